# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul`: multiply each group of rows by the group's own matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ejkernel.kernels._options import type_text, within_32_bits
from ejkernel.kernels.grouped_matmul.activation import GroupedMatmulActivation as GroupedMatmulActivation
from ejkernel.kernels.grouped_matmul.activation import GroupedMatmulActivationConfig as GroupedMatmulActivationConfig
from ejkernel.kernels.grouped_matmul.activation import grouped_matmul_activation as _grouped_matmul_activation
from ejkernel.kernels.grouped_matmul.operation import GroupedMatmul as GroupedMatmul
from ejkernel.kernels.grouped_matmul.operation import GroupedMatmulConfig as GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.operation import GroupedMatmulWgrad as GroupedMatmulWgrad
from ejkernel.kernels.grouped_matmul.operation import GroupedMatmulWgradConfig as GroupedMatmulWgradConfig
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul as _grouped_matmul
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul_wgrad as _grouped_matmul_wgrad
from ejkernel.kernels.quantized_matmul.grouped.activation import (
    QuantizedGroupedActivation as QuantizedGroupedActivation,
)
from ejkernel.kernels.quantized_matmul.grouped.activation import (
    QuantizedGroupedActivationConfig as QuantizedGroupedActivationConfig,
)
from ejkernel.kernels.quantized_matmul.grouped.activation import (
    quantized_grouped_activation as _quantized_grouped_activation,
)
from ejkernel.kernels.quantized_matmul.grouped.operation import QuantizedGroupedMatmul as QuantizedGroupedMatmul
from ejkernel.kernels.quantized_matmul.grouped.operation import (
    QuantizedGroupedMatmulConfig as QuantizedGroupedMatmulConfig,
)
from ejkernel.kernels.quantized_matmul.grouped.operation import quantized_grouped_matmul as _quantized_grouped_matmul
from ejkernel.kernels.quantized_matmul.grouped.wgrad import BLOCKS as _COLUMN_BLOCKS
from ejkernel.kernels.quantized_matmul.grouped.wgrad import SQUARES as _SQUARES
from ejkernel.kernels.quantized_matmul.grouped.wgrad import QuantizedGroupedWgrad as QuantizedGroupedWgrad
from ejkernel.kernels.quantized_matmul.grouped.wgrad import QuantizedGroupedWgradConfig as QuantizedGroupedWgradConfig
from ejkernel.kernels.quantized_matmul.grouped.wgrad import quantized_grouped_wgrad as _quantized_grouped_wgrad
from ejkernel.kernels.quantized_matmul.quantized import Block, Quantized, full_block, is_quantized, quantized_operand
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK as _BLOCK
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.messages.names import names_checked
from ejkernel.ops.utils.values.signature import is_array

from ._names import by_name

# The names in jax.lax.ragged_dot, Megablox, Tokamax, grouped_gemm and PyTorch.
_NAMES_ELSEWHERE = by_name(
    {
        "first_group": "group_offset",
        "group_sizes": "batch_sizes m_sizes group_lengths",
        "group_sizes= are the sizes of groups, not their ends; pass jnp.diff(offs, prepend=0).": "offs",
        "group_sizes= are the sizes of groups, not offsets; pass their differences.": "group_offsets",
        "transpose_rhs": "trans_b transpose_b rhs_transposed",
        "preferred_element_type": "dtype out_dtype output_dtype",
        "row_scale": "scale",
        "groups": "num_groups num_actual_groups",
        "cfg": "tiling config",
        "lhs": "x a",
        "rhs": "w b weight",
    }
)


@overload
def grouped_matmul(
    lhs: Quantized | Float[Array, "m k"],
    rhs: Quantized | Float[Array, "groups k n"] | Float[Array, "groups n k"],
    group_sizes: Int[Array, " all_groups"],
    *,
    activation: Literal["silu", "gelu", "relu", "relu2"] | None = None,
    gate: Quantized | Float[Array, "groups k n"] | Float[Array, "groups n k"] | None = None,
    row_scale: Float[Array, " m"] | None = None,
    quantize: None = None,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: str | jax.lax.Precision | None = None,
    first_group: int | Int[Array, ""] | None = None,
    accumulation: Literal["exact", "fast"] = "exact",
    implementation: str | Sequence[str] | None = None,
    cfg: (
        GroupedMatmulConfig
        | GroupedMatmulActivationConfig
        | QuantizedGroupedMatmulConfig
        | QuantizedGroupedActivationConfig
        | None
    ) = None,
) -> Float[Array, "m n"]: ...


