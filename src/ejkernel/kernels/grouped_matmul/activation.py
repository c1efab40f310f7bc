# SPDX-License-Identifier: Apache-2.0
"""The operation behind `grouped_matmul` with an activation or a gate, fused into the epilogue of the products.

The forward saves the products as residuals, as plain JAX would, so the backward recomputes none; under
`jax.checkpoint`, JAX runs the forward again instead. Each product of a gradient is a call of `grouped_matmul` or
`grouped_matmul_wgrad`.
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
from .common import ACTIVATIONS, GroupedMatmulCall, finished, own_rows
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
    """Configuration of one call with an activation or a gate; only `fwd` counts, because gradients are other calls."""

    implementation: str = "xla"


class GroupedMatmulActivation(GroupedOperation[GroupedMatmulActivationConfig]):
    """The operation behind `grouped_matmul` with an activation or a gate; see there for the arguments."""

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
        """Check the arguments, and drop options with default values, which the key omits."""
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
            raise ArgumentError("activation and gate are both None; pass one of them, or call grouped_matmul.")
        said = arguments.said_options(
            lhs.dtype,
            activation=activation,
            transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type,
            precision=precision,
        )
        return (lhs, rhs, groups, gate, row_scale), said | {"implementation": self.requested(implementation)}

    def describe(self, *args: Any, **options: Any) -> GroupedMatmulCall:
        """Return the sizes and dtypes of a call."""
        lhs, rhs, groups, gate, row_scale = args
        activation = options.pop("activation", None)
        product = grouped_matmul.describe(lhs, rhs, groups, row_scale, **options)
        return dataclasses.replace(product, activation=activation, gated=gate is not None)

    def sharding_rule(self, inv: Invocation[GroupedMatmulActivationConfig, jax.Array]) -> ShardingRule:
        """Return a rule that splits all axes except `inner`, because an activation needs the complete sum.

        In the result of a shard, rows of other groups are zero, so the results of all shards add up.
        """
        gated, scaled = (inv.args[index] is not None for index in (3, 4))
        rhs = "groups columns inner" if inv.kwargs.get("transpose_rhs") else "groups inner columns"
        operands = ["rows inner", rhs, axes_of_groups(inv), *[rhs] * gated, *["rows"] * scaled]
        split = SPLIT | {"split": "rows groups columns"}
        # The residuals are summed over shards like the result: each must be one array for all devices. In return, the
        # gradient of the rows takes one all-reduce for both products instead of two.
        products = ", ".join(["rows columns"] * (1 + gated))
        return ShardingRule(f"{', '.join(operands)} -> rows columns", residuals=products, **split)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output, with sums and epilogue in float32."""
        lhs, rhs, groups, gate, row_scale = args
        how = {"transpose_rhs": options.get("transpose_rhs", False), "precision": "highest", "block": REFERENCE_BLOCK}
        products = [reference.product(lhs, matrices, groups, **how) for matrices in (rhs, gate) if matrices is not None]
        out = finished(products, own_rows(groups, lhs.shape[0], rhs.shape[0]), row_scale, options.get("activation"))
        return out.astype(options.get("preferred_element_type") or lhs.dtype)

    # Derivatives.

    def run(self, *args: Any, cfg: GroupedMatmulActivationConfig, **options: Any) -> Any:
        """Return the output; calls of `grouped_matmul` compute its tangents."""
        running = self._running(cfg, args, options)

        def output(*args: Any) -> Any:
            return running.implementation.output(running.call, *args, params=running.params)

        return _differentiable(output, lambda *args: self._by_calls(*args, **options)[0], args)

    def fwd_with_residuals(
        self, *args: Any, cfg: GroupedMatmulActivationConfig, **options: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the output and the products; calls of `grouped_matmul` compute their tangents."""
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
        """Return the gradients of the operands, by separate calls of `grouped_matmul` and `grouped_matmul_wgrad`."""
        lhs, rhs, groups, gate, row_scale = args
        products = [product.astype(accumulator(product.dtype)) for product in residuals]
        activation, own = options.get("activation"), own_rows(groups, lhs.shape[0], rhs.shape[0])
        # JAX differentiates the epilogue; each product is a call with a separate configuration.
        pull = jax.vjp(lambda *given: finished(given[0], own, given[1], activation), products, row_scale)[1]
        dproducts, dscale = pull(cotangents[0].astype(products[0].dtype))
        pairs = zip((rhs, gate), dproducts, strict=False)
        found = [gradients_of_product((lhs, matrices, groups), dout, options) for matrices, dout in pairs]
        dlhs = found[0][0] if gate is None else found[0][0] + found[1][0]
        return dlhs.astype(lhs.dtype), found[0][1], None, None if gate is None else found[1][1], dscale

    def _by_calls(self, *args: Any, **options: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the output and the products, computed by separate calls of `grouped_matmul`."""
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
        # Skip the products of operands without a tangent.
        given = {i: t for i, t in enumerate(tangents) if i != GROUPS and not isinstance(t, SymbolicZero | None)}

        def of_given(*varied: Any) -> Any:
            replaced = dict(zip(given, varied, strict=True))
            return by_calls(*[replaced.get(index, primal) for index, primal in enumerate(primals)])

        out, found = jax.jvp(of_given, [primals[index] for index in given], list(given.values()))
        return out, found

    compute.defjvp(tangents, symbolic_zeros=True)
    return compute(*args)
