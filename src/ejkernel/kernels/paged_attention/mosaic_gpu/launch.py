# SPDX-License-Identifier: Apache-2.0
"""A call as launches of the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.paged_attention.common import Operands, PagedCall, within_cache
from ejkernel.kernels.paged_attention.plan import PlanArrays, batch_schedules, token_tiles
from ejkernel.kernels.paged_attention.schedule import Prefill, Schedule, Tile, tile_sizes

from .latent_plan import ROWS, latent_plan
from .plan import LaunchPlan, MosaicGpuParams, as_run, is_widened, launch_plan, prefill_plan


def attention(
    call: PagedCall, given: tuple[Operands, PlanArrays], params: MosaicGpuParams, interpret: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the output and the log-sum-exp of operands without a plan, and a plan."""
    from ejkernel.kernels._hopper.launch import unsliced  # Mosaic GPU is not available in every environment

    from .widen import widened

    operands, plan_arrays = given
    if call.value_dim is not None:
        if is_widened(call):
            operands, call = _widened(call, operands), as_run(call)
        return _latent(call, operands, _token_schedule(call, plan_arrays), interpret)
    operands, (short, prefill) = unsliced((operands, _schedules(call, plan_arrays)))
    sizes = tile_sizes(call.q[0], call.table[0], call.q[1], call.pages[2])
    plan, decoded, tiles = launch_plan(call, params, sizes.short), operands, short
    apart = plan.is_narrow and sizes.long is not None
    if apart:
        plan = dataclasses.replace(plan, tokens=short.tiles.shape[0] * sizes.short)
        decoded, tiles = unsliced(_apart(short, sizes.short, operands))
    out, rows = _decoded(plan, decoded, tiles, interpret)
    lse = None
    if rows is not None:
        shape = plan.kv_heads, plan.tile_tokens, plan.group_rows
        lse = jnp.full(call.q[:2], -jnp.inf, jnp.float32)
        lse = _by_token(lse, short.tiles, rows.reshape(-1, *shape)[..., : plan.group])
    target: Any = out
    if sizes.long is not None:
        prefilled, own = operands, call
        if apart:
            prefilled, empty = unsliced(widened(call, operands, sizes.short, interpret))
            own, target = as_run(call), jax.new_ref(empty)
        rows = _prefilled(own, prefilled, prefill, target, interpret)
        lse = None if lse is None else _by_token(lse, prefill.tiles, rows)
    if lse is not None:
        padding = jnp.arange(call.q[0])[:, None] >= operands.query_offsets[-1]
        lse = jnp.where(padding, -jnp.inf, lse)
    whole = unsliced(jax.freeze(out))
    if plan.is_narrow:
        whole = _in_order(plan, whole)
    if apart:
        whole = unsliced(jax.freeze(target)).at[_tokens(short.tiles, sizes.short, call.q[0])].set(whole, mode="drop")
    return whole, lse


def _tokens(tiles: jax.Array, count: int, beyond: int) -> jax.Array:
    """Return the tokens of tiles of up to `count` tokens; `beyond` for missing ones."""
    number = jnp.arange(count, dtype=jnp.int32)
    used = number < tiles[:, Tile.COUNT, None]
    return jnp.where(used, tiles[:, Tile.TOKEN, None] + number, beyond).reshape(-1)


def _apart(made: Schedule, count: int, operands: Operands) -> tuple[Operands, Schedule]:
    """Return a launch with `count` queries for each tile alone, so that few get another order of columns."""
    tokens = _tokens(made.tiles, count, operands.q.shape[0] - 1)
    number = jnp.arange(made.tiles.shape[0], dtype=jnp.int32)
    tiles = made.tiles.at[:, Tile.TOKEN].set(number * count)
    return operands._replace(q=operands.q[tokens]), Schedule(tiles, made.programs)


def _widened(call: PagedCall, operands: Operands) -> Operands:
    """Return the operands with a copy of the 8-bit cache in the dtype of the queries, which holds each of its numbers.

    The copy has the whole cache, or the pages in the order of the page table if those are fewer. The schedule does not
    depend on the pages.
    """
    count, cache, table = call.pages[0], operands.kv_pages, operands.page_table
    if table.size < count:
        # Pages behind a sequence's keys are the same one, which stays in the GPU's cache.
        begin = jnp.arange(table.shape[1], dtype=jnp.int32) * call.pages[1]
        needed = begin < operands.kv_lengths[:, None]
        cache = cache[jnp.where(needed, within_cache(call, table), 0).reshape(-1)]
        table = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
    return operands._replace(kv_pages=cache.astype(call.dtype), page_table=table)


def _schedules(call: PagedCall, plan: PlanArrays) -> tuple[Schedule, Prefill]:
    if call.planned_for in (None, (call.pages[2], call.window)):
        return Schedule(plan.short_tiles, plan.short_programs), Prefill(plan.prefill_tiles, plan.prefill_ends)
    return batch_schedules(call.batch_shape, plan.offsets, plan.lengths)


def _token_schedule(call: PagedCall, plan: PlanArrays) -> Schedule:
    """Return a schedule of tiles of one token each."""
    if call.q[0] <= call.table[0]:
        return _schedules(call, plan)[0]
    if call.planned_for in (None, (1, call.window)):
        return Schedule(plan.token_tiles, plan.token_programs)
    return token_tiles(call.batch_shape, plan.offsets, plan.lengths)


