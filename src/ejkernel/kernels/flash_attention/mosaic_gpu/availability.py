# SPDX-License-Identifier: Apache-2.0
"""What the kernels of both directions need: the environment, the chip, and dtypes that its tensor cores multiply."""

from __future__ import annotations

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels.flash_attention.common import AttentionCall, scale_reason
from ejkernel.ops.utils.values.signature import is_known

SHARED_MEMORY = hopper.SHARED_MEMORY
DTYPES = hopper.DTYPES


def unavailable(call: AttentionCall) -> str | None:
    """Return why no kernel of either direction runs `call`, and what would; `None` if one may."""
    if not is_known(*call.query, *call.key, *call.value):
        return "it needs shapes that are numbers, and this program is exported for many; use 'xla'."
    missing = hopper.unavailable(call, "query, key and value", "'cudnn' or 'xla'")
    if missing is not None:
        return missing
    if call.dtype not in DTYPES:
        return f"query has dtype {call.dtype}, and 'mosaic_gpu' takes bfloat16 and float16; cast it, or use 'xla'."
    return scale_reason(call, "'mosaic_gpu'")
