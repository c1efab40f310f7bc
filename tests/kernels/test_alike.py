# SPDX-License-Identifier: Apache-2.0
"""Compiled code similar to that of a TPU kernel."""

from __future__ import annotations

import pytest

from ejkernel.kernels._alike import Alike, Likeness, kind_of, tile_of, views_of

LOOP = "tpu:tpu_v5_lite, fused, 1/1, block 1024, loop, tile 1024/512, unroll 1"
SPLASH = "tpu:tpu_v5_lite, splash keys, 1/1, blocks 512/1024/256; right edge"


def common(name):
    return {view: text for view, text, _ in views_of(name)}


@pytest.mark.parametrize(
    ("one", "other", "view"),
    [
        (SPLASH, SPLASH.replace("right edge", "ids"), "details"),
        (SPLASH, SPLASH.replace("/1024/", "/4096/"), "keys"),
        (SPLASH, SPLASH.replace("; ", ", left edge, ids and mask; "), "mask"),
        (SPLASH, SPLASH.replace("v5_lite", "v6_lite"), "chip"),
        (SPLASH, SPLASH.replace("512/1024/256", "256/512/512"), "area"),
        (SPLASH.replace("1/1", "2/1"), SPLASH, "dimensions"),
        ("tpu:tpu_v5, splash forward, 1/1, blocks 512/1024/256",) * 2 + ("area",),
        (LOOP, f"{LOOP}, transposed", "unroll"),
        (LOOP, LOOP.replace("loop", "ids, loop"), "ids"),
        (LOOP, LOOP.replace("/512", "/1024"), "chunk"),
        (f"{LOOP}, edges 2", LOOP, "edges"),
        ("tpu:tpu_v5, queries, 2/2, partial, block 128, strip 128",) * 2 + ("dimensions",),
    ],
)
def test_code_that_differs_in_what_a_view_leaves_out_has_it_in_common(one, other, view):
    assert common(one)[view] == common(other)[view]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SPLASH, SPLASH.replace("keys", "query")),
        (LOOP, LOOP.replace("1/1", "2/2, partial")),
        (SPLASH, SPLASH.replace("1/1", "1/1, float32")),
        (SPLASH, SPLASH.replace("; ", ", capped; ")),
        (SPLASH.replace("v5_lite", "v4"), SPLASH),
        (LOOP, LOOP.replace("fused", "keys")),
        (LOOP, LOOP.replace("tile 1024", "tile 512")),
        (LOOP.replace("fused", "forward"), LOOP.replace("fused", "forward").replace("unroll 1", "unroll 4")),
        ("tpu:tpu_v5, fused, 1/1, block 128, strip 128, no loop", "tpu:tpu_v5, fused, 1/1, block 128, strip 128"),
    ],
)
def test_other_code_has_nothing_in_common(one, other):
    assert not common(one).items() & common(other).items()


def test_a_block_of_keys_matters_to_the_forward_of_splash():
    one = SPLASH.replace("splash keys", "splash forward")
    assert not common(one).items() & common(one.replace("/1024/", "/4096/")).items()


def test_code_of_chips_with_few_kernels_may_differ_in_details_alone():
    assert common(SPLASH.replace("v5_lite", "v4")).keys() == {"details"}
    assert not common(LOOP.replace("tpu_v5_lite", "tpu7x"))


def test_kinds_and_tiles_of_code():
    assert kind_of(LOOP) == "fused, loop"
    assert kind_of("tpu:tpu_v5, fused, 1/1, block 512, strip 128, no loop, one block") == "fused, no loop"
    assert kind_of("tpu:tpu_v5, fused, 1/1, block 512, strip 128") == "fused, strip"
    assert kind_of("tpu:tpu_v5, fused, 1/1, block 512, ids, strip 128") == "fused, strip, ids"
    assert kind_of(SPLASH) == "splash keys"
    assert kind_of(LOOP.replace("loop", "ids, loop")) == "fused, loop"
    assert [tile_of(name) for name in (LOOP, SPLASH, "tpu:tpu_v5, fused, 1/1, block 512, strip 128")] == [512, 128, 64]
    assert tile_of("tpu:tpu_v5, fused, 1/1, block 512") == 1


def test_the_first_view_with_code_has_the_most_registers_and_the_margin():
    near, far = SPLASH.replace("/1024/", "/2048/"), SPLASH.replace("v5_lite", "v6_lite")
    table = {near: [100, 0], near.replace("right edge", "ids"): [110, 0], far: [90, 0], f"{LOOP} with {LOOP}": [500]}
    margins = {"splash keys": {"details of 1": 1.05, "keys of 1": 1.06, "chip of 2": 1.08}}
    assert Likeness(table, margins)(SPLASH) == Alike((110.0, 0.0), 1.06)
    assert Likeness({far: [90, 0]}, margins)(SPLASH) is None  # one with another chip has no margin
    assert Likeness(table, {})(SPLASH) is None


def test_code_of_narrower_heads_does_not_count():
    margins = {"splash keys": {"dimensions of 1": 1.1}}
    narrow, wide = SPLASH, SPLASH.replace("1/1", "2/1")
    assert Likeness({narrow: [100, 0]}, margins)(wide) is None
    assert Likeness({wide: [100, 0]}, margins)(narrow) == Alike((100.0, 0.0), 1.1)


def test_registers_count_in_proportion_to_a_tile_that_a_view_leaves_out():
    margins = {"fused, loop": {"chunk of 1": 1.01, "chunk of 2": 1.04, "chunk of 3": 1.02}}
    table = {LOOP: [200]}
    asked = LOOP.replace("/512", "/1024")
    assert Likeness(table, margins)(asked) is None  # one piece of code does not tell how they grow
    table[LOOP.replace("/512", "/128")] = [40]
    assert Likeness(table, margins)(asked) == Alike((400.0,), 1.04)
    table |= {LOOP.replace("/512", f"/{size}"): [size // 2] for size in (128, 256, 2048)}
    assert Likeness(table, margins)(asked) == Alike((512.0,), 1.02)  # more code is surer
