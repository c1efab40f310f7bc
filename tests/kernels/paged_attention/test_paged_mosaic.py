# SPDX-License-Identifier: Apache-2.0
"""The kernels for Hopper, simulated on a CPU, and the calls that they support."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device, ones, zeros
from tests.kernels.lowered import assert_in_place_calls_are_apart
from tests.kernels.paged_attention_cases import plan_of, simulate_hopper

from ejkernel import compat
from ejkernel.kernels.paged_attention import reference, schedule
from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.paged_attention.mosaic_gpu.plan import MosaicGpuParams, launch_plan
from ejkernel.modules import PagedAttention, append_to_pages

OUTSIDE = (-1, 10**9, -(2**31), 2**31 - 1)
SMALL = MosaicGpuParams(stages=2, query_buffers=1)
REPEATED = pytest.mark.whole  # each feature and size is also part of another case, here or in the next tests
CALL = PagedCall(
    q=(64, 32, 128),
    pages=(16384, 16, 8, 2, 128),
    table=(64, 256),
    dtype="bfloat16",
    cache_dtype="bfloat16",
    scale=128**-0.5,
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
)
LATENT = {"q": (64, 128, 576), "pages": (16384, 16, 1, 1, 576), "value_dim": 512}


@pytest.fixture
def simulated(monkeypatch):
    simulate_hopper(monkeypatch)


def poisoned(
    lengths, queries, *, page=16, heads=(4, 2), head_dim=64, padding=3, window=None, cache="bfloat16", kinds=2
):
    """Return a batch with NaN in each slot that no token sees, and indices outside of the cache in unused columns.

    In int8 the slots have 127.
    """
    rng = np.random.default_rng(0)
    columns = -(-max(lengths) // page) + 1
    table = rng.permutation(len(lengths) * columns).reshape(len(lengths), columns)
    pages = np.full((table.size, page, heads[1], kinds, head_dim), np.nan, np.float32)
    for row, length, count in zip(table, lengths, queries, strict=True):
        first = 0 if window is None else max(length - count - window, 0)
        for position in range(first // page * page, length):
            pages[row[position // page], position % page] = rng.standard_normal((heads[1], kinds, head_dim))
        row[: first // page] = rng.choice(OUTSIDE, first // page)
        used = -(-length // page)
        row[used:] = rng.choice(OUTSIDE, columns - used)
    if cache == "int8":
        pages = np.nan_to_num(np.round(40 * pages), nan=127).clip(-127, 127)
    q = rng.standard_normal((sum(queries) + padding, heads[0], head_dim))
    integers = table, np.concatenate([[0], np.cumsum(queries)]), lengths
    dtype = "float16" if cache == "float16" else "bfloat16"
    return on_device(q, dtype), on_device(pages, cache), *(on_device(x, jnp.int32) for x in integers)


@functools.cache
def program_of(call, params, interpret):
    """Return the simulated kernels of a call, compiled once for all operands."""
    return jax.jit(lambda *args: MosaicGpu().forward(call, *args, params=params))


@functools.cache
def reference_of(call):
    """Return the reference of a call, compiled in one piece."""
    return jax.jit(lambda args: reference.attention(call, args))


def prepared(args, options):
    """Return the arguments and the call as the kernels see them."""
    args, options = PagedAttention().prepare(*args, return_lse=True, **options)
    options.pop("implementation")
    return args, PagedAttention().describe(*args, **options)


def results(args, params=SMALL, **options):
    """Return the results of the kernels, in float32."""
    args, call = prepared(args, options)
    assert MosaicGpu().unsupported(call) is None
    found, _ = program_of(call, params, MosaicGpu.interpret)(*args)
    return [np.asarray(x, np.float32) for x in found]


def expected(args, **options):
    """Return the results of the reference, in float32."""
    args, call = prepared(args, options)
    wide = (np.asarray(x, np.float32) if getattr(x, "dtype", None) in ("bfloat16", "float16") else x for x in args)
    return [np.asarray(x) for x in reference_of(call)(tuple(wide))]


def check(args, **options):
    """Compare the kernels with the reference."""
    assert_near(results(args, **options), expected(args, **options))


def assert_near(found, wanted):
    (out, lse), (want, want_lse) = found, wanted
    assert np.linalg.norm(out - want) <= 3e-3 * np.linalg.norm(want)
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param({}, {}, marks=pytest.mark.whole),
        (
            {"page": 64, "head_dim": 128, "heads": (3, 1)},
            {"logits_soft_cap": 2.0, "sinks": on_device(np.linspace(-1, 1, 3), "float32")},
        ),
        (
            {"page": 8, "window": 40},
            {"sliding_window": 40, "k_scale": 0.5, "v_scale": on_device([2.0, 0.5], "float32")},
        ),
        pytest.param(
            {"cache": "float8_e4m3fn"},
            {"k_scale": 0.5, "sinks": on_device(np.linspace(-1, 1, 4), "float32")},
            marks=REPEATED,
        ),
        pytest.param(
            {"cache": "int8", "page": 8, "head_dim": 128, "window": 40},
            {"sliding_window": 40, "k_scale": 0.02},
            marks=REPEATED,
        ),
        pytest.param(
            {"head_dim": 256, "heads": (8, 1)},
            {"logits_soft_cap": 2.0, "sinks": on_device(np.linspace(-1, 1, 8), "float32")},
            marks=REPEATED,
        ),
        ({"head_dim": 192, "heads": (5, 1), "page": 8, "window": 40}, {"sliding_window": 40, "v_scale": 0.5}),
        pytest.param(
            {"head_dim": 96, "heads": (6, 2), "page": 64},
            {"logits_soft_cap": 2.0, "sinks": on_device(np.linspace(-1, 1, 6), "float32")},
            marks=REPEATED,
        ),
        pytest.param(
            {"head_dim": 80, "heads": (2, 2), "page": 8, "window": 40},
            {"sliding_window": 40, "k_scale": 0.5},
            marks=REPEATED,
        ),
        ({"head_dim": 16, "heads": (7, 1)}, {}),
        ({"cache": "int8", "head_dim": 256, "heads": (4, 1)}, {"k_scale": 0.02, "sinks": jnp.linspace(-1, 1, 4)}),
        ({"cache": "float8_e4m3fn", "head_dim": 112, "page": 8, "window": 40}, {"sliding_window": 40, "v_scale": 0.5}),
    ],
)
def test_decode_of_all_lengths_is_right_and_unused_values_never_matter(shape, options):
    lengths = [0, 1, 15, 16, 17, 64, 65, 200]
    check(poisoned(lengths, [1] * 8, padding=0, **shape), **options)


# Shapes and options of two tests, which share a program.
SHARED_LATENT = {"head_dim": 192, "kinds": 1, "heads": (4, 1)}, {"value_dim": 128}


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("queries", "shape", "options"),
    [
        ([0, 1, 1], {}, {}),
        ([0, 70, 3], {}, {"logits_soft_cap": 0.5}),
        ([0, 1, 3], SHARED_LATENT[0], SHARED_LATENT[1] | {"k_scale": ones(1)}),
    ],
    ids=["decode", "prefill", "latent"],
)
def test_sinks_far_from_the_logits_leave_the_log_sum_exp_finite(queries, shape, options):
    """Relative to the largest logit of the keys, the weight of a sink of 200 is infinite."""
    sinks = jnp.asarray([1e4, -jnp.inf, -1e4, 200])
    args = poisoned([0, 90, 200], queries, padding=0, **shape)
    found = results(args, sinks=sinks, **options)
    assert np.isfinite(found[1]).all()
    assert_near(found, expected(args, sinks=sinks, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("lengths", "queries", "shape", "options"),
    [
        ([9, 90], [1, 70], {}, {"k_scale": jnp.asarray([0, 0.5])}),
        (
            [0, 9, 200],
            [0, 1, 3],
            SHARED_LATENT[0],
            SHARED_LATENT[1] | {"k_scale": zeros(1), "sinks": on_device([-np.inf, -1, 0, 1], "float32")},
        ),
    ],
    ids=["decode and prefill", "latent"],
)
def test_a_scale_of_zero_makes_all_logits_zero(lengths, queries, shape, options):
    """The scale of a KV head whose keys are all zeros; hidden keys stay hidden."""
    args = poisoned(lengths, queries, padding=0, **shape)
    (out, lse), (wanted, wanted_lse) = results(args, **options), expected(args, **options)
    np.testing.assert_allclose(out, wanted, atol=0.01)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.sampled(by=lambda group, head_dim: {head_dim, f"{group % 2}"})
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("head_dim", [96, 256])
def test_any_number_of_query_heads_shares_a_kv_head(group, head_dim):
    """With one and with several tokens of a sequence in decode."""
    shape = {"heads": (2 * group, 2), "head_dim": head_dim}
    check(poisoned([70, 9], [1, 1], padding=1, **shape))
    check(poisoned([70, 9], [2, 1], padding=0, **shape))


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param({"heads": (16, 1)}, {}, marks=pytest.mark.whole),
        (
            {"heads": (72, 1), "page": 8, "window": 70},
            {
                "sliding_window": 70,
                "k_scale": 0.5,
                "logits_soft_cap": 2.0,
                "sinks": on_device(np.linspace(-1, 1, 72), "float32"),
            },
        ),
    ],
)
def test_latent_attention_of_all_lengths_is_right_and_unused_values_never_matter(shape, options):
    """With 72 heads, two blocks of threads share a token."""
    lengths = [0, 1, 15, 16, 17, 64, 65, 200]
    args = poisoned(lengths, [1] * 8, padding=0, head_dim=192, kinds=1, **shape)
    check(args, value_dim=128, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_latent_attention_of_several_tokens_of_a_sequence():
    args = poisoned([200, 64, 10, 0, 129], [5, 0, 3, 0, 20], heads=(20, 1), page=64, head_dim=192, kinds=1)
    check(args, value_dim=128)
    plan = plan_of(args)
    own = schedule.token_schedule(plan.arrays.offsets, plan.arrays.lengths, len(args[0]), 1, None)
    jax.tree.map(np.testing.assert_array_equal, (plan.arrays.token_tiles, plan.arrays.token_programs), tuple(own))


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_latent_attention_to_a_cache_of_8_bits():
    """Without spare pages, the copy has the whole cache. The schedule is that of a plan."""
    args = poisoned([200, 64, 10, 1], [5, 0, 3, 1], heads=(4, 1), page=64, head_dim=192, kinds=1, cache="int8")
    check(args, value_dim=128, k_scale=0.02, plan=plan_of(args))


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("cache", "queries", "spare_pages", "head_dim"),
    [
        ("float8_e4m3fn", (1, 0, 40, 7), 40, 64),
        pytest.param("int8", (1, 0, 40, 7), 0, 64, marks=REPEATED),
        pytest.param("int8", (3, 2, 1, 2), 0, 64, marks=REPEATED),
        ("int8", (1, 0, 40, 7), 0, 256),
        ("float8_e4m3fn", (1, 0, 40, 7), 0, 80),
    ],
)
def test_decode_and_prefill_share_a_batch_with_a_cache_of_8_bits(cache, queries, spare_pages, head_dim):
    """The copy for prefill has the pages of the table, in its order, if the cache has more; otherwise all pages."""
    window = 20 if spare_pages else None
    args = poisoned([3, 30, 90, 15], queries, window=window, cache=cache, head_dim=head_dim)
    args = args[0], jnp.pad(args[1], ((0, spare_pages), *[(0, 0)] * 4)), *args[2:]
    scales = {"k_scale": 0.02, "v_scale": jnp.array([0.5, 2.0])}
    check(args, sliding_window=window, sinks=jnp.linspace(-1, 1, 4), **scales)


@pytest.mark.slow
def test_latent_attention_has_no_races(monkeypatch):
    """With tiles of whole rows: two blocks of threads with items of none, one and several blocks of keys."""
    simulate_hopper(monkeypatch)
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(MosaicGpu, "interpret", mosaic_gpu.InterpretGPUParams(detect_races=True))
    args = poisoned([200, 1, 0, 65], [1] * 4, heads=(128, 1), padding=0, head_dim=192, kinds=1)
    check(args, value_dim=128)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_tokens_that_were_quantised_into_the_cache_are_attended_to():
    """The whole prompt is appended, and its last token attends: near to attention without a cache."""
    count, kv_heads, head_dim = 20, 2, 64
    q, k, v = (jax.random.normal(jax.random.key(i), (count, kv_heads, head_dim), jnp.bfloat16) for i in range(3))
    cache, table = jnp.full((3, 8, kv_heads, 2, head_dim), 99, jnp.int8), jnp.array([[2, 0, 1]])
    scales = {name: jnp.abs(x).max((0, 2)) / 127 for name, x in (("k_scale", k), ("v_scale", v))}
    cache = append_to_pages(cache, k, v, table, jnp.array([0, count]), jnp.array([count]), **scales)
    out, _ = results((q[-1:], cache, table, jnp.array([0, 1]), jnp.array([count])), **scales)
    wide = (x.astype(jnp.float32)[None] for x in (q[-1:], k, v))
    want = np.asarray(jax.nn.dot_product_attention(*wide)[0])
    assert np.linalg.norm(out - want) <= 0.02 * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("queries", "window", "head_dim", "dtype"),
    [
        pytest.param((1, 0, 40, 1, 7, 20), None, 64, "bfloat16", marks=pytest.mark.whole),
        pytest.param((1, 0, 40, 1, 7, 20), 20, 64, "bfloat16", marks=REPEATED),
        pytest.param((3, 2, 1, 4, 3, 3), None, 64, "bfloat16", marks=pytest.mark.whole),
        ((0, 2, 0, 1, 1, 0), None, 64, "bfloat16"),
        ((1, 0, 40, 1, 7, 20), None, 256, "float16"),
        pytest.param((3, 2, 1, 4, 3, 3), None, 256, "bfloat16", marks=pytest.mark.whole),
        ((1, 0, 40, 1, 7, 20), 20, 112, "bfloat16"),
        pytest.param((3, 2, 1, 4, 3, 3), 20, 80, "bfloat16", marks=pytest.mark.whole),
    ],
)
def test_decode_and_prefill_share_a_batch(queries, window, head_dim, dtype):
    args = poisoned([1, 30, 90, 129, 15, 64], queries, window=window, head_dim=head_dim, cache=dtype)
    check(args, sliding_window=window, sinks=jnp.linspace(-1, 1, 4))


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_a_plan_changes_no_result():
    args = poisoned([1, 30, 90, 129, 15, 64], (1, 0, 40, 1, 7, 20), window=20, head_dim=112)
    options = {"sliding_window": 20, "sinks": jnp.linspace(-1, 1, 4)}
    found = results(args, **options)  # by the program of the test before
    planned = results(args, plan=plan_of(args, sliding_window=20), **options)
    jax.tree.map(np.testing.assert_array_equal, planned, found)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_indices_outside_of_the_cache_change_no_other_sequence():
    q, pages, table, offsets, lengths = poisoned([70, 20, 40], [1, 1, 1], padding=0)
    found = results((q, pages, table, offsets, lengths))
    wrong = table.at[1, 0].set(-5)
    args = q, pages, wrong, offsets.at[3].set(10**6), lengths.at[2].set(10**6)
    out, lse = results(args)
    np.testing.assert_array_equal(out[0], found[0][0])
    np.testing.assert_array_equal(lse[0], found[1][0])
    assert not out[1:].any()  # the third sequence reaches beyond its pages
    assert np.isneginf(lse[1:]).all()
    assert not expected(args)[0][1:].any()


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_heads_of_one_device_under_shard_map():
    """On a mesh of one device, because the interpreter has one state for all devices."""
    args = poisoned([1, 30, 70], [1, 3, 1], padding=0)
    _, call = prepared(args, {})
    specs = P(None, "model"), P(None, None, "model"), P(), P(), P()
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))

    def run(*args):
        return MosaicGpu().forward(call, *args, None, None, None, None, params=SMALL)[0]

    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[:1] * 2))
    assert_near([np.asarray(x, np.float32) for x in sharded(*args)], expected(args))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "head_dim"),
    [
        pytest.param("bfloat16", 64, marks=pytest.mark.whole),
        pytest.param("int8", 64, marks=pytest.mark.whole),
        ("int8", 80),
        ("float8_e4m3fn", 16),
    ],
)
def test_kernels_that_write_to_one_output_are_apart_from_slices(cache, head_dim):
    """With few columns, the numbers of one token do not divide evenly over the threads that widen them."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    args = poisoned([1, 30, 70], [1, 3, 1], cache=cache, head_dim=head_dim)
    call = PagedAttention().describe(*args, *[None] * 4, softmax_scale=64**-0.5)

    def run(*args):
        return MosaicGpu().forward(call, *args, None, None, None, None, params=SMALL)[0]

    assert_in_place_calls_are_apart(jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("lengths", "queries", "shape", "options"),
    [
        pytest.param([300, 70], (170, 1), {"page": 64, "head_dim": 128, "heads": (3, 1)}, {}, marks=REPEATED),
        pytest.param(
            [200, 90],
            (90, 70),
            {"page": 8, "heads": (8, 1), "window": 100},
            {"sliding_window": 100, "v_scale": 0.5},
            marks=REPEATED,
        ),
        ([300, 70], (170, 1), {"page": 64, "head_dim": 256, "heads": (4, 1)}, {"logits_soft_cap": 2.0}),
        (
            [200, 90],
            (90, 70),
            {"head_dim": 256, "heads": (2, 1), "window": 100},
            {"sliding_window": 100, "v_scale": 0.5},
        ),
        (
            [300, 70],
            (170, 1),
            {"page": 8, "head_dim": 96, "heads": (2, 2)},
            {"sinks": on_device(np.linspace(-1, 1, 2), "float32")},
        ),
        pytest.param([200, 90], (90, 70), {"page": 64, "head_dim": 192, "heads": (3, 1)}, {}, marks=REPEATED),
    ],
)
def test_chunks_of_several_tiles_and_blocks_are_right(lengths, queries, shape, options):
    check(poisoned(lengths, queries, **shape), **options)


