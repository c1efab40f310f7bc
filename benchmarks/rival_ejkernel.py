# SPDX-License-Identifier: Apache-2.0
"""Probe of the earlier system on PyPI; run by `benchmarks.rivals` in that system's environment."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.report import environment
from benchmarks.timing import interleave, per_call
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration that changes nothing."""

    block: int = 16


def layer(a: Any, b: Any, *, scale: float = 1.0) -> Any:
    """The plain function."""
    return jnp.tanh(a @ b) * scale


class Layer(Kernel):  # type: ignore[type-arg]  # the earlier system's class may have other type parameters
    """The same as a kernel of the earlier system."""

    def run(self, a: Any, b: Any, *, scale: float = 1.0, cfg: Any) -> Any:
        """Compute it."""
        return layer(a, b, scale=scale)

    def heuristic_cfg(self, inv: Any) -> Config:
        """Return the only configuration."""
        return Config()


def main() -> None:
    """Print the result as JSON."""
    a = b = jnp.ones((16, 16), jnp.float32)
    kernel: Any = Layer("layer")
    policy: Any = AutotunePolicy(allow_autotune=False)  # type: ignore[call-arg]  # as the earlier system named it
    executor: Any = Executor(ConfigSelectorChain(ConfigCache(), policy))
    plain = jax.jit(layer, static_argnames="scale")
    around = jax.jit(lambda a, b: executor(kernel, a, b, scale=2.0))
    calls = {
        "jax.jit(function)(a, b, scale=2.0)": lambda: plain(a, b, scale=2.0),
        "executor(kernel, a, b, scale=2.0)": lambda: executor(kernel, a, b, scale=2.0),
        "executor(kernel, a, b, scale=2.0, stamp=False)": lambda: executor(kernel, a, b, scale=2.0, stamp=False),
        "jax.jit(lambda a, b: executor(...))(a, b)": lambda: around(a, b),
    }
    timed = interleave({name: per_call(call) for name, call in calls.items()}, int(sys.argv[1]))
    print(json.dumps({"environment": environment(), "calls": {name: t.data() for name, t in timed.items()}}))


if __name__ == "__main__":
    main()
