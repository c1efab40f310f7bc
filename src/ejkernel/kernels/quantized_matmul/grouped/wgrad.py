# SPDX-License-Identifier: Apache-2.0
"""The operation behind `grouped_matmul_wgrad` with quantised operands.

The contract of an implementation. It sees `lhs [k, m]` and `rhs [n, m]`, the groups, and both operands' scales
`[k, m / 128]` and `[n, m / 128]`, or `[ceil(n / 128), m / 128]` for `rhs` if `call.square`. Along `m` each group begins
with a block of 128 and takes as many as its size needs; `quantizing.groups` has this layout. The result is
`lhs @ rhs.T` over the blocks of each group, summed in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._options import canonical_flag, type_text
from ejkernel.kernels.grouped_matmul import _arguments as groups_arguments
from ejkernel.kernels.grouped_matmul import reference
from ejkernel.kernels.grouped_matmul.common import Groups, taken_apart
from ejkernel.kernels.grouped_matmul.operation import (
    REFERENCE_BLOCK,
    WeightsGradient,
    axes_of_groups,
    example_groups,
)
from ejkernel.kernels.quantized_matmul.operation import OUTPUTS, example_operand, widened
from ejkernel.kernels.quantized_matmul.quantized import Block, Quantized, canonical_dtype, check_quantized
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.kernels.quantized_matmul.quantizing.groups import block_count, whole_blocks
from ejkernel.kernels.quantized_matmul.sharding import ScaleAxes
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig

from .common import QuantizedGroupedWgradCall

_Invocation = Invocation["QuantizedGroupedWgradConfig", jax.Array]
_PACKAGE = "ejkernel.kernels.quantized_matmul"
BLOCKS, SQUARES = (1, BLOCK), (BLOCK, BLOCK)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedGroupedWgradConfig(OperationConfig):
    """Configuration of one weight gradient of quantised operands; only `fwd` counts, because it has no gradient."""

    implementation: str = "xla"


class QuantizedGroupedWgrad(WeightsGradient[QuantizedGroupedWgradConfig]):
    """The operation behind `grouped_matmul_wgrad` with quantised operands; see there for the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(
                f"{_PACKAGE}.mosaic_gpu.gradient:MosaicGpuGroupedWgrad", platforms=("gpu",)
            ),
            "xla": f"{_PACKAGE}.grouped.xla:XlaGroupedWgrad",
        }
    )
    why_no_gradient = "its operands are quantised. Use quantized_grouped_dense to train, or jax.lax.stop_gradient."

    def __init__(self) -> None:
        super().__init__(name="quantized_grouped_wgrad")

    def prepare(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        lhs_scale: Any,
        rhs_scale: Any,
        *,
        square: Any = False,
        preferred_element_type: Any = None,
        first_group: Any = None,
        groups: Any = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop options with default values, which the key omits."""
        square = canonical_flag("square", square)
        check_quantized("lhs", Quantized(lhs, lhs_scale, BLOCKS))
        check_quantized("rhs", Quantized(rhs, rhs_scale, SQUARES if square else BLOCKS))
        if len(lhs.shape) != 2 or len(rhs.shape) != 2 or lhs.shape[1] != rhs.shape[1] or lhs.shape[1] % BLOCK:
            raise ArgumentError(
                f"lhs and rhs must be [k, m] and [n, m] with whole blocks of {BLOCK}, the second results of "
                f"quantize_both(x, group_sizes); got {type_text(lhs)} and {type_text(rhs)}."
            )
        count_asked = groups_arguments.canonical_count(groups)
        groups_arguments.check_count(count_asked, group_sizes, first_group)
        own = groups_arguments.canonical_groups(group_sizes, first_group, count_asked)
        out = canonical_dtype("preferred_element_type", preferred_element_type or "bfloat16", OUTPUTS)
        options: dict[str, Any] = {} if out == "bfloat16" else {"preferred_element_type": out}
        if square:
            options["square"] = True
        if isinstance(own, tuple):
            options["groups"] = groups
        return (lhs, rhs, own, lhs_scale, rhs_scale), options | {"implementation": self.requested(implementation)}

    def describe(
        self,
        lhs: Any,
        rhs: Any,
        own: Groups,
        lhs_scale: Any,
        rhs_scale: Any,
        *,
        square: bool = False,
        preferred_element_type: str = "bfloat16",
        groups: int | None = None,
    ) -> QuantizedGroupedWgradCall:
        """Return the sizes and dtypes of a call."""
        sizes, first = taken_apart(own)
        return QuantizedGroupedWgradCall(
            rows=lhs.shape[1],
            groups=sizes.shape[0] if groups is None else groups,
            inner=lhs.shape[0],
            columns=rhs.shape[0],
            dtype=str(lhs.dtype),
            rhs_dtype=str(rhs.dtype),
            out_dtype=preferred_element_type,
            all_groups=None if first is None else sizes.shape[0],
            square=square,
        )

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return a rule that splits groups and both axes of the matrices; every device gets all rows."""
        _, rhs, *_, rhs_scale = inv.args
        scales, block = ScaleAxes(), (_rhs_block(inv.kwargs)[0], 1)
        of_columns = scales.of("rhs", rhs, rhs_scale, block, ["columns", "blocks"])
        axes = f"inner rows, columns rows, {axes_of_groups(inv)}, inner blocks, {of_columns}"
        return ShardingRule(
            f"{axes} -> groups inner columns",
            split=scales.split(["groups", "inner", "columns"]),
            follows=scales.follows,
            multiples=scales.multiples,
            cheapest=True,
        )

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the float32 sums of the dequantised operands."""
        lhs, rhs, own, lhs_scale, rhs_scale = args
        left, right = widened(lhs, lhs_scale, BLOCKS).T, widened(rhs, rhs_scale, _rhs_block(options)).T
        count, blocks = options.get("groups", taken_apart(own)[0].shape[0]), whole_blocks(own, lhs.shape[1])
        out = reference.weights_gradient(left, right, blocks, count=count, block=REFERENCE_BLOCK, precision="highest")
        return out.astype(options.get("preferred_element_type", "bfloat16"))

    def example_draws(
        self, inv: _Invocation, rng: np.random.Generator
    ) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return random operands with each kind of sizes."""
        (lhs, rhs, groups, *scales), options = inv.args, dict(inv.kwargs)
        left = example_operand(rng, lhs, scales[0], BLOCKS)
        right = example_operand(rng, rhs, scales[1], _rhs_block(options))
        # As many rows as take all blocks if every group has a partial one.
        rows = BLOCK * max(0, lhs.shape[1] // BLOCK - block_count(0, taken_apart(groups)[0].shape[0]))
        drawn = example_groups(groups, rows, self.call_of(inv).groups, rng)
        return {kind: ((left[0], right[0], own, left[1], right[1]), options) for kind, own in drawn.items()}

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with eight groups."""
        rows = BLOCK * block_count(1024, 8)
        arrays = [jax.ShapeDtypeStruct((size, rows), "float8_e4m3fn") for size in (256, 512)]
        scales = [jax.ShapeDtypeStruct((size, rows // BLOCK), jnp.float32) for size in (256, 512)]
        return (*arrays, jax.ShapeDtypeStruct((8,), jnp.int32), *scales), {}


quantized_grouped_wgrad = QuantizedGroupedWgrad()


def _rhs_block(options: Mapping[str, Any]) -> Block:
    return SQUARES if options.get("square") else BLOCKS
