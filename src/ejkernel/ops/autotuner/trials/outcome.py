# SPDX-License-Identifier: Apache-2.0
"""The results of a search: the outcome of every candidate, and the winner."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from ejkernel.ops.autotuner.measure.measurement import Measurement, more_bytes
from ejkernel.ops.autotuner.measure.sampling import Case, named_cases
from ejkernel.ops.autotuner.trials.challenge import Challenge, clock_of, is_by_another, labelled, least_lead, to_decide
from ejkernel.ops.autotuner.trials.programs import Outcome as Outcome
from ejkernel.ops.autotuner.trials.programs import are_same, program_name, programs, ranked
from ejkernel.ops.autotuner.trials.status import FAULTY, SearchProgress, SearchState, Status
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.error_text import printable, printable_lines, shortened
from ejkernel.ops.utils.formatting import arguments, compact, counted, durations, ratio, size, text_table, wrapped
from ejkernel.ops.utils.services import Shown
from ejkernel.ops.utils.storage.serialize import to_data

_REASON = 100  # characters of a reason in a table
STORED_REASON = 400  # characters of a reason in a file: compiler messages may have thousands
_FAILURES = 100  # failures listed in a cache entry; the log of the search has all
_LEGEND = (
    '* {marked}, h heuristic; sorted by "of heuristic", the time relative to the heuristic\'s in the same rounds. The '
    "confirmation run decides and may choose another row."
)
_TWO_CLOCKS = (
    "two clocks: `cpu` marks processor time, used while other processes disturb the wall clock; `wall-clock` marks "
    "wall-clock time. Times in brackets are by another clock than the heuristic's: compare `of heuristic` instead"
)
_CHOSEN, _IN_FORCE = "chosen", "in force, saved by another search"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings(Shown):
    """The results of a search, from this process or from a file.

    Attributes:
        outcomes: The outcome of each candidate; the heuristic comes first.
        seconds: Duration of the search.
        why: Why the heuristic stays, why the search is undecided, or why a faster candidate was passed over.
        interrupted: Whether the search was stopped early, so that this is the best result so far.
        challenge: The best challenger compared with the heuristic; `None` without a challenger, or if the heuristic
            could not be measured.
        undecided: Whether all rounds within the time left it open which candidate is the fastest. The heuristic then
            stays, unless the measured times put the challenger clearly ahead.
        rule_fault: How the kernel's gradients under the heuristic differ from JAX's derivatives, or how forward and
            backward configurations disagree on residuals; empty if no fault is known.
        input_sets: Number of input sets on which the winner's outputs were correct; 0 if the heuristic stays, or
            without validation.
        planned: Number of candidates in the search; `outcomes` may lack candidates that were never started.
        unconfirmed: Whether the search ended before the best candidate was compared with the heuristic.
        not_saved: Why the configuration is not saved; empty if it is.
        stays: The configuration saved by another search that is in force instead of this search's winner; `None`
            without one.
        is_only_here: Whether the configuration is in force in this process, but no file holds it; `not_saved` says why.
        lacks_reference: Whether the budget left too little time to compile the reference, so that candidates were
            compared with the heuristic's results.
        program: The program for which the call was tuned, as typed; empty if unknown.
        times: How often a run of the program makes the call; 0 if unknown.
    """

    outcomes: tuple[Outcome, ...]
    seconds: float
    why: str = ""
    interrupted: bool = False
    challenge: Challenge | None = None
    undecided: bool = False
    rule_fault: str = ""
    input_sets: int = 0
    planned: int = 0
    unconfirmed: bool = False
    not_saved: str = ""
    stays: Any = None
    is_only_here: bool = False
    lacks_reference: bool = False
    program: str = ""
    times: int = 0

    @property
    def key(self) -> ConfigKey:
        """The key of the call."""
        raise NotImplementedError

    @property
    def winner(self) -> Outcome:
        """The winner's outcome."""
        raise NotImplementedError

    @property
    def heuristic(self) -> Outcome:
        """The heuristic's outcome."""
        return self.outcomes[0]

    @property
    def is_kept(self) -> bool:
        """Whether the heuristic stays."""
        return self.winner is self.heuristic

    @property
    def in_force(self) -> Any:
        """The configuration in force: that of another search if it stays, else the winner's."""
        return self.winner.config if self.stays is None else self.stays

    def is_in_force(self, outcome: Outcome) -> bool:
        """Return whether an outcome is that of the configuration in force."""
        return outcome is self.winner if self.stays is None else are_same(outcome.config, self.stays)

    @property
    def counts(self) -> str:
        """The number of measured candidates of all, and the numbers of those with another result, in words."""
        counts = collections.Counter(outcome.status for outcome in self.outcomes)
        measured = f"{counts.pop(Status.MEASURED, 0)} of {self.progress.candidates} measured"
        others = [f"{count} {status}" for status, count in counts.items() if status != Status.SKIPPED]
        return ", ".join([measured, *others])

    @property
    def why_alike(self) -> str:
        """That all candidates compile to one program, as a sentence; empty if they do not, or one is not tried yet."""
        others = self.outcomes[1:]
        if not others or len(self.outcomes) < self.planned or any(one.status != Status.SAME for one in others):
            return ""
        part = "gradient rule" if ".bwd@" in self.key.op else "run"
        return (
            f"all {len(self.outcomes)} candidates compile to one program, so none is faster; if the kernel is yours, "
            f"check that its {part} uses cfg, and tune it again (--force on the command line)"
        )

    @property
    def before(self) -> float | None:
        """Seconds per call with the heuristic; `None` if not measured."""
        return self.heuristic.seconds_on(self.key.call)

    @property
    def after(self) -> float | None:
        """Seconds per call with the winner."""
        return self.winner.seconds_on(self.key.call)

    @property
    def speedup(self) -> float | None:
        """Speed-up of the winner over the heuristic; `None` if the heuristic was not measured.

        This is the ratio that decided, that of the median round of the confirmation run. For one of several calls that
        share the configuration, it is the ratio of the call's own median times.
        """
        if self.before is None or self.after is None:
            return None
        has_several_calls = len({case.call for case in self.cases}) > 1
        decided = None if self.is_kept or has_several_calls else self._decided
        return self.before / self.after if decided is None else decided

    @property
    def tuned(self) -> float | None:
        """Seconds per call with the winner for display: the heuristic's time divided by `speedup`.

        `after` may differ on a busy machine, because a ratio of medians is not the median of the ratios. It counts if
        the heuristic was not measured.
        """
        return self.before / self.speedup if self.before is not None and self.speedup else self.after

    def why_not_chosen(self, outcome: Outcome) -> str:
        """Return why a measured candidate lost, if it was compared with the heuristic or its time is shorter."""
        found, mine = self.challenge, relative_to_heuristic(outcome, self)
        if outcome is self.winner or mine is None:
            return ""
        rival = self.winner.config if found is None else found.challenger
        if found is not None and are_same(rival, outcome.config):
            first = "fastest in the run of all candidates; confirmation run: " if found.is_confirmation else ""
            return f"{first}{found.comparison.in_words}: {found.verdict(self.progress.state)}"
        best = relative_to_heuristic(self.winner, self)
        if best is None or mine >= best or outcome is self.heuristic:
            return ""
        if self.is_kept and self.progress.state == SearchState.PARTIAL:
            return "not confirmed yet"
        more = more_bytes(outcome.peak_bytes, self.winner.peak_bytes)
        margin = least_lead(outcome, self.winner)
        if mine >= best * (1 - margin):
            return f"within {margin:.0%} of the chosen one{f', and takes {size(more)} more memory' if more else ''}"
        # The winner and its rival have more samples, of the confirmation run.
        others = [one for one in self.outcomes if one is not self.winner and not are_same(rival, one.config)]
        count, *counts = (len(one.measurement.samples) for one in (outcome, *others) if one.measurement is not None)
        if count < max(counts):
            return f"dropped after {counted(count, 'round')}"
        return f"ranked behind {compact(rival)} in the run of all candidates"

    @property
    def _decided(self) -> float | None:
        """The speed-up in the confirmation run that the winner won; `None` without one."""
        found = self.challenge
        if found is None or found.came_out != "wins" or not found.is_confirmation:
            return None
        is_winner = are_same(found.challenger, self.winner.config)
        return found.comparison.speedup if is_winner and found.comparison.speedup > 0 else None

    @property
    def progress(self) -> SearchProgress:
        """The progress of the search."""
        statuses = [outcome.status for outcome in self.outcomes]
        return SearchProgress.of(statuses, planned=self.planned, unconfirmed=self.unconfirmed, undecided=self.undecided)

    @property
    def in_a_word(self) -> str:
        """The result in brief: the speed-up, `kept` (the heuristic), `undecided` or `not finished (n of m)`.

        If another search's configuration is in force, this follows.
        """
        found = self.progress.in_brief(self.speedup, kept=self.is_kept)
        if self.stays is None:
            return found
        return "saved one in force" if found == "kept" else f"{found}, saved one in force"

    @property
    def in_words(self) -> str:
        """The result with the reason why the heuristic stays, or why the search has no result yet."""
        found = self._found_in_words
        return found if self.stays is None else f"{found}; in force is {compact(self.stays)}, saved by another search"

    @property
    def _found_in_words(self) -> str:
        why = f": {self.why}" if self.why else ""
        if not self.is_kept and self.speedup is None:
            return "the heuristic could not be measured"
        if not self.is_kept:
            found = f"{ratio(self.speedup)} the heuristic's speed"
            if self.progress.state == SearchState.COMPLETE:
                return f"{found}{f' ({self.why})' if self.why else ''}"
            return f"{found}, {self.progress.in_words}{why}"
        found = self.progress.in_brief(self.speedup, kept=True)
        kept = "heuristic kept" if self.stays is None else "no candidate replaces the heuristic"
        return f"{kept if found == 'kept' else found}{why}"

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases of the search; empty if it has a single case."""
        return next((outcome.cases for outcome in self.outcomes if outcome.cases), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutotuneData(Findings):
    """A search that found a configuration.

    Attributes:
        inv: The call, or the first of several that share the configuration.
        calls: All calls, if the search has several.
        config: The winner.
        checked: The checks that the winner passed: `outputs`, and `gradients` for a differentiable forward call.
    """

    inv: Invocation[Any, Any]
    config: Any
    calls: tuple[Invocation[Any, Any], ...] = ()
    checked: tuple[str, ...] = ()

    @property
    def confidence(self) -> float | None:
        """Probability that the winner's lead in the confirmation run is not accidental.

        `None` if the heuristic stays, or could not be measured.
        """
        return None if self.challenge is None or self.is_kept else self.challenge.comparison.confidence

    @property
    def key(self) -> ConfigKey:
        """The key of the call."""
        return self.inv.key

    @property
    def winner(self) -> Outcome:
        """The winner's outcome."""
        return next(outcome for outcome in self.outcomes if outcome.config is self.config)

    def of_each_call(self) -> tuple[AutotuneData, ...]:
        """Return one copy per call of the search; `inv`, `before` and `after` differ."""
        return tuple(dataclasses.replace(self, inv=inv) for inv in self.calls) or (self,)

    def summary(self, *, width: int | None = None, verbose: bool = False, more: Sequence[str] = ()) -> str:
        """Return a table of all candidates, the fastest first; see `summary_of`."""
        title = f"{self.inv.op_id_v}  {arguments(self.inv.description)}", f"{self.key.device}, call {self.key.call}"
        return summary_of((*title, *more), self, width=width, verbose=verbose)

    def summary_data(self) -> dict[str, Any]:
        """Return the part of the search stored in a cache entry, as plain data."""
        failures = [
            {
                "config": to_data(outcome.config),
                "status": str(first.status),
                "reason": shortened(first.reason, STORED_REASON),
            }
            for first, twins in programs(self.outcomes)
            if first.status in FAULTY
            for outcome in (first, *twins)
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
            "standing": None if self.challenge is None else self.challenge.data(),
            "failures": failures,
            "rule_fault": self.rule_fault,
            **self._cases_data(),
        }

    def _cases_data(self) -> dict[str, Any]:
        """Return the cases and their times; empty if the search has a single case."""
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


