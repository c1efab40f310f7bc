# SPDX-License-Identifier: Apache-2.0
"""The choice between our Hopper kernels and cuDNN, tested on each call of the measured grid without that call."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from benchmarks.attention_cases import case_named
from tests.kernels.attention_cases import call_of

from ejkernel.kernels.flash_attention._few_scores import is_fastest_in_plain_jax
from ejkernel.kernels.flash_attention.common import Rules
from ejkernel.kernels.flash_attention.mosaic_gpu import choice
from ejkernel.modules import FlashAttention

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
NAMES = ("mosaic_gpu", "xla")
MEASURED = list(choice.measured())


@pytest.mark.parametrize("backward", [False, True])
def test_the_choice_without_a_call_is_nearly_the_best_for_it(backward):
    own = [one for one in MEASURED if one.call.backward == backward]
    lost = {"bfloat16": [], "float16": []}
    for call, gain in own:
        chosen = choice.expected_gain(call, without=call) > 0
        # The chosen one's time over the best one's, less 1.
        loss = math.expm1(max(0, -gain if chosen else gain))
        lost[call.dtype].append(loss)
    every = [*lost["bfloat16"], *lost["float16"]]
    assert len(every) >= 100
    assert sum(every) / len(every) <= 0.02
    assert max(lost["bfloat16"]) <= 0.08
    assert max(lost["float16"]) <= 0.09
    assert sum(x == 0 for x in every) / len(every) >= 0.85


def test_a_measured_call_decides_for_itself():
    call, gain = max(MEASURED, key=lambda one: one.gain)
    assert gain > 0.3
    assert choice.expected_gain(call) > 0.1
    assert choice.expected_gain(call, without=call) < choice.expected_gain(call)


def test_calls_outside_of_the_grid_use_the_usual_gain():
    far = dataclasses.replace(MEASURED[0].call, query=(1, 1 << 20, 1, 8))
    assert choice.expected_gain(far) == pytest.approx(0.04, abs=1e-3)


def test_calls_with_few_tiles_use_our_kernels():
    preference = FlashAttention.implementations["mosaic_gpu"].preference
    call = next(one.call for one in MEASURED if one.call.backward and one.gain > 0.2)
    few = dataclasses.replace(call, query=(1, 512, 1, 128), key=(1, 512, 1, 128), value=(1, 512, 1, 128))
    assert [preference(dataclasses.replace(few, backward=x)) for x in (False, True)] == [1, 1]


@pytest.mark.parametrize(("dim", "ours"), [(80, 1), (104, 0), (128, 1)])
def test_one_tile_of_odd_columns_is_left_to_cudnn(dim, ours):
    call = call_of(case_named(f"full B512 T100 H8/8 D{dim}"))
    assert FlashAttention.implementations["mosaic_gpu"].preference(call) == ours


def test_a_bias_of_bfloat16_leaves_room_for_tiles_of_two_warpgroups():
    call = dataclasses.replace(call_of(case_named("causal B4 T2048 H16/16 D128")), bias=(4, 16, 2048, 2048))
    found = [
        FlashAttention.implementations["mosaic_gpu"].heuristic(dataclasses.replace(call, bias_dtype=dtype))
        for dtype in ("bfloat16", "float32")
    ]
    assert [(one.warpgroups, one.kv_block) for one in found] == [(2, 128), (2, 96)]


def test_gradients_of_few_keys_whose_queries_cannot_be_divided_use_cudnn():
    preference = FlashAttention.implementations["mosaic_gpu"].preference
    call = next(one.call for one in MEASURED if one.call.backward and one.gain > 0.2)
    size = {"key": (2, 77, 8, 128), "value": (2, 77, 8, 128), "rules": Rules(scale=1.0)}
    calls = [dataclasses.replace(call, query=(2, count, 8, 128), **size) for count in (4096, 4097)]
    assert [preference(one) for one in calls] == [1, 0]


@pytest.mark.parametrize(("direction", "most"), [("forward", 1.17), ("forward and backward", 1.12)])
def test_few_scores_use_the_faster_of_plain_jax_and_our_kernels(direction, most):
    """The choice loses at most 2 % on average; a single forward may lose what its gradient gains."""
    rows = json.loads((RESULTS / "attention_few_scores_gpu.json").read_text(encoding="utf-8"))[direction]
    ratios, gains = [], []
    for name, row in rows.items():
        case, times = case_named(name), row["us"]
        chosen = {NAMES[is_fastest_in_plain_jax(call_of(case, backward=x))] for x in (False, "backward" in direction)}
        if len(chosen) == 1:  # a forward and a backward by different ones were not measured
            time = times[chosen.pop()]
            ratios.append(time / min(times[name] for name in NAMES))
            gains.append(times["mosaic_gpu"] / time)
    assert len(ratios) >= 75
    assert math.prod(ratios) ** (1 / len(ratios)) <= 1.02
    assert max(ratios) <= most
    assert max(gains) >= 1.8


@pytest.mark.parametrize(
    "change",
    [
        {"platform": "tpu"},
        {"device_fingerprint": "gpu:NVIDIA A100"},
        {"dtype": "float32"},
        {"segments": True},
        {"rules": Rules(scale=1.0, left=31, right=0)},
        {"query": (1, 508, 1, 256), "key": (1, 508, 1, 256), "value": (1, 508, 1, 256)},
        {"examples": 2},
        {"partitioned": True},
    ],
    ids=str,
)
def test_which_calls_with_few_scores_stay_with_kernels(change):
    call = call_of(case_named("causal B1 T512 H1/1 D256"))
    assert is_fastest_in_plain_jax(call)
    assert FlashAttention.implementations["xla"].preference(call) > 1
    assert not is_fastest_in_plain_jax(dataclasses.replace(call, **change))


@pytest.mark.parametrize(
    ("name", "is_fastest"),
    [
        ("full B1 T256 H8/8 D64 float32", True),
        ("full B1 T256 H8/8 D64", False),
        ("full B2 T256 H8/8 D64 float32", False),
        ("full B1 T252 H8/8 D64 float32", False),
        ("full B1 T256 H8/8 D72 float32", False),
        ("full B1 T256 H8/2 D64 float32", False),
        ("causal B1 T64 H4/4 D64 float32", False),
        ("causal B1 T512 H8/8 D64 float32", False),
        ("full B1 T64/4096 H8/8 D64 float32", True),
        ("full B1 T64/128 H8/8 D64 float32", False),
    ],
)
def test_few_scores_of_one_float32_example_use_plain_jax(name, is_fastest):
    assert is_fastest_in_plain_jax(call_of(case_named(name))) == is_fastest


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "name",
    ["full B512 T8 H32/8 D64", "full B1000 T4 H8/8 D104", "full B6272 T49 H3/3 D32 shared bias, mask"],
)
def test_short_sequences_run_in_our_kernels(name, backward):
    case = case_named(name)
    bias = {"bias": (1, case.heads[0], case.seq, case.keys)} if case.shared else {}
    call = call_of(case, backward=backward, **bias)
    assert not is_fastest_in_plain_jax(call)
    ours = FlashAttention.implementations["mosaic_gpu"]
    assert ours.preference(call) > FlashAttention.implementations["xla"].preference(call)
    params = ours.heuristic(call)
    assert params.form == "alone" if backward else params.alone


def test_sinks_make_gradients_in_a_window_slower_by_cudnn():
    """The gradient of the sinks needs row sums of output times cotangent, and cuDNN does not return them."""
    preference = FlashAttention.implementations["mosaic_gpu"].preference
    call = call_of(case_named("causal B64 T1024 H2/2 D128"), backward=True)
    call = dataclasses.replace(call, rules=Rules(scale=1.0, left=127, right=0))
    assert [preference(dataclasses.replace(call, sinks=sinks)) for sinks in (False, True)] == [0, 1]
