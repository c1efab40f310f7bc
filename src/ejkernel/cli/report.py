# SPDX-License-Identifier: Apache-2.0
"""What the command prints: tables for people, JSON for programs."""

from __future__ import annotations

import collections
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.execution.bundles import BundledCall
from ejkernel.ops.execution.outcome import MEASURED, AutotuneData, program_name, ranked, remarks
from ejkernel.ops.execution.result import AutotuningResult
from ejkernel.ops.execution.roofline import roofline
from ejkernel.ops.utils.serialize import to_data
from ejkernel.ops.utils.signature import is_array
from ejkernel.ops.utils.tables import compact, text_table

_PIPE_WIDTH = 400  # wide enough that nothing is cut where no person looks


def found(target: str, calls: Sequence[Invocation[Any, Any]], device: str) -> str:
    """Say how many calls a program has."""
    forward = sum(inv.direction == "fwd" for inv in calls)
    return f"{target}: {len(calls)} distinct calls, {forward} forward and {len(calls) - forward} derived, on {device}"


def signature(inv: Invocation[Any, Any]) -> str:
    """Return the call's arrays in short, such as `bf16[4,1024,8,64] x3`."""
    shapes = [_short(leaf) for leaf in jax.tree.leaves((inv.args, dict(inv.kwargs))) if is_array(leaf)]
    parts = []
    for shape in dict.fromkeys(shapes):
        count = shapes.count(shape)
        parts.append(shape if count == 1 else f"{shape} x{count}")
    batch = f" vmap{list(inv.batch_sizes)}" if inv.batch_sizes else ""
    return ", ".join(parts) + batch


def _short(leaf: Any) -> str:
    name = str(leaf.dtype).replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    return f"{name}[{','.join(map(str, leaf.shape))}]"


def calls_as_text(calls: Sequence[Invocation[Any, Any]]) -> str:
    """List calls with their keys."""
    if not calls:
        return "Nothing to tune."
    table = Table("operation", "arguments", "key")
    for inv in calls:
        table.add_row(inv.op_id_v, signature(inv), inv.call_key)
    return render(table)


def calls_as_json(calls: Sequence[Invocation[Any, Any]]) -> str:
    """List calls with all that is known of them."""
    return json.dumps([{"key": inv.call_key, **inv.description} for inv in calls], indent=2, sort_keys=True)


def table(result: AutotuningResult, *, verbose: bool = False) -> str:
    """Return the searches of a result as a table of before and after."""
    if not result.searches:
        return "Nothing to tune."
    rows = Table("operation", "arguments", "before", "after", "speed-up", "configuration", "candidates")
    for tuned in result.searches:
        rows.add_row(
            tuned.inv.op_id,
            signature(tuned.inv),
            _microseconds(tuned.heuristic.measurement),
            _microseconds(tuned.winner.measurement),
            _speedup(tuned),
            compact(tuned.config),
            _fates(tuned),
        )
    text = render(rows)
    return "\n\n".join([text, *map(candidates, result.searches)]) if verbose else text


def bundle(calls: Sequence[BundledCall]) -> str:
    """Return how the candidates of a bundle fared, and why some did not."""
    rows = Table("operation", "candidates")
    lines = []
    for call in calls:
        operation = str(call.description["op"])
        fates = collections.Counter(compiled.outcome.status for compiled in call.candidates)
        rows.add_row(operation, ", ".join(f"{count} {status}" for status, count in fates.most_common()))
        reasons = collections.Counter(c.outcome.reason for c in call.candidates if c.outcome.reason)
        lines += [f"{operation}: {count} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join([render(rows), *lines])


def candidates(tuned: AutotuneData) -> str:
    """Return the fate of every candidate of a search, the fastest first: `*` is the winner, `h` the heuristic."""
    rows = []
    for program in ranked(tuned.outcomes):
        outcome = program[0]
        measured, seconds = outcome.measurement, outcome.compile_seconds
        rows.append(
            (
                "*" if outcome is tuned.winner else "h" if outcome is tuned.heuristic else "",
                program_name(program),
                outcome.status,
                _microseconds(measured),
                "-" if measured is None else f"{measured.spread:.0%}",
                "-" if seconds is None else f"{seconds:.2f} s",
                " ".join(outcome.reason.split()),
            )
        )
    header = ("", "configuration", "status", "median", "spread", "compiled in", "reason")
    title = f"{tuned.inv.op_id_v}:{tuned.inv.call_key}  {signature(tuned.inv)}"
    kept = [f"the heuristic stays: {tuned.why}"] if tuned.why else []
    return "\n".join([title + _achieved(tuned), *kept, *remarks(tuned), text_table(header, rows)])


def _achieved(tuned: AutotuneData) -> str:
    """Return what the winner achieved, as a line, if its kernel says what a call costs."""
    cost, measured = tuned.inv.node.spec.kernel.cost(tuned.inv), tuned.winner.measurement
    if cost is None or measured is None:
        return ""
    reached = roofline(measured, cost)
    return f"\n{reached.tflops:.3g} TFLOP/s, {reached.gbytes:.3g} GB/s"


def _speedup(tuned: AutotuneData) -> str:
    if tuned.winner is tuned.heuristic:
        return "undecided" if tuned.undecided else "kept"
    return "-" if tuned.speedup is None else f"{tuned.speedup:.2f}x"


def _fates(tuned: AutotuneData) -> str:
    counts = [outcome.status for outcome in tuned.outcomes]
    others = [f"{counts.count(status)} {status}" for status in dict.fromkeys(counts) if status != MEASURED]
    return ", ".join([str(len(counts)), *others])


def _microseconds(measurement: Any) -> str:
    if measurement is None:
        return "-"
    microseconds = measurement.median * 1e6
    return f"{microseconds:.1f} us" if microseconds < 1e4 else f"{microseconds / 1e3:.1f} ms"


def result_as_json(result: AutotuningResult) -> str:
    """Return a result with what was measured."""
    entries = [
        {
            "op": tuned.inv.op_id_v,
            "key": tuned.inv.call_key,
            "config": to_data(tuned.config),
            "measured": tuned.summary_data(),
        }
        for tuned in result.searches
    ]
    return json.dumps({"device": result.device, "entries": entries}, indent=2, sort_keys=True)


def render(renderable: Any) -> str:
    """Return what rich would print, without colours, as text that a pipe can take."""
    width = Console().width if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined,no-any-return]
