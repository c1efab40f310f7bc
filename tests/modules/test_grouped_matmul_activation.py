# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul` with an activation, a gate or factors of rows, as a user meets it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.arrays import ones
from tests.kernels.grouped_matmul import by_numpy

from ejkernel.kernels.grouped_matmul.xla import XlaParams
from ejkernel.modules import (
    GroupedMatmul,
    GroupedMatmulActivation,
    GroupedMatmulActivationConfig,
    grouped_matmul,
    quantize,
)
from ejkernel.ops import ArgumentError, ConfigError, Invocation, check_kernel, find_labels_in_lowered

pytestmark = pytest.mark.slow

ROWS, K, N, GROUPS = 20, 8, 6, 4
SIZES = jnp.array([3, 0, 9, 4])
GIVEN = {
    name: by_numpy.normal(*shape, dtype="float32", seed=seed)
    for seed, (name, shape) in enumerate(
        {"lhs": (ROWS, K), "rhs": (GROUPS, K, N), "gate": (GROUPS, K, N), "row_scale": (ROWS,)}.items()
    )
}
FUNCTIONS = {
    None: lambda x: x,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}


def ours(given, activation=None, **options):
    return grouped_matmul(group_sizes=SIZES, activation=activation, **given, **options)


def plainly(given, activation=None):
    """Return the same by a loop over groups, which JAX differentiates."""
    out = jnp.zeros((ROWS, N))
    for group, (start, end) in enumerate(by_numpy.spans(SIZES, ROWS)):
        own = FUNCTIONS[activation](given["lhs"][start:end] @ given["rhs"][group])
        if "gate" in given:
            own *= given["lhs"][start:end] @ given["gate"][group]
        if "row_scale" in given:
            own *= given["row_scale"][start:end, None]
        out = out.at[start:end].set(own)
    return out


def operands(*names):
    return {name: GIVEN[name] for name in ("lhs", "rhs", *names)}


def assert_equal(expected, actual):
    for wanted, found in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        by_numpy.assert_near(np.asarray(wanted), found, error=1e-4)


# Arguments.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": "swish"}, "activation must be one of silu, gelu, relu, relu2, or None; got 'swish'"),
        ({"activation": jax.nn.silu}, "activation must be one of silu, .*; got <"),
        ({"gate": GIVEN["gate"][:, :, 1:]}, r"gate must have rhs's shape and dtype, \(4, 8, 6\) and float32; got \(4"),
        ({"gate": GIVEN["gate"].astype("bfloat16")}, "and float32; got .* and bfloat16"),
        ({"gate": [1.0]}, "gate must be a floating-point array .*, got list"),
        ({"row_scale": GIVEN["row_scale"][1:]}, r"a number for each row of lhs; got shapes \(19,\) and \(20, 8\)"),
        ({"row_scale": ones(ROWS, "int32")}, r"row_scale must be a floating-point array \[m\], got dtype int32"),
        ({"gate": GIVEN["gate"], "implementation": "jax_mgpu"}, "must be one of mosaic_gpu, xla, megablox"),
    ],
)
def test_a_wrong_argument_is_named(changes, words):
    with pytest.raises(ArgumentError, match=words):
        ours(
            operands() | {name: value for name, value in changes.items() if name != "activation"},
            **{name: value for name, value in changes.items() if name == "activation"},
        )


def test_a_configuration_is_that_of_the_call():
    cfg = GroupedMatmulActivationConfig(implementation="xla", fwd=XlaParams(block_rows=5))
    assert_equal(plainly(operands("gate"), "silu"), ours(operands("gate"), "silu", cfg=cfg))
    with pytest.raises(ConfigError, match="GroupedMatmulActivationConfig"):
        ours(operands(), cfg=cfg)


def test_the_operation_itself_wants_an_activation_or_a_gate():
    with pytest.raises(ArgumentError, match="activation and gate are both None"):
        GroupedMatmulActivation().prepare(GIVEN["lhs"], GIVEN["rhs"], SIZES)


# Results.


@pytest.mark.parametrize("sizes", by_numpy.HOSTILE.values(), ids=by_numpy.HOSTILE)
def test_hostile_sizes_are_right_with_garbage_behind_the_groups(sizes):
    rows = {"lhs": (by_numpy.ROWS, K), "row_scale": (by_numpy.ROWS,)}
    given = operands("gate") | {name: by_numpy.normal(*shape, dtype="float32") for name, shape in rows.items()}
    behind = given | {name: by_numpy.with_nan_behind(given[name], sizes) for name in rows}
    found = grouped_matmul(group_sizes=jnp.asarray(sizes), activation="silu", **behind)
    by_numpy.assert_near(by_numpy.product(sizes=sizes, activation="silu", **given), found, error=1e-5)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_nothing_of_one_group_or_past_the_last_reaches_another(activation):
    given = operands(*["gate"] * (activation is not None), "row_scale")
    poisoned = {name: x.at[3:12].set(jnp.nan).at[16:].set(jnp.nan) for name, x in given.items() if len(x) == ROWS}
    poisoned = given | poisoned | {name: x.at[2].set(jnp.nan) for name, x in given.items() if len(x) == GROUPS}
    out, pull = jax.vjp(lambda given: ours(given, activation), poisoned)
    gradients = pull(jnp.ones_like(out).at[16:].set(jnp.nan))[0]
    for found in (out, gradients["lhs"], gradients["row_scale"]):
        assert np.isnan(found[3:12]).all()
        assert np.isfinite(np.delete(found, range(3, 12), 0)).all()
        assert not np.any(found[16:])
    assert np.isfinite(gradients["rhs"][np.array([0, 1, 3])]).all()


