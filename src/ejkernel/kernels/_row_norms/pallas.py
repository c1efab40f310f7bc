# SPDX-License-Identifier: Apache-2.0
"""The implementation on TPUs, which reads each block of rows once.

XLA's fusions read the rows again for each statistic: `benchmarks/results/norms_tpu.md`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._spilled import WEIGHTS
from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels._vector_memory import (
    LANES,
    REGISTER,
    Need,
    Parts,
    limit_of,
    spilled_registers_of_norms,
    up,
    usual_of,
    with_chips,
)
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields
from ejkernel.ops.utils.values.signature import is_known

from .common import RESIDUALS, RowNormCall
from .strips import CHUNK, SUMS, differentiate, normalize, rows_of_strip

CallT = TypeVar("CallT", bound=RowNormCall)

# Rows of one tile of vector memory, by dtype.
_TILE = {"float32": 8, "bfloat16": 16}
_OF_TABLE = 1.04  # kernels of the table may take this much more
_OF_ONE_CHUNK = 36  # registers that a gradient of one whole chunk may take more, e.g. with arrays in vector memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PallasParams(NamedFields):
    """Parameters of a forward or backward.

    Attributes:
        block_rows: Rows per block, a multiple of 8, or of 16 in bfloat16.
    """

    block_rows: int = 64

    def __post_init__(self) -> None:
        if type(self.block_rows) is not int or self.block_rows < SUMS or self.block_rows % SUMS:
            raise ConfigError(f"block_rows must be a multiple of {SUMS}, got {self.block_rows!r}; try 64.")


class Pallas(Implementation[CallT], Generic[CallT]):
    """Normalises rows, and sums gradients, in vector memory."""

    name = "pallas"
    params = PallasParams
    residuals = RESIDUALS
    features = frozenset(("weight=None", "weight_offset", "residual"))

    def unsupported(self, call: CallT) -> str | None:
        """Return why the kernels do not support `call`, with an alternative; `None` if they do."""
        if call.platform not in (None, "tpu"):
            return f"implementation='pallas' needs a TPU, and this call is for {call.place}; use 'xla'."
        if not is_known(call.all_rows, call.dim) or not call.rows:
            return "it needs a known number of rows, at least 1; use 'xla'."
        if call.dtype not in _TILE:
            return f"x has dtype {call.dtype}, and 'pallas' takes {' and '.join(_TILE)}; cast it, or use 'xla'."
        if self.doubt(call, PallasParams(block_rows=_TILE[call.dtype])) is not None:
            return f"x has rows of {call.dim} elements, and 'pallas' keeps {_TILE[call.dtype]} in memory; use 'xla'."
        if call.partitioned:
            return (
                "'pallas' in a program that XLA partitions would gather x; call it inside jax.shard_map, or use 'xla'."
            )
        return None

    def preference(self, call: CallT) -> int:
        """Rank behind `xla`: no TPU has measured these kernels for us."""
        return -1

    def params_fault(self, call: CallT, params: PallasParams) -> str | None:
        """Return why the kernel cannot use this block size; `None` if it can."""
        if params.block_rows % _TILE[call.dtype]:
            return f"block_rows must be a multiple of {_TILE[call.dtype]} for {call.dtype}."
        return memory(call, params).fault(limit_of(call), call)

    def doubt(self, call: CallT, params: PallasParams) -> str | None:
        """See `Implementation`."""
        return self.params_fault(call, params) or memory(call, params).doubt(usual_of(call), call)

    def heuristic(self, call: CallT) -> PallasParams:
        """Return the largest block of `space` that surely fits in memory."""
        return [params for params in self.space(call) if self.doubt(call, params) is None][-1]

    def space(self, call: CallT) -> list[PallasParams]:
        """Return the block sizes that may fit in memory and are not larger than all rows need."""
        tile = _TILE[call.dtype]
        found = [PallasParams(block_rows=tile << power) for power in range(8)]
        found = [params for params in found if params.block_rows == tile or params.block_rows < 2 * call.rows]
        return [params for params in found if self.params_fault(call, params) is None]

    def forward(self, call: CallT, /, *args: Any, params: PallasParams) -> tuple[Any, Any]:
        """Return the output, and the statistics of each row."""
        formula, shape = call.formula, args[0].shape
        x, *vectors, residual = unify_varying(args if call.residual else (*args, None))
        rows = [x] if residual is None else [x, residual]
        launch = _Launch(call, params, x)
        found = launch(
            functools.partial(normalize, formula=formula),
            [*map(launch.rows, rows), *map(launch.vector, _given(vectors))],
            [launch.row_shape(x.dtype)] * len(rows) + [launch.column_shape()] * (1 + formula.centred),
        )
        outs, stats = [out.reshape(shape) for out in found[: len(rows)]], found[len(rows) :]
        stats = [one.reshape(shape[:-1]) for one in stats]
        return (tuple(outs) if call.residual else outs[0]), (tuple(stats) if formula.centred else stats[0])

    def backward(
        self, call: CallT, residuals: Any, out: Any, cotangents: tuple[Any, ...], /, *args: Any, params: PallasParams
    ) -> tuple[jax.Array | None, ...]:
        """Return the gradients."""
        formula = call.formula
        # The forward returned the normalised sum: the backward reads it instead of its terms.
        x, *vectors, _ = args if call.residual else (*args, None)
        stats = residuals if formula.centred else (residuals,)
        given = (out[1] if call.residual else x, *cotangents, *_given(vectors)[:1], *stats)
        arrays = unify_varying(given)
        several, weights = 1 + len(cotangents), len(given) - 1 - len(cotangents) - len(stats)
        launch = _Launch(call, params, arrays[0])
        dx, *sums = launch(
            functools.partial(differentiate, formula=formula, total=call.rows),
            [
                *map(launch.rows, arrays[:several]),
                *map(launch.vector, arrays[several : several + weights]),
                *map(launch.column, arrays[several + weights :]),
            ],
            [launch.row_shape(x.dtype)] + [launch.sum_shape()] * (weights + formula.bias),
        )
        totals = iter([found.sum(axis=0) for found in sums])
        gradients = [None if v is None else next(totals).astype(v.dtype) for v in vectors]
        dx = dx.reshape(x.shape)
        return (dx, *gradients, dx) if call.residual else (dx, *gradients)


def memory(call: RowNormCall, params: PallasParams) -> Need:
    """Return the bytes of vector memory."""
    parts, (form, columns, place) = parts_of(call, params), place_in_table(call, params)
    registers = spilled_registers_of_norms().get(form, {}).get(columns, [None] * 3)[place]
    has_rest = call.backward and call.rows > params.block_rows and call.rows % params.block_rows > 0
    if registers is None or has_rest:  # a gradient masks the rest of the rows
        return parts.need(WEIGHTS)
    registers += _OF_ONE_CHUNK if call.backward and call.dim == CHUNK else 0
    return Need(parts.least, int((parts.known + REGISTER * registers) * _OF_TABLE))


def place_in_table(call: RowNormCall, params: PallasParams) -> tuple[str, str, int]:
    """Return the place of a kernel in the table.

    Chunks are computed one after the other, so of many columns the rest of the last chunk counts.

    Returns:
        Its form and columns, and 0 for several strips of rows, 1 for a single one, or 2 for a part of one.
    """
    strip = rows_of_strip(params.block_rows)
    words = [call.device_fingerprint, "layer norm" if call.formula.centred else "rms norm", call.dtype]
    words += ["backward" if call.backward else "forward", "residual" if call.residual else "", f"{strip} rows"]
    place = 0 if call.rows > params.block_rows or params.block_rows > strip else 1 if call.rows == strip else 2
    columns = call.dim if call.dim < 2 * CHUNK or place == 2 else 2 * CHUNK + call.dim % CHUNK
    return ", ".join(filter(None, words)), str(columns), place


def parts_of(call: RowNormCall, params: PallasParams) -> Parts:
    """Return the memory of a kernel by its causes.

    The known bytes are two buffers of each window, or one for a single block: of rows, of the columns, where a value
    for each row takes a register's row, of the vectors, and of the sums over rows. The windows of the last two do not
    move, so they have one buffer. The compiler also keeps values of a chunk of columns, if they are too many for its
    registers.
    """
    dim, size, is_centred = up(call.dim), jnp.dtype(call.dtype).itemsize, call.formula.centred
    arrays = (3 if call.backward else 2) + (1 if call.backward else 2) * call.residual
    buffers = 1 if call.rows <= params.block_rows else 2
    least = buffers * params.block_rows * dim * size * arrays
    columns = buffers * (1 + is_centred) * 4 * LANES * params.block_rows
    vectors = (call.formula.weight is not None) + (call.formula.bias and not call.backward)
    sums = ((call.formula.weight is not None) + call.formula.bias) * call.backward
    fixed = 4 * dim * (vectors + SUMS * sums)
    kind = f"{'layer' if is_centred else 'rms'} norm, {'backward' if call.backward else 'forward'}"
    rows, is_loop = rows_of_strip(params.block_rows), dim >= 2 * CHUNK
    # a loop over one chunk is none, so that its values and those of the rest are there together
    sizes = {"loop": rows * CHUNK * is_loop, "rest": rows * (dim % CHUNK) * is_loop, "once": rows * dim * (not is_loop)}
    sizes["more"] = rows * max(0, dim - CHUNK // 2) * (not is_loop)
    sizes = with_chips(call, sizes)
    return Parts(least, least + columns + fixed, kind, sizes)


def _given(vectors: Sequence[Any]) -> list[Any]:
    return [vector for vector in vectors if vector is not None]


class _Launch:
    """One launch over blocks of rows: adds arrays and results with their block specifications."""

    def __init__(self, call: RowNormCall, params: PallasParams, x: Any) -> None:
        self._sizes, self._block = (call.rows, call.dim), params.block_rows
        # Under `shard_map` the type of a result includes the mesh axes over which it varies.
        self._struct = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(x).manual_axis_type)

    def __call__(self, kernel: Any, given: Sequence[tuple[Any, Any]], results: Sequence[tuple[Any, Any]]) -> list[Any]:
        found = pl.pallas_call(
            kernel,
            grid=(pl.cdiv(self._sizes[0], self._block),),
            in_specs=[spec for _, spec in given],
            out_specs=[spec for _, spec in results],
            out_shape=[shape for shape, _ in results],
            name="row_norm",
        )(*(array for array, _ in given))
        return list(found)

    def rows(self, x: Any) -> tuple[Any, Any]:
        return x.reshape(self._sizes), self._spec(self._sizes[1])

    def column(self, x: Any) -> tuple[Any, Any]:
        return x.reshape(self._sizes[0], 1), self._spec(1)

    def vector(self, x: Any) -> tuple[Any, Any]:
        return x[None], pl.BlockSpec((1, self._sizes[1]), lambda i: (0, 0))

    def row_shape(self, dtype: Any) -> tuple[Any, Any]:
        return self._struct(self._sizes, dtype), self._spec(self._sizes[1])

    def column_shape(self) -> tuple[Any, Any]:
        return self._struct((self._sizes[0], 1), jnp.float32), self._spec(1)

    def sum_shape(self) -> tuple[Any, Any]:
        shape = (SUMS, self._sizes[1])
        return self._struct(shape, jnp.float32), pl.BlockSpec(shape, lambda i: (0, 0))

    def _spec(self, columns: int) -> Any:
        return pl.BlockSpec((self._block, columns), lambda i: (i, 0))
