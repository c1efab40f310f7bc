# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.paged_attention`: paged attention on a GPU.

First the results of batches with random lengths (0, 1, whole pages) against plain JAX in float32, with NaN in every
slot of the cache without a key, and page indices outside of the cache behind each sequence. Then times. The contenders:
`mosaic_gpu` with a plan, other numbers of pipeline stages, `xla`, and on contiguous caches cuDNN (of the same lengths,
padded to the longest), our causal `flash_attention` or, for latent attention, plain JAX. The figure of `paged_plan` is
that of the arrays that `mosaic_gpu` reads.

Each case has its own process. `kernel_us` is the sum of the kernels of one call, the median of several; `us` is the
host clock's time per call of calls in a row; `gb_per_s` counts the keys and values that are seen, in `kernel_us`.
`error` is relative to NumPy in float32, for some sequences.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.apart import run_apart
from ejkernel import compat
from ejkernel.modules import PagedAttentionConfig, PagedPlan, flash_attention, paged_attention, paged_plan

OURS, PLAN = "mosaic_gpu", "paged_plan"
CUDNN, FLASH = "cudnn, contiguous", "flash_attention, contiguous"
PLAIN = "plain JAX, contiguous"
CHECKS = ("check decode", "check options", "check narrow", "check mixed")
RUNS, CHECKED_TOKENS = 11, 12
SPREAD = 40  # the standard deviation of int8 numbers
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: keys and new tokens of each sequence, and the heads."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...] | None = None  # None: one each
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    cache: str = "bfloat16"  # with 8 bits, of scaled keys and values
    options: tuple[tuple[str, Any], ...] = ()
    pages: tuple[int, ...] = (16, 64)
    value_dim: int | None = None  # of latent attention: a cache of keys alone
    contenders: tuple[str, ...] = ("xla", CUDNN)
    stages: tuple[int, ...] = ()

    @property
    def scales(self) -> dict[str, Any]:
        """Scales of keys and values."""
        if self.cache == "bfloat16":
            return {}
        unit = 1 / SPREAD if self.cache == "int8" else 1.0
        return {"k_scale": unit, "v_scale": unit / 2}

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a call, without scales."""
        return dict(self.options) | ({} if self.value_dim is None else {"value_dim": self.value_dim})

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each sequence."""
        return self.queries or (1,) * len(self.lengths)


def _ragged(count: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(7).integers(low, high + 1, count).tolist())


def _latent(count: int, length: int, heads: int, pages: tuple[int, ...] = (64,)) -> Case:
    """Return a decode step of absorbed latent attention, 512 values and 64 further elements of a key."""
    return Case(
        lengths=(length,) * count,
        heads=(heads, 1),
        head_dim=576,
        value_dim=512,
        options=(("softmax_scale", 192**-0.5),),
        pages=pages,
        contenders=("xla", PLAIN),
    )


CASES = {
    "64 x 4k": Case(lengths=(4096,) * 64, stages=(2,)),
    "64 x 4k, float8": Case(lengths=(4096,) * 64, cache="float8_e4m3fn", contenders=(), stages=(2, 4, 6)),
    "64 x 4k, int8": Case(lengths=(4096,) * 64, cache="int8", contenders=(), stages=(2, 4, 6)),
    "256 x 1k": Case(lengths=(1024,) * 256, contenders=(CUDNN,)),
    "64 x 4k, 64/8, D64": Case(lengths=(4096,) * 64, heads=(64, 8), head_dim=64, contenders=(CUDNN,), stages=(5,)),
    "128 ragged": Case(lengths=_ragged(128, 128, 8192), contenders=(CUDNN,)),
    "8 x 32k": Case(lengths=(32768,) * 8, contenders=(CUDNN,)),
    "1 x 128k": Case(lengths=(131072,), contenders=(CUDNN,)),
    "64 x 4k, window 1024": Case(lengths=(4096,) * 64, options=(("sliding_window", 1023),), contenders=(), pages=(64,)),
    "64 x 4k, 4 tokens each": Case(lengths=(4096,) * 64, queries=(4,) * 64, contenders=(), pages=(64,)),
    "64 x 4k, MLA": _latent(64, 4096, 128, (16, 64)),
    "64 x 4k, MLA, 64 heads": _latent(64, 4096, 64),
    "64 x 4k, MLA, 16 heads": _latent(64, 4096, 16),
    "8 x 32k, MLA": _latent(8, 32768, 128),
    "1 x 128k, MLA": _latent(1, 131072, 128),
    "256 x 1k, MLA": _latent(256, 1024, 128),
    "chunk of 8192": Case(lengths=(8192,), queries=(8192,), contenders=(FLASH,)),
    "4 chunks of 2048": Case(lengths=(2048,) * 4, queries=(2048,) * 4, contenders=(FLASH,), pages=(16, 64)),
    "64 x 4k and chunks": Case(
        lengths=(4096,) * 64 + (4096, 512), queries=(1,) * 64 + (1024, 512), contenders=(), pages=(64,)
    ),
    "the chunks alone": Case(lengths=(4096, 512), queries=(1024, 512), contenders=(), pages=(64,)),
    "16 x 512": Case(lengths=(512,) * 16, contenders=(CUDNN,), pages=(64,)),
    "tiny": Case(lengths=(40, 7), pages=(16,), contenders=("xla",)),
}


