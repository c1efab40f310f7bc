# SPDX-License-Identifier: Apache-2.0
"""Replay raw samples of recorded search spaces, and score the ways to pick the fastest of 100 candidates.

    python benchmarks/noise.py --spaces recorded_spaces --output benchmarks/results

A recorded space is a gzip-compressed JSON file with every configuration of a kernel and its samples on one device, in
the order of measurement. Only spaces with 32 samples per configuration are used.

For one pick, 100 configurations are drawn. A way of measuring sees some of their samples in recorded order; the
held-out samples define the reference. Regret is the held-out median of the pick, divided by the least of the 100, less
one. Samples are held out in two ways:

    mixed: 16 random samples after the first are seen, different for each pick, so past and future are alike.
    past:  the 15 samples after the first are seen, the 16 that follow are the reference. A clock that steps in
           between, or warms up, cannot be foreseen; the figure shows how little it harms.

Every way sees the very first sample of each configuration and ignores it, but pays for it. The recorded samples of
different configurations were not interleaved, so the replay does not show the effect of interleaving.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gzip
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ejkernel.ops.autotuner.measure.paired import compare
from ejkernel.ops.autotuner.measure.sampling import Sampling, SamplingPlan

SAMPLES = 32
CANDIDATES = 100
SPLITS = ("mixed", "past")
BASE = "median of 10"
OURS = "sampling"
HALVES = ("convolution", "dedispersion")
GRID = (
    SamplingPlan(),
    SamplingPlan(median_share=1.0),
    SamplingPlan(median_share=0.0),
    SamplingPlan(median_share=0.0, trim=0.25),
    SamplingPlan(trim=0.06),
    SamplingPlan(keep=((3, 16),)),
    SamplingPlan(keep=((3, 24), (6, 8))),
    SamplingPlan(hopeless=((3, 1.05),)),
)

Way = Callable[[np.ndarray], tuple[int, int]]  # seconds [candidates, samples], the first never counts -> pick, spent


@dataclasses.dataclass(frozen=True)
class Space:
    """The samples of a recorded space, `[configurations, samples]`."""

    name: str
    samples: np.ndarray

    @classmethod
    def load(cls, path: Path) -> Space | None:
        """Read a file of `recorded_spaces`; `None` if its configurations have fewer samples than are needed."""
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = json.load(file)["rows"]
        found = [row[2][:SAMPLES] for row in rows if row[1] is not None and len(row[2]) >= SAMPLES]
        return cls(path.name.removesuffix(".json.gz"), np.array(found)) if found else None


def fixed(rounds: int, center: Callable[..., np.ndarray]) -> Way:
    """Return the way that gives each candidate so many samples."""

    def pick(seen: np.ndarray) -> tuple[int, int]:
        return int(center(seen[:, 1 : rounds + 1], axis=1).argmin()), len(seen) * (rounds + 1)

    return pick


def two_stages(seen: np.ndarray) -> tuple[int, int]:
    """Pick by the median of 15 samples among the eight configurations with the best medians of 5."""
    finalists = np.argsort(np.median(seen[:, 1:6], axis=1), kind="stable")[:8]
    best = np.median(seen[finalists, 1:16], axis=1).argmin()
    return int(finalists[best]), len(seen) * 6 + len(finalists) * 10


def raced(plan: SamplingPlan) -> Way:
    """Return the way of a sampling."""

    def pick(seen: np.ndarray) -> tuple[int, int]:
        sampling, spent = Sampling(len(seen), plan=plan), 0
        rows = seen.tolist()
        taken = [0] * len(rows)
        while indices := sampling.next_round():
            for index in indices:
                sampling.note(index, rows[index][taken[index]])
                taken[index] += 1
            spent += len(indices)
        return sampling.ranking()[0], spent

    return pick


WAYS: dict[str, Way] = {
    "mean of 3": fixed(3, np.mean),
    "median of 5": fixed(5, np.median),
    BASE: fixed(10, np.median),
    "two stages": two_stages,
    OURS: raced(SamplingPlan()),
}


def picks(space: Space, split: str, ways: dict[str, Way], repeats: int) -> dict[str, np.ndarray]:
    """Return `[repeats, 2]` for each way: regret, and samples spent. All ways are given the same picks to make."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for repeat in range(repeats):
        rng = np.random.default_rng([repeat, *space.name.encode()])
        drawn = space.samples[rng.choice(len(space.samples), CANDIDATES, replace=False)]
        seen = np.zeros(SAMPLES, bool)
        seen[0] = True
        seen[1 + rng.choice(SAMPLES - 1, 16, replace=False) if split == "mixed" else slice(0, 16)] = True
        reference = np.median(drawn[:, ~seen], axis=1)
        for name, way in ways.items():
            pick, spent = way(drawn[:, seen])
            found[name].append((float(reference[pick] / reference.min() - 1), spent))
    return {name: np.array(rows) for name, rows in found.items()}


