# SPDX-License-Identifier: Apache-2.0
"""Selects the configurations for `check_kernel`, and the checks for each of them.

If a feature raises an error, and plain JAX does not support it either, its check is skipped with the reason. It fails
if the kernel claims the feature: by a gradient rule, by a variant of `run` for the platform, or because the feature
works under the heuristic.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ejkernel.ops.autotuner.bench.preparation import lower
from ejkernel.ops.autotuner.trials.candidates import LISTED, config_id, heuristic_of, program_digest
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.hooks import check_candidates
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of, check_config, has_gradient_rule
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import KernelError, NoConfigError, UnsupportedError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import arguments, compact
from ejkernel.ops.utils.storage.encode import stable_json
from ejkernel.testing.forms import backward_call, export_row, key_row, pickle_row, platform_rows, weak_type_row
from ejkernel.testing.inputs import dtype_rows, size_rows, value_rows
from ejkernel.testing.numbers import Numbers
from ejkernel.testing.programs import BATCHES, named_after
from ejkernel.testing.report import REFERENCE, CheckReport, Steps
from ejkernel.testing.rows import CheckRow, CheckStatus, not_run_row, row
from ejkernel.testing.rules import pair_rows
from ejkernel.testing.splitting import split_rows
from ejkernel.testing.subject import Scope, Subject

logger = logging.getLogger(__name__)

_TOO_FEW: Final = 2  # number of rows if a configuration does not run
_SMALL: Final = 8  # largest number of configurations for which every check covers all
_FEW: Final = 4  # configurations for costly checks in a larger space
_FULLY: Final = 2  # configurations for second derivatives, nested batches, and batches of one array
_FULL_ONLY: Final = ("second", "vmap o")  # beginnings of the names of checks of `_FULLY` configurations
_HEURISTIC_ONLY: Final = "gradient, by"
_REST: Final = "all other checks"
_FORMS: Final = ("inputs", "dtypes", "export", "pickle", "split")
_PAIRS: Final = "pairs of forward and backward"
# Steps after those of the configurations: the group of checks, and the name of the step.
_STEPS: Final = (
    ("gradient", _PAIRS),
    ("inputs", "scaled inputs, zeros"),
    ("inputs", "odd sizes"),
    *((group, group) for group in ("dtypes", "export", "pickle", "split", "platforms", "key")),
)


def checked(
    kernel: Kernel[Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    configs: Collection[object] | None,
    scope: Scope,
) -> CheckReport:
    """Return the report on a call; see `check_kernel`."""
    given = () if configs is None else check_candidates(configs, "configs")
    for index, config in enumerate(() if isinstance(given, ConfigSpace) else given):
        check_config(kernel, config, f"configs[{index}]")
    subject = Subject.of(kernel, args, kwargs, scope)
    call = f"{subject.kernel.op_id_v} {_arguments_of(subject.inv)}".rstrip()
    try:
        chosen, note = _configs(subject, subject.inv, configs)
        for config in chosen:
            check_config(subject.kernel, config)
    except Exception as error:  # noqa: BLE001 - the kernel's hooks; without a configuration there is nothing to check
        return CheckReport(call, (), (row("configurations", None, error),))
    rows = tuple(_rows(subject, chosen, configs))
    return CheckReport(call, tuple(chosen), rows, note, _not_checked(len(chosen), scope.without))


def _not_checked(count: int, without: frozenset[str]) -> tuple[str, ...]:
    """Return the list of omissions, in addition to skipped rows."""
    many, few, single = BATCHES
    found = [
        f"batch sizes other than {many} and 2 by {few} for all arrays, and {single} for one array",
        "odd sizes other than one or two more than the given lengths",
        "values of gradients for scaled inputs and zeros; arguments with NaN or infinity",
        "third derivatives",
    ]
    if count > _SMALL:
        checks = "pairs of forward and backward, scaled inputs, zeros, odd sizes, other dtypes"
        found.insert(0, f"{checks}: {count - _FEW} of {count} configurations")
    if count > _FULLY:
        checks = "second derivatives, nested batches, batches of one array"
        found.append(f"{checks}: {count - _FULLY} of {count} configurations")
    if without:
        found.append(f"groups left out: {', '.join(sorted(without))}")
    return tuple(found)


def _few(configs: Sequence[Any], count: int, seed: int) -> list[Any]:
    """Return all configurations, or the heuristic's and a reproducible sample of the others.

    The sample has as many different values as possible, e.g. of each implementation a configuration.
    """
    if len(configs) <= count:
        return list(configs)
    values = [{str(value) for value in _values(json.loads(stable_json(config)))} for config in configs]
    left = [0, *(int(index) for index in np.random.default_rng(seed).permutation(np.arange(1, len(configs))))]
    chosen, seen = [0], set(values[0])
    while len(chosen) < count:
        best = max((index for index in left if index not in chosen), key=lambda index: len(values[index] - seen))
        chosen.append(best)
        seen |= values[best]
    return [configs[index] for index in sorted(chosen)]


def _values(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield each value inside a configuration as JSON, after its path."""
    if not isinstance(config, dict | list):
        yield (*path, config)
        return
    for name, value in config.items() if isinstance(config, dict) else enumerate(config):
        yield from _values(value, (*path, name))


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


