# SPDX-License-Identifier: Apache-2.0
"""Saved results of a search, for any order of results, dying workers, deadlines and interrupts.

The search, its races, its journal, the parent of its worker and the cache are real. Compiling, the clock, the times and
the worker's death are faked, so that every order of events can be tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
import warnings

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ejkernel.ops import AutotunePolicy, Autotuner, ConfigSelectorChain, Invocation, Kernel, PersistentCache
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.measure import measurement
from ejkernel.ops.autotuner.measure.timers import Timer
from ejkernel.ops.autotuner.process.supervisor import WorkerDiedError, WorkerSilentError, WorkerStatus
from ejkernel.ops.autotuner.tasks import decisions, isolated
from ejkernel.ops.autotuner.tasks import run as runs
from ejkernel.ops.autotuner.tasks.journal import Journal
from ejkernel.ops.autotuner.trials.status import FAULTY, Status
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.errors import CandidateError, TuningError

BUDGET = 60.0
HEURISTIC = 0
OTHERS = range(1, 6)


class Scale(Kernel[int, jax.Array]):
    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return HEURISTIC

    def config_space(self, inv):
        return list(OTHERS)


KERNEL = Scale("scale")
INV = Invocation(kernel=KERNEL, args=(jax.ShapeDtypeStruct((4,), jnp.float32),)).abstract()


@dataclasses.dataclass(frozen=True)
class Faults:
    """What happens to one candidate."""

    seconds: float = 1.0
    is_wrong: bool = False
    is_wrong_on_other_inputs: bool = False
    is_wrong_at_times: bool = False
    fails_when_measured: bool = False


class Died(BaseException):
    """The worker process of the search ends here."""

    def __init__(self, death):
        super().__init__(death)
        self.death = death


class Scenario:
    """One search: the faults of candidates, and events by step.

    Attributes:
        sampled: Configurations with a time.
        checked: Configurations with correct results on new inputs.
        repeated: Configurations with correct results in many runs after their confirmation.
        beaten: Configurations faster than the heuristic in the confirmation run.
    """

    def __init__(self, faults, events):
        self.faults, self.events = faults, events
        self.now, self.step, self.journal, self.cancellation = 0.0, 0, None, None
        self.sampled, self.checked, self.repeated = set(), set(), set()

    def tick(self):
        """Let one step pass, and what happens at it."""
        self.now += 0.01
        event = self.events.get(self.step)
        self.step += 1
        if event == "deadline":
            self.now = max(self.now, BUDGET + 0.01)
        elif event == "far too late":
            self.now = max(self.now, 10 * BUDGET)
        elif event == "interrupt":
            if self.cancellation.is_requested:
                raise Died(KeyboardInterrupt())
            self.cancellation.request()
        elif event == "death":
            raise Died(WorkerDiedError("the worker was killed by SIGKILL"))
        elif event == "silence":
            self.journal.silence("running", self.accused, 1e9)
            raise Died(WorkerSilentError("no sign of life"))
        if self.journal.left() <= 0:
            raise Died(WorkerSilentError("its time was over"))

    accused = ()

    def at(self, config):
        self.accused = (config,)
        self.tick()


SCENARIO: list[Scenario] = []


class FakeWorker:
    """Replaces the worker process: the task runs here, until the worker dies."""

    doing = WorkerStatus(what="running")

    @property
    def accused(self):
        return list(SCENARIO[0].accused)

    def call(self, function, task, scope, sent, *, on_event, cancellation, deadline):
        SCENARIO[0].journal, SCENARIO[0].cancellation = deadline.journal, cancellation
        task = dataclasses.replace(task, policy=dataclasses.replace(POLICY, isolate=False))
        clock = lambda: SCENARIO[0].now  # noqa: E731
        run = runs.TuningRun(task, cancellation=cancellation, tell=on_event, clock=clock)
        try:
            return run.run()
        except Died as died:
            raise died.death from None


POLICY = AutotunePolicy(isolate=True, budget_s=BUDGET)


@dataclasses.dataclass(frozen=True)
class Program:
    """In place of a compiled candidate."""

    config: int

    def __call__(self, *arrays):
        SCENARIO[0].at(self.config)

    def memory_analysis(self):
        return None


class Preparation:
    """In place of compiling and checking."""

    def __init__(self, *, finished, **_):
        self.finished = finished

    def prepare(self, candidates, *, stop=lambda: False):
        for candidate in candidates:
            if stop():
                return
            scenario = SCENARIO[0]
            scenario.at(candidate.config)
            if scenario.faults[candidate.config].is_wrong:
                candidate.fail(Status.WRONG, CandidateError("it is wrong"))
            else:
                candidate.compiled, candidate.status = (Program(candidate.config),), Status.READY
            self.finished(candidate)

    def settle(self, candidates):
        pass

    def note_spills(self, spilled):
        pass


def confirmed(oracle, candidate, **_):
    scenario = SCENARIO[0]
    scenario.at(candidate.config)
    if scenario.faults[candidate.config].is_wrong_on_other_inputs:
        raise CandidateError("it is wrong on other inputs")
    scenario.checked.add(candidate.config)
    return ("outputs",)


def repeated(oracle, candidate):
    scenario = SCENARIO[0]
    scenario.at(candidate.config)
    if scenario.faults[candidate.config].is_wrong_at_times:
        raise CandidateError("it is wrong at times")
    scenario.repeated.add(candidate.config)


def sample(function, count):
    scenario, config = SCENARIO[0], function.function.candidate.config
    function()
    if scenario.faults[config].fails_when_measured:
        raise ValueError("it fails when it is measured")
    scenario.sampled.add(config)
    return scenario.faults[config].seconds


def calls_of(function, warmup, threads):
    function()
    return 1


def device_check(oracle, culprit):
    """Ignore the check: the end of a worker is not a candidate's failure."""


