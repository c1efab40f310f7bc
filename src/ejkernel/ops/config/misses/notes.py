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

from ejkernel.ops.config._files import CallFiles, CallRecord, UnusableError, check_inside, now
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import CacheWarning, SerializationError
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.serialize import describe, sealed_json

SCHEMA: Final = 2
FOLDER: Final = "missed"
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


class MissedNotes(CallFiles[Note]):
    """The notes beside one cache folder.

    If a note cannot be written, this object emits one `CacheWarning` and stops writing.

    Args:
        cache_dir: The folder of the persistent cache.
        clock: Returns the current time.
    """

    record, name, schema, largest = Note, FOLDER, SCHEMA, 1 << 20  # real notes have hundreds of bytes
    called, what = "the note", "a note of a missed call"

    def __init__(self, cache_dir: Path, *, clock: Callable[[], datetime.datetime] | None = None) -> None:
        super().__init__(cache_dir)
        self._clock = clock if clock is not None else now
        self._written: set[ConfigKey] = set()
        self._write_failed = False

    def put(self, inv: Invocation[Cfg, Out], source: str) -> None:
        """Note that `source` answered `inv`. Repeated calls cost nothing."""
        key = inv.key
        # Once per process, because the notes count processes.
        if key in self._written or self._write_failed:
            return
        self._written.add(key)
        file = self.file_of(key)
        before = self.usable(file)
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
        """Return every note that can be read, sorted by device, operation and call."""
        return filter(None, map(self.usable, self.files()))

    def check(self, found: Note) -> None:
        """See `CallFiles`."""
        if not 0 < found.processes < _MOST:
            raise UnusableError(f"it counts {describe(found.processes)} processes")

    def remove(self, key: ConfigKey) -> None:
        """Remove the note of a call, if there is one."""
        self._written.discard(key)
        try:
            check_inside(self.cache_dir, self.file_of(key))
            self.file_of(key).unlink(missing_ok=True)
        except OSError as error:
            warn(f"the note of {key.op} cannot be removed: {error}", CacheWarning)

    def withdraw(self, key: ConfigKey) -> None:
        """Remove the note of a call that has been tuned since this object wrote the note."""
        if key in self._written:
            self.remove(key)


def command_for(kernel: object) -> str:
    """Return the command that tunes the noted calls of a kernel; it imports the kernel's module, unless it is ours."""
    module = kernel.__module__
    return "ejkernel tune --missed" + f" --import {module}" * (module.partition(".")[0] not in ("__main__", "ejkernel"))
