# SPDX-License-Identifier: Apache-2.0
"""Requirements of the kernels of both directions: environment, chip and dtypes."""

from __future__ import annotations

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels.flash_attention.common import AttentionCall, scale_reason
from ejkernel.ops.utils.values.signature import is_known


def unavailable(call: AttentionCall) -> str | None:
    """Return why no kernel of either direction runs `call`, and an alternative; `None` if one may."""
    if not is_known(*call.query, *call.key, *call.value):
        return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
    missing = hopper.unavailable(call, "query, key and value", "'cudnn' or 'xla'")
    if missing is not None:
        return missing
    if call.dtype not in hopper.DTYPES:
        return f"query has dtype {call.dtype}; 'mosaic_gpu' supports bfloat16 and float16; cast it, or use 'xla'."
    return scale_reason(call, "'mosaic_gpu'")
