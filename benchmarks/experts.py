# SPDX-License-Identifier: Apache-2.0
"""Grouped products of published mixtures of experts, for `benchmarks/shipped.py`, and a table of their measurements.

python -m benchmarks.experts CACHE   # a table of the searches in a cache, as Markdown
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.grouped_matmul.jax_mgpu import JaxMgpuParams
from ejkernel.kernels.grouped_matmul.operation import (
    GroupedMatmulConfig,
    GroupedMatmulWgradConfig,
    grouped_matmul,
    grouped_matmul_wgrad,
)
from ejkernel.ops import Invocation, PersistentCache
from ejkernel.ops.autotuner.store.log import StoredSearch
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.errors import ConfigError

OPERATIONS = ("grouped_matmul", "grouped_matmul_wgrad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A layer's experts.

    Attributes:
        width: Width of the model.
        hidden: Hidden units of one expert.
        count: Number of experts.
        chosen: Experts per token.
    """

    width: int
    hidden: int
    count: int
    chosen: int


MODELS = {
    "Mixtral 8x7B": Experts(width=4096, hidden=14336, count=8, chosen=2),
    "Qwen-3 30B-A3B": Experts(width=2048, hidden=768, count=128, chosen=8),
    "DeepSeek-V3": Experts(width=7168, hidden=2048, count=256, chosen=8),
    "Llama-4 Scout": Experts(width=5120, hidden=8192, count=16, chosen=1),
    "Qwen-3 235B-A22B": Experts(width=4096, hidden=1536, count=128, chosen=8),
    "Llama-4 Maverick": Experts(width=5120, hidden=8192, count=128, chosen=1),
}
TRAINING, DECODING = 8192, (64, 256)  # tokens of a batch

# The most valuable first: the device may be gone before the list ends.
USES: dict[str, tuple[Experts, int, bool]] = {
    **{f"{name}, training, {TRAINING} tokens": (experts, TRAINING, True) for name, experts in MODELS.items()},
    **{
        f"{name}, decoding {tokens} tokens": (experts, tokens, False)
        for tokens, (name, experts) in itertools.product(DECODING, MODELS.items())
    },
}


def calls_of(experts: Experts, tokens: int, training: bool) -> list[Invocation[Any, Any]]:
    """Return the two products of a layer, into the experts and out of them, with their gradients if it is trained."""
    rows = tokens * experts.chosen
    wide, narrow = (jax.ShapeDtypeStruct((rows, size), jnp.bfloat16) for size in (experts.width, experts.hidden))
    sizes = jax.ShapeDtypeStruct((experts.count,), jnp.int32)
    found = []
    for lhs, out in ((wide, narrow), (narrow, wide)):
        matrices = jax.ShapeDtypeStruct((experts.count, lhs.shape[1], out.shape[1]), jnp.bfloat16)
        found.append(_call(grouped_matmul, lhs, matrices, sizes))
        if training:
            found.append(_call(grouped_matmul, out, matrices, sizes, transpose_rhs=True))
            found.append(_call(grouped_matmul_wgrad, lhs, out, sizes))
    return found


def _call(kernel: Any, *args: Any, **options: Any) -> Invocation[Any, Any]:
    prepared, kwargs = kernel.prepare(*args, **options)
    return Invocation(kernel=kernel, args=prepared, kwargs=kwargs)


def candidates(inv: Invocation[Any, Any]) -> list[Any]:
    """Return candidates for a call: variants of the heuristic's parameters for our kernel, and JAX's kernel."""
    kernel: Any = inv.kernel
    call, own = kernel.call_of(inv), kernel.implementations["mosaic_gpu"]
    decoding = call.rows < 128 * call.groups
    config = GroupedMatmulWgradConfig if inv.op_id == OPERATIONS[1] else GroupedMatmulConfig
    changes = _wgrad_changes() if config is GroupedMatmulWgradConfig else _product_changes(decoding)
    found = [config(implementation="mosaic_gpu", fwd=params) for params in running(own, call, changes)]
    if "jax_mgpu" in kernel.able(inv):
        others = kernel.implementations["jax_mgpu"].space(call) if decoding else [JaxMgpuParams()]
        found += [GroupedMatmulConfig(implementation="jax_mgpu", fwd=params) for params in others]
    return list(dict.fromkeys(found))


_TILES = (
    {"block_n": 256, "stages": 4, "out_slots": 2},
    {"block_n": 192, "stages": 4, "out_slots": 3},
    {"block_n": 128, "stages": 6, "out_slots": 2},
    {"block_n": 64, "stages": 8, "out_slots": 1},
)


def _product_changes(decoding: bool) -> Iterator[dict[str, Any]]:
    yield {}
    yield from ({"panel": panel} for panel in ((4, 32) if decoding else (4, 8, 32)))
    yield from _TILES
    yield {"block_m": 256, "block_n": 128, "stages": 4, "out_slots": 2}
    if not decoding:
        yield {"block_m": 256, "block_n": 128, "stages": 4, "out_slots": 1, "panel": 8}


def _wgrad_changes() -> Iterator[dict[str, Any]]:
    yield {}
    yield from ({"largest_first": first, "snake": snake} for first, snake in itertools.product((False, True), repeat=2))
    yield from ({"panel": panel} for panel in (4, 8, 32))
    yield from _TILES[1:3]
    yield {"block_k": 256, "block_n": 128, "stages": 4, "out_slots": 2}


def running(implementation: Any, call: Any, changes: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Yield the heuristic's parameters with each of the changes that the implementation runs."""
    first = implementation.heuristic(call)
    for change in changes:
        try:
            params = dataclasses.replace(first, **change)
        except ConfigError:
            continue
        if implementation.params_fault(call, params) is None:
            yield params


DIRECTIONS = ("in", "in, rows' gradient", "in, weights'", "out", "out, rows' gradient", "out, weights'")


def table(cache: Path) -> str:
    """Return a table with a row for each use: microseconds on balanced, skewed and partly empty groups, and means."""
    searches = {
        search.key.call: search for search in MeasurementStore(PersistentCache(cache, shipped=False)).searches()
    }
    lines = [
        "| | | ours, us: balanced / zipf / some empty | tuned, mean | JAX's kernel, mean | its time / tuned |",
        "|---|---|---|---|---|---|",
    ]
    for name, use in USES.items():
        named = DIRECTIONS if use[2] else (DIRECTIONS[0], DIRECTIONS[3])
        for direction, inv in zip(named, calls_of(*use), strict=True):
            found = searches.get(inv.call_key)
            if found is not None:
                lines.append(f"| {name} | {direction} | {' | '.join(_cells(found))} |")
    return "\n".join(lines) + "\n"


def _cells(search: StoredSearch) -> tuple[str, ...]:
    ours, theirs = (_best(search, name) for name in ("mosaic_gpu", "jax_mgpu"))
    mean = search.winner.seconds or 0.0
    own = " / ".join(f"{(case.median or 0) * 1e6:,.0f}" for case in ours.cases) if ours is not None else ""
    other = None if theirs is None else theirs.seconds
    return own, f"{mean * 1e6:,.0f}", *((f"{other * 1e6:,.0f}", f"{other / mean:.2f}") if other else ("-", "-"))


def _best(search: StoredSearch, implementation: str) -> Outcome | None:
    found = [o for o in search.outcomes if o.seconds and o.config["implementation"] == implementation]
    return min(found, key=lambda outcome: outcome.seconds or 0.0, default=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cache", type=Path)
    print(table(parser.parse_args(argv).cache), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
