# SPDX-License-Identifier: Apache-2.0
"""Our attention for TPUs, interpreted: several blocks, every kind of tile, streamed arrays; and its parameters."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tests.arrays import on_device

from ejkernel.kernels._vector_memory import Need, like, memory_of, memory_to_pass, untuned_of
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, AttentionCall, Operands, Rules
from ejkernel.kernels.flash_attention.pallas_tpu import choices, launch
from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu
from ejkernel.kernels.flash_attention.pallas_tpu.params import BackwardParams, ForwardParams
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.ops.errors import ConfigError

CHIPS = ("tpu:tpu_v5_lite", "tpu:tpu_v6_lite", "tpu:tpu_v5", "tpu:tpu7x", "tpu:tpu_v4")
FORWARD = ForwardParams(block_q=256, chunk=128, rows=256, strip=128)
BACKWARD = BackwardParams(block_kv=256, chunk=128, strip=128)
PARTS = dataclasses.replace(FORWARD, resident=256)
SPLIT = dataclasses.replace(BACKWARD, resident=256, query=PARTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call and its parameters."""

    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None
    queries: int = 384
    keys: int = 384
    heads: int = 2
    dims: tuple[int, int] = (32, 32)
    segments: bool = False
    lengths: bool = False
    forward: ForwardParams = FORWARD
    backward: BackwardParams = BACKWARD


CASES = {
    "full, odd lengths": Case(queries=300, keys=410),
    "causal, unrolled": Case(
        right=0,
        queries=768,
        keys=768,
        heads=1,
        forward=dataclasses.replace(FORWARD, rows=128, unroll=4, sum_by_product=True),
        backward=dataclasses.replace(BACKWARD, unroll=2, transpose=True),
    ),
    "causal, keys before": Case(right=0, queries=200, keys=600),
    "causal, rows without keys": Case(right=0, queries=512, keys=256),
    "window, two sides": Case(left=100, right=70, queries=640, keys=640),
    "window, one side": Case(left=170),
    "window, odd lengths": Case(left=100, right=0, queries=477, keys=600),
    "soft cap": Case(right=0, soft_cap=2.0),
    "unequal dims": Case(
        right=0,
        dims=(48, 128),
        forward=dataclasses.replace(FORWARD, sum_by_product=True),
        backward=dataclasses.replace(BACKWARD, transpose=True),
    ),
    "segments and window": Case(left=130, right=0, segments=True),
    "lengths": Case(lengths=True),
    "parts, full": Case(queries=512, keys=512, forward=PARTS, backward=SPLIT),
    "parts, window": Case(left=200, right=0, queries=768, keys=768, forward=PARTS, backward=SPLIT),
    "parts, segments, keys before": Case(right=0, queries=600, keys=1024, segments=True, forward=PARTS, backward=SPLIT),
}


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


def operands_of(case):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return on_device(rng.standard_normal(shape), jnp.float32)

    ids, lengths = (None, None), (None, None)
    if case.segments:
        keys = jnp.asarray(np.sort(rng.integers(0, 4, (1, case.keys)), axis=1), jnp.int32)
        ids = (keys[:, case.keys - case.queries :], keys)
    if case.lengths:
        lengths = (jnp.asarray([200], jnp.int32), jnp.asarray([300], jnp.int32))
    arrays = (
        normal(1, case.queries, case.heads, case.dims[0]),
        normal(1, case.keys, 1, case.dims[0]),
        normal(1, case.keys, 1, case.dims[1]),
    )
    cotangents = normal(1, case.queries, case.heads, case.dims[1]), normal(1, case.heads, case.queries)
    return Operands(*arrays, None, None, *ids, *lengths), cotangents


