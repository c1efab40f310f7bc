# SPDX-License-Identifier: Apache-2.0
"""Buckets: calls that share a key, their measurements, and the rules for a kernel."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.sample_kernels import Plain, WithResiduals, WithRule, squared, tanh_matmul, told_apart

from ejkernel import compat
from ejkernel.kernels.flash_attention.operation import bucketed_flash_attention
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention, rms_norm
from ejkernel.ops import (
    ArgumentError,
    Autotuner,
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    KernelError,
    autotune,
    autotune_lowered,
    bucketed,
    find_labels_in_lowered,
    tune,
)
from ejkernel.ops.autotuner.compile.bundles import compile_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.examples import example_sets, saver
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.registry import recording

pytestmark = [pytest.mark.slow, pytest.mark.sampled]

W = np.ones((4, 2), np.float32)


def rows(count):
    return np.linspace(-1, 1, count * 4, dtype=np.float32).reshape(count, 4)


class Bucketed:
    """Mixed into the sample kernels: rows are rounded up to a power of two."""

    space = (0,)

    def run(self, x, w, *, cfg):
        return told_apart(tanh_matmul(x, w), cfg)

    def bucket(self, inv):
        x, w = inv.abstract_args
        return (bucketed(x, 0), w), inv.kwargs

    def config_space(self, inv):
        return list(self.space)


class BucketedPlain(Bucketed, Plain):
    pass


class BucketedRule(Bucketed, WithRule):
    pass


class BucketedResiduals(Bucketed, WithResiduals):
    pass


KINDS = [BucketedPlain, BucketedRule, BucketedResiduals]
KERNEL = BucketedPlain()


def calls_of(function, *args):
    with recording() as seen:
        jax.jit(function).lower(*args)
    return {inv.op_id: inv for inv in seen}


def key_of(count, kernel=KERNEL):
    return Invocation(kernel=kernel, args=(rows(count), W)).call_key


# --- keys ---

COUNTS = st.integers(1, 5000)


@given(COUNTS, COUNTS)
def test_calls_of_one_bucket_have_one_key_and_calls_of_two_have_two(first, second):
    left, right = (jax.ShapeDtypeStruct((count, 4), "float32") for count in (first, second))
    keys = [Invocation(kernel=KERNEL, args=(x, W)).call_key for x in (left, right)]
    assert (keys[0] == keys[1]) == ((first - 1).bit_length() == (second - 1).bit_length())


@given(COUNTS)
def test_a_bucket_has_the_key_of_an_ordinary_call_with_its_arguments(count):
    plain = Invocation(kernel=Plain("BucketedPlain"), args=(bucketed(rows(count), 0), W))
    assert Invocation(kernel=KERNEL, args=(rows(count), W)).key == plain.key


TRANSFORMED = {
    "fwd": lambda f: f,
    "grad": lambda f: jax.grad(squared(f)),
    "vmap of grad": lambda f: lambda x, w: jax.vmap(jax.grad(squared(f)), (0, None))(x[None], w),
    "grad of vmap": lambda f: jax.grad(squared(lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, x]), w))),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x, w)),
    "hessian times vectors": lambda f: (
        lambda x, w: jax.vmap(lambda t: jax.jvp(lambda x: jax.grad(squared(f))(x, w), (x,), (t,)))(jnp.stack([x, x]))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_every_call_of_a_transformed_program_is_in_its_bucket(kind, name):
    kernel = kind("same")
    five, eight, nine = (calls_of(TRANSFORMED[name](kernel), rows(n), W) for n in (5, 8, 9))
    assert {op: inv.key for op, inv in five.items()} == {op: inv.key for op, inv in eight.items()}
    assert all(inv.key != nine[op].key for op, inv in five.items())


# Keys as they were before kernels could have buckets: entries on disk must be found again.
PINNED = {
    "fwd": {"k@v0": "d047bc32eb89aa6e"},
    "grad": {"k.bwd@v0": "70a81509dcf0ead4"},
    "vmap of grad": {"k.bwd@v0": "3417bc9b44db06ef"},
    "jvp": {"k@v0": "d047bc32eb89aa6e", "k.jvp@v0": "6c76b7353cb2d21e"},
}
PROGRAMS = {
    "fwd": lambda f: f,
    "grad": lambda f: jax.grad(lambda x, w: f(x, w).sum()),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x, w: f(x, w).sum()), (0, None)),
    "jvp": lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x,)),
}


@pytest.mark.parametrize("kind", [Plain, WithRule])
@pytest.mark.parametrize("name", PINNED)
def test_keys_of_kernels_without_the_hook_have_not_changed(kind, name):
    x = np.ones((3, 8, 4) if name == "vmap of grad" else (8, 4), np.float32)
    found = calls_of(PROGRAMS[name](kind("k")), x, W)
    assert {inv.op_id_v: inv.call_key for inv in found.values()} == PINNED[name]


def test_keys_of_modules_have_not_changed():
    q, x = jax.ShapeDtypeStruct((2, 100, 4, 16), "float32"), np.ones((8, 4), np.float32)
    attention = calls_of(jax.value_and_grad(lambda q: flash_attention(q, q, q, causal=True).sum()), q)
    norm = calls_of(jax.value_and_grad(lambda x: rms_norm(x, jnp.ones(4)).sum()), x)
    assert {op: inv.call_key for op, inv in (attention | norm).items()} == {
        "flash_attention": "ff519449f46f1eda",
        "flash_attention.bwd": "5a4a581a83ac18a8",
        "rms_norm": "2c695bc69b450e6c",
        "rms_norm.bwd": "182cb12e93baeadc",
    }


def test_static_arguments_may_be_rounded_too():
    class Upto(Kernel[int, jax.Array]):
        def run(self, x, *, length, cfg):
            return x[:length].sum()

        def bucket(self, inv):
            length = 1 << (inv.kwargs["length"] - 1).bit_length()
            return (jax.ShapeDtypeStruct((length,), inv.args[0].dtype),), {"length": length}

        def heuristic_cfg(self, inv):
            return inv.kwargs["length"]

    kernel = Upto()
    found = [calls_of(jax.grad(lambda x, n=n: kernel(x, length=n)), rows(16)[:, 0]) for n in (9, 13, 16)]
    assert len({calls["Upto.bwd"].key for calls in found}) == 1
    tuned = Autotuner(rounds=1).tune(found[0]["Upto.bwd"].representative, kernel)
    assert (tuned.config, tuned.inv.key) == (16, found[0]["Upto.bwd"].key)


def test_weak_types_stay_in_the_key():
    weak, strong = (Invocation(kernel=KERNEL, args=(x, W)) for x in (jnp.ones((5, 4)) * 1, jnp.full((5, 4), 1.0)))
    assert (weak.call_key == strong.call_key) == (weak.args[0].weak_type == strong.args[0].weak_type)


# --- calls with the same key share a configuration ---


class Block(Kernel[int, jax.Array]):
    """Shows its configuration; the heuristic's is the number of elements."""

    def run(self, x, *, cfg):
        return 0 * x.sum() + cfg

    def heuristic_cfg(self, inv):
        return inv.args[0].shape[0]

    def bucket(self, inv):
        return (bucketed(inv.args[0], 0),), {}


