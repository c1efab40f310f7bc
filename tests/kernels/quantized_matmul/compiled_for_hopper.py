# SPDX-License-Identifier: Apache-2.0
"""`python compiled_for_hopper.py NUMBER`: compile our 8-bit products for an H200, and NUMBER more of each space.

JAX's own switches print the names of the programs, their PTX and the report of ptxas.
"""

from __future__ import annotations

import sys

import jax
import numpy as np

from ejkernel.kernels.quantized_matmul.grouped.activation import quantized_grouped_activation
from ejkernel.kernels.quantized_matmul.grouped.operation import quantized_grouped_matmul
from ejkernel.kernels.quantized_matmul.grouped.wgrad import quantized_grouped_wgrad
from ejkernel.kernels.quantized_matmul.operation import quantized_matmul
from ejkernel.kernels.quantized_matmul.quantized import scale_shape
from ejkernel.kernels.quantized_matmul.quantizing.groups import block_count
from ejkernel.kernels.quantized_matmul.quantizing.operation import quantize_blocks
from ejkernel.kernels.rms_norm.quantized.operation import quantized_rms_norm
from ejkernel.ops import ConfigSpace, Invocation
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.core.transformations.nodes import Choice

M, N, K = 8192, 8192, 7168 + 128  # an odd number of steps
GROUPS = 8


def dense(dtypes, rows=M, columns=N, **options):
    """Return the arguments of a product."""
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(((rows, K), (columns, K)), dtypes, strict=True))
    own = {} if "float16" in dtypes[0] else {"x_block": (1, None)}
    options = {**own, "w_block": (1, None), "transpose_w": True, **options}
    blocks = (x, options.get("x_block")), (w, options["w_block"])
    shapes = [block and scale_shape(array.shape, block) for array, block in blocks]
    return (x, w, *[shape and jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]), options


def grouped(dtypes, rows=M, groups=GROUPS, **options):
    """Return the arguments of a product of groups."""
    shapes = (rows, K), (groups, N, K)
    lhs, rhs = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    own = {} if "float16" in dtypes[0] else {"lhs_block": (1, None)}
    options = {**own, "rhs_block": (1, 1, None), "transpose_rhs": True, **options}
    blocks = (lhs, options.get("lhs_block")), (rhs, options["rhs_block"])
    scales = [block and jax.ShapeDtypeStruct(scale_shape(array.shape, block), "float32") for array, block in blocks]
    return (lhs, rhs, jax.ShapeDtypeStruct((groups,), "int32"), *scales), options


