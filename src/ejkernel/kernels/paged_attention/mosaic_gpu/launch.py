# SPDX-License-Identifier: Apache-2.0
"""A call as launches of the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.paged_attention.common import Operands, PagedCall
from ejkernel.kernels.paged_attention.schedule import Schedule, Tile, schedules, tile_sizes

from .params import MosaicGpuParams
from .plan import LaunchPlan, launch_plan


def attention(
    call: PagedCall, operands: Operands, params: MosaicGpuParams, interpret: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the output and the log-sum-exp."""
    from ejkernel.kernels._hopper.launch import unsliced  # Mosaic GPU is not available in every environment

    operands, made = unsliced((operands, _schedules(call, operands)))
    sizes = tile_sizes(call.q[0], call.table[0], call.q[1], call.pages[2])
    out: Any = None
    lse = jnp.full(call.q[:2], -jnp.inf, jnp.float32) if call.return_lse else None
    for size, own in zip(sizes, made, strict=True):
        if size is not None:
            plan = launch_plan(call, params, size)
            out, rows = _launched(plan, operands, own, out, interpret)
            lse = None if lse is None else _by_token(plan, own, lse, rows)
    if lse is not None:
        padding = jnp.arange(call.q[0])[:, None] >= operands.query_offsets[-1]
        lse = jnp.where(padding, -jnp.inf, lse)
    return unsliced(jax.freeze(out)), lse


def _schedules(call: PagedCall, operands: Operands) -> tuple[Schedule, Schedule]:
    plan = operands.plan
    if plan is not None and call.planned_for == (call.pages[2], call.window):
        return Schedule(plan.short_tiles, plan.short_programs), Schedule(plan.long_tiles, plan.long_programs)
    return schedules(operands.query_offsets, operands.kv_lengths, call.q[0], call.q[1], call.pages[2], call.window)


def _launched(
    plan: LaunchPlan, operands: Operands, made: Schedule, out: Any, interpret: Any
) -> tuple[Any, jax.Array | None]:
    """Return a reference to the output with the rows of these tiles, and the log-sum-exp of each item's rows."""
    from ejkernel.kernels._hopper.launch import unsliced

    from . import kernel, sums
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
    found = kernel.run(plan, inputs, made.tiles.shape[0] * plan.kv_heads, out, interpret)
    out = jax.new_ref(found.out) if out is None else out
    lse = None if found.lse is None else jax.new_ref(found.lse)
    given = Sums(*made, found.shares, found.share_lse, sinks, inputs.v_scale, out, lse)
    sums.run(plan, given, interpret)
    return out, None if lse is None else unsliced(jax.freeze(lse))


def _by_token(plan: LaunchPlan, made: Schedule, lse: jax.Array, rows: Any) -> jax.Array:
    """Return the log-sum-exp of tokens, `[tokens, heads]`, with that of these tiles' rows."""
    rows = rows.reshape(-1, plan.kv_heads, plan.tile_tokens, plan.group_rows)[..., : plan.group].swapaxes(1, 2)
    rows = rows.reshape(-1, plan.tile_tokens, plan.heads)
    number = jnp.arange(plan.tile_tokens, dtype=jnp.int32)
    used = number < made.tiles[:, Tile.COUNT, None]
    tokens = jnp.where(used, made.tiles[:, Tile.TOKEN, None] + number, plan.tokens)
    return lse.at[tokens].set(rows, mode="drop")