def schedules_of(queries, lengths):
    """Return the schedules for 8 heads of 2 KV heads, and the number of tokens with some padding."""
    tokens = sum(queries) + 4
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(queries)]), jnp.int32)
    run = jax.jit(lambda offsets, lengths: schedule.schedules(offsets, lengths, tokens, 8, 2, None))
    return run(offsets, jnp.asarray(lengths, jnp.int32)), tokens


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 4, 264])
@pytest.mark.parametrize("queries", [(1,) * 6, (3, 0, 40, 1, 200, 2)])
def test_each_token_is_in_one_tile_and_each_block_in_one_program(monkeypatch, programs, queries):
    monkeypatch.setattr(schedule, "PROGRAMS", programs)
    (short, prefill), tokens = schedules_of(queries, np.array([1, 0, 640, 63, 64 + 200, 2]))
    seen, tiles = np.zeros(tokens, int), np.asarray(short.tiles)
    for _, token, count, *_ in (*tiles, *np.asarray(prefill.tiles)[: int(prefill.ends[-1])]):
        seen[token : token + count] += 1
    np.testing.assert_array_equal(seen, 1)
    work = np.zeros((len(tiles), 2), int)
    for first, begin, last, end, _ in np.asarray(short.programs):
        for item in range(first, last + 1):
            low, high = begin if item == first else 0, end if item == last else blocks_of(tiles[item // 2])
            work[item // 2, item % 2] += high - low
    assert work.tolist() == [[blocks_of(tile)] * 2 for tile in tiles]


def blocks_of(tile):
    return max(tile[schedule.Tile.END] - tile[schedule.Tile.FIRST], 1) * (tile[schedule.Tile.COUNT] > 0)


@pytest.mark.slow
def test_prefill_tiles_with_the_most_keys_come_first():
    (_, prefill), _ = schedules_of((3, 0, 40, 1, 200, 2), [1, 0, 640, 63, 264, 2])
    tiles = np.asarray(prefill.tiles)
    stops = (tiles[:, schedule.PrefillTile.POSITION] + tiles[:, schedule.PrefillTile.COUNT]).clip(0)
    used = int(prefill.ends[-1])
    assert stops[:used].tolist() == sorted(stops[:used], reverse=True)
    assert stops[0] == 640
    assert not tiles[used:, schedule.PrefillTile.COUNT].any()
    assert tiles[:used, schedule.PrefillTile.COUNT].all()


@pytest.mark.slow
@pytest.mark.parametrize("queries", [(1,) * 6, (3, 0, 40, 1, 200, 2), (2, 40, 40, 40, 40, 40)])
def test_short_batches_have_the_schedule_of_long_ones(monkeypatch, queries):
    """Long vectors are summed and sorted by other means."""
    lengths = [1, 0, 640, 63, 264, 2]
    found, _ = schedules_of(queries, lengths)
    monkeypatch.setattr(schedule, "SHORT", 0)
    jax.tree.map(np.testing.assert_array_equal, found, schedules_of(queries, lengths)[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_fingerprint": "gpu:nvidia_a100"}, "needs a Hopper GPU"),
        ({"dtype": "float32", "cache_dtype": "float32"}, "q has dtype float32"),
        (
            {"cache_dtype": "int8", "q": (65, 32, 128), "pages": (99999, 16, 8, 2, 128), "table": (64, 4096)},
            "copies the",
        ),
        ({"pages": (16384, 16, 8, 1, 128), "value_dim": 64}, "takes one KV head"),
        ({**LATENT, "q": (64, 256, 576)}, "up to 128 query heads, got 1 and 256"),
        ({**LATENT, "value_dim": 576}, "value_dim=576 with head_dim=576"),
        ({"q": (64, 32, 72), "pages": (16384, 16, 8, 2, 72)}, "multiple of 16 up to 256, got 72"),
        ({"q": (64, 32, 272), "pages": (16384, 16, 8, 2, 272)}, "multiple of 16 up to 256, got 272"),
        ({"pages": (16384, 48, 8, 2, 128)}, "pages of 8, 16, 32 or a multiple of 64 tokens, got 48"),
        ({"q": (64, 1024, 128)}, "up to 64 query heads per KV head, got 128"),
        ({"pages": (2**27, 16, 8, 2, 128)}, "counts tokens of the cache"),
        ({"table": (64, 0)}, "sizes that are known and not 0"),
    ],
)
def test_calls_that_the_kernels_do_not_support_are_refused_with_a_reason(changes, words):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    assert words in MosaicGpu().unsupported(dataclasses.replace(CALL, **changes))


@pytest.mark.parametrize("heads", [(32, 8), (64, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [64, 200, 5000])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_heuristic_and_the_space_fit_in_shared_memory(heads, tokens, head_dim):
    pages = (*CALL.pages[:2], heads[1], 2, head_dim)
    call, own = dataclasses.replace(CALL, q=(tokens, heads[0], head_dim), pages=pages), MosaicGpu()
    space = own.space(call)
    assert own.heuristic(call) in space
    assert [params for params in space if own.params_fault(call, params) is not None] == []
    assert len(space) == len(set(space))
    assert len(space) > 1 or (head_dim, heads) == (256, (64, 1))


@pytest.mark.parametrize(
    ("cache", "page_size", "head_dim", "stages"),
    [
        ("bfloat16", 16, 128, 2),
        ("bfloat16", 64, 128, 3),
        ("bfloat16", 16, 64, 4),
        ("int8", 16, 128, 3),
        ("float8_e4m3fn", 64, 128, 3),
        ("int8", 16, 64, 6),
    ],
)
def test_the_heuristic_has_the_fastest_measured_number_of_stages(cache, page_size, head_dim, stages):
    sizes = {"q": (64, 32, head_dim), "pages": (16384, page_size, 8, 2, head_dim), "cache_dtype": cache}
    assert MosaicGpu().heuristic(dataclasses.replace(CALL, **sizes)).stages == stages


@pytest.mark.parametrize(
    ("cache", "head_dim", "stages", "shares"),
    [
        ("bfloat16", 96, 2, 1),
        ("bfloat16", 128, 2, 1),
        ("bfloat16", 192, 2, 1),
        ("bfloat16", 256, 3, 2),
        ("int8", 128, 3, 1),
        ("int8", 256, 6, 2),
    ],
)
def test_a_program_takes_two_shares_if_it_has_a_multiprocessor_alone(cache, head_dim, stages, shares):
    """It has as many stages as fit in shared memory then."""
    sizes = {"q": (64, 40, head_dim), "pages": (16384, 16, 8, 2, head_dim), "cache_dtype": cache}
    call = dataclasses.replace(CALL, **sizes)
    params = MosaicGpu().heuristic(call)
    plan = launch_plan(call, params, 1)
    assert (params.stages, plan.shares, plan.programs) == (stages, shares, 264 // shares)


def test_latent_attention_has_one_configuration():
    call, own = dataclasses.replace(CALL, **LATENT), MosaicGpu()
    assert own.space(call) == [own.heuristic(call)]
    assert own.params_fault(call, own.heuristic(call)) is None
    assert "with value_dim, it runs with stages=2" in own.params_fault(call, MosaicGpuParams(stages=3))


def test_parameters_beyond_shared_memory_are_refused():
    assert "bytes of shared memory" in MosaicGpu().params_fault(CALL, MosaicGpuParams(stages=9))
