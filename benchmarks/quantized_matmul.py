# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.quantized_matmul`: products of 8-bit operands on a Hopper GPU.

The contenders: our kernel with exact and with fast sums, on int8, and with other tiles; our plain JAX on widened
operands; XLA's cuBLASLt call for float8 with scalar scales, XLA's product of float8 arrays without scales, and cuBLAS
on bfloat16. "bfloat16 by" has rows of bfloat16; "thin blocks" are 1x128 of both operands. "quantize" makes the rows'
numbers and scales from bfloat16, as a layer does before each product. "copy" negates `w` in bfloat16. With few rows,
rates count `w` once, and twice for the copy.

`benchmarks.quantized` times the contenders. `errors` are norms relative to the float32 product of the dequantised
operands: on normal numbers, and on their magnitudes, where coarse sums show. "rival / ours" compares exact and fast
sums with cuBLASLt's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.linear_cross_entropy_hopper import relative_error
from benchmarks.quantized import Function, add_rates, run_contenders, run_shapes
from ejkernel.modules import Quantized, QuantizedMatmulConfig, quantize, quantized_matmul

CHECKED = 512  # rows and columns
FEW_ROWS = 64  # with so many, reading `w` takes the time
SCALAR = 2.0**-6
EXACT, FAST, RIVAL = "ejkernel", "ejkernel fast", "xla cublasLt"


class Shape(NamedTuple):
    """Rows, columns and summed axis of a product."""

    m: int
    n: int
    k: int


SHAPES = {
    "B": Shape(4096, 16384, 7168),
    "C": Shape(8192, 8192, 8192),
    "decode": Shape(64, 28672, 8192),
    "decode, 16 rows": Shape(16, 28672, 8192),
    "decode, short": Shape(64, 14336, 4096),
    "decode, narrow": Shape(64, 4096, 14336),
    "decode, long": Shape(64, 8192, 28672),
    "ragged": Shape(4999, 7176, 1920),
    "A": Shape(4096, 7168, 16384),
    "D": Shape(4096, 4096, 7168),
    "tiny": Shape(200, 200, 384),
}


def ours(shape: Shape, *, implementation: str = "mosaic_gpu", fast: bool = False, **params: Any) -> Function:
    """Return the module's product, by its heuristic or by given parameters."""
    cfg: Any = None
    if params:
        from ejkernel.kernels.quantized_matmul.mosaic_gpu.plan import MosaicGpuParams

        cfg = QuantizedMatmulConfig(implementation=implementation, fwd=MosaicGpuParams(**params))

    def run(x: Any, w: Quantized) -> jax.Array:
        return quantized_matmul(
            x,
            w,
            transpose_w=True,
            accumulation="fast" if fast else "exact",
            implementation=implementation,
            cfg=cfg,
        )

    return run


def by_xla(shape: Shape, *, scaled: bool = False, precision: Any = None) -> Function:
    """Return XLA's product of the numbers alone, or with scalar scales in the form that it hands to cuBLASLt."""

    def run(x: Quantized, w: Quantized) -> jax.Array:
        left, right = x.values, w.values
        if scaled:
            left, right = (a.astype(jnp.bfloat16) * jnp.asarray(SCALAR, jnp.bfloat16) for a in (left, right))
        found = lax.dot_general(
            left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        return found.astype(jnp.bfloat16)

    return run


def bfloat16_product(shape: Shape) -> Function:
    """Return cuBLAS's product of bfloat16 arrays."""
    return lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ())))


