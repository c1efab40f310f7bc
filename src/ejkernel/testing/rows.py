# SPDX-License-Identifier: Apache-2.0
"""The rows of a report of `check_kernel`, one for each check of each configuration, and advice on failed rows.

Advice is about the first failure of each configuration: what usually causes it, and how to repeat the check alone.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax

from ejkernel.ops.autotuner.measure.correctness import Deviation
from ejkernel.ops.errors import EjkernelError, KernelError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import compact

logger = logging.getLogger(__name__)

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


def attempted(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function or, if it raises an exception, the exception, for a row with the reason."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - a kernel may fail in any way
        logger.debug("%s: %s", function, error_text(error))
        return error


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


# --- advice ---

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
FIXED: Final = "\N{WORD JOINER}"
"""A space inside of a word, where lines must not break."""

_HINTS: Final = {  # beginnings of the names of checks
    "configurations": "`config_space` and `heuristic_cfg` must return valid configurations",
    "types": "the results must have the same structure, shapes and dtypes under every configuration",
    "repeated": "results must depend on the arguments only: look for memory that is read before it is written, for a "
    "race between programs, and for counters or random numbers outside of the arguments",
    "arguments": "write to a copy of the argument, or declare the alias inside the kernel only",
    "jit": "the call is right without `jit`; do not use the values of arrays for decisions in Python",
    "under grad": "the forward of the gradient rule must return the same results as `run`",
    "gradient of": "compare the rule, or the backward's tiles, with JAX's gradient of `reference`",
    "gradient types": "return each gradient in the dtype of its argument",
    "gradient, by": "compare the rule with JAX's gradient of a plain function, and give the kernel a `reference`",
    "second": "differentiate the gradient rule once more by hand: it may treat a residual as a constant",
    "vmap": "under vmap `run` sees one example at a time; do not rely on the batch or grid size. "
    "Batches are random: if `run` needs others, such as positive ones, return them from `example_inputs`",
    "tangents": "compare the tangent rule with `jax.jvp` of `reference`",
    "scaled": "compute sums and exponentials in float32, and subtract the largest value before an exponential",
    "zeros": "divide and take roots only where the argument is not zero",
    "odd sizes": "mask the rest of a length that the block does not divide, "
    "or leave such blocks out of `config_space` and `heuristic_cfg`",
    "residuals": "residuals must mean the same under every configuration, because forward and backward are tuned "
    "separately",
    "bfloat16": "sum in float32, and convert the result at the end",
    "float": "sum in float32, and convert the result at the end",
    "weak types": "convert arguments to one dtype before you compute, e.g. by `jnp.asarray(x, x.dtype)`",
    "lowered": "the kernel has a variant of `run` for this platform, which must compile for it",
    "key": "give static arguments a name that other processes can find, see `nameable`",
    "pickle": "define the kernel at the top of a module, and keep what its constructor gets",
    "export": "`jax.export` must be able to serialize every primitive of the kernel",
    "shard_map": "check the sharding rule: an axis that is summed over must not be split",
    "split": "check the sharding rule: an axis that is summed over must not be split",
}

_GROUPS: Final = {  # beginnings of the names of checks, and the group that has them
    **{group: group for group in GROUPS},
    "under grad": "gradient",
    "residuals": "gradient",
    **dict.fromkeys(("scaled", "zeros", "odd sizes"), "inputs"),
    **dict.fromkeys(("float", "bfloat16", "weak types"), "dtypes"),
    "lowered": "platforms",
    "shard_map": "split",
}
_ALONE: Final = ("configurations", "lowered", "key", "pickle")
"""Prefixes of the names of checks that can fail alone."""
_RESULTS: Final = ("types", "outputs", "jit")
"""Checks of the plain call: if one fails, `run` itself is at fault."""
_BASIC: Final = (*_RESULTS, "repeated", "arguments", "under grad", "gradient")
"""Prefixes of the names of checks that make others fail."""


def next_steps(rows: Sequence[CheckRow], configs: Sequence[Any]) -> list[str]:
    """Return what to do about failed checks, and how to repeat the first of them alone.

    Args:
        rows: All rows of a report.
        configs: The configurations, the heuristic's first.
    """
    failed = [row for row in rows if row.status == CheckStatus.FAILED]
    roots = _roots(failed)
    by_check: dict[str, list[CheckRow]] = {}
    for row in failed:
        if roots[id(row)] is row:
            by_check.setdefault(row.check, []).append(row)
    steps: dict[str, list[str]] = {}
    for check, same in by_check.items():
        for text in _advice(check, same, configs):
            steps.setdefault(text, []).append(check)
    advice = [f"{', '.join(checks)}: {text}" for text, checks in steps.items()]
    following = dict.fromkeys(row.check for row in failed if roots[id(row)] is not row and row.check not in by_check)
    if following:
        advice.append(f"the other failures follow from it: {', '.join(following)}")
    return [*advice, _repeated_alone(failed[0])]


def _roots(failed: Sequence[CheckRow]) -> dict[int, CheckRow]:
    """Return, by the identity of each failed row, the first failure under the same configuration that explains it."""
    found: dict[int, CheckRow] = {}
    for index, row in enumerate(failed):
        before = (other for other in failed[:index] if other.config == row.config and _explains(other.check, row.check))
        found[id(row)] = next(before, row)
    return found


def _explains(first: str, check: str) -> bool:
    if check.startswith(_ALONE) or not first.startswith(_BASIC):
        return False
    # A wrong gradient leaves results and tangents alone; the gradients of two arguments may both be wrong.
    return not first.startswith("gradient") or not check.startswith(("gradient", "tangents", *_RESULTS))


def _advice(check: str, rows: Sequence[CheckRow], configs: Sequence[Any]) -> Iterator[str]:
    crashed = [row for row in rows if row.raised and row.config is not None]
    if crashed and check.startswith((*_RESULTS, "under grad", "gradient", "vmap", "second", "scaled", "zeros")):
        yield _of_exception(crashed, configs)
        return
    if check == "outputs":
        yield _of_results(rows, configs)
        return
    name = "odd sizes" if "instead of" in check else check
    hint = next((hint for start, hint in _HINTS.items() if name.startswith(start)), "")
    if hint:
        yield hint


def _of_exception(rows: Sequence[CheckRow], configs: Sequence[Any]) -> str:
    verb, other = ("raises", "it") if len(rows) == 1 else ("raise", "them")
    reason = " ".join(rows[0].reason.split()).rstrip(".")
    if any(row.config == config for row in rows for config in configs[:1]):
        return f"{_shown(rows)} {verb} {reason}: fix it; untuned calls run with the heuristic's configuration"
    return f"{_shown(rows)} {verb} {reason}: fix it, or leave {other} out of config_space"


def _of_results(rows: Sequence[CheckRow], configs: Sequence[Any]) -> str:
    if len(rows) == len(configs):
        return "results are wrong under every configuration: compare `run` and `reference`; either may be wrong"
    verb = "is" if len(rows) == 1 else "are"
    return f"{_shown(rows)} {verb} wrong, the others are not: look at what depends on the configuration, e.g. masks"


def _shown(rows: Sequence[CheckRow]) -> str:
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"{compact(rows[0].config)}{more}"


def _repeated_alone(row: CheckRow) -> str:
    name = "odd sizes" if "instead of" in row.check else row.check
    group = next((group for start, group in _GROUPS.items() if name.startswith(start)), None)
    kept = {group, "gradient"} if group in ("inputs", "dtypes", "vmap") else {group}
    without = [other for other in GROUPS if other not in kept]
    only = "" if row.config is None else f"configs=[{row.config!r}], "
    # The lines must not break inside a name.
    call = f"check_kernel(kernel, ..., {only}without={without})".replace(
        "second derivative", f"second{FIXED}derivative"
    )
    return f"to repeat the check {row.check!r} alone: {call}"
