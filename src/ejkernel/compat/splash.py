# SPDX-License-Identifier: Apache-2.0
"""Splash attention, the TPU kernels that JAX ships: its forward and the two kernels of its backward, one at a time.

JAX's public function ties the blocks of forward and backward together, and its gradient takes no cotangent of the
log-sum-exp. The functions here call the kernels directly.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.compat.launches import KernelMemory, launched, unchecked

# The logit of a hidden key, `DEFAULT_MASK_VALUE` of the kernels.
HIDDEN_LOGIT = -0.7 * float(np.finfo(np.float32).max)


class SplashMask(NamedTuple):
    """The static mask of one call.

    Query `i` is at position `i + offset`. It sees the keys from `left` before its position to `right` after it; `None`
    means all.
    """

    queries: int
    keys: int
    heads: int
    offset: int
    left: int | None
    right: int | None


class SplashBlocks(NamedTuple):
    """The blocks of one kernel; `compute` divides `keys` and is a multiple of 128."""

    queries: int
    keys: int
    compute: int


def splash_forward(
    arrays: tuple[Any, ...],
    segments: Any,
    *,
    mask: SplashMask,
    blocks: SplashBlocks,
    soft_cap: float | None,
    memory: KernelMemory,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the output `[heads, queries, value_dim]` and the log-sum-exp `[heads, queries]` of one example.

    Args:
        arrays: The scaled query `[heads, queries, head_dim]`, key and value `[groups, keys, ...]`.
        segments: The ids of queries and keys, int32, or `None`.
        mask: The static mask.
        blocks: They divide the lengths.
        soft_cap: See `flash_attention`.
        memory: The limit on vector memory, and where the arrays are.
        interpret: Whether to run the kernel in the interpreter.
    """
    kernel = _kernel(mask, blocks, None, soft_cap, interpret)
    given = (kernel.fwd_mask_info, *arrays, _segment_ids(segments), None)
    run = functools.partial(_kernels()._splash_attention_forward, **kernel.kwargs)
    out, residuals = unchecked(lambda: launched(run, given, memory), arrays[0])
    lse = residuals["logsumexp"] if isinstance(residuals, dict) else residuals[0]
    return out, lse


def splash_backward(
    arrays: tuple[Any, ...],
    segments: Any,
    *,
    mask: SplashMask,
    blocks: SplashBlocks,
    of: str,
    soft_cap: float | None,
    memory: KernelMemory,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Return the gradients of query, key and value that one kernel computes for one example.

    Args:
        arrays: Query, key, value, log-sum-exp, the output's cotangent and its product with the output, by row.
        segments: See `splash_forward`; the same for `mask`, `blocks`, `soft_cap` and `memory`.
        of: The kernel: `query`, `key and value`, or `all`.
    """
    splash = _kernels()
    kernel = _kernel(mask, blocks, of, soft_cap, interpret)
    query, key, value, lse, dout, delta = arrays
    common: dict[str, Any] = {
        "is_mqa": False,
        "mask_value": HIDDEN_LOGIT,
        "attn_logits_soft_cap": soft_cap,
        "mask_function": kernel.kwargs["mask_function"],
        "interpret": interpret,
        **{f"{name}_layout": splash.QKVLayout.HEAD_DIM_MINOR for name in "qkv"},
    }
    given = (query, key, value, _segment_ids(segments), None, lse, dout, delta)
    info = kernel.dq_mask_info if of == "query" else kernel.dkv_mask_info
    if of == "query":
        sizes: dict[str, Any] = {"bq": blocks.queries, "bkv": blocks.keys}
        run = functools.partial(splash._splash_attention_bwd_dq, mask_info=info, **sizes, **common)
        return unchecked(lambda: launched(run, given, memory), query), None, None
    sizes = {"bq": blocks.queries, "bkv": blocks.keys, "bkv_compute": blocks.compute}
    sizes["use_fused_bwd_kernel"] = of == "all"
    run = functools.partial(splash._splash_attention_bwd_dkv, mask_info=info, **sizes, **common)
    found: tuple[Any, Any, Any] = unchecked(lambda: launched(run, given, memory), query)
    return found


@functools.lru_cache(maxsize=64)
def _kernel(mask: SplashMask, blocks: SplashBlocks, of: str | None, soft_cap: float | None, interpret: bool) -> Any:
    """Return JAX's kernel object, with the tables of the mask and the options of its kernels."""
    splash = _kernels()
    backward: dict[str, Any] = {}
    if of is not None:  # the kernel of the query's gradient has no blocks to compute in
        backward = {
            "block_q_dkv": blocks.queries,
            "block_kv_dkv": blocks.keys,
            "block_kv_dkv_compute": blocks.compute,
            "block_q_dq": None if of == "all" else blocks.queries,
            "block_kv_dq": None if of == "all" else blocks.keys,
            "use_fused_bwd_kernel": of == "all",
        }
    sizes = splash.BlockSizes(block_q=blocks.queries, block_kv=blocks.keys, block_kv_compute=blocks.compute, **backward)
    # The tables are arrays: made under a trace, they would be tracers, and leak from this cache.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            _mask_of(mask),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            mask_value=HIDDEN_LOGIT,
            attn_logits_soft_cap=soft_cap,
            save_residuals=of is None,
            interpret=interpret,
        )
        # NumPy arrays belong to no device, so a program for any device can hold them.
        return jax.tree.map(np.asarray, kernel)


def _kernels() -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def _mask_of(mask: SplashMask) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (mask.queries, mask.keys)
    if mask.left is None and mask.right is None:
        one: Any = masks.FullMask(shape)
    elif mask.left is None and mask.right == 0:
        one = masks.CausalMask(shape, mask.offset)
    else:
        one = masks.LocalMask(shape, (mask.left, mask.right), mask.offset)
    return masks.MultiHeadMask([one] * mask.heads)


def _segment_ids(segments: Any) -> Any:
    return None if segments is None else _kernels().SegmentIds(*(jnp.asarray(x, jnp.int32) for x in segments))
