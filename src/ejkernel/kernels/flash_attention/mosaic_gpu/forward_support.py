# SPDX-License-Identifier: Apache-2.0
"""Supported calls, heuristic and search space of the forward, from shapes alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels.flash_attention.common import AttentionCall
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.errors import ConfigError

from .forward_faults import (
    arguments_reason,
    block_fault,
    has_much_wider_values,
    packing_fault,
    register_fault,
    shared_memory_fault,
    sharing_fault,
)
from .params import ForwardParams
from .parts import fastest_key_parts, in_key_parts, parts_fault
from .plan import ROWS, SMALL_CAP, WHOLE_DIMS, forward_plan, is_pieced, unavailable
from .schedule import duration, longest_share

# 80 gained 2 to 4 % at head_dim 256 with a soft cap, which takes two transcendental functions per weight.
_KV_BLOCKS = (64, 80, 96, 128, 160)
_NARROW_WINDOW, _SHORT_WINDOW, _SHORTEST_WINDOW = 512, 128, 64  # keys
_CAPPED_WITH_POLYNOMIALS = 128  # largest head dimension
_SHORT_LOOPS = 640  # queries and keys
_FEW_SHARED_TILES, _FEW_ROUNDS = 3, 6  # tiles for each block of threads
_WIDTHS_WITH_BIAS = {32: {64: 1.06}, 48: {64: 1.1, 96: 1.1}, 64: {64: 1.13, 96: 1.1}}  # times of a key, 128: 1
_FEW_QUERIES, _MANY_QUERIES = 512, 1536
_FEW_QUERIES_OF_WIDE_HEADS = 2048
_FEW_ODD_PARTS = (3, 5, 7)  # of the queries: half of the last tile of 128 is empty
_UNALIGNED_AT_NO_COST = 80  # columns: up to here, rows that start within a sector of memory cost at most 2 %
_FEW_KEYS, _MANY_ROWS = 1024, 8192  # keys of a head, and rows that read each of them


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the forward does not run `call`, and an alternative; `None` if it runs."""
    return unavailable(call) or arguments_reason(call)


def params_fault(call: AttentionCall, params: ForwardParams) -> str | None:
    """Return why `call`, which is supported, cannot run with `params`; `None` if it can.

    No parameters cause a deadlock: all warpgroups visit the same blocks in the same order, the producer never copies a
    block that no consumer visits, and a consumer that waits for its turn holds nothing that others wait for.
    """
    fault = parts_fault(call, "key_parts") if params.key_parts > 1 else None
    call = in_key_parts(call, params.key_parts)
    plan = forward_plan(call, params)
    return (
        fault
        or packing_fault(plan, call)
        or sharing_fault(plan, call)
        or block_fault(plan)
        or shared_memory_fault(plan)
        or register_fault(plan)
    )


def heuristic(call: AttentionCall) -> ForwardParams:
    """Return good parameters for a supported `call`."""
    parts = fastest_key_parts(call)
    return dataclasses.replace(_heuristic(in_key_parts(call, parts)), key_parts=parts)


def _heuristic(call: AttentionCall) -> ForwardParams:
    """Return good parameters with all keys in one part."""
    aligned = _should_align(call)
    preferred = dataclasses.replace(_preferred(call, aligned=aligned), align_keys=aligned)
    if _has_few_tiles(call):
        preferred = dataclasses.replace(preferred, warpgroups=1, ping_pong=False, pack_heads=False)
    for params in _fallbacks(preferred):
        if params_fault(call, params) is None:
            return _in_order(call, _with_polynomials(call, params))
    raise ConfigError(f"no launch parameters fit {call}; use 'xla'.")


def _has_few_tiles(call: AttentionCall) -> bool:
    """Return whether tiles of 64 rows are faster, as larger ones leave multiprocessors without work."""
    # One for each multiprocessor: seven forwards took 20 to 30 % less time at D64 to D256. Two, under a causal mask,
    # where short and long tiles even out: four took 13 to 29 % less.
    if call.bias is not None:  # its rule knows the size of tiles
        return False
    is_causal = call.rules.right == 0 and call.rules.left is None and call.key[1] <= call.query[1]
    uneven = is_causal and not (call.segments or call.key_lengths)
    tiles = forward_plan(call, ForwardParams(warpgroups=1, ping_pong=False)).tiles
    return tiles <= (2 if uneven else 1) * MULTIPROCESSORS


