# SPDX-License-Identifier: Apache-2.0
"""The epilogues of our product's kernel: simulated on a CPU, and lowered without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.grouped_matmul import by_numpy, made_of_products

from ejkernel import compat
from ejkernel.kernels.grouped_matmul.activation import grouped_matmul_activation
from ejkernel.kernels.grouped_matmul.mosaic_gpu import plan
from ejkernel.kernels.grouped_matmul.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.grouped_matmul.mosaic_gpu.plan import ProductParams
from ejkernel.modules import GroupedMatmulActivationConfig
from ejkernel.modules import grouped_matmul as product

pytestmark = pytest.mark.slow

K, N = 104, 136  # no multiples of a tile
SMALL = {"block_n": 64, "stages": 2, "panel": 2, "out_slots": 1}


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """Launch two thread blocks, so that each computes several tiles."""
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 2)


@pytest.fixture
def mosaic():
    """The module of the kernels, where it can be imported."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def operands(**which):
    return made_of_products.operands(by_numpy.ROWS, 4, K, N, **which)


def simulated(mosaic, given, params, *, races=False, **options):
    """Return a function of sizes and operands that runs the kernel, simulated and compiled once."""
    interpret = mosaic.InterpretGPUParams(detect_races=races)
    return made_of_products.launched(given, 4, params, interpret=interpret, **options)[0]


@pytest.mark.parametrize(
    ("activation", "gate", "row_scale", "transpose_rhs"),
    [
        ("silu", True, True, False),
        ("gelu", True, False, True),
        ("relu2", False, False, False),
        ("relu", False, True, True),
        (None, False, True, False),
        (None, True, False, False),
    ],
)
def test_epilogues_are_right_for_hostile_sizes(mosaic, activation, gate, row_scale, transpose_rhs):
    given = operands(gate=gate, row_scale=row_scale, transpose_rhs=transpose_rhs)
    options = {"transpose_rhs": transpose_rhs} | ({"activation": activation} if activation else {})
    run = simulated(mosaic, given, ProductParams(**SMALL), **options)
    for sizes in list(by_numpy.HOSTILE.values())[:: 3 if activation == "silu" else 5]:
        expected = by_numpy.product(sizes=sizes, activation=activation, transpose_rhs=transpose_rhs, **given)
        by_numpy.assert_near(expected, run(sizes, made_of_products.with_nan_behind(given, sizes))[0])


@pytest.mark.parametrize("gate", [True, False])
def test_products_are_kept_as_they_are_rounded_without_races(mosaic, gate):
    given, sizes = operands(gate=gate, row_scale=True), by_numpy.HOSTILE["uneven"]
    params = ProductParams(**SMALL | {"block_n": 128, "out_slots": 2})
    run = simulated(mosaic, given, params, keep=True, races=True, activation="silu")
    out, *products = run(sizes, made_of_products.with_nan_behind(given, sizes))
    by_numpy.assert_near(by_numpy.product(sizes=sizes, activation="silu", **given), out)
    matrices = [given[name] for name in ("rhs", "gate") if name in given]
    for found, own in zip(products, matrices, strict=True):
        by_numpy.assert_near(by_numpy.product(given["lhs"], own, sizes), found)


def test_some_of_the_groups_give_zeros_in_rows_of_the_others(mosaic):
    given, own = operands(gate=True, row_scale=True), slice(1, 3)
    part = given | {name: given[name][own] for name in ("rhs", "gate")}
    run = simulated(mosaic, part, ProductParams(**SMALL), activation="gelu", first_group=1)
    whole = given | {"rhs": jnp.zeros_like(given["rhs"]).at[own].set(given["rhs"][own])}
    for sizes in list(by_numpy.HOSTILE.values())[::5]:
        behind = part | {"row_scale": by_numpy.with_nan_behind(given["row_scale"], sizes)}
        expected = by_numpy.product(sizes=sizes, activation="gelu", **whole)
        by_numpy.assert_near(expected, run(sizes, behind)[0])


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, which multiplies for the interpreter
def test_nothing_of_one_group_reaches_another(mosaic):
    sizes, other_rows = (70, 43, 60, 127), slice(70, 113)
    given = operands(gate=True, row_scale=True)
    run = simulated(mosaic, given, ProductParams(**SMALL), activation="silu")
    poisoned = {name: given[name].at[other_rows].set(jnp.nan) for name in ("lhs", "row_scale")}
    poisoned["gate"] = given["gate"].at[1].set(jnp.inf)
    found = np.asarray(run(sizes, given | poisoned)[0], np.float32)
    assert np.isnan(found[other_rows]).all()
    expected = by_numpy.product(sizes=sizes, activation="silu", **given)
    others = np.r_[:70, 113:300]
    by_numpy.assert_near(expected[others], found[others])


# Lowering.


@pytest.mark.usefixtures("mosaic")
def test_one_kernel_computes_the_output_and_the_residuals():
    rows, matrices = jax.ShapeDtypeStruct((1024, 256), "bfloat16"), jax.ShapeDtypeStruct((8, 256, 256), "bfloat16")
    sizes, row_scale = jax.ShapeDtypeStruct((8,), "int32"), jax.ShapeDtypeStruct((1024,), "float16")
    cfg = GroupedMatmulActivationConfig(implementation="mosaic_gpu")

    def activated(lhs, rhs, gate, row_scale, sizes):
        return product(lhs, rhs, sizes, gate=gate, row_scale=row_scale, activation="silu", cfg=cfg).astype(jnp.float32)

    def loss(*args):
        return activated(*args).sum()

    given = (rows, matrices, matrices, row_scale, sizes)
    stacked = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in given]
    for function, args in ((activated, given), (jax.grad(loss, (0, 1, 2, 3)), given), (jax.vmap(activated), stacked)):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 1


# Layouts.


def test_two_products_share_the_registers():
    lhs, rhs = jax.ShapeDtypeStruct((8192, 4096), "bfloat16"), jax.ShapeDtypeStruct((8, 4096, 4096), "bfloat16")
    call = grouped_matmul_activation.describe(lhs, rhs, jax.ShapeDtypeStruct((8,), jnp.int32), rhs, None)
    assert MosaicGpu().heuristic(call) == ProductParams(block_n=128, stages=4, out_slots=2)
    assert "256 accumulator registers" in MosaicGpu().params_fault(call, ProductParams(stages=2))
    assert "bytes of shared memory" in MosaicGpu().params_fault(call, ProductParams(block_n=128, stages=5))
    drawn = MosaicGpu().space(call).sample(np.random.default_rng(0), 20)
    assert [None] * len(drawn) == [MosaicGpu().params_fault(call, params) for params in drawn]
