# SPDX-License-Identifier: Apache-2.0
"""The operation behind `grouped_matmul` with an activation or a gate: what is made of products, in their kernel.

It keeps the products for its backward, as plain JAX would, so that no product is computed twice; `jax.checkpoint` has
the forward computed again instead. Each product of a gradient is a call of `grouped_matmul` or `grouped_matmul_wgrad`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from ejkernel.kernels._numbers import accumulator
from ejkernel.kernels._options import canonical_flag
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.utils.messages.names import did_you_mean

from . import _arguments as arguments
from . import reference
from .common import GroupedMatmulCall, own_rows
from .epilogue import ACTIVATIONS, finished
from .operation import (
    GROUPS,
    REFERENCE_BLOCK,
    SPLIT,
    GroupedOperation,
    axes_of_groups,
    gradients_of_product,
    grouped_matmul,
    shared_options,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulActivationConfig(OperationConfig):
    """How one call with an activation or a gate runs; `fwd` alone is looked at, for gradients are other calls."""

    implementation: str = "xla"


class GroupedMatmulActivation(GroupedOperation[GroupedMatmulActivationConfig]):
    """The operation behind `grouped_matmul` with an activation or a gate, which documents the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(
                f"{__package__}.mosaic_gpu.implementation:MosaicGpuActivation", platforms=("gpu",)
            ),
            "xla": f"{__package__}.xla:XlaActivation",
            "megablox": LazyImplementation(f"{__package__}.megablox:MegabloxActivation", platforms=("tpu",)),
        }
    )

    def __init__(self) -> None:
        super().__init__(name="grouped_matmul_activation")

    def prepare(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        gate: Any = None,
        row_scale: Any = None,
        *,
        activation: Any = None,
        transpose_rhs: Any = False,
        preferred_element_type: Any = None,
        precision: Any = None,
        first_group: Any = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments; options that say nothing are left out, so that they are not in the call's key."""
        transpose_rhs = canonical_flag("transpose_rhs", transpose_rhs)
        arguments.check_product(lhs, rhs, transpose_rhs=transpose_rhs)
        groups = arguments.canonical_groups(group_sizes, first_group, rhs.shape[0])
        if gate is not None:
            arguments.check_gate(gate, rhs)
        if row_scale is not None:
            arguments.check_row_scale(row_scale, lhs)
        if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
            raise ArgumentError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, or None; got {activation!r}"
                f"{did_you_mean(activation, ACTIVATIONS)}"
            )
        if activation is None and gate is None:
            raise ArgumentError("activation and gate are both None; that is a call of grouped_matmul.")
        said = arguments.said_options(
            lhs.dtype,
            activation=activation,
            transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type,
            precision=precision,
        )
        return (lhs, rhs, groups, gate, row_scale), said | {"implementation": self.requested(implementation)}

    def describe(self, *args: Any, **options: Any) -> GroupedMatmulCall:
        """Return the sizes and dtypes."""
        lhs, rhs, groups, gate, row_scale = args
        activation = options.pop("activation", None)
        product = grouped_matmul.describe(lhs, rhs, groups, row_scale, **options)
        return dataclasses.replace(product, activation=activation, gated=gate is not None)

    def sharding_rule(self, inv: Invocation[GroupedMatmulActivationConfig, jax.Array]) -> ShardingRule:
        """Return that all may be split but what is summed over, for an activation takes the whole sum.

        Rows of groups that a part lacks are zero in its result, so that those of all parts add up.
        """
        gated, scaled = (inv.args[index] is not None for index in (3, 4))
        rhs = "groups columns inner" if inv.kwargs.get("transpose_rhs") else "groups inner columns"
        operands = ["rows inner", rhs, axes_of_groups(inv), *[rhs] * gated, *["rows"] * scaled]
        split = SPLIT | {"split": "rows groups columns"}
        # What is kept for the backward is added up as the result is: a residual has to be one array for all devices.
        # Against that, the gradients of both products by the rows are one sum, and not two.
        products = ", ".join(["rows columns"] * (1 + gated))
        return ShardingRule(f"{', '.join(operands)} -> rows columns", residuals=products, **split)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output, with sums and what is made of them in float32."""
        lhs, rhs, groups, gate, row_scale = args
        how = {"transpose_rhs": options.get("transpose_rhs", False), "precision": "highest", "block": REFERENCE_BLOCK}
        products = [reference.product(lhs, matrices, groups, **how) for matrices in (rhs, gate) if matrices is not None]
        out = finished(products, own_rows(groups, lhs.shape[0], rhs.shape[0]), row_scale, options.get("activation"))
        return out.astype(options.get("preferred_element_type") or lhs.dtype)

    # Derivatives.

    def run(self, *args: Any, cfg: GroupedMatmulActivationConfig, **options: Any) -> Any:
        """Return the output; its tangents are made of calls."""
        running = self._running(cfg, args, options)

        def output(*args: Any) -> Any:
            return running.implementation.output(running.call, *args, params=running.params)

        return _differentiable(output, lambda *args: self._by_calls(*args, **options)[0], args)

    def fwd_with_residuals(
        self, *args: Any, cfg: GroupedMatmulActivationConfig, **options: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the output and the products; their tangents are made of calls."""
        running = self._running(cfg, args, options)

        def forward(*args: Any) -> Any:
            return running.implementation.forward(running.call, *args, params=running.params)

        found: tuple[Any, tuple[Any, ...]] = _differentiable(
            forward, lambda *args: self._by_calls(*args, **options), args
        )
        return found

    def vjp(
        self,
        residuals: Any,
        out: Any,
        cotangents: tuple[Any, ...],
        *args: Any,
        cfg: GroupedMatmulActivationConfig,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return the gradients of the operands, by products and sums of products that are calls of their own."""
        lhs, rhs, groups, gate, row_scale = args
        products = [product.astype(accumulator(product.dtype)) for product in residuals]
        activation, own = options.get("activation"), own_rows(groups, lhs.shape[0], rhs.shape[0])
        # JAX differentiates what is made of products; these are calls, each with a configuration of its own.
        pull = jax.vjp(lambda *given: finished(given[0], own, given[1], activation), products, row_scale)[1]
        dproducts, dscale = pull(cotangents[0].astype(products[0].dtype))
        pairs = zip((rhs, gate), dproducts, strict=False)
        found = [gradients_of_product((lhs, matrices, groups), dout, options) for matrices, dout in pairs]
        dlhs = found[0][0] if gate is None else found[0][0] + found[1][0]
        return dlhs.astype(lhs.dtype), found[0][1], None, None if gate is None else found[1][1], dscale

    def _by_calls(self, *args: Any, **options: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the output and the products, these by calls of their own."""
        lhs, rhs, groups, gate, row_scale = args
        described = self.describe(*args, **{k: v for k, v in options.items() if k != "implementation"})
        shared = shared_options(options, grouped_matmul) | {
            "transpose_rhs": described.transpose_rhs,
            "preferred_element_type": described.kept_dtype,
        }
        products = tuple(
            grouped_matmul(lhs, matrices, groups, **shared) for matrices in (rhs, gate) if matrices is not None
        )
        wide = [product.astype(accumulator(product.dtype)) for product in products]
        own = own_rows(groups, lhs.shape[0], rhs.shape[0])
        out = finished(wide, own, row_scale, options.get("activation"))
        return out.astype(described.out_dtype), products

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with eight groups and a gate."""
        (lhs, rhs, group_sizes), _ = grouped_matmul.typical_call()
        return (lhs, rhs, group_sizes, rhs), {"activation": "silu"}


grouped_matmul_activation = GroupedMatmulActivation()


def _differentiable(function: Callable[..., Any], by_calls: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return `function(*args)`, with the derivatives of `by_calls`."""

    @jax.custom_jvp
    def compute(*args: Any) -> Any:
        return function(*args)

    def tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
        # What is not differentiated costs no products.
        given = {i: t for i, t in enumerate(tangents) if i != GROUPS and not isinstance(t, SymbolicZero | None)}

        def of_given(*varied: Any) -> Any:
            replaced = dict(zip(given, varied, strict=True))
            return by_calls(*[replaced.get(index, primal) for index, primal in enumerate(primals)])

        out, found = jax.jvp(of_given, [primals[index] for index in given], list(given.values()))
        return out, found

    compute.defjvp(tangents, symbolic_zeros=True)
    return compute(*args)
