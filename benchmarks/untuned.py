# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.untuned KIND... --draw SEED`: random calls, with the heuristic and nearby configurations.

Each call is tuned among the heuristic's configuration, the nearest ones of its search space, and one of each other
implementation. A row has their times. Benchmarks beside other libraries show losses to these; this one also shows
where a faster configuration exists and no library has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_near import near_points
from benchmarks.quantized_uses import calls_in, in_8_bits
from ejkernel.modules import (
    grouped_matmul,
    grouped_matmul_wgrad,
    layer_norm,
    linear_cross_entropy,
    paged_attention,
    quantize,
    quantized_dense,
    quantized_grouped_dense,
    quantized_matmul,
    rms_norm,
)
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Invocation, PersistentCache
from ejkernel.ops.autotuner.process.worker import worker_session
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.status import FAULTY
from ejkernel.ops.core.kernel import kernel_of
from ejkernel.ops.errors import TuningError

_Program = tuple[Callable[..., Any], tuple[Any, ...]]  # with the types of its arguments
_Rng = np.random.Generator


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _size(rng: _Rng, least: int, most: int, step: int = 1) -> int:
    """Return a multiple of `step`; every octave is equally likely."""
    drawn = 2 ** rng.uniform(np.log2(least), np.log2(most))
    return max(1, round(drawn / step)) * step


def _group_sizes(
    rng: _Rng, most_groups: int, rows_of_group: int, most_rows: int, step: int, numbers: int
) -> tuple[int, int, int, int]:
    """Return groups, rows, k and n; the matrices of all groups have up to so many numbers."""
    groups = _size(rng, 1, most_groups)
    rows = min(_size(rng, rows_of_group, 4096) * groups, most_rows)
    k, n = _size(rng, 256, 8192, step), _size(rng, 256, 8192, step)
    while groups * k * n > numbers:
        groups = -(-groups // 2)
    return groups, rows, k, n


def _grouped(rng: _Rng) -> _Program:
    groups, rows, k, n = _group_sizes(rng, 256, 4, 1 << 17, 64, 1 << 32)
    direction = rng.choice(["forward", "dgrad", "wgrad", "gated"])
    sizes, matrices = _int32(groups), _bf16(groups, k, n)
    if direction == "wgrad":
        return grouped_matmul_wgrad, (_bf16(rows, k), _bf16(rows, n), sizes)
    if direction == "dgrad":
        return _with(grouped_matmul, transpose_rhs=True), (_bf16(rows, n), matrices, sizes)
    if direction == "forward":
        return grouped_matmul, (_bf16(rows, k), matrices, sizes)

    def gated(lhs: Any, rhs: Any, gate: Any, sizes: Any) -> Any:
        return grouped_matmul(lhs, rhs, sizes, gate=gate, activation="silu")

    return gated, (_bf16(rows, k), matrices, matrices, sizes)


def _with(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *args: function(*args, **options)


def _quantized(rng: _Rng) -> _Program:
    m, k, n = _size(rng, 1, 32768), _size(rng, 256, 16384, 128), _size(rng, 256, 16384, 128)
    blocks = bool(rng.integers(2))
    dtype = "float8_e4m3fn" if blocks else str(rng.choice(["float8_e4m3fn", "int8"]))
    x = in_8_bits((m, k), dtype, (1, 128 if blocks else None))
    w = in_8_bits((n, k), dtype, (128, 128) if blocks else (1, None))
    if m <= 64 and rng.integers(2):
        return _with(quantized_matmul, transpose_w=True), (_bf16(m, k), w)
    return _with(quantized_matmul, transpose_w=True), (x, w)


def _quantized_grouped(rng: _Rng) -> _Program:
    groups, rows, k, n = _group_sizes(rng, 128, 16, 1 << 16, 128, 1 << 31)
    block: Any = 128 if rng.integers(2) else None

    def loss(x: Any, w: Any, sizes: Any) -> Any:
        return quantized_grouped_dense(x, w, sizes, block=block).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1)), (_bf16(rows, k), _bf16(groups, k, n), _int32(groups))


