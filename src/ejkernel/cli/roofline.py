# SPDX-License-Identifier: Apache-2.0
"""The rooflines of a report: throughput against floating-point operations per byte, below the peak of the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ejkernel.cli.peaks import Peak
from ejkernel.cli.report_data import CallReport
from ejkernel.ops.utils.formatting import ratio

_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 690.0, 10.0, 220.0  # of the box in the picture


@dataclasses.dataclass(frozen=True)
class Dot:
    """One call of a roofline.

    Attributes:
        number: The number of the call on the page, from 1.
        label: The call and its throughput as text.
        intensity: Floating-point operations per byte.
        tflops: Throughput tuned.
        before_tflops: Throughput with the heuristic; `None` if it was not measured.
    """

    number: int
    label: str
    intensity: float
    tflops: float
    before_tflops: float | None


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The calls of one device and dtype.

    Attributes:
        device: The device.
        peak: Its peak.
        dots: The calls.
        x_ends, y_ends: Powers of ten at the ends of the axes.
    """

    device: str
    peak: Peak
    dots: tuple[Dot, ...]
    x_ends: tuple[int, int]
    y_ends: tuple[int, int]

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the powers of ten on the horizontal axis."""
        return [(self.x_at(10.0**n), f"{10.0**n:g}") for n in range(self.x_ends[0], self.x_ends[1] + 1)]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the powers of ten on the vertical axis."""
        return [(self.y_at(10.0**n), f"{10.0**n:g}") for n in range(self.y_ends[0], self.y_ends[1] + 1)]

    @property
    def corners(self) -> list[tuple[float, float]]:
        """The corners of the roof: operations per byte and TFLOP/s."""
        low, high = 10.0 ** self.x_ends[0], 10.0 ** self.x_ends[1]
        ridge = 1e3 * self.peak.tflops / self.peak.gbytes
        low = max(low, 1e3 * 10.0 ** self.y_ends[0] / self.peak.gbytes)  # where the roof enters the box
        return [(x, self.peak.attainable(x)) for x in sorted({low, min(max(ridge, low), high), high})]

    @property
    def roof(self) -> str:
        """The roof as an SVG path."""
        return "M" + "L".join(f"{self.x_at(x)} {self.y_at(y)}" for x, y in self.corners)

    def x_at(self, intensity: float) -> float:
        """Return the place of a number of operations per byte."""
        return _at(intensity, self.x_ends, _LEFT, _RIGHT)

    def y_at(self, tflops: float) -> float:
        """Return the place of a throughput."""
        return _at(tflops, self.y_ends, _BOTTOM, _TOP)


def rooflines_of(calls: Sequence[CallReport]) -> list[Roofline]:
    """Return a roofline for each device and dtype with a known peak and a call of known cost."""
    groups: dict[tuple[str, str], list[tuple[int, CallReport]]] = {}
    for number, call in enumerate(calls, 1):
        if call.peak is not None:
            groups.setdefault((call.device, call.peak.dtype), []).append((number, call))
    found = []
    for (device, _), members in sorted(groups.items()):
        dots, peak = tuple(_dots(members)), members[0][1].peak
        if dots and peak is not None:
            found.append(_roofline(device, peak, dots))
    return found


def _dots(members: Sequence[tuple[int, CallReport]]) -> Iterator[Dot]:
    for number, call in members:
        reached = {each.name: each for each in call.throughput}
        tuned, before = reached.get("tuned"), reached.get("with the heuristic")
        if tuned is None or not tuned.tflops > 0 or not tuned.intensity > 0:
            continue
        gain = f", {ratio(call.speedup)}" if call.speedup is not None and call.speedup > 1 else ""
        label = f"{call.op} {call.arguments}: {tuned.tflops:.3g} TFLOP/s, {tuned.in_words}{gain}"
        yield Dot(number, label, tuned.intensity, tuned.tflops, None if before is None else before.tflops)


def _roofline(device: str, peak: Peak, dots: Sequence[Dot]) -> Roofline:
    ridge = 1e3 * peak.tflops / peak.gbytes
    x_ends = _ends([ridge, *(dot.intensity for dot in dots)])
    heights = [peak.tflops, *(dot.tflops for dot in dots), *(dot.before_tflops or dot.tflops for dot in dots)]
    return Roofline(device, peak, tuple(dots), x_ends, _ends(heights))


def _ends(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten around all values, with at least one decade between them."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _at(value: float, ends: tuple[int, int], first: float, last: float) -> float:
    return round(first + (last - first) * (math.log10(value) - ends[0]) / (ends[1] - ends[0]), 1)
