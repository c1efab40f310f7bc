# SPDX-License-Identifier: Apache-2.0
"""`configuration_digest`: which configurations a process has used, in a form that processes can compare."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Final

from ejkernel.ops.config.agreement.decisions import book_in_force
from ejkernel.ops.errors import AgreementError
from ejkernel.ops.utils.storage.serialize import stable_json
from ejkernel.ops.utils.validation import check_argument

_DIGITS: Final = 16


@dataclasses.dataclass(frozen=True)
class ConfigurationDigest:
    """The configurations that a process has used in programs that several processes run; equal by content.

    `str()` of it is 16 hex digits that stand for all of them.

    Attributes:
        keys: For each call, named with its key and its program's devices, the digests of the configurations that it
            ran with: several where overlays were entered, or where `cfg=` was passed.
    """

    keys: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return hashlib.sha256(stable_json(self.keys).encode()).hexdigest()[:_DIGITS]

    def __hash__(self) -> int:
        return hash(str(self))

    def difference(self, other: ConfigurationDigest) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the calls that two processes did not run alike: this one's digests, and the other's.

        No digests are those of a process that has not run the call, or not yet.
        """
        check_argument(isinstance(other, ConfigurationDigest), "other", "a ConfigurationDigest", other)
        calls = sorted({*self.keys, *other.keys})
        both = {call: (self.keys.get(call, ()), other.keys.get(call, ())) for call in calls}
        return {call: (mine, theirs) for call, (mine, theirs) in both.items() if mine != theirs}


def configuration_digest(process: int | None = None) -> ConfigurationDigest:
    """Return the configurations that a process has used so far in programs that several processes run.

    What other processes used is read from JAX's coordination service, as far as they have come; nobody is waited for.

    Args:
        process: Index of the process; `None` means this one.

    Raises:
        AgreementError: another process is asked for, and there is no coordination service, or it fails.
    """
    try:
        book = book_in_force()
    except LookupError as error:
        if process is None:
            return ConfigurationDigest({})
        raise AgreementError(f"process must be None, got {process!r}: {error}.") from error
    if process is None:
        # A copy, for this process goes on using configurations.
        return ConfigurationDigest(dict(book.used))
    check_argument(isinstance(process, int), "process", "the index of a process, or None", process)
    return ConfigurationDigest(book.used_by(process))
