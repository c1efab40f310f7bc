# SPDX-License-Identifier: Apache-2.0
"""Grouped products over meshes: experts, rows, columns and summed dimensions on several devices, in any mixture."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device
from tests.kernels.grouped_matmul import by_numpy
from tests.kernels.meshes import MODES, bytes_in_collectives, close, compiled, loss, mesh_of, placed, scanned

from ejkernel.modules import (
    GroupedMatmul,
    GroupedMatmulConfig,
    GroupedMatmulWgrad,
    GroupedMatmulWgradConfig,
    grouped_matmul,
    grouped_matmul_wgrad,
)
from ejkernel.ops import check_kernel, recording
from ejkernel.ops.execution.discovery import discover

pytestmark = pytest.mark.slow

ROWS, K, GROUPS = 64, 16, 8
LHS, RHS = (by_numpy.normal(*shape, dtype="float32") for shape in ((ROWS, K), (GROUPS, K, K)))
SIZES = on_device([3, 0, 17, 9, 1, 20, 0, 14], "int32")
ARRAYS = (LHS, RHS, SIZES)
SPLITS = {
    "experts": [P(), P("model"), P()],
    "experts, their sizes too": [P(), P("model"), P("model")],
    "rows": [P("data"), P(), P()],
    "rows and experts": [P("data"), P("model"), P()],
    "experts and columns": [P(), P("data", None, "model"), P()],
    "experts and what is summed over": [P(None, "model"), P("data", "model"), P()],
    "rows and columns": [P("data"), P(None, None, "model"), P()],
    "rows and experts over the same devices": [P("model"), P("model"), P()],
    "rows over all devices, experts over some": [P(("data", "model")), P("model"), P()],
}
CONTENDED = list(SPLITS)[-2:]


def gradient(function):
    return jax.grad(loss(function), argnums=(0, 1))


TRANSFORMATIONS = {
    "forward": lambda function: function,
    "gradient": gradient,
    "scan": lambda function: gradient(scanned(function)),
    "remat": lambda function: gradient(jax.checkpoint(function)),
}
LOOPS = [(mode, split, name) for mode in MODES for split in ("rows", "experts") for name in ("scan", "remat")]
CASES = [
    *[("auto", split, name) for split in SPLITS for name in ("forward", "gradient")],
    *[("explicit", split, "gradient") for split in SPLITS if split not in CONTENDED],
    # the rules of each axis are those of its kind: both kinds in one call
    *[("mixed", split, "gradient") for split in ("rows and experts", "experts and columns", "rows and columns")],
    *[case for case in LOOPS if case[0] == "auto" or case[1:] == ("experts", "scan")],
]


@functools.cache
def plainly(split, transformation):
    """Return the result of `ragged_dot` as XLA splits it, and the bytes sent between devices."""
    function = TRANSFORMATIONS[transformation](jax.lax.ragged_dot)
    program, found = compiled(function, ARRAYS, SPLITS[split], mesh_of("auto"))
    return jax.device_get(found), bytes_in_collectives(program)


@pytest.mark.parametrize(("mode", "split", "transformation"), CASES)
def test_split_product_is_the_whole_one_with_no_more_bytes_between_devices_than_ragged_dot(mode, split, transformation):
    specs = SPLITS[split] if mode == "auto" else [*SPLITS[split][:2], P()]
    program, found = compiled(TRANSFORMATIONS[transformation](grouped_matmul), ARRAYS, specs, mesh_of(mode))
    expected, most = plainly(split, transformation)
    close(found, expected)
    assert bytes_in_collectives(program) <= most


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(
    ("mode", "split"),
    [("auto", "rows and experts"), ("auto", "experts and columns"), ("explicit", "experts"), ("mixed", "rows")],
)
def test_epilogues_are_split_like_their_products(mode, split, activation):
    rows, matrices, sizes = [*SPLITS[split][:2], P()]
    gate, row_scale = by_numpy.normal(GROUPS, K, K, dtype="float32", seed=2), by_numpy.normal(ROWS, dtype="float32")

    def function(lhs, rhs, gate, row_scale, sizes):
        gate = None if activation is None else gate
        return grouped_matmul(lhs, rhs, sizes, activation=activation, gate=gate, row_scale=row_scale)

    both = jax.value_and_grad(loss(function), argnums=(0, 1, 2, 3))
    arrays, specs = (LHS, RHS, gate, row_scale, SIZES), [rows, matrices, matrices, P(*rows[:1]), sizes]
    _, found = compiled(both, arrays, specs, mesh_of(mode))
    close(found, jax.jit(both)(*arrays))


def test_factors_of_rows_of_other_devices_may_be_anything():
    lhs, row_scale = LHS.at[-ROWS // 4 :].set(jnp.nan), jnp.ones(ROWS).at[-ROWS // 4 :].set(jnp.inf)
    ours, *others = [
        grouped_matmul(lhs, RHS[own], SIZES, row_scale=row_scale, first_group=own.start)
        for own in (slice(0, 4), slice(4, 8))
    ]
    assert np.isfinite(ours).all()
    assert not np.isfinite(others[0]).all()


@pytest.mark.parametrize(
    ("mode", "batched"), [("auto", (0, None, 0)), ("auto", (None, 1, None)), ("explicit", (0, None, None))], ids=str
)
def test_examples_are_split_each_by_its_own_sizes(batched, mode):
    arrays = [x if axis is None else jnp.stack([x, x[::-1]], axis) for x, axis in zip(ARRAYS, batched, strict=True)]
    specs = [
        P(*[None] * axis, None, *spec) if axis == 0 else P(spec[0], None, *spec[1:]) if axis else spec
        for spec, axis in zip([P("data"), P("model"), P()], batched, strict=True)
    ]
    function = gradient(jax.vmap(grouped_matmul, batched))
    _, found = compiled(function, arrays, specs, mesh_of(mode))
    close(found, jax.jit(function)(*arrays))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_weights_gradient_is_split_by_rows_and_by_experts(mode):
    sharding = jax.NamedSharding(mesh_of(mode), P("model"))

    def sums(lhs, rhs, sizes):
        out = grouped_matmul_wgrad(lhs, rhs, sizes)
        return jax.lax.with_sharding_constraint(out, sharding) if mode == "auto" else out

    arrays, specs = (LHS, LHS[:, ::2], SIZES), [P("data"), P("data"), P()]
    program, found = compiled(sums, arrays, specs, mesh_of(mode))
    by_numpy.assert_near(by_numpy.weights_gradient(*arrays), found, error=1e-5)
    parts = 4 if mode == "auto" else 1
    assert bytes_in_collectives(program) == found.nbytes // parts


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_each_device_runs_the_call_that_it_would_run_inside_shard_map(mode):
    mesh, specs = mesh_of(mode), (P("data"), P("model"), P())

    def by_hand(lhs, rhs, sizes):
        ends = jnp.clip(jnp.cumsum(sizes) - jax.lax.axis_index("data") * lhs.shape[0], 0, lhs.shape[0])
        own = jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))
        out = grouped_matmul(lhs, rhs, own, first_group=jax.lax.axis_index("model") * rhs.shape[0])
        return jax.lax.psum(out, "model")

    inside = jax.shard_map(by_hand, mesh=mesh, in_specs=specs, out_specs=P("data"))
    with jax.set_mesh(mesh):
        given = placed(ARRAYS, specs, mesh)
        with recording() as compiled_calls:
            found = jax.jit(gradient(grouped_matmul)).lower(*given).compile()(*given)
        parts, manual = discover(gradient(grouped_matmul), *given), discover(gradient(inside), *given)
        close(found, jax.jit(gradient(inside))(*given))
    assert {inv.key for inv in compiled_calls} == {inv.key for inv in parts} == {inv.key for inv in manual}
    assert {inv.op_id for inv in parts} == {"grouped_matmul", "grouped_matmul.bwd", "grouped_matmul_wgrad"}
    shapes = {tuple(x.shape for x in inv.array_types) for inv in parts if inv.op_id == "grouped_matmul"}
    assert shapes == {((32, K), (2, K, K), (GROUPS,), ())}


def test_rows_are_split_beside_experts_split_by_hand():
    mesh = mesh_of("auto")

    def by_hand(lhs, rhs, sizes):
        out = grouped_matmul(lhs, rhs, sizes, first_group=jax.lax.axis_index("model") * rhs.shape[0])
        return jax.lax.psum(out, "model")

    inside = jax.shard_map(
        by_hand, mesh=mesh, in_specs=(P(), P("model"), P()), out_specs=P(), axis_names={"model"}, check_vma=True
    )
    _, found = compiled(gradient(inside), ARRAYS, SPLITS["rows and experts"], mesh)
    close(found, jax.jit(gradient(grouped_matmul))(*ARRAYS))
    with jax.set_mesh(mesh):
        parts = discover(inside, *placed(ARRAYS, SPLITS["rows and experts"], mesh))
    assert [x.shape for x in parts[0].array_types] == [(32, K), (2, K, K), (GROUPS,), ()]


def test_a_shard_of_the_rows_is_an_ordinary_call():
    mesh = mesh_of("auto")
    (part,) = discover(grouped_matmul, *placed(ARRAYS, [P("model"), P(), P()], mesh))
    (plain,) = discover(grouped_matmul, LHS[:16], RHS, SIZES)
    assert part.key == plain.key


@pytest.mark.parametrize(("columns", "moved"), [(16, "rhs"), (4, "rhs"), (256, "lhs")])
def test_the_smaller_of_rows_and_experts_is_moved(columns, moved):
    """They are on the same devices, which can be divided by one of them alone."""
    rhs = by_numpy.normal(GROUPS, K, columns, dtype="float32")
    mesh = mesh_of("auto")
    rows = 64 if moved == "lhs" else 256
    lhs = by_numpy.normal(rows, K, dtype="float32")
    (part,) = discover(grouped_matmul, *placed((lhs, rhs, SIZES), [P("model"), P("model"), P()], mesh))
    assert part.array_types[0].shape[0] == (rows if moved == "lhs" else rows // 4)
    assert part.array_types[1].shape[0] == (GROUPS // 4 if moved == "lhs" else GROUPS)


@pytest.mark.parametrize("groups", [6, 64])
def test_experts_that_do_not_divide_are_split_as_far_as_they_do_and_columns_beyond(groups):
    rhs, mesh = by_numpy.normal(groups, K, K, dtype="float32"), mesh_of("auto")
    sizes = jnp.full(groups, ROWS // groups, jnp.int32)
    constrained = jax.NamedSharding(mesh, P(("model", "data")))

    def function(lhs, rhs, sizes):
        return grouped_matmul(lhs, jax.lax.with_sharding_constraint(rhs, constrained), sizes)

    _, found = compiled(function, (LHS, rhs, sizes), [P(), P(), P()], mesh)
    by_numpy.assert_near(by_numpy.product(LHS, rhs, sizes), found, error=1e-5)
    (part,) = discover(function, *placed((LHS, rhs, sizes), [P(), P(), P()], mesh))
    expected = {6: (3, K, K // 4), 64: (8, K, K)}
    assert part.array_types[1].shape == expected[groups]


def test_experts_and_rows_on_the_same_explicit_devices_are_an_error_with_the_fix():
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"axis 0 of rhs, .* over 'model', .*reshard"):
        jax.jit(grouped_matmul)(*placed(ARRAYS, SPLITS[CONTENDED[0]], mesh))


@pytest.mark.parametrize("some", [{}, {"first_group": jnp.int32(3)}], ids=["all groups", "some of them"])
@pytest.mark.parametrize("kernel", [GroupedMatmul(), GroupedMatmulWgrad()], ids=lambda kernel: kernel.name)
def test_rules_and_shards_pass_check_kernel(kernel, some):
    is_product = kernel.name == "grouped_matmul"
    other = (RHS[4:] if some else RHS) if is_product else LHS[:, ::2]
    options = some | ({"groups": 4} if some and not is_product else {})
    config = GroupedMatmulConfig() if is_product else GroupedMatmulWgradConfig()
    without = ["dtypes", "platforms", "vmap", "pickle", "export", "gradient", "tangents", "key"]
    report = check_kernel(kernel, LHS, other, SIZES, **options, configs=[config], without=without)
    rows = {row.check: row.status for row in report.rows if row.check.startswith("split")}
    assert rows == dict.fromkeys(map("split along {}".format, ("columns", "groups", "inner", "rows")), "ok")


# Some of the groups.


@given(st.lists(st.integers(0, 40), min_size=5, max_size=5), st.integers(0, 5))
@settings(max_examples=20)
def test_results_of_all_groups_are_the_sum_of_those_of_some(sizes, cut):
    """Sizes may end before the rows do, or after them."""
    rhs, given_sizes = by_numpy.normal(5, K, 8, dtype="float32"), jnp.asarray(sizes, jnp.int32)
    lhs, dout = (by_numpy.normal(by_numpy.ROWS // 4, columns, dtype="float32") for columns in (K, 8))
    product, sums = _of_some(cut)
    close(product(lhs, rhs, given_sizes), grouped_matmul(lhs, rhs, given_sizes))
    close(sums(lhs, dout, given_sizes), grouped_matmul_wgrad(lhs, dout, given_sizes))


@functools.cache
def _of_some(cut):
    def product(lhs, rhs, sizes):
        parts = [(0, rhs[:cut]), (cut, rhs[cut:])]
        return sum(grouped_matmul(lhs, some, sizes, first_group=first) for first, some in parts)

    def sums(lhs, dout, sizes):
        parts = [(0, cut), (cut, 5 - cut)]
        return jnp.concatenate(
            [grouped_matmul_wgrad(lhs, dout, sizes, first_group=first, groups=count) for first, count in parts]
        )

    return jax.jit(product), jax.jit(sums)
