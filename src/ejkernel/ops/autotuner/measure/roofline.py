# SPDX-License-Identifier: Apache-2.0
"""The roofline of a measured call: its share of the device's peaks, and a check for impossible times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ejkernel.ops.autotuner.measure.measurement import COLD, Measurement
from ejkernel.ops.core.types import Cost

_GAP = 2.0  # correct candidates at the fast end are closer to each other than this ratio


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The throughput of a call.

    Attributes:
        tflops: 10¹² floating-point operations per second.
        gbytes: 10⁹ bytes per second, counting the bytes that must be moved at least once.
        flops_share: Share of the device's peak operations per second, if that peak is known.
        bytes_share: Share of the device's peak bandwidth, if known; above 1 it shows that caches were warm.
        bound: The lower bound on the time in seconds, from the known peaks; 0 without any. With warm caches the bytes
            do not count, because cached data need not be moved.
    """

    tflops: float
    gbytes: float
    flops_share: float | None = None
    bytes_share: float | None = None
    bound: float = 0.0


def roofline(
    measurement: Measurement, cost: Cost, *, peak_flops: float | None = None, peak_bandwidth: float | None = None
) -> Roofline:
    """Return the throughput of a measured call.

    Args:
        measurement: Its measurement; the median of the samples counts.
        cost: The operations and bytes of the call.
        peak_flops: The device's peak for the call's dtype, in operations per second.
        peak_bandwidth: The peak bandwidth of its memory, in bytes per second.
    """
    seconds = measurement.median
    compute = cost.flops / peak_flops if peak_flops else None
    memory = cost.bytes / peak_bandwidth if peak_bandwidth else None
    limits = [compute, memory if measurement.cache == COLD else None]
    return Roofline(
        tflops=cost.flops / seconds * 1e-12,
        gbytes=cost.bytes / seconds * 1e-9,
        flops_share=None if compute is None else compute / seconds,
        bytes_share=None if memory is None else memory / seconds,
        bound=max((limit for limit in limits if limit is not None), default=0.0),
    )


def suspiciously_fast(seconds: Sequence[float], *, bound: float = 0.0, gap: float = _GAP) -> list[int]:
    """Return the indices of candidates that are suspiciously fast and must be checked again on new inputs.

    A candidate is suspicious below `bound`, or if it is in the fastest quarter (at least one candidate) and the next
    slower one takes `gap` times as long. A single candidate is only compared with `bound`.

    Args:
        seconds: The median of each candidate.
        bound: The lower bound on the time in seconds; see `Roofline.bound`.
        gap: The ratio of neighbouring times.
    """
    order = sorted(range(len(seconds)), key=lambda index: (seconds[index], index))
    few = max(1, len(order) // 4)
    ahead = 0
    for place in range(1, min(few, len(order) - 1) + 1):
        if seconds[order[place]] >= gap * seconds[order[place - 1]]:
            ahead = place
    return sorted({*order[:ahead], *(index for index in order if seconds[index] < bound)})