@overload
def grouped_matmul(
    lhs: Quantized,
    rhs: Quantized,
    group_sizes: Int[Array, " all_groups"],
    *,
    activation: Literal["silu", "gelu", "relu", "relu2"] | None = None,
    gate: Quantized | None = None,
    quantize: DTypeLike,
    transpose_rhs: bool = False,
    first_group: int | Int[Array, ""] | None = None,
    accumulation: Literal["exact", "fast"] = "exact",
    implementation: str | Sequence[str] | None = None,
    cfg: QuantizedGroupedActivationConfig | None = None,
) -> Quantized: ...


@names_checked(_NAMES_ELSEWHERE)
def grouped_matmul(
    lhs: Quantized | Float[Array, "m k"],
    rhs: Quantized | Float[Array, "groups k n"] | Float[Array, "groups n k"],
    group_sizes: Int[Array, " all_groups"],
    *,
    activation: Literal["silu", "gelu", "relu", "relu2"] | None = None,
    gate: Quantized | Float[Array, "groups k n"] | Float[Array, "groups n k"] | None = None,
    row_scale: Float[Array, " m"] | None = None,
    quantize: DTypeLike | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: str | jax.lax.Precision | None = None,
    first_group: int | Int[Array, ""] | None = None,
    accumulation: Literal["exact", "fast"] = "exact",
    implementation: str | Sequence[str] | None = None,
    cfg: (
        GroupedMatmulConfig
        | GroupedMatmulActivationConfig
        | QuantizedGroupedMatmulConfig
        | QuantizedGroupedActivationConfig
        | None
    ) = None,
) -> Any:
    """Multiply the first `group_sizes[0]` rows of `lhs` with `rhs[0]`, the next `group_sizes[1]` with `rhs[1]`, ...

    This is the matmul in a mixture of experts, for tokens sorted by expert. Groups may have any size and may be
    empty. NaN and infinity in one group do not affect the rows of other groups.

    The gradient consists of two calls, each with its own configuration: a matmul with `rhs` transposed, and
    `grouped_matmul_wgrad`. Before, the result's gradient is rounded to the operands' dtype. For float16 operands, each
    row of a float32 gradient, or of a gradient before `row_scale`, is first scaled by a power of two into float16's
    range.

    With an activation or a gate, the result is `activation(lhs @ rhs) * (lhs @ gate)` for each group's matrices. This
    is a separate operation, `grouped_matmul_activation`, with its own key; implementations that can do so compute it in
    one kernel. Activation, gate and row scale are applied to float32 sums, before the result is rounded. The forward
    saves their results for the gradient, rounded to the result's dtype as in plain JAX, but in float32 for a float16
    result. Under `jax.checkpoint` they are recomputed, unless a policy saves `grouped_matmul_activation.out` and
    `grouped_matmul_activation.residuals`. `row_scale` alone saves nothing.

    Operands may be `Quantized` (or a `qwix.QArray`) on either or both sides: the result is the matmul of the
    dequantised operands. This is a separate operation, `quantized_grouped_matmul`. On Hopper GPUs, `mosaic_gpu` runs
    two 8-bit operands, and on average at most 64 rows a group in 16 bits, with `rhs` as `[groups, n, k]`:

        w8 = quantize(rhs.swapaxes(1, 2))  # once: a scale for each group's column
        out = grouped_matmul(quantize(lhs), w8, group_sizes, transpose_rhs=True)

    An operand without scales and `row_scale` have gradients; differentiating a quantised operand raises.

    With an activation or a gate this is a separate operation, `quantized_grouped_activation`; the gate is `Quantized`
    if `rhs` is. Its gradient computes the matmuls again. If both operands are `Quantized`, `quantize` makes the result
    `Quantized`, too, with a scale for 128 columns of a row, as the next matmul takes it; it is quantised from float32:

        h8 = grouped_matmul(
            x8, w8, sizes, activation="silu", gate=gate8, transpose_rhs=True, quantize="float8_e4m3fn"
        )
        out = grouped_matmul(h8, down8, sizes, transpose_rhs=True)  # down8 in 128x128 blocks

    Under `jax.vmap`, implementations without a batched kernel compute the examples one after the other. It is faster to
    join batches of rows into one call.

    Under `jit` over a mesh the call splits itself: by rows, groups (experts), columns, the contracted axis, or several
    of these. Inside `jax.shard_map`, if each device holds the matrices of some groups, pass the first group:

        out = grouped_matmul(lhs, rhs, group_sizes, first_group=jax.lax.axis_index("expert") * rhs.shape[0])
        out = jax.lax.psum(out, "expert")

    Args:
        lhs: Rows, group after group, as an array or `Quantized`.
        rhs: A matrix for each group, of the same dtype or `Quantized`.
        group_sizes: Number of rows in each group. The sum may differ from `m`: rows after the last group belong to no
            group, and sizes beyond the last row are ignored.
        activation: Activation of the result: `silu`, `gelu` (the tanh approximation, `jax.nn.gelu`'s default),
            `relu`, or `relu2`, its square; or `None`.
        gate: A second matrix for each group, like `rhs`; the result is multiplied by `lhs @ gate`.
        row_scale: A factor for each row of the result, such as a router's weight. Values past the last group are
            ignored. Not with `quantize`.
        quantize: Dtype of a result in 8 bits: `float8_e4m3fn`, `float8_e5m2` or `int8`.
        first_group: If `rhs` holds only some of the groups, the index of its first group in `group_sizes`, which lists
            all groups. Rows of the other groups are zero in the result. As an array, e.g. computed from the device's
            index, it lets all devices run the same program.
        transpose_rhs: Whether the matrices of `rhs` and `gate` are transposed, `[groups, n, k]`.
        preferred_element_type: Dtype of the result; by default that of `lhs`. With quantised operands that of the
            operand without scales, or bfloat16.
        precision: Of the matmuls, as for `jax.lax.dot`; only `xla` supports a value other than `None`.
        accumulation: How float8 products are summed, as for `quantized_matmul`: `exact` adds partial sums in float32;
            `fast` permits sums in the tensor core.
        implementation: An implementation (`mosaic_gpu`, `jax_mgpu`, `xla`, `megablox`), or several in order of
            preference; the call raises if none of them supports it. `None` leaves the choice to the configuration. It
            also applies to the matmuls of the gradient.
        cfg: The configuration of this call, not of its gradient; `None` looks one up. With an activation or a gate it
            is a `GroupedMatmulActivationConfig`; with quantised operands a `QuantizedGroupedMatmulConfig`, or a
            `QuantizedGroupedActivationConfig` with an activation, a gate or `quantize`.

    Returns:
        The result, with zeros in rows past the last group; with `quantize` as `Quantized`. Sums are computed in float32
        (float64 for float64).

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations, or `cfg` does not fit the call.
        UnsupportedError: `implementation` cannot run this call, or a quantised operand is differentiated.
    """
    group_sizes = within_32_bits(group_sizes)
    options: dict[str, Any] = {
        "transpose_rhs": transpose_rhs,
        "preferred_element_type": preferred_element_type,
        "first_group": within_32_bits(first_group),
        "implementation": implementation,
        "cfg": cfg,
    }
    if quantize is not None:
        unused = {"row_scale": row_scale, "preferred_element_type": preferred_element_type, "precision": precision}
        _check_unused(unused, "with quantize")
    if quantize is not None or is_quantized(lhs) or is_quantized(rhs):
        _check_quantized(precision)
        options["accumulation"] = accumulation
        if quantize is not None or activation is not None or gate is not None:
            more = {"activation": activation, "quantize": quantize, "row_scale": row_scale, **options}
            return _activated(lhs, rhs, group_sizes, gate, **more)
        lhs, lhs_scale, lhs_block = quantized_operand("lhs", lhs)
        rhs, rhs_scale, rhs_block = quantized_operand("rhs", rhs)
        options |= {"lhs_block": lhs_block, "rhs_block": rhs_block}
        return _quantized_grouped_matmul(lhs, rhs, group_sizes, lhs_scale, rhs_scale, row_scale, **options)
    if is_array(accumulation) or accumulation != "exact":
        raise ArgumentError(f"accumulation is for quantised operands, got {accumulation!r}; pass quantize(lhs).")
    options["precision"] = precision
    if activation is None and gate is None:
        return _grouped_matmul(lhs, rhs, group_sizes, row_scale, **options)
    return _grouped_matmul_activation(lhs, rhs, group_sizes, gate, row_scale, activation=activation, **options)


