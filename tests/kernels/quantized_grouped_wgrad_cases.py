# SPDX-License-Identifier: Apache-2.0
"""Weights' gradients of quantised columns in groups under test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject
from tests.kernels.quantized_matmul_cases import E4M3, E5M2

from ejkernel.kernels.quantized_matmul.grouped.xla import XlaGroupedParams
from ejkernel.kernels.quantized_matmul.quantizing.groups import block_count
from ejkernel.kernels.quantized_matmul.quantizing.xla import quantized_blocks
from ejkernel.modules import QuantizedGroupedWgrad

compiled_blocks = jax.jit(quantized_blocks, static_argnames=("dtype", "transposed", "square"))


def call_of(lhs=E4M3, rhs=E4M3, sizes=(0, 13, 1, 150), *, rows=170, **options):
    """Return sums of 32 rows and 48 columns; `lhs` and `rhs` are the dtypes of the operands."""

    def call(dtype):
        rng, own = np.random.default_rng(0), on_device(sizes, jnp.int32)
        arrays = [on_device(rng.standard_normal((rows, size)), dtype) for size in (32, 48)]
        squares = False, options.get("square", False)
        made = [
            compiled_blocks(x, own, dtype=name, transposed=True, square=square)[2:]
            for x, name, square in zip(arrays, (lhs, rhs), squares, strict=True)
        ]
        (left, left_scale), (right, right_scale) = made
        return (left, right, own, left_scale, right_scale), {"preferred_element_type": "float32", **options}

    return call


def in_use(rows, *columns, groups):
    def call(dtype):
        blocks = block_count(rows, groups)
        arrays = [jax.ShapeDtypeStruct((size, 128 * blocks), E4M3) for size in columns]
        scales = [jax.ShapeDtypeStruct((size, blocks), jnp.float32) for size in columns]
        return (*arrays, jax.ShapeDtypeStruct((groups,), jnp.int32), *scales), {}

    return call


SUBJECT = Subject(
    operation=QuantizedGroupedWgrad(),
    calls={
        "uneven": call_of(),
        "rows of no group, e5m2": call_of(rhs=E5M2, sizes=(5, 0, 100)),
        "sizes past the last row, int8": call_of("int8", "int8", (100, 300, 7)),
        "squares": call_of(rhs=E5M2, square=True),
        "some of the groups": call_of(first_group=1, groups=2),
    },
    briefly=("uneven",),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16",)),
        "xla": Backend(dtypes=("float32", "bfloat16"), params=(XlaGroupedParams(block_rows=100), XlaGroupedParams())),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3},
    spaces={"16 groups": in_use(4096, 1024, 2048, groups=16)},
    odd={"odd sizes": in_use(1333, 264, 328, groups=5)},
)
