# SPDX-License-Identifier: Apache-2.0
"""Puts one fault at a time into the code, and counts the faults that the tests notice.

First record which test runs which line, then check a sample of faults:

    python -m pip install -e '.[mutation]'
    COVERAGE_CORE=ctrace python -m pytest --cov --cov-context=test --cov-report=
    python scripts/mutation_check.py --faults 60 --seed 0 --output faults.json

A fault changes one place of `ejkernel.ops.config`, `.core` or `.autotuner`: a comparison, a number, a condition, a
loop. Only lines that a test runs are drawn. For each fault the tests that run its line are run until one
fails, those that run the fewest lines first. A fault counts as noticed if a test fails, if it ends the process of the
tests, or if the tests do not end in time. The tests that noticed faults then run without any: one that fails all the
same makes the check fail. `benchmarks/results/mutation.json` has the last figures.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins
import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(f"src/ejkernel/ops/{name}" for name in ("config", "core", "autotuner"))
# `X | Y` is mostly an annotation here, and the variables need names to be given.
LEFT_OUT = ("BitOr", "Variable", "RemoveDecorator")
# The tests copy, read or lint the sources themselves, so they would fail for reasons of style.
NOT_ASKED = ("tests/test_structure.py", "tests/typing")


@dataclass(frozen=True)
class Fault:
    """One change: the operator's n-th place in a file, and the line that it is on."""

    file: str
    line: int
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a fault; `noticed_by` is the test that failed, "time" if they did not end, or "exit"."""

    fault: Fault
    code: str
    noticed_by: str | None
    tests: int


def faults_of(file: Path) -> Iterator[Fault]:
    """Yield each change that can be made to a file."""
    nodes = list(cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast(file.read_text())))
    for name in cosmic_ray.plugins.operator_names():
        if any(part in name for part in LEFT_OUT):
            continue
        operator = cosmic_ray.plugins.get_operator(name)()
        positions = (p for node in nodes for p in operator.mutation_positions(node))
        for occurrence, ((line, _), _) in enumerate(positions):
            yield Fault(str(file.relative_to(ROOT)), line, name, occurrence)


def tests_by_line(data: coverage.CoverageData, file: str) -> dict[int, set[str]]:
    """Return the tests that run each line of a file."""
    found = data.contexts_by_lineno(str(ROOT / file))
    return {
        line: {test for test in (name.rpartition("|")[0] for name in names) if test and not test.startswith(NOT_ASKED)}
        for line, names in found.items()
    }


def drawn(data: coverage.CoverageData, count: int, seed: int) -> list[tuple[Fault, set[str]]]:
    """Return `count` faults with their tests: first a line is drawn, then one of its faults."""
    on_line: dict[tuple[str, int], list[Fault]] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for fault in faults_of(file):
                on_line.setdefault((fault.file, fault.line), []).append(fault)
    tests = {file: tests_by_line(data, file) for file, _ in on_line}
    lines = sorted((file, line) for file, line in on_line if tests[file].get(line))
    chance = random.Random(seed)
    chance.shuffle(lines)
    chosen = []
    while lines and len(chosen) < count:
        file, line = lines.pop()
        real = [fault for fault in on_line[file, line] if is_fault(fault)]
        if real:
            chosen.append((chance.choice(real), tests[file][line]))
    return chosen


def is_fault(fault: Fault) -> bool:
    """Return whether the changed file is a Python program that differs in more than its annotations."""
    before = (ROOT / fault.file).read_text()
    try:
        return without_annotations(changed(before, fault)) != without_annotations(before)
    except SyntaxError:  # the `*` of a signature, taken for a product
        return False


def without_annotations(code: str) -> str:
    """Return a program's syntax tree as text."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if hasattr(node, "annotation"):
            node.annotation = None
        if hasattr(node, "returns"):
            node.returns = None
    return ast.dump(tree)


def changed(code: str, fault: Fault) -> str:
    """Return the code with a fault in it."""
    operator = cosmic_ray.plugins.get_operator(fault.operator)()
    after = cosmic_ray.mutating.mutate_code(code, operator, fault.occurrence)
    if after is None:
        raise RuntimeError(f"{fault} changes nothing: the sources changed since the tests were recorded")
    return str(after)


