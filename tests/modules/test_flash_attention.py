# SPDX-License-Identifier: Apache-2.0
"""`flash_attention` as a user meets it: transformations, choices, refusals and memory."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device, ones, zeros

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import Operands, Rules
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.ops import (
    ArgumentError,
    Autotuner,
    BwdParams,
    ConfigError,
    FwdParams,
    Invocation,
    UnsupportedError,
    default_executor,
    extract_labels_from_hlo_text,
    recording,
)

pytestmark = pytest.mark.slow

KERNEL = FlashAttention()
SMALL = FlashAttentionConfig(
    fwd=FwdParams(q_blocksize=8, kv_blocksize=16), bwd=BwdParams(q_blocksize=16, kv_blocksize=8)
)


def make_qkv(length=24, heads=4, groups=2, head_dim=8, batch=2, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (batch, length, heads, head_dim), *[(batch, length, groups, head_dim)] * 2
    return tuple(on_device(rng.standard_normal(shape), dtype) for shape in shapes)


@functools.partial(jax.jit, static_argnames=("scale", "left", "right", "soft_cap"))
def reference(query, key, value, scale=8**-0.5, **rules):
    return attention(Operands(query, key, value), Rules(scale=scale, **rules))[0]


causal_attention = functools.partial(flash_attention, causal=True, cfg=SMALL)
causal_reference = functools.partial(reference, right=0)


def cpu_mesh(shape, names, axis_types):
    """Return a mesh of host devices; every test environment has enough."""
    return jax.make_mesh(shape, names, axis_types=axis_types, devices=jax.devices("cpu")[: math.prod(shape)])


def total(function):
    return lambda *arrays: jnp.sin(function(*arrays)).sum()


def assert_same(expected, actual):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4), expected, actual)


TRANSFORMATIONS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "gradient": lambda f: jax.grad(total(f), (0, 1, 2)),
    "jit of gradient": lambda f: jax.jit(jax.value_and_grad(total(f), (0, 1, 2))),
    "tangents": lambda f: lambda *a: jax.jvp(f, a, a),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(total(f))),
    "scan": lambda f: jax.grad(
        lambda q, k, v: jax.lax.scan(lambda c, _: (f(c, k, v), None), q, None, length=2)[0].sum()
    ),
    "vmap": lambda f: lambda q, k, v: jax.vmap(f, (0, None, None))(q[:, None], k[:1], v[:1]),
    "vmap of gradient": lambda f: jax.vmap(lambda *a: jax.grad(total(f), (0, 1))(*(x[None] for x in a))),
    "gradient of vmap": lambda f: jax.grad(
        lambda q, k, v: total(jax.vmap(f, (0, None, None)))(q[:, None], k[:1], v[:1])
    ),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_agree_with_the_formula(name):
    transform, arrays = TRANSFORMATIONS[name], make_qkv()
    assert_same(jax.jit(transform(causal_reference))(*arrays), transform(causal_attention)(*arrays))


@pytest.mark.parametrize("transform", [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))], ids=["fwd-rev", "rev-rev"])
def test_second_derivatives(transform):
    """No loop stands in the way of reverse mode over reverse mode."""
    query, key, value = make_qkv(length=6, heads=1, groups=1, head_dim=2, batch=1)
    cfg = FlashAttentionConfig(
        fwd=FwdParams(q_blocksize=4, kv_blocksize=3), bwd=BwdParams(q_blocksize=3, kv_blocksize=4)
    )
    ours = functools.partial(flash_attention, causal=True, cfg=cfg)
    plain = functools.partial(reference, scale=2**-0.5, right=0)
    found = jax.jit(transform(lambda q: total(ours)(q, key, value)))(query)
    assert_same(jax.jit(jax.hessian(lambda q: total(plain)(q, key, value)))(query), found)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_local_calls_under_shard_map(axis_type):
    mesh = cpu_mesh((2, 2), ("data", "heads"), (axis_type,) * 2)
    specs = (P("data", None, "heads"), P(None, None, "heads"), P(None, None, "heads"))
    query, key, value = make_qkv()
    arrays = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((query, key[:1], value[:1]), specs, strict=True)
    ]
    mapped = jax.shard_map(causal_attention, mesh=mesh, in_specs=specs, out_specs=specs[0])

    def expected(query, key, value):
        return causal_reference(query, *(jnp.broadcast_to(x, (2, *x.shape[1:])) for x in (key, value)))

    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(total(mapped), (0, 1, 2)))(*arrays)
    assert_same(jax.value_and_grad(total(expected), (0, 1, 2))(query, key[:1], value[:1]), found)


def test_automatic_sharding_gives_the_same_result():
    mesh = cpu_mesh((4,), ("data",), (AxisType.Auto,))
    arrays = make_qkv(batch=4)
    sharded = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arrays]
    found = jax.jit(jax.grad(total(causal_attention), (0, 1, 2)))(*sharded)
    assert_same(jax.grad(total(causal_reference), (0, 1, 2))(*arrays), found)


def test_bias_of_fewer_axes_gets_a_gradient_of_its_shape():
    query, key, value = make_qkv()
    bias = jnp.linspace(-1, 1, 4 * 24 * 24).reshape(4, 24, 24)
    found = jax.grad(lambda b: total(functools.partial(flash_attention, bias=b, cfg=SMALL))(query, key, value))(bias)
    expected = jax.grad(
        lambda b: jnp.sin(attention(Operands(query, key, value, b[None]), Rules(scale=8**-0.5))[0]).sum()
    )(bias)
    assert_same(expected, found)


def test_masks_may_be_numpy_arrays_and_key_padding():
    query, key, value = make_qkv()
    padding = np.arange(24)[None] < np.array([[24], [10]])
    found = flash_attention(query, key, value, attention_mask=padding, cfg=SMALL)
    assert_same(reference(query[1:], key[1:, :10], value[1:, :10]), found[1:])


def test_segments_have_separate_keys():
    query, key, value = make_qkv()
    segments = jnp.asarray([[0] * 10 + [1] * 14] * 2)
    found = flash_attention(query, key, value, causal=True, segment_ids=segments, cfg=SMALL)
    assert_same(causal_reference(query[:, 10:], key[:, 10:], value[:, 10:]), found[:, 10:])
    pair = flash_attention(query, key, value, causal=True, segment_ids=(segments, segments), cfg=SMALL)
    assert_same(found, pair)


def test_segments_of_64_bits_are_different():
    """Kernels for GPUs and TPUs compare 32 bits."""
    query, key, value = make_qkv()
    segments = np.asarray([[1] * 10 + [1 + 2**32] * 6 + [-1] * 4 + [2**32 - 1] * 4] * 2)
    numbered = np.unique(segments, return_inverse=True)[1].reshape(segments.shape)
    expected = flash_attention(query, key, value, segment_ids=numbered, cfg=SMALL)
    with jax.enable_x64(True):
        found = flash_attention(query, key, value, segment_ids=segments, cfg=SMALL)
        arrays, _ = KERNEL.prepare(query, key, value, None, None, jnp.asarray(segments))
        ids = next(x for x in arrays if isinstance(x, tuple))[1]
    assert_same(expected, found)
    assert (ids.dtype, len(np.unique(ids))) == (jnp.int32, 4)


@pytest.mark.parametrize("of_keys", [np.uint32, np.uint64])
def test_a_segment_has_one_number_in_pairs_of_different_dtypes(of_keys):
    """The largest ids in 32 bits are other segments than the negative ones with the same bits."""
    query, key, value = make_qkv()
    segments = np.asarray([[1] * 10 + [2**32 - 5] * 10 + [2**31] * 4] * 2)
    expected = flash_attention(query, key, value, segment_ids=segments, cfg=SMALL)
    pair = segments, segments.astype(of_keys)
    np.testing.assert_array_equal(flash_attention(query, key, value, segment_ids=pair, cfg=SMALL), expected)
    negative = np.full_like(segments, -5, np.int32), np.full_like(segments, 2**32 - 5, of_keys)
    assert not flash_attention(query, key, value, segment_ids=negative, cfg=SMALL).any()


def test_equal_rules_are_one_call():
    """A call's key does not depend on how the same thing was said."""
    arrays = make_qkv()

    def key(**options):
        args, options = KERNEL.prepare(*arrays, **options)
        return Invocation(kernel=KERNEL, args=args, kwargs=options).call_key

    assert key(causal=True) == key(causal=True, softmax_scale=8**-0.5) == key(sliding_window=(None, 0))
    assert key(sliding_window=(5, 0)) == key(causal=True, sliding_window=5)
    assert key(sliding_window=2**40, causal=True) == key(causal=True)
    assert key(sliding_window=(2**30, 2**40)) == key()
    assert key(causal=True) != key()


