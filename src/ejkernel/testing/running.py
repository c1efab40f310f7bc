# SPDX-License-Identifier: Apache-2.0
"""Selects the configurations for `check_kernel`, and the checks for each of them.

If a feature raises an error, and plain JAX does not support it either, its check is skipped with the reason. It fails
if the kernel claims the feature: by a gradient rule, by a variant of `run` for the platform, or because the feature
works under the heuristic.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
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
from ejkernel.ops.utils.formatting import arguments, compact
from ejkernel.ops.utils.storage.encode import stable_json
from ejkernel.testing.forms import backward_call, export_row, key_row, pickle_row, platform_rows, weak_type_row
from ejkernel.testing.inputs import dtype_rows, size_rows, value_rows
from ejkernel.testing.numbers import Numbers
from ejkernel.testing.programs import BATCHES, named_after
from ejkernel.testing.report import REFERENCE, CheckReport, Steps
from ejkernel.testing.rows import CheckRow, CheckStatus, attempted, not_run_row, row
from ejkernel.testing.rules import Pairs
from ejkernel.testing.splitting import split_rows
from ejkernel.testing.subject import Scope, Subject

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


def checked(kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope) -> CheckReport:
    """Return the report on a call; see `check_kernel`."""
    given = () if scope.configs is None else check_candidates(scope.configs, "configs")
    for index, config in enumerate(() if isinstance(given, ConfigSpace) else given):
        check_config(kernel, config, f"configs[{index}]")
    subject = Subject.of(kernel, args, kwargs, scope)
    call = f"{subject.kernel.op_id_v} {_arguments_of(subject.inv)}".rstrip()
    try:
        chosen, note = _configs(subject, subject.inv, scope.configs)
        for config in chosen:
            check_config(subject.kernel, config)
    except Exception as error:  # noqa: BLE001 - the kernel's hooks; without a configuration there is nothing to check
        return CheckReport(call, (), (row("configurations", None, error),))
    rows = tuple(_rows(subject, chosen))
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
    values = [set(map(str, _values(json.loads(stable_json(config))))) for config in configs]
    left = [0, *(int(index) for index in np.random.default_rng(seed).permutation(np.arange(1, len(configs))))]
    chosen, seen = [0], set(values[0])
    while len(chosen) < count:
        best = max((index for index in left if index not in chosen), key=lambda index: len(values[index] - seen))
        chosen.append(best)
        seen |= values[best]
    return [configs[index] for index in sorted(chosen)]


def _values(config: Any) -> list[Any]:
    """Return each value inside a configuration as JSON, with its path."""
    return jax.tree_util.tree_leaves_with_path(config, is_leaf=lambda value: value is None)


def _costly(configs: Sequence[Any], seed: int) -> list[Any]:
    """Return the configurations for costly checks."""
    return _few(configs, len(configs) if len(configs) <= _SMALL else _FEW, seed)


def _arguments_of(inv: Invocation[Cfg, Out]) -> str:
    """Return a short form of the call's arguments; empty if they have no stable description."""
    found = attempted(lambda: arguments(inv.description))
    return "" if isinstance(found, Exception) else found  # the row of the key reports the error


def _rows(subject: Subject, configs: Sequence[Any]) -> Iterator[CheckRow]:
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
    if subject.scope.configs is None and not failed and not subject.scope.is_brief:
        yield from _alike_rows(numbers, configs)
    yield from _input_rows(numbers, configs, failed)
    yield from _call_rows(numbers, configs[0])
    yield from _form_rows(subject, configs[0])


def _alike_rows(numbers: Numbers, configs: Sequence[Any]) -> Iterator[CheckRow]:
    """Yield a skipped row if all configurations lower to one program, of the call or of its backward."""
    alike = attempted(_alike_parts, numbers, configs)
    if alike and not isinstance(alike, Exception):  # of the kernel's hooks; other rows report it
        parts = " and ".join(alike)
        reason = f"those of {parts} lower to one program, so tuning has no choice; check the use of cfg in {parts}"
        yield row("configurations differ", None, reason, skipped=True)


def _alike_parts(numbers: Numbers, configs: Sequence[Any]) -> list[str]:
    """Return the parts of a call whose configurations all lower to one program."""
    subject = numbers.subject
    calls = {"run": (subject.inv, configs)}
    has_rule = numbers.has_gradient and has_gradient_rule(subject.kernel)
    if "gradient" not in subject.scope.without and has_rule and (inv := backward_call(numbers)):
        calls["the gradient rule"] = inv, _configs(subject, inv, None)[0]
    return [part for part, (inv, found) in calls.items() if _are_alike(subject, inv, found)]


