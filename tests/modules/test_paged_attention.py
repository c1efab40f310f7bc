# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` for its users: values that must not matter, keys, refused arguments, and other call forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device, ones
from tests.kernels.meshes import bytes_in_collectives, compiled, mesh_of
from tests.kernels.paged_attention_cases import DECODE, MIXED, PAGE, batch_of, plan_of

from ejkernel.kernels.paged_attention.xla import XlaParams
from ejkernel.modules import (
    PagedAttention,
    PagedAttentionConfig,
    append_to_pages,
    paged_attention,
    paged_plan,
    ragged_paged_attention,
)
from ejkernel.ops import ArgumentError, CallError, ConfigSelectorChain, Invocation, UnsupportedError
from ejkernel.ops.autotuner.bench.residuals import partners_in_force

SEQUENCES, TOKENS, COLUMNS, HEADS, KV_HEADS, HEAD_DIM = 6, 24, 5, 4, 2, 8
# None, one, whole pages, and one less or more than whole pages.
LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, COLUMNS * PAGE - 1, COLUMNS * PAGE)


def random_batch(rng):
    """Return a batch of random lengths, with NaN wherever no sequence has a key, and its keys and values."""
    lengths = rng.choice([*LENGTHS, *rng.integers(0, COLUMNS * PAGE + 1, 4)], SEQUENCES)
    queries = np.minimum(rng.choice([0, 1, 1, 2, 5, PAGE], SEQUENCES), lengths)
    queries = np.minimum(queries, np.maximum(TOKENS - np.cumsum(queries) + queries, 0))
    pages = np.full((SEQUENCES * COLUMNS + 4, PAGE, KV_HEADS, 2, HEAD_DIM), np.nan, np.float32)
    table = rng.permutation(len(pages))[: SEQUENCES * COLUMNS].reshape(SEQUENCES, COLUMNS)
    cached = [rng.standard_normal((length, KV_HEADS, 2, HEAD_DIM)).astype(np.float32) for length in lengths]
    for row, own in zip(table, cached, strict=True):
        for position, both in enumerate(own):
            pages[row[position // PAGE], position % PAGE] = both
    q = np.full((TOKENS, HEADS, HEAD_DIM), np.nan, np.float32)
    q[: queries.sum()] = rng.standard_normal((queries.sum(), HEADS, HEAD_DIM))
    offsets = np.concatenate([[0], np.cumsum(queries)])
    return (q, pages, *(np.asarray(x, np.int32) for x in (table, offsets, lengths))), cached


def by_numpy(q, offsets, cached, window=None):
    out = np.zeros(q.shape)
    for begin, end, own in zip(offsets[:-1], offsets[1:], cached, strict=True):
        for token in range(begin, end):
            position = len(own) - (end - token)
            first = 0 if window is None else max(position - window, 0)
            key, value = (np.repeat(own[first : position + 1, :, n], HEADS // KV_HEADS, 1) for n in (0, 1))
            weights = np.einsum("hd,shd->hs", q[token], key) * HEAD_DIM**-0.5
            weights = np.exp(weights - weights.max(1, keepdims=True))
            out[token] = np.einsum("hs,shd->hd", weights / weights.sum(1, keepdims=True), value)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("window", "block_pages", "tiles"), [(None, 2, 1), (3, 1, 4), (None, 8, 2)])
def test_batches_of_all_lengths_are_right_and_unused_values_never_matter(window, block_pages, tiles):
    """Unused slots, pages of no sequence and queries of padding are NaN."""
    cfg = PagedAttentionConfig(implementation="xla", fwd=XlaParams(block_pages=block_pages, tiles=tiles))
    run = jax.jit(lambda *args: paged_attention(*args, sliding_window=window, cfg=cfg))
    rng = np.random.default_rng(block_pages)
    for _ in range(12):
        args, cached = random_batch(rng)
        if window is not None:  # pages that no token sees any more may be freed
            _, _, table, offsets, lengths = args
            for row, first in zip(table, lengths - np.diff(offsets) - window, strict=True):
                row[: max(first, 0) // PAGE] = -1
        np.testing.assert_allclose(run(*args), by_numpy(args[0], args[3], cached, window), atol=2e-6)


@pytest.mark.slow
def test_indices_that_lead_out_of_the_arrays_change_no_other_sequence():
    args, _ = random_batch(np.random.default_rng(3))
    q, pages, table, _, lengths = args
    lengths[:], offsets = [3, 4, 99, 8, -5, 6], np.array([0, 1, 2, 3, 3, 4, 4 + 10**6], np.int32)
    table[2] = [-(2**31), 10**9, -1, 2**31 - 1, len(pages)]
    q, pages = np.nan_to_num(q), np.nan_to_num(pages)
    run = jax.jit(paged_attention)
    out = np.asarray(run(q, pages, table, offsets, lengths))
    assert np.isfinite(out).all()
    assert not out[2].any()  # all its pages are outside of the cache
    table[2], lengths[2] = 0, 1
    np.testing.assert_array_equal(out[:2], run(q, pages, table, offsets, lengths)[:2])


@pytest.mark.slow
def test_a_plan_serves_every_window_but_not_a_larger_one_than_its_own():
    args = batch_of(MIXED)
    plan = plan_of(args)
    want = paged_attention(*args, sliding_window=3)
    np.testing.assert_array_equal(paged_attention(*args, sliding_window=3, plan=plan), want)
    plan = plan_of(args, sliding_window=4)
    np.testing.assert_array_equal(paged_attention(*args, sliding_window=3, plan=plan), want)
    with pytest.raises(ArgumentError, match=r"plan must not leave out pages that sliding_window=None sees; got .* 4"):
        paged_attention(*args, plan=plan)
    with pytest.raises(ArgumentError, match="plan must be of this batch, but its heads / kv_heads is 4, not 2"):
        paged_attention(*args, plan=paged_plan(*args[3:], heads=8, kv_heads=2, page_size=4))


@pytest.mark.slow
def test_a_plan_without_the_table_leaves_the_schedule_to_the_layers():
    args = batch_of(MIXED)
    plan = paged_plan(*args[3:], heads=4, kv_heads=2, page_size=4, sliding_window=4)
    assert plan.arrays is None
    run = jax.jit(lambda args, plan: paged_attention(*args, sliding_window=3, plan=plan))
    np.testing.assert_array_equal(run(args, plan), paged_attention(*args, sliding_window=3))
    with pytest.raises(ArgumentError, match=r"tokens, pages and page_table belong together; pages and page_table"):
        paged_plan(*args[3:], heads=4, kv_heads=2, page_size=4, tokens=8)


@pytest.mark.slow
def test_a_plan_orders_decodes_before_prefills_and_long_sequences_first():
    table, *batch = jnp.zeros((5, 250), int), jnp.array([0, 1, 1, 2, 302, 304]), jnp.array([4, 9, 50, 400, 1000])
    plan = paged_plan(*batch, heads=8, kv_heads=4, page_size=4, tokens=304, pages=1, page_table=table)
    assert plan.arrays.order.tolist() == [2, 0, 4, 3, 1]
    assert plan.arrays.decodes.tolist() == [2]
    assert plan.shape.tile_queries == 64
    assert plan.arrays.tiles.tolist() == [0, 0, 0, 1, 6, 6]
    assert plan.arrays.end_pages.tolist() == [1, 0, 13, 100, 250]


@pytest.mark.slow
def test_differentiation_is_refused():
    q, *rest = batch_of(DECODE)
    for transform in (jax.grad, jax.jacfwd):
        with pytest.raises(UnsupportedError, match=r"paged_attention has no gradient: .* use flash_attention"):
            transform(lambda q: paged_attention(q, *rest).sum())(q)


def test_tuning_looks_for_no_backward():
    kernel = PagedAttention()
    args, options = kernel.prepare(*batch_of(DECODE))
    assert not partners_in_force(ConfigSelectorChain(), Invocation(kernel=kernel, args=args, kwargs=options), kernel)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_heads_over_a_mesh_axis_need_no_communication(mode):
    args = batch_of(MIXED, heads=(8, 4))
    specs = [P(None, "model"), P(None, None, "model"), P(), P(), P()]

    def planned(*args):
        return paged_attention(*args, plan=plan_of(args))

    for run in (paged_attention, planned):
        program, out = compiled(run, args, specs, mesh_of(mode))
        np.testing.assert_allclose(out, paged_attention(*args), atol=1e-6)
        assert not bytes_in_collectives(program)


def test_batches_of_one_power_of_two_share_a_key():
    kernel = PagedAttention()

    def key(sequences, tokens, columns, **options):
        cache = jax.ShapeDtypeStruct((700, 16, 2, 2, 64), "bfloat16")
        like = jax.ShapeDtypeStruct
        integers = (like(shape, "int32") for shape in ((sequences, columns), (sequences + 1,), (sequences,)))
        args, kwargs = kernel.prepare(like((tokens, 4, 64), "bfloat16"), cache, *integers, **options)
        return Invocation(kernel=kernel, args=args, kwargs=kwargs).call_key

    assert key(9, 130, 33) == key(16, 256, 64) != key(17, 256, 64)
    assert key(9, 130, 33) != key(9, 130, 33, sliding_window=5)


@pytest.mark.parametrize(("sequences", "tokens"), [(8, 8), (8, 100), (3, 1), (1, 64)])
def test_example_batches_fit_the_call(sequences, tokens):
    """They are measured: a batch beyond the table, or without keys, would measure other work."""
    kernel, like = PagedAttention(), jax.ShapeDtypeStruct
    integers = (like(shape, "int32") for shape in ((sequences, 8), (sequences + 1,), (sequences,)))
    args, options = kernel.prepare(like((tokens, 4, 8), "float32"), like((16, 16, 2, 2, 8), "int8"), *integers)
    inv = Invocation(kernel=kernel, args=args, kwargs=options)
    draws = kernel.example_draws(inv, np.random.default_rng(0))
    assert set(draws) == {"uniform", "long-tailed", "mixed"}
    for drawn, _ in draws.values():
        table, offsets, lengths = map(np.asarray, drawn[2:5])
        queries = np.diff(offsets)
        assert [tuple(x.shape) for x in drawn[:5]] == [tuple(x.shape) for x in args[:5]]
        assert (queries >= 0).all()
        assert 0 < queries.sum() <= tokens
        assert (queries <= lengths).all()
        assert lengths.max() <= 8 * 16
        assert table.max() < 16


def draws_of(sequences, tokens, columns=8):
    kernel, like = PagedAttention(), jax.ShapeDtypeStruct
    integers = (like(shape, "int32") for shape in ((sequences, columns), (sequences + 1,), (sequences,)))
    args, options = kernel.prepare(like((tokens, 4, 8), "float32"), like((16, 16, 2, 2, 8), "float32"), *integers)
    inv = Invocation(kernel=kernel, args=args, kwargs=options)
    draws = kernel.example_draws(inv, np.random.default_rng(0))
    return {name: [np.asarray(x).tolist() for x in drawn[3:5]] for name, (drawn, _) in draws.items()}


def test_recorded_batches_are_measured_in_the_calls_that_they_round_up_to(tmp_path, monkeypatch):
    (tmp_path / "batches.jsonl").write_text(
        '{"query_lengths": [1, 1, 1], "kv_lengths": [20, 7, 128]}\n\n'
        '{"query_lengths": [9, 1, 1], "kv_lengths": [9, 1, 3]}\n'
        '{"query_lengths": [1, 0, 1], "kv_lengths": [20, 7, 99]}\n{"query_lengths": [1], "kv_lengths": [900]}\n'
    )
    monkeypatch.setenv("EJKERNEL_BATCHES", str(tmp_path / "batches.jsonl"))
    assert draws_of(4, 4) == {"recorded 1 of 1": [[0, 1, 2, 3, 3], [20, 7, 128, 0]]}
    assert draws_of(4, 16) == {"recorded 1 of 1": [[0, 9, 10, 11, 11], [9, 1, 3, 0]]}
    assert draws_of(4, 2) == {"recorded 1 of 1": [[0, 1, 1, 2, 2], [20, 7, 99, 0]]}
    assert set(draws_of(1, 1)) == {"uniform", "long-tailed", "mixed"}  # 900 keys do not fit
    assert set(draws_of(64, 64)) == {"uniform", "long-tailed", "mixed"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: .*No such file"),
        ("{", r"line 1 must be a batch such as \{"),
        ('{"query_lengths": [1]}', r"line 1 must be a batch .* got \{\"query_lengths\": \[1\]\}"),
        ('\n{"query_lengths": [1], "kv_lengths": [1, 2]}', "line 2 must .* with as many integers"),
        ('{"query_lengths": [-1], "kv_lengths": [1]}', "with as many integers of at least 0"),
        ('{"query_lengths": [true], "kv_lengths": [1]}', "with as many integers"),
        ('{"query_lengths": [3], "kv_lengths": [2]}', "kv_lengths count the new tokens as well"),
        ('{"query_lengths": [0], "kv_lengths": [2]}', "of which there is at least one"),
    ],
)
def test_a_wrong_file_of_recorded_batches_is_an_error_with_the_line(tmp_path, monkeypatch, text, words):
    path = tmp_path / "batches.jsonl"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("EJKERNEL_BATCHES", str(path))
    with pytest.raises(ArgumentError, match=f"EJKERNEL_BATCHES: .*{words}"):
        draws_of(4, 4)


FORMS = {
    "alternating heads": lambda pages: pages.reshape(*pages.shape[:2], -1, pages.shape[-1]),
    "packed": lambda pages: pages.reshape(*pages.shape[:2], 1, 4, pages.shape[-1]),
    "a pair": lambda pages: (pages[..., 0, :], pages[..., 1, :]),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param(n, marks=[pytest.mark.whole] * (n == "packed")) for n in FORMS])
def test_the_call_of_other_libraries_writes_and_attends(form):
    q, pages, table, offsets, lengths = batch_of(MIXED, head_dim=16)
    rng = np.random.default_rng(1)
    new = [on_device(rng.standard_normal((len(q), 2, 12)), jnp.float32) for _ in range(2)]
    wide = [jnp.pad(x, ((0, 0), (0, 0), (0, 4))) for x in new]  # its cache may have padded heads
    count = 4
    offsets, lengths = offsets.at[count + 1 :].set(-1), lengths.at[count:].set(99)
    out, cache = ragged_paged_attention(
        q[..., :12],
        *new,
        FORMS[form](pages),
        lengths,
        table.reshape(-1),
        offsets,
        jnp.array([0, 0, count]),
        sm_scale=0.5,
        q_scale=0.5,
        sliding_window=6,
        soft_cap=2.0,
    )
    few = table[:count], offsets[: count + 1], lengths[:count]
    written = append_to_pages(pages, *wide, *few)
    query = jnp.pad(q[..., :12], ((0, 0), (0, 0), (0, 4)))
    want = paged_attention(query, written, *few, softmax_scale=0.25, sliding_window=5, logits_soft_cap=2.0)
    jax.tree.map(np.testing.assert_array_equal, cache, FORMS[form](written))
    np.testing.assert_allclose(out, want[..., :12], atol=1e-6)


@pytest.mark.slow
def test_the_call_of_other_libraries_takes_numpy_arrays_inside_jit():
    q, pages, *batch = batch_of(MIXED, head_dim=16)
    table, offsets, lengths = map(np.asarray, batch)
    own = {"sm_scale": 0.25, "update_kv_cache": False}

    def run(count):
        cache = FORMS["alternating heads"](pages)
        return ragged_paged_attention(q, None, None, cache, lengths, table, offsets, count, **own)[0]

    want = paged_attention(q, pages, *batch, softmax_scale=0.25)
    np.testing.assert_allclose(jax.jit(run)(jnp.array([len(lengths)])), want, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": ones((2, 4, 8, 8))}, r"q must be an array \[tokens, heads, head_dim\] .* got float32\[2, 4, 8, 8\]"),
        ({"q": ones((4, 3, 8))}, "q must have a multiple of the cache's heads, got 3 and 2"),
        ({"q": ones((4, 4, 16))}, "kv_pages must have q's head_dim, 16"),
        ({"kv_pages": ones((9, 4, 2, 8))}, r"kv_pages must be an array .* jnp.stack\(\[keys, values\], axis=-2\)"),
        (
            {"kv_pages": ones((9, 0, 2, 2, 8))},
            r"kv_pages must have a page_size .* of at least 1; got float32\[9, 0",
        ),
        ({"q": ones((4, 4, 0)), "kv_pages": ones((9, 4, 2, 2, 0))}, "and a head_dim of at least 1"),
        ({"kv_pages": ones((9, 4, 2, 2, 8), "bfloat16")}, "kv_pages must have q's dtype, float32, or be int8"),
        ({"kv_lengths": ones(6)}, r"kv_lengths must be an integer array \[sequences\]; got float32\[6\]"),
        ({"query_offsets": jnp.arange(6)}, r"query_offsets must be \[sequences \+ 1\] = \(7,\)"),
        ({"sliding_window": (3, 3)}, r"sliding_window must be an int >= 0, or a pair \(left, 0\).* got \(3, 3\)"),
        ({"value_dim": 4}, r"value_dim must be an integer up to head_dim, and needs a cache of keys alone"),
        ({"kv_pages": ones((9, 4, 2, 1, 8))}, "value_dim must be given for a cache without values"),
        ({"k_scale": jnp.ones(3)}, r"k_scale must be a positive number, or .* \[kv_heads\] = \(2,\); got float32\[3\]"),
        ({"k_scale": -1.0}, "k_scale must be a positive number or None, got -1.0"),
        ({"sinks": jnp.ones(2)}, r"sinks must be a floating-point array \[heads\] = \(4,\)"),
        ({"plan": 3}, "plan must be the result of paged_plan, or None; got int"),
        ({"softmax_scale": 0.0}, "softmax_scale must be a positive number or None, got 0.0"),
    ],
)
def test_a_wrong_argument_is_named(changes, words):
    names = ("q", "kv_pages", "page_table", "query_offsets", "kv_lengths")
    given = dict(zip(names, batch_of(DECODE), strict=True))
    with pytest.raises(ArgumentError, match=words):
        paged_attention(**given | changes)


def test_names_of_other_libraries_are_explained():
    with pytest.raises(CallError, match="sliding_window= is the number of earlier keys"):
        paged_attention(*batch_of(DECODE), window_size=3)


@pytest.mark.parametrize("kind", [np.array, jnp.array])
@pytest.mark.parametrize(
    ("offsets", "lengths", "words"),
    [
        ([1, 2, 3], [4, 4], r"query_offsets must start at 0 and never fall: .*; got \[1, 2, 3\]"),
        ([0, 3, 1], [4, 4], r"query_offsets must start at 0 and never fall: .*; got \[0, 3, 1\]"),
        ([0, 1, 3], [4, 1], r"kv_lengths must count the new tokens as well: sequence 1 has 2 new tokens, and .* is 1"),
        ([0, 1, 3], [0, 0], r"kv_lengths must count the new tokens as well: sequence 0 has 1 new tokens, and .* is 0"),
        ([0, 1, 9], [4, 8], r"query_offsets must end at the number of new tokens, 3, or before it; got \[0, 1, 9\]"),
    ],
)
def test_values_that_do_not_fit_together_are_named(kind, offsets, lengths, words):
    cache, new, table = jnp.ones((9, 4, 2, 2, 8)), jnp.ones((3, 2, 8)), jnp.zeros((2, 2), int)
    batch = kind(offsets), kind(lengths)
    shape = {"heads": 2, "kv_heads": 2, "page_size": 4, "tokens": 3, "pages": 9, "page_table": table}
    calls = [
        lambda: paged_attention(new, cache, table, *batch),
        lambda: append_to_pages(cache, new, new, table, *batch),
        lambda: paged_plan(*batch, **shape),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match=words):
            call()


@pytest.mark.parametrize("name", ["heads", "page_size", "tokens", "pages"])
def test_sizes_of_a_plan_fit_in_32_bits(name):
    shape = {"heads": 2, "kv_heads": 2, "page_size": 4, "tokens": 2, "pages": 9, "page_table": np.zeros((2, 2), int)}
    with pytest.raises(ArgumentError, match=rf"{name} must be .* 2\*\*31.*, got 4294967296"):
        paged_plan(np.array([0, 1, 2]), np.array([4, 4]), **shape | {name: 2**32})


def test_a_row_of_padding_has_no_keys():
    batch = np.array([0, 1, 2]), np.array([4, 0])
    paged_plan(*batch, heads=2, kv_heads=2, page_size=4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queries": None}, r"queries must be an array \[tokens, heads, head_dim\]; got NoneType\."),
        ({"keys": 3}, r"keys must be an array .*; got int, or pass update_kv_cache=False if the cache has them"),
        ({"kv_lens": [4, 4]}, r"kv_lens must be an integer array \[sequences\]; got list"),
        ({"kv_lens": jnp.array(3)}, r"kv_lens must be an integer array \[sequences\]; got int32\[\]"),
        ({"page_indices": jnp.zeros(3, int)}, r"page_indices must be .* as many pages for each of the 2 kv_lens; got"),
        ({"cu_q_lens": jnp.array([0, 1])}, r"cu_q_lens must be an integer array \[sequences \+ 1\] = \(3,\); got"),
        ({"distribution": jnp.ones(3)}, r"distribution must be an integer array .*; got float32\[3\]"),
        ({"sm_scale": "a"}, "sm_scale must be a positive number or None, got 'a'"),
        ({"q_scale": -1}, "q_scale must be a positive number or None, got -1"),
        ({"attention_sink": jnp.ones(3)}, r"attention_sink must be .* \[heads\] = \(2,\); got float32\[3\]"),
        ({"use_causal_mask": 3}, "use_causal_mask must be True or False, got 3"),
        ({"update_kv_cache": None}, "update_kv_cache must be True or False, got None"),
        ({"sm_scal": 1.0}, "ragged_paged_attention has no argument `sm_scal`; did you mean `sm_scale=`?"),
    ],
)
def test_a_wrong_argument_of_the_ragged_form_is_named(changes, words):
    new = jnp.ones((3, 2, 8))
    given = {"queries": new, "keys": new, "values": new, "kv_cache": jnp.ones((9, 4, 4, 8))}
    given |= {"kv_lens": jnp.array([4, 4]), "page_indices": jnp.zeros(4, int), "cu_q_lens": jnp.array([0, 1, 3])}
    with pytest.raises((ArgumentError, CallError), match=words):
        ragged_paged_attention(**given | {"distribution": jnp.array([0, 0, 2])} | changes)