def test_the_heuristic_sees_the_call_itself_as_often_as_it_is_made():
    executor, kernel, compiled = Executor(ConfigSelectorChain()), Block(), []

    class Watched(Block):
        def run(self, x, *, cfg):
            compiled.append(cfg)
            return super().run(x, cfg=cfg)

    kernel = Watched()
    found = [int(executor(kernel, np.ones(n, np.float32))) for n in (5, 6, 7)]
    assert found == [5, 6, 7]
    compiled.clear()
    again = [int(executor(kernel, np.ones(n, np.float32))) for n in (5, 6, 7)]
    assert (again, compiled) == ([5, 6, 7], [])  # answers for other lengths do not make executors forget


def test_a_configuration_is_used_for_all_of_the_bucket():
    kernel, cache = Block(), ConfigCache()
    executor = Executor(ConfigSelectorChain(cache))
    cache.put(Invocation(kernel=kernel, args=(np.ones(8, np.float32),)).key, 42)
    assert [int(executor(kernel, np.ones(n, np.float32))) for n in (5, 6, 8, 9)] == [42, 42, 42, 9]


def test_a_label_carries_the_key_of_the_bucket():
    labels = [find_labels_in_lowered(jax.jit(KERNEL).lower(rows(n), W)) for n in (5, 8, 9)]
    assert labels[0] == labels[1] != labels[2]
    assert labels[0][0].endswith(key_of(8))


