# SPDX-License-Identifier: Apache-2.0
"""The layer as a function of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from layer import Products, Size, Weights, experts, initial


def model(size: Size, products: Products, key: jax.Array) -> tuple[Callable[[Any, jax.Array], jax.Array], Weights]:
    """Return a function from weights and tokens to tokens, and the first weights."""
    return lambda weights, x: x + experts(x, weights, size.chosen, products), initial(size, key)
