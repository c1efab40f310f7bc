# SPDX-License-Identifier: Apache-2.0
"""The data of `ejkernel report`: the calls of a cache, each with the search behind its configuration."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ejkernel.cli.peaks import Peak, cost_of, main_dtype, peak_of
from ejkernel.cli.rounds import FEWEST, interval
from ejkernel.ops.autotuner.measure.sampling import PROCESSOR
from ejkernel.ops.autotuner.store.measurements import CallHistory, MeasurementStore, StoredSearch
from ejkernel.ops.autotuner.trials.challenge import CPU
from ejkernel.ops.autotuner.trials.outcome import remarks
from ejkernel.ops.autotuner.trials.status import SearchState, stored_in_brief, stored_in_words
from ejkernel.ops.autotuner.trials.view import SearchView, view_of
from ejkernel.ops.config.entries import StepNote, StoredEntry, time_in
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.types import ConfigKey, Cost
from ejkernel.ops.errors import DescriptionError
from ejkernel.ops.utils.error_text import printable, printable_lines
from ejkernel.ops.utils.formatting import arguments, compact, counted, durations

logger = logging.getLogger(__name__)

_VERSIONS: Final = ("ejkernel", "jax", "jaxlib", "driver", "python")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """The work of a call per second.

    Attributes:
        name: `with the heuristic` or `tuned`.
        tflops: 10¹² floating-point operations per second.
        gbytes: 10⁹ bytes per second.
        intensity: Floating-point operations per byte.
        of_peak: Fraction of the device's limit at this intensity; `None` if its peak is not known.
        limit: The limit of the call on this device: `compute` or `memory`; empty if the peak is not known.
    """

    name: str
    tflops: float
    gbytes: float
    intensity: float
    of_peak: float | None = None
    limit: str = ""

    @property
    def in_words(self) -> str:
        """The fraction of the peak as text."""
        return f"{self.of_peak:.0%} of the roofline, limited by {self.limit}" if self.of_peak is not None else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallReport(SearchView):
    """One call with its saved configuration and the search behind it.

    Attributes:
        op, device, call: The key.
        arguments: The arguments as text.
        config: The saved configuration; that of the search's winner if none is saved.
        result: The speed-up or, in a word, why there is none.
        speedup: The speed-up that decided, `before_us / tuned_us`.
        after_range: The 95 % interval of `after_us`; `None` without enough samples.
        clock: The timer of `after_us`; empty if unknown.
        search: Progress of the search; `-` without one.
        time: When the call was measured.
        versions: Names and versions of the software it was measured with.
        source: Where the configuration comes from.
        notes: Why the heuristic stays, and further remarks on the search.
        throughput: The throughput with the heuristic and tuned, if the kernel defines a cost.
        peak: The peak of the device, if it is known and the kernel defines a cost.
        program: The program that the call was tuned for, as typed; empty if unknown.
        times: How often a run of the program makes the call; `None` if unknown.
        share: The time of all these calls as a fraction of the program's step; `None` if unknown.
        step: The comparison of the program's step after the last search; `None` without one.
    """

    op: str
    device: str
    call: str
    arguments: str
    config: str
    result: str
    speedup: float | None = None
    after_range: tuple[float, float] | None = None
    clock: str = ""
    search: str = "-"
    time: str = "-"
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()
    throughput: tuple[Throughput, ...] = ()
    peak: Peak | None = None
    program: str = ""
    times: int | None = None
    share: float | None = None
    step: StepNote | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the heuristic stays, so that there is no tuned time."""
        return self.before_us is not None and self.before_us == self.after_us

    @property
    def after_in_words(self) -> str:
        """The time of the configuration, with its interval."""
        if self.after_us is None:
            return "not measured"
        if self.after_range is None:
            return f"{durations([self.after_us / 1e6])[0]}, without enough samples for an interval"
        time, low, high = durations(each / 1e6 for each in (self.after_us, *self.after_range))
        return f"{time} ({low} to {high})"

    @property
    def counts(self) -> bool:
        """Whether the call counts as tuned: it has a tuned configuration, or its search kept the heuristic."""
        is_ratio = self.speedup is not None and 0 < self.speedup < math.inf  # files may hold any number
        return is_ratio and not (self.kind == "open" and self.is_kept)

    @property
    def kind(self) -> str:
        """The group of the call in the page's filter."""
        if self.search.startswith(("not finished", SearchState.FAILED)):
            return "open"
        return "faster" if self.speedup is not None and self.speedup > 1 else "kept"


