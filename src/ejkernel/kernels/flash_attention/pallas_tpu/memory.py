# SPDX-License-Identifier: Apache-2.0
"""The vector memory of a kernel: a lower bound, and an upper estimate.

The compiler allocates two buffers of each window, the scratch arrays, and the registers that it spills. All but the
last follow from the shapes; a line, such as the log-sum-exp of a block, has no padding. If all tiles of a block are one
basic block, scratch arrays may become registers.

Spilled registers hold intermediate values of one basic block of consecutive operations on whole tiles: the
float32 scores of a tile are alive until their maximum, or the product of cotangent and value, is known, and the results
of products until they are added to the sums. Segment ids put a branch around each tile. Otherwise the unrolled
chunks are one basic block, and the strips at the edges another. How many values are alive depends on the compiler's
schedule, so the estimate is a weighted sum of the sizes of these values. `benchmarks.memory_tpu_fit` finds the weights
of each kind of kernel: those with the smallest estimates that are below no compiled kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from ejkernel.kernels._vector_memory import LANES, Need, Parts, like, up
from ejkernel.kernels.flash_attention.common import Rules

from .spilled import WEIGHTS
from .walk import Plan, Scores, Sight, scores_at_once

_LINE = 2 * 4  # bytes of a 32-bit value of a line, in two buffers


class Dims(NamedTuple):
    """A call's heads: dimensions, query heads of one key head, bytes of an element, the chip, if known, and key heads.

    Those are of all examples. Windows of a single head do not move, and have one buffer.
    """

    head: int
    value: int
    repeats: int
    size: int
    chip: str = ""
    heads: int = 2

    def buffers(self, sight: Sight, plan: Plan, *, of_queries: bool) -> int:
        """Return the buffers of a window along the axis that the loop walks over."""
        moves = self.heads * self.repeats > 1 if of_queries else self.heads > 1 or not sight.everything
        return 2 if moves or plan.parts > 1 else 1


def of_forward(
    dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, segmented: bool, sum_by_product: bool = False
) -> Parts:
    """Return the memory of the forward kernel."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    buffers = dims.buffers(*walked, of_queries=False)
    windows = dims.size * (2 * plan.block + buffers * plan.part) * (head + value) + _LINE * plan.block
    sums = up(dims.value + 1) if sum_by_product else value
    scratch = dims.size * plan.block * head + 4 * plan.block * (LANES + sums + (0 if sum_by_product else LANES))
    name = "forward by product" if sum_by_product and dims.size == 2 else "forward"
    return _parts(name, (windows, scratch), dims, walked, rules, segmented)


def of_queries(dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, segmented: bool) -> Parts:
    """Return the memory of the kernel for the query's gradient."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    windows = dims.size * dims.buffers(*walked, of_queries=False) * plan.part * (head + value)
    windows += 2 * dims.size * plan.block * (2 * head + value) + 2 * _LINE * plan.block
    scratch = dims.size * plan.block * head + 4 * plan.block * (2 * LANES + head)
    return _parts("queries", (windows, scratch), dims, walked, rules, segmented)


def of_keys(
    dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, fused: bool, segmented: bool, transpose: bool = False
) -> Parts:
    """Return the memory of the kernel for the gradients of key and value."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    buffers = dims.buffers(*walked, of_queries=True)
    windows = 4 * dims.size * plan.block * (head + value)
    windows += buffers * plan.part * (dims.size * (head * (2 if fused else 1) + value) + _LINE)
    kept = plan.block * plan.blocks if fused and dims.repeats > 1 else plan.block
    scratch = dims.size * plan.block * head + 4 * kept * (head + value)
    if fused:
        scratch += 4 * plan.part * (up(dims.head, 8) if transpose else head)
    found = _parts("fused" if fused else "keys", (windows, scratch), dims, walked, rules, segmented)
    if not (transpose and fused and found.form):
        return found
    return found._replace(form=f"{found.form}, transposed", loop=found.loop and f"{found.loop}, transposed")


def need_of(parts: Parts) -> Need:
    """Return the lower bound and the upper estimate."""
    return parts.need(WEIGHTS)