def test_preparing_twice_changes_nothing():
    mask, segments = jnp.ones((2, 24), bool), jnp.zeros((2, 24), jnp.int32)
    once = KERNEL.prepare(
        *make_qkv(), None, mask, segments, causal=True, sliding_window=3, logits_soft_cap=5, implementation="xla"
    )
    twice = KERNEL.prepare(*once[0], **once[1])
    assert once[1] == twice[1]
    assert jax.tree.map(jnp.shape, once[0]) == jax.tree.map(jnp.shape, twice[0])


QUERY, KEY, VALUE = make_qkv()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": [1.0]}, "query must be an array, got list"),
        ({"query": QUERY[0]}, r"key must have query's batch axes, \(\), and three more; got \(2, 24, 2, 8\)"),
        ({"query": QUERY[0, 0]}, r"query must have axes .* got shape \(4, 8\)"),
        (
            {"key": KEY[:, :0]},
            r"key must be \[\*batch, length, heads, head_dim\] with any batch axes, none of them empty",
        ),
        ({"query": QUERY[:, :, :2], "key": KEY[:, :0], "causal": True}, r"any batch axes, none of them empty"),
        ({"key": KEY.astype("bfloat16")}, "key must have query's dtype, float32; got bfloat16"),
        ({"query": QUERY.astype(int)}, "query's dtype must be one of bfloat16, float16, float32, float64; got int"),
        ({"key": KEY[:1]}, "key must have query's batch and head_dim, 2 and 8"),
        ({"value": VALUE[:, :3]}, "value must have key's batch, length and heads"),
        ({"query": QUERY[:, :, :3]}, "query has 3 heads and key has 2: query's heads must be a multiple"),
        ({"bias": ones((3, 24))}, r"bias must be broadcastable to .* = \(2, 4, 24, 24\), got shape \(3, 24\)"),
        ({"bias": ones((24, 24), bool)}, "bias must be a floating-point array, got dtype bool"),
        ({"attention_mask": ones((2, 24))}, "attention_mask must be a boolean array, got dtype float32"),
        ({"attention_mask": ones((3, 5), bool)}, r"got shape \(3, 5\). Pass \[queries, keys\] as mask"),
        ({"attention_mask": jnp.ones((24, 24), bool)}, r"mask\[None, None\]"),
        ({"segment_ids": jnp.zeros((2, 24))}, r"segment_ids must be an integer array .* got float32\[2, 24\]"),
        ({"segment_ids": zeros((2, 5), "int32")}, r"segment_ids must have shape \(2, 24\)"),
        ({"sliding_window": -1}, "sliding_window must be an int >= 0, .* got -1"),
        ({"sliding_window": (1, 2, 3)}, "sliding_window must be"),
        ({"softmax_scale": 0}, "softmax_scale must be a positive number or None, got 0"),
        ({"softmax_scale": 1e-40}, "softmax_scale must be between 1e-30 and 1e.30, .*; got 1e-40"),
        ({"logits_soft_cap": 1e39}, "logits_soft_cap must be between 1e-30 and 1e.30, .*; got 1e.39"),
        ({"logits_soft_cap": ones(2)}, "logits_soft_cap must be a positive number or None"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        (
            {"implementation": "fastest"},
            "one of .*, xla, splash, pallas_tpu, or None; got 'fastest'",
        ),
    ],
)
def test_a_wrong_argument_is_named(changes, words):
    with pytest.raises(ArgumentError, match=words):
        flash_attention(**{"query": QUERY, "key": KEY, "value": VALUE} | changes)


