# SPDX-License-Identifier: Apache-2.0
"""Calls with few scores: on a GPU, plain JAX is a few products of whole matrices, and starting them takes most time.

Measured on one H200: `benchmarks/results/attention_few_scores_gpu.json`.
"""

from __future__ import annotations

import math

from ejkernel.kernels._hopper import may_be_on_hopper
from ejkernel.ops.utils.values.signature import is_known

from ._xla_blocks import WIDEST_OF_OTHERS, has_blocks, is_on_gpu, is_one_block
from .common import AttentionCall

_FEW = 1 << 22  # scores of a gradient that computes its softmax again
_FEW_OF_WIDE = 1 << 21  # scores of heads with more than 256 columns
_LEAST_WORK = 9_000_000  # queries of a head, times its columns squared: with less, a kernel with few tiles is fast too
_ALIGNED = 8  # rows; products of other lengths take twice as long
_FEW_IN_SINGLE = {False: 1 << 20, True: 1 << 19}  # scores of a float32 forward and gradient
_ALIGNED_IN_SINGLE = (64, 32)  # rows and columns
_MANY_KEYS = 2048  # of few float32 queries


def is_one_step(call: AttentionCall, q_block: int | None, kv_block: int | None) -> bool:
    """Return whether a gradient computes its softmax again instead of reading the log-sum-exp.

    In a program with the forward, XLA computes this softmax once, and the log-sum-exp, two more kernels, not at all:
    causal attention of 512 tokens and one head of 256 columns took 27.7 us with its gradient instead of 40.7.

    Args:
        call: The call.
        q_block, kv_block: The blocks; `None` for the default.
    """
    if call.rules.partial or call.rules.dropout_rate or not (is_on_gpu(call) and has_blocks(call)):
        return False
    return is_known(*call.query) and is_one_block(call, q_block, kv_block) and _scores(call) <= _FEW


def is_fastest_in_plain_jax(call: AttentionCall) -> bool:
    """Return whether plain JAX is faster than our kernels and cuDNN on a Hopper GPU."""
    on_hopper = call.platform == "gpu" and may_be_on_hopper(call) and not call.partitioned
    if not on_hopper or not is_known(*call.query, *call.key, *call.value):
        return False
    if not _is_plain(call):
        return False
    if call.dtype == "float32":
        return _is_fastest_in_single(call)
    if call.query[1] != call.key[1] or call.query[1] % _ALIGNED:
        return False
    queries, heads, dim = call.query[1], call.examples * call.query[0] * call.query[2], call.query[3]
    if max(dim, call.value[3]) > WIDEST_OF_OTHERS:
        return _scores(call) <= _FEW_OF_WIDE
    # The tiles of several heads keep enough of the chip busy.
    if heads > 1 or dim != call.value[3] or dim <= 128 or dim * dim * queries < _LEAST_WORK:
        return False
    if call.rules.right is None:  # our kernels divide keys and queries into parts
        return queries <= 1024 and dim >= 176
    return queries <= 8 * dim or (call.backward and dim >= 192 and _scores(call) <= _FEW)


def _is_fastest_in_single(call: AttentionCall) -> bool:
    """Return whether plain JAX is faster in float32, which our kernels convert first: one example, few scores.

    One example of 128 tokens and four heads of 64 columns took 6 us instead of 8, and 20 instead of 26 with its
    gradient; one of 256 and 16 heads, 13 us instead of 18; one of 64 queries and 4,096 keys, 20 instead of 30. With
    four examples, XLA transposes the operands: 55 us instead of 22.
    """
    (batch, queries, heads, dim), keys, (rows, columns) = call.query, call.key[1], _ALIGNED_IN_SINGLE
    if call.examples * batch > 1 or heads > call.key[2] or dim != call.value[3] or dim > 2 * rows or dim % columns:
        return False
    if queries <= rows:  # few keys have kernels that convert
        return keys >= _MANY_KEYS and keys % rows == 0 and call.rules.right is None and _scores(call) <= _FEW_OF_WIDE
    return queries == keys and queries % rows == 0 and _scores(call) <= _FEW_IN_SINGLE[call.backward]


def _is_plain(call: AttentionCall) -> bool:
    """Return whether a call is causal or full attention, and nothing more."""
    given = (call.bias, call.attention_mask, call.rules.left, call.rules.soft_cap)
    return (
        call.rules.right in (None, 0)
        and all(x is None for x in given)
        and not (call.segments or call.query_lengths or call.key_lengths or call.rules.dropout_rate)
    )


def _scores(call: AttentionCall) -> int:
    return math.prod((call.examples, call.query[0], call.query[2], call.query[1], call.key[1]))
