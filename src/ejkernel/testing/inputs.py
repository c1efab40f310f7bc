# SPDX-License-Identifier: Apache-2.0
"""Checks with other inputs: large and small values, zeros, odd sizes, and other dtypes.

A false alarm costs more trust than a missed fault. Values are therefore compared with an allowance for rounding: the
change of the reference when its inputs change by a few units in the last place. Gradients must be finite if the
reference's are. Their values are not compared, because gradients almost vanish if functions saturate.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.measure.correctness import Deviation, position, tolerance
from ejkernel.ops.core.kernel import overrides
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.utils.values.signature import is_inexact
from ejkernel.testing.numbers import Numbers
from ejkernel.testing.programs import Results
from ejkernel.testing.report import wide
from ejkernel.testing.rows import HOW_TO_REFUSE, CheckRow, CheckStatus, attempted, compared, error_line, refusal, row
from ejkernel.testing.subject import Subject, odd, resized

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
_OTHER_DTYPES: Final = ("float32", "bfloat16", "float16")


# --- values ---


def value_rows(numbers: Numbers, configs: Sequence[Any]) -> Iterator[CheckRow]:
    """Yield rows that compare the call with the reference for scaled inputs and zeros, under each configuration."""
    given = numbers.examples[0]
    floats = [index for index, array in enumerate(given) if _may_change(numbers.subject, array)]
    if not floats:
        yield row("scaled inputs, zeros", None, "no floating-point argument accepts other values", skipped=True)
        return
    usual = [_size(out) for out in numbers.true().outs]
    for factors in SCALES:
        for factor in factors:
            scaled = _changed(given, floats, functools.partial(_scaled, factor=factor))
            truth = _true_and_slack(numbers, scaled, floats, usual)
            if truth is not None and _has_headroom(truth[0]):
                yield from (_value_row(numbers, config, f"scaled by {factor:g}", scaled, *truth) for config in configs)
                break
        else:
            tried = "".join(f", nor scaled by {factor:g}" for factor in factors[1:])
            reason = f"{numbers.whose} result is not finite for such inputs{tried}"
            yield row(f"scaled by {factors[0]:g}", None, reason, skipped=True)
    names = {"zeros": list(floats)}
    if len(floats) > 1:
        names |= {f"zeros in {numbers.subject.names[index]}": [index] for index in floats[:_ZEROED]}
    for name, which in names.items():
        zeros = _changed(given, which, jnp.zeros_like)
        truth = _true_and_slack(numbers, zeros, floats, usual)
        if truth is not None:
            yield from (_value_row(numbers, config, name, zeros, *truth) for config in configs)


def _may_change(subject: Subject, array: Any) -> bool:
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2 or not array.size:
        return False
    # Arrays from `example_inputs` may have to be positive or sorted, or to sum to one.
    values = np.asarray(array, np.float64)
    return not overrides(subject.kernel, "example_inputs") or bool((values < 0).any() and (values > 0).any())


def _scaled(array: Any, factor: float) -> Any:
    return (array * factor).astype(array.dtype)


def _changed(arrays: Sequence[Any], which: Sequence[int], change: Callable[[Any], Any]) -> list[Any]:
    return [change(array) if index in which else array for index, array in enumerate(arrays)]


def _true_and_slack(
    numbers: Numbers, arrays: list[Any], floats: Sequence[int], usual: Sequence[float]
) -> tuple[Results, list[Any]] | None:
    """Return the reference's results, and for each the accepted error of each element in addition to the tolerance.

    If the reference fails, return `None`.
    """
    true = attempted(numbers.truth.of, arrays, numbers.cotangents[0])
    moved = attempted(_when_rounded, numbers, arrays, floats)
    if isinstance(true, Exception) or isinstance(moved, Exception):
        return None
    slack: list[Any] = []
    for index, (out, size) in enumerate(zip(true.outs, usual, strict=True)):
        if is_inexact(out):
            units = float(compat.tracing.finfo(out.dtype).eps)
            apart = _furthest([other.outs[index] for other in moved], out)
            # After cancellation, the error of a result is of the size of rounding errors of its terms.
            slack.append(_MARGIN * (np.nan_to_num(apart, nan=np.inf) + units * size))
        else:
            slack.append(np.inf)
    return true, slack


def _when_rounded(numbers: Numbers, arrays: list[Any], floats: Sequence[int]) -> list[Results]:
    """Return the reference's results for inputs that differ by rounding errors."""
    rng = np.random.default_rng(0)
    moved = (_changed(arrays, floats, functools.partial(_rounded, rng=rng)) for _ in range(_DRAWS))
    return [numbers.truth.of(each, numbers.cotangents[0]) for each in moved]