def test_a_call_is_recorded_unchanged():
    (inv,) = calls_of(KERNEL, rows(5), W).values()
    assert (inv.args[0].shape, inv.representative.args[0].shape) == ((5, 4), (8, 4))


# --- tuning ---


class Witness(Autotuner):
    """Keeps the types of the arguments that it is asked to tune with."""

    def __init__(self):
        super().__init__(rounds=1)
        self.seen = []

    def tune(self, inv, kernel, **options):
        self.seen.append((inv.op_id, inv.args[0].shape))
        return super().tune(inv, kernel, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_the_representative_is_tuned_for_every_transformation(kind, name):
    kernel = kind("same")
    kernel.space = (0, 1)
    for inv in calls_of(TRANSFORMED[name](kernel), rows(5), W).values():
        tuned = Autotuner(rounds=1).tune(inv.representative, kernel)
        assert (tuned.inv.key, tuned.inv.args[0].shape) == (inv.key, (8, 4))
        assert tuned.outcomes[0].status == "measured"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_representative_is_measured_with_the_types_of_a_real_call_of_its_size(kind, name):
    kernel = kind("same")
    five, eight = (calls_of(TRANSFORMED[name](kernel), rows(n), W) for n in (5, 8))
    for op, real in eight.items():
        inv = five[op].representative
        (arrays,) = example_sets(inv, np.random.default_rng(0), saver(inv.node.forward, Choice(config=0))).values()
        assert [(a.shape, a.dtype) for a in arrays] == [(like.shape, like.dtype) for like in real.array_types]


def test_every_way_to_tune_measures_the_representative():
    kernel = BucketedPlain()
    tuner = Witness()
    chain = ConfigSelectorChain(autotune=True, tuner=tuner)
    executor = Executor(chain)
    executor(kernel, rows(5), W)
    executor(kernel, rows(7), W)
    assert tuner.seen == [("BucketedPlain", (8, 4))]
    with recording():
        lowered = jax.jit(lambda x, w: executor(kernel, x, w)).lower(rows(9), W)
    result = autotune_lowered(chain, lowered)
    assert tuner.seen[1:] == [("BucketedPlain", (16, 4))] * 2  # on the miss, and because it was asked for
    assert [entry.call_key for entry in result.entries] == [key_of(16)]


def test_autotune_of_one_call_is_for_its_bucket():
    class Sized(Block):
        def config_space(self, inv):
            return [inv.args[0].shape[0]]

        def reference(self, x):
            return 0 * x.sum() + x.shape[0]

    assert autotune(Sized(), np.ones(5, np.float32), num_iters=1) == 8


# --- rules for a kernel ---


class Chunks(BucketedPlain):
    """Breaks the promise: five rows are not cut into chunks of eight."""

    def run(self, x, w, *, cfg):
        return tanh_matmul(x.reshape(-1, max(cfg, 1), 4), w).reshape(x.shape[0], -1)


def test_an_unsupported_configuration_is_a_clear_error():
    kernel, cache = Chunks(), ConfigCache()
    executor = Executor(ConfigSelectorChain(cache))
    cache.put(Invocation(kernel=kernel, args=(rows(8), W)).key, 8)
    assert executor(kernel, rows(8), W).shape == (8, 2)
    with pytest.raises(KernelError, match=r"Chunks: 8 \(from memory\) was found for .*8, 4.* does not run for .*5, 4"):
        executor(kernel, rows(5), W)


def test_an_override_that_does_not_fit_fails_by_itself():
    with pytest.raises(ConfigError, match=r"cfg=8 is not in the space of this call.*reshape"):
        Chunks()(rows(5), W, cfg=8)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda x, w: None, r"bucket must return \(args, kwargs\), got None"),
        (lambda x, w: (x, w), r"bucket must return \(args, kwargs\), got"),
        (lambda x, w: ((x,), {}), r"bucket must return arguments of the kernel: .*missing a required argument: 'w'"),
        (lambda x, w: ((x, None), {}), "bucket must return arguments with the same structure as the call's"),
        (lambda x, w: ((x, [w]), {}), "bucket must return arguments with the same structure as the call's"),
        (lambda x, w: ((x, 3), {}), "bucket must return arguments with the same structure as the call's"),
        (lambda x, w: ((x.update(dtype="int32"), w), {}), r"only the sizes .* changed x from .* to int32\[5, 4\]"),
        (lambda x, w: ((x.update(shape=(8,)), w), {}), r"changed x from float32\[5, 4\] to float32\[8\]"),
        (
            lambda x, w: ((x.update(shape=(x.shape[0] + 1, 4)), w), {}),
            "bucket must be idempotent",
        ),
    ],
)
def test_an_invalid_representative_is_refused(answer, text):
    class Wrong(BucketedPlain):
        def bucket(self, inv):
            return answer(*inv.abstract_args)

    with pytest.raises(KernelError, match=f"Wrong: .*{text}|{text}"):
        Wrong()(rows(5), W)


