# SPDX-License-Identifier: Apache-2.0
"""`python compiled_for_hopper.py`: compile our normalisations of short rows for an H200, with as many rows as possible.

JAX's own switches print the names of the programs and the report of ptxas.
"""

from __future__ import annotations

import itertools

import jax

from ejkernel.modules import LayerNorm, RmsNorm
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.core.transformations.nodes import Choice

ROWS = 65536


def main() -> None:
    target = Target.named("nvidia_h200")
    for operation, (dim, dtype), residual, backward in itertools.product(
        (RmsNorm(), LayerNorm()), ((256, "bfloat16"), (128, "float32")), (False, True), (False, True)
    ):
        rows, vector = jax.ShapeDtypeStruct((ROWS, dim), dtype), jax.ShapeDtypeStruct((dim,), dtype)
        vectors = (vector,) * (1 + (operation.name == "layer_norm"))
        added = {"residual": rows} if residual else {}
        args, options = operation.prepare(rows, *vectors, implementation="mosaic_gpu", **added)
        op_id = f"{operation.name}{'.bwd' if backward else ''}"
        inv = Invocation(kernel=operation, args=args, kwargs=options, device=target.fingerprint, op_id=op_id)
        space = operation.implementations["mosaic_gpu"].space(operation.call_of(inv))
        params = max(space, key=lambda params: params.block_rows)
        print(f"compiling {op_id}, {dim}, {dtype}{', residual' * residual}: {params}", flush=True)
        config = operation.config_type(implementation="mosaic_gpu", **{"bwd" if backward else "fwd": params})
        compile_for(inv, Choice(config=config, platform="gpu"), target)


if __name__ == "__main__":
    main()
