# SPDX-License-Identifier: Apache-2.0
"""Products of quantised operands under test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject

from ejkernel.kernels.quantized_matmul.xla import XlaParams
from ejkernel.modules import QuantizedMatmul, quantize

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ROWS, BLOCKS = {"axis": -1}, {"axis": -1, "block": 128}
SQUARES = {"axis": (0, 1), "block": 128}
# Compiled in one piece: call by call, making the operands takes longer than the check.
quantized = jax.jit(quantize, static_argnames=("dtype", "block", "axis"))


def call_of(x, w, shape=(24, 256, 40), *, positive=False, lead=(), **options):
    """Return a product of `[m, k]` and `[n, k]`; `x` and `w` are dtype and blocks of an operand, or `None`."""

    def call(dtype):
        m, k, n = shape
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(size).astype(np.float32) for size in ((*lead, m, k), (n, k))]
        arrays = [on_device(abs(a) if positive else a, dtype) for a in arrays]
        # The result of two quantised operands is compared in full.
        out = {"preferred_element_type": "float32"} if x and w else {}
        given = {"transpose_w": True, **out, **options}
        args, scales = [], []
        for name, array, own in (("x", arrays[0], x), ("w", arrays[1], w)):
            made = None if own is None else quantized(array, dtype=own[0], **own[1])
            scales.append(None if made is None else made.scale)
            values = array if made is None else made.values
            if name == "w" and not given["transpose_w"]:
                values, scales[-1] = values.T, None if made is None else made.scale.T
            args.append(values)
            if made is not None:
                turned = made.block if given["transpose_w"] or name == "x" else made.block[::-1]
                given[f"{name}_block"] = turned
        return (*args, *scales), given

    return call


def in_use(m, k, n, *, blocks=1, wide=False):
    """Return a product; each row and each column has `blocks` scales, or the rows have 16 bits."""

    def call(dtype):
        arrays = [jax.ShapeDtypeStruct((size, k), E4M3) for size in (m, n)]
        scales = [jax.ShapeDtypeStruct((size, blocks), jnp.float32) for size in (m, n)]
        block = (1, None if blocks == 1 else 128)
        options = {"transpose_w": True, "x_block": block, "w_block": block}
        if wide:
            del options["x_block"]
            arrays[0], scales[0] = jax.ShapeDtypeStruct((m, k), "bfloat16"), None
            options["preferred_element_type"] = "float32"
        return (*arrays, *scales), options

    return call


SUBJECT = Subject(
    operation=QuantizedMatmul(),
    calls={
        "rows and columns": call_of((E4M3, ROWS), (E4M3, ROWS)),
        "positive": call_of((E4M3, ROWS), (E4M3, ROWS), (8, 2048, 16), positive=True),
        "fast": call_of((E4M3, ROWS), (E5M2, ROWS), accumulation="fast"),
        "one scale each": call_of((E5M2, {"axis": None}), (E4M3, {"axis": None})),
        "int8": call_of(("int8", ROWS), ("int8", ROWS), positive=True),
        "float8 by int8": call_of((E4M3, ROWS), ("int8", ROWS)),
        "blocks": call_of((E4M3, BLOCKS), (E4M3, SQUARES), (24, 256, 136)),
        "blocks that end early": call_of((E4M3, BLOCKS), ("int8", SQUARES), (5, 300, 130), positive=True),
        "few tiles": call_of((E4M3, ROWS), (E5M2, ROWS), (130, 8192, 40), positive=True),
        "few tiles, blocks": call_of((E4M3, BLOCKS), (E4M3, SQUARES), (70, 8192, 136)),
        "few long rows": call_of(("int8", ROWS), ("int8", ROWS), (9, 8192, 40)),
        "wide rows": call_of(None, ("int8", ROWS)),
        "wide rows, blocks": call_of(None, (E4M3, SQUARES), (24, 300, 136), lead=(2,)),
        "wide columns": call_of((E4M3, BLOCKS), None, lead=(3,)),
        "not transposed": call_of(None, (E4M3, SQUARES), transpose_w=False),
    },
    briefly=("rows and columns", "wide rows"),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16",)),
        "xla": Backend(dtypes=("float32", "bfloat16", "float16"), params=(XlaParams(), None)),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3},
    spaces={"many rows": in_use(4096, 1024, 2048)},
    odd={
        "odd sizes": in_use(1333, 1040, 328),
        "few odd rows": in_use(13, 1040, 329),
        "few odd rows of 16 bits, float32": in_use(13, 1040, 328, wide=True),
        "odd sizes, blocks": in_use(37, 1040, 328, blocks=9),
        "few odd tiles": in_use(205, 4240, 328),
        "few odd tiles, blocks": in_use(77, 4240, 328, blocks=34),
        "a few odd last rows": in_use(25601, 4240, 328),
        "few odd rows, long": in_use(1, 8208, 329),
    },
)
