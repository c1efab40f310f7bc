# SPDX-License-Identifier: Apache-2.0
"""What implementations of attention share."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.kernels.flash_attention.common import Rules, visible_pairs, within_window

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
