# SPDX-License-Identifier: Apache-2.0
"""The layer in Equinox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from layer import Products, Size, Weights, experts, initial


class Experts(eqx.Module):
    """Experts beside a residual."""

    weights: Weights
    chosen: int = eqx.field(static=True)
    products: Products = eqx.field(static=True)

    def __init__(self, size: Size, products: Products, key: jax.Array) -> None:
        self.weights = initial(size, key)
        self.chosen, self.products = size.chosen, products

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute it for `[tokens, width]`."""
        return x + experts(x, self.weights, self.chosen, self.products)


def model(size: Size, products: Products, key: jax.Array) -> tuple[Callable[[Any, jax.Array], jax.Array], Any]:
    """Return a function from parameters and tokens to tokens, and the first parameters."""
    parameters, static = eqx.partition(Experts(size, products, key), eqx.is_array)
    return lambda parameters, x: eqx.combine(parameters, static)(x), parameters
