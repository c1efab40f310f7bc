# SPDX-License-Identifier: Apache-2.0
"""Try to break the library's promises: `python -m benchmarks.torture [PART...]`.

Parts with a fixed number of cases end after the last. The others run for `--seconds`, or for `--inputs` inputs of each
kind. The same `--seed` repeats everything except the moments of kills and thread switches. Each violation is printed
with the command that repeats it, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import report
from benchmarks.torture import bombs, candidates, commands, fuzzing, searches, surroundings, threads, upkeep
from benchmarks.torture.part import KINDS, Budget, Finding, Part, Tally

PARTS: Final[dict[str, Part]] = {
    "crashes": surroundings.crashes,
    "upkeep": upkeep.upkeep,
    "disks": surroundings.disks,
    "places": surroundings.places,
    "clocks": surroundings.clocks,
    "damage": fuzzing.damage,
    "bombs": bombs.bombs,
    "mutation": fuzzing.mutation,
    "guided": fuzzing.guided,
    "commands": commands.commands,
    "threads": threads.threads,
    "candidates": candidates.candidates,
    "searches": searches.searches,
}
NUMBERED: Final = {"places", "clocks", "damage", "bombs", "mutation", "commands"}  # can repeat a single input
SHORT: Final = {  # about a minute for all parts together
    "crashes": 100,
    "upkeep": 30,
    "disks": 20,
    "places": 8,
    "clocks": 10,
    "damage": 120,
    "bombs": 200,
    "mutation": 200,
    "guided": 0,
    "commands": 60,
    "threads": 300,
    "candidates": 1,
    "searches": 4,
}


def run(name: str, budget: Budget) -> Tally:
    """Run a part."""
    tally, began = Tally(name), time.monotonic()
    PARTS[name](budget, tally)
    tally.seconds = time.monotonic() - began
    return tally


def repeats(part: str, finding: Finding, seed: int) -> str:
    """Return the command that repeats a finding."""
    whole = f"python -m benchmarks.torture {part} --seed {seed}"
    if part not in NUMBERED:
        return whole
    return f"{whole} --only {shlex.quote(finding.where)} --first {finding.number} --inputs 1"


def shown(tally: Tally, seed: int) -> str:
    """Return a part's counts and findings as text."""
    counts = ", ".join(f"{count:,} {what}" for what, count in sorted(tally.counts.items()))
    lines = [f"{tally.part}: {len(tally.findings)} found in {tally.seconds:.0f} s; {counts or 'nothing was tried'}"]
    lines += [f"  left out: {why}" for why in tally.left_out]
    for found in tally.findings:
        lines += [f"  {found.kind.upper()} {found.where} {found.number}: {found.what}"]
        lines += [f"    {repeats(tally.part, found, seed)}"]
    return "\n".join(lines)


def keep(file: Path, tallies: Sequence[Tally], seed: int) -> None:
    """Add runs to a file of figures."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": []}
    found["runs"] += [{"part": t.part, "seed": seed, **t.data(), "environment": report.environment()} for t in tallies]
    found["totals"] = totals(found["runs"])
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def totals(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return of each part the sums of its runs."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        total = found.setdefault(run["part"], {"counts": {}, "seconds": 0.0, **dict.fromkeys(KINDS, 0)})
        for kind, count in run["counts"].items():
            total["counts"][kind] = total["counts"].get(kind, 0) + count
        total["seconds"] = round(total["seconds"] + run["seconds"], 1)
        for kind in KINDS:
            total[kind] += run[kind]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts; 0 if nothing was found, 1 if something was."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--short", action="store_true", help="a little of everything, in a minute")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each part that could go on for ever")
    parser.add_argument("--inputs", type=int, help="so many of each kind, rather than for so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", action="append", default=[], metavar="KIND", help="only this kind of input")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the figures to this file")
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}.")
    tallies = []
    for name in args.parts or PARTS:
        inputs = SHORT[name] if args.short else args.inputs
        tempfile.tempdir = None  # a part may have set it
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            os.environ["EJKERNEL_CACHE_DIR"] = str(Path(folder) / "home")
            budget = Budget(
                seconds=args.seconds,
                inputs=inputs,
                seed=args.seed,
                first=args.first,
                only=tuple(args.only),
                folder=Path(folder),
            )
            tallies.append(run(name, budget))
        print(shown(tallies[-1], args.seed), flush=True)
        if args.out is not None:
            keep(args.out, tallies[-1:], args.seed)
    return int(any(tally.findings for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
