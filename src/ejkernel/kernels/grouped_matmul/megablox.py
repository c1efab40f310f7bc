# SPDX-License-Identifier: Apache-2.0
"""Grouped products by megablox, the kernels that JAX ships for TPUs.

They write only rows of groups, and need whole tiles of rows: this module pads the rows and clears the others.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels._vector_memory import LANES, Need, limit_of, memory_of, memory_to_pass, untuned_of, up
from ejkernel.ops.config.published import Facts, PublishedTable
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields
from ejkernel.ops.utils.values.signature import is_known

from . import _megablox_memory
from ._megablox_memory import Tile
from .common import PREACTIVATIONS, GroupedMatmulCall, Groups, activated, own_rows, row_spans, without_rest

_DTYPES = ("bfloat16", "float32")
_MOST_TILES = 4096  # tiles of rows: the kernels locate them by a histogram in float32, which is wrong for 5000
_ROWS = 16  # the granularity of tiles; that of columns is `LANES`
_COLUMNS = (128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegabloxParams(NamedFields):
    """The tiles of a product; for the weights' gradient, which sums over rows, the names are the same.

    Attributes:
        block_m: Rows of a tile, a multiple of 16.
        block_k: Columns of the left operand per tile, a multiple of 128; all of them if there are fewer.
        block_n: Columns of the right operand per tile, with the same rule.
    """

    block_m: int = 128
    block_k: int = 128
    block_n: int = 128

    def __post_init__(self) -> None:
        for name, unit in (("block_m", _ROWS), ("block_k", LANES), ("block_n", LANES)):
            value = getattr(self, name)
            if type(value) is not int or value < unit or value % unit:
                raise ConfigError(f"{name} must be a multiple of {unit}, got {value!r}; try {max(unit, 128)}.")


class _Megablox(Implementation[GroupedMatmulCall]):
    """Base of the product and the weights' gradient."""

    name = "megablox"
    params = MegabloxParams
    features = frozenset({"first_group"})

    def published_as(self, call: GroupedMatmulCall) -> Facts | None:
        """Return the sizes of a plain product in bfloat16."""
        if call.features or call.transpose_rhs or {call.dtype, call.out_dtype} != {"bfloat16"}:
            return None
        return {"rows": call.rows, "groups": call.groups, "inner": call.inner, "columns": call.columns}

    def unsupported(self, call: GroupedMatmulCall) -> str | None:
        """Return why the kernels do not support the call, with an alternative; `None` if they do."""
        if call.platform not in (None, "tpu"):
            return f"implementation='megablox' needs a TPU, and this call is for {call.place}; use 'xla'."
        sizes = (call.rows, call.groups, call.inner, call.columns)
        if not is_known(*sizes) or 0 in sizes:
            return "'megablox' needs m, k, n and groups that are known and not 0; use 'xla'."
        if call.dtype not in _DTYPES or call.out_dtype not in _DTYPES:
            asked = f"{call.dtype} to {call.out_dtype}"
            return f"'megablox' takes and returns bfloat16 and float32, got {asked}; cast lhs and rhs, or use 'xla'."
        if call.partitioned:
            return "'megablox' in a program that XLA partitions would gather both operands; use 'xla'."
        if not self._fitting(call):
            return f"'megablox' makes at most {_MOST_TILES} tiles of rows, too few for {call.rows}; use 'xla'."
        return None

    def params_fault(self, call: GroupedMatmulCall, params: MegabloxParams) -> str | None:
        """Return why these tiles exceed a limit; `None` if they may not."""
        tiles = -(-call.rows // params.block_m)
        if tiles > _MOST_TILES:
            return f"it makes {tiles} tiles of rows, and megablox supports at most {_MOST_TILES}."
        return self.memory(call, params).fault(memory_of(call), call)

    def doubt(self, call: GroupedMatmulCall, params: MegabloxParams) -> str | None:
        """See `Implementation`."""
        return self.params_fault(call, params) or self.memory(call, params).doubt(untuned_of(call), call)

    def memory(self, call: GroupedMatmulCall, params: MegabloxParams) -> Need:
        """Return the bytes of vector memory."""
        tile, known = self.tile_of(call, params)
        dtypes, whole = (call.dtype, call.out_dtype), all(size % LANES == 0 for size in _blocks(call, params))
        return _megablox_memory.need(tile, known, call.device_fingerprint or "", dtypes, whole=whole)

    def tile_of(self, call: GroupedMatmulCall, params: MegabloxParams) -> tuple[Tile, int]:
        """Return the tile of a product, and the bytes of two tiles of each operand and result, and of an accumulator.

        With a single tile of k, the compiler keeps the accumulator in registers.
        """
        m, (k, n) = params.block_m, (up(size) for size in _blocks(call, params))
        operands, out = (jnp.dtype(dtype).itemsize for dtype in (call.dtype, call.out_dtype))
        right = _rows(call, params, call.transpose_rhs) * (k if call.transpose_rhs else n)
        windows = 2 * (operands * (m * k + right) + out * m * n)
        if params.block_k >= call.inner:
            return Tile("single", m, k, n), windows
        return Tile("product", m, k, n, call.inner % params.block_k), windows + 4 * m * n

    def heuristic(self, call: GroupedMatmulCall) -> MegabloxParams:
        """Return the largest tiles that surely fit, if possible with at most the usual number of rows per group."""
        fitting = self._fitting(call)
        usual = [params for params in fitting if params.block_m <= max(call.usual_rows, LANES)]
        return max(usual or fitting, key=lambda params: (params.block_k * params.block_n, params.block_m))

    def _fitting(self, call: GroupedMatmulCall) -> list[MegabloxParams]:
        """Return the tiles of the space that surely fit in the memory that the compiler gives a kernel by default."""
        most = min(limit_of(call, surely=True), untuned_of(call))
        return [params for params in self.space(call) if self.memory(call, params).most <= most]

    def space(self, call: GroupedMatmulCall) -> list[MegabloxParams]:
        """Return the tiles that may fit in memory and are not much larger than the operands need."""
        few, most = up(call.rows, _ROWS), max(LANES, 2 * call.usual_rows, 2 * call.rows // _MOST_TILES)
        rows = [few] if few < LANES else [m for m in (128, 256, 512, 1024) if m <= most]
        columns = ([size for size in _COLUMNS if size < max(LANES + 1, 2 * of)] for of in (call.inner, call.columns))
        found = [MegabloxParams(block_m=m, block_k=k, block_n=n) for m, k, n in itertools.product(rows, *columns)]
        return [params for params in found if self.params_fault(call, params) is None]


class Megablox(_Megablox):
    """The product on TPUs."""

    published = PublishedTable("megablox")

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: MegabloxParams) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        lhs, rhs, groups = args
        return _product(call, lhs, rhs, groups, params, call.out_dtype), ()


class MegabloxActivation(_Megablox):
    """Products and their epilogue on TPUs."""

    residuals = PREACTIVATIONS
    features = frozenset({"activation", "gate", "row_scale", "first_group"})

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: MegabloxParams) -> tuple[jax.Array, Any]:
        """Return the output and the products."""
        lhs, rhs, groups, gate, row_scale = args
        return activated(
            call, lambda matrix: _product(call, lhs, matrix, groups, params, "float32"), rhs, groups, gate, row_scale
        )

    def memory(self, call: GroupedMatmulCall, params: MegabloxParams) -> Need:
        """Return the bytes of vector memory of a product with a float32 result."""
        return super().memory(dataclasses.replace(call, out_dtype="float32"), params)


