# SPDX-License-Identifier: Apache-2.0
"""Checks with other inputs: large and small values, zeros, and odd sizes.

A false alarm costs more trust than a missed fault. Values are therefore compared with an allowance for rounding: the
change of the reference when its inputs change by a few units in the last place. Gradients must be finite if the
reference's are. Their values are not compared, because gradients almost vanish if functions saturate.
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
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.values.signature import is_array
from ejkernel.testing.numbers import Numbers, error_line
from ejkernel.testing.programs import Results, all_deviations, alone, computed, cotangents_of, pulled
from ejkernel.testing.report import CheckRow, CheckStatus
from ejkernel.testing.subject import Subject

logger = logging.getLogger(__name__)

SCALES: Final = ((1e-3,), (1e3, 1e2, 1e1))
"""Factors of the inputs; each row uses its first factor for which the reference stays finite."""

_ZEROED: Final = 4  # arrays to set to zero one by one
_HALF: Final = 2  # bytes
_ROUNDED: Final = 16  # perturbation of the inputs, in units in the last place
_MARGIN: Final = 32  # allowance, as a multiple of the reference's change
_HEADROOM: Final = 64  # results must stay below the largest number by this factor
_DRAWS: Final = 2
_MARGIN_IN_HALF: Final = 4  # the same for 16-bit dtypes
_SIZES: Final = 4  # lengths to change one by one


# --- values ---


@dataclasses.dataclass(frozen=True, eq=False)
class _Variant:
    """Inputs with other values, and the reference's results for them.

    Attributes:
        name: The row's name.
        arrays: The inputs.
        true: Results and gradients of the reference.
        slack: For each result, the accepted error of each element in addition to the tolerance.
    """

    name: str
    arrays: list[Any]
    true: Results
    slack: Sequence[Any]


def value_rows(subject: Subject, numbers: Numbers, configs: Sequence[Any]) -> Iterator[CheckRow]:
    """Yield rows that compare the call with the reference for scaled inputs and zeros, under each configuration."""
    floats = [index for index, array in enumerate(numbers.examples[0]) if _may_change(subject, array)]
    if not floats:
        reason = "no floating-point argument accepts other values"
        yield CheckRow(check="scaled inputs, zeros", config=None, status=CheckStatus.SKIPPED, reason=reason)
        return
    made = list(_variants(subject, numbers, floats))
    yield from (variant for variant in made if isinstance(variant, CheckRow))
    for config in configs:
        try:
            program = numbers.program(config)
        except Exception as error:  # noqa: BLE001 - the row of the gradient reports it
            logger.debug("other values are not checked under %r: %s", config, error_text(error))
            continue
        for variant in made:
            if isinstance(variant, _Variant):
                yield _value_row(subject, program, config, variant)


def _may_change(subject: Subject, array: Any) -> bool:
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2 or not array.size:
        return False
    # Arrays from `example_inputs` may have to be positive or sorted, or to sum to one.
    values = np.asarray(array, np.float64)
    return not overrides(subject.kernel, "example_inputs") or bool((values < 0).any() and (values > 0).any())


def _variants(subject: Subject, numbers: Numbers, floats: Sequence[int]) -> Iterator[_Variant | CheckRow]:
    given = numbers.examples[0]
    usual = [_size(out) for out in numbers.true_of(given).outs]
    for factors in SCALES:
        for factor in factors:
            scaled = _changed(given, floats, functools.partial(_scaled, factor=factor))
            variant = _variant(f"scaled by {factors[0]:g}", numbers, scaled, floats, usual)
            if variant is not None and _has_headroom(variant.true):
                yield variant if factor == factors[0] else dataclasses.replace(variant, name=f"scaled by {factor:g}")
                break
        else:
            name, reason = f"scaled by {factors[0]:g}", "the reference is not finite for such inputs"
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
    """Return inputs and the reference's results; `None` if the reference fails."""
    rng = np.random.default_rng(0)
    try:
        true = numbers.true_of(arrays)
        moved = [numbers.true_of(_changed(arrays, floats, lambda a: _rounded(a, rng))).outs for _ in range(_DRAWS)]
    except Exception as error:  # noqa: BLE001 - a reference may reject such values
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
        # After cancellation, the error of a result is of the size of rounding errors of its terms.
        slack.append(_MARGIN * (np.nan_to_num(apart, nan=np.inf) + units * size))
    return _Variant(name, arrays, true, slack)


def _rounded(array: Any, rng: np.random.Generator) -> Any:
    """Return the array with each element changed by up to `_ROUNDED` units in the last place (16-bit dtypes: one)."""
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


def _has_headroom(true: Results) -> bool:
    """Return whether all results are finite, and far below the largest number of their dtype."""
    # A comparison with NaN is never true.
    return all(np.abs(_wide(array)).max() < float(compat.finfo(array.dtype).max) / _HEADROOM for array in _every(true))


def _value_row(subject: Subject, program: Callable[[Any], Results], config: Any, variant: _Variant) -> CheckRow:
    try:
        found = program(variant.arrays)
        worst, reason = _worst(subject, found, variant)
    except Exception as error:  # noqa: BLE001 - the row has the reason
        return CheckRow(check=variant.name, config=config, status=CheckStatus.FAILED, reason=error_line(error))
    status = CheckStatus.FAILED if reason else CheckStatus.OK
    return CheckRow(check=variant.name, config=config, status=status, reason=reason, error=worst, allowed=1.0)


