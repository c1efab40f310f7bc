# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention_cpu`: untuned attention beside `jax.nn.dot_product_attention` on a CPU.

Time is the median of interleaved runs, memory that of temporaries, as XLA plans it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.timing import interleave
from ejkernel.modules import flash_attention

ROUNDS = 7


class Case(NamedTuple):
    """One call: `[batch, length, heads, head_dim]`, the number of key heads, and the mask."""

    shape: tuple[int, int, int, int]
    groups: int
    dtype: str = "float32"
    window: int | None = None
    documents: int | None = None


CASES = {
    "causal, T1024 H8 D64": Case((2, 1024, 8, 64), 8),
    "causal, T4096 H8/2 D64": Case((1, 4096, 8, 64), 2),
    "causal, bfloat16, T2048 H8 D64": Case((1, 2048, 8, 64), 8, "bfloat16"),
    "window of 256 in T4096 H8 D64": Case((1, 4096, 8, 64), 8, window=256),
    "8 documents packed into T4096 H8 D64": Case((1, 4096, 8, 64), 8, documents=8),
}


def inputs(case: Case) -> tuple[Any, ...]:
    """Return query, key, value, and the number of each position's document."""
    batch, length, heads, dim = case.shape
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((heads, keys[0]), (case.groups, keys[1]), (case.groups, keys[2]))
    arrays = [jax.random.normal(key, (batch, length, n, dim), case.dtype) for n, key in sizes]
    numbers = np.arange(length) * (case.documents or 1) // length
    return (*arrays, jnp.broadcast_to(jnp.asarray(numbers, jnp.int32), (batch, length)))


def contenders(case: Case) -> dict[str, Callable[..., jax.Array]]:
    """Return ours and JAX's, of query, key, value and documents."""

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array) -> jax.Array:
        segments = documents if case.documents else None
        window = None if case.window is None else (case.window, 0)
        return flash_attention(q, k, v, causal=True, segment_ids=segments, sliding_window=window)

    def jax_nn(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array) -> jax.Array:
        mask = documents[:, None, :, None] == documents[:, None, None, :] if case.documents else None
        window = None if case.window is None else (case.window, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, mask=mask, local_window_size=window)

    return {"ejkernel": ours, "jax.nn": jax_nn}


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return output and gradients."""

    def both(*args: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *first: function(*first, args[3]), *args[:3])
        return out, pull(out)

    return both


def seconds(program: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Return the seconds of one run."""
    started = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - started


def temporary_bytes(program: Any) -> int:
    """Return the memory of temporaries, as XLA plans it."""
    return int(program.memory_analysis().temp_size_in_bytes)


def measured(case: Case, *, backward: bool) -> dict[str, Any]:
    """Return milliseconds and MiB of both contenders, and how far their results are apart."""
    args = inputs(case)
    programs = {
        name: jax.jit(with_gradients(function) if backward else function).lower(*args).compile()
        for name, function in contenders(case).items()
    }
    return side_by_side({name: (program, args) for name, program in programs.items()})


def side_by_side(programs: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """Return milliseconds and MiB of two compiled programs, ours first, and how far their results are apart.

    "ratio" is the other's time relative to ours, the median of the rounds' ratios.
    """
    ours, other = (jax.tree.leaves(program(*args)) for program, args in programs.values())
    apart = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(ours, other, strict=True))
    timings = interleave({name: functools.partial(seconds, *run) for name, run in programs.items()}, ROUNDS)
    memory = {name: temporary_bytes(program) for name, (program, _) in programs.items()}
    return {
        "ms": {name: round(timing.median * 1e3, 2) for name, timing in timings.items()},
        "ratio": round(list(timings.values())[1].median_ratio, 2),
        "temporary_mib": {name: round(size / 2**20, 1) for name, size in memory.items()},
        "difference": float(f"{apart:.1e}"),
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| | ejkernel, ms | `jax.nn`, ms | `jax.nn` / ejkernel | MiB | `jax.nn`, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        times, memory = row["ms"], row["temporary_mib"]
        cells = (times["ejkernel"], times["jax.nn"], f"{row['ratio']}x", memory["ejkernel"], memory["jax.nn"])
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure all cases, print a table, and write JSON with `--out`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, help="a folder for attention_cpu.json and .md")
    given = options.parse_args()
    rows = {}
    for name, case in CASES.items():
        for backward in (False, True):
            rows[f"{name}, {'forward and backward' if backward else 'forward'}"] = measured(case, backward=backward)
    text = table(rows)
    sys.stdout.write(text)
    if given.out:
        found = {"date": datetime.date.today().isoformat(), **report.environment(), "rows": rows}
        (given.out / "attention_cpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (given.out / "attention_cpu.md").write_text(f"# Attention on a CPU, untuned\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
