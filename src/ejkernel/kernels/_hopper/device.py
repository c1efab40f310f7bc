# SPDX-License-Identifier: Apache-2.0
"""Limits of a Hopper GPU, the calls that no Hopper kernel runs, and int32 arithmetic for kernels."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from ejkernel import compat
from ejkernel.ops.implementation import OperationCall

SHARED_MEMORY = 232_448  # bytes, the most that one block of threads can allocate
MULTIPROCESSORS = 132  # of an H100 or H200 SXM; a persistent launch is correct with any other number, only slower
DTYPES = ("bfloat16", "float16")  # operands of our matrix products
_HOPPER = re.compile(r"(^|[:_])(h20|h100|h200|h800|gh200)(_|$)")


class Registers(NamedTuple):
    """Registers of each thread, after `setmaxnreg` has moved some from the producer to the consumer warpgroups.

    Both numbers are multiples of 8. A multiprocessor has 65,536 registers, and a warpgroup has 128 threads. E.g. 40 for
    one producer and 232 for each of two consumers fit: `128 * (40 + 2 * 232)` is 64,512.
    """

    producer: int
    consumer: int


def widest_swizzle(*row_bytes: int) -> int:
    """Return the widest swizzle, in bytes, that divides rows of all these sizes; 0 if none does."""
    return next((width for width in (128, 64, 32) if not any(size % width for size in row_bytes)), 0)


def may_be_on_hopper(call: OperationCall) -> bool:
    """Return whether a call is for a Hopper GPU, or for an unknown device."""
    device = call.device_fingerprint
    return call.platform in (None, "gpu") and (not device or _HOPPER.search(device) is not None)


def unavailable(call: OperationCall, arrays: str, others: str, name: str = "mosaic_gpu") -> str | None:
    """Return why no Hopper kernel runs `call`, and an alternative; `None` if one may run it.

    Args:
        call: The call.
        arrays: The arguments that a program partitioned by XLA would gather.
        others: The implementations to suggest.
        name: The implementation to name in the message.
    """
    if not may_be_on_hopper(call):
        return (
            f"implementation={name!r} needs a Hopper GPU, such as an H100 or H200, and this call is for "
            f"{call.place}; use {others}."
        )
    missing = compat.kernels.mosaic_gpu_reason()  # after the device: a package would not help on another device
    if missing is not None:
        return f"implementation={name!r} is not available: {missing}."
    if call.partitioned:
        return (
            f"implementation={name!r} in a program that XLA partitions would gather {arrays} on every "
            "device; call it inside jax.shard_map, or use 'xla'."
        )
    return None


def quotient(number: Any, divisor: int) -> Any:
    """Return the quotient of a non-negative int32 number."""
    return lax.div(number, np.int32(divisor))


def wrapped(number: Any, size: int) -> Any:
    """Return the remainder of a non-negative int32 number, by a single instruction if `size` is a power of two."""
    return remainder(number, size) if size & (size - 1) else lax.bitwise_and(number, np.int32(size - 1))


def remainder(number: Any, divisor: int) -> Any:
    """Return the remainder of a non-negative int32 number."""
    return lax.rem(number, np.int32(divisor))
