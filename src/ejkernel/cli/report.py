# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import click

from ejkernel.cli.peaks import cost_of
from ejkernel.ops.autotuner.trials.challenge import CPU
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.autotuner.trials.status import SearchProgress
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils import formatting
from ejkernel.ops.utils.error_text import printable_json
from ejkernel.ops.utils.fingerprint import name_of_device
from ejkernel.ops.utils.formatting import arguments, counted, terminal_width, text_table
from ejkernel.ops.utils.storage.serialize import to_data


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *optional: str) -> str:
    """Return a table that fits the terminal; drop the columns in `optional`, in this order, if it is too wide."""
    return text_table(header, rows, width=terminal_width(), optional=optional)


def wrapped(text: str) -> str:
    """Return a text wrapped to the terminal, without splitting words."""
    return formatting.wrapped(text, terminal_width())


def echo_json(data: Any) -> None:
    """Print data as JSON."""
    click.echo(printable_json(json.dumps(data, indent=2, sort_keys=True)))


_CPU_TIMES: Final = (
    "cpu: processor time, since other processes disturbed the clock during this search; it may be shorter than "
    "wall-clock time, which the progress shows."
)
Times = Mapping[ConfigKey, int]
"""How often one run of a program makes each call, by key, where known."""


def found(target: str, calls: Sequence[Invocation[Any, Any]], device: str, times: Times = MappingProxyType({})) -> str:
    """Return a line with the number of calls of a program."""
    forward = sum(inv.direction == "fwd" for inv in calls)
    calls_found = counted(len(calls), "distinct call")
    unused = "" if forward or not calls else "; the program uses no forward result, so JAX drops the forward calls"
    is_repeated = any(times.get(inv.key, 1) > 1 for inv in calls)
    runs = f", made {number_made(calls, times)} times in a run" if is_repeated else ""
    kinds = f"{forward} forward and {len(calls) - forward} backward"
    return f"{target}: {calls_found}, {kinds}{runs}, on {name_of_device(device)}{_cores(device)}{unused}"


def number_made(calls: Sequence[Invocation[Any, Any]], times: Times) -> str:
    """Return how many calls a run makes, e.g. `12`, or `at least 12` if the number of some is unknown."""
    least = "" if all(inv.key in times for inv in calls) else "at least "
    return f"{least}{sum(times.get(inv.key, 1) for inv in calls)}"


def _cores(device: str) -> str:
    """Return the meaning of the suffix of a processor's name, e.g. `x2`."""
    number = device.rpartition("_x")[2]
    return f" (x{number}: {counted(int(number), 'core')})" if device.startswith("cpu:") and number.isdigit() else ""


def calls_as_text(
    calls: Sequence[Invocation[Any, Any]], tuned: Sequence[str], times: Times = MappingProxyType({})
) -> str:
    """Return a table of calls with their keys and tuning state, e.g. `complete`, `partial (1 of 12)` or `no`."""
    if not calls:
        return "Nothing to tune."
    number, header = _numbers(calls, times)
    rows = [
        (inv.op_id_v, arguments(inv.description), *number(inv), inv.call_key, how)
        for inv, how in zip(calls, tuned, strict=True)
    ]
    return table(("operation", "arguments", *header, "key", "tuned"), rows)


def _numbers(
    calls: Sequence[Invocation[Any, Any]], times: Times
) -> tuple[Callable[[Invocation[Any, Any]], tuple[str, ...]], tuple[str, ...]]:
    """Return a function of a call to its cells, and the header, of how often a run makes it; none if all run once."""
    if all(times.get(inv.key, 1) == 1 for inv in calls):
        return lambda inv: (), ()
    return lambda inv: (str(times.get(inv.key, "-")),), ("times",)


def calls_as_data(
    calls: Sequence[Invocation[Any, Any]], tuned: Sequence[str], progress: Sequence[SearchProgress | None], times: Times
) -> list[dict[str, Any]]:
    """Return the calls with keys, tuning state and descriptions, for JSON."""
    return [
        {
            "key": inv.call_key,
            "tuned": how,
            "times": times.get(inv.key),
            "search": None if far is None else far.data(),
            **inv.description,
        }
        for inv, how, far in zip(calls, tuned, progress, strict=True)
    ]


def searches(result: AutotuningResult, *, verbose: bool = False, times: Times = MappingProxyType({})) -> str:
    """Return a table of the searches with the times before and after."""
    if not result.searches:
        return "Nothing to tune."
    number, numbers = _numbers([tuned.inv for tuned in result.searches], times)
    header, found = result.table()
    header = (*header[:2], *numbers, *header[2:])
    rows = [(*row[:2], *number(tuned.inv), *row[2:]) for row, tuned in zip(found, result.searches, strict=False)]
    notes = [_CPU_TIMES] if any(CPU in time for row in found for time in row[2:4]) else []
    text = "\n".join([table(header, rows, "candidates", "arguments"), *map(wrapped, [*notes, *result.remarks()])])
    return "\n\n".join([text, *map(candidates, result.searches)]) if verbose else text


def candidates(tuned: AutotuneData) -> str:
    """Return a table of the candidates of a search, with the rates that its winner achieves."""
    return tuned.summary(width=terminal_width(), verbose=True, more=_achieved(tuned))


def _achieved(tuned: AutotuneData) -> tuple[str, ...]:
    """Return a line with the winner's TFLOP/s and GB/s; empty if its kernel defines no cost."""
    cost = cost_of(tuned.inv)
    if cost is None or not tuned.tuned:
        return ()
    return (f"{cost.flops / tuned.tuned * 1e-12:.3g} TFLOP/s, {cost.bytes / tuned.tuned * 1e-9:.3g} GB/s",)


def result_as_data(result: AutotuningResult, times: Times = MappingProxyType({})) -> dict[str, Any]:
    """Return a result with its measurements, for JSON."""
    entries = [
        {
            "op": tuned.inv.op_id_v,
            "key": tuned.inv.call_key,
            "times": times.get(tuned.inv.key),
            "config": to_data(tuned.config),
            "in_force": to_data(tuned.in_force),
            "search": tuned.progress.data(),
            "not_saved": tuned.not_saved,
            "measured": tuned.summary_data(),
        }
        for tuned in result.searches
    ]
    return {"device": result.device, "entries": entries}
