# SPDX-License-Identifier: Apache-2.0
"""Kernels shared by many tests, a chooser that records its calls, and comparisons."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from ejkernel.ops import Executor, Kernel


def tanh_matmul(x, w):
    """Return the result of the kernels below."""
    return jnp.tanh(x @ w)


def tanh_matmul_gradients(x, w, y, cotangent):
    return jax.vjp(jnp.matmul, x, w)[1](cotangent * (1 - y * y))


class Plain(Kernel[int, jax.Array]):
    """No gradient rule: JAX differentiates `run`."""

    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w)

    def heuristic_cfg(self, inv):
        return 0


class WithRule(Plain):
    """A rule from the primals alone."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return tanh_matmul_gradients(*primals, tanh_matmul(*primals), cotangents[0])


class WithResiduals(Plain):
    """A rule from residuals."""

    def fwd_with_residuals(self, x, w, *, cfg):
        y = tanh_matmul(x, w)
        return y, {"y": y}

    def vjp(self, residuals, out, cotangents, x, w, *, cfg):
        return tanh_matmul_gradients(x, w, residuals["y"], cotangents[0])


class Times(Kernel[int, jax.Array]):
    """`cfg * x`: the result shows the configuration."""

    def run(self, x, *, cfg):
        return cfg * x

    def heuristic_cfg(self, inv):
        return 1


class Double(Kernel[Any, jax.Array]):
    """`x + x`, with an optional static argument."""

    def run(self, x, *, cfg, note=None):
        return x + x

    def heuristic_cfg(self, inv):
        return 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """The configuration of `Tiled`."""

    rows: int
    order: str = "row"


class Tiled(Kernel[Tile, jax.Array]):
    """`x + x` of one array, with a static argument."""

    def run(self, x, *, causal=False, cfg):
        return x + x

    def heuristic_cfg(self, inv):
        return Tile(1)


class Searched(Kernel[int, jax.Array]):
    """`x + x` with the heuristic 1 and a search space; `faults` maps a configuration to its faulty function."""

    def __init__(self, space=(1, 2, 3), faults=None):
        super().__init__("Double")
        self.space, self.faults = space, faults or {}

    def run(self, x, *, cfg):
        return self.faults.get(cfg, lambda x: told_apart(x + x, cfg))(x)

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return list(self.space)


class Applies(Kernel[int, Any]):
    """Applies a function, its static argument; without one it doubles."""

    def run(self, x, function=None, *, cfg):
        return x * 2 if function is None else function(x)

    def heuristic_cfg(self, inv):
        return 1


class Computes(Kernel[int, Any]):
    """Computes the function that its instance was made with."""

    def __init__(self, name, function):
        super().__init__(name)
        self.function = function

    def run(self, *args, cfg):
        return self.function(*args)

    def heuristic_cfg(self, inv):
        return 1


class ShowsConfig(Kernel[int, jax.Array]):
    """Returns its configuration; the gradient is 100 plus the backward's configuration."""

    def run(self, x, *, cfg):
        return 0 * x.sum() + cfg

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (jnp.full_like(primals[0], 100 + cfg),)

    def heuristic_cfg(self, inv):
        return 0


class LoggingChooser:
    """Answers every call with the kernel's heuristic, and records the calls in `asked`."""

    def __init__(self):
        self.asked = []

    def choose(self, inv, kernel):
        self.asked.append(inv)
        return kernel.heuristic_cfg(inv)

    @property
    def calls(self):
        """Operation and batch sizes of each call."""
        return [(inv.op_id, inv.batch_sizes) for inv in self.asked]


def logged(kernel):
    """Return a function that runs `kernel`, and the chooser that logs its calls."""
    chooser = LoggingChooser()
    return functools.partial(Executor(chooser), kernel), chooser


def squared(f):
    """Return a scalar function that has a gradient."""
    return lambda *arrays: (f(*arrays) ** 2).sum()


@functools.cache
def result_of(program, f):
    """Return the result of a program with a plain function; tests of several kernels share it."""
    return jax.jit(program, static_argnums=0)(f)


def assert_trees_close(actual, expected, tolerance=1e-4):
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (want.dtype, want.shape) == (got.dtype, got.shape)
        as_float = [np.asarray(value, np.float32) for value in (got, want)]
        np.testing.assert_allclose(*as_float, rtol=tolerance, atol=tolerance)


def told_apart(value, cfg):
    """Return `value`, with a different program for each configuration, since equal programs are measured once."""
    return set_xla_metadata(value, configuration=str(cfg))