def _rows(subject: Subject, configs: Sequence[Any], given: Collection[object] | None) -> Iterator[CheckRow]:
    yield row("configurations")
    steps = _planned(subject, configs)
    steps.begin(REFERENCE)
    try:
        numbers = Numbers(subject, configs[0])
    except UnsupportedError as error:  # the kernel is for another platform
        yield row("outputs", None, str(error), skipped=True)
        # The remaining checks, of platforms and the key, do not run the kernel.
        yield from _form_rows(subject, configs[0])
        return
    except Exception as error:  # noqa: BLE001 - a kernel may fail in any way; the row has the reason
        yield row("outputs", configs[0], error)
        yield not_run_row(_REST, None, "outputs")
        return
    usual: list[CheckRow] = []
    failed: dict[int, str] = {}
    fully = _few(configs, _FULLY, subject.scope.seed)
    for index, config in enumerate(configs):
        is_full = any(config is other for other in fully)
        steps.begin(_name_of(config))
        rows = named_after(config, lambda *given: list(numbers.rows(given[0], fully=given[1])))(config, is_full)
        yield from rows
        first = next((made.check for made in rows if made.status == CheckStatus.FAILED), None)
        if index == 0 and len(rows) <= _TOO_FEW and not subject.scope.is_brief:  # the heuristic does not run
            yield not_run_row(_REST, None, first or "outputs")
            return
        usual = usual or rows
        if first is not None:
            failed[index] = first
            yield from _left_out(rows, usual, config, first, fully=is_full)
    if given is None and not failed and not subject.scope.is_brief:
        yield from _alike_rows(numbers, configs)
    yield from _input_rows(numbers, configs, failed, given)
    yield from _call_rows(numbers, configs[0])
    yield from _form_rows(subject, configs[0])


def _alike_rows(numbers: Numbers, configs: Sequence[Any]) -> Iterator[CheckRow]:
    """Yield a skipped row if all configurations lower to one program, of the call or of its backward."""
    subject = numbers.subject
    calls = {"run": (subject.inv, configs)}
    try:
        has_rule = numbers.has_gradient and has_gradient_rule(subject.kernel)
        if "gradient" not in subject.scope.without and has_rule and (inv := backward_call(numbers)):
            calls["the gradient rule"] = inv, _configs(subject, inv, None)[0]
        alike = [part for part, (inv, found) in calls.items() if _are_alike(subject, inv, found)]
    except Exception as error:  # noqa: BLE001 - the kernel's hooks; other rows report the error
        logger.debug("%s: programs not compared: %s", subject.inv.op_id, error_text(error))
        return
    if alike:
        parts = " and ".join(alike)
        reason = f"those of {parts} lower to one program, so tuning has no choice; check the use of cfg in {parts}"
        yield row("configurations differ", None, reason, skipped=True)


