# SPDX-License-Identifier: Apache-2.0
"""Gradients from the kernel's results.

A scalar loss needs three products. The exponentials of the logits leave the first product relative to a number `r` per
row that is known before it: the largest of some of the row's logits. Since `r` is at most the log-sum-exp, and bfloat16
has the range of float32, one factor per row remains, `softmax * exp(r - lse)`. It is applied to the rows of `dx`, and
to the rows of `x` in the weight's gradient, so no pass over the exponentials is needed. The label's -1 is scattered. If
the log-sum-exp of a row is too far above `r`, the exponentials are computed again, relative to the largest logits.

Other gradients compute the logits again, from the log-sum-exp.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._hopper.tile_shapes import TILE
from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels.linear_cross_entropy._xla_loops import over_columns, over_rows
from ejkernel.kernels.linear_cross_entropy.common import (
    Coefficients,
    Statistics,
    coefficients_of_loss,
    finite_top,
    merged_lse,
    merged_max,
)

from .launch import Exponentials, PaddedHead, Rows, may_overwrite

SAMPLED = 256  # columns whose largest logit `r` is
RUN = 16  # that many of them are neighbours, which share a sector of memory
LARGEST_SUM = 2.0**90  # of exponentials relative to `r`; factors and their products with `x` must not underflow
_LEAST_SOFTMAX = 2.0**-10  # of the softmax's coefficient relative to the token's factor: below bfloat16's precision


class Gradients(NamedTuple):
    """Gradients of `x`, and of the weight and bias, padded or not; the latter is `None` without bias."""

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None


class _Relative(NamedTuple):
    """The exponentials of rows, the numbers that they are relative to, and 1 if a sum is too large, or 0."""

    relative_to: jax.Array
    found: Exponentials
    exceeded: jax.Array


@dataclasses.dataclass(frozen=True)
class HeadGradients:
    """Gradients of the arrays of a head; see the module's text.

    Attributes:
        head: The weight and bias, padded or not.
        columns: The number of columns over which label smoothing spreads.
    """

    head: PaddedHead
    columns: Any

    # Three products.

    def of_loss(
        self, x: jax.Array, labels: jax.Array, factors: jax.Array, dtype: Any, total: jax.Array | None
    ) -> tuple[Gradients, Statistics]:
        """Return the gradients of `sum(factors * losses)` and the statistics.

        The weight's gradient is in `dtype`, and added to `total`, if any.
        """
        head, call, rows = self.head, self.head.call, Rows.of(x, labels)
        factors = factors.astype(jnp.float32)
        relative_to, found, _ = self._exponentials(rows)
        # Merged here, so that its type says that all devices have the same numbers: a loop's carry loses that.
        lse = merged_lse(relative_to + jnp.log(found.total), call.vocab_axis)
        unit = coefficients_of_loss(call, lse, jnp.ones_like(lse), self.columns)
        softmax = jnp.where(jnp.abs(unit.softmax) < _LEAST_SOFTMAX, _LEAST_SOFTMAX, unit.softmax)
        at_label = jnp.exp(found.label - relative_to) + unit.label / softmax * jnp.exp(lse - relative_to)
        if call.logits_soft_cap is not None:
            at_label = at_label * (1 - jnp.square(found.label / call.logits_soft_cap))
        at_label = jnp.where(found.label == -jnp.inf, 0, at_label)  # a removed column
        at = jnp.where(head.owns(labels), labels, found.matrix.shape[1])
        matrix = _with_labels(found.matrix, at, at_label)
        factor = factors * softmax * jnp.exp(relative_to - lse) * call.logits_scale
        constant = None if unit.constant is None else factors * unit.constant * call.logits_scale
        # Where all columns are removed, gradients are 0, not 0 times infinity.
        factor, constant = jax.tree.map(lambda y: jnp.where(lse == -jnp.inf, 0, y), (factor, constant))
        made = self._by_factors(rows, matrix, factor, constant, dtype, total)
        total_of_logits = self._sum_of_logits(rows) if "sum" in call.statistics else None
        return made, Statistics(lse, found.label, total_of_logits, None, merged_max(found.max, call.vocab_axis))

    def _exponentials(self, rows: Rows) -> _Relative:
        """Return exponentials with sums in range."""
        head, axes = self.head, self.head.call.vocab_axis

        def run(relative_to: jax.Array) -> _Relative:
            found = head.exponentials(rows, relative_to)
            # The same number on all devices that share the vocabulary, so that all of them run again, or none does.
            total = lax.psum(found.total, axes) if axes else found.total
            return _Relative(relative_to, found, (~(total < LARGEST_SUM)).astype(jnp.int32).max())

        def again(first: _Relative) -> _Relative:
            lse = finite_top(merged_lse(head.statistics(rows, ()).lse, axes))
            second = run(lse)._replace(exceeded=jnp.int32(0))
            return unify_varying((second, first))[0]

        first = run(self._largest_of_some(rows))
        if not axes and may_overwrite(rows.x, head.weight, first):
            relative_to, found = head.exponentials_again(rows, first.exceeded, first.relative_to, first.found)
            return _Relative(relative_to, found, jnp.int32(0))
        first = unify_varying((first, rows.x))[0]
        checked: _Relative = lax.while_loop(lambda carry: carry.exceeded != 0, again, first)
        return checked

    def _largest_of_some(self, rows: Rows) -> jax.Array:
        """Return the largest logit among columns spread over the vocabulary; it is at most the log-sum-exp."""
        head, call = self.head, self.head.call
        axis = 0 if call.transpose_weight else 1
        s = _product(rows.x, _sample(head.weight, call.columns, axis), (1, 1 - axis), jnp.float32)
        if head.bias is not None:
            s = s + _sample(head.bias, call.columns, 0)
        top = s.max(axis=1) * call.logits_scale
        if call.logits_soft_cap is not None:
            top = jnp.where(top == -jnp.inf, top, call.logits_soft_cap * jnp.tanh(top / call.logits_soft_cap))
        return lax.pmax(top, call.vocab_axis) if call.vocab_axis else top

    def _by_factors(
        self,
        rows: Rows,
        matrix: jax.Array,
        factor: jax.Array,
        constant: jax.Array | None,
        dtype: Any,
        total: jax.Array | None,
    ) -> Gradients:
        """Return the gradients if that of the logits is `factor * matrix + constant`, with a number per row each."""
        head, transposed = self.head, self.head.call.transpose_weight
        dx = head.gradient_of_rows(matrix, factor) if constant is None else None
        if dx is None:
            dx = self._by_weight(matrix, head.weight, jnp.float32) * factor[:, None]
        left = (rows.x * factor[:, None]).astype(rows.x.dtype)
        dweight = self._weight_gradient(left, matrix, head.own_columns, dtype, total)
        dbias = None
        if head.bias is not None:
            dbias = (matrix.astype(jnp.float32) * factor[:, None]).sum(axis=0)[: head.own_columns]
        if constant is not None:
            seen = self._seen()[: head.own_columns]
            dx = dx + constant[:, None] * self._sum_of_columns()
            rank_one = (rows.x.astype(jnp.float32) * constant[:, None]).sum(axis=0)
            added = seen[:, None] * rank_one if transposed else rank_one[:, None] * seen
            dweight = (dweight + added).astype(dtype)
            dbias = None if dbias is None else dbias + constant.sum() * seen
        return Gradients(dx.astype(rows.x.dtype), dweight, dbias)

    def _by_weight(self, matrix: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
        """Return the product of a matrix and columns of the weight."""
        axis = 0 if self.head.call.transpose_weight else 1
        return _product(matrix[:, : weight.shape[axis]], weight, (1, axis), dtype)

    def _weight_gradient(
        self, x: jax.Array, matrix: jax.Array, columns: int, dtype: Any, total: jax.Array | None
    ) -> jax.Array:
        """Return the product of rows and the first columns of a matrix in `dtype`, or its sum with `total`."""
        head, transposed = self.head, self.head.call.transpose_weight
        left, right = (matrix, x) if transposed else (x, matrix)
        if total is not None:
            return head.add_product(total, left, right)
        if transposed and columns < matrix.shape[1]:
            return head.product(matrix, x, columns, dtype)
        return _product(left, right, (0, 0), dtype)

    def _seen(self) -> jax.Array:
        """Return 1 for each column that is not removed, 0 for the others and for padding."""
        head = self.head
        if head.bias is None:
            return (jnp.arange(head.columns) < head.call.columns).astype(jnp.float32)
        return (head.bias[: head.columns] > -jnp.inf).astype(jnp.float32)

    def _sum_of_columns(self) -> jax.Array:
        """Return the sum of the weight's columns that are not removed."""
        head = self.head
        axis = 1 if head.call.transpose_weight else 0
        return _product(self._seen().astype(head.weight.dtype), head.weight, (0, 1 - axis), jnp.float32)

    def _sum_of_logits(self, rows: Rows) -> jax.Array:
        """Return the sum of each row's logits; without a soft cap it needs no logits."""
        head = self.head
        total = (rows.x.astype(jnp.float32) * self._sum_of_columns()).sum(axis=1)
        if head.bias is not None:
            total = total + jnp.where(head.bias == -jnp.inf, 0, head.bias).sum()
        return total * head.call.logits_scale

    # From the log-sum-exp.

    def by_rows(
        self,
        x: jax.Array,
        labels: jax.Array,
        given: Coefficients,
        lse: jax.Array,
        dtype: Any,
        total: jax.Array | None,
    ) -> Gradients:
        """Return the gradients; all logits of these rows are computed again at once.

        The weight's gradient is in `dtype`, and added to `total`, if any.
        """
        rows = Rows.of(x, labels)
        d = self.head.gradient_of_logits(rows, lse, given)
        return self._by_products(rows, self.head.weight, d, self.head.own_columns, (x.dtype, dtype), total)

    def by_columns(
        self, x: jax.Array, labels: jax.Array, given: Coefficients, lse: jax.Array, chunk: int | None
    ) -> Gradients:
        """Return the gradients; each chunk finishes its columns of the weight's gradient."""
        head, rows = self.head, Rows.of(x, labels)
        axis, bias = 0 if head.call.transpose_weight else 1, head.bias

        def step(made: Gradients, start: Any, count: int) -> Gradients:
            d = head.gradient_of_logits(rows, lse, given, start, count)
            weight = lax.dynamic_slice_in_dim(head.weight, start, count, axis)
            own = self._by_products(rows, weight, d, count, (jnp.float32, head.weight.dtype))
            dweight = lax.dynamic_update_slice_in_dim(made.weight, own.weight, start, axis)
            dbias = None
            if own.bias is not None and made.bias is not None:
                dbias = lax.dynamic_update_slice_in_dim(made.bias, own.bias, start, 0)
            return unify_varying((Gradients(made.x + own.x, dweight, dbias), made))[0]

        zeros = Gradients(
            jnp.zeros(rows.x.shape, jnp.float32),
            jnp.zeros_like(head.weight),
            None if bias is None else jnp.zeros(head.columns, jnp.float32),
        )
        zeros = unify_varying((zeros, rows.x, head.weight, lse, given))[0]
        made = over_columns(step, zeros, head.columns, chunk)
        return made._replace(x=made.x.astype(x.dtype))

    def _by_products(
        self,
        rows: Rows,
        weight: jax.Array,
        d: jax.Array,
        columns: int,
        dtypes: tuple[Any, Any],
        total: jax.Array | None = None,
    ) -> Gradients:
        """Return the gradients of some columns from the gradient of their logits."""
        dx = self._by_weight(d, weight, dtypes[0])
        dweight = self._weight_gradient(rows.x, d, columns, dtypes[1], total)
        dbias = None if self.head.bias is None else d.astype(jnp.float32).sum(axis=0)[:columns]
        return Gradients(dx, dweight, dbias)


