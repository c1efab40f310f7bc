# SPDX-License-Identifier: Apache-2.0
"""Programs over meshes of eight host devices, and the communication between devices."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

MODES = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(mode, shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=MODES[mode])


def loss(function):
    return lambda *arrays: (function(*arrays) ** 2).mean()


def gradient(function):
    return lambda *arrays: jax.grad(loss(function), argnums=range(len(arrays)))(*arrays)


def scanned(function):
    def step(rest, carry, _):
        return function(carry, *rest) * 0.5, None

    return lambda first, *rest: jax.lax.scan(functools.partial(step, rest), first, None, length=2)[0]


def placed(arrays, specs, mesh):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def compiled(function, arrays, specs, mesh):
    with jax.set_mesh(mesh):
        given = placed(arrays, specs, mesh)
        program = jax.jit(function).lower(*given).compile()
        return program, program(*given)


_COLLECTIVE = re.compile(
    r"= (\S+|\([^)]*\)) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_ARRAY = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")


def bytes_in_collectives(program):
    """Return how many bytes the results of a compiled program's collectives have."""
    arrays = [array for result in _COLLECTIVE.findall(program.as_text()) for array in _ARRAY.findall(result)]
    return sum(np.prod([int(n) for n in shape.split(",") if n] or [1]) * int(kind[1:]) // 8 for kind, shape in arrays)


def close(left, right):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), left, right)