def _quantized_training(rng: _Rng) -> _Program:
    block: Any = 128 if rng.integers(2) else None

    def loss(x: Any, w: Any) -> Any:
        return quantized_dense(x, w, block=block).astype(jnp.float32).sum()

    m, k, n = _size(rng, 256, 32768, 128), _size(rng, 256, 16384, 128), _size(rng, 256, 16384, 128)
    return jax.grad(loss, (0, 1)), (_bf16(m, k), _bf16(k, n))


def _quantize(rng: _Rng) -> _Program:
    block, rows = (128, None)[rng.integers(2)], _size(rng, 1, 65536)
    return _with(quantize, block=block), (_bf16(rows, _size(rng, 256, 16384, 128)),)


def _loss(rng: _Rng) -> _Program:
    rows, width, words = _size(rng, 64, 32768), _size(rng, 256, 8192, 64), _size(rng, 1024, 262144, 8)
    by_rows = bool(rng.integers(2))

    def loss(x: Any, weight: Any, labels: Any) -> Any:
        return linear_cross_entropy(x, weight, labels, transpose_weight=by_rows)

    weight = _bf16(words, width) if by_rows else _bf16(width, words)
    program = jax.value_and_grad(loss, (0, 1)) if rng.integers(3) else loss
    return program, (_bf16(rows, width), weight, _int32(rows))


def _norm(rng: _Rng) -> _Program:
    rows, width = _size(rng, 1, 65536), _size(rng, 64, 16384, 8)
    norm, vectors = (rms_norm, 1) if rng.integers(2) else (layer_norm, 2)
    args = (_bf16(rows, width), *[_bf16(width)] * vectors)
    if not rng.integers(3):
        return norm, args
    return jax.grad(lambda *args: norm(*args).astype(jnp.float32).sum(), (0, 1)), args


