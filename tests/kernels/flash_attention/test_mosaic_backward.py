# SPDX-License-Identifier: Apache-2.0
"""Our backward for Hopper: simulated on a CPU, lowered for CUDA without a GPU, and refused where it cannot run."""

from __future__ import annotations

import dataclasses
import functools
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.arrays import on_device
from tests.kernels.attention_cases import Case, reference_with_gradients
from tests.kernels.lowered import assert_in_place_calls_are_apart

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Hopper
from ejkernel.kernels.flash_attention.common import (
    EMPTY_ROW_LSE,
    AttentionCall,
    Operands,
    Rules,
    describe,
    within_window,
)
from ejkernel.kernels.flash_attention.mosaic_gpu import visibility
from ejkernel.kernels.flash_attention.mosaic_gpu.backward_order import order_of
from ejkernel.kernels.flash_attention.mosaic_gpu.backward_plan import backward_problem
from ejkernel.kernels.flash_attention.mosaic_gpu.backward_support import (
    heuristic,
    is_deterministic,
    params_fault,
    space,
    unsupported_reason,
)
from ejkernel.kernels.flash_attention.mosaic_gpu.params import BackwardParams
from ejkernel.kernels.flash_attention.mosaic_gpu.ranges import within_range
from ejkernel.kernels.flash_attention.mosaic_gpu.visibility import (
    Blocks,
    packed,
    ranges_of_keys,
    ranges_of_queries,
)
from ejkernel.ops import ConfigError

pytestmark = pytest.mark.slow

NAMES = ("query", "key", "value")
CAUSAL = Rules(scale=0.2, right=0)
LATE_CAP = Rules(scale=0.2, soft_cap=2.0, cap_after_bias=True)
FUSED = BackwardParams()
WIDE = BackwardParams(division="products")
SPLIT = BackwardParams(form="split", kv_block=64, kv_stages=2, q_warpgroups=2)
WIDE_SPLIT = dataclasses.replace(SPLIT, division="products")
Small = functools.partial(Case, batch=1, queries=128, keys=128, heads=1, groups=1, head_dim=64, value_dim=64)


@pytest.fixture
def mosaic():
    """The module of the kernels, where they can be imported."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from ejkernel.kernels.flash_attention.mosaic_gpu import launch

    return launch


def operands_and_residuals(case, dtype="bfloat16"):
    """Return the arguments of a backward, and the float32 gradients that it should return."""
    operands = case.operands(dtype)
    names = NAMES if operands.bias is None else (*NAMES, "bias")

    dout = on_device(np.random.default_rng(1).standard_normal((*operands.query.shape[:3], case.value_dim)), dtype)
    (out, lse), expected = reference_with_gradients(operands, case.rules, dout, names)
    return operands, (out.astype(dtype), lse), dout, expected


def simulated(mosaic, case, params, dtype="bfloat16"):
    """Return gradients by the kernels, simulated, and those of the reference."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    operands, residuals, dout, expected = operands_and_residuals(case, dtype)
    call = describe(operands, case.rules, platform="gpu", fingerprint="gpu:nvidia_h200", backward=True)
    assert (unsupported_reason(call), params_fault(call, params)) == (None, None)
    # Blocks add to the same memory in any order, in one step each, which the simulation does in two.
    alone = case.keys <= params.keys or (params.form == "split" and case.bias is None)
    interpret = plgpu.InterpretGPUParams(detect_races=alone)
    run = functools.partial(mosaic.backward, rules=case.rules, params=params, interpret=interpret)
    found = jax.block_until_ready(jax.jit(run)(operands, residuals, dout))
    return [x for x in found if x is not None], expected


def error(expected, actual):
    """Return the relative root mean square of the difference."""
    expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


