# SPDX-License-Identifier: Apache-2.0
"""Candidates of calls, estimated or compiled for a device that is not here, and their tables."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ejkernel.ops.autotuner.compile.bundles import BundledCall, BundledCandidate
from ejkernel.ops.config.estimates import PRUNED_FROM, EstimatedRow, Estimates, chosen
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import arguments, compact, counted, durations, size, terminal_width, text_table

_SHOWN: Final = 5  # configurations of a call
_NUMBER: Final = re.compile(r"\d+")  # reasons that differ only in numbers share a line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCalls:
    """The result of `autotune(..., target=...)`: estimates or a bundle, without measurements.

    Attributes:
        device: Fingerprint of the device.
        estimates: The estimates of each call, also in `estimated/` of the cache folder.
        bundled: The compiled candidates of each call, also in `folder`.
        folder: The folder of the bundle; `None` for estimates.
    """

    device: str
    estimates: tuple[Estimates, ...] = ()
    bundled: tuple[BundledCall, ...] = ()
    folder: Path | None = None

    @property
    def statuses(self) -> Mapping[str, int]:
        """The number of candidates by status.

        Estimates have `estimated` and `not estimated`; a bundle has `ready`, `same`, `failed` and `left`.
        """
        compiled = (str(candidate.outcome.status) for call in self.bundled for candidate in call.candidates)
        rows = (row for each in self.estimates for row in each.rows)
        estimated = ("not estimated" if row.us is None else "estimated" for row in rows)
        return dict(collections.Counter([*compiled, *estimated]))

    def __str__(self) -> str:
        """Return tables of the candidates."""
        if self.folder is None:
            return "\n\n".join(map(estimates_as_text, self.estimates))
        return bundle_as_text(self.bundled)


def bundle_as_text(calls: Sequence[BundledCall], *, verbose: bool = False) -> str:
    """Return a table of candidate statuses of a bundle, the vector memory of kernels, and the reasons of failures.

    Args:
        calls: The calls.
        verbose: Add a table of all candidates.
    """
    rows, lines = [], []
    for call in calls:
        operation = printable(call.description["op"])
        statuses = collections.Counter(candidate.outcome.status for candidate in call.candidates)
        rows.append((operation, ", ".join(f"{count} {status}" for status, count in statuses.most_common())))
        reasons = collections.Counter(c.outcome.reason for c in call.candidates if c.outcome.reason)
        taken = [c.program.vector_memory for c in call.candidates if c.program is not None and c.program.vector_memory]
        if taken:
            span = " to ".join(dict.fromkeys((size(min(taken)), size(max(taken)))))
            lines.append(f"{operation}: {span} of vector memory")
        lines += [f"{operation}: {count} x {reason}" for reason, count in reasons.most_common()]
    every = [_compiled_row(call, candidate) for call in calls for candidate in call.candidates] if verbose else []
    if every:
        heads = ("operation", "configuration", "status", "compiled in", "vector memory")
        lines.append(text_table(heads, every, width=terminal_width()))
    return "\n".join([text_table(("operation", "candidates"), rows, width=terminal_width()), *lines])


def _compiled_row(call: BundledCall, candidate: BundledCandidate) -> tuple[str, ...]:
    outcome, program = candidate.outcome, candidate.program
    seconds = "" if outcome.compile_seconds is None else f"{outcome.compile_seconds:.1f} s"
    memory = size(program.vector_memory) if program is not None and program.vector_memory else ""
    names = map(printable, (call.description["op"], compact(outcome.config)))
    return (*names, str(outcome.status), seconds, memory)


def estimates_as_text(found: Estimates, *, verbose: bool = False) -> str:
    """Return a table of the estimates of a call, and the reasons of refused candidates.

    Args:
        found: The estimates.
        verbose: Show all candidates rather than the fastest.
    """
    ranked = found.ranked
    shown = ranked if verbose else [row for at, row in enumerate(ranked) if at < _SHOWN or row.is_heuristic]
    times = durations(None if row.us is None else row.us / 1e6 for row in shown)
    cells = [
        ("h" if row.is_heuristic else "", _name(row), us, f"{row.cycles:,.0f}", _of_best(row, ranked[0]))
        for row, us in zip(shown, times, strict=True)
    ]
    lines = [printable(f"{found.key['op']}  {arguments(found.call)}"), f"{found.key['device']}: {found.source()}"]
    lines.append(text_table(("", "configuration", "estimated", "cycles", "of best"), cells, width=terminal_width()))
    if len(shown) < len(ranked):
        lines.append(f"and {counted(len(ranked) - len(shown), 'slower one')} (--verbose, or `ranked`)")
    reasons: dict[str, list[EstimatedRow]] = {}
    for row in found.rows:
        if row.us is None:
            reasons.setdefault(_NUMBER.sub("", row.reason), []).append(row)
    lines += [
        f"{len(rows)} x {printable(' '.join(rows[0].reason.split()))}, e.g. {_name(rows[0])}"
        for rows in reasons.values()
    ]
    best, note = chosen(found)
    lines.append(f"untuned calls run {'the heuristic' if best is None else _name(best)}: {printable(note)}")
    return "\n".join(lines)


def _name(row: EstimatedRow) -> str:
    return printable(compact(row.config))


def _of_best(row: EstimatedRow, best: EstimatedRow) -> str:
    ratio, least = ((us or 0.0) / (best.us or 1.0) for us in (row.us, row.us if row.least_us is None else row.least_us))
    return f"{ratio:.2f}, pruned" if least >= PRUNED_FROM and not row.is_heuristic else f"{ratio:.2f}"
