# SPDX-License-Identifier: Apache-2.0
"""The kernel's uses on padded arrays, under any transformation."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import compat
from ejkernel.kernels._hopper.tile_shapes import ALIGNED, ROWS, padded, with_zeros
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
    padded_columns,
    product_plan,
)

_LOG2E = 1.4426950408889634


class Exponentials(NamedTuple):
    """Exponentials of logits minus a number per row, so that none overflows.

    Attributes:
        total: Their sum per row.
        label: The label's logit; 0 if the label is not a column.
        max: The largest logit; `None` if the call does not want it.
        matrix: The exponentials times the slope of the cap, in bfloat16; 0 in padded columns.
        results: All results of the kernel.
    """

    total: jax.Array
    label: jax.Array
    max: jax.Array | None
    matrix: jax.Array
    results: list[jax.Array]


class Rows(NamedTuple):
    """Padded rows, their labels (-1 in padded rows), and how many rows are not padding."""

    x: jax.Array
    labels: jax.Array
    own: int

    @classmethod
    def of(cls, x: jax.Array, labels: jax.Array) -> Rows:
        """Return rows padded to whole tiles."""
        missing = padded(x.shape[0], TILE_ROWS) - x.shape[0]
        sizes = x.shape[0] + missing, padded(x.shape[1], ALIGNED)
        return cls(with_zeros(x, sizes), jnp.pad(labels, (0, missing), constant_values=-1), x.shape[0])

    def numbers(self, values: jax.Array, fill: float = 0) -> jax.Array:
        """Return one float32 number per padded row."""
        missing = self.x.shape[0] - values.shape[0]
        return jnp.pad(values.astype(jnp.float32), (0, missing), constant_values=fill)


@dataclasses.dataclass(frozen=True)
class PaddedHead:
    """The weight and the bias of a call, padded for the kernel, and how to launch it.

    Attributes:
        call, params: The call and its launch parameters.
        weight: The weight, padded with zeros.
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
        """Return the padded head; a weight with axes of multiples of 64 is not copied."""
        if bias is not None:
            missing = padded(call.columns, WIDEST_TILE) - call.columns
            bias = jnp.pad(bias.astype(jnp.float32), (0, missing), constant_values=-jnp.inf)
        sizes = padded(call.inner, ALIGNED), padded_columns(call.columns)
        return cls(call, params, with_zeros(weight, sizes[::-1] if call.transpose_weight else sizes), bias, interpret)

    @property
    def columns(self) -> int:
        """The number of padded columns."""
        return int(self.weight.shape[0 if self.call.transpose_weight else 1])

    def owns(self, labels: jax.Array) -> jax.Array:
        """Return which labels are columns."""
        return (labels >= 0) & (labels < self.call.columns)

    def statistics(self, rows: Rows, names: tuple[str, ...]) -> Statistics:
        """Return the statistics of padded rows, with the maximum, and with those of `names`; no logits are written."""
        plan = head_plan(self.call, self.params, STATISTICS, rows=rows.x.shape[0], statistics=names)
        found = dict(zip(plan.per_tile, self._run(plan, rows, self._label_table(plan, rows.labels)), strict=True))
        tops = found["max"]
        top = tops.max(axis=0)
        weights = jnp.exp(tops - finite_top(top))
        total = (found["total"] * weights).sum(axis=0)
        expected = expectation((found["expected"] * weights).sum(axis=0), total) if "expected" in found else None
        label = self._at_labels(plan, found["label"], rows.labels)
        return Statistics(
            log_of_sum(finite_top(top), total),
            label,
            found["sum"].sum(axis=0) if "sum" in found else None,
            expected,
            top,
        )

    def exponentials(self, rows: Rows, relative_to: jax.Array) -> Exponentials:
        """Return the exponentials of the logits of padded rows relative to a logit per row."""
        plan = head_plan(self.call, self.params, EXPONENTIALS, rows=rows.x.shape[0])
        table = self._label_table(plan, rows.labels)
        return self._exponentials(plan, rows, self._run(plan, rows, table, relative_to * _LOG2E))

    def exponentials_again(
        self, rows: Rows, again: jax.Array, relative_to: jax.Array, found: Exponentials
    ) -> tuple[jax.Array, Exponentials]:
        """Return the largest logit per row and the exponentials relative to it; if `again` is 0, what is given.

        The kernels overwrite `found` or do nothing. They read `again` on the device, so the host does not wait for it.
        """
        plan = head_plan(self.call, self.params, EXPONENTIALS, rows=rows.x.shape[0], conditional=True)
        first, *others = found.results
        given = again.reshape(1), self._label_table(plan, rows.labels)
        [tops] = self._run(dataclasses.replace(plan, mode=MAXIMA), rows, *given, into=(first,))
        relative_to = jnp.where(again != 0, finite_top(tops.max(axis=0)), relative_to)
        results = self._run(plan, rows, *given, relative_to * _LOG2E, into=(tops, *others))
        return relative_to, self._exponentials(plan, rows, results)

    def _exponentials(self, plan: HeadPlan, rows: Rows, results: list[jax.Array]) -> Exponentials:
        found = dict(zip(plan.per_tile, results, strict=False))
        top = found["max"].max(axis=0) if "max" in found else None
        label = self._at_labels(plan, found["label"], rows.labels)
        return Exponentials(found["total"].sum(axis=0), label, top, results[-1], results)

    def gradient_of_logits(
        self, rows: Rows, lse: jax.Array, given: Coefficients, start: Any = 0, count: int | None = None
    ) -> jax.Array:
        """Return the gradient of `x @ weight + bias` for padded rows and `count` columns from `start` on, in bfloat16.

        Args:
            rows: The rows.
            lse: The log-sum-exp, of padded rows.
            given: The coefficients, of padded rows; see `Coefficients`.
            start: The first column, a multiple of 64.
            count: A multiple of 64; `None`: all columns.
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
            rows=rows.x.shape[0],
            columns=count,
            has_constant=given.constant is not None,
            has_expected=has_expected,
        )
        first = jnp.asarray(start, jnp.int32).reshape(1)
        numbers = [lse * _LOG2E, *(c * scale for c in (softmax, given.label, *more))]
        return self._run(plan, rows, first, *numbers)[0]

    def add_product(self, total: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """Return `total + left.T @ right` in the memory of `total`, or by XLA; all have padded sizes."""
        if not may_overwrite(total, left, right):
            return total + jnp.dot(left.T, right, preferred_element_type=total.dtype)
        from . import sums

        with jax.enable_x64(False):
            found: jax.Array = one_by_one(
                lambda *arrays: sums.add_product(*arrays, interpret=self.interpret), total, left, right
            )
        return found

    def gradient_of_rows(self, matrix: jax.Array, factor: jax.Array) -> jax.Array | None:
        """Return the product of a gradient of logits and the weight, times a factor per row, in bfloat16.

        The result is `None` if XLA should compute it.
        """
        rows, inner = matrix.shape
        axis = 1 if self.call.transpose_weight else 0
        sizes = {"rows": rows, "inner": inner, "columns": self.weight.shape[axis]}
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
