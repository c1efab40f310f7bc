# SPDX-License-Identifier: Apache-2.0
"""The command line of benchmarks that compile random calls for TPUs, in a process replaced when it ends."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import attention_tpu, tpu_windows
from benchmarks.apart import AnsweringProcess
from ejkernel.ops.autotuner.compile.targets import Target

Case = dict[str, Any]
TARGETS = {chip: Target.named(f"tpu_{chip}") for chip in ("v4", "v5e", "v6e", "v5p")} | {"tpu7x": Target.named("tpu7x")}


def ratios(one: Case, *, with_kept: bool = False) -> list[float]:
    """Return the estimate over the compiler's figure for each kernel of a result.

    Args:
        one: The result.
        with_kept: Whether to add the windows that XLA saves to the figure.
    """
    used = one.get("used", ())
    kept = one.get("kept", [0] * len(used)) if with_kept else [0] * len(used)
    return [most / (size + more) for most, size, more in zip(one["estimated"], used, kept, strict=False)]


def ratio_table(classes: Mapping[str, Iterable[float]]) -> list[str]:
    """Return the distribution of an estimate over the compiler's figure, by class of kernels, as lines of Markdown."""
    heads = ("kernels", "compiled", "below 1", "least", "1 to 1.1", "1 to 1.2", "median", "largest")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, ratios in classes.items():
        if found := sorted(ratios):
            within = (f"{sum(1 <= ratio <= most for ratio in found) / len(found):.0%}" for most in (1.1, 1.2))
            least, median = f"{found[0]:.3f}", f"{statistics.median(found):.3f}"
            cells = [name, len(found), sum(ratio < 1 for ratio in found), least, *within, median, f"{found[-1]:.2f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _facts_of_none(results: list[Case]) -> Case:
    return {}


@dataclass(frozen=True, kw_only=True)
class Draws:
    """A benchmark of random calls.

    Attributes:
        module: The name of its module in this package.
        about: The help of its command line.
        what: A description of the results, for their file.
        drawn: Returns the call of a seed and an index.
        compiled: Compiles a call and returns the facts to record; an error is recorded, too.
        facts: Returns further entries of the file.
        title: The heading of the Markdown file.
        table: Returns the results as Markdown.
        chips: The chips that `--chips` takes, if the rest of a call does not depend on the chip.
        seconds: The time limit of a call.
        dumps: Whether libtpu writes its programs, for `tpu_windows.spilled_of`.
    """

    module: str
    about: str
    what: str
    drawn: Callable[[int, int], Case]
    compiled: Callable[[Case], Case]
    facts: Callable[[list[Case]], Case] = _facts_of_none
    title: str
    table: Callable[[list[Case]], str]
    chips: tuple[str, ...] = ()
    seconds: float
    dumps: bool = False

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Compile, write the results after each call, and at the end a Markdown file beside them; or print it."""
        parser = argparse.ArgumentParser(description=self.about)
        parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("--calls", type=int, default=20, help="how many calls to draw")
        parser.add_argument("--seed", type=int, default=25)
        parser.add_argument("--out", type=Path, help="a JSON file to which results are added")
        parser.add_argument("--again", type=Path, help="compile the calls of this file in place of drawn ones")
        if self.chips:
            parser.add_argument("--chips", nargs="*", choices=self.chips, help="in place of the chips drawn")
        given = parser.parse_args(arguments)
        if given.compile:
            self._compile()
            return
        results = json.loads(given.out.read_text())["results"] if given.out and given.out.exists() else []
        again = json.loads(given.again.read_text())["results"] if given.again else None
        folder = tempfile.TemporaryDirectory()
        dump = {"LIBTPU_INIT_ARGS": f"{tpu_windows.DUMP}{folder.name}"} if self.dumps else {}
        environment = attention_tpu.ENVIRONMENT | dump
        compiler = AnsweringProcess(self.module, "--compile", environment, self.seconds, "the compiler")
        try:
            for index in range(len(results), given.calls if again is None else len(again)):
                case = self.drawn(given.seed, index) if again is None else again[index]
                if self.chips and given.chips:
                    case["chip"] = given.chips[index % len(given.chips)]
                results.append(case | compiler(case))
                print(json.dumps(results[-1]), flush=True)
                if given.out:
                    self._write(given.out, results, given.seed)
        finally:
            compiler.end()
            folder.cleanup()
        if given.out:
            data = json.loads(given.out.read_text())
            about = f"{data['what']}; seed {data['seed']}. {json.dumps(data['versions'])}"
            given.out.with_suffix(".md").write_text(f"# {self.title}\n\n{about}\n\n{self.table(results)}\n")
        else:
            print(self.table(results))

    def _compile(self) -> None:
        """Read calls from standard input, one JSON object a line, and write the results to standard output."""
        for line in sys.stdin:
            try:
                answer = self.compiled(json.loads(line))
            except Exception as error:  # noqa: BLE001 - any error of the compiler is the answer
                answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
            print(json.dumps(answer), flush=True)

    def _write(self, out: Path, results: list[Case], seed: int) -> None:
        versions = attention_tpu.versions() | {"device": "compiled"}
        data = {"what": self.what, "versions": versions, "seed": seed, **self.facts(results)}
        lines = ",\n".join(f"    {json.dumps(one)}" for one in results)
        out.write_text(f'{json.dumps(data, indent=2)[:-2]},\n  "results": [\n{lines}\n  ]\n}}\n')