GRADIENTS = {
    "causal, grouped": (Small(heads=2, rules=CAUSAL), FUSED),
    "window, soft cap, mask": (
        Small(queries=150, keys=100, mask=(1, 1, 150, 100), rules=Rules(scale=0.2, left=20, soft_cap=2.0)),
        SPLIT,
    ),
    "segments, products": (Small(keys=136, segments=True, head_dim=128, rules=CAUSAL), WIDE),
    "causal, products": (Small(queries=192, keys=64, head_dim=128, rules=CAUSAL), WIDE),
    "bias and mask": (Small(queries=100, bias=(1, 1, 100, 128), mask=(1, 1, 100, 128)), FUSED),
    "bias, split": (Small(queries=130, keys=71, bias=(1, 1, 130, 71)), SPLIT),
    "sum of bias, split": (Small(queries=130, keys=60, bias=(1, 1, 130, 60), bias_dtype="float32"), SPLIT),
    "odd dims, split": (Small(head_dim=40, value_dim=24, queries=60, rules=CAUSAL), WIDE_SPLIT),
    "parts of a group": (Small(heads=4, rules=CAUSAL), dataclasses.replace(FUSED, head_parts=2)),
    "uneven parts": (Small(heads=5, rules=CAUSAL), dataclasses.replace(FUSED, head_parts=3)),
    "uneven parts, products": (Small(heads=3, head_dim=128), dataclasses.replace(WIDE, head_parts=2)),
    "parts of the queries": (Small(queries=130, keys=40, heads=4, groups=2), dataclasses.replace(FUSED, query_parts=2)),
    "parts of the keys": (Small(queries=70, keys=90, heads=2), dataclasses.replace(WIDE_SPLIT, key_parts=3)),
    "dropout and bias": (Small(heads=2, bias=(1, 2, 128, 128), rules=Rules(scale=0.2, dropout_rate=0.3)), FUSED),
    "dropout, products and split": (Small(heads=2, rules=Rules(scale=0.2, soft_cap=2.0, dropout_rate=0.3)), WIDE_SPLIT),
    "soft cap after bias": (Small(queries=100, keys=104, bias=(1, 1, 100, 104), rules=LATE_CAP), FUSED),
    "pieces of columns": (Small(queries=101, keys=99, heads=2, head_dim=72, value_dim=80, rules=CAUSAL), FUSED),
    "pieces of columns, products": (Small(queries=99, keys=101, head_dim=96, value_dim=72, rules=CAUSAL), WIDE),
    "two stages of keys, one of values": (Small(keys=256, head_dim=256, value_dim=256, rules=CAUSAL), WIDE_SPLIT),
}
# Of these, each feature is also part of another case.
REPEATED = ("causal, products", "bias and mask", "bias, split", "uneven parts, products")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole] * (n in REPEATED)) for n in GRADIENTS])
def test_gradients_match_reference(mosaic, name):
    case, params = GRADIENTS[name]
    found, expected = simulated(mosaic, case, params)
    dtypes = ["bfloat16"] * 3 + ([] if case.bias is None else [case.bias_dtype or "bfloat16"])
    assert dtypes == [gradient.dtype for gradient in found]
    for wanted, gradient in zip(expected, found, strict=True):
        assert gradient.shape == wanted.shape
        assert error(wanted, gradient) < 5e-3


