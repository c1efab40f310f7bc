# SPDX-License-Identifier: Apache-2.0
"""Why a forward does not run with some arguments or launch parameters."""

from __future__ import annotations

from ejkernel.kernels._hopper import SHARED_MEMORY
from ejkernel.kernels.flash_attention.common import AttentionCall

from .plan import REGISTERS, ForwardPlan

_REGISTERS_LEFT = 32  # of a thread, beside logits, weights and output; with fewer, ptxas serialises the products


def packing_fault(plan: ForwardPlan, call: AttentionCall) -> str | None:
    """Return why heads cannot share a tile; `None` if they can, or need not."""
    if not plan.params.pack_heads:
        return None
    of_group, warpgroups = plan.heads // plan.groups, plan.params.warpgroups
    if of_group % warpgroups:
        return f"pack_heads=True needs a multiple of {warpgroups} heads per group; this call has {of_group}"
    # A tile has one range of blocks, and one copy of each array by key, for all its heads.
    shared = plan.hides and call.attention_mask is not None and call.attention_mask[1] > 1
    if shared or (plan.key_bias and call.bias is not None and call.bias[1] > 1):
        return "pack_heads=True needs a mask and a key bias that all heads share"
    return None


def sharing_fault(plan: ForwardPlan, call: AttentionCall) -> str | None:
    """Return why queries and output cannot share a buffer; `None` if they can, or need not."""
    # Queries take as many columns of shared memory as the output, and products with keys as much longer.
    if plan.params.share_buffer and has_much_wider_values(call):
        return (
            f"share_buffer=True needs values that are at most a third wider than queries; they have {call.value[3]} "
            f"columns, and queries {call.query[3]}"
        )
    return None


def has_much_wider_values(call: AttentionCall) -> bool:
    """Return whether values are more than a third wider than queries."""
    return 4 * call.query[3] < 3 * call.value[3]


def block_fault(plan: ForwardPlan) -> str | None:
    """Return why blocks of keys cannot have this size; `None` if they can."""
    # Copies to shared memory start at multiples of 128 bytes, and arrays by key have 4 bytes per key. Other blocks
    # crashed the process.
    by_key = plan.segments or plan.key_bias or plan.key_mask
    if plan.params.kv_block % 32 and (plan.mask or by_key):
        what = "a mask" if plan.mask else "segment ids" if plan.segments else "a bias or mask of keys"
        return f"kv_block must be a multiple of 32 with {what}, got {plan.params.kv_block}"
    return None


def shared_memory_fault(plan: ForwardPlan) -> str | None:
    """Return why a launch does not fit in shared memory; `None` if it does."""
    needed = plan.shared_bytes()
    if needed > SHARED_MEMORY:
        return f"it needs {needed} bytes of shared memory; a block of threads has at most {SHARED_MEMORY}"
    return None


def register_fault(plan: ForwardPlan) -> str | None:
    """Return why a launch does not fit in registers; `None` if it does."""
    block, available = plan.params.kv_block, REGISTERS[plan.params.warpgroups][1]
    # Logits, weights in 16 bits, and the output: 128 threads share 64 rows of each.
    needed = block // 2 + block // 4 + plan.value_dim // 2 + _REGISTERS_LEFT
    if needed > available:
        return f"it needs about {needed} registers per thread; {available} are available"
    return None


def arguments_reason(call: AttentionCall) -> str | None:
    """Return why the forward does not run such arguments; `None` if it does."""
    widest = max(call.query[3], call.value[3])
    if widest > 256:
        return f"head_dim is {widest}; 'mosaic_gpu' supports at most 256; use 'xla'."
    if 0 in (*call.query, *call.key):
        return "an array is empty; use 'xla'."
    # Without a bias the kernel takes the maximum before it scales: only a positive scale keeps the order.
    if call.rules.scale <= 0:
        return f"scale must be positive for 'mosaic_gpu', got {call.rules.scale}; use 'xla'."
    return None
