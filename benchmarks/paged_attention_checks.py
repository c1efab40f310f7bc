# SPDX-License-Identifier: Apache-2.0
"""The checks of `benchmarks.paged_attention`: batches with random lengths, with NaN in unused slots of the cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.paged_attention_cases import OURS, SPREAD, plan_of
from ejkernel.modules import paged_attention

CHECKS = ("check decode", "check options", "check narrow", "check mixed", "check columns")

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
    "int8, mixed": {"group": "narrow", "cache": "int8", "most": 300, "scaled": True, "return_lse": True},
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
    "D256": {"group": "columns", "head_dim": 256, "heads": (40, 8), "return_lse": True},
    "D256, page 64, window, cap, sinks": {
        "group": "columns",
        "head_dim": 256,
        "heads": (8, 1),
        "page_size": 64,
        "sliding_window": 100,
        "logits_soft_cap": 3.0,
        "sinks": True,
    },
    "D256, few tokens": {"group": "columns", "head_dim": 256, "heads": (16, 2), "most": 3, "return_lse": True},
    "D256, mixed": {"group": "columns", "head_dim": 256, "heads": (40, 8), "most": 300, "return_lse": True},
    "D256, mixed, window, cap": {
        "group": "columns",
        "head_dim": 256,
        "heads": (16, 8),
        "most": 300,
        "page_size": 64,
        "sliding_window": 70,
        "logits_soft_cap": 3.0,
        "sinks": True,
    },
    "D256, int8, mixed": {
        "group": "columns",
        "head_dim": 256,
        "heads": (16, 8),
        "cache": "int8",
        "most": 300,
        "scaled": True,
    },
    "D256, float8": {"group": "columns", "head_dim": 256, "cache": "float8_e4m3fn", "scaled": True, "return_lse": True},
    "D192, page 8": {"group": "columns", "head_dim": 192, "page_size": 8, "return_lse": True},
    "D96": {"group": "columns", "head_dim": 96, "heads": (32, 32), "return_lse": True},
    "D96, page 64, mixed": {"group": "columns", "head_dim": 96, "heads": (8, 8), "page_size": 64, "most": 300},
    "D80, page 8, mixed, lse": {
        "group": "columns",
        "head_dim": 80,
        "heads": (8, 8),
        "page_size": 8,
        "most": 300,
        "return_lse": True,
    },
    "D80, int8": {"group": "columns", "head_dim": 80, "heads": (8, 8), "cache": "int8", "scaled": True},
    "D112, float8, mixed": {"group": "columns", "head_dim": 112, "cache": "float8_e4m3fn", "most": 300},
    "D16, page 64, mixed": {"group": "columns", "head_dim": 16, "page_size": 64, "most": 300},
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
    padding = 5 if cache is None or most > 1 else 0  # with more tokens than sequences, an 8-bit cache is copied
    q = rng.standard_normal((counts.sum() + padding, heads[0], head_dim))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return (
        jnp.asarray(q, dtype),
        jnp.asarray(np.nan_to_num(np.round(pages * SPREAD), nan=127).clip(-127, 127), cache)
        if cache == "int8"
        else jnp.asarray(pages, cache or dtype),
        *(jnp.asarray(x, jnp.int32) for x in (table, offsets, lengths)),
    )


def relative_error(actual: Any, expected: Any) -> float:
    """Return the norm of the difference relative to the norm of `expected`."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(f"{np.linalg.norm(actual - expected) / max(float(np.linalg.norm(expected)), 1e-30):.3g}")


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