@pytest.mark.parametrize("few", [0, 2**24], ids=["tiles skipped", "tiles visited"])
def test_a_mask_may_hide_whole_tiles(mosaic, monkeypatch, few):
    """Only in large calls are these tiles found before the kernel."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(mosaic, "_FEW_SCORES", few)
    case = Small(queries=64, keys=256, bias=(1, 1, 64, 256), mask=(1, 1, 1, 256))
    assert mosaic.skips_hidden(mosaic.backward_problem(described(case))) == (few == 0)
    operands, _, dout, _ = operands_and_residuals(case)
    operands = operands._replace(attention_mask=jnp.arange(256)[None, None, None] < 100)
    (out, lse), expected = reference_with_gradients(operands, case.rules, dout, (*NAMES, "bias"))
    run = functools.partial(mosaic.backward, rules=case.rules, params=FUSED, interpret=plgpu.InterpretGPUParams())
    found = jax.jit(run)(operands, (out.astype(jnp.bfloat16), lse), dout)
    for wanted, gradient in zip(expected, found, strict=True):
        assert error(wanted, gradient) < 5e-3


def test_neither_a_bias_nor_its_gradient_is_padded_in_memory(mosaic):
    case = Small(queries=200, keys=584, bias=(1, 1, 200, 584))
    run = functools.partial(mosaic.backward, rules=case.rules, params=FUSED)
    operands = case.types("bfloat16")
    residuals = operands.query, jax.ShapeDtypeStruct((1, 1, 200), jnp.float32)
    program = jax.make_jaxpr(run)(operands, residuals, operands.query)
    assert "[1,1,200,584]" in str(program)
    assert not re.search(r"\[1,1,2\d\d,(58[5-9]|59\d|6\d\d)\]", str(program))


def test_rows_without_keys_have_zero_gradients(mosaic):
    """The first queries stand before all keys."""
    case = Small(queries=128, keys=64, rules=CAUSAL)
    found, expected = simulated(mosaic, case, FUSED, "float16")
    np.testing.assert_array_equal(np.asarray(found[0][:, :64], np.float32), 0)
    assert error(expected[0], found[0]) < 2e-3


def test_float16_scores_may_have_gradients_beyond_its_range(mosaic):
    """The largest gradient of a score is about 2e5; those of query, key and value are below 2e4."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    case = Small(batch=2, queries=64, keys=64, head_dim=32, value_dim=32)
    operands, _, dout, _ = operands_and_residuals(case, "float16")
    operands = operands._replace(query=operands.query * 0.1, key=operands.key * 0.02, value=operands.value * 600)
    dout = dout * jnp.asarray([1000, 1], "float16")[:, None, None, None]
    (out, lse), expected = reference_with_gradients(operands, case.rules, dout)
    run = functools.partial(mosaic.backward, rules=case.rules, params=SPLIT, interpret=plgpu.InterpretGPUParams())
    found = jax.jit(run)(operands, (out.astype(jnp.float16), lse), dout)
    for wanted, gradient in zip(expected, found, strict=False):
        for of_example in range(2):
            assert error(wanted[of_example], gradient[of_example]) < 5e-3


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_nan_of_one_example_leaves_the_gradients_of_others_in_range(bad):
    """With a bias, which examples may share, all have one factor."""
    case = Small(batch=2, queries=8, keys=8, bias=(2, 1, 8, 8))
    operands = case.operands("float16")
    dout = jnp.full(operands.query.shape, 1000, jnp.float16)
    operands = operands._replace(value=operands.value * 600)
    spoiled = operands._replace(value=operands.value.at[0, 3].set(bad))
    expected, factor = within_range(operands, None, dout, case.rules, None)
    assert factor.min() > 1
    found, _ = within_range(spoiled, None, dout, case.rules, None)
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_tile_behind_the_last_key_has_no_weight_however_small_all_scores_are(mosaic):
    """A score of zero has an infinite weight in a row whose log-sum-exp is far below."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    case = Small(queries=64, keys=192)
    operands, _, dout, _ = operands_and_residuals(case)
    operands = operands._replace(query=operands.query + 6, key=operands.key - 6)
    (out, lse), expected = reference_with_gradients(operands, case.rules, dout)
    assert lse.max() < -128  # as a power of two it is infinite
    run = functools.partial(mosaic.backward, rules=case.rules, params=FUSED, interpret=plgpu.InterpretGPUParams())
    found = jax.jit(run)(operands, (out.astype(jnp.bfloat16), lse), dout)
    for wanted, gradient in zip(expected, found, strict=False):
        assert error(wanted, gradient) < 5e-2


def test_a_row_that_a_bias_hides_altogether_spoils_no_gradient(mosaic):
    """Masks are made of such numbers, and a row of padding has nothing else; nothing is asked of it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    case = Small(queries=64, keys=64)
    operands, _, dout, _ = operands_and_residuals(case)
    dout = dout.at[:, 3].set(0)
    options = {"rules": case.rules, "params": FUSED, "interpret": plgpu.InterpretGPUParams()}
    run = jax.jit(functools.partial(mosaic.backward, **options))
    for hiding in (jnp.finfo(jnp.float32).min, -1e9):
        biased = operands._replace(bias=jnp.zeros((1, 1, 64, 64), jnp.float32).at[:, :, 3].set(hiding))
        (out, lse), expected = reference_with_gradients(biased, case.rules, dout, (*NAMES, "bias"))
        found = run(biased, (out.astype(jnp.bfloat16), lse), dout)
        for wanted, gradient in zip(expected, found, strict=True):
            assert error(wanted, gradient) < 5e-3


def test_keys_beyond_the_length_have_zero_gradients(mosaic):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    operands, _, dout, _ = operands_and_residuals(Small())
    shown = jnp.arange(128)[None, None, None] < 70
    (out, lse), expected = reference_with_gradients(operands._replace(attention_mask=shown), CAUSAL, dout)
    limited = operands._replace(key_lengths=jnp.asarray([70], jnp.int32))
    run = functools.partial(mosaic.backward, rules=CAUSAL, params=FUSED, interpret=plgpu.InterpretGPUParams())
    found = jax.jit(run)(limited, (out.astype(jnp.bfloat16), lse), dout)
    np.testing.assert_array_equal(np.asarray(found[1][:, 70:], np.float32), 0)
    for wanted, gradient in zip(expected, found, strict=False):
        assert error(wanted, gradient) < 5e-3


