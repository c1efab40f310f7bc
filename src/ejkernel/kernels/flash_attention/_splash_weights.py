# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "forward": {
        "four steps": 0.399,
        "rows of steps": 1.245,
        "values": 1.78,
        "long steps": 0.242,
        "wide values of steps, narrow unit": 0.467,
        "unmasked steps": 0.617,
        "all, masked": 0.329,
        "step": 0.121,
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
        "four steps": 0.125,
        "heads": 1.934,
        "key heads": 1.975,
        "step": 1.38,
        "four steps, v5p": 0.094,
        "wide values": 0.437,
        "two steps, capped": 0.361,
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
        "four steps": 0.143,
        "key values": 1.459,
        "step, capped": 1.652,
        "wide values of steps, narrow unit": 2.485,
        "step": 1.029,
        "all, masked": 0.199,
        "long steps, ids": 0.35,
        "wide step heads": 0.702,
    },
    "keys, float32": {
        "all": 0.96,
        "step values": 2.149,
        "partial values": 1.649,
        "all, masked": 1.18,
    },
    "query": {
        "two steps": 0.625,
        "key heads": 0.453,
        "long steps, capped": 0.35,
        "wide values of steps, narrow unit": 0.349,
        "four steps, ids": 0.035,
        "long steps, masked": 0.273,
        "four steps": 0.691,
        "heads": 0.582,
    },
    "query, float32": {
        "step": 0.989,
        "rows of steps": 3.781,
    },
}
