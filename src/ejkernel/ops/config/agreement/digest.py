# SPDX-License-Identifier: Apache-2.0
"""`configuration_digest`: the configurations that a process has used, for comparison between processes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Final

from ejkernel.ops.config.agreement.decisions import current_book
from ejkernel.ops.errors import AgreementError
from ejkernel.ops.utils.storage.serialize import stable_json
from ejkernel.ops.utils.validation import check_argument

_DIGITS: Final = 16


@dataclasses.dataclass(frozen=True)
class ConfigurationDigest:
    """The configurations that a process has used in programs that several processes run; compared by content.

    `str()` returns 16 hex digits that represent all of them.

    Attributes:
        keys: The digests of the configurations used for each call. A call is named by its key and its program's
            devices; it has several digests if overlays were entered or `cfg=` was passed.
    """

    keys: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return hashlib.sha256(stable_json(self.keys).encode()).hexdigest()[:_DIGITS]

    def __hash__(self) -> int:
        return hash(str(self))

    def difference(self, other: ConfigurationDigest) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the calls that two processes ran differently, each with this process's and the other's digests.

        A process that has not run the call yet has no digests.
        """
        check_argument(isinstance(other, ConfigurationDigest), "other", "a ConfigurationDigest", other)
        calls = sorted({*self.keys, *other.keys})
        both = {call: (self.keys.get(call, ()), other.keys.get(call, ())) for call in calls}
        return {call: (mine, theirs) for call, (mine, theirs) in both.items() if mine != theirs}


def configuration_digest(process: int | None = None) -> ConfigurationDigest:
    """Return the configurations that a process has used so far in programs that several processes run.

    The digests of other processes come from JAX's coordination service; this does not wait for those processes.

    Args:
        process: Index of the process; `None` means the current process.

    Raises:
        AgreementError: `process` is another process, and the coordination service is missing or fails.
    """
    try:
        book = current_book()
    except LookupError as error:
        if process is None:
            return ConfigurationDigest({})
        raise AgreementError(f"process must be None, got {process!r}: {error}.") from error
    if process is None:
        # Copied, since this process continues to record configurations.
        return ConfigurationDigest(dict(book.used))
    check_argument(isinstance(process, int), "process", "the index of a process, or None", process)
    return ConfigurationDigest(book.used_by(process))
