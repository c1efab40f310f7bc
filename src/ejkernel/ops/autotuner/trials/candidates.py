# SPDX-License-Identifier: Apache-2.0
"""The candidates of a running search, their identities, and programs compiled for them elsewhere."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config._files import UnusableError, read_file
from ejkernel.ops.config.cache import config_token
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, heuristic_config
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import (
    CandidateError,
    EjkernelError,
    NoConfigError,
    SerializationError,
    TuningError,
    TuningWarning,
)
from ejkernel.ops.utils.error_text import error_text, message_of
from ejkernel.ops.utils.fingerprint import default_device
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.serialize import digest_of

LISTED = 24  # a space of at most so many configurations is measured completely, like a list
_LARGEST: Final = 1 << 30  # bytes of a program's file


# Compared by identity: configurations and programs may be neither hashable nor comparable.
@dataclasses.dataclass(slots=True, eq=False)
class Candidate:
    """A candidate of a running search."""

    config: Any
    compiled: Sequence[Callable[..., Any]] = ()  # one program per call of the search; none if it is not compiled
    status: Status = Status.SKIPPED
    reason: str = "the budget was spent before its turn"
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    output_bytes: int | None = None
    spilled: int | None = None
    measurement: Measurement | None = None
    twin: Candidate | None = None  # the candidate with the same program
    deferred: Sequence[Any] | None = None  # programs with many spills, put off until the others are checked
    beside: tuple[float, ...] = ()  # the heuristic's samples in the rounds of `measurement`; not of earlier attempts
    is_recalled: bool = False  # its times come from an earlier attempt or search
    input_sets: int = 0  # sets of inputs on which it was correct; only potential winners are checked on several
    result_types: str = ""  # of all calls, once it has run
    damage: int = 0  # the watch's damage count when this candidate began

    @property
    def seconds(self) -> float | None:
        """Seconds per call (of its twin, if it has one); `None` if not measured, or failed since."""
        measured = self if self.twin is None else self.twin
        return None if measured.measurement is None else measured.measurement.median

    def fail(self, status: Status, error: BaseException) -> None:
        """Record the reason only: a traceback would keep the candidate's arrays alive."""
        self.status, self.compiled, self.measurement, self.deferred = status, (), None, None
        self.reason = message_of(error) if isinstance(error, CandidateError) else error_text(error)

    def take_over(self, known: Outcome) -> None:
        """Copy the outcome of an earlier attempt."""
        self.status, self.reason, self.measurement = Status(known.status), known.reason, known.measurement
        self.compile_seconds, self.peak_bytes, self.spilled = known.compile_seconds, known.peak_bytes, known.spilled

    def outcome(self) -> Outcome:
        """Return its outcome; a measured candidate that was compiled again stays measured."""
        was_measured = self.status == Status.READY and self.measurement is not None
        return Outcome(
            config=self.config,
            status=Status.MEASURED if was_measured else self.status,
            reason="" if self.status in (Status.MEASURED, Status.READY) else self.reason,
            twin=self.twin.config if self.twin is not None and self.status == Status.SAME else None,
            measurement=self.measurement,
            compile_seconds=self.compile_seconds,
            peak_bytes=self.peak_bytes,
            spilled=self.spilled,
        )


def config_id(config: object) -> Any:
    """Return a hashable identity of a configuration.

    Raises:
        TuningError: The configuration is not plain data.
    """
    try:
        return config_token(config)
    except SerializationError as error:
        raise TuningError(f"configurations must be plain data, got {config!r}: {error}") from error


def is_in(space: Collection[Any], config: object) -> bool:
    """Return whether a list or space of configurations contains `config`."""
    if isinstance(space, ConfigSpace):
        return config in space
    return config_id(config) in map(config_id, space)


def distinct(configs: Iterable[Any], but: Iterable[object] = ()) -> list[Any]:
    """Return the distinct configurations, in order, without those of `but`."""
    known = set(map(config_id, but))
    return list({token: config for config in configs if (token := config_id(config)) not in known}.values())


def exchange(one: Candidate, other: Candidate) -> None:
    """Swap the results of two candidates with the same program."""
    for field in dataclasses.fields(Candidate):
        if field.name != "config":
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            setattr(one, field.name, theirs)
            setattr(other, field.name, mine)


