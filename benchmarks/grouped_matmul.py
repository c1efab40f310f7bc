# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.grouped_matmul`: grouped products beside the alternatives of JAX users, and a dense product.

"gated" is `silu(x @ w1) * (x @ w3)` with two matrices for each group, and "gated, trained" the same with the gradients
of all three; n is the length of its rows.

Each contender runs each call in a separate process with a time limit; only one at a time uses the device. Operands are
normally distributed. Group sizes are equal, follow Zipf's law, or follow Dirichlet's distribution, as if all ways to
divide the rows were equally likely. Some rows of each result are compared with NumPy's.
The report has medians of the device's own times.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fcntl
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.apart import run_apart
from ejkernel import compat
from ejkernel.modules import grouped_matmul, grouped_matmul_wgrad

OURS = "ejkernel"
ROUNDS = 15
KINDS = ("even", "zipf", "dirichlet", "dirichlet, second draw")  # of group sizes
Function = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call: rows, their length, the products' length, groups."""

    m: int
    k: int
    n: int
    groups: int


SHAPES = {
    "8 groups": Shape(m=8192, k=4096, n=4096, groups=8),
    "64 groups": Shape(m=16384, k=2048, n=2048, groups=64),
    "256 groups": Shape(m=131072, k=7168, n=2048, groups=256),
    "128 groups": Shape(m=131072, k=4096, n=1536, groups=128),
    "32 groups": Shape(m=16384, k=2880, n=2880, groups=32),
    "128 groups, 65,536 rows": Shape(m=65536, k=4096, n=1536, groups=128),
    "128 groups, 32,768 rows": Shape(m=32768, k=4096, n=1536, groups=128),
    "128 groups, 16,384 rows": Shape(m=16384, k=4096, n=1536, groups=128),
    "256 groups, 65,536 rows": Shape(m=65536, k=7168, n=2048, groups=256),
    "256 groups, decoding": Shape(m=256, k=7168, n=2048, groups=256),
}
PRODUCTS = {"forward": 1, "dgrad": 1, "wgrad": 1, "gated": 2, "gated, trained": 6}  # by direction, how many it takes


def operands(shape: Shape, direction: str) -> tuple[tuple[int, ...], ...]:
    """Return the operands' shapes."""
    rows = (shape.m, shape.n if direction == "dgrad" else shape.k)
    if direction == "wgrad":
        return rows, (shape.m, shape.n)
    return (rows, *[(shape.groups, shape.k, shape.n)] * (2 if "gated" in direction else 1))


