# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.split_linear_cross_entropy`: the loss with its gradients on one GPU and split over several.

The weight's vocabulary is sharded over all devices, or the tokens are; nothing is tuned, and there is no `shard_map`.
Programs run in turn in one process. "speedup" is the time on one device relative to the time on all of them, the median
of the rounds' ratios. `errors` are relative to the results of one device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import report
from benchmarks.linear_cross_entropy_hopper import SHAPES, Shape, arrays_of, relative_error, seconds_per_call
from ejkernel.modules import linear_cross_entropy

Run = Callable[[], Any]
SPLITS = {"one device": (None, None), "vocabulary": (None, "all"), "tokens": ("all", None)}


def program(shape: Shape, split: str) -> Run:
    """Return the compiled loss and gradients, with the arrays sharded over their devices."""
    tokens, columns = SPLITS[split]
    count = jax.device_count() if tokens or columns else 1
    mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    weight_spec = P(columns, None) if shape.transpose_weight else P(None, columns)
    specs = (P(tokens, None), weight_spec, P(tokens))
    x, weight, labels, _ = arrays_of(shape)
    given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, weight, labels), specs, strict=True)]

    def loss(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"logits_soft_cap": shape.soft_cap, "transpose_weight": shape.transpose_weight}
        total: jax.Array = linear_cross_entropy(x, weight, labels, **options)
        return total

    with jax.set_mesh(mesh):
        built = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*given).compile()

    def run() -> Any:
        with jax.set_mesh(mesh):
            return built(*given)

    return run


def measured(shape: Shape, rounds: int) -> dict[str, Any]:
    """Return each split's time, its speedup and its errors."""
    runs = {split: program(shape, split) for split in SPLITS}
    results = {split: jax.device_get(run()) for split, run in runs.items()}
    first = jax.tree.leaves(results["one device"])
    samples: dict[str, list[float]] = {split: [] for split in runs}
    for _ in range(rounds):
        for split, run in runs.items():
            samples[split].append(seconds_per_call(run, 3))
            time.sleep(0.2)  # the devices cool down alike
    rows: dict[str, Any] = {}
    for split, found in results.items():
        pairs = zip(samples["one device"], samples[split], strict=True)
        rows[split] = {
            "us": round(1e6 * statistics.median(samples[split]), 1),
            "speedup": round(statistics.median(one / many for one, many in pairs), 3),
            "errors": [
                float(f"{relative_error(jnp.asarray(a), jnp.asarray(b)):.1e}")
                for a, b in zip(jax.tree.leaves(found), first, strict=True)
            ],
        }
    return rows


def table(found: dict[str, Any]) -> str:
    """Return the rows as Markdown."""
    lines = ["| shape | split | us | speedup | errors |", "|---|---|---|---|---|"]
    for name, rows in found["shapes"].items():
        for split, row in rows.items():
            lines.append(f"| {name} | {split} | {row['us']:,} | {row['speedup']} | {row['errors']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table, and write it with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write split_linear_cross_entropy_<device>.json and .md"
    )
    parser.add_argument("--shapes", nargs="*", default=["L", "Q", "G"], choices=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": report.environment() | {"devices": jax.device_count()}, "shapes": {}}
    for name in args.shapes:
        found["shapes"][name] = measured(SHAPES[name], args.rounds)
        if args.out is not None:
            report.write(args.out, f"split_linear_cross_entropy_{report.platform_name()}", found, table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
