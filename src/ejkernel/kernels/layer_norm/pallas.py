# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation by a Pallas kernel on TPUs, which reads each block of rows once.

It has only a forward; another implementation computes the backward.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from .operation import RESIDUALS, LayerNormCall

# Rows of one tile of vector memory, by dtype; and the most bytes of a float32 block, because several are live at once.
_TILE = {"float32": 8, "bfloat16": 16}
_MOST = 2 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PallasParams:
    """Parameters of the kernel.

    Attributes:
        block_rows: Rows per block.
    """

    block_rows: int = 64


class Pallas(Implementation[LayerNormCall]):
    """The implementation for TPUs."""

    name = "pallas"
    params = PallasParams
    residuals = RESIDUALS

    def unsupported(self, call: LayerNormCall) -> str | None:
        """Return why the kernel does not support `call`, with an alternative; `None` if it does."""
        if call.platform not in (None, "tpu"):
            device = call.device_fingerprint or call.platform
            return f"implementation='pallas' needs a TPU, and this call is for {device}; use 'xla'."
        if not is_known(call.rows, call.dim) or not call.rows:
            return "it needs a known number of rows, at least 1; use 'xla'."
        if call.dtype not in _TILE:
            return f"x has dtype {call.dtype}, and 'pallas' takes {' and '.join(_TILE)}; cast it, or use 'xla'."
        if call.dim * _TILE[call.dtype] * 4 > _MOST:
            return f"x has rows of {call.dim} elements, and 'pallas' keeps {_TILE[call.dtype]} in memory; use 'xla'."
        if call.partitioned:
            return (
                "'pallas' in a program that XLA partitions would gather x; call it inside jax.shard_map, or use 'xla'."
            )
        return None

    def params_fault(self, call: LayerNormCall, params: PallasParams) -> str | None:
        """Return why the kernel cannot use this block size; `None` if it can."""
        tile = _TILE[call.dtype]
        if params.block_rows % tile:
            return f"block_rows must be a multiple of {tile} for {call.dtype}."
        if params.block_rows * call.dim * 4 > _MOST:
            return f"block_rows of {call.dim} elements each must fit in {_MOST} bytes, in float32."
        return None

    def heuristic(self, call: LayerNormCall) -> PallasParams:
        """Return the largest block of `space`."""
        return self.space(call)[-1]

    def space(self, call: LayerNormCall) -> list[PallasParams]:
        """Return the block sizes that fit in memory and are not larger than all rows need."""
        tile = _TILE[call.dtype]
        sizes = [size for size in (tile << power for power in range(8)) if size * call.dim * 4 <= _MOST]
        return [PallasParams(block_rows=size) for size in sizes if size == tile or size < 2 * call.rows]

    def forward(self, call: LayerNormCall, /, *args: Any, params: PallasParams) -> tuple[jax.Array, Any]:
        """Return the output, and mean and scale of every row."""
        x, weight, bias = unify_varying(args)
        rows, dim = call.rows, call.dim
        whole = pl.BlockSpec((params.block_rows, dim), lambda i: (i, 0))
        column = pl.BlockSpec((params.block_rows, 1), lambda i: (i, 0))
        vector = pl.BlockSpec((1, dim), lambda i: (0, 0))
        # Under `shard_map` the type of a result includes the mesh axes over which it varies.
        struct = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(x).manual_axis_type)
        out, mean, scale = pl.pallas_call(
            functools.partial(_normalize, eps=call.eps),
            grid=(pl.cdiv(rows, params.block_rows),),
            in_specs=[whole, vector, vector],
            out_specs=[whole, column, column],
            out_shape=[struct((rows, dim), x.dtype), *[struct((rows, 1), jnp.float32)] * 2],
            name="layer_norm",
        )(x.reshape(rows, dim), weight[None], bias[None])
        return out.reshape(x.shape), (mean.reshape(x.shape[:-1]), scale.reshape(x.shape[:-1]))


def _normalize(x: Any, weight: Any, bias: Any, out: Any, mean: Any, scale: Any, *, eps: float) -> None:
    wide = x[...].astype(jnp.float32)
    mean[...] = wide.mean(axis=-1, keepdims=True)
    centred = wide - mean[...]
    scale[...] = lax.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    normal = centred * scale[...] * weight[...].astype(jnp.float32) + bias[...].astype(jnp.float32)
    out[...] = normal.astype(out.dtype)
