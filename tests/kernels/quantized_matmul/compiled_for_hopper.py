# SPDX-License-Identifier: Apache-2.0
"""`python compiled_for_hopper.py NUMBER`: compile our 8-bit products for an H200, and NUMBER more of each space.

JAX's own switches print the names of the programs, their PTX and the report of ptxas.
"""

from __future__ import annotations

import sys

import jax
import numpy as np

from ejkernel.kernels.quantized_matmul.operation import quantized_matmul
from ejkernel.kernels.quantized_matmul.quantized import scale_shape
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.core.transformations.nodes import Choice

M, N, K = 8192, 8192, 7168 + 128  # an odd number of steps


def calls():
    """Yield name, dtypes of the operands, options."""
    yield "promoted", ("float8_e4m3fn", "float8_e4m3fn"), {}
    yield "fast", ("float8_e5m2", "float8_e4m3fn"), {"accumulation": "fast"}
    yield "integers", ("int8", "int8"), {"preferred_element_type": "float32"}
    yield "blocks", ("float8_e4m3fn", "float8_e4m3fn"), {"x_block": (1, 128), "w_block": (128, 128)}


def main(others: int) -> None:
    target = Target.named("nvidia_h200")
    for name, dtypes, more in calls():
        x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(((M, K), (N, K)), dtypes, strict=True))
        more = {"x_block": (1, None), "w_block": (1, None), "transpose_w": True, **more}
        shapes = [scale_shape(array.shape, more[name]) for array, name in ((x, "x_block"), (w, "w_block"))]
        scales = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        args, options = quantized_matmul.prepare(x, w, *scales, implementation="mosaic_gpu", **more)
        inv = Invocation(kernel=quantized_matmul, args=args, kwargs=options, device=target.fingerprint)
        first = quantized_matmul.heuristic_cfg(inv)
        space = quantized_matmul.implementations["mosaic_gpu"].space(quantized_matmul.call_of(inv))
        for params in [first.fwd, *space.sample(np.random.default_rng(0), others)]:
            print(f"compiling {name}: {params}", flush=True)
            cfg = quantized_matmul.config_type(implementation="mosaic_gpu", fwd=params)
            compile_for(inv, Choice(config=cfg, platform="gpu"), target)


if __name__ == "__main__":
    main(int(sys.argv[1]))
