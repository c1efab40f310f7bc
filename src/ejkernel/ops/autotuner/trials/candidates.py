# SPDX-License-Identifier: Apache-2.0
"""The candidates of a running search, with their programs and identities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config.cache import config_token
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, hook
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CandidateError, NoConfigError, SerializationError, TuningError
from ejkernel.ops.utils.error_text import error_text, message_of

LISTED = 24  # a space of at most so many configurations is measured completely, like a list


# Compared by identity: configurations and programs may be neither hashable nor comparable.
@dataclasses.dataclass(slots=True, eq=False)
class Candidate:
    """A candidate of a running search."""

    config: Any
    compiled: Sequence[Callable[..., Any]] | None = None  # one program per call of the search
    status: Status = Status.SKIPPED
    reason: str = "the budget was spent before its turn"
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    spilled: int | None = None
    measurement: Measurement | None = None
    twin: Candidate | None = None  # the candidate with the same program
    deferred: Sequence[Any] | None = None  # programs with many spills, put off until the others are checked
    is_recalled: bool = False  # its times come from an earlier attempt or search
    input_sets: int = 0  # sets of inputs on which it was correct; only potential winners are checked on several
    damage: int = 0  # the watch's damage count when this candidate began

    @property
    def seconds(self) -> float | None:
        """Seconds per call (of its twin, if it has one); `None` if not measured, or failed since."""
        measured = self if self.twin is None else self.twin
        return None if measured.measurement is None else measured.measurement.median

    def fail(self, status: Status, error: BaseException) -> None:
        """Record the reason only: a traceback would keep the candidate's arrays alive."""
        self.status, self.compiled, self.measurement, self.deferred = status, None, None, None
        self.reason = message_of(error) if isinstance(error, CandidateError) else error_text(error)

    def take_over(self, known: Outcome) -> None:
        """Copy the outcome of an earlier attempt."""
        self.status, self.reason, self.measurement = Status(known.status), known.reason, known.measurement
        self.compile_seconds, self.peak_bytes, self.spilled = known.compile_seconds, known.peak_bytes, known.spilled

    def outcome(self) -> Outcome:
        """Return its outcome; a measured candidate that was compiled again stays measured."""
        was_measured = self.status == Status.READY and self.measurement is not None
        return Outcome(
            config=self.config,
            status=Status.MEASURED if was_measured else self.status,
            reason="" if self.status in (Status.MEASURED, Status.READY) else self.reason,
            twin=self.twin.config if self.twin is not None and self.status == Status.SAME else None,
            measurement=self.measurement,
            compile_seconds=self.compile_seconds,
            peak_bytes=self.peak_bytes,
            spilled=self.spilled,
        )


def config_id(config: object) -> Any:
    """Return a hashable identity of a configuration.

    Raises:
        TuningError: The configuration is not plain data.
    """
    try:
        return config_token(config)
    except SerializationError as error:
        raise TuningError(f"configurations must be plain data, got {config!r}: {error}") from error


def distinct(configs: Iterable[object], but: Sequence[Candidate] = ()) -> list[Candidate]:
    """Return one candidate per distinct configuration, in order, without those of `but`."""
    found: dict[Any, Candidate] = {}
    known = {config_id(candidate.config) for candidate in but}
    for config in configs:
        token = config_id(config)
        if token not in known:
            found.setdefault(token, Candidate(config))
    return list(found.values())


def exchange(one: Candidate, other: Candidate) -> None:
    """Swap the results of two candidates with the same program."""
    for field in dataclasses.fields(Candidate):
        if field.name != "config":
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            setattr(one, field.name, theirs)
            setattr(other, field.name, mine)


def heuristic_of(inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> list[Any]:
    """Return a list of the heuristic's configuration; empty if the kernel has none."""
    try:
        config = hook(kernel, "heuristic_cfg", inv.platform)(inv)
    except NoConfigError:
        return []
    return [config]
