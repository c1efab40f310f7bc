# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.quantized_activation`: gated activations of 8-bit products, quantised in the same kernel.

`silu(x @ w) * (x @ gate)` in float8, with a scale for 128 columns of a row, from operands with scales of rows and
columns ("rows") or of blocks ("blocks"). "wide" is the same kernel with a result in bfloat16. "apart" is what a layer
does otherwise: a product with both matrices joined, whose bfloat16 result XLA activates and our kernel quantises.
"bfloat16" is our gated kernel on bfloat16 operands, and the same kernel that quantises. Decoding has rows of bfloat16
by 8-bit matrices ("bfloat16 by int8") and a result in bfloat16; "xla" is our plain JAX. Rates count the bytes of both
matrices. `benchmarks.quantized` times the contenders. `errors`
are norms relative to the float32 activation of the dequantised operands in some rows; rounding to 8 bits is most of
them. "name / rows" is the time of a contender relative to that of the kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.linear_cross_entropy_hopper import relative_error
from benchmarks.quantized import Function, add_rates, run_contenders, run_shapes
from benchmarks.quantized_grouped_matmul import COLUMNS, ROWS, Shape, expected, sizes_of
from ejkernel.modules import Quantized, grouped_matmul, quantize, quantized_matmul

E4M3 = "float8_e4m3fn"
FEW_ROWS = 64  # for each matrix: with so many, reading matrices takes the time

SHAPES = {
    "8 groups": Shape(8192, 14336, 4096, 8),
    "dense": Shape(8192, 14336, 4096, 1),
    "128 groups": Shape(65536, 1536, 4096, 128),
    "decode": Shape(64, 28672, 8192, 1),
    "decode, short": Shape(64, 14336, 4096, 1),
    "decode, 8 groups": Shape(128, 14336, 4096, 8),
    "decode, 128 groups": Shape(512, 1536, 4096, 128),
    "tiny": Shape(200, 72, 300, 5),
}


def fused(
    x: Any, w: Any, gate: Any, joined: Any, sizes: jax.Array, *, quantize: str | None = E4M3, by: str = "mosaic_gpu"
) -> Any:
    """Return the gated activation by one kernel, or by plain JAX."""
    del joined
    how: dict[str, Any] = {"activation": "silu", "quantize": quantize, "implementation": by}
    if len(sizes) == 1:
        parts = [Quantized(array.values[0], array.scale[0], array.block[1:]) for array in (w, gate)]
        return quantized_matmul(x, parts[0], gate=parts[1], transpose_w=True, **how)
    return grouped_matmul(x, w, sizes, gate=gate, transpose_rhs=True, **how)


def apart(x: Any, w: Any, gate: Any, joined: Any, sizes: jax.Array, *, quantized: bool = True) -> Any:
    """Return the same by a product with both matrices, and an activation that may be quantised afterwards."""
    del w, gate
    if len(sizes) == 1:
        whole = Quantized(joined.values[0], joined.scale[0], joined.block[1:])
        out = quantized_matmul(x, whole, transpose_w=True, implementation="mosaic_gpu")
    else:
        out = grouped_matmul(x, joined, sizes, transpose_rhs=True, implementation="mosaic_gpu")
    first, second = jnp.split(out, 2, axis=1)
    found = jax.nn.silu(first) * second
    return quantize(found, block=128) if quantized else found


def from_bfloat16(x: Any, w: Any, gate: Any, joined: Any, sizes: jax.Array) -> Quantized:
    """Return the same by the gated kernel on bfloat16 operands, quantised afterwards."""
    del joined
    how: dict[str, Any] = {"activation": "silu", "transpose_rhs": True, "implementation": "mosaic_gpu"}
    return quantize(grouped_matmul(x, w, sizes, gate=gate, **how), block=128)


