# SPDX-License-Identifier: Apache-2.0
"""`ejkernel report`: one HTML page about the saved searches, without scripts or styles from elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from ejkernel.cli import report
from ejkernel.cli.programs import import_operations, import_users, look_here
from ejkernel.cli.show import opened
from ejkernel.ops.autotuner.store.measurements import MeasurementStore, StoredSearch
from ejkernel.ops.autotuner.trials.outcome import Outcome, program_name, ranked, remarks
from ejkernel.ops.autotuner.trials.status import SearchProgress, SearchState, Status, stored_in_brief
from ejkernel.ops.config._files import version
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.types import ConfigKey, Cost
from ejkernel.ops.errors import ConfigError, DescriptionError
from ejkernel.ops.utils.error_text import error_text, printable, printable_lines
from ejkernel.ops.utils.formatting import arguments, compact, counted, duration, durations, ratio

logger = logging.getLogger(__name__)

_REASONS: Final = 8  # failure groups of a search with their full reason; the others share one group
_EXAMPLES: Final = 3  # configurations listed for one reason
_NUMBER: Final = re.compile(r"\d+")
_VERSIONS: Final = ("ejkernel", "jax", "jaxlib", "driver", "python")
_SCRIPT: Final = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program of a search: a row of its table and a mark of its chart.

    Attributes:
        name: Its configuration, and others that compile to the same program.
        mark: `winner`, `heuristic`, `heuristic kept` or empty.
        status: The status; files of later versions may contain others.
        group: The number of its failure group, from 1; 0 without a failure.
        time_us: The median.
        low_us, high_us: The quartiles; of fewer than four samples the least and the greatest.
        samples: Number of samples.
        compile_s: Seconds to compile.
    """

    name: str
    mark: str
    status: str
    group: int = 0
    time_us: float | None = None
    low_us: float = 0.0
    high_us: float = 0.0
    samples: int = 0
    compile_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """Unmeasured candidates of a search with the same status and reason.

    Attributes:
        status: Their status.
        reason: The reason of the first candidate; the others differ at most in numbers.
        configs: Their configurations.
    """

    status: str
    reason: str
    configs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """The work of a call per second.

    Attributes:
        name: `with the heuristic` or `tuned`.
        tflops: 10¹² floating-point operations per second.
        gbytes: 10⁹ bytes per second.
        intensity: Floating-point operations per byte.
    """

    name: str
    tflops: float
    gbytes: float
    intensity: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallReport:
    """One call with its saved configuration and the search behind it.

    Attributes:
        op, device, call: The key.
        arguments: The arguments as text.
        config: The saved configuration; that of the search's winner if none is saved.
        result: The speed-up or, in a word, why there is none.
        before_us, after_us: Time with the heuristic and with the configuration.
        speedup: `before_us / after_us`.
        search: Progress of the search; `-` without one.
        time: When the call was measured.
        versions: Names and versions of the software it was measured with.
        source: Where the configuration comes from.
        notes: Why the heuristic stays, and further remarks on the search.
        rows: The programs, the fastest first.
        failures: The unmeasured candidates by reason.
        best: Number of measurements and the best time so far, at each improvement.
        measured: Number of measured programs.
        standing: The comparison of the best candidate with the heuristic.
        throughput: The throughput with the heuristic and tuned, if the kernel defines a cost.
    """

    op: str
    device: str
    call: str
    arguments: str
    config: str
    result: str
    before_us: float | None = None
    after_us: float | None = None
    speedup: float | None = None
    search: str = "-"
    time: str = "-"
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    failures: tuple[Failures, ...] = ()
    best: tuple[tuple[int, float], ...] = ()
    measured: int = 0
    standing: dict[str, Any] | None = None
    throughput: tuple[Throughput, ...] = ()

    @property
    def kind(self) -> str:
        """The group of the call in the page's filter."""
        if self.search.startswith((SearchState.PARTIAL, SearchState.FAILED)):
            return "open"
        return "faster" if self.speedup is not None and self.speedup > 1 else "kept"


def run_report(cache: Path | None, output: Path, imports: Sequence[str], *, as_json: bool) -> int:
    """Run `ejkernel report`; return 1 if the cache is empty."""
    store = opened(cache)
    import_operations()  # they define the cost of a call
    if imports:
        look_here()
    for name in imports:
        import_users(name)
    calls = calls_of(store)
    if as_json:
        report.echo_json([dataclasses.asdict(call) for call in calls])
    elif calls:
        output.write_text(page(calls, str(store.path)), encoding="utf-8")
        click.echo(f"{output}: {counted(len(calls), 'call')}")
    else:
        click.echo(f"Nothing is saved in {store.path}.", err=True)
    return 0 if calls else 1


def calls_of(store: PersistentCache) -> list[CallReport]:
    """Return the calls with an entry or a search, sorted by operation, device and arguments."""
    searches: dict[Any, list[StoredSearch]] = {}
    for search in MeasurementStore(store).searches():
        searches.setdefault(search.key, []).append(search)
    entries = {entry.key: entry for _, entry in store.entries() if isinstance(entry.key, ConfigKey)}
    found = [
        _with_search(searches[key], entries.get(key)) if key in searches else _without_search(entries[key])
        for key in searches | entries
    ]
    return sorted(found, key=lambda call: (call.op, call.device, call.arguments, call.call))


