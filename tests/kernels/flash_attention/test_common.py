# SPDX-License-Identifier: Apache-2.0
"""What implementations of attention share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.arrays import on_device
from tests.kernels.attention_cases import SUBJECT, by_reference

from ejkernel.kernels.flash_attention.common import Operands, Rules, visible_pairs, within_window
from ejkernel.kernels.flash_attention.mosaic_gpu.visibility import lengths_as_segments
from ejkernel.modules import FlashAttention

LENGTH = st.integers(1, 12)
SIDE = st.none() | st.integers(0, 14)


@given(LENGTH, LENGTH, SIDE, SIDE)
def test_pairs_are_counted_as_the_mask_shows_them(queries, keys, left, right):
    rules = Rules(scale=1.0, left=left, right=right)
    mask = within_window(np.arange(queries) + keys - queries, np.arange(keys), rules)
    assert visible_pairs(queries, keys, rules) == (queries * keys if mask is None else int(mask.sum()))


@given(LENGTH, LENGTH, SIDE, SIDE)
def test_a_side_that_hides_no_key_is_left_out(queries, keys, left, right):
    rules = Rules(scale=1.0, left=left, right=right)
    pairs = visible_pairs(queries, keys, rules)
    found = rules.at_lengths(queries, keys)
    assert visible_pairs(queries, keys, found) == pairs
    for side in ("left", "right"):
        if getattr(found, side):
            assert visible_pairs(queries, keys, dataclasses.replace(found, **{side: None})) > pairs


@pytest.mark.parametrize("name", ["splash", "pallas_tpu", "mosaic_gpu"])
def test_the_extreme_segment_ids_of_a_user_do_not_see_hidden_positions(monkeypatch, name):
    """Kernels mark positions past the lengths with segment ids."""
    rng = np.random.default_rng(0)
    arrays = (on_device(rng.standard_normal((2, 24, 2, 16)), jnp.float32) for _ in range(3))
    extremes = np.asarray([-(2**31), -(2**31) + 1, 2**31 - 2, 2**31 - 1], np.int32)
    ids = jnp.asarray(np.repeat(np.stack([extremes, extremes[::-1]]), 6, axis=1))
    operands = Operands(
        *arrays, None, None, ids, ids, jnp.asarray([20, 24], jnp.int32), jnp.asarray([24, 15], jnp.int32)
    )
    rules = Rules(scale=0.3)
    expected, _ = by_reference(operands, rules)
    if name == "mosaic_gpu":
        found, _ = by_reference(lengths_as_segments(operands), rules)
    else:
        SUBJECT.backends[name].simulate(monkeypatch)
        kernels = FlashAttention.implementations[name]
        found, _ = jax.jit(lambda operands: kernels.attend(operands, rules, kernels.params()))(operands)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)
