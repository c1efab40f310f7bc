# SPDX-License-Identifier: Apache-2.0
"""Tasks handed to an executor; the workers here follow a script."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from concurrent.futures.process import BrokenProcessPool

import jax
import jax.numpy as jnp
import pytest
from tests.ops.faulty_kernels import BEST, HEURISTIC, SHAPE, plain

from ejkernel.ops.autotuner.compile.bundles import BundledCall, BundledCandidate
from ejkernel.ops.autotuner.fleet import dispatch
from ejkernel.ops.autotuner.fleet.place import RefusedError
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import compare
from ejkernel.ops.autotuner.process.messages import (
    Arrived,
    Began,
    Happened,
    Raised,
    Returned,
    Warned,
    pickled,
    unpickled,
)
from ejkernel.ops.autotuner.process.watch import Instruction
from ejkernel.ops.autotuner.process.worker import Worker, WorkerSlot, in_slot
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.trials.candidates import CodeFile, Program
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.events import CandidateFinished, SearchStarted, WorkerRestarted, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.config.policy import AutotunePolicy, policy_override
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import ConfigError, TuningError, TuningWarning
from ejkernel.ops.execution.offline import tune_invocations, tune_together
from ejkernel.ops.utils.storage.serialize import digest_of

CALL = Invocation(kernel=plain, args=(jax.ShapeDtypeStruct(SHAPE, jnp.float32),)).abstract()
OUTCOMES = tuple(
    Outcome(config=config, status="measured", measurement=Measurement(samples=(seconds,) * 8))
    for config, seconds in ((HEURISTIC, 2.0), (BEST, 1.0))
)
CHALLENGE = Challenge(BEST, compare((1.0,) * 8, (2.0,) * 8), is_confirmation=True)
FOUND = AutotuneData(inv=CALL, config=BEST, outcomes=OUTCOMES, seconds=1.0, checked=("outputs",), challenge=CHALLENGE)
THERE = "process 7 on elsewhere"


class Scripted(concurrent.futures.Executor):
    """Each task is carried out by the next of some functions of its assignment, which return an outcome, or raise."""

    def __init__(self, *workers):
        self.workers = list(workers)
        self.assignments = []

    def submit(self, function, sent):
        future = concurrent.futures.Future()
        assignment = unpickled(sent).args[0]
        self.assignments.append(assignment)
        try:
            came_out = self.workers.pop(0)(assignment)
            if came_out is None:  # the task never begins
                return future
            messages = came_out if isinstance(came_out, tuple) else (came_out,)
            future.set_result(tuple(map(pickled, messages)))
        except RuntimeError as error:
            future.set_exception(error)
        return future


def say(assignment, *messages):
    for message in (Arrived(THERE), *messages):
        assignment.line.say(pickled(message))


def find(assignment):
    say(assignment, Happened(SearchStarted(CALL.key, 2, HEURISTIC)))
    return Returned(FOUND)


def is_lost_with(*configs, what="running"):
    def lose(assignment):
        say(assignment, Happened(SearchStarted(CALL.key, 2, HEURISTIC)), Began(what, list(configs), 0.0))
        raise BrokenProcessPool("a process ended")

    return lose


def refuse(assignment):
    return Raised(RefusedError("it has gpu:abacus, but the call is for a gpu:slide_rule"))


def tuned_by(*workers, calls=(CALL,), **options):
    executor = Scripted(*workers)
    chain = ConfigSelectorChain(policy=AutotunePolicy(executor=executor))
    return tune_together(chain, [[SharedCall(inv=inv)] for inv in calls], **options), chain, executor


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(dispatch, "_BACK_OFF", 0.0)
    monkeypatch.setattr(dispatch, "_LOOK", 0.001)


def test_results_of_workers_are_kept_in_memory_here():
    result, chain, _ = tuned_by(find)
    assert [entry.cfg for entry in result.entries] == [BEST]
    assert chain.cache.get(CALL.key) == BEST


def test_calls_are_sent_side_by_side_and_come_back_in_order():
    other = Invocation(kernel=plain, args=(jax.ShapeDtypeStruct((8, 8), jnp.float32),)).abstract()

    together = threading.Barrier(2)

    def wait_for_both(assignment):
        together.wait(60)
        return Returned(FOUND)

    result, _, executor = tuned_by(wait_for_both, wait_for_both, calls=[CALL, other])
    assert [data.inv.key for data in result.searches] == [CALL.key, other.key]
    assert len(executor.assignments) == 2


def test_tasks_bound_to_this_process_run_here():
    executor = Scripted(find)
    chain = ConfigSelectorChain(policy=AutotunePolicy(devices=3))
    with policy_override(executor=executor, budget_s=9.0):
        tune_invocations(chain, [CALL])
    (sent,) = executor.assignments
    assert (sent.task.policy.executor, sent.task.policy.devices, sent.task.policy.budget_s) == (None, 1, 9.0)
    assert [change.changes for change in sent.scope.policies] == [(("budget_s", 9.0),)]


def test_a_lost_worker_s_task_is_sent_again_and_the_loss_is_an_event():
    events = []
    with on_event(events.append):
        result, _, executor = tuned_by(is_lost_with(HEURISTIC, BEST), find)
    assert [entry.cfg for entry in result.entries] == [BEST]
    (lost,) = [event for event in events if isinstance(event, WorkerRestarted)]
    assert lost.reason.startswith("a worker was lost (process 7 on elsewhere): BrokenProcessPool: a process ended: ")
    assert sum(isinstance(event, SearchStarted) for event in events) == 1
    assert executor.assignments[1].task.suspects == (HEURISTIC, BEST)


def test_a_candidate_alone_with_two_lost_workers_is_out():
    _, _, executor = tuned_by(is_lost_with(BEST), is_lost_with(BEST), find)
    (out,) = executor.assignments[2].task.known
    assert (out.config, out.status) == (BEST, "crashed")
    assert "2 workers were lost while it ran alone" in out.reason


def test_candidates_beside_others_are_not_blamed():
    several = is_lost_with(HEURISTIC, BEST)
    _, _, executor = tuned_by(several, several, is_lost_with(BEST, what="running the reference"), find)
    assert executor.assignments[3].task.known == ()


def test_a_candidate_with_earlier_times_is_out_after_three_lost_workers():
    def lose(assignment):
        done = Happened(CandidateFinished(CALL.key, Outcome(config=BEST, status="measured")))
        say(assignment, done, Began("confirming", [BEST], 0.0))
        raise BrokenProcessPool

    _, _, executor = tuned_by(lose, lose, lose, find)
    assert [[o.status for o in sent.task.known] for sent in executor.assignments] == [
        [],
        ["measured"],
        ["measured"],
        ["crashed"],
    ]


class Garbling(Scripted):
    """Its first answers are no messages."""

    def __init__(self, *workers):
        super().__init__(*workers)
        self.garbage = [None, (b"garbage",), (), (pickled("no message"),)]

    def submit(self, function, sent):
        if not self.garbage:
            return super().submit(function, sent)
        future = concurrent.futures.Future()
        future.set_result(self.garbage.pop())
        return future


def test_garbage_of_an_executor_is_a_lost_worker():
    executor, events = Garbling(find), []
    chain = ConfigSelectorChain(policy=AutotunePolicy(executor=executor))
    with on_event(events.append):
        assert tune_invocations(chain, [CALL]).entries[0].cfg == BEST
    assert sum(isinstance(event, WorkerRestarted) for event in events) == 4


def test_a_task_is_abandoned_after_twenty_lost_workers():
    with pytest.warns(TuningWarning, match="plain: gave up after the loss of 20 workers"):
        result, _, _ = tuned_by(*[is_lost_with()] * 20)
    assert len(result) == 0


def test_a_refused_task_is_sent_again():
    result, _, executor = tuned_by(refuse, refuse, find)
    assert [entry.cfg for entry in result.entries] == [BEST]
    assert len(executor.assignments) == 3


def test_a_task_without_a_worker_is_not_tuned_and_the_reason_is_reported_once():
    refusals = r"refuse the task: it has gpu:abacus, but the call is for a gpu:slide_rule\. Pass an executor"
    with pytest.warns(TuningWarning, match=refusals):
        result, chain, _ = tuned_by(*[refuse] * 6)
    assert len(result) == 0
    assert CALL.key not in chain.cache


def test_a_failed_search_is_not_retried():
    with pytest.warns(TuningWarning, match="none of 2 candidates"):
        _, _, executor = tuned_by(lambda assignment: Raised(TuningError("plain: none of 2 candidates")))
    assert len(executor.assignments) == 1


def test_undelivered_events_come_with_the_answer():
    events = []
    said = (Happened(SearchStarted(CALL.key, 2, HEURISTIC)), Warned(TuningWarning("it is odd")))
    with on_event(events.append), pytest.warns(TuningWarning, match="it is odd"):
        tuned_by(lambda assignment: (*said, Returned(FOUND)))
    assert SearchStarted(CALL.key, 2, HEURISTIC) in events


def test_a_kernel_that_cannot_be_sent_is_a_warning_that_says_what_to_do():
    class Inner(type(plain)):
        pass

    call = Invocation(kernel=Inner("inner"), args=CALL.args).abstract()
    with pytest.warns(TuningWarning, match=r"cannot be sent to a worker process.*top level of a module.*no executor"):
        tuned_by(find, calls=[call])


class Closing(Scripted):
    """Cancels its first task before it begins, and accepts no more."""

    def submit(self, function, sent):
        if self.assignments:
            raise ValueError("the quota is used up")
        future = super().submit(function, sent)
        future.cancel()
        return future


def test_a_task_that_the_executor_cancels_and_does_not_take_again_is_carried_out_here(monkeypatch):
    monkeypatch.setattr(dispatch, "carry_out", lambda sent: (pickled(Returned(FOUND)),))
    executor = Closing(lambda assignment: None)
    chain = ConfigSelectorChain(policy=AutotunePolicy(executor=executor))
    text = "the executor accepts no more tasks, so this process tunes the rest: ValueError: the quota"
    with pytest.warns(TuningWarning, match=text):
        assert tune_invocations(chain, [CALL]).entries[0].cfg == BEST


def test_an_executor_must_submit():
    with pytest.raises(ConfigError, match=r"executor must be a concurrent\.futures\.Executor.*got 3"):
        AutotunePolicy(executor=3)
    with pytest.raises(ConfigError, match="got <class"):
        AutotunePolicy(executor=concurrent.futures.ThreadPoolExecutor)


# --- Ctrl-C ---


def asked_to_end(*workers, at_once=False):
    slot = WorkerSlot(Worker)
    slot.cancellation.request(at_once=at_once)
    with in_slot(slot):
        return tuned_by(*workers)


def test_tasks_that_have_not_begun_are_cancelled():
    with pytest.raises(KeyboardInterrupt):
        asked_to_end(lambda assignment: None)


def test_running_tasks_return_the_best_so_far_which_is_kept():
    wishes = []

    class Asked(Scripted):
        def submit(self, function, sent):
            assignment, future = unpickled(sent).args[0], concurrent.futures.Future()
            say(assignment)

            def work():
                while assignment.line.instruction() == Instruction.GO_ON:
                    pass
                wishes.append(assignment.line.instruction())
                return (pickled(Returned(dataclasses.replace(FOUND, interrupted=True))),)

            self.pool = concurrent.futures.ThreadPoolExecutor(1)
            future = self.pool.submit(work)
            self.pool.shutdown(wait=False)
            return future

    slot = WorkerSlot(Worker)
    slot.cancellation.request()
    chain = ConfigSelectorChain(policy=AutotunePolicy(executor=Asked()))
    with in_slot(slot), pytest.raises(KeyboardInterrupt):
        tune_invocations(chain, [CALL])
    assert wishes == [Instruction.END]
    assert chain.cache.get(CALL.key) == BEST


def test_an_answer_that_has_arrived_is_not_abandoned():
    slot = WorkerSlot(Worker)
    slot.cancellation.request()
    executor = Scripted(lambda assignment: Returned(dataclasses.replace(FOUND, interrupted=True)))
    chain = ConfigSelectorChain(policy=AutotunePolicy(executor=executor))
    with in_slot(slot), pytest.raises(KeyboardInterrupt):
        tune_invocations(chain, [CALL])
    assert chain.cache.get(CALL.key) == BEST


def test_a_second_ctrl_c_does_not_wait():
    with pytest.raises(KeyboardInterrupt):
        asked_to_end(say, at_once=True)


# --- programs compiled before ---


def test_programs_are_sent_with_their_code_and_recompiled_if_the_file_is_gone(tmp_path):
    here = Program(code=CodeFile.written(tmp_path / "0-0.bin", b"code"))
    gone = Program(code=CodeFile(tmp_path / "0-1.bin", digest_of(b"code")))
    candidates = [
        BundledCandidate(outcome=Outcome(config=config, status="ready"), program=program)
        for config, program in ((HEURISTIC, here), (BEST, gone))
    ]
    compiled = {CALL.key: BundledCall(description=CALL.description, candidates=tuple(candidates), reference=here)}
    with pytest.warns(TuningWarning, match=r"compiled again: its program 0-1\.bin is missing"):
        _, _, executor = tuned_by(find, compiled=compiled)
    task = executor.assignments[0].task
    assert [(config, program.code) for config, program in task.programs] == [(HEURISTIC, b"code")]
    assert task.reference.code == b"code"
