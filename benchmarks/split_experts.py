# SPDX-License-Identifier: Apache-2.0
"""Grouped products under `jit` over a mesh of two GPUs or more, beside `jax.lax.ragged_dot`, which XLA splits.

    python -m benchmarks.split_experts --out benchmarks/results

Nothing is tuned, and the program has no `shard_map`. Rounds are interleaved. A ratio is the median over rounds of
`ragged_dot`'s time divided by ours. Group sizes follow Zipf's law, in random order.

On one device: the cost of passing the numbers of the groups to a call with some of the matrices.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.grouped_matmul import SHAPES, Shape, group_sizes, operands, ours
from benchmarks.mesh import Program, seconds
from benchmarks.report import environment
from ejkernel import compat
from ejkernel.modules import grouped_matmul

CALLS = ("8 groups", "64 groups")
SPLITS = {
    "experts": (P(), P("devices"), P()),
    "rows": (P("devices"), P(), P()),
    "rows and experts": (P("devices"), P("devices"), P()),
}


def with_gradients(product: Program) -> Program:
    """Return a product and its gradients."""

    def both(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
        out, pull = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes), lhs, rhs)
        return out, pull(out)

    return both


def difference(left: Any, right: Any) -> float:
    """Return the largest difference of results, as a part of the largest number."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    numbers = [(np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in pairs]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in numbers)


def compiled(program: Program, arrays: list[jax.Array]) -> Program:
    """Return a compiled program that has run once."""
    built: Program = jax.jit(program).lower(*arrays).compile()
    jax.block_until_ready(built(*arrays))
    return built


def interleaved(programs: list[Program], arrays: list[jax.Array], rounds: int) -> tuple[list[float], float]:
    """Return the microseconds of two programs, and the second's as a multiple of the first's."""
    calls = [max(3, round(0.02 / seconds(program, arrays, 3))) for program in programs]
    pairs = [
        [seconds(program, arrays, count) for program, count in zip(programs, calls, strict=True)] for _ in range(rounds)
    ]
    medians = [round(statistics.median(times) * 1e6, 1) for times in zip(*pairs, strict=True)]
    return medians, round(statistics.median(theirs / own for own, theirs in pairs), 3)


def measure(name: str, split: str, direction: str, rounds: int) -> dict[str, Any]:
    """Return times of a split product and of XLA's."""
    shape = SHAPES[name]
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,))
    shapes = ((shape.m, shape.k), (shape.groups, shape.k, shape.n))
    made = [jax.random.normal(jax.random.key(seed), own, jnp.bfloat16) for seed, own in enumerate(shapes)]
    arrays = [*made, jnp.asarray(group_sizes(shape, "zipf"))]
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, SPLITS[split], strict=True)]
    row: dict[str, Any] = {"call": name, "split": split, "direction": direction}
    programs = []
    for product in (grouped_matmul, jax.lax.ragged_dot):
        try:
            programs.append(compiled(with_gradients(product) if direction == "both" else product, given))
        except Exception as error:  # noqa: BLE001 - an error of a contender is its result
            return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    (own, theirs), ratio = interleaved(programs, given, rounds)
    apart = difference(*[program(*given) for program in programs])
    return row | {"ejkernel_us": own, "ragged_dot_us": theirs, "ratio": ratio, "largest_difference": round(apart, 5)}


def measure_part(name: str, direction: str, rounds: int) -> dict[str, Any]:
    """Return the device's own times of a product, and of the same with all groups as a part of the groups."""
    shape = SHAPES[name]
    call, part = ours(shape, direction), {"first_group": jnp.int32(0)}
    more = {"groups": shape.groups} if direction == "wgrad" else {}
    shapes = operands(shape, direction)
    made = [jax.random.normal(jax.random.key(seed), own, jnp.bfloat16) for seed, own in enumerate(shapes)]
    arrays = [*made, jnp.asarray(group_sizes(shape, "zipf")), part["first_group"]]
    programs = [
        compiled(lambda lhs, rhs, sizes, _: call(lhs, rhs, sizes), arrays),
        compiled(lambda lhs, rhs, sizes, first: call(lhs, rhs, sizes, first_group=first, **more), arrays),
    ]
    samples = [
        [compat.executables.cupti_seconds(functools.partial(p, *arrays)) or 0.0 for p in programs]
        for _ in range(rounds)
    ]
    whole, some = (round(statistics.median(times) * 1e6, 1) for times in zip(*samples, strict=True))
    apart = difference(*[program(*arrays) for program in programs])
    figures = {"plain_us": whole, "first_group_us": some, "ratio": round(some / whole, 3)}
    return {"call": name, "direction": direction} | figures | {"largest_difference": round(apart, 5)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| call, bfloat16 | split by | | ejkernel, us | ragged_dot, us | ratio |", "|---|---|---|---|---|---|"]
    for row in rows:
        direction = {"forward": "forward", "both": "forward and backward"}[row["direction"]]
        figures = (
            f"failed: {row['failed']} | |"
            if "failed" in row
            else f"{row['ejkernel_us']:,.0f} | {row['ragged_dot_us']:,.0f} | {row['ratio']:.2f}"
        )
        lines.append(f"| {described(SHAPES[row['call']])} | {row['split']} | {direction} | {figures} |")
    return "\n".join(lines)


def described(shape: Shape) -> str:
    """Return a shape in words."""
    return f"{shape.m} rows, {shape.k} to {shape.n}, {shape.groups} groups"


def table_of_parts(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `measure_part` as Markdown."""
    lines = ["| call on one device, bfloat16 | | plain, us | with first_group, us | ratio |", "|---|---|---|---|---|"]
    lines += [
        f"| {described(SHAPES[row['call']])} | {row['direction']} | {row['plain_us']:,.1f} | "
        f"{row['first_group_us']:,.1f} | {row['ratio']:.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure on as many devices as there are, print the results and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    over_mesh = jax.device_count() > 1
    found = over_a_mesh(args.rounds) if over_mesh else of_parts(args.rounds)
    result: dict[str, Any] = {"environment": environment(), "devices": jax.device_count(), "rows": []}
    for row in found:
        print(row, flush=True)
        result["rows"].append(row)
        if args.out is not None:
            keep(result, args.out / ("experts_gpu" if over_mesh else "first_group_gpu"))


def over_a_mesh(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the times of split products."""
    for split in SPLITS:
        for name in CALLS:
            for direction in ("forward", "both"):
                yield measure(name, split, direction, rounds)


def of_parts(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the times of products on one device."""
    for name in (*CALLS, "256 groups, decoding"):
        for direction in ("forward", "dgrad", "wgrad"):
            yield measure_part(name, direction, rounds)


def keep(result: dict[str, Any], path: Path) -> None:
    """Write the results, as JSON and as a table."""
    said = ", ".join(f"{name} {value}" for name, value in result["environment"].items())
    made = table if result["devices"] > 1 else table_of_parts
    title = "over a mesh of devices" if result["devices"] > 1 else "with the numbers of their groups"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(
        f"# Grouped products {title}\n\n`python -m benchmarks.split_experts`, {result['devices']} devices; {said}.\n\n"
        f"{made(result['rows'])}\n"
    )


if __name__ == "__main__":
    main()