def test_bucketed_rounds_the_named_axes():
    like = jax.ShapeDtypeStruct((3, 0, 100, 64), "bfloat16")
    assert bucketed(like, 1, -2).update() == jax.ShapeDtypeStruct((3, 0, 128, 64), "bfloat16")
    assert bucketed(like, 0, least=16).shape == (16, 0, 100, 64)
    assert bucketed(None, 3) is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, 0), "array must be an array or None, got 3"),
        ((W, 2), r"axes must be axes of an array of shape \(4, 2\), got 2"),
        ((W, 0, 12), "least must be a power of two, got 12"),
    ],
)
def test_bucketed_refuses(arguments, text):
    array, axis, *least = arguments
    with pytest.raises(ArgumentError, match=text):
        bucketed(array, axis, **({"least": least[0]} if least else {}))


def test_a_symbolic_size_is_not_rounded():
    (rows,) = jax.export.symbolic_shape("rows")
    with pytest.raises(ArgumentError, match="axis 0 has the symbolic size rows, which cannot be rounded"):
        bucketed(jax.ShapeDtypeStruct((rows, 4), "float32"), 0)


def test_a_tuned_function_may_have_buckets():
    @tune(space={"rows": [1, 2]}, bucket=lambda inv: ((bucketed(inv.args[0], 0),), inv.kwargs))
    def total(x, *, rows=1):
        return x.sum() * rows

    keys = {(n, r): calls_of(lambda x, r=r: total(x, **r_of(r)), np.ones(n, np.float32))["total"].key
            for n in (5, 8) for r in (None, 2)}  # fmt: skip
    assert len(set(keys.values())) == 1  # an override is no part of the key


def r_of(r):
    return {} if r is None else {"rows": r}


# --- flash_attention ---


def attention_calls(length, keys=None, **options):
    q, k = (jax.ShapeDtypeStruct((2, n, 4, 16), "float32") for n in (length, keys or length))
    return calls_of(jax.value_and_grad(lambda q, k: flash_attention(q, k, k, causal=True, **options).sum()), q, k)


def test_attention_with_buckets_has_the_keys_of_power_of_two_lengths():
    plain = {op: inv.key for op, inv in attention_calls(128).items()}
    for length in (65, 100, 128):
        assert {op: inv.key for op, inv in attention_calls(length, bucket_lengths=True).items()} == plain
    assert all(inv.key != plain[op] for op, inv in attention_calls(129, bucket_lengths=True).items())


