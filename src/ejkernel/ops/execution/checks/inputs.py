# SPDX-License-Identifier: Apache-2.0
"""The call on other inputs: large and small values, zeros, and odd sizes.

A false alarm costs more trust than a miss. Values are therefore compared with an allowance for rounding: as much as the
reference itself moves when its inputs do, by a few units in the last place. Gradients of such inputs must be finite
where the reference's are; how large they are is not compared, because little of them is left where functions saturate.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.measure.correctness import tolerance
from ejkernel.ops.core.kernel import overrides
from ejkernel.ops.core.transformations.nodes import Choice, is_inexact
from ejkernel.ops.execution.checks.numbers import Numbers, told
from ejkernel.ops.execution.checks.programs import Results, all_deviations, alone, computed, cotangents_of, pulled
from ejkernel.ops.execution.checks.report import CheckRow, CheckStatus
from ejkernel.ops.execution.checks.subject import Subject
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.values.signature import is_array

logger = logging.getLogger(__name__)

SCALES: Final = ((1e-3,), (1e3, 1e2, 1e1))
"""Factors of the inputs; of each row the first for which the reference stays finite."""

_ZEROED: Final = 4  # arrays that are zero alone
_HALF: Final = 2  # bytes
_ROUNDED: Final = 16  # units in the last place that inputs are moved by
_MARGIN: Final = 32  # of what the reference moves then
_ROOM: Final = 64  # results must stay below the largest number by this factor
_DRAWS: Final = 2
_IN_HALF: Final = 4  # of what the reference moves, in 16 bits
_SIZES: Final = 4  # lengths that are changed one by one


# --- values ---


@dataclasses.dataclass(frozen=True, eq=False)
class _Variant:
    """Inputs of other values, with the reference's results for them.

    Attributes:
        name: The row's name.
        arrays: The inputs.
        true: Results and gradients of the reference.
        slack: For each result, how far each element may be off beside the tolerance.
    """

    name: str
    arrays: list[Any]
    true: Results
    slack: Sequence[Any]


def value_rows(subject: Subject, numbers: Numbers, configs: Sequence[Any]) -> Iterator[CheckRow]:
    """Yield whether the call is right for scaled inputs and zeros, under each of these configurations."""
    floats = [index for index, array in enumerate(numbers.examples[0]) if _may_change(subject, array)]
    if not floats:
        reason = "no floating-point argument may have other values"
        yield CheckRow(check="scaled inputs, zeros", config=None, status=CheckStatus.SKIPPED, reason=reason)
        return
    made = list(_variants(subject, numbers, floats))
    yield from (variant for variant in made if isinstance(variant, CheckRow))
    for config in configs:
        try:
            program = numbers.program(config)
        except Exception as error:  # noqa: BLE001 - the row of its gradient says it
            logger.debug("other values are not checked under %r: %s", config, error_text(error))
            continue
        for variant in made:
            if isinstance(variant, _Variant):
                yield _value_row(subject, program, config, variant)


def _may_change(subject: Subject, array: Any) -> bool:
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2 or not array.size:
        return False
    # Arrays that the author makes may have to be positive, or sorted, or sum to one.
    values = np.asarray(array, np.float64)
    return not overrides(subject.kernel, "example_inputs") or bool((values < 0).any() and (values > 0).any())


def _variants(subject: Subject, numbers: Numbers, floats: Sequence[int]) -> Iterator[_Variant | CheckRow]:
    given = numbers.examples[0]
    usual = [_size(out) for out in numbers.true_of(given).outs]
    for factors in SCALES:
        for factor in factors:
            scaled = _changed(given, floats, functools.partial(_scaled, factor=factor))
            variant = _variant(f"scaled by {factors[0]:g}", numbers, scaled, floats, usual)
            if variant is not None and _has_room(variant.true):
                yield variant if factor == factors[0] else dataclasses.replace(variant, name=f"scaled by {factor:g}")
                break
        else:
            name, reason = f"scaled by {factors[0]:g}", "the reference is not finite then"
            yield CheckRow(check=name, config=None, status=CheckStatus.SKIPPED, reason=reason)
    names = {"zeros": list(floats)}
    if len(floats) > 1:
        names |= {f"zeros in {subject.names[index]}": [index] for index in floats[:_ZEROED]}
    for name, which in names.items():
        zeroed = _variant(name, numbers, _changed(given, which, jnp.zeros_like), floats, usual)
        if zeroed is not None:
            yield zeroed


def _scaled(array: Any, factor: float) -> Any:
    return (array * factor).astype(array.dtype)


def _changed(arrays: Sequence[Any], which: Sequence[int], change: Callable[[Any], Any]) -> list[Any]:
    return [change(array) if index in which else array for index, array in enumerate(arrays)]


def _variant(
    name: str, numbers: Numbers, arrays: list[Any], floats: Sequence[int], usual: Sequence[float]
) -> _Variant | None:
    """Return inputs with the reference's results; `None` if the reference fails."""
    rng = np.random.default_rng(0)
    try:
        true = numbers.true_of(arrays)
        moved = [numbers.true_of(_changed(arrays, floats, lambda a: _rounded(a, rng))).outs for _ in range(_DRAWS)]
    except Exception as error:  # noqa: BLE001 - a reference may refuse such values
        logger.debug("%s: the reference fails: %s", name, error_text(error))
        return None
    slack: list[Any] = []
    for index, (out, size) in enumerate(zip(true.outs, usual, strict=True)):
        if not is_inexact(out):
            slack.append(np.inf)
            continue
        wide, units = _wide(out), float(compat.finfo(out.dtype).eps)
        with np.errstate(all="ignore"):
            apart = np.max([np.abs(_wide(outs[index]) - wide) for outs in moved], axis=0) if wide.size else 0.0
        # After cancellation, a result is known to the last digits of the terms that cancelled.
        slack.append(_MARGIN * (np.nan_to_num(apart, nan=np.inf) + units * size))
    return _Variant(name, arrays, true, slack)


