# SPDX-License-Identifier: Apache-2.0
"""A part of the torture: its budget, counts and findings."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

PATIENCE: Final = 60.0  # seconds after which something that takes milliseconds hangs, however busy the machine is
KINDS: Final = ("lost", "hang", "uncaught", "wrong")
_MOST: Final = 20  # findings of a part; a defect has many faces


class HangError(BaseException):
    """An operation did not return. Not an `Exception`, so that code under test does not catch it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The budget of a part, and the source of its inputs.

    Attributes:
        seconds: Time limit, unless `inputs` is given.
        inputs: Inputs of each kind; `None`: as many as the time allows.
        seed: Determines all inputs: the same seed and number make the same input.
        first: The number of the first input, to continue from, or to repeat one.
        folder: An empty folder.
        only: Kinds of input to try; empty means all.
    """

    seconds: float
    seed: int
    folder: Path
    inputs: int | None = None
    first: int = 0
    only: tuple[str, ...] = ()

    def random(self, *names: object) -> random.Random:
        """Return a random source for these names; the same names give the same numbers."""
        return random.Random(f"{self.seed} {names}")

    def chosen(self, count: int) -> range:
        """Return the numbers of the cases to try, out of `count`: all, or as many as `inputs` says, spread evenly."""
        if self.inputs is None or self.first:
            return range(self.first, count if self.inputs is None else min(count, self.first + self.inputs))
        return range(0, count, max(1, count // max(1, self.inputs)))

    def numbers(self, share: float = 1.0) -> Iterator[int]:
        """Yield the numbers of the inputs, until the budget, or a share of its seconds, is spent."""
        end, number = time.monotonic() + self.seconds * share, self.first
        while time.monotonic() < end if self.inputs is None else number < self.first + self.inputs:
            yield number
            number += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A violation of a promise.

    Attributes:
        kind: One of `KINDS`.
        where: The kind of input.
        number: The number of the input.
        what: A description.
    """

    kind: str
    where: str
    number: int
    what: str


@dataclasses.dataclass(slots=True)
class Tally:
    """The counts and findings of a part."""

    part: str
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def found(self, kind: str, where: str, number: int, what: str) -> None:
        """Note that something is not as it must be."""
        assert kind in KINDS
        if len(self.findings) < _MOST:
            self.findings.append(Finding(kind, where, number, what))

    def try_(
        self, where: str, number: int, do: Callable[[], _T], declared: tuple[type[BaseException], ...] = ()
    ) -> _T | None:
        """Return the result of `do`, or `None` if it raises a declared error; other errors are findings."""
        try:
            with within(PATIENCE):
                return do()
        except declared:
            return None
        except KeyboardInterrupt:
            raise
        except HangError as error:
            self.found("hang", where, number, last_lines(error))
        except BaseException as error:  # noqa: BLE001 - any undeclared error is a finding
            self.found("uncaught", where, number, last_lines(error))
        return None

    def data(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        by_kind = collections.Counter(finding.kind for finding in self.findings)
        return {
            "counts": dict(sorted(self.counts.items())),
            "seconds": round(self.seconds, 1),
            **{kind: by_kind[kind] for kind in KINDS},
            **({"left_out": self.left_out} if self.left_out else {}),
        }


Part = Callable[[Budget, Tally], None]


def last_lines(error: BaseException) -> str:
    """Return the error's type, message and innermost frames."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    try:
        text = str(error)
    except Exception as why:  # noqa: BLE001 - an error with a broken `__str__`
        text = f"(no words: {type(why).__name__})"
    return f"{type(error).__name__}: {text[:300]} [{places}]"


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `HangError` where the block takes longer; for the main thread.

    Raises:
        HangError: it did.
    """
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _hangs(number: int, frame: object) -> None:
    raise HangError(f"it had not come back after {PATIENCE:g} s")
