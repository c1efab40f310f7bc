# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "forward": {
        "four steps": 0.067,
        "rows of steps": 2.528,
        "values": 0.988,
        "long steps": 0.465,
        "wide values of steps, narrow unit": 0.566,
        "unmasked steps": 0.125,
        "step": 0.681,
        "four steps, capped": 0.147,
    },
    "forward, float32": {
        "four steps": 0.973,
        "rows": 3.589,
        "all, masked": 0.001,
        "wide values of steps, narrow unit": 1.685,
        "constant": 3.314,
        "long steps, capped": 0.413,
        "key values": 0.354,
    },
    "fused": {
        "four steps": 0.124,
        "heads": 1.931,
        "key heads": 1.972,
        "step": 1.378,
        "four steps, v5p": 0.094,
        "wide values": 0.436,
        "two steps, capped": 0.36,
        "wide values of steps, narrow unit": 0.315,
    },
    "fused, float32": {
        "step": 0.95,
        "key values": 0.877,
        "rows of steps": 0.958,
        "long steps, capped": 0.35,
        "wide step values": 0.903,
        "two steps": 0.559,
        "two steps, capped": 0.503,
        "wide values": 1.018,
    },
    "keys": {
        "four steps": 0.058,
        "key values": 1.611,
        "step, capped": 1.622,
        "wide values of steps, narrow unit": 2.45,
        "step": 1.209,
        "all, masked": 0.227,
        "long steps, ids": 0.27,
        "wide step heads": 0.493,
    },
    "keys, float32": {
        "all": 0.96,
        "step values": 2.149,
        "partial values": 1.649,
        "all, masked": 1.18,
    },
    "query": {
        "two steps": 0.649,
        "key heads": 0.47,
        "long steps, capped": 0.363,
        "wide values of steps, narrow unit": 0.363,
        "four steps, ids": 0.037,
        "long steps, masked": 0.284,
        "four steps": 0.717,
        "heads": 0.604,
    },
    "query, float32": {
        "step": 1.027,
        "rows of steps": 3.927,
    },
}
