# SPDX-License-Identifier: Apache-2.0
"""The implementation `mosaic_gpu` of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels.flash_attention.common import (
    AttentionCall,
    AttentionImplementation,
    Gradients,
    Operands,
    Residuals,
    Rules,
    describe,
    with_sinks,
)
from ejkernel.ops.utils.values.signature import is_known

from . import backward_support, forward_support, wide_support
from .alone_support import alone_fault, alone_heuristic, alone_space, is_alone
from .choice import expected_gain
from .few_queries import fold, fold_residuals, fold_rows, folded, folds, unfold_residuals, unfold_rows
from .launch import backward, forward
from .params import BackwardParams, ForwardParams
from .parts import what_hides
from .plan import ROWS, unavailable
from .single import digits_reason, forward_of_single
from .slices import backward_in_slices, slice_of, slicing_reason

_LEAST_KEYS = MULTIPROCESSORS * 128  # of all heads together: one block of threads per multiprocessor
_ROUNDED = (None, "default", "fastest", "bfloat16", "tensorfloat32")  # values of `jax_default_matmul_precision`


class MosaicGpu(AttentionImplementation):
    """Our Hopper kernels; they skip blocks of keys that a tile of queries cannot see."""

    name = "mosaic_gpu"
    params = ForwardParams
    bwd_params = BackwardParams
    adds_sinks = True
    is_told_of_sinks = True
    features = frozenset(("query_lengths", "key_lengths", "deterministic", "soft_cap_after_bias", "dropout_rate"))

    def unsupported(self, call: AttentionCall) -> str | None:
        """Return why the kernels do not run the call; `None` if they do."""
        if not is_known(*call.query, *call.key, *call.value):
            return unavailable(call)  # the rest compares sizes
        reason: str | None = _support(call).unsupported_reason(_in_half(call))
        return reason or _precision_reason(call)

    def params_fault(self, call: AttentionCall, params: Any) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        short, call = _short(call), _in_half(call)
        fault: str | None = (
            alone_fault(short, params) if is_alone(params) else _support(call).params_fault(call, params)
        )
        if fault is None and call.deterministic and not _repeats(call, params):
            fault = "form='fused' adds up gradients in nondeterministic order; deterministic=True needs form='split'."
        return fault

    def preference(self, call: AttentionCall) -> int:
        """Return 1 if our kernels should be faster than cuDNN's on an H200, else 0."""
        # Never slower than cuDNN in `benchmarks/attention.py`.
        if call.dtype == "float32" or call.bias is not None or call.attention_mask is not None or call.segments:
            return 1
        if wide_support.is_wide(call):
            return 1  # cuDNN runs no such heads
        if alone_heuristic(call) is not None:
            return 1
        if call.query[1] < ROWS:
            return int(_gains_with_few_queries(call))
        if max(call.query[1], call.key[1]) <= 2 * ROWS and 96 < call.query[3] < 128 and not call.backward:
            return 0  # 147 us instead of 105 for 512 examples of 100 tokens at D104: their last columns are few
        if what_hides(call) is None and _has_parts(self.heuristic(call)):
            return 1  # 0.15 to 0.83 of cuDNN's time, which leaves most of the chip idle
        (batch, queries, heads, _), keys = call.query, call.key[1]
        if call.backward and keys < queries and batch * heads * keys < _LEAST_KEYS:
            return 0  # not in the grid: a block of threads owns keys of one head, so most of the chip is idle
        return int(expected_gain(call) > 0)

    def heuristic(self, call: AttentionCall) -> ForwardParams | BackwardParams:
        """Return good parameters, measured on similar calls."""
        short, call = _short(call), _in_half(call)
        params: ForwardParams | BackwardParams = alone_heuristic(short) or _support(call).heuristic(call)
        return params if _repeats(call, params) or not call.deterministic else next(iter(self.space(call)))

    def space(self, call: AttentionCall) -> Any:
        """Return the search space."""
        alone, call = tuple(alone_space(_short(call))), _in_half(call)
        space = _support(call).space(call)
        space = (*alone, *space) if alone else space
        if not call.deterministic or not call.backward:
            return space
        return [params for params in space if _repeats(call, params)]

    def attend(self, operands: Operands, rules: Rules, params: ForwardParams) -> Residuals:
        """See `launch.forward`."""
        run = forward_of_single if operands.query.dtype == jnp.float32 else forward
        if not folds(describe(operands, rules)):
            return run(operands, rules, params)
        out, lse = unfold_residuals(run(*fold(operands, rules), params), operands.query.shape[2])
        return (out, lse) if operands.sinks is None else with_sinks(out, lse, operands.sinks)

    def differentiate(
        self, operands: Operands, residuals: Residuals, dout: jax.Array, rules: Rules, params: BackwardParams
    ) -> Gradients:
        """See `launch.backward`."""
        run = backward_in_slices if operands.query.dtype == jnp.float32 else backward
        if not is_alone(params):
            operands = operands._replace(sinks=None)  # the log-sum-exp includes them
        if not folds(describe(operands, rules)):
            return run(operands, residuals, dout, rules, params)
        groups, heads = operands.key.shape[2], operands.query.shape[2]
        own, rules = fold(operands, rules)
        found = run(own, fold_residuals(residuals, groups), fold_rows(dout, groups), rules, params)
        return unfold_rows(found[0], heads), *found[1:]


def _has_parts(params: ForwardParams | BackwardParams) -> bool:
    return params.key_parts > 1 or (isinstance(params, BackwardParams) and params.query_parts > 1)


def _gains_with_few_queries(call: AttentionCall) -> bool:
    """Return whether our kernels are faster than cuDNN's with fewer queries than a tile has rows.

    8 examples of 16 queries, 32 heads that share 8 key heads and 4,096 keys at D128: 42 us instead of 103 forward, and
    133 instead of 486 backward. Where no heads share keys, 16 examples at D64 take 34 us instead of 40 forward, but 222
    instead of 143 backward. For a single query, cuDNN has another kernel: it takes 37 us and ours 39. Without shared
    keys at D64 it takes 38 us and ours 33, if there is work for all multiprocessors.
    """
    (batch, queries, heads, _), groups = call.query, call.key[2]
    if call.backward:
        return heads > groups
    return queries > 1 or (heads == groups and 2 * batch * heads >= MULTIPROCESSORS)


def _support(call: AttentionCall) -> Any:
    if wide_support.is_wide(call):
        return wide_support
    return backward_support if call.backward else forward_support


def _short(call: AttentionCall) -> AttentionCall:
    """Return the call that the kernels of short sequences run."""
    call = folded(call)
    return slice_of(call) if call.dtype == "float32" and call.backward else call


def _in_half(call: AttentionCall) -> AttentionCall:
    """Return the call that the other kernels run."""
    call = _short(call)
    return dataclasses.replace(call, dtype="float16") if call.dtype == "float32" else call


def _precision_reason(call: AttentionCall) -> str | None:
    """Return why float32 operands must not be rounded; `None` if they may."""
    if call.dtype != "float32":
        return None
    if call.rules.precision is None and call.default_precision not in _ROUNDED:
        return (
            f"jax_default_matmul_precision is {call.default_precision!r}, and 'mosaic_gpu' rounds float32; use 'xla'."
        )
    return (digits_reason(call) or slicing_reason(call)) if call.backward else None


def _repeats(call: AttentionCall, params: Any) -> bool:
    return not isinstance(params, BackwardParams) or backward_support.is_deterministic(call, params)
