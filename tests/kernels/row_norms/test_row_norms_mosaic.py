# SPDX-License-Identifier: Apache-2.0
"""Our normalisations of rows for Hopper: simulated on a CPU, and refused where they would not run."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device

from ejkernel import compat
from ejkernel.kernels._row_norms import launch, plan
from ejkernel.kernels._row_norms.plan import RowNormParams
from ejkernel.kernels.rms_norm.quantized import mosaic_gpu as quantized
from ejkernel.kernels.rms_norm.quantized.operation import quantized_rms_norm
from ejkernel.modules import LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig, layer_norm, rms_norm
from ejkernel.ops import ConfigError

pytestmark = pytest.mark.slow

SHORT = RowNormParams(block_rows=16, stages=1)
OPERATIONS = {"rms_norm": RmsNorm(), "layer_norm": LayerNorm()}


@pytest.fixture
def simulated(monkeypatch):
    """Run the kernels in the interpreter with race detection: two thread blocks, each with several rows."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    interpret = mosaic_gpu.InterpretGPUParams(detect_races=True)
    for name in ("normalize", "gradients"):
        monkeypatch.setattr(launch, name, functools.partial(getattr(launch, name), interpret=interpret))
    monkeypatch.setattr(plan.hopper, "MULTIPROCESSORS", 2)


def arguments(operation, rows, dim, *, dtype="bfloat16", weight=True, residual=False):
    rng = np.random.default_rng(0)
    # A sum of eighths is exact in all dtypes, so the float32 reference has the same input as the kernels.
    x, added = (jnp.asarray(rng.integers(-16, 24, (rows, dim)) / 8, dtype) for _ in range(2))
    vectors = [on_device(1 + rng.standard_normal(dim), dtype) for _ in range(1 + (operation.name == "layer_norm"))]
    return (x, *(vectors if weight else [None]), *([added] if residual else []))


def by_kernel(operation, params, **options):
    """Return a function to output and gradients, forward and backward by the kernels."""
    found = operation.implementations["mosaic_gpu"]

    def run(*args):
        call = operation.describe(*args, **options)
        out, residuals = found.forward(call, *args, params=params)
        cotangents = tuple(map(jnp.cos, jax.tree.leaves(out)))
        backward = dataclasses.replace(call, backward=True)
        return out, found.backward(backward, residuals, out, cotangents, *args, params=params)

    return run


def assert_near(expected, found, error=2e-2):
    expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=error * max(1, np.abs(expected).max()))


def check(operation, params, args, error=2e-2, **options):
    out, gradients = jax.jit(by_kernel(operation, params, eps=1e-3, **options))(*args)

    @jax.jit
    def reference(args):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
        expected, pull = jax.vjp(lambda *args: operation.reference(*args, eps=1e-3, **options), *wide)
        return expected, pull(
            jax.tree.map(lambda x, like: jnp.cos(x.astype(like.dtype)).astype(x.dtype), expected, out)
        )

    expected, wanted = reference(args)
    for a, b in zip(jax.tree.leaves((expected, wanted)), jax.tree.leaves((out, gradients)), strict=True):
        assert_near(a, b, error)
    assert [x.dtype for x in jax.tree.leaves(args)] == [x.dtype for x in jax.tree.leaves(gradients)]


ONE_ROW = RowNormParams(block_rows=1, stages=3)
TWO_ROWS = RowNormParams(block_rows=2, stages=1, occupancy=1)


# Half of all combinations: every pair of an operation, parameters, and a residual or none.
@pytest.mark.parametrize(
    ("name", "params", "dim", "residual"),
    [
        ("rms_norm", ONE_ROW, 1024, False),
        ("rms_norm", TWO_ROWS, 640, True),
        ("layer_norm", ONE_ROW, 1024, True),
        ("layer_norm", TWO_ROWS, 640, False),
    ],
)
@pytest.mark.usefixtures("simulated")
def test_output_and_gradients_are_right_without_races(name, params, dim, residual):
    check(OPERATIONS[name], params, arguments(OPERATIONS[name], 10, dim, residual=residual))


# Three or five blocks of rows, by two blocks of threads.
@pytest.mark.parametrize(
    ("name", "block_rows", "rows", "dim", "residual"),
    [
        ("rms_norm", 16, 80, 192, True),
        ("rms_norm", 32, 96, 64, False),
        ("layer_norm", 16, 80, 192, False),
        ("layer_norm", 32, 96, 64, True),
    ],
)
@pytest.mark.usefixtures("simulated")
def test_output_and_gradients_of_short_rows_are_right_without_races(name, block_rows, rows, dim, residual):
    params = RowNormParams(block_rows=block_rows, stages=1, occupancy=1)
    check(OPERATIONS[name], params, arguments(OPERATIONS[name], rows, dim, residual=residual))


