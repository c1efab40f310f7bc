# SPDX-License-Identifier: Apache-2.0
"""Grouped products with an activation or a gate under test."""

from __future__ import annotations

from tests.kernels.conformance import Backend, Subject, assert_close
from tests.kernels.grouped_matmul_cases import ODD, SIZES, beyond_float16, call_with, in_use

from ejkernel.kernels.grouped_matmul.xla import XlaParams
from ejkernel.modules import GroupedMatmul, GroupedMatmulActivation


def check_residuals(args, options, residuals, dtype):
    """Compare the residuals with the products themselves."""
    lhs, rhs, sizes, gate, _ = args
    kept = {name: options[name] for name in ("transpose_rhs", "preferred_element_type") if name in options}
    matrices = [x for x in (rhs, gate) if x is not None]
    for own, found in zip(matrices, residuals, strict=True):
        assert_close(SUBJECT, GroupedMatmul().reference(lhs, own, sizes, **kept), found, dtype)


SUBJECT = Subject(
    operation=GroupedMatmulActivation(),
    calls={
        **{name: call_with(sizes, "gate", activation="silu") for name, sizes in SIZES.items()},
        "without a gate": call_with(SIZES["uneven"], activation="relu2"),
        "a gate alone": call_with(SIZES["uneven"], "gate"),
        "transposed": call_with(SIZES["uneven"], "gate", activation="gelu", transpose_rhs=True),
        "factors of rows": call_with(SIZES["rows past the end"], "gate", "row_scale", activation="relu"),
        "some of the groups": call_with(SIZES["uneven"], "gate", "row_scale", activation="silu", first_group=1),
        "large products": beyond_float16(activation="silu"),
    },
    briefly=("uneven", "factors of rows"),
    in_float16=("large products",),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16")),
        "xla": Backend(dtypes=("float32", "bfloat16", "float16"), params=(XlaParams(block_rows=7),) * 2),
        "megablox": Backend(),  # interpreted in a separate test
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3},
    spaces={
        "16 groups, gated": in_use("gate", activation="silu"),
        "16 groups, with factors of rows": in_use("row_scale", activation="relu2", transpose_rhs=True),
    },
    odd={"odd sizes": in_use("gate", "row_scale", activation="gelu", **ODD)},
)
