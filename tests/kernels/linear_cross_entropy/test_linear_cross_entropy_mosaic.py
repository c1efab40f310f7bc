# SPDX-License-Identifier: Apache-2.0
"""The loss's kernels for Hopper, simulated on a CPU, and what they accept."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device
from tests.kernels.linear_cross_entropy import plain_kernel

from ejkernel import compat
from ejkernel.kernels._hopper.tile_shapes import PIECE
from ejkernel.kernels.linear_cross_entropy.common import LinearCrossEntropyCall
from ejkernel.kernels.linear_cross_entropy.mosaic_gpu import gradients, plan, support
from ejkernel.kernels.linear_cross_entropy.mosaic_gpu.implementation import MosaicGpu, MosaicGpuGradients
from ejkernel.kernels.linear_cross_entropy.mosaic_gpu.params import MosaicGpuParams
from ejkernel.kernels.linear_cross_entropy.operation import linear_cross_entropy, linear_cross_entropy_gradients
from ejkernel.ops import ConfigError
from ejkernel.ops.errors import KernelWarning

REPEATED = pytest.mark.whole  # each parameter and option is also part of another case
ROWS, INNER, COLUMNS, REMOVED = 200, 72, 330, 5  # no multiples of a tile; a bias of -inf removes the last columns
SMALL = {"stages": 2, "panel": 1}
TOLERANCE = {"statistics": 1e-5, "gradients": 8e-3}
CALL = LinearCrossEntropyCall(
    tokens=8192,
    inner=4096,
    columns=128256,
    dtype="bfloat16",
    gradients=("x", "weight"),
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
    memory_limit=32 << 30,
)


@pytest.fixture
def simulated(monkeypatch):
    """A function that has the kernels run in the interpreter, on two multiprocessors with several tiles each."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    def run(*, detect_races=False):
        monkeypatch.setattr(plan, "MULTIPROCESSORS", 2)
        for implementation in (MosaicGpu, MosaicGpuGradients):
            # A stand-in for additions in memory reads past the end of an array, and never stores what it found there.
            options = {"detect_races": detect_races, "out_of_bounds_reads": "uninitialized"}
            interpret = mosaic_gpu.InterpretGPUParams(**options)
            monkeypatch.setattr(implementation, "interpret", interpret)

    run()
    return run


def arrays(*, rows=ROWS, columns=COLUMNS, transpose_weight=False, bias=False):
    """Return rows, weight, labels with ignored ones, factors of the losses, and the bias, if any."""
    rng = np.random.default_rng(0)
    x = on_device(rng.standard_normal((rows, INNER)), jnp.bfloat16)
    shape = (columns, INNER) if transpose_weight else (INNER, columns)
    weight = on_device(0.3 * rng.standard_normal(shape), jnp.bfloat16)
    labels = rng.integers(0, columns - REMOVED, rows)
    labels[::7] = -100
    factors = np.where(labels < 0, 0, rng.random(rows))
    added = rng.standard_normal(columns)
    added[-REMOVED:] = -np.inf
    found = x, weight, on_device(labels, jnp.int32), on_device(factors, jnp.float32)
    return (*found, on_device(added, jnp.bfloat16)) if bias else found


def wide(args):
    return [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]


def by_reference(operation=linear_cross_entropy_gradients, **options):
    """Return the reference for such arguments, in float32 and compiled in one piece."""
    return jax.jit(lambda *args: operation.reference(*wide(args), **options))


def described(operation, args, options):
    """Return the prepared arguments and options, and the call."""
    args, options = operation.prepare(*args, **options)
    options.pop("implementation")
    return args, options, operation.describe(*args, **options)


def assert_near(expected, actual, kind):
    expected, actual = (np.asarray(x, np.float64) for x in (expected, actual))
    assert expected.shape == actual.shape
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error <= TOLERANCE[kind]


def loss_and_gradients(args, params, **options):
    """Return a compiled function of such arguments, and the results by the reference for them."""
    args, options, call = described(linear_cross_entropy_gradients, args, options)
    implementation = MosaicGpuGradients()
    assert implementation.params_fault(call, params) is None
    run = jax.jit(lambda *args: implementation.forward(call, *args, params=params)[0])
    return run, by_reference(**options)