def _furthest(moved: Sequence[Any], true: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.max([np.abs(wide(other) - wide(true)) for other in moved], axis=0) if true.size else 0.0


def _rounded(array: Any, rng: np.random.Generator) -> Any:
    """Return the array with each element changed by up to `_ROUNDED` units in the last place (16-bit dtypes: one)."""
    units = 1 if array.dtype.itemsize == _HALF else _ROUNDED
    by = 1 + units * float(compat.tracing.finfo(array.dtype).eps) * rng.uniform(-1, 1, array.shape)
    return jnp.asarray(wide(array) * by, array.dtype)


def _size(out: Any) -> float:
    """Return the root mean square of the finite elements."""
    if not is_inexact(out) or not out.size:
        return 0.0
    sizes = np.abs(wide(out))
    finite = sizes[np.isfinite(sizes)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _has_headroom(true: Results) -> bool:
    """Return whether all results are finite, and far below the largest number of their dtype."""
    # A comparison with NaN is never true.
    return all(
        np.abs(wide(array)).max() < float(compat.tracing.finfo(array.dtype).max) / _HEADROOM for array in _every(true)
    )


def _value_row(
    numbers: Numbers, config: Any, name: str, arrays: list[Any], true: Results, slack: Sequence[Any]
) -> CheckRow:
    both = attempted(numbers.results, config, arrays)
    if isinstance(both, Exception):
        return row(name, config, both)
    deviations = [
        _value_deviation(f"result {index}{how}", *each, numbers)
        for how, found in zip(("", " without a gradient"), both, strict=False)
        for index, each in enumerate(zip(found.outs, true.outs, slack, strict=True))
        if is_inexact(each[1]) and each[1].size
    ]
    for index, (got, want) in enumerate(zip(both[0].gradients or (), true.gradients or (), strict=False)):
        if (~np.isfinite(wide(got)) & np.isfinite(wide(want))).any():
            deviations.append(Deviation(np.inf, 1.0, f"gradient {index} is not finite, but the expected one is"))
    return compared(name, config, deviations or [Deviation(0.0, 1.0)])


def _value_deviation(name: str, got: Any, want: Any, slack: Any, numbers: Numbers) -> Deviation:
    """Return the largest error as a fraction of the allowance."""
    allowed = tolerance(want.dtype, platform=numbers.subject.platform, precision=None)
    off, where = _relative_error(got, want, slack, allowed.worst)
    values = f"{wide(got).ravel()[where]:.6g} instead of {wide(want).ravel()[where]:.6g}{position(where, want.shape)}"
    return Deviation(off, 1.0, f"{name} differs from {numbers.whose}: {values}" if off > 1 else "")


def _relative_error(got: Any, want: Any, slack: Any, relative: float) -> tuple[float, int]:
    """Return the largest difference as a fraction of the allowance, and its position."""
    mine, true = wide(got), wide(want)
    finite = np.isfinite(true)
    # Close to the largest number, a different order of summation may overflow.
    near = np.abs(np.where(finite, true, 0)) > float(compat.tracing.finfo(want.dtype).max) / _HEADROOM
    with np.errstate(all="ignore"):
        allowed = relative * (np.abs(true) + _size(want)) + slack
        share = np.abs(mine - true) / np.maximum(allowed, float(compat.tracing.finfo(want.dtype).tiny))
    share = np.where(np.isfinite(mine), np.nan_to_num(share, nan=0.0), np.inf)
    share = np.where(finite & ~near, share, 0.0)
    return float(share.max()), int(share.argmax())


# --- rounding ---


def _is_rounding(numbers: Numbers, found: Results, true: Results) -> bool:
    """Return whether rounding of the inputs changes the reference as much as the results differ.

    Only for 16-bit dtypes: if a sum cancels, its result is mostly rounding errors.
    """
    arrays = numbers.examples[0]
    floats = [index for index, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
    if any(arrays[index].dtype.itemsize != _HALF for index in floats):
        return False
    moved = [_every(other) for other in _when_rounded(numbers, arrays, floats)]
    for index, (got, want) in enumerate(zip(_every(found), _every(true), strict=True)):
        apart = _furthest([other[index] for other in moved], want)
        slack = _MARGIN_IN_HALF * float(np.sqrt(np.mean(apart**2)))
        allowed = tolerance(want.dtype, platform="cpu", precision=None)
        if _relative_error(got, want, slack + _MARGIN_IN_HALF * apart, allowed.worst)[0] > 1:
            return False
        off = float(np.sqrt(np.mean(np.abs(wide(got) - wide(want)) ** 2)))
        if off > allowed.overall * _size(want) + slack:
            return False
    return True


def _every(found: Results) -> list[Any]:
    return [array for array in (*found.outs, *(found.gradients or ())) if is_inexact(array) and array.size]


# --- sizes and dtypes ---


def size_rows(
    numbers: Numbers,
    configs_for: Callable[[Subject], Sequence[Any]],
    pairs_for: Callable[[Numbers], Iterator[CheckRow]],
) -> Iterator[CheckRow]:
    """Yield rows that compare the call with the reference for odd sizes; equal lengths change together.

    All lengths change at once. If the kernel refuses that, or the reference fails, they change one by one.

    Args:
        numbers: The call.
        configs_for: Returns the configurations to check for a changed call, the heuristic's first.
        pairs_for: Yields rows that compare the backward's own configurations for a changed call.
    """
    subject = numbers.subject
    free = subject.free_lengths()
    if not free:
        yield row("odd sizes", None, "no array has a length that can change", skipped=True)
        return
    # Use dtypes of JAX's arrays, because NumPy's may be wider.
    given = subject.elements(1)[0]

    def changed(name: str, lengths: Sequence[int]) -> list[CheckRow]:
        like = resized(given, lengths)
        return list(_changed_rows(numbers, name, like, configs_for, pairs_for, may_be_no_call=True))

    rows = changed("odd sizes", free)
    if len(free) > 1 and all(each.status == CheckStatus.SKIPPED for each in rows):
        rows = [each for n in free[:_SIZES] for each in changed(f"{odd(n)} instead of {n}", [n])]
    yield from rows


def dtype_rows(numbers: Numbers, configs_for: Callable[[Subject], Sequence[Any]]) -> Iterator[CheckRow]:
    """Yield rows that compare the call with the reference for other dtypes of its floating-point arrays."""
    for dtype in _OTHER_DTYPES:
        given = numbers.subject.elements(1)[0]
        cast = [a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in given]
        if any(new.dtype != like.dtype for new, like in zip(cast, numbers.subject.types, strict=True)):
            yield from _changed_rows(numbers, dtype, cast, configs_for)


def _changed_rows(
    numbers: Numbers,
    name: str,
    arrays: Sequence[Any],
    configs_for: Callable[[Subject], Sequence[Any]],
    pairs_for: Callable[[Numbers], Iterator[CheckRow]] | None = None,
    *,
    may_be_no_call: bool = False,
) -> Iterator[CheckRow]:
    """Yield a row for each configuration of the call with other arrays; skipped if it refuses them.

    Args:
        numbers: The call.
        name: Name of the rows.
        arrays: The other arrays, which may be abstract.
        configs_for: Returns the configurations to check for a changed call, the heuristic's first.
        pairs_for: See `size_rows`.
        may_be_no_call: Whether the arrays may not fit together. Then errors only count if the reference, or another
            configuration, takes them.
    """
    types = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    configs: Sequence[Any] = (None,)
    try:
        subject = numbers.subject.with_arrays(arrays)
        configs = configs_for(subject)
        other = numbers.like(subject, configs[0])
        jax.eval_shape(subject.executed(configs[0]), *other.examples[0])
    except Exception as error:  # noqa: BLE001 - a kernel need not support every size and dtype
        yield _refused_row(numbers, name, arrays, configs, error, types, may_be_no_call=may_be_no_call)
        return
    true = attempted(other.true)
    if isinstance(true, Exception):  # nor does a reference
        yield row(name, None, f"the reference fails: {error_line(true)}", skipped=True)
        return
    found = [(name, *each) for each in zip(configs, other.all_results(configs), strict=True)]
    if other.has_own_forward:
        alone = zip(configs, other.all_results(configs, gradients=False), strict=True)
        found += [(f"{name}, no gradient", *each) for each in alone]
    for check, config, one in found:
        if isinstance(one, Exception):
            yield _crashed_row(check, config, one, types)
            continue
        made = other.row_of(check, config, one)
        if made.status == CheckStatus.FAILED and len(one.outs) == len(true.outs) and _is_rounding(other, one, true):
            made = row(check, config)  # within rounding; the error would exceed the general tolerance
        yield dataclasses.replace(made, reason=f"{types}: {made.reason}" if made.reason else "")
    for made in pairs_for(other) if pairs_for is not None else ():
        reason = f"{types}: {made.reason}" if made.reason else ""
        yield dataclasses.replace(made, check=f"{made.check}, {name}", reason=reason)


def _refused_row(
    numbers: Numbers,
    name: str,
    arrays: Sequence[Any],
    configs: Sequence[Any],
    error: Exception,
    types: str,
    *,
    may_be_no_call: bool,
) -> CheckRow:
    """Return the row of a call that fails under the heuristic's configuration, `configs[0]`, when traced."""
    subject = numbers.subject
    if refusal(error):
        return row(name, None, refusal(error), skipped=True)
    if may_be_no_call and subject.inv.override_cfg is not None:
        reason = f"the configuration among the arguments does not fit {types}: {error_line(error)}"
        return row(name, None, reason, skipped=True)
    if subject.has_reference:
        takers = [subject.plain(Choice(platform=subject.platform, reference=True))]
    else:
        takers = [subject.plain(Choice(config=config, platform=subject.platform)) for config in configs[1:]]
    is_call = any(not isinstance(attempted(jax.eval_shape, run, *arrays), Exception) for run in takers)
    if is_call or not (may_be_no_call or subject.has_reference):
        return _crashed_row(name, configs[0], error, types)
    why = "the reference fails as well" if subject.has_reference else "no reference shows that it is"
    return row(name, None, f"{types} may be no valid call, {why}: {error_line(error)}", skipped=True)


def _crashed_row(name: str, config: object, error: Exception, types: str) -> CheckRow:
    """Return the row of a configuration that raises an error: skipped if it refuses the call, failed otherwise."""
    if refusal(error):
        return row(name, config, refusal(error), skipped=True)
    leave = "" if config is None else ", or leave the configuration out of the space for them"
    return row(name, config, f"{types}: {error_line(error)}. {HOW_TO_REFUSE}{leave}")