def summed_over_rows(
    gradients: Any, arrays: tuple[Any, ...], head: PaddedHead, dtype: Any, lse: jax.Array | None = None
) -> tuple[Gradients, Any]:
    """Return the gradients and further results of `gradients(rows, dtype, total)`, over chunks of rows.

    Args:
        gradients: Returns the gradients of some rows, with the weight's in `dtype` and added to `total`, if any, and
            further results per row.
        arrays: Arrays with an axis of rows, beginning with `x`.
        head: The padded weight and bias; its parameters have the size of chunks.
        dtype: Dtype of the sum of the weight's gradient.
        lse: The log-sum-exp of the rows, if known.
    """
    chunk, weight = head.params.chunk, head.weight
    if chunk is None or chunk >= arrays[0].shape[0]:
        found: tuple[Gradients, Any] = gradients((*arrays, lse), weight.dtype, None)
        return found

    def step(sums: Gradients | None, rows: Any) -> Any:
        made, more = gradients(rows, dtype, None if sums is None else sums.weight)
        total = made._replace(x=None)
        if sums is not None:
            bias = None if sums.bias is None else sums.bias + made.bias
            total = unify_varying((total._replace(bias=bias), sums))[0]
        return total, (made.x, more)

    # Sums need rows of whole tiles: otherwise the weight's gradient would be a product in pieces.
    sums, (dx, more) = over_rows(step, None, arrays, chunk, lse, TILE[0])
    return Gradients(dx, sums.weight.astype(weight.dtype), sums.bias), more


def _sample(x: jax.Array, columns: int, axis: int) -> jax.Array:
    """Return some of the first columns: short runs, spread over all of them."""
    runs = SAMPLED // RUN
    if columns < 2 * SAMPLED:
        return lax.slice_in_dim(x, 0, columns, axis=axis)
    spread = lax.slice_in_dim(x, 0, columns - columns % runs, axis=axis)
    spread = spread.reshape(*x.shape[:axis], runs, -1, *x.shape[axis + 1 :])
    return lax.slice_in_dim(spread, 0, RUN, axis=axis + 1).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _with_labels(matrix: jax.Array, labels: jax.Array, values: jax.Array) -> jax.Array:
    """Return the matrix with a value per row at its label; a label past the last column has none."""
    at = matrix.at[jnp.arange(labels.shape[0]), labels]
    return at.set(values.astype(matrix.dtype), unique_indices=True, indices_are_sorted=True, mode="drop")


def _product(left: jax.Array, right: jax.Array, contracted: tuple[int, int], dtype: Any) -> jax.Array:
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(left, right, axes, preferred_element_type=dtype)
