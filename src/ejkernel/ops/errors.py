# SPDX-License-Identifier: Apache-2.0
"""Every error that ejkernel raises on purpose, under one root."""

from __future__ import annotations

from ejkernel.ops.utils.printable import printable_lines


class EjkernelError(Exception):
    """Root: `except EjkernelError` catches all that this library raises on purpose."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())  # messages quote files and other people's exceptions


class ConfigError(EjkernelError, ValueError):
    """A configuration, a policy or a setting is not usable."""


class SerializationError(ConfigError):
    """A value cannot be written as JSON, or a JSON text is not such a value; the message holds the path."""


class KernelError(EjkernelError, TypeError):
    """A kernel class is incomplete, or one of its hooks broke its contract."""


class GradientError(KernelError):
    """A gradient rule returned something that does not fit the arguments."""


class ArgumentError(EjkernelError, ValueError):
    """An argument of an operation has the wrong shape, dtype or value."""


class CallError(EjkernelError, TypeError):
    """The arguments of a call do not fit the operation: one is unknown, missing, or by position without a place."""


class UnsupportedError(EjkernelError, NotImplementedError):
    """The platform or implementation that was asked for cannot run this call."""


class UnstableKeyError(EjkernelError, TypeError):
    """A static argument has no name that is the same in every process, so the call has no key."""


class DescriptionError(EjkernelError, ValueError):
    """A description of a call, in a program's text or a file, cannot be turned back into the call."""


class AgreementError(EjkernelError, RuntimeError):
    """The processes of one program do not run a call with one configuration."""


class CandidateError(EjkernelError, RuntimeError):
    """One candidate could not be compiled, run or accepted."""


class TuningError(EjkernelError, RuntimeError):
    """Tuning could not produce a configuration."""


class DeviceLostError(TuningError):
    """The device does not work in this process any more, as after an illegal access."""


class KernelCheckError(EjkernelError, AssertionError):
    """`check_kernel` found something wrong; the message is its table, and `report` the report."""

    def __init__(self, report: object) -> None:
        super().__init__(report)  # args keep the report, so the error survives pickling
        self.report = report

    def __str__(self) -> str:
        return f"a kernel does not keep its contract\n{self.report}"


class NoConfigError(EjkernelError, LookupError):
    """No tier had a configuration."""

    def __init__(self, op_id: str, tried: tuple[str, ...], call: str = "", not_taken: str = "") -> None:
        super().__init__(op_id, tried, call, not_taken)  # args keep the fields, so the error survives pickling
        self.op_id, self.tried, self.call, self.not_taken = op_id, tried, call, not_taken

    def __str__(self) -> str:
        saved = f" What is saved for it is not taken: {self.not_taken}." if self.not_taken else ""
        advice = (
            "Give the kernel a heuristic_cfg or a config_space, or pass cfg=..."
            if "heuristic" in self.tried
            else "Pass cfg=..., tune the call (`ejkernel tune`), or allow the kernel's own choice with "
            "AutotunePolicy(heuristic=True), or without EJKERNEL_ON_MISS=error."
        )
        return printable_lines(
            f"No configuration for {self.op_id!r}{f' ({self.call})' if self.call else ''}; tried "
            f"{', '.join(self.tried)}.{saved} {advice}"
        )


class EjkernelWarning(UserWarning):
    """Root of the warnings of this library."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class CacheWarning(EjkernelWarning):
    """An entry of a persistent cache was ignored, or the cache cannot be written."""


class SettingsWarning(EjkernelWarning):
    """A variable of the environment begins with `EJKERNEL_` and is not one of ours."""


class AgreementWarning(EjkernelWarning):
    """The processes of one program have no means to agree on configurations."""


class UnstableKeyWarning(EjkernelWarning):
    """A call cannot be remembered, because one of its static arguments has no stable name."""


class KernelWarning(EjkernelWarning):
    """Two kernels cannot be told apart, or one breaks its contract in a way that does not end the program."""


class ShardingWarning(EjkernelWarning):
    """A call that could be split over the devices of its program is not; each device computes all of it."""


class OfflineWarning(EjkernelWarning):
    """A program's calls could not be tuned, because nothing is known about them but their labels."""


class TuningWarning(EjkernelWarning):
    """A search ended without measuring what it was asked to measure."""


class GradientWarning(TuningWarning):
    """A kernel's gradients are wrong under every configuration, or where forward and backward have different ones."""