class MegabloxWgrad(_Megablox):
    """The weights' gradient on TPUs."""

    published = PublishedTable("megablox_wgrad")

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: MegabloxParams) -> tuple[jax.Array, Any]:
        """Return the gradient, without residuals."""
        tiling = (params.block_m, *_blocks(call, params))

        def compute(lhs: jax.Array, rhs: jax.Array, groups: Groups) -> Any:
            lhs, rhs = (_whole_tiles(x, params.block_m) for x in (lhs, rhs))
            return compat.kernels.megablox_weights_gradient(
                *(lhs, rhs, _sizes(call, groups)),
                count=call.groups,
                dtype=call.out_dtype,
                memory=memory_to_pass(self.memory(call, params), (lhs, rhs)),
                tiling=tiling,
            )

        return one_by_one(compute, *args), ()

    def tile_of(self, call: GroupedMatmulCall, params: MegabloxParams) -> tuple[Tile, int]:
        """Return the tile, and the bytes of two tiles of each operand and result, and of an accumulator."""
        m, (k, n) = params.block_m, (up(size) for size in _blocks(call, params))
        operands, out = (jnp.dtype(dtype).itemsize for dtype in (call.dtype, call.out_dtype))
        return Tile("weights", m, k, n), 2 * operands * m * (k + n) + (2 * out + 4) * _rows(call, params) * n


def _product(
    call: GroupedMatmulCall, lhs: jax.Array, rhs: jax.Array, groups: Groups, params: MegabloxParams, dtype: str
) -> jax.Array:
    tiling = (params.block_m, *_blocks(call, params))
    need = Megablox().memory(dataclasses.replace(call, out_dtype=dtype), params)

    def compute(lhs: jax.Array, rhs: jax.Array, groups: Groups) -> jax.Array:
        sizes = _sizes(call, groups)
        # Avoid a launch without tiles: if all groups are empty, compute one row for the first group, and clear it.
        sizes = jnp.where(sizes[1:].any(), sizes, jnp.arange(sizes.shape[0], dtype=sizes.dtype) == 1)
        out = compat.kernels.megablox_product(
            *(_whole_tiles(lhs, params.block_m), rhs, sizes),
            dtype=dtype,
            memory=memory_to_pass(need, (lhs, rhs)),
            tiling=tiling,
            transpose_rhs=call.transpose_rhs,
        )
        return without_rest(out[: call.rows], own_rows(groups, call.rows, call.groups))

    out: jax.Array = one_by_one(compute, lhs, rhs, groups)
    return out


def _blocks(call: GroupedMatmulCall, params: MegabloxParams) -> tuple[int, int]:
    """Return the sizes of tiles along k and n; a tile may have any size that covers its whole axis."""
    return min(params.block_k, call.inner), min(params.block_n, call.columns)


def _rows(call: GroupedMatmulCall, params: MegabloxParams, is_transposed: bool = False) -> int:
    """Return the rows of a matrix's tile in memory; unlike its columns they are not padded to `LANES`."""
    return up(_blocks(call, params)[is_transposed], 8)


def _sizes(call: GroupedMatmulCall, groups: Groups) -> jax.Array:
    """Return the number of rows before the groups with matrices, and the sizes of these groups."""
    # Rows before them form an extra group, and its matrix is never read. So no rows have to move.
    starts, ends = row_spans(groups, call.rows, call.groups)
    return jnp.concatenate([starts[:1], ends - starts])


def _whole_tiles(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % rows), (0, 0)))
