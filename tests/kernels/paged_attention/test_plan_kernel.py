# SPDX-License-Identifier: Apache-2.0
"""The kernel that computes a whole schedule, simulated on a CPU, and the programs that have it."""

from __future__ import annotations

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.kernels.meshes import mesh_of

from ejkernel import compat
from ejkernel.kernels.paged_attention import plan_kernel
from ejkernel.kernels.paged_attention.plan import BatchShape, Schedules, plan_arrays

PAGE, PAGES = 16, 40
DECODE = BatchShape(tokens=5, heads=4, kv_heads=2, pages=PAGES, page_size=PAGE, table=(6, 5), window=None)
SPECULATIVE = BatchShape(tokens=18, heads=4, kv_heads=2, pages=PAGES, page_size=PAGE, table=(6, 5), window=20)
MIXED = BatchShape(tokens=300, heads=8, kv_heads=1, pages=PAGES, page_size=PAGE, table=(6, 20), window=40)
MANY = BatchShape(tokens=1100, heads=2, kv_heads=2, pages=PAGES, page_size=PAGE, table=(1100, 2), window=None)
LONG = BatchShape(tokens=2, heads=1, kv_heads=1, pages=PAGES, page_size=PAGE, table=(2, 70000), window=None)
TILES = BatchShape(tokens=300000, heads=4, kv_heads=1, pages=PAGES, page_size=PAGE, table=(1, 512), window=None)
# Many blocks check these page tables, and the tiles of prefill are ordered by their sequences.
TABLE = BatchShape(tokens=5, heads=4, kv_heads=2, pages=PAGES, page_size=PAGE, table=(6, 1500), window=None)
WINDOW = BatchShape(tokens=9, heads=4, kv_heads=2, pages=PAGES, page_size=PAGE, table=(6, 1500), window=20)
PREFILL = BatchShape(tokens=300, heads=8, kv_heads=1, pages=PAGES, page_size=PAGE, table=(2, 20), window=None)
NARROW = BatchShape(tokens=300, heads=8, kv_heads=1, pages=PAGES, page_size=PAGE, table=(2, 20), window=40)
CHUNK = BatchShape(tokens=8192, heads=32, kv_heads=8, pages=PAGES, page_size=PAGE, table=(1, 512), window=None)

knows_hopper = pytest.mark.skipif(not hasattr(triton, "get_gpu_info"), reason="needs JAX 0.11.2")


@functools.cache
def both(shape, by_token=False):
    """Return both forms of the schedules."""
    forms = Schedules(shape, by_token=by_token)
    return jax.jit(lambda *args: list(forms.plain(*args))), jax.jit(lambda *args: list(forms.on_hopper(*args)))


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setattr(plan_kernel, "run", functools.partial(plan_kernel.run, interpret=True))


@st.composite
def batches(draw, shape):
    """Return offsets, lengths and a page table of any values; most are valid."""
    sequences, columns = shape.table
    keys = columns * PAGE
    lengths = st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, keys - 1, keys, keys + 9, -3])
    lengths |= st.integers(0, keys)
    counts = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 4, 40, 129]), min_size=sequences, max_size=sequences))
    offsets = np.cumsum([0, *counts])
    if draw(st.booleans()):
        offsets = np.array(draw(st.permutations(offsets.tolist())))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    table = rng.integers(0, PAGES, shape.table)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, sequences - 1)), draw(st.integers(0, columns - 1))
        table[at] = draw(st.sampled_from([-1, PAGES, 10**9, -(2**31), 2**31 - 1]))
    own = draw(st.lists(lengths, min_size=sequences, max_size=sequences))
    return [np.asarray(x, np.int32) for x in (offsets, own, table)]


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data())
@pytest.mark.parametrize(
    "shape",
    [DECODE, SPECULATIVE, MIXED, TABLE, WINDOW, PREFILL, NARROW],
    ids=["decode", "speculative", "mixed", "large page table", "the same, window", "prefill", "prefill, window"],
)
def test_the_kernel_and_xla_have_equal_schedules(shape, data):
    args = data.draw(batches(shape))
    plain, kernel = both(shape)
    jax.tree.map(np.testing.assert_array_equal, kernel(*args), plain(*args))
    if shape.kv_heads == 1:
        offsets, lengths, *_ = plain(*args)
        plain, kernel = both(shape, by_token=True)
        jax.tree.map(np.testing.assert_array_equal, kernel(offsets, lengths), plain(offsets, lengths))