def test_an_epilogue_uses_sums_before_rounding():
    given = {name: x.astype("bfloat16") for name, x in operands("gate", "row_scale").items()}
    wide = ours(given, "gelu", preferred_element_type="float32")
    assert wide.dtype == "float32"
    by_numpy.assert_near(by_numpy.product(sizes=SIZES, activation="gelu", **given), wide, error=1e-5)
    np.testing.assert_array_equal(ours(given, "gelu"), wide.astype("bfloat16"))


@pytest.mark.parametrize("factor", [0.0, pytest.param(2**-24, marks=pytest.mark.whole)])
def test_float16_products_may_overflow_where_the_result_does_not(factor):
    arrays = [(size * GIVEN[name]).astype("float16") for name, size in (("lhs", 4096), ("rhs", 64), ("gate", 2**-12))]
    row_scale = jnp.full(ROWS, factor, jnp.float32)
    assert np.isinf(arrays[0] @ arrays[1][0]).any()

    def values(dtype):
        def run(lhs, rhs, gate, row_scale):
            return grouped_matmul(lhs, rhs, SIZES, gate=gate, row_scale=row_scale, activation="silu")

        given = (*(x.astype(dtype) for x in arrays), row_scale)
        out, tangent = jax.jvp(run, given, given)
        return out, tangent, *jax.vjp(run, *given)[1](jnp.ones_like(out))

    for wanted, found in zip(values("float32"), values("float16"), strict=True):
        assert float(jnp.abs(wanted).max()) < 6e4 or found.dtype == "float32"
        atol = 4e-3 * float(jnp.abs(wanted).max())
        np.testing.assert_allclose(found.astype("float32"), wanted, rtol=0, atol=atol)


def test_64_bits_are_kept():
    with jax.enable_x64(True):
        given = {name: x.astype("float64") + 1e-12 for name, x in operands("gate", "row_scale").items()}
        np.testing.assert_allclose(ours(given, "silu"), plainly(given, "silu"), rtol=1e-12)


def test_strict_promotion_of_types_is_kept():
    given = operands("gate") | {"row_scale": GIVEN["row_scale"].astype("float16")}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for activation in (None, "silu"):
            own = given if activation else {name: given[name] for name in ("lhs", "rhs", "row_scale")}
            gradients = jax.grad(lambda own, activation=activation: ours(own, activation).sum())(own)
            assert gradients["row_scale"].dtype == "float16"


# Derivatives.


@pytest.mark.whole  # the conformance suite checks the types, without a gate and factors in one call
def test_gradients_have_the_types_of_their_arguments():
    operation = GroupedMatmulActivation()
    cfg = operation.config_type(fwd=XlaParams(block_rows=8))
    without = ["second derivative", "inputs", "platforms", "vmap", "pickle", "export", "tangents", "key", "split"]
    args = (GIVEN["lhs"], GIVEN["rhs"], SIZES, GIVEN["gate"], GIVEN["row_scale"])
    assert check_kernel(operation, *args, configs=[cfg], without=without, activation="silu").ok


@pytest.mark.parametrize("others", [(), ("gate", "row_scale")], ids=["alone", "with a gate and factors of rows"])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gradients_are_those_of_a_loop_over_groups(activation, others):
    found, expected = (gradients_by(jax.grad, function, activation, operands(*others)) for function in (ours, plainly))
    assert_equal(expected, found)


@pytest.mark.parametrize("others", [("row_scale",), ("gate", "row_scale")], ids=["factors of rows", "a gate, too"])
@pytest.mark.parametrize("derivative", [jax.jacfwd, jax.hessian, lambda loss: jax.grad(jax.checkpoint(loss))])
def test_derivatives_of_every_kind_are_those_of_a_loop_over_groups(derivative, others):
    given = {name: operands(*others)[name] for name in ("lhs", *others[-1:])}
    activation, rest = "silu" if "gate" in others else None, operands(*others)
    functions = [lambda given, *how, f=f: f(rest | given, *how) for f in (ours, plainly)]
    found, expected = (gradients_by(derivative, function, activation, given) for function in functions)
    assert_equal(expected, found)


def gradients_by(derivative, function, activation, given):
    def loss(given):
        return jnp.sin(function(given, activation)).sum()

    program = jax.jit(derivative(loss)).lower(given)
    return program.compile(compiler_options={"xla_backend_optimization_level": 0})(given)


