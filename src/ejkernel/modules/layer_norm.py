# SPDX-License-Identifier: Apache-2.0
"""`layer_norm`: normalise rows to mean 0 and variance 1, then scale and shift them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from jaxtyping import Array, Float

from ejkernel.kernels.layer_norm.operation import LayerNorm as LayerNorm
from ejkernel.kernels.layer_norm.operation import LayerNormConfig as LayerNormConfig
from ejkernel.kernels.layer_norm.operation import layer_norm as _layer_norm
from ejkernel.ops.core.types import Number
from ejkernel.ops.utils.messages.names import names_checked

from ._names import by_name

# The names in Flax, PyTorch, Tokamax and flash-attn.
_NAMES_ELSEWHERE = by_name(
    {
        "eps": "epsilon variance_epsilon",
        "weight": "scale gamma",
        "bias": "offset beta",
        "layer_norm normalises the last axis; move yours there.": "axis axes reduction_axes",
        "layer_norm normalises the last axis; leave it out.": "normalized_shape",
        "with residual= the sum is always returned; leave it out.": "prenorm",
        "cfg": "config",
    }
)


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
        x: Array to normalise.
        weight: Scale of each column; any floating-point dtype.
        bias: Shift of each column; any floating-point dtype.
        residual: Added to `x` before normalising, as in a residual block; same shape and dtype as `x`. The sum is
            rounded to that dtype before it is normalised, and returned as a second result.
        eps: Added to the variance.
        implementation: An implementation (`mosaic_gpu`, `xla`, `pallas`), or several in order of preference; the call
            raises if none of them supports it. `None` leaves the choice to the configuration.
        cfg: The configuration of this call and its gradient; `None` looks one up. A direction without parameters in
            `cfg` uses the implementation's heuristic.

    Returns:
        The output, computed in float32 and returned in `x.dtype`. With a residual, the output and the sum.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations, or `cfg` does not fit the call.
        UnsupportedError: `implementation` cannot run this call; the message says why.
    """
    more = () if residual is None else (residual,)  # each argument slows down an eager call
    return _layer_norm(x, weight, bias, *more, eps=eps, implementation=implementation, cfg=cfg)
