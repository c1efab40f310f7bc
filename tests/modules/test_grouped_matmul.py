# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul` for its users: refused arguments, the choice of the implementation, the calls of its gradient."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device, ones
from tests.kernels.grouped_matmul import by_numpy

from ejkernel.kernels.grouped_matmul.operation import example_sizes
from ejkernel.kernels.grouped_matmul.xla import XlaParams
from ejkernel.modules import (
    GroupedMatmul,
    GroupedMatmulConfig,
    GroupedMatmulWgradConfig,
    grouped_matmul,
    grouped_matmul_wgrad,
)
from ejkernel.ops import ArgumentError, ConfigError, Invocation, UnsupportedError, autotune, find_labels_in_lowered

pytestmark = pytest.mark.slow

ROWS, K, N = 20, 8, 6
SIZES = on_device([3, 0, 9, 4], "int32")
LHS, RHS, DOUT = (by_numpy.normal(*shape, dtype="float32") for shape in ((ROWS, K), (4, K, N), (ROWS, N)))
KERNEL = GroupedMatmul()
TILES = GroupedMatmulConfig(implementation="xla", fwd=XlaParams(block_rows=5))
SUM_TILES = GroupedMatmulWgradConfig(implementation="xla", fwd=XlaParams(block_rows=5))


def plainly(lhs, rhs, sizes=SIZES):
    """Return the product by a loop over groups, which JAX differentiates."""
    out = jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)
    for matrix, (start, end) in zip(rhs, by_numpy.spans(sizes, lhs.shape[0]), strict=True):
        out = out.at[start:end].set(lhs[start:end] @ matrix)
    return out


def loss_of(product):
    return lambda lhs, rhs: jnp.sin(product(lhs, rhs, SIZES)).sum()


def assert_equal(expected, actual):
    for wanted, found in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


# Arguments.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lhs": [1.0]}, r"lhs must be a floating-point array \[m, k\], got list; pass a JAX or NumPy array"),
        ({"lhs": LHS.astype("int16")}, r"lhs must be .* \[m, k\], got dtype int16; cast it, e.g. to bfloat16"),
        (
            {"lhs": LHS.astype("int8")},
            r"lhs must be .* of 16 bits or more, got int8\[.*; pass Quantized\(values, scale",
        ),
        ({"rhs": RHS.astype("float8_e5m2")}, r"rhs must be .* of 16 bits or more, got float8_e5m2\[.*; pass Quantized"),
        ({"lhs": ones((2, 3, 4))}, r"lhs must be \[m, k\], got shape \(2, 3, 4\); reshape it"),
        ({"rhs": ones((4, K, N), "int32")}, r"rhs must be a floating-point array \[groups, k, n\], got dtype int32"),
        ({"rhs": RHS.astype("bfloat16")}, "one dtype, got float32 and bfloat16; cast"),
        (
            {"rhs": ones((4, K + 1, N))},
            r"have one k where .* False; got shapes \(20, 8\) and \(4, 9, 6\): axes 1 and 1 differ",
        ),
        (
            {"transpose_rhs": True},
            r"have one k where .* True; got shapes \(20, 8\) and \(4, 8, 6\): axes 1 and 2 differ",
        ),
        ({"transpose_rhs": 1}, "transpose_rhs must be True or False, got 1"),
        ({"group_sizes": ones(4)}, r"group_sizes must be an array of integers \[groups\], got dtype float32"),
        ({"group_sizes": SIZES[None]}, r"group_sizes must be \[4\], one for each matrix of rhs; got shape \(1, 4\)"),
        (
            {"group_sizes": (5, 5, 5, 5)},
            "group_sizes must be an array of integers .*, got tuple; pass a JAX or NumPy array",
        ),
        (
            {"group_sizes": ones(6, "int32")},
            r"got shape \(6,\); if rhs has only some of the groups, pass first_group",
        ),
        ({"group_sizes": jnp.ones(3, int)}, r"group_sizes must be \[4\], one for each matrix of rhs; got shape \(3,\)"),
        ({"first_group": 1.5}, r"first_group must be an integer, or an integer array of shape \(\); got 1\.5"),
        ({"first_group": jnp.float32(1)}, r"first_group must be an integer, .*; got float32\[\]"),
        ({"first_group": -1}, "first_group must be from 0 to 4, the number of groups; got -1"),
        ({"first_group": 2**40}, "first_group must be from 0 to 4, the number of groups; got 1099511627776"),
        (
            {"first_group": 0, "group_sizes": SIZES[:3]},
            r"sizes of all groups, at least the 4 with matrices here; .* \(3,\)",
        ),
        ({"preferred_element_type": "int8"}, "preferred_element_type must be a floating-point dtype, got int8"),
        ({"preferred_element_type": "number"}, "preferred_element_type must be a dtype or None, got 'number'"),
        ({"precision": "exact"}, "precision must be one of default, high, highest"),
        ({"implementation": "cudnn"}, "one of mosaic_gpu, jax_mgpu, xla, megablox, or None; got 'cudnn'"),
    ],
)
def test_a_wrong_argument_is_named(changes, words):
    with pytest.raises(ArgumentError, match=words):
        grouped_matmul(**{"lhs": LHS, "rhs": RHS, "group_sizes": SIZES} | changes)