def interleaved(functions, **options):
    """Time functions; the end of a worker ends the race, and does not count as a candidate's failure."""
    on_error = options.pop("on_error")

    def reported(index, error):
        if isinstance(error, Died):
            raise error
        on_error(index, error)

    return measurement.interleaved(functions, on_error=reported, **options)


@contextlib.contextmanager
def made_up():
    """Replace processes, clocks and compilers by fakes."""
    timer = Timer("wall", sample)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(isolated, "shared_worker", lambda: contextlib.nullcontext(FakeWorker()))
        patch.setattr(isolated, "worker_session", contextlib.nullcontext)
        patch.setattr(isolated, "Journal", functools.partial(Journal, clock=lambda: SCENARIO[0].now))
        patch.setattr(runs, "Preparation", Preparation)
        patch.setattr(decisions, "confirm", confirmed)
        patch.setattr(decisions, "check_repeatedly", repeated)
        patch.setattr(decisions, "rule_fault", lambda oracle: "")
        patch.setattr(decisions, "pair_fault", lambda oracle, kept: "")
        patch.setattr(runs.Oracle, "compute_references", lambda oracle: SCENARIO[0].tick())
        patch.setattr(timing, "interleaved", interleaved)
        patch.setattr(timing, "check_device", device_check)
        patch.setattr(measurement, "choose_timer", lambda functions: timer)
        patch.setattr(measurement, "calls_per_sample", calls_of)
        yield


FAULTS = st.fixed_dictionaries(
    {
        config: st.builds(
            Faults,
            seconds=st.sampled_from([0.5, 0.9, 1.0, 1.01, 2.0]),
            is_wrong=st.sampled_from([False, False, False, True]),
            is_wrong_on_other_inputs=st.sampled_from([False, False, False, True]),
            is_wrong_at_times=st.sampled_from([False, False, False, True]),
            fails_when_measured=st.sampled_from([False, False, False, True]),
        )
        for config in (HEURISTIC, *OTHERS)
    }
)
EVENTS = st.dictionaries(
    st.integers(0, 120),
    st.sampled_from(["deadline", "far too late", "interrupt", "death", "silence"]),
    max_size=4,
)


class InterruptedSearches(RuleBasedStateMachine):
    """Searches of one call, one after the other, in one cache; each is cut short somewhere, or not."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.cache = PersistentCache(self.folder.name, shipped=False)

    @rule(faults=FAULTS, events=EVENTS)
    def search(self, faults, events):
        scenario = Scenario(faults, events)
        SCENARIO[:] = [scenario]
        before = self.cache.load(INV.key)
        chain = ConfigSelectorChain(ConfigCache(), self.cache, policy=POLICY, tuner=Autotuner(rounds=5, warmup=0))
        with made_up():
            ended = self.end_of(chain)
        assert "nothing is saved" not in ended  # the search itself never names such a winner
        after = self.cache.load(INV.key)
        if after is not None and (before is None or after != before):
            self.check(scenario, after, before)
        elif before is not None:
            assert after == before

    @staticmethod
    def end_of(chain):
        """Search, and return the text of the raised error."""
        try:
            chain.search(INV, KERNEL, policy=POLICY)
        except (KeyboardInterrupt, TuningError) as error:
            return str(error)
        return ""

    def check(self, scenario, entry, before):
        """Compare a new entry with the history of the search."""
        config, search = entry.config, entry.measured["search"]
        assert config in scenario.sampled
        assert not scenario.faults[config].is_wrong
        if config == HEURISTIC:
            assert search["state"] in ("complete", "undecided") or self.is_wrong(scenario, before)
            return
        assert config in scenario.checked & scenario.repeated
        assert entry.measured["winner"]["samples"] > 0
        standing, heuristic = entry.measured["standing"], scenario.faults[HEURISTIC]
        if standing is None:
            deaths = sum(event in ("death", "silence") for event in scenario.events.values())
            assert heuristic.is_wrong or heuristic.fails_when_measured or deaths > 1
        else:
            assert (standing["rival"], standing["verdict"], standing["alone"]) == (config, "wins", True)
            assert scenario.faults[config].seconds < heuristic.seconds

    @staticmethod
    def is_wrong(scenario, before):
        faults = Faults() if before is None else scenario.faults[before.config]
        return faults.is_wrong or faults.is_wrong_on_other_inputs or faults.is_wrong_at_times

    @invariant()
    def rankings_and_states_agree_with_the_log(self):
        store = ConfigSelectorChain(ConfigCache(), self.cache).store
        for found in store.searches():
            done = sum(outcome.status in {*FAULTY, Status.MEASURED} for outcome in found.outcomes)
            progress = found.progress
            assert progress.done == done
            assert progress.state == "failed" or progress.candidates == 1 + len(OTHERS)
            assert progress.state not in ("complete", "undecided") or done == progress.candidates
            for outcome in found.outcomes:
                assert (outcome.status == Status.MEASURED) == (outcome.measurement is not None)
                assert outcome.measurement is None or not math.isnan(outcome.seconds)

    def teardown(self):
        self.folder.cleanup()


@pytest.mark.slow
def test_only_a_confirmed_winner_is_saved_after_any_end_of_a_search():
    options = settings(
        max_examples=40,
        stateful_step_count=3,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=[Phase.generate],  # the schedules are short, and to shrink one takes minutes
    )
    run_state_machine_as_test(InterruptedSearches, settings=options)
