# SPDX-License-Identifier: Apache-2.0
"""Compiles candidates in parallel and checks each as soon as it is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from ejkernel.ops.autotuner.bench.checking import check
from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.compile.threads import CompileThreads, Done, GivenUpError
from ejkernel.ops.autotuner.measure.measurement import check_room, num_bytes
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.trials.candidates import (
    Candidate,
    Program,
    config_id,
    exchange,
    loaded_or_none,
    program_digest,
)
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.errors import CandidateError
from ejkernel.ops.utils.formatting import compact

# Candidates with at least so many spilled bytes per thread are not run if another candidate is correct. They took 2.5
# times as long as the best and more, while one with 20 bytes was the best (benchmarks/results/spills_h200.json).
_SPILLS_MUCH: Final = 512
_GRACE: Final = 10.0  # seconds for abandoning a compilation in this process, before the caller ends the attempt


def _spills_much(spilled: int | None) -> bool:
    return spilled is not None and spilled >= _SPILLS_MUCH


class _SameProgram(CandidateError):
    def __init__(self, owner: Candidate) -> None:
        super().__init__(f"the same program as {compact(owner.config)}")
        self.owner = owner


@dataclasses.dataclass(kw_only=True)
class Preparation:
    """Compiles candidates in parallel and checks each as soon as it is compiled.

    Attributes:
        oracle: The call or calls, with inputs and reference results.
        programs: Programs compiled before, by index of the call and `config_id` of the configuration.
        compile_elsewhere: Compiles a call in another process; returns `None` if it must be compiled here.
        width: Number of candidates compiled at a time; by default one per core.
        left: Returns the seconds left for the search.
        finished: Called with each candidate when its status is known. A candidate that shares its program with others
            may be reported twice.
    """

    oracle: Oracle
    programs: Mapping[tuple[int, Any], Program] = dataclasses.field(default_factory=dict)
    compile_elsewhere: Callable[[Invocation[Any, Any], Choice], Program | None] | None = None
    width: int | None = None
    left: Callable[[], float] = lambda: math.inf
    finished: Callable[[Candidate], None] = lambda candidate: None

    def __post_init__(self) -> None:
        self._owners: dict[str, Candidate] = {}
        self._lock = threading.Lock()
        self._compiling: dict[int, Any] = {}
        self._some_spill_little = False

    def prepare(self, candidates: Sequence[Candidate], *, stop: Callable[[], bool] = lambda: False) -> None:
        """Compile candidates in parallel, run each once, and compare its results.

        Failures become outcomes. Candidates with the same program are compiled once; the first of them in
        `candidates` owns the program. A candidate that spills many registers runs only if it is the baseline, or if
        no correct candidate spills less.

        Args:
            candidates: The candidates to compile.
            stop: Returns whether to end as soon as possible.

        Raises:
            TuningError: The example inputs or the reference failed.
            DeviceLostError: The device no longer works in this process.
        """
        watch = self.oracle.watch
        check_room(
            sum(num_bytes(like) for oracle in self.oracle.all for like in oracle.inv.argument_types),
            f"the inputs{' of all calls together' * (len(self.oracle.all) > 1)}",
        )
        jobs = [in_callers_context(functools.partial(self._compile, candidate)) for candidate in candidates]
        threads = CompileThreads(jobs, width=self.width, timeout=self.oracle.limits.compile, left=self.left)
        self.oracle.compute_references()  # while the first candidates are compiled
        self._watch_compiling()
        harmed = []
        for done in threads.results(stop):
            candidate = candidates[done.index]
            self._take(candidate, done)
            # A candidate may fail because another did damage, e.g. closed an output stream. It is tried again alone.
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
        self.settle(candidates)

    def _take(self, candidate: Candidate, done: Done[object]) -> None:
        """Record the result of a candidate's compilation, and run the candidate."""
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
        """Record the spilled bytes of a correct candidate, if known."""
        if spilled is not None and not _spills_much(spilled):
            self._some_spill_little = True

    def _prune_or_check(self, candidate: Candidate, programs: Sequence[Any]) -> None:
        candidate.deferred = None
        if self._some_spill_little and candidate.config is not self.oracle.baseline:
            reason = f"it spills {candidate.spilled} bytes of registers per thread, much more than others"
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
        with self._reported(candidate), self.oracle.settings.during(repr(candidate.config)):
            candidate.damage = self.oracle.watch.damage()
            return self._compile_for_all(candidate)

    @contextlib.contextmanager
    def _reported(self, candidate: Candidate) -> Iterator[None]:
        """Report that a candidate is being compiled in the `with` block, which may crash or never end."""
        thread = threading.get_ident()  # an abandoned thread may still compile the same candidate
        with self._lock:
            self._compiling[thread] = candidate.config
            self.oracle.watch.compiling(list(self._compiling.values()))
        try:
            yield
        finally:
            with self._lock:
                del self._compiling[thread]
                self.oracle.watch.compiling(list(self._compiling.values()))

    def _compile_for_all(self, candidate: Candidate) -> Any:
        found = [self._program(number, oracle.inv, candidate) for number, oracle in enumerate(self.oracle.all)]
        digests, programs = zip(*found, strict=True)
        if all(digests):
            self._claim("+".join(digests), candidate)
        known = [program.spilled for program in programs if not isinstance(program, jax.stages.Lowered)]
        candidate.spilled = max((spilled for spilled in known if spilled is not None), default=None)
        # A candidate with many spills waits until the others are checked, and runs only if none of them is correct.
        # Candidates measured before run at once; the baseline always runs.
        if _spills_much(candidate.spilled) and candidate.measurement is None:
            candidate.deferred = programs
            return None
        return _ready(programs)

    def _program(self, number: int, inv: Invocation[Any, Any], candidate: Candidate) -> tuple[str | None, Any]:
        """Return the digest of a candidate's program for a call, and the program, which may be lowered only."""
        choice = dataclasses.replace(self.oracle.choice, config=candidate.config)
        program = self.programs.get((number, config_id(candidate.config)))
        if program is not None:
            return None, _Bundled(program, functools.partial(lower, inv, choice))
        program = None if self.compile_elsewhere is None else self.compile_elsewhere(inv, choice)
        if program is not None:
            return program.digest, program
        lowered = lower(inv, choice)
        return program_digest(lowered.as_text()), lowered

    def _check(self, candidate: Candidate, compiled: Any) -> None:
        check(self.oracle, candidate, compiled)
        if candidate.status == Status.READY:
            self.note_spills(candidate.spilled)

    def _claim(self, program: str, candidate: Candidate) -> None:
        """Make a candidate the owner of its program.

        Raises:
            _SameProgram: The program has another owner.
        """
        with self._lock:
            owner = self._owners.setdefault(program, candidate)
        if owner is not candidate:
            raise _SameProgram(owner)

    def settle(self, candidates: Sequence[Candidate]) -> None:
        """Make the first of several candidates with one program its owner, whichever was compiled first."""
        self._reorder(candidates)
        for candidate in candidates:
            if candidate.status == Status.SAME:
                self.finished(candidate)

    def _reorder(self, candidates: Sequence[Candidate]) -> None:
        order = {id(candidate): index for index, candidate in enumerate(candidates)}
        with self._lock:  # an abandoned thread may still claim its program
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


def lower(inv: Invocation[Any, Any], choice: Choice) -> jax.stages.Lowered:
    """Return the program of a call."""
    return jax.jit(inv.node.flat(choice)).lower(*inv.argument_types)


@dataclasses.dataclass(frozen=True, slots=True)
class _Bundled:
    """A program from another machine, which is compiled here if it cannot be loaded."""

    program: Program
    lower: Callable[[], jax.stages.Lowered]

    @property
    def spilled(self) -> int | None:
        return self.program.spilled

    def load(self) -> Any:
        found = loaded_or_none(self.program)
        return self.lower().compile() if found is None else found


def _ready(programs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the programs compiled or loaded."""
    return tuple(p.compile() if isinstance(p, jax.stages.Lowered) else p.load() for p in programs)