def calls_of(store: PersistentCache, *, measure_peak: bool = False, newest: int | None = None) -> list[CallReport]:
    """Return the calls with an entry or a search, sorted by operation, device and arguments.

    Args:
        store: The cache.
        measure_peak: Whether to measure the peak of this device.
        newest: Show this search of each call instead of the search behind its entry: 0 the newest, 1 the next older.
            Calls without such a search are left out.
    """
    histories = MeasurementStore(store).by_call()
    if newest is not None:
        chosen = [(one.searches[newest], one.entry) for one in histories.values() if newest < len(one.searches)]
        found = [
            _of_search(dataclasses.replace(search, stays=None), measure_peak, _source(search, entry))
            for search, entry in chosen
        ]
    else:
        alone = [entry for key, entry in store.entries() if key not in histories]
        found = [_of_history(history, measure_peak) for history in histories.values()]
        found += [CallReport(**_identity(one.key, one.call, one.provenance), **_saved(one)) for one in alone]
    return sorted(_with_shares(found), key=lambda call: (call.op, call.device, call.arguments, call.call))


def steps_of(calls: Sequence[CallReport]) -> dict[tuple[str, str], StepNote]:
    """Return the newest comparison of each program's step, by program and device."""
    known = [(call.step, call.device) for call in calls if call.step is not None]
    return {(step.target, device): step for step, device in sorted(known, key=lambda each: each[0].time)}


def _with_shares(calls: Sequence[CallReport]) -> Iterator[CallReport]:
    """Yield the calls with their shares of the measured steps."""
    steps = steps_of(calls)
    for call in calls:
        step = steps.get((call.program, call.device))
        if step is None or call.tuned_us is None or call.times is None or not step.after_us > 0:
            yield call
        else:
            yield dataclasses.replace(call, share=call.tuned_us * call.times / step.after_us)


def _saved(entry: StoredEntry) -> dict[str, Any]:
    """Return the values of an entry without the file of its search."""
    times = entry.median_us("heuristic"), entry.median_us("winner")
    return {
        "config": compact(entry.config),
        "result": stored_in_brief(entry.measured, entry.speedup),
        "before_us": times[0],
        "after_us": times[1],
        "tuned_us": times[0] / entry.speedup if times[0] and entry.speedup else times[1],
        "note": CPU if _stored_clock(entry) == PROCESSOR else "",
        "speedup": entry.speedup,
        "clock": _stored_clock(entry),
        "search": stored_in_words(entry.measured),
        "source": f"{_place(entry)}; the file of its search is not here",
        **_in_program(entry),
    }


def _in_program(entry: StoredEntry, program: str = "") -> dict[str, Any]:
    """Return the program of an entry and the comparison of its step."""
    step = StepNote.stored_in(entry.measured)
    return {"step": step, "program": printable(program or ("" if step is None else step.target))}


def _stored_clock(entry: StoredEntry) -> str:
    times = (entry.measured or {}).get("winner")
    return printable(times.get("method") or "") if isinstance(times, dict) else ""


def _place(entry: StoredEntry) -> str:
    return "saved in a shared cache or in memory" if entry.path is None else f"saved in {printable(entry.path)}"


def _identity(key: ConfigKey, call: Any, provenance: Any) -> dict[str, Any]:
    return {
        "op": printable(key.op),
        "device": printable(key.device),
        "call": printable(key.call),
        "arguments": arguments(call),
        "time": time_in(provenance),
        "versions": {name: printable(provenance[name]) for name in _VERSIONS if provenance.get(name)},
    }


