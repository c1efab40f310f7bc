# SPDX-License-Identifier: Apache-2.0
"""What kernels in Mosaic for Hopper GPUs need, whatever they compute: environment, chip, one device's program."""

from __future__ import annotations

import re

from ejkernel import compat
from ejkernel.ops.implementation import OperationCall

SHARED_MEMORY = 232_448  # bytes that a block of threads may have
MULTIPROCESSORS = 132  # of an H100 or H200 in an SXM module; a persistent launch is right on any other number
DTYPES = ("bfloat16", "float16")  # that are multiplied
_HOPPER = re.compile(r"(^|[:_])(h20|h100|h200|h800|gh200)(_|$)")


def unavailable(call: OperationCall, arrays: str, others: str, name: str = "mosaic_gpu") -> str | None:
    """Return why no such kernel runs `call`, and what would; `None` if one may.

    Args:
        call: The call.
        arrays: What would be gathered in a program that XLA partitions.
        others: Implementations that run elsewhere.
        name: The implementation's.
    """
    missing = compat.mosaic_gpu_reason()
    if missing is not None:
        return f"implementation={name!r} is not available: {missing}."
    device = call.device_fingerprint
    if call.platform not in (None, "gpu") or (device and not _HOPPER.search(device)):
        return (
            f"implementation={name!r} needs a Hopper GPU, such as an H100 or H200, and this call is for "
            f"{device or call.platform}; use {others}."
        )
    if call.partitioned:
        return (
            f"implementation={name!r} in a program that XLA partitions would gather {arrays} on every "
            "device; call it inside jax.shard_map, or use 'xla'."
        )
    return None
