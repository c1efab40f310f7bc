# SPDX-License-Identifier: Apache-2.0
"""The operation behind `grouped_matmul` with quantised operands.

The contract of an implementation. It sees `lhs [m, k]`, `rhs [groups, k, n]` or `[groups, n, k]`, the groups, both
operands' scales or `None`, and factors of rows if the call has them. Scales are as in `quantized_matmul`. Rows outside
all groups become zero for any content. Sums are float32 unless `call.fast`.

The gradient of an operand without scales is a call of this operation or of `grouped_matmul_wgrad`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._numbers import balanced, has_small_range
from ejkernel.kernels._options import canonical_flag, type_text
from ejkernel.kernels.grouped_matmul import _arguments as groups_arguments
from ejkernel.kernels.grouped_matmul import reference
from ejkernel.kernels.grouped_matmul.common import Groups, own_rows, scaled_rows, taken_apart
from ejkernel.kernels.grouped_matmul.operation import (
    REFERENCE_BLOCK,
    GroupedOperation,
    axes_of_groups,
    grouped_matmul_wgrad,
    shared_options,
)
from ejkernel.kernels.quantized_matmul.operation import (
    ACCUMULATIONS,
    OUTPUTS,
    checked_operand,
    constant_operands,
    example_operand,
    gradient_options,
    in_range,
    usual_result,
    widened,
)
from ejkernel.kernels.quantized_matmul.quantized import Block, canonical_dtype
from ejkernel.kernels.quantized_matmul.sharding import ScaleAxes
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig

from .common import QuantizedGroupedMatmulCall

_Invocation = Invocation["QuantizedGroupedMatmulConfig", jax.Array]
_PACKAGE = "ejkernel.kernels.quantized_matmul"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedGroupedMatmulConfig(OperationConfig):
    """Configuration of one call of `grouped_matmul` with `Quantized` operands; pass it there as `cfg=`.

    Attributes:
        implementation: Name of the implementation.
        fwd: Its parameters; `None`: its heuristic's.
        bwd: Not used, because gradients are other calls with their own configurations; `None`, or parameters of the
            implementation's backward.
    """

    implementation: str = "xla"


class QuantizedGroupedMatmul(GroupedOperation[QuantizedGroupedMatmulConfig]):
    """The operation behind `grouped_matmul` with quantised operands; see there for the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(
                f"{_PACKAGE}.mosaic_gpu.implementation:MosaicGpuGrouped", platforms=("gpu",)
            ),
            "xla": f"{_PACKAGE}.grouped.xla:XlaGrouped",
        }
    )

    def __init__(self) -> None:
        super().__init__(name="quantized_grouped_matmul")

    def prepare(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        lhs_scale: Any = None,
        rhs_scale: Any = None,
        row_scale: Any = None,
        *,
        lhs_block: Any = None,
        rhs_block: Any = None,
        transpose_rhs: Any = False,
        preferred_element_type: Any = None,
        accumulation: Any = "exact",
        first_group: Any = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop options with default values, which the key omits."""
        transpose_rhs = canonical_flag("transpose_rhs", transpose_rhs)
        lhs_block = checked_operand("lhs", lhs, lhs_scale, lhs_block, takes_scale=False)
        rhs_block = checked_operand("rhs", rhs, rhs_scale, rhs_block, takes_scale=False)
        _check_shapes(lhs, rhs, transpose_rhs=transpose_rhs)
        groups = groups_arguments.canonical_groups(group_sizes, first_group, rhs.shape[0])
        if row_scale is not None:
            groups_arguments.check_row_scale(row_scale, lhs)
        if not isinstance(accumulation, str) or accumulation not in ACCUMULATIONS:
            raise ArgumentError(f"accumulation must be one of {', '.join(ACCUMULATIONS)}; got {accumulation!r}.")
        said = {
            "lhs_block": lhs_block,
            "rhs_block": rhs_block,
            "transpose_rhs": transpose_rhs,
            "accumulation": accumulation if accumulation == "fast" else None,
        }
        if preferred_element_type is not None:
            out = canonical_dtype("preferred_element_type", preferred_element_type, OUTPUTS)
            said["preferred_element_type"] = None if out == usual_result(lhs, rhs) else out
        args = (lhs, rhs, groups, lhs_scale, rhs_scale, row_scale)
        options = {name: value for name, value in said.items() if value}
        return args[: 5 + (row_scale is not None)], options | {"implementation": self.requested(implementation)}

    def describe(
        self,
        lhs: Any,
        rhs: Any,
        groups: Groups,
        lhs_scale: Any = None,
        rhs_scale: Any = None,
        row_scale: Any = None,
        *,
        lhs_block: Block | None = None,
        rhs_block: Block | None = None,
        transpose_rhs: bool = False,
        preferred_element_type: str | None = None,
        accumulation: str = "exact",
    ) -> QuantizedGroupedMatmulCall:
        """Return the sizes, dtypes and blocks of a call."""
        sizes, first = taken_apart(groups)
        turned = rhs_block if rhs_block is None or transpose_rhs else (rhs_block[0], rhs_block[2], rhs_block[1])
        return QuantizedGroupedMatmulCall(
            rows=lhs.shape[0],
            groups=rhs.shape[0],
            inner=lhs.shape[1],
            columns=rhs.shape[1 if transpose_rhs else 2],
            dtype=str(lhs.dtype),
            rhs_dtype=str(rhs.dtype),
            out_dtype=preferred_element_type or usual_result(lhs, rhs),
            lhs_block=lhs_block,
            rhs_block=turned,
            transpose_rhs=transpose_rhs,
            fast=accumulation == "fast",
            scaled=row_scale is not None,
            all_groups=None if first is None else sizes.shape[0],
        )

    def run(self, *args: Any, cfg: QuantizedGroupedMatmulConfig, **options: Any) -> Any:
        """Return the product; quantised operands have no derivatives."""
        return super().run(*constant(args), cfg=cfg, **options)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the float32 product of the dequantised operands."""
        lhs, rhs, groups, lhs_scale, rhs_scale, *factors = constant(args)
        left = widened(lhs, lhs_scale, options.get("lhs_block"))
        right = widened(rhs, rhs_scale, options.get("rhs_block"))
        transposed = options.get("transpose_rhs", False)
        out = reference.product(
            left, right, groups, block=REFERENCE_BLOCK, transpose_rhs=transposed, precision="highest"
        )
        for row_scale in factors:
            out = scaled_rows(out, row_scale, own_rows(groups, lhs.shape[0], rhs.shape[0]))
        return out.astype(options.get("preferred_element_type") or usual_result(lhs, rhs))

    def custom_vjp(
        self,
        primals: tuple[Any, ...],
        cfg: QuantizedGroupedMatmulConfig,
        kwargs: dict[str, Any],
        cotangents: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """Return the gradients of the operand without scales and of the row factors, by other calls."""
        lhs, rhs, groups, lhs_scale, rhs_scale, *factors = primals
        dout, dlhs, drhs = cotangents[0], None, None
        shared = gradient_options(kwargs)
        if lhs_scale is None:
            more = shared | {"rhs_block": kwargs["rhs_block"], "transpose_rhs": not kwargs.get("transpose_rhs", False)}
            arrays = (rhs, groups, None, rhs_scale, *factors)
            dlhs = in_range(quantized_grouped_matmul, dout, lhs.dtype, *arrays, **more)
        elif rhs_scale is None:
            drhs = self._matrices_gradient(primals, kwargs, dout)
        if not factors:
            return dlhs, drhs, None, None, None
        wide = {**kwargs, "preferred_element_type": "float32"}
        product = quantized_grouped_matmul(*primals[:5], **wide)
        own = own_rows(groups, lhs.shape[0], rhs.shape[0])
        dscale = jnp.where(own, jnp.sum(product * dout.astype(jnp.float32), axis=1), 0).astype(factors[0].dtype)
        return dlhs, drhs, None, None, None, dscale

    def _matrices_gradient(self, primals: tuple[Any, ...], kwargs: dict[str, Any], dout: jax.Array) -> jax.Array:
        """Return the gradient of `rhs`: `grouped_matmul_wgrad` of dequantised rows."""
        lhs, rhs, groups, lhs_scale, _, *factors = primals
        small = has_small_range(rhs.dtype)
        rows = widened(lhs, lhs_scale, kwargs["lhs_block"], jnp.float32 if small else rhs.dtype)
        dout = dout.astype(jnp.float32) if small else dout
        for row_scale in factors:
            dout = scaled_rows(dout, row_scale, own_rows(groups, lhs.shape[0], rhs.shape[0]))
        operands = [each.astype(rhs.dtype) for each in (balanced(rows, dout) if small else (rows, dout))]
        if kwargs.get("transpose_rhs", False):
            operands.reverse()
        shared = shared_options(kwargs, grouped_matmul_wgrad)
        return grouped_matmul_wgrad(*operands, groups, groups=rhs.shape[0], **shared)

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return the rule of `grouped_matmul`, with scales that follow their operands."""
        lhs, rhs, _, lhs_scale, rhs_scale, *factors = inv.args
        axes = "groups columns inner" if inv.kwargs.get("transpose_rhs") else "groups inner columns"
        texts, scales = ["rows inner", axes, axes_of_groups(inv)], ScaleAxes()
        if lhs_scale is not None:
            texts.append(scales.of("lhs", lhs, lhs_scale, inv.kwargs["lhs_block"], ["rows", "inner"]))
        if rhs_scale is not None:
            texts.append(scales.of("rhs", rhs, rhs_scale, inv.kwargs["rhs_block"], axes.split()))
        texts += ["rows"] * len(factors)
        return ShardingRule(
            f"{', '.join(texts)} -> rows columns",
            split=scales.split(["rows", "groups", "inner", "columns"]),
            follows=scales.follows,
            multiples=scales.multiples,
            cheapest=True,
        )

    def example_draws(
        self, inv: _Invocation, rng: np.random.Generator
    ) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return random operands, quantised as the call's are, with each kind of sizes."""
        draws = super().example_draws(inv, rng)
        first, options = next(iter(draws.values()))
        lhs, lhs_scale = example_operand(rng, first[0], first[3], options.get("lhs_block"))
        rhs, rhs_scale = example_operand(rng, first[1], first[4], options.get("rhs_block"))
        return {
            kind: ((lhs, rhs, args[2], lhs_scale, rhs_scale, *args[5:]), options) for kind, (args, _) in draws.items()
        }

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with eight groups, and a scale for each row and column."""
        shapes = (1024, 256), (8, 512, 256)
        lhs, rhs = (jax.ShapeDtypeStruct(shape, "float8_e4m3fn") for shape in shapes)
        scales = [jax.ShapeDtypeStruct((*shape[:-1], 1), jnp.float32) for shape in shapes]
        sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
        return (lhs, rhs, sizes, *scales), {"lhs_block": (1, None), "rhs_block": (1, 1, None), "transpose_rhs": True}


quantized_grouped_matmul = QuantizedGroupedMatmul()


def constant(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without derivatives of quantised operands."""
    lhs, rhs, groups, lhs_scale, rhs_scale, *factors = args
    lhs, rhs, lhs_scale, rhs_scale = constant_operands(lhs, rhs, lhs_scale, rhs_scale)
    return lhs, rhs, groups, lhs_scale, rhs_scale, *factors


def _check_shapes(lhs: Any, rhs: Any, *, transpose_rhs: bool) -> None:
    if len(lhs.shape) != 2 or len(rhs.shape) != 3:
        raise ArgumentError(
            f"lhs must be [m, k] and rhs have a matrix for each group; got {type_text(lhs)} and {type_text(rhs)}."
        )
    if lhs.shape[1] != rhs.shape[2 if transpose_rhs else 1]:
        is_other_way = lhs.shape[1] == rhs.shape[1 if transpose_rhs else 2]
        hint = f"; pass transpose_rhs={not transpose_rhs}" if is_other_way else ""
        raise ArgumentError(
            f"lhs and rhs must have one k where transpose_rhs is {transpose_rhs}; got {type_text(lhs)} and "
            f"{type_text(rhs)}{hint}."
        )
