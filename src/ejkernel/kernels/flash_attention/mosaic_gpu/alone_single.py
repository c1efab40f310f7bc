# SPDX-License-Identifier: Apache-2.0
"""Float32 operands of short sequences: the kernel converts each head to float16 in shared memory.

Before a kernel, XLA needs a pass over the operands for their largest numbers, another one for the conversion, and a
third over the output. The factors are those of `single`, but each head has its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._numbers import LARGEST_OF_HALF, power_of_two

from .forward_mainloop import along_rows
from .masks import WGMMA, broadcast_index
from .plan import ROWS

_OPERANDS = ("query", "key", "value")
_MOST = 120  # exponents: a power of two and its reciprocal are normal numbers


def convert(kernel: Any, part: Any) -> jax.Array:
    """Convert a head's operands to float16, and release their stage.

    Args:
        kernel: The `ForwardKernel`.
        part: The consumer's work; the float16 operands are in the stage with the team's number.

    Returns:
        For each row, the factor that undoes that of the values.
    """
    memory = kernel.memory
    for number, name in enumerate(_OPERANDS):
        memory.largest.at[part.team, number][...] = _largest(kernel, name, part)
    plgpu.commit_smem()
    query, key, value = (_exponents(memory.largest.at[part.team, number]) for number in range(len(_OPERANDS)))
    shift = jnp.clip(lax.shift_right_arithmetic(key - query, jnp.full_like(key, 1)), -_MOST, _MOST)
    value = jnp.clip(value, -_MOST, _MOST)
    for name, exponent in zip(_OPERANDS, (shift, -shift, -value), strict=True):
        _store(kernel, name, part, power_of_two(exponent))
    plgpu.commit_smem()
    memory.pipeline.consumer_release(part.item.stage)
    return power_of_two(value)


def _largest(kernel: Any, name: str, part: Any) -> jax.Array:
    """Return the largest finite magnitude of each row, over all slabs."""
    found = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), WGMMA.reduce(1))
    for slab in range(kernel.plan.slabs(name)):
        for x in _staged(kernel, name, part, slab):
            size = jnp.abs(x)
            found = jnp.maximum(found, jnp.where(size < jnp.inf, size, 0.0).max(axis=1))
    return found


def _exponents(largest: Any) -> jax.Array:
    """Return the exponent of the largest of 64 numbers in shared memory, for each row."""
    by_column = plgpu.load(largest, layout=WGMMA.reduce(0), optimized=False)
    highest = lax.broadcast_in_dim(by_column, (ROWS, ROWS), [1]).max(axis=1)
    bits = lax.bitcast_convert_type(highest, jnp.int32)
    return lax.shift_right_arithmetic(bits, jnp.full_like(bits, 23)) - 126


def _store(kernel: Any, name: str, part: Any, factor: jax.Array) -> None:
    """Store an operand in float16; only if query and key are both huge can a number be out of range."""
    for slab in range(kernel.plan.slabs(name)):
        pieces = _staged(kernel, name, part, slab)
        x = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
        x = x * along_rows(factor, x.shape)
        limited = jnp.minimum(jnp.maximum(x, -LARGEST_OF_HALF), LARGEST_OF_HALF)
        half = jnp.where(jnp.abs(x) < jnp.inf, limited, x).astype(jnp.float16)
        kernel.matrices.assign(getattr(kernel.memory, name), (part.team, slab), half)


def _staged(kernel: Any, name: str, part: Any, slab: int) -> list[jax.Array]:
    """Return the pieces of a slab in float32, with zeros in rows that do not count."""
    tiles = kernel.matrices.tiles(getattr(kernel.memory, f"staged_{name}"), part.item.stage, slab)
    loaded = [plgpu.load(tile, layout=WGMMA, optimized=False) for tile in tiles]
    counted = _counted(kernel, name, part, slab, loaded[0].shape)
    return [jnp.where(counted, x, 0.0) for x in loaded]


def _counted(kernel: Any, name: str, part: Any, slab: int, shape: tuple[int, ...]) -> jax.Array:
    """Return which rows of a slab count: copies leave rows past the end as they were, and hidden keys set no factor."""
    plan, inputs = kernel.plan, kernel.inputs
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + slab * ROWS
    if name == "query":
        return row < plan.queries
    counted = row < plan.keys
    if inputs.key_lengths is not None:
        counted = counted & (row < inputs.key_lengths[part.item.example])
    hidden = inputs.hidden
    if hidden is not None and hidden.shape[2] == 1:
        at = (*broadcast_index(hidden, part.item.example, part.item.head), 0, pl.ds(slab * ROWS, ROWS))
        by_row = plgpu.load(hidden.at[at], layout=WGMMA.reduce(1), optimized=False)
        counted = counted & (along_rows(by_row, shape) >= 0)
    return counted