def test_a_batched_call_is_the_stack_of_its_examples(mosaic):
    """The bias that all examples have in common has a gradient for each."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    case = Small(batch=2, queries=64, keys=64, bias=(1, 1, 64, 64), rules=CAUSAL)
    operands, (out, lse), dout, expected = operands_and_residuals(case)
    run = functools.partial(mosaic.backward, rules=CAUSAL, params=FUSED, interpret=plgpu.InterpretGPUParams())

    def of_one(query, key, value, out, lse, dout):
        return run(operands._replace(query=query, key=key, value=value), (out, lse), dout)

    rows = [x[:, None] for x in (*operands[:3], out, lse, dout)]
    found = jax.jit(jax.vmap(of_one))(*rows)
    for wanted, gradient in zip(expected[:3], found, strict=False):
        assert error(wanted, gradient[:, 0]) < 5e-3
    assert error(expected[3], found[3].sum(axis=0)) < 5e-3


def described(case, dtype="bfloat16"):
    return describe(
        case.types(dtype),
        case.rules,
        platform="gpu",
        fingerprint="gpu:nvidia_h200",
        backward=True,
    )


SAMPLE = {
    "causal 128": Case(queries=640, keys=640, heads=4, groups=2, head_dim=128, value_dim=128, rules=CAUSAL),
    "short 128": Case(queries=512, keys=512, heads=4, groups=2, head_dim=128, value_dim=128, rules=CAUSAL),
    "64 and 184": Case(queries=512, keys=512, head_dim=64, value_dim=184),
    "96 and 160": Case(queries=512, keys=512, head_dim=96, value_dim=160, rules=CAUSAL),
    "window 64": Case(queries=1000, keys=1000, head_dim=64, value_dim=64, rules=Rules(scale=0.1, left=100, right=0)),
    "full 256": Case(queries=512, keys=512, head_dim=256, value_dim=256),
    "192 and 128": Case(queries=300, keys=300, head_dim=192, value_dim=128, segments=True, rules=CAUSAL),
    "soft cap 96": Case(queries=256, keys=256, head_dim=96, value_dim=96, rules=Rules(scale=0.1, soft_cap=5.0)),
    "bias 32": Case(queries=256, keys=256, head_dim=32, value_dim=32, bias=(1, 4, 256, 256)),
}


ADDING = ("causal 128", "bias 32")


def lower(mosaic, case, params):
    """Lower for CUDA, which builds the whole kernel and checks its layouts; no GPU is needed."""
    operands = case.types("bfloat16")
    query, value = operands.query.shape, operands.value.shape
    out = jax.ShapeDtypeStruct((*query[:3], value[3]), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((query[0], query[2], query[1]), jnp.float32)
    run = functools.partial(mosaic.backward, rules=case.rules, params=params)
    return jax.jit(run).trace(operands, (out, lse), out).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole] * (n == "short 128")) for n in SAMPLE])
def test_configurations_are_lowered(request, mosaic, name):
    """The heuristic's parameters; with `--whole` the whole search space.

    A kernel that adds to memory is apart from slices.
    """
    case = SAMPLE[name]
    call = described(case)
    for params in space(call) if request.config.getoption("--whole") else [heuristic(call)]:
        text = lower(mosaic, case, params)
        assert "attention_backward" in text
        if params == heuristic(call) and name in ADDING:
            assert "output_operand_alias" in text
            assert_in_place_calls_are_apart(text)


def test_it_is_lowered_where_tangents_may_be_asked_for(mosaic):
    """As a candidate is, which is compiled by itself."""
    case = SAMPLE["bias 32"]
    operands = case.types("bfloat16")
    lse = jax.ShapeDtypeStruct((case.batch, case.heads, case.queries), jnp.float32)

    @jax.custom_jvp
    def run(operands, lse, dout):
        return mosaic.backward(operands, (dout, lse), dout, case.rules, BackwardParams(q_block=128))

    run.defjvp(lambda primals, tangents: (run(*primals), run(*tangents)))
    text = jax.jit(run).trace(operands, lse, operands.query).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" not in text  # which would have to be compiled where the device is


@pytest.mark.parametrize(
    "setting",
    [{"numpy_rank_promotion": "raise", "numpy_dtype_promotion": "strict"}, {"enable_x64": True}],
    ids=["strict", "64 bits"],
)
def test_it_is_lowered_inside_shard_map_under_strict_settings(mosaic, setting):
    case = Case(queries=200, keys=300, head_dim=64, value_dim=64, mask=(2, 1, 200, 300), segments=True, rules=CAUSAL)
    lengths = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    operands = case.types("float16")  # with a factor on its cotangent
    operands = operands._replace(query_lengths=lengths, key_lengths=lengths)
    lse = jax.ShapeDtypeStruct((case.batch, case.heads, case.queries), jnp.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = jax.sharding.PartitionSpec("x")

    def run(operands, lse, dout):
        return mosaic.backward(operands, (dout, lse), dout, case.rules, FUSED)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    for name, value in setting.items():
        jax.config.update(f"jax_{name}", value)
    try:
        jax.jit(sharded).trace(operands, lse, operands.query).lower(lowering_platforms=("cuda",))
    finally:
        for name, value in {
            "numpy_rank_promotion": "allow",
            "numpy_dtype_promotion": "standard",
            "enable_x64": False,
        }.items():
            jax.config.update(f"jax_{name}", value)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_heuristic_is_in_the_space_and_runs(name):
    call = described(SAMPLE[name])
    assert params_fault(call, heuristic(call)) is None
    assert heuristic(call) in space(call)
    assert len(set(space(call))) == len(space(call)) > 1


FINE = AttentionCall(
    query=(2, 256, 4, 128),
    key=(2, 256, 2, 128),
    value=(2, 256, 2, 128),
    dtype="bfloat16",
    rules=CAUSAL,
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
    backward=True,
)


@pytest.mark.parametrize(
    ("batch", "groups", "parts", "tried"),
    [(1, 1, 4, {1, 2, 4, 8}), (2, 1, 4, {1, 2, 4, 8}), (1, 4, 1, {1, 2}), (8, 8, 1, {1})],
)
def test_the_heads_of_a_group_are_divided_where_blocks_are_few(batch, groups, parts, tried):
    key = (batch, 8192, groups, 128)
    call = dataclasses.replace(FINE, query=(batch, 8192, 8, 128), key=key, value=key)
    assert heuristic(call).head_parts == parts
    assert {params.head_parts for params in space(call) if params.keys == 128} == tried


@pytest.mark.usefixtures("mosaic")
@pytest.mark.parametrize(
    ("batch", "heads", "rules", "longest_first"),
    [
        (16, (4, 2), CAUSAL, True),
        (8, (32, 8), CAUSAL, False),
        (16, (4, 2), Rules(scale=0.2), False),
        (256, (4, 2), CAUSAL, False),
    ],
    ids=["few", "more than the cache holds", "equal", "many"],
)
def test_few_causal_blocks_begin_with_the_longest(batch, heads, rules, longest_first):
    from ejkernel.kernels.flash_attention.mosaic_gpu.backward_consumers import KeysKernel

    key = (batch, 1024, heads[1], 128)
    call = dataclasses.replace(FINE, query=(batch, 1024, heads[0], 128), key=key, value=key, rules=rules)
    kernel = KeysKernel(backward_problem(call), FUSED, Hopper())
    blocks, examples, parts = (np.asarray(x) for x in kernel.schedule(jnp.arange(kernel.programs)))
    assert len({*zip(blocks, examples, parts, strict=True)}) == kernel.programs
    assert (np.diff(blocks if longest_first else examples) >= 0).all()


@pytest.mark.parametrize(
    ("queries", "heads", "parts"),
    [
        ((4, 2048, 16, 120), 2, 4),
        ((1, 4118, 64, 128), 8, 4),
        ((1, 4096, 32, 128), 4, 4),
        ((8, 1024, 32, 128), 8, 2),
        ((1, 16384, 64, 128), 8, 4),
        ((1, 8192, 32, 64), 8, 1),
        ((9, 1024, 28, 128), 4, 2),
        ((3, 1024, 28, 64), 4, 3),
        ((5, 1024, 40, 128), 8, 2),
        ((1, 2048, 40, 128), 8, 2),
    ],
)
def test_causal_parts_are_the_fastest_of_those_measured(queries, heads, parts):
    """On one H100, microseconds with 1, 2, 4 and 8 parts: 695, 591, 524, 689; 1,973, 1,681, 1,465, 2,037; and so on.

    On one H200, 7 heads in 1, 2, 3, 4 and 7 parts: 566, 494, 502, 512, 555; in 2, 3, 4 and 7: 126, 110, 118, 128.
    """
    key = (*queries[:2], heads, queries[3])
    assert heuristic(dataclasses.replace(FINE, query=queries, key=key, value=key)).head_parts == parts


@pytest.mark.parametrize(
    ("queries", "heads", "changes", "keys"),
    [
        ((1, 3001, 2, 128), 2, {"rules": Rules(scale=0.1)}, 64),
        ((1, 2048, 8, 128), 8, {"rules": Rules(scale=0.1)}, 128),
        ((2, 1024, 12, 80), 12, {"rules": Rules(scale=0.1)}, 128),
        ((1, 2048, 8, 128), 8, {}, 64),
        ((1, 4096, 4, 128), 1, {}, 64),
        ((1, 3072, 8, 96), 8, {}, 128),
        ((1, 512, 8, 128), 8, {}, 64),
        ((1, 4096, 4, 96), 2, {"rules": Rules(scale=0.1), "key_lengths": True}, 64),
        ((4, 1024, 4, 112), 4, {"rules": Rules(scale=0.1), "key_lengths": True}, 128),
        ((1, 2048, 8, 128), 1, {"rules": Rules(scale=0.1), "key_lengths": True}, 128),
        ((4, 512, 2, 128), 2, {"rules": Rules(scale=0.1), "key_lengths": True}, 64),
        ((1, 4096, 4, 64), 1, {}, 64),
        ((1, 2048, 8, 64), 1, {"rules": Rules(scale=0.1), "key_lengths": True}, 128),
    ],
)
def test_blocks_have_as_many_keys_as_the_fastest_of_those_measured(queries, heads, changes, keys):
    """On one H200, the first (3,000 queries) takes 79 us with 64 keys and 121 with 128; the second 112 and 94."""
    key = (*queries[:2], heads, queries[3])
    params = heuristic(dataclasses.replace(FINE, query=queries, key=key, value=key, **changes))
    assert params.form == "fused"
    assert params.keys == keys


@pytest.mark.parametrize(("heads", "warpgroups"), [(4, 1), (8, 2)])
@pytest.mark.parametrize("dim", [136, 192, 256])
def test_wide_heads_have_two_stages_of_keys(dim, heads, warpgroups):
    """On one H200, 8 heads of 4,096 queries take 718 us at D256, and 845 with one stage."""
    key = (1, 2048, heads, dim)
    params = heuristic(dataclasses.replace(FINE, query=key, key=key, value=key))
    assert (params.form, params.kv_stages, params.q_warpgroups) == ("split", 2, warpgroups)


def test_parts_alternate_only_if_the_cache_holds_them_all():
    """On one H100, 8,192 queries: 5,018 us two by two, 9,319 all together; 1,024: 304 all together, 315 one by one."""
    for queries, batch, at_most in ((8192, 1, 8), (1024, 8, 16)):
        shape = (batch, queries, 64 if batch == 1 else 16, 128)
        problem = backward_problem(dataclasses.replace(FINE, query=shape, key=shape, value=shape))
        assert 2 <= order_of(problem, FUSED).together <= at_most


@pytest.mark.parametrize(
    ("queries", "heads", "parts"),
    [
        ((16, 2048, 8, 80), 1, 4),
        ((8, 4096, 8, 128), 2, 4),
        ((4, 4096, 16, 80), 2, 8),
        ((32, 1024, 4, 128), 1, 2),
        ((8, 2048, 16, 128), 4, 2),
        ((32, 1024, 8, 80), 4, 1),
    ],
)
def test_parts_of_full_calls_with_lengths_are_the_fastest_of_those_measured(queries, heads, parts):
    """On one H200, the first takes 1,213, 965, 868 and 894 us with 1, 2, 4 and 8 parts."""
    key = (*queries[:2], heads, queries[3])
    call = dataclasses.replace(FINE, query=queries, key=key, value=key, rules=Rules(scale=0.1), key_lengths=True)
    assert heuristic(call).head_parts == parts


@pytest.mark.parametrize(
    ("queries", "heads", "parts"),
    [((1, 8192, 16, 64), 4, 4), ((2, 4096, 8, 8), 2, 4), ((32, 1024, 8, 224), 2, 1), ((64, 512, 8, 216), 1, 1)],
)
def test_long_packed_sequences_have_more_parts(queries, heads, parts):
    """On one H200, the first takes 377 us with 1 part, and 281 with 4; the third 752 with 1, and 826 with 2."""
    key = (*queries[:2], heads, queries[3])
    call = dataclasses.replace(FINE, query=queries, key=key, value=key, segments=True)
    assert heuristic(call).head_parts == parts


@pytest.mark.parametrize(
    "changes",
    [{"rules": Rules(scale=0.1, left=63, right=0)}, {"rules": Rules(scale=0.1)}, {"key_lengths": True}],
    ids=["window", "full", "lengths"],
)
def test_parts_of_huge_calls_are_chosen_without_a_list_of_their_blocks(changes):
    key = (64, 65536, 4, 128)
    call = dataclasses.replace(FINE, query=(64, 65536, 256, 128), key=key, value=key, **changes)
    tracemalloc.start()
    try:
        heuristic(call)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20  # the blocks of 64 parts are 8 million


def windowed(dim, left):
    sizes = {"queries": 2048, "keys": 2048, "head_dim": dim, "value_dim": dim}
    return described(Case(rules=Rules(scale=0.2, left=left, right=0), **sizes))


@pytest.mark.parametrize(
    ("dim", "left", "expected"),
    [(32, 63, (1, 64)), (32, 511, (2, 128)), (64, 63, (2, 64)), (64, 511, (2, 64)), (64, 1023, (2, 128))],
)
def test_a_narrow_window_has_few_queries_a_step(dim, left, expected):
    call = windowed(dim, left)
    found = heuristic(call)
    assert (found.warpgroups, found.q_block) == expected
    assert found in space(call)


@pytest.mark.parametrize(
    ("queries", "cap", "dim", "q_block"),
    [(512, 20.0, 64, 64), (512, None, 64, 128), (1024, 20.0, 64, 128), (512, 20.0, 24, 128)],
)
def test_short_causal_calls_with_a_soft_cap_have_fewer_queries_a_step(queries, cap, dim, q_block):
    sizes = {"queries": queries, "keys": queries, "head_dim": dim, "value_dim": dim}
    rules = Rules(scale=0.2, right=0, soft_cap=cap)
    assert heuristic(described(Case(batch=64, heads=8, groups=2, rules=rules, **sizes))).q_block == q_block


@pytest.mark.parametrize(("dim", "left", "form"), [(128, 127, "split"), (96, 255, "split"), (128, 511, "fused")])
def test_a_narrow_window_has_a_kernel_for_the_gradient_of_queries(dim, left, form):
    call = windowed(dim, left)
    found = heuristic(call)
    assert (found.form, found.division) == (form, "keys")
    assert found in space(call)


@pytest.mark.parametrize(
    ("queries", "heads", "parts"),
    [
        ((9, 1024, 28, 112), 4, 3),
        ((9, 1024, 28, 80), 4, 3),
        ((3, 2048, 12, 128), 2, 4),
        ((5, 1024, 40, 128), 8, 2),
        ((3, 1536, 32, 128), 4, 5),
        ((5, 1024, 16, 128), 4, 3),
        ((1, 5148, 16, 120), 2, 5),
        ((7, 1024, 15, 128), 5, 2),
        ((1, 2048, 40, 128), 8, 1),
    ],
)
def test_parts_of_equal_work_fill_the_last_round_of_blocks(queries, heads, parts):
    """They are the fastest of those measured on one H200, e.g. 750 us instead of 869 with one part and 800 with 7."""
    key = (*queries[:2], heads, queries[3])
    call = dataclasses.replace(FINE, query=queries, key=key, value=key, rules=Rules(scale=0.1))
    assert heuristic(call).head_parts == parts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"platform": "cpu", "device_fingerprint": "cpu:x"}, "needs a Hopper GPU, .* for cpu:x"),
        ({"device_fingerprint": "gpu:nvidia_b200"}, "needs a Hopper GPU"),
        ({"partitioned": True}, "jax.shard_map"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"query": (2, 256, 4, 100)}, "query has head_dim 100; .* multiples of 8"),
        ({"value": (2, 256, 2, 264)}, "value has head_dim 264"),
        ({"key": (2, 0, 2, 128)}, "sizes above 0"),
        ({"rules": Rules(scale=0.0)}, "scale"),
        ({"query": (2, 256, 4, 256), "bias": (1, 4, 256, 256)}, "bias .* up to head_dim 128"),
        ({"deterministic": True, "bias": (1, 4, 256, 256)}, r"bias has shape \(1, 4, .* deterministic=True excludes"),
    ],
)
def test_refusal_names_the_argument_and_the_way_out(monkeypatch, changes, words):
    monkeypatch.setattr(compat.kernels, "mosaic_gpu_reason", lambda: None)
    reason = unsupported_reason(dataclasses.replace(FINE, **changes))
    assert re.search(words, reason), reason
    assert re.search("'xla'|'cudnn'", reason)


def test_what_the_environment_lacks_is_the_reason(monkeypatch):
    monkeypatch.setattr(compat.kernels, "mosaic_gpu_reason", lambda: "no such thing here")
    assert "no such thing here" in unsupported_reason(FINE)


@pytest.mark.parametrize(
    ("dims", "params", "words"),
    [
        ((128, 128), dataclasses.replace(FUSED, q_stages=4, dout_stages=4), "shared memory"),
        ((128, 128), dataclasses.replace(FUSED, q_block=192), "q_block must be 64 or 128"),
        ((128, 128), dataclasses.replace(SPLIT, warpgroups=3, q_stages=1, dout_stages=1), "accumulator registers"),
        ((64, 64), dataclasses.replace(FUSED, warpgroups=3), "cannot divide the 64 columns"),
        ((192, 128), dataclasses.replace(WIDE, q_block=128), "q_block must be 64"),
        ((256, 256), FUSED, "shared memory"),
        (
            (128, 128),
            dataclasses.replace(FUSED, head_parts=3),
            "head_parts must be at most 2, the heads of a group, got 3",
        ),
    ],
)
def test_parameters_that_cannot_run_are_refused(dims, params, words):
    call = dataclasses.replace(FINE, query=(2, 256, 4, dims[0]), key=(2, 256, 2, dims[0]), value=(2, 256, 2, dims[1]))
    assert re.search(words, params_fault(call, params)), params_fault(call, params)


def test_a_bias_needs_the_division_by_keys():
    assert "division='keys'" in params_fault(dataclasses.replace(FINE, bias=(1, 4, 256, 256)), WIDE_SPLIT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("form", "both"),
        ("division", None),
        ("warpgroups", 4),
        ("q_block", 65),
        ("q_stages", 0),
        ("kv_block", 64),
        ("head_parts", 0),
    ],
)
def test_error_names_field_and_value(field, value):
    with pytest.raises(ConfigError, match=rf"{field} must be .*, got {value!r}"):
        BackwardParams(**{field: value})


def test_only_sums_in_one_order_repeat_bit_by_bit():
    biased = dataclasses.replace(FINE, bias=(1, 4, 256, 256))
    assert not is_deterministic(FINE, FUSED)
    assert is_deterministic(FINE, SPLIT)
    assert not is_deterministic(biased, SPLIT)
    assert is_deterministic(dataclasses.replace(biased, bias=(2, 4, 256, 256)), SPLIT)


packed_once = jax.jit(packed, static_argnums=(1, 2))


@settings(max_examples=40)
@given(st.data())
def test_ranges_hold_every_visible_pair_and_no_hidden_one_without_a_mask(data):
    masked = data.draw(st.booleans(), "masked")  # a mask is known for 32 queries at once
    # few shapes, since each is compiled: shorter than a block, whole blocks, and a rest
    lengths = [(1, 24), (96, 1), (150, 13)] if masked else [(1, 24), (3, 17), (13, 1), (24, 7), (16, 16)]
    queries, keys = data.draw(st.sampled_from(lengths), "lengths")
    blocks = Blocks(*data.draw(st.sampled_from([(32, 4), (64, 8)] if masked else [(2, 8), (4, 4), (8, 2)]), "blocks"))
    left, right = data.draw(st.tuples(*[st.none() | st.integers(0, 20)] * 2), "window")
    rules, ids = Rules(scale=1.0, left=left, right=right), [None, None]
    visible = within_window(np.arange(queries) + keys - queries, np.arange(keys), rules)
    visible = np.ones((1, queries, keys), bool) if visible is None else np.asarray(visible)[None]
    if data.draw(st.booleans(), "segments"):
        ids = [np.array([data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))]) for n in (queries, keys)]
        visible = visible & (ids[0][:, :, None] == ids[1][:, None, :])
    counts, mask, words = (-(-queries // blocks.queries), -(-keys // blocks.keys)), None, None
    if masked:
        mask = np.random.default_rng(data.draw(st.integers(0, 99))).random((1, 2, queries, keys)) < 0.02
        words = np.asarray(packed_once(mask, (counts[0] * blocks.queries + 64, counts[1] * blocks.keys + 8), 2))
    shapes = ((1, queries, 1, 1), (1, keys, 1, 1), (1, keys, 1, 1))
    operands = Operands(*(np.zeros(shape) for shape in shapes), query_segments=ids[0], key_segments=ids[1])
    whole = np.zeros((counts[0] * blocks.queries, counts[1] * blocks.keys), bool)
    some, every = whole.copy(), whole.copy()
    some[:queries, :keys] = visible[0] if mask is None else visible[0] & mask.any(axis=(0, 1))
    every[:queries, :keys], every[queries:, :keys] = visible[0], True
    shape = (counts[0], blocks.queries, counts[1], blocks.keys)
    some, every = some.reshape(shape).any(axis=(1, 3)), every.reshape(shape).all(axis=(1, 3))
    for ranges, seen, free in (
        (ranges_of_queries(operands, rules, blocks, words), some.T, every.T),
        (ranges_of_keys(operands, rules, blocks, words), some, every),
    ):
        first, begin, end, last = (np.asarray(ranges)[0, :, i, None] for i in range(4))
        tiles = np.arange(seen.shape[1])
        assert (np.diff(np.asarray(ranges)[0], axis=-1) >= 0).all()
        assert not (seen & ~((first <= tiles) & (tiles < last))).any()
        assert not ((begin <= tiles) & (tiles < end) & ~free).any()


@pytest.mark.parametrize(
    "rules", [Rules(scale=1.0), CAUSAL, Rules(scale=1.0, left=5, right=7), Rules(scale=1.0, left=60)]
)
@pytest.mark.parametrize("sizes", [(150, 150), (70, 150), (150, 33)])
def test_lengths_cut_the_ranges_as_a_search_in_all_tiles_does(rules, sizes):
    queries, keys = (jnp.asarray([0, 1, size // 2, 32, 33, size, size], jnp.int32) for size in sizes)
    # In any pairs: all lengths of queries with all of keys.
    queries, keys = jnp.repeat(queries, len(keys)), jnp.tile(keys, len(queries))
    shapes = ((49, sizes[0], 1, 1), *((49, sizes[1], 1, 1),) * 2)
    operands = Operands(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    for some_lengths in (
        {"query_lengths": queries},
        {"key_lengths": keys},
        {"query_lengths": queries, "key_lengths": keys},
    ):

        @jax.jit
        def both(lengths):
            limited, blocks = operands._replace(**lengths), Blocks(16, 32)
            some, every = visibility._seen_by_heads(limited, rules, blocks, None)
            by_keys, by_queries = ([x.swapaxes(1, 2) for x in (some, every)], (some, every))
            searched = [
                visibility._ranges(*x, masked_after=after) for x, after in ((by_keys, False), (by_queries, True))
            ]
            return [of(limited, rules, blocks) for of in (ranges_of_queries, ranges_of_keys)], searched

        for found, searched in zip(*both(some_lengths), strict=True):
            np.testing.assert_array_equal(*np.broadcast_arrays(found, np.stack(searched, axis=-1)))


def test_empty_rows_have_the_log_sum_exp_that_gives_zero_weights():
    assert jnp.exp2(jnp.float32(-EMPTY_ROW_LSE)) == 0
