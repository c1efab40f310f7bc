# SPDX-License-Identifier: Apache-2.0
"""Which calls the forward runs, with which parameters: all of it told from shapes, before anything is compiled."""

from __future__ import annotations

import re

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import AttentionCall
from ejkernel.ops.config.space import ConfigSpace
from ejkernel.ops.utils.signature import is_known

from ._forward_plan import ForwardPlan, swizzle
from .params import ForwardParams

_HOPPER = re.compile(r"(^|[:_])(h20|h100|h200|h800|gh200)(_|$)")
_DTYPES = ("bfloat16", "float16")
_SHARED_BYTES = 232_448  # that a block of threads may have on Hopper
_REGISTERS = {1: 240, 2: 240, 3: 160}  # of a thread that computes, by how many warpgroups do


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the forward does not run `call`, and what would; `None` if it does."""
    if not is_known(*call.query, *call.key, *call.value):
        return "it needs shapes that are numbers, and this program is exported for many; use 'xla'."
    missing = compat.mosaic_gpu_reason()
    if missing is not None:
        return f"implementation='mosaic_gpu' is not available: {missing}."
    return _platform_reason(call) or _arguments_reason(call)


def params_fault(call: AttentionCall, params: ForwardParams) -> str | None:
    """Return why `call`, which is supported, cannot run with `params`; `None` if it can.

    No parameters make warpgroups wait for each other in a circle: all of them meet the same blocks in the same order,
    copies never run ahead of the blocks that there are, and whoever waits for its turn holds nothing that others need.
    """
    plan = plan_of(call, params)
    return _shape_fault(plan, call) or _shared_fault(plan) or _register_fault(plan)


def plan_of(call: AttentionCall, params: ForwardParams) -> ForwardPlan:
    """Return what is static of a launch."""
    bias, mask = _kind(call.bias, call), _kind(call.attention_mask, call)
    return ForwardPlan(
        batch=call.query[0],
        queries=call.query[1],
        keys=call.key[1],
        heads=call.query[2],
        groups=call.key[2],
        head_dim=call.query[3],
        value_dim=call.value[3],
        dtype=call.dtype,
        rules=call.rules,
        params=params,
        bias=4 if bias == "block" else 0,
        mask=mask == "block",
        key_bias=bias == "keys",
        key_mask=mask == "keys",
        segments=call.segments,
        table=call.segments or mask in ("block", "keys"),
    )


def _kind(shape: tuple[int, ...] | None, call: AttentionCall) -> str:
    """Return whether a bias or mask differs between `keys`, between rows and keys (`block`), or is not looked at."""
    if shape is None or (shape[3] == 1 and call.key[1] > 1):
        return ""
    return "keys" if shape[2] == 1 else "block"
