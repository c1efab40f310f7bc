# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.linear_cross_entropy_hopper`: the language-model head's loss on a Hopper GPU.

"trained" is the mean loss with the gradients of `x` and the weight, "forward" the mean loss alone, "per token" the
gradients of a weighted sum of each token's loss. The contenders: our kernels by default ("ejkernel") and with other
tiles and chunks, our plain JAX, Optax on bfloat16 logits, Tokamax if it is installed, and the matrix products alone,
which cuBLAS runs: three of them for "trained", one for "forward", four for "per token".

Each shape has its own process. It compiles one contender after another while the card is idle, because XLA times the
kernels that it chooses from. Then it runs them interleaved, so the host clock's times are those of a warm card.
`kernel_us` is the sum of the kernels of one call after a pause. `peak_mib` is temporary memory and results, by XLA's
`memory_analysis()`. `errors` are relative to our plain JAX in float32; Tokamax ignores no labels, so its own reference
has label 0 in place of ignored ones. "best of ours / ours" tells what tuning would gain.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.apart import run_apart
from ejkernel import compat
from ejkernel.kernels._hopper.tile_shapes import padded
from ejkernel.modules import LinearCrossEntropyConfig, LinearCrossEntropyGradientsConfig, linear_cross_entropy

OURS, PRODUCTS = "ejkernel", "products"
SLICES, SLICE_S = 15, 0.1
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one head: tokens, length of a row, vocabulary; layout and soft cap of the logits."""

    tokens: int
    inner: int
    columns: int
    transpose_weight: bool = False
    soft_cap: float | None = None


SHAPES = {
    "L": Shape(tokens=8192, inner=4096, columns=128256),
    "Q": Shape(tokens=16384, inner=2048, columns=151936, transpose_weight=True),
    "G": Shape(tokens=8192, inner=2304, columns=256000, transpose_weight=True, soft_cap=30.0),
    "D": Shape(tokens=4096, inner=7168, columns=129280),
    "tiny": Shape(tokens=256, inner=128, columns=1024),
}
DIRECTIONS = {"trained": 3, "forward": 1, "per token": 4}  # and how many products each takes


def ours(
    shape: Shape, direction: str, *, implementation: str = "mosaic_gpu", parts: int | None = None, **params: Any
) -> Function:
    """Return the module's loss, by its heuristic, with other parameters, or with the rows in so many parts."""
    cfg: Any = None
    if parts is not None:
        params["chunk"] = padded(-(-shape.tokens // parts), 128)
    if params:
        chosen = dataclasses.replace(heuristic(shape, direction), **params)
        if direction == "trained":
            cfg = LinearCrossEntropyGradientsConfig(implementation=implementation, fwd=chosen)
        else:
            tile = dataclasses.replace(chosen, form="rows", chunk=None, accumulation_dtype=None)
            cfg = LinearCrossEntropyConfig(implementation=implementation, fwd=tile, bwd=chosen)

    def loss(x: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array) -> jax.Array:
        found = linear_cross_entropy(
            x,
            weight,
            labels,
            transpose_weight=shape.transpose_weight,
            logits_soft_cap=shape.soft_cap,
            reduction="none" if direction == "per token" else "mean",
            implementation=implementation,
            cfg=cfg,
        )
        return (found * factors).sum() if direction == "per token" else found

    return with_gradients(loss, direction)


def heuristic(shape: Shape, direction: str) -> Any:
    """Return the parameters of the kernels by default."""
    from ejkernel.kernels.linear_cross_entropy.common import LinearCrossEntropyCall
    from ejkernel.kernels.linear_cross_entropy.mosaic_gpu import support

    call = LinearCrossEntropyCall(
        tokens=shape.tokens,
        inner=shape.inner,
        columns=shape.columns,
        dtype="bfloat16",
        transpose_weight=shape.transpose_weight,
        logits_soft_cap=shape.soft_cap,
        gradients=("x", "weight") if direction == "trained" else (),
        backward=direction == "per token",
        platform="gpu",
    )
    return support.heuristic(call)


def by_optax(shape: Shape, direction: str) -> Function:
    """Return Optax's loss of bfloat16 logits."""
    import optax

    def loss(x: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array) -> jax.Array:
        logits = logits_of(shape, x, weight).astype(jnp.float32)
        if shape.soft_cap is not None:
            logits = shape.soft_cap * jnp.tanh(logits / shape.soft_cap)
        known = labels >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(known, labels, 0))
        losses = jnp.where(known, losses, 0)
        return (losses * factors).sum() if direction == "per token" else losses.sum() / known.sum()

    return with_gradients(loss, direction)


def by_tokamax(shape: Shape, direction: str) -> Function:
    """Return Tokamax's loss by its default; it has no soft cap, no ignored labels, and takes `[d, V]`."""
    import tokamax

    if shape.soft_cap is not None or direction == "per token":
        raise ValueError("it takes neither a soft cap nor factors of tokens")

    def loss(x: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array) -> Any:
        matrix = weight.T if shape.transpose_weight else weight
        return tokamax.linear_softmax_cross_entropy_loss(x, jnp.maximum(labels, 0), matrix, reduction="mean")

    return with_gradients(loss, direction)


def products_alone(shape: Shape, direction: str) -> Function:
    """Return the products that a loss takes, on a random gradient of logits."""

    def run(x: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array, d: jax.Array) -> Any:
        logits = logits_of(shape, x, weight)
        if direction == "forward":
            return logits
        # As if computed again: another operand keeps XLA from sharing the product.
        again = (logits_of(shape, x + factors[:1].astype(x.dtype), weight),) if direction == "per token" else ()
        dx = d @ (weight if shape.transpose_weight else weight.T)
        return logits, *again, dx, d.T @ x if shape.transpose_weight else x.T @ d

    return run


def logits_of(shape: Shape, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return bfloat16 logits."""
    return x @ (weight.T if shape.transpose_weight else weight)


def with_gradients(loss: Function, direction: str) -> Function:
    """Return a loss with the gradients of `x` and the weight, or alone."""
    return loss if direction == "forward" else jax.value_and_grad(loss, (0, 1))


TILES: dict[str, dict[str, Any]] = {
    "panel 8": {"panel": 8},
    "panel 32": {"panel": 32},
    "stages 3, out_slots 4": {"stages": 3, "out_slots": 4},
    "stages 4, out_slots 2": {"stages": 4, "out_slots": 2},
    "no overlap": {"stages": 3, "out_slots": 4, "lag": 0, "cluster": 1},
    "cluster alone": {"stages": 4, "out_slots": 2, "lag": 0, "cluster": 2},
    "lag 2, stages 3": {"stages": 3, "out_slots": 4, "lag": 2, "cluster": 2},
    "overlap": {"stages": 4, "out_slots": 2, "lag": 3, "cluster": 2},
}
CHUNKS: dict[str, dict[str, Any]] = {
    "all rows": {"chunk": None, "accumulation_dtype": None},
    "3 parts, bf16 sum": {"parts": 3, "accumulation_dtype": "bfloat16"},
    "rows 4096": {"chunk": 4096, "accumulation_dtype": None},
    "rows 2048": {"chunk": 2048, "accumulation_dtype": None},
    "rows 2048, bf16 sum": {"chunk": 2048, "accumulation_dtype": "bfloat16"},
    "vocabulary 32768": {"form": "vocabulary", "chunk": 32768},
    "vocabulary 16384": {"form": "vocabulary", "chunk": 16384},
}
CONTENDERS: dict[str, Callable[[Shape, str], Function]] = {
    OURS: ours,
    **{name: functools.partial(ours, **params) for name, params in (TILES | CHUNKS).items()},
    "xla": functools.partial(ours, implementation="xla"),
    "optax": by_optax,
    "tokamax": by_tokamax,
    PRODUCTS: products_alone,
}
RIVALS = ("optax", "tokamax")


def arrays_of(shape: Shape) -> tuple[jax.Array, ...]:
    """Return random rows, weight, labels with some ignored, and factors of tokens."""
    keys = jax.random.split(jax.random.key(0), 4)
    spread = 2.5 * (4 if shape.soft_cap else 1) / shape.inner**0.5
    sizes = (shape.columns, shape.inner) if shape.transpose_weight else (shape.inner, shape.columns)
    x = jax.random.normal(keys[0], (shape.tokens, shape.inner), jnp.bfloat16)
    weight = (spread * jax.random.normal(keys[1], sizes, jnp.bfloat16)).astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (shape.tokens,), 0, shape.columns).at[::20].set(-100)
    factors = jax.random.uniform(keys[3], (shape.tokens,)) / shape.tokens
    return x, weight, labels, factors


def compiled(name: str, shape: Shape, direction: str, arrays: tuple[jax.Array, ...]) -> Any:
    """Return a contender's compiled program."""
    d = [jax.ShapeDtypeStruct((shape.tokens, shape.columns), jnp.bfloat16)] if name == PRODUCTS else []
    return jax.jit(CONTENDERS[name](shape, direction)).lower(*arrays, *d).compile()


def references(
    shape: Shape, direction: str, names: Sequence[str], arrays: tuple[jax.Array, ...]
) -> dict[str, list[jax.Array]]:
    """Return the results of our plain JAX in float32, for each contender."""
    x, weight, labels, factors = arrays
    run = jax.jit(ours(shape, direction, implementation="xla"))

    def results(labels: jax.Array) -> list[jax.Array]:
        with jax.default_matmul_precision("highest"):
            return jax.tree.leaves(run(x.astype(jnp.float32), weight.astype(jnp.float32), labels, factors))

    found = dict.fromkeys(names, results(labels))
    return found | ({"tokamax": results(jnp.maximum(labels, 0))} if "tokamax" in names else {})


@jax.jit
def relative_error(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Return the norm of the difference relative to the norm of `expected`."""
    expected = expected.astype(jnp.float32).ravel()
    difference = actual.astype(jnp.float32).ravel() - expected
    found: jax.Array = jnp.linalg.norm(difference) / jnp.linalg.norm(expected)
    return found


def seconds_per_call(run: Function, number: int) -> float:
    """Return the host clock's seconds per call of several calls in a row."""
    start = time.perf_counter()
    for _ in range(number):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / number


def measured(shape: Shape, direction: str, names: Sequence[str], *, check: bool) -> dict[str, Any]:
    """Return the figures of each contender, or the reason for having none."""
    arrays = arrays_of(shape)
    found: dict[str, Any] = {}
    runs: dict[str, Function] = {}
    expected = jax.block_until_ready(references(shape, direction, names, arrays)) if check else {}
    for name in names:
        try:
            program = compiled(name, shape, direction, arrays)
            found[name] = first_call(name, program, shape, arrays, expected.get(name))
        except Exception as error:  # noqa: BLE001  # a contender's failure is a result, with its reason
            found[name] = {"reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        else:
            runs[name] = functools.partial(program, *arrays, *random_gradient(name, shape))
    del expected
    numbers = {name: max(1, min(5, int(SLICE_S / seconds_per_call(run, 1)))) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = np.random.default_rng(0)
    for _ in range(SLICES):
        for name in order.permutation(list(runs)):
            samples[str(name)].append(seconds_per_call(runs[str(name)], numbers[str(name)]))
    for name, run in runs.items():
        us = 1e6 * float(np.median(samples[name]))
        flops = 2 * DIRECTIONS[direction] * shape.tokens * shape.inner * shape.columns
        found[name] |= {"us": round(us, 1), "best_us": round(1e6 * min(samples[name]), 1)}
        found[name] |= {"tflops": round(flops / us / 1e6, 1)}
        time.sleep(0.5)  # the card cools down
        kernels = compat.executables.cupti_seconds(run) if jax.default_backend() == "gpu" else None
        found[name]["kernel_us"] = None if kernels is None else round(1e6 * kernels, 1)
    return found


def random_gradient(name: str, shape: Shape) -> list[jax.Array]:
    """Return the gradient of logits that the products alone take."""
    size = (shape.tokens, shape.columns)
    return [jax.random.normal(jax.random.key(1), size, jnp.bfloat16)] if name == PRODUCTS else []


def first_call(
    name: str, program: Any, shape: Shape, arrays: tuple[jax.Array, ...], expected: list[jax.Array] | None
) -> dict[str, Any]:
    """Return a program's memory, and the errors of its results."""
    memory = program.memory_analysis()
    sizes = {"temp": memory.temp_size_in_bytes, "peak": memory.temp_size_in_bytes + memory.output_size_in_bytes}
    row: dict[str, Any] = {f"{key}_mib": round(value / 2**20) for key, value in sizes.items()}
    out = jax.tree.leaves(jax.block_until_ready(program(*arrays, *random_gradient(name, shape))))
    if expected is not None and name != PRODUCTS:
        row["errors"] = [float(f"{relative_error(a, b):.2e}") for a, b in zip(out, expected, strict=True)]
    return row


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Return times relative to ours by default: the products', the best other library's, our best configuration's."""
    own = rows.get(OURS, {}).get("us")
    others = [rows[name]["us"] for name in RIVALS if "us" in rows.get(name, {})]
    mine = [rows[name]["us"] for name in (OURS, *TILES, *CHUNKS) if "us" in rows.get(name, {})]
    pairs = {
        "products / ours": rows.get(PRODUCTS, {}).get("us"),
        "best other / ours": min(others, default=None),
        "best of ours / ours": min(mine, default=None),
    }
    return {name: round(value / own, 3) for name, value in pairs.items() if own and value}


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table, a line per shape, direction and contender."""
    lines = ["| | us | / products | kernels us | TFLOP/s | peak MiB | errors |", "|---" * 7 + "|"]
    for key, rows in found.items():
        if "contenders" not in rows:
            continue
        products = rows["contenders"].get(PRODUCTS, {}).get("us")
        for name, row in rows["contenders"].items():
            ratio = f"{row['us'] / products:.3f}" if products and row.get("us") else ""
            us, *cells = [f"{row[x]:,}" if row.get(x) else "" for x in ("us", "kernel_us", "tflops", "peak_mib")]
            line = " | ".join((key.replace(" | ", ", ") + f", {name}", us, ratio, *cells))
            lines.append(f"| {line} | {row.get('errors', row.get('reason', ''))} |")
    return "\n".join(lines) + "\n"


def document(found: dict[str, Any]) -> str:
    """Return the table with a heading, the environment and the sizes of the shapes."""
    environment = found["environment"]
    flags = environment["xla_flags"] or "the default"
    sizes = "; ".join(
        f"{name}: {s.tokens:,} tokens, width {s.inner:,}, vocabulary {s.columns:,}"
        + ", tied" * s.transpose_weight
        + (f", soft cap {s.soft_cap:g}" if s.soft_cap else "")
        for name, s in SHAPES.items()
        if any(key.startswith(f"{name} |") for key in found)
    )
    parts = [
        "# The loss of an output layer on one GPU",
        f"`python -m benchmarks.linear_cross_entropy_hopper`; {report.heading(found)}; XLA flags: {flags}.",
        f"bfloat16; untuned. {sizes}. `products` are the matrix products alone, by XLA: three for `trained`, four for "
        "`per token`, one for `forward`. Rows of one shape and direction ran interleaved in one process: times of a "
        "warm card, and sums of kernel times of single calls. Peak memory is that of temporary arrays and results.",
        *([found["note"]] if "note" in found else []),
        table(found),
    ]
    return "\n\n".join(parts)


def measured_apart(shape: str, direction: str, names: Sequence[str], seconds: float, *, check: bool) -> dict[str, Any]:
    """Return the result of measuring in a separate process, or the reason for having none."""
    job = json.dumps({"shape": shape, "direction": direction, "names": list(names), "check": check})
    lines, reason = run_apart("benchmarks.linear_cross_entropy_hopper", "--one", job, seconds=seconds)
    if reason:
        return {"reason": reason, "contenders": {}, "ratios": {}}
    rows: dict[str, Any] = json.loads(lines[-1])
    return {"contenders": rows, "ratios": ratios(rows)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_cross_entropy_hopper", description=__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write linear_cross_entropy_<device>.json and .md there"
    )
    parser.add_argument("--shapes", nargs="*", default=["L", "Q", "G", "D"], choices=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--directions", nargs="*", default=list(DIRECTIONS), choices=list(DIRECTIONS), metavar="NAME")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave out the errors")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of one process (default: %(default)s)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        job = json.loads(args.one)
        print(json.dumps(measured(SHAPES[job["shape"]], job["direction"], job["names"], check=job["check"])))
        return 0
    flags = {"xla_flags": os.environ.get("XLA_FLAGS", "")}
    found: dict[str, Any] = {"environment": report.environment() | flags}
    for direction in args.directions:
        for shape in args.shapes:
            names = [name for name in args.contenders if direction != "forward" or name not in CHUNKS]
            result = measured_apart(shape, direction, names, args.seconds, check=args.check)
            found[f"{shape} | {direction}"] = result
            print(shape, direction, json.dumps(result), file=sys.stderr, flush=True)
            if args.out is not None:  # written after each process, in case a later one fails
                report.write(args.out, f"linear_cross_entropy_{report.platform_name()}", found, document(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
