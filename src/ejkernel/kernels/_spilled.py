# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "layer norm, backward": {
        "loop": 3.105,
        "once": 0.606,
        "more": 3.711,
        "loop, tpu:tpu_v5_lite": 0.909,
        "loop, tpu:tpu_v6_lite": 1.931,
        "more, tpu:tpu_v6_lite": 0.341,
        "loop, tpu:tpu_v4": 1.666,
        "rest, tpu:tpu_v4": 1.439,
        "once, tpu:tpu_v4": 3.029,
        "loop, tpu:tpu7x": 0.644,
        "once, tpu:tpu7x": 0.682,
    },
    "layer norm, forward": {
        "more": 1.821,
        "more, tpu:tpu_v5_lite": 0.047,
        "more, tpu:tpu_v6_lite": 0.393,
        "loop, tpu:tpu_v4": 3.151,
        "rest, tpu:tpu_v4": 1.401,
        "once, tpu:tpu_v4": 2.871,
        "more, tpu:tpu7x": 0.309,
    },
    "paged, bfloat16, partial": {
        "scores": 1.401,
        "rows": 5.734,
        "keys": 1.972,
        "rows of heads": 0.523,
    },
    "paged, bfloat16, whole": {
        "keys": 0.876,
        "scores of heads": 0.803,
        "rows of heads": 4.583,
        "keys of heads": 0.391,
        "constant": 0.982,
    },
    "paged, bfloat16, wide unit": {
        "scores": 0.332,
        "keys": 0.804,
        "scores of heads": 0.992,
        "rows of heads": 3.539,
        "keys of heads": 0.03,
        "constant": 0.787,
    },
    "paged, float32, partial": {
        "scores": 2.69,
        "rows": 1.991,
        "keys": 0.372,
        "rows of heads": 1.477,
    },
    "paged, float32, whole": {
        "keys": 0.958,
        "scores of heads": 0.829,
        "rows of heads": 5.379,
        "constant": 0.078,
    },
    "paged, float32, wide unit": {
        "keys": 0.938,
        "scores of heads": 0.545,
        "rows of heads": 4.929,
    },
    "rms norm, backward": {
        "loop": 2.136,
        "once": 0.981,
        "more": 3.431,
        "loop, tpu:tpu_v5_lite": 0.946,
        "loop, tpu:tpu_v6_lite": 0.56,
        "loop, tpu:tpu_v4": 1.786,
        "rest, tpu:tpu_v4": 1.54,
        "once, tpu:tpu_v4": 2.101,
        "loop, tpu:tpu7x": 0.701,
        "more, tpu:tpu7x": 0.491,
    },
    "rms norm, forward": {
        "more": 0.827,
        "more, tpu:tpu_v6_lite": 0.183,
        "loop, tpu:tpu_v4": 1.786,
        "rest, tpu:tpu_v4": 0.841,
        "once, tpu:tpu_v4": 1.611,
        "more, tpu:tpu7x": 0.183,
    },
}
