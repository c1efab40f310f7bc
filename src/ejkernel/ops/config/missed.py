# SPDX-License-Identifier: Apache-2.0
"""Notes of calls that nothing was measured for: one small JSON file a call, in `missed/` beside the cache's entries.

They are renamed into place as entries are, so two processes that miss one call lose a count at the worst.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.config._files import ENTRY, UnusableError, check_inside, files, location, read_file
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import CacheWarning, SerializationError
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.sealed import read_object, sealed_json
from ejkernel.ops.utils.storage.serialize import describe, from_plain

SCHEMA: Final = 2
FOLDER: Final = "missed"
_LARGEST: Final = 1 << 20  # bytes of a note that is read; real ones have hundreds
_MOST: Final = 1 << 31  # processes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A call that nothing was measured for, as it is in its file.

    Attributes:
        schema: Layout of the file.
        key: Device, operation and call.
        call: The abstract call, as `Invocation.description` has it.
        source: The tier that answered instead, such as `heuristic` or `forward`; `error` if none did.
        processes: How many processes missed it, as far as they could count.
        first: When it was first missed.
        last: When it was last missed.
        kernel: `module.Class` of the kernel, or `module.function`, for readers; nothing is imported by it.
    """

    schema: int
    key: dict[str, str]
    call: dict[str, Any]
    source: str
    processes: int
    first: str
    last: str
    kernel: str

    @property
    def config_key(self) -> ConfigKey:
        """What a configuration of the call is remembered under."""
        return ConfigKey(**self.key)


class MissedNotes:
    """The notes beside one cache folder.

    A note that cannot be written is one `CacheWarning`, after which this object writes no more; one that cannot be
    read is a `CacheWarning`, and no note.

    Args:
        cache_dir: The folder of the persistent cache.
        clock: Source of the notes' times.
    """

    def __init__(self, cache_dir: Path, *, clock: Callable[[], datetime.datetime] | None = None) -> None:
        self.cache_dir = cache_dir
        self._clock = clock if clock is not None else _now
        self._written: set[ConfigKey] = set()
        self._write_failed = False

    @property
    def folder(self) -> Path:
        """Where the notes are."""
        return self.cache_dir / FOLDER

    def put(self, inv: Invocation[Cfg, Out], source: str) -> None:
        """Note that `inv` was answered by `source`; the same call again costs nothing."""
        key = inv.key
        # Once a process, however often it calls: processes are counted.
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
            # of a function that is a kernel, the function's
            kernel=f"{kernel.__module__}.{getattr(kernel, '__qualname__', type(kernel).__qualname__)}",
        )
        try:
            # a note that the end of the machine takes is made again by the next run
            write_file(file, sealed_json(note), durable=False, root=self.cache_dir)
        except (OSError, SerializationError) as error:
            self._write_failed = True
            text = f"missed calls cannot be noted in {self.folder} ({error}); set EJKERNEL_CACHE_DIR."
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

    def read(self, file: Path) -> Note | None:
        """Return the note of a file, or `None` if it is gone.

        Raises:
            UnusableError: it cannot be used.
        """
        try:
            check_inside(self.cache_dir, file)
        except OSError as error:
            raise UnusableError(f"it cannot be read: {error}") from error
        raw = read_file(file, _LARGEST)
        if raw is None:
            return None
        try:
            note = from_plain(read_object(raw, SCHEMA, "a note of a missed call"), Note)
        except SerializationError as error:
            raise UnusableError(str(error)) from error
        # A note that lies under another's name would be tuned, and removed, as that.
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
        """Remove the note of a call if it was put here, and has been tuned since."""
        if key in self._written:
            self.remove(key)

    def _file(self, key: ConfigKey) -> Path:
        return self.folder.joinpath(*location(key))

    def _read(self, file: Path) -> Note | None:
        """Return the note of a file, or `None` if there is no file, or none that can be used."""
        try:
            return self.read(file)
        except UnusableError as error:
            warn(f"ignoring the note {file}: {error}", CacheWarning)
            return None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