def _latent(call: PagedCall, operands: Operands, made: Schedule, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp of latent attention."""
    from ejkernel.kernels._hopper.launch import unsliced

    from . import latent
    from .memory import Inputs
    from .shares import SumInputs

    plan, heads = latent_plan(call), call.q[1]
    operands, made = unsliced((operands, made))
    padding, sinks = plan.heads - heads, operands.sinks
    if sinks is not None:
        sinks = jnp.pad(sinks.astype(jnp.float32) * LOG2_E, (0, padding)).reshape(plan.parts, -1)
        sinks = jnp.pad(sinks, ((0, 0), (0, ROWS - plan.rows)))
    inputs = Inputs(
        tiles=made.tiles,
        programs=made.programs,
        q=jnp.pad(operands.q, ((0, 0), (0, padding), (0, 0))) if padding else operands.q,
        cache=operands.kv_pages.reshape(-1, plan.head_dim),
        table=operands.page_table,
        sinks=sinks,
        k_scale=operands.k_scale,
    )
    found = latent.run(plan, inputs, interpret)
    out, lse = jax.new_ref(found.out), jax.new_ref(found.lse)
    given = SumInputs(*made, found.shares, found.share_lse, sinks, inputs.k_scale, out, lse)
    latent.run_sums(plan, given, interpret)

    whole, rows = unsliced((jax.freeze(out), jax.freeze(lse)))
    whole = whole[:, :heads] if padding else whole
    rows = rows.reshape(call.q[0], plan.parts, ROWS)[..., : plan.rows].reshape(call.q[0], -1)[:, :heads]
    is_padding = jnp.arange(call.q[0])[:, None] >= operands.query_offsets[-1]
    return whole, jnp.where(is_padding, -jnp.inf, rows)


def _decoded(plan: LaunchPlan, operands: Operands, made: Schedule, interpret: Any) -> tuple[Any, jax.Array | None]:
    """Return a reference to an output with the rows of these tiles, and the log-sum-exp of each item's rows."""
    from ejkernel.kernels._hopper.launch import unsliced

    from . import kernel
    from .memory import Inputs
    from .shares import SumInputs

    sinks, cache, kinds = operands.sinks, operands.kv_pages, 1 if plan.is_whole else 2
    if sinks is not None:
        sinks = (sinks.astype(jnp.float32) * LOG2_E).reshape(plan.kv_heads, plan.group)
        sinks = jnp.pad(sinks, ((0, 0), (0, plan.group_rows - plan.group)))
        sinks = jnp.tile(sinks, (1, plan.tile_tokens))
    inputs = Inputs(
        tiles=made.tiles,
        programs=made.programs,
        q=_even_first(plan, operands.q) if plan.is_narrow else operands.q,
        cache=cache.reshape(-1, kinds * plan.kv_heads, (2 // kinds) * plan.head_dim),
        table=operands.page_table,
        sinks=sinks,
        k_scale=operands.k_scale,
        v_scale=operands.v_scale,
    )
    found = kernel.run(plan, inputs, made.tiles.shape[0] * plan.kv_heads, interpret)
    out = jax.new_ref(found.out)
    lse = None if found.lse is None else jax.new_ref(found.lse)
    given = SumInputs(*made, found.shares, found.share_lse, sinks, inputs.v_scale, out, lse)
    kernel.run_sums(plan, given, interpret)
    return out, None if lse is None else unsliced(jax.freeze(lse))


def _even_first(plan: LaunchPlan, q: jax.Array) -> jax.Array:
    """Return queries in the dtype of the products, with even columns first in each unit, and zeros in the last one.

    Numbers beyond the range of the dtype become its largest.
    """
    most = float(compat.tracing.finfo(plan.product_dtype).max)
    q = jnp.clip(q.astype(jnp.float32), -most, most).astype(plan.product_dtype)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, plan.width - q.shape[2])))
    return q.reshape(*q.shape[:2], plan.units, -1, 2).swapaxes(3, 4).reshape(q.shape)


def _in_order(plan: LaunchPlan, out: jax.Array) -> jax.Array:
    """Return an output with even columns first in each unit in the order of the values."""
    shape = out.shape
    return out.reshape(*shape[:2], plan.units, 2, -1).swapaxes(3, 4).reshape(shape)[..., : plan.head_dim]


def _prefilled(call: PagedCall, operands: Operands, made: Prefill, out: Any, interpret: Any) -> Any:
    """Write the rows of these tiles into the output, and return their log-sum-exp by tile, head and token."""
    from ejkernel.kernels._hopper.launch import unsliced

    from . import prefill

    # JAX refuses warps with references that vary over mesh axes.
    by_warp, sinks = not compat.tracing.varying_axes(operands.kv_pages), operands.sinks
    plan = prefill_plan(call, made.tiles.shape[0], by_warp=by_warp)
    if sinks is not None:
        sinks = (sinks.astype(jnp.float32) * LOG2_E).reshape(plan.bundles, plan.tile_heads)
        sinks = jnp.tile(sinks, (1, plan.warpgroup_tokens))
    inputs = prefill.PrefillInputs(
        tiles=made.tiles,
        ends=made.ends,
        q=operands.q,
        cache=operands.kv_pages.reshape(-1, plan.groups, 2 * plan.head_dim),
        table=operands.page_table,
        out=out,
        sinks=sinks,
        k_scale=operands.k_scale,
        v_scale=operands.v_scale,
    )
    lse = prefill.run(plan, inputs, interpret)
    return None if lse is None else unsliced(lse).reshape(made.tiles.shape[0], plan.bundles, -1, plan.tile_heads)


def _by_token(lse: jax.Array, tiles: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the log-sum-exp of tokens, `[tokens, heads]`, with that of these tiles' rows.

    Args:
        lse: That of other tiles.
        tiles: The tiles.
        rows: `[tiles, parts of the heads, tokens of a tile, heads of a part]`.
    """
    count = rows.shape[2]
    rows = rows.swapaxes(1, 2).reshape(-1, lse.shape[1])
    tokens = _tokens(tiles, count, lse.shape[0])
    return lse.at[tokens].set(rows, mode="drop")
