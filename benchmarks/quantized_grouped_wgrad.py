# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.quantized_grouped_wgrad`: the gradient of groups' matrices in 8 bits, beside bfloat16.

"blocks" reads rows and gradients that `quantize_both` made, with a scale for 128 numbers of either; "squares" reads
gradients with a scale for 128x128 numbers. "from bfloat16" makes both of them first, with the rows' copies, which a
layer needs anyway. "quantize" is one of these. Group sizes are drawn from a multinomial distribution.
`benchmarks.quantized` times the contenders. `errors` are norms relative to the float32 product, of the dequantised
operands where these are in 8 bits, in a part of one group's result: on normal numbers, and on their magnitudes, where
coarse sums show. "bfloat16 / name" is the time of our bfloat16 kernel relative to that of a contender.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.linear_cross_entropy_hopper import relative_error
from benchmarks.quantized import Function, run_contenders, run_shapes
from benchmarks.quantized_grouped_matmul import BASE, SHAPES, Shape, ratios, sizes_of
from ejkernel.kernels.grouped_matmul.common import taken_apart
from ejkernel.kernels.quantized_matmul.quantizing.groups import whole_blocks
from ejkernel.modules import Quantized, QuantizedGroupedWgradConfig, grouped_matmul_wgrad, quantize_both

PART = 128  # rows and columns of a group's result that are compared
GROUP = 1
DTYPES = ("float8_e4m3fn", "float8_e5m2")  # of rows and gradients


def ours(**params: Any) -> Function:
    """Return our kernel's gradient, by its heuristic or by given parameters."""
    cfg: Any = None
    if params:
        from ejkernel.kernels.grouped_matmul.mosaic_gpu.plan import WgradParams

        cfg = QuantizedGroupedWgradConfig(implementation="mosaic_gpu", fwd=WgradParams(**params))
    return functools.partial(grouped_matmul_wgrad, implementation="mosaic_gpu", cfg=cfg)


def from_bfloat16(lhs: jax.Array, dout: jax.Array, sizes: jax.Array, *, square: bool = False) -> Any:
    """Return the gradient, and the rows in 8 bits."""
    kinds = (lhs, DTYPES[0], False), (dout, DTYPES[1], square)
    both = [quantize_both(x, sizes, dtype=dtype, square=own) for x, dtype, own in kinds]
    return grouped_matmul_wgrad(both[0][1], both[1][1], sizes), [rows for rows, _ in both]


CONTENDERS: dict[str, Function] = {
    BASE: ours(),
    "blocks": ours(),
    "squares": ours(),
    "squares, from bfloat16": functools.partial(from_bfloat16, square=True),
    "blocks, from bfloat16": from_bfloat16,
    "quantize": lambda lhs, dout, sizes: quantize_both(dout, sizes, dtype=DTYPES[1]),
    "quantize, squares": lambda lhs, dout, sizes: quantize_both(dout, sizes, dtype=DTYPES[1], square=True),
    "xla bfloat16": functools.partial(grouped_matmul_wgrad, implementation="xla"),
    "blocks, block_n 128": ours(block_n=128, stages=5),
    "blocks, block_n 128, 4 stages": ours(block_n=128, stages=4),
    "blocks, panel 4": ours(block_n=192, stages=4, out_slots=3, panel=4),
    "blocks, panel 32": ours(block_n=192, stages=4, out_slots=3, panel=32),
    "blocks, 5 stages": ours(block_n=192, stages=5, out_slots=1),
    "blocks, largest first": ours(block_n=192, stages=4, out_slots=3, largest_first=True, snake=True),
    "squares, 5 stages": ours(block_n=192, stages=5, out_slots=1),
    "squares, dealt in order": ours(block_n=192, stages=4, out_slots=3),
    "squares, largest first": ours(block_n=192, stages=4, out_slots=3, largest_first=True, snake=True),
    "blocks, dealt in order": ours(block_n=192, stages=4, out_slots=3),
}
FEW = tuple(CONTENDERS)[:8]


@functools.partial(jax.jit, static_argnums=(0, 1))
def operands(shape: Shape, kind: str, positive: bool | jax.Array) -> tuple[Any, Any]:
    """Return rows and gradients: in bfloat16, or their columns in 8 bits, with scales of blocks or squares."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    sizes = (shape.m, shape.k), (shape.m, shape.n)
    made = [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]
    arrays = [jnp.where(positive, jnp.abs(array), array) for array in made]
    if kind == BASE:
        return arrays[0], arrays[1]
    groups, squares = sizes_of(shape), (False, kind == "squares")
    pairs = zip(arrays, DTYPES, squares, strict=True)
    first, second = (quantize_both(x, groups, dtype=dtype, square=square)[1] for x, dtype, square in pairs)
    return first, second


def kind_of(name: str) -> str:
    """Return the kind of a contender's operands."""
    kind = name.split(",")[0]
    return kind if kind in ("blocks", "squares") and "from" not in name else BASE


@jax.jit
def expected(lhs: Any, dout: Any, sizes: jax.Array) -> jax.Array:
    """Return a part of one group's float32 gradient."""
    arrays = []
    for array in (lhs, dout):
        if isinstance(array, Quantized):
            part = -(-PART // (array.block[0] or 1))
            array = Quantized(array.values[:PART], array.scale[:part], array.block).dequantize().T
        arrays.append(array[:, :PART].astype(jnp.float32))
    own = taken_apart(whole_blocks(sizes, lhs.shape[1]))[0] if isinstance(lhs, Quantized) else sizes
    ends, row = jnp.cumsum(own), jnp.arange(len(arrays[0]))
    inside = (row >= ends[GROUP - 1]) & (row < ends[GROUP])
    return jnp.einsum("rk,rn->kn", jnp.where(inside[:, None], arrays[0], 0), arrays[1], precision="highest")


def error(name: str, program: Function, arrays: Any) -> float | None:
    """Return a contender's error in a part of one group's result, if it is a gradient."""
    if name.startswith("quantize"):
        return None
    out = program(*arrays)
    out = out[0] if isinstance(out, tuple) else out
    found = relative_error(out[GROUP, :PART, :PART], expected(*arrays))
    return float(f"{found:.2e}")


def measured(shape: Shape, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the figures of each contender, or the reason for having none; print what is known so far."""
    return run_contenders(
        names,
        CONTENDERS.__getitem__,
        kind_of,
        lambda kind, positive: (*operands(shape, kind, positive), sizes_of(shape)),
        error,
        seconds=seconds,
        flops=2.0 * math.prod(shape[:3]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it with `--out`; see `run_shapes`."""
    return run_shapes(
        "quantized_grouped_wgrad",
        __doc__,
        SHAPES,
        CONTENDERS,
        few=dict.fromkeys(list(SHAPES)[:2], FEW),
        seconds=45.0,
        measured=measured,
        ratios=ratios,
        argv=argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
