# SPDX-License-Identifier: Apache-2.0
"""A 16-bit copy of the pages of an 8-bit cache that prefill reads.

A block of threads has one sequence and copies every n-th run of its tokens. Only sequences in prefill are copied, up to
their lengths, so a batch with one chunk costs the pages of one sequence; the rest of the copy stays uninitialised.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.device import quotient, remainder
from ejkernel.kernels._hopper.launch import PROGRAM, launch, plgpu
from ejkernel.kernels.paged_attention.common import Operands, PagedCall

from .memory import cache_row

_PROGRAMS = 16_384  # of all sequences; most have nothing to copy
_PER_SEQUENCE = 16, 128  # at least and at most
_THREADS = 128  # of a block
_REGISTERS = 128  # numbers that a thread has at once


class WidenPlan(NamedTuple):
    """The static description.

    Attributes:
        call: The call.
        most: Query tokens of a sequence beyond which it is copied.
        by_sequence: Whether the copy has the pages in the order of the page table; otherwise in that of the cache.
    """

    call: PagedCall
    most: int
    by_sequence: bool

    @property
    def width(self) -> int:
        """Numbers of a token in the cache."""
        return 2 * self.call.pages[2] * self.call.pages[4]

    @property
    def tokens(self) -> int:
        """Tokens per copy, a power of two; their numbers are divided evenly over the threads."""
        run = 8
        while run > 1 and run * self.width > _THREADS * _REGISTERS and run // 2 * self.width % _THREADS == 0:
            run //= 2
        return run

    @property
    def layout(self) -> Any:
        """The layout of these numbers in registers."""
        vector = math.gcd(self.tokens * self.width // _THREADS, self.tokens)
        return plgpu.Layout.WG_STRIDED((self.tokens, self.width), vec_size=vector)

    @property
    def programs(self) -> int:
        """Number of blocks of threads that copy the pages of one sequence."""
        least, most = _PER_SEQUENCE
        return max(least, min(_PROGRAMS // self.call.table[0], most))

    @property
    def pages(self) -> int:
        """Pages of the copy."""
        return self.call.table[0] * self.call.table[1] if self.by_sequence else self.call.pages[0]


class _Inputs(NamedTuple):
    cache: Any  # [pages * page_size, width]
    table: Any
    offsets: Any
    lengths: Any


def widened(call: PagedCall, operands: Operands, most: int, interpret: Any = None) -> tuple[Operands, jax.Array]:
    """Return the operands with a copy of the cache in the dtype of the queries, and a page table of the copy.

    The copy has the pages of sequences with more than `most` query tokens. The schedule does not depend on the pages.
    The second result is an uninitialised array of the shape of the queries.
    """
    sequences, columns = call.table
    plan = WidenPlan(call, most, sequences * columns < call.pages[0])
    inputs = _Inputs(
        operands.kv_pages.reshape(-1, plan.width), operands.page_table, operands.query_offsets, operands.kv_lengths
    )
    copy, empty = launch(
        lambda given, results, memory: _copy(plan, given, results[0]),
        inputs,
        [
            jax.ShapeDtypeStruct((plan.pages * call.pages[1], plan.width), call.dtype),
            jax.ShapeDtypeStruct(call.q, call.dtype),
        ],
        name="paged_attention_widen",
        programs=sequences * plan.programs,
        interpret=interpret,
    )
    table = operands.page_table
    if plan.by_sequence:
        table = jnp.arange(sequences * columns, dtype=jnp.int32).reshape(table.shape)
    return operands._replace(kv_pages=copy.reshape(plan.pages, *call.pages[1:]), page_table=table), empty


def _copy(plan: WidenPlan, given: _Inputs, out: Any) -> None:
    call, program, run, programs = plan.call, lax.axis_index(PROGRAM), plan.tokens, plan.programs
    sequence, part = quotient(program, programs), remainder(program, programs)
    length = given.lengths[sequence]
    count = given.offsets[sequence + 1] - given.offsets[sequence]
    first = jnp.int32(0) if call.window is None else jnp.maximum(length - count - call.window, 0)

    @pl.when(count > plan.most)
    def _sequence() -> None:
        begin = quotient(first, call.pages[1]) * (call.pages[1] // run) + part  # prefill reads whole pages
        end = quotient(length + (run - 1), run)

        @pl.loop(0, quotient(jnp.maximum(end - begin, 0) + (programs - 1), programs))
        def _tokens(i: Any) -> None:
            key = (begin + i * programs) * run
            row = cache_row(call.pages[0], call.pages[1], run, given.table, sequence, key)
            target = sequence * (call.table[1] * call.pages[1]) + key if plan.by_sequence else row
            values = plgpu.load(given.cache.at[pl.ds(row, run)], layout=plan.layout, optimized=False)
            compat.kernels.store_as_it_is(out.at[pl.ds(target, run)], values.astype(jnp.float32).astype(call.dtype))