def figures(rows: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Return the figures of a way on a space; regrets in per cent, and their paired difference to `base`'s."""
    regret, spent = 100 * rows[:, 0], rows[:, 1]
    difference = regret - 100 * base[:, 0]
    root = len(rows) ** 0.5
    return {
        "mean": float(regret.mean()),
        "mean_error": float(regret.std(ddof=1) / root),
        "p95": float(np.quantile(regret, 0.95)),
        "difference": float(difference.mean()),
        "difference_error": float(difference.std(ddof=1) / root),
        "samples": float(spent.mean()),
        "most_samples": float(spent.max()),
        "share": float((spent / base[:, 1]).max()),
    }


def measure(spaces: Sequence[Space], ways: dict[str, Way], repeats: int) -> dict[str, Any]:
    """Return the figures of every split, space and way."""
    tables: dict[str, Any] = {}
    for split in SPLITS:
        for space in spaces:
            rows = picks(space, split, ways, repeats)
            table = {name: figures(found, rows[BASE]) for name, found in rows.items()}
            tables.setdefault(split, {})[space.name] = table
            print(f"{split} {space.name}: " + ", ".join(f"{n} {row['mean']:.3f}" for n, row in table.items()))
    return tables


def chosen_on_one_kernel(spaces: Sequence[Space], repeats: int) -> dict[str, Any]:
    """Choose the plan by the mixed regret on one kernel's spaces, and report the other's; then the other way round."""
    ways = {BASE: WAYS[BASE]} | {str(index): raced(plan) for index, plan in enumerate(GRID)}
    tables = measure(spaces, ways, repeats)
    result = {}
    for there, held_out in (HALVES, HALVES[::-1]):
        rows = [table for name, table in tables["mixed"].items() if name.startswith(there)]
        means = [float(np.mean([row[str(index)]["mean"] for row in rows])) for index in range(len(GRID))]
        best = int(np.argmin(means))
        result[held_out] = {
            "chosen_on": there,
            "plan": dataclasses.asdict(GRID[best]),
            "means_there": means,
            "held_out": {
                split: {name: table[str(best)] for name, table in tables[split].items() if name.startswith(held_out)}
                for split in SPLITS
            },
        }
    return {"grid": [dataclasses.asdict(plan) for plan in GRID], "halves": result}


def false_wins(space: Space) -> dict[str, float]:
    """Return how often a configuration beats itself: every other sample against those in between.

    `compared` is the sign test with its tie of 2 %; `most_rounds` the rule "2 % in the median, and ahead in three of
    four rounds"; `median` the medians alone.
    """
    ours, most, median = 0, 0, 0
    for row in space.samples[:, 1:31]:
        mine, theirs = row[0::2], row[1::2]
        faster = bool(np.median(mine) < 0.98 * np.median(theirs))
        ours += compare(mine.tolist(), theirs.tolist()).wins
        most += faster and bool((mine < theirs).sum() >= 0.75 * len(mine))
        median += bool(np.median(mine) < np.median(theirs))
    count = len(space.samples)
    return {"compared": ours / count, "most_rounds": most / count, "median": median / count}


def worse_spaces(tables: dict[str, Any]) -> list[str]:
    """Return where the plan's regret exceeds the base's by two standard errors, or it spends more than 60 %."""
    return [
        f"{split} {name}"
        for split, spaces in tables.items()
        for name, table in spaces.items()
        if table[OURS]["difference"] > 2 * table[OURS]["difference_error"] or table[OURS]["share"] > 0.6
    ]


def rendered(table: dict[str, dict[str, float]]) -> list[str]:
    """Return the rows of one space as Markdown."""
    return [
        f"| {name} | {row['mean']:.3f} ± {row['mean_error']:.3f} | {row['p95']:.2f} "
        f"| {row['difference']:+.3f} ± {row['difference_error']:.3f} | {row['samples']:.0f} "
        f"| {row['most_samples']:.0f} |"
        for name, row in table.items()
    ]


def document(results: dict[str, Any]) -> str:
    """Return the results as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    head = [
        "| way | regret, mean % | p95 % | difference to the median of ten | samples, mean | at most |",
        "|---" * 6 + "|",
    ]
    lines = [
        "# Picking the fastest of 100, replayed on recorded samples",
        "",
        f"{results['date']}, {results['repeats']} picks a space; {versions}; devices: those in the spaces' names.",
        "",
        "`python benchmarks/noise.py --spaces DIR`; its docstring explains held-out samples. ±: one standard error;",
        "the difference is paired, pick by pick. Samples include the first of each candidate, which never counts. The",
        "defaults of early stopping were chosen on these spaces; the last section chooses on one kernel and tests on",
        "the other.",
        "",
    ]
    titles = {"mixed": "Held out: samples in between", "past": "Held out: samples that come after"}
    for split in SPLITS:
        lines += [f"## {titles[split]}", ""]
        for name, table in results["tables"][split].items():
            lines += [f"### {name}", "", *head, *rendered(table), ""]
    lines += ["## A configuration against itself: how often it wins", ""]
    lines += ["| space | sign test and 2 % | 3 of 4 rounds and 2 % | median alone |", "|---|---|---|---|"]
    for name, row in results["false_wins"].items():
        lines.append(f"| {name} | " + " | ".join(f"{100 * share:.2f} %" for share in row.values()) + " |")
    lines += ["", "## Plans chosen on one kernel, reported on the other", ""]
    lines += [f"{len(GRID)} plans; chosen by the mean regret between samples.", ""]
    for held_out, half in results["split"]["halves"].items():
        plan = ", ".join(f"{name}={value}" for name, value in half["plan"].items())
        lines += [f"### Chosen on {half['chosen_on']}, reported on {held_out}", "", f"`{plan}`", "", *head]
        lines += rendered({f"{s}, {n}": row for s, table in half["held_out"].items() for n, row in table.items()})
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and keep the figures; 0 if the sampling is nowhere worse than the median of ten, 1 if it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", type=Path, default=Path("recorded_spaces"), help="folder of *.json.gz files")
    parser.add_argument("--repeats", type=int, default=1000, help="picks in each space")
    parser.add_argument("--output", type=Path, help="folder for noise.json and noise.md")
    args = parser.parse_args(argv)
    loaded = [Space.load(path) for path in sorted(args.spaces.glob("*.json.gz"))]
    spaces = [space for space in loaded if space is not None]
    if not spaces:
        parser.error(f"--spaces: no *.json.gz file with {SAMPLES} samples a configuration in {args.spaces}")
    tables = measure(spaces, WAYS, args.repeats)
    results = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "repeats": args.repeats,
        "versions": {"numpy": np.__version__, "python": platform.python_version()},
        "worse": worse_spaces(tables),
        "tables": tables,
        "false_wins": {space.name: false_wins(space) for space in spaces},
        "split": chosen_on_one_kernel(spaces, args.repeats),
    }
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "noise.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (args.output / "noise.md").write_text(document(results), encoding="utf-8")
    print(f"worse than the {BASE}, or more than 60 % of its samples: {results['worse'] or 'nowhere'}", file=sys.stderr)
    return 1 if results["worse"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
