# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention_drawn FILE...`: compact tables of runs of `benchmarks.attention --draw --out`.

A summary has a line for each direction, with the share of lost cases; then each case has a line with both directions.
Several files of one draw are joined; later files replace cases of earlier ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DIRECTIONS = {"forward": "forward", "forward and backward": "both"}
NAMES = {"jax.nn cudnn": "cuDNN", "tokamax": "Tokamax", "jax.nn xla": "XLA"}
LOST = 0.98  # ratios below it count as lost

Cases = Mapping[str, Mapping[str, Any]]


def joined(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the cases of all files, by direction."""
    found: dict[str, dict[str, Any]] = {direction: {} for direction in DIRECTIONS}
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        for direction, cases in found.items():
            cases |= run.get(direction, {})
    return found


def _words(name: str) -> str:
    """Return the words of a case, without the number in its draw."""
    number, _, words = name.partition(" ")
    return words if words and number[0].isdigit() else name


def summary(found: Mapping[str, Cases]) -> Iterator[str]:
    """Yield a Markdown table with the geometric mean and the worst of the untuned ratios."""
    yield f"| | cases | geometric mean | worst | below {LOST} |"
    yield "|---|---|---|---|---|"
    for direction, cases in found.items():
        ratios = [case["ratios"]["untuned"] for case in cases.values() if "untuned" in case["ratios"]]
        if ratios:
            mean, lost = np.exp(np.mean(np.log(ratios))), sum(ratio < LOST for ratio in ratios)
            yield f"| {direction} | {len(ratios)} | {mean:.2f} | {min(ratios):.2f} | {lost} |"


def table(found: Mapping[str, Cases]) -> Iterator[str]:
    """Yield a Markdown table with a line for each case."""
    heads = (f"{short}: ejkernel | best other | ratio" for short in DIRECTIONS.values())
    yield f"| case | {' | '.join(heads)} |"
    yield "|---" * (1 + 3 * len(DIRECTIONS)) + "|"
    for name in dict.fromkeys(name for cases in found.values() for name in cases):
        cells = [cell for cases in found.values() for cell in _cells(cases.get(name))]
        yield f"| {_words(name)} | {' | '.join(cells)} |"


def _cells(case: Mapping[str, Any] | None) -> tuple[str, str, str]:
    times = {} if case is None else case["us"]
    others = {name: time for name, time in times.items() if name in NAMES}
    ours = _microseconds(times["untuned"]) if "untuned" in times else ""
    if not others:
        return ours, "-", ""
    best = min(others, key=others.__getitem__)
    ratio = f"{others[best] / times['untuned']:.2f}" if ours else ""
    return ours, f"{_microseconds(others[best])} ({NAMES[best]})", ratio


def _microseconds(time: float) -> str:
    return f"{time:,.0f}" if time >= 100 else f"{time:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_drawn", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    found = joined(parser.parse_args(argv).files)
    print("\n".join([*summary(found), "", *table(found)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
