# SPDX-License-Identifier: Apache-2.0
"""Few queries, as in decoding: the heads that share keys are further queries of one head.

A tile has 64 queries of one head. With fewer queries most of its rows are empty, and each head reads the keys again.
"""

from __future__ import annotations

import dataclasses

import jax

from ejkernel.kernels.flash_attention.common import AttentionCall, Operands, Residuals, Rules

from .parts import what_hides

_MOST = 32  # queries
_LEAST_KEYS = 1024  # for fewer, the copies of queries and output take longer than the empty rows


def folds(call: AttentionCall) -> bool:
    """Return whether the heads of a group become queries: all of these must see the same keys."""
    return (
        what_hides(call) is None
        and 0 < call.query[1] <= _MOST
        and call.key[1] >= _LEAST_KEYS
        and call.key[2] > 0
        and (call.query[2] > call.key[2] or call.rules.right is not None)
    )


def folded(call: AttentionCall) -> AttentionCall:
    """Return the call that the kernels run."""
    if not folds(call):
        return call
    (batch, queries, heads, dim), groups = call.query, call.key[2]
    query = (batch, queries * heads // groups, groups, dim)
    return dataclasses.replace(call, query=query, rules=_of_all(call.rules))


def fold(operands: Operands, rules: Rules) -> tuple[Operands, Rules]:
    """Return the operands, without sinks, and the rules of such a call."""
    return operands._replace(query=fold_rows(operands.query, operands.key.shape[2]), sinks=None), _of_all(rules)


def fold_rows(x: jax.Array, groups: int) -> jax.Array:
    """Return `[batch, queries, heads, dim]` with the heads of a group as queries."""
    batch, queries, heads, dim = x.shape
    split = x.reshape(batch, queries, groups, heads // groups, dim)
    return split.swapaxes(2, 3).reshape(batch, -1, groups, dim)


def unfold_rows(x: jax.Array, heads: int) -> jax.Array:
    """Undo `fold_rows`."""
    batch, _, groups, dim = x.shape
    split = x.reshape(batch, -1, heads // groups, groups, dim)
    return split.swapaxes(2, 3).reshape(batch, -1, heads, dim)


def fold_residuals(residuals: Residuals, groups: int) -> Residuals:
    """Return output and log-sum-exp with the heads of a group as queries."""
    out, lse = residuals
    rows = fold_rows(lse.transpose(0, 2, 1)[..., None], groups)
    return fold_rows(out, groups), rows[..., 0].transpose(0, 2, 1)


def unfold_residuals(residuals: Residuals, heads: int) -> Residuals:
    """Undo `fold_residuals`."""
    out, lse = residuals
    rows = unfold_rows(lse.transpose(0, 2, 1)[..., None], heads)
    return unfold_rows(out, heads), rows[..., 0].transpose(0, 2, 1)


def _of_all(rules: Rules) -> Rules:
    return dataclasses.replace(rules, right=None)
