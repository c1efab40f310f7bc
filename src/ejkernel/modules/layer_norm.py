# SPDX-License-Identifier: Apache-2.0
"""`layer_norm`: rows with mean 0 and variance 1, scaled and shifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from jaxtyping import Array, Float

from ejkernel.kernels.layer_norm.operation import LayerNorm as LayerNorm
from ejkernel.kernels.layer_norm.operation import LayerNormConfig as LayerNormConfig
from ejkernel.kernels.layer_norm.operation import layer_norm as _layer_norm
from ejkernel.ops.core.types import Number
from ejkernel.ops.utils.messages.names import names_checked

_NAMES_ELSEWHERE = {  # in Flax, PyTorch, Tokamax and flash-attn
    "epsilon": "eps",
    "variance_epsilon": "eps",
    "scale": "weight",
    "gamma": "weight",
    "offset": "bias",
    "beta": "bias",
    "axis": "layer_norm normalises the last axis; move yours there.",
    "axes": "layer_norm normalises the last axis; move yours there.",
    "reduction_axes": "layer_norm normalises the last axis; move yours there.",
    "normalized_shape": "layer_norm normalises the last axis; leave it out.",
    "prenorm": "with residual= the sum is always a result; leave it out.",
    "config": "cfg",
}


@overload
def layer_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, " dim"],
    bias: Float[Array, " dim"],
    *,
    residual: None = None,
    eps: Number = 1e-5,
    implementation: str | Sequence[str] | None = None,
    cfg: LayerNormConfig | None = None,
) -> Float[Array, "*rows dim"]: ...


@overload
def layer_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, " dim"],
    bias: Float[Array, " dim"],
    *,
    residual: Float[Array, "*rows dim"],
    eps: Number = 1e-5,
    implementation: str | Sequence[str] | None = None,
    cfg: LayerNormConfig | None = None,
) -> tuple[Float[Array, "*rows dim"], Float[Array, "*rows dim"]]: ...


@names_checked(_NAMES_ELSEWHERE)
def layer_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, " dim"],
    bias: Float[Array, " dim"],
    *,
    residual: Float[Array, "*rows dim"] | None = None,
    eps: Number = 1e-5,
    implementation: str | Sequence[str] | None = None,
    cfg: LayerNormConfig | None = None,
) -> Float[Array, "*rows dim"] | tuple[Float[Array, "*rows dim"], Float[Array, "*rows dim"]]:
    """Normalise `x` over its last axis: `(x - mean) / sqrt(variance + eps) * weight + bias`.

    Args:
        x: What is normalised.
        weight: Factor on every element of a row; of any floating-point dtype.
        bias: Added to every element of a row, likewise.
        residual: Added to `x` before, as a block adds its input to what it computed; of `x`'s shape and dtype. The sum
            is a result, too, rounded to that dtype before it is normalised.
        eps: Added to the variance.
        implementation: Run this one (`mosaic_gpu`, `xla`, `pallas`), or one of these, the one to prefer first, or
            raise; `None` leaves the choice to the configuration.
        cfg: The configuration to run with, for this call and its gradient; `None` resolves one. Where it has no
            parameters for one of the two, they are the implementation's heuristic's.

    Returns:
        The output, in `x.dtype`; it is computed in float32. With a residual, the output and the sum.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or value.
        ConfigError: `cfg` names another implementation than `implementation`, or does not fit the call.
        UnsupportedError: `implementation` cannot run this call; the message says why.
    """
    more = () if residual is None else (residual,)  # what is not said takes no time
    return _layer_norm(x, weight, bias, *more, eps=eps, implementation=implementation, cfg=cfg)
