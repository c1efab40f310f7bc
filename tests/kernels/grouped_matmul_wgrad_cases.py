# SPDX-License-Identifier: Apache-2.0
"""Grouped products' weights' gradients under test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject
from tests.kernels.grouped_matmul_cases import SIZES, random_arrays

from ejkernel.kernels.grouped_matmul.xla import XlaParams
from ejkernel.modules import GroupedMatmulWgrad


def call_with(sizes, **options):
    """Return sums over 40 rows, of 16 and 24 columns."""

    def call(dtype):
        return (*random_arrays(dtype, (40, 16), (40, 24)), on_device(sizes, jnp.int32)), options

    return call


def in_use(rows, *columns, groups):
    def call(dtype):
        lhs, rhs = (jax.ShapeDtypeStruct((rows, each), dtype) for each in columns)
        return (lhs, rhs, jax.ShapeDtypeStruct((groups,), jnp.int32)), {}

    return call


SUBJECT = Subject(
    operation=GroupedMatmulWgrad(),
    calls={
        **{name: call_with(sizes) for name, sizes in SIZES.items()},
        "some of the groups": call_with(SIZES["rows past the end"], first_group=1, groups=2),
    },
    briefly=("uneven",),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16")),
        "xla": Backend(dtypes=("float32", "bfloat16", "float16"), params=(XlaParams(block_rows=7),) * 2),
        "megablox": Backend(),  # interpreted in a separate test
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3},
    spaces={"16 groups": in_use(4096, 1024, 2048, groups=16)},
    odd={"odd sizes": in_use(1333, 264, 328, groups=5)},
)
