# SPDX-License-Identifier: Apache-2.0
"""Our forward for Hopper: simulated on a CPU, lowered for CUDA without a GPU, and refused where it cannot run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.attention_cases import Case, by_reference

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, Operands, Rules, describe, within_window
from ejkernel.kernels.flash_attention.mosaic_gpu import plan
from ejkernel.kernels.flash_attention.mosaic_gpu.forward_support import (
    heuristic,
    params_fault,
    space,
    unsupported_reason,
)
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams
from ejkernel.kernels.flash_attention.mosaic_gpu.visibility import block_table, window_blocks, window_origin
from ejkernel.ops import ConfigError

pytestmark = pytest.mark.slow

CAUSAL = Rules(scale=0.2, right=0)
LATE_CAP = Rules(scale=0.2, soft_cap=2.0, cap_after_bias=True)
REPEATED = pytest.mark.whole  # each feature is also part of another case
ONE = ForwardParams(kv_block=32, warpgroups=1)
TWO = ForwardParams(kv_block=32)
TWO_TILES = ForwardParams(kv_block=32, warpgroups=1, persistent=True, query_buffers=2)
SHARED = dataclasses.replace(TWO_TILES, warpgroups=2, share_buffer=True, kv_block=64)
HOLDING = dataclasses.replace(TWO_TILES, kv_block=64, share_buffer=True)  # at head_dim 128 or more
PACKED = ForwardParams(kv_block=32, pack_heads=True, share_buffer=True)
Small = functools.partial(Case, batch=1, queries=70, keys=70, heads=1, groups=1)


@pytest.fixture
def mosaic():
    """The module of the kernel, where it can be imported."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


@pytest.fixture
def soon_compiled():
    """What is simulated is compiled as fast as can be: it runs once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """A persistent launch has one block of threads, which takes all tiles."""
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 1)


def described(case, dtype="bfloat16"):
    operands = case.types(dtype)
    return describe(operands, case.rules, platform="gpu", fingerprint="gpu:nvidia_h200")


def simulated(mosaic, case, params, dtype="bfloat16", operands=None):
    """Return the forward's results, simulated, and those of the reference."""
    from ejkernel.kernels.flash_attention.mosaic_gpu.launch import forward

    operands = case.operands(dtype) if operands is None else operands
    call = describe(operands, case.rules, platform="gpu", fingerprint="gpu:nvidia_h200")
    assert (unsupported_reason(call), params_fault(call, params)) == (None, None)
    # Of buffers that share memory, the detector tells no parts apart.
    interpret = mosaic.InterpretGPUParams(detect_races=not params.share_buffer)
    run = functools.partial(forward, rules=case.rules, params=params, interpret=interpret)
    found = jax.block_until_ready(jax.jit(run)(operands))
    return found, by_reference(operands, case.rules)


