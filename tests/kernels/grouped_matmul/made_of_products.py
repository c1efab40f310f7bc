# SPDX-License-Identifier: Apache-2.0
"""Calls of our product's kernel with epilogues: arguments by name, and the launch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from tests.kernels.grouped_matmul import by_numpy

from ejkernel.kernels.grouped_matmul.activation import grouped_matmul_activation
from ejkernel.kernels.grouped_matmul.mosaic_gpu import launch
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul


def operands(rows, groups, k, n, *, gate, row_scale, transpose_rhs=False):
    """Return rows, matrices, and a gate and factors if they are wanted."""
    matrices = (groups, n, k) if transpose_rhs else (groups, k, n)
    found = {"lhs": by_numpy.normal(rows, k) / 8, "rhs": by_numpy.normal(*matrices, seed=1)}
    if gate:
        found["gate"] = by_numpy.normal(*matrices, seed=2)
    if row_scale:
        found["row_scale"] = by_numpy.normal(rows, seed=3, dtype="float32")
    return found


def with_nan_behind(given, sizes):
    """Return operands with NaN in rows and factors past the last group."""
    return given | {x: by_numpy.with_nan_behind(given[x], sizes) for x in ("lhs", "row_scale") if x in given}


def launched(given, groups, params, *, keep=False, interpret=None, first_group=None, **options):
    """Return a function of sizes and operands that runs the kernel, compiled once; and the call's description."""
    operation = grouped_matmul_activation if "gate" in given or options.get("activation") else grouped_matmul
    asked = options | {name: given[name] for name in ("gate", "row_scale") if name in given}
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    args, kwargs = operation.prepare(given["lhs"], given["rhs"], sizes, first_group=first_group, **asked)
    call = operation.describe(*args, **{name: value for name, value in kwargs.items() if name != "implementation"})

    @jax.jit
    def run(sizes, given):
        groups = sizes if first_group is None else (sizes, jnp.int32(first_group))
        arrays = (given["lhs"], given["rhs"], groups, *[given[x] for x in ("gate", "row_scale") if x in given])
        if keep:
            return launch.product_keeping(call, arrays, params, interpret=interpret)
        return [launch.product(call, arrays, params, interpret=interpret)]

    return (lambda sizes, given=given: run(jnp.asarray(sizes, jnp.int32), given)), call
