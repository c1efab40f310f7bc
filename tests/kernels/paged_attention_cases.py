# SPDX-License-Identifier: Apache-2.0
"""Paged attention under test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject

from ejkernel import compat
from ejkernel.kernels.paged_attention import schedule
from ejkernel.kernels.paged_attention.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.paged_attention.xla import XlaParams
from ejkernel.modules import PagedAttention, paged_plan

PAGE = 4
# New tokens and all tokens of each sequence: none, one, and whole pages among them.
DECODE = ((1, 1), (1, 4), (0, 0), (1, 9), (1, 0), (1, 5))
MIXED = ((5, 5), (1, 13), (0, 7), (6, 8), (3, 12), (1, 1))
# Without prefill, whose other kernels each transformation would simulate, too, for seconds.
FEW = ((1, 13), (0, 7), (1, 12))


def batch_of(
    lengths, *, page=PAGE, tokens=None, heads=(4, 2), head_dim=8, dtype="float32", cache=None, keys_only=False
):
    """Return the positional arguments of a call, with pages in random order."""
    rng = np.random.default_rng(0)
    queries, keys = np.array(lengths).T
    columns = max(1, -(-int(keys.max()) // page)) + 1
    count = len(lengths) * columns + 2
    table = rng.permutation(count)[: len(lengths) * columns].reshape(len(lengths), columns)
    pages = rng.standard_normal((count, page, heads[1], 1 if keys_only else 2, head_dim))
    if cache == "int8":
        pages = np.round(pages * 40).clip(-127, 127)
    q = rng.standard_normal((tokens or int(queries.sum()), heads[0], head_dim))
    offsets = np.concatenate([[0], np.cumsum(queries)])
    integers = (on_device(x, jnp.int32) for x in (table, offsets, keys))
    return on_device(q, dtype), on_device(pages, cache or dtype), *integers


def call_of(lengths, *, scaled=False, sinks=False, planned=False, **options):
    """Return a call of these lengths."""
    shape = {
        name: options.pop(name)
        for name in ("page", "tokens", "heads", "head_dim", "cache", "keys_only")
        if name in options
    }

    def call(dtype):
        args = batch_of(lengths, dtype=dtype, **shape)
        heads, kv_heads = args[0].shape[1], args[1].shape[2]
        given = dict(options)
        if scaled:
            given |= {"k_scale": jnp.linspace(0.02, 0.03, kv_heads), "v_scale": jnp.linspace(0.03, 0.02, kv_heads)}
        if sinks:
            given["sinks"] = jnp.linspace(-1, 1, heads)
        if planned:
            given["plan"] = plan_of(args)
        return args, given

    return call


def plan_of(args, **options):
    """Return the whole schedule of a batch."""
    q, cache, table, offsets, lengths = args
    sizes = {"heads": q.shape[1], "kv_heads": cache.shape[2], "page_size": cache.shape[1]}
    return paged_plan(offsets, lengths, **sizes, tokens=len(q), pages=len(cache), page_table=table, **options)


def in_use(sequences, tokens, pages, *, page=(16, 8, 2, 128), heads=32, **options):
    def call(dtype):
        like = jax.ShapeDtypeStruct
        cache = like((sequences * pages, *page), dtype)
        integers = (like(shape, jnp.int32) for shape in ((sequences, pages), (sequences + 1,), (sequences,)))
        return (like((tokens, heads, page[-1]), dtype), cache, *integers), options

    return call


def simulate_hopper(monkeypatch):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(schedule, "PROGRAMS", 3)
    monkeypatch.setattr(MosaicGpu, "interpret", mosaic_gpu.InterpretGPUParams())


SUBJECT = Subject(
    operation=PagedAttention(),
    calls={
        "decode": call_of(DECODE),
        "mixed": call_of(MIXED, tokens=20, sliding_window=5, logits_soft_cap=3.0, sinks=True),
        "planned": call_of(MIXED, planned=True, return_lse=True, softmax_scale=0.3),
        "int8": call_of(MIXED, page=8, head_dim=64, cache="int8", scaled=True),
        "float8": call_of(DECODE, page=8, head_dim=64, cache="float8_e4m3fn", scaled=True),
        "pages of 8": call_of(FEW, page=8, head_dim=64, tokens=3, sinks=True, sliding_window=5, return_lse=True),
        "prefill": call_of(
            ((1, 13), (0, 7), (3, 12)), page=8, head_dim=64, tokens=6, sinks=True, sliding_window=5, return_lse=True
        ),
        "256 columns": call_of(
            MIXED,
            page=8,
            heads=(8, 1),
            head_dim=256,
            sinks=True,
            sliding_window=5,
            logits_soft_cap=3.0,
            return_lse=True,
        ),
        "80 columns, int8": call_of(MIXED, page=8, heads=(3, 3), head_dim=80, cache="int8", scaled=True),
        "latent": call_of(MIXED, heads=(4, 1), keys_only=True, head_dim=12, value_dim=8),
        "latent, wide": call_of(
            MIXED, page=8, heads=(20, 1), keys_only=True, head_dim=192, value_dim=128, tokens=20, sliding_window=5
        ),
    },
    briefly=("mixed", "pages of 8", "prefill"),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16"), simulate=simulate_hopper, tested_apart=True),
        "xla": Backend(dtypes=("float32", "bfloat16", "float16"), params=(XlaParams(block_pages=2, tiles=2), None)),
        "tpu_ragged": Backend(dtypes=("bfloat16",)),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3},
    spaces={
        "64 decodes": in_use(64, 64, 256),
        "2 decodes of 256 columns": in_use(2, 2, 1024, page=(64, 8, 2, 256), heads=40),
        "prefill": in_use(8, 2048, 64),
    },
    odd={
        "odd decodes": in_use(7, 7, 37, page=(8, 3, 2, 64), heads=21, sliding_window=101),
        "odd decodes, 96 columns": in_use(7, 7, 37, page=(8, 3, 2, 96), heads=15),
        "odd prefill, 80 columns": in_use(5, 333, 37, page=(16, 3, 2, 80), heads=21, sliding_window=101),
        "odd prefill, 256 columns": in_use(5, 333, 37, page=(8, 1, 2, 256), heads=7),
        "odd prefill, latent": in_use(5, 333, 37, page=(8, 1, 1, 320), heads=20, value_dim=256),
    },
)
