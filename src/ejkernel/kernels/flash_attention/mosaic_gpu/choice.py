# SPDX-License-Identifier: Apache-2.0
"""Whether our kernels or cuDNN's are faster: a weighted mean over similar calls of a measured grid.

`python -m benchmarks.attention_choice` measures the grid, and a test leaves out one call after the other.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from ejkernel.kernels.flash_attention.common import AttentionCall, Rules

from .forward_support import heuristic
from .plan import TILE_ROWS, WHOLE_DIMS

_FILE = "flash_attention_h200.json"
_WIDTHS = {False: 0.35, True: 0.7}  # of the weights, in units of `_position`: forward, backward
_NARROW, _MOST_WARPGROUPS = 64, 3  # of heads, and of the forward's tiles for these
_USUAL = 0.04  # the gain of our kernels where no similar call was measured
_USUAL_IN_HALF = -0.1  # of backwards in float16 with 65 to 128 columns
_GAIN_WITH_SINKS = 0.1  # of backwards in a window: with sinks cuDNN took 217 us instead of 191, ours 204 instead of 201
_USUAL_WEIGHT = 0.3  # of the usual gain, where an equal call has 1


class Measured(NamedTuple):
    """A measured call, and the logarithm of cuDNN's time over ours."""

    call: AttentionCall
    gain: float


def expected_gain(call: AttentionCall, without: AttentionCall | None = None) -> float:
    """Return the expected logarithm of cuDNN's time over ours.

    Args:
        call: A call that both support.
        without: A measured call that does not count.
    """
    calls, positions, gains = _grid(call.backward)
    distances = np.square(positions - np.asarray(_position(call))).sum(axis=1)
    weights = np.exp(distances / (-2 * _WIDTHS[call.backward] ** 2))
    if without is not None:
        weights = np.where([one == without for one in calls], 0, weights)
    usual = _USUAL_IN_HALF if call.backward and call.dtype == "float16" and 64 < call.query[3] <= 128 else _USUAL
    expected = float((weights @ gains + _USUAL_WEIGHT * usual) / (weights.sum() + _USUAL_WEIGHT))
    return expected + _GAIN_WITH_SINKS * (call.backward and call.sinks and call.rules.left is not None)


def measured() -> Iterator[Measured]:
    """Yield the calls of the grid that both support."""
    data = json.loads((resources.files("ejkernel") / "data" / "measured" / _FILE).read_text(encoding="utf-8"))
    for row in data["calls"]:
        if {"mosaic_gpu", "cudnn"} <= set(row["us"]):
            yield Measured(_call_of(row), math.log(row["us"]["cudnn"] / row["us"]["mosaic_gpu"]))


@functools.cache
def _grid(backward: bool) -> tuple[list[AttentionCall], np.ndarray, np.ndarray]:
    calls, gains = zip(*(one for one in measured() if one.call.backward == backward), strict=True)
    return list(calls), np.asarray([_position(call) for call in calls]), np.asarray(gains)


def _position(call: AttentionCall) -> tuple[float, ...]:
    """Return a point; calls at a distance of 1 have little in common."""
    batch, queries, heads, dim = call.query
    hides, shortness = call.attention_mask is not None, _shortness(call)
    pieced = dim not in WHOLE_DIMS or queries % TILE_ROWS > 0
    # Narrow heads: with two warpgroups, for few tiles, ours was up to 8 % slower, and with three as much faster.
    three = not call.backward and dim <= _NARROW and heuristic(call).warpgroups == _MOST_WARPGROUPS
    return (
        2 * math.log2(dim),
        math.log2(queries),
        0.5 * math.log2(batch * heads * queries),
        float(call.rules.right is not None),
        1.5 * (shortness > 0),
        float(hides or call.key_lengths or call.query_lengths),
        float(pieced),
        1.5 * three,
        # The more heads share keys, the more ours gains in the backward; in a short window it loses without them.
        1.2 * call.backward * math.log2(heads / call.key[2]),
        0.7 * call.backward * shortness,
        # In a short window, our backward is slower than cuDNN's for most heads in pieces, and faster for others.
        0.8 * call.backward * (pieced and shortness > 0),
        # Padded to 128 in the sums, with many heads for each key head: ours took 20 % longer, and at 128 less time.
        0.5 * call.backward * (96 < dim <= 112) * math.log2(heads / call.key[2]),
        1.0 * call.backward * (call.dtype == "float16"),  # its backward also limits the range of gradients
    )


def _shortness(call: AttentionCall) -> float:
    """Return how short the window is: the binary logarithm of 2,048 over its size, at least 1; 0 without a window."""
    left = call.rules.left
    if left is None or left >= call.key[1] // 2:
        return 0.0
    return max(1.0, 11 - math.log2(left + 1))


def _call_of(row: dict[str, Any]) -> AttentionCall:
    batch, queries, keys, heads, groups, dim = row["sizes"]
    key = (batch, keys, groups, dim)
    return AttentionCall(
        query=(batch, queries, heads, dim),
        key=key,
        value=key,
        dtype=row.get("dtype", "bfloat16"),
        rules=Rules(scale=1.0, left=row.get("left"), right=row.get("right")),
        key_lengths=row.get("lengths", False),
        backward=row["direction"] == "bwd",
        platform="gpu",
    )
