# SPDX-License-Identifier: Apache-2.0
"""The memory that a call needs, and the memory of the device."""

from __future__ import annotations

import math
import os
from typing import Any

from ejkernel import compat
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.fingerprint import default_device
from ejkernel.ops.utils.formatting import size


def num_bytes(like: Any) -> int:
    """Return the size in bytes of an array of this shape and dtype; a random key counts as eight bytes."""
    is_key = compat.dtypes.issubdtype(like.dtype, compat.dtypes.prng_key)
    each: int = 8 if is_key else like.dtype.itemsize
    return int(math.prod(like.shape)) * each


def peak_bytes(compiled: Any) -> int | None:
    """Return the bytes that a call of a compiled program needs, with inputs and results; `None` if unknown."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")
    argument, output, temp, alias = (int(getattr(analysis, part)) for part in parts)
    # donated arrays are counted among both arguments and results
    return argument + output + temp - alias


def output_bytes(compiled: Any) -> int | None:
    """Return the bytes of a compiled program's results; `None` if the compiler cannot tell."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.output_size_in_bytes)


def device_bytes() -> int | None:
    """Return the memory of the default device in bytes; `None` if unknown."""
    device = default_device()
    stats = device.memory_stats()
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def check_room(needed: int, what: str) -> None:
    """Raise if the default device has less memory than `needed` bytes.

    Raises:
        TuningError: The device is too small.
    """
    available = device_bytes()
    if available is not None and needed > available:
        raise TuningError(f"not enough memory for {what}: {size(needed)} needed, {size(available)} on the device.")
