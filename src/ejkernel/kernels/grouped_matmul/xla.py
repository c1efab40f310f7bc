# SPDX-License-Identifier: Apache-2.0
"""Grouped products in plain JAX: a loop over tiles of rows, or XLA's ragged product, which is native on TPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ejkernel.kernels._numbers import accumulator
from ejkernel.kernels._options import POSITIVE, check_parameters
from ejkernel.kernels._varying import one_by_one
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields
from ejkernel.ops.utils.values.signature import is_known

from . import reference
from .common import PREACTIVATIONS, GroupedMatmulCall, Groups, activated, own_rows, row_spans, scaled_rows, without_rest

_Spans = tuple[jax.Array, jax.Array]  # where the rows of each group begin, and where they end
_BLOCKS = (128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaParams(NamedFields):
    """Parameters of the loop over rows.

    Attributes:
        block_rows: Rows per step; `None` multiplies all rows at once with `jax.lax.ragged_dot_general`. Except on TPUs,
            that function multiplies every row by the matrix of every group, and a NaN in one group reaches the others.
    """

    block_rows: int | None = None

    def __post_init__(self) -> None:
        check_parameters(self, block_rows=POSITIVE)


class _Xla(Implementation[GroupedMatmulCall]):
    """Base of the product and the weights' gradient."""

    name = "xla"
    params = XlaParams
    differentiable = True
    features = frozenset({"precision", "first_group"})

    def heuristic(self, call: GroupedMatmulCall) -> XlaParams:
        """Return tiles of about the size of the groups."""
        if call.platform == "tpu" or not _has_tiles(call):
            return XlaParams()
        return XlaParams(block_rows=max(size for size in _BLOCKS if size <= max(call.usual_rows, _BLOCKS[0])))

    def space(self, call: GroupedMatmulCall) -> list[XlaParams]:
        """Return all tile sizes up to four times the usual size of a group."""
        whole = [XlaParams()] if call.platform == "tpu" or not _has_tiles(call) else []
        if not _has_tiles(call):
            return whole
        most = max(_BLOCKS[0], 4 * call.usual_rows)
        return [*whole, *[XlaParams(block_rows=size) for size in _BLOCKS if size <= most]]


class Xla(_Xla):
    """The product, on every platform."""

    features = frozenset({"precision", "row_scale", "first_group"})

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: XlaParams) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        lhs, rhs, groups, *scales = args
        out = product(call, lhs, rhs, groups, params)
        for row_scale in scales:
            out = scaled_rows(out, row_scale, own_rows(groups, call.rows, call.groups))
        return out.astype(call.out_dtype), ()


class XlaActivation(_Xla):
    """Products, then their epilogue, on every platform."""

    residuals = PREACTIVATIONS
    features = frozenset({"precision", "activation", "gate", "row_scale", "first_group"})

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: XlaParams) -> tuple[jax.Array, Any]:
        """Return the output and the products."""
        lhs, rhs, groups, gate, row_scale = args
        return activated(call, lambda matrix: product(call, lhs, matrix, groups, params), rhs, groups, gate, row_scale)


class XlaWgrad(_Xla):
    """The weights' gradient, on every platform."""

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: XlaParams) -> tuple[jax.Array, Any]:
        """Return the gradient, without residuals."""
        lhs, rhs, groups = args
        if params.block_rows is None:
            spans = row_spans(groups, call.rows, call.groups)
            lhs, rhs = (
                _own_first(call, without_rest(x, own_rows(groups, call.rows, call.groups)), spans) for x in (lhs, rhs)
            )
            out = _whole(call, (lhs, rhs), spans, ((0,), (0,)), [])
        else:
            out = reference.weights_gradient(
                lhs, rhs, groups, count=call.groups, block=params.block_rows, precision=call.precision
            )
        return out.astype(call.out_dtype), ()


def _has_tiles(call: GroupedMatmulCall) -> bool:
    """Return whether the sizes are numbers, which tiles need."""
    return is_known(call.rows, call.groups)


def product(call: GroupedMatmulCall, lhs: jax.Array, rhs: jax.Array, groups: Groups, params: XlaParams) -> jax.Array:
    """Return a product in the accumulator dtype."""
    if params.block_rows is None:
        spans = row_spans(groups, call.rows, call.groups)
        axes = ((1,), (2 if call.transpose_rhs else 1,))
        out = _own_back(call, _whole(call, (_own_first(call, lhs, spans), rhs), spans, axes, [0]), spans)
        return without_rest(out, own_rows(groups, call.rows, call.groups))
    return reference.product(
        lhs,
        rhs,
        groups,
        block=params.block_rows,
        transpose_rhs=call.transpose_rhs,
        precision=call.precision,
    )


def _whole(
    call: GroupedMatmulCall, operands: tuple[jax.Array, jax.Array], spans: _Spans, axes: Any, of_group: Any
) -> jax.Array:
    """Return the product by XLA's ragged dot."""
    numbers = lax.RaggedDotDimensionNumbers((axes, ((), ())), [0], of_group)
    dtypes: dict[str, Any] = {"precision": call.precision, "preferred_element_type": accumulator(call.dtype)}

    def multiply(left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(left, right, sizes, numbers, **dtypes)

    def of_examples(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        # JAX batches a ragged product once, and only if all operands have the axis.
        pairs = zip(arrays, batched, strict=True)
        every = [x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, is_mapped in pairs]
        return one_by_one(jax.vmap(multiply), *every), True

    batchable: Any = custom_vmap(multiply)
    batchable.def_vmap(of_examples)
    product: jax.Array = batchable(*operands, spans[1] - spans[0])
    return product


def _own_first(call: GroupedMatmulCall, x: jax.Array, spans: _Spans) -> jax.Array:
    """Roll the rows so that those of the groups with matrices come first, as XLA requires."""
    return x if call.all_groups is None else jnp.roll(x, -spans[0][:1].sum(), axis=0)


def _own_back(call: GroupedMatmulCall, x: jax.Array, spans: _Spans) -> jax.Array:
    """Undo `_own_first`."""
    return x if call.all_groups is None else jnp.roll(x, spans[0][:1].sum(), axis=0)
