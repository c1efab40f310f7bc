# SPDX-License-Identifier: Apache-2.0
"""The epilogue of grouped products: an activation, a gate, a factor for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import accumulator

from .common import GroupedMatmulCall, Groups, own_rows, without_rest

PREACTIVATIONS: Final = "preactivations"  # the residuals: the products, in the call's `kept_dtype`


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
    """Return the result of the epilogue, in the dtype of the products, which is the accumulator dtype.

    Args:
        products: The product, and the gate's product if any; rows outside all groups are zero.
        own: For each row, whether it belongs to a group.
        row_scale: A factor for each row, or `None`; rows outside all groups ignore it.
        activation: One of `ACTIVATIONS`, for the first product, or `None`.
    """
    first, *others = products
    out = first if activation is None else ACTIVATIONS[activation](first)
    for other in others:
        out = out * other
    return out if row_scale is None else scaled_rows(out, row_scale, own)


def activated(
    call: GroupedMatmulCall,
    product: Callable[[jax.Array], jax.Array],
    rhs: Any,
    groups: Groups,
    gate: Any,
    row_scale: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the output and the products to save, given a function of the matrices that returns the wide product."""
    products = [product(matrices) for matrices in (rhs, gate) if matrices is not None]
    own = own_rows(groups, call.rows, call.groups)
    out = finished(products, own, row_scale, call.activation).astype(call.out_dtype)
    return out, tuple(x.astype(call.kept_dtype) for x in products)


def scaled_rows(rows: jax.Array, row_scale: jax.Array, own: jax.Array) -> jax.Array:
    """Return own rows times their factors, multiplied in the accumulator dtype, and zeros for the others."""
    wide = accumulator(rows.dtype)
    factors = without_rest(row_scale.astype(wide), own)
    return (without_rest(rows, own).astype(wide) * factors[:, None]).astype(rows.dtype)
