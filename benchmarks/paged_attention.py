# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.paged_attention`: paged attention on a GPU.

First the results of batches with random lengths (0, 1, whole pages) against plain JAX in float32, with NaN in every
slot of the cache without a key, and page indices outside of the cache behind each sequence. Then times. The contenders:
`mosaic_gpu` with a plan, other numbers of pipeline stages, `xla`, also with other sizes of blocks, and on contiguous
caches cuDNN (of the same lengths, padded to the longest), our causal `flash_attention` or, for latent attention, plain
JAX. The figure of `paged_plan` is that of the arrays that `mosaic_gpu` reads, computed by one kernel, or by XLA.

Each case has its own process. With `--at-once`, several compile side by side, and then one at a time measures.
`kernel_us` is the sum of the kernels of one call, the median of several; `us` is the host clock's time per call of
calls in a row; `gb_per_s` counts the keys and values that are seen, in `kernel_us`. `error` is relative to NumPy in
float32, for some sequences.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.apart import run_apart
from benchmarks.paged_attention_cases import (
    CASES,
    CUDNN,
    FLASH,
    OURS,
    PLAIN,
    PLAN,
    SPREAD,
    UNPLANNED,
    Case,
    plan_of,
)
from benchmarks.paged_attention_checks import CHECKS, checked, relative_error
from ejkernel import compat
from ejkernel.kernels.paged_attention.plan import Schedules
from ejkernel.kernels.paged_attention.xla import XlaParams
from ejkernel.modules import PagedAttentionConfig, flash_attention, paged_attention

RUNS, CHECKED_TOKENS = 11, 12
Function = Callable[..., Any]


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


def ours(case: Case, implementation: str, params: Any = None) -> Function:
    """Return the call with a plan."""
    cfg = None if params is None else PagedAttentionConfig(implementation=implementation, fwd=params)
    options: dict[str, Any] = case.scales | case.arguments
    if implementation == UNPLANNED:
        return lambda args, plan: paged_attention(*args, implementation=OURS, **options)
    return lambda args, plan: paged_attention(*args, plan=plan, implementation=implementation, cfg=cfg, **options)


