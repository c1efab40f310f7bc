# SPDX-License-Identifier: Apache-2.0
"""Calls tuned together keep one configuration in every place."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.ops.config.shared.stores import entry, folder, tuned_together

from ejkernel.ops import Autotuner, ConfigSelectorChain, Invocation, PersistentCache, tune
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.config.shared import upkeep
from ejkernel.ops.config.shared.choice import best_of_classes, by_preference, calls_of, together
from ejkernel.ops.config.shared.exchange import FolderPlace, plan


def rows(place):
    """Return the configuration that answers for each call, by its number."""
    return {int(found[0].key.call, 16): found[0].config["rows"] for found in place.variants()}


def bring(target, *sources):
    found = plan(sources, target)
    target.put(found.entries)
    return found


def test_a_set_is_copied_as_a_whole(tmp_path):
    target = folder(tmp_path / "a", entry(1, 1, speedup=1.1))
    bring(target, folder(tmp_path / "b", *tuned_together(1, 2, rows=7)))
    assert rows(target) == {1: 7, 2: 7}


def test_a_set_with_a_better_local_entry_is_not_pulled_and_is_shown(tmp_path):
    target = folder(tmp_path / "a", entry(1, 1, speedup=1.9))
    found = bring(target, folder(tmp_path / "b", *tuned_together(1, 2, rows=7)))
    assert rows(target) == {1: 1}
    assert [step.action for step in found.steps] == ["kept", "kept"]
    (conflict,) = found.conflicts
    assert conflict.verdict.why.startswith("tuned together with a call that keeps its entry: ours has 1.90x")


def test_an_entry_tuned_alone_does_not_replace_a_call_of_a_set(tmp_path):
    target = folder(tmp_path / "a", *tuned_together(1, 2, rows=7))
    found = bring(target, folder(tmp_path / "b", entry(1, 1, speedup=9.0)))
    assert rows(target) == {1: 7, 2: 7}
    assert [step.verdict.why for step in found.conflicts] == ["ours was tuned together with other calls"]


def test_a_better_search_for_the_same_set_replaces_the_whole_set_or_nothing(tmp_path):
    target = folder(tmp_path / "a", *tuned_together(1, 2, rows=7, speedup=1.2))
    better, worse = tuned_together(1, 2, rows=8, speedup=1.4), tuned_together(1, 2, rows=9, speedup=1.1)
    bring(target, folder(tmp_path / "b", *better))
    assert rows(target) == {1: 8, 2: 8}
    bring(target, folder(tmp_path / "c", *worse))
    assert rows(target) == {1: 8, 2: 8}


def test_calls_only_in_a_worse_search_are_not_pulled(tmp_path):
    target = folder(tmp_path / "a", tuned_together(1, 2, rows=7, speedup=1.4)[0])
    bring(target, folder(tmp_path / "b", *tuned_together(1, 2, rows=8, speedup=1.2)))
    assert rows(target) == {1: 7}
    bring(target, folder(tmp_path / "c", *tuned_together(1, 2, rows=7, speedup=1.4)))
    assert rows(target) == {1: 7, 2: 7}


def test_a_later_search_for_more_calls_takes_the_place_of_a_set(tmp_path):
    target = folder(tmp_path / "a", *tuned_together(1, 2, rows=7, days=3))
    bring(target, folder(tmp_path / "b", *tuned_together(2, 3, rows=8)))
    assert rows(target) == {1: 7, 2: 7}
    bring(target, folder(tmp_path / "c", *tuned_together(1, 2, 3, rows=8, speedup=1.1)))
    assert rows(target) == {1: 8, 2: 8, 3: 8}


@pytest.mark.parametrize("speedups", [(1.2, 1.4), (1.4, 1.2)])
def test_of_two_sets_that_share_a_call_one_is_copied_and_the_other_reported(tmp_path, shared, speedups):
    first, second = speedups
    shared.put([*tuned_together(1, 2, rows=1, speedup=first), *tuned_together(2, 3, rows=2, speedup=second)])
    target = folder(tmp_path / "a")
    found = bring(target, shared)
    assert rows(target) in ({1: 1, 2: 1}, {2: 2, 3: 2})
    assert [step.verdict.why for step in found.conflicts] == [
        "tuned together with a call that has no entry or one of another set"
    ]


def test_an_incomplete_set_is_skipped_except_for_entries_tuned_separately(tmp_path, shared):
    shared.put([tuned_together(1, 2, 3, rows=7)[0], entry(1, 5)])
    shared.put(tuned_together(1, 2, 3, rows=7)[1:2])
    target = folder(tmp_path / "a")
    found = bring(target, shared)
    assert rows(target) == {1: 5}
    assert len(found.conflicts) == 1


def test_a_shared_cache_keeps_both_and_answers_with_the_set(tmp_path, shared):
    bring(shared, folder(tmp_path / "a", entry(1, 1, speedup=9.0), entry(2, 1, speedup=9.0)))
    bring(shared, folder(tmp_path / "b", *tuned_together(1, 2, 3, rows=7, days=30)))
    bring(shared, folder(tmp_path / "c", *tuned_together(1, 2, 3, rows=8, speedup=1.4)))
    upkeep.merge(shared)
    assert rows(shared) == {1: 7, 2: 7, 3: 7}
    assert sorted(len(found) for found in shared.variants()) == [1, 2, 2]  # without the worse search of the set
    # into a folder with something better the set does not come, but what was tuned alone does
    assert bring(folder(tmp_path / "d", entry(3, 1, speedup=2.0)), shared).conflicts
    assert rows(FolderPlace(tmp_path / "d")) == {1: 1, 2: 1, 3: 1}


SEARCHES = st.lists(
    st.builds(
        lambda *search: search,
        st.sampled_from([(1,), (2,), (1, 2), (1, 2, 3)]),
        st.sampled_from([1.0, 1.1, 1.11, 1.5]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=5,
)


def made(searches):
    for number, (calls, speedup, days) in enumerate(searches):
        if len(calls) > 1:
            yield tuned_together(*calls, rows=number, speedup=speedup, days=days)
        else:
            yield [entry(calls[0], number, speedup=speedup, days=days)]


@hypothesis_settings(max_examples=60)
@given(SEARCHES)
def test_the_answers_for_a_set_come_from_one_search(searches):
    by_call = {}
    for found in made(searches):
        for each in found:
            by_call.setdefault(each.key.call, []).append(each)
    answers = {call: by_preference(best_of_classes(entries))[0] for call, entries in by_call.items()}
    for answer in answers.values():
        mine = together(answer)
        same = [other for other in answers.values() if together(other) == mine and mine]
        assert len({other.config["rows"] for other in same}) <= 1


@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEARCHES)
def test_a_folder_never_has_two_searches_of_one_set(tmp_path_factory, searches):
    root = tmp_path_factory.mktemp("sets")
    target = FolderPlace(root / "target")
    for number, found in enumerate(made(searches)):
        bring(target, folder(root / str(number), *found))
        held = [entries[0] for entries in target.variants()]
        for one in held:
            other = next((e for e in held if e.key.call in calls_of(one) and together(e) == together(one)), one)
            assert other.config == one.config


@tune(space={"rows": [1, 2]})
def doubled(x, *, rows=1):
    return x * (2 if rows else 2.0)


def test_entries_name_the_calls_of_their_search(tmp_path):
    cache = PersistentCache(tmp_path, shipped=False)
    chain = ConfigSelectorChain(persistent=cache, tuner=Autotuner(rounds=2, warmup=0))
    first, second = (Invocation(kernel=doubled, args=(jnp.ones(size),)) for size in (4, 8))
    chain.search(first, doubled, others=[SharedCall(inv=second)])
    one, other = (entry for _, entry in cache.entries())
    assert calls_of(one) == {one.key.call, other.key.call}
    assert together(one) == together(other)
