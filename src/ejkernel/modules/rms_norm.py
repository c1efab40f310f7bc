# SPDX-License-Identifier: Apache-2.0
"""`rms_norm`: scale rows by their root mean square."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from ejkernel.kernels.rms_norm.operation import RmsNorm as RmsNorm
from ejkernel.kernels.rms_norm.operation import RmsNormConfig as RmsNormConfig
from ejkernel.kernels.rms_norm.operation import rms_norm as _rms_norm


def rms_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, " dim"],
    *,
    eps: float = 1e-6,
    implementation: str | Sequence[str] | None = None,
    cfg: RmsNormConfig | None = None,
) -> Float[Array, "*rows dim"]:
    """Scale `x` by the root mean square of its last axis: `x / sqrt(mean(x²) + eps) * weight`.

    Args:
        x: What is normalised.
        weight: Factor on every element of a row; of any floating-point dtype.
        eps: Added to the mean of squares.
        implementation: Run this one (`xla`) or raise; `None` leaves the choice to the configuration.
        cfg: The configuration to run with, for this call and its gradient; `None` resolves one. Where it has no
            parameters for one of the two, they are the implementation's heuristic's.

    Returns:
        The output, in `x.dtype`; it is computed in float32.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or value.
    """
    return _rms_norm(x, weight, eps=eps, implementation=implementation, cfg=cfg)
