# SPDX-License-Identifier: Apache-2.0
"""Jobs side by side in threads, with a deadline that learns."""

from __future__ import annotations

import threading

import pytest

from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, CompileThreads, default_width, result_within
from ejkernel.ops.errors import CandidateError

LONG = 60.0  # seconds that no test waits for


def results(jobs, *, timeout=None, **options):
    threads = CompileThreads(jobs, timeout=timeout or AdaptiveTimeout(first=LONG, least=LONG), **options)
    return list(threads.results())


def raising(error):
    def job():
        raise error

    return job


@pytest.mark.parametrize("width", [1, 2, 5])
def test_as_many_jobs_run_side_by_side_as_the_width_says_and_no_more(width):
    running, most, lock = set(), [0], threading.Lock()
    meeting = threading.Barrier(width)  # each job waits for as many as may run at once

    def job(index):
        with lock:
            running.add(index)
            most[0] = max(most[0], len(running))
        meeting.wait(LONG)
        with lock:
            running.discard(index)
        return index

    found = results([lambda index=index: job(index) for index in range(2 * width)], width=width)
    assert sorted(done.result for done in found) == list(range(2 * width))
    assert most[0] == width


def test_results_come_as_jobs_end_and_not_in_their_order():
    first_may_end = threading.Event()
    jobs = [lambda: first_may_end.wait(LONG), lambda: "second"]
    found = []
    for done in CompileThreads(jobs, width=2, timeout=AdaptiveTimeout(first=LONG, least=LONG)).results():
        found.append((done.index, done.result))
        first_may_end.set()
    assert found == [(1, "second"), (0, True)]


def test_an_endless_job_is_abandoned_and_the_rest_continues():
    never = threading.Event()
    jobs = [never.wait, lambda: "after it"]
    found = results(jobs, width=1, timeout=AdaptiveTimeout(first=0.2, least=LONG))
    never.set()
    assert [done.index for done in found] == [0, 1]
    assert isinstance(found[0].error, CandidateError)
    assert str(found[0].error).startswith("compilation abandoned after 0.2 s (allowed: 0.2 s)")
    assert found[1].result == "after it"


def test_a_late_return_of_an_abandoned_job_is_not_a_result():
    released, ended = threading.Event(), threading.Event()

    def late():
        released.wait(LONG)
        return "too late"

    def after():
        released.set()
        ended.wait(0.2)  # never set: gives the other thread time for its result
        return "in time"

    found = results([late, after], width=1, timeout=AdaptiveTimeout(first=0.3, least=LONG))
    assert [(done.index, done.result) for done in found] == [(0, None), (1, "in time")]


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_an_exception_of_a_job_is_its_result_without_the_traceback(error):
    failed, fine = sorted(results([raising(error), lambda: 1]), key=lambda done: done.index)
    assert failed.error is error
    assert failed.error.__traceback__ is None
    assert fine.result == 1


def test_no_job_begins_after_a_stop_request():
    begun = []
    jobs = [lambda index=index: begun.append(index) for index in range(10)]
    threads = CompileThreads(jobs, width=1, timeout=AdaptiveTimeout(first=LONG, least=LONG))
    found = threads.results(stop=lambda: len(begun) >= 2)
    assert 1 <= len(list(found)) <= 3
    assert 2 <= len(begun) <= 3


def test_no_jobs_are_no_results():
    assert results([]) == []


def test_a_process_has_one_thread_a_core_at_least():
    assert default_width() >= 1


# --- the timeout ---


def test_the_timeout_is_long_without_earlier_times():
    assert AdaptiveTimeout(first=300.0, least=30.0).seconds == 300.0


def test_the_timeout_follows_usual_times_down_to_a_minimum():
    timeout = AdaptiveTimeout(first=300.0, least=30.0, factor=5.0)
    timeout.note(0.1)
    assert timeout.seconds == 30.0
    for _ in range(20):
        timeout.note(20.0)
    assert timeout.seconds == 100.0


def test_where_little_time_is_left_half_of_it_is_allowed_but_never_less_than_others_took():
    timeout = AdaptiveTimeout(first=300.0, least=30.0)
    assert timeout.within(1.0) == 300.0  # nothing says yet that it is too long
    timeout.note(2.0)
    assert [timeout.within(left) for left in (100.0, 20.0, 5.0, 0.0)] == [30.0, 10.0, 4.0, 4.0]


def test_an_endless_job_is_abandoned_sooner_near_the_deadline():
    never = threading.Event()
    timeout = AdaptiveTimeout(first=LONG, least=LONG)
    timeout.note(0.01)
    found = results([never.wait, lambda: "after it"], width=1, timeout=timeout, left=lambda: 0.2)
    never.set()
    assert str(found[0].error).endswith("(allowed: 0.1 s)")
    assert found[1].result == "after it"


def test_the_timeout_learns_only_from_successful_jobs():
    ticks = iter(range(1000))
    timeout = AdaptiveTimeout(first=1e6, least=0.0, factor=2.0)
    results([lambda: 1, raising(ValueError())], width=1, timeout=timeout, clock=lambda: float(next(ticks)))
    learnt = timeout.seconds
    assert learnt == 2.0  # one tick from the beginning to the end


def test_a_job_in_time_returns_its_result_or_raises():
    assert result_within(60.0, lambda: 3) == (3, True)
    with pytest.raises(ZeroDivisionError):
        result_within(60.0, lambda: 1 // 0)
    with pytest.raises(CandidateError, match="its own"):
        result_within(60.0, lambda: raised(CandidateError("its own")))


def test_a_job_that_exceeds_its_time_or_is_stopped_is_abandoned():
    ended = threading.Event()
    assert result_within(0.01, ended.wait) == (None, False)
    assert result_within(60.0, ended.wait, lambda: True) == (None, False)
    ended.set()


def raised(error):
    raise error


@pytest.mark.parametrize(("left", "for_budget"), [(0.0, True), (1e9, False)])
def test_a_compilation_stopped_by_the_budget_differs_from_one_that_takes_too_long(left, for_budget):
    goes_on, now = threading.Event(), iter(range(0, 10_000_000, 100))
    timeout = AdaptiveTimeout(first=LONG, least=LONG, factor=1.0)
    timeout.note(1.0)
    found = results([goes_on.wait], timeout=timeout, left=lambda: left, clock=lambda: float(next(now)))
    goes_on.set()
    assert (len(found), found[0].error.for_budget) == (1, for_budget)
