# SPDX-License-Identifier: Apache-2.0
"""The switch between a GPU and Pallas's interpreter: operations that the interpreter lacks have a stand-in here.

A kernel has one source. Everything that depends on where it runs is a method of its `Backend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat

from .exponentials import exp2_by_fma
from .launch import plgpu

Accumulators = Sequence[Any]


class Hopper:
    """Asynchronous warpgroup products (WGMMA) with accumulators in registers; asynchronous stores."""

    interpret: Any = None

    def accumulate(self, body: Callable[[Accumulators], None], *initial: jax.Array) -> tuple[jax.Array, ...]:
        """Run `body` on accumulators that start from `initial`; return them once all products are done."""
        # `run_scoped` fills accumulators with zeros first, even if they are assigned next: a causal gradient of 4,096
        # queries at head_dim 128 took 3 % longer with them.
        return tuple(pl.run_state(body)(tuple(plgpu.ACC.init(x) for x in initial)))

    def with_accumulators(self, body: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
        """Return the result of `body` on accumulators of these shapes, which start from zeros."""
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def multiply(self, accumulator: Any, left: Any, right: Any) -> None:
        """Start `accumulator += left @ right`; `right` is in shared memory, `left` there or in registers."""
        plgpu.wgmma(accumulator, left, right)

    def start_product(
        self, left: Any, right: Any, at: tuple[Any, Any], span: tuple[int, int], used: Any = None
    ) -> jax.Array:
        """Start the product of `left[at]` by rows of `right`, of float8 numbers; it is valid after `finish_products`.

        Args:
            left, right: `[stages, parts, 64, 128]` and `[stages, ..., 128]`, in shared memory, as `tiled` returns it.
            at: Stage and part.
            span: The first row of `right` in its stage, a multiple of 8, and how many: the product's columns.
            used: How many of the 128 numbers of a row may differ from zero; `None`: all of them.
        """
        (stage, part), (start, width) = at, span
        rows = (stage * left.shape[1] + part) * left.shape[2], stage * math.prod(right.shape[1:-1]) + start
        started: jax.Array = compat.products.start_product(left, right, rows, (left.shape[2], width), used)
        return started

    def finish_products(self, *, pending: int) -> None:
        """Wait until at most `pending` products are in flight."""
        plgpu.wgmma_wait(pending)

    def assign(self, tile: Any, value: Any) -> None:
        """Store a matrix in a tile of shared memory."""
        tile[...] = value

    def read(self, accumulator: Any, *, pending: int) -> jax.Array:
        """Return an accumulator's value once at most `pending` products are in flight."""
        value: jax.Array = plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)
        return value

    def exp2_by_fma(self, x: jax.Array) -> jax.Array:
        """Return powers of two; see `exponentials.exp2_by_fma`."""
        powers: jax.Array = exp2_by_fma(x)
        return powers

    def widened(self, x: jax.Array) -> jax.Array:
        """Return a matrix of floating-point numbers, in the layout of a product's result, in float32."""
        wide: jax.Array = compat.kernels.widened_bfloat16(x) if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
        return wide

    def copy_if(self, condition: Any, source: Any, target: Any, barrier: Any) -> None:
        """Start a copy from global to shared memory if the condition holds; the barrier is told in either case."""
        plgpu.copy_gmem_to_smem(source, target, barrier, predicate=condition)

    def add_to_memory(self, source: Any, target: Any) -> None:
        """Start a copy that adds a tile in shared memory to one in global memory."""
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

    def uniform(self, number: Any) -> Any:
        """Return a number that all threads share, in a register that they share."""
        return compat.kernels.uniform(number)

    def aliased(self, *types: Any) -> Any:
        """Return one buffer of shared memory with several layouts."""
        return plgpu.RefUnion(*types)

    def views(self, buffer: Any, count: int) -> tuple[Any, ...]:
        """Return the views of an `aliased` buffer, in the order of its types."""
        del count
        return tuple(buffer)

    def read_if(self, condition: Any, read: Callable[[], list[Any]]) -> list[Any]:
        """Return the arrays that `read` loads; if the condition does not hold, they may have any values."""
        del condition
        return read()

    def order_reads(self) -> None:
        """Order reads of shared memory before copies that overwrite it: the arrival that follows does so."""

    def load_pairs(self, buffer: Any, at: tuple[Any, ...], columns: Any, *, transposed: bool = False) -> jax.Array:
        """Return columns of a matrix of an `aliased` buffer whose second view has pairs of 8-bit numbers, as int16."""
        pairs = buffer[1].at[(*at, slice(None), columns)]
        loaded: jax.Array = plgpu.load(
            pairs.transpose((1, 0)) if transposed else pairs, layout=plgpu.Layout.WGMMA, optimized=False
        )
        return loaded

    def widened_pairs(self, pairs: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
        """Return the first and the second numbers of pairs, in float16."""
        return compat.kernels.widened_pairs(pairs, dtype)

    def widened_in_order(self, pairs: jax.Array, dtype: str, wide: str) -> tuple[jax.Array, jax.Array]:
        """Return the numbers of the even and of the odd pairs, in float16, or int8 divided by 64 in bfloat16."""
        return compat.kernels.widened_in_order(pairs, dtype, wide)

    def tile(self, tiles: Any, index: tuple[Any, Any], shape: tuple[int, int]) -> Any:
        """Return a tile, by row and column, of a view with tiles and their elements as its last four axes."""
        del shape
        return tiles.at[index]


class Interpreter:
    """The operations of `Hopper`, synchronous and in program order, for Pallas's interpreter.

    Args:
        interpret: `InterpretGPUParams`.
    """

    def __init__(self, interpret: Any) -> None:
        self.interpret = interpret

    def accumulate(self, body: Callable[[Accumulators], None], *initial: jax.Array) -> tuple[jax.Array, ...]:
        """See `Hopper.accumulate`."""
        cells = [_Cell(x) for x in initial]
        body(cells)
        return tuple(cell.value for cell in cells)

    def with_accumulators(self, body: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
        """See `Hopper.with_accumulators`."""
        return body(*(_Cell(jnp.zeros(shape, jnp.float32)) for shape in shapes))

    def multiply(self, accumulator: Any, left: Any, right: Any) -> None:
        """See `Hopper.multiply`."""
        left, right = left[...], right[...]
        left = left.reshape(-1, left.shape[-1])  # an aliased buffer may have more axes
        plgpu.commit_smem()  # orders these reads before copies into the same buffers
        accumulator[...] = accumulator[...] + jnp.dot(left, right, preferred_element_type=jnp.float32)

    def start_product(
        self, left: Any, right: Any, at: tuple[Any, Any], span: tuple[int, int], used: Any = None
    ) -> jax.Array:
        """See `Hopper.start_product`."""
        one, other = left[at], right[at[0]].reshape(-1, right.shape[-1])[span[0] : sum(span)]
        plgpu.commit_smem()  # as in `multiply`
        if used is not None:  # an instruction takes 32 numbers
            number = lax.broadcasted_iota(jnp.int32, one.shape, 1)
            one = jnp.where(number // 32 * 32 < jnp.maximum(used, 1), one, jnp.zeros_like(one))
        return jnp.dot(one, other.T, preferred_element_type=jnp.float32)

    def finish_products(self, *, pending: int) -> None:
        """See `Hopper.finish_products`."""

    def assign(self, tile: Any, value: Any) -> None:
        """See `Hopper.assign`; an aliased buffer may have more axes."""
        tile[...] = value.reshape(tile.shape)

    def read(self, accumulator: Any, *, pending: int) -> jax.Array:
        """See `Hopper.read`."""
        del pending
        value: jax.Array = accumulator[...]
        return value

    def exp2_by_fma(self, x: jax.Array) -> jax.Array:
        """See `Hopper.exp2_by_fma`; compiled for a CPU, XLA would simplify its sums as if they were exact."""
        return jnp.exp2(x)

    def widened(self, x: jax.Array) -> jax.Array:
        """See `Hopper.widened`."""
        return x.astype(jnp.float32)

    def copy_if(self, condition: Any, source: Any, target: Any, barrier: Any) -> None:
        """See `Hopper.copy_if`."""
        pl.when(condition)(lambda: plgpu.copy_gmem_to_smem(source, target, barrier))
        pl.when(jnp.logical_not(condition))(lambda: plgpu.barrier_arrive(barrier))

    def add_to_memory(self, source: Any, target: Any) -> None:
        """See `Hopper.add_to_memory`; the interpreter runs one block of threads after another.

        Only a copy is clipped at the end of an array. Past it, `out_of_bounds_reads="uninitialized"` reads anything. No
        wait follows: the race detector sees whether the caller waits before it overwrites `source`. It also sees a race
        if one place is added to twice without a wait for the first copy, which a GPU allows.
        """
        source[...] = target[...] + source[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(source, target)

    def uniform(self, number: Any) -> Any:
        """See `Hopper.uniform`."""
        return number

    def aliased(self, *types: Any) -> Any:
        """See `Hopper.aliased`; the interpreter ignores layouts, so the first type serves for all."""
        return types[0]

    def views(self, buffer: Any, count: int) -> tuple[Any, ...]:
        """See `Hopper.views`."""
        return (buffer,) * count

    def read_if(self, condition: Any, read: Callable[[], list[Any]]) -> list[Any]:
        """See `Hopper.read_if`; the race detector sees a read that other values replace."""
        zeros = [jnp.zeros(array.shape, array.dtype) for array in jax.eval_shape(read)]
        found: list[Any] = lax.cond(condition, read, lambda: zeros)
        return found

    def order_reads(self) -> None:
        """See `Hopper.order_reads`; the race detector wants a fence, as after writes."""
        plgpu.commit_smem()

    def load_pairs(self, buffer: Any, at: tuple[Any, ...], columns: Any, *, transposed: bool = False) -> jax.Array:
        """See `Hopper.load_pairs`; `buffer` has the first view's type."""
        block = buffer[at]
        pairs = lax.bitcast_convert_type(block.reshape(len(block), -1, 2), jnp.int16)
        pairs = lax.slice_in_dim(pairs, columns.start, columns.start + columns.size, axis=1)
        return pairs.T if transposed else pairs

    def widened_pairs(self, pairs: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
        """See `Hopper.widened_pairs`."""
        found = lax.bitcast_convert_type(pairs, jnp.dtype(dtype)).astype(jnp.float16)
        return found[..., 0], found[..., 1]

    def widened_in_order(self, pairs: jax.Array, dtype: str, wide: str) -> tuple[jax.Array, jax.Array]:
        """See `Hopper.widened_in_order`."""
        found = lax.bitcast_convert_type(pairs, jnp.dtype(dtype)).astype(wide)
        found = found.reshape(*pairs.shape[:-1], -1, 2, 2) / (64 if wide == "bfloat16" else 1)
        first, second = (found[..., number, :].reshape(pairs.shape) for number in (0, 1))
        return first, second

    def tile(self, tiles: Any, index: tuple[Any, Any], shape: tuple[int, int]) -> Any:
        """See `Hopper.tile`; the view is a matrix here."""
        return tiles.at[tuple(pl.ds(i * size, size) for i, size in zip(index, shape, strict=True))]


class _Cell:
    """A value with the read and assignment syntax of a reference."""

    def __init__(self, value: jax.Array) -> None:
        self.value = value

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        self.value = value

    @property
    def at(self) -> _Slices:
        """Slices of the value."""
        return _Slices(self)


class _Slices:
    """The property `at` of a cell."""

    def __init__(self, cell: _Cell) -> None:
        self._cell = cell

    def __getitem__(self, index: tuple[slice, ...]) -> _CellSlice:
        return _CellSlice(self._cell, index)


class _CellSlice:
    """A slice of a cell, with the syntax of a reference; it is read and assigned as a whole."""

    def __init__(self, cell: _Cell, index: tuple[slice, ...]) -> None:
        self._cell, self._index = cell, index

    def __getitem__(self, index: Any) -> jax.Array:
        return self._cell.value[self._index][index]

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        del index
        start = [piece.start or 0 for piece in self._index]
        self._cell.value = lax.dynamic_update_slice(self._cell.value, value, start)


Backend = Hopper | Interpreter


def backend_for(interpret: Any) -> Backend:
    """Return the backend for `InterpretGPUParams`, or for a GPU if it is `None`."""
    return Hopper() if interpret is None else Interpreter(interpret)
