# SPDX-License-Identifier: Apache-2.0
"""The log of a search as text: one line of JSON about the search, then one short line per outcome.

The first line is an object (`_Header`). Each outcome is an array with the columns named in the header. The last line
holds the digest of all lines before it. New fields and columns need a default, so that older logs can still be read.
Fields for cases exist only in searches with several cases.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import PairedComparison
from ejkernel.ops.autotuner.measure.sampling import Case
from ejkernel.ops.autotuner.search.model import Record
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.outcome import STORED_REASON, AutotuneData, Findings, Outcome, summary_of
from ejkernel.ops.autotuner.trials.programs import are_same
from ejkernel.ops.autotuner.trials.status import CameOut, Status
from ejkernel.ops.config._files import UnusableError, restored_key
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.step_notes import StepNote
from ejkernel.ops.core.declared_names import PLAIN, read_config, type_name
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError, SerializationError
from ejkernel.ops.utils.error_text import printable, printable_json, shortened
from ejkernel.ops.utils.formatting import arguments
from ejkernel.ops.utils.storage.serialize import (
    check_schema,
    describe,
    from_plain,
    parse_json,
    read_lines,
    sealed_lines,
    stable_json,
    to_data,
)

logger = logging.getLogger(__name__)

SCHEMA: Final = 2  # increase when the layout changes; logs with another schema are skipped with a warning
_WHAT: Final = "the log of a search"
_MOST: Final = 100_000  # outcomes of a search
# Fields of `Findings` that a header holds as they are.
_FLAGS: Final = ("undecided", "interrupted", "input_sets", "unconfirmed", "lacks_reference", "program", "times")
_TEXTS: Final = ("why", "rule_fault", "not_saved")
_TIMES_US: Final = (1e-6, 1e15)  # range of valid times: a picosecond to thirty years
# Without a measurement, these statuses say nothing about a configuration.
_OPTIONAL: Final = ("cases", "lacks_reference", "program", "times")
_UNKNOWN: Final = frozenset({Status.SAME, Status.SKIPPED, Status.READY, Status.PRUNED})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredSearch(Findings):
    """A search loaded from its file; logs of earlier versions may lack the reasons for the result.

    Attributes:
        key: The key of the call.
        call: The abstract call as plain data.
        config_type: `module.Qualname` of the configurations' class, or `json` for plain data. The outcomes hold plain
            data in both cases.
        winner_index: The index of the winner in the outcomes.
        provenance: Device, versions and time of writing.
        path: The file; `None` for a search held in memory because it could not be written.
    """

    key: ConfigKey
    call: Any
    config_type: str
    winner_index: int
    provenance: Mapping[str, Any]
    path: Path | None = None

    @property
    def winner(self) -> Outcome:
        """The winner's outcome."""
        return self.outcomes[self.winner_index]

    @property
    def was_saved(self) -> bool:
        """Whether it saved its winner's configuration."""
        # Older logs have no `not_saved`; a search that ended early then saved a winner, but not the heuristic.
        return not (self.not_saved or (self.is_kept and not self.progress.state.is_finished))

    def replaced_by(self, entry: StoredEntry) -> StoredSearch:
        """Return the search as its entry shows it.

        If another configuration is saved, it is in `stays`. But if the program's step dropped the winner in favour of
        another candidate, this candidate counts as the winner.
        """
        if are_same(self.winner.config, entry.config):
            return self
        note = StepNote.stored_in(entry.measured)
        if note is not None and note.why and are_same(self.winner.config, note.dropped):
            places = [i for i, outcome in enumerate(self.outcomes) if are_same(outcome.config, entry.config)]
            if places:
                return dataclasses.replace(self, winner_index=places[0], why=note.in_words)
        return dataclasses.replace(self, stays=entry.config)

    @property
    def shares(self) -> dict[str, float]:
        """The weight of each call in the mean, by call key."""
        shares: dict[str, float] = {} if self.cases else {self.key.call: 1.0}
        for case in self.cases:
            shares[case.call] = shares.get(case.call, 0.0) + case.weight
        return shares

    def record(self, label: str = "", cfg_type: object = None) -> Record:
        """Return the times of the call as the starting point of a new search.

        Configurations that were never run, or share the program of another, are left out. Configurations that cannot
        be decoded are left out and logged.

        Args:
            label: The source of the times; device and key by default.
            cfg_type: The configurations' type; `None` for the type named in the file, if files may name it.
        """
        known = [o for o in self.outcomes if o.measurement is not None or o.status not in _UNKNOWN]
        times = tuple((o.config, o.seconds_on(self.key.call)) for o in self._decoded(known, cfg_type))
        return Record(label or f"{self.key.device} {self.key.call}", times)

    def measured(self, cfg_type: object = None) -> tuple[Outcome, ...]:
        """Return the measured outcomes except the heuristic's, with decoded configurations.

        Configurations that cannot be decoded are left out and logged.
        """
        measured = [o for o in self.outcomes[1:] if o.status == Status.MEASURED and o.measurement is not None]
        return tuple(self._decoded(measured, cfg_type))

    def _decoded(self, outcomes: Sequence[Outcome], cfg_type: object) -> list[Outcome]:
        """Return the outcomes with decoded configurations, without those that cannot be decoded."""
        found, refused = [], []
        for outcome in outcomes:
            data = outcome.config
            try:
                config = read_config(data, self.config_type, cfg_type)
                found.append(dataclasses.replace(outcome, config=config))
            except ConfigError as error:
                refused.append(error)
        if refused:
            text = "%d of %d configurations in the log of %s cannot be decoded, e.g.: %s"
            logger.info(text, len(refused), len(self.outcomes), printable(self.path or self.key), refused[0])
        return found

    def summary(self, *, width: int | None = None) -> str:
        """Return a table of all candidates, the fastest first, at most `width` characters wide."""
        time = str(self.provenance.get("time", "at an unknown time"))[:19].replace("T", " ")
        title = f"{self.key.op}  {arguments(self.call)}", f"{self.key.device}, call {self.key.call}, measured {time}"
        return summary_of(title, self, width=width)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StoredChallenge:
    """The fields of `Challenge.data`."""

    rival: Any
    verdict: str
    rival_us: float
    heuristic_us: float
    speedup: float | None
    rounds: int
    rival_faster: int
    heuristic_faster: int
    confidence: float
    judged_by: str
    alone: bool
    doubt: str = ""
    interval: tuple[float, float] | None = None
    more_bytes: int = 0

    def restored(self) -> Challenge:
        """Return the `Challenge`.

        Raises:
            UnusableError: The figures are invalid or inconsistent.
        """
        figures = (self.rival_us, self.heuristic_us, self.confidence, 1.0 if self.speedup is None else self.speedup)
        won = (self.rival_faster, self.heuristic_faster)
        # The figures are shown and compared, so reject inconsistent ones.
        possible = min(won) >= 0 and sum(won) <= self.rounds and all(0 <= figure < math.inf for figure in figures)
        low, high = self.interval or (1.0, 1.0)
        if self.verdict not in list(CameOut) or not possible or not 0 < low <= high < math.inf:
            raise UnusableError(f"line 1: the figures of its comparison are inconsistent: {self}")
        comparison = PairedComparison(
            wins=self.verdict == CameOut.WINS,
            settled=self.verdict != CameOut.UNDECIDED,
            speedup=math.inf if self.speedup is None else self.speedup,
            confidence=self.confidence,
            pairs=self.rounds,
            ahead=self.rival_faster,
            behind=self.heuristic_faster,
            challenger=self.rival_us / 1e6,
            incumbent=self.heuristic_us / 1e6,
            judged_by=self.judged_by,
            doubt=self.doubt,
            interval=self.interval,
            more_bytes=self.more_bytes,
        )
        return Challenge(self.rival, comparison, is_confirmation=self.alone)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The first line.

    Attributes:
        schema: Version of this layout.
        key, call, config_type, provenance: As in `StoredSearch`.
        fields: Field names of the configurations; each line holds the values in this order. `None`: each line holds
            the whole configuration.
        winner: Index of the winner's line, from 0.
        seconds: Duration of the search.
        outcomes: Number of outcome lines.
        columns: Columns of these lines.
        twins: For each outcome with status `same`: its line and the line of the candidate with the same program.
        why, undecided, interrupted, rule_fault, input_sets, planned, unconfirmed, not_saved, lacks_reference,
        program, times: As in `AutotuneData`; the last three are only written if they are set.
        standing: `AutotuneData.challenge`.
        cases: The cases of the search, without samples; `None` if it has a single case.
    """

    schema: int
    key: Any
    call: Any
    config_type: str
    fields: list[str] | None
    winner: int
    seconds: float
    outcomes: int
    columns: list[str]
    provenance: dict[str, Any]
    twins: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    why: str = ""
    standing: _StoredChallenge | None = None
    undecided: bool = False
    interrupted: bool = False
    rule_fault: str = ""
    input_sets: int = 0
    planned: int = 0
    unconfirmed: bool = False
    not_saved: str = ""
    lacks_reference: bool = False
    program: str = ""
    times: int = 0
    cases: list[Case] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The line of one outcome; times are microseconds per call, and medians for cases."""

    config: Any
    status: str
    samples_us: list  # type: ignore[type-arg]  # any number of floats, checked by `_outcome`
    method: str | None
    compile_s: float | None
    peak_bytes: int | None
    reason: str
    spilled: int | None = None
    cases_us: list | None = None  # type: ignore[type-arg]  # as `samples_us`
    relative: float | None = None


