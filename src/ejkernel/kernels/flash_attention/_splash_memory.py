# SPDX-License-Identifier: Apache-2.0
"""The vector memory of splash attention's kernels: a lower bound, and an upper estimate.

The windows and the sums follow from the shapes. How many intermediate values the compiler keeps beside them depends on
its schedule, so the estimate is a weighted sum of the sizes of these values; see `pallas_tpu/memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from ejkernel import compat
from ejkernel.kernels._vector_memory import LANES, WIDE_UNITS, Need, Parts, beyond_fit, form_of, larger, up

from ._splash_weights import WEIGHTS
from .common import AttentionCall

# Chips with few kernels in the fit, or none, keep this many times as many values of the separate backward kernels.
_MORE = {
    "tpu:tpu_v4": {"query": 2.3, "query, float32": 2.3, "keys": 1.1, "keys, float32": 1.1},
    "tpu:tpu7x": {"query, float32": 1.5, "keys, float32": 1.35},
}
_SUBLANES = 8
Blocks = tuple[int, int, int]
"""Queries, keys, and keys per step."""


def clipped_blocks(queries: int, keys: int, blocks: Blocks) -> compat.splash.SplashBlocks:
    """Return blocks cut to the sequences, rounded up to 128; the steps divide the blocks of keys."""
    block_q, block_kv = (min(size, -(-of // LANES) * LANES) for size, of in zip(blocks, (queries, keys), strict=False))
    return compat.splash.SplashBlocks(block_q, block_kv, math.gcd(block_kv, blocks[2]))


def vector_memory(call: AttentionCall, blocks: Mapping[str, Blocks]) -> Need:
    """Return the bytes of vector memory of the largest kernel.

    A kernel takes less if XLA keeps its arrays in vector memory, because they are short.

    Args:
        call: The call.
        blocks: The blocks of each kernel: `forward`, `fused`, or `keys` and `query`.
    """
    return larger(*(parts_of(call, name, own).need(WEIGHTS) for name, own in blocks.items()))


def parts_of(call: AttentionCall, name: str, blocks: Blocks) -> Parts:
    """Return the memory of one kernel by its causes."""
    block = clipped_blocks(call.query[1], call.key[1], blocks)
    head, value = up(call.query[3]), up(call.value[3])
    if name == "forward":
        sums = 4 * block.queries * (2 * LANES + value)
    elif name == "query":
        sums = 4 * block.queries * head
    else:
        sums = 4 * block.keys * (head + value)
        sums += 4 * block.queries * head if name == "fused" and block.keys > block.compute else 0
    windows, examples = _windows(call, name, block), call.query[0] * call.examples
    # The sums are results of the kernel, of its own for each example. Those of a single one have one buffer, not two.
    known = 2 * sum(windows.values()) + sums * (1 if examples == 1 else 2)
    # A window of a single block that does not move has one buffer. The compiler may not see that it does not move.
    blocks_of = {"queries": -(-call.query[1] // block.queries), "keys": -(-call.key[1] // block.keys)}
    heads = {"queries": call.query[2], "keys": call.key[2]}
    changes = {"mask": 1, "ids": examples}
    moves = {(what, axis): blocks_of[axis] * changes.get(what, examples * heads[axis]) > 1 for what, axis in windows}
    least = sum(size * (2 if moves[window] else 1) for window, size in windows.items())
    # the compiler may keep the sums of a single block in registers
    least += 0 if name == "query" and block.keys >= call.key[1] else sums
    kind = name if call.dtype == "bfloat16" else f"{name}, float32"
    parts = Parts(least, known, kind, _sizes(call, block), _form(call, name, block))
    wider = beyond_fit(call.query[3], call.value[3]) if name in ("keys", "query") else 1.0
    return parts.times(wider * _MORE.get(call.device_fingerprint or "", {}).get(kind, 1.0))


def _form(call: AttentionCall, name: str, block: compat.splash.SplashBlocks) -> str:
    """Return the name of a kernel in the table of compiled code; the facts behind the semicolon change it little."""
    rules, steps = call.rules, (-(-call.query[1] // block.queries), -(-call.key[1] // block.keys))
    words = [f"splash {name}", f"{-(-call.query[3] // LANES)}/{-(-call.value[3] // LANES)}"]
    words += ["float32" if call.dtype == "float32" else "", f"blocks {'/'.join(map(str, block))}"]
    words += ["" if rules.soft_cap is None else "capped", "" if rules.left is None else "left edge"]
    has_ids, is_masked = _has_ids(call, block), _has_mask(call)
    words += ["masked" if is_masked and name == "query" else "", "one block" if steps == (1, 1) else ""]
    words += ["ids and mask" if has_ids and is_masked and name != "forward" else ""]
    details = ["" if rules.right is None else "right edge", "ids" if has_ids else ""]
    details.append(f"steps {min(steps[0], 2)}/{min(steps[1], 2)}")
    found = form_of(call, *words)
    return f"{found}; {', '.join(filter(None, details))}" if found else ""


def _sizes(call: AttentionCall, block: compat.splash.SplashBlocks) -> dict[str, int]:
    """Return the numbers of intermediate values: scores of steps, and results of products."""
    (queries, keys, compute), dims = block, (call.query[3], call.value[3])
    head, value = map(up, dims)
    step, steps = queries * compute, keys // compute
    found = {"step": step, "two steps": step * min(steps, 2), "four steps": step * min(steps, 4), "all": step * steps}
    found["long steps"] = found["four steps"] if compute >= 4 * LANES else 0
    found["beyond a large step"] = max(step - (1 << 20), 0)
    which = {
        "ids": _has_ids(call, block),
        "capped": call.rules.soft_cap is not None,
        "v5p": call.device_fingerprint == "tpu:tpu_v5",
        "narrow unit": call.device_fingerprint not in WIDE_UNITS,
        "masked": _has_mask(call),
        # the last registers of a row are partly used
        "partial": any(dim % LANES and dim != LANES // 2 for dim in dims),
    }
    found |= {f"{name}, {also}": size if holds else 0 for name, size in found.items() for also, holds in which.items()}
    found["unmasked steps"] = 0 if _has_mask(call) else found["four steps"]
    found |= {
        "rows of steps": queries * LANES * min(steps, 8),
        "rows": queries * LANES,
        "values": queries * value,
        "heads": queries * head,
    }
    found |= {"step rows": compute * LANES, "step values": compute * value, "step heads": compute * head}
    found |= {"key heads": keys * head, "key values": keys * value, "constant": LANES * LANES}
    # chips with products of 128 columns add up wider results in parts
    found |= {f"wide {name}": found[name] if value > LANES else 0 for name in ("values", "step values")}
    found["wide step heads"] = found["step heads"] if head > LANES else 0
    found["wide values of steps"] = found["wide values"] * steps
    found["wide values of steps, narrow unit"] = found["wide values of steps"] if which["narrow unit"] else 0
    return found | {"partial values": found["values"] if which["partial"] else 0}


def _has_ids(call: AttentionCall, block: compat.splash.SplashBlocks) -> bool:
    """Return whether the kernels read ids: they also hide the padding, unless causal attention does not reach it."""
    given = call.segments or call.query_lengths or call.key_lengths
    return given or (call.key[1] % block.keys != 0 and call.rules.right != 0)


def _has_mask(call: AttentionCall) -> bool:
    return call.rules.left is not None or call.rules.right is not None


def _windows(call: AttentionCall, name: str, block: compat.splash.SplashBlocks) -> dict[tuple[str, str], int]:
    """Return the bytes of one buffer of the windows, by content and by axis.

    The row of a value for each query or key has 128 lanes, its column 8 rows.
    """
    size, head, value = jnp.dtype(call.dtype).itemsize, up(call.query[3]), up(call.value[3])
    has_ids, is_masked = _has_ids(call, block), _has_mask(call)
    queries, keys = size * block.queries * (head + value), size * block.keys * (head + value)
    row, column = 4 * LANES, 4 * _SUBLANES
    if name in ("keys", "fused"):
        of_queries, of_keys = column, row
        keys *= 2
        queries += 2 * column * block.queries + (size * block.queries * head if name == "fused" else 0)
    else:
        of_queries, of_keys = row, column
        queries += block.queries * (row if name == "forward" else 2 * 4 + size * head)
    return {
        ("heads", "queries"): queries,
        ("heads", "keys"): keys,
        ("ids", "queries"): of_queries * block.queries * has_ids,
        ("ids", "keys"): of_keys * block.keys * has_ids,
        ("mask", "queries"): of_queries * block.queries * is_masked,
    }