def _paged(rng: _Rng) -> _Program:
    sequences, page = _size(rng, 1, 256), int(rng.choice([16, 32, 64, 128]))
    kv_heads, group = 2 ** int(rng.integers(4)), int(rng.choice([1, 2, 4, 5, 8]))
    per_sequence = max(1, _size(rng, 128, min(65536, 1 << 21 >> sequences.bit_length()), page) // page)
    dim = int(rng.choice([64, 128, 256]))
    tokens = sequences * (1 if rng.integers(3) else _size(rng, 2, 256))
    cache = _bf16(sequences * per_sequence, page, kv_heads, 2, dim)
    table = _int32(sequences, per_sequence), _int32(sequences + 1), _int32(sequences)
    return paged_attention, (_bf16(tokens, kv_heads * group, dim), cache, *table)


def given(text: str) -> Invocation[Any, Any]:
    """Return a product of 8-bit numbers, e.g. of `blocks,205,13312,512`: scales or dtypes, then `m,k,n`."""
    name, *sizes = text.split(",")
    m, k, n = map(int, sizes)
    float8 = "float8_e4m3fn"
    dtypes = {"int8": ("int8", "int8"), "mixed": ("float8_e5m2", float8), "wide": ("bfloat16", "int8")}
    x_dtype, w_dtype = (dtypes | dict.fromkeys(("rows", "blocks", "thin"), (float8, float8)))[name]
    block = 128 if name in ("blocks", "thin") else None
    w = in_8_bits((n, k), w_dtype, (128 if name == "blocks" else 1, block))
    x = _bf16(m, k) if name == "wide" else in_8_bits((m, k), x_dtype, (1, block))
    [inv] = calls_in(_with(quantized_matmul, transpose_w=True), x, w)
    return inv


KINDS = {
    "grouped": _grouped,
    "quantized": _quantized,
    "quantized_grouped": _quantized_grouped,
    "quantized_training": _quantized_training,
    "quantize": _quantize,
    "loss": _loss,
    "norm": _norm,
    "paged": _paged,
}


def calls_of(kind: str, seed: int, count: int) -> Iterator[Invocation[Any, Any]]:
    """Yield the calls of random programs, from one program for each of `count`, until `count` calls are reached."""
    found = 0
    for number in range(count):
        function, args = KINDS[kind](np.random.default_rng([seed, number]))
        for inv in calls_in(function, *args):
            yield inv
            found += 1
        if found >= count:
            return


def combined(first: Any, space: Any, axes: Sequence[str]) -> list[Any]:
    """Return a point of a space for each combination of values of some axes: the one nearest to `first`."""
    others = [field.name for field in dataclasses.fields(first) if field.name not in axes]

    def changed(params: Any) -> tuple[int, int]:  # among the nearest, the one with the most stages
        return sum(getattr(params, name) != getattr(first, name) for name in others), -getattr(params, "stages", 0)

    nearest: dict[tuple[Any, ...], Any] = {}
    for params in sorted(space, key=changed):
        nearest.setdefault(tuple(getattr(params, name) for name in axes), params)
    return [first, *(params for params in nearest.values() if params != first)]


def candidates_of(inv: Invocation[Any, Any], count: int, axes: Sequence[str] = ()) -> list[Any]:
    """Return the heuristic's configuration, others of its implementation, and one of each other.

    The others are the `count` nearest ones, or with `axes`, those of `combined`.
    """
    kernel: Any = inv.kernel
    call, usual = kernel.call_of(inv), kernel.heuristic_cfg(inv)
    field = "bwd" if getattr(call, "backward", False) and hasattr(usual, "bwd") else "fwd"

    def points(name: str) -> list[Any]:
        own = kernel.implementations[name]
        if name != usual.implementation:
            return [own.heuristic(call)] if name != "reference" else []
        if own_axes := [axis for axis in axes if hasattr(own.heuristic(call), axis)]:
            return combined(own.heuristic(call), own.space(call), own_axes)
        return near_points(own.heuristic(call), own.space(call), count)

    return [
        dataclasses.replace(usual, implementation=name, **{field: params})
        for name in sorted(kernel.able(inv), key=lambda name: name != usual.implementation)
        for params in points(name)
    ]


def row_of(found: AutotuneData, seconds: float) -> dict[str, Any]:
    """Return the times of a search, the fastest first, and the heuristic's."""
    times = {outcome.config: outcome.seconds for outcome in found.outcomes if outcome.seconds}
    usual, best = found.inv.kernel.heuristic_cfg(found.inv), min(times, key=times.__getitem__)  # type: ignore[union-attr]
    first = times.get(usual)
    described = {str(config): round(1e6 * time, 2) for config, time in sorted(times.items(), key=lambda item: item[1])}
    return {
        "operation": found.inv.op_id,
        "call": str(found.inv.description)[:600],
        "us": first and round(1e6 * first, 2),
        "best_us": round(1e6 * times[best], 2),
        "gain": first and round(first / times[best] - 1, 3),
        "usual": str(usual),
        "best": str(best),
        "others": described,
        "wrong": [f"{outcome.config}: {outcome.reason}" for outcome in found.outcomes if outcome.status in FAULTY],
        "took": round(seconds, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Tune the calls."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.untuned", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of random calls: {', '.join(KINDS)}")
    parser.add_argument("--draw", type=int, default=0, metavar="SEED")
    parser.add_argument("--calls", nargs="*", default=[], metavar="CALL", help="8-bit products: blocks,205,13312,512")
    parser.add_argument("--axes", nargs="*", default=[], metavar="AXIS", help="try all combinations of their values")
    parser.add_argument("--validate", action="store_true", help="compare results with the reference")
    parser.add_argument("--count", type=int, default=16, help="calls of each kind (default: %(default)s)")
    parser.add_argument("--near", type=int, default=10, metavar="N", help="candidates of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no search begins")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: one a core)")
    args = parser.parse_args(argv)
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    checks: Any = "outputs" if args.validate else False
    policy = AutotunePolicy(isolate=True, validate=checks, compile_processes=args.processes, budget_s=60.0)
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder, worker_session():
        store = PersistentCache(Path(folder), shipped=False)
        chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(persistent=store, policy=policy)
        drawn = (inv for kind in args.kinds for inv in calls_of(kind, args.draw, args.count))
        for inv in itertools.chain(map(given, args.calls), drawn):
            start = time.monotonic()
            if start > end:
                break
            candidates = candidates_of(inv, args.near, args.axes)
            if len(candidates) < 2:
                continue
            try:
                found = chain.search(inv, kernel_of(inv), policy=policy, candidates=candidates)
            except TuningError as error:
                print(json.dumps({"operation": inv.op_id, "error": str(error)}), flush=True)
                continue
            print(json.dumps(row_of(found, time.monotonic() - start)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