def test_wrong_arguments_of_the_weights_gradient_are_named():
    with pytest.raises(ArgumentError, match=r"have as many rows; got shapes \(20, 8\) and \(19, 6\)"):
        grouped_matmul_wgrad(LHS, DOUT[1:], SIZES)
    with pytest.raises(ArgumentError, match=r"group_sizes must be \[groups\]; got shape \(\)"):
        grouped_matmul_wgrad(LHS, DOUT, jnp.int32(3))
    with pytest.raises(
        ArgumentError, match="groups must be the number of groups in the result if first_group is given"
    ):
        grouped_matmul_wgrad(LHS, DOUT, SIZES, first_group=1)
    with pytest.raises(ArgumentError, match=r"groups must be an int >= 0, or None; got 2\.0"):
        grouped_matmul_wgrad(LHS, DOUT, SIZES, groups=2.0)
    with pytest.raises(ArgumentError, match=rf"groups must be {len(SIZES)}, .*; got 2\. .* pass first_group"):
        grouped_matmul_wgrad(LHS, DOUT, SIZES, groups=2)
    with pytest.raises(ConfigError, match="block_rows must be a positive integer or None, got 0"):
        XlaParams(block_rows=0)


def test_types_in_place_of_arrays_are_reported():
    with pytest.raises(
        ArgumentError,
        match=r"grouped_matmul: lhs is a type without values, float32\[20, 8\]; .* jax.eval_shape",
    ):
        grouped_matmul(jax.ShapeDtypeStruct((20, 8), "float32"), RHS, SIZES)


def test_our_kernels_are_strict_about_the_device():
    with pytest.raises(UnsupportedError, match="'mosaic_gpu'"):
        jax.jit(functools.partial(grouped_matmul, implementation="mosaic_gpu")).lower(LHS, RHS, SIZES).compile()


# Results.


@pytest.mark.parametrize("sizes", by_numpy.HOSTILE.values(), ids=by_numpy.HOSTILE)
def test_hostile_sizes_are_right_with_garbage_behind_the_groups(sizes):
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, K, dtype="float32"), by_numpy.normal(4, K, N, dtype="float32")
    dout, given_sizes = by_numpy.normal(by_numpy.ROWS, N, dtype="float32", seed=1), jnp.asarray(sizes)
    behind = [by_numpy.with_nan_behind(x, sizes) for x in (lhs, dout)]
    by_numpy.assert_near(by_numpy.product(lhs, rhs, sizes), grouped_matmul(behind[0], rhs, given_sizes), error=1e-5)
    by_numpy.assert_near(
        by_numpy.weights_gradient(lhs, dout, sizes), grouped_matmul_wgrad(*behind, given_sizes), error=1e-5
    )


