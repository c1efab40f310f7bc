# SPDX-License-Identifier: Apache-2.0
"""Statistics of the logits under test, and the calls that the gradients' cases share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject

from ejkernel.kernels.linear_cross_entropy.xla import XlaParams
from ejkernel.modules import LinearCrossEntropy

COLUMNS = XlaParams(form="vocabulary", chunk=10)


def arrays_of(batch, inner, columns, dtype, *, transposed=False, padded=0):
    """Return hidden states, weight, labels, and a bias that removes the last columns."""
    rng = np.random.default_rng(0)
    x = on_device(rng.standard_normal((*batch, inner)), dtype)
    shape = (columns, inner) if transposed else (inner, columns)
    labels = rng.integers(0, columns - padded, batch)
    labels.flat[1::7] = -100
    bias = rng.standard_normal(columns)
    bias[columns - padded :] = -np.inf
    return x, on_device(rng.standard_normal(shape), dtype), on_device(labels, jnp.int32), on_device(bias, dtype)


def call_of(*sizes, bias=False, padded=0, transpose_weight=False, **options):
    """Return a call with random arrays."""

    def call(dtype):
        *arrays, added = arrays_of(*sizes, dtype, transposed=transpose_weight, padded=padded)
        given = {"transpose_weight": transpose_weight, **options}
        return (*arrays, *([added] if bias else [])), given

    return call


def in_use(tokens, inner, columns, *more, **options):
    """Return the shapes of a call."""

    def call(dtype):
        matrix = (columns, inner) if options.get("transpose_weight") else (inner, columns)
        shapes = [((tokens, inner), dtype), (matrix, dtype), ((tokens,), "int32"), *more]
        return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), options

    return call


SUBJECT = Subject(
    operation=LinearCrossEntropy(),
    calls={
        "plain": call_of((12,), 8, 37),
        "all options": call_of(
            (13,),
            8,
            37,
            bias=True,
            padded=3,
            transpose_weight=True,
            statistics=("sum", "expected", "max"),
            logits_soft_cap=3.0,
            logits_scale=0.7,
        ),
    },
    briefly=("plain",),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16",)),
        "xla": Backend(dtypes=("float32", "bfloat16", "float16"), params=(XlaParams(chunk=5), COLUMNS)),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3},
    spaces={"one head": in_use(8192, 4096, 128256)},
    odd={
        "odd sizes": in_use(1333, 264, 8200, transpose_weight=True, logits_soft_cap=30.0),
        "odd vocabulary": in_use(333, 384, 8201, transpose_weight=True),
        "pieces": in_use(1333, 264, 8200),
    },
)
