# SPDX-License-Identifier: Apache-2.0
"""What the kernels of both directions need: the environment, the chip, and dtypes that its tensor cores multiply."""

from __future__ import annotations

import re

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import AttentionCall
from ejkernel.ops.utils.values.signature import is_known

SHARED_MEMORY = 232_448  # bytes that a block of threads may have on Hopper
DTYPES = ("bfloat16", "float16")
_HOPPER = re.compile(r"(^|[:_])(h20|h100|h200|h800|gh200)(_|$)")


def unavailable(call: AttentionCall) -> str | None:
    """Return why no kernel of either direction runs `call`, and what would; `None` if one may."""
    if not is_known(*call.query, *call.key, *call.value):
        return "it needs shapes that are numbers, and this program is exported for many; use 'xla'."
    missing = compat.mosaic_gpu_reason()
    if missing is not None:
        return f"implementation='mosaic_gpu' is not available: {missing}."
    device = call.device_fingerprint
    if call.platform not in (None, "gpu") or (device and not _HOPPER.search(device)):
        return (
            "implementation='mosaic_gpu' needs a Hopper GPU, such as an H100 or H200, and this call is for "
            f"{device or call.platform}; use 'cudnn' or 'xla'."
        )
    if call.partitioned:
        return (
            "implementation='mosaic_gpu' in a program that XLA partitions would gather query, key and value on every "
            "device; call it inside jax.shard_map, or use 'xla'."
        )
    if call.dtype not in DTYPES:
        return f"query has dtype {call.dtype}, and 'mosaic_gpu' takes bfloat16 and float16; cast it, or use 'xla'."
    return None
