# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation under test."""

from __future__ import annotations

import jax
import numpy as np
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject
from tests.kernels.layer_norm_cases import interpret_pallas

from ejkernel.kernels._row_norms.pallas import PallasParams
from ejkernel.kernels.rms_norm.xla import XlaParams
from ejkernel.modules import RmsNorm


def rows_of(*shape, weight_dtype=None, residual=False, **options):
    """Return a call with random rows."""

    def call(dtype):
        rng = np.random.default_rng(0)
        x = on_device(rng.standard_normal(shape), dtype)
        weight = on_device(1 + rng.standard_normal(shape[-1]), weight_dtype or dtype)
        added = (on_device(rng.standard_normal(shape), dtype),) if residual else ()
        return (x, weight, *added), options

    return call


def in_use(rows, dim):
    return lambda dtype: ((jax.ShapeDtypeStruct((rows, dim), dtype), jax.ShapeDtypeStruct((dim,), dtype)), {})


SUBJECT = Subject(
    operation=RmsNorm(),
    calls={
        "rows": rows_of(8, 16),
        "one row": rows_of(16),
        "several axes": rows_of(2, 3, 6, 16, eps=0.1),
        "odd sizes": rows_of(7, 13),
        "wide weight": rows_of(4, 16, weight_dtype="float32"),
        "residual": rows_of(8, 16, residual=True),
        "long rows": rows_of(6, 1536, residual=True),
        "short rows": rows_of(2, 8, 128, residual=True),
    },
    briefly=("rows", "residual"),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16", "float32")),
        "xla": Backend(
            dtypes=("float32", "bfloat16", "float16"), params=(XlaParams(block_rows=4), XlaParams(block_rows=5))
        ),
        "pallas": Backend(params=(PallasParams(block_rows=16),) * 2, simulate=interpret_pallas),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3},
    spaces={"many rows": in_use(8192, 4096), "many short rows": in_use(65536, 128)},
    odd={"odd rows": in_use(1333, 1408), "odd short rows": in_use(1328, 192)},
)
