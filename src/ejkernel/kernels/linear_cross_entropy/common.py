# SPDX-License-Identifier: Apache-2.0
"""Definitions that all implementations share: the description of a call, statistics of rows, and their merging."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.implementation import OperationCall

STATISTICS: Final = ("sum", "expected", "max")
"""Optional results of a call, in this order, after the log-sum-exp and the label's logit."""

GRADIENTS: Final = ("x", "weight", "bias")
"""Arguments with a gradient, in the order of the results."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearCrossEntropyCall(OperationCall):
    """A call without its arrays.

    Attributes:
        tokens: Number of rows of `x`.
        inner: Length of a row of `x`.
        columns: Number of columns of the logits: the vocabulary, or a device's part of it.
        dtype: Name of the dtype of `x` and `weight`.
        transpose_weight: Whether the weight is `[columns, inner]`.
        bias: Whether the call has a bias.
        statistics: The members of `STATISTICS` that the call returns.
        gradients: The members of `GRADIENTS` that the call returns; empty for `linear_cross_entropy`.
        label_smoothing, z_loss: Options of the loss, which determine the gradients; 0 for `linear_cross_entropy`.
        logits_soft_cap: Logits become `cap * tanh(logits / cap)`; `None`: no cap.
        logits_scale: Factor on the logits before the cap.
        precision: Precision of the products, named as in `jax.lax.Precision`; `None` means JAX's default.
        accumulation_dtype: Dtype of sums over chunks of rows; `None` leaves it to the configuration.
        memory_limit: Bytes that temporary arrays may take; `None`: a part of the device's memory.
        vocab_axis: Mesh axes over which the vocabulary is sharded; empty if this device has all of it.
    """

    tokens: int
    inner: int
    columns: int
    dtype: str
    transpose_weight: bool = False
    bias: bool = False
    statistics: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logits_soft_cap: float | None = None
    logits_scale: float = 1.0
    precision: str | None = None
    accumulation_dtype: str | None = None
    memory_limit: int | None = None
    vocab_axis: tuple[str, ...] = ()

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`."""
        asked = {
            "bias": self.bias,
            "label_smoothing": self.label_smoothing != 0,
            "z_loss": self.z_loss != 0,
            "logits_soft_cap": self.logits_soft_cap is not None,
            "logits_scale": self.logits_scale != 1,
            "precision": self.precision is not None,
            "accumulation_dtype": self.accumulation_dtype is not None,
            "vocab_axis": bool(self.vocab_axis),
            **{f"statistic {name!r}": name in self.statistics for name in STATISTICS},
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)


class Statistics(NamedTuple):
    """Statistics of rows of logits, one number per row in float32; `None` where the call does not want them.

    Attributes:
        lse: Log-sum-exp.
        label: The logit at the label; 0 if the label is not one of the columns.
        sum: Sum of the finite logits.
        expected: Expectation of the logits under the softmax.
        max: The largest logit.
    """

    lse: jax.Array
    label: jax.Array
    sum: jax.Array | None = None
    expected: jax.Array | None = None
    max: jax.Array | None = None

    @classmethod
    def of(cls, results: Any, names: tuple[str, ...]) -> Statistics:
        """Return the statistics in the leading results of a call that returns the optional statistics `names`."""
        lse, label, *more = results[: 2 + len(names)]
        return cls(lse, label, **dict(zip((n for n in STATISTICS if n in names), more, strict=True)))

    def results(self) -> tuple[jax.Array, ...]:
        """Return the statistics that are present, in order."""
        return tuple(value for value in self if value is not None)


def log_of_sum(top: jax.Array, total: jax.Array) -> jax.Array:
    """Return `top + log(total)`: the log-sum-exp, from the maximum and the sum of exponentials relative to it."""
    # Without log(0) inside, so that derivatives are 0 and not NaN where a device's columns are all removed.
    return jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))


def expectation(weighted: jax.Array, total: jax.Array) -> jax.Array:
    """Return `weighted / total`: the expected logit; 0 where all logits are -inf, as on a device with only padding."""
    return weighted / jnp.where(total == 0, 1, total)


def finite_top(top: jax.Array) -> jax.Array:
    """Return maxima to subtract from logits; 0 in place of -inf, where all logits are -inf."""
    return jnp.where(top == -jnp.inf, 0, top)


def merged_lse(lse: jax.Array, vocab_axis: tuple[str, ...]) -> jax.Array:
    """Return the log-sum-exp over the whole vocabulary from that of each device's part; two numbers per row travel."""
    if not vocab_axis:
        return lse
    top = finite_top(lax.pmax(lax.stop_gradient(lse), vocab_axis))
    return log_of_sum(top, lax.psum(jnp.exp(lse - top), vocab_axis))


