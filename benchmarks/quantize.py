# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.quantize`: quantising bfloat16 matrices in blocks, by rows and in both layouts.

"both" is `quantize_both`, with the rows and the columns in 8 bits, "squares" with a scale for 128x128 numbers of the
columns, and "blocks" and "rows" are `quantize` with 1x128 blocks and with a scale for each row. "norm" is `rms_norm`
with its result in 8 bits, from one pass or from two: the result in bfloat16, then its blocks. "copy" negates the
matrix, so it reads and writes bfloat16. `benchmarks.quantized` times the contenders. Rates count the matrix and the
results once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.quantized import Function, add_rates, run_contenders, run_shapes
from ejkernel.kernels.quantized_matmul.quantizing.plan import QuantizeParams
from ejkernel.modules import QuantizeConfig, quantize, quantize_both, rms_norm

SHAPES = {"8192 x 4096": (8192, 4096), "8192 x 14336": (8192, 14336), "4096 x 7168": (4096, 7168)}


def ours(**params: int) -> Function:
    """Return our kernel with given parameters."""
    return functools.partial(
        quantize_both, cfg=QuantizeConfig(implementation="mosaic_gpu", fwd=QuantizeParams(**params))
    )


def norm(x: jax.Array, **options: Any) -> Any:
    """Return the normalised rows, with a weight of ones."""
    return rms_norm(x, jnp.ones(x.shape[-1], x.dtype), **options)


CONTENDERS: dict[str, tuple[Function, int]] = {  # with the bytes per number
    "both": (quantize_both, 4),
    "both, xla": (functools.partial(quantize_both, implementation="xla"), 4),
    "both, squares": (functools.partial(quantize_both, square=True), 4),
    "both, 1 tile, 3 blocks": (ours(tiles=1, blocks=3), 4),
    "blocks": (lambda x: quantize(x, block=128), 3),
    "rows": (quantize, 3),
    "norm": (lambda x: norm(x, quantize="float8_e4m3fn"), 3),
    "norm, xla": (lambda x: norm(x, quantize="float8_e4m3fn", implementation="xla"), 3),
    "norm, then blocks": (lambda x: quantize(norm(x), block=128), 3),
    "copy": (lambda x: -x, 4),
}


def measured(shape: tuple[int, int], names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the times of each contender, or the reason for having none."""

    def operands(kind: str, positive: bool) -> tuple[jax.Array]:
        return (jax.random.normal(jax.random.key(0), shape, jnp.bfloat16),)

    found = run_contenders(
        names,
        lambda name: CONTENDERS[name][0],
        lambda name: "bfloat16",
        operands,
        lambda name, program, arrays: None,
        seconds=seconds,
    )
    add_rates(found, lambda name: math.prod(shape) * CONTENDERS[name][1])
    return found


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Return our rates relative to that of copying."""
    rates = {name: row["gb_per_s"] for name, row in rows.items() if "gb_per_s" in row}
    copied = rates.pop("copy", 0)
    return {f"{name} / copy, GB/s": round(rate / copied, 3) for name, rate in rates.items() if copied}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it with `--out`; see `run_shapes`."""
    return run_shapes(
        "quantize",
        __doc__,
        SHAPES,
        CONTENDERS,
        few=dict.fromkeys(SHAPES, tuple(CONTENDERS)),
        seconds=60.0,
        measured=measured,
        ratios=ratios,
        argv=argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