CONTENDERS: dict[str, Function] = {
    "rows": fused,
    "blocks": fused,
    "rows, wide": functools.partial(fused, quantize=None),
    "blocks, wide": functools.partial(fused, quantize=None),
    "rows, apart": apart,
    "blocks, apart": apart,
    "bfloat16": from_bfloat16,
    **{
        f"bfloat16 by {name}{more}": functools.partial(function, **options)
        for name in ("int8", "float8")
        for more, function, options in (
            ("", fused, {"quantize": None}),
            (", apart", apart, {"quantized": False}),
            (", xla", fused, {"quantize": None, "by": "xla"}),
        )
    },
}
MANY_ROWS = tuple(CONTENDERS)[:7]
DECODE = tuple(CONTENDERS)[7:]


@functools.partial(jax.jit, static_argnums=(0, 1))
def operands(shape: Shape, kind: str, positive: bool | jax.Array) -> tuple[Any, ...]:
    """Return rows, both matrices of each group, and these joined: in bfloat16, or quantised."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    sizes = (shape.m, shape.k), *[(shape.groups, shape.n, shape.k)] * 2
    made = [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]
    x, *matrices = (jnp.where(positive, jnp.abs(array), array) for array in made)
    if kind == "bfloat16":
        return x, *matrices, None
    joined = jnp.concatenate(matrices, axis=1)
    own: dict[str, Any] = {"block": 128, "axis": (1, 2)} if kind == "blocks" else {}
    if kind.startswith("bfloat16 by"):
        own = {"dtype": "int8" if kind.endswith("int8") else E4M3}
        return x, *(quantize(array, **own) for array in (*matrices, joined))
    rows: dict[str, Any] = {"block": 128} if kind == "blocks" else {}
    return quantize(x, **rows), *(quantize(array, **own) for array in (*matrices, joined))


def measured(shape: Shape, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the figures of each contender, or the reason for having none; print what is known so far."""
    found = run_contenders(
        names,
        CONTENDERS.__getitem__,
        lambda name: name.split(",")[0],
        lambda kind, positive: (*operands(shape, kind, positive), sizes_of(shape)),
        functools.partial(error, shape),
        seconds=seconds,
        flops=4.0 * math.prod(shape[:3]),
    )
    if shape.m <= FEW_ROWS * shape.groups:
        add_rates(found, lambda name: 2.0 * math.prod(shape[1:]))
    return found


def error(shape: Shape, name: str, program: Function, arrays: Any) -> float:
    """Return a contender's error in some rows."""
    x, w, gate, _, sizes = arrays
    rows = jnp.linspace(0, shape.m - 4, ROWS).astype(jnp.int32)
    groups = jnp.searchsorted(jnp.cumsum(sizes), rows, side="right")
    # `expected` takes bfloat16 matrices as [groups, k, n].
    matrices = [each if isinstance(each, Quantized) else each.swapaxes(1, 2) for each in (w, gate)]
    products = [expected(x, each, rows, groups) for each in matrices]
    out = program(*arrays)
    quantized = isinstance(out, Quantized)
    some = Quantized(out.values[rows], out.scale[rows], out.block).dequantize() if quantized else out[rows]
    return float(f"{relative_error(some[:, :COLUMNS], jax.nn.silu(products[0]) * products[1]):.2e}")


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Return the times of the other ways relative to those of the kernels."""
    kinds = ("rows", "blocks", "bfloat16 by int8", "bfloat16 by float8")
    pairs = [(f"{own}, {other}", own) for other in ("wide", "apart", "xla") for own in kinds]
    pairs += [("bfloat16", "rows"), ("bfloat16", "blocks")]
    found = {}
    for kind in ("us", "kernel_us"):
        for other, own in pairs:
            pair = rows.get(other, {}).get(kind), rows.get(own, {}).get(kind)
            if pair[0] and pair[1]:
                found[f"{other} / {own}, {kind}"] = round(pair[0] / pair[1], 3)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it with `--out`; see `run_shapes`."""
    return run_shapes(
        "quantized_activation",
        __doc__,
        SHAPES,
        CONTENDERS,
        few={name: DECODE if name.startswith("decode") else MANY_ROWS for name in list(SHAPES)[:7]},
        seconds=45.0,
        measured=measured,
        ratios=ratios,
        argv=argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
