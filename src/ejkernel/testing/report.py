# SPDX-License-Identifier: Apache-2.0
"""The report of `check_kernel`, a row for each check of each configuration, shown as a table; and its progress."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.measure.correctness import Deviation, deviations, position
from ejkernel.ops.errors import CandidateError, KernelCheckError
from ejkernel.ops.utils.formatting import compact, counted, text_table
from ejkernel.ops.utils.values.signature import is_inexact
from ejkernel.testing.rows import FIXED, NOT_RUN, CheckRow, CheckStatus, next_steps, share

_WIDTH: Final = 80
_NAME: Final = 36  # longest name of a check that fits into its column
_SHOWN: Final = 3  # reasons to show for each check
_EVERY: Final = 5.0  # seconds between two lines of progress


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The results of all checks; `str(report)` is a table.

    Attributes:
        call: The operation and its arguments.
        configs: The checked configurations, the heuristic's first.
        rows: The checks.
        note: A remark, e.g. that the configurations are a sample.
        not_checked: Omissions, in addition to skipped rows.
    """

    call: str
    configs: tuple[Any, ...]
    rows: tuple[CheckRow, ...]
    note: str = ""
    not_checked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all checks passed or were skipped."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        """The failed rows."""
        return tuple(row for row in self.rows if row.status == CheckStatus.FAILED)

    def raise_if_failed(self) -> None:
        """Raise a `KernelCheckError`, with the table as its message, if a check failed."""
        if self.failures:
            raise KernelCheckError(self)

    def __str__(self) -> str:
        """Return a table with a line for each check, followed by the reasons."""
        by_check: dict[str, list[CheckRow]] = {}
        for row in self.rows:
            by_check.setdefault(row.check, []).append(row)
        header = ("check", "status", "worst error", "allowed", "runs")
        table, *lines = text_table(header, [_cells(rows) for rows in by_check.values()]).split("\n")
        shown: list[str] = []
        for line, rows in zip(lines, by_check.values(), strict=True):
            name = [] if len(rows[0].check) <= _NAME else textwrap.wrap(rows[0].check, _WIDTH)
            shown += [*name, line, *_reasons(rows)]
        notes = textwrap.wrap(self.note, _WIDTH)
        steps = next_steps(self.rows, self.configs) if self.failures else []
        omissions = [*_not_run(by_check), *self.not_checked]
        ends = [*_listed("what to do:", steps), *_listed("not checked:", omissions)]
        return "\n".join([*textwrap.wrap(self._title(by_check), _WIDTH), *notes, table, *shown, *ends])

    def _title(self, by_check: Mapping[str, Sequence[CheckRow]]) -> str:
        failed, run = self.failures, [row for row in self.rows if row.status != CheckStatus.SKIPPED]
        checks = f"{len({row.check for row in failed})} of {counted(len(by_check), 'check')} failed"
        where = f" ({len(failed)} of {counted(len(run), 'run')})" if failed else ""
        return f"{self.call}: {counted(len(self.configs), 'configuration')}, {checks}{where}"


def _listed(title: str, texts: Sequence[str]) -> list[str]:
    """Return a title and indented texts; nothing without texts."""
    lines = [title] if texts else []
    for text in texts:
        lines += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="      ")
    return [line.replace(FIXED, " ") for line in lines]


def _cells(rows: Sequence[CheckRow]) -> tuple[str, ...]:
    status = _status(rows)
    # The error of failed rows alone, because an exception has none, and that of a passed row would mislead.
    same = [row for row in rows if row.status == status]
    compared = [row for row in same if row.error is not None and row.allowed is not None]
    worst = max(compared, key=share, default=None)
    run = [row for row in rows if row.status != CheckStatus.SKIPPED]
    of = f"{len(same)} of {len(run)}" if status == CheckStatus.FAILED else str(len(run) or "-")
    name = rows[0].check if len(rows[0].check) <= _NAME else ""  # longer names get a separate line
    if worst is None:
        return name, status, "-", "-", of
    return name, status, f"{worst.error:.2g}", f"{worst.allowed:g}", of


def _status(rows: Sequence[CheckRow]) -> CheckStatus:
    statuses = [row.status for row in rows]
    return next(status for status in (CheckStatus.FAILED, CheckStatus.OK, CheckStatus.SKIPPED) if status in statuses)


def _not_run(by_check: Mapping[str, Sequence[CheckRow]]) -> list[str]:
    """Return the checks that ran under some configurations only; others are rows of the table."""
    checks: dict[str, list[str]] = {}
    for check, rows in by_check.items():
        for row in rows:
            if row.reason.startswith(NOT_RUN) and _status(rows) != CheckStatus.SKIPPED:
                checks.setdefault(f"{compact(row.config)}, {row.reason}", []).append(check)
    return [f"{why}: {', '.join(names)}" for why, names in checks.items()]


def _reasons(rows: Sequence[CheckRow]) -> list[str]:
    """Return why rows failed or were skipped, wrapped below their line."""
    failed, is_skipped = [row for row in rows if row.status == CheckStatus.FAILED], _status(rows) == CheckStatus.SKIPPED
    explained = failed or [row for row in rows if row.reason and (is_skipped or not row.reason.startswith(NOT_RUN))]
    by_reason: dict[str, list[CheckRow]] = {}
    for row in explained:
        # Usually a kernel fails under all configurations for the same reason; show it once.
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


REFERENCE: Final = "the reference"
HEURISTIC: Final = "the heuristic's"
BY_JAX: Final = "JAX's gradient of `run`"
_UNITS: Final = 64  # in the last place, of the largest gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How results are compared.

    Attributes:
        platform: Platform of the results.
        precision: Default matmul precision.
        tolerance: The largest difference, relative to the largest value and at least 1; derivatives may differ by twice
            that. `None`: the tolerances of tuning.
    """

    platform: str
    precision: str | None
    tolerance: float | None = None

    def __call__(
        self, got: Sequence[Any], want: Sequence[Any], whose: str = REFERENCE, names: Sequence[str] = ()
    ) -> list[Deviation]:
        """Return the deviation of each array; of derivatives, which have names, small ones may cancel.

        NaN is correct only where a reference has NaN: two configurations that both compute NaN are both wrong.
        """
        if self.tolerance is not None and len(got) == len(want):
            allowed = self.tolerance * (2 if names else 1)
            called = names or [f"result {index}" for index in range(len(want))]
            return [_of_largest(*each, allowed, whose) for each in zip(called, got, want, strict=True)]
        options: dict[str, Any] = {"platform": self.platform, "precision": self.precision}
        try:
            found = list(deviations(got, want, **options, names=names, of=whose))
        except CandidateError as error:
            return [Deviation(np.inf, 0.0, str(error))]
        largest = max(map(_largest, want), default=0.0)
        for index, (mine, true, deviation) in enumerate(zip(got, want, found, strict=True)):
            if names and deviation.reason and _is_cancelled(mine, true, largest):
                found[index] = Deviation(0.0, deviation.allowed)
            elif not deviation.reason and whose in (HEURISTIC, BY_JAX) and _has_nan(mine):
                name = names[index] if names else f"result {index}"
                found[index] = Deviation(np.inf, deviation.allowed, f"{name} has NaN, and no reference confirms it")
        return found