@pytest.mark.parametrize(("length", "options"), [(100, {}), (100, {"bucket_lengths": True}), (128, {})])
def test_attention_of_either_kind_is_rebuilt_from_its_description(length, options):
    for inv in attention_calls(length, **options).values():
        assert rebuild(inv.description).key == inv.key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_the_description_of_a_bucket_rebuilds_its_representative(kind, name):
    kernel = kind("rebuilt")
    for inv in calls_of(TRANSFORMED[name](kernel), rows(5), W).values():
        again = rebuild(inv.description)
        assert (again.key, again.args) == (inv.key, inv.representative.args)
        assert again.argument_types == inv.representative.argument_types


def test_the_representative_is_compiled_for_other_devices(tmp_path):
    kernel = BucketedPlain("bundled")
    (inv,) = calls_of(kernel, rows(5), W).values()
    (bundled,) = compile_bundle([inv], Target.named("here"), tmp_path / "bundle")
    assert bundled.description == inv.description
    ((_, program),) = bundled.programs
    compiled = compat.executables.loaded(program.code.read(), inputs=2, outputs=1)
    assert compiled(rows(8), W)[0].shape == (8, 2)


def test_masks_and_segments_are_of_the_bucket_s_lengths():
    q, k = np.ones((1, 5, 2, 8), np.float32), np.ones((1, 9, 2, 8), np.float32)
    segments = np.zeros((1, 5), np.int32), np.zeros((1, 9), np.int32)
    options = {
        "bias": np.zeros((1, 1, 5, 9), np.float32), "attention_mask": np.ones((1, 9), bool), "segment_ids": segments,
    }  # fmt: skip
    (inv,) = calls_of(lambda q, k: flash_attention(q, k, k, bucket_lengths=True, **options), q, k).values()
    *arrays, pair = inv.representative.args
    shapes = [(1, 8, 2, 8), (1, 16, 2, 8), (1, 16, 2, 8), (1, 1, 8, 16), (1, 1, 1, 16)]
    assert [x.shape for x in arrays] == shapes
    assert [x.shape for x in pair] == [(1, 8), (1, 16)]


@pytest.mark.parametrize("length", [5, 40, 64])
def test_every_configuration_of_a_bucket_runs_for_every_length(length):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, length, 2, 8)), "float32") for _ in range(3))
    wanted = flash_attention(q, k, v, causal=True)
    stand_in = attention_calls(64, bucket_lengths=True)["flash_attention"].representative
    for cfg in FlashAttention().config_space(stand_in):
        found = flash_attention(q, k, v, causal=True, bucket_lengths=True, cfg=cfg)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_parameters_that_do_not_fit_a_length_of_the_bucket_are_replaced(monkeypatch):
    """On Hopper GPUs, lengths not divisible by 8 need more shared memory than the rounded length."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    monkeypatch.setattr("ejkernel.ops.operation.lowered_place", lambda: {"platform": "gpu"})

    def call(length):
        query, key = (jax.ShapeDtypeStruct((4, length, heads, 224), "bfloat16") for heads in (8, 1))
        return FlashAttention().prepare(query, key, key, causal=True)

    kernel = bucketed_flash_attention
    config = FlashAttentionConfig(implementation="mosaic_gpu")
    usual = kernel._running(config, *call(1024)).params
    found = kernel._running(dataclasses.replace(config, fwd=usual), *call(898))
    assert found.params == found.implementation.heuristic(found.call) != usual
    with pytest.raises(ConfigError, match="bytes of shared memory"):
        FlashAttention()._running(dataclasses.replace(config, fwd=usual), *call(898))


def test_lengths_with_other_implementations_are_a_separate_bucket():
    """If cuDNN does not run an odd length, the configuration of an even length must not be used."""
    kernel = attention_calls(100, bucket_lengths=True)["flash_attention"].kernel
    args, options = kernel.prepare(*[jax.ShapeDtypeStruct((2, n, 4, 64), "bfloat16") for n in (101, 101, 101)],
                                   attention_mask=jax.ShapeDtypeStruct((2, 101), bool))  # fmt: skip
    gpu, cpu = (
        Invocation(kernel=kernel, args=args, kwargs=options, device=name) for name in ("gpu:nvidia_h200", "cpu")
    )
    assert (gpu.representative.args[0].shape[1], cpu.representative.args[0].shape[1]) == (101, 128)
