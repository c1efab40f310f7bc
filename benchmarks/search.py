# SPDX-License-Identifier: Apache-2.0
"""Replay recorded search spaces, and score the search strategies on them.

    python benchmarks/search.py --spaces recorded_spaces

A recorded space is a gzip-compressed JSON file with every configuration of a kernel and its time on one device. A
strategy asks for configurations and sees the same as on the device: the time, or a failure.

Score of a space, after Willemsen et al., "A methodology for comparing optimization algorithms for auto-tuning", 2024:
with F(k) the mean over seeds of the best time after k evaluations (B(1) before the first that did not fail) and B(k)
the expected best of k draws without replacement from the valid configurations, the mean over k = 1 ... K of
(F(k) - B(k)) / (optimum - B(k)). K is the number of random draws that is expected to come within 5 % of (median -
optimum) of the optimum, at most 200. Random search scores 0; the optimum at once scores 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import gzip
import json
import math
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ejkernel.ops.autotuner.search.strategies import ModelSearch, Random, Record, SearchOptions, Strategy
from ejkernel.ops.config.spaces.space import ConfigSpace

MOST = 200  # evaluations of the longest search
WARM = 100  # evaluations of a search that starts from records
AFTER = (10, 25, 50, 100, 200)
NEAR = 1.05  # times the optimum: counts as found
HALVES = (("convolution", "gemm"), ("dedispersion", "pnpoly"))
GRID = (
    SearchOptions(),
    SearchOptions(scattered=8),
    SearchOptions(additive=(0.0,)),
    SearchOptions(additive=(0.5,)),
    SearchOptions(aligned_from=5),
    SearchOptions(aligned_from=10**6),
)


@dataclasses.dataclass(frozen=True)
class Space:
    """A recorded space: its configurations, and their times in `unit`s of the file; NaN for a failure."""

    name: str
    configurations: tuple[dict[str, Any], ...]
    times: np.ndarray

    @classmethod
    def load(cls, path: Path) -> Space:
        """Read a file of `recorded_spaces`."""
        with gzip.open(path, "rt", encoding="utf-8") as file:
            data = json.load(file)
        rows = data["rows"]
        times = np.array([math.nan if row[1] is None else row[1] for row in rows])
        return cls(
            path.name.removesuffix(".json.gz"), tuple(dict(zip(data["axes"], r[0], strict=True)) for r in rows), times
        )

    @property
    def kernel(self) -> str:
        """The kernel, without the device."""
        return self.name.split("__")[0]

    @property
    def valid(self) -> np.ndarray:
        """The times of valid configurations, ascending."""
        return np.sort(self.times[~np.isnan(self.times)])

    @property
    def optimum(self) -> float:
        """The least time."""
        return float(self.valid[0])

    @property
    def budget(self) -> int:
        """The number K of evaluations over which the score is taken."""
        valid = self.valid
        near = int((valid <= self.optimum + 0.05 * (np.median(valid) - self.optimum)).sum())
        return min(MOST, math.ceil((len(valid) - near) / (near + 1)))

    def random_best(self, most: int) -> np.ndarray:
        """Return B(1) ... B(most)."""
        valid, means = self.valid, []
        count = len(valid)
        slower = np.arange(count, 0, -1.0)  # how many are not faster than the i-th
        at_least = np.ones(count)  # probability that the best of k draws is not faster than the i-th
        for k in range(most):
            at_least = at_least * np.maximum(slower - k, 0.0) / (count - k)
            means.append(float((-np.diff(at_least, append=0.0) * valid).sum()))
        return np.array(means)


def failing(space: Space) -> Space:
    """Return the space with its most tempting part made to fail: a made-up restriction on recorded times.

    Configurations with certain values on two axes fail. They are at most a tenth of the space, and include as many of
    the fastest twentieth as possible: often the fastest tiles are next to tiles that no longer fit.
    """
    names = list(space.configurations[0])
    fast = space.times <= np.nanquantile(space.times, 0.05)
    columns = {name: np.array([repr(config[name]) for config in space.configurations]) for name in names}
    tempting, most = np.zeros(len(space.times), bool), 0
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            for a in np.unique(columns[one]):
                for b in np.unique(columns[other]):
                    chosen = (columns[one] == a) & (columns[other] == b)
                    if chosen.mean() <= 0.1 and (chosen & fast).sum() > most:
                        tempting, most = chosen, int((chosen & fast).sum())
    return Space(f"{space.name}, failing", space.configurations, np.where(tempting, math.nan, space.times))


@dataclasses.dataclass(frozen=True)
class Run:
    """One search: the best time after each evaluation (NaN before the first success), its evaluations, its time."""

    curve: np.ndarray
    asked: tuple[int, ...]
    own_seconds: float


def replay(space: Space, strategy_of: Callable[[ConfigSpace[Any]], Strategy], evaluations: int) -> Run:
    """Run a strategy on a recorded space; its own processor time counts, building the space's listing does not."""
    declared = ConfigSpace.listed(space.configurations)
    row_of = {tuple(config.values()): row for row, config in enumerate(space.configurations)}
    declared.points()
    start = time.process_time()
    strategy = strategy_of(declared)
    asked: list[int] = []
    while len(asked) < evaluations:
        configs = strategy.ask(1)
        if not configs:
            break
        row = row_of[tuple(configs[0].values())]
        asked.append(row)
        measured = float(space.times[row])
        strategy.tell(configs[0], None if math.isnan(measured) else measured)
    own = time.process_time() - start
    curve = np.fmin.accumulate(space.times[asked])
    curve = np.concatenate([curve, np.full(evaluations - len(curve), curve[-1])])
    return Run(curve, tuple(asked), own)


