# SPDX-License-Identifier: Apache-2.0
"""The log of a search as text: a `StoredSearch` as JSON, with each outcome on a line of its own.

The last line holds the digest of all lines before it. Fields with their default values are left out, so that logs stay
readable when a field with a default is added.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import PairedComparison
from ejkernel.ops.autotuner.measure.sampling import Case
from ejkernel.ops.autotuner.search.model import Record
from ejkernel.ops.autotuner.trials.outcome import STORED_REASON, AutotuneData, Findings, Outcome, summary_of
from ejkernel.ops.autotuner.trials.programs import are_same
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config._files import UnusableError, or_unusable
from ejkernel.ops.config.entries import StepNote, StoredEntry
from ejkernel.ops.core.declared_names import PLAIN, read_config, type_name
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.error_text import printable, printable_json, shortened
from ejkernel.ops.utils.formatting import arguments
from ejkernel.ops.utils.storage.serialize import (
    check_schema,
    describe,
    from_plain,
    parse_json,
    read_lines,
    sealed_lines,
    to_data,
)

logger = logging.getLogger(__name__)

SCHEMA: Final = 3  # increase when the layout changes; logs with another schema are skipped with a warning
_WHAT: Final = "the log of a search"
_MOST: Final = 100_000  # lines of a log
_TIMES: Final = (1e-12, 1e9)  # range of valid times in seconds: a picosecond to thirty years
_RATIO: Final = _TIMES[1] / _TIMES[0]  # the largest ratio of two times
_COUNTS: Final = range(1 << 63)  # valid numbers of bytes and calls; larger ones may not become floats
# Without a measurement, these statuses say nothing about a configuration.
_UNKNOWN: Final = frozenset({Status.SAME, Status.SKIPPED, Status.READY, Status.PRUNED})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredSearch(Findings):
    """A search as its file holds it.

    Attributes:
        key: The key of the call.
        call: The abstract call as plain data.
        config_type: `module.Qualname` of the configurations' class, or `json` for plain data. The outcomes hold plain
            data in both cases.
        winner_index: The index of the winner in the outcomes.
        provenance: Device, versions and time of writing.
        path: The file, if it is known.
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
                config = read_config(data, self.config_type, cfg_type, self.key.op)
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


