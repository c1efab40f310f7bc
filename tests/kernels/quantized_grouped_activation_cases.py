# SPDX-License-Identifier: Apache-2.0
"""Activations of quantised products, in 8 bits and wide, under test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from tests.kernels import quantized_grouped_matmul_cases as products
from tests.kernels.conformance import Backend, Subject
from tests.kernels.quantized_grouped_matmul_cases import SHORT, SQUARES
from tests.kernels.quantized_matmul_cases import BLOCKS, E4M3, E5M2, ROWS

from ejkernel.kernels.quantized_matmul.grouped.xla import XlaGroupedParams
from ejkernel.modules import QuantizedGroupedActivation


def call_of(lhs, rhs, *sizes, gated=True, factored=False, quantize=E4M3, **options):
    """Return an activation of 24 rows and 40 columns; see `quantized_grouped_matmul_cases`."""
    own = {name: options.pop(name) for name in ("inner", "accumulation", "first_group") if name in options}

    def call(dtype):
        args, given = products.call_of(lhs, rhs, *sizes, **own)(dtype)
        out = {"preferred_element_type": given.pop("preferred_element_type")} if lhs and rhs else {}
        # The same matrices in another order of groups.
        gate = tuple(None if args[i] is None else jnp.flip(args[i], 0) for i in (1, 4)) if gated else None
        more = (gate, jnp.linspace(-1, 2, len(args[0]))) if factored else (gate,) if gated else ()
        result = out if quantize is None else {"quantize": quantize}
        return (*args, *more), given | {"activation": "silu", **result, **options}

    return call


def in_use(*shape, groups, wide=False):
    """Return an activation in 8 bits; or that of rows of 16 bits, with factors."""

    def call(dtype):
        (lhs, rhs, sizes, lhs_scale, rhs_scale), options = products.in_use(*shape, groups=groups)(dtype)
        gate, own = (rhs, rhs_scale), {"activation": "silu"}
        if wide:
            del options["lhs_block"]
            rows = jax.ShapeDtypeStruct(lhs.shape, "bfloat16"), jax.ShapeDtypeStruct(lhs.shape[:1], "float32")
            return (rows[0], rhs, sizes, None, rhs_scale, gate, rows[1]), options | own
        return (lhs, rhs, sizes, lhs_scale, rhs_scale, gate), options | own | {"quantize": E4M3}

    return call


SUBJECT = Subject(
    operation=QuantizedGroupedActivation(),
    calls={
        "rows and columns": call_of((E4M3, ROWS), (E4M3, ROWS)),
        "fast, e5m2, no gate": call_of(
            (E4M3, ROWS), (E5M2, ROWS), accumulation="fast", gated=False, activation="relu2", quantize=E5M2
        ),
        "int8, no activation": call_of(("int8", ROWS), ("int8", ROWS), SHORT, activation=None, quantize="int8"),
        "blocks": call_of((E4M3, BLOCKS), (E4M3, SQUARES), SHORT, inner=300),
        "wide": call_of((E4M3, ROWS), (E4M3, ROWS), SHORT, quantize=None),
        "wide, factors, no gate": call_of((E4M3, BLOCKS), (E4M3, SQUARES), gated=False, factored=True, quantize=None),
        "wide int8, factors": call_of(("int8", ROWS), ("int8", ROWS), factored=True, quantize=None),
        "wide rows, factors": call_of(None, ("int8", ROWS), factored=True, quantize=None),
        "wide rows of one group, no gate": call_of(None, (E4M3, ROWS), (17,), gated=False, quantize=None),
        "wide rows, blocks": call_of(None, (E4M3, SQUARES), SHORT, quantize=None, activation="gelu"),
        "wide matrices": call_of((E4M3, BLOCKS), None, SHORT, factored=True, quantize=None),
        "some of the groups": call_of((E4M3, ROWS), (E4M3, ROWS), first_group=1, activation="gelu"),
    },
    briefly=("rows and columns", "wide rows, factors"),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16",)),
        "xla": Backend(dtypes=("float32", "bfloat16"), params=(XlaGroupedParams(block_rows=7), XlaGroupedParams())),
    },
    # A number halfway between two others may be rounded to either: float8 has few digits.
    tolerance=dict.fromkeys(("float32", "bfloat16", "float16"), 0.15),
    spaces={"16 groups": in_use(4096, 1024, 2048, groups=16)},
    odd={
        "odd sizes": in_use(1333, 1040, 400, groups=5),
        "few odd rows": in_use(13, 1040, 329, groups=1, wide=True),
        "few odd rows of groups": in_use(133, 1040, 328, groups=5, wide=True),
    },
)
