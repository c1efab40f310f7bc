# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays of 64-bit integers in eager calls: no function keeps the lower half of a number beyond 32 bits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device

from ejkernel.modules import (
    flash_attention,
    grouped_matmul,
    grouped_matmul_wgrad,
    paged_attention,
    quantize,
    quantize_both,
    quantized_grouped_dense,
    ragged_paged_attention,
)
from ejkernel.ops import ArgumentError

pytestmark = pytest.mark.slow
ALL, MOST = 2**32, np.iinfo(np.int32).max


def normal(*shape):
    return on_device(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def attend(**arrays):
    q = normal(1, 4, 1, 8)
    return flash_attention(q, q, q, **arrays)


def of_rows(function, *arrays, **options):
    return lambda sizes: function(*arrays, sizes, **options)


def decoded(table, lengths):
    return paged_attention(normal(2, 4, 8), normal(6, 4, 2, 2, 8), table, np.arange(3), lengths)


def decoded_with_new_tokens(table, count=None):
    count = jnp.array([2]) if count is None else count
    new, places = normal(2, 2, 8), (jnp.array([5, 9]), table.reshape(-1), jnp.arange(3), count)
    return ragged_paged_attention(normal(2, 4, 8), new, new, normal(6, 4, 4, 8), *places)[0]


X, EXPERTS, TABLE, LENGTHS = normal(2, 4), normal(2, 4, 3), np.arange(6).reshape(2, 3), np.array([5, 9])
BEYOND, WITHIN = TABLE + np.array([[ALL], [0]]), np.where([[True], [False]], MOST, TABLE)
SIZES = [ALL, 1], [MOST, 1]
CASES = {
    "segment_ids": (lambda ids: attend(segment_ids=ids), [[1, 1, ALL + 1, ALL + 1]], [[1, 1, 2, 2]]),
    "one example": (lambda ids: flash_attention(*[normal(4, 1, 8)] * 3, segment_ids=ids), [1, 1, ALL, 0], [1, 1, 2, 3]),
    "key_lengths": (lambda lengths: attend(key_lengths=lengths), [2**63 - 1], [4]),
    "query_lengths": (lambda lengths: attend(query_lengths=lengths), [2 - ALL], [0]),
    "grouped_matmul": (of_rows(grouped_matmul, X, EXPERTS), *SIZES),
    "activation": (of_rows(grouped_matmul, X, EXPERTS, activation="silu"), *SIZES),
    "grouped_matmul_wgrad": (of_rows(grouped_matmul_wgrad, X, X), *SIZES),
    "quantised": (of_rows(grouped_matmul, quantize(X, axis=1), quantize(EXPERTS, axis=1)), *SIZES),
    "quantized_grouped_dense": (of_rows(quantized_grouped_dense, X, EXPERTS), *SIZES),
    "quantize_both": (lambda sizes: quantize_both(normal(128, 128), sizes)[1].values, [ALL, 100], [MOST, 100]),
    "distribution": (lambda count: decoded_with_new_tokens(TABLE, count), [ALL + 1], [2]),
    "page_table": (lambda table: decoded(table, LENGTHS), BEYOND, WITHIN),
    "kv_lengths": (lambda lengths: decoded(TABLE, lengths), [2**63 - 1, 9], [12, 9]),
    "page_indices": (decoded_with_new_tokens, BEYOND, WITHIN),
}


def test_a_first_group_beyond_32_bits_is_an_error():
    with pytest.raises(ArgumentError, match="first_group must be from 0 to 3"):
        grouped_matmul(X, EXPERTS, jnp.array([1, 1, 0]), first_group=np.array(ALL + 1))


def test_ids_with_the_same_lower_halves_differ():
    ids = np.array([[-5, -5, 2**63 - 5, 2**31 - 5]]), np.array([[2**64 - 5, 2**63 - 5, 2**31 - 5, 7]], np.uint64)
    wide = attend(segment_ids=ids)
    alike = jnp.array([[1, 1, 2, 3]]), jnp.array([[4, 2, 3, 5]])
    np.testing.assert_array_equal(wide, attend(segment_ids=alike))


@pytest.mark.parametrize("case", CASES)
def test_numbers_beyond_32_bits_are_not_cut(case):
    run, numbers, expected = CASES[case]
    np.testing.assert_array_equal(run(np.asarray(numbers)), run(jnp.asarray(expected, jnp.int32)))
