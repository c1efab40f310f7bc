# SPDX-License-Identifier: Apache-2.0
"""Programs compiled ahead of time, in another process or on another machine."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.config._files import UnusableError, read_file
from ejkernel.ops.errors import CandidateError, TuningError
from ejkernel.ops.utils.fingerprint import default_device
from ejkernel.ops.utils.storage.serialize import digest_of

_LARGEST: Final = 1 << 30  # bytes of a program's file


@dataclasses.dataclass(frozen=True, slots=True)
class CodeFile:
    """Machine code in a file.

    Attributes:
        path: The file.
        sha256: Digest of its content when it was written.
    """

    path: Path
    sha256: str

    def read(self) -> bytes:
        """Return the machine code.

        Raises:
            CandidateError: The file is missing, or its content has changed.
        """
        try:
            code = read_file(self.path, _LARGEST)
        except UnusableError as error:
            raise CandidateError(f"its program {self.path.name} cannot be used: {error}") from error
        if code is None:
            raise CandidateError(f"its program {self.path.name} is missing")
        # Machine code runs unchecked: never load a damaged file or the program of another row.
        if digest_of(code) != self.sha256:
            raise CandidateError(f"its program {self.path.name} was changed after it was written")
        return code


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
        why_left: Why it was not compiled here.
    """

    digest: str = ""
    code: bytes | CodeFile | None = None
    inputs: int = 0
    outputs: int = 0
    mosaic: bool = False
    spilled: int | None = None
    why_left: str = ""

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
            _load_mosaic_runtime()
        return compat.loaded(code, inputs=self.inputs, outputs=self.outputs)


def is_first(device: jax.Device) -> bool:
    """Return whether `device` is device 0, the target of programs compiled elsewhere."""
    return int(device.id) == 0


@functools.cache
def _load_mosaic_runtime() -> None:
    compat.load_mosaic_gpu_runtime()


def program_digest(text: str) -> str | None:
    """Return the digest of a lowered program; `None` if the text does not identify the program.

    The text of a program with host callbacks does not name the functions that it calls.
    """
    # Different configurations may compile to one program: e.g. block sizes larger than the array, or fields that a
    # platform ignores.
    return None if "callback" in text else hashlib.sha256(text.encode()).hexdigest()