def assert_close(found, expected, dtype="bfloat16"):
    (out, lse), (wanted, wanted_lse) = found, expected
    assert out.dtype == dtype
    assert out.shape == wanted.shape
    out, wanted = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
    assert np.linalg.norm(out - wanted) <= 5e-3 * np.linalg.norm(wanted)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "params"),
    [
        (Small(heads=2, value_dim=24), TWO),
        (Small(heads=2, rules=CAUSAL), TWO_TILES),
        (
            Small(keys=90, rules=Rules(scale=0.2, left=20, right=3, soft_cap=2.0)),
            dataclasses.replace(ONE, overlap=False),
        ),
        (Small(heads=2, segments=True, rules=CAUSAL), PACKED),
        (Small(bias=(1, 1, 70, 70), mask=(1, 1, 70, 70)), ONE),
        pytest.param(Small(batch=2, bias=(1, 1, 1, 70), mask=(2, 1, 1, 70)), ONE, marks=REPEATED),
        (Small(heads=2, bias=(1, 2, 1, 70)), ONE),
        (Small(batch=2, bias=(1, 1, 70, 70), mask=(2, 1, 1, 70)), dataclasses.replace(ONE, kv_block=64)),
        (Small(bias=(1, 1, 70, 1), mask=(1, 1, 70, 1), head_dim=20), ONE),
        (Small(heads=2, rules=Rules(scale=0.2, right=0, dropout_rate=0.3)), TWO),
        pytest.param(Small(bias=(1, 1, 70, 70), mask=(1, 1, 1, 70), rules=LATE_CAP), ONE, marks=REPEATED),
        (Small(bias=(1, 1, 70, 1), rules=LATE_CAP), ONE),
        (Small(queries=72, keys=72, heads=2, head_dim=64, value_dim=64, rules=CAUSAL), TWO),
        (Small(head_dim=112, value_dim=72, rules=CAUSAL), TWO),
        (Small(queries=150, heads=2, head_dim=88, value_dim=72), dataclasses.replace(TWO_TILES, warpgroups=2)),
        (
            Small(queries=150, heads=2, head_dim=80, value_dim=80),
            SHARED,
        ),
        (Small(heads=2, head_dim=112, value_dim=72), SHARED),
        pytest.param(Small(heads=2, head_dim=72, value_dim=88), SHARED, marks=REPEATED),
        pytest.param(Small(queries=72, keys=72, heads=2, head_dim=64, value_dim=48), SHARED, marks=REPEATED),
        (Small(heads=2, rules=Rules(scale=0.2, left=15, right=2)), dataclasses.replace(PACKED, kv_block=96)),
        (Small(keys=130), dataclasses.replace(ONE, fma_columns=16)),
        (Small(heads=2, head_dim=136, value_dim=136, rules=Rules(scale=0.2, left=15, right=0)), TWO_TILES),
        (Small(queries=72, keys=72, heads=2, head_dim=128, value_dim=128), HOLDING),
        (Small(queries=72, keys=72, heads=2, head_dim=192, value_dim=192, rules=CAUSAL), HOLDING),
        (Small(heads=2, head_dim=184, value_dim=184), HOLDING),
        (Small(heads=2, head_dim=24, value_dim=40, rules=CAUSAL), dataclasses.replace(TWO, align_keys=True)),
        pytest.param(
            Small(heads=2, head_dim=104, value_dim=104), dataclasses.replace(SHARED, align_keys=True), marks=REPEATED
        ),
        (Small(keys=90, heads=2), dataclasses.replace(ONE, key_parts=3)),
    ],
    ids=[
        "full",
        "causal",
        "window, soft cap",
        "segments",
        "bias and mask",
        "bias and mask of keys",
        "bias of keys",
        "mask of keys in the dtype of the bias",
        "of rows",
        "dropout",
        "soft cap after bias",
        "soft cap after bias of rows",
        "whole tiles",
        "pieces of columns",
        "warpgroup without queries",
        "pieces of columns in a shared buffer",
        "fewer columns of the output in a shared buffer",
        "more columns of the output in a shared buffer",
        "whole tiles in a shared buffer of another width",
        "window in one block",
        "polynomial exponentials",
        "wide heads in a window",
        "queries in registers",
        "whole tiles, some queries in registers",
        "pieces of columns, some queries in registers",
        "aligned keys",
        "aligned keys beside a shared buffer",
        "parts of the keys",
    ],
)
@pytest.mark.usefixtures("soon_compiled", "one_multiprocessor")
def test_output_and_lse_match_reference(mosaic, case, params):
    assert_close(*simulated(mosaic, case, params))


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_whose_logits_are_all_at_the_soft_cap_are_right(mosaic, sign):
    """Their weights are the largest and the smallest ones: no maximum is subtracted."""
    case = Small(rules=Rules(scale=1.0, soft_cap=50.0))
    operands = case.operands("bfloat16")
    operands = operands._replace(query=jnp.full_like(operands.query, 30 * sign), key=jnp.full_like(operands.key, 30))
    assert_close(*simulated(mosaic, case, ONE, operands=operands))


@pytest.mark.usefixtures("soon_compiled")
def test_the_last_tile_of_an_example_reads_nothing_of_the_next(mosaic):
    """Copies past the last row fetch zeros, not the NaN of the next example and head."""
    from ejkernel.kernels.flash_attention.mosaic_gpu.launch import forward

    case = Small(batch=2, heads=2, groups=2, queries=35, keys=35, head_dim=24, value_dim=24)
    operands = case.operands("bfloat16")
    run = functools.partial(forward, rules=case.rules, params=ONE, interpret=mosaic.InterpretGPUParams())
    spoiled = operands._replace(
        query=operands.query.at[1].set(jnp.nan),
        key=operands.key.at[1].set(jnp.nan),
        value=operands.value.at[1].set(jnp.nan),
    )
    (out, lse), (wanted, wanted_lse) = jax.jit(run)(spoiled), by_reference(operands, case.rules)
    assert_close((out[:1], lse[:1]), (wanted[:1], wanted_lse[:1]))
    assert np.isnan(np.asarray(out[1], np.float32)).all()


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 200])
@pytest.mark.parametrize("queries", [512, 577])
@pytest.mark.usefixtures("mosaic")
def test_no_array_is_padded_in_memory(head_dim, queries):
    from ejkernel.kernels.flash_attention.mosaic_gpu.launch import forward

    case = Small(queries=queries, keys=queries, head_dim=head_dim, value_dim=head_dim)
    call = described(case)
    assert unsupported_reason(call) is None
    run = functools.partial(forward, rules=case.rules, params=heuristic(call))
    program = jax.make_jaxpr(run)(case.types("bfloat16"))
    assert "pad" not in " ".join(equation.params.get("name", equation.primitive.name) for equation in program.eqns)


