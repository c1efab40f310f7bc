# SPDX-License-Identifier: Apache-2.0
"""JAX's grouped products for TPUs, as we call them: interpreted on a CPU, and refused where they do not run."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.kernels.grouped_matmul import by_numpy
from tests.kernels.grouped_matmul_cases import interpret_megablox

from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.kernels.grouped_matmul.megablox import Megablox, MegabloxActivation, MegabloxParams, MegabloxWgrad
from ejkernel.modules import grouped_matmul
from ejkernel.ops import ConfigError

pytestmark = pytest.mark.slow

INNER, COLUMNS = 200, 72  # a tile of 128 columns, and a part of one; fewer than a tile has
CALL = GroupedMatmulCall(
    rows=by_numpy.ROWS,
    groups=4,
    inner=INNER,
    columns=COLUMNS,
    dtype="bfloat16",
    out_dtype="bfloat16",
    platform="tpu",
    device_fingerprint="tpu:v5",
)
PARAMS = MegabloxParams(block_m=64)


@pytest.fixture
def interpreted(monkeypatch):
    interpret_megablox(monkeypatch)


def compiled(implementation, call):
    return jax.jit(lambda *args: implementation.forward(call, *args, params=PARAMS))


@pytest.mark.usefixtures("interpreted")
def test_a_product_is_right_for_hostile_sizes_with_garbage_behind_the_groups():
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, INNER), by_numpy.normal(4, INNER, COLUMNS, seed=1)
    run = compiled(Megablox(), CALL)
    for sizes in by_numpy.HOSTILE.values():
        found, _ = run(by_numpy.with_nan_behind(lhs, sizes), rhs, jnp.asarray(sizes, jnp.int32))
        by_numpy.assert_near(by_numpy.product(lhs, rhs, sizes), found)


@pytest.mark.usefixtures("interpreted")
def test_a_product_with_some_of_the_groups_leaves_rows_of_the_others_zero():
    own = slice(1, 3)
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, INNER), by_numpy.normal(4, COLUMNS, INNER, seed=1)
    part = dataclasses.replace(CALL, groups=2, all_groups=4, transpose_rhs=True)
    run = compiled(Megablox(), part)
    for sizes in by_numpy.HOSTILE.values():
        found, _ = run(by_numpy.with_nan_outside(lhs, sizes, own), rhs[own], (jnp.asarray(sizes), jnp.int32(1)))
        by_numpy.assert_near(by_numpy.product(lhs, by_numpy.only(own, rhs), sizes, transpose_rhs=True), found)


@pytest.mark.usefixtures("interpreted")
def test_the_weights_gradient_is_right_for_hostile_sizes_and_has_nothing_of_other_groups_rows():
    own = slice(1, 3)
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, INNER), by_numpy.normal(by_numpy.ROWS, COLUMNS, seed=1)
    part = dataclasses.replace(CALL, groups=2, all_groups=4)
    run = compiled(MegabloxWgrad(), part)
    for sizes in by_numpy.HOSTILE.values():
        given = [by_numpy.with_nan_outside(x, sizes, own) for x in (lhs, rhs)]
        found, _ = run(*given, (jnp.asarray(sizes), jnp.int32(1)))
        by_numpy.assert_near(by_numpy.weights_gradient(lhs, rhs, sizes)[own], found)


@pytest.mark.usefixtures("interpreted")
def test_a_gate_and_factors_of_rows_are_applied_to_own_rows_and_both_products_are_kept():
    sizes, call = (0, 23, 1, 16), dataclasses.replace(CALL, rows=48, activation="silu", gated=True, scaled=True)
    lhs, scale = by_numpy.normal(48, INNER), by_numpy.normal(48, seed=3, dtype="float32")
    rhs, gate = (by_numpy.normal(4, INNER, COLUMNS, seed=seed) for seed in (1, 2))
    found, products = compiled(MegabloxActivation(), call)(
        by_numpy.with_nan_behind(lhs, sizes), rhs, jnp.asarray(sizes, jnp.int32), gate, scale
    )
    expected = by_numpy.product(lhs, rhs, sizes, activation="silu", gate=gate, row_scale=scale)
    by_numpy.assert_near(expected, found)
    for matrices, product in zip((rhs, gate), products, strict=True):
        by_numpy.assert_near(by_numpy.product(lhs, matrices, sizes), product)


def grouped_program(lhs, rhs, sizes, gate):
    found = grouped_matmul(lhs, rhs, sizes, activation="silu", gate=gate, implementation="megablox")
    return grouped_matmul(found, rhs, sizes, transpose_rhs=True, implementation="megablox").astype(jnp.float32).sum()


@pytest.mark.parametrize("inside", [False, True], ids=["under jit", "inside shard_map"])
def test_a_program_with_gradients_lowers_for_tpus(inside):
    rows, matrices, sizes = (64, 256), (4, 256, 128), (4,)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (rows, matrices, matrices)]
    args.insert(2, jax.ShapeDtypeStruct(sizes, jnp.int32))
    function = jax.value_and_grad(grouped_program, (0, 1, 3))
    if inside:
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(
            lambda *args: jax.lax.psum(grouped_program(*args), "data"),
            mesh=mesh,
            in_specs=(P("data"), P(), P(), P()),
            out_specs=P(),
        )
        function = jax.value_and_grad(mapped, (0, 1, 3))
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 4  # equal calls share one function


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"platform": "gpu", "device_fingerprint": "gpu:nvidia_h200"}, "needs a TPU, and this call is for gpu:nvidia"),
        ({"dtype": "float16", "out_dtype": "float16"}, "got float16 to float16; cast lhs and rhs"),
        ({"out_dtype": "float64"}, "got bfloat16 to float64"),
        ({"inner": 0}, "known and not 0"),
        ({"groups": 0}, "known and not 0"),
        ({"partitioned": True}, "would gather both operands"),
    ],
)
def test_calls_that_it_does_not_run_are_refused_with_the_reason(changes, words):
    assert Megablox().unsupported(CALL) is None
    assert re.search(words, Megablox().unsupported(dataclasses.replace(CALL, **changes)))


def test_parameters_are_checked():
    with pytest.raises(ConfigError, match="block_m must be a multiple of 16, got 40; try 128"):
        MegabloxParams(block_m=40)
    with pytest.raises(ConfigError, match="block_n must be a multiple of 128, got 64; try 128"):
        MegabloxParams(block_n=64)


def test_parameters_that_do_not_fit_or_that_it_counts_wrongly_are_refused():
    large = dataclasses.replace(CALL, rows=1 << 20, inner=4096, columns=4096)
    assert "vector memory" in Megablox().params_fault(large, MegabloxParams(block_m=1024, block_k=2048, block_n=1024))
    assert "8192 tiles of rows" in Megablox().params_fault(large, MegabloxParams(block_m=128))
    assert Megablox().params_fault(large, MegabloxParams(block_m=256)) is None


# Bytes that Google's compiler used, libtpu 0.0.48.1; the left operand is kept if a tile is wider than the matrix unit.
@pytest.mark.parametrize(
    ("implementation", "chip", "tile", "inner", "changes", "taken"),
    [
        (Megablox(), "tpu:tpu_v5_lite", (512, 1024, 256), 4096, {}, 5_234_688),
        (Megablox(), "tpu:tpu_v6_lite", (512, 1024, 256), 4096, {}, 4_599_808),
        (Megablox(), "tpu:tpu_v5_lite", (512, 1024, 1024), 1024, {}, 10_047_488),
        (Megablox(), "tpu:tpu_v5", (512, 1024, 256), 3584, {"transpose_rhs": True}, 5_230_592),
        (Megablox(), "tpu:tpu_v5_lite", (512, 1024, 256), 3584, {"out_dtype": "float32"}, 5_754_880),
        (MegabloxWgrad(), "tpu:tpu_v6_lite", (512, 512, 512), 2048, {}, 4_841_472),
        (MegabloxWgrad(), "tpu:tpu_v5_lite", (512, 1024, 256), 4096, {}, 5_611_520),
        (MegabloxWgrad(), "tpu:tpu_v5_lite", (256, 1024, 128), 1001, {}, 2_416_640),
    ],
    ids=str,
)
def test_a_kernel_takes_no_more_than_the_estimate(implementation, chip, tile, inner, changes, taken):
    m, k, n = tile
    call = dataclasses.replace(CALL, rows=8 * m, inner=inner, columns=4 * n, device_fingerprint=chip, **changes)
    need = implementation.memory(call, MegabloxParams(block_m=m, block_k=k, block_n=n))
    assert need.least <= taken <= need.most <= 1.1 * taken


def spilled(tile, inner, implementation=MegabloxWgrad(), **changes):  # noqa: B008 - it has no state
    """Return the bytes that the upper estimate has above the lower one, without its margin."""
    m, k, n = tile
    call = dataclasses.replace(CALL, rows=8 * m, inner=inner, columns=4 * n, **changes)
    need = implementation.memory(call, MegabloxParams(block_m=m, block_k=k, block_n=n))
    return need.most / (1.02 if {m, k, n} <= {128, 256, 512, 1024} else 1.05) - need.least


def test_a_tile_between_those_of_the_table_counts_as_the_larger_neighbour():
    place = {"device_fingerprint": "tpu:tpu_v5_lite"}
    least, most = (spilled((m, 512, 512), 2048, **place) for m in (256, 512))
    assert 0 < least < most
    assert spilled((384, 512, 512), 2048, **place) == pytest.approx(most, abs=8)


def test_a_tile_beyond_the_table_keeps_as_many_times_more_values():
    place = {"device_fingerprint": "tpu:tpu_v5_lite"}
    most = spilled((1024, 512, 512), 2048, **place)
    assert spilled((2048, 512, 512), 2048, **place) == pytest.approx(2 * (most + 64 * 4096), abs=8)


def test_v5p_spills_as_v5e_and_an_unknown_chip_at_least_as_much_as_any():
    chips = ("tpu:tpu_v5_lite", "tpu:tpu_v5", "tpu:tpu_v6_lite", "tpu:tpu_v4", "tpu:tpu7x")
    found = [spilled((512, 512, 512), 2048, device_fingerprint=chip) for chip in chips]
    assert found[0] == found[1]
    assert spilled((512, 512, 512), 2048, device_fingerprint="") > max(found)


@pytest.mark.parametrize("implementation", [Megablox(), MegabloxWgrad(), MegabloxActivation()], ids=str)
@pytest.mark.parametrize("rows", [1, 40, 8192, 1 << 20])
def test_a_space_has_fitting_configurations_and_the_heuristic(implementation, rows):
    call = dataclasses.replace(CALL, rows=rows, groups=8, inner=4096, columns=1536)
    space = implementation.space(call)
    assert implementation.heuristic(call) in space
    assert all(implementation.params_fault(call, params) is None for params in space)
