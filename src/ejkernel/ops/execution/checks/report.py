# SPDX-License-Identifier: Apache-2.0
"""What `check_kernel` found out: a row for each check of each configuration, and a table of them."""

from __future__ import annotations

import dataclasses
import enum
import math
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from ejkernel.ops.errors import KernelCheckError
from ejkernel.ops.utils.formatting import compact, counted, text_table

_WIDTH: Final = 80
_NAME: Final = 36  # characters of a check's name that fit beside the rest
_SHOWN: Final = 3  # reasons of one check that the table shows


class CheckStatus(enum.StrEnum):
    """What came out of a check."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One check of one configuration.

    Attributes:
        check: What was checked, such as `outputs` or `vmap over x`.
        config: The configuration; `None` where the check is of the kernel.
        status: What came out of it.
        reason: Why it failed, or was skipped.
        error: How far the worst array was from the reference; `None` where nothing was compared.
        allowed: How far it might have been.
    """

    check: str
    config: Any
    status: CheckStatus
    reason: str = ""
    error: float | None = None
    allowed: float | None = None


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What was found out; `str()` of it is a table.

    Attributes:
        call: The operation and its arguments.
        configs: The configurations that were checked; the heuristic's is the first.
        rows: The checks.
        note: What else there is to know, such as that the configurations are a sample.
        not_checked: The omissions, beside the rows that were skipped.
    """

    call: str
    configs: tuple[Any, ...]
    rows: tuple[CheckRow, ...]
    note: str = ""
    not_checked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if row.status == CheckStatus.FAILED)

    def raise_if_failed(self) -> None:
        """Raise a `KernelCheckError`, whose message is the table, if anything failed."""
        if self.failures:
            raise KernelCheckError(self)

    def __str__(self) -> str:
        """Return the rows as a table, a line for each check, with the reasons below."""
        by_check: dict[str, list[CheckRow]] = {}
        for row in self.rows:
            by_check.setdefault(row.check, []).append(row)
        header = ("check", "status", "worst error", "allowed", "of")
        table, *lines = text_table(header, [_cells(rows) for rows in by_check.values()]).split("\n")
        shown: list[str] = []
        for line, rows in zip(lines, by_check.values(), strict=True):
            name = [] if len(rows[0].check) <= _NAME else textwrap.wrap(rows[0].check, _WIDTH)
            shown += [*name, line, *_reasons(rows)]
        count = counted(len(self.configs), "configuration")
        title = f"{self.call}: {count}, {len(self.failures)} of {len(self.rows)} checks failed"
        notes = textwrap.wrap(self.note, _WIDTH)
        return "\n".join([*textwrap.wrap(title, _WIDTH), *notes, table, *shown, *self._omissions()])

    def _omissions(self) -> list[str]:
        lines = ["not checked:"] if self.not_checked else []
        for text in self.not_checked:
            lines += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="      ")
        return lines


def _cells(rows: Sequence[CheckRow]) -> tuple[str, ...]:
    statuses = [row.status for row in rows]
    status = next(status for status in (CheckStatus.FAILED, CheckStatus.OK, CheckStatus.SKIPPED) if status in statuses)
    compared = [row for row in rows if row.error is not None and row.allowed is not None]
    worst = max(compared, key=_share, default=None)
    of = str(len(rows)) if status != CheckStatus.FAILED else f"{statuses.count(CheckStatus.FAILED)} of {len(rows)}"
    name = rows[0].check if len(rows[0].check) <= _NAME else ""  # a longer one has a line of its own
    if worst is None:
        return name, status, "-", "-", of
    return name, status, f"{worst.error:.2g}", f"{worst.allowed:g}", of


def _share(row: CheckRow) -> float:
    assert row.error is not None  # only rows that compared anything get here
    if row.allowed:
        return row.error / row.allowed
    return math.inf if row.error else 0.0


def _reasons(rows: Sequence[CheckRow]) -> list[str]:
    """Return why rows failed or were skipped, wrapped below their line."""
    told = [row for row in rows if row.status == CheckStatus.FAILED] or [row for row in rows if row.reason]
    by_reason: dict[str, list[CheckRow]] = {}
    for row in told:
        # A kernel mostly fails under all configurations for one reason, which is told once.
        by_reason.setdefault(row.reason, []).append(row)
    lines: list[str] = []
    for reason, same in list(by_reason.items())[:_SHOWN]:
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        name = f"{compact(same[0].config)}{more}: " if same[0].config is not None else ""
        text = " ".join(f"{name}{reason}".split())
        lines += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="      ", max_lines=6)
    if len(by_reason) > _SHOWN:
        lines.append(f"    ... and {len(by_reason) - _SHOWN} other reasons")
    return lines