def _source(search: StoredSearch, entry: StoredEntry | None) -> str:
    """Return where the configuration of a search is now."""
    if search.not_saved:
        return f"not saved: {search.not_saved}"
    if entry is None:
        return "saved by this search, but the entry is gone"
    return _place(entry) if search.stays is None else "saved by this search, but replaced since"


def _of_history(history: CallHistory, measure_peak: bool) -> CallReport:
    search, newest, entry = history.shown, history.searches[0], history.entry
    found = _of_search(search, measure_peak, _source(search, entry))
    notes = []
    if search is not newest:
        notes.append(f"a newer search, measured {time_in(newest.provenance)}, saved nothing: {newest.not_saved}")
    if entry is not None and history.behind is None:
        # Times and throughput of the search's winner are not those of the saved configuration.
        found = dataclasses.replace(found, **_saved(entry), after_range=None, throughput=(), time=entry.time)
        notes.append(f"the candidates are those of a search that saved nothing, measured {time_in(search.provenance)}")
    if len(history.searches) > 1:
        others = counted(len(history.searches) - 1, "other search", "other searches")
        notes.append(
            f"the cache has {others} of this call; `ejkernel report --against previous` compares the newest two"
        )
    known = {} if entry is None else _in_program(entry, search.program)
    return dataclasses.replace(found, notes=(*found.notes, *map(printable_lines, notes)), **known)


def _of_search(search: StoredSearch, measure_peak: bool, source: str) -> CallReport:
    winner = search.winner
    config = "-" if winner.measurement is None else compact(winner.config)
    # The page shows the comparison with the heuristic in full.
    notes = [search.why, *remarks(dataclasses.replace(search, challenge=None))]
    throughput, peak = _throughput(search, measure_peak)
    return CallReport(
        **_identity(search.key, search.call, search.provenance),
        **view_of(search),
        config=config,
        result=search.in_a_word,
        speedup=search.speedup,
        after_range=_interval(search),
        clock="" if winner.measurement is None else printable(winner.measurement.method),
        search=search.progress.in_words,
        source=source,
        notes=tuple(map(printable_lines, filter(None, notes))),
        throughput=throughput,
        peak=peak,
        program=printable(search.program),
        times=search.times if search.times > 0 else None,
    )


def _interval(search: StoredSearch) -> tuple[float, float] | None:
    """Return the 95 % interval of the winner's time in microseconds; `None` without enough samples."""
    measured, time = search.winner.measurement, search.after
    if measured is None or time is None or len(measured.samples) < FEWEST:
        return None
    low, high = interval(sorted(measured.samples))
    # With several cases the samples are means over all of them.
    factor = time / measured.median * 1e6
    return low * factor, high * factor


def _throughput(search: StoredSearch, measure_peak: bool) -> tuple[tuple[Throughput, ...], Peak | None]:
    """Return the throughput with the heuristic and tuned, and the peak of the device; nothing without a cost."""
    cost, dtype = _cost(search)
    if cost is None or cost.bytes <= 0:
        return (), None
    intensity, peak = cost.flops / cost.bytes, peak_of(search.key.device, dtype, measure=measure_peak)
    found: list[Throughput] = []
    for name, seconds in (("with the heuristic", search.before), ("tuned", search.tuned)):
        if seconds is None or (name == "tuned" and search.is_kept and found):
            continue
        reached = Throughput(
            name=name,
            tflops=cost.flops / seconds * 1e-12,
            gbytes=cost.bytes / seconds * 1e-9,
            intensity=intensity,
            of_peak=None if peak is None else peak.seconds(cost) / seconds,
            limit="" if peak is None else peak.limit(intensity),
        )
        found.append(reached)
    return tuple(found), peak


def _cost(search: StoredSearch) -> tuple[Cost | None, str]:
    """Return the cost of a call and the dtype of its largest array."""
    try:
        inv = rebuild(search.call, key=search.key.call, op=search.key.op)
    except DescriptionError as error:  # e.g. the kernel's module is not imported
        logger.info("no throughput of %s: %s", printable(search.key), error)
        return None, ""
    return cost_of(inv), main_dtype(inv)
