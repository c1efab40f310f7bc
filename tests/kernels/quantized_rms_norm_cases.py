# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation with a result in 8 bits under test."""

from __future__ import annotations

from tests.kernels.conformance import Backend, Subject
from tests.kernels.rms_norm_cases import in_use, rows_of

from ejkernel.modules import QuantizedRmsNorm

SUBJECT = Subject(
    operation=QuantizedRmsNorm(),
    calls={
        "rows": rows_of(8, 512),
        "odd sizes": rows_of(7, 13),
        "residual, e5m2": rows_of(2, 3, 1536, residual=True, quantize="float8_e5m2"),
        "int8": rows_of(4, 200, quantize="int8"),
        "wide weight": rows_of(4, 1024, weight_dtype="float32", weight_offset=1.0),
    },
    briefly=("rows",),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16", "float32")),
        "xla": Backend(dtypes=("float32", "bfloat16")),
    },
    # A number halfway between two others may be rounded to either: float8 has few digits.
    tolerance=dict.fromkeys(("float32", "bfloat16", "float16"), 0.15),
    spaces={"many rows": in_use(8192, 4096)},
    odd={"odd rows": in_use(1333, 1536)},
)
