# SPDX-License-Identifier: Apache-2.0
"""The report of `check_kernel`: a row for each check of each configuration, shown as a table."""

from __future__ import annotations

import dataclasses
import enum
import math
import textwrap
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.measure.correctness import Deviation, deviations, position
from ejkernel.ops.core.transformations.nodes import is_inexact
from ejkernel.ops.errors import CandidateError, EjkernelError, KernelCheckError, KernelError
from ejkernel.ops.utils.formatting import compact, counted, text_table

_WIDTH: Final = 80
_NAME: Final = 36  # longest name of a check that fits into its column
_SHOWN: Final = 3  # reasons to show for each check
HOW_TO_REFUSE = "To refuse such calls, raise UnsupportedError with the reason"

GROUPS: Final = (
    "gradient",
    "second derivative",
    "tangents",
    "vmap",
    "inputs",
    "dtypes",
    "platforms",
    "key",
    "pickle",
    "export",
    "split",
)

_HINTS: Final = {  # beginnings of the names of checks
    "types": "the results must have the same shapes and dtypes under every configuration",
    "repeated": "results must depend on the arguments only: look for memory that is read before it is written, for a "
    "race between programs, and for counters or random numbers outside of the arguments",
    "arguments": "write to a copy of the argument, or declare the alias inside the kernel only",
    "gradient of": "compare the rule, or the backward's tiles, with JAX's gradient of `reference`",
    "gradient, by": "compare the rule with JAX's gradient of a plain function, and give the kernel a `reference`",
    "second": "differentiate the gradient rule once more by hand: it may treat a residual as a constant",
    "vmap": "`run` sees one example; code that uses the size of a batch, or of the grid, is wrong for many",
    "tangents": "compare the tangent rule with `jax.jvp` of `reference`",
    "scaled": "compute sums and exponentials in float32, and subtract the largest value before an exponential",
    "zeros": "divide and take roots only where the argument is not zero",
    "odd sizes": "mask the rest of a length that the block does not divide, or leave such blocks out of the space",
    "residuals": "residuals must mean the same under every configuration, because forward and backward are tuned apart",
    "bfloat16": "sum in float32, and convert the result at the end",
    "float16": "sum in float32, and convert the result at the end",
    "weak types": "convert arguments to one dtype before you compute, e.g. by `jnp.asarray(x, x.dtype)`",
    "key": "give static arguments a name that other processes can find, see `nameable`",
    "pickle": "define the kernel at the top of a module, and keep what its constructor gets",
    "shard_map": "check the sharding rule: an axis that is summed over must not be split",
    "split": "check the sharding rule: an axis that is summed over must not be split",
}
FIXED: Final = "\N{WORD JOINER}"
"""A space inside of a word, where lines must not break."""

_GROUPS: Final = {  # beginnings of the names of checks, and the group that has them
    "gradient": "gradient",
    "under grad": "gradient",
    "residuals": "gradient",
    "second": "second derivative",
    "vmap": "vmap",
    "tangents": "tangents",
    "scaled": "inputs",
    "zeros": "inputs",
    "odd sizes": "inputs",
    "float": "dtypes",
    "bfloat16": "dtypes",
    "weak types": "dtypes",
    "lowered": "platforms",
    "key": "key",
    "pickle": "pickle",
    "export": "export",
    "split": "split",
    "shard_map": "split",
}


class CheckStatus(enum.StrEnum):
    """The result of a check."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One check of one configuration.

    Attributes:
        check: Name of the check, such as `outputs` or `vmap over x`.
        config: The configuration; `None` if the check does not depend on it.
        status: The result.
        reason: Why the check failed or was skipped.
        error: Error of the worst array, relative to its largest value; `None` if the check compares no arrays. For
            scaled inputs and special values each element has its own limit: then it is the largest share of a limit.
        allowed: The tolerance for `error`; 1 for shares.
    """

    check: str
    config: Any
    status: CheckStatus
    reason: str = ""
    error: float | None = None
    allowed: float | None = None


def error_line(error: BaseException) -> str:
    """Return the error's type and message, as the reason in a row."""
    return f"{type(error).__name__}: {error}"


def refusal(error: Exception) -> str:
    """Return the reason of a declared refusal; empty if the kernel crashed.

    Declared are ejkernel's errors, such as `UnsupportedError`, `ArgumentError` and an empty space; and
    `NotImplementedError`, also of the compiler. Any other error may be a mistake in the kernel.
    """
    if isinstance(error, KernelError):  # a hook of the kernel broke its contract
        return ""
    declared = isinstance(error, EjkernelError | NotImplementedError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("UNIMPLEMENTED")
    )
    return f"not supported: {error_line(error)}" if declared else ""