def group_sizes(shape: Shape, kind: str) -> np.ndarray[Any, Any]:
    """Return equal group sizes, or random ones: after Zipf's law, or Dirichlet's distribution with parameters 1."""
    if kind == "even":
        return np.full(shape.groups, shape.m // shape.groups, np.int32)
    seeds = {"zipf": 7, "dirichlet": 0, "dirichlet, second draw": 1}
    rng, ones = np.random.default_rng(seeds[kind]), np.ones(shape.groups)
    weights = rng.permutation(1 / ones.cumsum()) if kind == "zipf" else rng.dirichlet(ones)
    return rng.multinomial(shape.m, weights / weights.sum()).astype(np.int32)


def gated(product: Function, direction: str) -> Function:
    """Return the gated activation of two products, which JAX fuses, with or without gradients."""

    def fused(lhs: jax.Array, rhs: jax.Array, gate: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.nn.silu(product(lhs, rhs, sizes)) * product(lhs, gate, sizes)

    return fused if direction == "gated" else trained(fused)


def trained(function: Function) -> Function:
    """Return a function with its gradients."""

    def with_gradients(lhs: jax.Array, rhs: jax.Array, gate: jax.Array, sizes: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *arrays: function(*arrays, sizes), lhs, rhs, gate)
        return out, pull(jax.lax.optimization_barrier(out))  # in a program other layers lie between

    return with_gradients


def ours(shape: Shape, direction: str, *, implementation: str | None = None) -> Function:
    """Return the module's call, untuned."""
    if "gated" in direction:

        def fused(lhs: jax.Array, rhs: jax.Array, gate: jax.Array, sizes: jax.Array) -> jax.Array:
            return grouped_matmul(lhs, rhs, sizes, gate=gate, activation="silu", implementation=implementation)

        return fused if direction == "gated" else trained(fused)
    if direction == "wgrad":
        return functools.partial(grouped_matmul_wgrad, implementation=implementation)
    return functools.partial(grouped_matmul, transpose_rhs=direction == "dgrad", implementation=implementation)


def two_calls(shape: Shape, direction: str) -> Function:
    """Return the gated activation of two calls of our product."""
    return gated(grouped_matmul, direction)


def ragged_dot(shape: Shape, direction: str) -> Function:
    """Return XLA's product."""
    if "gated" in direction:
        return gated(jax.lax.ragged_dot, direction)
    numbers = _dimension_numbers(direction)
    return lambda lhs, rhs, sizes: jax.lax.ragged_dot_general(lhs, rhs, sizes, numbers)


def _dimension_numbers(direction: str) -> jax.lax.RaggedDotDimensionNumbers:
    axes, of_group = {
        "forward": (((1,), (1,)), [0]),
        "dgrad": (((1,), (2,)), [0]),
        "wgrad": (((0,), (0,)), []),
    }[direction]
    return jax.lax.RaggedDotDimensionNumbers((axes, ((), ())), [0], of_group)


def by_tokamax(shape: Shape, direction: str, *, implementation: str | None = None) -> Function:
    """Return Tokamax's product, by its default choice or by one implementation; needs Tokamax."""
    import tokamax

    if "gated" in direction:
        return gated(functools.partial(tokamax.ragged_dot, implementation=implementation), direction)
    return functools.partial(
        tokamax.ragged_dot_general,
        ragged_dot_dimension_numbers=_dimension_numbers(direction),
        implementation=implementation,
    )


def by_jax(shape: Shape, direction: str) -> Function:
    """Return the kernel that JAX ships for Hopper, with the fastest of the layouts that we tried."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    tiles = {"block_m": 128, "block_n": 128, "block_k": 64}
    layout: dict[str, Any] = {**tiles, "max_concurrent_steps": 4, "grid_block_n": 16}
    if direction == "wgrad":
        return lambda lhs, rhs, sizes: transposed_ragged_dot_mgpu.transposed_ragged_dot(
            lhs, rhs, group_sizes=sizes, **layout
        )
    if shape.m // shape.groups < 128:
        layout["block_m"] = 64
    if direction == "gated":
        return gated(
            lambda lhs, rhs, sizes: ragged_dot_mgpu.ragged_dot(lhs, rhs, group_sizes=sizes, **layout), direction
        )
    return lambda lhs, rhs, sizes: ragged_dot_mgpu.ragged_dot(
        lhs, rhs, group_sizes=sizes, transpose_rhs=direction == "dgrad", **layout
    )


def dense(shape: Shape, direction: str) -> Function:
    """Return one product of as much work, for each."""
    if "gated" in direction:
        return gated(lambda lhs, rhs, sizes: jnp.dot(lhs, rhs[0]), direction)
    if direction == "wgrad":
        return lambda lhs, rhs, sizes: jnp.dot(lhs.T, rhs)
    return lambda lhs, rhs, sizes: jnp.dot(lhs, rhs[0] if direction == "forward" else rhs[0].T)


CONTENDERS: dict[str, Callable[[Shape, str], Function]] = {
    OURS: ours,
    "two calls": two_calls,
    "xla": functools.partial(ours, implementation="xla"),
    "jax mgpu": by_jax,
    "ragged_dot": ragged_dot,
    "tokamax": by_tokamax,
    "tokamax triton": functools.partial(by_tokamax, implementation="triton"),
    "dense": dense,
}
RIVALS = ("jax mgpu", "ragged_dot", "tokamax", "tokamax triton")


def measured(shape: Shape, direction: str, contender: str, lock: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Return microseconds and errors of one contender, by kind of sizes; a dense product has one kind."""
    types = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in operands(shape, direction)]
    sizes = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    with lock.open("w") as file:
        if contender in ("dense", "ragged_dot", "xla"):  # XLA times candidates on the device while it compiles
            fcntl.flock(file, fcntl.LOCK_EX)
        program = jax.jit(CONTENDERS[contender](shape, direction)).lower(*types, sizes).compile()
        fcntl.flock(file, fcntl.LOCK_EX)
        draw = jax.jit(lambda key, like: jax.random.normal(key, like, jnp.bfloat16), static_argnums=1)
        arrays = [draw(jax.random.key(seed), x.shape) for seed, x in enumerate(types)]
        if "gated" in direction:
            arrays[0] /= shape.k**0.5
        found = {}
        for kind in kinds if contender != "dense" else ("even",):
            own = jnp.asarray(group_sizes(shape, kind))
            out = jax.tree.leaves(program(*arrays, own))[0]
            error = None if contender == "dense" else error_of((*arrays, np.asarray(own), out), direction)
            samples = [
                compat.executables.cupti_seconds(functools.partial(program, *arrays, own)) or 0.0 for _ in range(ROUNDS)
            ]
            found[kind] = {"us": round(1e6 * float(np.median(samples)), 1), "error": error}
        return found


def error_of(arrays: tuple[Any, ...], direction: str) -> float:
    """Return the relative error of a sample of the result: some rows of some groups."""
    lhs, rhs, *gates, sizes, out = arrays
    ends, errors = np.cumsum(sizes), [0.0]
    if direction == "wgrad":
        lhs, rhs = (np.asarray(x, np.float32) for x in (lhs[:, :64], rhs[:, :128]))
    for group in np.flatnonzero(sizes)[:: max(1, len(sizes) // 6)]:
        start, end, at = int(ends[group] - sizes[group]), int(ends[group]), np.array([group])
        if direction == "wgrad":
            expected = lhs[start:end].T @ rhs[start:end]
            actual = np.asarray(jnp.take(out, at, axis=0)[0, :64, :128], np.float32)
        else:
            rows = np.linspace(start, end - 1, 16).astype(int)
            matrix = np.asarray(jnp.take(rhs, at, axis=0)[0], np.float32)
            left, actual = (np.asarray(jnp.take(x, rows, axis=0), np.float32) for x in (lhs, out))
            expected = left @ (matrix.T if direction == "dgrad" else matrix)
            for gate in gates:
                matrix = np.asarray(jnp.take(gate, at, axis=0)[0], np.float32)
                expected *= (left @ matrix) / (1 + np.exp(-expected))
        errors.append(float(np.linalg.norm(actual - expected) / np.linalg.norm(expected)))
    worst = float(np.max(errors))  # NaN, if one of them is
    return round(worst, 5)


def measured_apart(job: tuple[str, str, str], lock: Path, seconds: float, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the result of measuring in a separate process, or the reason for having none."""
    given = ("--one", *job, str(lock), "--kinds", *kinds)
    lines, reason = run_apart("benchmarks.grouped_matmul", *given, seconds=seconds)
    if reason:
        return {"reason": reason}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table, a line for each call and kind of sizes."""
    lines = [
        f"| | {' | '.join(f'{name}, us (TFLOP/s)' for name in CONTENDERS)} | best other / ours | dense / ours |",
        "|---" * (len(CONTENDERS) + 3) + "|",
    ]
    for call, contenders in found.items():
        if call == "environment":
            continue
        shape = SHAPES[call.split(" | ")[0]]
        flops = 2 * shape.m * shape.k * shape.n * PRODUCTS[call.split(" | ")[1]]
        for kind in KINDS:
            times = {name: row[kind]["us"] for name, row in contenders.items() if kind in row}
            dense_us, own = contenders.get("dense", {}).get("even", {}).get("us"), times.get(OURS)
            rivals = [times[name] for name in RIVALS if name in times]
            cells = [f"{times[n]:,.0f} ({flops / times[n] / 1e6:,.0f})" if n in times else "" for n in CONTENDERS]
            ratios = [f"{x / own:.2f}" if own and x else "" for x in (min(rivals, default=None), dense_us)]
            lines.append(f"| {call.replace(' | ', ', ')}, {kind} | {' | '.join([*cells, *ratios])} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and keep it with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped_matmul", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write grouped_matmul_<device>.json and .md there")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--directions", nargs="*", default=list(PRODUCTS), choices=list(PRODUCTS), metavar="DIRECTION")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of one process (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="processes that compile at once (default: %(default)s)")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        shape, direction, contender, lock = args.one
        print(json.dumps(measured(SHAPES[shape], direction, contender, Path(lock), args.kinds)))
        return 0
    found: dict[str, Any] = {"environment": report.environment()}
    jobs = [(s, d, c) for s in args.shapes for d in args.directions for c in args.contenders if worth(s, d, c)]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        lock = Path(folder) / "device"
        measure = functools.partial(measured_apart, lock=lock, seconds=args.seconds, kinds=args.kinds)
        results = pool.map(measure, jobs)
        for (shape, direction, contender), result in zip(jobs, results, strict=True):
            found.setdefault(f"{shape} | {direction}", {})[contender] = result
            print(shape, direction, contender, json.dumps(result), file=sys.stderr, flush=True)
            if args.out is not None:  # save after each result, since a later one may end the process
                report.write(args.out, f"grouped_matmul_{report.platform_name()}", found, table(found))
    print(table(found))
    return 0


def worth(shape: str, direction: str, contender: str) -> bool:
    """Return whether it exists, and can be waited for: XLA's product takes seconds for many rows of many groups."""
    heavy = SHAPES[shape].m * SHAPES[shape].groups > 1 << 23
    made = contender != "two calls" or "gated" in direction
    has_gradient = contender != "jax mgpu" or direction != "gated, trained"
    in_use = "decoding" not in shape or direction not in ("wgrad", "gated, trained")
    return made and has_gradient and in_use and not (contender == "ragged_dot" and heavy)


if __name__ == "__main__":
    raise SystemExit(main())
