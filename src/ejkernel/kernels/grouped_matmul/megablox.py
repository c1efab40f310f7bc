# SPDX-License-Identifier: Apache-2.0
"""Grouped products by megablox, the kernels that JAX ships for TPUs.

They write the rows of groups alone, and count rows in whole tiles: what is missing is added, and the rest cleared.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel import compat
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from .common import GroupedMatmulCall, Groups, own_rows, row_spans, without_rest
from .epilogue import PREACTIVATIONS, finished

_DTYPES = ("bfloat16", "float32")
_MEMORY = 16 << 20  # bytes of a core's vector memory that a kernel may have, unless its compiler is told otherwise
_MOST_TILES = 4096  # of rows: the kernels find each one's place by a histogram in float32, which is wrong for 5000
_ROWS, _LANES = 16, 128  # what tiles are multiples of
_COLUMNS = (128, 256, 512, 1024)
_one_by_one: Any = sequential_vmap  # under `vmap`; it has no annotations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegabloxParams:
    """The tiles of a product; those of the weights' gradient, whose sums run over rows, are called alike.

    Attributes:
        block_m: Rows of a tile, a multiple of 16.
        block_k: Columns of the left operand, a multiple of 128; where there are fewer, all.
        block_n: Columns of the right one, likewise.
    """

    block_m: int = 128
    block_k: int = 128
    block_n: int = 128

    def __post_init__(self) -> None:
        for name, unit in (("block_m", _ROWS), ("block_k", _LANES), ("block_n", _LANES)):
            value = getattr(self, name)
            if type(value) is not int or value < unit or value % unit:
                raise ConfigError(f"{name} must be a multiple of {unit}, got {value!r}; try {max(unit, 128)}.")


class _Megablox(Implementation[GroupedMatmulCall]):
    """What product and weights' gradient share."""

    name = "megablox"
    params = MegabloxParams
    features = frozenset({"first_group"})

    def unsupported(self, call: GroupedMatmulCall) -> str | None:
        """Return why the kernels do not run the call, and what would."""
        if call.platform not in (None, "tpu"):
            device = call.device_fingerprint or call.platform
            return f"implementation='megablox' needs a TPU, and this call is for {device}; use 'xla'."
        sizes = (call.rows, call.groups, call.inner, call.columns)
        if not is_known(*sizes) or 0 in sizes:
            return "'megablox' needs m, k, n and groups that are known and not 0; use 'xla'."
        if call.dtype not in _DTYPES or call.out_dtype not in _DTYPES:
            asked = f"{call.dtype} to {call.out_dtype}"
            return f"'megablox' takes and gives bfloat16 and float32, got {asked}; cast lhs and rhs, or use 'xla'."
        if call.partitioned:
            return "'megablox' in a program that XLA partitions would gather both operands; use 'xla'."
        return None

    def params_fault(self, call: GroupedMatmulCall, params: MegabloxParams) -> str | None:
        """Return what these parameters have too much of."""
        tiles, needed = -(-call.rows // params.block_m), self.memory(call, params)
        if tiles > _MOST_TILES:
            return f"it makes {tiles} tiles of rows, and megablox counts {_MOST_TILES} at most."
        if needed > _MEMORY:
            return f"it takes {needed} bytes of vector memory, and there are {_MEMORY}."
        return None

    def memory(self, call: GroupedMatmulCall, params: MegabloxParams) -> int:
        """Return the bytes of a product's tiles: two of each operand and result, and the sums."""
        m, (k, n) = params.block_m, _blocks(call, params)
        operands, out = (jnp.dtype(dtype).itemsize for dtype in (call.dtype, call.out_dtype))
        rest = 4 * k * (m + n) if call.inner % k else 0  # where k ends within a tile, which is cleared in float32
        return 2 * (operands * k * (m + n) + out * m * n) + 4 * m * n + rest

    def heuristic(self, call: GroupedMatmulCall) -> MegabloxParams:
        """Return the largest tiles of the space, but no more rows than a group usually has."""
        return max(
            (params for params in self.space(call) if params.block_m <= max(call.usual_rows, _LANES)),
            key=lambda params: (params.block_k * params.block_n, params.block_m),
        )

    def space(self, call: GroupedMatmulCall) -> list[MegabloxParams]:
        """Return tiles that fit into memory, none of which has much more than there is."""
        few = -(-call.rows // _ROWS) * _ROWS
        rows = [few] if few < _LANES else [m for m in (128, 256, 512, 1024) if m <= max(_LANES, 2 * call.usual_rows)]
        columns = ([size for size in _COLUMNS if size < max(_LANES + 1, 2 * of)] for of in (call.inner, call.columns))
        found = [MegabloxParams(block_m=m, block_k=k, block_n=n) for m, k, n in itertools.product(rows, *columns)]
        return [params for params in found if self.params_fault(call, params) is None] or found[-1:]


class Megablox(_Megablox):
    """The product on TPUs."""

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: MegabloxParams) -> tuple[jax.Array, Any]:
        """Return the product; nothing is left for a backward."""
        lhs, rhs, groups = args
        return _product(call, lhs, rhs, groups, params, call.out_dtype), ()


class MegabloxActivation(_Megablox):
    """Products on TPUs, and what is made of them."""

    residuals = PREACTIVATIONS
    features = frozenset({"activation", "gate", "row_scale", "first_group"})

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: MegabloxParams) -> tuple[jax.Array, Any]:
        """Return the output and the products."""
        lhs, rhs, groups, gate, row_scale = args
        matrices = [matrix for matrix in (rhs, gate) if matrix is not None]
        products = [_product(call, lhs, matrix, groups, params, "float32") for matrix in matrices]
        own = own_rows(groups, call.rows, call.groups)
        out = finished(products, own, row_scale, call.activation).astype(call.out_dtype)
        return out, tuple(product.astype(call.kept_dtype) for product in products)

    def memory(self, call: GroupedMatmulCall, params: MegabloxParams) -> int:
        """Return the bytes of a product's tiles, whose result is in float32."""
        return super().memory(dataclasses.replace(call, out_dtype="float32"), params)


