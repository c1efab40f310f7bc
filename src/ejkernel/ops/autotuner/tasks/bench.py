# SPDX-License-Identifier: Apache-2.0
"""A call's inputs and the truth about them: candidates are compiled, checked and timed on it."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, CompileThreads, Done
from ejkernel.ops.autotuner.measure.correctness import check_results
from ejkernel.ops.autotuner.measure.measurement import Runner, interleaved, sets_for_cold
from ejkernel.ops.autotuner.measure.memory import check_room, device_bytes, num_bytes, peak_bytes
from ejkernel.ops.autotuner.measure.race import Race
from ejkernel.ops.autotuner.process.threads import carried
from ejkernel.ops.autotuner.tasks.watch import Unwatched, Watch
from ejkernel.ops.autotuner.trials.candidates import Candidate, Loader, Remote, config_id, exchange, program_digest
from ejkernel.ops.autotuner.trials.naming import result_names
from ejkernel.ops.autotuner.trials.outcome import FAILED, MEASURED, PRUNED, READY, SAME, WRONG
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.examples import example_arrays, example_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import overrides
from ejkernel.ops.core.nodes import Choice, Node
from ejkernel.ops.errors import CandidateError, DeviceLostError, TuningError
from ejkernel.ops.utils.telling import error_text

_MOST_SETS = 512  # of inputs for cold caches; inputs so small that they need more are measured warm
# Bytes of registers that a thread spills, from which on a candidate is not run if there is another: such ones took 2.5
# times as long as the best, and more, while one that spilled 20 was the best (benchmarks/results/spills_h200.json).
_SPILLS_MUCH = 512
REFERENCE = "running the reference"  # what no candidate is to blame for
_GRACE = 10.0  # seconds in which this process gives a compilation up by itself, before whoever watches ends it


def _spills_much(spilled: int | None) -> bool:
    return spilled is not None and spilled >= _SPILLS_MUCH


@dataclasses.dataclass(slots=True, kw_only=True)
class Limits:
    """How long the parts of a search may take; without a budget only compiling can be given up in this process.

    Attributes:
        compile: Lowering and compiling one candidate.
        run: The first call of one candidate.
        idle: A race, without a sign of life.
    """

    compile: AdaptiveTimeout = dataclasses.field(default_factory=lambda: AdaptiveTimeout(first=300.0, least=30.0))
    run: AdaptiveTimeout = dataclasses.field(
        default_factory=lambda: AdaptiveTimeout(first=120.0, least=20.0, factor=50.0)
    )
    idle: float = 60.0


class _SameProgram(CandidateError):
    def __init__(self, owner: Candidate) -> None:
        super().__init__(f"the same program as {owner.config!r}")
        self.owner = owner


@dataclasses.dataclass(kw_only=True)
class Bench:
    """A call's inputs and the truth about them.

    Attributes:
        inv: The call.
        baseline: The configuration that stands for a reference where the kernel has none; its residuals are used.
        policy: Whether results are checked.
        seed: Of the random inputs.
        width: How many candidates are compiled at a time.
        limits: How long the parts may take.
        watch: Who must know what is under way.
        programs: Programs that were compiled before, by what tells their configurations from others.
        reference: The kernel's reference for this call, compiled before.
        compile_elsewhere: Compiles a call in another process; returns `None` if it must be compiled here.
        stop: Whether to end as soon as possible.
        left: The seconds that are left for the search.
    """

    inv: Invocation[Any, Any]
    baseline: Any
    policy: AutotunePolicy
    seed: int = 0
    width: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    watch: Watch = dataclasses.field(default_factory=Unwatched)
    programs: Mapping[Any, Loader] = dataclasses.field(default_factory=dict)
    reference: Loader | None = None
    compile_elsewhere: Callable[[Invocation[Any, Any], Choice], Remote | None] | None = None
    stop: Callable[[], bool] = lambda: False
    left: Callable[[], float] = lambda: math.inf

    def __post_init__(self) -> None:
        self._owners: dict[str, Candidate] = {}
        self._lock = threading.Lock()
        self._compiling: dict[int, list[Any]] = {}
        self._references: dict[Node, Callable[..., Any]] = {}
        self._arrays: list[Any] | None = None
        self._truth: Sequence[Any] | None = None
        self._some_spill_little = False
        self._choice = Choice(config=self.baseline, platform=self.inv.platform)

    @property
    def arrays(self) -> list[Any]:
        """The inputs; made when first asked for."""
        if self._arrays is None:
            self._arrays = self.inputs(self.seed)
        return self._arrays

    def prepare(
        self, candidates: Sequence[Candidate], finished: Callable[[Candidate], None] = lambda candidate: None
    ) -> None:
        """Compile candidates side by side, run each once as soon as it is there, and compare its results.

        A failure is noted, whatever it is. Candidates that are the same program are compiled once; of these the
        first in the order of `candidates` is the one that counts. `finished` may hear of one of these twice. Those
        that spill many registers are not run, but for the baseline, if another is right that does not.

        Raises:
            TuningError: there are no inputs, or no truth about them.
            DeviceLostError: the device no longer works in this process.
        """
        check_room(sum(map(num_bytes, example_types(self.inv))), f"{self.inv.op_id}: its inputs")
        jobs = [carried(functools.partial(self._compile, candidate)) for candidate in candidates]

        def changed(running: Sequence[int]) -> None:
            with self._lock:  # threads that were left by an earlier call may still be at work
                self._compiling[id(jobs)] = [candidates[index].config for index in running]
                self.watch.compiling([config for configs in self._compiling.values() for config in configs])

        threads = CompileThreads(jobs, width=self.width, timeout=self.limits.compile, left=self.left, on_change=changed)
        self.find_truth()  # while the first candidates are compiled
        self._watch_compiling()
        harmed = []
        for done in threads.results(self.stop):
            candidate = candidates[done.index]
            self._take(candidate, done)
            if candidate.status == FAILED and len(candidates) > 1 and self.watch.harm() != candidate.harm:
                harmed.append(candidate)
            elif candidate.status != SAME and candidate.held is None:
                finished(candidate)
            self._watch_compiling()
        for candidate in harmed:  # perhaps by what was compiled beside it
            if not self.stop():
                self.prepare([candidate], finished)
        self._reorder(candidates, finished)
        for candidate in candidates:
            if candidate.held is not None and not self.stop():
                self._prune_or_check(candidate, candidate.held)
                finished(candidate)
        _tell_of_twins(candidates, finished)

    def _take(self, candidate: Candidate, done: Done[Any]) -> None:
        """Take note of what became of a candidate when it was compiled, and run it."""
        candidate.compile_seconds = done.seconds
        if isinstance(done.error, _SameProgram):
            candidate.status, candidate.reason, candidate.twin = SAME, str(done.error), done.error.owner
        elif done.error is not None:
            candidate.fail(FAILED, done.error)
        elif candidate.held is None:
            self._check(candidate, done.result)

    def note_spills(self, spilled: int | None) -> None:
        """Take note that a candidate which is right spills so much, as far as that is known."""
        if spilled is not None and not _spills_much(spilled):
            self._some_spill_little = True

    def _prune_or_check(self, candidate: Candidate, program: Loader) -> None:
        candidate.held = None
        if self._some_spill_little and candidate.config is not self.baseline:
            reason = f"it spills {program.spilled} bytes of registers a thread, much more than others"
            candidate.fail(PRUNED, CandidateError(reason))
            return
        self.watch.begin("loading", [candidate.config], self.limits.run.seconds)
        try:
            compiled = program.load()
        except BaseException as error:  # noqa: BLE001 - as any failure of a candidate
            candidate.fail(FAILED, error)
        else:
            self._check(candidate, compiled)

    def _watch_compiling(self) -> None:
        self.watch.begin("compiling", [], self.limits.compile.seconds + _GRACE)

    def _compile(self, candidate: Candidate) -> Any:
        candidate.harm = self.watch.harm()
        made = self.programs.get(config_id(candidate.config)) or self._made_elsewhere(candidate)
        if made is None:
            choice = Choice(config=candidate.config, platform=self.inv.platform)
            lowered = jax.jit(self.inv.node.flat(choice)).lower(*example_types(self.inv))
            self._claim(program_digest(lowered.as_text()), candidate)
            return lowered.compile()
        candidate.spilled = made.spilled
        if _spills_much(made.spilled) and candidate.measurement is None:
            candidate.held = made
            return None
        return made.load()

    def _made_elsewhere(self, candidate: Candidate) -> Loader | None:
        if self.compile_elsewhere is None:
            return None
        choice = Choice(config=candidate.config, platform=self.inv.platform)
        made = self.compile_elsewhere(self.inv, choice)
        if made is not None:
            self._claim(made.digest, candidate)
        return made

    def _claim(self, program: str | None, candidate: Candidate) -> None:
        """Make a candidate the owner of its program.

        Raises:
            _SameProgram: it has an owner.
        """
        if program:
            with self._lock:
                owner = self._owners.setdefault(program, candidate)
            if owner is not candidate:
                raise _SameProgram(owner)

    def settle(self, candidates: Sequence[Candidate], finished: Callable[[Candidate], None]) -> None:
        """Give a shared program to the first of those that share it: which one was compiled is a matter of luck."""
        self._reorder(candidates, finished)
        _tell_of_twins(candidates, finished)

    def _reorder(self, candidates: Sequence[Candidate], finished: Callable[[Candidate], None]) -> None:
        order = {id(candidate): index for index, candidate in enumerate(candidates)}
        with self._lock:  # a thread that was given up may still come to its program
            owners = list(self._owners.items())
        for program, owner in owners:
            twins = [candidate for candidate in candidates if candidate.twin is owner]
            if not twins or order[id(twins[0])] > order.get(id(owner), -1):
                continue
            first = self._owners[program] = twins[0]
            exchange(first, owner)
            for twin in (*twins[1:], owner):
                twin.twin, twin.reason = first, str(_SameProgram(first))
            if first.held is None:
                finished(first)

    def find_truth(self) -> None:
        """Make the inputs and the reference's results, if that was not done before."""
        if self._arrays is not None:
            return
        has_reference = overrides(self.inv.node.spec.kernel, "reference")
        what = "the reference" if has_reference else "the heuristic, which stands for a reference,"
        self.watch.begin(REFERENCE, [], self.limits.compile.first)
        try:
            self._arrays = self.inputs(self.seed)
            self._truth = self.truth_about(self.inv.node, self._arrays) if self.policy.validate else None
        except TuningError:
            raise
        except BaseException as error:  # whatever it is, without inputs and truth no candidate can be judged
            raise TuningError(f"{self.inv.op_id}: example inputs or {what} failed: {error_text(error)}") from error

    def inputs(self, seed: int) -> list[Any]:
        """Return random inputs of the call."""
        arrays = example_arrays(self.inv, np.random.default_rng(seed), self._choice)
        return list(jax.block_until_ready(arrays))

    def truth_about(self, node: Node, arrays: Sequence[Any]) -> Sequence[Any]:
        """Return what the reference makes of `arrays`; where the kernel has none, the baseline."""
        if node not in self._references:
            has_reference = overrides(node.spec.kernel, "reference")
            choice = dataclasses.replace(self._choice, reference=has_reference)
            if node is self.inv.node and self.reference is not None:
                self._references[node] = self.reference.load()
            else:
                lowered = jax.jit(node.flat(choice)).lower(*arrays)
                self._references[node] = compat.compiled_for_one_run(lowered, self.inv.platform)
        return list(jax.block_until_ready(self._references[node](*arrays)))

    def _check(self, candidate: Candidate, compiled: Any) -> None:
        self.watch.begin("running", [candidate.config], self.limits.run.seconds)
        start = time.perf_counter()
        try:
            candidate.peak_bytes = peak_bytes(compiled)
            check_room(candidate.peak_bytes or 0, "it")
            results = jax.block_until_ready(compiled(*self.arrays))
            self.limits.run.note(time.perf_counter() - start)
            if self._truth is not None:
                self.compare(results, self._truth)
        except CandidateError as error:
            candidate.fail(WRONG, error)
        except TuningError as error:
            candidate.fail(FAILED, CandidateError(str(error)))
        except BaseException as error:  # noqa: BLE001 - a candidate may fail in every way; the reason is kept
            candidate.fail(FAILED, error)
            self._probe(candidate)
        else:
            candidate.compiled, candidate.status = compiled, READY
            self.note_spills(candidate.spilled)

    def compare(self, results: Sequence[Any], truth: Sequence[Any]) -> None:
        """Raise a `CandidateError` unless the results are as near to the truth as their dtypes allow."""
        names = result_names(self.inv.node)
        check_results(results, truth, platform=self.inv.platform, precision=self.inv.precision, names=names)

    def _probe(self, culprit: Candidate) -> None:
        """Find out whether the device still works: after an illegal access every later call in the process fails."""
        try:
            jax.block_until_ready(jnp.zeros((), jnp.float32) + 1)
        except BaseException as error:
            raise DeviceLostError(
                f"{self.inv.op_id}: the device does not work in this process any more, after {culprit.config!r}: "
                f"{culprit.reason}; tune in a worker process (AutotunePolicy(isolate=True), or the command)."
            ) from error

    def renew(self) -> None:
        """Put new inputs in place of those that the candidates were checked and measured on so far."""
        self._arrays, self._truth = None, None
        self.seed += 1
        self.find_truth()

    def check_again(self, candidate: Candidate) -> Sequence[Any]:
        """Compare a candidate's results on the inputs that there are now, and return them.

        Raises:
            CandidateError: they are wrong, or there are none.
        """
        assert candidate.compiled is not None
        try:
            results: Sequence[Any] = jax.block_until_ready(candidate.compiled(*self.arrays))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the candidate's
            raise CandidateError(f"it fails on other inputs: {error_text(error)}") from None
        if self._truth is not None:
            self.compare(results, self._truth)
        return results

    def race(self, runners: Sequence[Candidate], race: Race, *, warmup: int) -> list[Candidate]:
        """Measure compiled candidates in turns, and return them, the best first; one that fails leaves the race.

        Once `stop()` is true, what was sampled by then decides.
        """
        self.watch.begin("measuring", [runner.config for runner in runners], self.limits.idle)
        sets = self._argument_sets()
        functions = [
            Runner(_Run(runner, runner.compiled, index, self.watch), sets) for index, runner in enumerate(runners)
        ]
        failed: list[int] = []

        def left(index: int, error: BaseException) -> None:
            failed.append(index)
            runners[index].fail(FAILED, error)
            self._probe(runners[index])

        measurements = interleaved(functions, race=race, warmup=warmup, stop=self.stop, on_error=left)
        for index, measurement in enumerate(measurements):
            if index not in failed and measurement.samples:
                seconds = runners[index].compile_seconds
                runners[index].measurement = dataclasses.replace(measurement, compile_seconds=seconds)
                runners[index].status = MEASURED
        return [runners[index] for index in race.ranking()]

    def _argument_sets(self) -> list[list[Any]]:
        """Return the inputs and, for cold caches, as many copies as the caches cannot hold, if the device has room."""
        size = sum(map(num_bytes, self.arrays))
        count = sets_for_cold(size) if self.policy.cold_cache else 1
        room = device_bytes()
        if count > _MOST_SETS or (room is not None and count * size > room / 2):
            count = 1
        copies = [[jnp.copy(array) for array in self.arrays] for _ in range(count - 1)]
        return [self.arrays, *jax.block_until_ready(copies)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """A candidate's program, called under watch."""

    candidate: Candidate
    compiled: Any
    index: int
    watch: Watch

    def __call__(self, *arrays: Any) -> Any:
        self.watch.running(self.index)
        return self.compiled(*arrays)

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()


def _tell_of_twins(candidates: Sequence[Candidate], finished: Callable[[Candidate], None]) -> None:
    for candidate in candidates:
        if candidate.status == SAME:
            finished(candidate)
