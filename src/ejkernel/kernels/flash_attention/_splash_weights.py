# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {
    "forward": {
        "all": 0.273,
        "values": 0.001,
        "four steps": 0.989,
        "wide values of steps, narrow unit": 0.564,
        "constant": 0.703,
        "unmasked steps": 0.124,
        "rows of steps": 0.208,
        "wide values of steps": 0.184,
    },
    "forward, float32": {
        "four steps": 0.001,
        "values": 0.876,
        "step, capped": 0.001,
        "four steps, capped": 0.802,
        "step, narrow unit": 1.482,
        "beyond a large step": 1.575,
        "four steps, masked": 0.226,
    },
    "fused": {
        "step": 1.486,
        "wide values": 1.041,
        "step, capped": 1.059,
        "long steps, masked": 0.02,
        "beyond a large step, masked": 0.278,
        "wide step heads": 0.404,
        "four steps": 0.032,
        "unmasked steps": 0.078,
    },
    "fused, float32": {
        "step": 1.665,
        "step, capped": 0.578,
        "beyond a large step": 0.253,
    },
    "keys": {
        "step": 1.259,
        "wide values": 1.107,
        "long steps, capped": 0.674,
        "step, narrow unit": 0.271,
        "long steps, ids": 0.143,
        "beyond a large step, masked": 0.219,
        "step, masked": 0.144,
        "step, partial": 0.07,
    },
    "keys, float32": {
        "two steps": 0.349,
        "step, narrow unit": 1.268,
        "long steps": 0.338,
        "wide step heads": 0.319,
    },
    "query": {
        "two steps": 1.223,
        "long steps, capped": 0.844,
        "step values": 0.435,
        "long steps, masked": 0.223,
        "rows": 0.577,
        "wide values of steps, narrow unit": 0.191,
        "step, ids": 0.038,
        "step rows": 0.056,
    },
    "query, float32": {
        "step": 0.151,
        "wide step heads": 0.449,
        "long steps": 0.613,
        "step, v5p": 0.051,
        "step, masked": 0.084,
    },
}