def _activated(
    lhs: Any, rhs: Any, group_sizes: Any, gate: Any, *, row_scale: Any = None, quantize: Any = None, **options: Any
) -> Any:
    """Return the activation of a matmul of groups with 8-bit operands; see `grouped_matmul` for the arguments."""
    lhs, lhs_scale, lhs_block = quantized_operand("lhs", lhs)
    rhs, rhs_scale, rhs_block = quantized_operand("rhs", rhs)
    pair = None
    if gate is not None:
        values, scale, block = quantized_operand("gate", gate)
        own, like = (None if each is None else full_block(each, 3) for each in (block, rhs_block))
        if own != like:
            wanted = "an array like rhs" if like is None else f"Quantized like rhs, in blocks {like}"
            raise ArgumentError(f"gate must be {wanted}; got {type_text(gate)}{'' if own is None else f', {own}'}.")
        pair = (values, scale)
    options |= {"lhs_block": lhs_block, "rhs_block": rhs_block, "quantize": quantize}
    found = _quantized_grouped_activation(
        lhs,
        rhs,
        group_sizes,
        lhs_scale,
        rhs_scale,
        *((pair, row_scale) if row_scale is not None else (pair,)),
        **options,
    )
    return found if quantize is None else Quantized(found[0], found[1], (1, _BLOCK))