_COLUMNS: Final = [field.name for field in dataclasses.fields(_Row)]
_NEEDED: Final = [field.name for field in dataclasses.fields(_Row) if field.default is dataclasses.MISSING]


def dump(data: AutotuneData, provenance: Mapping[str, object]) -> str:
    """Return a search as text.

    Raises:
        SerializationError: A configuration has no JSON form.
    """
    configs = [to_data(outcome.config) for outcome in data.outcomes]
    place = {stable_json(config): at for at, config in enumerate(configs)}  # JSON distinguishes 1, 1.0 and True
    # Write field names once rather than in each of hundreds of lines.
    fields = list(configs[0]) if isinstance(configs[0], dict) else None
    if fields is not None and any(not isinstance(c, dict) or c.keys() != configs[0].keys() for c in configs):
        fields = None
    # Configurations of mixed types are loaded as plain data.
    types = {type_name(outcome.config) for outcome in data.outcomes}
    # Older versions do not know these columns.
    unused = {"cases_us"} if not data.cases else set()
    if all(o.measurement is None or o.measurement.relative is None for o in data.outcomes):
        unused.add("relative")
    columns = [name for name in _COLUMNS if name not in unused]
    header = _Header(
        schema=SCHEMA,
        key=data.key,
        call=data.inv.description,
        config_type=types.pop() if len(types) == 1 else PLAIN,
        fields=fields,
        winner=next(i for i, outcome in enumerate(data.outcomes) if outcome is data.winner),
        seconds=round(data.seconds, 3),
        planned=data.planned,
        outcomes=len(configs),
        columns=columns,
        provenance=dict(provenance),
        twins=[(i, place[stable_json(to_data(o.twin))]) for i, o in enumerate(data.outcomes) if o.twin is not None],
        standing=None if data.challenge is None else _StoredChallenge(**data.challenge.data()),
        cases=[dataclasses.replace(case, samples=()) for case in data.cases] or None,
        why=shortened(data.why, STORED_REASON),
        rule_fault=shortened(data.rule_fault, STORED_REASON),
        not_saved=shortened(data.not_saved, STORED_REASON),
        **{name: getattr(data, name) for name in _FLAGS},
    )
    rows = (
        _row(config if fields is None else [config[name] for name in fields], outcome)
        for config, outcome in zip(configs, data.outcomes, strict=True)
    )
    # Older versions do not know these fields.
    first = {name: value for name, value in to_data(header).items() if value or name not in _OPTIONAL}
    if header.standing is not None and not header.standing.more_bytes:
        del first["standing"]["more_bytes"]
    lines = [first, *([getattr(row, name) for name in columns] for row in rows)]
    text = "".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
    return sealed_lines(printable_json(text))