def test_an_unknown_implementation_is_no_configuration():
    with pytest.raises(ConfigError, match=r"implementation must be one of .*, xla, splash, pallas_tpu; got 'magic'"):
        FlashAttentionConfig(implementation="magic")


def test_a_named_implementation_is_run_or_refused():
    arrays = make_qkv(dtype="bfloat16")
    for_cpu = jax.jit(functools.partial(flash_attention, implementation="cudnn")).trace(*arrays)
    with pytest.raises(UnsupportedError, match=r"implementation='cudnn' needs an NVIDIA GPU.*use 'xla'"):
        for_cpu.lower(lowering_platforms=("cpu",))
    with pytest.raises(UnsupportedError, match=r": implementation='cudnn' needs an NVIDIA GPU.* dtype float32"):
        jax.eval_shape(functools.partial(flash_attention, implementation="cudnn"), QUERY, KEY, VALUE)
    assert flash_attention(*arrays, implementation="xla").shape == arrays[0].shape


def test_a_configuration_may_not_contradict_a_named_implementation():
    with pytest.raises(ConfigError, match=r"cfg.implementation is 'cudnn', but the call requests implementation='xla'"):
        flash_attention(QUERY, KEY, VALUE, implementation="xla", cfg=FlashAttentionConfig(implementation="cudnn"))


