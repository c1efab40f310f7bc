# SPDX-License-Identifier: Apache-2.0
"""Types shared by all packages: the type variables of a kernel and the key of a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ejkernel.ops.utils.messages.names import NamedFields

Cfg = TypeVar("Cfg")
"""Configuration type of a kernel, usually a frozen dataclass."""

Out = TypeVar("Out")
"""Output type of a kernel: an array or a tree of arrays."""

Flag = bool | np.bool_
"""A static boolean argument."""

Integer = int | np.integer[Any]
"""A static integer, of Python or NumPy."""

Number = float | np.floating[Any] | np.integer[Any]
"""A static number, of Python or NumPy."""


class ConfigKey(NamedTuple):
    """The key of a saved configuration; equal to the plain tuple of its fields.

    Attributes:
        device: Fingerprint of the device, such as `gpu:nvidia_h200`.
        op: Versioned name of the operation, such as `matmul@v1`.
        call: Key of the call's signature: 16 hexadecimal digits.
    """

    device: str
    op: str
    call: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost(NamedFields):
    """The work of a call, independent of the implementation.

    Attributes:
        flops: Floating-point operations; a multiply-add counts as two.
        bytes: The least memory traffic: each argument read once, and each result written once.
    """

    flops: float
    bytes: float