# Of these, each feature is also part of another case.
REPEATED = ("causal, keys before", "window, one side", "parts, full")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole] * (n in REPEATED)) for n in CASES])
def test_results_and_gradients_match_the_reference(interpreted, name):
    """Also where blocks end before and behind the sequences, and with a cotangent of the log-sum-exp."""
    case = CASES[name]
    rules = Rules(scale=0.2, left=case.left, right=case.right, soft_cap=case.soft_cap)
    operands, (dout, dlse) = operands_of(case)

    @jax.jit
    def reference(operands):
        (out, lse), pull = jax.vjp(lambda *arrays: attention(Operands(*arrays, *operands[3:]), rules), *operands[:3])
        return out, lse, *pull((dout, jnp.where(lse == EMPTY_ROW_LSE, 0, dlse)))

    expected = reference(operands)
    dlse = jnp.where(expected[1] == EMPTY_ROW_LSE, 0, dlse)

    @jax.jit
    def ours(operands):
        found = launch.forward(operands, rules, case.forward)
        return *found, *launch.backward(operands, found, dout, rules, case.backward, dlse)[:3]

    for want, got in zip(expected, ours(operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5 * max(1, np.abs(want[want < 1e29]).max()))


def call_of(length, chip, backward, **more):
    heads = {"query": (1, length, 8, 128), "key": (1, length, 4, 128), "value": (1, length, 4, 128)}
    rules = Rules(scale=0.1, **more)
    return AttentionCall(
        **heads, dtype="bfloat16", rules=rules, platform="tpu", device_fingerprint=chip, backward=backward
    )


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("length", [1, 300, 4096, 131_072])
def test_the_heuristic_fits_in_the_memory_of_every_chip(length, chip, backward):
    for more in ({}, {"right": 0}, {"left": 1000, "right": 0}):
        call = call_of(length, chip, backward, **more)
        implementation = PallasTpu()
        assert implementation.doubt(call, implementation.heuristic(call)) is None
        space = implementation.space(call)
        assert implementation.heuristic(call) in space
        assert 1 <= len(space) <= 60


def test_the_heuristic_takes_parameters_whose_upper_estimate_is_a_little_above_the_share():
    """Those of the simulated sweeps; the compiler reports less than the estimate."""
    heads = {"query": (2, 8192, 1, 192), "key": (2, 8192, 1, 192), "value": (2, 8192, 1, 128)}
    call = dataclasses.replace(call_of(8192, CHIPS[2], True, right=0), **heads)
    assert 3 * memory_of(call) // 4 < choices.needed(call, PallasTpu().heuristic(call)).most <= untuned_of(call)
    assert PallasTpu().heuristic(call).block_kv == 2048


def test_long_sequences_are_streamed_and_their_backward_is_split():
    assert PallasTpu().heuristic(call_of(4096, CHIPS[0], False)).resident is None
    assert PallasTpu().heuristic(call_of(131_072, CHIPS[0], False)).resident is not None
    assert PallasTpu().heuristic(call_of(4096, CHIPS[0], True)).query is None
    assert PallasTpu().heuristic(call_of(131_072, CHIPS[0], True)).query is not None


def test_parameters_that_exceed_the_memory_are_refused_with_the_sizes():
    call = call_of(65_536, CHIPS[1], True, right=0)
    fault = PallasTpu().params_fault(call, BackwardParams())
    assert "bytes of vector memory, and a kernel may take 134217728" in fault
    assert choices.needed(call, BackwardParams()).least > memory_of(call)


# Bytes that Google's compiler used, libtpu 0.0.48.1; benchmarks/results/memory_attention_tpu_fitted.json has more.
COMPILED = {
    "unrolled chunks": (17_448_960, Rules(scale=0.1), ForwardParams(block_q=1024, chunk=512, unroll=4)),
    "strips of causal attention": (
        31_584_256,
        Rules(scale=0.1, right=0),
        ForwardParams(block_q=2048, chunk=1024, rows=512, strip=256),
    ),
    "sum by product": (
        34_668_544,
        Rules(scale=0.1, right=0),
        ForwardParams(block_q=2048, chunk=2048, rows=2048, unroll=1, sum_by_product=True),
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_estimates_of_memory_are_up_to_25_percent_above_the_compilers(name):
    used, rules, params = COMPILED[name]
    call = dataclasses.replace(call_of(8192, CHIPS[1], False), rules=rules)
    need = choices.needed(call, params)
    assert need.least <= used <= need.most <= 1.25 * used


def test_the_estimate_of_a_common_kernel_is_the_compilers_figure():
    call = call_of(4096, CHIPS[1], False, right=0)
    params = PallasTpu().heuristic(call)
    for alike in (call, dataclasses.replace(call, query=(7, 4096, 4, 128))):
        assert 30_474_240 <= choices.needed(alike, params).most <= 1.04 * 30_474_240
    others = [dataclasses.replace(params, rows=1024), dataclasses.replace(params, strip=256)]
    forms = {choices.parts_of(call, each)[0][-2:] for each in (params, *others)}
    forms |= {choices.parts_of(call_of(4096, chip, False, right=0), params)[0][-2:] for chip in CHIPS}
    assert len(forms) == 2 + len({like(chip) for chip in CHIPS})


# Queries, head dimensions, repeats, dtype, mask, parameters, and the bytes of the largest kernel.
NEEDS_MORE = {
    "unrolled beyond the chunks of a causal call": (
        *("tpu:tpu_v5", 3000, (160, 160), 8, "bfloat16", {"right": 0}),
        *(ForwardParams(block_q=1024, chunk=1024, unroll=4, rows=1024, strip=256), 28_217_344),
    ),
    "a value that fills its last register in part": (
        *("tpu:tpu_v5", 4096, (128, 160), 8, "bfloat16", {"right": 0}),
        *(BackwardParams(block_kv=2048, chunk=1024, strip=256), 40_370_176),
    ),
    "strips of a single block": (
        *("tpu:tpu_v6_lite", 2048, (64, 64), 4, "bfloat16", {"left": 511, "right": 0}),
        *(BackwardParams(block_kv=2048, chunk=1024, strip=512), 22_470_656),
    ),
    "causal gradients of wide dimensions, partial values": (
        *("tpu:tpu_v6_lite", 16_384, (256, 240), 1, "bfloat16", {"right": 0}),
        *(BackwardParams(block_kv=1024, chunk=1024, unroll=1, strip=512, transpose=True), 84_664_320),
    ),
    "causal gradients of wide partial dimensions": (
        *("tpu:tpu_v5_lite", 16_384, (240, 240), 1, "bfloat16", {"right": 0}),
        *(BackwardParams(block_kv=2048, chunk=1024, unroll=1, strip=256), 99_270_656),
    ),
    "padded keys of a float32 forward with a partial value": (
        *("tpu:tpu_v5", 3000, (192, 192), 2, "float32", {}),
        *(ForwardParams(block_q=1024, chunk=512, unroll=1, rows=1024, strip=256), 29_806_592),
    ),
    "padded keys of a gradient": (
        *("tpu:tpu_v5_lite", 1500, (80, 80), 4, "bfloat16", {}),
        *(BackwardParams(block_kv=1024, chunk=2048, unroll=1, strip=512), 12_941_312),
    ),
    "chunks of a v5p that are unrolled": (
        *("tpu:tpu_v5", 4096, (64, 64), 1, "bfloat16", {"right": 0}),
        *(ForwardParams(block_q=2048, chunk=2048, unroll=2, rows=2048, strip=256), 42_151_936),
    ),
    "two kernels in float32": (
        *("tpu:tpu_v5", 8192, (256, 256), 1, "float32", {"right": 0}),
        BackwardParams(
            block_kv=512,
            chunk=512,
            strip=256,
            query=ForwardParams(block_q=512, chunk=512, unroll=1, rows=512, strip=256),
        ),
        54_120_448,
    ),
}


def test_estimates_of_memory_of_strips_with_ids_are_not_below_the_compilers():
    heads = {"query": (1, 1024, 4, 160), "key": (1, 1024, 1, 160), "value": (1, 1024, 1, 160)}
    call = dataclasses.replace(call_of(1024, CHIPS[1], False, right=0), **heads, segments=True)
    need = choices.needed(call, ForwardParams(block_q=1024, chunk=512, strip=256))
    assert need.least <= 8_830_976 <= need.most <= 1.35 * 8_830_976


@pytest.mark.parametrize("name", NEEDS_MORE)
def test_estimates_of_memory_are_not_below_the_compilers(name):
    *case, params, used = NEEDS_MORE[name]
    need = choices.needed(drawn_call(*case, params), params)
    assert need.least <= used <= need.most <= 1.3 * used


@pytest.mark.parametrize(
    ("chip", "length", "dims", "used"),
    [
        ("tpu:tpu_v5_lite", 1024, (1024, 1024), 24_031_232),
        ("tpu:tpu_v5", 1024, (768, 512), 14_901_248),
        ("tpu:tpu_v6_lite", 512, (576, 512), 7_004_160),
        ("tpu:tpu_v6_lite", 2048, (576, 512), 25_559_040),
    ],
)
def test_estimates_of_heads_beyond_the_fit_are_not_below_the_compilers(chip, length, dims, used):
    call = drawn_call(chip, length, dims, 2, "bfloat16", {"right": 0}, None)
    need = choices.needed(call, choices.heuristic(call))
    assert need.least <= used <= need.most <= 1.5 * used


def drawn_call(chip, length, dims, repeats, dtype, mask, params):
    dim, value_dim = dims
    return AttentionCall(
        query=(2, length, repeats, dim),
        key=(2, length, 1, dim),
        value=(2, length, 1, value_dim),
        dtype=dtype,
        rules=Rules(scale=0.1, **mask),
        platform="tpu",
        device_fingerprint=chip,
        backward=isinstance(params, BackwardParams),
    )


def test_windows_of_a_single_head_have_one_buffer():
    params = BackwardParams(block_kv=512, chunk=512, strip=256, query=ForwardParams(block_q=512, chunk=512))
    call = drawn_call(CHIPS[1], 8192, (128, 128), 1, "bfloat16", {"right": 0}, params)
    alone = dataclasses.replace(call, query=(1, *call.query[1:]), key=(1, *call.key[1:]), value=(1, *call.value[1:]))
    keys, one = choices.parts_of(call, params)[0], choices.parts_of(alone, params)[0]
    assert keys.known - one.known == keys.least - one.least == 8192 * (2 * 256 + 8)


def test_the_compiler_decides_whether_parameters_fit_that_the_estimates_do_not_decide():
    """It refuses these, which take 72 of 64 MiB."""
    params = ForwardParams(block_q=2048, chunk=2048, unroll=4, rows=2048, strip=256)
    call = drawn_call("tpu:tpu_v5", 8192, (240, 240), 1, "bfloat16", {"left": 4095, "right": 0}, params)
    assert PallasTpu().doubt(call, params) is not None
    assert choices.needed(call, params).least <= 75_602_329
    assert PallasTpu().params_fault(call, params) is None


def test_estimates_of_memory_depend_on_what_a_kernel_reads():
    """Ids put a branch around each tile, and padding has ids; a transposed gradient has no padded lanes."""

    def most(call, params):
        return choices.needed(call, params).most

    params = ForwardParams(block_q=1024, chunk=1024, unroll=4)
    plain = call_of(8192, CHIPS[1], False)
    assert most(dataclasses.replace(plain, segments=True), params) < most(plain, params)
    assert most(call_of(8000, CHIPS[1], False), params) < most(plain, params)
    causal = call_of(8000, CHIPS[1], False, right=0)
    assert most(causal, params) == most(call_of(8192, CHIPS[1], False, right=0), params)
    narrow = {"query": (1, 8192, 8, 64), "key": (1, 8192, 4, 64), "value": (1, 8192, 4, 64)}
    backward = dataclasses.replace(call_of(8192, CHIPS[1], True), **narrow)
    plain, transposed = (choices.parts_of(backward, BackwardParams(transpose=flag))[0] for flag in (False, True))
    assert plain.known - transposed.known == 2**21


@pytest.mark.parametrize(("estimate", "limit"), [(2**20, 2**24), (2**23, 2**24), (2**25, 2**26)])
def test_the_compilers_limit_has_a_margin_above_the_estimate(estimate, limit):
    assert memory_to_pass(Need(0, estimate), []).limit == limit


@pytest.mark.parametrize(("length", "in_hbm"), [(1024, False), (2048, True)])
def test_only_long_arrays_are_kept_out_of_vector_memory(length, in_hbm):
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 128), "bfloat16") for heads in (8, 2))
    assert memory_to_pass(Need(0, 0), [query, key, key]).in_hbm is in_hbm


