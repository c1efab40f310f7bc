# SPDX-License-Identifier: Apache-2.0
"""Attention under `jit` over a mesh of two GPUs or more, beside `jax.nn` with cuDNN, which XLA partitions.

    python -m benchmarks.mesh --out benchmarks/results

Nothing is tuned, and the program has no `shard_map`. Rounds are interleaved. A ratio is the median over rounds of
`jax.nn`'s time divided by ours. In explicit mode `jax.nn` may not run; then its time in automatic mode counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.report import environment
from ejkernel.modules import flash_attention

CALLS = {  # batch, length, heads, key heads, head dimension
    "B8 T4096 H32/8 D128": (8, 4096, 32, 8, 128),
    "B16 T2048 H16/8 D64": (16, 2048, 16, 8, 64),
}
SPLITS = {"batch": P("devices"), "heads": P(None, None, "devices")}
MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
Program = Callable[..., Any]


def ours(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of ejkernel."""
    return flash_attention(query, key, value, causal=True)


def theirs(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of JAX, with cuDNN."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def with_gradient(attention: Program) -> Program:
    """Return attention and its gradients."""

    def both(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        out, pull = jax.vjp(attention, query, key, value)
        return out, pull(out)

    return both


def arrays(call: tuple[int, ...], mesh: Any, spec: P) -> list[jax.Array]:
    """Return query, key and value, sharded."""
    batch, length, heads, groups, dim = call
    shapes = [(batch, length, n, dim) for n in (heads, groups, groups)]
    made = [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed, shape in enumerate(shapes)]
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in made]


def compiled(program: Program, call: tuple[int, ...], mode: str, spec: P) -> tuple[Program, list[jax.Array]] | str:
    """Return a compiled program with its arguments, or why it does not compile."""
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(MODES[mode],))
    with jax.set_mesh(mesh):
        given = arrays(call, mesh, spec)
        try:
            built = jax.jit(program).lower(*given).compile()
        except Exception as error:  # noqa: BLE001 - an error of a contender is its result
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        jax.block_until_ready(built(*given))
    return built, given


def seconds(program: Program, given: list[jax.Array], calls: int) -> float:
    """Return how long one of so many calls takes."""
    started = time.perf_counter()
    for _ in range(calls):
        out = program(*given)
    jax.block_until_ready(out)
    return (time.perf_counter() - started) / calls


def measure(name: str, split: str, mode: str, direction: str, rounds: int) -> dict[str, Any]:
    """Return interleaved times of both, and their ratio."""
    change: Callable[[Program], Program] = with_gradient if direction == "both" else lambda program: program
    row: dict[str, Any] = {"call": name, "split": split, "mode": mode, "direction": direction}
    own = compiled(change(ours), CALLS[name], mode, SPLITS[split])
    other = compiled(change(theirs), CALLS[name], mode, SPLITS[split])
    if isinstance(other, str):
        row["jax.nn, explicit"] = other
        other = compiled(change(theirs), CALLS[name], "auto", SPLITS[split])
    if isinstance(own, str) or isinstance(other, str):
        return row | {"failed": [x for x in (own, other) if isinstance(x, str)]}
    apart = [
        float(jnp.max(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32))))
        for x, y in zip(jax.tree.leaves(own[0](*own[1])), jax.tree.leaves(other[0](*other[1])), strict=True)
    ]
    calls = max(5, round(0.05 / seconds(*own, 5)))
    pairs = [(seconds(*own, calls), seconds(*other, calls)) for _ in range(rounds)]
    return row | {
        "ejkernel_us": round(statistics.median(a for a, _ in pairs) * 1e6, 1),
        "jax.nn_us": round(statistics.median(b for _, b in pairs) * 1e6, 1),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "largest_difference": max(apart),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| call, bfloat16, causal | split by | mode | | ejkernel, us | jax.nn with cuDNN, us | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        direction = {"forward": "forward", "both": "forward and backward"}[row["direction"]]
        figures = (
            f"failed: {row['failed']} | |"
            if "failed" in row
            else (f"{row['ejkernel_us']:,.0f} | {row['jax.nn_us']:,.0f} | {row['ratio']:.3f}")
        )
        lines.append(f"| {row['call']} | {row['split']} | {row['mode']} | {direction} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Measure everything, print it, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = []
    for name in CALLS:
        for split in SPLITS:
            for mode in MODES:
                for direction in ("forward", "both"):
                    rows.append(measure(name, split, mode, direction, args.rounds))
                    print(rows[-1], flush=True)
                    result: dict[str, Any] = {"environment": environment(), "devices": jax.device_count(), "rows": rows}
                    if args.out is not None:
                        text = f"# Attention over a mesh of {jax.device_count()} devices\n\n`python -m benchmarks.mesh`"
                        described = ", ".join(f"{k} {v}" for k, v in result["environment"].items())
                        args.out.mkdir(parents=True, exist_ok=True)
                        (args.out / "mesh_gpu.json").write_text(json.dumps(result, indent=1) + "\n")
                        (args.out / "mesh_gpu.md").write_text(f"{text}; {described}.\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