def _behind(searches: Sequence[StoredSearch], entry: StoredEntry | None) -> StoredSearch:
    """Return the newest search that found the entry's configuration, else the newest."""
    same = (s for s in searches if entry is not None and s.winner.config == entry.config)
    return next(same, searches[0])


def _without_search(entry: StoredEntry) -> CallReport:
    progress = SearchProgress.stored_in(entry.measured)
    times = [_stored_time(entry, name) for name in ("heuristic", "winner")]
    return CallReport(
        **_identity(entry.key, entry.call, entry.provenance),
        config=compact(entry.config),
        result=stored_in_brief(entry.measured, entry.speedup),
        before_us=times[0],
        after_us=times[1],
        speedup=entry.speedup,
        search="-" if progress is None else progress.in_words,
        source=f"{_place(entry)}; the file of its search is not here",
    )


def _stored_time(entry: StoredEntry, name: str) -> float | None:
    times = (entry.measured or {}).get(name)
    found = times.get("median_us") if isinstance(times, dict) else None
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _place(entry: StoredEntry) -> str:
    return "saved in a shared cache or in memory" if entry.path is None else f"saved in {printable(entry.path)}"


def _identity(key: ConfigKey, call: Any, provenance: Any) -> dict[str, Any]:
    return {
        "op": printable(key.op),
        "device": printable(key.device),
        "call": printable(key.call),
        "arguments": arguments(call),
        "time": printable(provenance.get("time", "-"))[:16].replace("T", " "),
        "versions": {name: printable(provenance[name]) for name in _VERSIONS if provenance.get(name)},
    }


def _with_search(searches: Sequence[StoredSearch], entry: StoredEntry | None) -> CallReport:
    search = _behind(searches, entry)
    winner, groups = search.winner, _grouped(search.outcomes)
    source = f"not saved: {search.not_saved or search.progress.in_words + ' search'}"
    config = "-" if winner.measurement is None else compact(winner.config)
    # The page shows the comparison with the heuristic in full.
    notes = [search.why, *remarks(dataclasses.replace(search, challenge=None))]
    if entry is not None:
        source, config = _place(entry), compact(entry.config)
        if entry.config != winner.config:
            notes.append(f"this is the newest search; it chose {compact(winner.config)} instead")
    if len(searches) > 1:
        others = counted(len(searches) - 1, "other search", "other searches")
        notes.append(f"the cache has {others} of this call, not shown here")
    return CallReport(
        **_identity(search.key, search.call, search.provenance),
        config=config,
        result=search.in_a_word,
        before_us=_us(search.before),
        after_us=_us(search.after),
        speedup=search.speedup,
        search=search.progress.in_words,
        source=source,
        notes=tuple(map(printable_lines, filter(None, notes))),
        rows=tuple(_row(program, search, groups) for program in ranked(search.outcomes)),
        failures=tuple(groups.values()),
        best=tuple(_best_so_far(search.outcomes)),
        measured=sum(outcome.measurement is not None for outcome in search.outcomes),
        standing=_standing(search),
        throughput=tuple(_throughput(search)),
    )


def _standing(search: StoredSearch) -> dict[str, Any] | None:
    found = search.challenge
    if found is None:
        return None
    return found.data() | {"rival": compact(found.challenger), "in_words": found.came_out.in_words}


def _row(program: tuple[Outcome, tuple[Outcome, ...]], search: StoredSearch, groups: dict[Any, Failures]) -> Row:
    first, twins = program
    row = Row(name=program_name(program), mark="", status=printable(first.status))
    if first.measurement is None:
        return dataclasses.replace(row, group=_number(first, groups))
    own = (first, *twins)
    mark = "heuristic" if any(outcome is search.heuristic for outcome in own) else ""
    if any(outcome is search.winner for outcome in own):
        mark = "heuristic kept" if mark else "winner"
    samples = first.measurement.samples
    few = len(samples) < 4
    low, high = (min(samples), max(samples)) if few else np.quantile(samples, (0.25, 0.75), method="weibull")
    return dataclasses.replace(
        row,
        mark=mark,
        time_us=_us(first.measurement.median),
        low_us=float(low) * 1e6,
        high_us=float(high) * 1e6,
        samples=len(samples),
        compile_s=first.compile_seconds,
    )


def _group_of(outcome: Outcome) -> tuple[str, str]:
    return str(outcome.status), _NUMBER.sub("#", outcome.reason)


def _number(outcome: Outcome, groups: dict[Any, Failures]) -> int:
    keys = list(groups)
    key = _group_of(outcome)
    return keys.index(key) + 1 if key in keys else len(keys) if outcome.status != Status.SAME else 0


