# SPDX-License-Identifier: Apache-2.0
"""The state machine that waits for workers, and the searches above it, with workers in memory."""

from __future__ import annotations

import math
import os
import signal
import threading

import numpy as np
import pytest
from tests.ops.autotuner.fake_workers import FakeWorker, killed, only
from tests.ops.sample_kernels import Times

from ejkernel.ops import AutotunePolicy, Invocation
from ejkernel.ops.autotuner.bench.oracle import REFERENCE
from ejkernel.ops.autotuner.process.messages import (
    Arrived,
    Began,
    Compiling,
    Happened,
    Returned,
    Warned,
    pickled,
)
from ejkernel.ops.autotuner.process.supervisor import (
    Deadline,
    Signs,
    WorkerDiedError,
    WorkerSilentError,
    WorkerStatus,
    interrupts_held_back,
)
from ejkernel.ops.autotuner.process.watch import Cancellation, Instruction
from ejkernel.ops.autotuner.process.worker import WorkerSlot, in_slot, shared_worker, worker_session
from ejkernel.ops.autotuner.tasks import isolated
from ejkernel.ops.autotuner.tasks.isolated import tune_isolated
from ejkernel.ops.autotuner.tasks.task import SharedCall, TuningTask
from ejkernel.ops.autotuner.trials.events import CandidateFinished, SearchStarted, WorkerRestarted, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.errors import DeviceLostError, TuningError

