# SPDX-License-Identifier: Apache-2.0
"""What a time means: how near it is to what the device can do, and whether it can be true at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ejkernel.ops.autotuner.measure.measurement import COLD, Measurement
from ejkernel.ops.core.types import Cost

_GAP = 2.0  # candidates that are true follow each other more closely than that, at the fast end


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a call reached.

    Attributes:
        tflops: 10¹² floating-point operations a second.
        gbytes: 10⁹ bytes a second, of those that must be moved at least.
        flops_share: Share of the device's peak of the first, if that was given.
        bytes_share: Share of the device's peak of the second, if that was given; with warm caches it may exceed 1.
        bound: Seconds that no true figure undercuts, as far as peaks were given; 0 where none was. What a warm cache
            holds need not be moved, so bytes count only for cold ones.
    """

    tflops: float
    gbytes: float
    flops_share: float | None = None
    bytes_share: float | None = None
    bound: float = 0.0


def roofline(
    measurement: Measurement, cost: Cost, *, peak_flops: float | None = None, peak_bandwidth: float | None = None
) -> Roofline:
    """Return what a measured call reached.

    Args:
        measurement: Its time, the median of its samples.
        cost: Its work.
        peak_flops: What the device can do at most for the call's dtype, operations a second.
        peak_bandwidth: What its memory moves at most, bytes a second.
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
    """Return which candidates are too fast to be believed without another look: fresh inputs, on their own.

    Those are the ones below `bound`; and of the fastest quarter (one at least) those beyond a gap: the next one takes
    `gap` times as long. A lone candidate is compared with `bound` only.

    Args:
        seconds: Medians of all candidates.
        bound: Seconds that no true figure undercuts, as of `Roofline.bound`.
        gap: Ratio of neighbours in time.
    """
    order = sorted(range(len(seconds)), key=lambda index: (seconds[index], index))
    few = max(1, len(order) // 4)
    ahead = 0
    for place in range(1, min(few, len(order) - 1) + 1):
        if seconds[order[place]] >= gap * seconds[order[place - 1]]:
            ahead = place
    return sorted({*order[:ahead], *(index for index in order if seconds[index] < bound)})