@pytest.mark.parametrize(
    ("dims", "queries", "rules", "expected"),
    [
        ((104, 104), 4096, Rules(scale=0.2), True),
        ((64, 88), 4096, Rules(scale=0.2), True),
        ((112, 112), 4096, Rules(scale=0.2), False),  # whole sectors
        ((72, 72), 4096, Rules(scale=0.2), False),  # it gains nothing
        ((104, 104), 4095, Rules(scale=0.2), False),  # too few rows for each key
        ((104, 104), 8191, CAUSAL, False),
        ((104, 104), 8192, CAUSAL, True),
        ((104, 104), 4096, Rules(scale=0.2, soft_cap=2.0), False),
        ((104, 104), 16384, Rules(scale=0.2, left=8190, right=0), False),
        ((104, 104), 16384, Rules(scale=0.2, left=8191, right=0), True),
    ],
)
def test_keys_are_aligned_where_many_rows_read_them(dims, queries, rules, expected):
    sizes = {"queries": queries, "keys": queries, "heads": 4, "groups": 2, "head_dim": dims[0], "value_dim": dims[1]}
    call = described(Case(batch=1, rules=rules, **sizes))
    assert heuristic(call).align_keys == expected
    unaligned = any(dim % 16 for dim in dims)
    assert {params.align_keys for params in space(call)} == ({False, True} if unaligned else {False})


@pytest.mark.usefixtures("mosaic")
def test_only_keys_and_values_are_aligned():
    from ejkernel.kernels.flash_attention.mosaic_gpu.launch import forward

    case = Small(queries=64, keys=96, heads=2, head_dim=24, value_dim=40)
    run = functools.partial(forward, rules=case.rules, params=dataclasses.replace(TWO, align_keys=True))
    program = jax.make_jaxpr(run)(case.types("bfloat16"))
    padded = [
        x.outvars[0].aval.shape for x in program.eqns if x.params.get("name", x.primitive.name) in ("pad", "_pad")
    ]
    assert padded == [(1, 96, 1, 32), (1, 96, 1, 48)]
    assert [x.shape for x in program.out_avals] == [(1, 64, 2, 40), (1, 2, 64)]


@pytest.mark.usefixtures("mosaic")
def test_a_bias_is_not_padded_in_memory():
    from ejkernel.kernels.flash_attention.mosaic_gpu.launch import forward

    case = Small(queries=584, keys=584, bias=(1, 1, 584, 584))
    run = functools.partial(forward, rules=case.rules, params=heuristic(described(case)))
    program = jax.make_jaxpr(run)(case.types("bfloat16"))
    sizes = {variable.aval.shape[2:] for equation in program.eqns for variable in equation.outvars}
    assert not [size for size in sizes if len(size) == 2 and min(size) > 584]


@pytest.mark.parametrize(
    "case",
    [
        Small(heads=2, rules=CAUSAL, keys=40),  # the first rows see no key
        Small(heads=2, rules=dataclasses.replace(CAUSAL, soft_cap=5.0), keys=40),
        Small(heads=2, bias=(1, 2, 70, 70)),
        Small(heads=2, bias=(1, 1, 70, 1)),
    ],
    ids=["causal", "soft cap", "bias", "bias of rows"],
)
@pytest.mark.usefixtures("soon_compiled")
def test_sinks_are_part_of_the_softmax(mosaic, case):
    operands = case.operands("bfloat16")._replace(sinks=jnp.asarray([1.5, -jnp.inf]))
    assert_close(*simulated(mosaic, case, ONE, operands=operands))


@pytest.mark.usefixtures("soon_compiled")
def test_rows_without_keys_are_zero(mosaic):
    """The first queries stand before all keys."""
    (out, lse), expected = simulated(mosaic, Small(keys=20, rules=CAUSAL), ONE, "float16")
    assert_close((out, lse), expected, "float16")
    np.testing.assert_array_equal(np.asarray(out[:, :50], np.float32), 0)
    np.testing.assert_array_equal(lse[..., :50], np.float32(EMPTY_ROW_LSE))


@pytest.mark.parametrize(
    ("given", "segments"),
    [(("query_lengths", "key_lengths"), False), (("key_lengths",), False), (("key_lengths",), True)],
    ids=["both", "keys", "keys and segments"],
)
@pytest.mark.usefixtures("soon_compiled")
def test_what_is_behind_the_lengths_is_not_seen_and_sees_nothing(mosaic, given, segments):
    case = Small(batch=2, segments=segments, rules=CAUSAL)
    lengths = {"query_lengths": jnp.asarray([40, 70], jnp.int32), "key_lengths": jnp.asarray([50, 0], jnp.int32)}
    operands = case.operands("bfloat16")._replace(**{name: lengths[name] for name in given})
    (out, lse), expected = simulated(mosaic, case, ONE, operands=operands)
    assert_close((out, lse), expected)
    np.testing.assert_array_equal(np.asarray(out[1], np.float32), 0)


