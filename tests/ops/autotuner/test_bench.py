# SPDX-License-Identifier: Apache-2.0
"""The bench: candidates with equal programs, candidates correct by accident, and the inputs for timing."""

from __future__ import annotations

import dataclasses
import random
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel.ops.autotuner.bench import checking, preparation, timing
from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.bench.preparation import Preparation
from ejkernel.ops.autotuner.bench.timing import Timing
from ejkernel.ops.autotuner.measure import measurement
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.sampling import Sampling, SamplingPlan
from ejkernel.ops.autotuner.process.watch import Watch
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.core.examples import example_sets, saver
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.transformations.nodes import Choice

X = jax.ShapeDtypeStruct((16,), jnp.int32)


class Sum(Kernel[int, jax.Array]):
    """`x + x`; configurations with the same last digit are the same program."""

    def run(self, x, *, cfg):
        return told_apart(x + x, cfg % 10)

    def reference(self, x):
        return x + x

    def heuristic_cfg(self, inv):
        return 1


def preparation_of(kernel, x=X, **options):
    inv = Invocation(kernel=kernel, args=(x,)).abstract()
    return Preparation(oracle=Oracle(inv=inv, baseline=1), **options)


def prepared(kernel, configs, **options):
    candidates = [Candidate(config) for config in configs]
    there = preparation_of(kernel, **options)
    there.prepare(candidates)
    return there, candidates


def raced(there, runners, rounds=1, **options):
    Timing(oracle=there.oracle, **options).measure(runners, Sampling(len(runners), plan=SamplingPlan.fixed(rounds)))


def test_the_watch_hears_of_a_candidate_before_and_after_it_is_compiled():
    heard, seen = [], []

    class Heard(Watch):
        def compiling(self, configs):
            heard.append(configs)

    class Seen(Sum):
        def run(self, x, *, cfg):
            seen.append((cfg, cfg in heard[-1]))
            return super().run(x, cfg=cfg)

    there = preparation_of(Seen("seen"), width=1)
    there.oracle.watch = Heard()
    there.prepare([Candidate(1), Candidate(2)])
    assert seen == [(1, True), (2, True)]
    assert heard == [[1], [], [2], []]


def test_the_end_of_an_abandoned_compilation_does_not_hide_another_of_the_same_candidate():
    heard, abandoned, goes_on = [], threading.Event(), threading.Event()
    there, candidate = preparation_of(Sum("again")), Candidate(1)
    there.oracle.watch = SimpleNamespace(compiling=heard.append)

    def compile_for_long():
        with there._reported(candidate):
            abandoned.set()
            goes_on.wait(60)

    thread = threading.Thread(target=compile_for_long)
    thread.start()
    abandoned.wait(60)
    with there._reported(candidate):
        goes_on.set()
        thread.join()
        assert heard == [[1], [1, 1], [1]]
    assert heard[-1] == []


# --- one program ---


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_first_of_candidates_with_equal_programs_counts_in_any_order_of_compilation(monkeypatch, seed):
    order = random.Random(seed).sample(range(4), 4)
    results = preparation.CompileThreads

    class Shuffled(results):
        def __init__(self, jobs, **options):
            super().__init__([jobs[index] for index in order], **options | {"width": 1})

        def results(self, stop):
            for done in super().results(stop):
                yield dataclasses.replace(done, index=order[done.index])

    monkeypatch.setattr(preparation, "CompileThreads", Shuffled)
    _, (one, same, other, third) = prepared(Sum("sum"), [1, 11, 2, 21])
    assert [c.status for c in (one, same, other, third)] == ["ready", "same", "ready", "same"]
    assert same.twin is third.twin is one
    assert same.reason == third.reason == "the same program as 1"
    assert one.compiled
    assert not same.compiled
    assert not third.compiled