def _are_alike(subject: Subject, inv: Invocation[Any, Any], configs: Sequence[Any]) -> bool:
    """Return whether a call has several configurations, and all lower to one program."""
    choices = (Choice(config=config, platform=subject.platform) for config in configs)
    found = (program_digest(lower(inv, choice).as_text()) for choice in choices)
    first = next(found, None)
    return first is not None and len(configs) > 1 and all(other == first for other in found)


def _planned(subject: Subject, configs: Sequence[Any]) -> Steps:
    """Return the steps of all checks of a call."""
    later = [name for group, name in _STEPS if group not in subject.left_out(configs[0])]
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


def _input_rows(numbers: Numbers, configs: Sequence[Any], failed: Mapping[int, str]) -> Iterator[CheckRow]:
    """Yield rows of checks that need several configurations, or several inputs.

    Args:
        numbers: The call.
        configs: All configurations, the heuristic's first.
        failed: By index, the first failed check of configurations with wrong results for the usual inputs.
    """
    scope, right = numbers.subject.scope, [c for index, c in enumerate(configs) if index not in failed]
    without = numbers.subject.left_out(configs[0])
    if "gradient" not in without and numbers.has_gradient and not scope.is_brief:
        scope.steps.begin(_PAIRS)
        runs = _costly([c for index, c in enumerate(configs) if index == 0 or index not in failed], scope.seed)
        backwards = _backward_configs(numbers)
        pairs = list(Pairs(numbers.subject, runs, backwards, numbers.examples[0], numbers.cotangents[0]).rows())
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
            yield from size_rows(numbers, lambda other: _costly(_own_configs(other), scope.seed), _sized_pairs)
    if "dtypes" not in without:
        scope.steps.begin("dtypes")
        yield from dtype_rows(numbers, lambda other: _costly(_configs(other, other.inv, None)[0], scope.seed))


def _own_configs(subject: Subject) -> list[Any]:
    """Return the configurations of a call with other arrays; the given ones may not fit it."""
    configs, _ = _configs(subject, subject.inv, None)
    given = subject.scope.configs
    known = None if given is None else {config_id(config) for config in given}
    return [configs[0], *(c for c in configs[1:] if known is None or config_id(c) in known)]


def _sized_pairs(numbers: Numbers) -> Iterator[CheckRow]:
    """Yield rows that compare the gradients of the backward's own configurations, if it has any, for a changed call."""
    scope = numbers.subject.scope
    if "gradient" in scope.without or not numbers.has_gradient or scope.is_brief:
        return
    backwards = _backward_configs(numbers)
    if backwards is not None:
        forwards = _own_configs(numbers.subject)[:1]
        yield from Pairs(numbers.subject, forwards, backwards, numbers.examples[0], numbers.cotangents[0]).rows()


def _backward_configs(numbers: Numbers) -> list[Any] | None:
    """Return the configurations of the backward call, if they differ from the forward's."""
    subject = numbers.subject
    if subject.scope.configs is not None or subject.inv.override_cfg is not None:
        return None
    forward = {config_id(config) for config in _configs(subject, subject.inv, None)[0]}
    found = attempted(_of_backward, numbers)
    if isinstance(found, Exception):  # of the kernel's hooks; the rows of its gradient report the error
        return None
    same = not found or {config_id(config) for config in found} == forward
    return None if same else _costly(found, subject.scope.seed)


def _of_backward(numbers: Numbers) -> list[Any]:
    """Return the configurations of the backward call; none if the gradient makes no such call."""
    inv = backward_call(numbers)
    return [] if inv is None else _configs(numbers.subject, inv, None)[0]


def _call_rows(numbers: Numbers, config: object) -> Iterator[CheckRow]:
    """Yield rows that compare other forms of the call with the call itself."""
    want, subject = numbers.usual(config), numbers.subject
    without = subject.left_out(config)
    yield from subject.unavailable_rows(config, *_FORMS)
    if "dtypes" not in without and (weak := weak_type_row(numbers, config, want)) is not None:
        yield weak
    if "export" not in without:
        subject.scope.steps.begin("export")
        yield export_row(numbers, config, want)
    if "pickle" not in without:
        subject.scope.steps.begin("pickle")
        yield pickle_row(numbers, config, want)
    if "split" not in without:
        subject.scope.steps.begin("split")
        yield from split_rows(numbers, config, want)


def _form_rows(subject: Subject, config: object) -> Iterator[CheckRow]:
    """Yield rows of checks that do not run the call."""
    without = subject.left_out(config)
    yield from subject.unavailable_rows(config, "platforms", "key")
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