GO_ON, END, END_AT_ONCE = Instruction
RUNNING = Began("running", ["a", "b"], 10.0)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _default_handler():
    """The shell may ignore Ctrl-C in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- one call ---


def test_a_worker_returns_the_result_and_is_idle():
    worker = FakeWorker()
    assert worker.call(divmod, 7, 2) == (3, 1)
    assert (worker.requests[0].func, worker.is_busy, worker.instructions) == (divmod, False, [GO_ON])


def test_an_exception_of_the_call_leaves_the_worker_alive_and_idle():
    worker = FakeWorker()
    with pytest.raises(ZeroDivisionError):
        worker.call(divmod, 7, 0)
    assert (worker.is_alive, worker.is_busy) == (True, False)
    assert worker.call(divmod, 7, 2) == (3, 1)


@pytest.mark.parametrize(
    ("script", "seconds"),
    [((), 0.0), ((5.0, RUNNING), 0.0), ((5.0, RUNNING, 3.0, Compiling([]), 2.0, RUNNING, 1.0), 5.0)],
)
def test_the_seconds_of_a_lost_worker_are_those_between_its_first_and_last_message(script, seconds):
    worker = FakeWorker(*script, killed())
    with pytest.raises(WorkerDiedError):
        worker.call(print)
    assert worker.seconds == seconds


def test_an_argument_that_cannot_be_pickled_is_not_sent():
    worker = FakeWorker()
    with pytest.raises(TuningError, match=r"cannot be sent to a worker process.*top level of a module.*isolate=False"):
        worker.call(print, lambda: None)
    assert (worker.requests, worker.is_busy) == ([], False)


def test_messages_update_the_step_and_reach_the_caller():
    events = []
    worker = FakeWorker(
        Arrived("there"), RUNNING, Compiling(["c"]), Signs(running=1), Happened("event"), Warned(UserWarning("odd"))
    )
    with pytest.warns(UserWarning, match="odd"):
        worker.call(os.getpid, on_event=events.append)
    assert (worker.doing.what, worker.accused) == ("running", ["b", "c"])
    assert (worker.where, events) == ("there", ["event"])


@pytest.mark.parametrize(
    ("script", "what", "accused"),
    [
        ([], "receiving its task", []),
        ([5.0], "receiving its task", []),
        ([Compiling(["a", "b"])], "receiving its task", ["a", "b"]),
        ([RUNNING], "running", ["a"]),
        ([RUNNING, 9.0, Signs(beats=1, running=1)], "running", ["b"]),
        ([RUNNING, Signs(running=7)], "running", ["b"]),  # the index of an earlier, longer list
        ([RUNNING, Began("confirming", ["b"], 1.0)], "confirming", ["b"]),
    ],
)
def test_a_death_is_an_error_with_the_step_and_its_candidates(script, what, accused):
    worker = FakeWorker(*script, killed())
    with pytest.raises(WorkerDiedError, match=f"^the worker was killed by SIGABRT while {what}$") as raised:
        worker.call(os.getpid)
    assert (worker.accused, worker.is_busy) == (accused, True)
    assert raised.value.reason == "the worker was killed by SIGABRT"


@pytest.mark.parametrize("data", [b"", b"not a pickle", pickled("no message"), b"\x80\x05\x95"])
def test_garbage_ends_the_worker(data):
    worker = FakeWorker(RUNNING, data, Returned("late"))
    with pytest.raises(WorkerDiedError, match=r"the worker sent garbage .* while running"):
        worker.call(os.getpid)
    assert (worker.instructions, worker.accused) == ([GO_ON, END_AT_ONCE], ["a"])


def test_a_warning_that_cannot_be_pickled_is_issued_as_its_text():
    class LocalWarning(UserWarning):
        pass

    with pytest.warns(UserWarning, match="LocalWarning: odd"):
        FakeWorker(Warned.of(LocalWarning("odd"))).call(os.getpid)


# --- time ---


def test_a_silent_worker_is_ended():
    worker = FakeWorker(RUNNING, 9.0, 2.0, Returned("late"))
    with pytest.raises(WorkerSilentError, match=r"no sign of life for 11.0 s while running \(allowed: 10.0 s\)"):
        worker.call(os.getpid)
    assert (worker.instructions, worker.is_busy) == ([GO_ON, END_AT_ONCE], True)


@pytest.mark.parametrize("sign", [Signs(beats=1), RUNNING, Happened("event")])
def test_a_sign_of_life_extends_the_wait(sign):
    worker = FakeWorker(RUNNING, 9.0, sign, 9.0, Returned("late"))
    assert worker.call(os.getpid) == "late"


def test_an_answer_in_the_last_moment_counts():
    assert FakeWorker(RUNNING, 10.0, Returned("late")).call(os.getpid) == "late"


def test_a_wake_up_is_no_sign_of_life():
    worker = FakeWorker(RUNNING, 9.0, Signs(wakes=1), 2.0)
    with pytest.raises(WorkerSilentError):
        worker.call(os.getpid)


def test_the_allowed_silence_may_change():
    allowed = iter([600.0, 600.0])
    worker = FakeWorker(1.0, 1.0, 1.0, 1.0)
    doing = WorkerStatus(what="compiling", allowed=lambda: next(allowed, 0.1))
    with pytest.raises(WorkerSilentError, match=r"3.0 s while compiling \(allowed: 0.1 s\)"):
        worker.call(os.getpid, doing=doing)


class Limits(Deadline):
    """A total limit of 5 s; records whether the lock was blocked."""

    def __init__(self, worker):
        self.worker, self.stuck = worker, []

    def silence(self, worker, *, is_stuck):
        self.stuck.append(is_stuck)
        return math.inf

    def left(self):
        return 5.0 - self.worker.now


def test_a_deadline_ends_a_worker_that_shows_signs_of_life():
    worker = FakeWorker(RUNNING, *(step for beats in range(9) for step in (1.0, Signs(beats=beats))))
    with pytest.raises(WorkerSilentError, match="deadline exceeded while running"):
        worker.call(os.getpid, deadline=Limits(worker))
    assert worker.now == 5.0


def test_a_worker_that_does_not_wake_up_is_stuck():
    worker = FakeWorker(2.0, Signs(wakes=1), 2.0, Signs(beats=1, wakes=1), 0.6, Signs(wakes=2))
    limits = Limits(worker)
    worker.call(os.getpid, deadline=limits)
    assert limits.stuck == [False, False, False, False, True, False]


# --- cancellation ---


def test_a_cancellation_is_passed_on_and_the_answer_still_counts():
    cancellation = Cancellation()
    worker = FakeWorker(cancellation.request, 1.0, Returned("the best so far"))
    assert worker.call(os.getpid, cancellation=cancellation) == "the best so far"
    assert worker.instructions == [GO_ON, END]
    worker.call(os.getpid)
    assert worker.instructions == [GO_ON, END, GO_ON]


def test_a_cancellation_at_once_ends_the_worker():
    around = Cancellation()
    worker = FakeWorker(lambda: around.request(at_once=True), Returned("late"))
    with pytest.raises(KeyboardInterrupt):
        worker.call(os.getpid, cancellation=Cancellation(within=around))
    assert worker.instructions == [GO_ON, END_AT_ONCE]


def test_a_request_is_not_sent_after_a_cancellation_at_once():
    cancellation, worker = Cancellation(), FakeWorker()
    cancellation.request(at_once=True)
    cancellation.request()
    with pytest.raises(KeyboardInterrupt):
        worker.call(os.getpid, cancellation=cancellation)
    assert worker.requests == []


def test_the_first_ctrl_c_cancels_and_the_second_is_raised():
    cancellation = Cancellation()
    worker = FakeWorker(ctrl_c, 1.0, ctrl_c, Returned("late"))
    with pytest.raises(KeyboardInterrupt):
        worker.call(os.getpid, cancellation=cancellation)
    assert worker.instructions == [GO_ON, END, END_AT_ONCE]


def test_a_ctrl_c_during_the_last_wait_keeps_the_answer():
    cancellation = Cancellation()
    worker = FakeWorker(lambda: ctrl_c() or pickled(Returned(7)))
    assert worker.call(os.getpid, cancellation=cancellation) == 7
    assert cancellation.is_requested


def test_without_a_cancellation_the_first_ctrl_c_is_raised():
    worker = FakeWorker(ctrl_c, Returned("late"))
    with pytest.raises(KeyboardInterrupt):
        worker.call(os.getpid)
    assert worker.instructions == [GO_ON, END_AT_ONCE]


# --- slots ---


def test_a_session_reuses_its_worker_and_closes_it(monkeypatch):
    with only(monkeypatch, [], []) as started:
        for _ in range(2):
            with worker_session():
                for _ in range(2):
                    with shared_worker() as worker:
                        worker.call(os.getpid)
        assert [len(worker.requests) for worker in started] == [2, 2]
        assert not any(worker.is_alive for worker in started)


@pytest.mark.parametrize(
    "script", [[killed()], [b"garbage"], [500.0], [ctrl_c]], ids=["dead", "mad", "silent", "ctrl-c"]
)
def test_a_lost_worker_is_replaced_on_the_next_use(monkeypatch, script):
    with only(monkeypatch, script, []) as started, worker_session():
        with pytest.raises((WorkerDiedError, KeyboardInterrupt)), shared_worker() as worker:
            worker.call(os.getpid)
        with shared_worker() as worker:
            assert worker.call(divmod, 7, 2) == (3, 1)
        assert [worker.is_alive for worker in started] == [False, True]


def test_a_worker_that_died_while_idle_is_replaced_and_one_with_a_lost_device_too(monkeypatch):
    with only(monkeypatch, [], [], []) as started, worker_session():
        with shared_worker() as worker:
            worker.kill()
        with pytest.raises(DeviceLostError), shared_worker():
            raise DeviceLostError("lost")
        with pytest.raises(ZeroDivisionError), shared_worker() as worker:
            worker.call(divmod, 7, 0)
        with shared_worker() as worker:
            worker.call(divmod, 7, 2)
        assert [len(worker.requests) for worker in started] == [0, 0, 2]


def test_an_abandoned_slot_starts_no_worker():
    slot = WorkerSlot(FakeWorker)
    with slot.lent() as worker:
        slot.abandon()
    assert not worker.is_alive
    with in_slot(slot), pytest.raises(KeyboardInterrupt), shared_worker():
        pass


def test_two_workers_do_not_affect_each_other():
    lost, well = WorkerSlot(lambda: FakeWorker(killed())), WorkerSlot(FakeWorker)
    begun, errors = threading.Event(), []

    def lose():
        begun.wait(60)
        try:
            with lost.lent() as worker:
                worker.call(os.getpid)
        except WorkerDiedError as error:
            errors.append(error)

    thread = threading.Thread(target=lose)
    thread.start()
    with well.lent() as worker:
        begun.set()
        thread.join(60)
        assert worker.call(divmod, 7, 2) == (3, 1)
    assert len(errors) == 1
    assert well.worker.is_alive
    assert lost.worker is None


# --- searches: failure attribution, and continuing after it ---


SCALE = Times("scale")
CALL = Invocation(kernel=SCALE, args=(np.ones(4, np.float32),)).abstract()
HEURISTIC, A, B = 1, 2, 3
STARTED = Happened(SearchStarted(CALL.key, 3, HEURISTIC))
FOUND = Returned(AutotuneData(inv=CALL, config=A, outcomes=(), seconds=1.0))


def measured(config):
    return Happened(CandidateFinished(CALL.key, Outcome(config=config, status="measured")))


def running(*configs, what="running", allowed=10.0):
    return Began(what, list(configs), allowed)


def search(monkeypatch, *scripts, budget_s=None, others=()):
    """Return the result of a search with scripted workers, their tasks, and the events."""
    started, events = [], []
    with only(monkeypatch, *scripts, started=started), on_event(events.append):
        data = tune_isolated(TuningTask(inv=CALL, policy=AutotunePolicy(budget_s=budget_s), others=others))
    return data, [worker.requests[0].args[0] for worker in started], events


def statuses(task):
    return {outcome.config: (outcome.status, outcome.reason) for outcome in task.known}


def test_a_search_goes_on_with_a_new_worker_without_the_guilty_candidate(monkeypatch):
    first = [STARTED, measured(HEURISTIC), running(A, B), Signs(running=1), killed()]
    data, tasks, events = search(monkeypatch, first, [STARTED, measured(HEURISTIC), FOUND])
    assert data.config == A
    assert statuses(tasks[1]) == {
        HEURISTIC: ("measured", ""),
        B: ("crashed", "the worker was killed by SIGABRT while running"),
    }
    assert [type(event) for event in events] == [SearchStarted, CandidateFinished, CandidateFinished, WorkerRestarted]


def test_candidates_compiling_together_are_suspects_until_one_fails_alone(monkeypatch):
    together, alone = [STARTED, Compiling([A, B]), killed()], [STARTED, Compiling([B]), killed()]
    _, tasks, _ = search(monkeypatch, together, alone, [FOUND])
    assert [task.suspects for task in tasks] == [(), (A, B), (A,)]
    assert statuses(tasks[2]).keys() == {B}


def test_the_result_has_the_calls_of_the_caller_and_none_for_a_call_alone(monkeypatch):
    other = Invocation(kernel=SCALE, args=(np.ones(8, np.float32),)).abstract()
    alone, *_ = search(monkeypatch, [STARTED, FOUND])
    together, *_ = search(monkeypatch, [STARTED, FOUND], others=(SharedCall(inv=other),))
    assert (alone.inv, alone.calls) == (CALL, ())
    assert together.calls == (CALL, other)


def test_the_heuristic_has_a_second_attempt(monkeypatch):
    script = [STARTED, running(HEURISTIC), killed()]
    _, tasks, _ = search(monkeypatch, script, script, [FOUND])
    assert [statuses(task).keys() for task in tasks] == [set(), set(), {HEURISTIC}]


def test_a_silent_candidate_or_one_sending_garbage_has_crashed(monkeypatch):
    _, tasks, _ = search(monkeypatch, [STARTED, running(A), 11.0], [running(B), b"garbage"], [FOUND])
    assert {config: status for config, (status, _) in statuses(tasks[2]).items()} == {A: "crashed", B: "crashed"}
    assert statuses(tasks[2])[A][1] == "no sign of life for 11.0 s while running (allowed: 10.0 s)"


def test_a_budget_shortens_the_silence_and_skips_the_candidate(monkeypatch):
    _, tasks, _ = search(monkeypatch, [STARTED, running(A, allowed=120.0), 31.0], [FOUND], budget_s=60.0)
    assert statuses(tasks[1])[A][0] == "skipped"
    assert statuses(tasks[1])[A][1].startswith("the budget left it too little time: no sign of life for 31.0 s")


def test_a_lost_device_is_attributed_like_a_death(monkeypatch):
    monkeypatch.setattr(isolated, "_carry_out", _lose_the_device)
    with pytest.raises(TuningError, match="lost twice while no candidate ran: lost"):
        search(monkeypatch, [], [])


def _lose_the_device(*_):
    raise DeviceLostError("lost")


def test_two_deaths_without_a_candidate_end_the_search(monkeypatch):
    script = [STARTED, running(what=REFERENCE), killed()]
    with pytest.raises(TuningError, match="scale: the search was lost twice while no candidate ran: the worker was"):
        search(monkeypatch, script, script)


@pytest.mark.parametrize("end", [ctrl_c, killed()], ids=["second ctrl-c", "death"])
def test_after_ctrl_c_the_search_ends_with_its_results_and_starts_no_worker(monkeypatch, end):
    script = [STARTED, measured(HEURISTIC), ctrl_c, end]
    if end is ctrl_c:
        with pytest.raises(KeyboardInterrupt):
            search(monkeypatch, script)
    else:
        data, tasks, _ = search(monkeypatch, script)
        assert (data.config, data.interrupted, len(tasks)) == (HEURISTIC, True, 1)


@pytest.mark.parametrize("end", [[ctrl_c, FOUND], [lambda: ctrl_c() or pickled(FOUND)]], ids=["before", "with"])
def test_a_ctrl_c_that_comes_too_late_for_the_worker_keeps_its_result_and_interrupts(monkeypatch, end):
    data, *_ = search(monkeypatch, [STARTED, measured(HEURISTIC), *end])
    assert (data.config, data.interrupted) == (A, True)


# --- Ctrl-C that waits until it is looked for ---


def test_ctrl_c_is_raised_when_polled():
    with interrupts_held_back() as held:
        signal.raise_signal(signal.SIGINT)
        assert len(held) == 1
        with pytest.raises(KeyboardInterrupt):
            held.pop()()


def test_an_unpolled_ctrl_c_is_raised_at_the_end():
    holding = interrupts_held_back()
    holding.__enter__()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        holding.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_an_ignored_ctrl_c_stays_ignored(handler):
    signal.signal(signal.SIGINT, handler)
    with interrupts_held_back() as held:
        assert signal.getsignal(signal.SIGINT) is handler
    assert held == []


def test_another_thread_holds_nothing_back():
    seen = []

    def work():
        with interrupts_held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [signal.default_int_handler]


# --- how a search is asked for its end ---


def test_a_cancellation_is_not_requested_at_first_and_permanent_afterwards():
    cancellation = Cancellation()
    before = cancellation.is_requested
    cancellation.request()
    cancellation.request()
    assert (before, cancellation.is_requested) == (False, True)


def test_the_end_of_all_is_the_end_of_each_and_not_the_other_way_round():
    device = Cancellation()
    one, other = Cancellation(within=device), Cancellation(within=device)
    one.request()
    assert (one.is_requested, other.is_requested, device.is_requested) == (True, False, False)
    device.request()
    assert other.is_requested
