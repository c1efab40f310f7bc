# SPDX-License-Identifier: Apache-2.0
"""Float32 operands of short sequences: the kernel converts each head to float16 in shared memory.

Before a kernel, XLA needs a pass over the operands for their largest numbers, another one for the conversion, and a
third over the output. Powers of two make the largest finite magnitude of each operand of a head at least `2**14`, below
the largest number of float16; they are undone in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._numbers import power_of_two

from .forward_mainloop import along_rows
from .masks import WGMMA, broadcast_index
from .plan import ROWS

_OPERANDS = ("query", "key", "value")
_TOP = 15  # the exponent of the largest magnitude
_MOST = 120  # exponents: the powers of two, and their reciprocals, are normal numbers


class Undone(NamedTuple):
    """Factors that undo those of the operands, one for each row.

    Attributes:
        products: On the products of queries and keys.
        values: On the sums of values.
    """

    products: jax.Array
    values: jax.Array


def convert(kernel: Any, part: Any) -> Undone:
    """Convert a head's operands to float16, release their stage, and return what undoes the factors.

    Args:
        kernel: The `ForwardKernel`.
        part: The consumer's work; the float16 operands are in the stage with the team's number.
    """
    memory = kernel.memory
    for number, name in enumerate(_OPERANDS):
        memory.largest.at[part.team, number][...] = _largest(kernel, name, part)
    plgpu.commit_smem()
    raised = [_TOP - _exponents(memory.largest.at[part.team, number]) for number in range(len(_OPERANDS))]
    for name, exponent in zip(_OPERANDS, raised, strict=True):
        _store(kernel, name, part, power_of_two(exponent))
    plgpu.commit_smem()
    memory.pipeline.consumer_release(part.item.stage)
    query, key, value = raised
    return Undone(power_of_two(-(query + key)), power_of_two(-value))


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
    return jnp.clip(lax.shift_right_arithmetic(bits, jnp.full_like(bits, 23)) - 126, _TOP - _MOST, _MOST)


def _store(kernel: Any, name: str, part: Any, factor: jax.Array) -> None:
    """Store an operand in float16."""
    for slab in range(kernel.plan.slabs(name)):
        pieces = _staged(kernel, name, part, slab)
        x = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
        half = (x * along_rows(factor, x.shape)).astype(jnp.float16)
        kernel.matrices.assign(getattr(kernel.memory, name), (part.team, slab), half)


def _staged(kernel: Any, name: str, part: Any, slab: int) -> list[jax.Array]:
    """Return the pieces of a slab in float32, with zeros for keys that do not count: they must set no factor."""
    tiles = kernel.matrices.tiles(getattr(kernel.memory, f"staged_{name}"), part.item.stage, slab)
    loaded = [plgpu.load(tile, layout=WGMMA, optimized=False) for tile in tiles]
    counted = None if name == "query" else _counted(kernel, part, slab, loaded[0].shape)
    return loaded if counted is None else [jnp.where(counted, x, 0.0) for x in loaded]


def _counted(kernel: Any, part: Any, slab: int, shape: tuple[int, ...]) -> jax.Array | None:
    """Return which keys count; `None` if all do, as copies fill rows past the end with zeros."""
    inputs, hidden, counted = kernel.inputs, kernel.inputs.hidden, None
    if inputs.key_lengths is not None:
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + slab * ROWS
        counted = row < inputs.key_lengths[part.item.example]
    if hidden is not None and hidden.shape[2] == 1:
        at = (*broadcast_index(hidden, part.item.example, part.item.head), 0, pl.ds(slab * ROWS, ROWS))
        by_row = plgpu.load(hidden.at[at], layout=WGMMA.reduce(1), optimized=False)
        seen = along_rows(by_row, shape) >= 0
        counted = seen if counted is None else counted & seen
    return counted
