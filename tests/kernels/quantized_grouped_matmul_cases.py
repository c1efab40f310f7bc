# SPDX-License-Identifier: Apache-2.0
"""Grouped products of quantised operands under test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject
from tests.kernels.quantized_matmul_cases import BLOCKS, E4M3, E5M2, ROWS, quantized

from ejkernel.kernels.quantized_matmul.grouped.xla import XlaGroupedParams
from ejkernel.modules import QuantizedGroupedMatmul

SQUARES = {"axis": (1, 2), "block": 128}
UNEVEN, SHORT = (0, 13, 1, 10), (5, 0, 7, 3)


def call_of(lhs, rhs, sizes=UNEVEN, *, inner=256, positive=False, factors=False, **options):
    """Return a product of 24 rows and 40 columns; `lhs` and `rhs` are dtype and blocks of an operand, or `None`."""

    def call(dtype):
        rng = np.random.default_rng(0)
        groups = 2 if "first_group" in options else len(sizes)
        shapes = (24, inner), (groups, 40, inner)
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        arrays = [on_device(abs(a) if positive else a, dtype) for a in arrays]
        # The result of two quantised operands is compared in full.
        out = {"preferred_element_type": "float32"} if lhs and rhs else {}
        given, args, scales = {"transpose_rhs": True, **out, **options}, [], []
        for name, array, own in (("lhs", arrays[0], lhs), ("rhs", arrays[1], rhs)):
            made = None if own is None else quantized(array, dtype=own[0], **own[1])
            parts = [array, None] if made is None else [made.values, made.scale]
            turned = name == "rhs" and not given["transpose_rhs"]
            args.append(parts[0].swapaxes(1, 2) if turned else parts[0])
            scales.append(parts[1].swapaxes(1, 2) if turned and made else parts[1])
            if made is not None:
                block = made.block
                given[f"{name}_block"] = (block[0], block[2], block[1]) if turned else block
        row_scale = [on_device(rng.standard_normal(24), jnp.float32)] if factors else []
        return (*args, on_device(sizes, jnp.int32), *scales, *row_scale), given

    return call


def in_use(m, k, n, *, groups):
    def call(dtype):
        shapes = (m, k), (groups, n, k)
        values = [jax.ShapeDtypeStruct(shape, E4M3) for shape in shapes]
        scales = [jax.ShapeDtypeStruct((*shape[:-1], 1), jnp.float32) for shape in shapes]
        blocks = {"lhs_block": (1, None), "rhs_block": (1, 1, None)}
        return (*values, jax.ShapeDtypeStruct((groups,), jnp.int32), *scales), {"transpose_rhs": True, **blocks}

    return call


SUBJECT = Subject(
    operation=QuantizedGroupedMatmul(),
    calls={
        "rows and columns": call_of((E4M3, ROWS), (E4M3, ROWS)),
        "positive, fast": call_of((E4M3, ROWS), (E5M2, ROWS), positive=True, accumulation="fast"),
        "one scale each": call_of((E5M2, {"axis": None}), (E4M3, {"axis": (1, 2)}), SHORT),
        "int8, factors of rows": call_of(("int8", ROWS), ("int8", ROWS), SHORT, factors=True),
        "blocks": call_of((E4M3, BLOCKS), (E4M3, SQUARES)),
        "blocks that end early, factors of rows": call_of(
            (E4M3, BLOCKS), (E5M2, SQUARES), SHORT, inner=300, factors=True
        ),
        "some of the groups": call_of((E4M3, ROWS), (E4M3, ROWS), first_group=1),
        "wide rows": call_of(None, ("int8", ROWS)),
        "wide rows, blocks, factors of rows": call_of(None, (E4M3, SQUARES), SHORT, factors=True, transpose_rhs=False),
        "wide matrices, factors of rows": call_of((E4M3, BLOCKS), None, SHORT, factors=True),
    },
    briefly=("rows and columns", "wide rows"),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16",)),
        "xla": Backend(
            dtypes=("float32", "bfloat16", "float16"), params=(XlaGroupedParams(block_rows=7), XlaGroupedParams())
        ),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3},
    spaces={"16 groups": in_use(4096, 1024, 2048, groups=16)},
    odd={"odd sizes": in_use(1333, 1040, 328, groups=5)},
)