def _are_alike(subject: Subject, inv: Invocation[Any, Any], configs: Sequence[Any]) -> bool:
    """Return whether a call has several configurations, and all lower to one program."""
    choices = (Choice(config=config, platform=subject.platform) for config in configs)
    found = (program_digest(lower(inv, choice).as_text()) for choice in choices)
    first = next(found, None)
    return first is not None and len(configs) > 1 and all(other == first for other in found)


def _planned(subject: Subject, configs: Sequence[Any]) -> Steps:
    """Return the steps of all checks of a call."""
    without = subject.scope.without | subject.scope.reasons(subject.kernel, configs[0]).keys()
    later = [name for group, name in _STEPS if group not in without]
    subject.scope.steps.plan([REFERENCE, *map(_name_of, configs), *later])
    return subject.scope.steps


def _name_of(config: object) -> str:
    """Return the name of the step that checks a configuration."""
    return f"configuration {compact(config)}"


def _left_out(
    rows: Sequence[CheckRow], usual: Sequence[CheckRow], config: object, failed: str, *, fully: bool
) -> Iterator[CheckRow]:
    """Yield a row for each check that the heuristic's configuration has, and this one lacks because `failed` failed."""
    has, left = {made.check for made in rows}, dict.fromkeys(made.check for made in usual)
    for check in left:
        is_due = not check.startswith(_HEURISTIC_ONLY) and (fully or not check.startswith(_FULL_ONLY))
        # `gradient` is a row of failed and missing gradients alone.
        if is_due and check not in has and check != "gradient":
            yield not_run_row(check, config, failed)


def _input_rows(
    numbers: Numbers, configs: Sequence[Any], failed: Mapping[int, str], given: Collection[object] | None
) -> Iterator[CheckRow]:
    """Yield rows of checks that need several configurations, or several inputs.

    Args:
        numbers: The call.
        configs: All configurations, the heuristic's first.
        failed: By index, the first failed check of configurations with wrong results for the usual inputs.
        given: See `check_kernel`.
    """
    scope, right = numbers.subject.scope, [c for index, c in enumerate(configs) if index not in failed]
    without = scope.without | scope.reasons(numbers.subject.kernel, configs[0]).keys()
    if "gradient" not in without and numbers.has_gradient and not scope.is_brief:
        scope.steps.begin(_PAIRS)
        runs = _costly([c for c in configs if c is configs[0] or any(c is other for other in right)], scope.seed)
        backwards = _backward_configs(numbers, given)
        pairs = list(pair_rows(numbers.subject, runs, backwards, numbers.examples[0], numbers.cotangents[0]))
        yield from pairs
        if pairs and backwards is None:
            yield from (not_run_row("residuals", configs[index], first) for index, first in failed.items() if index)
    if "inputs" not in without:
        scope.steps.begin("scaled inputs, zeros")
        # A configuration with wrong results for usual inputs would also fail for all others.
        if right:
            yield from value_rows(numbers, _costly(right, scope.seed))
        yield from (not_run_row("scaled inputs, zeros", configs[index], first) for index, first in failed.items())
        scope.steps.begin("odd sizes")
        if 0 in failed:
            yield not_run_row("odd sizes", None, failed[0])
        else:
            configs_for = functools.partial(_sized_configs, given=given)
            yield from size_rows(numbers, configs_for, functools.partial(_sized_pairs, given=given))
    if "dtypes" not in without:
        scope.steps.begin("dtypes")
        yield from dtype_rows(numbers, lambda other: _costly(_own_configs(other, None), scope.seed))


def _own_configs(subject: Subject, given: Collection[object] | None) -> list[Any]:
    """Return the configurations of a call with other arrays; the given ones may not fit it."""
    configs, _ = _configs(subject, subject.inv, None)
    known = None if given is None else {config_id(config) for config in given}
    return [configs[0], *(c for c in configs[1:] if known is None or config_id(c) in known)]


def _sized_configs(subject: Subject, given: Collection[object] | None) -> list[Any]:
    return _costly(_own_configs(subject, given), subject.scope.seed)


