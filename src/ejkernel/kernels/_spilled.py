# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "layer norm, backward": {
        "once": 0.56,
        "loop": 4.655,
        "once, tpu:tpu_v4": 2.801,
        "more": 3.431,
        "rest, tpu:tpu_v4": 0.841,
        "once, tpu:tpu7x": 0.631,
        "more, tpu:tpu_v6_lite": 0.316,
    },
    "layer norm, forward": {
        "once": 0.001,
        "loop, tpu:tpu_v4": 3.151,
        "once, tpu:tpu_v4": 2.871,
        "more": 1.821,
        "rest, tpu:tpu_v4": 1.401,
        "more, tpu:tpu_v6_lite": 0.393,
        "more, tpu:tpu7x": 0.309,
        "more, tpu:tpu_v5_lite": 0.047,
    },
    "paged, bfloat16, partial": {
        "scores of heads": 0.001,
        "rows": 5.498,
        "keys": 1.891,
        "rows of heads": 0.501,
        "scores": 1.343,
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
        "once": 0.981,
        "loop": 2.836,
        "once, tpu:tpu_v4": 2.101,
        "loop, tpu:tpu_v4": 1.086,
        "more": 3.431,
        "more, tpu:tpu7x": 0.491,
        "loop, tpu:tpu_v5_lite": 0.246,
        "rest, tpu:tpu_v4": 1.54,
    },
    "rms norm, forward": {
        "more": 1.009,
        "rest, tpu:tpu_v4": 0.841,
        "once, tpu:tpu_v4": 1.611,
        "loop, tpu:tpu_v4": 1.786,
    },
}
