# SPDX-License-Identifier: Apache-2.0
"""Attention over a sharded sequence: results of one device, and what travels between devices."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device, ones, zeros
from tests.kernels.meshes import MODES, bytes_in_collectives, close, compiled, mesh_of, placed

from ejkernel.kernels.flash_attention.operation import FlashAttention, FlashAttentionConfig
from ejkernel.modules import flash_attention, from_zigzag, to_zigzag
from ejkernel.ops import ArgumentError, ConfigSelectorChain, Executor, PersistentCache
from ejkernel.ops.execution.discovery import discover

pytestmark = pytest.mark.slow

SHARD = P(None, "context")
LENGTH = 32


def mesh(devices):
    return jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def normal(seed, *shape, dtype=jnp.float32):
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


def operands(length=LENGTH, heads=4, groups=2, head_dim=8, value_dim=12, keys=None):
    shapes = ((length, heads, head_dim), (keys or length, groups, head_dim), (keys or length, groups, value_dim))
    return [normal(seed, 2, *shape) for seed, shape in enumerate(shapes)]


def segments():
    lengths = [[7, 5, 20], [20, 3, 9]]
    return jnp.asarray([np.repeat(range(3), each) for each in lengths], jnp.int32)


# Options of the call, arrays that are sharded with the sequence, replicated arrays, and the number of devices.
FEATURES = {
    "causal": ({"causal": True}, {}, {}, 4),
    "full": ({}, {}, {}, 2),
    "causal in zig-zag order, capped": ({"causal": True, "zigzag": True, "logits_soft_cap": 2.0}, {}, {}, 4),
    "full in zig-zag order, lengths": ({"zigzag": True}, {}, {"key_lengths": [19, 32]}, 2),
    "gathered": ({"causal": True, "gather_keys": True}, {}, {}, 4),
    "gathered in zig-zag order": (
        {"causal": True, "gather_keys": True, "zigzag": True},
        {},
        {"key_lengths": [21, 9], "query_lengths": [21, 9]},
        4,
    ),
    "gathered, full": ({"gather_keys": True}, {"segment_ids": segments()}, {}, 2),
    "window inside one shard": ({"causal": True, "sliding_window": 5}, {}, {}, 4),
    "window over several shards": ({"sliding_window": (13, 3)}, {}, {}, 4),
    "one-sided window": ({"sliding_window": (2, None)}, {}, {"key_lengths": [30, 12]}, 2),
    "window in zig-zag order": ({"causal": True, "sliding_window": 11, "zigzag": True, "return_lse": True}, {}, {}, 4),
    "segments": ({"causal": True}, {"segment_ids": segments()}, {}, 4),
    "segments in zig-zag order": (
        {"causal": True, "zigzag": True, "return_lse": True},
        {"segment_ids": segments()},
        {"sinks": [0.5, -1.0, 2.0, 0.1]},
        2,
    ),
    "lengths and sinks": (
        {"causal": True, "return_lse": True},
        {},
        {"sinks": [0.5, -1.0, 2.0, 0.1], "key_lengths": [9, 30], "query_lengths": [11, 32]},
        4,
    ),
}


def on_devices(options, devices):
    """Return the call over shards, on and with arrays in natural order."""

    def local(arrays, whole):
        return flash_attention(**arrays, **whole, **options, axis_name="context")

    out_specs = (SHARD, P(None, None, "context")) if options.get("return_lse") else SHARD
    shards = jax.shard_map(local, mesh=mesh(devices), in_specs=(SHARD, P()), out_specs=out_specs)

    def call(arrays, whole):
        if not options.get("zigzag"):
            return shards(arrays, whole)
        found = shards(to_zigzag(arrays, devices), whole)
        return jax.tree.map(lambda x: from_zigzag(x, devices, axis=1 if x.ndim > 3 else 2), found)

    return call


def results(call, arrays, whole):
    """Return the results, and the gradients of every floating-point array."""

    def loss(inexact):
        given, also = ({name: inexact.get(name, x) for name, x in each.items()} for each in (arrays, whole))
        found = jax.tree.leaves(call(given, also))
        return sum(
            (jnp.where(jnp.isinf(x), 0, x) * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum() for x in found
        ), found

    inexact = {name: x for name, x in (arrays | whole).items() if jnp.issubdtype(x.dtype, jnp.floating)}
    (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inexact)
    return found, gradients


# Of these, each feature is also part of another case.
REPEATED = ("causal", "full", "gathered", "window inside one shard", "segments")


@pytest.mark.parametrize("feature", [pytest.param(n, marks=[pytest.mark.whole] * (n in REPEATED)) for n in FEATURES])
def test_a_sharded_sequence_gives_the_results_and_gradients_of_one_device(feature):
    options, sharded, replicated, devices = FEATURES[feature]
    arrays = dict(zip(("query", "key", "value"), operands(), strict=True)) | sharded
    whole = {name: jnp.asarray(x) for name, x in replicated.items()}
    plain = {name: x for name, x in options.items() if name not in ("zigzag", "gather_keys")}
    expected = results(lambda arrays, whole: flash_attention(**arrays, **whole, **plain), arrays, whole)
    close(expected, results(on_devices(options, devices), arrays, whole))


def plain(*arrays, **options):
    return flash_attention(*arrays, **({"causal": True} | options))


def gradient(function):
    return jax.grad(lambda *arrays: (function(*arrays).astype(jnp.float32) ** 2).mean(), argnums=(0, 1, 2))


def over(devices, **options):
    """Return the call inside `shard_map`."""
    local = functools.partial(plain, **{"axis_name": "context"} | options)
    return jax.shard_map(local, mesh=mesh(devices), in_specs=(SHARD,) * 3, out_specs=SHARD)


# The second names the axes in another order than the mesh.
SPLITS = {"auto": P("data", "model"), "explicit": P(None, ("model", "data")), "mixed": P(None, "model")}


@pytest.mark.parametrize("mode", MODES)
def test_under_jit_a_sharded_sequence_is_not_gathered(mode):
    arrays, options = operands(), {"sinks": normal(3, 4)} if mode == "auto" else {}
    function, specs = gradient(functools.partial(plain, **options)), [SPLITS[mode]] * 3
    program, found = compiled(function, arrays, specs, mesh_of(mode))
    close(function(*arrays), found)
    assert "collective-permute" in program.as_text()
    assert "all-gather" not in program.as_text()


def test_a_shard_under_jit_and_in_shard_map_has_the_key_of_the_local_call():
    arrays, local = operands(), operands(LENGTH // 4)
    given = placed(arrays, [P(None, "model")] * 3, mesh_of("auto"))
    keys = [
        {inv.key for inv in discover(gradient(function), *arrays)}
        for function, arrays in ((plain, local), (plain, given), (over(4, zigzag=True), arrays))
    ]
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.parametrize("gather", [True, False])
def test_gradients_of_large_logits_are_those_of_one_device(gather):
    # A log-sum-exp of some thousand is rounded to 1e-4; that of a block is much less than that of all keys.
    arrays = [x + shift for x, shift in zip(operands(value_dim=8), (20.0, 20.0, 0.0), strict=True)]
    expected, found = (jax.jit(gradient(function))(*arrays) for function in (plain, over(4, gather_keys=gather)))
    for one, ours in zip(expected, found, strict=True):
        np.testing.assert_allclose(ours, one, atol=2e-3 * np.abs(one).max())


def test_8_devices_have_at_most_twice_the_error_of_one_in_bfloat16():
    arrays = [x.astype(jnp.bfloat16) for x in operands(64, heads=2, groups=1)]
    exact = gradient(plain)(*[x.astype(jnp.float32) for x in arrays])
    errors = [
        [float(jnp.linalg.norm(x - y)) for x, y in zip(exact, jax.jit(gradient(function))(*arrays), strict=True)]
        for function in (plain, over(8))
    ]
    assert all(ours <= 2 * one for one, ours in zip(*errors, strict=True)), errors


def test_transformations_of_a_sharded_sequence():
    arrays = [x[..., :8] for x in operands()]
    tangents = [x.astype(x.dtype) * 0.5 for x in arrays]

    def everything(function):
        def twice(*arrays):
            function_again = jax.checkpoint(function)
            return jax.lax.scan(lambda x, _: (function_again(x, *arrays[1:]), None), arrays[0], length=2)[0]

        batched = jax.vmap(gradient(twice))(*[jnp.stack([x, -x]) for x in arrays])
        return batched, jax.jvp(function, arrays, tangents)

    close(*(jax.jit(everything, static_argnums=0)(function) for function in (plain, over(2))))


@pytest.mark.parametrize("axis_name", [None, "context"])
def test_vmap_around_shard_map_with_segments_that_differ(axis_name):
    """JAX makes both branches of a condition that `vmap` maps, and then they fail inside `shard_map`."""
    arrays, ids = [x[..., :8] for x in operands()], jnp.stack([segments(), segments()[::-1], segments() * 0])
    spec = P(None, axis_name) if axis_name else P("context")

    def local(*arrays):
        return plain(*arrays[:3], segment_ids=arrays[3], axis_name=axis_name)

    shards = jax.shard_map(local, mesh=mesh(2), in_specs=(spec,) * 4, out_specs=spec)

    def mapped(function):
        return jax.vmap(lambda ids: gradient(lambda *arrays: function(*arrays, ids))(*arrays))(ids)

    expected = jax.jit(lambda: mapped(lambda *arrays: plain(*arrays[:3], segment_ids=arrays[3])))()
    close(expected, jax.jit(lambda: mapped(shards))())


def permutes(program):
    return len(re.findall(r"= \S+ collective-permute(?:-start)?\(", program.as_text()))


def test_each_key_inside_a_window_travels_once():
    arrays, devices, window = operands(groups=2, value_dim=8), 4, 5
    program = jax.jit(over(devices, sliding_window=window)).lower(*arrays).compile()
    assert permutes(program) == 2  # keys and values
    assert bytes_in_collectives(program) == 2 * 2 * window * 2 * 8 * 4  # two arrays, batch, window, heads, dim, float32


def test_few_key_heads_are_gathered():
    arrays = operands(groups=1, heads=8, value_dim=8)
    texts = [jax.jit(over(devices)).lower(*arrays).compile().as_text() for devices in (2, 8)]
    assert ["all-gather" in text for text in texts] == [True, False]


def test_memory_does_not_grow_with_the_number_of_devices():
    def temporary(devices):
        arrays = [jax.ShapeDtypeStruct((2, 256 * devices, 4, 16), jnp.float32)] * 3
        return jax.jit(gradient(over(devices))).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(3), temporary(8)
    assert many <= 1.05 * few


WRONG = {
    "bias": ({"bias": ones((1, 1, 8, 8))}, "bias is not available with a sharded sequence.*shard heads"),
    "mask": ({"attention_mask": ones((2, 8), bool)}, "attention_mask is not available.*use segment_ids"),
    "dropout": ({"dropout_rate": 0.1, "dropout_key": zeros(2, "uint32")}, "dropout_rate is not available"),
    "odd": ({"zigzag": True}, "zigzag needs shards of even length, two pieces each; got 7 queries and 7 keys"),
    "another axis": ({"axis_name": "data"}, "axis_name must be a mesh axis of an enclosing jax.shard_map.*got 'data'"),
    "an axis twice": (
        {"axis_name": ("context", "context")},
        "axis_name must name each mesh axis once; got .'context', ",
    ),
    "a number": ({"axis_name": 3}, "axis_name must be the name of a mesh axis, several names, or None; got 3"),
    "no axes": ({"axis_name": ()}, r"axis_name must name a mesh axis, got \(\); for a whole sequence, pass None"),
    "no axis": ({"axis_name": None, "gather_keys": True}, "gather_keys needs axis_name.*got gather_keys=True"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_sharded_sequence_does_not_support_is_an_error_with_the_fix(wrong):
    options, says = WRONG[wrong]
    with pytest.raises(ArgumentError, match=says):
        jax.eval_shape(over(4, **options), *operands(28 if wrong == "odd" else LENGTH))


def test_causal_attention_needs_as_many_queries_as_keys():
    with pytest.raises(ArgumentError, match=r"query must have key's length with axis_name and a causal mask.*7 and 8"):
        jax.eval_shape(over(4), *operands(28, keys=32))
    arrays = operands(keys=16)
    function = functools.partial(plain, causal=False)
    close(jax.jit(gradient(function))(*arrays), jax.jit(gradient(over(2, causal=False)))(*arrays))


def test_zigzag_order_pairs_early_and_late_pieces():
    positions = to_zigzag(np.arange(12), 3, axis=0)
    np.testing.assert_array_equal(positions, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
    tree = {"tokens": jnp.arange(24).reshape(2, 12), "x": jnp.arange(48).reshape(2, 12, 2)}
    close(tree, from_zigzag(to_zigzag(tree, 3), 3))


WRONG_ORDERS = {
    "length": (np.ones((2, 12)), 4, r"axis 1 .* divisible by 2 \* devices = 8, got shape \(2, 12\)"),
    "many devices": (np.ones((2, 12)), 10**12, "axis 1 .* divisible by"),
    "no devices": (np.ones((2, 12)), 0, "devices must be .* an int >= 1; got 0"),
    "a mesh": (np.ones((2, 12)), "context", "devices must be .*; got 'context'"),
    "no batch": (np.ones(12), 2, r"the sequence as axis 1, got float64\[12\]; pass axis="),
    "no array": ([1, 2], 1, "tree must consist of arrays .* got int"),
}


@pytest.mark.parametrize("wrong", WRONG_ORDERS)
def test_what_cannot_be_reordered_is_an_error_with_the_fix(wrong):
    tree, devices, says = WRONG_ORDERS[wrong]
    with pytest.raises(ArgumentError, match=says):
        to_zigzag(tree, devices)


def test_a_block_is_not_launched_persistently_since_copies_hold_multiprocessors(monkeypatch):
    on_gpu = {"platform": "gpu", "device_fingerprint": "gpu:nvidia_h200"}
    monkeypatch.setattr("ejkernel.ops.operation.lowered_place", lambda: on_gpu)
    operation, config = FlashAttention(), FlashAttentionConfig(implementation="mosaic_gpu")
    query, key = (jax.ShapeDtypeStruct((1, 4096, heads, 128), "bfloat16") for heads in (16, 8))
    args, options = (query, key, key), dict.fromkeys(("softmax_scale", "sliding_window", "logits_soft_cap"))
    options |= {"causal": True, "softmax_scale": 0.1, "implementation": None}
    alone = operation._running(config, args, options).params
    beside = operation._beside_copies(config, args, options).fwd
    assert alone.persistent
    assert beside == dataclasses.replace(alone, persistent=False, query_buffers=1)


@pytest.mark.parametrize("form", ["jit", "shard_map"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_call_over_a_sharded_sequence_is_explained(form, saved, tmp_path):
    q = normal(0, 2, LENGTH, 4, 8)

    def attend(q, **options):
        return flash_attention(q, q, q, causal=True, **options)

    function = jax.jit(attend)
    if form == "shard_map":
        local = functools.partial(attend, axis_name="context")
        function = jax.shard_map(local, mesh=mesh(4), in_specs=SHARD, out_specs=SHARD)
    sharded = jax.device_put(q, NamedSharding(mesh(4), SHARD))
    executor = Executor(ConfigSelectorChain(persistent=PersistentCache(tmp_path, shipped=False)))
    (first,) = executor.explain(function, sharded)
    if saved:
        executor.chooser.persistent.put(first.key, first.config)
        executor = Executor(ConfigSelectorChain(persistent=PersistentCache(tmp_path, shipped=False)))
        (first,) = executor.explain(function, sharded)
    assert first.source == ("persistent" if saved else "heuristic")
    assert first.label is not None
