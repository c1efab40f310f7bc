# SPDX-License-Identifier: Apache-2.0
"""`quantized_matmul`: matmuls of 8-bit numbers with scales; `quantize` and `quantize_both` make these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from ejkernel.kernels._hopper import DTYPES as _NARROW
from ejkernel.kernels._merging import Merging
from ejkernel.kernels._numbers import is_integer
from ejkernel.kernels._options import canonical_flag, type_text, within_32_bits
from ejkernel.kernels.quantized_matmul.operation import QuantizedMatmul as QuantizedMatmul
from ejkernel.kernels.quantized_matmul.operation import QuantizedMatmulConfig as QuantizedMatmulConfig
from ejkernel.kernels.quantized_matmul.operation import flat_block
from ejkernel.kernels.quantized_matmul.operation import quantized_matmul as _quantized_matmul
from ejkernel.kernels.quantized_matmul.quantized import (
    LARGEST,
    Block,
    full_block,
    given_scale,
    is_quantized,
    quantized_operand,
    without_gradient,
)
from ejkernel.kernels.quantized_matmul.quantized import Quantized as Quantized
from ejkernel.kernels.quantized_matmul.quantized import quantize as _quantize
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK as _BLOCK
from ejkernel.kernels.quantized_matmul.quantizing.operation import Quantize as Quantize
from ejkernel.kernels.quantized_matmul.quantizing.operation import QuantizeConfig as QuantizeConfig
from ejkernel.kernels.quantized_matmul.quantizing.operation import quantize_blocks as _quantize_blocks
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.messages.names import names_checked
from ejkernel.ops.utils.values.signature import is_array

from ._names import by_name
from .grouped_matmul import (
    QuantizedGroupedActivationConfig,
    QuantizedGroupedMatmulConfig,
    grouped_matmul,
)

# The names in PyTorch, Qwix, Transformer Engine and DeepGEMM.
_NAMES_ELSEWHERE = by_name(
    {
        "x": "lhs",
        "w": "rhs weight",
        "x_scale": "scale_a lhs_scale",
        "w_scale": "scale_b rhs_scale weight_scale",
        "preferred_element_type": "dtype out_dtype",
        "accumulation='fast' is use_fast_accum=True.": "use_fast_accum",
        "transpose_w": "transpose_rhs",
        "cfg": "config",
    }
)


@names_checked({})
def quantize(
    x: Float[Array, ...],
    *,
    dtype: DTypeLike = "float8_e4m3fn",
    block: int | Sequence[int | None] | None = None,
    axis: int | Sequence[int] | None = -1,
    scale_dtype: DTypeLike = "float32",
    stochastic: Array | Literal[False] = False,
) -> Quantized:
    """Return `x` in 8 bits, with scales that map the largest magnitude of each block to the dtype's largest number.

    For a matmul, the scales must not vary along the contracted axis, except by blocks:

        quantize(x)                                         # x [m, k]: a scale for each row
        quantize(w, axis=0)                                 # w [k, n]: a scale for each column
        quantize(x, block=128)                              # 1x128 blocks
        quantize(w, block=(128, 128), axis=(0, 1))          # 128x128 blocks
        quantize(x, axis=None)                              # one scale

    The error of a number is at most half a unit in its last place: `scale / 2` for int8, and for float8 the larger of
    `|x| * 2**-4` (e4m3) or `|x| * 2**-3` (e5m2) and half the least positive number, `scale * 2**-10` or
    `scale * 2**-17`; twice that if `stochastic`. A block of zeros stays zero. A block with NaN or infinity becomes NaN.
    Scales are at least the dtype's smallest normal number.

    `quantize` has no gradient: `jax.grad` through it raises. Use `quantized_dense` to train.

    Args:
        x: A floating-point array.
        dtype: `float8_e4m3fn`, `float8_e5m2` or `int8`.
        block: How many elements along each axis of `axis` share a scale; `None` is all of them. An integer counts for
            each of these axes.
        axis: The axis along which elements share a scale, or several; `None` is all axes.
        scale_dtype: Dtype of the scales: float32 or bfloat16.
        stochastic: A PRNG key to round up or down at random, with the right mean; `False` rounds to nearest even.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        UnsupportedError: The call is differentiated.
    """
    # Arrays, which `==` would compare element by element, are refused below.
    usual = stochastic is False and is_integer(axis) and type(block) is int and block == _BLOCK
    usual = usual and not is_array(scale_dtype) and scale_dtype in ("float32", jnp.float32)
    if usual and is_array(x) and str(x.dtype) in _NARROW and x.shape and axis in (-1, len(x.shape) - 1):
        values, scale = _quantize_blocks(x, dtype=dtype)
        return Quantized(values, scale, (1,) * (len(x.shape) - 1) + (_BLOCK,))
    return _quantize(x, dtype=dtype, block=block, axis=axis, scale_dtype=scale_dtype, stochastic=stochastic)


@names_checked({})
def quantize_both(
    x: Float[Array, "m k"],
    group_sizes: Int[Array, " groups"] | None = None,
    *,
    dtype: DTypeLike = "float8_e4m3fn",
    square: bool = False,
    implementation: str | Sequence[str] | None = None,
    cfg: QuantizeConfig | None = None,
) -> tuple[Quantized, Quantized]:
    """Return `quantize(x, block=128)` and `quantize(x.T, block=128)`, which a kernel makes in one pass over `x`.

        x8, x8t = quantize_both(x)     # [m, k] for a matmul of rows, [k, m] for the gradient of its matrix

    With `group_sizes` each group begins a block of the columns, for `grouped_matmul_wgrad`: they are
    `[k, 128 * (m // 128 + groups + 1)]`, a group takes as many blocks of 128 as it needs, and there are zeros behind
    its rows and behind the last group. So no block has rows of two groups. Rows past the last group have no column.
    Over a mesh each device then needs all rows of its columns of `x`: shard `x` along `k`. Rows that are sharded are
    gathered over automatic axes, and raise over explicit ones.

    With `square`, 128x128 numbers of the columns share a scale, as in `quantize(x.T, block=128, axis=(0, 1))`. The
    gradient of matrices is faster with such columns as its right operand: see `grouped_matmul_wgrad`.

    On Hopper GPUs `mosaic_gpu` runs bfloat16 and float16 matrices to float8, if 16 divides `k`, and `m` where there are
    no groups. It multiplies by the reciprocal of a scale where `xla` divides, so some numbers halfway between two
    others are rounded to the other.

    Args:
        x: The matrix, in bfloat16, float16 or float32.
        group_sizes: The number of rows of each group, as for `grouped_matmul`; `None` without groups.
        dtype: As for `quantize`.
        square: Whether the columns have scales of 128x128 blocks rather than 1x128.
        implementation: As for `quantized_matmul`.
        cfg: The configuration of this call; `None` looks one up.

    Returns:
        The rows and the columns in 8 bits, each with a float32 scale for 128 consecutive numbers, or for 128x128.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        UnsupportedError: `implementation` cannot run this call, or the call is differentiated.
    """
    options: dict[str, Any] = {"dtype": dtype, "square": square, "implementation": implementation, "cfg": cfg}
    rows, row_scale, columns, column_scale = _quantize_blocks(
        x, within_32_bits(group_sizes), transposed=True, **options
    )
    blocks = (1, _BLOCK), (_BLOCK if square else 1, _BLOCK)
    return Quantized(rows, row_scale, blocks[0]), Quantized(columns, column_scale, blocks[1])


@overload
def quantized_matmul(
    x: Quantized | Num[Array, "*rows k"],
    w: Quantized | Num[Array, "k n"] | Num[Array, "n k"],
    *,
    x_scale: Float[Array, ...] | None = None,
    w_scale: Float[Array, ...] | None = None,
    activation: Literal["silu", "gelu", "relu", "relu2"] | None = None,
    gate: Quantized | Num[Array, "k n"] | Num[Array, "n k"] | None = None,
    row_scale: Float[Array, "*rows"] | None = None,
    quantize: None = None,
    transpose_w: bool = False,
    preferred_element_type: DTypeLike | None = None,
    accumulation: Literal["exact", "fast"] = "exact",
    implementation: str | Sequence[str] | None = None,
    cfg: QuantizedMatmulConfig | QuantizedGroupedMatmulConfig | QuantizedGroupedActivationConfig | None = None,
) -> Float[Array, "*rows n"]: ...


@overload
def quantized_matmul(
    x: Quantized | Num[Array, "*rows k"],
    w: Quantized | Num[Array, "k n"] | Num[Array, "n k"],
    *,
    x_scale: Float[Array, ...] | None = None,
    w_scale: Float[Array, ...] | None = None,
    activation: Literal["silu", "gelu", "relu", "relu2"] | None = None,
    gate: Quantized | None = None,
    quantize: DTypeLike,
    transpose_w: bool = False,
    accumulation: Literal["exact", "fast"] = "exact",
    implementation: str | Sequence[str] | None = None,
    cfg: QuantizedGroupedActivationConfig | None = None,
) -> Quantized: ...


@names_checked(_NAMES_ELSEWHERE)
def quantized_matmul(
    x: Quantized | Num[Array, "*rows k"],
    w: Quantized | Num[Array, "k n"] | Num[Array, "n k"],
    *,
    x_scale: Float[Array, ...] | None = None,
    w_scale: Float[Array, ...] | None = None,
    activation: Literal["silu", "gelu", "relu", "relu2"] | None = None,
    gate: Quantized | Num[Array, "k n"] | Num[Array, "n k"] | None = None,
    row_scale: Float[Array, "*rows"] | None = None,
    quantize: DTypeLike | None = None,
    transpose_w: bool = False,
    preferred_element_type: DTypeLike | None = None,
    accumulation: Literal["exact", "fast"] = "exact",
    implementation: str | Sequence[str] | None = None,
    cfg: QuantizedMatmulConfig | QuantizedGroupedMatmulConfig | QuantizedGroupedActivationConfig | None = None,
) -> Any:
    """Multiply matrices of which at least one holds 8-bit numbers with scales: `dequantize(x) @ dequantize(w)`.

        w8 = quantize(w.T)                                              # once: [n, k], a scale for each column of w
        y = quantized_matmul(quantize(x), w8, transpose_w=True)

    The tensor cores of Hopper GPUs keep few bits of a float8 sum: sums of 7,168 positive products come out 12 % too
    small, of 16,384 24 %, by cuBLASLt as well. By default partial sums are therefore added in float32, every 256 of
    `k`. `accumulation="fast"` leaves them in the tensor core, which is 2 to 8 % faster; its error on data with mean
    zero was 0.25 % at 7,168. int8 sums are exact either way, but the parts of a sum that several blocks of threads
    compute are added in float32.

    A scale may be one number, one for each row of `x` or column of `w`, or one for each block along `k`. `mosaic_gpu`
    runs two 8-bit operands with scales of rows, columns or arrays, or of 1x128 blocks by 128x128 blocks, and `w` as
    `[n, k]`. `xla` runs everything else, on widened operands.

    A bfloat16, float16 or float32 operand has a gradient: the matmul of the result's gradient and the other,
    dequantised operand. Differentiating a quantised operand raises, and so does `serialize(vjp_order=1)` of an
    exported program, which differentiates all arguments: pass `jax.lax.stop_gradient(w)` in the program.
    `quantized_dense` quantises both and trains.

    Activation, gate and factors of rows: the result is `activation(x @ w) * (x @ gate) * row_scale`, computed from
    float32 sums. With an activation or a gate this is the operation `quantized_grouped_activation` with one group,
    whose gradient computes the matmuls again. `row_scale` alone makes it `quantized_grouped_matmul` with one group. On
    Hopper GPUs `mosaic_gpu` has these epilogues for two 8-bit operands, and for at most 64 rows in 16 bits.

    If both operands have 8 bits, `quantize` makes the result `Quantized`, too, with a scale for 128 columns of a row,
    as the next matmul takes it:

        h8 = quantized_matmul(x8, w8, activation="silu", gate=gate8, transpose_w=True, quantize="float8_e4m3fn")
        y = quantized_matmul(h8, down8, transpose_w=True)  # down8 = quantize(down.T, block=128, axis=(0, 1))

    Under `jit` over a mesh the call splits itself by rows, columns and `k`, and scales are sharded like their operands.
    Blocks are never cut. Inside `jax.shard_map` each shard must begin and end with a block.

    Args:
        x: Rows: `Quantized`, a `qwix.QArray`, an 8-bit array with `x_scale`, or a floating-point array.
        w: The matrix, in one of the same forms.
        x_scale: Factors of an 8-bit array `x`: a number, `[m]` for each row of a matrix, or an array of the same rank
            whose sizes divide those of `x`.
        w_scale: Factors of an 8-bit array `w`: a number, `[n]`, or an array of the same rank.
        activation: Activation of the result: `silu`, `gelu` (the tanh approximation), `relu`, `relu2`, its square, or
            `None`.
        gate: A second matrix in the form of `w`, quantised if `w` is; the result is multiplied by `x @ gate`.
        row_scale: A factor for each row of the result; not with `quantize`. It has a gradient.
        quantize: Dtype of a result in 8 bits: `float8_e4m3fn`, `float8_e5m2` or `int8`.
        transpose_w: Whether `w` is `[n, k]`, as Hopper's tensor cores read 8-bit numbers.
        preferred_element_type: Dtype of the result: bfloat16, float16 or float32. By default that of the operand
            without scales, or bfloat16 if both are quantised.
        accumulation: `exact` adds partial sums in float32; `fast` permits sums in the tensor core.
        implementation: An implementation (`mosaic_gpu`, `xla`), or several in order of preference; the call raises if
            none of them supports it. `None` leaves the choice to the configuration.
        cfg: The configuration of this call; `None` looks one up. Gradients are calls with their own. With an
            activation, a gate or `quantize` it is a `QuantizedGroupedActivationConfig`, and with `row_scale` alone a
            `QuantizedGroupedMatmulConfig`.

    Returns:
        The result; with `quantize` as `Quantized`.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations, or `cfg` does not fit the call.
        UnsupportedError: `implementation` cannot run this call, or a quantised operand is differentiated.
    """
    transpose_w = canonical_flag("transpose_w", transpose_w)
    x, x_scale, x_block = _by_rows(*_operand("x", x, x_scale, 0))
    w, w_scale, w_block = _operand("w", w, w_scale, 0 if transpose_w else 1)
    options: dict[str, Any] = {
        "preferred_element_type": preferred_element_type,
        "accumulation": accumulation,
        "implementation": implementation,
    }
    if any(given is not None for given in (quantize, activation, gate, row_scale)):
        for name, value in {"preferred_element_type": preferred_element_type, "row_scale": row_scale}.items():
            if quantize is not None and value is not None:
                raise ArgumentError(f"{name} must be None with quantize, got {value_text(value)}.")
        options |= {"row_scale": row_scale, "activation": activation, "quantize": quantize}
        options |= {"transpose_rhs": transpose_w, "cfg": cfg}
        return _of_groups((x, x_scale, x_block), (w, w_scale, w_block), gate, options)
    chosen: Any = cfg
    return _quantized_matmul(
        x,
        w,
        x_scale,
        w_scale,
        x_block=x_block,
        w_block=w_block,
        transpose_w=transpose_w,
        cfg=chosen,
        **options,
    )


def _of_groups(x: Any, w: Any, gate: Any, options: dict[str, Any]) -> Any:
    """Return a matmul with an epilogue: that of one group of rows."""
    (values, scale, block), (matrix, w_scale, w_block) = x, w
    if block is None and w_block is None:
        names = ("activation", "gate", "quantize", "row_scale")
        asked = [f"{name}=" for name in names if (gate if name == "gate" else options[name]) is not None]
        raise ArgumentError(f"x or w must be in 8 bits, with scales, to pass {', '.join(asked)}; see quantize.")
    if options["quantize"] is not None and None in (block, w_block):
        raise ArgumentError("x and w must be in 8 bits to pass quantize=; see quantize, or quantize the result.")
    _quantized_matmul.prepare(  # its messages have the names of arguments here
        *(values, matrix, scale, w_scale), x_block=block, w_block=w_block, transpose_w=options["transpose_rhs"]
    )
    merging = Merging.of(values, len(values.shape) - 1)
    options["row_scale"] = _checked_row_scale(options["row_scale"], values, merging)
    rows = merging.merge("x", values)
    if block is not None:
        own = merging if scale.shape[:-1] == merging.sizes else Merging.of(scale, len(scale.shape) - 1)
        rows = Quantized(rows, own.merge("x_scale", scale), flat_block(block))
    group = _one_group(matrix, w_scale, w_block)
    if gate is not None:
        given, like = quantized_operand("gate", gate), (matrix, w_scale, w_block)
        if _form(*given) != _form(*like):
            wanted = "an array" if w_block is None else "Quantized"
            raise ArgumentError(f"gate must be {wanted} like w, {_form(*like)}; got {_form(*given)}.")
        gate = _one_group(*given)
    sizes = jnp.full((1,), rows.shape[0], jnp.int32)
    found = grouped_matmul(rows, group, sizes, gate=gate, **options)
    if not isinstance(found, Quantized):
        return merging.separate(found)
    block = (1,) * (len(values.shape) - 1) + found.block[1:]
    return Quantized(merging.separate(found.values), merging.separate(found.scale), block)


def _form(matrix: Any, scale: Any, block: Block | None) -> str:
    """Return the types of a matrix and its scales, and the blocks."""
    if block is None:
        return type_text(matrix)
    return f"{type_text(matrix)} with scales {type_text(scale)} of blocks {full_block(block, 2)}"


def _checked_row_scale(row_scale: Any, x: Any, merging: Merging) -> Any:
    """Return the factors of rows as a vector."""
    if row_scale is None:
        return None
    shape = tuple(x.shape[:-1])
    if not is_array(row_scale) or tuple(row_scale.shape) != shape:
        raise ArgumentError(
            f"row_scale must be an array of shape {shape}, that of x's rows; got {type_text(row_scale)}."
        )
    return merging.merge("row_scale", row_scale)


def _one_group(matrix: Any, scale: Any, block: Block | None) -> Any:
    """Return a matrix as that of the only group."""
    return matrix[None] if block is None else Quantized(matrix[None], scale[None], (1, *full_block(block, 2)))


def _by_rows(x: Any, scale: Any, block: Block | None) -> tuple[Any, Any, Block | None]:
    """Return an operand with scales for each row, if only some leading axes share them."""
    leading = () if block is None else full_block(block, len(x.shape))[:-1]
    if block is None or set(leading) != {1, None}:
        return x, scale, block
    return x, jnp.broadcast_to(scale, (*x.shape[:-1], scale.shape[-1])), (*[1] * len(leading), block[-1])


def _operand(name: str, array: Any, scale: Any, axis: int) -> tuple[Any, Any, Block | None]:
    """Return an operand's numbers, scales and blocks; `axis` is that of a vector of scales."""
    if is_quantized(array):
        return quantized_operand(name, array, scale)
    if scale is None or not is_array(array) or str(array.dtype) not in LARGEST:
        return array, scale, None
    if is_array(scale) and len(scale.shape) == 1 and len(array.shape) == 2:
        if scale.shape[0] != array.shape[axis]:
            raise ArgumentError(
                f"{name}_scale must be a number, a vector of {array.shape[axis]} numbers (axis {axis} of {name}), or "
                f"an array with the rank of {name}; got {type_text(scale)} for {name} {type_text(array)}."
            )
        scale = scale.reshape((-1, 1) if axis == 0 else (1, -1))
    found = given_scale(name, array, scale, f"{name}_scale")
    return *without_gradient(found.values, found.scale), found.block
