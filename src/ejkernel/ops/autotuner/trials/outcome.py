# SPDX-License-Identifier: Apache-2.0
"""What a search found out: the fate of every candidate, and the winner."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ejkernel.ops.autotuner.measure.cases import Case, seconds_on
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import PairedComparison
from ejkernel.ops.autotuner.measure.race import PROCESSOR
from ejkernel.ops.autotuner.trials.progress import SearchProgress, SearchState
from ejkernel.ops.autotuner.trials.status import FAULTY, CameOut, Status
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.formatting import arguments, compact, counted, duration, ratio, text_table
from ejkernel.ops.utils.printable import printable, printable_lines
from ejkernel.ops.utils.storage.serialize import stable_json, to_data

_REASON = 100  # characters of a reason that a table shows
_KEPT_REASON = 400  # characters of one that a file keeps: a compiler's message may have thousands
_FAILURES = 100  # candidates whose failure the entry tells of; the search's log has all of them
_TWINS = 2  # configurations that a table names beside the first of a program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one candidate.

    Attributes:
        config: The candidate.
        status: What became of it; a log of a later version may have a word for it that is none of `Status`.
        reason: Why it was not measured.
        twin: Of one that is `same`, the candidate whose program it is.
        measurement: Its times.
        compile_seconds: How long lowering and compiling took.
        peak_bytes: Memory that a call takes, inputs and results included, where the compiler tells.
        spilled: Bytes of registers that a thread spills to memory, where the compiler tells: on GPUs, of programs that
            were compiled in a process of their own.
    """

    config: Any
    status: Status | str
    reason: str = ""
    twin: Any = None
    measurement: Measurement | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    spilled: int | None = None

    def __post_init__(self) -> None:
        if self.status in list(Status):  # as a file, or a tuner of the user's, says it
            object.__setattr__(self, "status", Status(self.status))
        object.__setattr__(self, "reason", printable_lines(self.reason))  # a file's, or a candidate's exception's

    @property
    def seconds(self) -> float | None:
        """How long a call takes, or the mean of several cases; `None` if it was not measured."""
        return None if self.measurement is None else self.measurement.median

    @property
    def cases(self) -> tuple[Case, ...]:
        """What it was measured on, if that is more than one thing, with its times."""
        return () if self.measurement is None else self.measurement.cases

    def seconds_on(self, call: str) -> float | None:
        """Return how long the call of that key takes, of several that it was measured on."""
        return None if self.measurement is None else seconds_on(call, self.measurement.median, self.measurement.cases)


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """How the best of the others stands against the heuristic, by the last race of them that counted.

    Attributes:
        rival: Its configuration.
        verdict: Its figures; `wins` says whether it replaces the heuristic, and `settled` whether that is certain.
        alone: Whether the race was of the two alone, and not one of all.
    """

    rival: Any
    verdict: PairedComparison
    alone: bool = False

    @property
    def came_out(self) -> CameOut:
        """What came out."""
        if not self.verdict.settled:
            return CameOut.UNDECIDED
        return CameOut.WINS if self.verdict.wins else CameOut.STAYS

    def data(self) -> dict[str, Any]:
        """Return it as plain data, times in microseconds; the verdict is what `came_out`."""
        verdict = self.verdict
        return {
            "rival": to_data(self.rival),
            "verdict": self.came_out.value,
            "rival_us": round(verdict.challenger * 1e6, 4),
            "heuristic_us": round(verdict.incumbent * 1e6, 4),
            # JSON has no infinity.
            "speedup": round(verdict.speedup, 4) if math.isfinite(verdict.speedup) else None,
            "rounds": verdict.pairs,
            "rival_faster": verdict.ahead,
            "heuristic_faster": verdict.behind,
            "confidence": round(verdict.confidence, 6),
            "judged_by": verdict.judged_by,
            "alone": self.alone,
        }

    def line(self) -> str:
        """Return it as a line for people."""
        verdict = self.verdict
        where = "in a race of the two alone" if self.alone else "in the race of all"
        by = " of processor time, for other processes disturbed the clock" if verdict.judged_by == PROCESSOR else ""
        return (
            f"{compact(self.rival)} {where}: {duration(verdict.challenger)}, the heuristic "
            f"{duration(verdict.incumbent)}{by}; faster in {verdict.ahead} of {verdict.pairs} rounds, slower in "
            f"{verdict.behind}; {self.came_out.in_words}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What came out of a search, of this process or from a file.

    Attributes:
        outcomes: What became of each candidate; the heuristic is the first.
        seconds: How long the search took.
        why: Why the heuristic stays, if it does.
        interrupted: Whether it was stopped before its end, and this is the best so far.
        standing: How the best of the others stands against the heuristic; `None` if there is none, or if the heuristic
            could not be measured.
        undecided: Whether the evidence was too little to tell who is the fastest, for all the rounds there was time
            for. The heuristic stays then, unless the other was clearly ahead by as much as was measured.
        rule_fault: How the kernel's gradients, under the heuristic, differ from JAX's derivatives of what it computes,
            or how forward and backward configurations disagree on residuals; empty if nothing is known to be wrong.
        input_sets: On how many sets of inputs the winner's outputs were right; 0 if the heuristic stays, or if nothing
            was validated.
        planned: How many candidates the search is about; `outcomes` may lack those whose turn never came.
        unconfirmed: Whether it ended before its best candidate was compared with the heuristic.
        not_saved: Why its configuration is not saved; empty if it is.
    """

    outcomes: tuple[Outcome, ...]
    seconds: float
    why: str = ""
    interrupted: bool = False
    standing: Standing | None = None
    undecided: bool = False
    rule_fault: str = ""
    input_sets: int = 0
    planned: int = 0
    unconfirmed: bool = False
    not_saved: str = ""

    @property
    def progress(self) -> SearchProgress:
        """How far the search came."""
        statuses = [outcome.status for outcome in self.outcomes]
        return SearchProgress.of(statuses, planned=self.planned, unconfirmed=self.unconfirmed)

    @property
    def cases(self) -> tuple[Case, ...]:
        """What every candidate was measured on, if that is more than one thing."""
        return next((outcome.cases for outcome in self.outcomes if outcome.cases), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutotuneData(Findings):
    """A search that found a configuration.

    Attributes:
        inv: The call; of several that share the configuration, the first.
        calls: All of them, if there are several.
        config: The winner.
        checked: What of the winner was checked: `outputs`, and `gradients` where the call is a forward that has one.
    """

    inv: Invocation[Any, Any]
    config: Any
    calls: tuple[Invocation[Any, Any], ...] = ()
    checked: tuple[str, ...] = ()

    @property
    def confidence(self) -> float | None:
        """Probability that the winner is not ahead of the heuristic by accident, of their race of the two alone.

        `None` if the heuristic stays, or could not be measured.
        """
        return None if self.standing is None or self.winner is self.heuristic else self.standing.verdict.confidence

    @property
    def key(self) -> ConfigKey:
        """The key of the call."""
        return self.inv.key

    @property
    def winner(self) -> Outcome:
        """The winner's outcome."""
        return next(outcome for outcome in self.outcomes if outcome.config is self.config)

    @property
    def heuristic(self) -> Outcome:
        """The heuristic's outcome."""
        return self.outcomes[0]

    @property
    def before(self) -> float | None:
        """Seconds that the call takes with the heuristic; `None` if it was not measured."""
        return self.heuristic.seconds_on(self.inv.call_key if self.calls else "")

    @property
    def after(self) -> float | None:
        """Seconds that the call takes with the winner."""
        return self.winner.seconds_on(self.inv.call_key if self.calls else "")

    @property
    def speedup(self) -> float | None:
        """How many times faster than the heuristic the winner is; `None` if the heuristic was not measured."""
        return None if self.before is None or self.after is None else self.before / self.after

    def of_each_call(self) -> tuple[AutotuneData, ...]:
        """Return the search as that of each call that shares the configuration: `inv`, `before` and `after` differ."""
        return tuple(dataclasses.replace(self, inv=inv) for inv in self.calls) or (self,)

    @property
    def in_a_word(self) -> str:
        """What the search brought: how many times faster the winner is, or that the heuristic was kept.

        The heuristic is kept only if the others were measured; until then the search is not finished.
        """
        if self.winner is self.heuristic:
            if self.progress.state != SearchState.COMPLETE:
                return self.progress.not_finished
            return "undecided" if self.undecided else "kept"
        return ratio(self.speedup)

    def summary(self, *, width: int | None = None) -> str:
        """Return the fate of every candidate as a table for people, the fastest first, of at most `width` columns."""
        title = f"{self.inv.op_id_v}  {arguments(self.inv.description)}", f"{self.key.device}, call {self.key.call}"
        return summary_of(title, self, self.winner, width=width)

    def summary_data(self) -> dict[str, Any]:
        """Return what a cache entry keeps of the search, as plain data."""
        failures = [
            {"config": to_data(outcome.config), "status": str(outcome.status), "reason": shortened(outcome.reason)}
            for outcome in self.outcomes
            if outcome.status in FAULTY
        ][:_FAILURES]
        return {
            "winner": _times(self.winner, self.after),
            "heuristic": _times(self.heuristic, self.before),
            "speedup": self.speedup,
            "candidates": len(self.outcomes),
            "search": self.progress.data(),
            "seconds": round(self.seconds, 3),
            "checked": list(self.checked),
            "input_sets": self.input_sets,
            "confidence": None if self.confidence is None else round(self.confidence, 4),
            "interrupted": self.interrupted,
            "undecided": self.undecided,
            "standing": None if self.standing is None else self.standing.data(),
            "skipped": sum(outcome.status == Status.SKIPPED for outcome in self.outcomes),
            "failures": failures,
            "rule_fault": self.rule_fault,
            **self._cases_data(),
        }

    def _cases_data(self) -> dict[str, Any]:
        """Return what the winner was chosen for, and how long each took; nothing if that is the call alone."""
        before, after = self.heuristic, self.winner
        if not after.cases:
            return {}
        known = {(case.call, case.draw): case.median for case in before.cases}
        cases = [
            {
                "call": case.call,
                "arguments": case.arguments,
                "draw": case.draw,
                "weight": round(case.weight, 6),
                "winner_us": _microseconds(case.median),
                "heuristic_us": _microseconds(known.get((case.call, case.draw))),
            }
            for case in after.cases
        ]
        mean = {"winner_us": _microseconds(after.seconds), "heuristic_us": _microseconds(before.seconds)}
        return {"cases": cases, "geometric_mean": mean}


def shortened(reason: str) -> str:
    """Return a reason as files keep it."""
    return reason if len(reason) <= _KEPT_REASON else reason[: _KEPT_REASON - 3] + "..."


def summary_of(title: Sequence[str], search: Findings, winner: Outcome, *, width: int | None = None) -> str:
    """Return a search as text: `title`, what came out, and a table of its programs, the fastest first.

    Args:
        title: What was searched for, line by line.
        search: What came out.
        winner: One of its outcomes.
        width: How wide the table may be; `None`: as wide as it is.
    """
    outcomes = search.outcomes
    heuristic = outcomes[0].seconds
    if winner is outcomes[0] and search.progress.state != SearchState.COMPLETE:
        found = f"{search.progress.not_finished}{': ' if search.why else ''}{search.why}"
    elif winner is outcomes[0]:
        found = f"the heuristic stays{': ' if search.why else ''}{search.why}"
    elif heuristic is None or winner.seconds is None:
        found = "the heuristic could not be measured"
    else:
        found = f"{ratio(heuristic / winner.seconds)} the heuristic's speed"
    tried = f"{counted(len(outcomes), 'candidate')} in {search.seconds:.1f} s; {found}"
    found_programs = ranked(outcomes)
    rows = [_cells(program, program[0] is outcomes[0], program[0] is winner, heuristic) for program in found_programs]
    header = ["", "configuration", "status", "median", "spread", "of heuristic", "reason"]
    if search.cases:
        header[3:4] = ["mean", "of each"]
        rows = [(*row[:4], in_cases(p[0]), *row[4:]) for row, p in zip(rows, found_programs, strict=True)]
    table = text_table(header, rows, width=width, optional=("of heuristic", "spread"))
    return "\n".join((*map(printable, (*title, tried)), *map(printable_lines, remarks(search)), table))


def remarks(search: Findings) -> list[str]:
    """Return what else is to be said of a search: its cases, the figures that decided, what cut it short, faults."""
    lines = [f"one configuration for {named_cases(search.cases)}"] if search.cases else []
    lines += [] if search.standing is None else [search.standing.line()]
    if search.input_sets:
        lines.append(f"the winner is right on {counted(search.input_sets, 'set')} of inputs")
    if search.undecided:
        lines.append("undecided: the evidence was too little to tell which is the fastest")
    if search.interrupted:
        lines.append("interrupted: this is the best so far")
    if search.not_saved:
        lines.append(f"not saved: {search.not_saved}")
    return [*lines, search.rule_fault] if search.rule_fault else lines


def named_cases(cases: Sequence[Case]) -> str:
    """Return what a configuration was chosen for, as words of a sentence, with the weights where they differ."""
    calls = len({case.call for case in cases})
    weighted = len({round(case.weight, 9) for case in cases}) > 1
    names = [case.name + f" (weight {case.weight:.3g})" * weighted for case in cases]
    what = f"{counted(len(cases), 'case')} of {calls} calls" if calls > 1 else f"{len(cases)} draws of inputs"
    return f"{what}, by the geometric mean: {'; '.join(names)}"


def in_cases(outcome: Outcome) -> str:
    """Return the times of each case, in their order; `-` without any."""
    return " | ".join(duration(case.median) for case in outcome.cases) or "-"


def programs(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, tuple[Outcome, ...]]]:
    """Return the programs of a search, in order: the outcome of each, and those of the candidates that are the same."""
    # A configuration need not be hashable, and one from a file is plain data.
    tokens = [stable_json(to_data(outcome.config)) for outcome in outcomes]
    twins: dict[str, list[Outcome]] = {token: [] for token in tokens}
    owners = []
    for outcome, token in zip(outcomes, tokens, strict=True):
        of = stable_json(to_data(outcome.twin)) if outcome.status == Status.SAME and outcome.twin is not None else ""
        if of in twins:
            twins[of].append(outcome)
        else:
            owners.append((outcome, token))
    return [(outcome, tuple(twins[token])) for outcome, token in owners]


