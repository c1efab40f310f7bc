# SPDX-License-Identifier: Apache-2.0
"""The measured operation, as plain functions and as a kernel: small, so that overhead shows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Invocation, Kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A configuration that changes nothing; `block` is only there to be chosen."""

    block: int = 16


def layer(a: Any, b: Any, *, scale: float = 1.0) -> Any:
    """The plain function."""
    return jnp.tanh(a @ b) * scale


class Layer(Kernel[LayerConfig, jax.Array]):
    """The same as a kernel."""

    def run(self, a: Any, b: Any, *, scale: float = 1.0, cfg: LayerConfig) -> Any:
        """Compute it."""
        return layer(a, b, scale=scale)

    def heuristic_cfg(self, inv: Invocation[LayerConfig, jax.Array]) -> LayerConfig:
        """Return the only configuration."""
        return LayerConfig()


def block(x: Any, w: Any, *, scale: float = 1.0) -> Any:
    """A plain function of usual size: a product, a softmax, a normalisation, another product and an activation."""
    h = jax.nn.softmax(x @ w * scale, axis=-1)
    h = (h - h.mean(axis=-1, keepdims=True)) * jax.lax.rsqrt(jnp.var(h, axis=-1, keepdims=True) + 1e-6)
    return jax.nn.gelu(jnp.where(h > 0, h, 0.1 * h) @ w) + x


class Block(Kernel[LayerConfig, jax.Array]):
    """The same as a kernel."""

    def run(self, x: Any, w: Any, *, scale: float = 1.0, cfg: LayerConfig) -> Any:
        """Compute it."""
        return block(x, w, scale=scale)

    def heuristic_cfg(self, inv: Invocation[LayerConfig, jax.Array]) -> LayerConfig:
        """Return the only configuration."""
        return LayerConfig()


class Applies(Kernel[LayerConfig, jax.Array]):
    """A kernel of containers and of static values of any kind."""

    def run(self, x: Any, given: Any = None, *, cfg: LayerConfig) -> Any:
        """Add the arrays in `given` to the hyperbolic tangent of `x`."""
        return applied(x, given)

    def heuristic_cfg(self, inv: Invocation[LayerConfig, jax.Array]) -> LayerConfig:
        """Return the only configuration."""
        return LayerConfig()


def applied(x: Any, given: Any = None) -> Any:
    """The same as a plain function."""
    arrays = [leaf for leaf in jax.tree.leaves(given) if isinstance(leaf, jax.Array)]
    return sum(arrays, jnp.tanh(x))


def executor_that_knows(kernel: Layer, *args: Any, **kwargs: Any) -> Executor[LayerConfig, jax.Array]:
    """Return an executor with a configuration for the call in memory."""
    cache = ConfigCache()
    cache.put(Invocation(kernel=kernel, args=args, kwargs=kwargs).key, LayerConfig(block=32))
    return Executor(ConfigSelectorChain(cache))
