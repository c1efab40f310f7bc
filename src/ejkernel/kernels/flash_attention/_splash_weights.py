# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "forward": {
        "all": 0.579,
        "values": 0.417,
        "key values": 0.09,
        "unmasked steps": 0.072,
        "all, masked": 0.001,
        "wide values of steps, narrow unit": 0.524,
        "four steps": 0.641,
        "constant": 1.014,
    },
    "forward, float32": {
        "all": 0.001,
        "values": 1.517,
        "unmasked steps": 0.273,
        "wide values of steps": 0.848,
        "four steps": 1.043,
        "step rows": 0.853,
    },
    "fused": {
        "step": 1.531,
        "wide values": 1.538,
        "step, capped": 0.861,
        "four steps, masked": 0.02,
        "beyond a large step, partial": 0.033,
        "four steps, ids": 0.071,
        "long steps": 0.063,
        "beyond a large step, masked": 0.057,
    },
    "fused, float32": {
        "step": 1.807,
        "step, capped": 0.733,
        "beyond a large step": 0.241,
        "two steps, capped": 0.093,
        "beyond a large step, narrow unit": 0.112,
        "unmasked steps": 0.036,
        "two steps, narrow unit": 0.035,
    },
    "keys": {
        "step": 1.274,
        "step, capped": 1.265,
        "wide values of steps, narrow unit": 1.151,
        "step, narrow unit": 0.234,
        "long steps, ids": 0.128,
        "step, masked": 0.166,
        "beyond a large step": 0.145,
        "step, partial": 0.084,
    },
    "keys, float32": {
        "step": 0.789,
        "step, narrow unit": 0.704,
        "two steps": 0.38,
        "step, capped": 1.441,
        "wide values": 1.485,
        "long steps, narrow unit": 0.001,
        "four steps": 0.092,
        "long steps": 0.088,
    },
    "query": {
        "two steps": 1.223,
        "step, capped": 0.197,
        "step values": 0.491,
        "long steps, masked": 0.223,
        "rows": 0.577,
        "wide values of steps, narrow unit": 0.177,
        "step, ids": 0.038,
        "long steps, capped": 0.648,
    },
    "query, float32": {
        "step": 1.37,
        "long steps, capped": 0.922,
        "step, masked": 0.243,
        "constant": 2.166,
        "long steps, partial": 0.103,
        "step values": 0.274,
    },
}