def test_a_configuration_that_cannot_run_the_call_is_refused():
    cfg = FlashAttentionConfig(implementation="cudnn")
    call = functools.partial(flash_attention, segment_ids=jnp.zeros((2, 24), int), cfg=cfg)
    with pytest.raises(UnsupportedError, match="flash_attention: segment_ids"):
        jax.eval_shape(call, *make_qkv(dtype="bfloat16"))


def gpu_invocation(length=4096, device="gpu:nvidia_h200", dtype="bfloat16", *, queries=None, groups=16, **options):
    query, key = (
        jax.ShapeDtypeStruct((4, *sizes, 128), dtype) for sizes in ((queries or length, 16), (length, groups))
    )
    args, options = KERNEL.prepare(query, key, key, **options)
    return Invocation(kernel=KERNEL, args=args, kwargs=options, device=device)


def test_the_heuristic_prefers_the_fastest_supported_implementation():
    has_own = compat.kernels.mosaic_gpu_reason() is None
    assert KERNEL.heuristic_cfg(gpu_invocation(causal=True)).implementation == ("mosaic_gpu" if has_own else "cudnn")
    decoding = gpu_invocation(queries=1, groups=4, causal=True)
    assert KERNEL.heuristic_cfg(decoding).implementation == "cudnn"
    assert KERNEL.heuristic_cfg(gpu_invocation(logits_soft_cap=30.0)).implementation == (
        "mosaic_gpu" if has_own else "xla"
    )
    assert KERNEL.heuristic_cfg(gpu_invocation(causal=True, implementation="xla")).implementation == "xla"
    assert KERNEL.heuristic_cfg(gpu_invocation(causal=True, device="cpu:x")).implementation == "xla"


