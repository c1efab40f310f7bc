# SPDX-License-Identifier: Apache-2.0
"""The paged cache: writes in place, quantisation, and the pool of pages."""

from __future__ import annotations

import copy
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.arrays import on_device

from ejkernel.modules import OutOfPagesError, PagePool, append_to_pages, copy_pages, paged_attention
from ejkernel.ops.errors import ArgumentError, ArgumentWarning

PAGE = 4


def batch(dtype="float32", pages=20, head_dim=8):
    """Return an empty cache and three sequences with 1, 0 and 6 new tokens of 5, 8 and 7."""
    rng = np.random.default_rng(0)
    k, v = (on_device(rng.standard_normal((8, 2, head_dim)), jnp.float32) for _ in range(2))
    table = on_device(rng.permutation(pages)[:9].reshape(3, 3), jnp.int32)
    cache = jnp.zeros((pages, PAGE, 2, 2, head_dim), dtype)
    return cache, k, v, table, jnp.array([0, 1, 1, 7]), jnp.array([5, 8, 7])


def test_new_tokens_are_written_to_their_places_and_nothing_else_changes():
    cache, k, v, table, offsets, lengths = batch()
    written = np.asarray(append_to_pages(cache, k, v, table, offsets, lengths))
    want = np.zeros(written.shape, np.float32)
    for token, (sequence, position) in enumerate([(0, 4), *((2, at) for at in range(1, 7))]):
        page = table[sequence, position // PAGE]
        want[page, position % PAGE] = np.stack([k[token], v[token]], 1)  # [kv_heads, 2, head_dim]
    np.testing.assert_array_equal(written, want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_donated_cache_is_written_in_place(dtype):
    """The program has no operation on the whole cache except the write, such as a copy or a conversion."""
    cache, *rest = batch(dtype)
    shape = ",".join(map(str, cache.shape))
    step = jax.jit(lambda cache, *rest: append_to_pages(cache, *rest, k_scale=0.02, v_scale=0.02), donate_argnums=0)
    program = step.lower(cache, *rest).compile().as_text()
    assert "input_output_alias={ {}: (0" in program
    assert not re.findall(rf"= \w+\[{shape}\]\S* (?:copy|convert|select)\(.*", program)
    address = cache.unsafe_buffer_pointer()
    written = append_to_pages(cache, *rest, k_scale=0.02, v_scale=0.02)
    assert cache.is_deleted()
    assert written.unsafe_buffer_pointer() == address


def test_new_tokens_are_written_without_a_loop():
    """On a GPU, a loop of small kernels would take longer than the write."""
    like = jax.ShapeDtypeStruct
    new, integers = like((4, 2, 8), "float32"), [like(shape, "int32") for shape in ((3, 2), (4,), (3,))]
    program = jax.jit(append_to_pages).lower(like((6, 4, 2, 2, 8), "float32"), new, new, *integers)
    assert "while" not in program.as_text()


def test_tokens_without_a_place_are_dropped():
    """Past the last offset, past the table, or with a page outside the cache: no other page may change."""
    cache, k, v, table, offsets, _ = batch()
    outside = table.at[0].set(jnp.array([-1, 99, -7]))
    written = append_to_pages(cache, k, v, outside, offsets.at[-1].set(2), jnp.array([5, 8, 13]))
    assert not np.asarray(written).any()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most", "error"), [("int8", 127, 0.004), ("float8_e4m3fn", 448, 0.04)])
def test_attention_to_a_quantised_cache_is_close_to_that_of_the_values(dtype, most, error):
    _, k, v, table, offsets, lengths = batch()
    k = k.at[3, 1, 2].set(40.0)  # the other head keeps its small steps
    scales = {name: jnp.abs(x).max((0, 2)) / most for name, x in (("k_scale", k), ("v_scale", v))}
    q = on_device(np.random.default_rng(1).standard_normal((8, 4, 8)), jnp.float32)
    outs = []
    for kind, given in (("float32", {}), (dtype, scales)):
        cache = append_to_pages(batch(kind)[0], k, v, table, offsets, lengths, **given)
        outs.append(np.asarray(paged_attention(q, cache, table, offsets, lengths, **given))[:, :2])
    assert np.abs(outs[0] - outs[1]).max() < 3 * error


def test_values_beyond_the_range_of_a_quantised_cache_are_clipped():
    cache, k, v, *rest = batch("float8_e4m3fn")
    written = append_to_pages(cache, k * 1e6, v, *rest)
    assert np.abs(np.asarray(written, np.float32)).max() == 448


def test_an_integer_cache_without_a_scale_warns():
    cache, k, v, *rest = batch("int8")
    with pytest.warns(
        ArgumentWarning, match=r"append_to_pages: v is float32 and kv_pages int8, .* Pass v_scale"
    ) as shown:
        cache = append_to_pages(cache, k, v, *rest, k_scale=0.02)
    assert len(shown) == 1
    cache = append_to_pages(cache, k, v, *rest, k_scale=0.02, v_scale=1.0)
    append_to_pages(cache, k.astype("int8"), v.astype("int8"), *rest)


def test_pages_are_copied_within_the_cache():
    cache = jnp.arange(4 * PAGE * 2 * 2, dtype=jnp.float32).reshape(4, PAGE, 1, 2, 2)
    before = np.asarray(cache)
    after = np.asarray(copy_pages(cache, jnp.array([1, 0, 2, -1, 4]), jnp.array([3, -1, 9, 0, 1])))
    np.testing.assert_array_equal(after, before[[0, 1, 2, 1]])
    assert copy_pages(cache[:0], jnp.array([1]), jnp.array([0])).shape == (0, PAGE, 1, 2, 2)


@pytest.mark.parametrize("wide", [False, True])
def test_pages_of_more_than_32_bits_are_outside_the_cache(wide):
    cache, k, v, table, offsets, lengths = batch()
    with jax.enable_x64(wide):
        beyond = np.asarray(table, np.int64) + 2**32
        beyond = jnp.asarray(beyond) if wide else beyond
        cache = append_to_pages(cache, k, v, beyond, offsets, lengths)
        cache = copy_pages(cache + 1, np.array([1]), beyond[0, :1])
        assert (np.asarray(cache) == 1).all()
        if wide:
            q = jnp.ones((8, 2, 8), jnp.float32)
            assert not np.asarray(paged_attention(q, cache, beyond, offsets, lengths)).any()


def test_arguments_are_checked():
    cache, k, v, table, offsets, lengths = batch()
    with pytest.raises(ArgumentError, match=r"v must be None for a cache of keys alone"):
        append_to_pages(cache, k, None, table, offsets, lengths)
    with pytest.raises(ArgumentError, match=r"k must be \[tokens, kv_heads, head_dim\].*2 and 8.*float32\[8, 1, 8\]"):
        append_to_pages(cache, k[:, :1], v, table, offsets, lengths)
    with pytest.raises(ArgumentError, match=r"page_table must have a row for each of the 3 kv_lengths"):
        append_to_pages(cache, k, v, table[:2], offsets, lengths)
    pool = PagePool(8, PAGE)
    sequence = pool.allocate(9)
    with pytest.raises(ArgumentError, match=r"columns must be at least 3"):
        pool.table([sequence], columns=2)
    with pytest.raises(ArgumentError, match=r"must be the number of a sequence of the pool \(0\), got 7; freed"):
        pool.free(7)


class Pool(RuleBasedStateMachine):
    """A pool against the texts of its sequences, which are written to pages of letters."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(pages=12, page_size=PAGE)
        self.cache = np.full((12, PAGE), -1)
        self.texts = {}
        self.letters = 0

    def write(self, sequence, tokens):
        text = self.texts[sequence]
        for _ in range(tokens):
            page = self.pool.table([sequence])[0, len(text) // PAGE]
            self.cache[page, len(text) % PAGE] = self.letters
            text.append(self.letters)
            self.letters += 1

    @rule(target=sequences, tokens=st.integers(0, 20))
    def allocate(self, tokens):
        before = self.pool.free_pages
        try:
            sequence = self.pool.allocate(tokens)
        except OutOfPagesError:
            assert self.pool.pages_for(tokens) > before == self.pool.free_pages
            sequence = self.pool.allocate()
            tokens = 0
        self.texts[sequence] = []
        self.write(sequence, tokens)
        return sequence

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        forked = self.pool.fork(sequence)
        self.texts[forked] = list(self.texts[sequence])
        return forked

    @rule(sequence=sequences, tokens=st.integers(0, 9))
    def extend(self, sequence, tokens):
        before = self.pool.free_pages, self.pool.table([sequence]).tolist()
        try:
            copies = self.pool.extend(sequence, tokens)
        except OutOfPagesError:
            assert before == (self.pool.free_pages, self.pool.table([sequence]).tolist())
            return
        for source, target in copies:
            self.cache[target] = self.cache[source]
        self.write(sequence, tokens)

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        self.pool.free(sequence)
        del self.texts[sequence]

    @invariant()
    def every_sequence_reads_its_own_text(self):
        assert set(self.pool.sequences) == set(self.texts)
        for sequence, text in self.texts.items():
            read = self.cache[self.pool.table([sequence])[0]].reshape(-1)[: self.pool.length(sequence)]
            assert text == read.tolist()

    @invariant()
    def pages_without_a_sequence_are_free(self):
        used = {page for sequence in self.texts for page in self.pool.table([sequence])[0]}
        assert 12 - len(used) == self.pool.free_pages


TestPool = pytest.mark.slow(Pool.TestCase)
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pool: pool.table(3), "sequences must be a list of sequences of the pool, got 3"),
        (lambda pool: pool.table([], columns="a"), "columns must be an integer >= 0 or None, got 'a'"),
        (lambda pool: pool.free([1]), r"sequence must be the number of a sequence .* got \[1\]"),
        (lambda pool: pool.pages_for("a"), "tokens must be an integer >= 0, got 'a'"),
        (lambda pool: pool.allocate(True), "tokens must be an integer >= 0, got True"),
    ],
)
def test_a_wrong_argument_of_the_pool_is_named(call, words):
    with pytest.raises(ArgumentError, match=words):
        call(PagePool(4, PAGE))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_numbers_of_tokens_in_small_integers_do_not_overflow(dtype):
    pool, tokens = PagePool(40, 16), np.asarray(100, dtype)[()]
    sequence = pool.allocate(tokens)
    assert pool.pages_for(tokens) == 7
    assert pool.extend(sequence, tokens) == []
    assert (pool.length(sequence), pool.free_pages) == (200, 40 - 13)


def test_a_pool_shows_its_pages_and_sequences():
    pool = PagePool(pages=4, page_size=16)
    pool.allocate(20)
    assert repr(pool) == "PagePool(pages=4, page_size=16, free_pages=2, sequences=1)"


def test_a_copied_pool_is_independent():
    pool = PagePool(pages=4, page_size=16)
    pool.allocate(20)
    other = copy.copy(pool)
    other.free(other.allocate(20))
    other.extend(0, 16)
    assert (pool.sequences, pool.length(0), pool.free_pages) == ((0,), 20, 2)
    assert (other.sequences, other.length(0), other.free_pages) == ((0,), 36, 1)