def _row(config: object, outcome: Outcome) -> _Row:
    measured, compiled = outcome.measurement, outcome.compile_seconds
    return _Row(
        config=config,
        status=str(outcome.status),
        samples_us=[] if measured is None else [_short(sample) for sample in measured.samples],
        method=None if measured is None else measured.method,
        compile_s=None if compiled is None else round(compiled, 3),
        peak_bytes=outcome.peak_bytes,
        reason=shortened(outcome.reason, STORED_REASON),
        spilled=outcome.spilled,
        relative=None if measured is None or measured.relative is None else float(f"{measured.relative:.5g}"),
        cases_us=[_short(case.median) for case in outcome.cases if case.median is not None] or None,
    )


def _short(seconds: float) -> float:
    return float(f"{seconds * 1e6:.5g}")


def lines_of(raw: bytes) -> list[str]:
    """Return the lines of a file written by `dump`, after checking the digest.

    Raises:
        UnusableError: The file was damaged, or comes from an unknown version.
    """
    try:
        return read_lines(raw, SCHEMA, _WHAT)
    except SerializationError as error:
        raise UnusableError(str(error)) from error


def load_header(lines: Sequence[str]) -> tuple[ConfigKey, Any]:
    """Return the key and the abstract call of a search without reading its outcomes.

    Raises:
        UnusableError: This version cannot read the lines.
    """
    header = _header(lines[0])
    return header.key, header.call