@pytest.mark.parametrize("length", [1, 77, 300, 4096, 100_000])
@pytest.mark.parametrize("device", ["cpu:x", "gpu:nvidia_h200", "tpu:v5"])
def test_candidates_are_few_distinct_and_supported(length, device):
    candidates = KERNEL.config_space(gpu_invocation(length, device, causal=True))
    names = Counter(c.implementation for c in candidates)
    others = {"gpu": {"cudnn"}, "tpu": {"splash", "pallas_tpu"}, "cpu": set()}[device.partition(":")[0]]
    assert names.keys() - {"mosaic_gpu"} == {"xla"} | others
    assert names["xla"] + names["cudnn"] <= 20
    assert names["splash"] <= 40
    assert names["pallas_tpu"] <= 60
    assert names["mosaic_gpu"] <= 300
    assert names.total() == len(set(candidates))
    blocks = [c.fwd.kv_blocksize for c in candidates if c.implementation == "xla"]
    assert all(1 <= block <= length for block in blocks)


def test_a_backward_call_is_tuned_over_backward_blocks():
    struct = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.float32)
    seen = {}

    class Spy(FlashAttention):
        def heuristic_cfg(self, inv):
            if inv.array_types:
                seen[inv.direction] = self.config_space(inv)
            return super().heuristic_cfg(inv)

    spy = Spy()
    jax.jit(jax.grad(lambda q: spy(q, q, q, causal=True).sum())).lower(struct)
    assert set(seen) == {"fwd", "bwd"}
    assert {config.bwd for config in seen["fwd"]} == {None}
    assert {config.fwd for config in seen["bwd"]} == {None}
    assert len({config.bwd for config in seen["bwd"]}) == len(seen["bwd"]) > 4


def test_examples_show_every_row_a_key_and_segments_rise():
    mask = jax.ShapeDtypeStruct((2, 1, 9, 9), bool)
    segments = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    struct = jax.ShapeDtypeStruct((2, 9, 4, 8), jnp.float32)
    args, options = KERNEL.prepare(struct, struct, struct, None, mask, segments, causal=True)
    made, _ = KERNEL.example_inputs(Invocation(kernel=KERNEL, args=args, kwargs=options), np.random.default_rng(0))
    assert made[4][..., 0].all()
    assert not made[4].all()
    assert (np.diff(made[5][0], axis=-1) >= 0).all()
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, args)


def test_tuning_finds_a_correct_configuration():
    inv = Invocation(kernel=KERNEL, args=KERNEL.prepare(*make_qkv())[0], kwargs=KERNEL.prepare(*make_qkv())[1])
    tuned = Autotuner(rounds=2, warmup=1).tune(inv, KERNEL, candidates=[SMALL])
    assert {"measured"} == {outcome.status for outcome in tuned.outcomes}, [o.reason for o in tuned.outcomes]


def lower_for_cuda(function, *shapes, sharding=None):
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    return jax.jit(function).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


def test_blocks_that_a_configuration_leaves_open_are_those_of_the_programs_platform():
    def matmuls(**params):
        cfg = FlashAttentionConfig(implementation="xla", **params)
        text = lower_for_cuda(functools.partial(flash_attention, cfg=cfg), *[(4, 2048, 8, 64)] * 3)
        return re.findall(r"stablehlo.dot_general.*", text)

    assert matmuls() == matmuls(fwd=FwdParams())


def gradient_of_sum(**options):
    return jax.grad(lambda q: flash_attention(q, q, q, causal=True, **options).astype(jnp.float32).sum())


@pytest.mark.parametrize("implementation", [None, "cudnn"])
def test_a_program_for_cuda_calls_cudnn_both_ways(implementation):
    """Also from a machine without a GPU: a call is for the platform that its program is lowered for."""
    text = lower_for_cuda(gradient_of_sum(implementation=implementation), (2, 64, 4, 64))
    assert re.findall(r"__cudnn\$\w+", text) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    labels = extract_labels_from_hlo_text(text)
    assert [re.search(r"#(.*):", text).group(1) for text in labels] == ["flash_attention@v0", "flash_attention.bwd@v0"]