def summary_of(title: Sequence[str], search: Findings, *, width: int | None = None, verbose: bool = False) -> str:
    """Return a search as text: `title`, the result, and a table of its programs, sorted by `of heuristic`.

    Configurations with the same program share a row.

    Args:
        title: Lines that describe the call.
        search: The results.
        width: Largest width of the table in characters; `None` for no limit.
        verbose: Whether to add the compilation times, and not to shorten the reasons.
    """
    tried = f"{counted(len(search.outcomes), 'candidate')} in {search.seconds:.1f} s; {search.in_words}"
    found = ranked(search.outcomes)
    firsts, clock = [program[0] for program in found], clock_of(search.outcomes)
    times = zip(durations(one.seconds for one in firsts), firsts, strict=True)
    names, common = without_common(list(map(program_name, found)))
    columns = {
        "": [
            "*" * (one.seconds is not None and any(map(search.is_in_force, (one, *twins))))
            + "h" * (one is search.heuristic)
            for one, twins in found
        ],
        "configuration": names,
        "status": [str(one.status) for one in firsts],
        "mean" if search.cases else "median": [labelled(*pair, clock) for pair in times],
        **({"of each": _times_of_each(firsts)} if search.cases else {}),
        "spread": [_spread(one.measurement) for one in firsts],
        "of heuristic": [share_of(one, search) for one in firsts],
        **({"compiled in": [_compiled_in(one.compile_seconds) for one in firsts]} if verbose else {}),
        "reason": [
            _in_one_line(one.reason or search.why_not_chosen(one), None if verbose else _REASON) for one in firsts
        ],
    }
    optional = ("compiled in", "spread")
    table = text_table(list(columns), zip(*columns.values(), strict=True), width=width, optional=optional)
    marked = _LEGEND.format(marked=_CHOSEN if search.stays is None else _IN_FORCE)
    legend = [wrapped(marked, width)] if any(one.measurement for one in firsts) else []
    said = [wrapped(printable_lines(line), width, 2) for line in remarks(search)]
    said += [f"all candidates: {common}"] if common else []
    return "\n".join((*(wrapped(printable(line), width, 2) for line in (*title, tried)), *said, table, *legend))