def wide(array: Any) -> Any:
    """Return the array with 64-bit numbers, as a NumPy array."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return np.asarray(array).astype(np.complex128 if is_complex else np.float64)


def _of_largest(name: str, got: Any, want: Any, allowed: float, whose: str) -> Deviation:
    if got.shape != want.shape:
        return Deviation(np.inf, allowed, f"{name} has shape {got.shape}, {whose} {want.shape}")
    mine, true = wide(got), wide(want)
    with np.errstate(invalid="ignore"):
        apart = np.where((mine == true) | (np.isnan(mine) & np.isnan(true)), 0.0, np.abs(mine - true))
    error = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)) / max(1.0, float(np.abs(true).max(initial=0.0)))
    at = int(np.nan_to_num(apart, nan=np.inf).argmax()) if apart.size else 0
    where = position(at, apart.shape) if apart.size else ""
    reason = f"{name} differs from {whose} by {error:.2g} of the largest value{where} (allowed: {allowed:g})"
    return Deviation(error, allowed, "" if error <= allowed else reason)


def _is_cancelled(got: Any, want: Any, largest: float) -> bool:
    """Return whether all terms of a derivative cancel, as for a shift of a softmax, so that rounding errors remain.

    Such a derivative may have any values that are small compared with the largest of the others.
    """
    if got.shape != want.shape or not got.size or not jnp.issubdtype(got.dtype, jnp.floating):
        return False
    single, own = (float(compat.tracing.finfo(dtype).eps) * _UNITS * largest for dtype in (np.float32, got.dtype))
    return _largest(want) <= single and _largest(got) <= max(own, single)


def _largest(array: Any) -> float:
    if not array.size or not jnp.issubdtype(array.dtype, jnp.floating):
        return 0.0
    return float(np.abs(wide(array)).max())


def _has_nan(array: Any) -> bool:
    return is_inexact(array) and bool(np.isnan(np.asarray(array)).any())


class Steps:
    """The planned steps of a run, and the current one."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._current = ""
        self._started = time.monotonic()

    def plan(self, names: Sequence[str]) -> None:
        """Set the steps, in order; some of them may not begin."""
        self._names = names

    def begin(self, name: str) -> None:
        """Make a step of the plan the current one."""
        self._current = name

    def line(self) -> str:
        """Return the current step as text, e.g. `step 3 of 12: configuration rows=64, after 21 s`."""
        seconds = f"after {time.monotonic() - self._started:.0f} s"
        if self._current not in self._names:
            return f"preparing, {seconds}"
        return f"step {self._names.index(self._current) + 1} of {len(self._names)}: {self._current}, {seconds}"

    @contextlib.contextmanager
    def shown(self, tell: Callable[[str], object], every: float = _EVERY) -> Iterator[None]:
        """Pass `line()` to `tell` every few seconds for the `with` block, from another thread."""
        finished = threading.Event()

        def repeat() -> None:
            while not finished.wait(every):
                tell(self.line())

        thread = threading.Thread(target=repeat, name="progress of check_kernel", daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()


def to_stderr(text: str) -> None:
    """Write a line to stderr, if the process has one."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
