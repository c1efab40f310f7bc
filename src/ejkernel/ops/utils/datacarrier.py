# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of attention kernels, one class per direction."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.messages.names import NamedFields
from ejkernel.ops.utils.services import Shown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchParams(NamedFields, Shown):
    """Fields and checks that both directions share."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{field.name} must be a positive integer or None, got {value!r}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FwdParams(_LaunchParams):
    """Launch parameters of a forward pass; `None` leaves the choice to the kernel.

    Attributes:
        q_blocksize: Query rows per program.
        kv_blocksize: Key/value rows per program.
        num_warps: Warps per program. Ignored on platforms without warps.
        num_stages: Depth of the memory pipeline.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BwdParams(_LaunchParams):
    """Launch parameters of a backward pass, with the same fields as `FwdParams`."""
