# SPDX-License-Identifier: Apache-2.0
"""Sizes of chunks in plain JAX: the heuristic, the search space, and the memory that they take."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ejkernel.ops.errors import KernelWarning
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.values.signature import is_known

from .common import LinearCrossEntropyCall

_SHARE = 4  # temporary arrays may take a quarter of a device's memory by default
_UNKNOWN_DEVICE = 16 << 30


def estimated_bytes(call: LinearCrossEntropyCall, form: str, chunk: int | None) -> int:
    """Return an estimate of the bytes of temporary arrays, besides arguments and results."""
    size = jnp.dtype(call.dtype).itemsize
    has_gradients = call.backward or bool(call.gradients)
    if form == "rows":
        rows, columns = call.tokens if chunk is None else min(chunk, call.tokens), call.columns
        total = 4 * call.inner * columns * (has_gradients and rows < call.tokens)
    else:
        rows, columns = call.tokens, call.columns if chunk is None else min(chunk, call.columns)
        total = 4 * rows * call.inner * has_gradients + size * call.inner * columns
    return call.examples * (total + rows * columns * (4 + size * has_gradients))


def memory_limit(call: LinearCrossEntropyCall) -> int:
    """Return the number of bytes that temporary arrays of the call may take."""
    return call.memory_limit or _device_memory(call.platform) // _SHARE


@functools.cache
def _device_memory(platform: str | None) -> int:
    """Return the memory of this process's device, if it is of that platform and reports it."""
    if platform in (None, "cpu"):
        return _UNKNOWN_DEVICE
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int((stats or {}).get("bytes_limit", _UNKNOWN_DEVICE))


def heuristic_chunks(call: LinearCrossEntropyCall) -> tuple[str, int | None]:
    """Return the form and the size of chunks, without measuring."""
    if not is_known(call.tokens, call.inner, call.columns):
        return "rows", None
    for form, chunk in (_best(call), *_choices(call)):
        if estimated_bytes(call, form, chunk) <= memory_limit(call):
            return form, chunk
    smallest = min(_choices(call), key=lambda choice: estimated_bytes(call, *choice))
    warn_of_limit(call, estimated_bytes(call, *smallest))
    return smallest


def warn_of_limit(call: LinearCrossEntropyCall, least: int) -> None:
    """Warn that every configuration exceeds the limit that the caller gave.

    Args:
        call: The call.
        least: The bytes that the smallest configuration needs by estimate.
    """
    if call.memory_limit is not None:
        warn(
            f"memory_limit={call.memory_limit} is less than every configuration needs, so the smallest runs: its "
            f"temporary arrays take about {least} bytes. memory_limit is in bytes; pass at least {least}.",
            KernelWarning,
        )


def _best(call: LinearCrossEntropyCall) -> tuple[str, int | None]:
    """Return the form and size of chunks to prefer where there is memory enough."""
    if call.platform != "cpu":
        # The logits of up to `2 * inner` rows take no more memory than the sum of the weight's gradient.
        return _rows(call, max(1024, 2 * call.inner))
    # Measured on a CPU: narrow chunks stay in its caches, which pays for a fourth product of 16-bit operands.
    if jnp.dtype(call.dtype).itemsize < 4:
        return "vocabulary", 2048 if call.columns > 2048 else None
    return _rows(call, max(128, min(call.inner, call.tokens // 4)))


def _rows(call: LinearCrossEntropyCall, chunk: int) -> tuple[str, int | None]:
    return "rows", chunk if chunk < call.tokens else None


def space_of_chunks(call: LinearCrossEntropyCall) -> list[tuple[str, int | None]]:
    """Return the forms and sizes of chunks with temporary arrays that fit within the memory limit."""
    if not is_known(call.tokens, call.inner, call.columns):
        return [heuristic_chunks(call)]
    return [choice for choice in _choices(call) if estimated_bytes(call, *choice) <= memory_limit(call)]


def _choices(call: LinearCrossEntropyCall) -> list[tuple[str, int | None]]:
    rows = [chunk for chunk in (16384, 8192, 4096, 2048, 1024, 512, 256, 128) if chunk < call.tokens]
    columns = [chunk for chunk in (32768, 16384, 8192, 4096, 2048, 1024, 512, 256) if chunk < call.columns]
    return [("rows", None), *(("rows", n) for n in rows), *(("vocabulary", n) for n in columns)]