def gradient(dtypes, *, square=False):
    """Return the arguments of a weights' gradient of groups."""
    rows = 128 * block_count(M, GROUPS)
    arrays = [jax.ShapeDtypeStruct((size, rows), dtype) for size, dtype in zip((K, N), dtypes, strict=True)]
    scales = [jax.ShapeDtypeStruct((size, rows // 128), "float32") for size in (K, N // 128 if square else N)]
    return (*arrays, jax.ShapeDtypeStruct((GROUPS,), "int32"), *scales), {"square": square}


def activation(dtypes, *, gated=True, **options):
    """Return the arguments of an activation of groups; rows in 16 bits have factors."""
    (lhs, rhs, sizes, lhs_scale, rhs_scale), options = grouped(dtypes, **options)
    gate = [(rhs, rhs_scale)] if gated else []
    factors = [] if lhs_scale else [jax.ShapeDtypeStruct(lhs.shape[:1], "float32")]
    return (lhs, rhs, sizes, lhs_scale, rhs_scale, *gate, *factors), {"activation": "silu"} | options


def calls():
    """Yield name, operation, arguments and options."""
    both, integers = ("float8_e4m3fn", "float8_e4m3fn"), ("int8", "int8")
    yield "promoted", quantized_matmul, *dense(both)
    yield "fast", quantized_matmul, *dense(("float8_e5m2", "float8_e4m3fn"), accumulation="fast")
    yield "integers", quantized_matmul, *dense(integers, preferred_element_type="float32")
    yield "blocks", quantized_matmul, *dense(both, x_block=(1, 128), w_block=(128, 128))
    yield "blocks of columns", quantized_matmul, *dense(both, x_block=(1, 128), w_block=(1, 128))
    for few in (64, 256, 201 * 128):  # with 512 columns tiles are split, in the third case those of the fourth round
        yield f"{few} rows, 512 columns", quantized_matmul, *dense(both, rows=few, columns=512)
    for block in ((128, 128), (1, 128)):
        name = f"{block} blocks, 512 columns"
        yield name, quantized_matmul, *dense(both, rows=205, columns=512, x_block=(1, 128), w_block=block)
    yield "few rows", quantized_matmul, *dense(both, rows=64)
    for x, w in (("bfloat16", both[0]), ("bfloat16", "float8_e5m2"), ("bfloat16", "int8"), ("float16", "int8")):
        yield f"few rows of {x} by {w}", quantized_matmul, *dense((x, w), rows=64)
        for groups in (1, GROUPS):
            name = f"few rows of {x} by {w}, {groups} groups"
            yield name, quantized_grouped_matmul, *grouped((x, w), rows=64 * groups, groups=groups)
            name += ", with a gate"
            yield name, quantized_grouped_activation, *activation((x, w), rows=64 * groups, groups=groups)
    x = jax.ShapeDtypeStruct((M, K), "bfloat16")
    yield "quantising", quantize_blocks, (x,), {"transposed": True}
    groups = jax.ShapeDtypeStruct((GROUPS,), "int32")
    yield "quantising groups", quantize_blocks, (x, groups), {"transposed": True}
    yield "norm", quantized_rms_norm, (jax.ShapeDtypeStruct((M, 7168), "bfloat16"), None, None), {}
    yield "quantising squares", quantize_blocks, (x, groups), {"transposed": True, "square": True}
    yield "gradient of groups", quantized_grouped_wgrad, *gradient(both)
    mixed = (both[0], "float8_e5m2")
    yield "gradient of groups, squares", quantized_grouped_wgrad, *gradient(mixed, square=True)
    yield "groups promoted", quantized_grouped_matmul, *grouped(both)
    yield "groups fast", quantized_grouped_matmul, *grouped(both, accumulation="fast")
    yield "groups of integers", quantized_grouped_matmul, *grouped(integers)
    blocks = {"lhs_block": (1, 128), "rhs_block": (1, 128, 128)}
    yield "groups with blocks", quantized_grouped_matmul, *grouped(both, **blocks)
    for name, own in (("activation", {"quantize": "float8_e4m3fn"}), ("activation, wide", {})):
        yield name, quantized_grouped_activation, *activation(both, gated=False, **own)
        yield f"{name}, fast", quantized_grouped_activation, *activation(both, accumulation="fast", **own)
        yield f"{name}, with a gate", quantized_grouped_activation, *activation(both, **own)
        yield f"{name}, of blocks", quantized_grouped_activation, *activation(both, **blocks, **own)


def sampled(space, number):
    """Return some parameters of a space."""
    rng = np.random.default_rng(0)
    if isinstance(space, ConfigSpace):
        return space.sample(rng, number)
    return [space[i] for i in rng.permutation(len(space))[:number]]


def main(others: int) -> None:
    target = Target.named("nvidia_h200")
    for name, operation, args, options in calls():
        args, options = operation.prepare(*args, implementation="mosaic_gpu", **options)
        inv = Invocation(kernel=operation, args=args, kwargs=options, device=target.fingerprint)
        first = operation.heuristic_cfg(inv)
        space = operation.implementations["mosaic_gpu"].space(operation.call_of(inv))
        for params in [first.fwd, *sampled(space, others)]:
            print(f"compiling {name}: {params}", flush=True)
            cfg = operation.config_type(implementation="mosaic_gpu", fwd=params)
            compile_for(inv, Choice(config=cfg, platform="gpu"), target)


if __name__ == "__main__":
    main(int(sys.argv[1]))
