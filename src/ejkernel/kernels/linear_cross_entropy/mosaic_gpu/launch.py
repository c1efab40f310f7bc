# SPDX-License-Identifier: Apache-2.0
"""The kernel's uses, on arrays padded where copies need it, under any transformation."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import compat
from ejkernel.kernels._hopper.tile_shapes import ALIGNED_ROW, ROWS, padded, with_zeros
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.linear_cross_entropy.common import (
    Coefficients,
    LinearCrossEntropyCall,
    Statistics,
    expectation,
    finite_top,
    log_of_sum,
)

from .params import MosaicGpuParams
from .plan import (
    EXPONENTIALS,
    GRADIENT,
    MAXIMA,
    STATISTICS,
    TILE_ROWS,
    WIDEST_TILE,
    HeadPlan,
    head_plan,
    padded_sizes,
    product_plan,
)

_LOG2E = 1.4426950408889634


class Exponentials(NamedTuple):
    """Exponentials of logits minus a number per row, so that none overflows.

    Attributes:
        total: Their sum per row.
        label: The label's logit; 0 if the label is not a column.
        max: The largest logit; `None` if the call does not want it.
        matrix: The exponentials times the slope of the cap, in bfloat16, in rows of a multiple of 8; 0 past the last
            column.
        results: All results of the kernel.
    """

    total: jax.Array
    label: jax.Array
    max: jax.Array | None
    matrix: jax.Array
    results: list[jax.Array]


class Rows(NamedTuple):
    """Rows, each padded to a multiple of 8 elements, and their labels, with -1 for the rest of the last tile."""

    x: jax.Array
    labels: jax.Array

    @classmethod
    def of(cls, x: jax.Array, labels: jax.Array) -> Rows:
        """Return rows as the kernels take them."""
        count, inner = x.shape
        missing = padded(count, TILE_ROWS) - count
        labels = jnp.pad(labels, (0, missing), constant_values=-1)
        return cls(with_zeros(x, (count, padded(inner, ALIGNED_ROW))), labels)

    @property
    def in_tiles(self) -> int:
        """The number of rows of whole tiles."""
        return int(self.labels.shape[0])

    def own(self, values: Any) -> Any:
        """Return numbers per row, of a tree of numbers per row of whole tiles."""
        return jax.tree.map(lambda y: y[: self.x.shape[0]], values)


def _for_tiles(values: jax.Array) -> jax.Array:
    """Return one float32 number per row of whole tiles."""
    missing = padded(values.shape[0], TILE_ROWS) - values.shape[0]
    return jnp.pad(values.astype(jnp.float32), (0, missing))


@dataclasses.dataclass(frozen=True)
class PaddedHead:
    """The weight and the bias of a call, padded where the kernel needs it, and how to launch it.

    Attributes:
        call, params: The call and its launch parameters.
        weight: The weight, of `padded_sizes`.
        bias: The bias in float32, padded with -inf to whole tiles; `None` without bias.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """

    call: LinearCrossEntropyCall
    params: MosaicGpuParams
    weight: jax.Array
    bias: jax.Array | None
    interpret: Any = None

    @classmethod
    def of(
        cls,
        call: LinearCrossEntropyCall,
        params: MosaicGpuParams,
        weight: jax.Array,
        bias: jax.Array | None,
        interpret: Any,
    ) -> PaddedHead:
        """Return the head; `padded_sizes` says when the weight is copied."""
        if bias is not None:
            missing = padded(call.columns, WIDEST_TILE) - call.columns
            bias = jnp.pad(bias.astype(jnp.float32), (0, missing), constant_values=-jnp.inf)
        sizes = padded_sizes(call, params)
        return cls(call, params, with_zeros(weight, sizes[::-1] if call.transpose_weight else sizes), bias, interpret)

    @property
    def columns(self) -> int:
        """The number of columns of the weight, padded or not."""
        return int(self.weight.shape[0 if self.call.transpose_weight else 1])

    @property
    def own_columns(self) -> int:
        """The number of columns of the weight's gradient for some rows; those of `[d, V]` end as TMA stores them.

        Where XLA adds the gradients of chunks, it would have to crop the exponentials of each, so the sum is cropped.
        """
        by_kernel = self.params.chunk is None or may_overwrite(self.weight)
        return self.call.columns if self.call.transpose_weight and by_kernel else self.columns

    def owns(self, labels: jax.Array) -> jax.Array:
        """Return which labels are columns."""
        return (labels >= 0) & (labels < self.call.columns)

    def statistics(self, rows: Rows, names: tuple[str, ...]) -> Statistics:
        """Return the statistics of rows, with the maximum, and with those of `names`; no logits are written."""
        plan = head_plan(self.call, self.params, STATISTICS, rows=rows.in_tiles, statistics=names)
        found = dict(zip(plan.per_tile, self._run(plan, rows, self._label_table(plan, rows.labels)), strict=True))
        tops = found["max"]
        top = tops.max(axis=0)
        weights = jnp.exp(tops - finite_top(top))
        total = (found["total"] * weights).sum(axis=0)
        expected = expectation((found["expected"] * weights).sum(axis=0), total) if "expected" in found else None
        label = self._at_labels(plan, found["label"], rows.labels)
        sums = found["sum"].sum(axis=0) if "sum" in found else None
        statistics = Statistics(log_of_sum(finite_top(top), total), label, sums, expected, top)
        return Statistics(*rows.own(statistics))

    def exponentials(self, rows: Rows, relative_to: jax.Array) -> Exponentials:
        """Return the exponentials of the logits of rows relative to a logit per row."""
        plan = head_plan(self.call, self.params, EXPONENTIALS, rows=rows.in_tiles)
        table = self._label_table(plan, rows.labels)
        return self._exponentials(plan, rows, self._run(plan, rows, table, _for_tiles(relative_to * _LOG2E)))

    def exponentials_again(
        self, rows: Rows, again: jax.Array, relative_to: jax.Array, found: Exponentials
    ) -> tuple[jax.Array, Exponentials]:
        """Return the largest logit per row and the exponentials relative to it; if `again` is 0, what is given.

        The kernels overwrite `found` or do nothing. They read `again` on the device, so the host does not wait for it.
        """
        plan = head_plan(self.call, self.params, EXPONENTIALS, rows=rows.in_tiles, conditional=True)
        first, *others = found.results
        given = again.reshape(1), self._label_table(plan, rows.labels)
        [tops] = self._run(dataclasses.replace(plan, mode=MAXIMA), rows, *given, into=(first,))
        relative_to = jnp.where(again != 0, finite_top(rows.own(tops.max(axis=0))), relative_to)
        results = self._run(plan, rows, *given, _for_tiles(relative_to * _LOG2E), into=(tops, *others))
        return relative_to, self._exponentials(plan, rows, results)

    def _exponentials(self, plan: HeadPlan, rows: Rows, results: list[jax.Array]) -> Exponentials:
        found = dict(zip(plan.per_tile, results, strict=False))
        top = rows.own(found["max"].max(axis=0)) if "max" in found else None
        label = self._at_labels(plan, found["label"], rows.labels)
        return Exponentials(rows.own(found["total"].sum(axis=0)), rows.own(label), top, results[-1], results)

    def gradient_of_logits(
        self, rows: Rows, lse: jax.Array, given: Coefficients, start: Any = 0, count: int | None = None
    ) -> jax.Array:
        """Return the gradient of `x @ weight + bias` for rows and `count` columns from `start` on, in bfloat16.

        Its rows are padded to a multiple of 8, with zeros past the last column.

        Args:
            rows: The rows.
            lse: The log-sum-exp.
            given: The coefficients; see `Coefficients`.
            start: The first column, a multiple of 64.
            count: How many columns; `None`: all.
        """
        softmax, scale = given.softmax, self.call.logits_scale
        more = [] if given.constant is None else [given.constant]
        has_expected = given.expected is not None and given.mean is not None
        if given.expected is not None and given.mean is not None:
            softmax = softmax + given.expected * (1 - given.mean)
            more.append(given.expected)
        plan = head_plan(
            self.call,
            self.params,
            GRADIENT,
            rows=rows.in_tiles,
            columns=count,
            has_constant=given.constant is not None,
            has_expected=has_expected,
        )
        first = jnp.asarray(start, jnp.int32).reshape(1)
        numbers = [lse * _LOG2E, *(c * scale for c in (softmax, given.label, *more))]
        return self._run(plan, rows, first, *map(_for_tiles, numbers))[0]

    def add_product(self, total: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """Return `total + left.T @ right` in the memory of `total`, or by XLA; see `sums.add_product`."""
        if not may_overwrite(total, left, right):
            return total + jnp.dot(left.T, right, preferred_element_type=total.dtype)
        from . import sums

        with jax.enable_x64(False):
            found: jax.Array = one_by_one(
                lambda *arrays: sums.add_product(*arrays, interpret=self.interpret), total, left, right
            )
        return found

    def product(self, left: jax.Array, right: jax.Array, rows: int, dtype: Any) -> jax.Array:
        """Return the first rows of `left.T @ right` in `dtype`; XLA's result would have to be cropped."""
        from . import sums

        with jax.enable_x64(False):
            found: jax.Array = one_by_one(
                lambda left, right: sums.product(left, right, rows, dtype, interpret=self.interpret), left, right
            )
        return found

    def gradient_of_rows(self, matrix: jax.Array, factor: jax.Array) -> jax.Array | None:
        """Return the product of a gradient of logits and the weight, times a factor per row, in bfloat16.

        The result is `None` if XLA should compute it.
        """
        columns = self.weight.shape[1 if self.call.transpose_weight else 0]
        factor = _for_tiles(factor)
        sizes = {"rows": factor.shape[0], "inner": self.columns, "columns": columns}
        plan = product_plan(self.params, **sizes, transpose_weight=not self.call.transpose_weight)
        return None if plan is None else self._launch(plan, matrix, self.weight, factor)[0]

    def _run(self, plan: HeadPlan, rows: Rows, *others: jax.Array, into: tuple[jax.Array, ...] = ()) -> list[jax.Array]:
        bias = [] if self.bias is None else [self.bias]
        return self._launch(plan, rows.x, self.weight, *bias, rows.labels, *others, into=into)

    def _launch(self, plan: HeadPlan, *arrays: jax.Array, into: tuple[jax.Array, ...] = ()) -> list[jax.Array]:
        from .kernel import run_head  # Mosaic GPU is not available in every environment

        with jax.enable_x64(False):  # the kernel counts in int32
            found: list[jax.Array] = one_by_one(
                lambda arrays, into: run_head(plan, arrays, into, interpret=self.interpret), arrays, into
            )
        return found

    def _label_table(self, plan: HeadPlan, labels: jax.Array) -> jax.Array:
        """Return 1 where a tile's columns contain a label of one of 64 rows: comparisons take time in every tile."""
        parts = lax.broadcasted_iota(jnp.int32, labels.shape, 0) // ROWS
        tiles = jnp.where(self.owns(labels), labels // plan.block_n, plan.column_tiles)
        table = jnp.zeros((plan.rows // ROWS, plan.column_tiles), jnp.int32)
        return table.at[parts, tiles].set(1, mode="drop")

    def _at_labels(self, plan: HeadPlan, parts: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the label's logit of each row; other tiles have not written theirs."""
        owns = self.owns(labels)
        tiles = jnp.where(owns, labels // plan.block_n, 0)
        return jnp.where(owns, parts[tiles, jnp.arange(labels.shape[0])], 0)


def may_overwrite(*arrays: Any) -> bool:
    """Return whether kernels on these arrays may overwrite some of them.

    Pallas refuses references of arrays that vary over mesh axes.
    """
    return not any(compat.tracing.varying_axes(x) for x in jax.tree.leaves(arrays))
