# SPDX-License-Identifier: Apache-2.0
"""Implementations of RMS normalisation; the residual of every forward is `1 / rms` of each row, in float32."""

from __future__ import annotations

IMPLEMENTATIONS = ("xla",)
"""Names of all implementations, the one to prefer first; `xla` runs everything, everywhere."""
