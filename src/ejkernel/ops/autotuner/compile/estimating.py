# SPDX-License-Identifier: Apache-2.0
"""Estimates for the candidates of calls on a device of another machine; see `simulation.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ejkernel.ops.autotuner.compile.bundles import MOST_CANDIDATES, Candidates, Progress, aimed_calls, carried_out
from ejkernel.ops.autotuner.compile.processes import CompileProcesses, compile_processes
from ejkernel.ops.autotuner.compile.simulation import METHOD, check_simulated, seconds_of, simulate_for
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, Done, GivenUpError
from ejkernel.ops.autotuner.process.worker import worker_session
from ejkernel.ops.autotuner.trials.candidates import Program, config_id, heuristic_of, is_in
from ejkernel.ops.config.estimates import EstimatedRow, EstimateFiles, Estimates, row_of
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import kernel_of
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.errors import CandidateError

logger = logging.getLogger(__name__)

_TIMEOUT: Final = 600.0  # seconds for one candidate: simulating takes some 8 us for each simulated cycle
_FULL: Final = "; the memory may have been full"  # so another run may succeed

Simulate = Callable[[Invocation[Any, Any], Choice], Program]


def estimate_calls(
    calls: Iterable[Invocation[Any, Any]],
    target: Target,
    *,
    candidates: Candidates | None = None,
    max_candidates: int = MOST_CANDIDATES,
    processes: int = 1,
    timeout_s: float = _TIMEOUT,
    simulate: Simulate | None = None,
    progress: Progress | None = None,
    store: EstimateFiles | None = None,
) -> list[Estimates]:
    """Estimate the times of the candidates of calls on a target. Measures nothing and needs no device.

    A candidate that the simulator cannot estimate gets a row with the reason. Calls without candidates are skipped with
    a `TuningWarning`. An interrupted run stores what it has, and the next run goes on there; it only repeats candidates
    that were killed. It does not notice that a kernel has changed in between.

    Args:
        calls: The abstract calls, with their kernels.
        target: The TPU.
        candidates: Returns the candidates of a call beside its heuristic; the kernel's `config_space` by default.
        max_candidates: Number of candidates of a `ConfigSpace` to estimate, chosen at random.
        processes: Number of processes that simulate, one candidate at a time each; a process that ends is replaced.
        timeout_s: Seconds for one candidate.
        simulate: Returns the program of a call with its cycles; by default Google's compiler does.
        progress: Called with the call, the number of finished candidates and the number of all candidates.
        store: Takes the estimates of each call.

    Raises:
        ConfigError: This machine has no simulator for the target, or `store` is not writable.
    """
    check_simulated(target)
    found = []
    with contextlib.ExitStack() as stack:
        if simulate is None:
            simulate = _in_processes(stack, target, processes, timeout_s)
        for inv, configs in aimed_calls(calls, target, candidates, max_candidates, "estimate"):
            heuristics = heuristic_of(inv, kernel_of(inv))
            rows = {} if store is None else _earlier_rows(inv, configs, store)
            left = [config for config in configs if config_id(config) not in rows]
            jobs = [functools.partial(simulate, inv, Choice(config=config, platform=inv.platform)) for config in left]
            # The processes have the same deadline, and end first.
            timeout = AdaptiveTimeout(first=2 * timeout_s, least=2 * timeout_s)
            try:
                for done in carried_out(inv, jobs, width=processes, timeout=timeout, progress=progress):
                    config = left[done.index]
                    row = _row(config, done, target, timeout_s)
                    rows[config_id(config)] = dataclasses.replace(row, is_heuristic=is_in(heuristics, config))
            finally:  # an interrupted run stores what it has
                if store is not None and rows:
                    store.put(dataclasses.replace(Estimates.of(inv, METHOD, list(rows.values())), unfinished=True))
            found.append(Estimates.of(inv, METHOD, [rows[config_id(config)] for config in configs]))
    if store is not None:
        for each in found:
            store.put(each)
    return found


def _in_processes(stack: contextlib.ExitStack, target: Target, count: int, timeout_s: float) -> Simulate:
    """Return a function that simulates in processes, which end with the stack."""
    target.check(loads_compiler=False)
    stack.enter_context(worker_session())
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ejkernel-simulator-", ignore_cleanup_errors=True))
    pool: CompileProcesses = compile_processes(count, simulate=True)

    def simulate(inv: Invocation[Any, Any], choice: Choice) -> Program:
        work = functools.partial(simulate_for, inv, choice, target, folder=folder)
        return pool.run(work, timeout_s)

    return simulate


def _earlier_rows(
    inv: Invocation[Any, Any], configs: Sequence[object], store: EstimateFiles
) -> dict[Any, EstimatedRow]:
    """Return the rows that an interrupted run of this compiler has estimated, by configuration."""
    earlier = store.load(inv.key)
    if earlier is None or not earlier.unfinished or earlier.versions != Estimates.of(inv, METHOD, []).versions:
        return {}
    known = {_identity(row): row for row in earlier.rows if not row.reason.endswith(_FULL)}
    pairs = ((config_id(config), known.get(_identity(row_of(config)))) for config in configs)
    rows = {token: row for token, row in pairs if row is not None}
    logger.info("%s: %d estimates of an interrupted run are used again", inv.op_id, len(rows))
    return rows


def _row(config: object, done: Done[Program], target: Target, timeout_s: float) -> EstimatedRow:
    """Return the row of a finished job."""
    program = done.result
    if program is None or program.cycles is None:
        return row_of(config, reason=_why_not(done.error, timeout_s))
    least = program.cycles if program.least_cycles is None else program.least_cycles
    us, least_us = (round(seconds_of(cycles, target) * 1e6, 4) for cycles in (program.cycles, least))
    cycles = round(program.cycles, 1)
    return row_of(config, us=us, least_us=least_us, cycles=cycles, simulated=program.simulated)


def _identity(row: EstimatedRow) -> tuple[str, str]:
    return row.config_type, json.dumps(row.config, sort_keys=True)


def _why_not(error: BaseException | None, timeout_s: float) -> str:
    if isinstance(error, GivenUpError):
        return f"not estimated: simulating it takes longer than {timeout_s:g} s"
    if isinstance(error, CandidateError):
        text = re.sub(r"F\d{4} \S+ +\d+ \S+\] ", "", str(error))  # the time and place of libtpu's message
        text += _FULL if "SIGKILL" in text else ""
        return text if text.startswith("not estimated") else f"not estimated: {text}"
    return f"not estimated: {type(error).__name__}: {error}"
