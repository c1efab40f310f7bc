# SPDX-License-Identifier: Apache-2.0
"""Arrays, shared memory and barriers of latent attention, and the parts common to its two kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._hopper.launch import plgpu, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels.paged_attention.schedule import BLOCK, Tile

from .latent_plan import REST, ROWS, LatentPlan
from .memory import Item, normalisation, number

LAYOUT = plgpu.Layout.WGMMA
BY_ROW = LAYOUT.reduce(1)


class Results(NamedTuple):
    """Results in global memory.

    Attributes:
        out: `[tokens, heads, value_dim]`.
        lse: `[tokens, parts * ROWS]`.
        shares: `[2 * groups, 2, parts * ROWS, value_dim]`: of each group those of its first and its last item, each as
            two numbers in the dtype of the output; their sum has 16 bits at least.
        share_lse: `[2 * groups, parts * ROWS]`, to the base 2.
    """

    out: Any
    lse: Any
    shares: Any
    share_lse: Any


class Buffers(NamedTuple):
    """Shared memory; the values of queries and keys are in two halves of their columns.

    Attributes:
        q: `[2, ROWS, half]`; also stages the output; each warpgroup has one half of its columns.
        q_rest: `[1, ROWS, REST]`.
        values: `[stages, 2, BLOCK, half]`.
        rest: `[stages, BLOCK, REST]`: the other columns of the keys, and afterwards the weights `[ROWS, BLOCK]`.
        tops: `[stages, ROWS]`: the maxima to which the weights are relative, to the base 2.
        totals: `[2, warpgroups, ROWS]`: the sums of the weights of each warpgroup, of two items in turn.
    """

    q: Any
    q_rest: Any
    values: Any
    rest: Any
    tops: Any
    totals: Any

    @classmethod
    def types(cls, plan: LatentPlan) -> Buffers:
        """Return the types of the buffers."""
        return cls(
            q=tiled((2, ROWS, plan.half), plan.dtype),
            q_rest=tiled((1, ROWS, REST), plan.dtype),
            values=tiled((2, 2, BLOCK, plan.half), plan.dtype),
            rest=tiled((2, BLOCK, REST), plan.dtype),
            tops=plgpu.SMEM((2, ROWS), jnp.float32),
            totals=plgpu.SMEM((2, 2, ROWS), jnp.float32),
        )


class Barriers(NamedTuple):
    """Barriers.

    Attributes:
        q: The pipeline of queries.
        own: Of each stage, the half of the values that its warpgroup sums, and releases.
        other: Of each stage, the half that the other warpgroup sums and releases, and the rest of the keys.
        weights: Of each stage; its warpgroup arrives once the weights are in shared memory, and the other one waits.
        totals: Both warpgroups arrive and wait.
    """

    q: Pipeline
    own: Pipeline
    other: Pipeline
    weights: Any
    totals: Any

    @classmethod
    def types(cls, plan: LatentPlan) -> Barriers:
        """Return the types of the barriers."""
        return cls(
            q=Pipeline.types(1, consumers=2, copies=3),
            own=Pipeline.types(2, consumers=1, copies=plan.copies),
            other=Pipeline.types(2, consumers=1, copies=2 * plan.copies),
            weights=plgpu.Barrier(num_barriers=2),
            totals=plgpu.Barrier(num_arrivals=2),
        )


def item_of(tiles: Any, index: Any) -> Item:
    """Return an item: a tile of the only KV head."""
    return Item(index, jnp.int32(0), *(number(tiles, index, column) for column in Tile))


def by_row(vector: Any, shape: tuple[int, ...]) -> Any:
    """Return one number per row, broadcast along the row."""
    return lax.broadcast_in_dim(vector, shape, [0])


def load_rows(vector: Any) -> Any:
    """Return one number per row from memory."""
    return plgpu.load(vector, layout=BY_ROW, optimized=False)


def finished(sinks: Any, scale: Any, part: Any, acc: Any, top: Any, total: Any) -> tuple[Any, Any]:
    """Return some columns of the output of a tile, and its log-sum-exp.

    Args:
        sinks: As in `Inputs`.
        scale: The scale of the values, `k_scale`.
        part: The part of the heads.
        acc: The sum of weighted values.
        top: The maximum to which weights are relative, to the base 2.
        total: The sum of the weights.
    """
    sinks = None if sinks is None else load_rows(sinks.at[part])
    factor, lse = normalisation(top, total, sinks)
    if scale is not None:
        factor = factor * scale[0]
    return acc * by_row(factor, acc.shape), lse
