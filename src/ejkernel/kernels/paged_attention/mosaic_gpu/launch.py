# SPDX-License-Identifier: Apache-2.0
"""A call as launches of the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.paged_attention.common import Operands, PagedCall

from . import schedule as scheduling
from .params import MosaicGpuParams
from .plan import LaunchPlan, launch_plan
from .schedule import Schedule


def attention(
    call: PagedCall, operands: Operands, params: MosaicGpuParams, interpret: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the output and the log-sum-exp."""
    given = scheduling.ranges(operands.query_offsets, operands.kv_lengths, call.q[0])
    plan = launch_plan(call, params, 1)
    tiles = scheduling.token_tiles(given, call.q[0], call.window)
    made = scheduling.schedule(tiles, plan.kv_heads, plan.programs)
    out, lse = _launched(plan, operands, made, interpret)
    if lse is None:
        return out, None
    lse = lse.reshape(call.q[0], plan.kv_heads, plan.group_rows)[..., : plan.group].reshape(call.q[:2])
    padding = jnp.arange(call.q[0])[:, None] >= operands.query_offsets[-1]
    return out, jnp.where(padding, -jnp.inf, lse)


def _launched(
    plan: LaunchPlan, operands: Operands, made: Schedule, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    from . import kernel, sums  # Mosaic GPU is not available in every environment
    from .memory import Inputs, Sums

    sinks, cache = operands.sinks, operands.kv_pages
    if sinks is not None:
        sinks = (sinks.astype(jnp.float32) * LOG2_E).reshape(plan.kv_heads, plan.group)
        sinks = jnp.pad(sinks, ((0, 0), (0, plan.group_rows - plan.group)))
        sinks = jnp.tile(sinks, (1, plan.tile_tokens))
    inputs = Inputs(
        tiles=made.tiles,
        programs=made.programs,
        q=operands.q,
        cache=cache.reshape(-1, plan.kv_heads, 2 * plan.head_dim),
        table=operands.page_table,
        sinks=sinks,
        k_scale=operands.k_scale,
        v_scale=operands.v_scale,
    )
    items = made.tiles.shape[0] * plan.kv_heads
    found = kernel.run(plan, inputs, items, interpret)
    shares = Sums(made.tiles, made.programs, found.shares, found.share_lse, sinks, inputs.v_scale, found.out, found.lse)
    return sums.run(plan, shares, interpret)