class MegabloxWgrad(_Megablox):
    """The weights' gradient on TPUs."""

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: MegabloxParams) -> tuple[jax.Array, Any]:
        """Return the sums; nothing is left for a backward."""
        tiling = (params.block_m, *_blocks(call, params))

        def compute(lhs: jax.Array, rhs: jax.Array, groups: Groups) -> Any:
            lhs, rhs = (_whole_tiles(x, params.block_m) for x in (lhs, rhs))
            return compat.megablox_weights_gradient(
                lhs, rhs, _sizes(call, groups), count=call.groups, dtype=call.out_dtype, tiling=tiling
            )

        return _one_by_one(compute)(*unify_varying(args)), ()

    def memory(self, call: GroupedMatmulCall, params: MegabloxParams) -> int:
        """Return the bytes of its tiles: two of each operand and result, operands in float32, and the sums."""
        m, (k, n) = params.block_m, _blocks(call, params)
        operands, out = (jnp.dtype(dtype).itemsize for dtype in (call.dtype, call.out_dtype))
        return (2 * operands + 4) * m * (k + n) + (2 * out + 4) * k * n


def _product(
    call: GroupedMatmulCall, lhs: jax.Array, rhs: jax.Array, groups: Groups, params: MegabloxParams, dtype: str
) -> jax.Array:
    tiling = (params.block_m, *_blocks(call, params))

    def compute(lhs: jax.Array, rhs: jax.Array, groups: Groups) -> jax.Array:
        sizes = _sizes(call, groups)
        # A launch without any tile is not relied on: where no group has a row, the first is computed, and cleared.
        sizes = jnp.where(sizes[1:].any(), sizes, jnp.arange(sizes.shape[0], dtype=sizes.dtype) == 1)
        out = compat.megablox_product(
            _whole_tiles(lhs, params.block_m), rhs, sizes, dtype=dtype, tiling=tiling, transpose_rhs=call.transpose_rhs
        )
        return without_rest(out[: call.rows], own_rows(groups, call.rows, call.groups))

    out: jax.Array = _one_by_one(compute)(*unify_varying((lhs, rhs, groups)))
    return out


def _blocks(call: GroupedMatmulCall, params: MegabloxParams) -> tuple[int, int]:
    """Return the tiles' columns: a tile may have any number of them if these are all."""
    return min(params.block_k, call.inner), min(params.block_n, call.columns)


def _sizes(call: GroupedMatmulCall, groups: Groups) -> jax.Array:
    """Return the number of rows in front of the groups that there are matrices of, and the sizes of these."""
    # Rows in front are a group more, whose matrix is never read, so that no rows are moved.
    starts, ends = row_spans(groups, call.rows, call.groups)
    return jnp.concatenate([starts[:1], ends - starts])


def _whole_tiles(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % rows), (0, 0)))
