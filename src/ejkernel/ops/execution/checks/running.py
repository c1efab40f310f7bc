# SPDX-License-Identifier: Apache-2.0
"""Which configurations `check_kernel` checks, and which checks each has.

What raises honestly, and plain JAX cannot do either, is skipped with the reason; it is a failure where the kernel
claims it, by a rule, by a form of `run` for the platform, or by doing it under the heuristic.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ejkernel.ops.autotuner.trials.candidates import LISTED, config_id, heuristic_of
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of, check_config
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import KernelError, NoConfigError, UnsupportedError
from ejkernel.ops.execution.checks.forms import (
    dtype_rows,
    export_row,
    key_row,
    pickle_row,
    platform_rows,
    weak_type_row,
)
from ejkernel.ops.execution.checks.numbers import Numbers
from ejkernel.ops.execution.checks.report import CheckReport, CheckRow, CheckStatus
from ejkernel.ops.execution.checks.splitting import split_rows
from ejkernel.ops.execution.checks.subject import Subject
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import arguments

logger = logging.getLogger(__name__)

_TOO_FEW: Final = 2  # rows of a configuration that does not run


def checked(
    kernel: Kernel[Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    configs: Collection[object] | None,
    without: frozenset[str],
    seed: int,
) -> CheckReport:
    """Return the report on a call; see `check_kernel`."""
    subject = Subject.of(kernel, args, kwargs, seed)
    call = f"{subject.kernel.op_id_v} {_arguments_of(subject.inv)}".rstrip()
    try:
        chosen, note = _configs(subject, subject.inv, configs)
        for config in chosen:
            check_config(subject.kernel, config)
    except Exception as error:  # noqa: BLE001 - a kernel's own hooks; without a configuration nothing can be checked
        row = CheckRow(
            check="configurations", config=None, status=CheckStatus.FAILED, reason=f"{type(error).__name__}: {error}"
        )
        return CheckReport(call, (), (row,))
    return CheckReport(call, tuple(chosen), tuple(_rows(subject, chosen, without)), note)


def _arguments_of(inv: Invocation[Cfg, Out]) -> str:
    """Return the call's arguments in short; what has no stable name is left out."""
    try:
        return arguments(inv.description)
    except Exception as error:  # noqa: BLE001 - the row of the key says why
        logger.debug("%s: its arguments cannot be shown: %s", inv.op_id, error_text(error))
        return ""


def _rows(subject: Subject, configs: Sequence[object], without: frozenset[str]) -> Iterator[CheckRow]:
    yield CheckRow(check="configurations", config=None, status=CheckStatus.OK)
    try:
        numbers = Numbers(subject, configs[0], tuple(without))
    except UnsupportedError as error:  # it is for another platform than this process has
        yield CheckRow(check="outputs", config=None, status=CheckStatus.SKIPPED, reason=str(error))
        # What is left, platforms and the key, needs nothing to run here.
        without |= {"dtypes", "export", "pickle", "split"}
    except Exception as error:  # noqa: BLE001 - a kernel may fail in every way; the reason is its row's
        yield CheckRow(
            check="outputs", config=configs[0], status=CheckStatus.FAILED, reason=f"{type(error).__name__}: {error}"
        )
        return
    else:
        for config in configs:
            rows = list(numbers.rows(config))
            yield from rows
            if config is configs[0] and len(rows) <= _TOO_FEW:  # it does not run, so that nothing else would
                return
    yield from _form_rows(subject, configs[0], without)


def _form_rows(subject: Subject, config: object, without: frozenset[str]) -> Iterator[CheckRow]:
    if "dtypes" not in without:
        yield from dtype_rows(subject, _dtype_row)
        weak = weak_type_row(subject, config)
        yield from [] if weak is None else [weak]
    if "platforms" not in without:
        yield from platform_rows(subject, lambda inv: _configs(subject, inv, None)[0])
    if "key" not in without:
        yield key_row(subject)
    if "export" not in without:
        yield export_row(subject, config)
    if "pickle" not in without:
        yield pickle_row(subject, config)
    if "split" not in without:
        yield from split_rows(subject, config)


def _dtype_row(subject: Subject, name: str) -> CheckRow:
    """Return the worst of what a call under its heuristic shows."""
    config = _configs(subject, subject.inv, None)[0][0]
    found = list(Numbers(subject, config, ("tangents", "vmap")).rows(config))
    first = next((row for row in found if row.status == CheckStatus.FAILED), None)
    if first is not None and first.error is None and first.check in ("types", "outputs"):
        reason = f"the kernel does not take it: {first.reason}"  # and need not
        return CheckRow(check=name, config=config, status=CheckStatus.SKIPPED, reason=reason)
    worst = first or max((row for row in found if row.error is not None), key=lambda row: row.error or 0.0)
    reason = "" if first is None else f"{worst.check}: {worst.reason}"
    status = CheckStatus.OK if first is None else CheckStatus.FAILED
    return CheckRow(check=name, config=config, status=status, reason=reason, error=worst.error, allowed=worst.allowed)


def _configs(subject: Subject, inv: Invocation[Cfg, Out], given: Collection[object] | None) -> tuple[list[Any], str]:
    """Return the configurations to check, the heuristic's first, and what to say of them."""
    if inv.override_cfg is not None:
        return [inv.override_cfg], "The arguments say the whole configuration."
    candidates = candidates_of(subject.kernel, inv) if given is None else given
    if not isinstance(candidates, Collection):
        raise KernelError(f"{subject.kernel.op_id}: config_space must return configurations, got {candidates!r}.")
    note, chosen = "", candidates
    if isinstance(candidates, ConfigSpace) and candidates.size > LISTED:
        chosen = candidates.sample(np.random.default_rng(subject.seed), LISTED)
        note = f"The configurations are the heuristic's and {len(chosen)} of about {candidates.size:,}, at random."
    found: dict[Any, Any] = {}
    # The heuristic's first, and once: the others are held against it.
    for config in [*heuristic_of(inv, subject.kernel), *chosen]:
        found.setdefault(config_id(config), config)
    if not found:
        raise NoConfigError(subject.kernel.op_id, ("heuristic", "config_space"))
    return list(found.values()), note
