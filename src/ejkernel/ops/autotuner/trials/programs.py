# SPDX-License-Identifier: Apache-2.0
"""Programs that were compiled ahead of time: in another process, or on another machine."""

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
from ejkernel.ops.utils.storage.sealed import digest_of

_LARGEST: Final = 1 << 30  # bytes of a program's file


@dataclasses.dataclass(frozen=True, slots=True)
class CodeFile:
    """Machine code in a file.

    Attributes:
        path: The file.
        sha256: The digest of what was written to it.
    """

    path: Path
    sha256: str

    def read(self) -> bytes:
        """Return the machine code.

        Raises:
            CandidateError: the file is not there, or is not the one that was written.
        """
        try:
            code = read_file(self.path, _LARGEST)
        except UnusableError as error:
            raise CandidateError(f"its program {self.path.name} cannot be used: {error}") from error
        if code is None:
            raise CandidateError(f"its program {self.path.name} is not there")
        # It runs as it is, so that a damaged file, or another row's, must not.
        if digest_of(code) != self.sha256:
            raise CandidateError(f"its program {self.path.name} is not the one that was written for it")
        return code


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that was compiled, or left to be compiled where it runs.

    Attributes:
        digest: What tells it from others; empty if nothing does, or if nobody asks any more.
        code: Its machine code; `None` if it is left.
        inputs: How many arrays it takes.
        outputs: How many it returns.
        mosaic: Whether it needs the runtime of Mosaic GPU.
        spilled: Bytes of registers that a thread of it spills to memory, as far as that is known.
        why_left: Why it is left.
    """

    digest: str = ""
    code: bytes | CodeFile | None = None
    inputs: int = 0
    outputs: int = 0
    mosaic: bool = False
    spilled: int | None = None
    why_left: str = ""

    def load(self) -> Any:
        """Return it, ready to run on the default device.

        Raises:
            CandidateError: its file is not there, or is not the one that was written for it.
            TuningError: the default device is not the first, which is the one that programs are compiled for.
        """
        assert self.code is not None  # who loads it has seen that it is not left
        code = self.code.read() if isinstance(self.code, CodeFile) else self.code
        if not is_first(default_device()):
            raise TuningError(
                "a program that another process compiled runs on the first device alone, not on "
                f"{default_device()}; let this process see no other, such as with CUDA_VISIBLE_DEVICES."
            )
        # A program that was compiled elsewhere expects the runtime of its kernels in the process.
        if self.mosaic:
            _bring_mosaic_runtime()
        return compat.loaded(code, inputs=self.inputs, outputs=self.outputs)


def is_first(device: jax.Device) -> bool:
    """Return whether it is the device that programs which are compiled elsewhere run on."""
    return int(device.id) == 0


@functools.cache
def _bring_mosaic_runtime() -> None:
    compat.load_mosaic_gpu_runtime()


def program_digest(text: str) -> str | None:
    """Return what tells a lowered program from others; `None` where its text does not tell.

    The text of a program that calls back to the host does not say which function it calls.
    """
    # The text decides, because configurations that differ may be one program all the same: block sizes larger than the
    # array, fields that a platform ignores.
    return None if "callback" in text else hashlib.sha256(text.encode()).hexdigest()
