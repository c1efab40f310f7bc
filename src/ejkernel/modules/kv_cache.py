# SPDX-License-Identifier: Apache-2.0
"""The paged cache of a server: `append_to_pages` and `copy_pages` on the device, `PagePool` on the host."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from ejkernel.kernels._numbers import is_integer
from ejkernel.kernels._options import check_values, int32
from ejkernel.kernels.paged_attention import _arguments as arguments
from ejkernel.kernels.paged_attention import cache
from ejkernel.ops.errors import ArgumentError, EjkernelError
from ejkernel.ops.utils.messages.names import check_argument, frames_hidden, names_checked
from ejkernel.ops.utils.values.scalars import Takes, python_numbers

from .paged_attention import NAMES_ELSEWHERE, Pages, Scale

Table = np.ndarray[tuple[int, int], np.dtype[np.int32]]


@names_checked(NAMES_ELSEWHERE)
def append_to_pages(
    kv_pages: Pages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    page_table: Int[Array, "sequences pages_per_sequence"],
    query_offsets: Int[Array, " sequences_and_one"],
    kv_lengths: Int[Array, " sequences"],
    *,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> Pages:
    """Write the new tokens' keys and values to a cache, in place: the cache is donated, so use the result instead.

    Inside a function under `jax.jit`, donate the cache there, `jax.jit(step, donate_argnames="kv_pages")`; otherwise
    each step copies it.

    A cache of int8 or float8_e4m3fn stores `k / k_scale` and `v / v_scale`, rounded and clipped to its range. Pass the
    same scales to `paged_attention`. On a CPU, XLA copies a cache of float8_e4m3fn in each
    call, and with JAX 0.10 one of bfloat16.

    Tokens past `query_offsets[-1]`, past the page table, or of a page outside the cache are not written.

    Args:
        kv_pages: The cache, as for `paged_attention`.
        k, v: Keys and values of the new tokens, sequence after sequence. Those of the cache's dtype are written as they
            are. `v` is `None` for a cache of keys alone.
        page_table: The pages of each sequence, in order.
        query_offsets: The cumulative numbers of new tokens, with a leading 0. Outside of `jax.jit`, values on the host
            (NumPy arrays, and JAX's on a CPU) are checked, and those of `kv_lengths` with them.
        kv_lengths: The number of each sequence's keys, including its new tokens.
        k_scale, v_scale: Factors of the cached values, one number or one for each KV head; e.g. the largest magnitude
            divided by 127 for int8, or by 448 for float8_e4m3fn. `None` is 1; for int8 an `ArgumentWarning` says so.

    Returns:
        The cache with the new tokens.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
    """
    arguments.check_pages(kv_pages)
    arguments.check_batch(page_table, query_offsets, kv_lengths)
    arguments.check_new_tokens(k, v, kv_pages)
    check_values(kv_pages=kv_pages, k=k, v=v, page_table=page_table, query_offsets=query_offsets, kv_lengths=kv_lengths)
    arguments.check_batch_values(query_offsets, kv_lengths, k.shape[0])
    arguments.warn_of_rounding(k, v, kv_pages, k_scale, v_scale)
    scales = tuple(
        arguments.canonical_scales(name, python_numbers(scale, Takes.NUMBERS), kv_pages.shape[2])
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    )
    arguments.check_shards(kv_pages, k, v, k_scale=scales[0], v_scale=scales[1])
    batch = tuple(map(int32, (page_table, query_offsets, kv_lengths)))
    found: jax.Array = cache.append(kv_pages, (k, v), batch, scales)
    return found


@frames_hidden
def copy_pages(kv_pages: Pages, sources: Int[Array, " copies"], targets: Int[Array, " copies"]) -> Pages:
    """Copy pages within a cache, in place: the cache is donated, so use the result instead.

    Args:
        kv_pages: The cache, as for `paged_attention`.
        sources: The pages to read. A copy from a page outside the cache is left out.
        targets: The pages to write. A copy to a page outside the cache, such as -1, is left out: pad with these, so
            that all steps have one shape.

    Returns:
        The cache with the copies.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
    """
    arguments.check_pages(kv_pages)
    arguments.check_copies(sources, targets)
    check_values(kv_pages=kv_pages, sources=sources, targets=targets)
    arguments.check_whole_pages(kv_pages)
    found: jax.Array = cache.copy(kv_pages, int32(sources), int32(targets))
    return found


class OutOfPagesError(EjkernelError, RuntimeError):
    """The pool has too few free pages; free a sequence, e.g. preempt one."""


@dataclasses.dataclass
class _Sequence:
    pages: list[int]
    length: int


class PagePool:
    """The pages of a cache, and the sequences that own them; on the host, in plain Python.

    Sequences that share a prefix share its pages. A sequence gets a page of its own when it grows into a shared one:
    `extend` returns the pages to copy, for `copy_pages`.

    >>> pool = PagePool(pages=8, page_size=16)
    >>> first = pool.allocate(20)
    >>> second = pool.fork(first)
    >>> pool.extend(second, 1)
    [(1, 2)]
    >>> pool.table([first, second]).tolist()
    [[0, 1], [0, 2]]
    >>> pool.free(first)
    >>> pool.free_pages
    6

    A pool is not thread-safe. If a call raises, it changes nothing.

    Args:
        pages: Pages of the cache.
        page_size: Tokens of a page.

    Raises:
        ArgumentError: `pages` or `page_size` is not a positive integer.
    """

    @frames_hidden
    def __init__(self, pages: int, page_size: int) -> None:
        pages, page_size = python_numbers((pages, page_size), Takes.NUMBERS)
        arguments.check_count("pages", pages)
        arguments.check_count("page_size", page_size)
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    def __repr__(self) -> str:
        return (
            f"PagePool(pages={len(self._users)}, page_size={self.page_size}, free_pages={self.free_pages}, "
            f"sequences={len(self._sequences)})"
        )

    def __copy__(self) -> PagePool:
        """Return an independent pool: two pools that share their lists would hand out a page twice."""
        return copy.deepcopy(self)

    @property
    def free_pages(self) -> int:
        """The number of pages without a sequence."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences of the pool, oldest first."""
        return tuple(self._sequences)

    @frames_hidden
    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        tokens = self._count(tokens)
        return -(-tokens // self.page_size)

    @frames_hidden
    def allocate(self, tokens: int = 0) -> int:
        """Return a new sequence, with pages for so many tokens.

        Raises:
            OutOfPagesError: The pool has too few free pages.
        """
        tokens = self._count(tokens)
        pages = self._take(self.pages_for(tokens))
        return self._add(_Sequence(pages, tokens))

    @frames_hidden
    def fork(self, sequence: int) -> int:
        """Return a new sequence with the same tokens, which shares all pages."""
        own = self._of(sequence)
        for page in own.pages:
            self._users[page] += 1
        return self._add(_Sequence(list(own.pages), own.length))

    @frames_hidden
    def extend(self, sequence: int, tokens: int = 1) -> list[tuple[int, int]]:
        """Add tokens to a sequence, before `append_to_pages` writes them.

        Returns:
            The pages to copy first, `(source, target)`: at most one, if the last page was shared.

        Raises:
            OutOfPagesError: The pool has too few free pages.
        """
        tokens = self._count(tokens)
        own = self._of(sequence)
        last = own.length // self.page_size
        shared = bool(tokens) and own.length % self.page_size > 0 and self._users[own.pages[last]] > 1
        pages = self._take(self.pages_for(own.length + tokens) - len(own.pages) + shared)
        copies = []
        if shared:
            copies = [(own.pages[last], pages[0])]
            self._users[own.pages[last]] -= 1
            own.pages[last] = pages.pop(0)
        own.pages += pages
        own.length += tokens
        return copies

    @frames_hidden
    def free(self, sequence: int) -> None:
        """Remove a sequence; pages that no other sequence shares become free."""
        for page in reversed(self._of(sequence).pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
        del self._sequences[sequence]

    @frames_hidden
    def length(self, sequence: int) -> int:
        """Return the number of a sequence's tokens."""
        return self._of(sequence).length

    @frames_hidden
    def table(self, sequences: Sequence[int], *, columns: int | None = None) -> Table:
        """Return the page table of some sequences, int32 `[sequences, columns]`; unused entries are 0.

        Args:
            sequences: The sequences, one for each row.
            columns: The number of columns; `None`: that of the longest sequence.

        Raises:
            ArgumentError: A sequence has more pages than columns, or is not in the pool.
        """
        check_argument(isinstance(sequences, Iterable), "sequences", "a list of sequences of the pool", sequences)
        is_count = columns is None or (is_integer(columns) and columns >= 0)
        check_argument(is_count, "columns", "an integer >= 0 or None", columns)
        pages = [self._of(sequence).pages for sequence in sequences]
        longest = max(map(len, pages), default=0)
        if columns is not None and columns < longest:
            raise ArgumentError(
                f"columns must be at least {longest}, the pages of the longest sequence; got {columns}."
            )
        found = np.zeros((len(pages), longest if columns is None else columns), np.int32)
        for row, own in zip(found, pages, strict=True):
            row[: len(own)] = own
        return found

    def _add(self, sequence: _Sequence) -> int:
        number, self._next = self._next, self._next + 1
        self._sequences[number] = sequence
        return number

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages are needed, and {len(self._free)} of {len(self._users)} are free; free a sequence, or "
                "make a larger pool."
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def _of(self, sequence: int) -> _Sequence:
        if not is_integer(sequence) or sequence not in self._sequences:
            known = ", ".join(map(str, list(self._sequences)[:8])) + ", ..." * (len(self._sequences) > 8)
            raise ArgumentError(
                f"sequence must be the number of a sequence of the pool ({known or 'it has none'}), got {sequence!r}; "
                "freed sequences have no number."
            )
        return self._sequences[sequence]

    @staticmethod
    def _count(tokens: Any) -> int:
        check_argument(is_integer(tokens) and tokens >= 0, "tokens", "an integer >= 0", tokens)
        return int(tokens)  # sums of small NumPy integers overflow