def assert_all_near(expected, actual, statistics):
    assert len(expected) == len(actual)
    for index, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
        assert_near(wanted, found, "statistics" if index < statistics else "gradients")


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_three_products_in_chunks_give_the_loss_and_gradients(monkeypatch):
    monkeypatch.setattr(gradients, "SAMPLED", 4)
    monkeypatch.setattr(gradients, "RUN", 1)  # columns 0, 82, 164, 246
    args = arrays(transpose_weight=True, bias=True)
    run, reference = loss_and_gradients(
        args,
        MosaicGpuParams(chunk=128, **SMALL),
        transpose_weight=True,
        gradients=("x", "weight", "bias"),
        label_smoothing=0.5,
        z_loss=0.01,
        logits_scale=0.7,
    )
    assert_all_near(reference(*args), run(*args), 3)
    # Other columns have far larger logits: exponentials relative to those of the sampled columns overflow.
    x, weight, *others = args
    large = x, weight.at[1:40].multiply(30), *others
    assert float(jnp.max(x @ large[1].T)) > 150
    assert_all_near(reference(*large), run(*large), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest_sum", "columns"),
    [(gradients.LARGEST_SUM, COLUMNS), (1.0, COLUMNS), (gradients.LARGEST_SUM, 328)],
    ids=["", "computed again", "pieces"],
)
def test_a_soft_cap_with_overlapping_epilogues_has_no_races(simulated, monkeypatch, largest_sum, columns):
    simulated(detect_races=True)
    monkeypatch.setattr(gradients, "LARGEST_SUM", largest_sum)
    args = arrays(columns=columns)
    options = {"statistics": ("max",), "logits_soft_cap": 3.0, "z_loss": 0.01}
    run, reference = loss_and_gradients(args, MosaicGpuParams(lag=1, cluster=2, **SMALL), **options)
    assert_all_near(reference(*args), run(*args), 3)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_a_kernel_multiplies_by_the_weight_where_it_is_fast(monkeypatch):
    monkeypatch.setattr(plan, "_LEAST_COLUMNS", 256)
    rng = np.random.default_rng(1)
    x, weight = (on_device(0.3 * rng.standard_normal(shape), jnp.bfloat16) for shape in ((ROWS, 256), (256, COLUMNS)))
    args = x, weight, *arrays()[2:]
    run, reference = loss_and_gradients(args, MosaicGpuParams(**SMALL), gradients=("x",))
    assert f"linear_cross_entropy_{plan.PRODUCT}" in str(jax.make_jaxpr(run)(*args))
    assert_all_near(reference(*args), run(*args), 2)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("pieces", "options"),
    [
        (5, {}),
        pytest.param(2, {"block_n": 128}, marks=REPEATED),
        (2, {"block_n": 128, "form": "vocabulary"}),
        pytest.param(3, {"form": "vocabulary"}, marks=REPEATED),
    ],
)
def test_columns_beyond_a_vocabulary_of_whole_pieces_count_for_nothing(pieces, options):
    x, weight, *per_row = arrays(columns=pieces * PIECE)
    x, *per_row = (y[:60] for y in (x, *per_row))
    # Logits far below those of zeros: the exponentials of the latter overflow.
    args = abs(x), -8 * abs(weight), *per_row
    run, reference = loss_and_gradients(args, MosaicGpuParams(**SMALL, **options), statistics=("max",))
    assert_all_near(reference(*args), run(*args), 3)


# --- arrays of any size: the last tile is partial, and few are padded ---

