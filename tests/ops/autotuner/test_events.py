# SPDX-License-Identifier: Apache-2.0
"""Events of a search, as listeners receive them."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest
from tests.ops import faulty_kernels
from tests.ops.faulty_kernels import BEST, HEURISTIC, SHAPE

from ejkernel.ops.autotuner.trials.events import (
    CandidateFinished,
    Counter,
    RoundsFinished,
    SearchFinished,
    SearchStarted,
    emit,
    on_event,
)
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import TuningWarning

pytestmark = pytest.mark.slow

KERNEL = faulty_kernels.failing_on_device
INV = Invocation(kernel=KERNEL, args=(jax.ShapeDtypeStruct(SHAPE, jnp.float32),))


def tune(kernel=KERNEL, **options):
    inv = Invocation(kernel=kernel, args=INV.args)
    isolate = options.pop("isolate", False)
    return Autotuner(width=1).tune(inv, kernel, policy=AutotunePolicy(isolate=isolate), **options)


def statuses(events, config):
    return [e.outcome.status for e in events if isinstance(e, CandidateFinished) and e.outcome.config == config]


@pytest.mark.parametrize("isolate", [False, True], ids=["in this process", "in a worker"])
def test_a_search_begins_has_candidates_and_ends(isolate):
    events = []
    with on_event(events.append):
        data = tune(isolate=isolate)
    assert isinstance(events[0], SearchStarted)
    assert events[0].candidates == len(data.outcomes)
    assert isinstance(events[-1], SearchFinished)
    assert events[-1].data is data
    assert {type(event) for event in events[1:-1]} == {CandidateFinished, RoundsFinished}
    assert {event.is_confirmation for event in events if isinstance(event, RoundsFinished)} == {False, True}
    assert {event.key for event in events} == {INV.key}
    for config in (HEURISTIC, BEST):
        first, *later = statuses(events, config)
        assert (first, set(later)) == ("ready", {"measured"})
    for outcome in data.outcomes:
        assert statuses(events, outcome.config)[-1] == outcome.status


def test_events_stop_after_the_with_block():
    events = []
    with on_event(events.append):
        pass
    tune()
    assert events == []


def test_listeners_are_called_each_as_often_as_they_listen():
    one, other = [], []
    with on_event(one.append), on_event(one.append), on_event(other.append):
        tune()
    assert len(one) == 2 * len(other) > 0


def test_a_listener_that_stops_or_adds_one_during_an_event_takes_it_from_no_other():
    one, other, late = [], [], []
    with contextlib.ExitStack() as first, contextlib.ExitStack() as stack:

        def leave(event):
            one.append(event)
            first.close()
            stack.enter_context(on_event(late.append))

        first.enter_context(on_event(leave))
        stack.enter_context(on_event(other.append))
        for count in (1, 2):
            emit(SearchStarted(INV.key, count))
    assert [[event.candidates for event in each] for each in (one, other, late)] == [[1], [1, 2], [2]]


def test_a_listener_that_raises_is_a_warning_and_the_search_goes_on():
    heard = []

    def bad(event):
        raise KeyError(type(event).__name__)

    with on_event(bad), on_event(heard.append), pytest.warns(TuningWarning, match="a listener failed on") as got:
        data = tune()
    assert data.config == BEST
    assert len(heard) == len([w for w in got if "a listener failed on" in str(w.message)])
    assert str(got[0].message) == "a listener failed on SearchStarted: KeyError: 'SearchStarted'"


# --- counting ---


def finished(key, *configs):
    return [CandidateFinished(key, Outcome(config=config, status=Status.READY)) for config in configs]


def test_a_counter_counts_each_candidate_once_and_reports_each_number_once():
    reported = []
    counter = Counter(lambda *numbers: reported.append(numbers), [INV.key])
    for event in (SearchStarted(INV.key, 3), *finished(INV.key, 1, 1, 2), *finished(INV.key, 2)):
        counter(event)
    assert reported == [(INV.key, 0, 3), (INV.key, 1, 3), (INV.key, 2, 3)]


def test_a_counter_separates_searches_and_never_exceeds_their_number():
    reported, other = [], INV.key._replace(call="0" * 16)
    counter = Counter(lambda *numbers: reported.append(numbers), [INV.key, other])
    for event in (SearchStarted(INV.key, 1), SearchStarted(other, 9), *finished(INV.key, 1, 2), *finished(other, 1)):
        counter(event)
    assert reported == [(INV.key, 0, 1), (other, 0, 9), (INV.key, 1, 1), (other, 1, 9)]


def test_a_search_that_ends_early_is_counted_to_its_end():
    reported = []
    tune(progress=lambda *numbers: reported.append(numbers), candidates=[BEST])
    assert reported[-1] == (2, 2)
    assert reported == sorted(set(reported))