def test_transposed_matrices_have_the_gradients_of_themselves():
    given = operands("gate", "row_scale")
    turned = given | {name: given[name].swapaxes(1, 2) for name in ("rhs", "gate")}
    expected = jax.grad(lambda given: jnp.sin(plainly(given, "silu")).sum())(given)
    found = jax.grad(lambda given: jnp.sin(ours(given, "silu", transpose_rhs=True)).sum())(turned)
    assert_equal(expected, found | {name: found[name].swapaxes(1, 2) for name in ("rhs", "gate")})


def test_a_batch_is_its_examples_one_by_one():
    given = operands("gate", "row_scale")
    rows = {name: jnp.stack([given[name], given[name][::-1]]) for name in ("lhs", "row_scale")}
    gradient = jax.grad(lambda rows: jnp.sin(ours(given | rows, "relu2")).sum())
    found = jax.vmap(gradient)(rows)
    for index in range(2):
        assert_equal(gradient({name: x[index] for name, x in rows.items()}), {n: x[index] for n, x in found.items()})


def kept(given, activation):
    """Return the shapes of the residuals, without the arguments."""
    pull = jax.vjp(lambda given: ours(given, activation), given)[1]
    shapes = [x.shape for x in jax.tree.leaves(pull) if hasattr(x, "shape")]
    for x in (*given.values(), SIZES):
        if x.shape in shapes:
            shapes.remove(x.shape)
    return shapes


def test_products_are_kept_where_they_are_needed_and_factors_of_rows_need_none():
    assert kept(operands("row_scale"), None) == []
    assert kept(operands("gate", "row_scale"), "silu").count((ROWS, N)) >= 2


def forwards(policy):
    """Return how many forwards a program has that computes a gradient under `jax.checkpoint`."""

    def loss(given):
        return jnp.sin(ours(given | {"lhs": jnp.sin(given["lhs"])}, "silu")).sum()

    gradient = jax.jit(jax.value_and_grad(jax.checkpoint(loss, policy=policy)))
    return gradient.lower(operands("gate")).as_text().count("#grouped_matmul_activation@v0")


def test_a_forward_is_computed_again_unless_a_policy_saves_its_residuals():
    save = jax.checkpoint_policies.save_only_these_names
    names = [f"grouped_matmul_activation.{kind}" for kind in ("out", "residuals")]
    assert [forwards(policy) for policy in (None, save(names[0]), save(*names))] == [2, 2, 1]


# Keys.


def test_each_product_of_a_gradient_has_a_separate_key():
    gradient = jax.jit(jax.grad(lambda given: jnp.sin(ours(given, "silu")).sum()))
    labels = find_labels_in_lowered(gradient.lower(operands("gate", "row_scale")))
    named = sorted(re.sub(r".*#|@.*", "", label) for label in labels)
    assert named == [
        "grouped_matmul",
        "grouped_matmul_activation",
        "grouped_matmul_activation.bwd",
        "grouped_matmul_wgrad",
    ]
    plain = jax.jit(jax.grad(lambda given: jnp.sin(ours(given)).sum())).lower(operands())
    assert {label for label in labels if "activation" not in label} < set(find_labels_in_lowered(plain))


def test_a_call_without_them_has_the_key_that_it_had():
    kernel = GroupedMatmul()

    def key(*more, **options):
        args, kwargs = kernel.prepare(GIVEN["lhs"], GIVEN["rhs"], SIZES, *more, **options)
        return Invocation(kernel=kernel, args=args, kwargs=kwargs).call_key

    assert key() == key(None) == "a71f47e1a2496dd7"
    assert key(GIVEN["row_scale"]) != key()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("different", [("rhs",), ("gate",), ("gate", "row_scale"), ("lhs",)], ids=", ".join)
def test_some_arrays_may_differ_between_the_devices_of_a_shard_map(different, quantised):
    """The gradient of a replicated array is the sum over devices, each of its terms once."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    given = {"gate": None, **operands("gate", "row_scale")}
    differentiated = ["lhs", "row_scale"] if quantised else list(given)

    def loss(given):
        matrices = {name: quantize(given[name], axis=1) if quantised else given[name] for name in ("rhs", "gate")}
        return (ours({**given, **matrices}, "silu") ** 2).sum()

    def whole(varied, rest):
        return sum(loss({n: x[i] if n in different else x for n, x in (varied | rest).items()}) for i in range(4))

    def local(varied, rest):
        own = loss({n: x[0] if n in different else x for n, x in (varied | rest).items()})
        return jax.lax.psum(own, "data")

    stacked = {n: jnp.stack([x, -x, x / 2, 2 * x]) if n in different else x for n, x in given.items()}
    varied = {n: stacked.pop(n) for n in differentiated}
    specs = tuple({n: P("data") if n in different else P() for n in part} for part in (varied, stacked))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    assert_equal(jax.jit(jax.grad(whole))(varied, stacked), jax.jit(jax.grad(mapped))(varied, stacked))
