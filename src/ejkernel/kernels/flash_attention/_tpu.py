# SPDX-License-Identifier: Apache-2.0
"""Calls and parameters that no attention kernel for TPUs takes, ours or JAX's."""

from __future__ import annotations

from typing import Any

from ejkernel.kernels._vector_memory import LANES
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.values.signature import is_known

from .common import AttentionCall

_DTYPES = ("bfloat16", "float32")


def unsupported_reason(call: AttentionCall, name: str) -> str | None:
    """Return why the kernels of implementation `name` do not take `call`, and an alternative; `None` if they may."""
    if call.platform not in (None, "tpu"):
        return f"implementation={name!r} needs a TPU, and this call is for {call.place}; use 'xla'."
    sizes = (*call.query, *call.key, *call.value)
    if not is_known(*sizes) or 0 in sizes:
        return f"{name!r} needs lengths and heads that are known and not 0; use 'xla'."
    if call.dtype not in _DTYPES:
        return f"query has dtype {call.dtype}, and {name} takes bfloat16 and float32; cast it, or use 'xla'."
    for argument, given in (("bias", call.bias), ("attention_mask", call.attention_mask)):
        if given is not None:
            return f"{argument} is not available with implementation={name!r}; use 'xla'."
    if call.partitioned:
        return f"{name!r} in a program that XLA partitions would gather query, key and value; use 'xla'."
    return None


def check_blocks(params: Any, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Check that blocks are multiples of 128; those in `optional` may be `None`.

    Raises:
        ConfigError: A block is not.
    """
    for name in (*names, *optional):
        value = getattr(params, name)
        if value is None and name in optional:
            continue
        if type(value) is not int or value < LANES or value % LANES:
            raise ConfigError(f"{name} must be a multiple of {LANES}, got {value!r}; try 512.")
