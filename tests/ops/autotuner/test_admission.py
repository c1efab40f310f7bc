# SPDX-License-Identifier: Apache-2.0
"""Which winners may be saved, and the report of searches that ended early."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import types

import jax
import jax.numpy as jnp
import pytest
from tests.ops.sample_kernels import Double

from ejkernel.ops import (
    AutotunePolicy,
    Autotuner,
    ConfigSelectorChain,
    Invocation,
    PersistentCache,
    TuningWarning,
)
from ejkernel.ops.autotuner import tuner
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import PairedComparison
from ejkernel.ops.autotuner.measure.sampling import Sampling, SamplingPlan
from ejkernel.ops.autotuner.process.worker import of_session
from ejkernel.ops.autotuner.store.saving import AdmissionError, Earlier, why_not_saved
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import SearchProgress, SearchState
from ejkernel.ops.config.entries import StoredEntry

CALL = Invocation(op_id="double@v1", args=(jax.ShapeDtypeStruct((4, 8), jnp.float32),), device="gpu:h200")
WINS = PairedComparison(wins=True, settled=True, speedup=2.0, confidence=0.99, pairs=8, ahead=8)


def measured(config, seconds=1.0):
    return Outcome(config=config, status="measured", measurement=Measurement(samples=(seconds,)))


def search(*outcomes, winner=1, **fields):
    fields = {"checked": ("outputs",), "challenge": Challenge(1, WINS, is_confirmation=True), **fields}
    return AutotuneData(inv=CALL, config=winner, outcomes=outcomes, seconds=1.0, **fields)


GOOD = search(measured(0, 2.0), measured(1))


def test_a_measured_correct_and_confirmed_winner_is_saved():
    assert why_not_saved(GOOD, validated=True) == ""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"outcomes": (measured(0), Outcome(config=1, status="skipped"))}, "has no samples; its status is skipped"),
        ({"outcomes": (measured(0), Outcome(config=1, status="measured"))}, "has no samples"),
        ({"checked": ()}, "was not compared with the reference"),
        ({"challenge": None}, "was not compared with the heuristic"),
        ({"challenge": Challenge(2, WINS, is_confirmation=True)}, "was not compared with the heuristic"),
        ({"challenge": Challenge(1, WINS)}, "is not confirmed"),
        (
            {"challenge": Challenge(1, dataclasses.replace(WINS, settled=False), is_confirmation=True)},
            "is not confirmed",
        ),
        ({"config": 7}, "is not among the candidates"),
    ],
)
def test_any_other_winner_raises_its_fault(fields, says):
    with pytest.raises(AdmissionError, match=says):
        why_not_saved(dataclasses.replace(GOOD, **fields), validated=True)


def test_a_heuristic_that_failed_needs_no_race_and_one_without_samples_does():
    failed = Outcome(config=0, status="failed", reason="no")
    assert why_not_saved(search(failed, measured(1), challenge=None), validated=True) == ""
    with pytest.raises(AdmissionError, match="was not compared with the heuristic"):
        why_not_saved(search(Outcome(config=0, status="skipped"), measured(1), challenge=None), validated=True)


def test_a_heuristic_is_kept_only_if_the_others_were_measured():
    kept = search(measured(0), measured(1), winner=0, challenge=None)
    assert (why_not_saved(kept, validated=True), kept.in_a_word) == ("", "kept")
    early = search(measured(0), winner=0, challenge=None, planned=12)
    assert why_not_saved(early, validated=True) == early.in_a_word == "not finished (1 of 12)"


def test_a_partial_search_replaces_an_earlier_entry_only_after_measuring_it():
    partial = dataclasses.replace(GOOD, planned=12)
    assert why_not_saved(partial, validated=True) == ""
    assert why_not_saved(partial, validated=True, earlier=Earlier(1)) == ""
    assert "5, was not measured again" in why_not_saved(partial, validated=True, earlier=Earlier(5))


def test_a_partial_search_replaces_an_earlier_entry_with_wrong_results_by_the_measured_heuristic():
    for status, is_saved in (("wrong", True), ("failed", False), ("crashed", False)):
        outcomes = measured(0), Outcome(config=5, status=status, reason="no")
        early = search(*outcomes, winner=0, challenge=None, planned=12)
        assert (why_not_saved(early, validated=True, earlier=Earlier(5)) == "") == is_saved
    assert why_not_saved(early, validated=True, earlier=Earlier(3)) != ""


def test_a_configuration_with_the_program_of_a_wrong_one_is_wrong():
    wrong, same = Outcome(config=4, status="wrong", reason="no"), Outcome(config=5, status="same", twin=4)
    early = search(measured(0), wrong, same, winner=0, challenge=None, planned=12)
    assert why_not_saved(early, validated=True, earlier=Earlier(5)) == ""
    failures = early.summary_data()["failures"]
    assert [(each["config"], each["status"]) for each in failures] == [(4, "wrong"), (5, "wrong")]


def entry(found):
    key, measured = found.key, found.summary_data()
    return StoredEntry(key=key, config=found.config, config_type="json", call=None, measured=measured, provenance={})


OPEN = {"undecided": True, "challenge": Challenge(1, dataclasses.replace(WINS, wins=False, settled=False))}


@pytest.mark.parametrize(
    "earlier", [Earlier(1, entry(GOOD)), Earlier(0, entry(search(measured(0), winner=0))), Earlier(5)]
)
def test_an_undecided_search_keeps_the_earlier_entry(earlier):
    undecided = search(measured(0), measured(1), winner=0, **OPEN)
    says = f"undecided, so the saved configuration, {earlier.config}, stays"
    assert why_not_saved(undecided, validated=True, earlier=earlier) == says
    assert why_not_saved(undecided, validated=True) == ""
    assert why_not_saved(undecided, validated=True, earlier=Earlier(0, entry(undecided))) == ""
    for kept in (undecided, dataclasses.replace(undecided, planned=12)):
        found = dataclasses.replace(GOOD, undecided=True)
        assert why_not_saved(found, validated=True, earlier=Earlier(0, entry(kept))) == ""
    failing = search(measured(0), Outcome(config=earlier.config, status="wrong", reason="no"), winner=0, **OPEN)
    if earlier.config != 0:
        assert why_not_saved(failing, validated=True, earlier=earlier) == ""


def test_a_complete_search_replaces_a_searched_entry_only_after_measuring_it_unless_the_space_has_lost_it():
    assert why_not_saved(GOOD, validated=True, earlier=Earlier(0, entry(GOOD))) == ""
    assert "was not among the candidates" in why_not_saved(GOOD, validated=True, earlier=Earlier(5, entry(GOOD)))
    assert why_not_saved(GOOD, validated=True, earlier=Earlier(5, entry(GOOD), has_left=True)) == ""
    assert why_not_saved(GOOD, validated=True, earlier=Earlier(5)) == ""  # made by hand


@pytest.mark.parametrize(
    ("statuses", "options", "words"),
    [
        (["measured", "failed", "same"], {}, "complete"),
        (["measured", "skipped"], {}, "not finished (1 of 2)"),
        (["measured"], {"planned": 12}, "not finished (1 of 12)"),
        (["measured", "measured"], {"unconfirmed": True}, "not finished (2 of 2, the best one is not confirmed)"),
        (["skipped", "failed"], {}, "failed"),
        (["measured", "measured"], {"undecided": True}, "undecided"),
        (["measured", "skipped"], {"undecided": True}, "not finished (1 of 2)"),
    ],
)
def test_a_search_is_complete_undecided_partial_or_failed(statuses, options, words):
    assert SearchProgress.of(statuses, **options).in_words == words


UNKNOWN = "not finished (0 of 12)"


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"candidates": 12, "search": {"state": "partial", "done": 3, "candidates": 12}}, "not finished (3 of 12)"),
        ({"candidates": 12}, "complete"),
        ({"candidates": 12, "interrupted": True}, "not finished (0 of 12)"),
        ({"candidates": 12, "skipped": 3}, "not finished (0 of 12)"),
        ({"candidates": "12"}, "not finished (0 of 0, the best one is not confirmed)"),
        *(
            ({"candidates": 12, "search": {"state": "complete", "done": 12, "candidates": 12} | odd}, UNKNOWN)
            for odd in ({"state": "odd"}, {"more": 1}, {"done": -1}, {"done": 13}, {"done": 3}, {"done": True})
        ),
        ({"candidates": 12, "search": None}, UNKNOWN),
    ],
)
def test_entries_tell_how_far_their_search_came(measured, words):
    assert SearchProgress.stored_in(measured).in_words == words


def test_entries_without_a_state_have_the_stored_number_of_candidates():
    assert SearchProgress.stored_in({"candidates": 9}) == SearchProgress(SearchState.COMPLETE, 9, 9)


def test_candidates_without_samples_are_not_ranked():
    for dropped in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in range(3)):
        sampling = Sampling(3, plan=SamplingPlan.fixed(1, discard=0), incumbents=())
        for index in dropped:
            sampling.drop(index)
        for index in sampling.next_round():
            sampling.note(index, 1.0 + index)
        assert sampling.ranking() == [index for index in range(3) if index not in dropped]


class Finished(Autotuner):
    """Its searches measure the configurations 0, 1 and 2, and the last one fails."""

    def _carried_out(self, task):
        wrong = Outcome(config=2, status="wrong", reason="no")
        return dataclasses.replace(GOOD, inv=task.inv, outcomes=(*GOOD.outcomes, wrong))


@pytest.fixture
def chain(tmp_path):
    return ConfigSelectorChain(persistent=PersistentCache(tmp_path, shipped=False), tuner=Finished())


DOUBLE = Double("double_saved")
DOUBLED = Invocation(kernel=DOUBLE, args=(jax.ShapeDtypeStruct((4, 8), jnp.float32),)).abstract()


def saved_by(chain):
    return PersistentCache(chain.persistent.path, shipped=False).get(DOUBLED.key), chain.store.progress(DOUBLED.key)


def test_a_warning_that_is_an_error_does_not_discard_a_finished_search(chain):
    with pytest.raises(TuningWarning, match="1 of 2 candidates"):  # warnings are errors in all tests
        chain.search(DOUBLED, DOUBLE, candidates=[1, 2])
    assert saved_by(chain) == (1, SearchProgress(SearchState.COMPLETE, 3, 3))


def test_a_ctrl_c_while_a_search_is_saved_is_raised_afterwards(chain, monkeypatch):
    put = PersistentCache.put

    def interrupted(self, *args, **options):
        signal.raise_signal(signal.SIGINT)
        put(self, *args, **options)

    monkeypatch.setattr(PersistentCache, "put", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell may ignore it in background jobs
    with pytest.raises(KeyboardInterrupt):
        chain.search(DOUBLED, DOUBLE)
    signal.signal(signal.SIGINT, before)
    assert saved_by(chain) == (1, SearchProgress(SearchState.COMPLETE, 3, 3))


def test_a_ctrl_c_while_the_processes_of_a_search_end_does_not_discard_it(chain, monkeypatch):
    def here(task, **_):
        of_session("interrupt", lambda: types.SimpleNamespace(close=interrupt))
        return Finished()._carried_out(task)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "tune_here", here)
    with pytest.raises(KeyboardInterrupt):
        chain.search(DOUBLED, DOUBLE, tuner=Autotuner(), policy=AutotunePolicy(compile_processes=1))
    assert saved_by(chain) == (1, SearchProgress(SearchState.COMPLETE, 3, 3))
