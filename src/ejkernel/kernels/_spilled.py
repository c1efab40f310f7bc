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
        "scores": 1.091,
        "rows": 4.527,
        "keys": 1.684,
        "scores of heads": 0.058,
        "rows of heads": 0.582,
    },
    "paged, bfloat16, whole": {"keys": 0.525, "scores of heads": 1.291, "rows of heads": 3.823, "keys of heads": 0.431},
    "paged, bfloat16, wide unit": {
        "rows": 0.27,
        "keys": 0.217,
        "scores of heads": 1.004,
        "rows of heads": 2.742,
        "keys of heads": 0.308,
        "constant": 2.631,
    },
    "paged, float32, partial": {
        "scores": 1.919,
        "rows": 3.742,
        "keys": 0.674,
        "scores of heads": 0.045,
        "keys of heads": 0.07,
        "constant": 0.202,
    },
    "paged, float32, whole": {"scores of heads": 1.758, "keys of heads": 0.171, "constant": 3.625},
    "paged, float32, wide unit": {"scores of heads": 1.235, "rows of heads": 5.151, "keys of heads": 0.287},
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
