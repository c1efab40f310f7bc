# SPDX-License-Identifier: Apache-2.0
"""Distinguishes a kernel that refuses a call from one that crashes."""

from __future__ import annotations

import jax

from ejkernel.ops.errors import EjkernelError, KernelError
from ejkernel.testing.report import error_line

HOW_TO_REFUSE = "To refuse such calls, raise UnsupportedError with the reason"


def refusal(error: Exception) -> str:
    """Return the reason of a declared refusal; empty if the kernel crashed.

    Declared are ejkernel's errors, such as `UnsupportedError`, `ArgumentError` and an empty space; and
    `NotImplementedError`, also of the compiler. Any other error may be a mistake in the kernel.
    """
    if isinstance(error, KernelError):  # a hook of the kernel broke its contract
        return ""
    declared = isinstance(error, EjkernelError | NotImplementedError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("UNIMPLEMENTED")
    )
    return f"not supported: {error_line(error)}" if declared else ""
