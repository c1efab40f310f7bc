# SPDX-License-Identifier: Apache-2.0
"""The range of cotangents in float16."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import has_small_range, normalized
from ejkernel.kernels.flash_attention.common import Operands, Rules


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
    product of a row of the cotangent and a value, and their norms limit that. The factor is 1 unless this limit is too
    large; each example has its own, unless the gradient of a bias may be a sum over examples.
    """
    axes = (1, 2, 3) if operands.bias is None else (0, 1, 2, 3)

    def largest_norm(x: jax.Array) -> jax.Array:
        squares = jnp.square(x.astype(jnp.float32)).sum(axis=3, keepdims=True)
        # NaN in one example must not decide the factor of others.
        return jnp.sqrt(jnp.where(squares < jnp.inf, squares, 0).max(axis=axes, keepdims=True))

    left, right = largest_norm(dout), largest_norm(operands.value)
    if out is not None and rules.partial:  # otherwise the output is a mean of these values
        right = jnp.maximum(right, largest_norm(out))
    _, factor = normalized(left * right * 2.0**-14, ())
    return jnp.maximum(factor, 1)
