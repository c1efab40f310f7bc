# SPDX-License-Identifier: Apache-2.0
"""The operation behind `quantize` with 1x128 blocks and `quantize_both`.

The contract of an implementation. It sees `x [..., m, k]` and returns its numbers in `call.values` and their scales
`[..., m, ceil(k / 128)]` in float32; if `call.transposed`, `x` is a matrix, and the same of `x.T` follows. If
`call.groups`, it also sees the sizes of groups, and the same of `groups.in_columns(x, group_sizes)` follows. If
`call.square`, the transpose has scales of 128x128 blocks, `[ceil(k / 128), ceil(m / 128)]`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._options import canonical_flag, type_text
from ejkernel.kernels.grouped_matmul._arguments import check_sizes
from ejkernel.kernels.grouped_matmul.operation import example_sizes
from ejkernel.kernels.quantized_matmul.quantized import LARGEST, canonical_dtype
from ejkernel.kernels.quantized_matmul.sharding import ScaleAxes
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.types import Cost
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.signature import is_array, is_known

from .common import BLOCK, QuantizeCall
from .xla import quantized_blocks

_Invocation = Invocation["QuantizeConfig", Any]
OPERANDS = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig(OperationConfig):
    """Configuration of one call that quantises blocks; only `fwd` counts, because there is no gradient."""

    implementation: str = "xla"


class Quantize(Operation[QuantizeConfig, QuantizeCall, Any]):
    """The operation behind `quantize_both`; see there for the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(f"{__package__}.mosaic_gpu:MosaicGpu", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
        }
    )
    why_no_gradient = "rounding has none. Use quantized_dense to train, or jax.lax.stop_gradient on x."

    def __init__(self) -> None:
        super().__init__(name="quantize")

    def prepare(
        self,
        x: Any,
        group_sizes: Any = None,
        *,
        dtype: Any = "float8_e4m3fn",
        transposed: Any = False,
        square: Any = False,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments."""
        transposed, square = canonical_flag("transposed", transposed), canonical_flag("square", square)
        rank = 2 if transposed else 1
        if not is_array(x) or str(x.dtype) not in OPERANDS or len(x.shape) < rank or (transposed and len(x.shape) > 2):
            wanted = "a matrix" if transposed else "an array"
            raise ArgumentError(f"x must be {wanted} in {', '.join(OPERANDS)}; got {type_text(x)}.")
        if group_sizes is not None:
            check_sizes(group_sizes)
            if not transposed or not is_known(*x.shape):
                raise ArgumentError(
                    f"x must be a matrix of known sizes, and transposed=True, with group_sizes; got {type_text(x)}; "
                    "export a program for each size."
                )
        return (x,) if group_sizes is None else (x, group_sizes), {
            "dtype": canonical_dtype("dtype", dtype, tuple(LARGEST)),
            "transposed": transposed,
            **({"square": True} if square else {}),
            "implementation": self.requested(implementation),
        }

    def describe(
        self, x: Any, group_sizes: Any = None, *, dtype: str, transposed: bool, square: bool = False
    ) -> QuantizeCall:
        """Return the sizes and dtypes of a call."""
        return QuantizeCall(
            rows=math.prod(x.shape[:-1]),
            columns=x.shape[-1],
            dtype=str(x.dtype),
            values=dtype,
            transposed=transposed,
            groups=None if group_sizes is None else group_sizes.shape[0],
            square=square,
        )

    def example_inputs(self, inv: _Invocation, rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a random matrix, and balanced sizes if the call has groups."""
        (x, *sizes), options = super().example_inputs(inv, rng)
        drawn = [example_sizes(x.shape[0], own.shape[0], rng)["balanced"].astype(own.dtype) for own in sizes]
        return (x, *map(jnp.asarray, drawn)), options

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the results in plain JAX."""
        return quantized_blocks(*args, **options)

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return a rule that splits rows and columns by whole blocks; columns in groups need all rows."""
        shape, scales, square = tuple(inv.args[0].shape), ScaleAxes(), bool(inv.kwargs.get("square"))
        axes = [f"rows{i}" for i in range(len(shape) - 1)] + ["k"]
        given, split = [" ".join(axes)], axes
        results = [*given, scales.of_result("x", shape, (*[1] * (len(shape) - 1), BLOCK), axes)]
        if len(inv.args) > 1:  # the blocks of columns are not those of rows
            of_columns = scales.of_result("columns", shape[-1:], (BLOCK,), ["k"]) if square else "k"
            given, split, results = [*given, "_"], ["k"], [*results, "k _", f"{of_columns} _"]
        elif inv.kwargs["transposed"]:
            turned = axes[::-1]
            of_columns = scales.of_result("columns", shape[::-1], (BLOCK if square else 1, BLOCK), turned)
            results += [" ".join(turned), of_columns]
        return ShardingRule(
            f"{', '.join(given)} -> {', '.join(results)}",
            split=scales.split(split),
            follows=scales.follows,
            multiples=scales.multiples,
        )

    def cost(self, inv: _Invocation) -> Cost | None:
        """Return the bytes of the call: each array is read or written once."""
        call = self.call_of(inv)
        if not is_known(call.rows, call.columns):
            return None
        numbers = call.examples * call.rows * call.columns * (2 if call.transposed else 1)
        return Cost(flops=3 * numbers, bytes=inv.input_bytes + numbers + numbers // 32)

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with 1024 rows of 1024 elements."""
        return (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),), {}


quantize_blocks = Quantize()
