# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is sharded over all devices, beside the whole sequence on one device.

    python -m benchmarks.context_parallel --out benchmarks/results
    python -m benchmarks.context_parallel --cpu-devices 2 --length 512 --rounds 2   # whether it works

Nothing is tuned. Rounds are interleaved. The speed-up is the median over rounds of one device's time divided by that of
all devices.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.mesh import seconds, with_gradient
from benchmarks.report import environment
from ejkernel.modules import flash_attention, from_zigzag, to_zigzag

CALLS: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # heads, key heads, head dimension, options
    "causal, zig-zag": (16, 8, 128, {"causal": True, "zigzag": True}),
    "causal": (16, 8, 128, {"causal": True}),
    "causal, zig-zag, gathered": (16, 8, 128, {"causal": True, "zigzag": True, "gather_keys": True}),
    "causal, zig-zag, one key head": (16, 1, 128, {"causal": True, "zigzag": True}),
    "window of 4,096": (16, 8, 128, {"causal": True, "sliding_window": 4096}),
    "full": (16, 8, 128, {}),
}
ONLY_SHARDED = ("zigzag", "gather_keys")


def programs(name: str, length: int, direction: str) -> tuple[list[Any], list[list[jax.Array]]]:
    """Return the compiled programs for one device and for all, with their arguments."""
    heads, groups, dim, options = CALLS[name]
    mesh = jax.make_mesh((jax.device_count(),), ("context",), axis_types=(AxisType.Auto,))
    spec = P(None, "context")
    shapes = [(1, length, n, dim) for n in (heads, groups, groups)]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    arrays = [jax.random.normal(jax.random.key(seed), shape, dtype) for seed, shape in enumerate(shapes)]
    alone = functools.partial(flash_attention, **{k: v for k, v in options.items() if k not in ONLY_SHARDED})
    local = functools.partial(flash_attention, axis_name="context", **options)
    over_all = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    ordered = to_zigzag(arrays, mesh.size) if options.get("zigzag") else arrays
    given = [
        [jax.device_put(x, jax.devices()[0]) for x in arrays],
        [jax.device_put(x, NamedSharding(mesh, spec)) for x in ordered],
    ]
    change: Any = with_gradient if direction == "both" else lambda program: program
    found = [
        jax.jit(change(function)).lower(*each).compile()
        for function, each in zip((alone, over_all), given, strict=True)
    ]
    return found, given


def measure(name: str, length: int, direction: str, rounds: int) -> dict[str, Any]:
    """Return interleaved times, their ratio, and the largest difference of the results."""
    found, given = programs(name, length, direction)
    one, shards = (jax.device_get(program(*each)) for program, each in zip(found, given, strict=True))
    back = from_zigzag(shards, jax.device_count()) if CALLS[name][3].get("zigzag") else shards
    apart = jax.tree.map(lambda x, y: float(abs(x.astype("float32") - y.astype("float32")).max()), one, back)
    calls = max(1, round(0.2 / seconds(found[0], given[0], 1)))
    pairs = [[seconds(program, each, calls) for program, each in zip(found, given, strict=True)] for _ in range(rounds)]
    return {
        "call": name,
        "length": length,
        "direction": direction,
        "one_device_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 3),
        "all_devices_ms": round(statistics.median(b for _, b in pairs) * 1e3, 3),
        "speed_up": round(statistics.median(a / b for a, b in pairs), 3),
        "temporary_mib": [round(program.memory_analysis().temp_size_in_bytes / 2**20, 1) for program in found],
        "largest_difference": max(jax.tree.leaves(apart)),
    }


def main() -> None:
    """Measure everything, print it, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--length", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-devices", type=int)
    parser.add_argument("--only", choices=CALLS)
    args = parser.parse_args()
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    rows = []
    for name in [args.only] if args.only else CALLS:
        for direction in ("forward", "both"):
            rows.append(measure(name, args.length, direction, args.rounds))
            print(rows[-1], flush=True)
    if args.out is not None:
        result = {"environment": environment(), "devices": jax.device_count(), "rows": rows}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "context_parallel_gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