def _grouped(outcomes: Sequence[Outcome]) -> dict[Any, Failures]:
    """Return the unmeasured candidates by status and reason, ignoring numbers; the most frequent first."""
    found: dict[Any, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.measurement is None and outcome.status != Status.SAME:
            found.setdefault(_group_of(outcome), []).append(outcome)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    groups = {key: _failures(str(members[0].status), members[0].reason, members) for key, members in ordered[:_REASONS]}
    rest = [outcome for _, members in ordered[_REASONS:] for outcome in members]
    if rest:
        groups["rest"] = _failures("various", f"{len(ordered) - _REASONS} other reasons", rest)
    return groups


def _failures(status: str, reason: str, outcomes: Sequence[Outcome]) -> Failures:
    configs = tuple(compact(outcome.config) for outcome in outcomes)
    return Failures(status=printable(status), reason=reason or "no reason recorded", configs=configs)


def _best_so_far(outcomes: Sequence[Outcome]) -> Iterator[tuple[int, float]]:
    """Yield the number of measurements and the best time in microseconds, at each improvement."""
    best = math.inf
    measured = (outcome.seconds for outcome in outcomes if outcome.seconds is not None)
    for count, seconds in enumerate(measured, 1):
        if seconds < best:
            best = seconds
            yield count, best * 1e6


def _throughput(search: StoredSearch) -> Iterator[Throughput]:
    """Yield the throughput with the heuristic and tuned; nothing without a cost."""
    cost = _cost(search)
    if cost is None or cost.bytes <= 0:
        return
    for name, seconds in (("with the heuristic", search.before), ("tuned", search.after)):
        if seconds is not None:
            rates = {"tflops": cost.flops / seconds * 1e-12, "gbytes": cost.bytes / seconds * 1e-9}
            yield Throughput(name=name, **rates, intensity=cost.flops / cost.bytes)


def _cost(search: StoredSearch) -> Cost | None:
    try:
        inv = rebuild(search.call, key=search.key.call, op=search.key.op)
    except DescriptionError as error:  # e.g. the kernel's module is not imported
        logger.info("no throughput of %s: %s", printable(search.key), error)
        return None
    try:
        cost: Cost | None = inv.node.spec.kernel.cost(inv)
    except Exception as error:  # noqa: BLE001 - an error in the user's method
        logger.warning("no throughput of %s: cost raised %s", printable(search.key), error_text(error))
        return None
    return cost


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 4)


# --- the page ---


@dataclasses.dataclass(frozen=True)
class Axis:
    """A logarithmic axis of times that spans the quartiles of all rows."""

    low: float
    high: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Axis:
        """Return the axis of a search; any axis if nothing was measured."""
        ends = [end for row in rows if row.time_us is not None for end in (row.low_us, row.time_us, row.high_us)]
        return cls(min(ends, default=1.0), max(ends, default=1.0))

    def at(self, microseconds: float) -> float:
        """Return the place of a time in percent, from 4 to 96."""
        if self.high <= self.low:
            return 50.0
        return round(4 + 92 * math.log(microseconds / self.low) / math.log(self.high / self.low), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the two ends and the middle."""
        middle = math.sqrt(self.low * self.high)
        times = [self.low] if self.high <= self.low else [self.low, middle, self.high]
        return [(self.at(time), in_words(time)) for time in times]


def best_path(call: CallReport) -> str:
    """Return the steps of the best time so far as an SVG path in a box of 600 by 100; lower is faster."""
    axis = Axis(call.best[-1][1], call.best[0][1])
    path = ""
    for count, time in call.best:
        x = 600 * (count - 1) / max(call.measured - 1, 1)
        y = 100 - axis.at(time)
        path += f"H{x:.0f}V{y:.0f}" if path else f"M{x:.0f} {y:.0f}"
    return path + "H600"


def in_words(microseconds: float | None) -> str:
    """Return a time given in microseconds as text."""
    return duration(None if microseconds is None else microseconds / 1e6)


def rows_of(call: CallReport) -> Iterator[tuple[Row, str]]:
    """Return the rows of a call, each with its time; all times are in one unit."""
    times = durations(None if row.time_us is None else row.time_us / 1e6 for row in call.rows)
    return zip(call.rows, times, strict=True)


def page(calls: Sequence[CallReport], place: str = "") -> str:
    """Return the page as HTML.

    Args:
        calls: The calls.
        place: The folder of the cache.

    Raises:
        ConfigError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(f"Jinja2 is not installed ({error}): pip install 'ejkernel-ops[report]'.") from error
    text = resources.files("ejkernel.cli").joinpath("report_page.html").read_text(encoding="utf-8")
    script = _SCRIPT.search(text)
    assert script is not None  # of our template
    # A second barrier after escaping: the browser runs no other script.
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Files may hold any number.
    speedups = [call.speedup for call in calls if call.speedup is not None and 0 < call.speedup < math.inf]
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None
    html: str = environment.from_string(text).render(
        calls=calls,
        place=printable(place),
        digest=digest,
        mean=ratio(mean),
        devices=sorted({call.device for call in calls}),
        version=version("ejkernel-ops") or "",
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        Axis=Axis,
        us=in_words,
        best_path=best_path,
        rows_of=rows_of,
        counted=counted,
        examples=_EXAMPLES,
    )
    return html
