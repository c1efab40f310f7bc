# SPDX-License-Identifier: Apache-2.0
"""The last part of `ejkernel tune`: it compares the program's step without and with the new configurations.

Those that slow the step are replaced by the earlier ones. The searches have saved all of them already: Ctrl-C
loses nothing, and the next run compares a step not yet compared.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ejkernel.cli.files import Found
from ejkernel.cli.programs import Program, with_cache
from ejkernel.cli.saved import SavedCalls
from ejkernel.cli.sources import TuneOptions
from ejkernel.cli.step import FAILS, Answer, Question, Winner, compare_step, first_line
from ejkernel.ops.autotuner.trials.candidates import heuristic_of, is_in
from ejkernel.ops.autotuner.trials.programs import are_same
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.autotuner.trials.status import SearchProgress, is_kept_in
from ejkernel.ops.config.cache import same_config
from ejkernel.ops.config.entries import StepNote, StoredEntry
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import candidates_of, kernel_of
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import arguments, size
from ejkernel.ops.utils.storage.serialize import to_data

_SHARE: Final = 0.2  # of the time for all calls, but at least 30 s, and at most half of it
_LEAST_SHARE: Final = 30.0
_OF_SEARCHES: Final = 0.25  # of the time of the searches, but at least a minute
_LEAST: Final = 60.0
_MOST_DRAWN: Final = 1 << 30  # bytes of random arguments: a program given by types alone may be too large to run
_STUCK: Final = 600.0  # seconds, and ten times those allowed, after which the worker is ended

_NOTHING_BEFORE: Final = "the configurations before, e.g. the heuristic's, fail"
_ELSEWHERE: Final = " on a machine with its devices"
_STAYS: Final = "Each new configuration won by itself and stays saved"

Entries = Mapping[ConfigKey, tuple[Any, StoredEntry]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of the comparison.

    Attributes:
        target: The program, as typed.
        answer: The comparison.
        winners: The calls with new configurations.
        time: When it was made.
        advice: How to compare a step that was not compared.
    """

    target: str
    answer: Answer
    winners: tuple[Winner, ...]
    time: datetime.datetime
    advice: str = ""

    def note(self, winner: Winner) -> StepNote:
        """Return the note for the entry of a call."""
        answer, why = self.answer, self.answer.dropped.get(winner.key, "")
        return StepNote(
            target=self.target,
            before_us=round(answer.before * 1e6, 3),
            after_us=round(answer.after * 1e6, 3),
            speedup=round(answer.over["median"], 4),
            low=round(answer.over["low"], 4),
            high=round(answer.over["high"], 4),
            rounds=answer.rounds,
            time=self.time.isoformat(timespec="seconds"),
            dropped=to_data(winner.after) if why else None,
            why=f"{why} ({self.target})" if why else "",
            mapping=answer.mapping,
        )

    def lines(self) -> list[str]:
        """Return the lines for the end of the command."""
        if self.answer.skipped:
            return [printable(f"step not compared: {self.answer.skipped}. {self.advice}")]
        dropped = [winner for winner in self.winners if winner.key in self.answer.dropped]
        said = [f"{winner.name}: dropped: {self.answer.dropped[winner.key]}" for winner in dropped]
        said += filter(None, [self.answer.mapping, self.answer.guess])
        times = self.note(self.winners[0]).times
        over, doubt = self.answer.over, ""
        if self.answer.undecided:
            doubt = "; this machine is too noisy to tell whether it is slower: the next run compares it again"
        elif over["low"] < 1 < over["high"]:
            doubt = "; too noisy to tell whether it is faster: `ejkernel bench` can measure for longer"
        none = "; all new configurations are dropped" if len(dropped) == len(self.winners) else ""
        return [printable(line) for line in (*said, f"step: {times}{doubt}{none}")]

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        if self.answer.skipped:
            return {"target": self.target, "skipped": self.answer.skipped}
        note = dataclasses.asdict(self.note(self.winners[0]))
        dropped = [
            {"op": winner.key.op, "key": winner.key.call, "config": to_data(winner.after), "why": why}
            for winner in self.winners
            if (why := self.answer.dropped.get(winner.key))
        ]
        del note["why"]  # of one call
        return note | {"dropped": dropped, "undecided": self.answer.undecided, "skipped": None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """The comparison of the step after the searches of a program's calls.

    Attributes:
        options: The options of the command.
        program: The program.
        found: Its calls.
        saved: Their entries.
        earlier: The configurations before the searches.
    """

    options: TuneOptions
    program: Program
    found: Found
    saved: SavedCalls
    earlier: Entries

    @property
    def why_not(self) -> str:
        """Why the step does not run here; empty if it may."""
        if self.options.ray:
            return "the workers of Ray have the devices"
        if self.options.mesh_devices is not None:
            return "this machine may lack the devices of its mesh"
        if self.found.drawn_bytes > _MOST_DRAWN and not self.options.check_step:
            return f"random arrays for its arguments, which are types, would take {size(self.found.drawn_bytes)}"
        return ""

    @property
    def share(self) -> float:
        """The seconds of `--time` that the comparison may need."""
        whole = self.options.time
        return 0.0 if whole is None or self.why_not else max(_SHARE * whole, min(_LEAST_SHARE, whole / 2))

    def run(self, seconds: float) -> Checked | None:
        """Compare the step and drop the configurations that slow it; `None` without a new configuration.

        Args:
            seconds: Duration of the searches.
        """
        winners = tuple(self._winners())
        if not winners:
            return None
        winners = tuple(winner for winner in winners if winner.before is not None) or winners
        whole = self.options.time
        allowed = max(seconds * _OF_SEARCHES, _LEAST) if whole is None else whole - seconds
        question = Question(
            program=self.program,
            cache=self.options.cache,
            winners=winners,
            end=time.monotonic() + allowed,
            why_short="which is long beside the searches" if whole is None else "which is more than --time leaves",
            insists=self.options.check_step is True,
        )
        fails = winners[0].before is None
        why_not = _NOTHING_BEFORE if fails else self.why_not
        answer = Answer(skipped=why_not) if why_not else self._ask(question)
        checked = Checked(
            target=self.program.target,
            answer=answer,
            winners=winners,
            time=datetime.datetime.now(datetime.UTC),
            advice=f"{_STAYS}." if fails else self._advice,
        )
        if not (answer.skipped or answer.undecided):
            calls = {inv.key: inv for inv in self.found.calls}
            for winner in winners:
                self._settle(calls[winner.key], winner, checked.note(winner))
        return checked

    @property
    def has_winners(self) -> bool:
        """Whether a call has a new configuration, so that the step can be compared."""
        return any(self._winners())

    @property
    def _advice(self) -> str:
        where = "" if self.options.check_step else " or --check-step"
        where = _ELSEWHERE if self.options.is_elsewhere else where
        return f"{_STAYS}; `{_bench(self.program, self.options)}`{where} compares the step."

    def _ask(self, question: Question) -> Answer:
        try:
            if self.options.in_process:
                return compare_step(question)
            return _asked_elsewhere(question)
        except FAILS as error:
            return Answer(skipped=first_line(error))

    def _winners(self) -> Iterable[Winner]:
        """Yield the calls with a configuration that won a search but no comparison of the step."""
        for inv in self.found.calls:
            config, entry = self.saved.in_force(inv) or (None, None)
            if entry is None or not self.saved.is_own(entry) or not _won(entry):
                continue
            before = self._before(inv, entry)
            if before is None or not same_config(before, config):
                yield Winner(
                    key=inv.key,
                    name=f"{inv.op_id_v} {arguments(inv.description)}",
                    before=before,
                    after=config,
                    alone=entry.speedup,
                    gain=_saved_seconds(entry) * self.found.times.get(inv.key, 1),
                )

    def _before(self, inv: Invocation[Any, Any], now: StoredEntry) -> Any:
        """Return the configuration in force before the search, saved then or the heuristic's; `None` if all fail."""
        kernel = kernel_of(inv)
        config, entry = self.earlier.get(inv.key, (None, None))
        if (
            entry is not None
            and entry.config != now.config
            and is_in(candidates_of(kernel, inv.representative), config)
            and not _has_failed(now, config)
        ):
            return config
        heuristics = heuristic_of(inv.representative, kernel)
        return next((each for each in heuristics if not _has_failed(now, each)), None)

    def _settle(self, inv: Invocation[Any, Any], winner: Winner, note: StepNote) -> None:
        """Store the result in the entry of a call, unless another process has replaced the entry since."""
        _, entry = self.saved.in_force(inv) or (None, None)
        if entry is None or entry.config != to_data(winner.after):
            return
        measured = self._measured_before(entry, winner) if note.why else entry.measured or {}
        config = winner.before if note.why else winner.after
        self.saved.chain.remember(inv.key, config, call=entry.call, measured=note.added_to(measured))

    def _measured_before(self, entry: StoredEntry, winner: Winner) -> Mapping[str, Any]:
        """Return the figures of the configuration before, for the entry of a call that drops a new one."""
        measured = dict(entry.measured or {})
        _, earlier = self.earlier.get(winner.key, (None, None))
        if earlier is None or earlier.config != to_data(winner.before):
            return measured | {"winner": measured.get("heuristic"), "speedup": 1.0, "confidence": None}
        own = dict(earlier.measured or {})
        # The search of this run is the newest; it need not be repeated.
        return own | {name: measured[name] for name in ("search", "space") if name in own and name in measured}


def _asked_elsewhere(question: Question) -> Answer:
    """Return the answer of a new process, with memory as at the start of a program."""
    from ejkernel.ops.autotuner.process.supervisor import WorkerStatus
    from ejkernel.ops.autotuner.process.worker import Worker, close_first

    close_first()  # the step may need all memory
    worker = Worker()
    try:
        doing = WorkerStatus(what="comparing the step", allowed=_STUCK + 10 * max(question.end - time.monotonic(), 0.0))
        answer: Answer = worker.call(compare_step, question, doing=doing)
    finally:
        worker.close()
    return answer


def _won(entry: StoredEntry) -> bool:
    """Return whether the configuration of an entry has won a search, and was not compared in a step since."""
    is_searched = SearchProgress.stored_in(entry.measured) is not None
    return is_searched and not is_kept_in(entry.measured) and StepNote.stored_in(entry.measured) is None


def _has_failed(entry: StoredEntry, config: Any) -> bool:
    """Return whether the search of an entry found that a configuration fails or is wrong."""
    failures = (entry.measured or {}).get("failures")
    found = failures if isinstance(failures, list) else []
    return any(isinstance(each, dict) and are_same(each.get("config"), config) for each in found)


def _saved_seconds(entry: StoredEntry) -> float:
    """Return the seconds that a configuration saves in each call, compared with the heuristic."""
    found = entry.median_us("heuristic")
    return found / 1e6 * (1 - 1 / entry.speedup) if found is not None and entry.speedup else 0.0


def not_compared(result: AutotuningResult, program: Program | None, options: TuneOptions) -> list[str]:
    """Return the line after `--no-check-step` and without a program; none if no call has a faster configuration."""
    if all(search.is_kept for search in result.searches):
        return []
    if program is None:
        command = f"`ejkernel tune {with_cache('MODULE:FUNCTION', options.cache)} --check-step`"
        how = f"{command} drops configurations that slow a step"
    else:
        how = f"`{_bench(program, options)}`{_ELSEWHERE if options.is_elsewhere else ''} compares it"
    return [f"step not compared: a speed-up is that of a call by itself; {how}."]


def _bench(program: Program, options: TuneOptions) -> str:
    return f"ejkernel bench {with_cache(program.target, options.cache)}"


def settled(result: AutotuningResult, checked: Checked | None) -> AutotuningResult:
    """Return the searches with the reasons why the configurations of some are not kept."""
    if checked is None or not checked.answer.dropped:
        return result
    before = {winner.key: winner.before for winner in checked.winners}
    searches = []
    for search in result.searches:
        why = checked.answer.dropped.get(search.key)
        if why is not None and same_config(before[search.key], search.heuristic.config):
            search = dataclasses.replace(search, config=search.heuristic.config, why=why)
        elif why is not None:
            search = dataclasses.replace(search, not_saved=why, stays=before[search.key])
        searches.append(search)
    return dataclasses.replace(result, searches=tuple(searches))
