# SPDX-License-Identifier: Apache-2.0
"""Candidates: configurations under way, with their programs, and what tells either from others."""

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

LISTED = 24  # configurations up to which a space is measured whole, as a list always is


# By identity: neither configurations nor programs need have a hash, or be comparable.
@dataclasses.dataclass(slots=True, eq=False)
class Candidate:
    """A candidate under way."""

    config: Any
    compiled: Sequence[Callable[..., Any]] | None = None  # its program for each call that it is a candidate of
    status: Status = Status.SKIPPED
    reason: str = "the budget was spent before its turn"
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    spilled: int | None = None
    measurement: Measurement | None = None
    twin: Candidate | None = None  # whose program is the same
    deferred: Sequence[Any] | None = None  # its programs, which spill much, until the others have been checked
    is_recalled: bool = False  # whether its times are of an earlier attempt, or an earlier search
    input_sets: int = 0  # on which it was right, if it was about to win
    damage: int = 0  # what the watch knew of damage when it was begun

    @property
    def seconds(self) -> float | None:
        """How long a call takes; that of its twin if it has one; `None` if it was not measured, or failed since."""
        measured = self if self.twin is None else self.twin
        return None if measured.measurement is None else measured.measurement.median

    def fail(self, status: Status, error: BaseException) -> None:
        """Note the reason alone: a traceback would keep the candidate's arrays alive."""
        self.status, self.compiled, self.measurement, self.deferred = status, None, None, None
        self.reason = message_of(error) if isinstance(error, CandidateError) else error_text(error)

    def take_over(self, known: Outcome) -> None:
        """Become what an earlier attempt found out."""
        self.status, self.reason, self.measurement = Status(known.status), known.reason, known.measurement
        self.compile_seconds, self.peak_bytes, self.spilled = known.compile_seconds, known.peak_bytes, known.spilled

    def outcome(self) -> Outcome:
        """Return what became of it; one that was measured before and is compiled again stays measured."""
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
    """Return what tells a configuration from others.

    Raises:
        TuningError: it is not plain data.
    """
    try:
        return config_token(config)
    except SerializationError as error:
        raise TuningError(f"configurations must be plain data, got {config!r}: {error}") from error


def distinct(configs: Iterable[object], but: Sequence[Candidate] = ()) -> list[Candidate]:
    """Return one candidate for each configuration, in their order, leaving out those of `but`."""
    found: dict[Any, Candidate] = {}
    known = {config_id(candidate.config) for candidate in but}
    for config in configs:
        token = config_id(config)
        if token not in known:
            found.setdefault(token, Candidate(config))
    return list(found.values())


def exchange(one: Candidate, other: Candidate) -> None:
    """Swap all that was found out about two candidates that are the same program."""
    for field in dataclasses.fields(Candidate):
        if field.name != "config":
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            setattr(one, field.name, theirs)
            setattr(other, field.name, mine)


def heuristic_of(inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> list[Any]:
    """Return the heuristic's configuration, if the kernel has any to offer."""
    try:
        config = hook(kernel, "heuristic_cfg", inv.platform)(inv)
    except NoConfigError:
        return []
    return [config]