def test_a_gradient_that_cudnn_lacks_is_xlas_unless_cudnn_was_asked_for():
    text = lower_for_cuda(gradient_of_sum(), (2, 63, 4, 64))
    assert re.findall(r"__cudnn\$\w+", text) == ["__cudnn$fmhaSoftmax"]
    text = lower_for_cuda(gradient_of_sum(cfg=FlashAttentionConfig(implementation="cudnn")), (2, 63, 4, 64))
    assert re.findall(r"__cudnn\$\w+", text) == ["__cudnn$fmhaSoftmax"]
    with pytest.raises(UnsupportedError, match="even for cuDNN's gradient"):
        lower_for_cuda(gradient_of_sum(implementation="cudnn"), (2, 63, 4, 64))


def test_a_partitioned_program_leaves_cudnn_to_shard_map():
    mesh = cpu_mesh((4,), ("data",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    for options in ({}, {"cfg": FlashAttentionConfig(implementation="cudnn")}):
        assert "__cudnn" not in lower_for_cuda(gradient_of_sum(**options), (8, 64, 4, 64), sharding=sharding)
    mapped = jax.shard_map(gradient_of_sum(), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert lower_for_cuda(mapped, (8, 64, 4, 64), sharding=sharding).count("@__cudnn") == 2


def temporary_bytes(length):
    struct = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    cfg = FlashAttentionConfig(
        fwd=FwdParams(q_blocksize=128, kv_blocksize=128), bwd=BwdParams(q_blocksize=128, kv_blocksize=128)
    )
    gradient = jax.grad(lambda q: flash_attention(q, q, q, causal=True, cfg=cfg).sum())
    return jax.jit(gradient).lower(struct).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_linearly_with_the_length():
    short, long = temporary_bytes(2048), temporary_bytes(8192)
    assert long < 5 * short
    assert long < 8192 * 8192  # a quarter of the scores' size


def test_importing_the_modules_loads_no_pallas():
    probe = "import sys, ejkernel.modules; sys.exit('jax.experimental.pallas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_repeated_calls_share_a_program():
    executor = default_executor()
    options = {"causal": True, "softmax_scale": None, "sliding_window": None}
    for _ in range(2):
        executor(KERNEL, QUERY, KEY, VALUE, **options)
    assert len(executor._plans.tables.of(KERNEL)) == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a device without cuDNN")
def test_a_configuration_that_the_device_has_not_is_a_clear_error():
    x = jnp.ones((1, 16, 2, 64), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match=r"implementation='cudnn' needs an NVIDIA GPU.*use 'xla'"):
        flash_attention(x, x, x, cfg=FlashAttentionConfig(implementation="cudnn"))


def test_a_configuration_of_another_operation_is_a_clear_error():
    x = jnp.ones((1, 16, 2, 64))
    with pytest.raises(ConfigError, match="flash_attention: cfg must be a FlashAttentionConfig, got FwdParams"):
        flash_attention(x, x, x, cfg=FwdParams())


# --- cost ---


def cost_of(**options):
    query, key, value = (jax.ShapeDtypeStruct((2, 6, heads, 8), jnp.bfloat16) for heads in (4, 2, 2))
    kernel = FlashAttention()
    args, kwargs = kernel.prepare(query, key, value, **options)
    return kernel.cost(Invocation(kernel=kernel, args=args, kwargs=kwargs))


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 36),
        ({"causal": True}, 21),
        ({"causal": True, "sliding_window": 1}, 11),
        ({"sliding_window": (1, 0)}, 11),
        ({"sliding_window": (None, 1)}, 26),
    ],
)
def test_the_cost_counts_the_pairs_that_see_each_other(options, pairs):
    cost = cost_of(**options)
    assert cost.flops == 2 * 4 * pairs * 2 * (8 + 8)
    assert cost.bytes == 2 * (2 * 6 * 8) * (4 + 2 + 2 + 4)


def test_a_gradient_has_no_cost():
    with recording() as calls:
        jax.jit(jax.grad(lambda query, *others: flash_attention(query, *others).sum())).lower(*make_qkv())
    assert {call.direction: call.kernel.cost(call) is None for call in calls} == {"fwd": False, "bwd": True}
