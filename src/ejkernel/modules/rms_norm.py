# SPDX-License-Identifier: Apache-2.0
"""`rms_norm`: divide rows by their root mean square."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ejkernel.kernels._numbers import is_integer
from ejkernel.kernels._row_norms.common import Normalized, given_residual
from ejkernel.kernels.quantized_matmul.quantized import Quantized
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK as _BLOCK
from ejkernel.kernels.rms_norm.operation import RmsNorm as RmsNorm
from ejkernel.kernels.rms_norm.operation import RmsNormConfig as RmsNormConfig
from ejkernel.kernels.rms_norm.operation import rms_norm as _rms_norm
from ejkernel.kernels.rms_norm.quantized.operation import QuantizedRmsNorm as QuantizedRmsNorm
from ejkernel.kernels.rms_norm.quantized.operation import QuantizedRmsNormConfig as QuantizedRmsNormConfig
from ejkernel.kernels.rms_norm.quantized.operation import quantized_rms_norm as _quantized_rms_norm
from ejkernel.ops.core.types import Number
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.messages.names import names_checked
from ejkernel.ops.utils.values.scalars import Takes, given_text, python_numbers
from ejkernel.ops.utils.values.signature import is_array

from ._names import by_name

# The names in Flax, Optax, PyTorch, Tokamax and flash-attn.
_NAMES_ELSEWHERE = by_name(
    {
        "eps": "epsilon variance_epsilon",
        "weight": "scale gamma",
        "weight_offset": "scale_offset offset",
        "rms_norm has no bias; add it to the result.": "bias",
        "axis": "dim axes reduction_axes normalized_shape",
        "with residual= the sum is always returned; leave it out.": "prenorm",
        "without weight= the result is not scaled; leave it out.": "use_scale",
        "cfg": "config",
    }
)


def _normalized_axes(axis: Any, count: int) -> tuple[int, ...]:
    axis = python_numbers(axis, Takes.NUMBERS)
    axes = (axis,) if is_integer(axis) else axis
    if not isinstance(axes, Sequence) or not axes or not all(is_integer(a) and -count <= a < count for a in axes):
        raise ArgumentError(f"axis must be an axis of x, which has {count}, or several; got {given_text(axis)}.")
    found = tuple(int(a) % count for a in axes)
    if len(set(found)) != len(found):
        raise ArgumentError(f"axis must name each axis once; got {axis!r}.")
    return found


class _Options(TypedDict, total=False):
    """The options of `rms_norm` that do not affect the type of its result."""

    eps: Number
    weight_offset: Number
    axis: int | Sequence[int]
    implementation: str | Sequence[str] | None


@overload
def rms_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, "*dim"] | None = None,
    *,
    residual: None = None,
    cfg: RmsNormConfig | None = None,
    **options: Unpack[_Options],
) -> Float[Array, "*rows dim"]: ...


@overload
def rms_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, "*dim"] | None = None,
    *,
    residual: Float[Array, "*rows dim"],
    cfg: RmsNormConfig | None = None,
    **options: Unpack[_Options],
) -> tuple[Float[Array, "*rows dim"], Float[Array, "*rows dim"]]: ...


@overload
def rms_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, "*dim"] | None = None,
    *,
    residual: None = None,
    quantize: DTypeLike,
    cfg: QuantizedRmsNormConfig | None = None,
    **options: Unpack[_Options],
) -> Quantized: ...


@overload
def rms_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, "*dim"] | None = None,
    *,
    residual: Float[Array, "*rows dim"],
    quantize: DTypeLike,
    cfg: QuantizedRmsNormConfig | None = None,
    **options: Unpack[_Options],
) -> tuple[Quantized, Float[Array, "*rows dim"]]: ...


@names_checked(_NAMES_ELSEWHERE)
def rms_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, "*dim"] | None = None,
    *,
    residual: Float[Array, "*rows dim"] | None = None,
    quantize: DTypeLike | None = None,
    eps: Number = 1e-6,
    weight_offset: Number = 0.0,
    axis: int | Sequence[int] = -1,
    implementation: str | Sequence[str] | None = None,
    cfg: RmsNormConfig | QuantizedRmsNormConfig | None = None,
) -> Any:
    """Divide `x` by the root mean square of its last axis: `x / sqrt(mean(x²) + eps) * (weight + weight_offset)`.

    For a product in 8 bits, `quantize` returns the output as `Quantized`, with a scale for 128 elements of a row:

        x8 = rms_norm(x, weight, quantize="float8_e4m3fn")
        y = quantized_matmul(x8, w8, transpose_w=True)     # w8 = quantize(w.T, block=128, axis=(0, 1))

    This is a separate operation, `quantized_rms_norm`, without a gradient. It quantises the float32 output, which is
    not rounded to `x.dtype` first. On Hopper GPUs, `mosaic_gpu` runs float8 if 512 divides the length of a row.

    Args:
        x: Array to normalise.
        weight: Scale of each element of a row; any floating-point dtype, with the shape of the normalised axes, in
            their order. `None`: 1.
        residual: Added to `x` before normalising, as in a residual block; same shape and dtype as `x`. The sum is
            rounded to that dtype before it is normalised, and returned as a second result.
        quantize: Dtype of an output in 8 bits: `float8_e4m3fn`, `float8_e5m2` or `int8`; the last axis is normalised.
        eps: Added to the mean of squares.
        weight_offset: Added to the weight; 1 for models that store weights around zero.
        axis: The axis to normalise, or several to normalise together.
        implementation: An implementation (`mosaic_gpu`, `xla`, `pallas`), or several in order of preference; the call
            raises if none of them supports it. `None` leaves the choice to the configuration.
        cfg: The configuration of this call and its gradient; `None` looks one up. A direction without parameters in
            `cfg` uses the implementation's heuristic. With `quantize` it is a `QuantizedRmsNormConfig`.

    Returns:
        The output, computed in float32 and returned in `x.dtype`, or `Quantized`. With a residual, the output and the
        sum.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations, or `cfg` does not fit the call.
        UnsupportedError: `implementation` cannot run this call, or a call with `quantize` is differentiated.
    """
    options: dict[str, Any] = {"eps": eps, "implementation": implementation, "cfg": cfg}
    if quantize is not None:
        return _quantized(x, weight, residual, axis, quantize=quantize, weight_offset=weight_offset, **options)
    more = () if residual is None else (residual,)
    if type(axis) is int and axis == -1 and type(weight_offset) is float and not weight_offset:
        # Each argument slows down an eager call, so defaults are not passed.
        return _rms_norm(x, weight, *more, **options)
    options["weight_offset"] = weight_offset
    # Arguments that are not arrays go to the operation, which raises a clear error.
    if not is_array(x) or (is_integer(axis) and axis in (-1, len(x.shape) - 1)):
        return _rms_norm(x, weight, *more, **options)
    axes = _normalized_axes(axis, len(x.shape))
    # Implementations normalise the last axis, so several axes are flattened into one.
    moved, *others = (jnp.moveaxis(y, axes, range(-len(axes), 0)) for y in (x, *given_residual(residual, x)))
    kept, dims = moved.shape[: -len(axes)], moved.shape[-len(axes) :]
    if weight is not None and (not is_array(weight) or tuple(weight.shape) != dims):
        got = tuple(weight.shape) if is_array(weight) else type(weight).__name__
        raise ArgumentError(f"weight must have the shape of x's axes {axes}, {dims}; got {got}.")
    flat = None if weight is None else jnp.reshape(weight, -1)
    rows, *added = [jnp.reshape(y, (*kept, math.prod(dims))) for y in (moved, *others)]
    found = _rms_norm(rows, flat, *added, **options)
    out: Normalized = jax.tree.map(
        lambda y: jnp.moveaxis(jnp.reshape(y, moved.shape), range(-len(axes), 0), axes), found
    )
    return out


def _quantized(
    x: Any, weight: Any, residual: Any, axis: Any, **options: Any
) -> Quantized | tuple[Quantized, jax.Array]:
    """Return the output in 8 bits, and with a residual the sum."""
    if is_array(x) and _normalized_axes(axis, len(x.shape)) != (len(x.shape) - 1,):
        raise ArgumentError(f"axis must be the last axis of x with quantize, got {given_text(axis)}.")
    values, scale, *sums = _quantized_rms_norm(x, weight, *(() if residual is None else (residual,)), **options)
    out = Quantized(values, scale, (1,) * (len(values.shape) - 1) + (_BLOCK,))
    return (out, *sums) if sums else out
