# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.grouped_bounds`: the most that a grouped product reaches of a dense product's speed."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import grouped_bounds
from benchmarks.grouped_bounds import Rates, bound, tile_rows
from benchmarks.grouped_matmul import Shape


def test_the_last_tile_of_a_group_counts_as_a_whole_or_half_a_tile():
    sizes = np.asarray([0, 1, 64, 65, 128, 129])
    assert tile_rows(sizes, 128, 128) == 128 * (0 + 1 + 1 + 1 + 1 + 2)
    assert tile_rows(sizes, 128, 64) == 64 * (0 + 1 + 1 + 2 + 2 + 3)


def test_few_rows_are_limited_by_the_matrices_and_many_by_their_tiles():
    rates = Rates(dense=100.0, copy=50.0)
    few = bound(Shape(m=4, k=8, n=8, groups=2), np.asarray([4, 0]), rates, height=4, last=4)
    # One matrix is read, 64 numbers, and four rows of 8 + 8; the products are 4 * 2 * 64 operations.
    assert few.memory == pytest.approx(2 * (64 + 64) / 50)
    assert few.products == few.dense == pytest.approx(5.12)
    assert few.of_dense == pytest.approx(1.0)  # the memory's 5.12 s are as long
    slow = bound(Shape(m=4, k=8, n=8, groups=2), np.asarray([2, 2]), Rates(dense=1e9, copy=1.0), height=4, last=2)
    assert slow.of_dense == pytest.approx(slow.dense / slow.memory)
    many = bound(Shape(m=100, k=8, n=8, groups=1), np.asarray([100]), Rates(dense=1.0, copy=1e9), height=64, last=64)
    assert many.of_dense == pytest.approx(100 / 128)


def test_the_table_has_a_line_for_each_shape(capsys):
    assert grouped_bounds.main(["--shapes", "128 groups", "128 groups, 16,384 rows"]) == 0
    *_, many, few = capsys.readouterr().out.splitlines()
    assert many.startswith("| 128 groups | 1,024 | 0.9")
    assert many.endswith("| tiles |")
    assert few.startswith("| 128 groups, 16,384 rows | 128 | 0.6")
    assert few.endswith("| memory |")
    assert grouped_bounds.main(["--shapes", "128 groups", "--copy", "0.001"]) == 0
    assert "memory" in capsys.readouterr().out
