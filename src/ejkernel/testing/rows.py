# SPDX-License-Identifier: Apache-2.0
"""The rows of a report of `check_kernel`: one for each check of each configuration."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, Final

import jax

from ejkernel.ops.autotuner.measure.correctness import Deviation
from ejkernel.ops.errors import EjkernelError, KernelError

NOT_RUN: Final = "not run"
HOW_TO_REFUSE: Final = "To refuse such calls, raise UnsupportedError with the reason"


class CheckStatus(enum.StrEnum):
    """The result of a check: `OK` ("ok"), `FAILED` ("failed"), or `SKIPPED` ("skipped", and the row has the reason)."""

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
        reason: Why the check failed or was skipped. It starts with `not run` if an earlier check of the configuration
            failed.
        error: Error of the worst array, relative to its largest value; `None` if no arrays were compared. For scaled
            inputs and zeros the tolerance is per element; then this is the largest error as a fraction of it.
        allowed: The tolerance for `error`; 1 for scaled inputs and zeros.
        raised: Whether the check failed with an exception.
    """

    check: str
    config: Any
    status: CheckStatus
    reason: str = ""
    error: float | None = None
    allowed: float | None = None
    raised: bool = False


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


def row(check: str, config: Any = None, reason: str | BaseException = "", *, skipped: bool = False) -> CheckRow:
    """Return a row without a comparison: a check with a reason has failed, unless it was skipped."""
    status = CheckStatus.SKIPPED if skipped else CheckStatus.FAILED if reason else CheckStatus.OK
    raised = isinstance(reason, BaseException)
    text = error_line(reason) if isinstance(reason, BaseException) else reason
    return CheckRow(check=check, config=config, status=status, reason=text, raised=raised and not skipped)


def not_run_row(check: str, config: Any, failed: str) -> CheckRow:
    """Return the row of a check that was not run, because the check `failed` failed under the same configuration."""
    return row(check, config, f"{NOT_RUN}: {failed} already failed", skipped=True)


def compared(check: str, config: Any, found: Sequence[Deviation]) -> CheckRow:
    """Return the row of a comparison: its first fault, or the largest deviation."""
    found = found or [Deviation(0.0, 0.0)]
    worst = next((deviation for deviation in found if deviation.reason), None) or max(found, key=share)
    status = CheckStatus.FAILED if worst.reason else CheckStatus.OK
    error, allowed = float(worst.error), worst.allowed
    return CheckRow(check=check, config=config, status=status, reason=worst.reason, error=error, allowed=allowed)


def share(found: Any) -> float:
    """Return an error as a fraction of its tolerance."""
    if found.allowed:
        return float(found.error / found.allowed)
    return math.inf if found.error else 0.0