def lowered_for(device_kind, function, *avals):
    with compat.executables.abstract_device("gpu", device_kind, 132), warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


def plan(offsets, lengths, table, shape=DECODE):
    arrays = plan_arrays(shape, table, offsets, lengths)
    return arrays.short_tiles, arrays.short_programs


def avals_of(shape=DECODE, lead=()):
    sequences = shape.table[0]
    return [jax.ShapeDtypeStruct((*lead, *own), jnp.int32) for own in ((sequences + 1,), (sequences,), shape.table)]


@knows_hopper
@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "function", "shape", "lead", "kernels"),
    [
        ("NVIDIA H200", plan, DECODE, (), 1),
        ("NVIDIA H200", functools.partial(plan, shape=TABLE), TABLE, (), 2),
        ("NVIDIA H200", functools.partial(plan, shape=CHUNK), CHUNK, (), 1),
        ("NVIDIA A100", plan, DECODE, (), 0),
        ("NVIDIA H200", jax.vmap(plan), DECODE, (3,), 0),
    ],
    ids=["Hopper", "large page table", "prefill", "another GPU", "vmap"],
)
def test_programs_for_a_hopper_gpu_have_the_kernel(monkeypatch, device, function, shape, lead, kernels):
    monkeypatch.undo()
    text = lowered_for(device, function, *avals_of(shape, lead))
    assert text.count("__gpu$xla.gpu.triton") == kernels


@knows_hopper
@pytest.mark.slow
@pytest.mark.parametrize("shape", [MANY, LONG, TILES], ids=["sequences", "page table", "prefill"])
def test_a_batch_beyond_one_block_has_the_form_of_xla(monkeypatch, shape):
    monkeypatch.undo()
    text = lowered_for("NVIDIA H200", functools.partial(plan, shape=shape), *avals_of(shape))
    assert "triton" not in text


@pytest.fixture
def on_hopper(monkeypatch):
    """Let programs for CUDA be those for an H200."""
    known = sys.modules[triton.GpuInfo.__module__].registry
    hopper = triton.get_gpu_info_from_version(triton.GpuVersion.H200)
    monkeypatch.setitem(known, jax.devices()[0].device_kind, lambda: hopper)
    yield
    triton.get_gpu_info.cache_clear()


@knows_hopper
@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("sharded", "devices", "kernels"),
    [(True, (2, 4), 1), (False, (2, 4), 0), (False, (1, 1), 1)],
    ids=["shard_map", "jit", "one device"],
)
def test_shards_have_the_kernel_and_programs_that_xla_partitions_have_not(monkeypatch, mode, sharded, devices, kernels):
    monkeypatch.setattr(plan_kernel, "run", plan_kernel.run.func)
    mesh, function, lead = mesh_of(mode, devices), plan, ()
    if sharded:
        lead = (2,)
        own = lambda *args: [x[None] for x in plan(*(x[0] for x in args))]  # noqa: E731
        function = jax.shard_map(own, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    sharding = NamedSharding(mesh, P("data") if sharded else P())
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in avals_of(lead=lead)]
    with jax.set_mesh(mesh):
        text = jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == kernels


@knows_hopper
@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
def test_an_exported_program_for_a_hopper_gpu_can_be_serialized(monkeypatch):
    monkeypatch.setattr(plan_kernel, "run", plan_kernel.run.func)
    exported = jax.export.export(jax.jit(plan), platforms=["cuda"])(*avals_of())
    assert jax.export.deserialize(exported.serialize()).platforms == ("cuda",)


@pytest.mark.slow
def test_plans_are_equal_under_vmap_and_with_64_bits():
    rng = np.random.default_rng(0)
    offsets, lengths = np.tile(np.arange(7), (2, 1)), rng.integers(1, 80, (2, 6))
    args = [jnp.asarray(x, jnp.int32) for x in (offsets, lengths, rng.integers(0, PAGES, (2, *DECODE.table)))]
    each = [jax.jit(plan)(*(x[i] for x in args)) for i in range(2)]
    want = tuple(np.stack(own) for own in zip(*each, strict=True))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(jax.vmap(plan))(*args), want)
    with jax.enable_x64(True):
        wide = jax.jit(plan)(*(x[0] for x in args))
    assert {x.dtype for x in wide} == {jnp.dtype("int32")}
    jax.tree.map(np.testing.assert_array_equal, wide, each[0])
