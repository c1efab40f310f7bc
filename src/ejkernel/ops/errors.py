# SPDX-License-Identifier: Apache-2.0
"""The errors and warnings of ejkernel, each kind under one root."""

from __future__ import annotations

from typing import Any, Final

from ejkernel.ops.utils.error_text import printable_lines


class EjkernelError(Exception):
    """Root: `except EjkernelError` catches every deliberate error of this library."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())  # messages quote files and foreign exceptions


class ConfigError(EjkernelError, ValueError):
    """A configuration, a policy or a setting is not usable."""


class SerializationError(ConfigError):
    """A value cannot be written as JSON, or JSON data do not fit the type; the message contains the path."""


class KernelError(EjkernelError, TypeError):
    """A kernel class is incomplete, or one of its hooks broke its contract."""


class GradientError(KernelError):
    """A gradient rule returned gradients that do not match the arguments."""


class ArgumentError(EjkernelError, ValueError):
    """An argument of an operation has the wrong shape, dtype or value."""


class CallError(EjkernelError, TypeError):
    """The arguments of a call do not fit the operation: an unknown, missing or surplus argument."""


class UnsupportedError(EjkernelError, NotImplementedError):
    """The requested platform or implementation cannot run this call."""


class UnstableKeyError(EjkernelError, TypeError):
    """A static argument has no name that is stable across processes, so the call has no key."""


class DescriptionError(EjkernelError, ValueError):
    """A call cannot be rebuilt from its description in a program's text or a file."""


class AgreementError(EjkernelError, RuntimeError):
    """The processes of one program run a call with different configurations."""


class CandidateError(EjkernelError, RuntimeError):
    """A candidate failed to compile or run, or its results were rejected."""


class TuningError(EjkernelError, RuntimeError):
    """Tuning could not produce a configuration.

    Attributes:
        outcomes: The outcome of each candidate, the heuristic's first; empty if the search did not get that far.
        seconds: Duration of the search, if it has outcomes.
    """

    outcomes: tuple[Any, ...] = ()
    seconds: float = 0.0


class DeviceLostError(TuningError):
    """The device no longer works in this process, e.g. after an illegal memory access."""


class KernelCheckError(EjkernelError, AssertionError):
    """`check_kernel` found a violation; the message contains its table, and `report` the report."""

    def __init__(self, report: object) -> None:
        super().__init__(report)  # args keep the report, so the error survives pickling
        self.report = report

    def __str__(self) -> str:
        return f"the kernel fails some of the checks below\n{self.report}"


NO_HEURISTIC: Final = "the kernel has no heuristic_cfg, and no config_space with a configuration for this call"


class NoConfigError(EjkernelError, LookupError):
    """No tier had a configuration.

    Args:
        op_id: The operation.
        tried: The tiers that were asked, e.g. `persistent (/home/me/.cache/ejkernel/configs)`.
        call: The call, with its key.
        saved: Why a saved entry is not used, or the nearest entries, or the devices that the call was tuned on.
        missed: The command that tunes noted calls.
        is_noted: Whether the call is noted.
    """

    def __init__(
        self,
        op_id: str,
        tried: tuple[str, ...],
        call: str = "",
        saved: str = "",
        missed: str = "ejkernel tune --missed",
        is_noted: bool = False,
    ) -> None:
        # args keep the fields, so the error survives pickling
        super().__init__(op_id, tried, call, saved, missed, is_noted)
        self.op_id, self.tried, self.call, self.saved = op_id, tried, call, saved
        self.missed, self.is_noted = missed, is_noted

    def __str__(self) -> str:
        lines = [f"No configuration for {self.op_id!r}{f' ({self.call})' if self.call else ''}."]
        if self.saved:
            lines.append(f"{self.saved}.")
        if "heuristic" in self.tried:
            remedy = "give the kernel a heuristic_cfg, e.g. `def heuristic_cfg(self, inv): return MyConfig(...)`"
            lines.append(f"{NO_HEURISTIC[:1].upper()}{NO_HEURISTIC[1:]}: {remedy}, or pass cfg=...")
        else:
            lines.append(f"To tune it, {self._how_to_tune()}.")
            lines.append("To run untuned, unset EJKERNEL_ON_MISS, or use AutotunePolicy(heuristic=True) or cfg=...")
        return printable_lines("\n  ".join([*lines, f"Tried: {', '.join(self.tried)}."]))

    def _how_to_tune(self) -> str:
        if self.is_noted:
            return f"run `{self.missed}`"
        return (
            "run `ejkernel tune MODULE:FUNCTION`; or the program with EJKERNEL_ON_MISS=heuristic "
            f"EJKERNEL_NOTE_MISSES=1, and then `{self.missed}`, which tunes all of its calls"
        )


class EjkernelWarning(UserWarning):
    """Root of the warnings of this library."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ArgumentWarning(EjkernelWarning):
    """The arguments of a call are valid, but often a mistake."""


class CacheWarning(EjkernelWarning):
    """An entry of a persistent cache was ignored, or the cache cannot be written."""


class SettingsWarning(EjkernelWarning):
    """An environment variable starts with `EJKERNEL_` but is unknown."""


class AgreementWarning(EjkernelWarning):
    """The processes of one program cannot agree on configurations."""


class UnstableKeyWarning(EjkernelWarning):
    """A call has no key, because one of its static arguments has no stable name, so it cannot be tuned."""


class KernelWarning(EjkernelWarning):
    """A kernel shares its name and version with another, breaks its contract, or cannot meet a limit of the call."""


class ShardingWarning(EjkernelWarning):
    """A call with a sharding rule is not split over the devices of its program; each device computes all of it."""


class OfflineWarning(EjkernelWarning):
    """A program's calls cannot be tuned, because only their labels are known."""


class TuningWarning(EjkernelWarning):
    """A search ended without measuring all of its candidates."""


class GradientWarning(TuningWarning):
    """A kernel's gradients are wrong, under every configuration or if forward and backward use different ones."""
