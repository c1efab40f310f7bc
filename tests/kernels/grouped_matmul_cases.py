# SPDX-License-Identifier: Apache-2.0
"""Grouped products under test."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject

from ejkernel import compat
from ejkernel.kernels.grouped_matmul.megablox import MegabloxParams
from ejkernel.kernels.grouped_matmul.xla import XlaParams
from ejkernel.modules import GroupedMatmul

# Sizes that add up to 40 rows, or to less: uneven with empty ones and a single row, all in one, none.
SIZES = {
    "uneven": (0, 23, 1, 16),
    "all in one": (0, 0, 40, 0),
    "none": (0, 0, 0, 0),
    "rows past the end": (9, 0, 14, 3),
}


def random_arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [on_device(rng.standard_normal(shape), dtype) for shape in shapes]


def call_with(sizes, *others, **options):
    """Return a product of 40 rows, of 16 and 24 columns, with `others` that it takes: a "gate", a "row_scale"."""

    def call(dtype):
        groups = 2 if "first_group" in options else 4
        matrices = (groups, 24, 16) if options.get("transpose_rhs") else (groups, 16, 24)
        lhs, rhs, gate, row_scale = random_arrays(dtype, (40, 16), matrices, matrices, (40,))
        given = {"gate": gate, "row_scale": row_scale.astype(jnp.float32)}
        return (lhs, rhs, on_device(sizes, jnp.int32)), options | {name: given[name] for name in others}

    return call


def beyond_float16(*others, **options):
    """Return a call with products, and a gradient by `lhs`, that overflow in float16 without their factors."""

    def call(dtype):
        (lhs, rhs, sizes), given = call_with(SIZES["rows past the end"], *others, "row_scale", **options)(dtype)
        return (lhs, 2**14 * rhs, sizes), given | {"row_scale": given["row_scale"] * 2**-14}

    return call


def in_use(*others, rows=4096, groups=16, matrix=(1024, 1024), **options):
    def call(dtype):
        inner = matrix[1] if options.get("transpose_rhs") else matrix[0]
        shapes = (rows, inner), (groups, *matrix), (rows,)
        lhs, rhs, row_scale = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        given = {"gate": rhs, "row_scale": row_scale}
        sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
        return (lhs, rhs, sizes), options | {name: given[name] for name in others}

    return call


ODD = {"rows": 1333, "groups": 5, "matrix": (264, 328)}


def interpret_megablox(monkeypatch):
    for name in ("megablox_product", "megablox_weights_gradient"):
        monkeypatch.setattr(compat.kernels, name, functools.partial(getattr(compat.kernels, name), interpret=True))


SUBJECT = Subject(
    operation=GroupedMatmul(),
    calls={
        **{name: call_with(sizes) for name, sizes in SIZES.items()},
        "transposed": call_with(SIZES["uneven"], transpose_rhs=True),
        "factors of rows": call_with(SIZES["rows past the end"], "row_scale"),
        "factors of rows, transposed": call_with(SIZES["uneven"], "row_scale", transpose_rhs=True),
        "some of the groups": call_with(SIZES["rows past the end"], first_group=1),
        "large products": beyond_float16(),
    },
    briefly=("uneven", "factors of rows"),
    in_float16=("large products",),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16")),
        "jax_mgpu": Backend(dtypes=("bfloat16",)),
        "xla": Backend(dtypes=("float32", "bfloat16", "float16"), params=(XlaParams(block_rows=7),) * 2),
        "megablox": Backend(
            dtypes=("float32",), params=(MegabloxParams(block_m=16), None), simulate=interpret_megablox
        ),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3},
    spaces={"16 groups": in_use(), "16 groups, transposed": in_use(transpose_rhs=True)},
    odd={"odd sizes": in_use("row_scale", **ODD)},
)