@pytest.mark.parametrize(
    ("options", "arrays", "dim"),
    [
        ({"weight_offset": 1.0}, {}, 512),
        ({}, {"weight": False}, 64),
        ({}, {"dtype": "float32", "residual": True}, 512),
        ({}, {"dtype": "float32", "residual": True}, 64),
    ],
    ids=["offset", "no weight, short rows", "float32", "float32, short rows"],
)
@pytest.mark.usefixtures("simulated")
def test_options_are_those_of_the_reference(options, arrays, dim):
    error = 1e-5 if arrays.get("dtype") == "float32" else 2e-2
    params, rows = (RowNormParams(), 3) if dim == 512 else (SHORT, 16)
    check(OPERATIONS["rms_norm"], params, arguments(OPERATIONS["rms_norm"], rows, dim, **arrays), error, **options)


@pytest.mark.parametrize("axes", [(0, None), (0, 0)], ids=["one weight", "a weight for each"])
@pytest.mark.usefixtures("simulated")
def test_a_batched_call_is_the_stack_of_its_examples(axes):
    operation = OPERATIONS["rms_norm"]
    x, weight = arguments(operation, 3, 512)
    args = [jnp.stack([a, a[::-1]]) if axis == 0 else a for a, axis in zip((x, weight), axes, strict=True)]
    run = by_kernel(operation, RowNormParams(), eps=1e-6)
    found = jax.jit(jax.vmap(run, in_axes=axes))(*args)
    expected = jax.jit(run)(x[::-1], args[1][1] if axes[1] == 0 else weight)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert_near(a, b[1])


def test_blocks_of_rows_must_divide_them_and_fit():
    found, operation = OPERATIONS["rms_norm"].implementations["mosaic_gpu"], OPERATIONS["rms_norm"]
    call = operation.describe(*arguments(operation, 6, 1024))
    assert (
        found.params_fault(call, RowNormParams(block_rows=4)) == "block_rows must divide 6, the number of rows, got 4."
    )
    assert "bytes of shared memory" in found.params_fault(call, RowNormParams(block_rows=6, stages=16))
    assert all(6 % params.block_rows == 0 for params in found.space(call))


def test_up_to_sixteen_short_rows_are_taken_at_once_as_registers_allow():
    found, operation = OPERATIONS["layer_norm"].implementations["mosaic_gpu"], OPERATIONS["layer_norm"]
    call = dataclasses.replace(operation.describe(*arguments(operation, 128, 256)), backward=True)
    assert "need block_rows to be a multiple of 16 and stages=1, got 8 and 1" in found.params_fault(
        call, RowNormParams(block_rows=8, stages=1)
    )
    assert "320 registers per thread; 256 are available" in found.params_fault(
        call, RowNormParams(block_rows=64, stages=1)
    )
    assert "reads 32768 elements at once" in found.params_fault(
        dataclasses.replace(call, backward=False), RowNormParams(block_rows=128, stages=1)
    )
    assert {params.block_rows for params in found.space(call)} == {16, 32}
    assert found.heuristic(call) in list(found.space(call))


@pytest.mark.parametrize(
    ("name", "dim", "residual", "forward", "backward"),
    [
        ("rms_norm", 128, False, -1, 0),
        ("rms_norm", 256, False, -1, 0),
        ("rms_norm", 64, True, 0, 0),
        ("layer_norm", 128, False, -1, 0),
        ("layer_norm", 256, False, 0, 0),
        ("layer_norm", 256, True, 0, 0),
    ],
)
def test_short_rows_use_xla_where_it_is_as_fast(name, dim, residual, forward, backward):
    operation = OPERATIONS[name]
    found = operation.implementations["mosaic_gpu"]
    call = operation.describe(*arguments(operation, 1 << 10, dim, residual=residual))
    many, few = (dataclasses.replace(call, rows=rows) for rows in (1 << 18, 1 << 10))
    assert [found.preference(dataclasses.replace(many, backward=x)) for x in (False, True)] == [forward, backward]
    assert [found.preference(dataclasses.replace(few, backward=x)) for x in (False, True)] == [-1, -1]


@pytest.mark.parametrize("wrong", [{"block_rows": 0}, {"stages": -1}, {"occupancy": 2.0}], ids=str)
def test_parameters_are_positive_integers(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} must be a positive integer, got {value}"):
        RowNormParams(**wrong)


