# SPDX-License-Identifier: Apache-2.0
"""The batches that `benchmarks.paged_attention` times."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ejkernel.modules import PagedPlan, paged_plan

OURS, PLAN, UNPLANNED = "mosaic_gpu", "paged_plan", "mosaic_gpu, no plan"
CUDNN, FLASH = "cudnn, contiguous", "flash_attention, contiguous"
PLAIN = "plain JAX, contiguous"
SPREAD = 40  # the standard deviation of int8 numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: keys and new tokens of each sequence, and the heads."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...] | None = None  # None: one each
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    cache: str = "bfloat16"  # with 8 bits, of scaled keys and values
    options: tuple[tuple[str, Any], ...] = ()
    pages: tuple[int, ...] = (16, 64)
    value_dim: int | None = None  # of latent attention: a cache of keys alone
    contenders: tuple[str, ...] = ("xla", CUDNN)
    stages: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()  # tokens of the blocks of `xla`, which takes all sequences at once

    @property
    def scales(self) -> dict[str, Any]:
        """Scales of keys and values."""
        if self.cache == "bfloat16":
            return {}
        unit = 1 / SPREAD if self.cache == "int8" else 1.0
        return {"k_scale": unit} | ({"v_scale": unit / 2} if self.value_dim is None else {})

    @property
    def value_scale(self) -> float:
        """The factor on values."""
        scale: float = self.scales.get("v_scale" if self.value_dim is None else "k_scale", 1.0)
        return scale

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a call, without scales."""
        return dict(self.options) | ({} if self.value_dim is None else {"value_dim": self.value_dim})

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each sequence."""
        return self.queries or (1,) * len(self.lengths)


def _ragged(count: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(7).integers(low, high + 1, count).tolist())


def _latent(count: int, length: int, heads: int, pages: tuple[int, ...] = (64,), **others: Any) -> Case:
    """Return absorbed latent attention, in decode unless said, with 512 values and 64 further elements of a key."""
    return Case(
        lengths=(length,) * count,
        heads=(heads, 1),
        head_dim=576,
        value_dim=512,
        options=(("softmax_scale", 192**-0.5),),
        pages=pages,
        **{"contenders": ("xla", PLAIN)} | others,
    )


CASES = {
    "64 x 4k": Case(lengths=(4096,) * 64, stages=(2, 3, 4)),
    "64 x 4k, float8": Case(lengths=(4096,) * 64, cache="float8_e4m3fn", contenders=(), stages=(2, 4, 6)),
    "64 x 4k, int8": Case(lengths=(4096,) * 64, cache="int8", contenders=(), stages=(2, 4, 6)),
    "256 x 1k": Case(lengths=(1024,) * 256, contenders=(CUDNN,)),
    "64 x 4k, 64/8, D64": Case(lengths=(4096,) * 64, heads=(64, 8), head_dim=64, contenders=(CUDNN,), stages=(5,)),
    "128 ragged": Case(lengths=_ragged(128, 128, 8192), contenders=(CUDNN,)),
    "8 x 32k": Case(lengths=(32768,) * 8, contenders=(CUDNN,)),
    "1 x 128k": Case(lengths=(131072,), contenders=(CUDNN,)),
    "64 x 4k, window 1024": Case(lengths=(4096,) * 64, options=(("sliding_window", 1023),), contenders=(), pages=(64,)),
    "64 x 4k, 4 tokens each": Case(lengths=(4096,) * 64, queries=(4,) * 64, contenders=(), pages=(64,), stages=(4, 5)),
    "64 x 4k, MLA": _latent(64, 4096, 128, (16, 64)),
    "64 x 4k, MLA, 64 heads": _latent(64, 4096, 64),
    "64 x 4k, MLA, 16 heads": _latent(64, 4096, 16),
    "8 x 32k, MLA": _latent(8, 32768, 128),
    "1 x 128k, MLA": _latent(1, 131072, 128),
    "256 x 1k, MLA": _latent(256, 1024, 128),
    "64 x 4k, MLA, 2 tokens each": _latent(64, 4096, 128, queries=(2,) * 64, contenders=(UNPLANNED, "xla")),
    "64 x 4k, MLA, int8": _latent(64, 4096, 128, cache="int8", contenders=("xla",)),
    "chunk of 8192": Case(lengths=(8192,), queries=(8192,), contenders=(FLASH,)),
    "4 chunks of 2048": Case(lengths=(2048,) * 4, queries=(2048,) * 4, contenders=(FLASH,), pages=(16, 64)),
    "4 chunks of 2048, 64/8, D64": Case(
        lengths=(2048,) * 4, queries=(2048,) * 4, heads=(64, 8), head_dim=64, contenders=(FLASH,)
    ),
    "chunk of 8192, window 1024": Case(
        lengths=(8192,), queries=(8192,), options=(("sliding_window", 1023),), contenders=(FLASH,)
    ),
    "64 x 4k and chunks": Case(
        lengths=(4096,) * 64 + (4096, 512), queries=(1,) * 64 + (1024, 512), contenders=(), pages=(64,)
    ),
    "the chunks alone": Case(lengths=(4096, 512), queries=(1024, 512), contenders=(), pages=(64,)),
    "64 x 4k and chunks, int8": Case(
        lengths=(4096,) * 64 + (4096, 512),
        queries=(1,) * 64 + (1024, 512),
        cache="int8",
        contenders=("xla",),
        pages=(64,),
    ),
    "4 chunks of 2048, float8": Case(
        lengths=(2048,) * 4, queries=(2048,) * 4, cache="float8_e4m3fn", contenders=("xla",), pages=(64,)
    ),
    "2 x 64k, 40/8, D256": Case(
        lengths=(65536,) * 2,
        heads=(40, 8),
        head_dim=256,
        contenders=("xla",),
        stages=(2,),
        blocks=(512, 1024, 2048, 4096, 8192),
    ),
    "8 x 2k, 40/8, D256": Case(
        lengths=(2048,) * 8, heads=(40, 8), head_dim=256, contenders=("xla",), blocks=(512, 1024, 2048)
    ),
    "64 x 4k, 16/8, D256": Case(lengths=(4096,) * 64, heads=(16, 8), head_dim=256, contenders=("xla",), stages=(2,)),
    "64 x 4k, 16/8, D256, int8": Case(
        lengths=(4096,) * 64, heads=(16, 8), head_dim=256, cache="int8", contenders=(), stages=(2, 3, 4)
    ),
    "64 x 2k, 32/32, D96": Case(lengths=(2048,) * 64, heads=(32, 32), head_dim=96, contenders=("xla",), stages=(3,)),
    "64 x 4k, 64/8, D64, int8": Case(
        lengths=(4096,) * 64, heads=(64, 8), head_dim=64, cache="int8", contenders=(), stages=(4,)
    ),
    "4 chunks of 2048, 16/8, D256": Case(
        lengths=(2048,) * 4, queries=(2048,) * 4, heads=(16, 8), head_dim=256, contenders=(FLASH, "xla")
    ),
    "4 chunks of 2048, 32/32, D96": Case(
        lengths=(2048,) * 4, queries=(2048,) * 4, heads=(32, 32), head_dim=96, contenders=(FLASH, "xla")
    ),
    "16 x 512": Case(lengths=(512,) * 16, contenders=(CUDNN,), pages=(64,)),
    "tiny": Case(lengths=(40, 7), pages=(16,), contenders=("xla",)),
}


def plan_of(*args: jax.Array, window: int | None) -> PagedPlan:
    """Return the whole schedule of a batch."""
    q, cache, table, offsets, lengths = args
    (pages, page_size, kv_heads), heads = cache.shape[:3], q.shape[1]
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "page_size": page_size, "sliding_window": window}
    return paged_plan(offsets, lengths, **sizes, tokens=len(q), pages=pages, page_table=table)
