# SPDX-License-Identifier: Apache-2.0
"""`python compiled_for_hopper.py NUMBER`: compile our grouped products for an H200, and so many others of each space.

Names of what is compiled, PTX and what ptxas says of it are printed, by JAX's own switches for that.
"""

from __future__ import annotations

import sys

import jax
import numpy as np

from ejkernel.kernels.grouped_matmul.operation import grouped_matmul, grouped_matmul_wgrad
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.compile.ahead_of_time import compile_for
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.core.transformations.nodes import Choice

ROWS, GROUPS, K, N = 8192, 8, 4096, 4096


def calls():
    """Return the three products: name, operation, shapes, options; the first one also of some of the groups."""
    rows, matrices = (ROWS, K), (GROUPS, K, N)
    yield "forward", grouped_matmul, (rows, matrices), {}
    yield "forward of some groups", grouped_matmul, (rows, (GROUPS // 2, K, N)), {"first_group": GROUPS // 2}
    yield "dgrad", grouped_matmul, ((ROWS, N), matrices), {"transpose_rhs": True}
    yield "wgrad", grouped_matmul_wgrad, (rows, (ROWS, N)), {}
    yield "wgrad to float32", grouped_matmul_wgrad, (rows, (ROWS, N)), {"preferred_element_type": "float32"}


def main(others: int) -> None:
    target = Target.named("nvidia_h200")
    for name, operation, shapes, options in calls():
        arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
        sizes = jax.ShapeDtypeStruct((GROUPS,), "int32")
        args, options = operation.prepare(*arrays, sizes, implementation="mosaic_gpu", **options)
        inv = Invocation(kernel=operation, args=args, kwargs=options, device=target.fingerprint)
        first = operation.heuristic_cfg(inv)
        space = operation.implementations["mosaic_gpu"].space(operation.call_of(inv))
        for params in [first.fwd, *space.sample(np.random.default_rng(0), others)]:
            print(f"compiling {name}: {params}", flush=True)
            cfg = operation.config_type(implementation="mosaic_gpu", fwd=params)
            compile_for(inv, Choice(config=cfg, platform="gpu"), target)


if __name__ == "__main__":
    main(int(sys.argv[1]))