def without_common(names: Sequence[str]) -> tuple[list[str], str]:
    """Return configurations without the plain fields at the start that all have, and these fields."""
    parts = [name.split() for name in names]
    fields = [first for first, *others in zip(*parts, strict=False) if len({first, *others}) == 1]
    same = list(
        itertools.takewhile(lambda pair: pair[0] == pair[1] and "(" not in pair[0], zip(parts[0], fields, strict=False))
    )
    count = min(len(same), *(len(each) - 1 for each in parts)) if len(names) > 1 else 0
    return [" ".join(each[count:]) for each in parts], " ".join(parts[0][:count])


def _times_of_each(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the time of each case of each outcome, `-` without cases."""
    times = iter(durations(case.median for outcome in outcomes for case in outcome.cases))
    return [" | ".join(itertools.islice(times, len(outcome.cases))) or "-" for outcome in outcomes]


def relative_to_heuristic(outcome: Outcome, search: Findings) -> float | None:
    """Return an outcome's time divided by the heuristic's, in the same rounds if possible; `None` if unknown."""
    found, heuristic = outcome.relative, search.heuristic
    # Without common rounds, the medians compare if the clock is the same.
    if found is None and not is_by_another(outcome, clock_of(search.outcomes)):
        found = outcome.seconds / heuristic.seconds if outcome.seconds and heuristic.seconds else None
    return found


def share_of(outcome: Outcome, search: Findings) -> str:
    """Return an outcome's time relative to the heuristic's as text, such as `61%`; `-` if they do not compare."""
    found = relative_to_heuristic(outcome, search)
    return "-" if found is None else f"{found:.0%}"


def _spread(measurement: Measurement | None) -> str:
    return "-" if measurement is None or len(measurement.samples) < 4 else f"{measurement.spread:.0%}"


def _compiled_in(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _in_one_line(reason: str, most: int | None) -> str:
    text = " ".join(reason.split())
    return text if most is None else shortened(text, most)


def remarks(search: Findings) -> list[str]:
    """Return further lines about a search: its cases, the decisive figures, interruptions and faults."""
    state = search.progress.state
    lines = [f"one configuration for {named_cases(search.cases)}"] if search.cases else []
    lines += [search.why_alike] if search.why_alike else []
    lines += [] if search.challenge is None else [search.challenge.line(state, search.why)]
    if search.input_sets:
        lines.append(f"the winner matched the reference on {counted(search.input_sets, 'input set')}")
    if any(is_by_another(outcome, clock_of(search.outcomes)) for outcome in search.outcomes):
        lines.append(_TWO_CLOCKS)
    if search.lacks_reference:
        lines.append("compared with the heuristic's results: the reference took too long to compile for the budget")
    if state == SearchState.UNDECIDED:
        lines.append(f"undecided: {to_decide(search.challenge)}")
    if search.interrupted:
        lines.append("interrupted: this is the best so far")
    if search.not_saved not in ("", search.progress.not_finished):  # the first line says the latter
        lines.append(f"not saved: {search.not_saved}")
    return [*lines, search.rule_fault] if search.rule_fault else lines


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
