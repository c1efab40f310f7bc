# SPDX-License-Identifier: Apache-2.0
"""`python compiled_for_hopper.py`: compile the loss's kernels for an H200; JAX's switches print what ptxas reports."""

from __future__ import annotations

import jax

from ejkernel.kernels.linear_cross_entropy.mosaic_gpu.params import MosaicGpuParams
from ejkernel.kernels.linear_cross_entropy.operation import linear_cross_entropy, linear_cross_entropy_gradients
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.core.transformations.nodes import Choice

TOKENS, INNER, COLUMNS = 2048, 4096, 32768
CHUNKS = MosaicGpuParams(chunk=1024)
HALVES = MosaicGpuParams(chunk=1024, accumulation_dtype="bfloat16", lag=3, cluster=2)
VOCABULARY = MosaicGpuParams(form="vocabulary", chunk=16384)
ALL = ("sum", "expected", "max")


def calls():
    """Yield a name, operation, columns, parameters, the presence of a bias, and options."""
    capped = {"transpose_weight": True, "logits_soft_cap": 30.0}
    yield "statistics", linear_cross_entropy, COLUMNS, None, False, {}
    yield "all statistics", linear_cross_entropy, COLUMNS, None, True, {**capped, "statistics": ALL}
    yield "three products", linear_cross_entropy_gradients, COLUMNS, CHUNKS, False, {}
    yield "three products, capped", linear_cross_entropy_gradients, COLUMNS, HALVES, False, capped
    yield "three products, maximum", linear_cross_entropy_gradients, COLUMNS, None, False, {"statistics": ("max",)}
    yield "three products, bias", linear_cross_entropy_gradients, COLUMNS, None, True, {"label_smoothing": 0.1}
    # Pieces of the weight for the logits, or for the product of their gradient and the weight.
    yield "statistics, pieces", linear_cross_entropy, COLUMNS + 8, None, True, {"statistics": ALL}
    yield "three products, pieces", linear_cross_entropy_gradients, COLUMNS + 8, HALVES, False, {}
    yield "maximum, pieces", linear_cross_entropy_gradients, COLUMNS + 8, None, False, {"statistics": ("max",)}
    yield "bias, pieces", linear_cross_entropy_gradients, COLUMNS + 8, VOCABULARY, True, {"label_smoothing": 0.1}
    yield "three products, odd", linear_cross_entropy_gradients, COLUMNS + 1, HALVES, False, capped
    options = {**capped, "label_smoothing": 0.1}
    yield "four products, bias, capped", linear_cross_entropy_gradients, COLUMNS, VOCABULARY, True, options


def main() -> None:
    target = Target.named("nvidia_h200")
    for name, operation, columns, params, with_bias, options in calls():
        shape = (columns, INNER) if options.get("transpose_weight") else (INNER, columns)
        x, weight = (jax.ShapeDtypeStruct(sizes, "bfloat16") for sizes in ((TOKENS, INNER), shape))
        labels, factors = (jax.ShapeDtypeStruct((TOKENS,), dtype) for dtype in ("int32", "float32"))
        bias = [jax.ShapeDtypeStruct((columns,), "bfloat16")] if with_bias else []
        others = [labels, factors, *bias] if operation is linear_cross_entropy_gradients else [labels, *bias]
        args, options = operation.prepare(x, weight, *others, implementation="mosaic_gpu", **options)
        inv = Invocation(kernel=operation, args=args, kwargs=options, device=target.fingerprint)
        print(f"compiling {name}", flush=True)
        cfg = operation.heuristic_cfg(inv)
        if params is not None:
            cfg = operation.config_type(implementation="mosaic_gpu", fwd=params)
        compile_for(inv, Choice(config=cfg, platform="gpu"), target, only_once=True)


if __name__ == "__main__":
    main()
