# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in plain JAX: all rows in one pass, or a loop over blocks of rows.

XLA reads the rows twice: for their mean, and to scale them. A block that fits in cache is fetched from memory only
once, which outweighs the loop if the call has enough rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._numbers import accumulator
from ejkernel.kernels._options import POSITIVE, check_parameters
from ejkernel.kernels._row_norms.common import RESIDUALS
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields
from ejkernel.ops.utils.values.signature import is_known

from .operation import RmsNormCall

# Measured on a CPU: elements per block, and the minimum size of a call for blocks to pay. They pay most when XLA would
# keep a float32 copy of 16-bit rows, and never in a float32 forward.
_BLOCK = 1 << 19
_WORTHWHILE = {"fwd": 1 << 24, "bwd": 1 << 22}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaParams(NamedFields):
    """Parameters of a forward or backward.

    Attributes:
        block_rows: Rows per block; `None` processes all rows in one pass.
    """

    block_rows: int | None = None

    def __post_init__(self) -> None:
        check_parameters(self, block_rows=POSITIVE)


class Xla(Implementation[RmsNormCall]):
    """Plain JAX: supports every call on every platform."""

    name = "xla"
    params = XlaParams
    differentiable = True
    residuals = RESIDUALS
    features = frozenset(("weight=None", "weight_offset", "residual"))

    def heuristic(self, call: RmsNormCall) -> XlaParams:
        """Return one pass over all rows, or on a CPU blocks if measurements favour them."""
        rows, dim = call.all_rows, call.dim
        worthwhile = _WORTHWHILE["bwd" if call.backward else "fwd"]
        if not is_known(rows, dim) or call.platform != "cpu" or rows * dim < worthwhile:
            return XlaParams()
        if not call.backward and jnp.dtype(call.dtype).itemsize >= 4:
            return XlaParams()
        return XlaParams(block_rows=_even(rows, max(1, _BLOCK // dim)))

    def space(self, call: RmsNormCall) -> list[XlaParams]:
        """Return one pass, and blocks of several sizes."""
        rows, dim = call.all_rows, call.dim
        if not is_known(rows, dim):
            return [XlaParams()]
        sizes = dict.fromkeys(_even(rows, max(1, elements // dim)) for elements in (1 << 15, 1 << 17, _BLOCK, 1 << 21))
        return [XlaParams(), *(XlaParams(block_rows=size) for size in sizes if size < rows)]

    def forward(self, call: RmsNormCall, /, *args: Any, params: XlaParams) -> tuple[Any, jax.Array]:
        """Return the output, and `1 / rms` of every row in float32."""
        x, weight, *residual = args
        x = x + residual[0] if residual else x
        # Add the offset in float32: in bfloat16, a sum with an offset of 1 keeps few digits of a small weight.
        factor = None if weight is None else (weight.astype(accumulator(x.dtype)) + call.weight_offset)[None]

        def block(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            wide = rows.astype(accumulator(rows.dtype))
            scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + call.eps)
            normal = wide * scale if factor is None else wide * scale * factor
            return normal.astype(rows.dtype), scale[..., 0]

        rows = x.reshape(-1, x.shape[-1])
        if params.block_rows is None or params.block_rows >= rows.shape[0]:
            out, scale = block(rows)
        else:
            out, scale = _in_blocks(block, params.block_rows, rows)
        out, scale = out.reshape(x.shape), scale.reshape(x.shape[:-1])
        return ((out, x) if residual else out), scale

    def backward(
        self, call: RmsNormCall, residuals: Any, out: Any, cotangents: tuple[Any, ...], /, *args: Any, params: XlaParams
    ) -> tuple[jax.Array | None, ...]:
        """Return the gradients of `x`, the weight, and the residual."""
        x, weight, *residual = args
        # The forward returned the sum as its second result.
        x, dim = (out[1] if residual else x), x.shape[-1]

        def block(rows: jax.Array, scale: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
            wide, wide_dout = rows.astype(scale.dtype), dout.astype(scale.dtype)
            normal = wide * scale[..., None]
            dnormal = (
                wide_dout if weight is None else wide_dout * (weight.astype(scale.dtype) + call.weight_offset)[None]
            )
            inner = jnp.mean(dnormal * normal, axis=-1, keepdims=True)
            return (scale[..., None] * (dnormal - normal * inner)).astype(rows.dtype), (wide_dout * normal).sum(axis=0)

        flat = (x.reshape(-1, dim), residuals.reshape(-1), cotangents[0].reshape(-1, dim))
        weight, *arrays = unify_varying((weight, *flat))
        if params.block_rows is None or params.block_rows >= arrays[0].shape[0]:
            dx, dweight = block(*arrays)
        else:
            dx, dweight = _summed_in_blocks(block, params.block_rows, arrays)
        dx, gradient = dx.reshape(x.shape), None if weight is None else dweight.astype(weight.dtype)
        if not residual:
            return dx, gradient
        # Add the cotangent of the sum, which is the second result.
        dx = dx + cotangents[1]
        return dx, gradient, dx


def _even(rows: int, most: int) -> int:
    """Return the block size, at most `most`, that divides `rows` with the least padding."""
    return -(-rows // -(-rows // most)) if rows else 1


def _in_blocks(block: Callable[..., Any], size: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, scale = lax.map(block, _cut(rows, size))
    return _join(out, rows.shape[0]), _join(scale, rows.shape[0])


def _summed_in_blocks(block: Callable[..., Any], size: int, arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    def step(total: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        dx, dweight = block(*parts)
        return total + dweight, dx

    # Under `shard_map` the carry of a loop needs a fixed type, and blocks vary over the mesh.
    zero = unify_varying((jnp.zeros(arrays[0].shape[-1], arrays[1].dtype), arrays[0]))[0]
    dweight, dx = lax.scan(step, zero, tuple(_cut(x, size) for x in arrays))
    return _join(dx, arrays[0].shape[0]), dweight


def _cut(x: jax.Array, size: int) -> jax.Array:
    """Pad the rows to whole blocks with zeros, which add nothing to any sum."""
    missing = -x.shape[0] % size
    x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x
    return x.reshape(-1, size, *x.shape[1:])


def _join(x: jax.Array, rows: int) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])[:rows]
