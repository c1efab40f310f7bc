# SPDX-License-Identifier: Apache-2.0
"""Logits of some rows and columns in plain JAX: their statistics, their gradient, and the products with it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import compat
from ejkernel.kernels._numbers import accumulator, at_most_zero, has_small_range, normalized
from ejkernel.kernels._varying import unify_varying

from .common import Coefficients, LinearCrossEntropyCall, Statistics, expectation, finite_top, log_of_sum

_LARGE_FACTOR = 2.0**20  # logits of this size are exact to 1/16
_HEADROOM = 2.0**12  # scales probabilities in float16: 65,504 is the largest number, 6e-8 the smallest


class Partial(NamedTuple):
    """Statistics of rows over some of the columns.

    Attributes:
        top: The maximum, divided by `Problem.factor`.
        total: The sum of exponentials relative to it.
        label: The label's logit.
        sum: The sum of the logits; 0 if the call does not want it.
        weighted: The sum of the logits times their exponentials; 0 if the call does not want it.
    """

    top: jax.Array
    total: jax.Array
    label: jax.Array
    sum: jax.Array
    weighted: jax.Array

    def merged(self, other: Partial, factor: float) -> Partial:
        """Return the statistics over the columns of both."""
        top = jnp.maximum(self.top, other.top)
        own, others = (jnp.exp(_times(one.top - finite_top(top), factor)) for one in (self, other))
        return Partial(
            top,
            self.total * own + other.total * others,
            self.label + other.label,
            self.sum + other.sum,
            self.weighted * own + other.weighted * others,
        )

    def finished(self, factor: float) -> Statistics:
        """Return the statistics, also those that the call does not want."""
        top, expected = _times(self.top, factor), expectation(self.weighted, self.total)
        return Statistics(log_of_sum(top, self.total), self.label, self.sum, expected, lax.stop_gradient(top))


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arrays of a call, with `columns` of the weight from `first` on.

    Attributes:
        call: The description.
        x, weight, labels, bias: The arrays; labels count from the first column.
    """

    call: LinearCrossEntropyCall
    x: jax.Array
    weight: jax.Array
    labels: jax.Array
    bias: jax.Array | None

    @classmethod
    def of(
        cls,
        call: LinearCrossEntropyCall,
        x: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        bias: jax.Array | None = None,
    ) -> Problem:
        """Return the problem of a call, with arrays that may be carried by loops under `shard_map`."""
        x, weight, labels, bias = unify_varying((x, weight, labels, bias))
        return cls(call, x, weight, labels, bias)

    @property
    def factor(self) -> float:
        """The factor that makes logits of the results of `logits`; 1 unless it is large.

        The maximum is then subtracted before the multiplication: a compiler may fuse `values * factor - top` into one
        operation with one rounding, although `top` was rounded before. Logits of 1e9 would be up to 32 away.
        """
        largest = self.call.logits_soft_cap or self.call.logits_scale
        return largest if largest > _LARGE_FACTOR else 1.0

    @property
    def wide(self) -> Any:
        """The dtype of logits and sums."""
        return accumulator(self.call.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Return zeros for the carry of a loop."""
        found: jax.Array = unify_varying((jnp.zeros(shape, dtype), self.x))[0]
        return found

    def columns(self, start: Any, count: int) -> Problem:
        """Return the problem with some of the columns."""
        weight = lax.dynamic_slice_in_dim(self.weight, start, count, 0 if self.call.transpose_weight else 1)
        bias = None if self.bias is None else lax.dynamic_slice_in_dim(self.bias, start, count)
        return dataclasses.replace(self, weight=weight, bias=bias, labels=self.labels - start)

    def rows(self, x: jax.Array, labels: jax.Array) -> Problem:
        """Return the problem with other rows."""
        return dataclasses.replace(self, x=x, labels=labels)

    def _product(self, left: Any, right: Any, contracted: tuple[int, int], dtype: Any) -> jax.Array:
        # On CPUs XLA has no 16-bit product with a wide result for some of the layouts that `vmap` leads to.
        if self.call.examples > 1 and compat.programs.target_kind() == "cpu":
            left, right = left.astype(self.wide), right.astype(self.wide)
        axes = (((contracted[0],), (contracted[1],)), ((), ()))
        return lax.dot_general(left, right, axes, precision=self.call.precision, preferred_element_type=dtype)

    def logits(self) -> jax.Array:
        """Return the logits divided by `factor`, `[rows, columns]`."""
        call = self.call
        values = self._product(self.x, self.weight, (1, 1 if call.transpose_weight else 0), self.wide)
        if self.bias is None:
            return self._capped(values)
        bias = self.bias.astype(self.wide)[None]
        removed = bias == -jnp.inf
        # Without -inf inside, so that higher derivatives of removed columns are 0 and not NaN.
        return jnp.where(removed, -jnp.inf, self._capped(values + jnp.where(removed, 0, bias)))

    def _capped(self, values: jax.Array) -> jax.Array:
        cap, scale = self.call.logits_soft_cap, self.call.logits_scale
        if cap is None:
            return _times(values, scale / self.factor)
        return _times(jnp.tanh(_times(values, scale) * (1 / cap)), cap / self.factor)

    def statistics(self, values: jax.Array) -> Partial:
        """Return the statistics of the logits `values * factor`."""
        names, factor = self.call.statistics, self.factor
        top = _row_max(values)
        exponentials = jnp.exp(_times(values - finite_top(top)[:, None], factor))
        nothing = jnp.zeros_like(top)
        # Where a logit is -inf, its product with 0 is NaN.
        finite = values if self.bias is None else jnp.where(values == -jnp.inf, 0, values)
        return Partial(
            top,
            exponentials.sum(axis=1),
            _times(self._at_labels(values), factor),
            _times(finite.sum(axis=1), factor) if "sum" in names else nothing,
            _times((finite * exponentials).sum(axis=1), factor) if "expected" in names else nothing,
        )

    def _at_labels(self, values: jax.Array) -> jax.Array:
        count = values.shape[1]
        own = (self.labels >= 0) & (self.labels < count)
        at = jnp.clip(self.labels, 0, count - 1)[:, None]
        return jnp.where(own, jnp.take_along_axis(values, at, axis=1, mode="promise_in_bounds")[:, 0], 0)

    def gradient_of_logits(self, values: jax.Array, lse: jax.Array, given: Coefficients) -> jax.Array:
        """Return the gradient of `(x @ weight + bias) * logits_scale`, in float32; see `Coefficients`."""
        removed = None if self.bias is None else values == -jnp.inf
        values = values if removed is None else jnp.where(removed, 0, values)
        s = _times(values, self.factor)
        # With a factor, a large logit may be rounded differently than for the log-sum-exp, and exceed it.
        p = jnp.exp(s - lse[:, None] if self.factor == 1 else at_most_zero(s - lse[:, None]))
        if given.expected is None or given.mean is None:
            d = p * given.softmax[:, None]
        else:
            d = p * (given.softmax[:, None] + given.expected[:, None] * (1 + s - given.mean[:, None]))
        hit = lax.broadcasted_iota(jnp.int32, s.shape, 1) == self.labels[:, None]
        d = d + jnp.where(hit, given.label[:, None], 0)
        if given.constant is not None:
            d = d + given.constant[:, None]
        if self.call.logits_soft_cap is not None:
            d = d * (1 - jnp.square(_times(values, self.factor / self.call.logits_soft_cap)))
        return d if removed is None else jnp.where(removed, 0, d)

    def gradients(
        self, values: jax.Array, lse: jax.Array, given: Coefficients, dtypes: tuple[Any, Any]
    ) -> dict[str, Any]:
        """Return the gradients of `x` and weight in `dtypes`, and that of the bias in the dtype of sums."""
        given = given.scaled(self.call.logits_scale)
        if has_small_range(self.call.dtype):
            given, factor = _in_range(given)
        else:
            factor = None
        d = self.gradient_of_logits(values, lse, given)
        dbias = None if self.bias is None else d.sum(axis=0)
        d = d.astype(self.call.dtype)
        transposed = self.call.transpose_weight
        wide = dtypes if factor is None else (self.wide, self.wide)
        dx = self._product(d, self.weight, (1, 0 if transposed else 1), wide[0])
        dweight = self._product(*((d, self.x) if transposed else (self.x, d)), (0, 0), wide[1])
        if factor is not None:
            dx, dweight = (dx * factor).astype(dtypes[0]), (dweight * factor).astype(dtypes[1])
            dbias = None if dbias is None else dbias * factor[0]
        return {"x": dx, "weight": dweight, "bias": dbias}


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor


@jax.custom_jvp
def _row_max(s: jax.Array) -> jax.Array:
    """Return the largest number of each row.

    JAX divides the derivative by how many numbers are equal to it. These may be none, because XLA may compute `s` twice
    and round it differently. Of a shift, any derivative is right; this one loses the fewest digits.
    """
    return s.max(axis=1)


@_row_max.defjvp
def _row_max_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (s,), (tangent,) = primals, tangents
    top = _row_max(s)
    hit = s == top[:, None]
    count = jnp.maximum(hit.sum(axis=1, dtype=s.dtype), 1)
    return top, jnp.where(hit, tangent, 0).sum(axis=1) / count


def _in_range(given: Coefficients) -> tuple[Coefficients, jax.Array]:
    """Return coefficients whose products with probabilities fit in float16, and the factor `[1, 1]` that restores them.

    The coefficients of a mean over many tokens times small probabilities would underflow.
    """
    present = {name: value for name, value in given._asdict().items() if value is not None and name != "mean"}
    scaled, factor = normalized(jnp.stack(list(present.values()), axis=1), (0, 1))
    columns = jnp.unstack(scaled * _HEADROOM, axis=1)
    return given._replace(**dict(zip(present, columns, strict=True))), factor / _HEADROOM
