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
        "all": 1.311,
        "step, capped": 1.371,
        "wide step values": 1.646,
        "step values": 0.9,
        "step, ids": 0.366,
        "all, partial": 0.297,
        "wide values of steps, narrow unit": 0.546,
        "all, masked": 0.183,
    },
    "keys, float32": {
        "rows": 1.349,
        "all, masked": 1.854,
        "wide values": 2.056,
        "long steps, partial": 0.456,
    },
    "query": {
        "two steps": 0.434,
        "key heads": 1.04,
        "long steps, capped": 0.35,
        "wide values of steps, narrow unit": 0.906,
        "four steps, ids": 0.037,
        "long steps, masked": 0.338,
        "four steps": 0.814,
    },
    "query, float32": {
        "step": 1.152,
        "rows of steps": 0.001,
        "step, capped": 0.817,
        "step, v5p": 0.436,
        "step heads": 1.053,
    },
}
