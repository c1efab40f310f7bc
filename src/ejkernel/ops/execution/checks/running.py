# SPDX-License-Identifier: Apache-2.0
"""Which configurations `check_kernel` checks, and which checks each has.

What raises honestly, and plain JAX cannot do either, is skipped with the reason; it is a failure where the kernel
claims it, by a rule, by a form of `run` for the platform, or by doing it under the heuristic.
"""

from __future__ import annotations

import dataclasses
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
    backward_call,
    dtype_rows,
    export_row,
    key_row,
    pickle_row,
    platform_rows,
    weak_type_row,
)
from ejkernel.ops.execution.checks.inputs import is_rounding, size_rows, value_rows
from ejkernel.ops.execution.checks.numbers import Numbers
from ejkernel.ops.execution.checks.programs import BATCHES
from ejkernel.ops.execution.checks.report import CheckReport, CheckRow, CheckStatus
from ejkernel.ops.execution.checks.splitting import split_rows
from ejkernel.ops.execution.checks.subject import Subject
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import arguments

logger = logging.getLogger(__name__)

_TOO_FEW: Final = 2  # rows of a configuration that does not run
_SMALL: Final = 8  # configurations up to which every check looks at all of them
_FEW: Final = 4  # configurations of a larger space that costly checks look at
_CURVED: Final = 2  # configurations whose second derivatives are compared
_SIZED: Final = 3  # configurations of a call of odd sizes


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
    rows = tuple(_rows(subject, chosen, configs, without))
    return CheckReport(call, tuple(chosen), rows, note, _not_checked(len(chosen), without))


def _not_checked(count: int, without: frozenset[str]) -> tuple[str, ...]:
    """Return the list of omissions, beside the rows that were skipped."""
    few, many, single = BATCHES
    found = [
        f"batches of other sizes than 2 by {few}, {few} and {many} of all arrays, and {single} of one array",
        "other odd sizes than one or two more than the given lengths",
        "how large gradients are of scaled inputs and of zeros; arguments with NaN or infinity",
        "third derivatives",
    ]
    if count > _SMALL:
        checks = "forwards before other backwards, scaled inputs, zeros, other dtypes"
        found.insert(0, f"{checks}: {count - _FEW} of {count} configurations")
    found += [
        f"{checks}: {count - looked} of {count} configurations"
        for checks, looked in (("second derivatives", _CURVED), ("odd sizes", _SIZED))
        if count > looked
    ]
    if without:
        found.append(f"groups left out: {', '.join(sorted(without))}")
    return tuple(found)


def _few(configs: Sequence[Any], count: int, seed: int) -> list[Any]:
    """Return all configurations, or the heuristic's and some others, always the same."""
    if len(configs) <= count:
        return list(configs)
    others = np.random.default_rng(seed).choice(np.arange(1, len(configs)), count - 1, replace=False)
    return [configs[0], *(configs[index] for index in sorted(others))]


def _costly(configs: Sequence[Any], seed: int) -> list[Any]:
    """Return the configurations that costly checks look at."""
    return _few(configs, len(configs) if len(configs) <= _SMALL else _FEW, seed)


def _arguments_of(inv: Invocation[Cfg, Out]) -> str:
    """Return the call's arguments in short; what has no stable name is left out."""
    try:
        return arguments(inv.description)
    except Exception as error:  # noqa: BLE001 - the row of the key says why
        logger.debug("%s: its arguments cannot be shown: %s", inv.op_id, error_text(error))
        return ""


def _rows(
    subject: Subject, configs: Sequence[Any], given: Collection[object] | None, without: frozenset[str]
) -> Iterator[CheckRow]:
    yield CheckRow(check="configurations", config=None, status=CheckStatus.OK)
    try:
        numbers = Numbers(subject, configs[0], tuple(without))
    except UnsupportedError as error:  # it is for another platform than this process has
        yield CheckRow(check="outputs", config=None, status=CheckStatus.SKIPPED, reason=str(error))
        # What is left, platforms and the key, needs nothing to run here.
        without |= {"inputs", "dtypes", "export", "pickle", "split"}
    except Exception as error:  # noqa: BLE001 - a kernel may fail in any way; the row has the reason
        yield CheckRow(
            check="outputs", config=configs[0], status=CheckStatus.FAILED, reason=f"{type(error).__name__}: {error}"
        )
        return
    else:
        right: list[Any] = []
        curved = _few(configs, _CURVED, subject.seed)
        for config in configs:
            rows = list(numbers.rows(config, second=any(config is other for other in curved)))
            yield from rows
            if config is configs[0] and len(rows) <= _TOO_FEW:  # it does not run, so that nothing else would
                return
            right += [config] if all(row.status != CheckStatus.FAILED for row in rows) else []
        yield from _more_rows(subject, numbers, configs, right, given, without)
    yield from _form_rows(subject, configs[0], without)