def test_nothing_of_one_group_reaches_another():
    lhs, rhs = LHS.at[3:12].set(jnp.nan), RHS.at[2].set(jnp.nan)
    out, pull = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, SIZES, cfg=TILES), lhs, rhs)
    dlhs, drhs = pull(DOUT.at[3:12].set(jnp.inf))
    assert [bool(jnp.isnan(x[3:12]).all()) for x in (out, dlhs, drhs[2:3])] == [True] * 3
    for found in (out, dlhs):
        assert np.isfinite(found[np.r_[:3, 12:20]]).all()
    assert np.isfinite(drhs[np.array([0, 1, 3])]).all()


def test_a_result_may_be_wider_than_the_operands():
    lhs, rhs = LHS.astype("bfloat16"), RHS.astype("bfloat16")
    out = grouped_matmul(lhs, rhs, SIZES, preferred_element_type=jnp.float32)
    assert out.dtype == "float32"
    by_numpy.assert_near(by_numpy.product(lhs, rhs, SIZES), out, error=1e-6)
    gradient = jax.grad(lambda lhs: grouped_matmul(lhs, rhs, SIZES, preferred_element_type="float32").sum())(lhs)
    assert gradient.dtype == "bfloat16"


@pytest.mark.parametrize("preferred", ["float16", "float32"])
@pytest.mark.parametrize("factor", [0.0, 1e-3, 1e-6])
def test_float16_gradients_are_finite_where_they_overflow_only_without_the_rows_factors(factor, preferred):
    lhs, rhs = (300 * x for x in (LHS, RHS))
    row_scale, dout = jnp.full(ROWS, factor, jnp.float32), (200 * DOUT).astype(preferred)
    assert np.isinf((dout @ rhs[0].T).astype("float16")).any()  # a gradient without its factor

    def gradients(dtype, preferred):
        def run(lhs, rhs, row_scale):
            return grouped_matmul(lhs, rhs, SIZES, row_scale=row_scale, preferred_element_type=preferred)

        return jax.vjp(run, lhs.astype(dtype), rhs.astype(dtype), row_scale)[1](dout.astype(preferred))

    expected = gradients("float32", "float32")
    for wanted, found in zip(expected, gradients("float16", preferred), strict=True):
        atol = 2e-3 * float(jnp.abs(wanted).max())
        np.testing.assert_allclose(found.astype("float32"), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("product", [grouped_matmul, grouped_matmul_wgrad])
def test_memory_is_linear_in_rows_and_groups(product):
    """No array of the lowered gradient has a number for each pair of a row and a group."""
    rows, sizes = jnp.ones((512, 2)), jnp.ones(512, int)
    other = jnp.ones((512, 2, 2)) if product is grouped_matmul else rows
    text = jax.jit(jax.grad(lambda x, y: product(x, y, sizes).sum(), (0, 1))).lower(rows, other).as_text()
    largest = max(math.prod(map(int, shape.split("x"))) for shape in re.findall(r"tensor<([\dx]+)x\w", text))
    assert largest <= 8 * 512


@pytest.mark.parametrize("empty", ["m", "groups", "k", "n"])
def test_there_may_be_nothing_to_multiply(empty):
    m, groups, k, n = (0 if name == empty else 3 for name in ("m", "groups", "k", "n"))
    lhs, rhs, sizes = jnp.ones((m, k)), jnp.ones((groups, k, n)), jnp.ones(groups, int)
    np.testing.assert_array_equal(grouped_matmul(lhs, rhs, sizes), np.zeros((m, n)))
    np.testing.assert_array_equal(grouped_matmul_wgrad(lhs, jnp.ones((m, n)), sizes), np.zeros((groups, k, n)))


def test_derivatives_of_every_kind_are_those_of_a_loop_over_groups():
    ours, plain = loss_of(functools.partial(grouped_matmul, cfg=TILES)), loss_of(plainly)
    for derivative in (jax.grad, jax.jacfwd, jax.hessian):
        assert_equal(*(jax.jit(derivative(loss, (0, 1)))(LHS, RHS) for loss in (plain, ours)))


def test_second_derivatives_of_the_sums_are_those_of_a_loop_over_groups():
    def plain(lhs, rhs, sizes):
        return jnp.stack([lhs[start:end].T @ rhs[start:end] for start, end in by_numpy.spans(sizes, ROWS)])

    ours = functools.partial(grouped_matmul_wgrad, cfg=SUM_TILES)
    assert_equal(*(jax.jit(jax.hessian(loss_of(product), (0, 1)))(LHS, DOUT) for product in (plain, ours)))


def test_a_batch_equals_its_examples_one_by_one_even_if_only_sizes_are_batched():
    sizes = jnp.array([[3, 0, 9, 4], [20, 0, 0, 0], [1, 1, 1, 1]])
    found = jax.vmap(jax.grad(lambda lhs, sizes: grouped_matmul(lhs, RHS, sizes).sum()), (None, 0))(LHS, sizes)
    for own, of_example in zip(sizes, found, strict=True):
        expected = by_numpy.product(np.ones((ROWS, N)), RHS, own, transpose_rhs=True)
        np.testing.assert_allclose(of_example, expected, atol=1e-5)


def test_products_of_all_rows_at_once_batch_over_rows_alone_and_twice():
    lhs = jnp.stack([jnp.stack([LHS, -LHS]), jnp.stack([2 * LHS, LHS])])
    product = functools.partial(grouped_matmul, cfg=GroupedMatmulConfig(fwd=XlaParams()))
    wgrad = functools.partial(grouped_matmul_wgrad, cfg=GroupedMatmulWgradConfig(fwd=XlaParams()))
    factors = np.array([[1, -1], [2, 1]])[..., None, None]
    found = jax.vmap(jax.vmap(product, (0, None, None)), (0, None, None))(lhs, RHS, SIZES)
    np.testing.assert_allclose(found, factors * by_numpy.product(LHS, RHS, SIZES), atol=2e-5)
    found = jax.vmap(jax.vmap(wgrad, (0, None, None)), (0, None, None))(lhs, DOUT, SIZES)
    np.testing.assert_allclose(found, factors[..., None] * by_numpy.weights_gradient(LHS, DOUT, SIZES), atol=2e-5)


@pytest.mark.slow
def test_the_weights_gradient_in_bfloat16_batches_over_its_right_operand():
    lhs, douts = LHS.astype("bfloat16"), jnp.stack([DOUT, -DOUT]).astype("bfloat16")
    found = jax.vmap(lambda dout: grouped_matmul_wgrad(lhs, dout, SIZES))(douts)
    expected = by_numpy.weights_gradient(lhs, douts[0], SIZES)
    np.testing.assert_allclose(found.astype("float32"), [expected, -expected], rtol=1e-2, atol=1e-2)


def test_64_bits_are_kept():
    with jax.enable_x64(True):
        lhs, rhs = LHS.astype("float64") + 1e-12, RHS.astype("float64")
        out = grouped_matmul(lhs, rhs, SIZES.astype("int64"))
        assert out.dtype == "float64"
        np.testing.assert_allclose(out, plainly(lhs, rhs), rtol=1e-13)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_sizes_may_be_integers_of_any_width(dtype):
    lhs = by_numpy.normal(by_numpy.ROWS, K, dtype="float32")
    sizes = (120, 0, 100, 50)
    found = grouped_matmul(lhs, RHS, jnp.asarray(sizes, dtype))
    by_numpy.assert_near(by_numpy.product(lhs, RHS, sizes), found, error=1e-5)


def test_whole_rows_in_xla_are_correct():
    """Imitate the kernel on TPUs: correct everywhere if the input has no NaN."""
    out = grouped_matmul(LHS, RHS, SIZES, cfg=GroupedMatmulConfig(implementation="xla", fwd=XlaParams()))
    np.testing.assert_allclose(out, plainly(LHS, RHS), atol=1e-5)
    sums = GroupedMatmulWgradConfig(implementation="xla", fwd=XlaParams())
    found = grouped_matmul_wgrad(*(by_numpy.with_nan_behind(x, SIZES) for x in (LHS, DOUT)), SIZES, cfg=sums)
    np.testing.assert_allclose(found, by_numpy.weights_gradient(LHS, DOUT, SIZES), atol=1e-5)


@pytest.mark.parametrize("tiles", [XlaParams(), XlaParams(block_rows=5)], ids=["whole", "tiles"])
def test_a_range_of_groups_is_right_with_garbage_in_rows_of_other_groups(tiles):
    own, first = slice(2, 4), jnp.int32(2)
    lhs, dout = (by_numpy.with_nan_outside(x, SIZES, own) for x in (LHS, DOUT))
    given = jnp.nan_to_num(lhs) if tiles.block_rows is None else lhs  # XLA's product lets a NaN reach others
    product = GroupedMatmulConfig(implementation="xla", fwd=tiles)
    out = grouped_matmul(given, RHS[own], SIZES, first_group=first, cfg=product)
    np.testing.assert_allclose(out, by_numpy.product(LHS, by_numpy.only(own, RHS), SIZES), atol=1e-5)
    sums = GroupedMatmulWgradConfig(implementation="xla", fwd=tiles)
    found = grouped_matmul_wgrad(lhs, dout, SIZES, first_group=first, groups=2, cfg=sums)
    np.testing.assert_allclose(found, by_numpy.weights_gradient(LHS, DOUT, SIZES)[own], atol=1e-5)


@pytest.mark.parametrize("tiles", [XlaParams(), XlaParams(block_rows=5)], ids=["whole", "tiles"])
@pytest.mark.parametrize("first", [-9, -1, 3, 4, 2**31 - 1])
def test_groups_out_of_range_are_empty(tiles, first):
    """As where experts are padded to a number that devices divide."""
    there = [g if 0 <= g < 4 else None for g in (first, first + 1)]
    rhs = jnp.stack([jnp.full((K, N), jnp.nan) if g is None else RHS[g] for g in there])
    padded = jnp.zeros_like(rhs) if tiles.block_rows is None else rhs  # as above: XLA's product lets a NaN reach others
    padded = jnp.stack([padded[i] if g is None else RHS[g] for i, g in enumerate(there)])
    product = GroupedMatmulConfig(implementation="xla", fwd=tiles)
    out = grouped_matmul(LHS, padded, SIZES, first_group=jnp.int32(first), cfg=product)
    alone = sum(by_numpy.product(LHS, by_numpy.only(slice(g, g + 1), RHS), SIZES) for g in there if g is not None)
    np.testing.assert_allclose(out, np.zeros_like(out) + alone, atol=1e-5)
    sums = GroupedMatmulWgradConfig(implementation="xla", fwd=tiles)
    found = grouped_matmul_wgrad(LHS, DOUT, SIZES, first_group=jnp.int32(first), groups=2, cfg=sums)
    every = by_numpy.weights_gradient(LHS, DOUT, SIZES)
    np.testing.assert_allclose(found, [np.zeros((K, N)) if g is None else every[g] for g in there], atol=1e-5)


def test_gradients_of_some_of_the_groups_are_those_of_all():
    def loss(lhs, rhs, **options):
        return jnp.sin(grouped_matmul(lhs, rhs, SIZES, **options)).sum()

    both = functools.partial(jax.grad(loss, (0, 1)))
    parts = [both(LHS, RHS[own], first_group=own.start) for own in (slice(0, 1), slice(1, 4))]
    expected = both(LHS, RHS)
    assert_equal(expected, (parts[0][0] + parts[1][0], jnp.concatenate([parts[0][1], parts[1][1]])))


def test_some_of_the_groups_are_measured_with_those_that_have_the_most_rows():
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 8), (2, 8, 6))]
    groups = [jax.ShapeDtypeStruct((8,), "int32"), jax.ShapeDtypeStruct((), "int32")]
    args, kwargs = KERNEL.prepare(*types, groups[0], first_group=groups[1])
    inv = Invocation(kernel=KERNEL, args=args, kwargs=kwargs)
    for seed in range(5):
        (_, _, (sizes, first)), _ = KERNEL.example_inputs(inv, np.random.default_rng(seed))
        rows = np.asarray(sizes).reshape(4, 2).sum(1)
        assert rows[int(first) // 2] == rows.max() >= 4096 // 4
    assert KERNEL.cost(inv).flops == 2 * 1024 * 8 * 6
    assert autotune(KERNEL, *types, groups[0], first_group=groups[1]).implementation == "xla"


def test_experts_and_rows_may_be_split_by_shard_map():
    """Each device has two groups and their rows; the sizes of the others are none of its business."""
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.shard_map(grouped_matmul, mesh=mesh, in_specs=(P("expert"),) * 3, out_specs=P("expert"))
    sizes = jnp.array([3, 5, 9, 1])

    def loss(product, lhs, rhs):
        return jnp.sin(product(lhs, rhs, sizes)).sum()

    def plain(lhs, rhs, sizes):
        halves = [plainly(lhs[i * 10 :][:10], rhs[i * 2 :][:2], sizes[i * 2 :][:2]) for i in range(2)]
        return jnp.concatenate(halves)

    found = jax.jit(jax.grad(functools.partial(loss, split), (0, 1)))(LHS, RHS)
    expected = jax.grad(functools.partial(loss, plain), (0, 1))(LHS, RHS)
    assert_equal(expected, found)


# Keys.


def test_the_calls_of_a_gradient_have_separate_keys():
    grad = jax.jit(jax.grad(loss_of(grouped_matmul), (0, 1)))
    labels = find_labels_in_lowered(grad.lower(LHS, RHS))
    named = sorted(re.sub(r".*#|@.*", "", label) for label in labels)
    assert named == ["grouped_matmul", "grouped_matmul", "grouped_matmul.bwd", "grouped_matmul_wgrad"]
    transposed = jax.jit(lambda dout: grouped_matmul(dout, RHS, SIZES, transpose_rhs=True)).lower(DOUT)
    assert set(find_labels_in_lowered(transposed)) < set(labels)


def test_a_named_implementation_also_computes_the_gradients_it_supports():
    grad = jax.grad(loss_of(functools.partial(grouped_matmul, implementation=("jax_mgpu", "xla"))), (0, 1))
    assert_equal(jax.grad(loss_of(plainly), (0, 1))(LHS, RHS), grad(LHS, RHS))


def test_options_that_say_nothing_are_not_in_the_key():
    def key(**options):
        args, kwargs = KERNEL.prepare(LHS, RHS, SIZES, **options)
        return Invocation(kernel=KERNEL, args=args, kwargs=kwargs).call_key

    assert key() == key(transpose_rhs=False, preferred_element_type="float32", precision=None)
    assert len({key(), key(preferred_element_type="bfloat16"), key(precision="highest")}) == 3


@pytest.mark.parametrize("derivative", ["bwd", "jvp", "bwd.jvp"])
def test_a_derivative_needs_no_differentiable_implementation(derivative):
    args = KERNEL.prepare(LHS, RHS, SIZES)[0]
    call = KERNEL.call_of(Invocation(kernel=KERNEL, args=args, kwargs={}, op_id=f"grouped_matmul.{derivative}"))
    assert (call.backward, call.higher) == (False, False)


def test_a_backward_has_nothing_to_choose():
    call = Invocation(kernel=KERNEL, args=(LHS, RHS, SIZES), kwargs={}, op_id="grouped_matmul.bwd")
    assert len(KERNEL.config_space(call)) == 1


@given(st.integers(0, 5000), st.integers(1, 64), st.integers(0, 20))
@settings(max_examples=60)
def test_sizes_to_measure_with_add_up(rows, groups, seed):
    drawn = example_sizes(rows, groups, np.random.default_rng(seed))
    assert list(drawn) == ["balanced", "zipf", "some empty"]
    for sizes in drawn.values():
        assert sizes.shape == (groups,)
        assert (sizes >= 0).all()
        assert sizes.sum() == rows


def test_example_sizes_are_balanced_skewed_or_partly_empty():
    drawn = example_sizes(8000, 100, np.random.default_rng(0))
    assert set(drawn["balanced"]) == {80}
    assert max(drawn["zipf"]) > 10 * np.median(drawn["zipf"])
    assert 5 < sum(drawn["some empty"] == 0) < 50


def test_the_draws_of_a_product_differ_only_in_the_sizes():
    inv = Invocation(kernel=KERNEL, args=(LHS, RHS, SIZES), kwargs={})
    draws = KERNEL.example_draws(inv, np.random.default_rng(0))
    (first, _), *others = draws.values()
    for args, _ in others:
        assert args[0] is first[0]
        assert args[1] is first[1]
        assert not np.array_equal(args[2], first[2])