@pytest.mark.usefixtures("soon_compiled")
@pytest.mark.parametrize("sinks", [None, [-jnp.inf, 1.0]], ids=str)
def test_the_lowest_float_as_a_bias_hides_nothing_from_a_row_that_has_nothing_else(mosaic, sinks):
    """As in plain JAX: masks made of it leave a row that they hide altogether with the average of all values."""
    case = Small(heads=2)
    operands = case.operands("bfloat16")._replace(
        bias=jnp.zeros((1, 1, 70, 70)).at[:, :, 3].set(jnp.finfo(jnp.float32).min),
        sinks=None if sinks is None else jnp.asarray(sinks),
    )
    found, expected = simulated(mosaic, case, ONE, operands=operands)
    np.testing.assert_allclose(found[0].astype(jnp.float32), expected[0], atol=2e-2)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("soon_compiled")
def test_segments_in_any_order_match_reference(mosaic):
    rng = np.random.default_rng(0)
    ids = [jnp.asarray(rng.integers(0, 3, (1, 70)), jnp.int32) for _ in range(2)]
    operands = Small().operands("bfloat16")._replace(query_segments=ids[0], key_segments=ids[1])
    assert_close(*simulated(mosaic, Small(), ONE, operands=operands))


# Lowering, which builds the whole kernel and checks its layouts.


SAMPLE = {
    "causal 128": Case(queries=512, keys=512, heads=4, groups=2, head_dim=128, value_dim=128, rules=CAUSAL),
    "window 64": Case(queries=999, keys=1000, head_dim=64, value_dim=64, rules=Rules(scale=0.1, left=100, right=0)),
    "full 256": Case(queries=512, keys=512, head_dim=256, value_dim=256),
    "192 and 128": Case(queries=300, keys=300, head_dim=192, value_dim=128, segments=True, rules=CAUSAL),
    "soft cap 96": Case(queries=256, keys=256, head_dim=96, value_dim=96, rules=Rules(scale=0.1, soft_cap=5.0)),
    "bias 32": Case(queries=256, keys=256, head_dim=32, value_dim=32, bias=(1, 4, 256, 256), mask=(2, 1, 256, 256)),
}


def lower(case, params):
    from ejkernel.kernels.flash_attention.mosaic_gpu.launch import forward

    operands = case.types("bfloat16")
    run = functools.partial(forward, rules=case.rules, params=params)
    return jax.jit(run).trace(operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.usefixtures("mosaic")
def test_what_the_heuristic_says_is_lowered(name):
    case = SAMPLE[name]
    assert "flash_attention_forward" in lower(case, heuristic(described(case)))


@pytest.mark.parametrize("programs", [3, 132])
@pytest.mark.usefixtures("mosaic")
def test_it_is_lowered_within_shard_map_and_vmap(programs, monkeypatch):
    from ejkernel.kernels.flash_attention.mosaic_gpu.launch import forward

    monkeypatch.setattr(plan, "MULTIPROCESSORS", programs)

    @functools.partial(jax.vmap, in_axes=(0, None, None, None))
    def attend(query, key, value, ids):
        operands = Operands(query, key, value, query_segments=ids, key_segments=ids)
        return forward(operands, CAUSAL, dataclasses.replace(TWO, persistent=True))

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = [jax.P(None, "data"), *[jax.P("data")] * 3]
    run = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=tuple(specs), out_specs=(specs[0],) * 2, check_vma=True))
    query = jax.ShapeDtypeStruct((3, 2, 128, 2, 64), jnp.bfloat16)
    key, ids = jax.ShapeDtypeStruct((2, 128, 1, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 128), jnp.int32)
    lowered = run.trace(query, key, key, ids).lower(lowering_platforms=("cuda",))
    assert [x.shape for x in lowered.out_info] == [(3, 2, 128, 2, 64), (3, 2, 2, 128)]


@pytest.mark.usefixtures("mosaic")
def test_it_is_lowered_with_64_bits_and_under_strict_settings(monkeypatch):
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 3)
    rules = Rules(scale=0.1, left=100, right=3, soft_cap=5.0)
    shape = {"queries": 256, "keys": 256, "head_dim": 64, "value_dim": 64, "rules": rules}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        lower(Case(**shape, segments=True, bias=(1, 4, 256, 256), mask=(2, 1, 1, 256)), TWO_TILES)


# What runs, and with which parameters.


@pytest.mark.parametrize("name", SAMPLE)
def test_the_heuristic_is_in_the_space_and_runs(name):
    call = described(SAMPLE[name])
    assert params_fault(call, heuristic(call)) is None
    assert heuristic(call) in space(call)
    assert len(space(call)) > 10
    assert not [params for params in space(call) if params_fault(call, params)]


