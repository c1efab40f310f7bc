# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.quantize`: quantising bfloat16 matrices in blocks, by rows and in both layouts.

"both" is `quantize_both`, with the rows and the columns in 8 bits, "squares" with a scale for 128x128 numbers of the
columns, and "blocks" and "rows" are `quantize` with 1x128 blocks and with a scale for each row. "norm" is `rms_norm`
with its result in 8 bits, from one pass or from two: the result in bfloat16, then its blocks. "copy" negates the
matrix, so it reads and writes bfloat16. Rates count the matrix and the results once. `kernel_us` is the sum of the
kernels of one call, the median of several.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.linear_cross_entropy_hopper import seconds_per_call
from ejkernel import compat
from ejkernel.kernels.quantized_matmul.quantizing.plan import QuantizeParams
from ejkernel.modules import QuantizeConfig, quantize, quantize_both, rms_norm

SHAPES = ((8192, 4096), (8192, 14336), (4096, 7168))
CALLS = 7
Function = Callable[[jax.Array], Any]


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


def measured(shape: tuple[int, int], names: Sequence[str]) -> dict[str, Any]:
    """Return the times of each contender."""
    x = jax.jit(lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16))()
    found: dict[str, Any] = {}
    for name in names:
        function, size = CONTENDERS[name]
        program = jax.jit(function).lower(x).compile()
        run = functools.partial(program, x)
        jax.block_until_ready(run())
        row = {"us": round(1e6 * seconds_per_call(run, 20), 1)}
        time.sleep(0.2)  # the card cools down
        kernels = [compat.cupti_seconds(run) for _ in range(CALLS)] if jax.default_backend() == "gpu" else []
        if kernels and None not in kernels:
            row["kernel_us"] = round(1e6 * float(np.median(np.asarray(kernels, float))), 1)
        found[name] = row | {"gb_per_s": round(shape[0] * shape[1] * size / row.get("kernel_us", row["us"]) / 1e3)}
    return found


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table, a line per shape and contender."""
    lines = ["| | us | kernels us | GB/s |", "|---|---|---|---|"]
    for shape, rows in found.items():
        for name, row in rows.items() if shape != "environment" else ():
            lines.append(f"| {shape}, {name} | {row['us']} | {row.get('kernel_us', '')} | {row['gb_per_s']:,} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantize", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write quantize_<device>.json and .md there")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"environment": report.environment()}
    for shape in SHAPES:
        found[" x ".join(map(str, shape))] = measured(shape, args.contenders)
        print(json.dumps(found), flush=True)
        if args.out is not None:
            report.write(args.out, f"quantize_{report.platform_name()}", found, table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