def heuristic_of(inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> list[Any]:
    """Return a list of the heuristic's configuration; empty if the kernel has none."""
    try:
        return [heuristic_config(kernel, inv)]
    except NoConfigError:
        return []


@dataclasses.dataclass(frozen=True, slots=True)
class CodeFile:
    """Machine code in a compressed file.

    Attributes:
        path: The file.
        sha256: Digest of its content when it was written.
    """

    path: Path
    sha256: str

    @classmethod
    def written(cls, path: Path, code: bytes) -> CodeFile:
        """Write machine code; it takes a quarter of its size."""
        content = zlib.compress(code)
        path.write_bytes(content)
        return cls(path, digest_of(content))

    def read(self) -> bytes:
        """Return the machine code.

        Raises:
            CandidateError: The file is missing, or its content has changed.
        """
        try:
            content = read_file(self.path, _LARGEST)
            if content is None:
                raise CandidateError(f"its program {self.path.name} is missing")
            # Machine code runs unchecked: never load a damaged file or the program of another row.
            if digest_of(content) != self.sha256:
                raise CandidateError(f"its program {self.path.name} was changed after it was written")
            return zlib.decompressobj().decompress(content, _LARGEST)
        except (UnusableError, zlib.error) as error:
            raise CandidateError(f"its program {self.path.name} cannot be used: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled program, or a program left to the machine that runs it.

    Attributes:
        digest: Identity of the program; empty if unknown or no longer needed.
        code: Machine code; `None` if the compilation is left to the other machine.
        inputs: Number of input arrays.
        outputs: Number of output arrays.
        mosaic: Whether it needs the Mosaic GPU runtime.
        spilled: Bytes of registers that a thread spills to memory, if known.
        vector_memory: Bytes of vector memory that its largest kernel takes, on TPUs.
        why_left: Why it was not compiled here.
        cycles: Cycles of the device that a simulator estimates, if one was asked.
        least_cycles: The same without the simulator's known excess.
        simulated: The part of the call that was simulated, in words; empty for the whole call.
    """

    digest: str = ""
    code: bytes | CodeFile | None = None
    inputs: int = 0
    outputs: int = 0
    mosaic: bool = False
    spilled: int | None = None
    vector_memory: int | None = None
    why_left: str = ""
    cycles: float | None = None
    least_cycles: float | None = None
    simulated: str = ""

    def load(self) -> Any:
        """Load the program onto the default device.

        Raises:
            CandidateError: The file is missing, or its content has changed.
            TuningError: The default device is not device 0, the target of all such programs.
        """
        assert self.code is not None  # callers check
        code = self.code.read() if isinstance(self.code, CodeFile) else self.code
        if not is_first(default_device()):
            raise TuningError(
                "a program compiled by another process runs only on the first device, not on "
                f"{default_device()}; make that device the only visible one, e.g. with CUDA_VISIBLE_DEVICES."
            )
        # Code compiled elsewhere expects the runtime of its kernels in this process.
        if self.mosaic:
            compat.executables.load_mosaic_gpu_runtime()
        return compat.executables.loaded(code, inputs=self.inputs, outputs=self.outputs)


def is_first(device: jax.Device) -> bool:
    """Return whether `device` is device 0, the target of programs compiled elsewhere."""
    return int(device.id) == 0


def loaded_or_none(program: Program) -> Any:
    """Return a program of another machine, loaded; `None`, with a warning, if this device's runtime rejects it."""
    try:
        return program.load()
    except EjkernelError:  # its file has changed, or this is not the first device: not the runtime's doing
        raise
    except Exception as error:  # noqa: BLE001 - each runtime has its own errors
        warn(
            f"a program compiled elsewhere cannot be loaded, so it is compiled here: {error_text(error)}", TuningWarning
        )
        return None


def program_digest(text: str) -> str | None:
    """Return the digest of a lowered program; `None` if the text does not identify the program.

    The text of a program with host callbacks does not name the functions that it calls.
    """
    # Different configurations may compile to one program: e.g. block sizes larger than the array, or fields that a
    # platform ignores.
    return None if "callback" in text else hashlib.sha256(text.encode()).hexdigest()