@pytest.mark.parametrize("head_dim", [8, 72, 256])
@pytest.mark.parametrize("bias", [None, (2, 4, 48, 48), (1, 1, 1, 48)])
@pytest.mark.parametrize("mask", [None, (2, 1, 48, 48)])
def test_there_are_parameters_for_every_call(head_dim, bias, mask):
    call = described(Case(head_dim=head_dim, value_dim=head_dim, bias=bias, mask=mask), "float16")
    call = dataclasses.replace(call, bias_dtype=None if bias is None else "float32")
    assert params_fault(call, heuristic(call)) is None


FINE = described(Case(queries=512, keys=512, heads=4, groups=2, head_dim=128, value_dim=128, rules=CAUSAL))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "cast it"),
        ({"platform": "cpu", "device_fingerprint": "cpu:any"}, "needs a Hopper GPU"),
        ({"device_fingerprint": "gpu:nvidia_a100"}, "needs a Hopper GPU"),
        ({"device_fingerprint": "gpu:nvidia_b200"}, "needs a Hopper GPU"),
        ({"device_fingerprint": "gpu:amd_instinct_mi300x"}, "needs a Hopper GPU"),
        ({"partitioned": True}, r"jax\.shard_map"),
        ({"query": (2, 512, 4, 264)}, "at most 256"),
        ({"query": (2, 0, 4, 128)}, "an array is empty"),
        ({"rules": Rules(scale=0.0)}, "scale must be positive"),
        ({"query": (None, 512, 4, 128)}, "static shapes"),
    ],
)
def test_what_does_not_run_is_refused_with_a_reason(monkeypatch, change, reason):
    monkeypatch.setattr(compat.kernels, "mosaic_gpu_reason", lambda: None)
    assert unsupported_reason(FINE) is None
    assert re.search(reason, unsupported_reason(dataclasses.replace(FINE, **change)) or "")


def test_what_cannot_be_imported_is_refused_with_a_reason_after_the_device(monkeypatch):
    monkeypatch.setattr(compat.kernels, "mosaic_gpu_reason", lambda: "it needs absl-py")
    assert "it needs absl-py" in unsupported_reason(FINE)
    assert "needs a Hopper GPU" in unsupported_reason(dataclasses.replace(FINE, platform="cpu"))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"stages": 4}, "shared memory"),
        ({"kv_block": 256}, "shared memory"),
        ({"kv_block": 96, "stages": 1, "warpgroups": 3}, "registers"),
        ({"warpgroups": 3, "kv_block": 64, "pack_heads": True}, "multiple of 3 heads"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, fault):
    assert fault in params_fault(FINE, ForwardParams(**change))


@pytest.mark.parametrize(
    "extra", [{"segments": True}, {"attention_mask": (2, 1, 1, 512)}, {"bias": (2, 1, 1, 512), "bias_dtype": "float32"}]
)
def test_blocks_whose_numbers_of_keys_a_copy_cannot_address_are_refused(extra):
    call = dataclasses.replace(FINE, **extra)
    assert "kv_block must be a multiple of 32" in params_fault(call, ForwardParams(kv_block=80))
    assert params_fault(call, ForwardParams(kv_block=96)) is None


def test_heads_with_masks_of_their_own_are_not_packed():
    call = dataclasses.replace(FINE, attention_mask=(1, 4, 512, 512))
    assert "all heads share" in params_fault(call, ForwardParams(pack_heads=True, kv_block=64))


def test_examples_whose_keys_exceed_the_cache_are_dealt_one_by_one():
    key = (4, 65536, 2, 64)
    call = dataclasses.replace(FINE, query=key, key=key, value=key)
    assert plan.forward_plan(call, ForwardParams(persistent=True)).bundle == 2


@pytest.mark.parametrize("bias", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("length", [512, 577])
def test_copies_of_all_head_dimensions_overlap_with_products(length, bias):
    """One stage of keys took up to 2.4 times as long as two."""
    given = {} if bias is None else {"bias": (2, 4, length, length), "bias_dtype": bias}
    for head_dim, value_dim in itertools.product(range(8, 257, 31), (8, 64, 104, 136, 192, 208, 224, 256)):
        query, key, value = ((2, length, heads, dim) for heads, dim in ((4, head_dim), (2, head_dim), (2, value_dim)))
        call = dataclasses.replace(FINE, query=query, key=key, value=value, **given)
        assert heuristic(call).stages >= 2, (head_dim, value_dim)


def test_wide_values_do_not_share_the_buffer_of_queries():
    call = dataclasses.replace(FINE, query=(2, 512, 4, 64), key=(2, 512, 2, 64))
    assert "share_buffer" in params_fault(call, ForwardParams(share_buffer=True))


def test_the_space_has_no_output_that_takes_more_registers_in_the_buffer_of_wider_queries():
    """There 104 columns take 128."""
    call = dataclasses.replace(FINE, query=(2, 2049, 4, 184), key=(2, 2049, 2, 184), value=(2, 2049, 2, 104))
    assert not [params for params in space(call) if params_fault(call, params)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_block": 40}, "kv_block must be a multiple of 16"),
        ({"stages": 0}, "stages must be"),
        ({"warpgroups": True}, "warpgroups must be"),
        ({"query_buffers": 2}, "query_buffers must be 1 unless persistent=True"),
        ({"overlap": 1}, "overlap must be True or False"),
        ({"kv_block": 64, "fma_columns": 72}, "fma_columns must be at most kv_block, 64, got 72"),
    ],
)
def test_wrong_parameters_are_errors(wrong, message):
    with pytest.raises(ConfigError, match=message):
        ForwardParams(**wrong)


