# SPDX-License-Identifier: Apache-2.0
"""Supported calls, heuristic and search space of wide heads, from shapes alone.

Rows of more than 256 columns do not fit into the registers of a kernel that keeps the scores there. Here kernels write
the weights, and in the backward also the gradient of the scores, to memory, in 16 bits, and XLA multiplies them with
queries, keys, values and cotangents.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ejkernel.kernels._hopper import SHARED_MEMORY
from ejkernel.kernels._hopper.tile_shapes import OVERHEAD, PIECE, ROWS, STEP, WARPGROUPS, padded
from ejkernel.kernels.flash_attention.common import AttentionCall, Rules

from .params import BackwardParams, ForwardParams
from .plan import unavailable

NARROWEST = 257  # columns; the other kernels run narrower heads
_SLOTS = 2  # staging buffers of each consumer
_WIDEST = 1024
_AT_ONCE = 512 << 20  # bytes of weights; their gradient takes as much again
_KV_BLOCKS = (128, 256)
_ALIGNED_ROWS = 8  # of an array that is copied in whole tiles of shared memory


class WidePlan(NamedTuple):
    """One launch: sizes padded to whole tiles of shared memory, and the tiles of one pair of example and head.

    Attributes:
        batch, heads, groups: As in `Operands`.
        queries, keys: The lengths, without padding.
        head_dim, value_dim: Padded columns.
        rules: Of the call.
        dtype: Of operands and weights.
        lengths: Whether the lengths of the keys are given.
        kv_block: Keys of a tile.
        stages: Pipeline stages.
    """

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    rules: Rules
    dtype: str
    lengths: bool
    kv_block: int
    stages: int

    @property
    def rows(self) -> int:
        """Queries, padded for copies."""
        return padded(self.queries, _ALIGNED_ROWS)

    @property
    def columns(self) -> int:
        """Columns of the weights: the keys, padded to whole pieces for copies."""
        return padded(self.keys, PIECE)

    @property
    def row_tiles(self) -> int:
        """Tiles along the queries."""
        return -(-self.queries // (ROWS * WARPGROUPS))

    @property
    def column_tiles(self) -> int:
        """Tiles along the keys."""
        return -(-self.keys // self.kv_block)

    @property
    def slots(self) -> int:
        """Staging buffers of each consumer."""
        return _SLOTS


def plan_of(call: AttentionCall, params: ForwardParams | BackwardParams, batch: int) -> WidePlan:
    """Return the launch for some examples of a call."""
    return WidePlan(
        batch=batch,
        heads=call.query[2],
        groups=call.key[2],
        queries=call.query[1],
        keys=call.key[1],
        head_dim=padded(call.query[3], STEP),
        value_dim=padded(call.value[3], STEP),
        rules=call.rules,
        dtype=call.dtype,
        lengths=call.key_lengths,
        kv_block=params.kv_block,
        stages=_stages(params),
    )


def examples_at_once(call: AttentionCall) -> int:
    """Return how many examples to compute at once, a divisor of the batch: their weights take at most 512 MiB."""
    batch, queries, heads, _ = call.query
    most = max(1, _AT_ONCE // (2 * heads * queries * call.key[1]))
    return max(count for count in range(1, batch + 1) if batch % count == 0 and count <= most)


def is_wide(call: AttentionCall) -> bool:
    """Return whether these kernels run a call of this head dimension, rather than others."""
    return max(call.query[3], call.value[3]) >= NARROWEST


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the kernels do not run `call`, and an alternative; `None` if they do."""
    return unavailable(call) or _arguments_reason(call)


def params_fault(call: AttentionCall, params: ForwardParams | BackwardParams) -> str | None:
    """Return why a supported `call` cannot run with `params`; `None` if it can."""
    del call
    if params.kv_block not in _KV_BLOCKS or params != _params(type(params), params.kv_block, _stages(params)):
        return (
            f"heads of more than 256 columns take {_params(type(params), _KV_BLOCKS[0], 4)}, with another number of "
            f"stages or kv_block={_KV_BLOCKS[1]}; got {params}."
        )
    stage = (ROWS * WARPGROUPS + params.kv_block) * STEP
    needed = 2 * (_stages(params) * stage + WARPGROUPS * _SLOTS * ROWS * PIECE) + OVERHEAD
    if needed > SHARED_MEMORY:
        return f"{params} needs {needed} bytes of shared memory; a block of threads has {SHARED_MEMORY}."
    return None


def heuristic(call: AttentionCall) -> ForwardParams | BackwardParams:
    """Return good parameters for `call`: the best, or within 2 % of it, on the measured shapes."""
    return _params(BackwardParams, 128, 5) if call.backward else _params(ForwardParams, 256, 4)


def space(call: AttentionCall) -> tuple[ForwardParams | BackwardParams, ...]:
    """Return the search space of `call`."""
    kind = BackwardParams if call.backward else ForwardParams
    found = [_params(kind, keys, stages) for keys, stages in ((128, 4), (128, 5), (128, 3), (256, 4), (256, 3))]
    return tuple(params for params in found if params_fault(call, params) is None)


def _params(
    kind: type[ForwardParams] | type[BackwardParams], kv_block: int, stages: int
) -> ForwardParams | BackwardParams:
    if kind is ForwardParams:
        return ForwardParams(kv_block=kv_block, stages=stages)
    return BackwardParams(form="unfused", kv_block=kv_block, q_stages=stages)


def _stages(params: ForwardParams | BackwardParams) -> int:
    return params.stages if isinstance(params, ForwardParams) else params.q_stages


def _arguments_reason(call: AttentionCall) -> str | None:
    if call.backward and call.dtype != "bfloat16":
        return f"query has dtype {call.dtype}; the backward of heads wider than 256 takes bfloat16; use 'xla'."
    if max(call.query[3], call.value[3]) > _WIDEST:
        return f"query has shape {call.query} and value {call.value}; 'mosaic_gpu' has {_WIDEST} columns at most."
    if not all((*call.query, *call.key, *call.value)):
        return f"query has shape {call.query} and key {call.key}; 'mosaic_gpu' needs sizes above 0; use 'xla'."
    given = {
        "bias": call.bias is not None,
        "attention_mask": call.attention_mask is not None,
        "segment_ids": call.segments,
        "query_lengths": call.query_lengths,
        "logits_soft_cap": call.rules.soft_cap is not None,
        "dropout_rate": call.rules.dropout_rate > 0,
    }
    names = [name for name, is_given in given.items() if is_given]
    if names:
        return f"heads wider than 256 columns take no {names[0]} in 'mosaic_gpu'; use 'xla'."
    if 2 * math.prod(call.query[1:3]) * call.key[1] > 2 * _AT_ONCE:
        return f"the weights of one example with query {call.query[1:]} take more than 1 GiB; use 'xla'."
    return None
