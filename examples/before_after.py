# SPDX-License-Identifier: Apache-2.0
"""Compare a training step before and after a change: results and memory. Several examples use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def compare(steps: Sequence[tuple[Any, tuple[Any, ...]]], names: tuple[str, str], subject: str) -> None:
    """Print the loss, the largest relative difference of the results, and the memory of temporary arrays.

    Args:
        steps: The jitted step before and after, each with its arguments; it returns the loss and the gradients.
        names: Names of both forms, for the memory.
        subject: Subject of the message for results that differ by 1e-4 or more, which end the program.
    """
    results, temporary = [], []
    for step, args in steps:
        compiled = step.lower(*args).compile()
        results.append(compiled(*args))
        temporary.append(compiled.memory_analysis().temp_size_in_bytes / 2**20)
    pairs = zip(*map(jax.tree.leaves, results), strict=True)
    worst = max(float(jnp.abs(before - after).max() / jnp.abs(before).max()) for before, after in pairs)
    print(f"loss {float(results[1][0]):.5f}; largest relative difference of loss and gradients {worst:.1e}")
    print(f"temporary arrays: {temporary[0]:.0f} MiB {names[0]}, {temporary[1]:.0f} MiB {names[1]}")
    if not worst < 1e-4:
        raise SystemExit(f"{subject} differ")
