# SPDX-License-Identifier: Apache-2.0
"""Searches for the tests of reports, comparisons and figures, and a parser of pages."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import jax
import numpy as np

from ejkernel.ops import Cost, Kernel, PersistentCache
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import compare
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.core.invocation import Invocation

SCRIPT = "<script>alert(1)</script>"
HOSTILE = f"""{SCRIPT} "quoted" 'too' {{{{ 7*7 }}}} </td></table>"""


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    order: str = "row"


class Reported(Kernel[Tile, jax.Array]):
    """Its cost is known."""

    def run(self, x, *, cfg):
        return x + x

    def cost(self, inv):
        return Cost(flops=4e6, bytes=2e6)


REPORTED = Reported("reported")


def call(rows=16, kernel=REPORTED):
    return Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((rows, 8), np.float32),), device="gpu:nvidia_h200")


def measured(config, *microseconds):
    samples = tuple(time * 1e-6 for time in microseconds)
    return Outcome(config=config, status=Status.MEASURED, measurement=Measurement(samples=samples), compile_seconds=0.5)


def failed(config, reason, status=Status.FAILED):
    return Outcome(config=config, status=status, reason=reason)


def found(inv=None):
    """A search: a heuristic of 4 us, a winner of 2 us, and three failures with two reasons."""
    outcomes = (
        measured(Tile(1), 4.0, 4.0, 4.0, 4.0),
        measured(Tile(2), 3.0, 3.0, 3.0, 3.0),
        failed(Tile(3), f"needs 300 bytes {HOSTILE}"),
        failed(Tile(4, SCRIPT), f"needs 400 bytes {HOSTILE}"),
        failed(Tile(5), "out of range", Status.CRASHED),
        measured(Tile(6), 1.9, 2.0, 2.0, 2.1),
    )
    challenge = Challenge(Tile(6), compare([2e-6] * 10, [4e-6] * 10), is_confirmation=True)
    return AutotuneData(
        inv=inv or call(), config=outcomes[5].config, outcomes=outcomes, seconds=1.0, challenge=challenge
    )


def save(folder, data, *, entry=True):
    cache = PersistentCache(folder, shipped=False)
    MeasurementStore(cache).save(data)
    if entry:
        cache.put(data.key, data.config, call=data.inv.description, measured=data.summary_data())
    return folder


class Page(HTMLParser):
    """Counts the tags and collects the text, the links and the declared columns of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.script, self._inside = [], [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.script += data
        elif self._inside != "style":
            self.texts.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())
