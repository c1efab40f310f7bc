# SPDX-License-Identifier: Apache-2.0
"""Lines: messages between a caller and the worker of its task while the task runs.

An executor transports only the task and its answer. A line also reports progress, lets the caller end a search, and
keeps the reported results if the worker is lost. Without a connection, all messages come with the answer.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ejkernel.ops.autotuner.process.messages import first_message, framed
from ejkernel.ops.autotuner.process.watch import Instruction


class Line(Protocol):
    """A line between a caller and a worker. It travels with the task, so it can be pickled."""

    # --- for the caller ---

    def heard(self) -> Iterator[bytes]:
        """Yield the messages since the last call."""

    def tell(self, instruction: Instruction) -> None:
        """Set the instruction for the worker."""

    def close(self) -> None:
        """Close the line; a worker that is still connected ends at once."""

    # --- for the worker ---

    def connect(self) -> bool:
        """Return whether this process can reach the caller."""

    def say(self, message: bytes) -> None:
        """Send a message to the caller. Messages arrive in order."""

    def instruction(self) -> Instruction:
        """Return the caller's instruction; `END_AT_ONCE` if the caller is gone."""


@dataclasses.dataclass(slots=True)
class FolderLine:
    """A line through a temporary folder, for a caller and a worker on one machine.

    Attributes:
        folder: The folder.
        read: Number of bytes that the caller has read.
    """

    folder: Path
    read: int = 0

    @classmethod
    def new(cls) -> FolderLine:
        """Return a line of this process."""
        return cls(Path(tempfile.mkdtemp(dir=_folder_of_this_process(os.getpid()))))

    def heard(self) -> Iterator[bytes]:
        """See `Line`."""
        try:
            with open(self.folder / "said", "rb") as file:
                file.seek(self.read)
                new = bytearray(file.read())
        except FileNotFoundError:
            return
        # An incomplete message stays: the worker is still writing it, or was lost.
        while (message := first_message(new)) is not None:
            self.read += len(framed(message))
            yield message

    def tell(self, instruction: Instruction) -> None:
        """See `Line`."""
        (self.folder / instruction.name).touch()

    def close(self) -> None:
        """See `Line`."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def connect(self) -> bool:
        """See `Line`."""
        # Another machine has no folder of this random name; another user may not write into it.
        return os.access(self.folder.parent, os.W_OK | os.X_OK)

    def say(self, message: bytes) -> None:
        """See `Line`."""
        try:
            with open(self.folder / "said", "ab", buffering=0) as file:
                file.write(framed(message))
        except FileNotFoundError:  # the caller is gone; `instruction` reports it
            return

    def instruction(self) -> Instruction:
        """See `Line`."""
        if not self.folder.exists() or (self.folder / Instruction.END_AT_ONCE.name).exists():
            return Instruction.END_AT_ONCE
        return Instruction.END if (self.folder / Instruction.END.name).exists() else Instruction.GO_ON


@functools.cache
def _folder_of_this_process(pid: int) -> Path:
    """Return a folder that this process removes at its end.

    If this folder exists but the folder of a line does not, the caller has closed the line.
    """
    folder = Path(tempfile.mkdtemp(prefix="ejkernel-lines-"))  # private to this user
    atexit.register(_remove, folder, pid)
    return folder


def _remove(folder: Path, pid: int) -> None:
    if pid == os.getpid():  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)