def _rounded(array: Any, rng: np.random.Generator) -> Any:
    """Return the array with every element moved by a few units in the last place, of 16 bits by one."""
    units = 1 if array.dtype.itemsize == _HALF else _ROUNDED
    by = 1 + units * float(compat.finfo(array.dtype).eps) * rng.uniform(-1, 1, array.shape)
    return jnp.asarray(_wide(array) * by, array.dtype)


def _wide(array: Any) -> Any:
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return np.asarray(array).astype(np.complex128 if is_complex else np.float64)


def _size(out: Any) -> float:
    """Return the root mean square of the finite elements."""
    if not is_inexact(out) or not out.size:
        return 0.0
    wide = np.abs(_wide(out))
    finite = wide[np.isfinite(wide)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _has_room(true: Results) -> bool:
    """Return whether all results are finite, and far from the largest number of their dtype."""
    # A comparison with NaN is never true.
    return all(np.abs(_wide(array)).max() < float(compat.finfo(array.dtype).max) / _ROOM for array in _every(true))


def _value_row(subject: Subject, program: Callable[[Any], Results], config: Any, variant: _Variant) -> CheckRow:
    try:
        found = program(variant.arrays)
        worst, reason = _worst(subject, found, variant)
    except Exception as error:  # noqa: BLE001 - the reason is the row's
        return CheckRow(check=variant.name, config=config, status=CheckStatus.FAILED, reason=told(error))
    status = CheckStatus.FAILED if reason else CheckStatus.OK
    return CheckRow(check=variant.name, config=config, status=status, reason=reason, error=worst, allowed=1.0)


def _worst(subject: Subject, found: Results, variant: _Variant) -> tuple[float, str]:
    """Return how far the results are off, as a part of the allowance, and the first fault."""
    worst, reason = 0.0, ""
    for index, (got, want, slack) in enumerate(zip(found.outs, variant.true.outs, variant.slack, strict=True)):
        if not is_inexact(want) or not want.size:
            continue
        off, where = _off(got, want, slack, tolerance(want.dtype, platform=subject.platform, precision=None).worst)
        if off > 1 and not reason:
            values = f"{_wide(got).ravel()[where]:.6g} instead of {_wide(want).ravel()[where]:.6g}"
            reason = f"result {index} differs from the reference: {values}"
        worst = max(worst, off)
    for index, (got, want) in enumerate(zip(found.gradients or (), variant.true.gradients or (), strict=False)):
        bad = ~np.isfinite(_wide(got)) & np.isfinite(_wide(want))
        if bad.any() and not reason:
            worst, reason = np.inf, f"gradient {index} is not finite, and the reference's is"
    return worst, reason


def _off(got: Any, want: Any, slack: Any, relative: float) -> tuple[float, int]:
    """Return the largest difference as a part of the allowance, and where it is."""
    mine, true = _wide(got), _wide(want)
    finite = np.isfinite(true)
    # Close to the largest number another order of sums may overflow.
    near = np.abs(np.where(finite, true, 0)) > float(compat.finfo(want.dtype).max) / _ROOM
    with np.errstate(all="ignore"):
        allowed = relative * (np.abs(true) + _size(want)) + slack
        share = np.abs(mine - true) / np.maximum(allowed, float(compat.finfo(want.dtype).tiny))
    share = np.where(np.isfinite(mine), np.nan_to_num(share, nan=0.0), np.inf)
    share = np.where(finite & ~near, share, 0.0)
    return float(share.max()), int(share.argmax())


# --- rounding ---


def is_rounding(numbers: Numbers, config: Any) -> bool:
    """Return whether results and gradients are off by no more than the reference's, as its inputs are rounded.

    For 16-bit dtypes: where a sum cancels, little more than rounding is left of it.
    """
    program, rng = numbers.program(config), np.random.default_rng(0)
    for arrays in numbers.examples:
        floats = [index for index, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
        if any(arrays[index].dtype.itemsize != _HALF for index in floats):
            return False
        true = _every(numbers.true_of(arrays))
        moved = [_every(numbers.true_of(_changed(arrays, floats, lambda a: _rounded(a, rng)))) for _ in range(_DRAWS)]
        for index, (got, want) in enumerate(zip(_every(program(arrays)), true, strict=True)):
            apart = np.max([np.abs(_wide(other[index]) - _wide(want)) for other in moved], axis=0)
            slack = _IN_HALF * float(np.sqrt(np.mean(apart**2)))
            allowed = tolerance(want.dtype, platform="cpu", precision=None)
            if _off(got, want, slack + _IN_HALF * apart, allowed.worst)[0] > 1:
                return False
            off = float(np.sqrt(np.mean(np.abs(_wide(got) - _wide(want)) ** 2)))
            if off > allowed.overall * _size(want) + slack:
                return False
    return True


def _every(found: Results) -> list[Any]:
    return [array for array in (*found.outs, *(found.gradients or ())) if is_inexact(array) and array.size]


# --- sizes ---


def size_rows(
    subject: Subject, configs_for: Callable[[Subject], Sequence[Any]], *, gradients: bool
) -> Iterator[CheckRow]:
    """Yield whether the call is right for odd sizes: lengths are changed, equal ones together.

    All lengths are changed at once; if the kernel or the reference refuses that, one after the other.

    Args:
        subject: The call.
        configs_for: The configurations to check of such a call, the heuristic's first.
        gradients: Compare gradients, too.
    """
    taken = [leaf for leaf in jax.tree.leaves((subject.args, subject.kwargs)) if _is_integer(leaf)]
    lengths = sorted({length for like in subject.types for length in like.shape if length > 1})
    free = [length for length in lengths if length not in taken]
    if not free:
        yield _size_row("odd sizes", None, "no array has a length that may change", CheckStatus.SKIPPED)
        return
    changes = [{length: _odd(length) for length in free}]
    rows = _changed_rows(subject, configs_for, "odd sizes", changes[0], gradients)
    if len(free) == 1 or any(row.status != CheckStatus.SKIPPED for row in rows):
        yield from rows
        return
    for length in free[:_SIZES]:
        name = f"{_odd(length)} instead of {length}"
        yield from _changed_rows(subject, configs_for, name, {length: _odd(length)}, gradients)


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, int | np.integer) and not is_array(leaf)


def _odd(length: int) -> int:
    return length + 1 + length % 2


def _size_row(check: str, config: Any, reason: str, status: CheckStatus, **found: Any) -> CheckRow:
    return CheckRow(check=check, config=config, status=status, reason=reason, **found)


def _changed_rows(
    subject: Subject,
    configs_for: Callable[[Subject], Sequence[Any]],
    name: str,
    change: Mapping[int, int],
    gradients: bool,
) -> list[CheckRow]:
    shapes = [tuple(change.get(length, length) for length in like.shape) for like in subject.types]
    # Of arrays that JAX has made, for NumPy's may be wider.
    given = subject.elements(1)[0]
    like = [jax.ShapeDtypeStruct(shape, array.dtype) for shape, array in zip(shapes, given, strict=True)]
    try:
        other: Subject = subject.with_arrays(like)
        configs = configs_for(other)
        arrays = other.elements(1)[0]
        truth = other.plain(Choice(config=configs[0], platform=other.platform, reference=other.has_reference))
        runs = {str(index): other.executed(config) for index, config in enumerate(configs)}
        jax.eval_shape(runs["0"], *arrays)
    except Exception as error:  # noqa: BLE001 - a kernel need not take every size
        return [_size_row(name, None, f"the kernel refuses it: {told(error)}", CheckStatus.SKIPPED)]
    try:
        cotangents = cotangents_of(truth, arrays, np.random.default_rng((subject.seed, 3)))
    except Exception as error:  # noqa: BLE001 - a reference need not, either
        return [_size_row(name, None, f"the reference fails: {told(error)}", CheckStatus.SKIPPED)]
    wrt = other.differentiable()
    of = (lambda run: pulled(run, wrt)) if gradients and any(wrt) and cotangents else alone
    true = computed({"true": (of(truth), arrays, cotangents)})["true"]
    if isinstance(true, Exception):
        return [_size_row(name, None, f"the reference fails: {told(true)}", CheckStatus.SKIPPED)]
    found = computed({key: (of(run), arrays, cotangents) for key, run in runs.items()})
    return [_compared(other, name, config, found[str(index)], true) for index, config in enumerate(configs)]


def _compared(subject: Subject, name: str, config: Any, found: Results | Exception, true: Results) -> CheckRow:
    if isinstance(found, Exception):
        return _size_row(name, config, f"the kernel refuses it: {told(found)}", CheckStatus.SKIPPED)
    types = f"{', '.join(f'{like.dtype}{list(like.shape)}' for like in subject.types)}: "
    for got, want in ((found.outs, true.outs), (found.gradients or (), true.gradients or ())):
        if len(got) != len(want):
            return _size_row(name, config, f"{types}{len(got)} results instead of {len(want)}", CheckStatus.FAILED)
    worst: Any = None
    for what, one in all_deviations(found, true, platform=subject.platform, precision=subject.inv.precision):
        if one.reason:
            reason = f"{types}{what}{one.reason}"
            return _size_row(name, config, reason, CheckStatus.FAILED, error=one.error, allowed=one.allowed)
        if worst is None or one.error * worst.allowed > worst.error * one.allowed:
            worst = one
    found_ = {} if worst is None else {"error": float(worst.error), "allowed": worst.allowed}
    return _size_row(name, config, "", CheckStatus.OK, **found_)
