# SPDX-License-Identifier: Apache-2.0
"""`flash_attention`: softmax attention by the fastest implementation that is known for the call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels import flash_attention as implementations
from ejkernel.kernels.flash_attention import IMPLEMENTATIONS, load
from ejkernel.kernels.flash_attention.common import AttentionCall, Operands, Rules, describe
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import ArgumentError, ConfigError, UnsupportedError
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams

from ._attention_arguments import checked_arguments

SegmentIds = Int[Array, "batch length"] | tuple[Int[Array, "batch queries"], Int[Array, "batch keys"]]
SlidingWindow = int | tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttentionConfig:
    """How one call of `flash_attention` runs, forward or backward.

    Attributes:
        implementation: Which implementation runs: `xla` or `cudnn`.
        fwd: Launch parameters of the forward.
        bwd: Launch parameters of the backward.
    """

    implementation: str = "xla"
    fwd: FwdParams = FwdParams()
    bwd: BwdParams = BwdParams()

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise ConfigError(
                f"implementation must be one of {', '.join(IMPLEMENTATIONS)}; got {self.implementation!r}."
            )


class FlashAttention(Kernel[FlashAttentionConfig, jax.Array]):
    """The operation behind `flash_attention`; it takes the same arguments."""

    def __init__(self) -> None:
        super().__init__(name="flash_attention")
