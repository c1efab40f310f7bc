# SPDX-License-Identifier: Apache-2.0
"""Train a layer of experts with ejkernel's products and with JAX's, interleaved, beside a dense layer of equal work.

    python examples/mixture_of_experts/run.py --library equinox

Needs `equinox`, or `flax` with `--library nnx`; `--library plain` is a function of arrays. Contenders that run out of
memory are left out of the comparison: on a GPU, `jax.lax.ragged_dot` multiplies every row with every expert's matrix.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from layer import PRODUCTS, Size, dense

SIZES = {
    "small": Size(),
    "mixtral": Size(tokens=8192, width=4096, hidden=14336, experts=8, chosen=2, dtype=jnp.bfloat16),
    "qwen3-30b": Size(tokens=16384, width=2048, hidden=768, experts=128, chosen=8, dtype=jnp.bfloat16),
}
CONTENDERS = (*PRODUCTS, "dense")
Model = tuple[Callable[[Any, jax.Array], jax.Array], Any]


def models(library: str, size: Size) -> dict[str, Model]:
    """Return the contenders: functions of parameters and tokens, and their initial parameters."""
    module = importlib.import_module(f"{library}_model")
    found = {name: module.model(size, products, jax.random.key(0)) for name, products in PRODUCTS.items()}
    return found | {"dense": dense_model(size)}


def dense_model(size: Size) -> Model:
    """Return a layer without experts that multiplies each token with as many weights."""
    hidden = size.chosen * size.hidden
    shapes = {"gate": (size.width, hidden), "up": (size.width, hidden), "down": (hidden, size.width)}
    weights = {
        name: (jax.random.normal(jax.random.key(i), shape) * shape[0] ** -0.5).astype(size.dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return lambda weights, x: x + dense(x, weights), weights


def training_step(function: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    """Return a step of gradient descent towards given outputs."""

    def step(parameters: Any, x: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        def loss(parameters: Any) -> jax.Array:
            return jnp.mean((function(parameters, x) - target).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), parameters, gradients), value

    return step


def train(library: str, size: Size, steps: int, contenders: Sequence[str] = CONTENDERS) -> dict[str, Any]:
    """Return losses, milliseconds per step and the memory of a step for each contender.

    If a program does not fit into memory, its row has only the reason, as `failed`.
    """
    x, target = (jax.random.normal(jax.random.key(i), (size.tokens, size.width)).astype(size.dtype) for i in (1, 2))
    found: dict[str, Any] = {}
    programs, state = {}, {}
    for name, (function, parameters) in models(library, size).items():
        if name not in contenders:
            continue
        try:
            programs[name] = jax.jit(training_step(function)).lower(parameters, x, target).compile()
            jax.block_until_ready(programs[name](parameters, x, target))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            programs.pop(name, None)
            found[name] = {"failed": str(error).partition("\n")[0]}
        else:
            state[name] = parameters
            found[name] = {"losses": [], "seconds": [], "bytes": bytes_of(programs[name])}
    for _ in range(steps + 1):
        for name, program in programs.items():
            started = time.perf_counter()
            state[name], loss = jax.block_until_ready(program(state[name], x, target))
            found[name]["losses"].append(float(loss))
            found[name]["seconds"].append(time.perf_counter() - started)
    for name in programs:
        found[name]["step_ms"] = round(statistics.median(found[name].pop("seconds")[1:]) * 1e3, 2)
    return found


def bytes_of(program: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes of a program's arguments, results and temporary memory."""
    found = program.memory_analysis()
    if found is None:
        return {}
    return {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each contender."""
    first = next((row["step_ms"] for row in result.values() if "step_ms" in row), 0.0)
    for name, row in result.items():
        if "failed" in row:
            yield f"{name:<12} is left out: {row['failed']}"
            continue
        memory = f"{sum(row['bytes'].values()) / 2**20:,.1f} MiB" if row["bytes"] else "unknown memory"
        ratio = row["step_ms"] / first
        yield f"{name:<12} {row['step_ms']:>10,.2f} ms a step ({ratio:.2f} times the first's), {memory}"


def disagreement(result: dict[str, Any], tolerance: float) -> str | None:
    """Return a message if the losses of the two layers of experts disagree, else `None`."""
    losses = {name: result[name]["losses"] for name in PRODUCTS if "losses" in result.get(name, {})}
    if len(losses) > 1 and any(abs(a - b) > tolerance * abs(b) for a, b in zip(*losses.values(), strict=True)):
        return f"losses disagree: {losses}"
    return None


def main() -> int:
    """Train, print the result, and return 1 if the losses disagree or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("plain", "equinox", "nnx"), default="plain")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME")
    parser.add_argument("--json", type=Path, help="keep the result here")
    args = parser.parse_args()
    size = SIZES[args.size]
    result = train(args.library, size, args.steps, args.contenders)
    for line in lines(result):
        print(line)
    if args.json is not None:
        environment = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        kept = {"environment": environment, "size": args.size, "library": args.library, **result}
        args.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    wrong = disagreement(result, 1e-4 if size.dtype == jnp.float32 else 3e-2)
    if wrong is None and all("failed" in row for row in result.values()):
        wrong = "nothing ran"
    print(wrong or "losses agree")
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
