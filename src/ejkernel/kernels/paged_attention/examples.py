# SPDX-License-Identifier: Apache-2.0
"""Batches for measuring: the lengths of sequences as servers meet them, or as a server has recorded them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ejkernel import settings
from ejkernel.ops.errors import ArgumentError, SerializationError
from ejkernel.ops.utils.storage.serialize import parse_json

_LARGEST = 1 << 26  # bytes of a file of batches
_RECORDED = 4  # recorded batches with which a call is measured
_FORM = '{"query_lengths": [1, 1, 512], "kv_lengths": [4096, 70, 512]}'
_CHUNK_SHARE = 0.25  # share of the sequences that prefill in a mixed batch


class Batch(NamedTuple):
    """The lengths of a batch: `query_offsets` and `kv_lengths`."""

    offsets: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]


def measured_batches(tokens: int, sequences: int, most: int, rng: np.random.Generator) -> dict[str, Batch]:
    """Return batches to measure a call with, by name: recorded batches of its size, or else `example_batches`.

    Recorded batches come from the file that `EJKERNEL_BATCHES` names.

    Args:
        tokens, sequences: Rounded-up numbers of new tokens and sequences. A recorded batch must have more than half of
            each, and not more than these.
        most: The largest number of keys of a sequence.
        rng: For `example_batches`.

    Raises:
        ArgumentError: The file cannot be read, or is no file of batches.
    """
    path = settings.current().batches
    found = [] if path is None else _fitting(path, tokens, sequences, most)
    return dict(found) or example_batches(tokens, sequences, most, rng)


def _fitting(path: Path, tokens: int, sequences: int, most: int) -> Iterator[tuple[str, Batch]]:
    """Yield some batches that round up to these numbers of tokens and sequences, with few keys and with many."""
    fits = []
    for queries, lengths in _recorded(path):
        near = tokens < 2 * queries.sum() and sequences < 2 * len(lengths)
        if near and queries.sum() <= tokens and len(lengths) <= sequences and lengths.max() <= most:
            fits.append((queries, lengths))
    fits.sort(key=lambda batch: int(batch[1].sum()))
    for index in sorted({round(at) for at in np.linspace(0, len(fits) - 1, min(_RECORDED, len(fits)))}):
        queries, lengths = (np.pad(x, (0, sequences - len(x))) for x in fits[index])
        yield f"recorded {index + 1} of {len(fits)}", _batch(queries, lengths, most)


@functools.lru_cache(maxsize=1)
def _recorded(path: Path) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return the new tokens and the keys of each sequence, of all batches of a file."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ArgumentError(f"EJKERNEL_BATCHES: {path} is larger than the limit of {_LARGEST} bytes.")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"EJKERNEL_BATCHES: {path} cannot be read: {error}") from error
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(path: Path, number: int, line: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    problem, got = f"EJKERNEL_BATCHES: {path}, line {number} must be a batch such as {_FORM}", line.strip()[:80]
    try:
        data = parse_json(line)
    except SerializationError as error:
        raise ArgumentError(f"{problem}; got {got}") from error
    if not isinstance(data, dict) or data.keys() != {"query_lengths", "kv_lengths"}:
        raise ArgumentError(f"{problem}; got {got}")
    for value in data.values():
        is_list = isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 31 for x in value)
        if not is_list or not value or len(value) != len(data["kv_lengths"]):
            raise ArgumentError(f"{problem}, with as many integers of at least 0 in both lists; got {got}")
    queries, lengths = (np.asarray(data[name], np.int64) for name in ("query_lengths", "kv_lengths"))
    if (queries > lengths).any() or not queries.sum():
        raise ArgumentError(f"{problem}: kv_lengths count the new tokens as well, of which there is at least one.")
    return queries, lengths


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
    """Return a batch of sequences at least as long as their new tokens, which count."""
    queries = np.minimum(queries, most)
    return Batch(np.concatenate([[0], np.cumsum(queries)]), np.maximum(lengths, queries))