def others(case: Case, page_size: int) -> dict[str, Function]:
    """Return the calls with the other parameters of a case."""
    from ejkernel.kernels.paged_attention.mosaic_gpu.plan import MosaicGpuParams

    stages = {f"{OURS}, {count} stages": ours(case, OURS, MosaicGpuParams(stages=count)) for count in case.stages}
    sizes = {tokens: XlaParams(block_pages=tokens // page_size, tiles=len(case.lengths)) for tokens in case.blocks}
    return stages | {f"xla, blocks of {tokens}": ours(case, "xla", own) for tokens, own in sizes.items()}


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
    window = dict(case.options).get("sliding_window")
    run = functools.partial(flash_attention, causal=True, sliding_window=None if window is None else (window, 0))
    return run, (q.reshape(count, -1, *q.shape[1:]), key, value)


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


def by_numpy(
    case: Case, args: Sequence[Any], token: int, keys: Callable[[int], np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    """Return the output of one token, in float32; `keys` returns the cached keys and values of a sequence."""
    q, _, _, offsets, lengths = args
    sequence = int(np.searchsorted(np.asarray(offsets), token, side="right")) - 1
    last = int(lengths[sequence]) - int(offsets[sequence + 1]) + token
    first = max(0, last - dict(case.options).get("sliding_window", last))
    both = keys(sequence)[first : last + 1]
    query = np.asarray(q[token], np.float32).reshape(both.shape[1], -1, both.shape[-1])
    scale = dict(case.options).get("softmax_scale", both.shape[-1] ** -0.5)
    logits = np.einsum("kgd,skd->kgs", query, both[:, :, 0]) * (scale * case.scales.get("k_scale", 1))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    values = both[:, :, -1, : case.value_dim]
    out: np.ndarray[Any, Any] = np.einsum("kgs,skd->kgd", weights / weights.sum(-1, keepdims=True), values)
    return np.reshape(out * case.value_scale, (q.shape[1], -1))


def wanted(case: Case, args: Sequence[jax.Array]) -> dict[int, np.ndarray[Any, Any]]:
    """Return the outputs of the first and last token, and of some others."""
    q, cache, table, *rest = args
    tokens = {0, len(q) - 1, *np.random.default_rng(3).integers(0, len(q), CHECKED_TOKENS).tolist()}
    pages = jax.jit(lambda cache, row: cache[row].astype(jnp.float32))

    @functools.lru_cache(1)  # the tokens ascend
    def keys(sequence: int) -> np.ndarray[Any, Any]:
        both = np.asarray(pages(cache, table[sequence]))
        return both.reshape(-1, *both.shape[2:])

    on_host = np.asarray(q), cache, table, *map(np.asarray, rest)
    return {token: by_numpy(case, on_host, token, keys) for token in sorted(tokens)}


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
        taken = [compat.executables.cupti_seconds(run) for _ in range(RUNS)]
        known = [x for x in taken if x is not None]
        row["kernel_us"] = round(1e6 * float(np.median(known)), 1) if known else None
    return row


def seen_bytes(case: Case) -> int:
    """Return the bytes of the keys and values that some token sees."""
    window = dict(case.options).get("sliding_window", 1 << 30)
    keys: int = sum(min(length, window + count) for length, count in zip(case.lengths, case.counts, strict=True))
    kinds = 2 if case.value_dim is None else 1
    return kinds * keys * case.heads[1] * case.head_dim * jnp.dtype(case.cache).itemsize


class Prepared(NamedTuple):
    """The compiled programs of a case; for a contender that cannot be compiled, the reason."""

    case: Case
    page_size: int
    args: Any
    plan: Any
    ours: dict[str, Any]
    read: dict[str, Any]  # the arrays of a plan that `mosaic_gpu` reads
    dense: dict[str, tuple[Any, Any]]  # the program, and that of its arguments


def prepared(name: str, page_size: int, only: Sequence[str] = ()) -> Prepared:
    """Compile all contenders of a case, or ours and these; no array is on the device."""
    case = CASES[name]
    batch = jax.jit(lambda: batch_of(case, page_size)).lower()
    args: Any = batch.out_info
    make_plan = functools.partial(plan_of, window=dict(case.options).get("sliding_window"))
    plan = jax.eval_shape(make_plan, *args)
    runs: dict[str, Function] = {OURS: ours(case, OURS)}
    runs |= others(case, page_size)
    runs |= {contender: ours(case, contender) for contender in case.contenders if contender not in DENSE}
    runs = {contender: run for contender, run in runs.items() if not only or contender in {OURS, *only}}
    programs: dict[str, Any] = {}
    for contender, function in runs.items():
        try:
            programs[contender] = jax.jit(function).lower(args, plan).compile()
        except Exception as error:  # noqa: BLE001  # a contender's failure is a result, with its reason
            programs[contender] = _reason(error)
    chosen = [contender for contender in case.contenders if contender in DENSE and (not only or contender in only)]
    dense = {contender: _dense(case, contender, args) for contender in chosen}
    by_token = case.value_dim is not None and case.queries is not None
    schedules = Schedules(plan.shape, by_token=by_token)
    read = {
        PLAN: lambda *args: read_by_ours(make_plan(*args).arrays, by_token=by_token),
        f"{PLAN}, xla": lambda *args: schedules.plain(args[3], args[4], args[2])[2:],
    }
    plans = {contender: jax.jit(function).lower(*args).compile() for contender, function in read.items()}
    own_plan = jax.jit(make_plan).lower(*args).compile()
    return Prepared(case, page_size, batch.compile(), own_plan, programs, plans, dense)


def _dense(case: Case, contender: str, args: Any) -> tuple[Any, Any]:
    functions = []

    def arguments(args: Any) -> Any:
        function, own = DENSE[contender](case, args)
        functions.append(function)
        return own

    make = jax.jit(arguments).lower(args)
    return jax.jit(functions[0]).lower(*make.out_info).compile(), make.compile()


def measured(given: Prepared) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each contender."""
    case, args = given.case, given.args()
    plan, want = given.plan(*args), wanted(case, args)
    for contender, program in given.ours.items():
        if isinstance(program, str):
            yield contender, {"reason": program}
            continue
        try:
            out = jax.block_until_ready(program(args, plan))
            found, again = np.asarray(out), np.asarray(program(args, plan))
            error = relative_error([found[token].astype(np.float32) for token in want], list(want.values()))
            row: dict[str, Any] = {"error": error, "same": bool((found == again).all())}
            row |= timed(functools.partial(program, args, plan))
        except Exception as failure:  # noqa: BLE001  # as above
            row = {"reason": _reason(failure)}
        yield contender, _with_rate(case, row)
    for contender, program in given.read.items():
        yield contender, timed(functools.partial(program, *args))
    for contender, (program, make) in given.dense.items():
        own = make(args)
        yield contender, _with_rate(case, timed(functools.partial(program, *own)))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def read_by_ours(plan: Any, *, by_token: bool) -> tuple[jax.Array, ...]:
    """Return the arrays of a plan that `mosaic_gpu` reads; `jax.jit` of a whole step computes no others.

    With `return_lse` it also reads the offsets, and the lengths with an 8-bit cache.
    """
    if by_token:
        return plan.token_tiles, plan.token_programs
    return plan.short_tiles, plan.short_programs, plan.prefill_tiles, plan.prefill_ends


def _with_rate(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    if row.get("kernel_us"):
        row["gb_per_s"] = round(seen_bytes(case) / row["kernel_us"] / 1e3)
    return row


def measured_apart(
    case: str, pages: Sequence[int], seconds: float, lock: str = "", only: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the results of a separate process; those before a crash or the time limit, with the reason."""
    # products in float32 would be autotuned for longer than they run
    flags = "--xla_gpu_autotune_level=0" if case in CHECKS else ""
    arguments = ("--one", case, "--lock", lock, "--contenders", *only, "--pages", *map(str, pages))
    lines, reason = run_apart("benchmarks.paged_attention", *arguments, seconds=seconds, xla_flags=flags)
    rows = dict(json.loads(line) for line in lines if line.startswith("["))
    return rows | {"failure": {"reason": reason}} if reason else rows


@contextlib.contextmanager
def locked(path: str, *, alone: bool) -> Iterator[None]:
    """Hold the lock of the processes of `--at-once`: several may compile, and one measures while none compiles."""
    with open(path or os.devnull, "w", encoding="utf-8") as file:
        if path:
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def one(case: str, pages: Sequence[int], lock: str, only: Sequence[str]) -> None:
    """Print the results of a case with these page sizes, or its own, a line each."""
    if case in CHECKS:
        with locked(lock, alone=True):
            for name, row in checked(case):
                print(json.dumps([name, row]), flush=True)
        return
    with locked(lock, alone=False):
        own = [prepared(case, page_size, only) for page_size in pages or CASES[case].pages]
    with locked(lock, alone=True):
        for given in own:
            for name, row in measured(given):
                print(json.dumps([f"page {given.page_size}, {name}", row]), flush=True)


def all_measured(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case with its results, as soon as they are known."""
    start, cases = time.perf_counter(), list(args.cases)
    with tempfile.NamedTemporaryFile() as file, concurrent.futures.ThreadPoolExecutor(args.at_once) as threads:
        for first in range(0, len(cases), args.at_once):
            group, left = cases[first : first + args.at_once], args.total - (time.perf_counter() - start)
            if left < args.seconds / 4:
                yield from ((case, {"skipped": {"reason": "no time left"}}) for case in group)
                continue
            lock, seconds = file.name if args.at_once > 1 else "", min(args.seconds * len(group), left)
            found = {
                threads.submit(measured_apart, case, args.pages, seconds, lock, args.contenders): case for case in group
            }
            for done in concurrent.futures.as_completed(found):
                yield found[done], done.result()


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
    parser.add_argument("--contenders", nargs="*", default=[], metavar="NAME", help="only these and mosaic_gpu")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="limit of one process, or its share (default: %(default)s)"
    )
    parser.add_argument("--total", type=float, default=3600.0, help="start no case after so many seconds")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="cases to compile before their times")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        one(args.one, args.pages, args.lock, args.contenders)
        return 0
    found: dict[str, Any] = {}
    for case, rows in all_measured(args):
        found[case] = rows
        print(case, json.dumps(rows), file=sys.stderr, flush=True)
        if args.out is not None:  # written after each process, in case a later one fails
            report.write(args.out, f"paged_attention_{report.platform_name()}", found, table(found))
    found["environment"] = report.environment()
    if args.out is not None:
        report.write(args.out, f"paged_attention_{report.platform_name()}", found, table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
