# SPDX-License-Identifier: Apache-2.0
"""Selects the configurations for `check_kernel`, and the checks for each of them.

If a feature raises an error, and plain JAX does not support it either, its check is skipped with the reason. It fails
if the kernel claims the feature: by a gradient rule, by a variant of `run` for the platform, or because the feature
works under the heuristic.
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
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import arguments
from ejkernel.testing.forms import (
    backward_call,
    dtype_rows,
    export_row,
    key_row,
    pickle_row,
    platform_rows,
    weak_type_row,
)
from ejkernel.testing.inputs import is_rounding, size_rows, value_rows
from ejkernel.testing.numbers import Numbers
from ejkernel.testing.programs import BATCHES
from ejkernel.testing.report import CheckReport, CheckRow, CheckStatus
from ejkernel.testing.splitting import split_rows
from ejkernel.testing.subject import Subject

logger = logging.getLogger(__name__)

_TOO_FEW: Final = 2  # number of rows if a configuration does not run
_SMALL: Final = 8  # largest number of configurations for which every check covers all
_FEW: Final = 4  # configurations for costly checks in a larger space
_CURVED: Final = 2  # configurations for second derivatives
_SIZED: Final = 3  # configurations for odd sizes


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
    except Exception as error:  # noqa: BLE001 - the kernel's hooks; without a configuration there is nothing to check
        row = CheckRow(
            check="configurations", config=None, status=CheckStatus.FAILED, reason=f"{type(error).__name__}: {error}"
        )
        return CheckReport(call, (), (row,))
    rows = tuple(_rows(subject, chosen, configs, without))
    return CheckReport(call, tuple(chosen), rows, note, _not_checked(len(chosen), without))


def _not_checked(count: int, without: frozenset[str]) -> tuple[str, ...]:
    """Return the list of omissions, in addition to skipped rows."""
    few, many, single = BATCHES
    found = [
        f"batch sizes other than 2 by {few}, {few} and {many} for all arrays, and {single} for one array",
        "odd sizes other than one or two more than the given lengths",
        "values of gradients for scaled inputs and zeros; arguments with NaN or infinity",
        "third derivatives",
    ]
    if count > _SMALL:
        checks = "pairs of forward and backward, scaled inputs, zeros, other dtypes"
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
    """Return all configurations, or the heuristic's and a reproducible sample of the others."""
    if len(configs) <= count:
        return list(configs)
    others = np.random.default_rng(seed).choice(np.arange(1, len(configs)), count - 1, replace=False)
    return [configs[0], *(configs[index] for index in sorted(others))]


def _costly(configs: Sequence[Any], seed: int) -> list[Any]:
    """Return the configurations for costly checks."""
    return _few(configs, len(configs) if len(configs) <= _SMALL else _FEW, seed)


def _arguments_of(inv: Invocation[Cfg, Out]) -> str:
    """Return a short form of the call's arguments; empty if they have no stable description."""
    try:
        return arguments(inv.description)
    except Exception as error:  # noqa: BLE001 - the row of the key reports the error
        logger.debug("%s: cannot describe its arguments: %s", inv.op_id, error_text(error))
        return ""


def _rows(
    subject: Subject, configs: Sequence[Any], given: Collection[object] | None, without: frozenset[str]
) -> Iterator[CheckRow]:
    yield CheckRow(check="configurations", config=None, status=CheckStatus.OK)
    try:
        numbers = Numbers(subject, configs[0], tuple(without))
    except UnsupportedError as error:  # the kernel is for another platform
        yield CheckRow(check="outputs", config=None, status=CheckStatus.SKIPPED, reason=str(error))
        # The remaining checks, of platforms and the key, do not run the kernel.
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
            if config is configs[0] and len(rows) <= _TOO_FEW:  # the heuristic does not run
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
    """Yield rows of checks that need several configurations, or several inputs."""
    runs = [config for config in configs if config is configs[0] or any(config is other for other in right)]
    yield from numbers.pair_rows(_costly(runs, subject.seed), _backward_configs(subject, numbers, given))
    # A configuration with wrong results for usual inputs would also fail for all others.
    if "inputs" not in without and right:
        yield from value_rows(subject, numbers, _costly(right, subject.seed))
        if right[0] is configs[0]:
            gradients = numbers.has_gradient and "gradient" not in without
            yield from size_rows(subject, lambda other: _sized(other, given), gradients=gradients)


