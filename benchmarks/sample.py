# SPDX-License-Identifier: Apache-2.0
"""The operation that is measured, as plain functions and as a kernel: small, so that what is around it shows."""

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
        """Return the one configuration."""
        return LayerConfig()


def executor_that_knows(kernel: Layer, *args: Any, **kwargs: Any) -> Executor[LayerConfig, jax.Array]:
    """Return an executor whose memory has a configuration for the call."""
    cache = ConfigCache()
    cache.put(Invocation(kernel=kernel, args=args, kwargs=kwargs).key, LayerConfig(block=32))
    return Executor(ConfigSelectorChain(cache))
