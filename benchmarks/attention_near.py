# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention_near --draw SEED --cache DIR`: tune random cases of attention in minutes.

Each forward and backward is timed with the heuristic's configuration, the nearest points of its search space, and
cuDNN. All are compiled in parallel, which takes most of the time. `DIR` then has the fastest ones, for the contender
`tuned` of `python -m benchmarks.attention --draw SEED --cache DIR`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention import calls_of, compiled_in_parallel
from benchmarks.attention_cases import case_named, widely_drawn_names
from benchmarks.attention_choice import Direction, config_of, measured, title_of
from ejkernel.kernels.flash_attention.operation import flash_attention as operation
from ejkernel.ops import Invocation, PersistentCache

_LEAST_GAIN = 0.01  # of a winner over the heuristic
_FARTHEST = 0.02  # of a winner's results from the heuristic's, by their norms


def near(call: Any, count: int) -> list[Any]:
    """Return the heuristic's parameters of `mosaic_gpu`, and this many near them in the search space."""
    implementation = operation.implementations["mosaic_gpu"]
    return near_points(implementation.heuristic(call), implementation.space(call), count)


def near_points(first: Any, space: Any, count: int) -> list[Any]:
    """Return `first`, and this many points of a space near it."""
    others = space.neighbours(first) if hasattr(space, "neighbours") else [one for one in space if one != first]
    # Few changes, and different ones, first. For example, not all block sizes before the order of heads.
    seen: Counter[tuple[str, ...]] = Counter()
    distances = {}
    for params in others:
        changed = tuple(_changed(first, params))
        distances[params] = len(changed) + seen[changed]
        seen[changed] += 1
    return [first, *sorted(distances, key=distances.__getitem__)[:count]]


def _changed(first: Any, params: Any) -> Iterator[str]:
    """Yield the fields that differ, without those that are 0 because of another field, such as a form's block."""
    for field in dataclasses.fields(first):
        one, other = getattr(first, field.name), getattr(params, field.name)
        if one != other and (isinstance(one, bool) or (one and other)):
            yield field.name


def entries_of(name: str, count: int) -> Iterator[tuple[Direction, Invocation[Any, Any]]]:
    """Yield the contenders of both directions of a case, the heuristic's first, and their calls."""
    for inv in calls_of(case_named(name)):
        call: Any = inv.kernel.call_of(inv)  # type: ignore[union-attr]  # calls found in programs have one
        direction, able = "bwd" if call.backward else "fwd", inv.kernel.able(inv)  # type: ignore[union-attr]
        usual = operation.heuristic_cfg(inv).implementation
        for implementation in sorted(able, key=lambda one: one != usual):
            if implementation == "mosaic_gpu":
                for params in near(call, count):
                    yield Direction(name, direction, implementation, None, params), inv
            elif implementation in (usual, "cudnn"):
                yield Direction(name, direction, implementation, None), inv


def tune(names: Sequence[str], cache: PersistentCache, args: argparse.Namespace) -> None:
    """Measure the cases, and store the winners."""
    start = time.perf_counter()
    of_cases = {name: dict(entries_of(name, args.near)) for name in names}
    entries = [entry for each in of_cases.values() for entry in each]
    programs = compiled_in_parallel(sorted(entries, key=lambda entry: entry.direction), args.processes)
    print(f"compiled {len(entries)} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    for each in of_cases.values():
        for row in measured(list(each), programs, args.rounds):
            times = {
                entry: row["us"][title_of(entry)]
                for entry in each
                if entry.direction == row["direction"] and row["apart"].get(title_of(entry), 1) < _FARTHEST
            }
            if not times:
                print(json.dumps(row), flush=True)
                continue
            usual, best = next(iter(times)), min(times, key=times.__getitem__)
            gain = times[usual] / times[best] - 1
            print(json.dumps(row | {"best": title_of(best), "gain": round(gain, 3)}), flush=True)
            if gain > _LEAST_GAIN:
                config = config_of(case_named(best.case), best.contender, best.direction, best.params)
                cache.put(each[best].key, config)


def main(argv: Sequence[str] | None = None) -> int:
    """Tune the cases."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_near", description=__doc__)
    parser.add_argument("--draw", type=int, metavar="SEED", help="draw cases at random")
    parser.add_argument("--count", type=int, default=16, help="how many cases to draw (default: %(default)s)")
    parser.add_argument("--cases", nargs="*", default=[], metavar="CASE", help="further ones, by name")
    parser.add_argument("--near", type=int, default=8, metavar="N", help="parameters for each (default: %(default)s)")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="folder for the winners")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each contender (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: one a core)")
    args = parser.parse_args(argv)
    drawn = [] if args.draw is None else widely_drawn_names(args.draw, args.count)
    tune([*args.cases, *drawn], PersistentCache(args.cache, shipped=False), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