def test_the_space_of_float32_has_no_large_tiles():
    wide = dataclasses.replace(call_of(4096, CHIPS[1], False, right=0), dtype="float32")
    space = PallasTpu().space(wide)
    assert all(params.unroll == 1 and params.block_q * params.chunk <= 2**19 for params in space)
    assert len(space) < len(PallasTpu().space(call_of(4096, CHIPS[1], False, right=0)))


def test_heads_too_wide_for_the_memory_are_refused():
    call = dataclasses.replace(call_of(4096, CHIPS[4], False), query=(1, 4096, 8, 4096), key=(1, 4096, 4, 4096))
    assert "head_dim is 4096 for query and key and 128 for value" in PallasTpu().unsupported(call)
    assert PallasTpu().unsupported(call_of(4096, CHIPS[4], False)) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ForwardParams(block_q=100), "block_q must be a multiple of 128, got 100"),
        (lambda: ForwardParams(resident=0), "resident must be a multiple of 128, got 0"),
        (lambda: ForwardParams(unroll=9), "unroll must be from 1 to 8, got 9"),
        (lambda: ForwardParams(sum_by_product=1), "sum_by_product must be True or False, got 1"),
        (lambda: BackwardParams(resident=1024), "resident must be None in the fused form, got 1024"),
        (lambda: BackwardParams(query=4), "query must be ForwardParams or None, got 4"),
        (lambda: BackwardParams(query=FORWARD, transpose=True), "transpose must be False where"),
    ],
)
def test_wrong_parameters_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
