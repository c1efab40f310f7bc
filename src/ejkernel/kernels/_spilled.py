# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "layer norm, backward": {
        "once": 0.65,
        "loop": 4.307,
        "once, tpu:tpu_v4": 3.332,
        "loop, tpu:tpu_v4": 4.104,
        "more": 4.347,
        "loop, tpu:tpu_v6_lite": 1.097,
        "once, tpu:tpu7x": 0.732,
    },
    "layer norm, forward": {
        "once": 0.001,
        "loop, tpu:tpu_v4": 3.697,
        "once, tpu:tpu_v4": 3.332,
        "more": 2.113,
        "rest, tpu:tpu_v4": 1.544,
        "more, tpu:tpu_v6_lite": 0.455,
        "more, tpu:tpu7x": 0.358,
        "more, tpu:tpu_v5_lite": 0.055,
    },
    "paged, bfloat16, partial": {
        "scores of heads": 0.001,
        "rows": 8.307,
        "keys": 3.012,
        "rows of heads": 0.392,
    },
    "paged, bfloat16, whole": {
        "scores of heads": 0.834,
        "keys of heads": 0.406,
        "constant": 1.02,
        "rows of heads": 4.76,
        "keys": 0.909,
        "scores": 0.001,
    },
    "paged, bfloat16, wide unit": {
        "scores of heads": 1.03,
        "keys": 0.834,
        "rows of heads": 3.675,
        "constant": 0.817,
        "keys of heads": 0.031,
        "scores": 0.344,
    },
    "paged, float32, partial": {
        "scores of heads": 0.001,
        "rows": 2.068,
        "keys": 0.386,
        "rows of heads": 1.534,
        "scores": 2.793,
        "keys of heads": 0.001,
    },
    "paged, float32, whole": {
        "scores of heads": 0.861,
        "keys": 0.994,
        "rows of heads": 5.586,
        "constant": 0.081,
    },
    "paged, float32, wide unit": {
        "scores of heads": 0.566,
        "keys": 0.974,
        "rows of heads": 5.118,
    },
    "rms norm, backward": {
        "once": 1.219,
        "loop": 3.291,
        "once, tpu:tpu_v4": 2.438,
        "loop, tpu:tpu_v4": 2.601,
        "more": 3.819,
        "more, tpu:tpu7x": 0.569,
        "loop, tpu:tpu_v5_lite": 0.285,
        "rest, tpu:tpu_v4": 2.763,
    },
    "rms norm, forward": {
        "more": 1.171,
        "rest, tpu:tpu_v4": 0.65,
        "once, tpu:tpu_v4": 1.951,
        "loop, tpu:tpu_v4": 2.235,
    },
}