def load(lines: Sequence[str], path: Path | None = None) -> StoredSearch:
    """Return the search stored in `lines`.

    Raises:
        UnusableError: This version cannot read the lines.
    """
    header = _header(lines[0])
    if len(lines) != header.outcomes + 1:
        raise UnusableError(f"it has {len(lines)} lines instead of {header.outcomes + 1}")
    if header.outcomes > _MOST:
        raise UnusableError(f"it has {header.outcomes} outcomes; at most {_MOST} are allowed")
    for number in (header.winner, *itertools.chain.from_iterable(header.twins)):
        if not 0 <= number < header.outcomes:
            raise UnusableError(f"its winner or a twin refers to outcome {number} of {header.outcomes}")
    outcomes = [_outcome(line, number, header) for number, line in enumerate(lines[1:], 2)]
    for twin, owner in header.twins:
        outcomes[twin] = dataclasses.replace(outcomes[twin], twin=outcomes[owner].config)
    return StoredSearch(
        key=header.key,
        call=header.call,
        config_type=header.config_type,
        outcomes=tuple(outcomes),
        winner_index=header.winner,
        provenance=header.provenance,
        path=path,
        seconds=header.seconds,
        planned=min(header.planned, _MOST),
        challenge=None if header.standing is None else header.standing.restored(),
        **{name: getattr(header, name) for name in (*_FLAGS, *_TEXTS)},
    )


def _header(line: str) -> _Header:
    try:
        data = parse_json(line)
        check_schema(data, SCHEMA, _WHAT)
        header = from_plain(data, _Header)
    except SerializationError as error:
        raise UnusableError(f"line 1: {error}") from error
    key, columns, fields = restored_key(header.key), header.columns, header.fields or []
    if not isinstance(key, ConfigKey):
        raise UnusableError(f"line 1: its key is not the key of a call: {describe(header.key)}")
    if not set(columns) <= set(_COLUMNS) or not set(_NEEDED) <= set(columns) or len(set(columns)) != len(columns):
        raise UnusableError(f"line 1: its columns are {describe(columns)}; the known columns are {_COLUMNS}")
    if not all(0 < case.weight <= 1 for case in header.cases or ()):
        raise UnusableError(f"line 1: weights of cases must be between 0 and 1, got {describe(header.cases)}")
    if len(set(fields)) != len(fields):
        raise UnusableError(f"line 1: its configurations have a duplicate field: {describe(fields)}")
    return dataclasses.replace(header, key=key)


def _outcome(line: str, number: int, header: _Header) -> Outcome:
    fields = header.fields
    try:
        row = from_plain(dict(zip(header.columns, from_plain(parse_json(line), list[Any]), strict=True)), _Row)
        config = row.config if fields is None else dict(zip(fields, from_plain(row.config, list[Any]), strict=True))
    except (ValueError, TypeError) as error:  # invalid JSON, types, or number of columns
        raise UnusableError(f"line {number}: {error}") from error
    _check_times(row.samples_us, number)
    cases = _cases(row, number, header)
    samples = tuple(sample / 1e6 for sample in row.samples_us)
    return Outcome(
        config=config,
        status=row.status,
        reason=row.reason,
        measurement=_measurement(row, samples, cases) if samples else None,
        compile_seconds=row.compile_s,
        peak_bytes=row.peak_bytes,
        spilled=row.spilled,
    )


def _measurement(row: _Row, samples: tuple[float, ...], cases: tuple[Case, ...]) -> Measurement:
    relative = row.relative if row.relative is not None and 0 < row.relative < math.inf else None
    return Measurement(samples=samples, method=row.method or "", cases=cases, relative=relative)


def _check_times(times: Sequence[Any], number: int) -> None:
    least, most = _TIMES_US
    if not all(type(sample) in (int, float) and least <= sample <= most for sample in times):
        raise UnusableError(f"line {number}: samples must be between {least} and {most}, got {describe(times)}")


def _cases(row: _Row, number: int, header: _Header) -> tuple[Case, ...]:
    """Return the cases of an outcome, each with its median as the only sample."""
    times, cases = row.cases_us or [], header.cases or []
    _check_times(times, number)
    if times and len(times) != len(cases):
        raise UnusableError(f"line {number}: it has times of {len(times)} cases instead of {len(cases)}")
    return tuple(
        dataclasses.replace(case, samples=(microseconds / 1e6,))
        for case, microseconds in zip(cases, times, strict=False)
    )
