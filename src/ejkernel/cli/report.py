# SPDX-License-Identifier: Apache-2.0
"""What the command prints: tables for people, JSON for programs."""

from __future__ import annotations

import collections
import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import click

from ejkernel.ops.autotuner.compile.bundles import BundledCall
from ejkernel.ops.autotuner.measure.roofline import roofline
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, in_cases, program_name, ranked, remarks
from ejkernel.ops.autotuner.trials.progress import SearchProgress, SearchState
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.utils.formatting import arguments, compact, counted, duration, text_table
from ejkernel.ops.utils.printable import printable, printable_json, printable_lines
from ejkernel.ops.utils.storage.serialize import to_data


def width() -> int | None:
    """Return how wide a table may be: as the terminal is, or, where the output goes elsewhere, as wide as it is."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *optional: str) -> str:
    """Return rows under a header, so that they fit; columns named in `optional` may be left out, in this order."""
    return text_table(header, rows, width=width(), optional=optional)


def wrapped(text: str) -> str:
    """Return a line as lines that fit the terminal, with no word cut."""
    columns = width()
    if columns is None:
        return text
    return textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)


def echo_json(data: Any) -> None:
    """Print data as JSON."""
    click.echo(printable_json(json.dumps(data, indent=2, sort_keys=True)))


def found(target: str, calls: Sequence[Invocation[Any, Any]], device: str) -> str:
    """Say how many calls a program has."""
    forward = sum(inv.direction == "fwd" for inv in calls)
    calls_found = counted(len(calls), "distinct call")
    return f"{target}: {calls_found}, {forward} forward and {len(calls) - forward} derived, on {device}"


def calls_as_text(calls: Sequence[Invocation[Any, Any]], tuned: Sequence[str]) -> str:
    """List calls with their keys, and how far they are tuned: `complete`, `partial (1 of 12)`, `no` and so on."""
    if not calls:
        return "Nothing to tune."
    rows = [(inv.op_id_v, arguments(inv.description), inv.call_key, how) for inv, how in zip(calls, tuned, strict=True)]
    return table(("operation", "arguments", "key", "tuned"), rows)


def calls_as_data(
    calls: Sequence[Invocation[Any, Any]], tuned: Sequence[str], progress: Sequence[SearchProgress | None]
) -> list[dict[str, Any]]:
    """List calls with all that is known of them."""
    return [
        {"key": inv.call_key, "tuned": how, "search": None if far is None else far.data(), **inv.description}
        for inv, how, far in zip(calls, tuned, progress, strict=True)
    ]


def searches(result: AutotuningResult, *, verbose: bool = False) -> str:
    """Return the searches of a result as a table of before and after."""
    if not result.searches:
        return "Nothing to tune."
    rows = [
        (
            tuned.inv.op_id,
            arguments(tuned.inv.description),
            duration(tuned.before),
            duration(tuned.after),
            tuned.in_a_word,
            compact(tuned.config),
            tuned.progress.in_words,
            _fates(tuned),
        )
        for tuned in result.searches
    ]
    header = ("operation", "arguments", "before", "after", "speed-up", "configuration", "search", "candidates")
    text = table(header, rows, "candidates", "arguments")
    return "\n\n".join([text, *map(candidates, result.searches)]) if verbose else text


def bundle(calls: Sequence[BundledCall]) -> str:
    """Return how the candidates of a bundle fared, and why some did not."""
    rows, lines = [], []
    for call in calls:
        operation = printable(call.description["op"])
        fates = collections.Counter(candidate.outcome.status for candidate in call.candidates)
        rows.append((operation, ", ".join(f"{count} {status}" for status, count in fates.most_common())))
        reasons = collections.Counter(c.outcome.reason for c in call.candidates if c.outcome.reason)
        lines += [f"{operation}: {count} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join([table(("operation", "candidates"), rows), *lines])


def candidates(tuned: AutotuneData) -> str:
    """Return the fate of every candidate of a search, the fastest first: `*` is the winner, `h` the heuristic."""
    rows = []
    # A row for a program and not for a candidate: configurations that make one program have one time.
    for program in ranked(tuned.outcomes):
        outcome = program[0]
        measured, seconds = outcome.measurement, outcome.compile_seconds
        rows.append(
            (
                "*" if outcome is tuned.winner else "h" if outcome is tuned.heuristic else "",
                program_name(program),
                outcome.status,
                duration(outcome.seconds) + f" ({in_cases(outcome)})" * bool(outcome.cases),
                "-" if measured is None else f"{measured.spread:.0%}",
                "-" if seconds is None else f"{seconds:.2f} s",
                " ".join(outcome.reason.split()),
            )
        )
    time = "mean (of each)" if tuned.cases else "median"
    header = ("", "configuration", "status", time, "spread", "compiled in", "reason")
    title = printable(f"{tuned.inv.op_id_v}:{tuned.inv.call_key}  {arguments(tuned.inv.description)}")
    is_complete = tuned.progress.state == SearchState.COMPLETE
    kept = (
        [f"{'the heuristic stays' if is_complete else tuned.progress.not_finished}: {tuned.why}"] if tuned.why else []
    )
    told = map(printable_lines, (*kept, *remarks(tuned)))
    return "\n".join([title + _achieved(tuned), *told, table(header, rows, "compiled in", "spread")])


def _achieved(tuned: AutotuneData) -> str:
    """Return what the winner achieved, as a line, if its kernel says what a call costs."""
    cost, measured = tuned.inv.node.spec.kernel.cost(tuned.inv), tuned.winner.measurement
    if cost is None or measured is None or tuned.after is None:
        return ""
    if tuned.calls:  # whose times the call's own are only a part of
        measured = dataclasses.replace(measured, samples=(tuned.after,))
    reached = roofline(measured, cost)
    return f"\n{reached.tflops:.3g} TFLOP/s, {reached.gbytes:.3g} GB/s"


def _fates(tuned: AutotuneData) -> str:
    counts = [outcome.status for outcome in tuned.outcomes]
    others = [f"{counts.count(status)} {status}" for status in dict.fromkeys(counts) if status != Status.MEASURED]
    return ", ".join([str(len(counts)), *others])


def result_as_data(result: AutotuningResult) -> dict[str, Any]:
    """Return a result with what was measured."""
    entries = [
        {
            "op": tuned.inv.op_id_v,
            "key": tuned.inv.call_key,
            "config": to_data(tuned.config),
            "search": tuned.progress.data(),
            "not_saved": tuned.not_saved,
            "measured": tuned.summary_data(),
        }
        for tuned in result.searches
    ]
    return {"device": result.device, "entries": entries}
