# SPDX-License-Identifier: Apache-2.0
"""The loss over meshes: tokens and vocabulary are split, and the results are those of one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device
from tests.kernels.meshes import bytes_in_collectives, close, compiled, mesh_of, placed

from ejkernel.kernels.linear_cross_entropy.xla import XlaParams
from ejkernel.modules import LinearCrossEntropyGradientsConfig, linear_cross_entropy, token_log_probs
from ejkernel.ops.execution.discovery import discover

pytestmark = pytest.mark.slow

BATCH, LENGTH, INNER, COLUMNS = 4, 6, 8, 32
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "logits_soft_cap": 3.0, "return_lse": True, "return_accuracy": True}


def arrays():
    """Return hidden states, weight, weights of tokens, a bias with padded columns, and labels."""
    rng = np.random.default_rng(0)
    x, weight, factors, bias = (
        on_device(rng.standard_normal(shape), jnp.float32)
        for shape in ((BATCH, LENGTH, INNER), (INNER, COLUMNS), (BATCH, LENGTH), (COLUMNS,))
    )
    labels = rng.integers(0, COLUMNS - 3, (BATCH, LENGTH))
    labels[0, 1] = -100
    return x, weight, jnp.abs(factors), bias.at[-3:].set(-jnp.inf), jnp.asarray(labels, jnp.int32)


def loss(x, weight, factors, bias, labels, **more):
    total, *others = linear_cross_entropy(x, weight, labels, token_weights=factors, bias=bias, **OPTIONS, **more)
    return total, others


def log_probs(x, weight, factors, bias, labels, **more):
    found = token_log_probs(x, weight, labels, bias=bias, return_entropy=True, temperature=0.7, **more)
    return (found[0] * jnp.cos(factors) + found[1] * factors).sum(), found


FUNCTIONS = {"loss": loss, "log_probs": log_probs}
SPECS = {
    "tokens and vocabulary": [P("data"), P(None, "model"), P("data"), P("model"), P("data")],
    "tokens over both axes": [P("data", "model"), P(), P("data", "model"), P(), P("data", "model")],
    "vocabulary over both axes": [P(), P(None, ("data", "model")), P(), P(("data", "model")), P()],
}
SHAPES = {"tokens over both axes": (2, 2)}  # the length is divisible by two


@functools.cache
def on_one_device(name):
    return jax.jit(jax.value_and_grad(FUNCTIONS[name], (0, 1, 2, 3), has_aux=True))(*arrays())


@pytest.mark.parametrize(
    ("mode", "split", "name"),
    [
        *((mode, split, name) for mode in ("auto", "explicit") for split in SPECS for name in FUNCTIONS),
        ("mixed", "tokens and vocabulary", "loss"),
    ],
)
def test_results_over_a_mesh_are_those_of_one_device(mode, split, name):
    mesh = mesh_of(mode) if split not in SHAPES else _small(mode)
    both = jax.value_and_grad(FUNCTIONS[name], (0, 1, 2, 3), has_aux=True)
    _, found = compiled(both, arrays(), SPECS[split], mesh)
    close(on_one_device(name), found)


def _small(mode):
    kind = mesh_of(mode).axis_types
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=kind, devices=jax.devices()[:4])


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_second_derivatives_of_a_scalar_loss_over_a_mesh(mode):
    def product(*given):
        gradients = jax.grad(lambda *arrays: loss(*arrays)[0], (0, 1))
        return jax.jvp(lambda x, weight: gradients(x, weight, *given[2:]), given[:2], given[:2])[1]

    _, found = compiled(product, arrays(), SPECS["tokens and vocabulary"], mesh_of(mode))
    close(jax.jit(product)(*arrays()), found)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_device_with_removed_columns_only_adds_nothing_to_derivatives(name):
    x, weight, factors, bias, labels = arrays()
    own = COLUMNS // mesh_of("auto").shape["model"]
    given = (x, weight, factors, bias.at[-own:].set(-jnp.inf), labels % (COLUMNS - own))

    def derivatives(*given):
        both = jax.value_and_grad(lambda *two: FUNCTIONS[name](*two, *given[2:])[0], (0, 1))
        return jax.jvp(both, given[:2], given[:2])

    _, found = compiled(derivatives, given, SPECS["tokens and vocabulary"], mesh_of("auto"))
    close(jax.jit(derivatives)(*given), found)


def test_the_gradient_of_a_shared_weight_under_a_named_vmap_over_explicit_axes():
    def of_weight(x, weight, labels):
        def losses(x, labels):
            return linear_cross_entropy(x, weight, labels, reduction="none")

        return jax.vmap(losses, axis_name="examples")(x, labels).sum()

    x, weight, _, _, labels = arrays()
    _, found = compiled(jax.grad(of_weight, 1), (x, weight, labels), [P(), P(), P()], mesh_of("explicit"))
    close(jax.jit(jax.grad(of_weight, 1))(x, weight, labels), found)


def test_a_weight_sharded_along_its_inner_axis_is_gathered():
    both = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
    specs = [P("data"), P("data"), P("data"), P(), P("data")]
    _, found = compiled(both, arrays(), specs, mesh_of("auto"))
    close(on_one_device("loss"), found)


def test_shards_are_calls_with_a_part_of_tokens_and_vocabulary():
    given = placed(arrays(), SPECS["tokens and vocabulary"], mesh_of("auto"))
    calls = discover(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True), *given)
    assert {"linear_cross_entropy_gradients"} == {inv.kernel.op_id for inv in calls}
    assert [tuple(a.shape for a in inv.array_types[:2]) for inv in calls] == [((2, 6, 8), (8, 8))]


SMALL = {"ids": lambda value: "checked" if value is True else "unchecked" if value is False else str(value)}


@pytest.mark.parametrize("check", [True, False], **SMALL)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_shard_map_with_a_vocabulary_axis_gives_the_same(name, check):
    chunks = LinearCrossEntropyGradientsConfig(fwd=XlaParams(chunk=3))
    more = {"vocab_axis": "model"} | ({"reduction": "sum", "cfg": chunks} if name == "loss" else {})

    def local(*arrays):
        return jax.lax.psum(FUNCTIONS[name](*arrays, **more)[0], "data")

    def whole(*arrays):
        return FUNCTIONS[name](*arrays, **{k: v for k, v in more.items() if k == "reduction"})[0]

    specs = tuple(SPECS["tokens and vocabulary"])
    mapped = jax.shard_map(local, mesh=mesh_of("auto"), in_specs=specs, out_specs=P(), check_vma=check)
    wrt = (0, 1, 2, 3)
    expected = jax.jit(jax.value_and_grad(whole, wrt))(*arrays())
    close(expected, jax.jit(jax.value_and_grad(mapped, wrt))(*arrays()))
    if check:  # gradients that each device makes itself
        inside = jax.shard_map(
            jax.value_and_grad(local, wrt), mesh=mesh_of("auto"), in_specs=specs, out_specs=(P(), specs[:4])
        )
        close(expected, jax.jit(inside)(*arrays()))


def test_no_tokens_with_a_vocabulary_axis_give_zeros():
    def local(x, weight):
        labels = jnp.zeros(x.shape[:1], jnp.int32)
        return linear_cross_entropy(x, weight, labels, reduction="sum", vocab_axis="model")

    mapped = jax.shard_map(local, mesh=mesh_of("auto"), in_specs=(P(), P(None, "model")), out_specs=P())
    loss, (dx, dw) = jax.jit(jax.value_and_grad(mapped, (0, 1)))(jnp.ones((0, INNER)), jnp.ones((INNER, COLUMNS)))
    assert loss == 0
    assert dx.shape == (0, INNER)
    assert not dw.any()


@pytest.mark.parametrize("by_hand", [False, True], ids=["jit", "shard_map"])
def test_four_numbers_per_token_and_the_gradient_of_x_travel(by_hand):
    x, weight, _, _, labels = arrays()
    mesh = jax.make_mesh((4,), ("model",), axis_types=mesh_of("auto").axis_types[:1], devices=jax.devices()[:4])
    specs = [P(), P(None, "model"), P()]

    def function(x, weight, labels):
        return linear_cross_entropy(x, weight, labels, reduction="sum", **({"vocab_axis": "model"} if by_hand else {}))

    if by_hand:
        function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    program, found = compiled(jax.value_and_grad(function, (0, 1)), (x, weight, labels), specs, mesh)
    tokens = BATCH * LENGTH
    assert tokens * (4 * 4 + INNER * 4) >= bytes_in_collectives(program) >= tokens * (3 * 4 + INNER * 4)
    close(
        jax.value_and_grad(lambda x, w: linear_cross_entropy(x, w, labels, reduction="sum"), (0, 1))(x, weight), found
    )
