# SPDX-License-Identifier: Apache-2.0
"""A winner checked on further sets of inputs: other random numbers, larger, smaller, mirrored, and zeros.

Every candidate runs on the first set. Only a candidate about to win runs on the others, so they cost little. A
candidate that is wrong for half of all inputs passes one set in two by luck, and all ten in about one search of a
thousand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ejkernel.ops.autotuner.bench.oracle import REFERENCE, Oracle
from ejkernel.ops.autotuner.measure.correctness import Deviation, deviations, is_all_finite
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.naming import result_names
from ejkernel.ops.core.transformations.nodes import is_inexact
from ejkernel.ops.errors import CandidateError
from ejkernel.ops.utils.error_text import error_text

_FRESH: Final = 8  # further sets
_SCALES: Final = (-1.0, 1e-2, 30.0, 0.0)  # factors on the floating-point inputs of one more set
_SECONDS: Final = 20.0  # after which no further set is begun
_LEAST: Final = 4  # sets tried in any case
# Scaled inputs are harder to compute with: rounding is forgiven as far as the heuristic rounds as well.
_SLACK: Final = 10.0
_TIMES_HEURISTIC: Final = 8.0


def check_on_more(oracle: Oracle, candidate: Candidate) -> int:
    """Check a winner on further sets of inputs, and return on how many it was compared.

    Args:
        oracle: The call, or several.
        candidate: The winner, compiled.

    Raises:
        CandidateError: its results are wrong on one of them.
    """
    assert candidate.compiled is not None
    start, compared = time.perf_counter(), 0
    for number, one in enumerate(oracle.all):
        for tried, (seed, scale) in enumerate(_sets(one)):
            spent = time.perf_counter() - start
            if tried >= _LEAST and (spent > _SECONDS or spent > one.left()):
                break
            oracle.begin(REFERENCE)
            for draw, arrays in one.inputs_of(seed, scale).items():
                truth = one.truth_about(one.inv.node, arrays)
                oracle.begin("confirming", candidate.config)
                where = "on other inputs" if scale == 1.0 else f"on inputs multiplied by {scale:g}"
                try:
                    counts = _compare(one, candidate.compiled[number], arrays, truth, scale)
                except CandidateError as error:
                    where = ", ".join(filter(None, (one.called, draw, where)))
                    raise CandidateError(f"{where}: {error}") from None
                compared += counts and number == 0
    return compared


def _sets(oracle: Oracle) -> Iterator[tuple[int, float]]:
    """Yield seed and scale of each further set; scaled ones first, which find more."""
    if oracle.has_fixed_inputs:
        return
    if oracle.may_be_scaled:
        yield from ((oracle.seed, scale) for scale in _SCALES)
    yield from ((oracle.seed + number, 1.0) for number in range(1, _FRESH + 1 - len(_SCALES) * oracle.may_be_scaled))


def _compare(oracle: Oracle, program: Any, arrays: Sequence[Any], truth: Sequence[Any], scale: float) -> bool:
    """Compare results on one set; return `False` if they cannot be compared, e.g. because the reference overflows.

    Raises:
        CandidateError: they are wrong.
    """
    if scale != 1.0 and not all(map(is_all_finite, truth)):
        return False
    try:
        results = jax.block_until_ready(program(*arrays))
    except BaseException as error:  # noqa: BLE001 - a candidate may fail in every way
        raise CandidateError(f"it fails: {error_text(error)}") from None
    if scale == 1.0:
        oracle.compare(results, truth, result_names(oracle.inv.node))
        return True
    wrong = [found for found in _deviations(oracle, results, truth, scale) if _is_far_off(found)]
    if not wrong:
        return True
    choice = oracle.choice
    usual = jax.block_until_ready(jax.jit(oracle.inv.node.flat(choice))(*arrays))
    of_heuristic = max(found.error for found in _deviations(oracle, usual, truth, scale))
    for found in wrong:
        if found.error > _TIMES_HEURISTIC * of_heuristic:
            raise CandidateError(found.reason)
    return False


def _is_far_off(found: Deviation) -> bool:
    return bool(found.reason) and found.error > _SLACK * found.allowed


def _deviations(oracle: Oracle, results: Sequence[Any], truth: Sequence[Any], scale: float) -> list[Deviation]:
    """Return how far floating-point results are off; of zeros, relative to one."""
    shift = 1 if scale == 0.0 else 0
    pairs = [(jnp.add(r, shift), jnp.add(t, shift)) for r, t in zip(results, truth, strict=True) if is_inexact(r)]
    names = result_names(oracle.inv.node) or [f"result {index}" for index in range(len(truth))]
    return list(
        deviations(
            [result for result, _ in pairs],
            [true for _, true in pairs],
            platform=oracle.inv.platform,
            precision=oracle.inv.precision,
            names=[name for name, result in zip(names, results, strict=True) if is_inexact(result)],
        )
    )
