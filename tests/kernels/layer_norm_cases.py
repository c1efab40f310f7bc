# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation under test."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.experimental import pallas as pl
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject

from ejkernel.kernels._row_norms.pallas import PallasParams
from ejkernel.modules import LayerNorm


def rows_of(*shape, vectors=None, residual=False, **options):
    """Return a call with random rows; weight and bias have a separate dtype."""

    def call(dtype):
        rng = np.random.default_rng(0)
        x, weight, bias = (rng.standard_normal(size) for size in (shape, shape[-1:], shape[-1:]))
        added = (on_device(rng.standard_normal(shape), dtype),) if residual else ()
        weight, bias = (on_device(1 + v, vectors or dtype) for v in (weight, bias))
        return (on_device(3 + x, dtype), weight, bias, *added), options

    return call


def in_use(*shape):
    return lambda dtype: (tuple(jax.ShapeDtypeStruct(own, dtype) for own in (shape, shape[1:], shape[1:])), {})


def interpret_pallas(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


SUBJECT = Subject(
    operation=LayerNorm(),
    calls={
        "rows": rows_of(20, 24),
        "one row": rows_of(24),
        "several axes": rows_of(2, 3, 6, 16, eps=0.1),
        "wide vectors": rows_of(4, 16, vectors="float32"),
        "residual": rows_of(20, 24, residual=True),
        "long rows": rows_of(6, 1536, residual=True),
        "short rows": rows_of(2, 8, 192, residual=True),
    },
    briefly=("rows", "residual"),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16", "float32")),
        "xla": Backend(dtypes=("float32", "bfloat16", "float16")),
        "pallas": Backend(params=(PallasParams(block_rows=16),) * 2, simulate=interpret_pallas),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3},
    spaces={"many rows": in_use(8192, 4096)},
    odd={"odd rows": in_use(1333, 1408)},
)