def _worst(subject: Subject, found: Results, variant: _Variant) -> tuple[float, str]:
    """Return the largest error as a fraction of the allowance, and the first fault."""
    worst, reason = 0.0, ""
    for index, (got, want, slack) in enumerate(zip(found.outs, variant.true.outs, variant.slack, strict=True)):
        if not is_inexact(want) or not want.size:
            continue
        off, where = _relative_error(
            got, want, slack, tolerance(want.dtype, platform=subject.platform, precision=None).worst
        )
        if off > 1 and not reason:
            values = f"{_wide(got).ravel()[where]:.6g} instead of {_wide(want).ravel()[where]:.6g}"
            reason = f"result {index} differs from the reference: {values}"
        worst = max(worst, off)
    for index, (got, want) in enumerate(zip(found.gradients or (), variant.true.gradients or (), strict=False)):
        bad = ~np.isfinite(_wide(got)) & np.isfinite(_wide(want))
        if bad.any() and not reason:
            worst, reason = np.inf, f"gradient {index} is not finite, but the reference's is"
    return worst, reason


def _relative_error(got: Any, want: Any, slack: Any, relative: float) -> tuple[float, int]:
    """Return the largest difference as a fraction of the allowance, and its position."""
    mine, true = _wide(got), _wide(want)
    finite = np.isfinite(true)
    # Close to the largest number, a different order of summation may overflow.
    near = np.abs(np.where(finite, true, 0)) > float(compat.finfo(want.dtype).max) / _HEADROOM
    with np.errstate(all="ignore"):
        allowed = relative * (np.abs(true) + _size(want)) + slack
        share = np.abs(mine - true) / np.maximum(allowed, float(compat.finfo(want.dtype).tiny))
    share = np.where(np.isfinite(mine), np.nan_to_num(share, nan=0.0), np.inf)
    share = np.where(finite & ~near, share, 0.0)
    return float(share.max()), int(share.argmax())


# --- rounding ---


def is_rounding(numbers: Numbers, config: Any) -> bool:
    """Return whether rounding of the inputs changes the reference as much as the configuration's results differ.

    Only for 16-bit dtypes: if a sum cancels, its result is mostly rounding errors.
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
            slack = _MARGIN_IN_HALF * float(np.sqrt(np.mean(apart**2)))
            allowed = tolerance(want.dtype, platform="cpu", precision=None)
            if _relative_error(got, want, slack + _MARGIN_IN_HALF * apart, allowed.worst)[0] > 1:
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
    """Yield rows that compare the call with the reference for odd sizes; equal lengths change together.

    All lengths change at once. If the kernel or the reference rejects that, they change one by one.

    Args:
        subject: The call.
        configs_for: Returns the configurations to check for a changed call, the heuristic's first.
        gradients: Whether to compare gradients.
    """
    taken = [leaf for leaf in jax.tree.leaves((subject.args, subject.kwargs)) if _is_integer(leaf)]
    lengths = sorted({length for like in subject.types for length in like.shape if length > 1})
    free = [length for length in lengths if length not in taken]
    if not free:
        yield _size_row("odd sizes", None, "no array has a length that can change", CheckStatus.SKIPPED)
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
    # Use dtypes of JAX's arrays, because NumPy's may be wider.
    given = subject.elements(1)[0]
    like = [jax.ShapeDtypeStruct(shape, array.dtype) for shape, array in zip(shapes, given, strict=True)]
    try:
        other: Subject = subject.with_arrays(like)
        configs = configs_for(other)
        arrays = other.elements(1)[0]
        truth = other.plain(Choice(config=configs[0], platform=other.platform, reference=other.has_reference))
        runs = {str(index): other.executed(config) for index, config in enumerate(configs)}
        jax.eval_shape(runs["0"], *arrays)
    except Exception as error:  # noqa: BLE001 - a kernel need not support every size
        return [_size_row(name, None, f"not supported: {error_line(error)}", CheckStatus.SKIPPED)]
    try:
        cotangents = cotangents_of(truth, arrays, np.random.default_rng((subject.seed, 3)))
    except Exception as error:  # noqa: BLE001 - nor does a reference
        return [_size_row(name, None, f"the reference fails: {error_line(error)}", CheckStatus.SKIPPED)]
    wrt = other.differentiable()
    of = (lambda run: pulled(run, wrt)) if gradients and any(wrt) and cotangents else alone
    true = computed({"true": (of(truth), arrays, cotangents)})["true"]
    if isinstance(true, Exception):
        return [_size_row(name, None, f"the reference fails: {error_line(true)}", CheckStatus.SKIPPED)]
    found = computed({key: (of(run), arrays, cotangents) for key, run in runs.items()})
    return [_compared(other, name, config, found[str(index)], true) for index, config in enumerate(configs)]


def _compared(subject: Subject, name: str, config: Any, found: Results | Exception, true: Results) -> CheckRow:
    if isinstance(found, Exception):
        return _size_row(name, config, f"not supported: {error_line(found)}", CheckStatus.SKIPPED)
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
