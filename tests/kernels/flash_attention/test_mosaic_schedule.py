# SPDX-License-Identifier: Apache-2.0
"""The tiles of each block of threads of a persistent forward."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ejkernel.kernels.flash_attention.common import AttentionCall, Rules
from ejkernel.kernels.flash_attention.mosaic_gpu import plan
from ejkernel.kernels.flash_attention.mosaic_gpu.forward_support import heuristic
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams
from ejkernel.kernels.flash_attention.mosaic_gpu.schedule import schedule, tile_work

from .test_mosaic_forward import CAUSAL, Small, assert_close, mosaic, simulated, soon_compiled

pytestmark = pytest.mark.slow
__all__ = ["mosaic", "soon_compiled"]  # fixtures

PERSISTENT = ForwardParams(persistent=True)
FULL = Rules(scale=0.1)


def planned(query, rules=CAUSAL, params=PERSISTENT):
    key = (*query[:2], 1, query[3])
    call = AttentionCall(query=query, key=key, value=key, dtype="bfloat16", rules=rules, platform="gpu")
    return plan.forward_plan(call, params)


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


@pytest.mark.parametrize(("queries", "warpgroups"), [(1024, 2), (1650, 2), (2300, 3), (8192, 3)])
def test_narrow_causal_calls_have_the_tiles_that_take_less_time(queries, warpgroups):
    call = AttentionCall(
        query=(16, queries, 8, 64),
        key=(16, queries, 8, 64),
        value=(16, queries, 8, 64),
        dtype="bfloat16",
        rules=CAUSAL,
        platform="gpu",
    )
    assert heuristic(call).warpgroups == warpgroups