# Which blocks are met, against a dense mask.

SIDE = st.none() | st.integers(0, 30)
IDS = st.integers(0, 3)
TILES = 10


def check_blocks(found, visible, keys, kv_block, rows, origins=None):
    """Hold the blocks of each tile, `[tiles, 4]`, against a mask `[queries, keys]`."""
    for tile, (first, free_from, free_until, end) in enumerate(np.asarray(found).tolist()):
        origin = 0 if origins is None else int(origins[tile])
        seen = visible[tile * rows : (tile + 1) * rows, origin:]
        assert not visible[tile * rows : (tile + 1) * rows, :origin].any()
        assert 0 <= first < end <= -(-keys // kv_block)
        assert not seen[:, : first * kv_block].any()
        assert not seen[:, end * kv_block :].any()
        free = range(max(free_from, first), min(free_until, end))
        for block in free:
            assert seen[:, block * kv_block : (block + 1) * kv_block].all()
            assert origin + (block + 1) * kv_block <= keys


@given(
    st.integers(1, 40), st.integers(1, 40), SIDE, SIDE, st.sampled_from([4, 8]), st.sampled_from([4, 16]), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_blocks_of_a_window_hold_all_that_it_shows(queries, keys, left, right, rows, kv_block, slides):
    rules = Rules(scale=1.0, left=left, right=right)
    mask = within_window(np.arange(queries) + keys - queries, np.arange(keys), rules)
    low = np.arange(TILES, dtype=np.int32) * rows + (keys - queries)
    origin = np.asarray(window_origin(rules, low)) if slides and left is not None else np.zeros_like(low)
    blocks = window_blocks(rules, keys, kv_block, low, np.minimum(low + rows, keys) - 1, origin)
    found = np.stack([np.broadcast_to(x, low.shape) for x in blocks], axis=-1)[: -(-queries // rows)]
    visible = np.ones((queries, keys), bool) if mask is None else np.asarray(mask)
    check_blocks(found, visible, keys, kv_block, rows, origin)


def test_a_window_takes_as_few_blocks_as_it_can():
    """64 rows see 191 keys; from one block of 64 to the next they are in four of them."""
    rules = Rules(scale=1.0, left=127, right=0)
    low = np.arange(8, dtype=np.int32) * 64
    for kv_block, blocks in ((64, 3), (192, 1)):
        found = window_blocks(rules, 512, kv_block, low, low + 63, window_origin(rules, low))
        assert blocks == int(np.max(found.end - found.first))


def test_short_windows_have_small_steps():
    def chosen(left, **sizes):
        case = Case(queries=4096, keys=4096, rules=Rules(scale=0.2, left=left, right=0), **sizes)
        found = heuristic(described(case))
        return found.kv_block, found.pack_heads

    wide = {"head_dim": 128, "value_dim": 128}
    assert [chosen(left, heads=8, groups=8, **wide) for left in (63, 127, 255)] == [
        (64, False),
        (64, False),
        (128, False),
    ]
    assert chosen(127, batch=4, heads=8, groups=8, head_dim=112, value_dim=112) == (128, False)
    assert [chosen(left, heads=8, groups=4, **wide) for left in (127, 1023)] == [(64, True), (128, False)]


@pytest.mark.parametrize(("batch", "warpgroups"), [(1, 1), (2, 1), (4, 2)])
def test_a_few_tiles_with_a_narrow_window_are_small(batch, warpgroups):
    sizes = {"queries": 4096, "keys": 4096, "head_dim": 64, "value_dim": 64}
    case = Case(batch=batch, heads=8, groups=8, rules=Rules(scale=0.2, left=127, right=0), **sizes)
    assert heuristic(described(case)).warpgroups == warpgroups


@pytest.mark.parametrize(
    ("heads", "rules", "segments", "warpgroups"),
    [
        (4, Rules(scale=0.2), False, 1),
        (8, Rules(scale=0.2), False, 2),
        (8, CAUSAL, False, 1),
        (8, CAUSAL, True, 2),
        (12, CAUSAL, False, 2),
    ],
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_few_tiles_are_small(dim, heads, rules, segments, warpgroups):
    """On one H200, 8 causal heads of 2,048 queries take 25.6 us at D128, and 29.3 with tiles of 128 rows."""
    sizes = {"queries": 2048, "keys": 2048, "head_dim": dim, "value_dim": dim}
    case = Case(batch=1, heads=heads, groups=heads, rules=rules, segments=segments, **sizes)
    assert min(heuristic(described(case)).warpgroups, 2) == warpgroups


@pytest.mark.parametrize(
    ("keys", "rules", "bias", "warpgroups"),
    [
        (2048, CAUSAL, None, 1),
        (16384, CAUSAL, None, 2),
        (2048, Rules(scale=0.2, right=64), None, 2),
        (2048, CAUSAL, (1, 1, 2048, 2048), 2),
    ],
    ids=["as many keys as queries", "more keys: tiles are alike", "not causal", "bias"],
)
def test_two_small_tiles_for_each_multiprocessor_must_even_out(keys, rules, bias, warpgroups):
    case = Case(batch=1, queries=2048, keys=keys, heads=8, groups=8, head_dim=64, value_dim=64, rules=rules, bias=bias)
    assert min(heuristic(described(case)).warpgroups, 2) == warpgroups


@pytest.mark.parametrize(("batch", "queries", "persistent"), [(1, 2048, False), (24, 2048, True), (12, 640, True)])
def test_packed_segments_of_many_or_similar_tiles_are_persistent(batch, queries, persistent):
    sizes = {"queries": queries, "keys": queries, "head_dim": 64, "value_dim": 64}
    case = Case(batch=batch, heads=8, groups=2, segments=True, rules=CAUSAL, **sizes)
    found = heuristic(described(case))
    assert (found.persistent, found.pack_heads) == (persistent, True)


def test_only_soft_caps_up_to_128_columns_have_polynomials():
    def columns(dim, cap):
        case = Case(queries=4096, keys=4096, head_dim=dim, value_dim=dim, rules=Rules(scale=0.2, soft_cap=cap))
        return heuristic(described(case)).fma_columns

    assert [columns(dim, 50.0) for dim in (8, 64, 72, 128, 144, 256)] == [32, 32, 48, 48, 0, 0]
    assert [columns(128, cap) for cap in (None, 60.0)] == [0, 32]


@pytest.mark.parametrize(
    ("dim", "batch", "queries", "expected"),
    [
        (32, 2, 8192, (2, False, 32)),
        (8, 1, 16384, (2, False, 0)),
        (32, 8, 2048, (2, True, 0)),
        (32, 3, 8192, (3, True, 0)),
    ],
    ids=["two tiles for each block of threads", "D8", "few keys", "more tiles"],
)
def test_narrow_heads_with_many_keys_and_two_tiles_for_each_block_run_once(dim, batch, queries, expected):
    case = Case(batch=batch, queries=queries, keys=queries, heads=2, groups=2, head_dim=dim, value_dim=dim)
    found = heuristic(described(dataclasses.replace(case, rules=Rules(scale=0.2))))
    assert (found.warpgroups, found.persistent, found.fma_columns) == expected


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(batch=8, queries=1024, keys=1024, heads=32, groups=4, head_dim=192, value_dim=192), (64, False, True)),
        (Case(batch=30, queries=310, keys=310, heads=64, groups=8, head_dim=112, value_dim=112), (128, True, True)),
        (Case(batch=30, queries=384, keys=384, heads=64, groups=8, head_dim=112, value_dim=112), (128, False, True)),
    ],
    ids=["D192", "five parts of 64 queries", "six parts"],
)
def test_full_calls_are_persistent_and_pack_heads_for_half_a_tile(case, expected):
    found = heuristic(described(case))
    assert (found.kv_block, found.pack_heads, found.persistent) == expected


def test_tiles_with_a_bias_have_the_size_that_takes_the_fewest_rounds():
    def warpgroups(batch, queries, heads):
        sizes = {"queries": queries, "keys": queries, "head_dim": 24, "value_dim": 24}
        case = Case(batch=batch, heads=heads, groups=heads, bias=(1, heads, queries, queries), **sizes)
        return heuristic(described(case)).warpgroups

    assert [warpgroups(1, 409, 4), warpgroups(1, 768, 16), warpgroups(6, 673, 4)] == [1, 2, 3]
    assert [warpgroups(26, 616, 4), warpgroups(98, 664, 4)] == [2, 3]


@pytest.mark.parametrize(
    ("dim", "queries", "expected"),
    [
        (256, 1024, (64, 1)),
        (240, 577, (64, 1)),
        (208, 650, (64, 2)),
        (208, 2177, (96, 1)),
        (152, 1391, (128, 1)),
        (144, 700, (128, 2)),
    ],
)
def test_full_calls_with_wide_heads_are_persistent(dim, queries, expected):
    sizes = {"queries": queries, "keys": queries, "head_dim": dim, "value_dim": dim}
    found = heuristic(described(Case(batch=8, heads=8, groups=8, rules=Rules(scale=0.2), **sizes)))
    assert (found.persistent, found.ping_pong, found.heads_first) == (True, True, True)
    assert (found.kv_block, found.query_buffers) == expected


@pytest.mark.parametrize(
    ("dim", "groups", "left", "expected"),
    [
        (152, 1, 255, {"kv_block": 64, "pack_heads": True}),
        (144, 8, 63, {"kv_block": 64, "warpgroups": 1, "ping_pong": False}),
        (144, 8, 255, {"kv_block": 64, "stages": 3}),
        (144, 1, 1023, {}),
        (200, 8, 1023, {"kv_block": 64}),
    ],
)
def test_wide_heads_in_a_window_are_persistent(dim, groups, left, expected):
    sizes = {"queries": 4096, "keys": 4096, "head_dim": dim, "value_dim": dim}
    rules = Rules(scale=0.2, left=left, right=0)
    found = heuristic(described(Case(batch=2, heads=8, groups=groups, rules=rules, **sizes)))
    usual = ForwardParams(persistent=True, share_buffer=True, heads_first=True, query_buffers=2)
    assert found == dataclasses.replace(usual, **expected)


def test_wide_heads_with_lengths_are_persistent_but_for_one_example_and_the_widest():
    def persistent(batch, dim):
        call = described(Case(batch=batch, queries=2048, keys=2048, heads=8, groups=8, head_dim=dim, value_dim=dim))
        return heuristic(dataclasses.replace(call, key_lengths=True)).persistent

    assert [persistent(8, 152), persistent(1, 152), persistent(1, 184)] == [True, False, True]
    assert not persistent(8, 256)


def test_only_masks_of_many_keys_need_a_table():
    few, many = (Case(batch=8, queries=n, keys=n, heads=8, groups=8, mask=(8, 1, 1, n)) for n in (512, 2048))
    whole = dataclasses.replace(few, mask=(8, 1, 512, 512))
    assert [plan.forward_plan(described(case), ForwardParams()).table for case in (few, many, whole)] == [0, 1, 1]


blocks_of = jax.jit(block_table, static_argnames=("rules", "tile_rows", "kv_block"))


@given(st.data(), st.sampled_from([(24, 24), (13, 30), (30, 13)]), st.sampled_from([(None, None), (5, 0), (None, 3)]))
@settings(max_examples=100, deadline=None)
def test_blocks_of_segments_and_masks_hold_all_that_they_show(data, sizes, sides):
    (queries, keys), (left, right) = sizes, sides
    rules, rows, kv_block = Rules(scale=1.0, left=left, right=right), 8, 4
    ids = [np.array([data.draw(st.lists(IDS, min_size=n, max_size=n))], np.int32) for n in sizes]
    if data.draw(st.booleans()):
        ids = [np.sort(x) for x in ids]
    shown = data.draw(st.sampled_from([0.1, 0.9, 1]))
    mask = np.random.default_rng(data.draw(IDS)).random((1, 1, queries, keys)) < shown
    shapes = ((1, queries, 1, 1), (1, keys, 1, 1), (1, keys, 1, 1))
    arrays = Operands(*(np.zeros(shape) for shape in shapes), None, mask, *ids)
    if shown == 1:
        arrays = arrays._replace(attention_mask=None)
    window = within_window(np.arange(queries) + keys - queries, np.arange(keys), rules)
    visible = mask[0, 0] & (ids[0][0][:, None] == ids[1][0][None, :]) & (True if window is None else np.asarray(window))
    found = blocks_of(arrays, rules=rules, tile_rows=rows, kv_block=kv_block)
    check_blocks(found[0, 0], visible, keys, kv_block, rows)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [5, 2, 9, 1]], ids=["ascending", "in any order"])
def test_foreign_blocks_of_packed_segments_are_skipped(order):
    """Each tile lies in one segment of 64 tokens and meets its blocks alone."""
    ids = jnp.repeat(jnp.asarray([order], jnp.int32), 64, axis=1)
    arrays = Operands(*[jnp.zeros((1, 256, 1, 1))] * 3, query_segments=ids, key_segments=ids)
    found = np.asarray(blocks_of(arrays, rules=Rules(scale=1.0), tile_rows=32, kv_block=16))[0, 0]
    start = np.arange(8) // 2 * 4
    np.testing.assert_array_equal(found, np.stack([start, start, start + 4, start + 4], axis=-1))
