# SPDX-License-Identifier: Apache-2.0
"""The operation behind `grouped_matmul` of quantised operands with an epilogue, and its dense form.

The contract of an implementation. It sees `lhs [m, k]`, `rhs [groups, n, k]` or `[groups, k, n]`, the groups, both
operands' scales or `None`, if there is a gate, a pair of its matrices and their scales, and if the call has them,
factors of rows. It returns the float32 activation in `call.values`, and the float32 scales of its 1x128 blocks; or
without `call.values`, the activation in `call.out_dtype`. Rows outside all groups are zero.

The gradient computes the products again, by calls of `quantized_grouped_matmul`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._options import type_text
from ejkernel.kernels.grouped_matmul.common import ACTIVATIONS, finished, own_rows
from ejkernel.kernels.grouped_matmul.operation import GROUPS, GroupedOperation, axes_of_groups
from ejkernel.kernels.quantized_matmul.operation import example_operand, gradient_options
from ejkernel.kernels.quantized_matmul.quantized import (
    LARGEST,
    Block,
    Quantized,
    canonical_dtype,
    check_quantized,
)
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.kernels.quantized_matmul.sharding import ScaleAxes
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.types import Cost
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.utils.messages.names import did_you_mean

from .common import QuantizedGroupedActivationCall, activation_of
from .operation import QuantizedGroupedMatmulConfig, constant, quantized_grouped_matmul

_Invocation = Invocation["QuantizedGroupedActivationConfig", Any]
_PACKAGE = "ejkernel.kernels.quantized_matmul"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedGroupedActivationConfig(OperationConfig):
    """Configuration of one matmul of `Quantized` operands with `quantize=`, `activation=` or `gate=`.

    Only `fwd` counts, because gradients are other calls.
    """

    implementation: str = "xla"


class QuantizedGroupedActivation(GroupedOperation[QuantizedGroupedActivationConfig]):
    """The operation behind `grouped_matmul` with quantised operands and an epilogue; see there for the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(
                f"{_PACKAGE}.mosaic_gpu.activation:MosaicGpuActivation", platforms=("gpu",)
            ),
            "xla": f"{_PACKAGE}.grouped.xla:XlaGroupedActivation",
        }
    )

    def __init__(self) -> None:
        super().__init__(name="quantized_grouped_activation")

    def prepare(  # noqa: PLR0917 - the arrays are positional
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        lhs_scale: Any = None,
        rhs_scale: Any = None,
        gate: Any = None,
        row_scale: Any = None,
        *,
        quantize: Any = None,
        activation: Any = None,
        preferred_element_type: Any = None,
        lhs_block: Any = None,
        rhs_block: Any = None,
        transpose_rhs: Any = False,
        accumulation: Any = "exact",
        first_group: Any = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop options with default values, which the key omits.

        `gate` is a pair: the gate's numbers, and their scales or `None`.
        """
        for name, scale in (("lhs", lhs_scale), ("rhs", rhs_scale)):
            if quantize is not None and scale is None:
                raise ArgumentError(
                    f"lhs and rhs must both be Quantized to pass quantize=, and {name} is not; quantize the result."
                )
        if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
            raise ArgumentError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, or None; got {activation!r}"
                f"{did_you_mean(activation, ACTIVATIONS)}"
            )
        args, options = quantized_grouped_matmul.prepare(
            *(lhs, rhs, group_sizes, lhs_scale, rhs_scale, row_scale),
            lhs_block=lhs_block,
            rhs_block=rhs_block,
            transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type,
            accumulation=accumulation,
            first_group=first_group,
        )
        more: tuple[Any, ...] = args[5:] and (None, *args[5:])
        if gate is not None:
            check_gate(gate, (rhs, rhs_scale), options.get("rhs_block"))
            more = (tuple(gate), *more[1:])
        own = {
            "quantize": None if quantize is None else canonical_dtype("quantize", quantize, tuple(LARGEST)),
            "activation": activation,
        }
        options |= {name: value for name, value in own.items() if value is not None}
        return (*args[:5], *more), options | {"implementation": self.requested(implementation)}

    def describe(
        self, *args: Any, quantize: str | None = None, activation: str | None = None, **options: Any
    ) -> QuantizedGroupedActivationCall:
        """Return the sizes, dtypes and blocks of a call."""
        gate, *factors = args[5:] or (None,)
        product = quantized_grouped_matmul.describe(*args[:5], *factors, **options)
        fields = {field.name: getattr(product, field.name) for field in dataclasses.fields(product)}
        more: dict[str, Any] = {"activation": activation, "gated": gate is not None, "values": quantize}
        if quantize is not None:
            more["out_dtype"] = "float32"  # of the arithmetic
        return QuantizedGroupedActivationCall(**fields | more)

    def run(self, *args: Any, cfg: QuantizedGroupedActivationConfig, **options: Any) -> Any:
        """Return the activation; quantised operands have no derivatives."""
        product, more = constant(args[:5]), args[5:]
        if more and more[0] is not None and more[0][1] is not None:
            more = (jax.lax.stop_gradient(more[0]), *more[1:])
        return super().run(*product, *more, cfg=cfg, **options)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the activation of float32 products of the dequantised operands."""
        shared = {name: options[name] for name in ("lhs_block", "rhs_block", "transpose_rhs") if name in options}
        products = [
            quantized_grouped_matmul.reference(*each, preferred_element_type="float32", **shared)
            for each in products_of(args)
        ]
        return activation_of(self.describe(*args, **options), products, args[GROUPS], *args[6:])

    def custom_vjp(
        self,
        primals: tuple[Any, ...],
        cfg: QuantizedGroupedActivationConfig,
        kwargs: dict[str, Any],
        cotangents: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """Return the gradients of operands without scales and of the row factors, by calls of the products."""
        lhs, rhs, groups, lhs_scale, rhs_scale, *more = primals
        found: list[Any] = [None] * len(primals)
        row_scale = more[1] if len(more) > 1 else None
        if "quantize" in kwargs or (None not in (lhs_scale, rhs_scale) and row_scale is None):
            return tuple(found)
        names = ("lhs_block", "rhs_block", "transpose_rhs")
        shared = {name: kwargs[name] for name in names if name in kwargs} | gradient_options(kwargs)
        given = products_of(primals)
        wide = [quantized_grouped_matmul(*each, preferred_element_type="float32", **shared) for each in given]
        activation, own = kwargs.get("activation"), own_rows(groups, lhs.shape[0], rhs.shape[0])
        # JAX differentiates the epilogue; each product is a call with a separate configuration.
        pull = jax.vjp(lambda wide, row_scale: finished(wide, own, row_scale, activation), wide, row_scale)[1]
        dproducts, dscale = pull(cotangents[0].astype(jnp.float32))
        by_product = [
            quantized_grouped_matmul.custom_vjp(each, QuantizedGroupedMatmulConfig(), shared, (dout,))
            for each, dout in zip(given, dproducts, strict=True)
        ]
        if lhs_scale is None:
            found[0] = functools.reduce(jnp.add, [each[0] for each in by_product])
        found[1] = by_product[0][1]
        if len(by_product) > 1 and rhs_scale is None:
            found[5] = (by_product[1][1], None)
        if row_scale is not None:
            found[6] = dscale
        return tuple(found)

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return a rule that splits rows, groups, and columns by whole blocks; an activation needs the complete sum.

        As in `grouped_matmul_activation`, the results of all shards of groups add up; results in 8 bits do not.
        """
        lhs, rhs, _, lhs_scale, rhs_scale, *more = inv.args
        axes = "groups columns inner" if inv.kwargs.get("transpose_rhs") else "groups inner columns"
        scales = ScaleAxes()
        of_lhs, of_rhs = (
            [] if scale is None else [scales.of(name, array, scale, inv.kwargs[f"{name}_block"], own.split())]
            for name, array, scale, own in (("lhs", lhs, lhs_scale, "rows inner"), ("rhs", rhs, rhs_scale, axes))
        )
        call, names = self.call_of(inv), ["rows", "columns"]
        quantized = "quantize" in inv.kwargs
        of_out = [scales.of_result("out", (call.rows, call.columns), (1, BLOCK), names)] if quantized else []
        texts = ["rows inner", axes, axes_of_groups(inv), *of_lhs, *of_rhs, *([axes, *of_rhs] if call.gated else [])]
        texts += ["rows"] * len(more[1:])
        return ShardingRule(
            f"{', '.join(texts)} -> {', '.join(['rows columns', *of_out])}",
            split=scales.split(names if quantized else [*names, "groups"]),
            follows=scales.follows,
            multiples=scales.multiples,
            cheapest=True,
        )

    def cost(self, inv: _Invocation) -> Cost | None:
        """See `GroupedOperation`; a number in 8 bits is a byte, and 128 share a scale."""
        base = super().cost(inv)
        if base is None or "quantize" not in inv.kwargs:
            return base
        call = self.call_of(inv)
        size = call.examples * self.result_size(call)
        return Cost(flops=base.flops, bytes=inv.input_bytes + size + size // 32)

    def example_draws(
        self, inv: _Invocation, rng: np.random.Generator
    ) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return random operands, quantised as the call's are, with each kind of sizes."""
        draws = super().example_draws(inv, rng)
        first, options = next(iter(draws.values()))
        lhs, lhs_scale = example_operand(rng, first[0], first[3], options.get("lhs_block"))
        rhs, rhs_scale = example_operand(rng, first[1], first[4], options.get("rhs_block"))
        gate, *factors = first[5:] or (None,)
        if gate is not None:
            gate = example_operand(rng, gate[0], gate[1], options.get("rhs_block"))
        more = (gate, *factors)[: len(first) - 5]
        return {kind: ((lhs, rhs, args[2], lhs_scale, rhs_scale, *more), options) for kind, (args, _) in draws.items()}

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with eight groups and a gate."""
        (lhs, rhs, sizes, lhs_scale, rhs_scale), options = quantized_grouped_matmul.typical_call()
        return (lhs, rhs, sizes, lhs_scale, rhs_scale, (rhs, rhs_scale)), options | {
            "activation": "silu",
            "quantize": "float8_e4m3fn",
        }


quantized_grouped_activation = QuantizedGroupedActivation()


def products_of(args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of the product, and of the gate's, if the call has a gate."""
    lhs, rhs, groups, lhs_scale, rhs_scale, *more = args
    gates = [] if not more or more[0] is None else [more[0]]
    return [(lhs, values, groups, lhs_scale, scale) for values, scale in ((rhs, rhs_scale), *gates)]


def check_gate(gate: Sequence[Any], rhs: Sequence[Any], block: Block | None) -> None:
    """Raise an `ArgumentError` unless the gate's numbers and scales have the shapes and dtypes of those of `rhs`."""
    values, scale = gate
    if block is not None:
        check_quantized("gate", Quantized(values, scale, block))
    pairs = [pair for pair in ((values, rhs[0]), (scale, rhs[1])) if pair[1] is not None]
    if any((tuple(own.shape), own.dtype) != (tuple(other.shape), other.dtype) for own, other in pairs):
        with_scales = f" with scales {type_text(rhs[1])}" if block is not None else ""
        raise ArgumentError(
            f"gate must be {'Quantized ' if block is not None else ''}like rhs, {type_text(rhs[0])}{with_scales}; got "
            f"{type_text(values)}{f' with {type_text(scale)}' if block is not None else ''}."
        )
