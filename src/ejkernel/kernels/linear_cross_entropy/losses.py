# SPDX-License-Identifier: Apache-2.0
"""Losses composed from the two operations.

Under `grad`, a scalar loss is a call of `linear_cross_entropy_gradients` with the loss's gradients as results; its
tangent is their product with the arguments' tangents. So the loss's cotangent becomes a factor of the gradients. All
other losses are sums of the statistics that `linear_cross_entropy` returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ejkernel import compat
from ejkernel.kernels._numbers import accumulator

from .common import GRADIENTS, Statistics, counted_columns, merged, token_losses
from .operation import (
    LinearCrossEntropyConfig,
    LinearCrossEntropyGradientsConfig,
    linear_cross_entropy,
    linear_cross_entropy_gradients,
)

_ARRAYS = (*GRADIENTS, "labels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The arguments of a loss that have gradients, and how logits follow from them.

    Attributes:
        x, weight, bias: The arrays.
        labels: Labels that count from this device's first column.
        options: Keyword arguments of both `linear_cross_entropy` and `linear_cross_entropy_gradients`.
        vocab_axis: Mesh axes over which the vocabulary is sharded, inside `shard_map`.
        cfg: The configuration of one of these operations, or `None`; the other operation looks one up.
    """

    x: Any
    weight: Any
    bias: Any
    labels: Any
    options: Mapping[str, Any]
    vocab_axis: tuple[str, ...]
    cfg: LinearCrossEntropyConfig | LinearCrossEntropyGradientsConfig | None

    @property
    def columns(self) -> Any:
        """The number of columns over which label smoothing spreads."""
        own = self.weight.shape[0 if self.options.get("transpose_weight") else 1]
        return counted_columns(self.bias, own, self.vocab_axis)

    def statistics(self, names: tuple[str, ...]) -> Statistics:
        """Return the statistics of whole rows."""
        cfg = self.cfg if isinstance(self.cfg, LinearCrossEntropyConfig) else None
        bias = () if self.bias is None else (self.bias,)
        results = linear_cross_entropy(
            self.x, self.weight, self.labels, *bias, statistics=names, cfg=cfg, **self.options
        )
        found = Statistics.of(results, names)
        return merged(found, self.vocab_axis) if self.vocab_axis else found

    def gradients(self, names: tuple[str, ...], wanted: tuple[str, ...], factors: Any, **loss: Any) -> Any:
        """Return the statistics, and the wanted gradients of `sum(factors * losses)` by name."""
        cfg = self.cfg if isinstance(self.cfg, LinearCrossEntropyGradientsConfig) else None
        bias = () if self.bias is None else (self.bias,)
        results = linear_cross_entropy_gradients(
            self.x,
            self.weight,
            self.labels,
            factors,
            *bias,
            statistics=names,
            gradients=wanted,
            vocab_axis=self.vocab_axis,
            cfg=cfg,
            **self.options,
            **loss,
        )
        found = Statistics.of(results, names)
        if self.vocab_axis:  # log-sum-exp and maximum are merged already
            label, total = lax.psum((found.label, found.sum), self.vocab_axis)
            found = found._replace(label=label, sum=total)
        return found, dict(zip(wanted, results[2 + len(names) :], strict=True))


def summed_losses(
    head: Head, factors: jax.Array, *, label_smoothing: float, z_loss: float, with_max: bool, with_lse: bool
) -> tuple[jax.Array, Statistics]:
    """Return `sum(factors * losses)`, whose gradient is made together with it, and the statistics.

    Args:
        head: The arguments.
        factors: A factor of each token's loss, in float32; it has a gradient as well.
        label_smoothing, z_loss: See `token_losses`.
        with_max: Whether the statistics include the maximum; it has no gradient.
        with_lse: Whether the log-sum-exp in the statistics has a gradient; it needs the logits again.
    """
    names = (*(["sum"] if label_smoothing else []), *(["max"] if with_max else []))
    loss = {"label_smoothing": label_smoothing, "z_loss": z_loss}

    @jax.custom_jvp
    def total(x: Any, weight: Any, bias: Any, labels: Any, factors: Any) -> tuple[jax.Array, Statistics]:
        own = dataclasses.replace(head, x=x, weight=weight, bias=bias, labels=labels)
        found = own.statistics(names)
        return weighted(factors, token_losses(found, columns=own.columns, **loss)).sum(), found

    def tangents(primals: Any, tangents: Any) -> Any:
        # The labels as well: a tracer that the rule closes over may belong to a trace that has ended.
        *arrays, factors = primals
        own = dataclasses.replace(head, **dict(zip(_ARRAYS, arrays, strict=True)))
        given = {
            name: tangent
            for name, tangent in zip((*_ARRAYS, "factors"), tangents, strict=True)
            if name != "labels" and tangent is not None and not isinstance(tangent, SymbolicZero)
        }
        wanted = tuple(name for name in GRADIENTS if name in given)
        found, made = own.gradients(names, wanted, factors, **loss) if wanted else (own.statistics(names), {})
        losses = token_losses(found, columns=own.columns, **loss)
        out = weighted(factors, losses).sum(), found
        # A policy of `jax.checkpoint` may save these by name.
        parts = [
            _product(checkpoint_name(gradient, "linear_cross_entropy.residuals"), given[name])
            for name, gradient in made.items()
        ]
        tangent = sum(parts, jnp.zeros((), out[0].dtype))
        if parts and head.vocab_axis:  # each device has a part of the columns
            tangent = lax.psum(tangent, head.vocab_axis)
        if "factors" in given:
            tangent = tangent + jnp.sum(given["factors"] * losses)
        return out, (tangent.astype(out[0].dtype), _tangents_of_statistics(own, found, given, with_lse=with_lse))

    total.defjvp(tangents, symbolic_zeros=True)
    found: tuple[jax.Array, Statistics] = total(head.x, head.weight, head.bias, head.labels, factors)
    return found


def _tangents_of_statistics(head: Head, found: Statistics, given: Mapping[str, Any], *, with_lse: bool) -> Statistics:
    """Return zeros, except for the log-sum-exp if its gradient is wanted."""
    zeros: Statistics = jax.tree.map(_zeros_like, found)
    names = [name for name in GRADIENTS if name in given]
    if not with_lse or not names:
        return zeros

    def lse(*arrays: Any) -> jax.Array:
        return dataclasses.replace(head, **dict(zip(names, arrays, strict=True))).statistics(()).lse

    primals = [getattr(head, name) for name in names]
    return zeros._replace(lse=jax.jvp(lse, primals, [given[name] for name in names])[1])


def _zeros_like(value: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.Array:
    # With the sharding of the value over explicit axes, and varying like it over manual ones.
    zeros: jax.Array = compat.tracing.match_varying(value, jnp.zeros_like(value, dtype, shape))
    return zeros


def _product(gradient: jax.Array, tangent: jax.Array) -> jax.Array:
    dtype = accumulator(gradient.dtype)
    if not gradient.size:  # XLA's CPU compiler crashes when an empty gradient and another are summed over devices
        return _zeros_like(gradient, (), dtype)
    return jnp.sum(gradient.astype(dtype) * tangent.astype(dtype))


def weighted(factors: jax.Array, losses: jax.Array) -> jax.Array:
    """Return the products, in which a factor of 0 removes even an infinite loss; its gradient is a finite loss."""
    return factors * jnp.where((factors == 0) & ~jnp.isfinite(losses), 0, losses)
