# SPDX-License-Identifier: Apache-2.0
"""The outcome of one candidate, and the programs of a search: candidates that compile to one program count once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.sampling import Case, seconds_on
from ejkernel.ops.autotuner.trials.challenge import clock_of, is_by_another
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.utils.error_text import printable_lines
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.storage.serialize import stable_json, to_data

_TWINS = 2  # configurations that a table lists after the first of a program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one candidate.

    Attributes:
        config: Its configuration.
        status: Its status; logs of later versions may contain values missing from `Status`.
        reason: Why it was not measured.
        twin: For status `same`: the configuration with the same program.
        measurement: Its times.
        compile_seconds: Seconds of tracing, lowering and compiling.
        peak_bytes: Memory of one call with inputs and results, if the compiler reports it.
        spilled: Bytes of registers that a thread spills to memory, if the compiler reports it: on GPUs, for programs
            compiled in a separate process.
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
        if self.status in list(Status):  # files and custom tuners pass a string
            object.__setattr__(self, "status", Status(self.status))
        object.__setattr__(self, "reason", printable_lines(self.reason))  # from a file or an exception

    @property
    def seconds(self) -> float | None:
        """Seconds per call, or the mean over several cases; `None` if not measured."""
        return None if self.measurement is None else self.measurement.median

    @property
    def relative(self) -> float | None:
        """The time divided by the heuristic's in the same rounds; `None` if unknown."""
        return None if self.measurement is None else self.measurement.relative

    @property
    def cases(self) -> tuple[Case, ...]:
        """The measured cases with their times; empty if the search has a single case."""
        return () if self.measurement is None else self.measurement.cases

    def seconds_on(self, call: str) -> float | None:
        """Return the seconds of the call with the key `call`, one of the calls of the search."""
        return None if self.measurement is None else seconds_on(call, self.measurement.median, self.measurement.cases)


def are_same(one: Any, other: Any) -> bool:
    """Return whether two configurations are the same; one from a file is plain data."""
    return _token(one) == _token(other)


def _token(config: Any) -> str:
    return stable_json(to_data(config))  # configurations may be unhashable, and those from a file are plain data


def programs(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, tuple[Outcome, ...]]]:
    """Return the programs of a search in order, each as its first outcome and the outcomes of its duplicates."""
    twins: dict[str, list[Outcome]] = {_token(outcome.config): [] for outcome in outcomes}
    owners: list[Outcome] = []
    for outcome in outcomes:
        is_twin = outcome.status == Status.SAME and outcome.twin is not None
        same = twins.get(_token(outcome.twin), owners) if is_twin else owners
        same.append(outcome)
    return [(outcome, tuple(twins[_token(outcome.config)])) for outcome in owners]


def ranked(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, tuple[Outcome, ...]]]:
    """Return the programs of a search, the fastest first, by their ratio to the heuristic in the same rounds.

    Without common rounds their medians count, and those by another clock than the heuristic's come last.
    """
    clock = clock_of(outcomes)
    unit = next((one.seconds for one in outcomes if one.seconds), 1.0)  # the heuristic's time, of any rounds

    def place(program: tuple[Outcome, tuple[Outcome, ...]]) -> tuple[bool, bool, float]:
        first = program[0].measurement
        if first is None:
            return True, False, 0.0
        if first.relative is not None:
            return False, False, first.relative
        return False, is_by_another(program[0], clock), first.median / unit

    return sorted(programs(outcomes), key=place)


def program_name(program: tuple[Outcome, tuple[Outcome, ...]]) -> str:
    """Return the configuration of a program, and some of those that compile to the same program."""
    first, others = program
    if not others:
        return compact(first.config)
    shown = ", ".join(compact(outcome.config) for outcome in others[:_TWINS])
    more = f" and {len(others) - _TWINS} more" if len(others) > _TWINS else ""
    return f"{compact(first.config)} (also {shown}{more})"
