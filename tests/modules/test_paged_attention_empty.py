# SPDX-License-Identifier: Apache-2.0
"""Paged attention of batches without sequences, tokens, columns or pages."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import append_to_pages, copy_pages, paged_attention, paged_plan, ragged_paged_attention

SIZES = [
    (sequences, tokens, columns, pages)
    for sequences, tokens, columns, pages in itertools.product((0, 2), (0, 3), (0, 2), (0, 4))
    if not (sequences and tokens and columns and pages)
]
sizes = pytest.mark.parametrize(
    "size", SIZES, ids=lambda size: "sequences {} tokens {} columns {} pages {}".format(*size)
)


def operands(size, head_dim=16, **options):
    """Return the arguments of a call with one token per sequence."""
    sequences, tokens, columns, pages = size
    given = {
        "q": jnp.full((tokens, 4, head_dim), jnp.nan),
        "kv_pages": jnp.ones((pages, 4, 2, 2, head_dim), options.get("dtype", "float32")),
        "page_table": jnp.zeros((sequences, columns), jnp.int32),
        "query_offsets": jnp.minimum(jnp.arange(sequences + 1, dtype=jnp.int32), tokens),
        "kv_lengths": jnp.arange(1, sequences + 1, dtype=jnp.int32),
    }
    return tuple(given.values())


def plan(args, **options):
    q, pages, table, *batch = args
    shape = {"heads": 4, "kv_heads": 2, "page_size": 4, "tokens": len(q), "pages": len(pages)}
    return paged_plan(*batch, **shape, page_table=table, **options)


def eager_and_jitted(function, *args):
    """Return the equal results of both calls."""
    found = function(*args)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(function)(*args), found)
    return found


@pytest.mark.slow
@sizes
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_without_anything_to_attend_to_the_result_is_zero(size, implementation):
    def both(*args):
        own = {"implementation": implementation, "return_lse": True}
        return paged_attention(*args, **own), paged_attention(*args, plan=plan(args), **own)

    args = operands(size)
    for out, lse in eager_and_jitted(both, *args):
        assert out.shape == args[0].shape
        assert not out.any()
        assert (np.asarray(lse) == -np.inf).all()


@pytest.mark.slow
@sizes
@pytest.mark.parametrize("window", [None, 3])
def test_a_plan_has_valid_arrays(size, window):
    args = operands(size)
    found = eager_and_jitted(lambda *args: plan(args, sliding_window=window).arrays, *args)
    sequences, tokens, columns, _ = size
    np.testing.assert_array_equal(found.offsets, np.minimum(np.arange(sequences + 1), tokens))
    assert found.lengths.shape == found.order.shape == found.end_pages.shape == (sequences,)
    assert found.decodes.tolist() == [min(sequences, tokens)]
    if not sequences or not tokens:
        assert found.short_tiles.shape[0] == found.short_programs.shape[0] == found.prefill_tiles.shape[0] == 0
    if not columns:
        assert not found.lengths.any()
    short = paged_plan(*args[3:], heads=4, kv_heads=2, page_size=4, sliding_window=window)
    assert not paged_attention(*args, plan=short, sliding_window=window).any()


@pytest.mark.slow
@sizes
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_without_a_place_to_write_a_cache_stays(size, dtype):
    q, pages, *batch = operands(size, dtype=dtype)
    new = jnp.full((len(q), 2, 16), 5.0)
    want, scales = np.asarray(pages), {"k_scale": 0.1, "v_scale": 0.1}
    written = eager_and_jitted(lambda *args: append_to_pages(jnp.array(pages), new, new, *args, **scales), *batch)
    np.testing.assert_array_equal(written, want)
    np.testing.assert_array_equal(copy_pages(written, jnp.zeros(0, int), jnp.zeros(0, int)), want)


@pytest.mark.slow
@sizes
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("updates", [False, True])
def test_the_call_of_other_libraries_gives_zeros(size, pair, updates):
    q, pages, table, offsets, lengths = operands(size)
    cache = (pages[..., 0, :], pages[..., 1, :]) if pair else pages.reshape(*pages.shape[:2], 4, 16)
    new = jnp.full((len(q), 2, 16), 5.0) if updates else None

    def run(table):
        count = jnp.full(3, len(lengths))
        own = (jax.tree.map(jnp.array, cache), lengths, table, offsets, count)
        return ragged_paged_attention(q, new, new, *own, update_kv_cache=updates)

    for indices in (table, table.reshape(-1)):
        out, found = eager_and_jitted(run, indices)
        assert out.shape == q.shape
        assert not out.any()
        jax.tree.map(np.testing.assert_array_equal, found, cache)


@pytest.mark.slow
def test_a_flat_table_may_have_pages_of_no_sequence():
    none, cache = jnp.zeros(0, int), jnp.ones((4, 4, 4, 16))
    q = jnp.ones((3, 4, 16))
    new = jnp.full((3, 2, 16), 5.0)
    out, found = ragged_paged_attention(
        q, new, new, jnp.array(cache), none, jnp.arange(8), jnp.zeros(1, int), none[:1].sum()[None]
    )
    assert not out.any()
    np.testing.assert_array_equal(found, cache)
