# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.norms`: normalisations of rows beside the same formulas in plain JAX, which XLA fuses.

The report has the median of the device's own times, and the bandwidth: the bytes that the operation has to read and
write, divided by the time. Nothing is tuned. By default XLA computes short rows, e.g. of heads; for these, our kernel
runs with several parameters, and the report has the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from ejkernel import compat
from ejkernel.kernels._row_norms.plan import SHORT
from ejkernel.modules import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.ops import Invocation

ROUNDS = 15
SHAPES = ((4096, 1024), (16384, 2048), (8192, 3072), (8192, 4096), (16384, 5120), (8192, 7168), (16384, 8192))
SHORT_SHAPES = ((1048576, 64), (524288, 128), (262144, 192), (262144, 256))
SHORT_OCCUPANCIES = (4, 16)
DIRECTIONS = ("forward", "both")
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One normalisation.

    Attributes:
        ours: The module's function of rows, vectors, and the residual if it has one.
        plain: The same in plain JAX.
        vectors: Number of vectors, e.g. weight and bias.
        kernel: The operation behind it.
        residual: Whether it adds a residual.
    """

    ours: Function
    plain: Function
    vectors: int
    kernel: Any
    residual: bool = False


def plain_rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the formula, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def plain_layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Return the formula, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return (centred * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def added(plain: Function) -> Function:
    """Return `plain` of a sum of rows and residual, and the sum itself as a second result."""

    def function(x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        *vectors, residual = rest
        x = x + residual
        return plain(x, *vectors), x

    return function


def ours_added(module: Function) -> Function:
    """Return the module's function with the residual as its last positional argument."""

    def function(*args: jax.Array, **options: Any) -> Any:
        return module(*args[:-1], residual=args[-1], **options)

    return function


OPERATIONS = {
    "rms_norm": Operation(rms_norm, plain_rms_norm, 1, RmsNorm()),
    "rms_norm, residual": Operation(ours_added(rms_norm), added(plain_rms_norm), 1, RmsNorm(), residual=True),
    "layer_norm": Operation(layer_norm, plain_layer_norm, 2, LayerNorm()),
    "layer_norm, residual": Operation(ours_added(layer_norm), added(plain_layer_norm), 2, LayerNorm(), residual=True),
}


def with_gradients(function: Function) -> Function:
    """Return a function that computes output and gradients for given cotangents."""

    def both(cotangents: Any, *args: jax.Array) -> Any:
        out, pull = jax.vjp(function, *args)
        return out, pull(cotangents)

    return both


def measured(operation: Operation, rows: int, dim: int, direction: str) -> dict[str, Any]:
    """Return microseconds of both contenders, and how far their results are apart."""
    sizes = [(rows, dim), *[(dim,)] * operation.vectors, *[(rows, dim)] * operation.residual]
    args: list[Any] = [
        jax.random.normal(jax.random.key(i), size, jnp.bfloat16) + (len(size) == 1) for i, size in enumerate(sizes)
    ]
    outs = (args[0][::-1], args[0]) if operation.residual else args[0][::-1]
    own = [outs, *args] if direction == "both" else args
    expected, xla = timed(operation.plain, own, direction)
    tried = []
    for config in short_configs(operation, args, direction) or [None]:
        options = {} if config is None else {"cfg": config}
        result, us = timed(functools.partial(operation.ours, **options), own, direction)
        difference = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(result, expected, strict=True))
        tried.append((us, difference, str(getattr(config, "bwd" if direction == "both" else "fwd", None))))
    us, difference, params = min(tried)
    arrays = 2 * (1 + operation.residual) + (direction == "both") * (3 + operation.residual)
    found = {"ejkernel": {"us": us}, "xla": {"us": xla}, "difference": difference, "bytes": arrays * rows * dim * 2}
    return found | ({"params": params, "tried": len(tried)} if len(tried) > 1 else {})


def timed(function: Function, own: Sequence[Any], direction: str) -> tuple[list[jax.Array], float]:
    """Return results, and the median of microseconds."""
    program = jax.jit(with_gradients(function) if direction == "both" else function).lower(*own).compile()
    results = jax.tree.leaves(program(*own))
    samples = [compat.executables.cupti_seconds(lambda: program(*own)) or 0.0 for _ in range(ROUNDS)]
    return results, round(1e6 * float(np.median(samples)), 1)


def short_configs(operation: Operation, args: Sequence[Any], direction: str) -> list[Any]:
    """Return configurations of our own kernel for short rows, in the last direction; none for others."""
    if args[0].shape[-1] >= SHORT:
        return []
    vectors, residual = args[: 1 + operation.vectors], args[1 + operation.vectors :]
    prepared, options = operation.kernel.prepare(*vectors, **({"residual": residual[0]} if residual else {}))
    inv = Invocation(kernel=operation.kernel, args=prepared, kwargs=options)
    call, kernel = operation.kernel.call_of(inv), operation.kernel.implementations["mosaic_gpu"]
    backward = dataclasses.replace(call, backward=True)
    last, field = (backward, "bwd") if direction == "both" else (call, "fwd")
    chosen = [params for params in kernel.space(last) if params.occupancy in SHORT_OCCUPANCIES]
    first = {"fwd": kernel.heuristic(call)}
    return [operation.kernel.config_type(implementation="mosaic_gpu", **first | {field: params}) for params in chosen]


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table, a line for each call."""
    lines = ["| | ejkernel, us (TB/s) | plain JAX, us (TB/s) | plain JAX / ejkernel |", "|---|---|---|---|"]
    for call, row in found.items():
        if call != "environment":
            times = [row[name]["us"] for name in ("ejkernel", "xla")]
            cells = [f"{us:,.0f} ({row['bytes'] / us / 1e6:.2f})" for us in times]
            lines.append(f"| {call} | {' | '.join(cells)} | {times[1] / times[0]:.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and keep it with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norms", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write norms_<platform>.json and .md there")
    parser.add_argument("--rows", choices=("long", "short", "all"), default="all", help="which shapes")
    args = parser.parse_args(argv)
    shapes = SHAPES * (args.rows != "short") + SHORT_SHAPES * (args.rows != "long")
    found: dict[str, Any] = {"environment": report.environment()}
    for name, operation in OPERATIONS.items():
        for rows, dim in shapes:
            for direction in DIRECTIONS:
                call = f"{name}, {rows} x {dim}, {direction}"
                found[call] = measured(operation, rows, dim, direction)
                print(call, json.dumps(found[call]), file=sys.stderr, flush=True)
    if args.out is not None:
        name = "norms_short" if args.rows == "short" else "norms"
        report.write(args.out, f"{name}_{report.platform_name()}", found, table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
