# SPDX-License-Identifier: Apache-2.0
"""The heuristic and the search space of paged attention in plain JAX."""

from __future__ import annotations

import dataclasses

import pytest

from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.xla import Xla


def call_of(sequences, length, *, page=64, kv_heads=8, head_dim=256, platform="gpu"):
    """Return a decode."""
    columns = length // page
    return PagedCall(
        q=(sequences, 5 * kv_heads, head_dim),
        pages=(sequences * columns, page, kv_heads, 2, head_dim),
        table=(sequences, columns),
        dtype="bfloat16",
        cache_dtype="bfloat16",
        scale=head_dim**-0.5,
        platform=platform,
    )


def sizes_of(call):
    params = Xla().heuristic(call)
    return params.block_pages * call.pages[1], params.tiles


@pytest.mark.parametrize(
    ("sequences", "length", "sizes"),
    [(2, 65536, (2048, 2)), (8, 2048, (1024, 8)), (64, 4096, (512, 8)), (1, 131072, (2048, 1)), (2, 256, (256, 2))],
)
def test_few_sequences_have_long_blocks(sequences, length, sizes):
    """The first two are measured; a table with fewer columns than a block limits the last."""
    assert sizes_of(call_of(sequences, length)) == sizes


def test_prefill_and_short_windows_have_short_blocks():
    decode = call_of(4, 8192)
    assert sizes_of(decode) == (2048, 4)
    assert sizes_of(dataclasses.replace(decode, window=127)) == (512, 4)
    assert sizes_of(dataclasses.replace(decode, window=1500)) == (1024, 4)
    assert sizes_of(dataclasses.replace(decode, q=(8192, *decode.q[1:]))) == (512, 4)


def test_a_cpu_takes_one_tile_with_a_block_that_fits_in_its_caches():
    assert sizes_of(call_of(2, 65536, platform="cpu")) == (512, 1)


@pytest.mark.parametrize("sequences", [1, 2, 16])
def test_the_space_has_blocks_of_up_to_8192_tokens_as_far_as_all_tiles_fit_in_memory(sequences):
    call = call_of(sequences, 65536)
    space = Xla().space(call)
    assert Xla().heuristic(call) in space
    assert len(space) == len(set(space))
    bytes_of_token = 4 * 8 * 2 * 256
    tokens = [(64 * own.block_pages, own.tiles) for own in space]
    assert max(tokens)[0] == 8192
    assert max(count * own for own, count in tokens) * bytes_of_token == min(sequences * 8192 * bytes_of_token, 2**28)
