# SPDX-License-Identifier: Apache-2.0
"""The layer in Flax NNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from layer import Products, Size, experts, initial


class Experts(nnx.Module):
    """Experts beside a residual."""

    def __init__(self, size: Size, products: Products, key: jax.Array) -> None:
        first = initial(size, key)
        self.router, self.gate = nnx.Param(first["router"]), nnx.Param(first["gate"])
        self.up, self.down = nnx.Param(first["up"]), nnx.Param(first["down"])
        self.chosen, self.products = size.chosen, products

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute it for `[tokens, width]`."""
        weights = {name: getattr(self, name)[...] for name in ("router", "gate", "up", "down")}
        return x + experts(x, weights, self.chosen, self.products)


def model(size: Size, products: Products, key: jax.Array) -> tuple[Callable[[Any, jax.Array], jax.Array], Any]:
    """Return a function from parameters and tokens to tokens, and the first parameters."""
    definition, parameters = nnx.split(Experts(size, products, key), nnx.Param)
    return lambda parameters, x: nnx.merge(definition, parameters)(x), parameters
