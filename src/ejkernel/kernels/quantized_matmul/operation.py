# SPDX-License-Identifier: Apache-2.0
"""The operation behind `quantized_matmul`.

The contract of an implementation. It sees `x [m, k]`, `w [k, n]` or `[n, k]`, and their scales or `None`. A scale has
the rank of its operand and an entry per block; `call.x_block` and `call.w_block` have the blocks. The result is
`(x * x_scale) @ (w * w_scale)` in `call.out_dtype`, summed in float32 unless `call.fast`.

A product is linear in an operand without scales, so its gradient is a call of the same operation. Quantised operands
have no gradient here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._numbers import accumulator, has_small_range, normalized
from ejkernel.kernels._options import canonical_flag, type_text
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.types import Cost
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.signature import is_array, is_known

from .common import QuantizedMatmulCall
from .quantized import LARGEST, Block, Quantized, canonical_dtype, check_quantized, quantize
from .sharding import ScaleAxes

_Invocation = Invocation["QuantizedMatmulConfig", jax.Array]
OPERANDS = ("bfloat16", "float16", "float32")  # of an operand without scales
OUTPUTS = ("bfloat16", "float16", "float32")
ACCUMULATIONS = ("exact", "fast")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatmulConfig(OperationConfig):
    """Configuration of one call of `quantized_matmul`.

    Attributes:
        implementation: Name of the implementation.
        fwd: Its parameters; `None`: its heuristic's.
        bwd: Not used, because gradients are other calls with their own configurations; `None`, or parameters of the
            implementation's backward.
    """

    implementation: str = "xla"


class QuantizedMatmul(Operation[QuantizedMatmulConfig, QuantizedMatmulCall, jax.Array]):
    """The operation behind `quantized_matmul`; see there for the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(f"{__package__}.mosaic_gpu.implementation:MosaicGpu", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
        }
    )

    def __init__(self) -> None:
        super().__init__(name="quantized_matmul")

    def prepare(
        self,
        x: Any,
        w: Any,
        x_scale: Any = None,
        w_scale: Any = None,
        *,
        x_block: Any = None,
        w_block: Any = None,
        transpose_w: Any = False,
        preferred_element_type: Any = None,
        accumulation: Any = "exact",
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop options with default values, which the key omits."""
        transpose_w = canonical_flag("transpose_w", transpose_w)
        x_block, w_block = checked_operand("x", x, x_scale, x_block), checked_operand("w", w, w_scale, w_block)
        _check_shapes(x, w, x_block, transpose_w=transpose_w)
        if x_block is None and w_block is None:
            raise ArgumentError(
                f"x or w must be quantised, got {type_text(x)} and {type_text(w)}; see quantize, or use x @ w."
            )
        if not isinstance(accumulation, str) or accumulation not in ACCUMULATIONS:
            raise ArgumentError(f"accumulation must be one of {', '.join(ACCUMULATIONS)}; got {accumulation!r}.")
        said = {
            "x_block": x_block,
            "w_block": w_block,
            "transpose_w": transpose_w,
            "accumulation": accumulation if accumulation == "fast" else None,
        }
        if preferred_element_type is not None:
            out = canonical_dtype("preferred_element_type", preferred_element_type, OUTPUTS)
            said["preferred_element_type"] = None if out == usual_result(x, w) else out
        options = {name: value for name, value in said.items() if value}
        args = (x, w, None if x_block is None else x_scale, None if w_block is None else w_scale)
        return args, options | {"implementation": self.requested(implementation)}

    def describe(
        self,
        x: Any,
        w: Any,
        x_scale: Any = None,
        w_scale: Any = None,
        *,
        x_block: Block | None = None,
        w_block: Block | None = None,
        transpose_w: bool = False,
        preferred_element_type: str | None = None,
        accumulation: str = "exact",
    ) -> QuantizedMatmulCall:
        """Return the sizes, dtypes and blocks of a call."""
        return QuantizedMatmulCall(
            rows=math.prod(x.shape[:-1]),
            inner=x.shape[-1],
            columns=w.shape[0 if transpose_w else 1],
            x_dtype=str(x.dtype),
            w_dtype=str(w.dtype),
            out_dtype=preferred_element_type or usual_result(x, w),
            x_block=None if x_block is None else flat_block(x_block),
            w_block=w_block if w_block is None or transpose_w else w_block[::-1],
            transpose_w=transpose_w,
            fast=accumulation == "fast",
        )

    def call_of(self, inv: _Invocation) -> QuantizedMatmulCall:
        """Return the description of the forward; derivatives are separate calls."""
        return dataclasses.replace(super().call_of(inv), backward=False, higher=False)

    def config_space(self, inv: _Invocation) -> Collection[QuantizedMatmulConfig]:
        """Return the search space of a forward; derivatives have no parameters."""
        return super().config_space(inv) if inv.direction == "fwd" else [self.heuristic_cfg(inv)]

    def run(self, *args: Any, cfg: QuantizedMatmulConfig, **options: Any) -> Any:
        """Return the product; the leading axes of `x` become one axis."""
        x, w, x_scale, w_scale = constant_operands(*args)
        scales = None if x_scale is None else flat(x_scale)
        found = super().run(flat(x), w, scales, w_scale, cfg=cfg, **options)
        return found.reshape(*x.shape[:-1], found.shape[-1])

    def custom_vjp(
        self, primals: tuple[Any, ...], cfg: QuantizedMatmulConfig, kwargs: dict[str, Any], cotangents: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the gradient of the operand without scales, by another call; the other operand has none."""
        x, w, x_scale, w_scale = primals
        shared = gradient_options(kwargs)
        transposed, dout = kwargs.get("transpose_w", False), cotangents[0]
        if x_scale is None:
            shared |= {"w_block": kwargs["w_block"], "transpose_w": not transposed}
            return in_range(quantized_matmul, dout, x.dtype, w, None, w_scale, **shared), None, None, None
        if w_scale is not None:
            return None, None, None, None
        shared["w_block"] = flat_block(kwargs["x_block"])
        dw = in_range(quantized_matmul, flat(dout).T, w.dtype, flat(x), None, flat(x_scale), **shared)  # [n, k]
        return None, dw if transposed else dw.T, None, None

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the float32 product of the dequantised operands."""
        x, w, x_scale, w_scale = constant_operands(*args)

        left = widened(x, x_scale, options.get("x_block"))
        right = widened(w, w_scale, options.get("w_block"))
        axes = ((x.ndim - 1,), (1 if options.get("transpose_w") else 0,))
        out = lax.dot_general(left, right, (axes, ((), ())), precision="highest")
        return out.astype(options.get("preferred_element_type") or usual_result(x, w))

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return a rule that splits rows, columns and the summed axis; scales follow their operands."""
        x, w, x_scale, w_scale = inv.args
        axes = ["columns", "inner"] if inv.kwargs.get("transpose_w", False) else ["inner", "columns"]
        rows, scales = [f"rows{i}" for i in range(len(x.shape) - 1)], ScaleAxes()
        texts = [" ".join([*rows, "inner"]), " ".join(axes)]
        if x_scale is not None:
            texts.append(scales.of("x", x, x_scale, inv.kwargs["x_block"], [*rows, "inner"]))
        if w_scale is not None:
            texts.append(scales.of("w", w, w_scale, inv.kwargs["w_block"], axes))
        return ShardingRule(
            f"{', '.join(texts)} -> {' '.join([*rows, 'columns'])}",
            split=scales.split([*rows, "columns", "inner"]),
            follows=scales.follows,
            multiples=scales.multiples,
            cheapest=True,
        )

    def example_inputs(self, inv: _Invocation, rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random operands, quantised as the call's are."""
        (x, w, x_scale, w_scale), options = super().example_inputs(inv, rng)
        x, x_scale = example_operand(rng, x, x_scale, options.get("x_block"))
        w, w_scale = example_operand(rng, w, w_scale, options.get("w_block"))
        return (x, w, x_scale, w_scale), options

    def cost(self, inv: _Invocation) -> Cost | None:
        """Return the work of the product; each array is read or written once."""
        call = self.call_of(inv)
        if inv.direction != "fwd" or not is_known(call.rows, call.inner, call.columns):
            return None
        out = call.examples * call.rows * call.columns * jnp.dtype(call.out_dtype).itemsize
        flops = 2 * call.examples * call.rows * call.inner * call.columns
        return Cost(flops=flops, bytes=inv.input_bytes + out)

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with a scale for each row and column."""
        x, w = (jax.ShapeDtypeStruct((1024, 1024), "float8_e4m3fn") for _ in range(2))
        scale = jax.ShapeDtypeStruct((1024, 1), jnp.float32)
        return (x, w, scale, scale), {"x_block": (1, None), "w_block": (1, None), "transpose_w": True}


quantized_matmul = QuantizedMatmul()


def example_operand(rng: np.random.Generator, array: Any, scale: Any, block: Block | None) -> tuple[Any, Any]:
    """Return random numbers and their scales for an operand with scales; else the operand."""
    if scale is None or block is None:
        return array, scale
    key = jax.random.key(int(rng.integers(2**31)), impl="rbg")
    axes = [axis for axis, size in enumerate(block) if size != 1]
    made = quantize(
        jax.random.normal(key, array.shape, jnp.bfloat16),
        dtype=array.dtype,
        block=[block[axis] for axis in axes],
        axis=axes,
        scale_dtype=scale.dtype,
    )
    return made.values, made.scale


def gradient_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the calls of a gradient share with the forward."""
    found: dict[str, Any] = {name: kwargs[name] for name in ("accumulation", "implementation") if name in kwargs}
    if asked := found.get("implementation"):
        # The matrix lies along the other axis there, which a requested implementation may not read.
        found["implementation"] = tuple(dict.fromkeys([*([asked] if isinstance(asked, str) else asked), "xla"]))
    return found


def in_range(product: Any, rows: jax.Array, dtype: Any, *args: Any, **options: Any) -> Any:
    """Return `product(rows, *args)`, a product linear in the rows of a gradient, in `dtype`.

    In a dtype of small range, such as float16, each wider row is first scaled by a power of two into that range.
    """
    if rows.dtype == dtype or not has_small_range(dtype):
        return product(rows.astype(dtype), *args, **options)
    rows, factors = normalized(rows.astype(accumulator(dtype)), (-1,))
    wide = product(rows.astype(dtype), *args, preferred_element_type="float32", **options)
    return (wide * factors).astype(dtype)


def usual_result(x: Any, w: Any) -> str:
    """Return the default dtype of a result: that of the operand without scales, or bfloat16."""
    return next((str(array.dtype) for array in (x, w) if str(array.dtype) in OPERANDS), "bfloat16")


def constant_operands(x: Any, w: Any, x_scale: Any = None, w_scale: Any = None) -> tuple[Any, ...]:
    """Return the arguments, with the gradients of operands that have scales stopped."""
    stop = lax.stop_gradient
    x, x_scale = (x, None) if x_scale is None else (stop(x), stop(x_scale))
    w, w_scale = (w, None) if w_scale is None else (stop(w), stop(w_scale))
    return x, w, x_scale, w_scale


def widened(array: jax.Array, scale: jax.Array | None, block: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Return an operand as a floating-point array."""
    return array.astype(dtype) if scale is None else Quantized(array, scale, block).dequantize(dtype)


def flat(x: Any) -> Any:
    """Return an array with its leading axes as one."""
    return x if len(x.shape) == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def flat_block(block: Block) -> Block:
    """Return the block of an array with leading axes merged into one."""
    return block[-2:] if len(block) > 1 else (1, *block)


def checked_operand(name: str, array: Any, scale: Any, block: Any, *, takes_scale: bool = True) -> Block | None:
    """Check an operand with its scales; return its blocks, one per axis, or `None` without scales.

    Args:
        name: The argument's name, for messages.
        array: The numbers.
        scale: Their scales, or `None`.
        block: Their blocks, or `None`.
        takes_scale: Whether the public function has an argument for the scales.
    """
    scaled = f"with {name}_scale" if takes_scale else "inside Quantized"
    if not is_array(array) or str(array.dtype) not in (*OPERANDS, *LARGEST):
        raise ArgumentError(
            f"{name} must be Quantized, or an array in {', '.join(OPERANDS)}; or in {', '.join(LARGEST)} {scaled}; "
            f"got {type_text(array)}."
        )
    if str(array.dtype) in OPERANDS:
        if scale is not None:
            raise ArgumentError(f"{name}_scale must be None, because {name} is {array.dtype}; multiply the result.")
        return None
    if scale is None or block is None:
        wanted = f"{name}_scale must be given" if takes_scale else f"{name} must be Quantized"
        raise ArgumentError(
            f"{wanted}, because {name} is {type_text(array)}; pass Quantized(values, scale, block), or cast numbers "
            "that have no scales to bfloat16."
        )
    check_quantized(name, Quantized(array, scale, block))
    return (1,) * (len(array.shape) - len(block)) + tuple(block)


def _check_shapes(x: Any, w: Any, x_block: Block | None, *, transpose_w: bool) -> None:
    if len(w.shape) != 2 or not x.shape:
        raise ArgumentError(f"x must be [..., k] and w a matrix; got {type_text(x)} and {type_text(w)}.")
    if x.shape[-1] != w.shape[1 if transpose_w else 0]:
        is_other_way = x.shape[-1] == w.shape[0 if transpose_w else 1]
        hint = f"; pass transpose_w={not transpose_w}" if is_other_way else ""
        got = f"got {type_text(x)} and {type_text(w)}{hint}."
        raise ArgumentError(f"x must be [..., k] and w {'[n, k]' if transpose_w else '[k, n]'} with the same k, {got}")
    leading = () if x_block is None else x_block[:-1]
    if len(leading) > 1 and set(leading) not in ({1}, {None}):
        raise ArgumentError(
            f"the blocks of x must be one row high, or take whole leading axes; got block {x_block} for "
            f"{type_text(x)}; use quantize(x) or quantize(x, block=128)."
        )
