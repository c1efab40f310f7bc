# SPDX-License-Identifier: Apache-2.0
"""Float32 operands of short sequences: the kernel converts each head to float16 in shared memory.

XLA would read the operands twice before the kernel, for their largest numbers and for the conversion, and the results
once more after it. Powers of two make the largest finite magnitude of each operand of a head at least `2**14`, below
the largest number of float16; they are undone in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.device import wrapped
from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._numbers import power_of_two

from .forward_mainloop import along_rows
from .masks import WGMMA, broadcast_index
from .plan import ROWS

_TOP = 15  # the exponent of the largest magnitude
_MOST = 120  # exponents: the powers of two, and their reciprocals, are normal numbers


def convert(kernel: Any, part: Any) -> dict[str, jax.Array]:
    """Convert a head's operands to float16, and return the exponent of each operand's factor, for each row.

    Args:
        kernel: The kernel.
        part: The consumer's work; the float16 operands are in the stage with the team's number.
    """
    raised = {}
    for number, name in enumerate(kernel.plan.operands):
        # Each of two consumers converts a slab.
        slabs = range(kernel.plan.slabs(name)) if kernel.plan.team == 1 else [part.slab]
        largest = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), WGMMA.reduce(1))
        for slab in slabs:
            pieces = _staged(kernel, name, part, slab)
            for x in pieces:
                largest = jnp.maximum(largest, largest_of_rows(x))
        raised[name] = exponent(kernel, part, number, largest)
        for slab in slabs:
            # One slab stays in registers.
            pieces = pieces if len(slabs) == 1 else _staged(kernel, name, part, slab)
            _store(kernel, name, part, slab, pieces, power_of_two(raised[name]))
    plgpu.commit_smem()
    kernel.await_team(kernel.memory.shared, part)
    return raised


def largest_of_rows(x: jax.Array) -> jax.Array:
    """Return the largest finite magnitude of each row."""
    size = jnp.abs(x)
    largest: jax.Array = jnp.where(size < jnp.inf, size, 0.0).max(axis=1)
    return largest


def exponent(kernel: Any, part: Any, number: int, largest: jax.Array) -> jax.Array:
    """Return the exponent of a factor for numbers with these largest magnitudes of rows; all rows have the same.

    Args:
        kernel: The kernel.
        part: The consumer's work.
        number: Counts the calls for one head, modulo 2: threads may still read the memory of the previous call.
        largest: One number for each row.
    """
    memory = kernel.memory.largest.at[part.team, number % 2]
    memory.at[pl.ds(part.slab * ROWS, ROWS)][...] = largest
    plgpu.commit_smem()
    kernel.await_team(kernel.memory.shared, part)
    by_column = plgpu.load(memory, layout=WGMMA.reduce(0), optimized=False)
    highest = lax.broadcast_in_dim(by_column, (ROWS, kernel.plan.team * ROWS), [1]).max(axis=1)
    bits = lax.bitcast_convert_type(highest, jnp.int32)
    found = lax.shift_right_arithmetic(bits, jnp.full_like(bits, 23)) - 126
    return _TOP - jnp.maximum(found, _TOP - _MOST)


def undone(x: jax.Array, *raised: jax.Array) -> jax.Array:
    """Return a matrix without factors of these exponents; one after the other, as their product may be out of range."""
    for exponents in raised:
        x = x * along_rows(power_of_two(-exponents), x.shape)
    return x


def _store(kernel: Any, name: str, part: Any, slab: Any, pieces: list[jax.Array], factor: jax.Array) -> None:
    """Store a slab in float16."""
    x = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
    half = (x * along_rows(factor, x.shape)).astype(jnp.float16)
    kernel.matrices.assign(getattr(kernel.memory, name), (part.team, slab), half)


def _staged(kernel: Any, name: str, part: Any, slab: Any) -> list[jax.Array]:
    """Return the pieces of a slab in float32, with zeros for keys that do not count: they must set no factor."""
    tiles = kernel.matrices.tiles(getattr(kernel.memory, f"staged_{name}"), part.item.stage, slab)
    loaded = [plgpu.load(tile, layout=WGMMA, optimized=False) for tile in tiles]
    counted = _counted(kernel, part, slab, loaded[0].shape) if name in ("key", "value") else None
    return loaded if counted is None else [jnp.where(counted, x, 0.0) for x in loaded]


def _counted(kernel: Any, part: Any, slab: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Return which keys count; `None` if all do, as copies fill rows past the end with zeros."""
    inputs, hidden, counted = kernel.inputs, kernel.inputs.hidden, None
    if inputs.key_lengths is not None:
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + slab * ROWS
        row = row if kernel.plan.key_heads == 1 else wrapped(row, kernel.plan.key_tokens)
        counted = row < inputs.key_lengths[part.item.example]
    if hidden is not None and hidden.shape[2] == 1:
        at = (*broadcast_index(hidden, part.item.example, part.item.bundle), 0, pl.ds(slab * ROWS, ROWS))
        by_row = plgpu.load(hidden.at[at], layout=WGMMA.reduce(1), optimized=False)
        seen = along_rows(by_row, shape) >= 0
        counted = seen if counted is None else counted & seen
    return counted
