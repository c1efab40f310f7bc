# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: tables for people, JSON for programs."""

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
from ejkernel.ops.utils.error_text import printable, printable_json, printable_lines
from ejkernel.ops.utils.formatting import arguments, compact, counted, duration, text_table
from ejkernel.ops.utils.storage.serialize import to_data


def width() -> int | None:
    """Return the maximum width of a table: that of the terminal, or `None` if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *optional: str) -> str:
    """Return a table that fits the terminal; drop the columns in `optional`, in this order, if it is too wide."""
    return text_table(header, rows, width=width(), optional=optional)


def wrapped(text: str) -> str:
    """Return a text wrapped to the terminal, without splitting words."""
    columns = width()
    if columns is None:
        return text
    return textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)


def echo_json(data: Any) -> None:
    """Print data as JSON."""
    click.echo(printable_json(json.dumps(data, indent=2, sort_keys=True)))


def found(target: str, calls: Sequence[Invocation[Any, Any]], device: str) -> str:
    """Return a line with the number of calls of a program."""
    forward = sum(inv.direction == "fwd" for inv in calls)
    calls_found = counted(len(calls), "distinct call")
    return f"{target}: {calls_found}, {forward} forward and {len(calls) - forward} backward, on {device}"


def calls_as_text(calls: Sequence[Invocation[Any, Any]], tuned: Sequence[str]) -> str:
    """Return a table of calls with their keys and tuning state, e.g. `complete`, `partial (1 of 12)` or `no`."""
    if not calls:
        return "Nothing to tune."
    rows = [(inv.op_id_v, arguments(inv.description), inv.call_key, how) for inv, how in zip(calls, tuned, strict=True)]
    return table(("operation", "arguments", "key", "tuned"), rows)


def calls_as_data(
    calls: Sequence[Invocation[Any, Any]], tuned: Sequence[str], progress: Sequence[SearchProgress | None]
) -> list[dict[str, Any]]:
    """Return the calls with keys, tuning state and descriptions, for JSON."""
    return [
        {"key": inv.call_key, "tuned": how, "search": None if far is None else far.data(), **inv.description}
        for inv, how, far in zip(calls, tuned, progress, strict=True)
    ]


def searches(result: AutotuningResult, *, verbose: bool = False) -> str:
    """Return a table of the searches with the times before and after."""
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
            _statuses(tuned),
        )
        for tuned in result.searches
    ]
    header = ("operation", "arguments", "before", "after", "speed-up", "configuration", "search", "candidates")
    text = table(header, rows, "candidates", "arguments")
    return "\n\n".join([text, *map(candidates, result.searches)]) if verbose else text


def bundle(calls: Sequence[BundledCall]) -> str:
    """Return a table of candidate statuses of a bundle, with the reasons of failures."""
    rows, lines = [], []
    for call in calls:
        operation = printable(call.description["op"])
        statuses = collections.Counter(candidate.outcome.status for candidate in call.candidates)
        rows.append((operation, ", ".join(f"{count} {status}" for status, count in statuses.most_common())))
        reasons = collections.Counter(c.outcome.reason for c in call.candidates if c.outcome.reason)
        lines += [f"{operation}: {count} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join([table(("operation", "candidates"), rows), *lines])


def candidates(tuned: AutotuneData) -> str:
    """Return a table of the candidates of a search, the fastest first: `*` is the winner, `h` the heuristic."""
    rows = []
    # One row per program: configurations that compile to the same program share one time.
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
    kept = [f"{'heuristic kept' if is_complete else tuned.progress.not_finished}: {tuned.why}"] if tuned.why else []
    lines = map(printable_lines, (*kept, *remarks(tuned)))
    return "\n".join([title + _achieved(tuned), *lines, table(header, rows, "compiled in", "spread")])


def _achieved(tuned: AutotuneData) -> str:
    """Return a line with the winner's TFLOP/s and GB/s; empty if its kernel defines no cost."""
    cost, measured = tuned.inv.node.spec.kernel.cost(tuned.inv), tuned.winner.measurement
    if cost is None or measured is None or tuned.after is None:
        return ""
    if tuned.calls:  # the samples are means over several calls, so use this call's time
        measured = dataclasses.replace(measured, samples=(tuned.after,))
    reached = roofline(measured, cost)
    return f"\n{reached.tflops:.3g} TFLOP/s, {reached.gbytes:.3g} GB/s"


def _statuses(tuned: AutotuneData) -> str:
    counts = [outcome.status for outcome in tuned.outcomes]
    others = [f"{counts.count(status)} {status}" for status in dict.fromkeys(counts) if status != Status.MEASURED]
    return ", ".join([str(len(counts)), *others])


def result_as_data(result: AutotuningResult) -> dict[str, Any]:
    """Return a result with its measurements, for JSON."""
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