CONTENDERS: dict[str, Callable[[Shape], Function]] = {
    EXACT: ours,
    FAST: functools.partial(ours, fast=True),
    "ejkernel int8": ours,
    "ejkernel blocks": ours,
    "blocks, 5 stages": functools.partial(ours, block_n=192, stages=5, out_slots=1),
    "blocks, block_n 128": functools.partial(ours, block_n=128, stages=5),
    "ejkernel xla": functools.partial(ours, implementation="xla"),
    "ejkernel xla fast": functools.partial(ours, implementation="xla", fast=True),
    "ejkernel thin blocks": ours,
    "ejkernel bfloat16 by int8": ours,
    "ejkernel bfloat16 by float8": ours,
    "xla bfloat16 by int8": functools.partial(ours, implementation="xla"),
    "block_n 192": functools.partial(ours, block_n=192, out_slots=3),
    "panel 8": functools.partial(ours, panel=8),
    "panel 32": functools.partial(ours, panel=32),
    "block_n 128": functools.partial(ours, block_n=128, stages=6),
    RIVAL: functools.partial(by_xla, scaled=True),
    "xla float8": by_xla,
    "xla float8 highest": functools.partial(by_xla, precision="highest"),
    "cublas bfloat16": bfloat16_product,
    "quantize": lambda shape: lambda x, w: quantize(x),
    "copy": lambda shape: lambda x, w: -w,
}
FEW = (EXACT, FAST, "ejkernel int8", RIVAL, "cublas bfloat16")
BLOCKS = ("ejkernel blocks", "ejkernel thin blocks")
WIDE = ("ejkernel bfloat16 by int8", "ejkernel bfloat16 by float8")
DECODE = (*FEW, *WIDE, "xla bfloat16 by int8", "copy")
# The contenders of each shape that run by default.
OF_SHAPE = {
    "B": (*FEW, *BLOCKS),
    "C": (*FEW, *BLOCKS),
    "decode": DECODE,
    "decode, 16 rows": DECODE,
    "decode, narrow": DECODE,
    "decode, long": DECODE,
    "ragged": (*FEW[:3], BLOCKS[0], "ejkernel xla"),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def operands(shape: Shape, kind: str, positive: bool | jax.Array) -> tuple[Any, Any]:
    """Return operands: bfloat16, or quantised with a scale for each row and column, or for blocks."""
    keys = jax.random.split(jax.random.key(0), 2)
    made = [jax.random.normal(key, (size, shape.k), jnp.bfloat16) for key, size in zip(keys, shape[:2], strict=True)]
    x, w = (jnp.where(positive, jnp.abs(a), a) for a in made)
    if kind == "bfloat16":
        return x, w
    if kind.startswith("wide rows"):
        return x, quantize(w, dtype=kind.removeprefix("wide rows by "))
    if kind == "thin blocks":
        return quantize(x, block=128), quantize(w, block=128)
    if kind == "blocks":
        return quantize(x, block=128), quantize(w, block=128, axis=(0, 1))
    return quantize(x, dtype=kind), quantize(w, dtype=kind)


def kind_of(name: str) -> str:
    """Return the kind of a contender's operands."""
    if "bfloat16 by" in name:
        return "wide rows by " + ("int8" if "int8" in name else "float8_e4m3fn")
    if name in ("cublas bfloat16", "quantize", "copy"):
        return "bfloat16"
    kinds = {"thin": "thin blocks", "blocks": "blocks", "int8": "int8"}
    return next((kind for part, kind in kinds.items() if part in name), "float8_e4m3fn")


@jax.jit
def expected(x: Any, w: Any, factor: float | jax.Array) -> jax.Array:
    """Return a corner of the float32 product, with `factor` in place of each scale unless it is 0."""

    def wide(a: Any) -> jax.Array:
        if not isinstance(a, Quantized):
            return jnp.asarray(a[:CHECKED]).astype(jnp.float32)
        plain = factor * a.values[:CHECKED].astype(jnp.float32)
        return jnp.where(factor == 0, a.dequantize()[:CHECKED], plain)

    return lax.dot_general(wide(x), wide(w), (((1,), (1,)), ((), ())), precision="highest")


def measured(shape: Shape, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the figures of each contender, or the reason for having none; print what is known so far."""
    found = run_contenders(
        names,
        lambda name: CONTENDERS[name](shape),
        kind_of,
        functools.partial(operands, shape),
        error,
        seconds=seconds,
        flops=2.0 * math.prod(shape),
    )
    if shape.m <= FEW_ROWS:
        wide = {"copy": 4, "cublas bfloat16": 2}  # bytes for each number of `w`
        add_rates(found, lambda name: shape.n * shape.k * wide.get(name, 1))
    return found


def error(name: str, program: Function, arrays: Any) -> float | None:
    """Return a contender's error on some operands, if it is a product."""
    if name in ("quantize", "copy"):
        return None
    factor = SCALAR if name == RIVAL else float(name.startswith("xla float8"))
    found = relative_error(program(*arrays)[:CHECKED, :CHECKED], expected(*arrays, factor))
    return float(f"{found:.2e}")


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Return cuBLASLt's time relative to ours, and our rates relative to that of copying."""
    names = [name for name in rows if name.startswith("ejkernel")]
    found = {}
    for kind in ("us", "kernel_us"):
        for name in names:
            pair = rows.get(RIVAL, {}).get(kind), rows[name].get(kind)
            if pair[0] and pair[1]:
                found[f"rival / {name}, {kind}"] = round(pair[0] / pair[1], 3)
    if "gb_per_s" in rows.get("copy", {}):
        rates = {name: rows[name]["gb_per_s"] for name in names if "gb_per_s" in rows[name]}
        found |= {f"{name} / copy, GB/s": round(rate / rows["copy"]["gb_per_s"], 3) for name, rate in rates.items()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it with `--out`; see `run_shapes`."""
    return run_shapes(
        "quantized_matmul",
        __doc__,
        SHAPES,
        CONTENDERS,
        few=OF_SHAPE,
        seconds=60.0,
        measured=measured,
        ratios=ratios,
        argv=argv,
        title=lambda shape: " x ".join(map(str, SHAPES[shape])),
    )


if __name__ == "__main__":
    raise SystemExit(main())
