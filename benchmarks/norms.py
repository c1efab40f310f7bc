# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.norms`: normalisations of rows beside the same formulas in plain JAX, which XLA fuses.

What is reported is the median of the device's own times, and how many bytes a second that is: of those that the
operation has to read and write, whatever a contender reads twice.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from ejkernel.modules import layer_norm, rms_norm

ROUNDS = 15
SHAPES = ((4096, 1024), (16384, 2048), (8192, 3072), (8192, 4096), (16384, 5120), (8192, 7168), (16384, 8192))
DIRECTIONS = ("forward", "both")
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One normalisation.

    Attributes:
        ours: The module's, of rows, vectors, and what is added to the rows, if it is.
        plain: The same in plain JAX.
        vectors: How many there are.
        residual: Whether something is added.
    """

    ours: Function
    plain: Function
    vectors: int
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
    """Return the same of a sum, which is a result, too."""

    def function(x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        *vectors, residual = rest
        x = x + residual
        return plain(x, *vectors), x

    return function


OPERATIONS = {
    "rms_norm": Operation(rms_norm, plain_rms_norm, 1),
    "rms_norm, residual": Operation(lambda x, w, r: rms_norm(x, w, residual=r), added(plain_rms_norm), 1, True),
    "layer_norm": Operation(layer_norm, plain_layer_norm, 2),
    "layer_norm, residual": Operation(
        lambda x, w, b, r: layer_norm(x, w, b, residual=r), added(plain_layer_norm), 2, True
    ),
}


def with_gradients(function: Function) -> Function:
    """Return output and gradients for cotangents that are given."""

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
    found: dict[str, Any] = {}
    results = {}
    for name, function in (("ejkernel", operation.ours), ("xla", operation.plain)):
        own = [outs, *args] if direction == "both" else args
        program = jax.jit(with_gradients(function) if direction == "both" else function).lower(*own).compile()
        results[name] = jax.tree.leaves(program(*own))
        samples = [compat.cupti_seconds(lambda p=program, own=own: p(*own)) or 0.0 for _ in range(ROUNDS)]
        found[name] = {"us": round(1e6 * float(np.median(samples)), 1)}
    pairs = zip(*results.values(), strict=True)
    found["difference"] = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
    arrays = 2 * (1 + operation.residual) + (direction == "both") * (3 + operation.residual)
    found["bytes"] = arrays * rows * dim * 2
    return found


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
    parser.add_argument("--out", type=Path, metavar="DIR", help="write norms_<device>.json and .md there")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"environment": report.environment()}
    for name, operation in OPERATIONS.items():
        for rows, dim in SHAPES:
            for direction in DIRECTIONS:
                call = f"{name}, {rows} x {dim}, {direction}"
                found[call] = measured(operation, rows, dim, direction)
                print(call, json.dumps(found[call]), file=sys.stderr, flush=True)
    if args.out is not None:
        report.write(args.out, f"norms_{report.platform_name()}", found, table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
