# SPDX-License-Identifier: Apache-2.0
"""The memory that a call needs, and the memory of the device."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Final

from ejkernel import compat
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.fingerprint import default_device
from ejkernel.ops.utils.formatting import size

_NOTABLE: Final = 1 << 20  # bytes; see `more_bytes`
_NOTABLE_SHARE: Final = 0.1


def num_bytes(like: Any) -> int:
    """Return the size in bytes of an array of this shape and dtype; a random key counts as eight bytes."""
    is_key = compat.tracing.dtypes.issubdtype(like.dtype, compat.tracing.dtypes.prng_key)
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


def more_bytes(mine: int | None, theirs: int | None) -> int:
    """Return how many more bytes one program needs than another; 0 if unknown or not notable.

    Notable are 1 MiB and a tenth more.
    """
    if mine is None or theirs is None:
        return 0
    more = mine - theirs
    return more if more >= max(_NOTABLE, _NOTABLE_SHARE * theirs) else 0


def preferred(times: Sequence[float], needs: Sequence[int | None], *, margin: float) -> int:
    """Return the index of the candidate to prefer by time and memory.

    Of the candidates within `margin` of the first, those that need notably more memory than the leanest are passed
    over, and the first of the others is preferred.

    Args:
        times: The time of each candidate, the best candidate first.
        needs: The bytes that each candidate needs; `None` if unknown.
        margin: Share of a candidate's time by which the first must be faster to be preferred to it.
    """
    close = [at for at, time in enumerate(times) if times[0] >= time * (1 - margin)]
    known = {at: need for at in close if (need := needs[at]) is not None}
    if 0 not in known:
        return 0
    least = min(known.values())
    return next(at for at, need in known.items() if not more_bytes(need, least))


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
