# SPDX-License-Identifier: Apache-2.0
"""The implementation `mosaic_gpu` of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.common import (
    AttentionCall,
    AttentionImplementation,
    Gradients,
    Operands,
    Residuals,
    Rules,
)

from . import backward_support, forward_support
from .launch import backward, forward
from .params import BackwardParams, ForwardParams
from .plan import TILE_ROWS
from .single import backward_of_single, forward_of_single

_MOST_SINGLE_ROWS = 32768
_ROUNDED = (None, "default", "fastest", "bfloat16", "tensorfloat32")  # values of `jax_default_matmul_precision`


class MosaicGpu(AttentionImplementation):
    """Our Hopper kernels; they skip blocks of keys that a tile of queries cannot see."""

    name = "mosaic_gpu"
    params = ForwardParams
    bwd_params = BackwardParams
    adds_sinks = True
    features = frozenset(("query_lengths", "key_lengths", "deterministic", "soft_cap_after_bias", "dropout_rate"))

    def unsupported(self, call: AttentionCall) -> str | None:
        """Return why the kernels do not run the call; `None` if they do."""
        reason: str | None = _support(call).unsupported_reason(_in_half(call))
        return reason or _precision_reason(call)

    def params_fault(self, call: AttentionCall, params: Any) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        call = _in_half(call)
        fault: str | None = _support(call).params_fault(call, params)
        if fault is None and call.deterministic and not _repeats(call, params):
            fault = "form='fused' adds up gradients in nondeterministic order; deterministic=True needs form='split'."
        return fault

    def preference(self, call: AttentionCall) -> int:
        """Return 1 if our kernel was faster than cuDNN on one H200 in `benchmarks/attention.py`, else 0."""
        if call.dtype == "float32":
            return 1
        dim, hides, queries = min(call.query[3], call.value[3]), call.rules.right is not None, call.query[1]
        if call.backward:
            return int(_support(call).is_preferred(call))
        if call.bias is not None:
            return 1
        # Causal at head_dim 96 and 4,096 queries: 382 us for 482 of cuDNN. At head_dim 64 and 3,001 queries: 98 us for
        # 109.
        if dim > 64 or (dim == 64 and (not hides or queries % TILE_ROWS)):
            return int(queries >= (1024 if dim > 128 else 512))
        # Causal at head_dim 64: 1,052 us for 1,204 of cuDNN at 16,384 queries; up to 4,096 no difference.
        return int(dim >= 64 and (queries >= 8192))

    def heuristic(self, call: AttentionCall) -> ForwardParams | BackwardParams:
        """Return good parameters, measured on similar calls."""
        call = _in_half(call)
        params: ForwardParams | BackwardParams = _support(call).heuristic(call)
        return params if _repeats(call, params) or not call.deterministic else next(iter(self.space(call)))

    def space(self, call: AttentionCall) -> Any:
        """Return the search space."""
        call = _in_half(call)
        space = _support(call).space(call)
        if not call.deterministic or not call.backward:
            return space
        return [params for params in space if _repeats(call, params)]

    def attend(self, operands: Operands, rules: Rules, params: ForwardParams) -> Residuals:
        """See `launch.forward`."""
        run = forward_of_single if operands.query.dtype == jnp.float32 else forward
        return run(operands, rules, params)

    def differentiate(
        self, operands: Operands, residuals: Residuals, dout: jax.Array, rules: Rules, params: BackwardParams
    ) -> Gradients:
        """See `launch.backward`."""
        run = backward_of_single if operands.query.dtype == jnp.float32 else backward
        return run(operands, residuals, dout, rules, params)


def _support(call: AttentionCall) -> Any:
    return backward_support if call.backward else forward_support


def _in_half(call: AttentionCall) -> AttentionCall:
    """Return the call that the kernels run."""
    return dataclasses.replace(call, dtype="float16") if call.dtype == "float32" else call


def _precision_reason(call: AttentionCall) -> str | None:
    """Return why float32 operands must not be rounded; `None` if they may."""
    if call.dtype != "float32":
        return None
    if call.rules.precision is None and call.default_precision not in _ROUNDED:
        return (
            f"jax_default_matmul_precision is {call.default_precision!r}, and 'mosaic_gpu' rounds float32; use 'xla'."
        )
    rows = call.query[1] * (call.query[2] // call.key[2])
    if call.backward and rows > _MOST_SINGLE_ROWS:
        return (
            f"the gradient of a float32 key may be a sum over {rows} rows (queries times heads per key head), and has "
            f"few digits in float16 beyond {_MOST_SINGLE_ROWS}; use 'xla', or bfloat16."
        )
    return None


def _repeats(call: AttentionCall, params: Any) -> bool:
    return not isinstance(params, BackwardParams) or backward_support.is_deterministic(call, params)