def _more_rows(
    subject: Subject,
    numbers: Numbers,
    configs: Sequence[Any],
    right: Sequence[Any],
    given: Collection[object] | None,
    without: frozenset[str],
) -> Iterator[CheckRow]:
    """Yield rows of what several configurations compute from one input, or one configuration from several inputs."""
    runs = [config for config in configs if config is configs[0] or any(config is other for other in right)]
    yield from numbers.pair_rows(_costly(runs, subject.seed), _backward_configs(subject, numbers, given))
    # A configuration that is wrong for usual inputs would be so for all others.
    if "inputs" not in without and right:
        yield from value_rows(subject, numbers, _costly(right, subject.seed))
        if right[0] is configs[0]:
            gradients = numbers.has_gradient and "gradient" not in without
            yield from size_rows(subject, lambda other: _sized(other, given), gradients=gradients)


def _sized(subject: Subject, given: Collection[object] | None) -> list[Any]:
    """Return the configurations to check of a call of odd sizes."""
    configs, _ = _configs(subject, subject.inv, None)
    if given is not None:
        # Those that were given may not be for these sizes.
        known = {config_id(config) for config in given}
        configs = [configs[0], *(config for config in configs[1:] if config_id(config) in known)]
    return _few(configs, _SIZED, subject.seed)


def _backward_configs(subject: Subject, numbers: Numbers, given: Collection[object] | None) -> list[Any] | None:
    """Return the configurations of the backward call, if the kernel has others for it than for the forward."""
    if given is not None or subject.inv.override_cfg is not None or not numbers.has_gradient:
        return None
    forward = {config_id(config) for config in _configs(subject, subject.inv, None)[0]}
    try:
        inv = backward_call(subject, numbers.cotangents)
        if inv is None:
            return None
        found, _ = _configs(subject, inv, None)
    except Exception as error:  # noqa: BLE001 - a kernel's own hooks; the rows of its gradient say more
        logger.debug("%s: no configurations of the backward: %s", subject.inv.op_id, error_text(error))
        return None
    same = {config_id(config) for config in found} == forward
    return None if same else _costly(found, subject.seed)


def _form_rows(subject: Subject, config: object, without: frozenset[str]) -> Iterator[CheckRow]:
    if "dtypes" not in without:
        yield from dtype_rows(subject, _dtype_rows)
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


def _dtype_rows(subject: Subject, name: str) -> Iterator[CheckRow]:
    """Yield the worst of what a call shows under its heuristic and other configurations."""
    configs = _costly(_configs(subject, subject.inv, None)[0], subject.seed)
    numbers = Numbers(subject, configs[0], ("tangents", "vmap"))
    row = _worst_row(name, configs[0], [_but_for_rounding(numbers, row) for row in numbers.rows(configs[0])])
    yield row
    if row.status == CheckStatus.OK and configs[1:]:
        for other in numbers.brief_rows(configs[1:]):
            yield _worst_row(name, other.config, [_but_for_rounding(numbers, other)])


def _but_for_rounding(numbers: Numbers, row: CheckRow) -> CheckRow:
    """Return the row, as passed if rounding in 16 bits explains the difference."""
    numeric = row.check in ("outputs", "jit", "under grad") or row.check.startswith("gradient of ")
    if row.status != CheckStatus.FAILED or row.error is None or not numeric:
        return row
    return dataclasses.replace(row, status=CheckStatus.OK, reason="") if is_rounding(numbers, row.config) else row


def _worst_row(name: str, config: object, found: Sequence[CheckRow]) -> CheckRow:
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