def _parts(
    name: str,
    arrays: tuple[int, int],
    dims: Dims,
    walked: tuple[Sight, Plan],
    rules: Rules,
    segmented: bool,
) -> Parts:
    (windows, scratch), (sight, plan) = arrays, walked
    windows += _LINE * (plan.block + plan.part) if segmented else 0
    scores = scores_at_once(sight, plan, branches=segmented)
    sizes = _sizes(dims, plan, scores, capped=rules.soft_cap is not None, segmented=segmented)
    sizes |= {"scratch": scratch // 4, "scratch of one head": scratch // 4 if dims.repeats == 1 else 0}
    is_straight = plan.blocks == 1 or (sight.everything and plan.columns <= plan.unroll * plan.chunk)
    kind = _kind(name, dims, walked, scores, segmented)
    known = windows + (scratch if scores.tile else 0)
    least = windows if is_straight else windows + scratch
    forms = _forms(name, dims, walked, rules, scores, segmented) if dims.chip else ("", "")
    return Parts(least, known, kind, sizes, *forms)


def _forms(
    name: str, dims: Dims, walked: tuple[Sight, Plan], rules: Rules, scores: Scores, segmented: bool
) -> tuple[str, str]:
    """Return the facts that decide the intermediate values outside of the loops, and in the loops.

    A loop computes tiles without a mask, unless a window has two edges or no strips. So the mask is a fact of the
    strips, and the size of a chunk one of the loops.
    """
    sight, plan = walked
    edges = (sight.before is not None) + (sight.after is not None)
    chunks, value = plan.columns // plan.chunk, dims.value + (name == "forward by product")  # a column of ones
    unroll = 1 if segmented else plan.unroll if edges else min(plan.unroll, chunks)
    has_loop = scores.tile > 0 and (edges > 0 or plan.parts > 1 or chunks > unroll)
    is_partial = any(dim % LANES and (dim > LANES or dims.size == 4 or not has_loop) for dim in (dims.head, dims.value))
    words = [like(dims.chip) if has_loop else dims.chip, name, f"{-(-dims.head // LANES)}/{-(-value // LANES)}"]
    words += ["partial" if is_partial else "", f"block {plan.block}", "float32" if dims.size == 4 else ""]
    words += ["capped" if rules.soft_cap is not None else "", "ids" if segmented else ""]
    tile = f"tile {plan.rows}/{plan.chunk}, unroll {unroll}"
    # the compiler overlaps unrolled chunks differently on a v5p
    chip = dims.chip if name == "forward" and unroll > 1 else words[0]
    loop = [chip, *words[1:], "loop", tile, f"edges {edges}" if edges == 2 or (edges and not scores.edges) else ""]
    if scores.edges:
        words += [f"strip {plan.strip}", f"sees {sight.before}/{sight.after}", f"offset {sight.offset % plan.chunk}"]
        words += [f"tile {plan.rows * plan.chunk}" if edges == 2 else "", "streamed" if plan.parts > 1 else ""]
    words += [] if has_loop else ["no loop", tile if scores.tile else ""]
    if plan.blocks == 1:
        words += ["one block", "grouped" if dims.repeats > 1 and name == "fused" else ""]
    return ", ".join(filter(None, words)), ", ".join(filter(None, loop)) if has_loop else ""


def _kind(name: str, dims: Dims, walked: tuple[Sight, Plan], scores: Scores, segmented: bool) -> str:
    """Return the kind of a kernel: its name, and the form of its basic blocks."""
    if dims.size == 4:
        return f"{name if name in ('forward', 'fused') else 'split'}, float32"
    if not scores.tile:
        return f"{name}, strips"
    if name in ("keys", "queries"):
        return name
    if segmented:
        return f"{name}, ids"
    sight, plan = walked
    edges = (sight.before is not None) + (sight.after is not None)
    if edges == 2 and plan.blocks == 1:
        return "one block, two edges"
    return f"{name}, {('no edge', 'one edge', 'two edges')[edges]}"


def _sizes(dims: Dims, plan: Plan, scores: Scores, *, capped: bool, segmented: bool) -> dict[str, int]:
    """Return the numbers of values of a kernel's basic blocks: scores, and results of products."""
    head, value = up(dims.head), up(dims.value)
    values, heads, chunk = plan.block * value, plan.block * head, plan.chunk * head
    found = {"tile": scores.tile, "chunk": scores.chunk, "ahead": scores.ahead, "edges": scores.edges}
    found["chunk or edges"] = max(scores.chunk, scores.edges)
    found |= {f"{name}, capped": size if capped else 0 for name, size in found.items()}
    found |= {"strip": scores.strip, "rows": plan.block * LANES, "values": values, "heads": heads, "chunk heads": chunk}
    # products of several matrix units' widths are added up in parts
    found |= {"wide values": values if value > LANES else 0, "wide heads": heads if head > LANES else 0}
    found["wide chunk heads"] = chunk if head > LANES else 0
    found["partial values"] = values if _is_partial(dims.value) else 0
    found["partial heads"] = heads if _is_partial(dims.head) else 0
    branched = {"tile, ids": scores.tile, "edges, ids": scores.edges, "values, ids": values}
    return found | {name: size if segmented else 0 for name, size in branched.items()}


def _is_partial(dim: int) -> bool:
    """Return whether a product has several registers per row, the last of them partly used."""
    return dim > LANES and dim % LANES != 0
