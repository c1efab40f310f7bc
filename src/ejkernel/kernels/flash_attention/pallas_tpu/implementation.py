# SPDX-License-Identifier: Apache-2.0
"""The implementation `pallas_tpu` of attention."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.flash_attention._tpu import unsupported_reason
from ejkernel.kernels.flash_attention.common import (
    AttentionCall,
    AttentionImplementation,
    Gradients,
    Operands,
    Residuals,
    Rules,
    operands_of,
    scale_reason,
)

from . import choices
from .launch import backward, forward
from .params import BackwardParams, ForwardParams


class PallasTpu(AttentionImplementation):
    """Our kernels for TPUs; they skip tiles that a block cannot see."""

    name = "pallas_tpu"
    params = ForwardParams
    bwd_params = BackwardParams
    features = frozenset(("query_lengths", "key_lengths", "return_lse", "deterministic"))

    def unsupported(self, call: AttentionCall) -> str | None:
        """Return why the kernels do not support the call, with an alternative; `None` if they do."""
        if (reason := unsupported_reason(call, self.name)) is not None:
            return reason
        if (doubt := choices.doubt(call, choices.heuristic(call))) is not None:
            dims = f"{call.query[3]} for query and key and {call.value[3]} for value"
            return f"head_dim is {dims}; use 'xla'. With the smallest blocks of pallas_tpu {doubt}"
        return scale_reason(call, self.name)

    def params_fault(self, call: AttentionCall, params: ForwardParams | BackwardParams) -> str | None:
        """See `choices.params_fault`."""
        return choices.params_fault(call, params)

    def doubt(self, call: AttentionCall, params: ForwardParams | BackwardParams) -> str | None:
        """See `choices.doubt`."""
        return choices.doubt(call, params)

    def heuristic(self, call: AttentionCall) -> ForwardParams | BackwardParams:
        """See `choices.heuristic`."""
        params: ForwardParams | BackwardParams = choices.heuristic(call)
        return params

    def space(self, call: AttentionCall) -> list[ForwardParams] | list[BackwardParams]:
        """See `choices.space`."""
        return choices.space(call)

    def every(self, call: AttentionCall) -> list[Any]:
        """See `choices.every`."""
        return choices.every(call)

    def preference(self, call: AttentionCall) -> int:
        """Rank behind `xla`: no TPU has measured these kernels for us."""
        return -1

    def attend(self, operands: Operands, rules: Rules, params: ForwardParams) -> Residuals:
        """See `launch.forward`."""
        out, lse = forward(operands, rules, params)
        assert lse is not None
        return out, lse

    def output(self, call: AttentionCall, /, *args: Any, params: ForwardParams) -> Any:
        """See `Implementation`; computes the log-sum-exp only if needed."""
        operands = operands_of(args)
        if call.return_lse or operands.sinks is not None:
            return super().output(call, *args, params=params)
        return forward(operands, call.rules, params, with_lse=False)[0]

    def differentiate(
        self,
        operands: Operands,
        residuals: Residuals,
        dout: jax.Array,
        rules: Rules,
        params: BackwardParams,
        dlse: jax.Array | None = None,
    ) -> Gradients:
        """See `launch.backward`."""
        return backward(operands, residuals, dout, rules, params, dlse)
