# SPDX-License-Identifier: Apache-2.0
"""What is made of products beside storing them: an activation, a gate, a factor for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import accumulator

from .common import without_rest

PREACTIVATIONS: Final = "preactivations"  # the residuals: the products, in `kept_dtype` of the call


def _relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: Final[Mapping[str, Callable[[jax.Array], jax.Array]]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "relu": jax.nn.relu,
    "relu2": _relu2,
}


def finished(
    products: Sequence[jax.Array], own: jax.Array, row_scale: jax.Array | None, activation: str | None
) -> jax.Array:
    """Return the result in the dtype of the products, that which sums run in.

    Args:
        products: The product, and the gate's where there is one: zeros in rows that are not own.
        own: Of each row, whether it belongs to a group.
        row_scale: A factor for each row, whatever it is for others; `None`: none.
        activation: One of `ACTIVATIONS`, of the first product; `None`: none.
    """
    first, *others = products
    out = first if activation is None else ACTIVATIONS[activation](first)
    for other in others:
        out = out * other
    return out if row_scale is None else scaled_rows(out, row_scale, own)


def scaled_rows(rows: jax.Array, row_scale: jax.Array, own: jax.Array) -> jax.Array:
    """Return own rows times their factors, multiplied in the dtype that sums run in, and zeros in the others."""
    wide = accumulator(rows.dtype)
    factors = without_rest(row_scale.astype(wide), own)
    return (without_rest(rows, own).astype(wide) * factors[:, None]).astype(rows.dtype)
