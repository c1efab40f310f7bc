# SPDX-License-Identifier: Apache-2.0
"""Which calls the forward runs, with which parameters: all of it told from shapes, before anything is compiled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ejkernel.kernels.flash_attention.common import AttentionCall
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.errors import ConfigError

from ._forward_plan import REGISTERS, ROWS, ForwardPlan, imbalance, plan_of
from .availability import SHARED_MEMORY, unavailable
from .params import ForwardParams

_REGISTERS_LEFT = 32  # of a thread, for all but logits, weights, output and bias: with fewer, products wait in line
# 80: at head_dim 256 and with a soft cap, which takes two transcendental functions a weight, they gained 2 to 4 %.
_KV_BLOCKS = (64, 80, 96, 128, 160)
_EVEN = {False: 1.02, True: 1.05}  # imbalance up to which a launch was the faster one, by whether heads come first


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the forward does not run `call`, and what would; `None` if it does."""
    return unavailable(call) or _arguments_reason(call)


def params_fault(call: AttentionCall, params: ForwardParams) -> str | None:
    """Return why `call`, which is supported, cannot run with `params`; `None` if it can.

    No parameters make warpgroups wait for each other in a circle: all of them meet the same blocks in the same order,
    copies never run ahead of the blocks that there are, and whoever waits for its turn holds nothing that others need.
    """
    plan = plan_of(call, params)
    return (
        _packing_fault(plan, call)
        or _sharing_fault(plan)
        or _block_fault(plan)
        or _shared_memory_fault(plan)
        or _register_fault(plan)
    )


def heuristic(call: AttentionCall) -> ForwardParams:
    """Return parameters that `call`, which is supported, runs well with."""
    for params in _fallbacks(_preferred(call)):
        if params_fault(call, params) is None:
            return params
    raise ConfigError(f"no parameters are known that {call} runs with; use 'xla'.")


def space(call: AttentionCall) -> ConfigSpace[ForwardParams]:
    """Return all parameters that are worth a try for `call`, which is supported."""

    def memory(kv_block: int, stages: int, warpgroups: int, share_buffer: bool, query_buffers: int) -> bool:
        plan = plan_of(
            call,
            ForwardParams(
                kv_block=kv_block,
                stages=stages,
                warpgroups=warpgroups,
                share_buffer=share_buffer,
                query_buffers=query_buffers,
                persistent=True,  # without which there are no two query_buffers; shared memory is the same
            ),
        )
        return (_sharing_fault(plan) or _shared_memory_fault(plan)) is None

    def registers(kv_block: int, warpgroups: int) -> bool:
        plan = plan_of(call, ForwardParams(kv_block=kv_block, warpgroups=warpgroups))
        return (_block_fault(plan) or _register_fault(plan)) is None

    def packing(pack_heads: bool, warpgroups: int) -> bool:
        plan = plan_of(call, ForwardParams(pack_heads=pack_heads, warpgroups=warpgroups))
        return _packing_fault(plan, call) is None

    def persistence(query_buffers: int, persistent: bool) -> bool:
        return persistent or query_buffers == 1

    either = (False, True)
    # The guess is among what is tried, whatever it had to fall back to.
    few = heuristic(call)
    return ConfigSpace(
        {
            "kv_block": tuple(sorted({few.kv_block, *(size for size in _KV_BLOCKS if size < call.key[1] + 32)})),
            "stages": tuple(sorted({few.stages, 2, 3})),
            "warpgroups": (2, 3),
            "ping_pong": either,
            "persistent": either,
            "query_buffers": (1, 2),
            "pack_heads": either,
            "share_buffer": either,
            "heads_first": either,
        },
        constraints=(memory, registers, packing, persistence),
        build=ForwardParams,
    )


