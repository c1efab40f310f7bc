# SPDX-License-Identifier: Apache-2.0
"""The estimate of `tpu_ragged`'s vector memory, beside the figures of Google's compiler (libtpu 0.0.48.1)."""

from __future__ import annotations

import pytest

from ejkernel.kernels.paged_attention import _ragged_memory
from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.tpu_ragged import TpuRagged, TpuRaggedParams

V5E, V5P, V6E = "tpu:tpu_v5_lite", "tpu:tpu_v5", "tpu:tpu_v6_lite"


def call_of(chip, dtype, heads, tokens, page, table, **more):
    sizes = {"q": (tokens, heads[0], 128), "pages": (2048, page, heads[1], 2, 128), "table": table}
    return PagedCall(
        **sizes, dtype=dtype, cache_dtype=dtype, scale=0.1, platform="tpu", device_fingerprint=chip, **more
    )


@pytest.mark.parametrize(
    ("chip", "dtype", "heads", "tokens", "page", "table", "taken"),
    [
        (V5E, "float32", (40, 8), 256, 128, (256, 8), 9_486_336),
        (V6E, "bfloat16", (8, 4), 512, 64, (8, 32), 3_473_408),
        (V5E, "bfloat16", (32, 8), 64, 16, (8, 128), 10_895_360),
    ],
)
def test_the_estimate_of_common_heads_and_blocks_is_the_compilers_figure(
    chip, dtype, heads, tokens, page, table, taken
):
    call, implementation = call_of(chip, dtype, heads, tokens, page, table), TpuRagged()
    params = implementation.heuristic(call)
    assert _ragged_memory.is_listed(call, params)
    need = _ragged_memory.memory(call, params)
    assert need.least <= taken <= need.most <= 1.025 * taken
    capped = _ragged_memory.memory(call_of(chip, dtype, heads, tokens, page, table, soft_cap=30.0), params)
    assert taken < need.most < capped.most <= 1.055 * taken


def test_a_soft_cap_takes_more_of_kernels_with_many_registers():
    call = call_of(V6E, "bfloat16", (16, 4), 2048, 64, (8, 32), window=99, soft_cap=9.0)
    params = TpuRaggedParams(block_pages=16, block_queries=128)
    assert _ragged_memory.is_listed(call, params)
    assert 20_844_544 <= _ragged_memory.memory(call, params).most <= 1.1 * 20_844_544


@pytest.mark.parametrize(
    ("chip", "dtype", "heads", "tokens", "page", "pages", "taken"),
    [
        (V5E, "bfloat16", (16, 1), 20, 32, 5, 1_355_776),
        (V6E, "bfloat16", (32, 8), 13, 16, 3, 2_011_136),
        (V5P, "float32", (16, 2), 13, 16, 17, 2_191_360),
        (V5P, "bfloat16", (4, 2), 5, 16, 12, 503_808),
        (V5E, "bfloat16", (64, 8), 20, 64, 8, 10_973_184),
    ],
)
def test_blocks_between_those_of_the_table_are_interpolated(chip, dtype, heads, tokens, page, pages, taken):
    call = call_of(chip, dtype, heads, tokens, page, (8, pages))
    params = TpuRaggedParams(block_pages=pages, block_queries=tokens)
    assert not _ragged_memory.is_listed(call, params)
    assert taken <= _ragged_memory.memory(call, params).most <= 1.2 * taken


def test_other_heads_have_a_weighted_sum():
    call = call_of(V5E, "bfloat16", (72, 24), 64, 16, (8, 64))
    assert _ragged_memory.form_of_heads(call).endswith("heads 72/24")
    need = _ragged_memory.memory(call, TpuRaggedParams(block_pages=8, block_queries=8))
    assert need.least < need.most