# With a share of 0.1, gradients without its term would be within the tolerance.
EVERY = {"gradients": ("x", "weight", "bias"), "statistics": ("max",), "z_loss": 0.01, "logits_scale": 0.7}
CAPPED = {"gradients": ("x", "weight"), "logits_soft_cap": 3.0}
ANY_SIZE = [
    (True, 331, {}, EVERY | {"label_smoothing": 0.5}),
    pytest.param(True, 331, {"chunk": 128}, CAPPED, marks=REPEATED),
    (True, 331, {"form": "vocabulary", "chunk": 256}, CAPPED | {"statistics": ("sum",), "label_smoothing": 0.5}),
    pytest.param(True, 331, {"form": "vocabulary", "chunk": 256, "block_n": 128}, EVERY, marks=REPEATED),
    (True, 72, {"block_n": 128, "cluster": 2, "lag": 1}, CAPPED),
    (True, 13, {}, EVERY),
    (False, 328, {"form": "vocabulary", "chunk": 256}, EVERY | {"label_smoothing": 0.5}),
    (False, 328, {"chunk": 128, "cluster": 2, "lag": 1, "accumulation_dtype": "bfloat16"}, EVERY),
    (False, 331, {"block_n": 128}, CAPPED | {"label_smoothing": 0.0}),
    pytest.param(False, 40, {}, EVERY, marks=REPEATED),
    (False, 13, {"form": "vocabulary"}, CAPPED),
]


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("transposed", "columns", "params", "options"), ANY_SIZE, ids=str)
def test_arrays_of_any_size_give_the_loss_and_gradients(transposed, columns, params, options):
    rows = ROWS if params else 139
    args = arrays(rows=rows, columns=columns, transpose_weight=transposed, bias="bias" in options["gradients"])
    options = options | {"transpose_weight": transposed}
    run, reference = loss_and_gradients(args, MosaicGpuParams(**SMALL, **params), **options)
    found, expected = run(*args), reference(*args)
    assert_all_near(expected, found, len(expected) - len(options["gradients"]))


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("transposed", "columns", "options"), [(True, 331, {}), (False, 328, {"form": "vocabulary", "chunk": 256})]
)
def test_statistics_of_arrays_of_any_size_and_their_gradients_match_the_reference(transposed, columns, options):
    x, weight, labels, _ = arrays(columns=columns, transpose_weight=transposed)
    given = {"statistics": ("sum", "expected", "max"), "transpose_weight": transposed}
    args, given, call = described(linear_cross_entropy, (x, weight, labels), given)
    reference = by_reference(linear_cross_entropy, **given)
    expected, pull = jax.vjp(lambda *args: reference(*args, labels), *wide((x, weight)))
    cotangents = tuple(jnp.cos(y) for y in expected)

    @jax.jit
    def run(*args):
        params = MosaicGpuParams(**SMALL, **options)
        out, _ = MosaicGpu().forward(call, *args, params=params)
        gradients = dataclasses.replace(call, backward=True)
        return *out, *MosaicGpu().backward(gradients, (), out, cotangents, *args, params=params)[:2]

    assert_all_near((*expected, *pull(cotangents)), run(*args), 5)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "adds"), [(64, False), (136, False), (64, True)])