def ranked(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, tuple[Outcome, ...]]]:
    """Return the programs of a search, the fastest first."""
    return sorted(programs(outcomes), key=lambda p: math.inf if p[0].seconds is None else p[0].seconds)


def program_name(program: tuple[Outcome, tuple[Outcome, ...]]) -> str:
    """Return the configuration of a program, with the others that make the same one, in short."""
    first, others = program
    if not others:
        return compact(first.config)
    shown = ", ".join(compact(outcome.config) for outcome in others[:_TWINS])
    more = f" and {len(others) - _TWINS} more" if len(others) > _TWINS else ""
    return f"{compact(first.config)} (also {shown}{more})"


def _cells(
    program: tuple[Outcome, tuple[Outcome, ...]], first: bool, won: bool, heuristic: float | None
) -> tuple[str, ...]:
    outcome, _ = program
    measured, text = outcome.measurement, " ".join(outcome.reason.split())
    reason = text if len(text) <= _REASON else text[: _REASON - 3] + "..."
    times = ("-", "-", "-")
    if measured is not None:
        share = "-" if heuristic is None else f"{measured.median / heuristic:.0%}"
        times = (duration(measured.median), f"{measured.spread:.0%}" if len(measured.samples) > 3 else "-", share)
    return "*" if won else "h" if first else "", program_name(program), str(outcome.status), *times, reason


def _times(outcome: Outcome, seconds: float | None) -> dict[str, Any] | None:
    measurement = outcome.measurement
    if measurement is None:
        return None
    return {
        "median_us": _microseconds(seconds),
        "spread": round(measurement.spread, 4),
        "samples": len(measurement.samples),
        "method": measurement.method,
    }


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 3)