def merged(local: Statistics, vocab_axis: tuple[str, ...]) -> Statistics:
    """Return the statistics of whole rows from those of each device's part of the vocabulary."""
    lse = merged_lse(local.lse, vocab_axis)
    parts = summable(local, lse)
    # One collective sums all of them.
    label, total, expected = lax.psum((parts.label, parts.sum, parts.expected), vocab_axis)
    return Statistics(lse, label, total, expected, merged_max(local.max, vocab_axis))


def merged_on_all_devices(found: Statistics, vocab_axis: tuple[str, ...]) -> Statistics:
    """Return the statistics with the log-sum-exp and maximum over the whole vocabulary; the others stay local."""
    return found._replace(lse=merged_lse(found.lse, vocab_axis), max=merged_max(found.max, vocab_axis))


def merged_max(top: jax.Array | None, vocab_axis: tuple[str, ...]) -> jax.Array | None:
    """Return the maxima over the whole vocabulary; they have no gradient."""
    if top is None or not vocab_axis:
        return top
    found: jax.Array = lax.pmax(lax.stop_gradient(top), vocab_axis)
    return found


def summable(local: Statistics, lse: jax.Array) -> Statistics:
    """Return a device's statistics, with those that add up over devices weighted by the device's part of the softmax.

    Args:
        local: The statistics of the device's part of the vocabulary.
        lse: The log-sum-exp over the whole vocabulary.
    """
    if local.expected is None:
        return local._replace(lse=lse)
    return local._replace(lse=lse, expected=jnp.exp(local.lse - lse) * local.expected)


def counted_columns(bias: jax.Array | None, columns: int, vocab_axis: tuple[str, ...] = ()) -> Any:
    """Return the number of columns over which label smoothing spreads: all except those with a bias of -inf."""
    if bias is None:
        return columns * (lax.axis_size(vocab_axis) if vocab_axis else 1)
    count = jnp.sum(bias > -jnp.inf).astype(jnp.float32)
    return lax.psum(count, vocab_axis) if vocab_axis else count


def token_losses(found: Statistics, *, label_smoothing: float, z_loss: float, columns: Any) -> jax.Array:
    """Return the loss of each token from the statistics of its logits.

    Args:
        found: The statistics, with `sum` if there is label smoothing.
        label_smoothing: The share of the target spread evenly over all columns.
        z_loss: Factor of the squared log-sum-exp.
        columns: The number of columns over which the target is spread.
    """
    losses = found.lse
    if label_smoothing < 1:  # the logit of a removed column, -inf, times 0 would be NaN
        losses = losses - (1 - label_smoothing) * found.label
    if label_smoothing and found.sum is not None:
        losses = losses - label_smoothing * found.sum / columns  # not label_smoothing / columns: that is float32
    if z_loss:
        losses = losses + z_loss * found.lse**2
    return losses


class Coefficients(NamedTuple):
    """Numbers per row that determine the gradient of the logits, `[tokens]` each.

    With `p` the softmax, the gradient of a logit `s` is `p * (softmax + expected * (1 + s - mean)) + constant`, and
    `label` more at the label.

    Attributes:
        softmax: Coefficient of the softmax.
        label: Added at the label.
        constant: Added everywhere; `None` for 0.
        expected: Coefficient of the derivative of the expected logit; `None` for 0.
        mean: The expected logit.
    """

    softmax: jax.Array
    label: jax.Array
    constant: jax.Array | None = None
    expected: jax.Array | None = None
    mean: jax.Array | None = None

    def scaled(self, factor: float) -> Coefficients:
        """Return the coefficients that multiply the gradient by `factor`."""
        if factor == 1:
            return self
        constant, expected = (None if x is None else x * factor for x in (self.constant, self.expected))
        return self._replace(
            softmax=self.softmax * factor, label=self.label * factor, constant=constant, expected=expected
        )


def coefficients_of_loss(
    call: LinearCrossEntropyCall, lse: jax.Array, factors: jax.Array, columns: Any
) -> Coefficients:
    """Return the coefficients for the gradient of `sum(factors * losses)`; see `token_losses`."""
    softmax = factors * (1 + 2 * call.z_loss * lse) if call.z_loss else factors
    constant = -factors * call.label_smoothing / columns if call.label_smoothing else None
    return Coefficients(softmax, -factors * (1 - call.label_smoothing), constant)


def coefficients_of_statistics(found: Statistics, cotangents: Statistics) -> Coefficients:
    """Return the coefficients for the gradient of `linear_cross_entropy`; the maximum has no gradient."""
    return Coefficients(cotangents.lse, cotangents.label, cotangents.sum, cotangents.expected, found.expected)