def _preferred(call: AttentionCall) -> ForwardParams:
    """Return what was fastest on an H200 for calls like this one, whether or not it fits."""
    rules, short, narrow = call.rules, call.query[1] < 2048, call.query[3] <= 64
    grouped = (call.query[2] // call.key[2]) % 2 == 0
    if max(call.query[3], call.value[3]) > 192:
        few = 64 if rules.soft_cap is None else 80
        # At head_dim 256 the output fits only where the queries were, and turns cost 2 %.
        return ForwardParams(kv_block=few, share_buffer=True, ping_pong=False, pack_heads=short and grouped)
    if call.query[3] > 128:
        return ForwardParams(share_buffer=True, ping_pong=False)
    # Packed, warpgroups have the same rows, and so the same segments: 64 rows meet fewer blocks than 128 do.
    if call.segments:
        return ForwardParams(pack_heads=grouped)
    if rules.left is not None and rules.left < call.key[1] // 2:
        return ForwardParams(persistent=True, query_buffers=2, share_buffer=True)
    if call.bias is not None:
        return ForwardParams(persistent=True, query_buffers=2, warpgroups=3 if narrow else 2)
    if rules.right is not None:
        return _preferred_causal(call, warpgroups=3 if narrow and not short else 2)
    full = ForwardParams(persistent=True, query_buffers=2, share_buffer=not narrow, heads_first=True)
    return dataclasses.replace(full, warpgroups=3) if narrow else full


def _preferred_causal(call: AttentionCall, warpgroups: int) -> ForwardParams:
    """Return a persistent launch, if its tiles can be dealt out evenly, else one whose blocks come as there is room."""
    short, narrow = call.query[1] < 2048, call.query[3] <= 64
    for heads_first in (False, True):
        params = ForwardParams(
            persistent=True, query_buffers=2, share_buffer=True, heads_first=heads_first, warpgroups=warpgroups
        )
        if imbalance(plan_of(call, params)) < _EVEN[heads_first]:
            return params
    return ForwardParams(warpgroups=warpgroups, heads_first=not (short or narrow))


def _fallbacks(params: ForwardParams) -> Iterator[ForwardParams]:
    """Yield `params`, and then ever smaller ones."""
    yield params
    few = dataclasses.replace(params, warpgroups=min(params.warpgroups, 2), pack_heads=False, query_buffers=1)
    # Fewer keys at a time before fewer stages, as long as they are not very few.
    for sizes, stages in (((128, 96, 64), 2), ((128, 96, 64), 1), ((32, 16), 2), ((32, 16), 1)):
        for size, share in itertools.product(sizes, (params.share_buffer, not params.share_buffer)):
            yield dataclasses.replace(few, kv_block=min(size, params.kv_block), stages=stages, share_buffer=share)


def _arguments_reason(call: AttentionCall) -> str | None:
    widest = max(call.query[3], call.value[3])
    if widest > 256:
        return f"head_dim is {widest}, and 'mosaic_gpu' takes up to 256; use 'xla'."
    if 0 in (*call.query, *call.key):
        return "an array without elements is left to 'xla'."
    # Without a bias the maximum is looked for before the scale comes in, which has to leave it the maximum.
    if call.rules.scale <= 0:
        return f"scale must be positive for 'mosaic_gpu', got {call.rules.scale}; use 'xla'."
    return None


def _packing_fault(plan: ForwardPlan, call: AttentionCall) -> str | None:
    if not plan.params.pack_heads:
        return None
    of_group, warpgroups = plan.heads // plan.groups, plan.params.warpgroups
    if of_group % warpgroups:
        return f"pack_heads=True needs a multiple of {warpgroups} heads in each group, and there are {of_group}"
    # A tile meets one range of blocks, and has one copy of what belongs to keys, whatever heads it is of.
    shared = plan.table and call.attention_mask is not None and call.attention_mask[1] > 1
    if shared or (plan.key_bias and call.bias is not None and call.bias[1] > 1):
        return "pack_heads=True needs one mask, and one bias of keys, for all heads"
    return None


def _sharing_fault(plan: ForwardPlan) -> str | None:
    if plan.params.share_buffer and (ROWS * plan.head_dim) % (8 * plan.value_dim):
        return (
            f"share_buffer=True needs queries that make whole rows of the output, and head_dim is {plan.head_dim} "
            f"where that of values is {plan.value_dim}"
        )
    if plan.params.share_buffer and plan.value_dim > plan.head_dim:
        return "share_buffer=True needs values that are no wider than queries"
    return None


def _block_fault(plan: ForwardPlan) -> str | None:
    # Copies begin at multiples of 128 bytes in shared memory, where a number of each key takes 4.
    # With others, a process ended.
    by_key = plan.segments or plan.key_bias or plan.key_mask
    if plan.params.kv_block % 32 and (plan.mask or by_key):
        what = "a mask" if plan.mask else "segment ids" if plan.segments else "a bias or mask of keys"
        return f"kv_block must be a multiple of 32 where there is {what}, and is {plan.params.kv_block}"
    return None


def _shared_memory_fault(plan: ForwardPlan) -> str | None:
    needed = plan.shared_bytes()
    if needed > SHARED_MEMORY:
        return f"it takes {needed} bytes of shared memory, and a block of threads has at most {SHARED_MEMORY}"
    return None


def _register_fault(plan: ForwardPlan) -> str | None:
    block, available = plan.params.kv_block, REGISTERS[plan.params.warpgroups][1]
    # Logits, weights in 16 bits, and the output: 64 rows of each are divided among 128 threads.
    needed = block // 2 + block // 4 + plan.value_dim // 2 + _REGISTERS_LEFT
    if needed > available:
        return f"it takes about {needed} registers a thread, and {available} are to be had"
    return None
