# SPDX-License-Identifier: Apache-2.0
"""The sharding rule of attention: over examples and heads."""

from __future__ import annotations

from typing import Any

from ejkernel.ops.core.sharding.rule import ShardingRule

from .common import Operands

# Sequences are not sharded. Query and output share the axis name, so that a sharded query can give a sharded output.
_AXES = {
    "query": "batch queries heads _",
    "key": "batch _ groups _",
    "value": "batch _ groups _",
    "bias": "batch heads _ _",
    "attention_mask": "batch heads _ _",
    "query_segments": "batch _",
    "key_segments": "batch _",
    "query_lengths": "batch",
    "key_lengths": "batch",
    "sinks": "heads",
}
_MAIN = ("query", "key", "value")


def attention_rule(operands: Operands, *, return_lse: bool) -> ShardingRule | None:
    """Return the rule for a call with these operands; `None` with dropout, whose mask depends on the row's position."""
    if operands.dropout_key is not None:
        return None
    given = [(name, array) for name, array in operands._asdict().items() if array is not None]
    arguments = [_AXES[name] if name in _MAIN else _broadcast(_AXES[name], array) for name, array in given]
    lse = ", batch heads queries" if return_lse else ""
    return ShardingRule(
        f"{', '.join(arguments)} -> batch queries heads _{lse}",
        split="batch heads",
        residuals="batch heads queries",
        follows={"groups": "heads"},
    )


def _broadcast(axes: str, array: Any) -> str:
    """Return the axes, with `_` in place of those of length 1, which broadcast."""
    return " ".join("_" if length == 1 else name for name, length in zip(axes.split(), array.shape, strict=True))
