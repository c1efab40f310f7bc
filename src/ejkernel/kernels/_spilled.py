# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "grouped product, bfloat16": {
        "left": 0.054,
        "products": 1.06,
        "products, tpu:tpu_v6_lite": 0.205,
        "left, tpu:tpu_v4": 0.289,
        "right, tpu:tpu_v4": 0.012,
        "constant": 0.24,
    },
    "grouped product, float32": {
        "some left": 0.099,
        "products": 0.291,
        "products, tpu:tpu_v4": 0.111,
        "constant": 0.24,
    },
    "grouped product, single, bfloat16": {
        "left": 0.586,
        "some left": 0.821,
        "sums, tpu:tpu_v4": 0.024,
        "constant": 0.24,
    },
    "grouped product, single, float32": {
        "left": 0.099,
        "sums, tpu:tpu_v6_lite": 0.295,
        "sums, tpu:tpu_v4": 0.061,
        "constant": 0.24,
    },
    "grouped weights, bfloat16": {
        "left": 0.651,
        "right": 0.142,
        "left, tpu:tpu_v6_lite": 0.188,
        "right, tpu:tpu_v4": 0.031,
        "constant": 0.24,
    },
    "grouped weights, float32": {
        "left": 0.07,
        "products": 0.536,
        "left, tpu:tpu_v5_lite": 0.134,
        "left, tpu:tpu_v6_lite": 0.057,
        "left, tpu:tpu_v4": 0.247,
        "constant": 0.24,
    },
    "layer norm, backward": {
        "loop": 3.749,
        "once": 1.288,
        "more": 3.067,
        "loop, tpu:tpu_v5_lite": 0.266,
        "loop, tpu:tpu_v6_lite": 1.288,
        "loop, tpu:tpu_v4": 1.023,
        "rest, tpu:tpu_v4": 1.439,
        "once, tpu:tpu_v4": 1.944,
    },
    "layer norm, forward": {
        "more": 2.061,
        "more, tpu:tpu_v6_lite": 0.082,
        "loop, tpu:tpu_v4": 3.05,
        "rest, tpu:tpu_v4": 1.356,
        "once, tpu:tpu_v4": 2.779,
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
    "rms norm, backward": {
        "loop": 2.758,
        "once": 0.954,
        "more": 3.814,
        "loop, tpu:tpu_v5_lite": 0.239,
        "loop, tpu:tpu_v4": 1.056,
        "rest, tpu:tpu_v4": 1.498,
        "once, tpu:tpu_v4": 2.043,
    },
    "rms norm, forward": {
        "more": 0.875,
        "more, tpu:tpu_v6_lite": 0.08,
        "loop, tpu:tpu_v4": 1.69,
        "rest, tpu:tpu_v4": 0.795,
        "once, tpu:tpu_v4": 1.524,
    },
}
