# SPDX-License-Identifier: Apache-2.0
"""The last lines of `ejkernel tune`: each call counts once, and the advice fits the result."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tests.cli.searches import Tile, call, failed, found, measured

from ejkernel.cli.outcome import TuneOutcome, doubled
from ejkernel.ops import PersistentCache
from ejkernel.ops.autotuner.trials.outcome import AutotuneData


def kept(inv, **fields):
    """A search that measured only the heuristic."""
    heuristic = measured(Tile(1), 4.0, 4.0, 4.0, 4.0)
    return AutotuneData(inv=inv, config=heuristic.config, outcomes=(heuristic,), seconds=30.0, **fields)


def all_failed(inv):
    outcome = failed(Tile(1), "does not fit")
    return AutotuneData(inv=inv, config=outcome.config, outcomes=(outcome,), seconds=1.0)


def summary(calls, searches, saved=(), tuned=(), **fields):
    outcome = TuneOutcome(
        calls=calls,
        searches=searches,
        has_entry=lambda inv: inv in (*saved, *tuned),
        is_tuned=lambda inv: inv in tuned,
        store=PersistentCache("configs"),
        seconds=61.0,
        **fields,
    )
    return outcome.lines()


def test_each_call_counts_once():
    calls = [call(rows) for rows in (8, 16, 24, 32, 40)]
    faster, same, partial, lost, late = calls
    searches = [found(faster), kept(same), kept(partial, planned=3, not_saved="it is not finished"), all_failed(lost)]
    lines = summary(calls, searches, saved=[faster, same], not_started=[late])
    assert lines[0] == (
        "5 calls in 61.0 s: 1 faster than the heuristic, 1 with the heuristic kept, 1 not finished, 1 failed, "
        "1 not started; saved in configs"
    )
    assert "not started, because the time was over: reported@v0 f32[40,8]" in lines
    assert "2 searches can continue: run the command again." in lines[-1]
    assert "3 calls have no saved configuration yet, so EJKERNEL_ON_MISS=error raises." in lines[-1]


def test_an_unfinished_search_of_a_tuned_call_cannot_continue():
    one, other = call(8), call(16)
    searches = [kept(inv, planned=3, not_saved="it is not finished") for inv in (one, other)]
    lines = summary([one, other], searches, tuned=[one], budget=30.0)
    assert lines[-1] == (
        "1 search can continue: run the command again, with --budget 60 (seconds for each call) for more time. 1 call "
        "keeps the configuration saved earlier; --force --budget 60 (seconds for each call) searches again from the "
        "start. 1 call has no saved configuration yet, so EJKERNEL_ON_MISS=error raises."
    )


def test_a_call_that_keeps_its_entry_and_was_not_started_cannot_continue():
    first, late = call(8), call(16)
    lines = summary([first, late], [found(first)], saved=[first, late], not_started=[late])
    assert lines[-1] == "not started, because the time was over: reported@v0 f32[16,8]"


def test_after_a_time_for_all_calls_the_advice_is_more_of_it():
    inv = call()
    partial = dataclasses.replace(kept(inv, planned=3), lacks_reference=True)
    assert (
        "run the command again, with --time 240 (seconds for all calls) for more time."
        in summary([inv], [partial], time=120.0)[-1]
    )
    assert any("--budget 60 (seconds for each call)" in line for line in summary([inv], [partial]))


def test_a_failed_call_is_not_called_unfinished():
    lines = summary([call()], [])
    assert lines[0].endswith("1 failed; none saved yet")
    assert "1 call failed (reported@v0 f32[16,8]): the warnings above say why." in lines[1]
    assert "can continue" not in " ".join(lines)


def test_a_partial_search_that_saved_its_winner_counts_as_faster_and_can_continue():
    inv = call()
    lines = summary([inv], [dataclasses.replace(found(inv), planned=9)], saved=[inv], budget=20.0)
    assert "1 faster than the heuristic; saved in configs" in lines[0]
    assert (
        lines[-1]
        == "1 search can continue: run the command again, with --budget 40 (seconds for each call) for more time."
    )


def test_the_reason_of_an_unfinished_search_is_shown():
    inv = call()
    lines = summary([inv], [kept(inv, planned=3, why="deadline exceeded", not_saved="it is not finished")], budget=5.0)
    assert "deadline exceeded" in lines[1]
    assert "--budget 60 (seconds for each call) for more time" in lines[-1]


def test_the_reason_of_an_undecided_search_is_shown():
    inv = call()
    lines = summary([inv], [kept(inv, undecided=True, why="5 rounds are few")], saved=[inv], budget=5.0)
    assert lines[0].endswith("1 undecided (heuristic kept); saved in configs")
    assert lines[1] == "reported@v0 f32[16,8]: undecided: 5 rounds are few"


def test_a_space_without_another_configuration_is_named():
    inv = call()
    text = "Nothing to compare with the heuristic, because the space has nothing else: reported@v0 f32[16,8]"
    assert summary([inv], [kept(inv)], saved=[inv])[1] == text


def test_integers_that_were_guessed_are_named():
    inv = dataclasses.replace(call(), args=(jax.ShapeDtypeStruct((4,), jnp.int32),))
    text = "the values of i32[4] were random zeros and ones. If they affect the time, give the kernel example_inputs."
    assert any(line.endswith(text) for line in summary([inv], [kept(inv)], saved=[inv]))
    assert not any("random" in line for line in summary([call()], [kept(call())], saved=[call()]))


def test_a_search_without_reference_is_named():
    inv = call()
    lines = summary([inv], [kept(inv, lacks_reference=True)], saved=[inv], budget=20.0)
    text = "the warnings above name the calls. --force --budget 60 (seconds for each call) gives it more time."
    assert any("compared with the heuristic's results" in line and line.endswith(text) for line in lines)


def test_an_unfinished_search_without_reference_gets_one_piece_of_advice():
    inv = call()
    lines = summary([inv], [kept(inv, lacks_reference=True, planned=3, not_saved="it is not finished")])
    assert " ".join(lines).count("--budget") == 1
    assert "run the command again, with --budget 60 (seconds for each call) for more time" in lines[-1]


@pytest.mark.parametrize(("given", "suggested"), [((20.0, 35.0), 70), ((None, 41.0), 90), ((1.0,), 20)])
def test_a_suggested_budget_is_twice_the_longest_time(given, suggested):
    assert doubled(*given) == suggested
