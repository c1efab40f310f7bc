# SPDX-License-Identifier: Apache-2.0
"""`rms_norm`: scale rows by their root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels._numbers import is_integer
from ejkernel.kernels.rms_norm.operation import RmsNorm as RmsNorm
from ejkernel.kernels.rms_norm.operation import RmsNormConfig as RmsNormConfig
from ejkernel.kernels.rms_norm.operation import rms_norm as _rms_norm
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.signature import is_array


def _normalized_axes(axis: Any, count: int) -> tuple[int, ...]:
    axes = (axis,) if is_integer(axis) else axis
    if not isinstance(axes, Sequence) or not axes or not all(is_integer(a) and -count <= a < count for a in axes):
        raise ArgumentError(f"axis must be an axis of x, which has {count}, or several; got {axis!r}.")
    found = tuple(int(a) % count for a in axes)
    if len(set(found)) != len(found):
        raise ArgumentError(f"axis must name each axis once; got {axis!r}.")
    return found


def rms_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, "*dim"] | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    implementation: str | Sequence[str] | None = None,
    cfg: RmsNormConfig | None = None,
) -> Float[Array, "*rows dim"]:
    """Scale `x` by the root mean square of its last axis: `x / sqrt(mean(x²) + eps) * (weight + weight_offset)`.

    Args:
        x: What is normalised.
        weight: Factor on every element of a row; of any floating-point dtype, and of the shape that the axes have, in
            their order. `None`: 1.
        eps: Added to the mean of squares.
        weight_offset: Added to the weight: 1 for weights that are kept around zero.
        axis: Which axis is normalised, or which ones together.
        implementation: Run this one (`xla`) or raise; `None` leaves the choice to the configuration.
        cfg: The configuration to run with, for this call and its gradient; `None` resolves one. Where it has no
            parameters for one of the two, they are the implementation's heuristic's.

    Returns:
        The output, in `x.dtype`; it is computed in float32.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or value.
    """
    options: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "implementation": implementation, "cfg": cfg}
    if not is_array(x) or axis in (-1, len(x.shape) - 1):
        return _rms_norm(x, weight, **options)
    axes = _normalized_axes(axis, len(x.shape))
    moved = jnp.moveaxis(x, axes, range(-len(axes), 0))
    kept, dims = moved.shape[: -len(axes)], moved.shape[-len(axes) :]
    if weight is not None and (not is_array(weight) or tuple(weight.shape) != dims):
        got = tuple(weight.shape) if is_array(weight) else type(weight).__name__
        raise ArgumentError(f"weight must have the shape of x's axes {axes}, {dims}; got {got}.")
    flat = None if weight is None else jnp.reshape(weight, -1)
    out = _rms_norm(jnp.reshape(moved, (*kept, -1)), flat, **options)
    return jnp.moveaxis(jnp.reshape(out, moved.shape), range(-len(axes), 0), axes)
