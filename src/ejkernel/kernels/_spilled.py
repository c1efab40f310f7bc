# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "layer norm, backward": {"values": 5.395, "row": 2.778, "rows": 1.068},
    "layer norm, backward, float32": {"values": 4.581, "row": 3.7, "values, tpu:tpu_v6_lite": 0.057, "rows": 1.36},
    "layer norm, backward, residual": {"values": 4.391, "row": 7.624, "values, tpu:tpu_v6_lite": 0.131, "rows": 3.473},
    "layer norm, backward, residual, float32": {
        "values": 3.615,
        "row": 4.124,
        "row, tpu:tpu_v6_lite": 4.226,
        "rows": 2.165,
    },
    "layer norm, forward": {"values": 1.089, "row": 2.096, "rows": 0.711},
    "layer norm, forward, float32": {
        "values": 1.537,
        "values, tpu:tpu_v5_lite": 0.022,
        "values, tpu:tpu_v6_lite": 0.057,
        "rows": 0.372,
    },
    "layer norm, forward, residual": {
        "values": 1.869,
        "row": 0.191,
        "values, tpu:tpu_v5_lite": 0.001,
        "row, tpu:tpu_v6_lite": 1.292,
        "rows": 0.429,
    },
    "layer norm, forward, residual, float32": {
        "values": 3.096,
        "values, tpu:tpu_v6_lite": 0.048,
        "row, tpu:tpu_v6_lite": 0.029,
    },
    "paged, bfloat16, partial": {
        "scores": 0.777,
        "rows": 3.224,
        "keys": 1.199,
        "scores of heads": 0.041,
        "rows of heads": 0.414,
    },
    "paged, bfloat16, whole": {"keys": 0.743, "scores of heads": 1.54, "rows of heads": 4.459, "keys of heads": 0.464},
    "paged, bfloat16, wide unit": {
        "rows": 0.32,
        "keys": 0.257,
        "scores of heads": 1.187,
        "rows of heads": 3.243,
        "keys of heads": 0.365,
        "constant": 3.112,
    },
    "paged, float32, partial": {"scores": 2.732, "rows": 1.803, "rows of heads": 0.23, "keys of heads": 0.091},
    "paged, float32, whole": {"rows": 1.655, "keys": 0.846, "scores of heads": 3.123, "rows of heads": 0.145},
    "paged, float32, wide unit": {"scores of heads": 0.954, "rows of heads": 4.012, "keys of heads": 0.335},
    "rms norm, backward": {"values": 5.43, "row": 2.147},
    "rms norm, backward, float32": {"values": 3.244},
    "rms norm, backward, residual": {"values": 3.721, "row": 1.042},
    "rms norm, backward, residual, float32": {"values": 2.931, "row": 3.103, "row, tpu:tpu_v6_lite": 0.371},
    "rms norm, forward": {
        "values": 0.848,
        "row": 4.797,
        "values, tpu:tpu_v5_lite": 0.358,
        "values, tpu:tpu_v6_lite": 0.351,
    },
    "rms norm, forward, float32": {
        "values": 0.168,
        "row": 0.581,
        "row, tpu:tpu_v5_lite": 1.81,
        "values, tpu:tpu_v6_lite": 1.373,
    },
    "rms norm, forward, residual": {"values": 1.491, "row": 0.002, "values, tpu:tpu_v6_lite": 0.055},
    "rms norm, forward, residual, float32": {
        "values": 1.148,
        "row, tpu:tpu_v5_lite": 0.325,
        "values, tpu:tpu_v6_lite": 0.034,
    },
}
