# SPDX-License-Identifier: Apache-2.0
"""Candidates compiled side by side, and each checked as soon as it is there."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax

from ejkernel.ops.autotuner.bench.checking import check
from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.compile.threads import CompileThreads, Done, GivenUpError
from ejkernel.ops.autotuner.measure.memory import check_room, num_bytes
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.trials.candidates import Candidate, config_id, exchange
from ejkernel.ops.autotuner.trials.programs import Program, program_digest
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.core.examples import example_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.errors import CandidateError
from ejkernel.ops.utils.formatting import compact

# Bytes of registers that a thread spills, from which on a candidate is not run if there is another: such ones took 2.5
# times as long as the best, and more, while one that spilled 20 was the best (benchmarks/results/spills_h200.json).
_SPILLS_MUCH: Final = 512
_GRACE: Final = 10.0  # seconds in which this process gives a compilation up by itself, before whoever watches ends it

Finished = Callable[[Candidate], None]


def _spills_much(spilled: int | None) -> bool:
    return spilled is not None and spilled >= _SPILLS_MUCH


class _SameProgram(CandidateError):
    def __init__(self, owner: Candidate) -> None:
        super().__init__(f"the same program as {compact(owner.config)}")
        self.owner = owner


@dataclasses.dataclass(kw_only=True)
class Preparation:
    """Compiles candidates side by side, and has each checked as soon as it is there.

    Attributes:
        oracle: The call, and what is right.
        programs: Programs that were compiled before, by the number of their call, and what tells their configurations
            from others.
        compile_elsewhere: Compiles a call in another process; returns `None` if it must be compiled here.
        width: How many candidates are compiled at a time; one a core by default.
        left: The seconds that are left for the search.
        finished: Called with each candidate whose fate is known; it may hear of one of several that are one program
            twice.
    """

    oracle: Oracle
    programs: Mapping[tuple[int, Any], Program] = dataclasses.field(default_factory=dict)
    compile_elsewhere: Callable[[Invocation[Any, Any], Choice], Program | None] | None = None
    width: int | None = None
    left: Callable[[], float] = lambda: math.inf
    finished: Finished = lambda candidate: None

    def __post_init__(self) -> None:
        self._owners: dict[str, Candidate] = {}
        self._lock = threading.Lock()
        self._compiling: dict[int, list[Any]] = {}
        self._some_spill_little = False

    def prepare(self, candidates: Sequence[Candidate], *, stop: Callable[[], bool] = lambda: False) -> None:
        """Compile candidates side by side, run each once as soon as it is there, and compare its results.

        A failure is noted, whatever it is. Candidates that are the same program are compiled once; of these the
        first in the order of `candidates` is the one that counts. Those that spill many registers are not run, but
        for the baseline, if another is right that does not.

        Args:
            candidates: What to compile.
            stop: Whether to end as soon as possible.

        Raises:
            TuningError: there are no inputs, or no truth about them.
            DeviceLostError: the device no longer works in this process.
        """
        watch = self.oracle.watch
        check_room(
            sum(num_bytes(like) for oracle in self.oracle.all for like in example_types(oracle.inv)),
            f"the inputs{' of all calls together' * (len(self.oracle.all) > 1)}",
        )
        jobs = [in_callers_context(functools.partial(self._compile, candidate)) for candidate in candidates]

        def changed(running: Sequence[int]) -> None:
            with self._lock:  # threads that were left by an earlier call may still be at work
                self._compiling[id(jobs)] = [candidates[index].config for index in running]
                watch.compiling([config for configs in self._compiling.values() for config in configs])

        timeout = self.oracle.limits.compile
        threads = CompileThreads(jobs, width=self.width, timeout=timeout, left=self.left, on_change=changed)
        self.oracle.find_truth()  # while the first candidates are compiled
        self._watch_compiling()
        harmed = []
        for done in threads.results(stop):
            candidate = candidates[done.index]
            self._take(candidate, done)
            # Who failed while something was found damaged, such as a stream that another has closed, is tried again
            # alone.
            if candidate.status == Status.FAILED and len(candidates) > 1 and watch.damage() != candidate.damage:
                harmed.append(candidate)
            elif candidate.status != Status.SAME and candidate.deferred is None:
                self.finished(candidate)
            self._watch_compiling()
        for candidate in harmed:
            if not stop():
                self.prepare([candidate], stop=stop)
        self._reorder(candidates)
        for candidate in candidates:
            if candidate.deferred is not None and not stop():
                self._prune_or_check(candidate, candidate.deferred)
                self.finished(candidate)
        self._tell_of_twins(candidates)

    def _take(self, candidate: Candidate, done: Done[object]) -> None:
        """Take note of what became of a candidate when it was compiled, and run it."""
        candidate.compile_seconds = done.seconds
        if isinstance(done.error, _SameProgram):
            candidate.status, candidate.reason, candidate.twin = Status.SAME, str(done.error), done.error.owner
        elif isinstance(done.error, GivenUpError) and done.error.for_budget:
            candidate.fail(Status.SKIPPED, CandidateError(f"the budget left it too little time: {done.error}"))
        elif done.error is not None:
            candidate.fail(Status.FAILED, done.error)
        elif candidate.deferred is None:
            self._check(candidate, done.result)

    def note_spills(self, spilled: int | None) -> None:
        """Take note that a candidate which is right spills so much, as far as that is known."""
        if spilled is not None and not _spills_much(spilled):
            self._some_spill_little = True

    def _prune_or_check(self, candidate: Candidate, programs: Sequence[Any]) -> None:
        candidate.deferred = None
        if self._some_spill_little and candidate.config is not self.oracle.baseline:
            reason = f"it spills {candidate.spilled} bytes of registers a thread, much more than others"
            candidate.fail(Status.PRUNED, CandidateError(reason))
            return
        self.oracle.watch.begin("loading", [candidate.config], self.oracle.limits.run.seconds)
        try:
            compiled = _ready(programs)
        except BaseException as error:  # noqa: BLE001 - as any failure of a candidate
            candidate.fail(Status.FAILED, error)
        else:
            self._check(candidate, compiled)

    def _watch_compiling(self) -> None:
        self.oracle.watch.begin("compiling", [], self.oracle.limits.compile.seconds + _GRACE)

    def _compile(self, candidate: Candidate) -> Any:
        candidate.damage = self.oracle.watch.damage()
        with self.oracle.settings.during(repr(candidate.config)):
            return self._compile_for_all(candidate)

    def _compile_for_all(self, candidate: Candidate) -> Any:
        found = [self._program(number, oracle.inv, candidate) for number, oracle in enumerate(self.oracle.all)]
        digests, programs = zip(*found, strict=True)
        if all(digests):
            self._claim("+".join(digests), candidate)
        known = [program.spilled for program in programs if not isinstance(program, jax.stages.Lowered)]
        candidate.spilled = max((spilled for spilled in known if spilled is not None), default=None)
        # One that spills much waits until the others are checked, and is run only if none of them is right. What was
        # measured before is run at once, and the baseline in any case.
        if _spills_much(candidate.spilled) and candidate.measurement is None:
            candidate.deferred = programs
            return None
        return _ready(programs)

    def _program(self, number: int, inv: Invocation[Any, Any], candidate: Candidate) -> tuple[str | None, Any]:
        """Return what tells a candidate's program of a call from others, and the program, if only lowered as yet."""
        choice = dataclasses.replace(self.oracle.choice, config=candidate.config)
        program = self.programs.get((number, config_id(candidate.config)))
        if program is not None:
            return None, program
        program = None if self.compile_elsewhere is None else self.compile_elsewhere(inv, choice)
        if program is not None:
            return program.digest, program
        lowered = jax.jit(inv.node.flat(choice)).lower(*example_types(inv))
        return program_digest(lowered.as_text()), lowered

    def _check(self, candidate: Candidate, compiled: Any) -> None:
        check(self.oracle, candidate, compiled)
        if candidate.status == Status.READY:
            self.note_spills(candidate.spilled)

    def _claim(self, program: str, candidate: Candidate) -> None:
        """Make a candidate the owner of its program.

        Raises:
            _SameProgram: it has an owner.
        """
        with self._lock:
            owner = self._owners.setdefault(program, candidate)
        if owner is not candidate:
            raise _SameProgram(owner)

    def settle(self, candidates: Sequence[Candidate]) -> None:
        """Give a shared program to the first of those that share it: which one was compiled is a matter of luck."""
        self._reorder(candidates)
        self._tell_of_twins(candidates)

    def _tell_of_twins(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            if candidate.status == Status.SAME:
                self.finished(candidate)

    def _reorder(self, candidates: Sequence[Candidate]) -> None:
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
            if first.deferred is None:
                self.finished(first)


def _ready(programs: Sequence[Any]) -> tuple[Any, ...]:
    """Return programs that can be run."""
    return tuple(p.compile() if isinstance(p, jax.stages.Lowered) else p.load() for p in programs)
