# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper GPUs by kernels of our own, in Pallas Mosaic GPU."""

from __future__ import annotations

import jax

from ejkernel.kernels.flash_attention.common import AttentionCall, AttentionImplementation, Operands, Rules
from ejkernel.ops.config.spaces.space import ConfigSpace

from . import forward_support
from .forward import forward
from .params import ForwardParams


class MosaicGpu(AttentionImplementation):
    """The forward by our own kernel; backwards are others', which take what it leaves."""

    name = "mosaic_gpu"
    params = ForwardParams

    def unsupported(self, call: AttentionCall) -> str | None:
        """See `forward_support.unsupported_reason`."""
        if call.backward:
            return "implementation='mosaic_gpu' has no backward; use 'cudnn' or 'xla' for that."
        return forward_support.unsupported_reason(call)

    def params_fault(self, call: AttentionCall, params: ForwardParams) -> str | None:
        """See `forward_support.params_fault`."""
        return forward_support.params_fault(call, params)

    def heuristic(self, call: AttentionCall) -> ForwardParams:
        """See `forward_support.heuristic`."""
        return forward_support.heuristic(call)

    def space(self, call: AttentionCall) -> ConfigSpace[ForwardParams]:
        """See `forward_support.space`."""
        return forward_support.space(call)

    def attend(self, operands: Operands, rules: Rules, params: ForwardParams) -> tuple[jax.Array, jax.Array]:
        """See `forward.forward`."""
        return forward(operands, rules, params)
