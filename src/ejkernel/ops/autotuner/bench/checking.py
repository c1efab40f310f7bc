# SPDX-License-Identifier: Apache-2.0
"""Compares the results of candidates with the reference results.

Every candidate runs on the first set of inputs. Only a candidate about to win runs on further sets (other random
numbers; larger, smaller, mirrored; zeros), so they cost little. A candidate that is wrong for half of all inputs passes
one set in two by luck, and all ten in about one search of a thousand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ejkernel.ops.autotuner.bench.oracle import REFERENCE, Oracle, Workload, result_names
from ejkernel.ops.autotuner.measure.correctness import Deviation, deviations, is_all_finite
from ejkernel.ops.autotuner.measure.measurement import check_room, largest, output_bytes, peak_bytes
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.errors import CandidateError, DeviceLostError, TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.values.signature import is_inexact

_FRESH: Final = 8  # further sets
_SCALES: Final = (-1.0, 1e-2, 30.0, 0.0)  # factors on the floating-point inputs of one more set
_SECONDS: Final = 20.0  # after which no further set is begun
_LEAST: Final = 4  # sets tried in any case
# A kernel with a race condition is correct most of the time: 32 runs find one that is wrong in 10 % of its runs with a
# probability of 97 %.
_RUNS: Final = 32
_RUNS_SECONDS: Final = 1.0  # after which no further run is begun
# Scaled inputs are harder to compute with: rounding is forgiven as far as the heuristic rounds as well.
_SLACK: Final = 10.0
_TIMES_HEURISTIC: Final = 8.0


def check(oracle: Oracle, candidate: Candidate, compiled: Sequence[Any]) -> None:
    """Run a candidate on all inputs of all calls, and record its outcome.

    Args:
        oracle: The call or calls, with their inputs.
        candidate: The candidate.
        compiled: Its program for each call.

    Raises:
        DeviceLostError: The device no longer works in this process.
    """
    oracle.watch.begin("running", [candidate.config], oracle.limits.run.seconds)
    with oracle.settings.during(repr(candidate.config)):
        _run_and_judge(oracle, candidate, compiled)


def _run_and_judge(oracle: Oracle, candidate: Candidate, compiled: Sequence[Any]) -> None:
    limit = oracle.limits.run
    at: Workload | None = None
    types: dict[int, str] = {}
    try:
        candidate.peak_bytes = largest(map(peak_bytes, compiled))
        candidate.output_bytes = largest(map(output_bytes, compiled))
        check_room(candidate.peak_bytes or 0, "the candidate")
        for at in oracle.workloads:
            start = time.perf_counter()
            results = jax.block_until_ready(compiled[at.number](*at.arrays))
            # Later deadlines adapt to this time.
            limit.note(time.perf_counter() - start)
            types[at.number] = ", ".join(f"{result.dtype}{list(result.shape)}" for result in results)
            at.judge(results)
    except CandidateError as error:
        candidate.fail(Status.WRONG, error)
    except TuningError as error:
        candidate.fail(Status.FAILED, CandidateError(str(error)))
    except BaseException as error:  # noqa: BLE001 - candidates may raise anything; the reason is recorded
        candidate.fail(Status.FAILED, error if at is None else CandidateError(at.named(error_text(error))))
        # If this error broke the device, all later candidates would fail too.
        check_device(oracle, candidate)
    else:
        candidate.compiled, candidate.status, candidate.result_types = compiled, Status.READY, "; ".join(types.values())


def check_again(oracle: Oracle, candidate: Candidate) -> list[list[jax.ShapeDtypeStruct]]:
    """Check a candidate on the current inputs, and return the types of its results for each call.

    Raises:
        CandidateError: The results are wrong, or the program fails.
    """
    types: dict[int, list[jax.ShapeDtypeStruct]] = {}
    for workload in oracle.workloads:
        try:
            results = jax.block_until_ready(candidate.compiled[workload.number](*workload.arrays))
        except BaseException as error:  # noqa: BLE001 - every error here is the candidate's
            raise CandidateError(workload.named(f"it fails on other inputs: {error_text(error)}")) from None
        workload.judge(results)
        types[workload.number] = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    return list(types.values())


def check_device(oracle: Oracle, culprit: Candidate) -> None:
    """Check that the device still works: after an illegal access, all later calls of the process fail.

    Raises:
        DeviceLostError: The device no longer works.
    """
    try:
        jax.block_until_ready(jnp.zeros((), jnp.float32) + 1)
    except BaseException as error:
        raise DeviceLostError(
            f"{oracle.inv.op_id}: the device no longer works in this process after {compact(culprit.config)}: "
            f"{culprit.reason}; tune in a worker process (AutotunePolicy(isolate=True), or the command)."
        ) from error


def check_repeatedly(oracle: Oracle, candidate: Candidate) -> None:
    """Check a winner on the current inputs many times, after the runs that were timed.

    Raises:
        CandidateError: The results are wrong at least once.
    """
    if not oracle.validate:
        return
    oracle.begin("confirming", candidate.config)
    end = time.perf_counter() + _RUNS_SECONDS
    for number in range(_RUNS):
        if number and time.perf_counter() > end:
            return
        try:
            check_again(oracle, candidate)
        except CandidateError as error:
            raise CandidateError(f"it is not always right: {error}") from None


def check_on_more(oracle: Oracle, candidate: Candidate) -> int:
    """Check a winner on further sets of inputs, and return the number of sets compared.

    Args:
        oracle: The call or calls, with their inputs.
        candidate: The winner, compiled.

    Raises:
        CandidateError: Its results are wrong on one of the sets.
    """
    start, compared = time.perf_counter(), 0
    for number, one in enumerate(oracle.all):
        for tried, (seed, scale) in enumerate(_sets(one)):
            spent = time.perf_counter() - start
            if tried >= _LEAST and (spent > _SECONDS or spent > one.left()):
                break
            oracle.begin(REFERENCE)
            for draw, arrays in one.inputs_of(seed, scale).items():
                expected = one.reference_results(one.inv.node, arrays)
                oracle.begin("confirming", candidate.config)
                where = "on other inputs" if scale == 1.0 else f"on inputs multiplied by {scale:g}"
                try:
                    counts = _compare(one, candidate.compiled[number], arrays, expected, scale)
                except CandidateError as error:
                    where = ", ".join(filter(None, (one.called, draw, where)))
                    raise CandidateError(f"{where}: {error}") from None
                compared += counts and number == 0
    return compared


def _sets(oracle: Oracle) -> Iterator[tuple[int, float]]:
    """Yield seed and scale of each further set; scaled sets first, since they find more errors."""
    if oracle.inputs is not None and not callable(oracle.inputs.source):  # all sets would be these arrays
        return
    if oracle.may_be_scaled:
        yield from ((oracle.seed, scale) for scale in _SCALES)
    yield from ((oracle.seed + number, 1.0) for number in range(1, _FRESH + 1 - len(_SCALES) * oracle.may_be_scaled))


def _compare(oracle: Oracle, program: Any, arrays: Sequence[Any], expected: Sequence[Any], scale: float) -> bool:
    """Compare results on one set; return `False` if they cannot be compared, e.g. because the reference overflows.

    Raises:
        CandidateError: The results are wrong.
    """
    if scale != 1.0 and not all(map(is_all_finite, expected)):
        return False
    try:
        results = jax.block_until_ready(program(*arrays))
    except BaseException as error:  # noqa: BLE001 - candidates may raise anything
        raise CandidateError(f"it fails: {error_text(error)}") from None
    if scale == 1.0:
        oracle.compare(results, expected, result_names(oracle.inv.node))
        return True
    found = _deviations(oracle, results, expected, scale)
    wrong = [each for each in found if each.reason and each.error > _SLACK * each.allowed]
    if not wrong:
        return True
    choice = oracle.choice
    usual = jax.block_until_ready(jax.jit(oracle.inv.node.flat(choice))(*arrays))
    of_heuristic = max(each.error for each in _deviations(oracle, usual, expected, scale))
    for each in wrong:
        if each.error > _TIMES_HEURISTIC * of_heuristic:
            raise CandidateError(each.reason)
    return False


def _deviations(oracle: Oracle, results: Sequence[Any], expected: Sequence[Any], scale: float) -> list[Deviation]:
    """Return how far floating-point results are off; of zeros, relative to one."""
    shift = 1 if scale == 0.0 else 0
    pairs = [(jnp.add(r, shift), jnp.add(t, shift)) for r, t in zip(results, expected, strict=True) if is_inexact(r)]
    names = result_names(oracle.inv.node) or [f"result {index}" for index in range(len(expected))]
    return list(
        deviations(
            [result for result, _ in pairs],
            [value for _, value in pairs],
            platform=oracle.inv.platform,
            precision=oracle.inv.precision,
            names=[name for name, result in zip(names, results, strict=True) if is_inexact(result)],
        )
    )
