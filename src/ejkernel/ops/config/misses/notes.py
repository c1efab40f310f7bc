# SPDX-License-Identifier: Apache-2.0
"""Notes of calls that have not been tuned: one small JSON file per call, in `missed/` beside the cache's entries.

Notes are written atomically, like entries. Two processes that miss one call at the same time lose a count at worst.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.config._files import (
    ENTRY,
    CallRecord,
    UnusableError,
    check_inside,
    files,
    location,
    now,
    or_unusable,
    read_file,
)
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import CacheWarning, SerializationError
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.serialize import describe, from_plain, read_object, sealed_json

SCHEMA: Final = 2
FOLDER: Final = "missed"
_LARGEST: Final = 1 << 20  # maximum bytes of a note; real notes have hundreds
_MOST: Final = 1 << 31  # processes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note(CallRecord):
    """A call that has not been tuned, as stored in its file.

    Attributes:
        source: The tier that answered instead, such as `heuristic` or `forward`; `error` if none did.
        processes: Number of processes that missed the call (approximate).
        first: Time of the first miss.
        last: Time of the last miss.
        kernel: `module.Class` of the kernel, or `module.function`. Only for readers; it is never imported.
    """

    source: str
    processes: int
    first: str
    last: str
    kernel: str


class MissedNotes:
    """The notes beside one cache folder.

    If a note cannot be written, this object emits one `CacheWarning` and stops writing. A note that cannot be read is
    skipped with a `CacheWarning`.

    Args:
        cache_dir: The folder of the persistent cache.
        clock: Returns the current time.
    """

    def __init__(self, cache_dir: Path, *, clock: Callable[[], datetime.datetime] | None = None) -> None:
        self.cache_dir = cache_dir
        self._clock = clock if clock is not None else now
        self._written: set[ConfigKey] = set()
        self._write_failed = False

    @property
    def folder(self) -> Path:
        """The folder of the notes."""
        return self.cache_dir / FOLDER

    def put(self, inv: Invocation[Cfg, Out], source: str) -> None:
        """Note that `source` answered `inv`. Repeated calls cost nothing."""
        key = inv.key
        # Once per process, because the notes count processes.
        if key in self._written or self._write_failed:
            return
        self._written.add(key)
        file = self._file(key)
        before = self._read(file)
        now = self._clock().astimezone(datetime.UTC).isoformat(timespec="seconds")
        kernel: Any = inv.kernel
        note = Note(
            schema=SCHEMA,
            key=key._asdict(),
            call=inv.description,
            source=source,
            processes=1 if before is None else before.processes + 1,
            first=now if before is None else before.first,
            last=now,
            # a function can be a kernel: then its own name
            kernel=f"{kernel.__module__}.{getattr(kernel, '__qualname__', type(kernel).__qualname__)}",
        )
        try:
            # not durable: the next run writes a lost note again
            write_file(file, sealed_json(note), durable=False, root=self.cache_dir)
        except (OSError, SerializationError) as error:
            self._write_failed = True
            text = f"cannot write notes of missed calls to {self.folder} ({error}); set EJKERNEL_CACHE_DIR."
            warn(text, CacheWarning)

    def entries(self) -> Iterator[Note]:
        """Yield every note that can be read, sorted by device, operation and call."""
        for file in self.files():
            note = self._read(file)
            if note is not None:
                yield note

    def files(self) -> list[Path]:
        """Return the files of all notes, sorted by device, operation and call."""
        return [] if self.folder.is_symlink() else list(files(self.folder, ENTRY))

    @or_unusable
    def read(self, file: Path) -> Note | None:
        """Return the note of a file, or `None` if it is gone.

        Raises:
            UnusableError: The note cannot be used.
        """
        raw = read_file(file, _LARGEST, root=self.cache_dir)
        if raw is None:
            return None
        note = from_plain(read_object(raw, SCHEMA, "a note of a missed call"), Note)
        # With a wrong file name, tuning the call would remove the wrong note.
        if set(note.key) != set(ConfigKey._fields) or self._file(note.config_key) != file:
            raise UnusableError(f"it holds another key: {describe(note.key)}")
        if not 0 < note.processes < _MOST:
            raise UnusableError(f"it counts {describe(note.processes)} processes")
        return note

    def remove(self, key: ConfigKey) -> None:
        """Remove the note of a call, if there is one."""
        self._written.discard(key)
        try:
            check_inside(self.cache_dir, self._file(key))
            self._file(key).unlink(missing_ok=True)
        except OSError as error:
            warn(f"the note of {key.op} cannot be removed: {error}", CacheWarning)

    def withdraw(self, key: ConfigKey) -> None:
        """Remove the note of a call that has been tuned since this object wrote the note."""
        if key in self._written:
            self.remove(key)

    def _file(self, key: ConfigKey) -> Path:
        return self.folder.joinpath(*location(key))

    def _read(self, file: Path) -> Note | None:
        """Return the note of a file, or `None` if the file is missing or cannot be used."""
        try:
            return self.read(file)
        except UnusableError as error:
            warn(f"ignoring the note {file}: {error}", CacheWarning)
            return None


def command_for(kernel: object) -> str:
    """Return the command that tunes the noted calls of a kernel; it imports the kernel's module, unless it is ours."""
    module = kernel.__module__
    return "ejkernel tune --missed" + f" --import {module}" * (module.partition(".")[0] not in ("__main__", "ejkernel"))
