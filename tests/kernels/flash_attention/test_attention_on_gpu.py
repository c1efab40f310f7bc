# SPDX-License-Identifier: Apache-2.0
"""Attention on a Hopper GPU, at sizes that a simulation cannot reach."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("gpu")]


def by_jax(query, key, value):
    """Return attention by products in float32; all heads share one key head."""
    key, value = (jnp.repeat(x, query.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * query.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value, precision="highest")


def gradients(attend, query, key, value, dout):
    return jax.vjp(attend, query, key, value)[1](dout)


def drawn(shape, dtype):
    return [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 4)]


@pytest.mark.parametrize(("queries", "heads"), [(16384, 1), (8192, 8), (33024, 1)], ids=["whole", "heads", "queries"])
def test_float32_gradients_of_long_rows_keep_their_digits(queries, heads):
    """Above 32,768 rows per key head the backward runs in slices of heads, then of queries."""
    query, dout = drawn((1, queries, heads, 64), jnp.float32)[:2]
    key, value = drawn((1, queries, 1, 64), jnp.float32)[2:]
    attend = functools.partial(flash_attention, implementation="mosaic_gpu")
    arrays = (query, key, value, dout)
    expected = jax.jit(functools.partial(gradients, by_jax))(*arrays)
    for found, exact in zip(jax.jit(functools.partial(gradients, attend))(*arrays), expected, strict=True):
        assert jnp.linalg.norm(found - exact) < 1e-3 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("loop", [jax.lax.map, jax.vmap], ids=["map", "vmap"])
def test_gradients_of_slices_equal_those_of_whole_arrays(loop):
    """XLA must not pass slices to a kernel that updates an operand in place."""
    arrays = drawn((3, 2, 512, 4, 128), jnp.bfloat16)
    ours = functools.partial(gradients, functools.partial(flash_attention, causal=True))
    batched = (lambda *xs: jax.lax.map(lambda x: ours(*x), xs)) if loop is jax.lax.map else jax.vmap(ours)
    for index, one in enumerate(zip(*jax.jit(batched)(*arrays), strict=True)):
        alone = jax.jit(ours)(*(x[index] for x in arrays))
        for found, expected in zip(one, alone, strict=True):
            np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=0, atol=2e-2)


@pytest.mark.parametrize(("dim", "queries"), [(320, 700), (576, 1024)])
def test_wide_heads_are_those_of_products_in_float32(dim, queries):
    query, dout = drawn((2, queries, 4, dim), jnp.bfloat16)[:2]
    key, value = drawn((2, queries, 1, dim), jnp.bfloat16)[2:]
    arrays = (query, key, value, dout)
    attend = functools.partial(flash_attention, implementation="mosaic_gpu")
    exact = [x.astype(jnp.float32) for x in arrays]
    expected = [by_jax(*exact[:3]), *jax.jit(functools.partial(gradients, by_jax))(*exact)]
    found = [attend(*arrays[:3]), *jax.jit(functools.partial(gradients, attend))(*arrays)]
    for ours, theirs in zip(found, expected, strict=True):
        assert jnp.linalg.norm(ours.astype(jnp.float32) - theirs) < 6e-3 * jnp.linalg.norm(theirs)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (29, 50), (64, 64), (16, 100), (128, 77)])
def test_short_sequences_with_all_features_are_those_of_plain_jax(queries, keys, dtype):
    """Heads share keys, so that consumers read the same keys and their gradients are added up."""
    (query, dout), (key, value) = drawn((33, queries, 6, 40), dtype)[:2], drawn((33, keys, 2, 40), dtype)[2:]
    lengths = jnp.arange(33, dtype=jnp.int32) * keys // 32  # the first example has no key
    mask = jnp.arange(33 * keys).reshape(33, 1, 1, keys) % 5 > 0
    sinks = jnp.asarray([0.5, -jnp.inf, 2, 0, -1, 3], jnp.float32)
    rest = {"attention_mask": mask, "key_lengths": lengths, "logits_soft_cap": 5.0, "sliding_window": (None, 30)}

    def run(implementation):
        def attend(query, key, value, sinks):
            return flash_attention(query, key, value, sinks=sinks, implementation=implementation, **rest)

        def with_gradients(dout, *arrays):
            out, pull = jax.vjp(attend, *arrays)
            return out, *pull(dout)

        return jax.jit(with_gradients)(dout, query, key, value, sinks)

    for found, expected in zip(run("mosaic_gpu"), run("xla"), strict=True):
        difference = found.astype(jnp.float32) - expected.astype(jnp.float32)
        # The gradient of a sink is a small sum of many numbers: each of the two is up to 0.7 % from the exact one.
        assert jnp.linalg.norm(difference) < 2e-2 * jnp.linalg.norm(expected.astype(jnp.float32))


def test_nan_of_one_short_example_reaches_no_other():
    query, key, value, dout = (x.at[1].set(jnp.nan) for x in drawn((3, 20, 2, 64), jnp.bfloat16))
    for found in jax.jit(functools.partial(gradients, flash_attention))(query, key, value, dout):
        assert jnp.isnan(found).all(axis=(1, 2, 3)).tolist() == [False, True, False]
        assert jnp.isfinite(found[::2]).all()


@pytest.mark.parametrize("shape", [(1, 6, 61, 50), (33, 6, 61, 50), (1, 1, 61, 50)], ids=["heads", "whole", "shared"])
def test_short_sequences_with_a_bias_are_those_of_plain_jax(shape):
    (query, dout), (key, value) = drawn((33, 61, 6, 40), jnp.bfloat16)[:2], drawn((33, 50, 6, 40), jnp.bfloat16)[2:]
    bias = jax.random.normal(jax.random.key(1), shape, jnp.float32)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (33, 1, 61, 50))

    def run(implementation):
        def attend(query, key, value, bias):
            return flash_attention(query, key, value, bias=bias, attention_mask=mask, implementation=implementation)

        return jax.jit(lambda dout, *arrays: jax.vjp(attend, *arrays)[1](dout))(dout, query, key, value, bias)

    for found, expected in zip(run("mosaic_gpu"), run("xla"), strict=True):
        difference = found.astype(jnp.float32) - expected.astype(jnp.float32)
        assert jnp.linalg.norm(difference) < 1e-2 * jnp.linalg.norm(expected.astype(jnp.float32))


@pytest.mark.parametrize(
    ("queries", "keys", "dim"), [(5, 5, 32), (50, 50, 64), (16, 100, 40), (64, 64, 128), (100, 77, 64)]
)
def test_short_float32_sequences_keep_the_digits_of_float16(queries, keys, dim):
    query = drawn((33, queries, 4, dim), jnp.float32)[0]
    key, value = drawn((33, keys, 1, dim), jnp.float32)[2:]
    lengths = jnp.arange(33, dtype=jnp.int32) % keys + 1
    scale = jnp.exp2(jnp.arange(33.0) * 7 - 110)[:, None, None, None]
    attend = functools.partial(flash_attention, key_lengths=lengths)
    found = attend(query * 1e9, key * 1e-9, value * scale, implementation="mosaic_gpu")
    expected = attend(query, key, value, implementation="xla", precision="highest")
    for ours, theirs in zip(found / scale, expected, strict=True):
        assert jnp.linalg.norm(ours - theirs) < 1e-3 * jnp.linalg.norm(theirs)
