# SPDX-License-Identifier: Apache-2.0
"""Batches for measuring: the lengths of sequences as servers meet them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

_CHUNK_SHARE = 0.25  # share of the sequences that prefill in a mixed batch


class Batch(NamedTuple):
    """The lengths of a batch: `query_offsets` and `kv_lengths`."""

    offsets: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]


def example_batches(tokens: int, sequences: int, most: int, rng: np.random.Generator) -> dict[str, Batch]:
    """Return batches of up to `most` keys per sequence, by kind.

    - `uniform`: sequences of the same length with the same number of new tokens.
    - `long-tailed`: most sequences are short, few are long.
    - `mixed`: a few sequences prefill a chunk, and the others decode.

    Args:
        tokens: New tokens of all sequences.
        sequences: The number of sequences.
        most: The largest length.
        rng: Source of random numbers.
    """
    if not sequences:
        return {"uniform": Batch(np.zeros(1, np.int64), np.zeros(0, np.int64))}
    even = np.diff(np.linspace(0, tokens, sequences + 1).astype(np.int64))
    mixed = np.minimum(np.arange(sequences) < tokens, 1)
    chunks = max(1, int(sequences * _CHUNK_SHARE))
    mixed[rng.choice(min(sequences, max(tokens, 1)), min(chunks, max(tokens, 1)), replace=False)] += (
        max(tokens - sequences, 0) // chunks
    )
    tail = np.minimum(most * (0.05 + 0.05 * rng.pareto(1.2, sequences)), most).astype(np.int64)
    return {
        "uniform": _batch(even, np.full(sequences, most), most),
        "long-tailed": _batch(even, tail, most),
        "mixed": _batch(mixed, rng.integers(0, most + 1, sequences), most),
    }


def _batch(queries: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], most: int) -> Batch:
    """Return a batch whose sequences are at least as long as their new tokens, which count."""
    queries = np.minimum(queries, most)
    return Batch(np.concatenate([[0], np.cumsum(queries)]), np.maximum(lengths, queries))
