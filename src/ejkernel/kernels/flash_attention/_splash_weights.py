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
        "values": 2.37,
        "unmasked steps": 0.273,
        "wide values of steps": 0.646,
        "four steps": 1.043,
    },
    "fused": {
        "step": 1.594,
        "wide values": 1.279,
        "step, capped": 0.975,
        "four steps, masked": 0.024,
        "beyond a large step, partial": 0.001,
        "four steps, ids": 0.051,
        "beyond a large step, masked": 0.169,
        "wide step heads": 0.123,
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
        "step, narrow unit": 0.616,
        "two steps": 0.558,
        "step, capped": 1.432,
        "wide values": 1.448,
        "long steps, narrow unit": 0.098,
        "all": 0.002,
    },
    "query": {
        "two steps": 1.265,
        "step, capped": 0.27,
        "wide step values": 0.234,
        "long steps, masked": 0.295,
        "step rows": 0.259,
        "values": 0.598,
        "wide step heads": 0.029,
        "long steps, capped": 0.514,
    },
    "query, float32": {
        "step": 1.37,
        "long steps, capped": 0.854,
        "step, masked": 0.243,
        "constant": 4.353,
        "long steps, partial": 0.103,
    },
}
