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
        "rows": 3.912,
        "keys": 1.15,
        "rows of heads": 0.664,
        "scores": 2.389,
        "keys of heads": 0.001,
        "queries": 0.001,
        "constant": 0.001,
    },
    "paged, bfloat16, whole": {
        "scores of heads": 0.954,
        "keys of heads": 0.407,
        "constant": 1.021,
        "rows of heads": 4.64,
        "keys": 0.895,
    },
    "paged, bfloat16, wide unit": {
        "scores of heads": 1.065,
        "keys": 1.104,
        "rows of heads": 3.655,
        "constant": 0.924,
        "scores": 0.049,
        "keys of heads": 0.004,
    },
    "paged, float32, partial": {
        "scores of heads": 0.001,
        "rows": 2.068,
        "keys": 0.472,
        "rows of heads": 1.563,
        "scores": 2.675,
    },
    "paged, float32, whole": {
        "scores of heads": 0.977,
        "keys": 1.014,
        "rows of heads": 5.468,
        "constant": 0.077,
        "keys of heads": 0.016,
    },
    "paged, float32, wide unit": {
        "scores of heads": 1.008,
        "keys": 0.978,
        "rows of heads": 3.922,
        "constant": 0.744,
        "keys of heads": 0.042,
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