def test_candidates_with_equal_programs_share_one_measurement(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", interleaved_with(float))
    there, candidates = prepared(Sum("sum"), [3, 13, 23, 4], width=1)
    raced(there, [c for c in candidates if c.compiled], rounds=2)
    assert [c.seconds for c in candidates] == [3.0, 3.0, 3.0, 4.0]


def test_a_candidate_finishes_with_its_final_status():
    last = {}
    _, candidates = prepared(Sum("sum"), [1, 11, 21, 31, 2], finished=lambda c: last.update({c.config: c.status}))
    assert last == {c.config: c.status for c in candidates}


def test_candidates_of_a_later_batch_are_twins_of_the_earlier_ones():
    there, (first,) = prepared(Sum("sum"), [11])
    later = Candidate(1)
    there.prepare([later])
    assert (later.status, later.twin) == ("same", first)


def test_programs_that_call_back_to_the_host_are_never_one():
    class CallsBack(Sum):
        def run(self, x, *, cfg):
            return jax.pure_callback(lambda x: x * (2 + (cfg == 2)), X, x)

    _, candidates = prepared(CallsBack("calls_back"), [1, 2, 3])
    assert [c.status for c in candidates] == ["ready", "wrong", "ready"]


def test_programs_that_differ_in_a_constant_alone_are_not_one():
    class Constant(Sum):
        def run(self, x, *, cfg):
            return x + x + jnp.asarray(np.arange(16, dtype=np.int32) % 2 * (cfg - 1))

    _, candidates = prepared(Constant("constant"), [1, 2])
    assert [c.status for c in candidates] == ["ready", "wrong"]


# --- right by accident ---


def test_a_candidate_right_on_the_first_inputs_only_does_not_win(monkeypatch):
    inv = Invocation(kernel=Sum("sum"), args=(X,))
    (arrays,) = example_sets(
        inv, np.random.default_rng(0), saver(inv.node.forward, Choice(config=1, platform="cpu"))
    ).values()
    (known,) = map(np.asarray, arrays)

    class Remembers(Sum):
        """2 returns the sum of the inputs that the first seed makes."""

        def run(self, x, *, cfg):
            return jnp.asarray(known * 2) if cfg == 2 else told_apart(x + x, cfg)

        def config_space(self, inv):
            return [2, 3]

    monkeypatch.setattr(timing, "interleaved", interleaved_with({1: 3.0, 2: 1.0, 3: 2.0}.get))
    kernel = Remembers("remembers")
    data = Autotuner().tune(Invocation(kernel=kernel, args=(X,)), kernel)
    assert [outcome.status for outcome in data.outcomes] == ["measured", "wrong", "measured"]
    assert data.config == 3


# --- memory and caches ---


def test_a_candidate_that_needs_more_than_the_device_has_fails_with_both_figures(monkeypatch):
    class Large(Sum):
        def run(self, x, *, cfg):
            if cfg == 2:
                return x + x + (jnp.sort(jnp.arange(1000)[:, None] + x, 0)[0] >> 30)
            return x + x

    monkeypatch.setattr(measurement, "device_bytes", lambda: 4096)
    _, (small, large) = prepared(Large("large"), [1, 2])
    assert small.status == "ready"
    assert large.status == "failed"
    assert large.reason.endswith(" 4.0 KiB on the device.")


def test_a_compiler_that_fails_to_tell_the_memory_is_the_candidate_s_failure(monkeypatch):
    def raises(compiled):
        raise RuntimeError("no analysis")

    monkeypatch.setattr(checking, "peak_bytes", raises)
    _, (candidate,) = prepared(Sum("sum"), [1])
    assert (candidate.status, candidate.reason) == ("failed", "RuntimeError: no analysis")


@pytest.mark.parametrize(
    ("elements", "cold_cache", "room", "expected"),
    [
        (1 << 14, True, None, "cold"),  # 48 sets
        (1 << 14, False, None, "warm"),
        (16, True, None, "warm"),  # too many sets
        (1 << 14, True, 1 << 22, "warm"),  # half of it holds 32 sets
    ],
)
def test_inputs_are_cold_on_request_where_possible(monkeypatch, elements, cold_cache, room, expected):
    monkeypatch.setattr(measurement, "_CACHE_BYTES", 1 << 20)
    if room is not None:
        monkeypatch.setattr(timing, "device_bytes", lambda: room)
    x = jax.ShapeDtypeStruct((elements,), jnp.int32)
    there, candidates = prepared(Sum("sum"), [1], x=x)
    raced(there, candidates, cold_cache=cold_cache)
    found = candidates[0].measurement
    assert (found.cache, found.output_bytes) == (expected, 4 * elements)
    assert found.peak_bytes >= 8 * elements


@pytest.mark.slow
def test_copies_for_cold_caches_are_equal_and_keys_of_random_numbers_too(monkeypatch):
    monkeypatch.setattr(measurement, "_CACHE_BYTES", 1 << 10)

    class Draws(Sum):
        def run(self, x, *, cfg):
            return jax.random.bits(x[0], (4,))

        def reference(self, x):
            return jax.random.bits(x[0], (4,))

    keys = jax.random.split(jax.random.key(0), 64)
    there, _ = prepared(Draws("draws"), [1], x=keys)
    first, *others = Timing(oracle=there.oracle, cold_cache=True).argument_sets()[0]
    assert len(others) > 1
    for other in others:
        assert jnp.array_equal(jax.random.key_data(first[0]), jax.random.key_data(other[0]))


# --- programs that spill registers ---


@dataclasses.dataclass(frozen=True)
class Remote:
    """A program compiled elsewhere."""

    config: int
    digest: str
    spilled: int | None
    loaded: list[int]

    def load(self):
        self.loaded.append(self.config)
        return jax.jit(lambda x: (x + x if self.config < 100 else 3 * x,)).lower(X).compile()


def compiled_elsewhere(spills, loaded, order=()):
    """Return a function that compiles `Sum` elsewhere; the programs of `order` arrive in that order."""
    turns = {config: threading.Event() for config in order}
    if order:
        turns[order[0]].set()

    def compile_elsewhere(inv, choice):
        config = choice.config
        if config in turns:
            turns[config].wait(60)
            after = order[order.index(config) + 1 :]
            if after:
                turns[after[0]].set()
        return Remote(config, str(config % 10), spills[config], loaded)

    return compile_elsewhere


def statuses(candidates):
    return {candidate.config: candidate.status for candidate in candidates}


def test_a_spilling_candidate_is_not_loaded_if_another_is_right():
    loaded = []
    spills = {1: 0, 2: 511, 3: 512, 4: None}
    _, candidates = prepared(Sum("sum"), spills, compile_elsewhere=compiled_elsewhere(spills, loaded))
    assert statuses(candidates) == {1: "ready", 2: "ready", 3: "pruned", 4: "ready"}
    assert sorted(loaded) == [1, 2, 4]


@pytest.mark.parametrize("spills", [{1: 900, 2: 600}, {1: 900, 2: 600, 103: 0}, {1: 900, 2: 600, 3: None}])
def test_a_spilling_candidate_runs_if_no_better_one_is_known(spills):
    _, candidates = prepared(Sum("sum"), spills, compile_elsewhere=compiled_elsewhere(spills, []))
    assert [candidate.status for candidate in candidates[:2]] == ["ready", "ready"]


@pytest.mark.parametrize("first", [1, 11])
def test_the_baseline_runs_even_if_it_spills_or_has_a_twin(first):
    spills = {1: 900, 11: 900, 2: 0}
    order = [first, 12 - first, 2]
    elsewhere = compiled_elsewhere(spills, [], order)
    _, candidates = prepared(Sum("sum"), spills, compile_elsewhere=elsewhere, width=3)
    assert statuses(candidates) == {1: "ready", 11: "same", 2: "ready"}
    assert candidates[1].twin is candidates[0]


def test_candidates_measured_before_are_not_pruned():
    there, candidates = prepared(Sum("sum"), [1], compile_elsewhere=compiled_elsewhere({1: 0, 2: 900}, []))
    known = Outcome(config=2, status="measured", measurement=Measurement(samples=(1.0,), method="made up"), spilled=900)
    candidates.append(Candidate(2))
    candidates[1].take_over(known)
    assert candidates[1].outcome() == known
    there.prepare(candidates[1:])
    assert statuses(candidates) == {1: "ready", 2: "ready"}


def test_a_held_back_candidate_that_fails_to_load_fails_alone():
    class Damaged(Remote):
        def load(self):
            raise ValueError("damaged")

    def compile_elsewhere(inv, choice):
        return (Damaged if choice.config == 2 else Remote)(choice.config, str(choice.config), 900, [])

    _, candidates = prepared(Sum("sum"), [1, 2], compile_elsewhere=compile_elsewhere)
    assert statuses(candidates) == {1: "ready", 2: "failed"}
    assert candidates[1].reason == "ValueError: damaged"
