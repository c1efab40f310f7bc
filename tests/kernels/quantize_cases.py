# SPDX-License-Identifier: Apache-2.0
"""Quantising blocks under test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject

from ejkernel.modules import Quantize


def call_of(*shape, values="float8_e4m3fn", positive=False, transposed=False, sizes=None):
    def call(dtype):
        x = np.random.default_rng(0).standard_normal(shape)
        groups = [] if sizes is None else [on_device(sizes, jnp.int32)]
        return (on_device(abs(x) if positive else x, dtype), *groups), {"dtype": values, "transposed": transposed}

    return call


def in_use(*shape):
    return lambda dtype: ((jax.ShapeDtypeStruct(shape, dtype),), {"transposed": True})


SUBJECT = Subject(
    operation=Quantize(),
    calls={
        "rows": call_of(16, 256),
        "both": call_of(144, 272, transposed=True),
        "groups": call_of(150, 144, transposed=True, sizes=(0, 130, 3)),
        "rows that end early, e5m2": call_of(2, 3, 150, values="float8_e5m2", positive=True),
        "int8": call_of(3, 130, values="int8"),
    },
    briefly=("rows",),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16")),
        "xla": Backend(dtypes=("float32", "bfloat16")),
    },
    # A number halfway between two others may be rounded to either: e4m3 has 14 units between its largest numbers.
    tolerance=dict.fromkeys(("float32", "bfloat16", "float16"), 0.08),
    spaces={"many rows": in_use(4096, 1024)},
    odd={"odd sizes": in_use(336, 656)},
)
