# SPDX-License-Identifier: Apache-2.0
"""The tiles of each block of threads of a persistent forward."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention.common import AttentionCall, Rules
from ejkernel.kernels.flash_attention.mosaic_gpu import plan
from ejkernel.kernels.flash_attention.mosaic_gpu.forward_support import heuristic
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams
from ejkernel.kernels.flash_attention.mosaic_gpu.schedule import longest_share, order_by_length, schedule, tile_work

from .test_mosaic_forward import CAUSAL, Small, assert_close, mosaic, simulated, soon_compiled

pytestmark = pytest.mark.slow
__all__ = ["mosaic", "soon_compiled"]  # fixtures

PERSISTENT = ForwardParams(persistent=True)
FULL = Rules(scale=0.1)


def called(query, rules=CAUSAL, key_heads=1, **more):
    key = (*query[:2], key_heads, query[3])
    return AttentionCall(query=query, key=key, value=key, dtype="bfloat16", rules=rules, platform="gpu", **more)


def planned(query, rules=CAUSAL, params=PERSISTENT):
    return plan.forward_plan(called(query, rules), params)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize(
    ("query", "rules"),
    [
        ((16, 600, 8, 128), CAUSAL),
        ((14, 1650, 8, 64), CAUSAL),
        ((11, 1708, 8, 128), CAUSAL),
        ((64, 1024, 2, 128), CAUSAL),
        ((8, 2048, 8, 64), Rules(scale=0.1, left=1023, right=0)),
    ],
    ids=["short", "narrow", "odd", "many examples", "window"],
)
def test_each_block_of_threads_has_about_the_same_work(query, rules, warpgroups, heads_first):
    params = dataclasses.replace(PERSISTENT, warpgroups=warpgroups, heads_first=heads_first)
    launched = planned(query, rules, params)
    table = schedule(launched)
    assert sorted(table[table < launched.tiles]) == list(range(launched.tiles))
    assert list(table[:, 0]) == list(range(launched.programs))  # where each starts without the table
    assert np.all(table[:, -1] == launched.tiles)
    assert np.all(np.diff(table) >= 0)
    loads = np.append(tile_work(launched), 0)[table].sum(axis=1)
    assert loads.max() / loads.mean() < 1.08


def test_tiles_of_equal_length_are_dealt_in_turns():
    launched = planned((16, 600, 8, 128), FULL)
    table = schedule(launched)
    assert list(table.T.ravel()[: launched.tiles]) == list(range(launched.tiles))


def test_one_tile_for_each_block_of_threads_needs_no_schedule():
    assert schedule(planned((1, 2048, 1, 64))) is None
    assert schedule(planned((16, 600, 8, 128), params=ForwardParams())) is None


@pytest.mark.parametrize("params", [PERSISTENT, dataclasses.replace(PERSISTENT, query_buffers=2)], ids=["1", "2"])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.usefixtures("soon_compiled")
def test_several_blocks_of_threads_compute_all_tiles(mosaic, monkeypatch, params, shares):
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 2)
    params = dataclasses.replace(params, kv_block=32, share_buffer=shares)
    case = Small(queries=300, keys=300, heads=2, rules=CAUSAL)
    assert_close(*simulated(mosaic, case, params))


@pytest.mark.parametrize(
    ("packs", "masks"), [(False, False), (True, False), (False, True)], ids=["alone", "packed heads", "a mask of heads"]
)
@pytest.mark.usefixtures("soon_compiled")
def test_tiles_dealt_by_length_are_all_computed(mosaic, monkeypatch, packs, masks):
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 3)
    params = ForwardParams(persistent=True, query_buffers=2, share_buffer=True, kv_block=32, pack_heads=packs)
    case = Small(batch=2, queries=300, keys=300, heads=4, groups=2, segments=True, rules=CAUSAL)
    case = dataclasses.replace(case, mask=(1, 4, 300, 300)) if masks else case
    assert_close(*simulated(mosaic, case, params))


@pytest.mark.parametrize(("queries", "warpgroups"), [(1024, 2), (1650, 2), (2300, 3), (8192, 3)])
def test_narrow_causal_calls_have_the_tiles_that_take_less_time(queries, warpgroups):
    assert heuristic(called((16, queries, 8, 64), key_heads=8)).warpgroups == warpgroups


@pytest.mark.parametrize(
    ("query", "persistent", "kv_block"),
    [
        ((2, 8192, 8, 64), True, 128),
        ((2, 1024, 16, 128), False, 128),
        ((1, 8192, 16, 160), True, 128),
        ((1, 8192, 16, 192), True, 96),
        ((1, 8192, 16, 256), False, 64),
        ((1, 4096, 8, 192), False, 96),
    ],
    ids=["many tiles", "few tiles", "wide", "wider", "widest", "wide with few tiles"],
)
def test_forwards_with_segments_are_persistent_if_blocks_of_threads_have_several_tiles(query, persistent, kv_block):
    found = heuristic(called(query, key_heads=4, segments=True))
    assert (found.persistent, found.kv_block) == (persistent, kv_block)


def test_tiles_of_unknown_lengths_are_dealt_longest_first():
    rng = np.random.default_rng(0)
    launched = plan.forward_plan(called((3, 1024, 8, 128), segments=True), PERSISTENT)
    assert launched.deals_by_length
    table = rng.integers(0, 9, (3, 1, launched.row_tiles, 4), dtype=np.int32)
    order = np.asarray(order_by_length(launched, jnp.asarray(table), None))
    lengths = (table[..., 3] - table[..., 0]).ravel()
    assert list(order) == list(np.argsort(-lengths, stable=True))


def test_key_lengths_count_under_a_causal_mask():
    lengths = np.array([100, 1024, 500], np.int32)
    launched = plan.forward_plan(called((3, 1024, 64, 128), key_lengths=True), PERSISTENT)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        order = np.asarray(order_by_length(launched, None, jnp.asarray(lengths)))
    seen = np.minimum(np.arange(128, 1025, 128)[None], lengths[:, None])
    assert launched.deals_by_length
    assert list(order) == list(np.argsort(-np.ceil(seen / 128).ravel(), stable=True))


# Without a causal mask the tiles of an example are alike. So many tiles even out, and take long to order.
@pytest.mark.parametrize(
    ("query", "rules", "hides"),
    [
        ((8, 1024, 8, 128), FULL, {"key_lengths": True}),
        ((8, 1024, 8, 128), CAUSAL, {}),
        ((512, 4096, 8, 128), CAUSAL, {"segments": True}),
    ],
    ids=["full", "nothing hidden", "many tiles"],
)
def test_other_tiles_are_dealt_by_the_window_alone(query, rules, hides):
    launched = plan.forward_plan(called(query, rules, **hides), PERSISTENT)
    assert not launched.deals_by_length
    assert schedule(launched) is not None


@pytest.mark.parametrize(("queries", "dim", "shares"), [(512, 64, False), (512, 32, True), (1024, 64, True)])
def test_the_output_of_short_narrow_forwards_has_its_own_buffer(queries, dim, shares):
    assert heuristic(called((64, queries, 16, dim), key_heads=16)).share_buffer is shares


# Four tiles for each block of threads divide unevenly, with the tiles of one head before the next.
@pytest.mark.parametrize(
    ("query", "key_heads", "heads_first"),
    [
        ((1, 8192, 8, 128), 8, False),
        ((2, 4096, 8, 192), 8, False),
        ((1, 8192, 10, 128), 5, True),
        ((1, 8192, 32, 128), 32, True),
    ],
    ids=["uneven", "wide", "even", "many tiles"],
)
def test_causal_tiles_come_by_rows_where_heads_divide_unevenly(query, key_heads, heads_first):
    call = called(query, key_heads=key_heads)
    params = heuristic(call)
    assert (params.persistent, params.heads_first) == (True, heads_first)
    other = dataclasses.replace(params, heads_first=not heads_first)
    gains = longest_share(plan.forward_plan(call, params)) < longest_share(plan.forward_plan(call, other))
    assert gains or plan.forward_plan(call, params).tiles > 6 * plan.MULTIPROCESSORS


@pytest.mark.parametrize(
    ("keys", "dim", "block"),
    [(402, 32, 64), (384, 32, 128), (200, 32, 128), (260, 32, 64), (650, 64, 96), (330, 64, 128), (450, 48, 128)],
)
def test_few_keys_are_computed_in_vain_with_a_bias(keys, dim, block):
    call = called((32, keys, 4, dim), FULL, key_heads=4, bias=(1, 4, keys, keys))
    assert heuristic(call).kv_block == block