def row(check: str, config: Any = None, reason: str = "", *, skipped: bool = False) -> CheckRow:
    """Return a row without a comparison: a check with a reason has failed, unless it was skipped."""
    status = CheckStatus.SKIPPED if skipped else CheckStatus.FAILED if reason else CheckStatus.OK
    return CheckRow(check=check, config=config, status=status, reason=reason)


def compared(check: str, config: Any, found: Sequence[Deviation]) -> CheckRow:
    """Return the row of a comparison: its first fault, or the largest deviation."""
    found = found or [Deviation(0.0, 0.0)]
    worst = next((deviation for deviation in found if deviation.reason), None) or max(found, key=_share)
    status = CheckStatus.FAILED if worst.reason else CheckStatus.OK
    error, allowed = float(worst.error), worst.allowed
    return CheckRow(check=check, config=config, status=status, reason=worst.reason, error=error, allowed=allowed)


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
        header = ("check", "status", "worst error", "allowed", "of")
        table, *lines = text_table(header, [_cells(rows) for rows in by_check.values()]).split("\n")
        shown: list[str] = []
        for line, rows in zip(lines, by_check.values(), strict=True):
            name = [] if len(rows[0].check) <= _NAME else textwrap.wrap(rows[0].check, _WIDTH)
            shown += [*name, line, *_reasons(rows)]
        count = counted(len(self.configs), "configuration")
        title = f"{self.call}: {count}, {len(self.failures)} of {len(self.rows)} checks failed"
        notes = textwrap.wrap(self.note, _WIDTH)
        failures = self.failures
        steps = next_steps([row.check for row in failures], failures[0].config) if failures else []
        ends = [*_listed("what to do:", steps), *_listed("not checked:", self.not_checked)]
        return "\n".join([*textwrap.wrap(title, _WIDTH), *notes, table, *shown, *ends])


def next_steps(checks: Sequence[str], config: Any) -> list[str]:
    """Return what to do about failed checks: what usually causes them, and how to repeat the first of them alone.

    Args:
        checks: Names of the failed checks.
        config: The configuration of the first one; `None` if it does not depend on one.
    """
    named = ["odd sizes" if "instead of" in check else check for check in dict.fromkeys(checks)]
    steps = [f"{start}: {hint}" for start, hint in _HINTS.items() if any(name.startswith(start) for name in named)]
    group = next((group for start, group in _GROUPS.items() if named[0].startswith(start)), None)
    kept = {group, "gradient"} if group in ("inputs", "dtypes", "vmap") else {group}
    without = [other for other in GROUPS if other not in kept]
    only = "" if config is None else f"configs=[{config!r}], "
    # The lines must not break inside a name.
    call = f"check_kernel(kernel, ..., {only}without={without})".replace(
        "second derivative", f"second{FIXED}derivative"
    )
    return [*steps, f"to repeat the check {checks[0]!r} alone: {call}"]


def _listed(title: str, texts: Sequence[str]) -> list[str]:
    """Return a title and indented texts; nothing without texts."""
    lines = [title] if texts else []
    for text in texts:
        lines += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="      ")
    return [line.replace(FIXED, " ") for line in lines]


def _cells(rows: Sequence[CheckRow]) -> tuple[str, ...]:
    statuses = [row.status for row in rows]
    status = next(status for status in (CheckStatus.FAILED, CheckStatus.OK, CheckStatus.SKIPPED) if status in statuses)
    compared = [row for row in rows if row.error is not None and row.allowed is not None]
    worst = max(compared, key=_share, default=None)
    of = str(len(rows)) if status != CheckStatus.FAILED else f"{statuses.count(CheckStatus.FAILED)} of {len(rows)}"
    name = rows[0].check if len(rows[0].check) <= _NAME else ""  # longer names get a separate line
    if worst is None:
        return name, status, "-", "-", of
    return name, status, f"{worst.error:.2g}", f"{worst.allowed:g}", of


def _share(found: Any) -> float:
    if found.allowed:
        return float(found.error / found.allowed)
    return math.inf if found.error else 0.0


def _reasons(rows: Sequence[CheckRow]) -> list[str]:
    """Return why rows failed or were skipped, wrapped below their line."""
    explained = [row for row in rows if row.status == CheckStatus.FAILED] or [row for row in rows if row.reason]
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
    single, own = (float(compat.finfo(dtype).eps) * _UNITS * largest for dtype in (np.float32, got.dtype))
    return _largest(want) <= single and _largest(got) <= max(own, single)


def _largest(array: Any) -> float:
    if not array.size or not jnp.issubdtype(array.dtype, jnp.floating):
        return 0.0
    return float(np.abs(wide(array)).max())


def _has_nan(array: Any) -> bool:
    return is_inexact(array) and bool(np.isnan(np.asarray(array)).any())