def score(space: Space, runs: Sequence[Run]) -> float:
    """Return the score of a space."""
    most = space.budget
    random = space.random_best(most)
    curves = np.stack([run.curve[:most] for run in runs])
    mean = np.where(np.isnan(curves), random[0], curves).mean(axis=0)
    return float(np.mean((mean - random) / (space.optimum - random)))


def summary(space: Space, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of a space."""
    random = space.random_best(1)[0]
    curves = np.stack([np.where(np.isnan(run.curve), random, run.curve) for run in runs]) / space.optimum
    after = [k for k in AFTER if k <= curves.shape[1]]
    enough = curves.shape[1] >= space.budget
    return {
        "score": score(space, runs) if enough else None,
        "ratio": {str(k): float(np.exp(np.log(curves[:, k - 1]).mean())) for k in after},
        "found": {str(k): float((curves[:, k - 1] <= NEAR).mean()) for k in after},
        "failed": {str(k): failed_share(space, runs, k) for k in after},
        "own_ms": 1e3 * sum(run.own_seconds for run in runs) / sum(len(run.asked) for run in runs),
    }


def failed_share(space: Space, runs: Sequence[Run], most: int) -> float:
    """Return which share of the first evaluations failed."""
    return float(np.mean([np.isnan(space.times[list(run.asked[:most])]).mean() for run in runs]))


def record_of(space: Space, asked: Iterable[int]) -> Record:
    """Return the record of these evaluations."""
    times = [(row, float(space.times[row])) for row in asked]
    return Record(space.name, tuple((space.configurations[r], None if math.isnan(t) else t) for r, t in times))


_spaces: dict[str, Space] = {}
Task = tuple[str, str, int, SearchOptions, tuple[tuple[str, tuple[int, ...]], ...]]


def run_task(task: Task) -> Run:
    """Run one search; `kind` is random, cold or warm, and `known` holds the records for a warm one."""
    kind, name, seed, options, known = task
    space = _spaces[name]
    if kind == "random":
        return replay(space, lambda declared: Random(declared, seed=seed), MOST)
    records = [record_of(_spaces[other], asked) for other, asked in known]
    evaluations = WARM if kind == "warm" else max(space.budget, 100)
    return replay(
        space, lambda declared: ModelSearch(declared, records=records, seed=seed, options=options), evaluations
    )


def others(space: Space) -> list[Space]:
    return [other for other in _spaces.values() if other.kernel == space.kernel and other.name != space.name]


class Bench:
    """Runs searches, and collects the figures of each space."""

    def __init__(self, seeds: int, pool: Any) -> None:
        self.seeds, self._map = seeds, (map if pool is None else pool.imap)

    def collect(
        self, label: str, tasks_of: Callable[[Space, int], Task | None]
    ) -> tuple[dict[str, Any], dict[str, list[Run]]]:
        """Run the tasks of every space and seed; print and return the figures, and the runs."""
        tasks = [task for s in _spaces.values() for seed in range(self.seeds) if (task := tasks_of(s, seed))]
        runs: dict[str, list[Run]] = {}
        for task, run in zip(tasks, self._map(run_task, tasks), strict=True):
            runs.setdefault(task[1], []).append(run)
        figures = {name: summary(_spaces[name], found) for name, found in runs.items()}
        table = {"spaces": figures, "all": overall(figures.values())}
        print("\n".join(render(label, table)), flush=True)
        return table, runs


def overall(figures: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over spaces: of the scores and shares arithmetic, of the ratios geometric."""
    rows = list(figures)
    common = [k for k in map(str, AFTER) if all(k in row["ratio"] for row in rows)]
    scores = [row["score"] for row in rows]
    return {
        "score": None if None in scores else float(np.mean(scores)),
        "ratio": {k: float(np.exp(np.mean([math.log(row["ratio"][k]) for row in rows]))) for k in common},
        "worst": {k: max(row["ratio"][k] for row in rows) for k in common},
        "found": {k: float(np.mean([row["found"][k] for row in rows])) for k in common},
        "own_ms": float(np.mean([row["own_ms"] for row in rows])),
    }


def render(label: str, table: dict[str, Any]) -> list[str]:
    """Return a table as Markdown."""
    after = [str(k) for k in AFTER if str(k) in table["all"]["ratio"]]
    lines = [f"### {label}", ""]
    head = [f"best / optimum after {k}" for k in after] + [f"found after {k}" for k in after]
    lines += ["| space | score | " + " | ".join(head) + " | own ms |", "|---" * (len(head) + 3) + "|"]
    for name, row in [*table["spaces"].items(), ("**all**", table["all"])]:
        cells = ["–" if row["score"] is None else f"{row['score']:.3f}"]
        cells += [f"{row['ratio'][k]:.3f}" for k in after] + [f"{100 * row['found'][k]:.0f} %" for k in after]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {row['own_ms']:.1f} |")
    worst = ", ".join(f"{value:.3f} after {k}" for k, value in table["all"]["worst"].items())
    return [*lines, "", f"Worst space: {worst}.", ""]


def _cold(options: SearchOptions, space: Space, seed: int) -> Task:
    return ("cold", space.name, seed, options, ())


def chosen_on_one_half(bench: Bench) -> dict[str, Any]:
    """Choose the options on the kernels of one half, and report the other half; then the other way round."""
    tables = []
    for options in GRID:
        table, _ = bench.collect(f"cold, {options}", functools.partial(_cold, options))
        tables.append(table["spaces"])
    result = {}
    for half, held_out in (HALVES, HALVES[::-1]):
        means = [overall(f for n, f in table.items() if n.startswith(half))["score"] for table in tables]
        best = int(np.argmax(means))
        figures = overall(f for name, f in tables[best].items() if name.startswith(held_out))
        result[" + ".join(held_out)] = {
            "chosen_on": " + ".join(half),
            "options": dataclasses.asdict(GRID[best]),
            "scores_there": means,
            "held_out": figures,
        }
    return {"grid": [dataclasses.asdict(options) for options in GRID], "halves": result}


def measure(bench: Bench, *, choose: bool) -> dict[str, Any]:
    """Run everything."""
    options = SearchOptions()
    random, _ = bench.collect("random", lambda s, seed: ("random", s.name, seed, options, ()))
    cold, runs = bench.collect("cold", functools.partial(_cold, options))

    def warm(s: Space, seed: int) -> Task | None:
        known = tuple((other.name, tuple(range(len(other.times)))) for other in others(s))
        return ("warm", s.name, seed, options, known) if known else None

    def partly(s: Space, seed: int) -> Task | None:
        known = tuple((other.name, runs[other.name][seed].asked[:WARM]) for other in others(s))
        return ("warm", s.name, seed, options, known) if known else None

    tables = {"random": random, "cold": cold}
    if any(map(others, _spaces.values())):
        tables["warm"], _ = bench.collect("warm: the other devices' whole spaces", warm)
        tables["partly"], _ = bench.collect(f"warm: {WARM} measurements of each other device", partly)
    return {"tables": tables, "split": chosen_on_one_half(bench) if choose else None}


def measure_failing(bench: Bench) -> dict[str, Any]:
    """Run cold searches, and say how many of their evaluations failed, beside the share of the space that does."""
    cold, _ = bench.collect("cold", lambda s, seed: ("cold", s.name, seed, SearchOptions(), ()))
    for name, row in cold["spaces"].items():
        row["failing"] = float(np.isnan(_spaces[name].times).mean())
        print(f"{name}: {row['failing']:.1%} fails, of the first 100 evaluations {row['failed']['100']:.1%}")
    print(f"mean: {np.mean([row['failed']['100'] for row in cold['spaces'].values()]):.1%}")
    return {"tables": {"cold": cold}, "split": None}


def document(results: dict[str, Any]) -> str:
    """Return the results as a page."""
    labels = {
        "cold": "Cold",
        "warm": "Warm: the whole recorded spaces of the kernel's other devices are known",
        "partly": f"Warm: {WARM} measurements of each other device are known, made by the cold search",
        "random": "Random, as a check of the score",
    }
    lines = ["# Search, replayed on recorded spaces", ""]
    lines += [
        f"{results['date']}, {results['seeds']} seeds; " + ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    ]
    lines += [
        "",
        f"`python benchmarks/search.py --spaces DIR {results['option']}`; the file says how the score is defined. "
        "'Found': at most",
    ]
    lines += [f"{NEAR} times the optimum. 'Own ms': the strategy's processor time an evaluation, on one core.", ""]
    for key in results["tables"]:
        lines += render(labels[key], results["tables"][key])
    for name, row in results["tables"]["cold"]["spaces"].items():
        if "failing" in row:
            lines.append(
                f"- {name}: {row['failing']:.1%} fails, of the first 100 evaluations {row['failed']['100']:.1%}"
            )
    lines.append("")
    if results["split"]:
        lines += ["### Options chosen on some kernels, reported on the others (cold)", ""]
        lines += ["| chosen on | options | reported on | score | found after 100 |", "|---|---|---|---|---|"]
        for held_out, row in results["split"]["halves"].items():
            text = ", ".join(f"{k}={v}" for k, v in row["options"].items())
            figures = row["held_out"]
            lines.append(
                f"| {row['chosen_on']} | {text} | {held_out} | {figures['score']:.3f} "
                f"| {100 * figures['found']['100']:.0f} % |"
            )
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", type=Path, default=Path("recorded_spaces"), help="folder of *.json.gz files")
    parser.add_argument("--seeds", type=int, default=20, help="searches of each space")
    parser.add_argument("--only", default="", help="use the spaces with this in their name")
    parser.add_argument("--failing", action="store_true", help="cold searches of spaces with failures; nothing else")
    parser.add_argument("--choose", action="store_true", help="also try other options, and report them held out")
    parser.add_argument("--jobs", type=int, default=1, help="processes; set OMP_NUM_THREADS=1")
    parser.add_argument("--output", type=Path, help="folder for search.json and search.md")
    args = parser.parse_args(argv)
    paths = sorted(path for path in args.spaces.glob("*.json.gz") if args.only in path.name)
    if not paths:
        parser.error(f"--spaces: no *.json.gz file with {args.only!r} in {args.spaces}")
    loaded = list(map(Space.load, paths))
    if args.failing:
        loaded = [s for s in loaded if np.isnan(s.times).any()] + list(map(failing, loaded))
    _spaces.update((space.name, space) for space in loaded)
    # Forked, so that the spaces are shared; nothing here starts threads.
    with multiprocessing.get_context("fork").Pool(args.jobs) if args.jobs > 1 else _Here() as pool:
        bench = Bench(args.seeds, pool)
        measured = measure_failing(bench) if args.failing else measure(bench, choose=args.choose)
    versions = {"numpy": np.__version__, "python": platform.python_version()}
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    option = "--failing" if args.failing else "--choose"
    device = f"recorded ones, replayed; own time on {platform.machine()}"
    results = {"date": date, "device": device, "seeds": args.seeds, "option": option, "versions": versions, **measured}
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        name = "search_failing" if args.failing else "search"
        (args.output / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (args.output / f"{name}.md").write_text(document(results), encoding="utf-8")
    return 0


class _Here:
    """Replaces the pool if there is only one process."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