def test_tiles_with_few_pieces_do_not_share_a_buffer_that_is_still_copied(simulated, monkeypatch, columns, adds):
    simulated(detect_races=True)
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 1)
    from ejkernel.kernels.linear_cross_entropy.mosaic_gpu import sums

    rng = np.random.default_rng(3)
    left, right = (on_device(rng.standard_normal((64, size)), "bfloat16") for size in (512, columns))

    def run(left, right):
        interpret = MosaicGpuGradients.interpret
        if adds:
            return sums.add_product(jnp.zeros((512, columns), "bfloat16"), left, right, interpret=interpret)
        return sums.product(left, right, 512, "bfloat16", interpret=interpret)

    found = np.asarray(jax.jit(run)(left, right), np.float32)
    assert_near(np.float32(left).T @ np.float32(right), found, "gradients")


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("transposed", "columns"), [(True, 331), (False, 328)])
def test_a_kernel_multiplies_by_a_weight_that_ends_anywhere(monkeypatch, transposed, columns):
    monkeypatch.setattr(plan, "_LEAST_COLUMNS", INNER)
    monkeypatch.setattr(plan, "_LEAST_USE", 0)
    args = arrays(columns=columns, transpose_weight=transposed)
    options = {"gradients": ("x",), "transpose_weight": transposed}
    run, reference = loss_and_gradients(args, MosaicGpuParams(**SMALL), **options)
    assert f"linear_cross_entropy_{plan.PRODUCT}" in str(jax.make_jaxpr(run)(*args))
    assert_all_near(reference(*args), run(*args), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transposed", "columns", "params", "is_padded"),
    [
        (True, 331, {}, True),
        (True, 331, {"form": "vocabulary"}, False),
        (True, 328, {}, False),
        (False, 328, {}, False),
        (False, 331, {}, True),
    ],
)
def test_a_weight_is_padded_only_where_copies_or_products_need_it(transposed, columns, params, is_padded):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    args = arrays(columns=columns, transpose_weight=transposed)
    run, _ = loss_and_gradients(args, MosaicGpuParams(**params), transpose_weight=transposed)
    padded = re.findall(r":bf16\[(\d+),(\d+)\] = pad", str(jax.make_jaxpr(run)(*args)))
    assert is_padded == any("384" in sizes for sizes in padded)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_chunks_of_the_vocabulary_give_the_loss_and_gradients_with_every_option():
    args = arrays(bias=True)
    run, reference = loss_and_gradients(
        args,
        MosaicGpuParams(form="vocabulary", chunk=256, **SMALL),
        gradients=("x", "weight", "bias"),
        statistics=("max",),
        label_smoothing=0.1,
        z_loss=0.01,
        logits_soft_cap=3.0,
        logits_scale=0.7,
    )
    assert_all_near(reference(*args), run(*args), 4)


@pytest.mark.slow
@pytest.mark.whole  # arrays of any size have statistics as well, soft caps and chunks are in other cases
@pytest.mark.usefixtures("simulated")
def test_statistics_and_their_gradients_match_the_reference():
    x, weight, labels, _, bias = arrays(transpose_weight=True, bias=True)
    options = {"statistics": ("sum", "expected", "max"), "transpose_weight": True, "logits_soft_cap": 3.0}
    args, options, call = described(linear_cross_entropy, (x, weight, labels, bias), options)
    reference = by_reference(linear_cross_entropy, **options)
    expected, pull = jax.vjp(lambda x, weight, bias: reference(x, weight, labels, bias), *wide((x, weight, bias)))
    cotangents = tuple(jnp.cos(y) for y in expected)

    @jax.jit
    def run(*args):
        params = MosaicGpuParams(chunk=128, accumulation_dtype="bfloat16", **SMALL)
        out, _ = MosaicGpu().forward(call, *args, params=params)
        dx, dweight, _, dbias = MosaicGpu().backward(call, (), out, cotangents, *args, params=params)
        return *out, dx, dweight, dbias

    assert_all_near((*expected, *pull(cotangents)), run(*args), 5)


@pytest.mark.slow
def test_the_host_does_not_wait_for_the_range_of_exponentials():
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    call = dataclasses.replace(CALL, tokens=256, inner=128, columns=1024)
    shapes = ((256, 128), "bfloat16"), ((128, 1024), "bfloat16"), ((256,), "int32"), ((256,), "float32")
    run = jax.jit(lambda *args: MosaicGpuGradients().forward(call, *args, params=MosaicGpuParams())[0])
    traced = run.trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert not any(branch in program for branch in ("stablehlo.while", "stablehlo.case", "stablehlo.if"))
    assert all(f"linear_cross_entropy_{mode}" in program for mode in (plan.MAXIMA, plan.EXPONENTIALS))