def check(fault: Fault, tests: Sequence[str], copy: Path, seconds: float) -> Outcome:
    """Return what the tests make of a fault in `copy`, a copy of this folder."""
    place = copy / fault.file
    before = place.read_text()
    after = changed(before, fault)
    code = after.splitlines()[fault.line - 1].strip()
    place.write_text(after)
    try:
        return Outcome(fault, code, noticed_by(tests, copy, seconds), len(tests))
    finally:
        place.write_text(before)


def noticed_by(tests: Sequence[str], copy: Path, seconds: float) -> str | None:
    """Return the test that fails, or None if all pass; "time" if they take too long, "exit" if their process ends."""
    command = [sys.executable, "-m", "pytest", "-xq", "-n0", "-p", "no:cacheprovider", "--no-header", "-rfE", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "time"
    if run.returncode == 0:
        return None
    for line in run.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.partition(" ")[2].partition(" - ")[0]
    if run.returncode > pytest.ExitCode.NO_TESTS_COLLECTED:
        return "exit"
    raise RuntimeError(f"pytest ended with status {run.returncode} and no failed test: {run.stdout[-500:]}{run.stderr}")


def copied(place: Path) -> Path:
    """Copy this folder to `place`, without hidden and compiled files, and return `place`."""
    return Path(shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "__pycache__")))


def checked(
    faults: Sequence[tuple[Fault, Sequence[str]]], processes: int, seconds: float
) -> tuple[list[Outcome], str | None]:
    """Return an outcome for each fault, and a test that noticed a fault but also fails without one, if any."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def outcome_of(fault: Fault, tests: Sequence[str]) -> Outcome:
        copy = copies.get()
        try:
            outcome = check(fault, tests, copy, seconds)
        finally:
            copies.put(copy)
        print(f"{outcome.noticed_by or 'NOT NOTICED'}: {fault.file}:{fault.line}: {outcome.code}", flush=True)
        return outcome

    with tempfile.TemporaryDirectory() as folder:
        for number in range(processes):
            copies.put(copied(Path(folder) / str(number)))
        with ThreadPoolExecutor(processes) as pool:
            outcomes = list(pool.map(outcome_of, *zip(*faults, strict=True)))
        tests = {outcome.noticed_by for outcome in outcomes} - {None, "time", "exit"}
        return outcomes, noticed_by(sorted(map(str, tests)), copies.get(), seconds) if tests else None


def summary(seed: int, outcomes: Sequence[Outcome], wrong: str | None) -> dict[str, object]:
    """Return the contents of the JSON file; `wrong` is a test that fails without a fault."""
    noticed = sum(outcome.noticed_by is not None for outcome in outcomes)
    found = {"seed": seed, "faults": len(outcomes), "noticed": noticed, "fails_without_a_fault": wrong}
    return {**found, "outcomes": [asdict(outcome) for outcome in outcomes]}


def main() -> None:
    options = argparse.ArgumentParser(description="Count the faults that the tests notice.")
    options.add_argument("--faults", type=int, default=60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--tests", type=int, default=150, help="run at most so many tests for a fault")
    options.add_argument("--seconds", type=float, default=600, help="time for the tests of one fault")
    options.add_argument("--processes", type=int, default=1, help="check so many faults at once")
    options.add_argument("--output", type=Path, help="write the outcomes there as JSON")
    given = options.parse_args()

    data = coverage.CoverageData(str(ROOT / ".coverage"))
    data.read()
    chosen = drawn(data, given.faults, given.seed)
    if not chosen:
        sys.exit("no test runs a line that could be changed: record first which test runs which line, as above")
    # How much a test runs: the more it does, the longer it takes and the less it looks at one line.
    size = Counter(
        test for file in data.measured_files() for tests in tests_by_line(data, file).values() for test in tests
    )
    faults = [(fault, sorted(tests, key=lambda test: (size[test], test))[: given.tests]) for fault, tests in chosen]
    outcomes, wrong = checked(faults, given.processes, given.seconds)
    print(f"{sum(outcome.noticed_by is not None for outcome in outcomes)} of {len(outcomes)} faults noticed")
    if given.output:
        given.output.write_text(json.dumps(summary(given.seed, outcomes, wrong), indent=1) + "\n")
    if wrong:
        sys.exit(f"{wrong} fails without a fault too, or takes too long")


if __name__ == "__main__":
    main()
