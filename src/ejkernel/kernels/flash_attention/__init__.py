# SPDX-License-Identifier: Apache-2.0
"""Implementations of attention; a backend is imported when it is first asked for.

All share one contract, so that the forward of one may be followed by the backward of another: the forward's residuals
are its output and the log-sum-exp of every row, `[batch, heads, queries]` in float32.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import jax

from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams

from .common import AttentionCall, Operands, Rules

IMPLEMENTATIONS = ("cudnn", "xla")
"""Names of all implementations, the one to prefer first; `xla` runs everything, everywhere."""


class Implementation(Protocol):
    """What the module of an implementation has."""

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Return why `call` does not run, and what would; `None` if it runs."""

    def forward(self, operands: Operands, rules: Rules, params: FwdParams) -> tuple[jax.Array, jax.Array]:
        """Return output and log-sum-exp."""

    def backward(
        self,
        operands: Operands,
        residuals: tuple[jax.Array, jax.Array],
        dout: jax.Array,
        rules: Rules,
        params: BwdParams,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return the gradients of query, key, value and bias."""


def load(name: str) -> Implementation:
    """Return the implementation of that name.

    Raises:
        ArgumentError: there is none; a call that was read from a file may ask for any.
    """
    if name not in IMPLEMENTATIONS:
        raise ArgumentError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}; got {name!r}.")
    return cast(Implementation, importlib.import_module(f"{__name__}.{name}"))
