# SPDX-License-Identifier: Apache-2.0
"""Heuristics and spaces of the implementations for TPUs, for random calls that they accept."""

from __future__ import annotations

import random

import pytest

from ejkernel.kernels._row_norms.pallas import Pallas
from ejkernel.kernels.flash_attention.common import AttentionCall, Rules
from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu
from ejkernel.kernels.flash_attention.splash import Splash
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.kernels.grouped_matmul.megablox import Megablox, MegabloxActivation, MegabloxWgrad
from ejkernel.kernels.layer_norm.operation import LayerNormCall
from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.tpu_ragged import TpuRagged
from ejkernel.kernels.rms_norm.operation import RmsNormCall

CHIPS = ("tpu:tpu_v5_lite", "tpu:tpu_v5", "tpu:tpu_v6_lite", "tpu:tpu7x", "tpu:tpu_v4", "")


def up_to(dice, power):
    return int(2 ** dice.uniform(0, power))


def attention(dice, place):
    heads, queries = dice.choice((1, 2, 8)), up_to(dice, 17)
    keys, dim = dice.choice((queries, up_to(dice, 17))), dice.randint(1, dice.choice((256, 2048)))
    value_dim = dice.choice((dim, dice.randint(1, 256)))
    sides = dice.choice((None, up_to(dice, 17))), dice.choice((None, 0, up_to(dice, 17)))
    rules = Rules(scale=0.1, left=sides[0], right=sides[1], soft_cap=dice.choice((None, 30.0)))
    return AttentionCall(
        query=(2, queries, heads * dice.choice((1, 4)), dim),
        key=(2, keys, heads, dim),
        value=(2, keys, heads, value_dim),
        rules=rules.at_lengths(queries, keys),
        segments=dice.random() < 0.3,
        backward=dice.random() < 0.5,
        **place,
    )


def groups(dice, place):
    sizes = {"rows": up_to(dice, 21), "inner": up_to(dice, 15), "columns": up_to(dice, 15)}
    count = dice.choice((1, 3, 60, 256, 5000))
    return GroupedMatmulCall(**sizes, groups=count, out_dtype=dice.choice((place["dtype"], "float32")), **place)


def norm(dice, place):
    made = dice.choice((RmsNormCall, LayerNormCall))
    flags = {"residual": dice.random() < 0.5, "backward": dice.random() < 0.5}
    return made(rows=up_to(dice, 21), dim=up_to(dice, 18), eps=1e-6, **flags, **place)


def paged(dice, place):
    kv_heads, table = dice.choice((1, 2, 8, 32)), (dice.choice((1, 32)), up_to(dice, 10))
    q = (up_to(dice, 14), kv_heads * dice.choice((1, 3, 8, 16)), 128)
    pages = (1000, 1 << dice.randint(3, 10), kv_heads, 2, 128)
    return PagedCall(q=q, pages=pages, table=table, cache_dtype=place["dtype"], scale=0.1, **place)


CALLS = {
    Splash: attention,
    PallasTpu: attention,
    Megablox: groups,
    MegabloxWgrad: groups,
    MegabloxActivation: groups,
    Pallas: norm,
    TpuRagged: paged,
}


@pytest.mark.slow
@pytest.mark.parametrize("made", CALLS, ids=lambda made: made.__name__)
def test_calls_are_refused_with_an_alternative_or_the_heuristic_surely_fits(made):
    implementation, dice, accepted = made(), random.Random(25), 0
    for _ in range(150):
        place = {"platform": "tpu", "device_fingerprint": dice.choice(CHIPS)}
        call = CALLS[made](dice, place | {"dtype": dice.choice(("bfloat16", "float32"))})
        if (reason := implementation.unsupported(call)) is not None:
            assert "use 'xla'" in reason
            continue
        accepted += 1
        assert implementation.doubt(call, implementation.heuristic(call)) is None, call
        space = implementation.space(call)
        assert space, call
        assert all(implementation.params_fault(call, params) is None for params in space), call
    assert accepted > 50