def _sized(subject: Subject, given: Collection[object] | None) -> list[Any]:
    """Return the configurations to check with odd sizes."""
    configs, _ = _configs(subject, subject.inv, None)
    if given is not None:
        # The given configurations may not fit these sizes.
        known = {config_id(config) for config in given}
        configs = [configs[0], *(config for config in configs[1:] if config_id(config) in known)]
    return _few(configs, _SIZED, subject.seed)


def _backward_configs(subject: Subject, numbers: Numbers, given: Collection[object] | None) -> list[Any] | None:
    """Return the configurations of the backward call, if they differ from the forward's."""
    if given is not None or subject.inv.override_cfg is not None or not numbers.has_gradient:
        return None
    forward = {config_id(config) for config in _configs(subject, subject.inv, None)[0]}
    try:
        inv = backward_call(subject, numbers.cotangents)
        if inv is None:
            return None
        found, _ = _configs(subject, inv, None)
    except Exception as error:  # noqa: BLE001 - the kernel's hooks; the rows of its gradient report the error
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
    """Yield for each configuration the worst row of a call with other dtypes."""
    configs = _costly(_configs(subject, subject.inv, None)[0], subject.seed)
    numbers = Numbers(subject, configs[0], ("tangents", "vmap"))
    row = _worst_row(name, configs[0], [_excuse_rounding(numbers, row) for row in numbers.rows(configs[0])])
    yield row
    if row.status == CheckStatus.OK and configs[1:]:
        for other in numbers.brief_rows(configs[1:]):
            yield _worst_row(name, other.config, [_excuse_rounding(numbers, other)])


def _excuse_rounding(numbers: Numbers, row: CheckRow) -> CheckRow:
    """Return the row, marked as passed if rounding in 16 bits explains its error."""
    numeric = row.check in ("outputs", "jit", "under grad") or row.check.startswith("gradient of ")
    if row.status != CheckStatus.FAILED or row.error is None or not numeric:
        return row
    return dataclasses.replace(row, status=CheckStatus.OK, reason="") if is_rounding(numbers, row.config) else row


def _worst_row(name: str, config: object, found: Sequence[CheckRow]) -> CheckRow:
    first = next((row for row in found if row.status == CheckStatus.FAILED), None)
    if first is not None and first.error is None and first.check in ("types", "outputs"):
        reason = f"not supported: {first.reason}"
        return CheckRow(check=name, config=config, status=CheckStatus.SKIPPED, reason=reason)
    worst = first or max((row for row in found if row.error is not None), key=lambda row: row.error or 0.0)
    reason = "" if first is None else f"{worst.check}: {worst.reason}"
    status = CheckStatus.OK if first is None else CheckStatus.FAILED
    return CheckRow(check=name, config=config, status=status, reason=reason, error=worst.error, allowed=worst.allowed)


def _configs(subject: Subject, inv: Invocation[Cfg, Out], given: Collection[object] | None) -> tuple[list[Any], str]:
    """Return the configurations to check, the heuristic's first, and a note about them."""
    if inv.override_cfg is not None:
        return [inv.override_cfg], "The arguments fix the whole configuration."
    candidates = candidates_of(subject.kernel, inv) if given is None else given
    if not isinstance(candidates, Collection):
        raise KernelError(f"{subject.kernel.op_id}: config_space must return configurations, got {candidates!r}.")
    note, chosen = "", candidates
    if isinstance(candidates, ConfigSpace) and candidates.size > LISTED:
        chosen = candidates.sample(np.random.default_rng(subject.seed), LISTED)
        note = f"Checked: the heuristic and {len(chosen)} of about {candidates.size:,} configurations, at random."
    found: dict[Any, Any] = {}
    # The heuristic's first, because the others are compared with it, and without duplicates.
    for config in [*heuristic_of(inv, subject.kernel), *chosen]:
        found.setdefault(config_id(config), config)
    if not found:
        raise NoConfigError(subject.kernel.op_id, ("heuristic", "config_space"))
    return list(found.values()), note
