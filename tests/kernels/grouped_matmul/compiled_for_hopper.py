# SPDX-License-Identifier: Apache-2.0
"""`python compiled_for_hopper.py NUMBER`: compile our grouped products for an H200, and NUMBER more of each space.

JAX's own switches print the names of the programs, their PTX and the report of ptxas.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import numpy as np

from ejkernel.kernels.grouped_matmul.activation import grouped_matmul_activation
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul, grouped_matmul_wgrad
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.core.transformations.nodes import Choice

ROWS, GROUPS, K, N = 8192, 8, 4096, 4096


def calls():
    """Yield the products and their epilogues, also for some of the groups: name, operation, shapes, options."""
    rows, matrices = (ROWS, K), (GROUPS, K, N)
    yield "forward", grouped_matmul, (rows, matrices), {}
    yield "forward of some groups", grouped_matmul, (rows, (GROUPS // 2, K, N)), {"first_group": GROUPS // 2}
    yield "dgrad", grouped_matmul, ((ROWS, N), matrices), {"transpose_rhs": True}
    yield "wgrad", grouped_matmul_wgrad, (rows, (ROWS, N)), {}
    yield "wgrad to float32", grouped_matmul_wgrad, (rows, (ROWS, N)), {"preferred_element_type": "float32"}
    gate, row_scale = jax.ShapeDtypeStruct(matrices, "bfloat16"), jax.ShapeDtypeStruct((ROWS,), "float32")
    yield "factors of rows", grouped_matmul, (rows, matrices), {"row_scale": row_scale}
    gated = {"gate": gate, "activation": "gelu", "row_scale": row_scale}
    yield "gated", grouped_matmul_activation, (rows, matrices), gated
    yield "gated, products kept", grouped_matmul_activation, (rows, matrices), gated


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
            choice = Choice(config=cfg, platform="gpu")
            if "kept" in name:
                compile_keeping(inv, choice, target)
            else:
                compile_for(inv, choice, target)


def compile_keeping(inv, choice, target):
    """Compile the forward of a differentiated call, which also stores residuals."""
    node = dataclasses.replace(inv.node, residuals=True)
    with target.entered():
        jax.jit(node.flat(choice)).lower(*[target.placed(like) for like in inv.argument_types]).compile()


if __name__ == "__main__":
    main(int(sys.argv[1]))