@pytest.mark.slow
def test_examples_of_a_batch_are_no_slices_for_kernels_that_update_arrays():
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    call = dataclasses.replace(CALL, tokens=256, inner=128, columns=1024)
    params = MosaicGpuParams(chunk=128, accumulation_dtype="bfloat16")
    shapes = ((2, 256, 128), "bfloat16"), ((128, 1024), "bfloat16"), ((2, 256), "int32"), ((256,), "float32")

    def one(*args):
        return MosaicGpuGradients().forward(call, *args, params=params)[0]

    traced = jax.jit(jax.vmap(one, (0, None, 0, None))).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    lines = traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
    updates = [i for i, line in enumerate(lines) if "output_operand_alias" in line]
    assert len(updates) == 5  # two for each chunk, and a sum
    for i in updates:
        # XLA moves slices of operands and results into the call unless a barrier is between them.
        before, update, after = (line.partition(" = ") for line in lines[i - 1 : i + 2])
        assert before[2].startswith("stablehlo.optimization_barrier")
        assert after[2].startswith("stablehlo.optimization_barrier")
        operands = re.search(r"custom_call @\w+\(([^)]*)\)", update[2])[1].split(", ")
        assert {operand.partition("#")[0] for operand in operands} == {before[0].strip().partition(":")[0]}


@pytest.mark.slow
@pytest.mark.parametrize("vocab_axis", [None, "devices"])
@pytest.mark.parametrize("transposed", [False, True])
def test_chunks_of_rows_lower_inside_shard_map_and_no_exponentials_are_cropped(vocab_axis, transposed):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, columns, devices = (512, 512 - transposed, 2) if vocab_axis else (256, 1024 - transposed, 1)
    sizes = {"tokens": rows, "inner": 128, "columns": columns, "transpose_weight": transposed}
    call = dataclasses.replace(CALL, **sizes, vocab_axis=vocab_axis and (vocab_axis,))
    params = MosaicGpuParams(chunk=128, accumulation_dtype="bfloat16")

    def dweight(*args):
        found = MosaicGpuGradients().forward(call, *args, params=params)[0][-1]
        return found if vocab_axis else lax.psum(found, "devices")

    split = P("devices")
    whole, shape = (split, (columns * devices, 128)) if transposed else (P(None, "devices"), (128, columns * devices))
    in_specs = (P(), whole, P(), P()) if vocab_axis else (split, P(), split, split)
    run = jax.shard_map(dweight, mesh=mesh, in_specs=in_specs, out_specs=whole if vocab_axis else P())
    shapes = ((512, 128), "bfloat16"), (shape, "bfloat16"), ((512,), "int32"), ((512,), "float32")
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<128x{columns}xbf16>" not in (text if transposed else "")


@pytest.mark.parametrize("columns", [5, 511, 512, 999])
def test_sampled_columns_are_different_and_spread_over_the_vocabulary(columns):
    found = gradients._sample(jnp.arange(2 * 1024).reshape(2, -1), columns, 1)
    assert found.shape == (2, columns if columns < 2 * gradients.SAMPLED else gradients.SAMPLED)
    first = np.unique(np.asarray(found[0]))
    assert len(first) == found.shape[1]
    assert 0.9 * columns - gradients.RUN <= first[-1] + 1 <= columns


# --- programs around the kernel, which plain JAX replaces ---

LOSS = {"gradients": ("x", "weight", "bias"), "statistics": ("max",), "label_smoothing": 0.1, "z_loss": 0.01}


