# SPDX-License-Identifier: Apache-2.0
"""Candidates run once, and their results compared with what is right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.autotuner.bench.oracle import Oracle, Workload
from ejkernel.ops.autotuner.measure.memory import check_room, peak_bytes
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.errors import CandidateError, DeviceLostError, TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import compact


def check(oracle: Oracle, candidate: Candidate, compiled: Sequence[Any]) -> None:
    """Run a candidate on all there is, and take note of what comes of it.

    Args:
        oracle: The call, or several.
        candidate: The candidate.
        compiled: Its program for each call.

    Raises:
        DeviceLostError: the device no longer works in this process.
    """
    limit = oracle.limits.run
    oracle.watch.begin("running", [candidate.config], limit.seconds)
    with oracle.settings.during(repr(candidate.config)):
        _run_and_judge(oracle, candidate, compiled)


def _run_and_judge(oracle: Oracle, candidate: Candidate, compiled: Sequence[Any]) -> None:
    limit = oracle.limits.run
    at: Workload | None = None
    try:
        peaks = [peak_bytes(program) for program in compiled]
        candidate.peak_bytes = None if None in peaks else max(peak for peak in peaks if peak is not None)
        check_room(candidate.peak_bytes or 0, "the candidate")
        for at in oracle.workloads:
            start = time.perf_counter()
            results = jax.block_until_ready(compiled[at.number](*at.arrays))
            # The deadline of those that follow learns from it.
            limit.note(time.perf_counter() - start)
            at.judge(results)
    except CandidateError as error:
        candidate.fail(Status.WRONG, error)
    except TuningError as error:
        candidate.fail(Status.FAILED, CandidateError(str(error)))
    except BaseException as error:  # noqa: BLE001 - a candidate may fail in every way; the reason is kept
        several = at is not None and at.case is not None
        candidate.fail(Status.FAILED, CandidateError(at.named(error_text(error))) if several and at else error)
        # What was raised may be the device's end, for which every later candidate would be to blame.
        check_device(oracle, candidate)
    else:
        candidate.compiled, candidate.status = compiled, Status.READY


def check_again(oracle: Oracle, candidate: Candidate) -> list[list[jax.ShapeDtypeStruct]]:
    """Compare a candidate's results on the inputs that there are now, and return their types for each call.

    Raises:
        CandidateError: they are wrong, or there are none.
    """
    assert candidate.compiled is not None
    types: dict[int, list[jax.ShapeDtypeStruct]] = {}
    for workload in oracle.workloads:
        try:
            results = jax.block_until_ready(candidate.compiled[workload.number](*workload.arrays))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the candidate's
            raise CandidateError(workload.named(f"it fails on other inputs: {error_text(error)}")) from None
        workload.judge(results)
        types[workload.number] = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    return list(types.values())


def check_device(oracle: Oracle, culprit: Candidate) -> None:
    """Find out whether the device still works: after an illegal access every later call in the process fails.

    Raises:
        DeviceLostError: it does not.
    """
    try:
        jax.block_until_ready(jnp.zeros((), jnp.float32) + 1)
    except BaseException as error:
        raise DeviceLostError(
            f"{oracle.inv.op_id}: the device does not work in this process any more, after {compact(culprit.config)}: "
            f"{culprit.reason}; tune in a worker process (AutotunePolicy(isolate=True), or the command)."
        ) from error