@pytest.mark.parametrize(
    ("rows", "dim", "dtype", "platform", "reason"),
    [
        (
            16,
            96,
            "bfloat16",
            "gpu",
            "rows of 96 elements; 'mosaic_gpu' supports multiples of 64 below 512, and of 128",
        ),
        (8, 256, "bfloat16", "gpu", "x has 8 short rows; 'mosaic_gpu' supports multiples of 16; use 'xla'"),
        (16, 448, "float32", "gpu", "rows of 448 elements, too long for registers"),
        (8, 1000, "bfloat16", "gpu", "rows of 1000 elements"),
        (8, 65536, "bfloat16", "gpu", "too long for shared memory"),
        (8, 1024, "float64", "gpu", "x has dtype float64"),
        (8, 1024, "bfloat16", "tpu", "needs a Hopper GPU"),
    ],
)
def test_unsupported_calls_give_the_reason(rows, dim, dtype, platform, reason):
    operation = OPERATIONS["rms_norm"]
    call = dataclasses.replace(operation.describe(*arguments(operation, 1, 512)), platform=platform)
    call = dataclasses.replace(call, rows=rows, dim=dim, dtype=dtype, backward=dim == 448)
    assert reason in operation.implementations.unsupported("mosaic_gpu", call)


def test_small_forwards_and_gradients_of_many_examples_are_left_to_xla():
    operation = OPERATIONS["layer_norm"]
    found, call = operation.implementations["mosaic_gpu"], operation.describe(*arguments(operation, 1, 512))
    large = dataclasses.replace(call, rows=1 << 16, dim=4096)
    backward = dataclasses.replace(call, backward=True)
    assert [found.preference(x) for x in (call, large, backward, dataclasses.replace(backward, examples=8))] == [
        -1,
        0,
        0,
        -1,
    ]


def both_norms(x, weight, residual):
    own = SHORT if x.shape[-1] < 512 else RowNormParams()
    params = {"implementation": "mosaic_gpu", "fwd": own, "bwd": own}
    out, total = rms_norm(x, weight, residual=residual, cfg=RmsNormConfig(**params))
    return layer_norm(out, weight, weight, cfg=LayerNormConfig(**params)) + total


def gradients_of_both(*args):
    return jax.grad(lambda *args: both_norms(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*args)


def launches(function, *args):
    """Return how many kernels of ours a function's program for CUDA has."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @mosaic_gpu")


@pytest.mark.skipif(compat.kernels.mosaic_gpu_reason() is not None, reason=str(compat.kernels.mosaic_gpu_reason()))
def test_they_are_lowered_within_shard_map_and_under_strict_settings():
    rows, vector = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 1024), (1024,)))
    short = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = (P("rows"), P(), P("rows"))
    mapped = jax.shard_map(gradients_of_both, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=True)
    for own, weight in ((rows, vector), short):
        assert launches(mapped, own, weight, own) == 4
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert launches(gradients_of_both, rows, vector, rows) == 4


@pytest.mark.parametrize(("dim", "params"), [(1024, (1, 2, 8)), (8192, (2, 2, 1)), (16384, (1, 1, 1))], ids=str)
def test_a_heuristic_fills_the_device_with_thread_blocks(dim, params):
    operation = OPERATIONS["rms_norm"]
    call = dataclasses.replace(operation.describe(*arguments(operation, 1, 512)), rows=8192, dim=dim, backward=True)
    heuristic = operation.implementations["mosaic_gpu"].heuristic(call)
    assert params == (heuristic.block_rows, heuristic.stages, heuristic.occupancy)


@pytest.mark.parametrize(("shape", "residual", "races"), [((2, 3, 1536), False, True), ((4, 512), True, False)])
def test_simulated_rows_in_8_bits_are_those_of_plain_jax(monkeypatch, shape, residual, races):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(plan.hopper, "MULTIPROCESSORS", 2)
    rng = np.random.default_rng(0)
    x = on_device(rng.standard_normal(shape), "bfloat16").at[..., 1, :].set(0)
    weight = None if residual else on_device(rng.standard_normal(shape[-1]), "float32")
    args, options = quantized_rms_norm.prepare(x, weight, 2 * x + 1 if residual else None)
    options.pop("implementation")
    call, norm = quantized_rms_norm.describe(*args, **options), quantized.MosaicGpu()
    params = RowNormParams(block_rows=1, stages=2, occupancy=1)
    assert norm.params_fault(call, params) is None
    interpret = mosaic_gpu.InterpretGPUParams(detect_races=races)
    run = lambda *args: quantized.normalized(call, args, params, interpret=interpret)  # noqa: E731
    found, expected = jax.jit(run)(*args), quantized_rms_norm.reference(*args, **options)
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in expected]
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), plain.astype(jnp.float32), rtol=0.13)
