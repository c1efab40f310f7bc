# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.linear_cross_entropy`: the loss of a language model's output layer beside plain JAX and Optax.

Times are wall-clock seconds of compiled programs, in interleaved rounds. Memory is XLA's: temporary arrays, and with
the results. Errors are relative to float32 products of `highest` precision: of the loss, and of each gradient the norm
of the difference over the norm. Nothing is tuned.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.timing import interleave
from ejkernel.modules import linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 2048, 512, 32768
DTYPES = ("float32", "bfloat16")
MIB = 1 << 20
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def plain(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss from float32 logits of a product in the operands' dtype."""
    logits = (x @ weight).astype(jnp.float32)
    at_labels = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=1) - at_labels).mean()


def by_optax(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss as Optax computes it."""
    import optax

    found: jax.Array = optax.softmax_cross_entropy_with_integer_labels(x @ weight, labels).mean()
    return found


def ours_per_token(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean of the losses of all tokens; the backward recomputes the logits."""
    return linear_cross_entropy(x, weight, labels, reduction="none").mean()


def contenders() -> dict[str, Loss]:
    """Return the losses by name; Optax if it is installed."""
    found: dict[str, Loss] = {"plain JAX": plain}
    if importlib.util.find_spec("optax"):
        found["optax"] = by_optax
    return found | {"ours": linear_cross_entropy, "ours, per token": ours_per_token}


def operands(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return hidden states, a weight and labels."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), dtype)
    weight = jnp.asarray(rng.standard_normal((WIDTH, VOCABULARY)) * WIDTH**-0.5, dtype)
    return x, weight, jnp.asarray(rng.integers(0, VOCABULARY, TOKENS), jnp.int32)


def measure(rounds: int) -> dict[str, Any]:
    """Return times, memory and errors of all contenders, by dtype and direction."""
    found: dict[str, Any] = {"environment": report.environment(), "sizes": [TOKENS, WIDTH, VOCABULARY]}
    for dtype in DTYPES:
        args = operands(dtype)
        wide = (*(array.astype(jnp.float32) for array in args[:2]), args[2])
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(*wide)
        for direction in ("forward", "both"):
            programs = {
                name: jax.jit(jax.value_and_grad(loss, (0, 1)) if direction == "both" else loss).lower(*args).compile()
                for name, loss in contenders().items()
                if direction == "both" or loss is not ours_per_token
            }
            slices = {name: functools.partial(_seconds, program, args) for name, program in programs.items()}
            timings = interleave(slices, rounds)
            found[f"{dtype}, {direction}"] = {
                name: timings[name].data() | _memory(program) | _errors(program(*args), expected)
                for name, program in programs.items()
            }
    return found


def _seconds(program: Any, args: Sequence[jax.Array]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - begin


def _memory(program: Any) -> dict[str, float]:
    used = program.memory_analysis()
    both = used.temp_size_in_bytes + used.output_size_in_bytes
    return {"temporary_mib": round(used.temp_size_in_bytes / MIB, 1), "with_results_mib": round(both / MIB, 1)}


def _errors(found: Any, expected: Any) -> dict[str, float]:
    loss, *gradients = jax.tree.leaves(found)
    wanted, *others = jax.tree.leaves(expected)
    errors = {"loss_error": abs(float(loss) / float(wanted) - 1)}
    for name, gradient, other in zip(("dx_error", "dweight_error"), gradients, others, strict=False):
        off = jnp.linalg.norm(gradient.astype(jnp.float32) - other) / jnp.linalg.norm(other)
        errors[name] = float(off)
    return {name: float(f"{value:.2g}") for name, value in errors.items()}


def text(run: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [report.heading(run), "", f"{TOKENS} tokens, width {WIDTH}, vocabulary {VOCABULARY}.", ""]
    lines += [
        "| | | median, ms | ratio to plain JAX | temporary, MiB | with results, MiB | errors: loss, dx, dweight |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, rows in run.items():
        for name, row in rows.items() if "," in case else ():
            errors = ", ".join(f"{row[key]:.1e}" for key in ("loss_error", "dx_error", "dweight_error") if key in row)
            times = f"{row['median'] * 1e3:.0f} | {row['median_ratio']:.2f}"
            memory = f"{row['temporary_mib']:.0f} | {row['with_results_mib']:.0f}"
            lines.append(f"| {case} | {name} | {times} | {memory} | {errors} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures, and with `--out` write them to `linear_cross_entropy_<platform>.json` there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_cross_entropy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    run = measure(args.rounds)
    print(text(run))
    if args.out is not None:
        name = f"linear_cross_entropy_{report.platform_name()}"
        (args.out / f"{name}.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        (args.out / f"{name}.md").write_text(text(run) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
