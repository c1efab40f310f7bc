# SPDX-License-Identifier: Apache-2.0
"""Candidates run once, and their results compared with what is right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.measure.memory import check_room, peak_bytes
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.errors import CandidateError, DeviceLostError, TuningError
from ejkernel.ops.utils.error_text import error_text


def check(oracle: Oracle, candidate: Candidate, compiled: Any) -> None:
    """Run a candidate, and take note of what comes of it.

    Raises:
        DeviceLostError: the device no longer works in this process.
    """
    limit = oracle.limits.run
    oracle.watch.begin("running", [candidate.config], limit.seconds)
    start = time.perf_counter()
    try:
        candidate.peak_bytes = peak_bytes(compiled)
        check_room(candidate.peak_bytes or 0, "it")
        results = jax.block_until_ready(compiled(*oracle.arrays))
        limit.note(time.perf_counter() - start)
        oracle.judge(results)
    except CandidateError as error:
        candidate.fail(Status.WRONG, error)
    except TuningError as error:
        candidate.fail(Status.FAILED, CandidateError(str(error)))
    except BaseException as error:  # noqa: BLE001 - a candidate may fail in every way; the reason is kept
        candidate.fail(Status.FAILED, error)
        check_device(oracle, candidate)
    else:
        candidate.compiled, candidate.status = compiled, Status.READY


def check_again(oracle: Oracle, candidate: Candidate) -> Sequence[Any]:
    """Compare a candidate's results on the inputs that there are now, and return them.

    Raises:
        CandidateError: they are wrong, or there are none.
    """
    assert candidate.compiled is not None
    try:
        results: Sequence[Any] = jax.block_until_ready(candidate.compiled(*oracle.arrays))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the candidate's
        raise CandidateError(f"it fails on other inputs: {error_text(error)}") from None
    oracle.judge(results)
    return results


def check_device(oracle: Oracle, culprit: Candidate) -> None:
    """Find out whether the device still works: after an illegal access every later call in the process fails.

    Raises:
        DeviceLostError: it does not.
    """
    try:
        jax.block_until_ready(jnp.zeros((), jnp.float32) + 1)
    except BaseException as error:
        raise DeviceLostError(
            f"{oracle.inv.op_id}: the device does not work in this process any more, after {culprit.config!r}: "
            f"{culprit.reason}; tune in a worker process (AutotunePolicy(isolate=True), or the command)."
        ) from error
