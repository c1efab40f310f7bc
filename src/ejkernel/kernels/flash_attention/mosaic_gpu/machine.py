# SPDX-License-Identifier: Apache-2.0
"""The operations that a GPU has and Pallas's interpreter has not: one source of a kernel for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its annotations differ between versions, and few of them take a slice of a reference

Accumulators = Sequence[Any]


class Hopper:
    """Warpgroup matrix products, asynchronous, on accumulators in registers."""

    interpret: Any = None

    def accumulate(self, body: Callable[[Accumulators], None], *initial: jax.Array) -> tuple[jax.Array, ...]:
        """Run `body` on accumulators that start from `initial`; return them when all products are done."""
        # Accumulators of `run_scoped` are filled with zeros first, whatever they are given then: a causal gradient of
        # 4,096 queries at head_dim 128 took 3 % longer with them.
        return tuple(pl.run_state(body)(tuple(plgpu.ACC.init(x) for x in initial)))

    def multiply(self, accumulator: Any, left: Any, right: Any) -> None:
        """Start `accumulator += left @ right`; `right` is in shared memory, `left` there or in registers."""
        plgpu.wgmma(accumulator, left, right)

    def read(self, accumulator: Any, *, pending: int) -> jax.Array:
        """Return an accumulator's value once at most `pending` products are under way."""
        value: jax.Array = plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)
        return value

    def add_to_memory(self, source: Any, target: Any) -> None:
        """Start adding a tile in shared memory to one in global memory."""
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

    def store_to_memory(self, source: Any, target: Any) -> None:
        """Start to store a tile in shared memory in global memory."""
        plgpu.copy_smem_to_gmem(source, target)


class Interpreter:
    """The same, at once and in order, for the interpreter.

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

    def multiply(self, accumulator: Any, left: Any, right: Any) -> None:
        """See `Hopper.multiply`."""
        left, right = left[...], right[...]
        plgpu.commit_smem()  # what was read here is overwritten by copies that wait for this warpgroup
        accumulator[...] = accumulator[...] + jnp.dot(left, right, preferred_element_type=jnp.float32)

    def read(self, accumulator: Any, *, pending: int) -> jax.Array:
        """See `Hopper.read`."""
        del pending
        value: jax.Array = accumulator[...]
        return value

    def add_to_memory(self, source: Any, target: Any) -> None:
        """See `Hopper.add_to_memory`; blocks run one after the other here."""
        target[...] = target[...] + source[...]

    def store_to_memory(self, source: Any, target: Any) -> None:
        """See `Hopper.store_to_memory`."""
        target[...] = source[...]


def shown(words: Sequence[jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Return where the bits of a mask are set, in a tile of that shape.

    Args:
        words: One vector along the tile's rows for each 32 columns, in int32.
        shape: Of the tile, whose layout is that of accumulators.
    """
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    word, *others = (lax.broadcast_in_dim(x, shape, [0]) for x in words)
    for i, other in enumerate(others, 1):
        word = jnp.where(column >= 32 * i, other, word)
    # Of a column's number, two bits depend on the thread: a word is shifted by these once, all others are constants.
    shifted = lax.shift_right_logical(word, column & 6)
    bit = lax.shift_left(jnp.full(shape, 1, jnp.int32), column & 25)
    found: jax.Array = (shifted & bit) != 0
    return found


class _Cell:
    """A value that is assigned as a reference is."""

    def __init__(self, value: jax.Array) -> None:
        self.value = value

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        self.value = value


Machine = Hopper | Interpreter