def _with_polynomials(call: AttentionCall, params: ForwardParams) -> ForwardParams:
    """Return the parameters, for a soft cap with polynomials in place of some exponentials: it takes tanh as well."""
    # A quarter of the columns gains 4 to 15 % with 8 to 64 columns. Three eighths gain 1 to 8 % with 72 to 128 columns,
    # and a quarter 3 % less; with a cap above `SMALL_CAP` a quarter gains 0 to 3 %, and three eighths lose as much. At
    # head_dim 144 to 256, and without a cap, most forwards with polynomials were slower.
    cap, wide = call.rules.soft_cap, max(call.query[3], call.value[3])
    if cap is None or wide > _CAPPED_WITH_POLYNOMIALS:
        return params
    eighths = 3 if cap <= SMALL_CAP and call.dtype == "bfloat16" and wide > 64 else 2
    return dataclasses.replace(params, fma_columns=params.kv_block // 64 * 8 * eighths)


def space(call: AttentionCall) -> ConfigSpace[ForwardParams]:
    """Return the search space of a supported `call`; launches that deal by length have one order of heads."""

    few = heuristic(call)
    # Where the keys of a part are no multiple of 8, its copies take more shared memory than those of the whole.
    divided = {count: in_key_parts(call, count) for count in (1, few.key_parts)}

    def fits(
        kv_block: int, stages: int, warpgroups: int, share_buffer: bool, query_buffers: int, key_parts: int
    ) -> bool:
        params = ForwardParams(
            kv_block=kv_block,
            stages=stages,
            warpgroups=warpgroups,
            share_buffer=share_buffer,
            query_buffers=query_buffers,
            persistent=True,  # two query_buffers need it; shared memory does not depend on it
        )
        plan = forward_plan(divided[key_parts], params)
        fault = sharing_fault(plan, call) or block_fault(plan) or shared_memory_fault(plan) or register_fault(plan)
        return fault is None

    def packing(pack_heads: bool, warpgroups: int) -> bool:
        plan = forward_plan(call, ForwardParams(pack_heads=pack_heads, warpgroups=warpgroups))
        return packing_fault(plan, call) is None

    either = (False, True)
    # The heuristic is in the space, even if it is a fallback.
    return ConfigSpace(
        {
            "kv_block": tuple(sorted({few.kv_block, *(size for size in _KV_BLOCKS if size < call.key[1] + 32)})),
            "stages": tuple(sorted({few.stages, 2, 3})),
            "warpgroups": (1, 2) if few.warpgroups == 1 else (2, 3),
            "ping_pong": either,
            "persistent": either,
            "query_buffers": (1, 2),
            "pack_heads": either,
            "share_buffer": either,
            "heads_first": either,
            "fma_columns": tuple({few.fma_columns: None, 0: None}),
            "align_keys": either if _has_unaligned_rows(call) else (False,),
            "key_parts": tuple({few.key_parts: None, 1: None}),
        },
        constraints=(fits, packing, _order_of(call), _persistence, _several),
        build=ForwardParams,
    )


def _order_of(call: AttentionCall) -> Callable[..., bool]:
    def order(heads_first: bool, persistent: bool, pack_heads: bool, warpgroups: int) -> bool:
        params = ForwardParams(persistent=persistent, pack_heads=pack_heads, warpgroups=warpgroups)
        return not (heads_first and forward_plan(call, params).deals_by_length)

    return order


def _persistence(query_buffers: int, persistent: bool) -> bool:
    return persistent or query_buffers == 1


def _several(ping_pong: bool, pack_heads: bool, warpgroups: int) -> bool:
    return warpgroups > 1 or not (ping_pong or pack_heads)


def _has_unaligned_rows(call: AttentionCall) -> bool:
    """Return whether rows of keys or values start within a sector of memory."""
    return any(-dim % 16 >= 8 for dim in (call.key[3], call.value[3]))


def _should_align(call: AttentionCall) -> bool:
    """Return whether copies of keys and values to rows of whole sectors take less time than they save."""
    # With the copies, 32 heads and 4 key heads of 4,096 rows took 396 us instead of 436 at D104, 395 instead of 412 at
    # D120, 610 instead of 659 at D168; but 344 instead of 348 at D72, and at D40 and D56 as long as before. With 8,192
    # rows for each key they gained 0 to 7 %; with 4,096 they lost 0 to 6 %. In a window of 1,024 keys and 8 heads for
    # each key head: 131 us instead of 134 at D104, but 133 instead of 130 at D120; of 4,096 keys: 728 instead of 790.
    rules = call.rules
    if not _has_unaligned_rows(call) or max(call.key[3], call.value[3]) <= _UNALIGNED_AT_NO_COST:
        return False
    hides = call.segments or call.query_lengths or call.attention_mask is not None
    if hides or call.bias is not None or rules.soft_cap is not None:  # not measured
        return False
    rows, left, right = call.query[1], rules.left, rules.right
    if left is not None or right is not None:
        window = rows if left is None or right is None else left + right + 1
        rows = min(rows, window) // 2
    return call.key[1] >= _FEW_KEYS and rows * call.query[2] // call.key[2] >= _MANY_ROWS


def _preferred(call: AttentionCall, *, aligned: bool) -> ForwardParams:
    """Return the fastest parameters on an H200 for similar calls; they may not fit this call."""
    rules, narrow = call.rules, call.query[3] <= 64
    grouped = (call.query[2] // call.key[2]) % 2 == 0
    wide = max(call.query[3], call.value[3])
    left = rules.left if rules.left is not None and rules.left < call.key[1] // 2 else None
    if wide > 128:
        return _preferred_wide(call, wide, packs=grouped, left=left, aligned=aligned)
    # With packed heads all consumers have the same rows, so the same segments: 64 rows visit fewer blocks than 128.
    if call.segments:
        return _preferred_for_segments(call, packs=grouped)
    if left is not None:
        pieced, packs = is_pieced(call, WHOLE_DIMS), grouped and (narrow or left < _SHORT_WINDOW)
        # 256 tiles: 12.1 us instead of 13.2 with tiles of 64 rows, which divide more evenly. 512 tiles: 26.9 instead of
        # 27.6, and 28.2 instead of 29.3. But 1,024 tiles: 37.5 instead of 36.6.
        few = left < _SHORT_WINDOW and forward_plan(call, ForwardParams()).tiles <= 4 * MULTIPROCESSORS
        shortest = _SHORT_WINDOW if few or (wide == 128 and not pieced) else _SHORTEST_WINDOW
        # In pieces of columns and a window of 128: 32.8 us instead of 28.4 at D88, 40.8 instead of 33.2 at D104.
        few = few and (left < _SHORTEST_WINDOW or not pieced)
        return _preferred_in_window(left, packs=packs, shortest=shortest, warpgroups=1 if few else 2)
    if call.bias is not None:
        return _preferred_with_bias(call)
    if rules.right is not None:
        return _preferred_causal(call, narrow=narrow)
    return _preferred_full(call, narrow=narrow, packs=grouped)


def _preferred_for_segments(call: AttentionCall, *, packs: bool) -> ForwardParams:
    """Return a persistent launch, which deals tiles by length, unless blocks of threads would have few tiles each."""
    # 15 of 18 forwards with 2 to 40 segments took 3 to 15 % less than by the former rules, which did not know the
    # lengths; one took 4 % more: 155 us instead of 149 at D64. With two tiles for each block of threads 114 instead of
    # 109.
    params = ForwardParams(pack_heads=packs)
    if _has_few_tiles_each(call, params):
        return params
    return dataclasses.replace(params, persistent=True, query_buffers=2, share_buffer=True)


def _has_few_tiles_each(call: AttentionCall, params: ForwardParams) -> bool:
    return forward_plan(call, params).tiles <= _FEW_SHARED_TILES * MULTIPROCESSORS


def _in_order(call: AttentionCall, params: ForwardParams) -> ForwardParams:
    """Return the parameters, with the tiles of all heads by rows where those of one head at a time divide unevenly."""
    if forward_plan(call, params).deals_by_length:  # in one order for both
        return dataclasses.replace(params, heads_first=False)
    # Under a causal mask with up to six tiles for each block of threads, the estimated gain is within 2 % of the
    # measured one in 13 forwards at D64 to D256: 2 to 8 % in 12 of them. With eight or more tiles, where it says 2 to
    # 4 %, two took 0 and 3 % longer: the tiles of more heads at once share less of the cache.
    usual = params.persistent and params.heads_first
    if not usual or call.rules.right is None or call.rules.left is not None:
        return params
    one_head, all_heads = (
        forward_plan(call, dataclasses.replace(params, heads_first=first)) for first in (True, False)
    )
    if one_head.tiles > _FEW_ROUNDS * MULTIPROCESSORS or longest_share(all_heads) > 0.985 * longest_share(one_head):
        return params
    return all_heads.params


def _preferred_with_bias(call: AttentionCall) -> ForwardParams:
    """Return good parameters with a bias: the size of tiles that takes the fewest rounds of these times."""
    # The times of tiles of 45 biased calls at head_dim 16 to 64, and the rule mispredicts none by more than 5 %.
    dim, params = call.query[3], ForwardParams(persistent=True, query_buffers=2)
    times = {3: 1.0, 2: 0.8 if dim < 64 else 0.76, 1: 0.5} if dim <= 64 else {2: 0.77, 1: 0.5}
    sizes = [
        (dataclasses.replace(params, warpgroups=count, ping_pong=count > 1, share_buffer=count > 2 and dim > 48), time)
        for count, time in times.items()
    ]
    if dim > 64:
        # Tiles of 128 rows fit beside a bias of bfloat16: 155 us instead of 204 at D128, 139 instead of 173 at D96.
        size, less = sizes[0][0], dataclasses.replace(sizes[0][0], share_buffer=True, query_buffers=1)
        smaller = (size, less, dataclasses.replace(less, kv_block=96))
        sizes[0] = next((one for one in smaller if params_fault(call, one) is None), size), sizes[0][1]
    params = _fastest_size(call, sizes)
    params = dataclasses.replace(params, ping_pong=params.ping_pong and _gains_by_turns(call, params))
    # Where each example has its own bias, the tiles of a head come together: 55 us instead of 60, 204 instead of 208.
    own = call.bias is not None and call.bias[0] > 1
    return dataclasses.replace(params, kv_block=_keys_with_bias(call), heads_first=own)


def _keys_with_bias(call: AttentionCall) -> int:
    """Return the number of keys in a block with which few are computed in vain; smaller blocks take longer for each."""
    # 402 keys at D32: 28.9 us with 64 instead of 31.0 with 128; 260 keys 28.8 instead of 32.2; 180 at D16 21.9 instead
    # of 25.1; 300 at D64 22.5 instead of 23.7; 650 at D64 41.4 with 96 instead of 44.8. But 320 at D64 101 instead of
    # 98.
    dim, keys = call.query[3], call.key[1]
    times = next((times for width, times in _WIDTHS_WITH_BIAS.items() if dim <= width), {})
    return min((128, *times), key=lambda block: -(-keys // block) * block * times.get(block, 1.0))


def _gains_by_turns(call: AttentionCall, params: ForwardParams) -> bool:
    """Return whether several warpgroups of a call with a bias should take turns at the tensor core."""
    if params.warpgroups > 2:  # up to 10 % faster; but with two blocks of keys at head_dim 64 4 to 6 % slower
        return call.query[3] < 64 or call.key[1] > 2 * params.kv_block
    # 1 to 6 % slower, but up to 6 % faster with columns in pieces, and 3 % with one tile for each block of threads.
    few = forward_plan(call, params).tiles <= MULTIPROCESSORS
    return few or call.query[3] > 64 or is_pieced(call, WHOLE_DIMS)


def _preferred_full(call: AttentionCall, *, narrow: bool, packs: bool) -> ForwardParams:
    """Return good parameters without a window."""
    full = ForwardParams(persistent=True, query_buffers=2, share_buffer=True, heads_first=True)
    if not narrow:
        # 310 queries are five parts of 64 rows, and three tiles of 128: packed heads took 266 us instead of 296.
        packs = packs and call.attention_mask is None and -(-call.query[1] // ROWS) in _FEW_ODD_PARTS
        # Of few queries: 115.3 us instead of 117.7 for 512 at D128, 66.7 instead of 68.4 for 384.
        return _with_output_buffer(call, dataclasses.replace(full, pack_heads=packs))
    three = dataclasses.replace(full, warpgroups=3, share_buffer=False)
    # With tiles of 192 rows, half of the blocks of threads had two of 192 tiles: 18 us, and 14 us with 256 smaller
    # ones. 512 queries with lengths: 26.6 us instead of 30.1 with three tiles for each head; but 930: 116 instead of
    # 101 with five. One example of 4,096 queries with a length: 102 instead of 100 at D64. A tile of 128 rows takes
    # 0.85 of the time of one of 192 at D8 to D32, and 0.77 to 0.82 at D40 to D64.
    lengths = call.key_lengths and call.query[0] > 1
    small = 0.85 if call.query[3] <= 32 else 0.72 if lengths else 0.8
    return _fastest_size(call, [(three, 1.0), (_two_for_narrow(call, full), small)])


def _two_for_narrow(call: AttentionCall, full: ForwardParams) -> ForwardParams:
    """Return the parameters of tiles of 128 rows for narrow heads."""
    dim, keys = call.query[3], call.key[1]
    if call.key_lengths or call.attention_mask is not None or call.rules.soft_cap is not None:
        return full
    if dim <= 32:
        # Without persistence, where a multiprocessor has at most two tiles: 131 us instead of 135 at D32 for 8,192
        # queries, and 128 if some exponentials are polynomials; 119 instead of 127 at D8, where polynomials lose. But
        # 37 instead of 37 for 2,048 queries, and 12 instead of 11 for 512.
        if keys <= 2048 or forward_plan(call, full).tiles > 2 * MULTIPROCESSORS:
            return full
        return dataclasses.replace(full.without_persistence(), fma_columns=32 if dim > 16 else 0)
    if dim <= 48:
        # At D48 instead of steps of 128 keys: 140 us instead of 151 for 8,192 queries, 75 instead of 78 for 4,096. The
        # last step counts: at D40 59.8 instead of 60.5 for 3,000 queries.
        wide, usual = (-(-keys // block) * block for block in (224, 128))
        return dataclasses.replace(full, kv_block=224) if keys > 2048 and 0.93 * wide < usual else full
    # Without turns: 80.5 us instead of 83.5 at D64 for 4,096 queries. Steps of 192 keys: 153 instead of 157 for 8,192
    # queries, but 82.6 instead of 80.5 for 4,096.
    block = 192 if keys >= 8192 else 128
    return dataclasses.replace(full, kv_block=block, overlap=False, ping_pong=False)


def _fastest_size(call: AttentionCall, sizes: list[tuple[ForwardParams, float]]) -> ForwardParams:
    """Return the parameters whose tiles, each of the time beside them, take the least time; the first of equal ones."""

    def duration(size: tuple[ForwardParams, float]) -> float:
        params, time = size
        rounds = forward_plan(call, params).tiles / MULTIPROCESSORS
        # Tiles of several examples' lengths even out. One example's are alike: 125 us instead of 101 at 8,192 queries.
        evens_out = call.key_lengths and call.query[0] > 1
        return time * (rounds if evens_out else math.ceil(rounds))

    fitting = [size for size in sizes if params_fault(call, size[0]) is None]
    return min(fitting or sizes, key=duration)[0]


# Wide heads.


def _preferred_wide(call: AttentionCall, wide: int, *, packs: bool, left: int | None, aligned: bool) -> ForwardParams:
    """Return good parameters for heads of more than 128 columns; one buffer of queries is left where two do not fit."""
    # Without persistence, full: 89 us instead of 78 at head_dim 144, 220 instead of 191 at 168, 298 instead of 274 at
    # 256. Causal: 56 instead of 46 at 160, 124 instead of 101 at 192, 203 instead of 174 at 224; but 169 instead of 176
    # at 136, where each head has its own keys. Lengths: 39 instead of 34 and 275 instead of 254 at 200 and 184.
    params = ForwardParams(persistent=True, query_buffers=2, share_buffer=True, heads_first=True)
    params = params if wide <= 160 else dataclasses.replace(params, kv_block=64)
    if call.segments and call.bias is None and call.attention_mask is None:
        return _preferred_wide_for_segments(call, params, packs=packs)
    if left is not None:
        return _preferred_wide_window(left, params, packs=packs)
    # One example with a length at head_dim 152: 194 us instead of 209.
    one = call.key_lengths and call.query[0] == 1 and wide <= 160
    if one or call.bias is not None or call.attention_mask is not None:
        return _preferred_wide_once(call, wide, packs=packs)
    if call.query[3] != call.value[3]:
        return _preferred_unequal(call, params, packs=packs)
    # 1,903 to 4,096 queries without a mask: 411 us instead of 426 at head_dim 248, 771 instead of 788 at 240. But 1,394
    # queries: 794 instead of 784; 3,383 queries at 256: 612 instead of 559; and 4,096 at 248 with aligned rows: 777
    # instead of 759.
    full = call.rules.right is None
    if 240 <= wide < 256 and full and not aligned and call.query[1] >= _MANY_QUERIES:
        return params.without_persistence()
    # Lengths: 265 us instead of 306 and 330 instead of 370 at 256, from 1 to 14 % in nine calls; but with 512 queries
    # 50 instead of 48. At 248, 178 instead of 171.
    if wide == 256 and call.key_lengths and call.query[1] >= 1024:
        return params.without_persistence()
    # Steps of 96 keys leave room for one buffer of queries. They gain with many queries: with 4,096, 598 us instead of
    # 611 at head_dim 176, and 670 instead of 678 at 208. With fewer, two buffers gain more: with 2,048, 206 instead of
    # 207 and 183 instead of 187; with 1,024, 189 instead of 200; with 512, 246 instead of 279. At other head dims: 793
    # instead of 674 at 184, 313 instead of 305 at 192, 414 instead of 375 at 200. With rows aligned they gain there,
    # too: 605 instead of 609 at 184, 657 instead of 677 at 200, and 589 instead of 610 at 168. Under a causal mask they
    # spill.
    gains = wide in (176, 208) or (aligned and wide in (168, 184, 200))
    many = gains and full and call.query[1] > _FEW_QUERIES_OF_WIDE_HEADS
    return dataclasses.replace(params, kv_block=96) if many else params


def _preferred_wide_for_segments(call: AttentionCall, params: ForwardParams, *, packs: bool) -> ForwardParams:
    """Return a launch that deals tiles by length where that gains."""
    # 154 us instead of 170 at D144, 133 instead of 144 at D136, 200 instead of 210 at D160, 125 instead of 139 at D192.
    # But 225 instead of 213 at D208, 144 instead of 135 at D224, and 224 instead of 212 at D256.
    wide = max(call.query[3], call.value[3])
    if wide > 192 or _has_few_tiles_each(call, params):
        return _preferred_wide_once(call, wide, packs=packs)
    return params if wide <= 160 else dataclasses.replace(params, kv_block=96, query_buffers=1)


def _preferred_wide_window(left: int, params: ForwardParams, *, packs: bool) -> ForwardParams:
    """Return good parameters for wide heads in a window."""
    few = dataclasses.replace(params, kv_block=64)
    # Instead of 64 rows of each of two heads, 128 rows of one: 49 us instead of 40 at head_dim 152 and a window of 256,
    # 132 instead of 116 at 208. With a window of 1,024: 160 us instead of 148 at 184, but 69 instead of 74 at 144.
    if packs and left < (_NARROW_WINDOW if params.kv_block > 64 else 2 * _NARROW_WINDOW):
        return dataclasses.replace(few, pack_heads=True)
    if left < _SHORT_WINDOW:  # 53 us instead of 59 at head_dim 256, 45 instead of 46 at 144
        return dataclasses.replace(few, warpgroups=1, ping_pong=False)
    if left >= _NARROW_WINDOW or params.kv_block == 64:
        return params
    return dataclasses.replace(few, stages=3)


def _preferred_unequal(call: AttentionCall, params: ForwardParams, *, packs: bool) -> ForwardParams:
    """Return good parameters for wide heads where queries are not as wide as values."""
    wide = max(call.query[3], call.value[3])
    if wide <= 160:
        return params
    if call.value[3] <= 64:  # queries take most of the memory: 96 keys leave room for two tiles
        return dataclasses.replace(params, kv_block=96, heads_first=False, pack_heads=packs)
    if not has_much_wider_values(call):
        return params
    # Beside much wider values, which share no buffer. Steps of 128 keys at D64/184: 425 us instead of 497 with 64,
    # causal 242 instead of 268; at D96/176 233 instead of 274. Where these do not fit, 96: 148 us instead of 170 with
    # 64 at D64/168, but causal 212 instead of 176 at D120/184.
    few = dataclasses.replace(params, kv_block=64 if call.rules.right is not None else 96)
    many = dataclasses.replace(params, kv_block=128, query_buffers=1, share_buffer=False)
    return many if params_fault(call, many) is None else few


def _preferred_wide_once(call: AttentionCall, wide: int, *, packs: bool) -> ForwardParams:
    """Return good parameters for wide heads without persistence."""
    if forward_plan(call, ForwardParams(share_buffer=True)).pieced:  # ping-pong gains 8 to 15 %
        # Beside much wider values, which share no buffer, 64 keys took 105 us instead of 118 with 96.
        many = 64 if has_much_wider_values(call) else 96
        return ForwardParams(kv_block=128 if wide <= 160 else many, share_buffer=True)
    if wide > 192:
        # At head_dim 256 the output fits only in the buffer of the queries, and ping-pong costs 2 %.
        packs = packs and call.query[1] < 2048
        few = 64 if call.rules.soft_cap is None else 80
        return ForwardParams(kv_block=few, share_buffer=True, ping_pong=False, pack_heads=packs)
    return ForwardParams(share_buffer=True, ping_pong=False)


def _preferred_in_window(left: int, *, packs: bool, shortest: int, warpgroups: int) -> ForwardParams:
    """Return a persistent launch: others took up to 1.3 times as long."""
    params = ForwardParams(persistent=True, query_buffers=2, share_buffer=True, heads_first=True)
    if not packs and warpgroups == 1:
        return dataclasses.replace(params, warpgroups=1, ping_pong=False, kv_block=64, stages=3)
    if not packs:
        # 128 rows then see three blocks of 64 keys or two of 128: 22 or 26 us at head_dim 128. With a window of 128:
        # 25.7 us instead of 27.8 at head_dim 128, but 47.9 instead of 46.4 at 112.
        return dataclasses.replace(params, kv_block=64, stages=3) if left <= shortest else params
    # 64 rows of two heads see fewer keys than 128 rows of one: at head_dim 64 a window of 128 took 80 us instead of
    # 97, and one of 256 took 77 us instead of 90.
    params = dataclasses.replace(params, pack_heads=True)
    return dataclasses.replace(params, kv_block=64, stages=3) if left < _NARROW_WINDOW else params


def _preferred_causal(call: AttentionCall, *, narrow: bool) -> ForwardParams:
    """Return a persistent launch; for narrow heads the one of three sizes of tiles that should take the least time."""
    params = ForwardParams(persistent=True, query_buffers=2, share_buffer=True, heads_first=True)
    if not narrow:
        # Up to 512 queries: 96 us instead of 99 at D128, 71 instead of 74 at D112; but 83 instead of 83 at D96, and
        # with shared keys 171 instead of 169.
        few = call.query[1] <= _FEW_QUERIES and call.query[3] > 96 and call.query[2] == call.key[2]
        return _with_output_buffer(call, dataclasses.replace(params, kv_block=64, stages=3) if few else params)
    large = dataclasses.replace(params, warpgroups=3)
    sizes = (params, dataclasses.replace(large, kv_block=64, stages=3), large)
    params = min(sizes, key=lambda params: duration(forward_plan(call, params)))
    # Of seven calls with 33 to 64 columns 2 to 10 % faster, e.g. 48.2 us instead of 52.5 for 256 queries at D64. But 60
    # instead of 58 at D32, and with tiles of 192 rows as fast.
    return params if call.query[3] <= 32 or params.warpgroups > 2 else _with_output_buffer(call, params)


def _with_output_buffer(call: AttentionCall, params: ForwardParams) -> ForwardParams:
    """Return the parameters; a short call gets a separate output buffer if shared memory has room for it.

    The queries of the next tile then need not wait until the output is stored.
    """
    alone = dataclasses.replace(params, share_buffer=False)
    short = max(call.query[1], call.key[1]) <= _SHORT_LOOPS
    return alone if short and params_fault(call, alone) is None else params


def _fallbacks(params: ForwardParams) -> Iterator[ForwardParams]:
    """Yield `params`, then parameters that need less and less memory and fewer registers."""
    yield params
    few = dataclasses.replace(params, warpgroups=min(params.warpgroups, 2), pack_heads=False, query_buffers=1)
    # Fewer keys per step before fewer stages: with one stage of 64 or 96 keys, forwards took 1.2 to 2.4 times as long
    # as with two of 32 or 48. Two stages of 16 keys were not measured.
    for sizes, stages in (((128, 96, 64, 48, 32), 2), ((128, 96, 64, 32), 1), ((16,), 2), ((16,), 1)):
        for size, share in itertools.product(sizes, (params.share_buffer, not params.share_buffer)):
            yield dataclasses.replace(few, kv_block=min(size, params.kv_block), stages=stages, share_buffer=share)
