# SPDX-License-Identifier: Apache-2.0
"""Arrays, shared memory and units of work of `alone`, the kernels of short sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels._numbers import LOG2_E

LARGEST_OF_BASE_2 = 2e38  # times `LOG2_E`, a larger number is infinite


def in_base_2(x: jax.Array) -> jax.Array:
    """Return natural logarithms as those to the base 2; numbers near the largest of float32 stay as they are."""
    return jnp.where(jnp.abs(x) < LARGEST_OF_BASE_2, x * LOG2_E, x)


class AloneInputs(NamedTuple):
    """Arrays in global memory.

    Attributes:
        query, key, value: As in `Operands`, with columns padded for copies.
        dout: The output's cotangent; only for gradients.
        key_lengths: `[batch]` in int32; `None` without them.
        sinks: `[batch or 1, bundles, 64]` in float32, one for each row; `None` without them.
        hidden: `[batch or 1, bundles or 1, rows or 1, columns]` in float32: minus infinity for keys that a mask hides,
            0 for others; `None` without a mask.
        bias: `[batch or 1, bundles or 1, rows, columns]` in float32, for logarithms to the base 2; `None` without one.
        factor: `[batch]` in float32, on the gradients; `None` is 1.
    """

    query: Any
    key: Any
    value: Any
    dout: Any = None
    key_lengths: Any = None
    sinks: Any = None
    hidden: Any = None
    bias: Any = None
    factor: Any = None


class Memory(NamedTuple):
    """Shared memory and barriers; types before `run_scoped`, references inside it."""

    query: Any
    key: Any
    value: Any
    out: Any
    dout: Any
    weights: Any
    dscores: Any
    staged_query: Any  # in float32
    staged_key: Any
    staged_value: Any
    staged_dout: Any
    largest: Any  # of each row of these
    pipeline: Pipeline
    shared: Any  # what the consumers of a team share is written
    done: Any  # and no product needs it any more


class Item(NamedTuple):
    """A bundle of an example's heads, and the stage of its operands."""

    example: Any
    bundle: Any
    stage: Any


class Part(NamedTuple):
    """The work of a consumer: an item, the number of its team, and its own number in the team, and in the block."""

    item: Item
    team: Any
    slab: Any
    warpgroup: Any


class Weights(NamedTuple):
    """Weights before their division by the sums of rows.

    Attributes:
        weights: The numerators.
        share: One over the sum, for each row; 0 for a row that sees no key.
        lse: The log-sum-exp of each row.
        slope: The derivative of the soft cap; `None` without one.
    """

    weights: jax.Array
    share: jax.Array
    lse: jax.Array
    slope: jax.Array | None