# Times.


def batch_of(case: Case, page_size: int) -> tuple[jax.Array, ...]:
    """Return q, cache, page table with pages in random order, offsets and lengths."""
    heads, kv_heads = case.heads
    needed = [-(-length // page_size) for length in case.lengths]
    order = np.random.default_rng(1).permutation(sum(needed))
    table = np.zeros((len(needed), max(needed)), np.int32)
    for row, count, end in zip(table, needed, np.cumsum(needed), strict=True):
        row[:count] = order[end - count : end]
    shape = (len(order), page_size, kv_heads, 2 if case.value_dim is None else 1, case.head_dim)
    cache = jax.jit(lambda key: _narrowed(jax.random.normal(key, shape, jnp.bfloat16), case.cache))(jax.random.key(0))
    q = jax.random.normal(jax.random.key(1), (sum(case.counts), heads, case.head_dim), jnp.bfloat16)
    offsets = np.concatenate([[0], np.cumsum(case.counts)])
    return q, cache, *(jnp.asarray(x, jnp.int32) for x in (table, offsets, case.lengths))


def _narrowed(x: jax.Array, dtype: str) -> jax.Array:
    return jnp.clip(jnp.round(x * SPREAD), -127, 127).astype(dtype) if dtype == "int8" else x.astype(dtype)


def ours(case: Case, implementation: str, stages: int | None = None) -> Function:
    """Return the call with a plan."""
    cfg: Any = None
    if stages is not None:
        from ejkernel.kernels.paged_attention.mosaic_gpu.params import MosaicGpuParams

        cfg = PagedAttentionConfig(implementation=implementation, fwd=MosaicGpuParams(stages=stages))
    options: dict[str, Any] = case.scales | case.arguments
    return lambda args, plan: paged_attention(*args, plan=plan, implementation=implementation, cfg=cfg, **options)


def by_cudnn(case: Case, args: Sequence[jax.Array]) -> tuple[Function, tuple[Any, ...]]:
    """Return cuDNN's attention and its arguments, contiguous caches of random values."""
    q, cache, *_, lengths = args
    shape = (len(lengths), max(case.lengths), cache.shape[2], cache.shape[4])
    key, value = (jax.jit(lambda k: jax.random.normal(k, shape, jnp.bfloat16))(jax.random.key(i)) for i in (2, 3))

    def run(q: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q[:, None],
            key,
            value,
            query_seq_lengths=jnp.ones_like(lengths),
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )

    return run, (q, key, value, lengths)


def by_flash(case: Case, args: Sequence[jax.Array]) -> tuple[Function, tuple[Any, ...]]:
    """Return our dense causal attention and its arguments, keys and values of equally long sequences without pages."""
    q, cache = args[:2]
    count, shape = len(case.lengths), cache.shape[2::2]
    key, value = (cache[..., kind, :].reshape(count, -1, *shape)[:, : case.lengths[0]] for kind in (0, 1))
    return functools.partial(flash_attention, causal=True), (q.reshape(count, -1, *q.shape[1:]), key, value)


def by_plain(case: Case, args: Sequence[jax.Array]) -> tuple[Function, tuple[Any, ...]]:
    """Return latent attention to contiguous caches of equal lengths as two products of plain JAX, and its arguments."""
    q, cache = args[:2]
    key = cache.reshape(len(case.lengths), -1, case.head_dim)[:, : case.lengths[0]]
    scale = dict(case.options)["softmax_scale"]

    def run(q: jax.Array, key: jax.Array) -> jax.Array:
        logits = jnp.einsum("bhd,bsd->bhs", q, key, preferred_element_type=jnp.float32) * scale
        return jnp.einsum("bhs,bsd->bhd", jax.nn.softmax(logits).astype(q.dtype), key[..., : case.value_dim])

    return run, (q, key)


DENSE = {CUDNN: by_cudnn, FLASH: by_flash, PLAIN: by_plain}


def by_numpy(case: Case, args: Sequence[jax.Array], token: int) -> np.ndarray[Any, Any]:
    """Return the output of one token, in float32."""
    q, cache, table, offsets, lengths = args
    sequence = int(np.searchsorted(np.asarray(offsets), token, side="right")) - 1
    last = int(lengths[sequence]) - int(offsets[sequence + 1]) + token
    first = max(0, last - dict(case.options).get("sliding_window", last))
    both = np.asarray(cache[table[sequence]].astype(jnp.float32))
    both = both.reshape(-1, *both.shape[2:])[first : last + 1]
    query = np.asarray(q[token].astype(jnp.float32)).reshape(both.shape[1], -1, both.shape[-1])
    scale = dict(case.options).get("softmax_scale", both.shape[-1] ** -0.5)
    logits = np.einsum("kgd,skd->kgs", query, both[:, :, 0]) * (scale * case.scales.get("k_scale", 1))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    values = both[:, :, -1, : case.value_dim]
    out: np.ndarray[Any, Any] = np.einsum("kgs,skd->kgd", weights / weights.sum(-1, keepdims=True), values)
    return np.reshape(out * case.scales.get("v_scale", 1), (q.shape[1], -1))


def relative_error(actual: Any, expected: Any) -> float:
    """Return the norm of the difference relative to the norm of `expected`."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(f"{np.linalg.norm(actual - expected) / max(float(np.linalg.norm(expected)), 1e-30):.3g}")


def error_of(case: Case, args: Sequence[jax.Array], out: jax.Array) -> float:
    """Return the error of the first and last token, and of some others."""
    rng = np.random.default_rng(3)
    tokens = sorted({0, len(out) - 1, *rng.integers(0, len(out), CHECKED_TOKENS).tolist()})
    return relative_error(out[jnp.asarray(tokens)].astype(jnp.float32), [by_numpy(case, args, t) for t in tokens])


def timed(run: Function) -> dict[str, Any]:
    """Return the times of a call."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    number = max(3, min(50, int(0.05 / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(number):
        out = run()
    jax.block_until_ready(out)
    row: dict[str, Any] = {"us": round(1e6 * (time.perf_counter() - start) / number, 1)}
    if jax.default_backend() == "gpu":
        taken = [compat.cupti_seconds(run) for _ in range(RUNS)]
        known = [x for x in taken if x is not None]
        row["kernel_us"] = round(1e6 * float(np.median(known)), 1) if known else None
    return row


def seen_bytes(case: Case) -> int:
    """Return the bytes of the keys and values that some token sees."""
    window = dict(case.options).get("sliding_window", 1 << 30)
    keys: int = sum(min(length, window + count) for length, count in zip(case.lengths, case.counts, strict=True))
    kinds = 2 if case.value_dim is None else 1
    return kinds * keys * case.heads[1] * case.head_dim * jnp.dtype(case.cache).itemsize


def plan_of(*args: jax.Array, window: int | None) -> PagedPlan:
    """Return the whole schedule of a batch."""
    q, cache, table, offsets, lengths = args
    (pages, page_size, kv_heads), heads = cache.shape[:3], q.shape[1]
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "page_size": page_size, "sliding_window": window}
    return paged_plan(offsets, lengths, **sizes, tokens=len(q), pages=pages, page_table=table)


def measured(name: str, page_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each contender."""
    case = CASES[name]
    args = batch_of(case, page_size)
    make_plan = functools.partial(plan_of, window=dict(case.options).get("sliding_window"))
    plan = jax.jit(make_plan)(*args)
    runs: dict[str, Function] = {OURS: ours(case, OURS)}
    runs |= {f"{OURS}, {count} stages": ours(case, OURS, count) for count in case.stages}
    runs |= {contender: ours(case, contender) for contender in case.contenders if contender not in DENSE}
    for contender, function in runs.items():
        try:
            program = jax.jit(function).lower(args, plan).compile()
            out = jax.block_until_ready(program(args, plan))
            row: dict[str, Any] = {"error": error_of(case, args, out), "same": bool((program(args, plan) == out).all())}
            row |= timed(functools.partial(program, args, plan))
        except Exception as error:  # noqa: BLE001  # a contender's failure is a result, with its reason
            row = {"reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        yield contender, _with_rate(case, row)
    read = jax.jit(lambda *args: read_by_ours(make_plan(*args).arrays))
    yield PLAN, timed(lambda: read(*args))
    for contender, made in DENSE.items():
        if contender in case.contenders:
            function, own = made(case, args)
            yield contender, _with_rate(case, timed(functools.partial(jax.jit(function).lower(*own).compile(), *own)))


def read_by_ours(plan: Any) -> tuple[jax.Array, ...]:
    """Return the arrays of a plan that `mosaic_gpu` reads; `jax.jit` of a whole step computes no others."""
    return plan.offsets, plan.lengths, plan.short_tiles, plan.short_programs, plan.prefill_tiles, plan.prefill_ends


def _with_rate(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    if row.get("kernel_us"):
        row["gb_per_s"] = round(seen_bytes(case) / row["kernel_us"] / 1e3)
    return row


# Results of random batches.

VARIANTS: dict[str, dict[str, Any]] = {
    "page 16": {},
    "page 16, no plan": {"planned": False},
    "page 64, D64": {"page_size": 64, "head_dim": 64, "heads": (16, 2)},
    "page 8, MHA": {"page_size": 8, "heads": (3, 3)},
    "window, cap, sinks, lse": {
        "group": "options",
        "sliding_window": 100,
        "logits_soft_cap": 3.0,
        "sinks": True,
        "return_lse": True,
    },
    "scales, float16, MQA": {"group": "options", "dtype": "float16", "scaled": True, "heads": (16, 1)},
    "float8": {"group": "narrow", "cache": "float8_e4m3fn", "scaled": True, "return_lse": True},
    "int8, page 64, window, sinks": {
        "group": "narrow",
        "cache": "int8",
        "scaled": True,
        "page_size": 64,
        "sliding_window": 100,
        "sinks": True,
    },
    "float8, D64, cap": {
        "group": "narrow",
        "cache": "float8_e4m3fn",
        "head_dim": 64,
        "heads": (16, 2),
        "logits_soft_cap": 3.0,
    },
    "int8, float16, D64, MQA": {
        "group": "narrow",
        "cache": "int8",
        "dtype": "float16",
        "head_dim": 64,
        "heads": (16, 1),
        "scaled": True,
    },
    "page 256, lse": {"group": "options", "page_size": 256, "return_lse": True},
    "few tokens": {"group": "mixed", "most": 3, "return_lse": True},
    "mixed": {"group": "mixed", "most": 300, "return_lse": True, "sinks": True},
    "mixed, window, D64": {
        "group": "mixed",
        "most": 300,
        "sliding_window": 70,
        "head_dim": 64,
        "page_size": 64,
        "heads": (12, 4),
    },
}


def poisoned(
    rng: np.random.Generator,
    *,
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    most: int,
    dtype: str,
    cache: str | None,
) -> tuple[jax.Array, ...]:
    """Return a batch with NaN in unused slots, and indices outside of the cache where no page is needed."""
    lengths = rng.choice([0, 1, page_size - 1, page_size, page_size + 1, 64, 640, *rng.integers(0, 1500, 9)], 24)
    counts = np.minimum(rng.integers(1, most + 1, len(lengths)), np.maximum(lengths, 1))
    columns = -(-1500 // page_size) + 1
    table = rng.permutation(len(lengths) * columns).reshape(len(lengths), columns)
    pages = np.full((table.size, page_size, heads[1], 2, head_dim), np.nan, np.float32)
    for row, length in zip(table, lengths, strict=True):
        used = -(-length // page_size)
        own = rng.standard_normal((used * page_size, *pages.shape[2:]))
        own[length:] = np.nan
        pages[row[:used]] = own.reshape(used, *pages.shape[1:])
        row[used:] = rng.choice([-1, 10**9, -(2**31), 2**31 - 1, 0], columns - used)
    table[5, 0] = -7  # this sequence gives zeros
    padding = 5 if cache is None else 0  # with 8 bits, `mosaic_gpu` takes no more tokens than sequences
    q = rng.standard_normal((counts.sum() + padding, heads[0], head_dim))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return (
        jnp.asarray(q, dtype),
        jnp.asarray(np.nan_to_num(np.round(pages * SPREAD), nan=127).clip(-127, 127), cache)
        if cache == "int8"
        else jnp.asarray(pages, cache or dtype),
        *(jnp.asarray(x, jnp.int32) for x in (table, offsets, lengths)),
    )


def checked(case: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the errors of random batches, with a plan or without."""
    for name, given in VARIANTS.items():
        if case != f"check {given.get('group', 'decode')}":
            continue
        options: dict[str, Any] = {
            key: given[key] for key in ("sliding_window", "logits_soft_cap", "return_lse") if key in given
        }
        shape: dict[str, Any] = {"page_size": 16, "heads": (32, 8), "head_dim": 128, "most": 1, "dtype": "bfloat16"}
        shape["cache"] = None
        shape |= {key: given[key] for key in shape if key in given}
        heads, kv_heads = shape["heads"]
        args = poisoned(np.random.default_rng(len(name)), **shape)
        if "sinks" in given:
            options["sinks"] = jnp.linspace(-1, 1, heads)
        if "scaled" in given:
            unit = 1 / SPREAD if shape["cache"] == "int8" else 1.0
            scale = jnp.linspace(0.5 * unit, 2 * unit, kv_heads)
            options |= {"k_scale": scale, "v_scale": scale[::-1]}
        wide = [x.astype(jnp.float32) if x.dtype == shape["dtype"] else x for x in args]
        with jax.default_matmul_precision("highest"):
            want = jax.tree.leaves(jax.jit(functools.partial(paged_attention, implementation="xla", **options))(*wide))
        if given.get("planned", True):
            options["plan"] = plan_of(*args, window=options.get("sliding_window"))
        try:
            run = jax.jit(lambda *args, options=options: paged_attention(*args, implementation=OURS, **options))
            out, *lse = jax.tree.leaves(run(*args))
            row: dict[str, Any] = {"error": relative_error(np.asarray(out, np.float32), want[0])}
            if lse:
                row["lse"] = float(np.abs(np.nan_to_num(np.asarray(lse[0])) - np.nan_to_num(want[1])).max())
        except Exception as error:  # noqa: BLE001  # a failure is a result, with its reason
            row = {"reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        yield name, row


# Processes.


def measured_apart(case: str, pages: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return the results of a separate process; those before a crash or the time limit, with the reason."""
    # products in float32 would be autotuned for longer than they run
    flags = "--xla_gpu_autotune_level=0" if case in CHECKS else ""
    arguments = ("--one", case, "--pages", *map(str, pages))
    lines, reason = run_apart("benchmarks.paged_attention", *arguments, seconds=seconds, xla_flags=flags)
    rows = dict(json.loads(line) for line in lines if line.startswith("["))
    return rows | {"failure": {"reason": reason}} if reason else rows


def one(case: str, pages: Sequence[int]) -> None:
    """Print the results of a case with these page sizes, or its own, a line each."""
    if case in CHECKS:
        for name, row in checked(case):
            print(json.dumps([name, row]), flush=True)
        return
    for page_size in pages or CASES[case].pages:
        for name, row in measured(case, page_size):
            print(json.dumps([f"page {page_size}, {name}", row]), flush=True)


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table."""
    fields = ("us", "kernel_us", "gb_per_s", "error")
    lines = ["| | us | kernels us | GB/s | error |", "|---" * 5 + "|"]
    for case, rows in found.items():
        if case == "environment":
            continue
        for name, row in rows.items():
            cells = [str(row.get(field, "")) for field in fields]
            lines.append(f"| {case}, {name} | {' | '.join(cells)} {row.get('reason', '')} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paged_attention", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write paged_attention_<platform>.json and .md there")
    default = [*CHECKS, *(name for name in CASES if name != "tiny")]
    parser.add_argument("--cases", nargs="*", default=default, choices=[*CHECKS, *CASES], metavar="CASE")
    parser.add_argument("--pages", nargs="*", type=int, default=[], metavar="N", help="only pages of N tokens")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one process (default: %(default)s)")
    parser.add_argument("--total", type=float, default=3600.0, help="start no case after so many seconds")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        one(args.one, args.pages)
        return 0
    start = time.perf_counter()
    found: dict[str, Any] = {}
    for case in args.cases:
        left = args.total - (time.perf_counter() - start)
        if left < args.seconds / 4:
            found[case] = {"skipped": {"reason": "no time left"}}
            continue
        found[case] = measured_apart(case, args.pages, min(args.seconds, left))
        print(case, json.dumps(found[case]), file=sys.stderr, flush=True)
        if args.out is not None:  # written after each process, in case a later one fails
            report.write(args.out, f"paged_attention_{report.platform_name()}", found, table(found))
    found["environment"] = report.environment()
    if args.out is not None:
        report.write(args.out, f"paged_attention_{report.platform_name()}", found, table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