def _check_quantized(precision: Any) -> None:
    _check_unused({"precision": precision}, "where lhs or rhs is quantised", "pass dequantize()d operands")


def _check_unused(given: Mapping[str, Any], where: str, instead: str = "apply it to the dequantized result") -> None:
    for name, value in given.items():
        if value is not None:
            shown = type_text(value) if hasattr(value, "shape") or isinstance(value, Quantized) else repr(value)
            raise ArgumentError(f"{name} must be None {where}, got {shown}; {instead}.")


@names_checked(_NAMES_ELSEWHERE)
def grouped_matmul_wgrad(
    lhs: Quantized | Float[Array, "m k"],
    rhs: Quantized | Float[Array, "m n"],
    group_sizes: Int[Array, " all_groups"],
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: str | jax.lax.Precision | None = None,
    first_group: int | Int[Array, ""] | None = None,
    groups: int | None = None,
    implementation: str | Sequence[str] | None = None,
    cfg: GroupedMatmulWgradConfig | QuantizedGroupedWgradConfig | None = None,
) -> Float[Array, "groups k n"]:
    """Return `lhs[rows].T @ rhs[rows]` for the rows of each group: the gradient of `grouped_matmul`'s matrices.

    Both operands may be 8-bit columns `[k, padded]` and `[n, padded]`, in which each group begins a block of 128:

        lhs8, lhs8t = quantize_both(lhs, group_sizes)
        dout8, dout8t = quantize_both(dout, group_sizes, dtype="float8_e5m2")
        drhs = grouped_matmul_wgrad(lhs8t, dout8t, group_sizes)

    With `quantize_both(dout, group_sizes, square=True)` a step of the sum has one scale for 128 columns of `dout`. This
    is faster: the kernel multiplies each partial sum once rather than twice.

    This is a separate operation, `quantized_grouped_wgrad`, without a gradient. On Hopper GPUs, `mosaic_gpu` runs
    float8.

    Args:
        lhs: Rows, group after group: the left operand of `grouped_matmul`.
        rhs: Rows of the same groups, of the same dtype: the gradient of the result of `grouped_matmul`.
        group_sizes: As for `grouped_matmul`.
        first_group: Index of the first group in the result, as for `grouped_matmul`; pass `groups` with it.
        groups: Number of groups in the result, starting with `first_group`; by default all.
        preferred_element_type: Dtype of the result; by default that of `lhs`, or bfloat16 if it is quantised.
        precision: As for `grouped_matmul`.
        implementation: As for `grouped_matmul`; `mosaic_gpu`, `xla` or `megablox`.
        cfg: The configuration of this call; `None` looks one up. With quantised operands it is a
            `QuantizedGroupedWgradConfig`.

    Returns:
        The sums, with zeros for empty groups. Rows past the last group are ignored.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations, or `cfg` does not fit the call.
        UnsupportedError: `implementation` cannot run this call, or a quantised operand is differentiated.
    """
    group_sizes = within_32_bits(group_sizes)
    options: dict[str, Any] = {
        "preferred_element_type": preferred_element_type,
        "first_group": within_32_bits(first_group),
        "groups": groups,
        "implementation": implementation,
        "cfg": cfg,
    }
    if is_quantized(lhs) or is_quantized(rhs):
        _check_quantized(precision)
        lhs, lhs_scale, _ = _columns("lhs", lhs, _COLUMN_BLOCKS)
        rhs, rhs_scale, block = _columns("rhs", rhs, _COLUMN_BLOCKS, _SQUARES)
        options["square"] = block == _SQUARES
        return _quantized_grouped_wgrad(lhs, rhs, group_sizes, lhs_scale, rhs_scale, **options)
    return _grouped_matmul_wgrad(lhs, rhs, group_sizes, precision=precision, **options)


def _columns(name: str, array: Any, *blocks: Block) -> tuple[Any, Any, Block]:
    """Return the numbers, scales and blocks of quantised columns; `blocks` are the possible ones."""
    values, scale, block = quantized_operand(name, array)
    if block not in blocks:
        got = type_text(array) if block is None else f"blocks {block}"
        raise ArgumentError(
            f"{name} must have blocks {' or '.join(map(str, blocks))} where lhs or rhs is quantised, got {got}; pass "
            "the second result of quantize_both(x, group_sizes) for both."
        )
    return values, scale, block
