# SPDX-License-Identifier: Apache-2.0
"""The effect of new configurations on a program's whole step, as stored in the entries of its calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import durations, ratio
from ejkernel.ops.utils.storage.serialize import from_plain, to_data

_FIELD: Final = "step"  # of the measured figures of an entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """The time of a program's step without and with the new configurations of its calls.

    Attributes:
        target: The program, as typed.
        before_us, after_us: Microseconds of a step without and with those new configurations that are in force.
        speedup, low, high: Their ratio, the median of the rounds, and its 95 % interval.
        rounds: The rounds of the comparison.
        time: When it was made, in the form of ISO 8601.
        dropped: The configuration that the search of the call chose, if it is not in force, as plain data.
        why: Why it is not.
        mapping: How much memory the steps map anew, as a sentence; empty if it is little.
    """

    target: str
    before_us: float
    after_us: float
    speedup: float
    low: float
    high: float
    rounds: int
    time: str = ""
    dropped: Any = None
    why: str = ""
    mapping: str = ""

    @classmethod
    def stored_in(cls, measured: Mapping[str, Any] | None) -> StepNote | None:
        """Return the note of an entry; `None` if it has none, e.g. because its step was not compared."""
        try:
            return from_plain((measured or {})[_FIELD], cls)
        except (KeyError, SerializationError):  # files may hold anything
            return None

    def added_to(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the measured figures of an entry with this note."""
        return dict(measured) | {_FIELD: to_data(self)}

    @property
    def times(self) -> str:
        """The times of the step with their ratio: `12.1 ms -> 11.4 ms, 1.06x (1.04 to 1.08)`."""
        before, after = durations([self.before_us / 1e6, self.after_us / 1e6])
        spread = "" if self.low == self.high else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{before} -> {after}, {ratio(self.speedup)}{spread}"

    @property
    def in_words(self) -> str:
        """The effect on the step, or why the configuration of the search is not in force."""
        return printable(self.why or f"the step of {self.target}: {self.times}")
