# SPDX-License-Identifier: Apache-2.0
"""Serve random requests with a small decoder: continuous batching over a paged cache.

    python examples/serving/serve.py [--requests 1000] [--compare]

Requests arrive, are prefilled in chunks, generate, stop early, fork and are preempted. Every text must equal that of
the same model without a cache, token for token, and all pages must be free at the end.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from model import Attend, Batch, Model, caches, gathered, paged, parameters, step, whole
from server import Counts, Request, Server

PAGES = 100  # few, so that requests are preempted
STEPS_ON_A_GPU = 8  # that are queued before the host waits
LARGER = Model(layers=4, width=512, heads=16, kv_heads=4, head_dim=64, dtype="bfloat16")
FOR_A_GPU = Model(layers=8, width=4096, heads=32, kv_heads=8, head_dim=128, vocabulary=32_000, dtype="bfloat16")


def serve(server: Server, count: int, rng: np.random.Generator, vocabulary: int) -> tuple[list[Request], int, int]:
    """Serve random requests. Return those with a complete text, and how many were forked and how many cancelled."""
    finished: list[Request] = []
    live: list[Request] = []
    forked = cancelled = 0
    while count or server.waiting or server.running:
        for _ in range(min(count, rng.poisson(0.4))):
            prompt = rng.integers(0, vocabulary, rng.integers(1, 60)).tolist()
            stop = int(rng.integers(vocabulary)) if rng.random() < 0.5 else None
            live.append(server.submit(prompt, len(prompt) + int(rng.integers(1, 40)), stop))
            count -= 1
        if live and rng.random() < 0.05:
            server.cancel(live.pop(int(rng.integers(len(live)))))
            cancelled += 1
        if live and rng.random() < 0.1:
            live.append(server.fork(live[int(rng.integers(len(live)))], int(rng.integers(vocabulary))))
            forked += 1
        if server.waiting or server.running:
            done = server.step()
            finished += done
            live = [request for request in live if request not in done]
    return finished, forked, cancelled


def wrong_texts(model: Model, weights: Any, requests: list[Request]) -> int:
    """Return how many texts differ from those of the model without a cache."""
    predict = jax.jit(functools.partial(whole, model))
    wrong = 0
    for request in requests:
        tokens = jnp.asarray(request.tokens + [0] * (128 - len(request.tokens)))  # one shape
        predicted = np.asarray(predict(weights, tokens)).tolist()
        wrong += request.tokens[request.prompt :] != predicted[request.prompt - 1 : len(request.tokens) - 1]
    return wrong


def decode_steps(model: Model, lengths: list[int], attend: Attend, count: int = 1, page_size: int = 16) -> Any:
    """Return a function that runs some decode steps of sequences of these lengths, and blocks until they are done.

    Each step takes the tokens that the previous one returned, on the device, and writes them to the same slots.
    """
    weights, sequences = parameters(model), len(lengths)
    columns = -(-max(lengths) // page_size)
    table = np.random.default_rng(0).permutation(sequences * columns).reshape(sequences, columns).astype(np.int32)
    ends, offsets = np.asarray(lengths, np.int32), np.arange(sequences + 1, dtype=np.int32)
    batch = Batch(*map(jnp.asarray, (offsets[:-1], ends - 1, table, offsets, ends)))
    run = jax.jit(functools.partial(step, model, attend=attend), donate_argnums=1)
    cached = caches(model, sequences * columns, page_size)

    def all_steps() -> None:
        nonlocal cached, batch
        for _ in range(count):
            found, cached = run(weights, cached, batch)
            batch = batch._replace(tokens=found)
        batch.tokens.block_until_ready()

    return all_steps


def compare(turns: int = 15) -> None:
    """Print the time of a decode step with `paged_attention`, and with a gather and `jax.nn`, in interleaved steps.

    On a GPU some steps are queued at once, as by a server that schedules ahead of the results.
    """
    rng, on_gpu = np.random.default_rng(0), jax.default_backend() == "gpu"
    model, queued = (FOR_A_GPU, STEPS_ON_A_GPU) if on_gpu else (LARGER, 1)
    count, length, low, high = (64, 4096, 128, 8192) if on_gpu else (16, 1024, 32, 2048)
    attends = {"paged_attention": paged, "gather + jax.nn": gathered}
    if on_gpu:
        attends["gather + cuDNN"] = functools.partial(gathered, implementation="cudnn")
    ragged = rng.integers(low, high + 1, count).tolist()
    for name, lengths in ((f"{count} x {length:,}", [length] * count), (f"{count} of {low}..{high:,}", ragged)):
        steps = {kind: decode_steps(model, lengths, attend, queued) for kind, attend in attends.items()}
        medians = {kind: seconds / queued for kind, seconds in median_times(steps, turns).items()}
        size = sum(lengths) * model.layers * model.kv_heads * 2 * model.head_dim * jnp.dtype(model.dtype).itemsize
        for kind, seconds in medians.items():
            rate, bandwidth, ratio = count / seconds, size / seconds / 1e9, seconds / medians["paged_attention"]
            print(
                f"{name:17} {kind:16} {1e3 * seconds:8.1f} ms  {rate:8.0f} tokens/s  {bandwidth:7.2f} GB/s of KV"
                f"  {ratio:5.2f} x"
            )


def median_times(steps: dict[str, Any], turns: int) -> dict[str, float]:
    """Return the median seconds of each step, all run in turn; the first run of each compiles."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range(turns + 1):
        for kind, once in steps.items():
            begin = time.perf_counter()
            once()
            times[kind] += [time.perf_counter() - begin] * (turn > 0)
    return {kind: statistics.median(own) for kind, own in times.items()}


def main() -> int:
    """Serve, print the figures, and return 1 if a text is wrong or a page is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="time decode steps of a larger model instead")
    args = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores, JAX {jax.__version__}, {today}")
    if args.compare:
        compare()
        return 0
    model = Model()
    weights = parameters(model)
    server = Server(model, weights, pages=PAGES, page_size=4, slots=12, longest=100)
    server.submit([0] * 60, 64)
    server.run()  # compiles
    server.counts = Counts()
    finished, forked, cancelled = serve(server, args.requests, np.random.default_rng(args.seed), model.vocabulary)
    counts, wrong, lost = server.counts, wrong_texts(model, weights, finished), PAGES - server.pool.free_pages
    missing = args.requests + forked - cancelled - len(finished)
    print(f"requests: {args.requests}, forked: {forked}, cancelled: {cancelled}, preempted: {counts.preempted}")
    print(f"steps: {counts.steps}, copied pages: {counts.copied_pages}, generated tokens: {counts.generated}")
    print(
        f"{counts.generated / counts.seconds:.0f} tokens/s, {counts.cache_bytes / counts.seconds / 1e9:.3f} GB/s of KV"
    )
    print(f"missing requests: {missing}, wrong texts: {wrong}, lost pages: {lost}")
    return 1 if missing or wrong or lost else 0


if __name__ == "__main__":
    sys.exit(main())