def _sized_pairs(numbers: Numbers, given: Collection[object] | None) -> Iterator[CheckRow]:
    """Yield rows that compare the gradients of the backward's own configurations, if it has any, for a changed call."""
    scope = numbers.subject.scope
    if "gradient" in scope.without or not numbers.has_gradient or scope.is_brief:
        return
    backwards = _backward_configs(numbers, given)
    if backwards is not None:
        forwards = _own_configs(numbers.subject, given)[:1]
        yield from pair_rows(numbers.subject, forwards, backwards, numbers.examples[0], numbers.cotangents[0])


def _backward_configs(numbers: Numbers, given: Collection[object] | None) -> list[Any] | None:
    """Return the configurations of the backward call, if they differ from the forward's."""
    subject = numbers.subject
    if given is not None or subject.inv.override_cfg is not None:
        return None
    forward = {config_id(config) for config in _configs(subject, subject.inv, None)[0]}
    try:
        inv = backward_call(numbers)
        found = [] if inv is None else _configs(subject, inv, None)[0]
    except Exception as error:  # noqa: BLE001 - the kernel's hooks; the rows of its gradient report the error
        logger.debug("%s: no configurations of the backward: %s", subject.inv.op_id, error_text(error))
        return None
    same = not found or {config_id(config) for config in found} == forward
    return None if same else _costly(found, subject.scope.seed)


def _call_rows(numbers: Numbers, config: object) -> Iterator[CheckRow]:
    """Yield rows that compare other forms of the call with the call itself."""
    want = numbers.usual(config)
    unavailable = numbers.subject.scope.reasons(numbers.subject.kernel, config)
    without = numbers.subject.scope.without | unavailable.keys()
    yield from (row(name, config, unavailable[name], skipped=True) for name in _FORMS if name in unavailable)
    if "dtypes" not in without and (weak := weak_type_row(numbers, config, want)) is not None:
        yield weak
    steps = numbers.subject.scope.steps
    if "export" not in without:
        steps.begin("export")
        yield export_row(numbers, config, want)
    if "pickle" not in without:
        steps.begin("pickle")
        yield pickle_row(numbers, config, want)
    if "split" not in without:
        steps.begin("split")
        yield from split_rows(numbers, config, want)


def _form_rows(subject: Subject, config: object) -> Iterator[CheckRow]:
    """Yield rows of checks that do not run the call."""
    unavailable = subject.scope.reasons(subject.kernel, config)
    without = subject.scope.without | unavailable.keys()
    yield from (
        row(name, config, unavailable[name], skipped=True) for name in ("platforms", "key") if name in unavailable
    )
    if "platforms" not in without:
        subject.scope.steps.begin("platforms")
        yield from platform_rows(subject, lambda own, inv: _configs(own, inv, None)[0])
    if "key" not in without:
        subject.scope.steps.begin("key")
        yield key_row(subject)


def _configs(subject: Subject, inv: Invocation[Cfg, Out], given: Collection[object] | None) -> tuple[list[Any], str]:
    """Return the configurations to check, the heuristic's first, and a note about them."""
    if inv.override_cfg is not None:
        return [inv.override_cfg], "The arguments fix the whole configuration."
    candidates = candidates_of(subject.kernel, inv) if given is None else given
    if not isinstance(candidates, Collection):
        raise KernelError(f"{subject.kernel.op_id}: config_space must return configurations, got {candidates!r}.")
    note, chosen = "", candidates
    if isinstance(candidates, ConfigSpace) and candidates.size > LISTED:
        chosen = candidates.sample(np.random.default_rng(subject.scope.seed), LISTED)
        note = f"Checked: the heuristic and {len(chosen)} of about {candidates.size:,} configurations, at random."
    found: dict[Any, Any] = {}
    # The heuristic's first, because the others are compared with it, and without duplicates.
    for config in [*heuristic_of(inv, subject.kernel), *chosen]:
        found.setdefault(config_id(config), config)
    if not found:
        raise NoConfigError(subject.kernel.op_id, ("heuristic", "config_space"))
    return list(found.values()), note
