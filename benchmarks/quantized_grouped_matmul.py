# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.quantized_grouped_matmul`: grouped products of 8-bit operands beside our bfloat16 product.

Group sizes are drawn from a multinomial distribution. `benchmarks.quantized` times the contenders. `errors` are norms
relative to the float32 product of the dequantised operands in some rows: on normal numbers, and on their magnitudes,
where coarse sums show. "bfloat16 / name" is the time of our bfloat16 product relative to that of a contender.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.linear_cross_entropy_hopper import relative_error
from benchmarks.quantized import Function, run_contenders, run_shapes
from ejkernel.modules import Quantized, QuantizedGroupedMatmulConfig, grouped_matmul, quantize

BASE = "bfloat16"
ROWS, COLUMNS = 64, 128  # compared with the float32 product


class Shape(NamedTuple):
    """Rows, columns and summed axis of a product, and its groups."""

    m: int
    n: int
    k: int
    groups: int


SHAPES = {
    "8 groups": Shape(8192, 14336, 4096, 8),
    "64 groups": Shape(16384, 2048, 2048, 64),
    "128 groups": Shape(131072, 1536, 4096, 128),
    "small and ragged": Shape(4999, 1100, 1928, 256),
    "tiny": Shape(200, 72, 300, 5),
}


def ours(*, fast: bool = False, **params: Any) -> Function:
    """Return our kernel's product, by its heuristic or by given parameters."""
    cfg: Any = None
    if params:
        from ejkernel.kernels.quantized_matmul.mosaic_gpu.plan import MosaicGpuParams

        cfg = QuantizedGroupedMatmulConfig(implementation="mosaic_gpu", fwd=MosaicGpuParams(**params))
    options: dict[str, Any] = {"accumulation": "fast"} if fast else {}
    return functools.partial(grouped_matmul, transpose_rhs=True, implementation="mosaic_gpu", cfg=cfg, **options)


CONTENDERS: dict[str, Function] = {
    BASE: functools.partial(grouped_matmul, implementation="mosaic_gpu"),
    "rows": ours(),
    "rows, fast": ours(fast=True),
    "int8": ours(),
    "blocks": ours(),
    "rows, block_n 192": ours(block_n=192, out_slots=3),
    "rows, block_n 128": ours(block_n=128, stages=6),
    "rows, panel 8": ours(panel=8),
    "rows, panel 32": ours(panel=32),
    "blocks, 5 stages": ours(block_n=192, stages=5, out_slots=1),
    "blocks, block_n 128": ours(block_n=128, stages=5),
}
FEW = tuple(CONTENDERS)[:5]


@functools.partial(jax.jit, static_argnums=(0, 1))
def operands(shape: Shape, kind: str, positive: bool | jax.Array) -> tuple[Any, Any]:
    """Return rows and matrices: bfloat16, or quantised with scales of rows and columns, or of blocks."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    shapes = (shape.m, shape.k), (shape.groups, shape.n, shape.k)
    made = [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, shapes, strict=True)]
    lhs, rhs = (jnp.where(positive, jnp.abs(array), array) for array in made)
    if kind == BASE:
        return lhs, rhs.swapaxes(1, 2)
    if kind == "blocks":
        return quantize(lhs, block=128), quantize(rhs, block=128, axis=(1, 2))
    return quantize(lhs, dtype=kind), quantize(rhs, dtype=kind)


def kind_of(name: str) -> str:
    """Return the kind of a contender's operands."""
    kinds = {BASE: BASE, "int8": "int8"}
    return kinds.get(name) or ("blocks" if "blocks" in name else "float8_e4m3fn")


@jax.jit
def expected(lhs: Any, rhs: Any, rows: jax.Array, groups: jax.Array) -> jax.Array:
    """Return the first columns of some rows of the float32 product, given the groups of these rows."""
    left = lhs[rows].astype(jnp.float32) if not isinstance(lhs, Quantized) else _part(lhs, rows)
    right = rhs[groups, :, :COLUMNS].swapaxes(1, 2) if not isinstance(rhs, Quantized) else _part(rhs, groups)
    return jnp.einsum("rk,rnk->rn", left, right.astype(jnp.float32), precision="highest")


def _part(array: Quantized, numbers: jax.Array) -> jax.Array:
    """Return some rows, or the first columns of some matrices, dequantised."""
    values, scale = array.values[numbers], array.scale[numbers]
    if values.ndim == 3:
        values = values[:, :COLUMNS]
        scale = scale[:, : -(-values.shape[1] // (array.block[1] or 1))]
    return Quantized(values, scale, array.block).dequantize()


def sizes_of(shape: Shape) -> jax.Array:
    """Return sizes of groups for all rows except the last three, which belong to no group."""
    rng = np.random.default_rng(7)
    return jnp.asarray(rng.multinomial(shape.m - 3, np.full(shape.groups, 1 / shape.groups)), jnp.int32)


def measured(shape: Shape, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the figures of each contender, or the reason for having none; print what is known so far."""
    return run_contenders(
        names,
        CONTENDERS.__getitem__,
        kind_of,
        lambda kind, positive: (*operands(shape, kind, positive), sizes_of(shape)),
        functools.partial(error, shape),
        seconds=seconds,
        flops=2.0 * math.prod(shape[:3]),
    )


def error(shape: Shape, name: str, program: Function, arrays: Any) -> float:
    """Return a contender's error in some rows; not a number if rows outside all groups are not zero."""
    *pair, sizes = arrays
    rows = jnp.linspace(0, shape.m - 4, ROWS).astype(jnp.int32)
    groups = jnp.searchsorted(jnp.cumsum(sizes), rows, side="right")
    out = program(*arrays)
    outside = bool(jnp.any(out[-3:]))
    found = relative_error(out[rows, :COLUMNS], expected(*pair, rows, groups))
    return float("nan") if outside else float(f"{found:.2e}")


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Return the bfloat16 product's time relative to those of the others."""
    found = {}
    for kind in ("us", "kernel_us"):
        for name, row in rows.items():
            pair = rows.get(BASE, {}).get(kind), row.get(kind)
            if name != BASE and pair[0] and pair[1]:
                found[f"bfloat16 / {name}, {kind}"] = round(pair[0] / pair[1], 3)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it with `--out`; see `run_shapes`."""
    return run_shapes(
        "quantized_grouped_matmul",
        __doc__,
        SHAPES,
        CONTENDERS,
        few=dict.fromkeys(list(SHAPES)[:3], FEW),
        seconds=40.0,
        measured=measured,
        ratios=ratios,
        argv=argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