def dump(data: AutotuneData, provenance: Mapping[str, object]) -> str:
    """Return a search as text.

    Raises:
        SerializationError: A configuration has no JSON form.
    """
    # Configurations of mixed types are loaded as plain data.
    types = {type_name(outcome.config) for outcome in data.outcomes}
    found = {field.name: getattr(data, field.name) for field in dataclasses.fields(Findings)}
    found |= {name: shortened(found[name], STORED_REASON) for name in ("why", "rule_fault", "not_saved")}
    # Another search saves the configuration that stays, and may replace it later.
    found |= {"outcomes": (), "seconds": round(data.seconds, 3), "stays": None, "is_only_here": False}
    search = StoredSearch(
        key=data.key,
        call=data.inv.description,
        config_type=types.pop() if len(types) == 1 else PLAIN,
        winner_index=next(i for i, outcome in enumerate(data.outcomes) if outcome is data.winner),
        provenance=dict(provenance),
        **found,
    )
    lines = [{"schema": SCHEMA, **_without_defaults(search)}, *map(_row, data.outcomes)]
    text = "".join(json.dumps(to_data(line), separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
    return sealed_lines(printable_json(text))


def _row(outcome: Outcome) -> dict[str, Any]:
    """Return the line of an outcome: times have five digits, and each case has its median only."""
    row = _without_defaults(outcome) | {"reason": shortened(outcome.reason, STORED_REASON)}
    if (measured := outcome.measurement) is not None:
        cases = tuple(
            dataclasses.replace(each, samples=(_short(each.median),)) for each in outcome.cases if each.samples
        )
        samples = tuple(map(_short, measured.samples))
        row["measurement"] = _without_defaults(
            dataclasses.replace(measured, samples=samples, cases=cases, relative=_short(measured.relative))
        )
    return row


def _without_defaults(value: Any) -> dict[str, Any]:
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: found for field, found in fields if found is not field.default}


def _short(number: float | None) -> Any:
    return None if number is None else float(f"{number:.5g}")


@or_unusable()
def lines_of(raw: bytes) -> list[str]:
    """Return the lines of a file written by `dump`, after checking the digest.

    Raises:
        UnusableError: The file was damaged, or comes from an unknown version.
    """
    return read_lines(raw, SCHEMA, _WHAT)


@or_unusable()
def load_header(lines: Sequence[str]) -> tuple[ConfigKey, Any]:
    """Return the key and the abstract call of a search without reading its outcomes.

    Raises:
        UnusableError: This version cannot read the lines.
    """
    header = _header(lines)
    return from_plain(header.get("key"), ConfigKey), header.get("call")


@or_unusable()
def load(lines: Sequence[str], path: Path | None = None) -> StoredSearch:
    """Return the search stored in `lines`.

    Raises:
        UnusableError: This version cannot read the lines.
    """
    if len(lines) > _MOST:
        raise UnusableError(f"it has {len(lines) - 1} outcomes; fewer than {_MOST} are allowed")
    found = {**_header(lines), "outcomes": [parse_json(line) for line in lines[1:]]}
    search = dataclasses.replace(from_plain(found, StoredSearch), path=path)
    _check(search)
    return search


def _header(lines: Sequence[str]) -> dict[str, Any]:
    header = parse_json(lines[0])
    check_schema(header, SCHEMA, _WHAT)
    del header["schema"]
    return cast("dict[str, Any]", header)


def _check(search: StoredSearch) -> None:
    """Check the figures that reports show and compare.

    Raises:
        UnusableError: They are invalid or inconsistent.
    """
    if not 0 <= search.winner_index < len(search.outcomes):
        raise UnusableError(f"its winner is outcome {search.winner_index} of {len(search.outcomes)}")
    if search.planned > _MOST:
        raise UnusableError(f"it has {describe(search.planned)} candidates")
    if search.times not in _COUNTS:
        raise UnusableError(f"its call is made {describe(search.times)} times")
    for number, outcome in enumerate(search.outcomes, 2):
        if not all(count in _COUNTS for count in _bytes_of(outcome) if count is not None):
            raise UnusableError(f"line {number}: numbers of bytes must be between 0 and 2**63")
        if outcome.measurement is not None and (why := _why_invalid(outcome.measurement, search.cases)):
            raise UnusableError(f"line {number}: {why}")
    if search.challenge is not None and not _is_consistent(search.challenge.comparison):
        raise UnusableError(f"the figures of its comparison are inconsistent: {search.challenge.comparison}")


def _bytes_of(outcome: Outcome) -> tuple[int | None, ...]:
    measured = outcome.measurement
    own = (outcome.peak_bytes, outcome.spilled)
    return own if measured is None else (*own, measured.peak_bytes, measured.output_bytes)


def _why_invalid(found: Measurement, cases: Sequence[Case]) -> str:
    times = [*found.samples, *(seconds for each in found.cases for seconds in each.samples)]
    if not found.samples or not all(_TIMES[0] <= seconds <= _TIMES[1] for seconds in times):
        return f"samples must be between {_TIMES[0]} and {_TIMES[1]} seconds, got {describe(times)}"
    if found.relative is not None and found.relative <= 0:
        return f"its time relative to the heuristic's is {found.relative}"
    if not all(0 < each.weight <= 1 for each in found.cases):
        return "weights of cases must be between 0 and 1"
    own, others = ([dataclasses.replace(each, samples=()) for each in of] for of in (found.cases, cases))
    return "" if own in ([], others) else "its cases are not those of the other lines"


def _is_consistent(found: PairedComparison) -> bool:
    low, high = found.interval or (1.0, 1.0)
    has_rounds = min(found.ahead, found.behind) >= 0 and found.ahead + found.behind <= found.pairs
    has_times = all(0 <= seconds <= _TIMES[1] for seconds in (found.challenger, found.incumbent))
    has_ratios = 1 / _RATIO <= found.speedup <= _RATIO and 0 < low <= high <= _RATIO and 0 <= found.confidence <= 1
    return has_rounds and has_times and has_ratios and found.more_bytes in _COUNTS
