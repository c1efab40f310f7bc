# SPDX-License-Identifier: Apache-2.0
"""Paged attention by the ragged kernel that JAX ships for TPUs.

Its cache has keys and values of each head in alternating rows: ours, with two axes joined. It does not write the rows
of padding, and a sequence without new tokens would end its loop: this module moves those last, and clears the rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels._vector_memory import LANES, limit_of, up, usual_of
from ejkernel.ops.config.published import Facts, PublishedTable
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields
from ejkernel.ops.utils.values.signature import is_known

from ._ragged_memory import PACKING, heads_of_block, memory
from .common import Operands, PagedCall, valid, within_cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TpuRaggedParams(NamedFields):
    """The blocks of the kernel.

    Attributes:
        block_pages: Pages copied to vector memory at once.
        block_queries: Tokens per block of queries.
    """

    block_pages: int = 8
    block_queries: int = 32

    def __post_init__(self) -> None:
        for name in ("block_pages", "block_queries"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}.")


class _OfJax(PublishedTable):
    """The table of the installed JAX, for sizes rounded up to powers of two."""

    def read(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """See `PublishedTable`."""
        names = ("heads", "kv_heads", "head_dim", "page", "tokens", "length")
        rows = [
            {
                "call": dict(zip(names, sizes, strict=True)) | {"device": device, "dtype": dtype},
                "params": {"block_pages": pages, "block_queries": queries},
            }
            for device, (dtype, cache_dtype, *sizes), (pages, queries) in compat.kernels.tuned_ragged_blocks()
            if dtype == cache_dtype
        ]
        return {f"JAX {jax.__version__}": rows}


class TpuRagged(Implementation[PagedCall]):
    """JAX's ragged paged attention, on TPUs."""

    name = "tpu_ragged"
    params = TpuRaggedParams
    published = _OfJax("tpu_ragged")

    def published_as(self, call: PagedCall) -> Facts | None:
        """Return the sizes that JAX's table rounds."""
        heads, kv_heads = heads_of_block(call)
        page = call.pages[1]
        sizes = {"heads": heads, "kv_heads": kv_heads, "page": page, "tokens": call.q[0]}
        sizes["length"] = page * call.table[1]
        rounded = {name: 1 << (size - 1).bit_length() for name, size in sizes.items()}
        return {**rounded, "head_dim": up(call.pages[4]), "dtype": call.dtype}

    def unsupported(self, call: PagedCall) -> str | None:
        """Return why the kernel does not support the call, with an alternative; `None` if it does."""
        if call.platform not in (None, "tpu"):
            return f"implementation='tpu_ragged' needs a TPU, and this call is for {call.place}; use 'xla'."
        sizes = (*call.q, *call.pages, *call.table)
        if not is_known(*sizes) or 0 in sizes:
            return "'tpu_ragged' needs sizes that are known and not 0; use 'xla'."
        if call.dtype not in PACKING or call.cache_dtype != call.dtype:
            return (
                f"'tpu_ragged' takes queries and cache of one dtype, bfloat16 or float32, got {call.dtype} and "
                f"{call.cache_dtype}; use 'xla'."
            )
        given = {"sinks": call.sinks, "k_scale and v_scale": call.scales, "return_lse": call.return_lse}
        given |= {"value_dim": call.value_dim is not None}
        for name, is_given in given.items():
            if is_given:
                return f"{name}: not available with implementation='tpu_ragged'; use 'xla'."
        if (reason := _layout_reason(call)) is None and self.doubt(call, self.heuristic(call)) is not None:
            return f"'tpu_ragged' has no blocks that fit in vector memory for pages of {call.pages}; use 'xla'."
        return reason

    def params_fault(self, call: PagedCall, params: TpuRaggedParams) -> str | None:
        """Return why these blocks exceed the memory of a TPU; `None` if they may fit."""
        return memory(call, params).fault(limit_of(call), call)

    def doubt(self, call: PagedCall, params: TpuRaggedParams) -> str | None:
        """See `Implementation`."""
        return memory(call, params).doubt(usual_of(call), call)

    def preference(self, call: PagedCall) -> int:
        """Rank behind `xla`: no TPU has measured this kernel for us."""
        return -1

    def heuristic(self, call: PagedCall) -> TpuRaggedParams:
        """Return blocks of about 512 keys, or fewer if they do not fit in memory."""
        pages, queries = max(1, min(call.table[1], 512 // call.pages[1])), min(32, call.q[0])
        smaller = [(max(1, pages >> power), queries) for power in range(pages.bit_length())]
        smaller += [(1, max(1, queries >> power)) for power in range(1, 3)]
        found = [TpuRaggedParams(block_pages=pages, block_queries=queries) for pages, queries in smaller]
        return next((params for params in found if self.doubt(call, params) is None), found[-1])

    def space(self, call: PagedCall) -> list[TpuRaggedParams]:
        """Return the blocks that may fit in memory and are not larger than the call."""
        pages = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= call.table[1]]
        queries = [size for size in (8, 16, 32, 64, 128) if size <= call.q[0]] or [call.q[0]]
        found = [TpuRaggedParams(block_pages=p, block_queries=q) for p, q in itertools.product(pages, queries)]
        fitting = [params for params in found if self.params_fault(call, params) is None]
        return list(dict.fromkeys((self.heuristic(call), *fitting)))

    def forward(self, call: PagedCall, /, *args: Any, params: TpuRaggedParams) -> tuple[Any, Any]:
        """Return the output."""
        operands = valid(call, args)
        blocks = (min(params.block_pages, call.table[1]), params.block_queries)

        def run(q: Any, pages: Any, table: Any, offsets: Any, lengths: Any) -> Any:
            own = operands._replace(q=q, kv_pages=pages, page_table=table, query_offsets=offsets, kv_lengths=lengths)
            return _attention(call, own, blocks)

        return one_by_one(run, *operands[:5]), ()


def _attention(call: PagedCall, operands: Operands, blocks: tuple[int, int]) -> jax.Array:
    offsets = operands.query_offsets
    count = jnp.diff(offsets)
    # Tokens keep their order, because a sequence without new tokens has none.
    order = jnp.argsort(count == 0, stable=True)
    pages, size, kv_heads, kinds, head_dim = call.pages
    out = compat.kernels.tpu_ragged_paged_attention(
        operands.q,
        operands.kv_pages.reshape(pages, size, kv_heads * kinds, head_dim),
        jnp.maximum(operands.kv_lengths, count)[order],
        within_cache(call, operands.page_table)[order],
        jnp.concatenate([jnp.zeros_like(offsets[:1]), jnp.cumsum(count[order], dtype=jnp.int32)]),
        jnp.sum(count > 0, dtype=jnp.int32)[None],
        scale=call.scale,
        window=None if call.window is None else call.window + 1,  # the kernel counts the query's own key
        soft_cap=call.soft_cap,
        blocks=blocks,
    )
    token = jnp.arange(call.q[0], dtype=jnp.int32)
    sequence = jnp.clip(jnp.searchsorted(offsets, token, side="right") - 1, 0, call.table[0] - 1)
    position = operands.kv_lengths[sequence] - (offsets[sequence + 1] - token)
    seen = (token >= offsets[0]) & (token < offsets[-1]) & (position >= 0)
    return jnp.where(seen[:, None, None], out, 0)


def _layout_reason(call: PagedCall) -> str | None:
    (_, heads, head_dim), packing = call.q, PACKING[call.dtype]
    if head_dim != LANES:
        return f"'tpu_ragged' needs a head_dim of {LANES}, got {head_dim}; pad a smaller one, or use 'xla'."
    for name, count in (("kv_heads", 2 * call.pages[2]), ("heads", heads)):
        tiles = count // packing
        if count % packing or not (tiles in (1, 2, 4, 8) or tiles % 8 == 0):
            return f"'tpu_ragged' cannot tile {name}={count if name == 'heads' else count // 2}; use 'xla'."
    if (block := heads_of_block(call)[0]) != heads and block % 8:
        return f"'tpu_ragged' cannot tile {heads} heads by {block} in {call.dtype}; use 'xla'."
    if call.pages[1] * 2 * call.pages[2] % (8 * packing):
        return f"'tpu_ragged' cannot tile pages of {call.pages[1]} tokens with {call.pages[2]} heads; use 'xla'."
    if call.partitioned:
        return "'tpu_ragged' in a program that XLA partitions would gather the cache; use 'xla'."
    return None