@pytest.fixture
def replaced(monkeypatch):
    """The kernel is replaced by plain JAX; one row in eight has exponentials that overflow at first."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from ejkernel.kernels.linear_cross_entropy.mosaic_gpu import kernel, sums

    monkeypatch.setattr(kernel, "run_head", plain_kernel.run_head)
    monkeypatch.setattr(sums, "add_product", plain_kernel.add_product)
    monkeypatch.setattr(sums, "product", plain_kernel.product)
    monkeypatch.setattr(gradients, "SAMPLED", 4)
    monkeypatch.setattr(gradients, "RUN", 1)
    x, *others = arrays(bias=True)
    return x.at[::8].multiply(40), *others


def prepared(args, params=None, **options):
    args, options, call = described(linear_cross_entropy_gradients, args, LOSS | options)
    params = params or MosaicGpuParams()
    return args, lambda *args: MosaicGpuGradients().forward(call, *args, params=params)[0]


@pytest.mark.slow
@pytest.mark.parametrize("sum_dtype", ["float32", "bfloat16"])
def test_a_sum_over_chunks_starts_from_the_first(replaced, sum_dtype):
    x, weight, labels, factors, bias = replaced
    longer = [jnp.concatenate([y, y]) for y in (x, labels, factors)]
    longer = longer[0], weight, *longer[1:], bias
    args, run = prepared(longer, MosaicGpuParams(chunk=128, accumulation_dtype=sum_dtype))
    assert len(args[0]) == 400
    program = str(jax.make_jaxpr(run)(*args))
    assert "length=3" in program  # four chunks
    assert "length=4" not in program
    _, options, _ = described(linear_cross_entropy_gradients, longer, LOSS)
    expected = by_reference(**options)(*longer)
    assert_all_near(expected, jax.jit(run)(*args), 4)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "vocabulary"])
@pytest.mark.parametrize(
    "options", [{}, {"logits_soft_cap": None, "label_smoothing": 0.0, "z_loss": 0.0}], ids=["all options", "no option"]
)
def test_without_any_column_gradients_are_zero(replaced, form, options):
    removed = *replaced[:4], jnp.full_like(replaced[4], -jnp.inf)
    args, run = prepared(removed, MosaicGpuParams(form=form), **options)
    _, options, _ = described(linear_cross_entropy_gradients, removed, LOSS | options)
    expected = by_reference(**options)(*removed)
    found = jax.jit(run)(*args)
    for wanted, one in zip(expected, found, strict=True):
        np.testing.assert_array_equal(np.asarray(wanted, np.float32), np.asarray(one, np.float32))
    assert not any(np.asarray(gradient, np.float32).any() for gradient in found[-3:])


@pytest.mark.slow
@pytest.mark.parametrize(("transposed", "chunk"), [(False, None), (True, None), (True, 128)])
def test_a_vocabulary_over_two_devices_gives_the_loss_and_gradients_of_one(replaced, transposed, chunk):
    own = COLUMNS // 2  # an odd number
    x, weight, labels, factors, bias = replaced
    whole = x, weight.T if transposed else weight, labels, factors, bias
    mesh = jax.make_mesh((2,), ("vocabulary",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def part(x, weight, labels, factors, bias):
        labels = labels - own * lax.axis_index("vocabulary")
        options = {"vocab_axis": "vocabulary", "transpose_weight": transposed}
        args, run = prepared((x, weight, labels, factors, bias), MosaicGpuParams(chunk=chunk), **options)
        lse, label, total, top, dx, dweight, dbias = run(*args)
        label, total, dx = lax.psum((label, total, dx.astype(jnp.float32)), "vocabulary")
        return lse, label, total, top, dx, dweight, dbias

    biases = P("vocabulary")
    weights = biases if transposed else P(None, "vocabulary")
    run = jax.shard_map(
        part, mesh=mesh, in_specs=(P(), weights, P(), P(), biases), out_specs=(*[P()] * 5, weights, biases)
    )
    _, options, _ = described(linear_cross_entropy_gradients, whole, LOSS | {"transpose_weight": transposed})
    expected = by_reference(**options)(*whole)
    assert_all_near(expected, jax.jit(run)(*whole), 4)


@pytest.mark.slow
def test_examples_of_a_batch_have_their_own_loss_and_gradients(replaced):
    x, *others = replaced
    args, run = prepared(replaced)
    found = jax.jit(jax.vmap(lambda x: run(x, *args[1:])))(jnp.stack([x, x[::-1]]))
    _, options, _ = described(linear_cross_entropy_gradients, replaced, LOSS)
    reference = by_reference(**options)
    for index, example in enumerate((x, x[::-1])):
        expected = reference(example, *others)
        assert_all_near(expected, [y[index] for y in found], 4)


# --- what is accepted ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "range is too small .* bfloat16, or use 'xla'"),
        ({"dtype": "float32"}, "float32; 'mosaic_gpu' supports bfloat16"),
        ({"accumulation_dtype": "float64"}, "pass float32 or bfloat16"),
        ({"device_fingerprint": "gpu:nvidia_a100"}, "needs a Hopper GPU"),
        ({"partitioned": True}, "would gather x and weight"),
        ({"columns": 0}, "is empty"),
    ],
    ids=str,
)
def test_a_call_is_refused_with_a_reason_and_an_alternative(changes, reason):
    if missing := compat.kernels.mosaic_gpu_reason():
        pytest.skip(missing)
    assert support.unsupported_reason(CALL) is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(support.unsupported_reason(dataclasses.replace(CALL, **changes)))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (32, ("rows", 5120)),
        (3.4, ("rows", 4096)),
        (3, ("vocabulary", 8192)),
        (1, ("vocabulary", 256)),
    ],
    ids=lambda x: "" if isinstance(x, tuple) else f"{x} GiB",
)
def test_less_memory_means_chunks_of_rows_and_then_of_the_vocabulary(limit, expected):
    too_little = pytest.warns(KernelWarning, match="less than every configuration needs")
    with too_little if limit == 1 else contextlib.nullcontext():
        found = support.heuristic(dataclasses.replace(CALL, tokens=65536, memory_limit=int(limit * 2**30)))
    assert expected == (found.form, found.chunk)


@pytest.mark.parametrize(
    ("tokens", "inner", "columns", "expected"),
    [
        (8192, 4096, 128256, (None, None)),
        (16384, 2048, 151936, (8192, "bfloat16")),
        (8192, 2304, 256000, (4096, "bfloat16")),
        (16384, 2304, 256000, (2432, None)),
        (4096, 7168, 129280, (None, None)),
    ],
)
def test_many_logits_are_cut_into_few_equal_chunks_by_default(tokens, inner, columns, expected):
    call = dataclasses.replace(CALL, tokens=tokens, inner=inner, columns=columns, memory_limit=None)
    found = support.heuristic(call)
    assert expected == (found.chunk, found.accumulation_dtype)


def test_a_sum_in_float32_has_shorter_chunks():
    call = dataclasses.replace(CALL, tokens=16384, accumulation_dtype="float32")
    found = support.heuristic(call)
    assert (found.chunk, found.accumulation_dtype) == (4096, None)


@pytest.mark.parametrize(
    ("tokens", "inner", "expected"),
    [
        (8192, 4096, True),
        (4096, 7168, True),
        (8192, 2048, True),
        (2304, 4096, False),
        (4096, 2304, False),
        (8192, 1024, False),
    ],
)
def test_xla_multiplies_for_short_rows_and_where_tiles_would_leave_multiprocessors_idle(tokens, inner, expected):
    sizes = {"rows": tokens, "inner": 128256, "columns": inner}
    assert expected == (plan.product_plan(MosaicGpuParams(), **sizes, transpose_weight=True) is not None)


@pytest.mark.parametrize(("inner", "panel"), [(2048, 16), (4096, 16), (7168, 12), (16384, 8)])
def test_rows_of_a_panel_stay_in_the_cache(inner, panel):
    assert support.heuristic(dataclasses.replace(CALL, inner=inner)).panel == panel


@pytest.mark.parametrize(
    ("tokens", "columns", "preference"), [(70, 12832, -1), (1559, 2280, -1), (751, 170440, 0), (65536, 128, 0)]
)
def test_xla_computes_gradients_with_few_logits(tokens, columns, preference):
    call = dataclasses.replace(CALL, tokens=tokens, columns=columns)
    assert MosaicGpuGradients().preference(call) == preference
    assert MosaicGpuGradients().preference(dataclasses.replace(call, memory_limit=1 << 20)) == 0
    assert MosaicGpu().preference(call) == 0


def test_three_products_have_a_buffer_for_each_piece():
    found = support.heuristic(CALL)
    assert found.out_slots == support.head_plan(CALL, found, plan.EXPONENTIALS, rows=plan.TILE_ROWS).pieces
    assert support.params_fault(CALL, found) is None


@pytest.mark.parametrize("gradients", [(), ("x", "weight")])
def test_epilogues_overlap_with_products_where_tiles_have_few_steps(gradients):
    found = [support.heuristic(dataclasses.replace(CALL, inner=inner, gradients=gradients)) for inner in (2304, 4096)]
    assert [(params.lag, params.cluster) for params in found] == [(3, 2), (0, 1)]
    assert support.params_fault(CALL, found[0]) is None


def test_a_sum_in_bfloat16_takes_no_memory_of_its_own():
    call = dataclasses.replace(CALL, tokens=16384)
    found = MosaicGpuParams(chunk=4096)
    narrow = dataclasses.replace(call, accumulation_dtype="bfloat16")
    assert (
        support.estimated_bytes(call, found) - support.estimated_bytes(narrow, found) == 4 * call.inner * call.columns
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 128256),
        ({"columns": 50264}, 50304),
        ({"columns": 50264, "tokens": 1024}, 50264),
        ({"columns": 50257, "tokens": 1024}, 50304),
        ({"columns": 50264, "transpose_weight": True}, 50264),
        ({"columns": 50257, "transpose_weight": True}, 50304),
        ({"columns": 50257, "transpose_weight": True, "gradients": ()}, 50257),
        ({"columns": 50264, "transpose_weight": True, "inner": 4097}, 50304),
    ],
    ids=str,
)
def test_a_weight_is_copied_only_where_the_kernels_need_it(changes, expected):
    call = dataclasses.replace(CALL, **changes)
    inner, columns = plan.padded_sizes(call, MosaicGpuParams())
    assert (inner - call.inner, columns) == (-call.inner % 8, expected)


@pytest.mark.parametrize(
    ("changes", "copies"), [({}, 0), ({"tokens": 512}, 1), ({"columns": 50257}, 1), ({"inner": 4097}, 2)], ids=str
)
def test_an_estimate_counts_the_exponentials_and_copies_of_the_weight(changes, copies):
    sizes = {"tokens": 1024, "columns": 50264, "transpose_weight": True}
    call = dataclasses.replace(CALL, **sizes | changes)
    expected = 2 * call.columns * (call.tokens + copies * call.inner)
    assert expected < support.estimated_bytes(call, MosaicGpuParams()) < 1.05 * expected


def test_a_search_also_tries_all_rows_at_once():
    chunks = {
        (params.chunk, params.accumulation_dtype) for params in support.space(dataclasses.replace(CALL, tokens=16384))
    }
    assert {(None, None), (8192, None), (8192, "bfloat16"), (4096, None)} <= chunks


def test_label_smoothing_with_a_soft_cap_uses_chunks_of_the_vocabulary():
    call = dataclasses.replace(CALL, label_smoothing=0.1, statistics=("sum",), logits_soft_cap=30.0)
    assert support.heuristic(call).form == "vocabulary"
    assert "form='vocabulary'" in support.params_fault(call, MosaicGpuParams())


@pytest.mark.parametrize("limit", [32 << 30, 4 << 30])
def test_the_space_has_the_heuristic_and_only_what_fits(limit):
    call = dataclasses.replace(CALL, tokens=65536, memory_limit=limit)
    found = list(support.space(call))
    assert len(found) == len(set(found)) > 50
    assert support.heuristic(call) in found
    assert all(support.params_fault(call, params) is None for params in found)
    assert max(support.estimated_bytes(call, params) for params in found) <= limit * 1.01


def test_parameters_that_shared_memory_cannot_hold_are_refused():
    assert "shared memory" in support.params_fault(CALL, MosaicGpuParams(stages=6))
    assert "out_slots must divide 2" in support.params_fault(CALL, MosaicGpuParams(block_n=128, out_slots=4))
    assert "lag must be less than stages" in support.params_fault(CALL, MosaicGpuParams(stages=2, lag=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "tiles"},
        {"chunk": 100},
        {"form": "vocabulary", "chunk": 128},
        {"block_n": 64},
        {"stages": 1},
    ],
)
def test_wrong_parameters_are_refused_with_the_value(wrong):
    name, value = list(wrong.items())[-1]
    with pytest.raises(ConfigError, match=f"{name} must be .*{value}"):
        MosaicGpuParams(**wrong)
