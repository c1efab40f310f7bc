# SPDX-License-Identifier: Apache-2.0
"""The range of numbers in float16."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._numbers import exponents, has_small_range, power_of_two
from ejkernel.kernels.flash_attention.common import Operands, Rules

_WIDEST = 256  # numbers of a row: with longer ones, XLA may copy all arrays into one first
_FEW = 1 << 23  # numbers; reading more of them in one kernel takes longer than in several


def exponents_of(arrays: Sequence[jax.Array], axes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Return `exponents` of each array; `axes` are all, or all but the first.

    XLA reads small arrays in one kernel instead of one for each: a float32 forward of 256 tokens and 8 heads of 64
    columns takes 11 us instead of 18. Large arrays are read one by one: 127 us instead of 142 for 16 examples of 577
    tokens and 12 heads.
    """
    sizes = [math.prod(x.shape[1:]) for x in arrays]
    if len(arrays) < 2 or sum(x.size for x in arrays) > _FEW or 0 in sizes:
        return tuple(exponents(x, axes) for x in arrays)
    common = math.gcd(*sizes)
    width = next(width for width in range(min(common, _WIDEST), 0, -1) if common % width == 0)
    rows = [x.reshape(len(x), -1, width).astype(jnp.float32) for x in arrays]
    magnitudes = jnp.abs(jnp.concatenate(rows, axis=1))
    of_rows = jnp.where(magnitudes < jnp.inf, magnitudes, 0).max(axis=2)
    numbers = np.arange(len(arrays))
    owner = np.repeat(numbers, [size // width for size in sizes])
    of_arrays = jnp.where(owner == numbers[:, None], of_rows[:, None], 0)
    largest = of_arrays.max(axis=(0, 2) if 0 in axes else 2, keepdims=True)[..., None]
    return tuple(jnp.frexp(largest[:, number : number + 1])[1] for number in numbers)


def within_range(
    operands: Operands, out: jax.Array | None, dout: jax.Array, rules: Rules, raised: int | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the cotangent divided by a power of two that keeps the scores' gradient in range, and that factor.

    The factor is `None` where nothing is divided: for bfloat16, and if the caller has limited the cotangent (`raised`).
    Without `rules.partial`, `out` is not read and may be `None`.
    """
    if raised is not None or not has_small_range(operands.query.dtype):
        return dout, None
    factor = _factor(operands, out, dout, rules)
    return dout.astype(jnp.float32) / factor, factor


def _factor(operands: Operands, out: jax.Array | None, dout: jax.Array, rules: Rules) -> jax.Array:
    """Return the power of two that, as a divisor of the cotangent, makes the scores' gradient fit in float16.

    All gradients are linear in the cotangent. The kernels round the scores' gradient; it is at most twice the largest
    product of a row of the cotangent and a value, and the largest magnitudes limit that. The factor is 1 unless this
    limit is too large; each example has its own, unless the gradient of a bias may be a sum over examples.
    """
    axes = (1, 2, 3) if operands.bias is None else (0, 1, 2, 3)
    # The output is a mean of these values, unless it is of other keys too.
    others = (out,) if out is not None and rules.partial else ()
    of_dout, *of_values = exponents_of((dout, operands.value, *others), axes)
    columns = math.ceil(math.log2(dout.shape[3]))
    return power_of_two(jnp.maximum(of_dout + functools.reduce(jnp.maximum, of_values) + columns - 14, 0))
