# SPDX-License-Identifier: Apache-2.0
"""Ready operations in programs for several devices: they split themselves, and agree with plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device
from tests.kernels.meshes import (
    MODES,
    bytes_in_collectives,
    close,
    compiled,
    gradient,
    loss,
    mesh_of,
    placed,
    scanned,
)

from ejkernel.modules import flash_attention, grouped_matmul, layer_norm, rms_norm
from ejkernel.ops import ArgumentError, recording
from ejkernel.ops.execution.discovery import discover

pytestmark = pytest.mark.slow


def random(*shape, seed=0):
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def plain_attention(query, key, value):
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    visible = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, logits, -jnp.inf)), value)


def plain_rms_norm(x, weight):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def plain_layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


attention = functools.partial(flash_attention, causal=True)
ATTENTION = (
    attention,
    plain_attention,
    (random(8, 16, 8, 8), random(8, 16, 4, 8, seed=1), random(8, 16, 4, 8, seed=2)),
)
RMS_NORM = (rms_norm, plain_rms_norm, (random(8, 4, 16), random(16, seed=1)))
LAYER_NORM = (layer_norm, plain_layer_norm, (random(8, 4, 16), random(16, seed=1), random(16, seed=2)))
SPLITS = {
    "batch": (*ATTENTION, [P("data")] * 3),
    "heads": (*ATTENTION, [P(None, None, "model")] * 3),
    "both": (*ATTENTION, [P("data", None, "model")] * 3),
    "rows of rms_norm": (*RMS_NORM, [P("data", "model"), P()]),
    "rows of layer_norm": (*LAYER_NORM, [P("data", "model"), P(), P()]),
}


def one_example(function):
    """Return `function` of one example of those that `vmap` is over."""
    return lambda first, *rest: function(first[None], *[x[None] if x.ndim > 1 else x for x in rest])[0]


def vmapped(function):
    return lambda *arrays: jax.vmap(one_example(function), [0 if x.ndim > 1 else None for x in arrays])(*arrays)


TRANSFORMATIONS = {
    "forward": lambda function: function,
    "gradient": gradient,
    "scan": lambda function: gradient(scanned(function)),
    "remat": lambda function: gradient(jax.checkpoint(function)),
    "vmap": lambda function: gradient(vmapped(function)),
}


# All for axes that XLA splits along; for others each split and each transformation, with the forward in its gradient.
CASES = [
    (mode, split, name)
    for mode in MODES
    for split in SPLITS
    for name in TRANSFORMATIONS
    if "norm" not in split or name not in ("scan", "remat")
    if mode == "auto" or name == "gradient" or (split == "both" and name != "forward")
]


@functools.cache
def plainly(split, transformation):
    """Return the result of plain JAX as XLA splits it, and the bytes sent between devices."""
    _, plain, arrays, specs = SPLITS[split]
    program, found = compiled(TRANSFORMATIONS[transformation](plain), arrays, specs, mesh_of("auto"))
    return jax.device_get(found), bytes_in_collectives(program)


@pytest.mark.parametrize(("mode", "split", "transformation"), CASES)
def test_split_call_is_plain_jax_with_no_more_bytes_between_devices(mode, split, transformation):
    ours, _, arrays, specs = SPLITS[split]
    program, found = compiled(TRANSFORMATIONS[transformation](ours), arrays, specs, mesh_of(mode))
    expected, most = plainly(split, transformation)
    close(found, expected)
    assert bytes_in_collectives(program) <= most


@pytest.mark.parametrize("mode", MODES)
def test_each_device_runs_the_call_that_it_would_run_inside_shard_map(mode):
    mesh, spec = mesh_of(mode), P("data", None, "model")
    function, arrays = gradient(attention), ATTENTION[2]
    whole = jax.shard_map(function, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3)
    with jax.set_mesh(mesh):
        given = placed(arrays, [spec] * 3, mesh)
        with recording() as compiled_calls:
            jax.jit(function).lower(*given).compile()
        found, inside = discover(function, *given), discover(whole, *given)
    assert {inv.key for inv in compiled_calls} == {inv.key for inv in found} == {inv.key for inv in inside}
    assert {inv.op_id for inv in found} == {"flash_attention", "flash_attention.bwd"}


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("groups", [1, 2])
def test_key_heads_fewer_than_devices_are_replicated(mode, groups):
    query, key, value = ATTENTION[2]
    arrays = (query, key[:, :, :groups], value[:, :, :groups])
    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=MODES[mode])
    _, found = compiled(gradient(attention), arrays, [P(None, None, "model"), P(), P()], mesh)
    close(found, jax.jit(gradient(plain_attention))(*arrays))


@pytest.mark.parametrize("batch", [8, 1])
def test_a_split_sequence_with_a_mask_is_moved_to_examples_or_heads(batch):
    arrays = [x[:batch] for x in ATTENTION[2]]
    masked = functools.partial(attention, attention_mask=jnp.ones((1, 1, 1, 16), bool))
    mesh = mesh_of("auto")
    given = placed(arrays, [P(None, "model")] * 3, mesh)
    shapes = [inv.array_types[0].shape for inv in discover(masked, *given)]
    assert shapes == [(2, 16, 8, 8) if batch == 8 else (1, 16, 2, 8)]
    close(jax.jit(masked)(*given), plain_attention(*arrays))


@pytest.mark.parametrize(
    ("spec", "says"), [(P(None, "model"), "axis 1 of query"), (P("data", None, None, "model"), "axis 3 of query")]
)
def test_an_indivisible_explicit_axis_is_an_error_with_the_fix(spec, says):
    mesh = mesh_of("explicit")
    masked = functools.partial(attention, attention_mask=jnp.ones((1, 1, 1, 16), bool))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"flash_attention: {says}.*jax\.sharding\.reshard"):
        jax.jit(masked)(*placed(ATTENTION[2], [spec, P(), P()], mesh))


@pytest.mark.parametrize(
    ("spec", "says"), [(P("data"), "can be split only over data"), (P(None, None, "model"), "cannot be split: another")]
)
def test_arrays_that_ask_for_different_explicit_axes_are_an_error(spec, says):
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"key, .* over 'model', but here it {says}"):
        jax.jit(attention)(*placed(ATTENTION[2], [spec, P("model"), spec], mesh))


def mask():
    return jax.random.bernoulli(jax.random.key(3), 0.8, (8, 1, 1, 16)).at[..., 0].set(True)


def segments():
    return jnp.sort(jax.random.randint(jax.random.key(4), (8, 16), 0, 3), axis=-1)


OPTIONS = {  # functions, because tests are collected by every process
    "bias of all examples": lambda: {"bias": random(1, 8, 16, 16, seed=5)},
    "bias of all heads": lambda: {"bias": random(8, 1, 16, 16, seed=5)},
    "mask": lambda: {"attention_mask": mask()},
    "segments": lambda: {"segment_ids": segments()},
    "lengths": lambda: {"key_lengths": jnp.arange(8) + 5},
    "sinks": lambda: {"sinks": random(8, seed=6)},
    "window and cap": lambda: {"sliding_window": 4, "logits_soft_cap": 5.0},
}


@pytest.mark.parametrize(
    ("option", "mode"),
    [*((option, "auto") for option in OPTIONS), ("bias of all heads", "explicit"), ("segments", "explicit")],
)
def test_every_argument_of_attention_is_split_with_the_query(option, mode):
    given = OPTIONS[option]()
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in given.items() if name not in arrays}

    def function(query, key, value, *more):
        return attention(query, key, value, **dict(zip(arrays, more, strict=True)), **static)

    inexact = [index for index, x in enumerate((*ATTENTION[2], *arrays.values())) if x.dtype == jnp.float32]
    whole = jax.grad(loss(function), argnums=inexact)
    specs = [P("data", None, "model")] * 3 + [P()] * len(arrays)
    operands = (*ATTENTION[2], *arrays.values())
    _, found = compiled(whole, operands, specs, mesh_of(mode))
    close(found, jax.jit(whole)(*operands))
    with jax.set_mesh(mesh_of(mode)):
        calls = discover(whole, *placed(operands, specs, mesh_of(mode)))
    assert {inv.array_types[0].shape for inv in calls} == {(4, 16, 2, 8)}


@pytest.mark.parametrize(
    ("mode", "spec"),
    [("auto", P("data")), ("explicit", P(None, "data", "model"))],
)
def test_dropout_is_not_split_and_drops_the_same_weights(mode, spec):
    def function(*arrays):
        return flash_attention(*arrays, dropout_rate=0.3, dropout_key=jax.random.key(1))

    both = jax.value_and_grad(loss(function), argnums=(0, 1, 2))
    _, found = compiled(both, ATTENTION[2], [spec] * 3, mesh_of(mode))
    close(found, both(*ATTENTION[2]))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_gradient_of_a_weight_is_summed_over_manual_axes_around_it_too(mode):
    mesh, (x, weight) = mesh_of(mode), RMS_NORM[2]
    inside = jax.shard_map(
        gradient(rms_norm), mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P()), axis_names={"data"}
    )
    expected = gradient(lambda *arrays: plain_rms_norm(*arrays) * 2**0.5)(x, weight)  # a mean of half the rows
    _, found = compiled(inside, (x, weight), [P("data", "model"), P()], mesh)
    close(found, expected)


def test_one_explicit_device_keeps_the_sharding_of_its_arrays():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    function = scanned(attention)
    _, found = compiled(gradient(function), ATTENTION[2], [P("data")] * 3, mesh)
    close(found, jax.jit(gradient(scanned(plain_attention)))(*ATTENTION[2]))
    assert all(x.sharding.spec[0] == "data" for x in found)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3)])
def test_a_mesh_with_axes_of_different_factors_is_split_in_its_own_order(shape):
    arrays = [random(6, 8, 6, 8, seed=seed) for seed in range(3)]
    mesh = jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[:6], axis_types=MODES["auto"])
    given = placed(arrays, [P("data", None, "model")] * 3, mesh)
    calls = discover(attention, *given)
    assert [inv.array_types[0].shape for inv in calls] == [(6 // shape[0], 8, 6 // shape[1], 8)]
    close(jax.jit(attention)(*given), plain_attention(*arrays))


@pytest.mark.parametrize(
    ("axis", "transposed", "mode"),
    [("columns", False, "auto"), ("inner", True, "auto"), ("columns", True, "explicit"), ("inner", False, "explicit")],
)
def test_a_grouped_product_is_split_by_columns_and_by_the_summed_dimension(axis, transposed, mode):
    sizes = jnp.asarray([5, 0, 9], jnp.int32)
    lhs, rhs = random(16, 8), random(3, 8, 16, seed=1)
    lhs_spec = P(None, "model" if axis == "inner" else None)
    rhs_spec = P(None, "model", None) if axis == "inner" else P(None, None, "model")
    if transposed:
        rhs, rhs_spec = rhs.swapaxes(1, 2), P(rhs_spec[0], rhs_spec[2], rhs_spec[1])

    def product(lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes, transpose_rhs=transposed)

    both = jax.value_and_grad(loss(product), argnums=(0, 1))
    _, found = compiled(both, (lhs, rhs, sizes), [lhs_spec, rhs_spec, P()], mesh_of(mode))
    close(found, both(lhs, rhs, sizes))


@pytest.mark.parametrize(("axis", "mode"), [("columns", "auto"), ("inner", "auto"), ("columns", "explicit")])
def test_a_grouped_product_with_an_activation_is_split_only_by_columns(axis, mode):
    function, arrays = activated()
    spec = P(None, None, "model") if axis == "columns" else P(None, "model")
    specs = [P(None, "model") if axis == "inner" else P(), spec, P(), spec, P()]
    both = jax.value_and_grad(loss(function), argnums=(0, 1, 3, 4))
    _, found = compiled(both, arrays, specs, mesh_of(mode))
    close(found, both(*arrays))
    calls = discover(function, *placed(arrays, specs, mesh_of(mode)))
    assert [inv.array_types[1].shape[1] for inv in calls] == [8]


def test_a_grouped_product_with_an_activation_refuses_a_summed_dimension_on_an_explicit_axis():
    function, arrays = activated()
    with pytest.raises(ArgumentError, match=r"axis 1 of lhs.* every device needs all of it"):
        compiled(
            function, arrays, [P(None, "model"), P(None, "model"), P(), P(None, "model"), P()], mesh_of("explicit")
        )


def activated():
    """Return a product with a full epilogue, and its arguments."""

    def function(lhs, rhs, sizes, gate, row_scale):
        return grouped_matmul(lhs, rhs, sizes, activation="silu", gate=gate, row_scale=row_scale)

    matrices = (random(3, 8, 16, seed=seed) for seed in (1, 2))
    return function, (
        random(16, 8),
        next(matrices),
        jnp.asarray([5, 0, 9], jnp.int32),
        next(matrices),
        random(16, seed=3),
    )
