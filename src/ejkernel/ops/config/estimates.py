# SPDX-License-Identifier: Apache-2.0
"""Estimated times of configurations: one JSON file per call, in `estimated/` beside the cache's entries.

A simulator of a compiler made the estimates; nothing was measured. They order the candidates of a later search, and
answer calls that no measurement answers.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax

from ejkernel.ops.config._files import CallFiles, CallRecord, UnusableError, now, version
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.core.declared_names import config_type_of, decode_config, type_name
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError, SerializationError
from ejkernel.ops.utils.formatting import durations
from ejkernel.ops.utils.storage.serialize import sealed_json, to_data

SCHEMA: Final = 1
FOLDER: Final = "estimated"
PRUNED_FROM: Final = 1.3  # times the best estimate; slower candidates are not measured
WITHIN_ERROR: Final = 1.1  # ratios of two estimates below this are within the simulator's error


class EstimatedTime(NamedTuple):
    """A configuration, its estimated seconds, and these without the simulator's known excess."""

    config: Any
    seconds: float
    least: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedRow:
    """One configuration.

    Attributes:
        config: The configuration as plain data.
        config_type: Its type.
        us: Estimated microseconds; `None` if the simulator refuses it.
        least_us: The same without the simulator's known excess for short grid steps; `None` if unknown.
        cycles: Estimated cycles.
        simulated: The part of the call that was simulated, in words; empty for the whole call.
        reason: Why it is refused.
        is_heuristic: Whether it is the heuristic's configuration.
    """

    config: Any
    config_type: str
    us: float | None = None
    least_us: float | None = None
    cycles: float | None = None
    simulated: str = ""
    reason: str = ""
    is_heuristic: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimates(CallRecord):
    """The estimates of one call, as stored in its file.

    Attributes:
        status: Always `estimated`.
        method: How they were made.
        versions: Of the compiler with the simulator, and of JAX.
        time: When they were made.
        rows: The configurations.
        unfinished: Whether the run that made them has not ended; the next run then uses them again.
    """

    status: str
    method: str
    versions: dict[str, str]
    time: str
    rows: list[EstimatedRow]
    unfinished: bool = False

    @classmethod
    def of(cls, inv: Invocation[Any, Any], method: str, rows: Sequence[EstimatedRow]) -> Estimates:
        """Return the estimates of a call, made now by the installed compiler."""
        return cls(
            schema=SCHEMA,
            key=inv.key._asdict(),
            call=inv.description,
            status=FOLDER,
            method=method,
            versions={"jax": jax.__version__, "libtpu": str(version("libtpu"))},
            time=now().astimezone(datetime.UTC).isoformat(timespec="seconds"),
            rows=list(rows),
        )

    @property
    def provenance(self) -> Mapping[str, str]:
        """Versions, device and time, as entries have them."""
        return {**self.versions, "device": self.key["device"], "time": self.time}

    @property
    def ranked(self) -> list[EstimatedRow]:
        """The configurations with an estimate, the fastest first."""
        return sorted((row for row in self.rows if row.us is not None), key=_us)

    @property
    def heuristic(self) -> EstimatedRow | None:
        """The heuristic's row, if it has an estimate."""
        return next((row for row in self.ranked if row.is_heuristic), None)

    def times(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> list[EstimatedTime]:
        """Return the estimates of decodable configurations, the fastest first."""
        config_type_of(inv, kernel)  # lets the rows name it
        found = []
        for row in self.ranked:
            try:
                config = decode_config(row.config, row.config_type, inv.op_id_v)
                found.append(EstimatedTime(config, _us(row) / 1e6, _least_us(row) / 1e6))
            except (ConfigError, SerializationError):  # of another version of the kernel
                continue
        return found

    def source(self) -> str:
        """Return the simulator, its version and the date, as text."""
        return f"estimated by the simulator of libtpu {self.versions.get('libtpu')}, {self.time[:10]}, not measured"


def _us(row: EstimatedRow) -> float:
    return math.inf if row.us is None else row.us


def _least_us(row: EstimatedRow) -> float:
    return _us(row) if row.least_us is None else row.least_us


def row_of(config: object, **known: Any) -> EstimatedRow:
    """Return the row of a configuration."""
    return EstimatedRow(config=to_data(config), config_type=type_name(config), **known)


def chosen(found: Estimates) -> tuple[EstimatedRow | None, str]:
    """Return the configuration of an untuned call with a note on its estimate, or `None` with the reason.

    The fastest is chosen only if it leads the heuristic by more than the simulator's error. Otherwise the call runs the
    heuristic's.
    """
    before = found.heuristic
    if before is None:
        why = next((f", {row.reason}" for row in found.rows if row.is_heuristic), "")
        return None, f"the heuristic has no estimate to compare with{why}"
    best = found.ranked[0]
    mine, theirs = durations((_us(best) / 1e6, _us(before) / 1e6))
    if best.is_heuristic:
        return None, f"the heuristic is the fastest, {mine}"
    if _least_us(before) < WITHIN_ERROR * _us(best):
        return None, f"the heuristic's {theirs} is within the error of the best, {mine}"
    return best, f"{mine}, the heuristic {theirs}"


class EstimateFiles(CallFiles[Estimates]):
    """The estimates beside one cache folder."""

    record, name, schema, largest = Estimates, FOLDER, SCHEMA, 16 << 20  # a configuration takes hundreds of bytes
    called, what = "the estimates", "the estimates of a call"

    def put(self, found: Estimates) -> None:
        """Write the estimates of a call; they replace earlier ones.

        Raises:
            ConfigError: The folder is not writable.
        """
        try:
            write_file(self.file_of(found.config_key), sealed_json(found), root=self.cache_dir)
        except OSError as error:
            raise ConfigError(f"the estimates cannot be written to {self.cache_dir}: {error}") from error

    def load(self, key: ConfigKey) -> Estimates | None:
        """Return the estimates of a call; `None` without a usable file."""
        return self.usable(self.file_of(key))

    def check(self, found: Estimates) -> None:
        """See `CallFiles`."""
        if not all(row.us is None or 0 < row.us < math.inf for row in found.rows):
            raise UnusableError("it has an estimate that is no time")
