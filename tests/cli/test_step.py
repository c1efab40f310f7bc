# SPDX-License-Identifier: Apache-2.0
"""The comparison of a program's step after the searches of `ejkernel tune`."""

import dataclasses
import datetime
import itertools
import json
import signal
import sys
from types import SimpleNamespace

import jax
import pytest
from tests.ops.autotuner.made_up_times import interleaved_with

from ejkernel.cli import main, step, step_check
from ejkernel.cli.builds import Build
from ejkernel.cli.sources import TuneOptions
from ejkernel.cli.step import Winner, choose
from ejkernel.ops import PersistentCache
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.config.entries import StepNote
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import TuningError

PROGRAM = '''
import dataclasses
import os
import jax
import jax.numpy as jnp
from ejkernel.ops import Kernel


@dataclasses.dataclass(frozen=True)
class Config:
    repeats: int = 8


class Product(Kernel[Config, jax.Array]):
    """A product that is slower with more repeats."""

    def run(self, a, b, *, cfg):
        for _ in range(cfg.repeats):
            b = b + 1e-30 * jnp.sin(b @ b)
        return a @ b

    def heuristic_cfg(self, inv):
        return Config(8)

    def config_space(self, inv):
        return [Config(int(n)) for n in os.environ.get("STEP_CANDIDATES", "1")]


class Wrong(Product):
    """The heuristic and the configurations in STEP_WRONG return wrong results."""

    def run(self, a, b, *, cfg):
        return super().run(a, b, cfg=cfg) + (str(cfg.repeats) in "8" + os.environ.get("STEP_WRONG", ""))

    def reference(self, a, b):
        return a @ b


product, wrong = Product("step_product"), Wrong("step_wrong")
ARRAY = jnp.ones((64, 64))


def step():
    return jax.jit(lambda a, b: product(a, b)), (ARRAY, ARRAY)


def wide():
    return jax.jit(lambda a, b: product(a, b) + product(a[:32], b).sum()), (ARRAY, ARRAY)


def wrong_before():
    return jax.jit(lambda a, b: wrong(a, b)), (ARRAY, ARRAY)


def types():
    return product, (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2


def integers():
    shapes = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
    return jax.jit(lambda a, b, n: product(a, b) + n.sum()), (*shapes, jax.ShapeDtypeStruct((3,), jnp.int32))


def printing():
    def step(a, b):
        jax.debug.print("{}", a[0, 0])
        return product(a, b)

    return jax.jit(step), (ARRAY, ARRAY)
'''


@dataclasses.dataclass(kw_only=True)
class Timed(Build):
    """A step with a given time."""

    seconds: float

    def run(self):
        self.samples.append(self.seconds)
        self.mapping.append((0, 0.0))


def timed(name, seconds):
    return Timed(
        name=name,
        compiled=len,
        arguments=((), {}),
        donated=(),
        compile_seconds=0.0,
        calls=(),
        first=seconds,
        seconds=seconds,
    )


def winner(call, gain=1.0):
    return Winner(key=ConfigKey("cpu", "op", call), name=call, before="old", after="new", alone=1.2, gain=gain)


def choice(costs, *, left=lambda: 100.0, broken=()):
    """Choose among winners that change the time of the step by the given shares, without noise."""

    def make(name, configs):
        news = [key.call for key, config in configs.items() if config == "new"]
        if set(broken) & set(news):
            raise TuningError("does not fit")
        return timed(name, 1.0 + sum(costs[call] for call in news))

    winners = [winner(call, gain) for gain, call in enumerate(costs)]
    before = make(step._BEFORE, {each.key: "old" for each in winners})
    return choose(winners, before, make, left)


def test_the_memory_that_the_steps_map_anew_is_told_with_and_without_a_slower_step(monkeypatch):
    monkeypatch.setattr(step, "of_mapping", lambda builds: ", ".join(build.name for build in builds))
    assert choice({"a": -0.1}).mapping == "without the new configurations, with them"
    assert choice({"a": 0.1}).mapping == "without the new configurations, with them"


def dropped(answer):
    return sorted(key.call for key in answer.dropped)


def test_winners_that_make_the_step_faster_are_kept():
    answer = choice({"a": -0.1, "b": 0.0})
    assert (answer.before, answer.after) == pytest.approx((1.0, 0.9))
    assert not answer.dropped


def test_a_difference_within_the_noise_drops_nothing():
    assert not choice({"a": 0.01}).dropped


def test_a_step_that_only_seems_slower_is_undecided():
    noise = itertools.cycle([1.04] * 11 + [0.5] * 10)

    class Noisy(Timed):
        def run(self):
            super().run()
            self.samples[-1] *= 1.0 if self.name == step._BEFORE else next(noise)

    def make(name, configs):
        return Noisy(**vars(timed(name, 1.0)))

    answer = choose([winner("a")], make(step._BEFORE, {}), make, lambda: 1.0)
    assert answer.undecided
    assert not answer.dropped


def test_the_only_winner_is_dropped_if_it_slows_the_step():
    answer = choice({"a": 0.05})
    assert dropped(answer) == ["a"]
    assert answer.before == answer.after == 1.0
    assert list(answer.dropped.values()) == [
        "1.20x by itself, but the step with it takes 1050.0 ms instead of 1000.0 ms"
    ]


def test_only_winners_that_slow_the_step_are_dropped():
    answer = choice({"a": 0.3, "b": -0.1, "c": 0.2, "d": -0.1})
    assert dropped(answer) == ["a", "c"]
    assert answer.after == pytest.approx(0.8)
    assert answer.over["median"] == pytest.approx(1.25)


def test_one_of_two_that_slow_the_step_only_together_is_kept_the_one_that_saves_more():
    def make(name, configs):
        news = [key.call for key, config in configs.items() if config == "new"]
        return timed(name, {0: 1.0, 1: 0.9, 2: 1.1}[len(news)])

    winners = [winner("a", gain=1.0), winner("b", gain=2.0)]
    answer = choose(winners, make(step._BEFORE, {}), make, lambda: 100.0)
    assert dropped(answer) == ["a"]
    assert answer.after == pytest.approx(0.9)


def test_winners_that_were_not_tried_in_time_are_dropped():
    answer = choice({"a": 0.3, "b": -0.1}, left=lambda: 0.0)
    assert dropped(answer) == ["a", "b"]
    assert all("no time was left" in why for why in answer.dropped.values())


def test_a_winner_with_which_the_step_does_not_run_is_dropped():
    answer = choice({"a": -0.1, "b": -0.1}, broken="b")
    assert dropped(answer) == ["b"]
    assert "does not fit" in next(iter(answer.dropped.values()))


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module `stepped`, whose calls are faster with fewer repeats."""
    (tmp_path / "stepped.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(timing, "interleaved", interleaved_with(lambda config: float(config.repeats)))
    yield tmp_path
    sys.modules.pop("stepped", None)


@pytest.fixture
def slower(monkeypatch):
    """The step is slower with one repeat in a call of this many rows; returns these rows."""
    rows = [64]
    built = step.build

    def build(name, loaded, chain, *, configs, pure):
        made = built(name, loaded, chain, configs=configs, pure=pure)
        by_rows = {inv.abstract_args[0].shape[0]: configs[inv.key].repeats for inv in made.calls}
        seconds = 1.0 + sum(0.3 if n in rows else -0.1 for n, repeats in by_rows.items() if repeats == 1)
        return timed(name, seconds)

    monkeypatch.setattr(step, "build", build)
    return rows


def run(capsys, *arguments):
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def tune(capsys, target, *more):
    return run(capsys, "tune", "--in-process", f"stepped:{target}", "--cache", "saved", *more)


def repeats():
    """The saved configurations, by number of rows."""
    entries = [entry for _, entry in PersistentCache("saved").entries()]
    return {entry.call["args"][0]["array"][1][0]: entry.config["repeats"] for entry in entries}


@pytest.mark.slow
def test_a_winner_that_slows_the_step_is_not_kept_and_the_commands_say_why(program, capsys, slower):
    status, out, err = tune(capsys, "step")
    why = "8.00x by itself, but the step with it takes 1300.0 ms instead of 1000.0 ms"
    assert status == 0
    assert f"step_product@v0 f32[64,64] x2: dropped: {why}" in out
    assert "step: 1000.0 ms -> 1000.0 ms, 1.00x; all new configurations are dropped" in out
    assert "1 with the heuristic kept" in err
    assert "repeats=8" in out
    assert repeats() == {64: 8}
    assert f"{why} (stepped:step)" in run(capsys, "explain", "stepped:step", "--cache", "saved")[1].replace("\n", " ")
    _, out, err = tune(capsys, "step")
    assert "1 call already tuned" in err
    assert "Nothing to tune" in out
    assert repeats() == {64: 8}


def test_a_step_without_new_configurations_is_unchanged(program, capsys, monkeypatch):
    monkeypatch.setenv("STEP_CANDIDATES", "9")
    assert "step: unchanged, because no call has a new configuration" in tune(capsys, "step")[1]
    assert "unchanged" not in tune(capsys, "step")[1]


@pytest.mark.slow
def test_the_mapped_memory_and_the_share_of_the_step_are_printed_and_saved(program, capsys, slower, monkeypatch):
    slower.clear()
    monkeypatch.setattr(step, "of_mapping", lambda builds: "each step maps 36 MiB anew")
    assert "each step maps 36 MiB anew\nstep: 1000.0 ms -> 900.0 ms" in tune(capsys, "step")[1]
    (data,) = json.loads(run(capsys, "report", "--cache", "saved", "--json")[1])
    assert data["step"]["mapping"] == "each step maps 36 MiB anew"
    assert data["program"] == "stepped:step"
    assert data["share"] == pytest.approx(data["tuned_us"] / 0.9e6)


@pytest.mark.slow
def test_the_search_of_a_dropped_winner_shows_what_is_in_force(program, capsys, slower):
    tune(capsys, "step")
    (search,) = MeasurementStore("saved").searches()
    assert search.is_kept
    assert not search.not_saved
    assert "by itself, but the step" in search.in_words
    assert run(capsys, "report", "--cache", "saved", "--json")[0] == 0
    log = run(capsys, "show", "--cache", "saved", "--log", f"step_product:{search.key.call}")[1]
    assert "heuristic kept: 8.00x by itself" in log.replace("\n", " ")


@pytest.mark.slow
def test_the_other_winners_stay(program, capsys, slower):
    _, out, err = tune(capsys, "wide", "--json")
    assert "\nstep: 1000.0 ms -> 900.0 ms" in err
    assert repeats() == {64: 8, 32: 1}
    found = json.loads(out)["step"]
    assert found["after_us"] == pytest.approx(0.9e6)
    assert [each["op"] for each in found["dropped"]] == ["step_product@v0"]
    notes = [StepNote.stored_in(entry.measured) for _, entry in PersistentCache("saved").entries()]
    assert sorted(bool(note.why) for note in notes) == [False, True]


@pytest.mark.slow
def test_what_was_saved_before_is_restored(program, capsys, slower, monkeypatch):
    monkeypatch.setenv("STEP_CANDIDATES", "2")
    tune(capsys, "step")
    assert repeats() == {64: 2}
    monkeypatch.setenv("STEP_CANDIDATES", "12")
    _, out, err = tune(capsys, "step", "--force")
    assert ": dropped: " in out
    assert "1 with the configuration saved earlier" in err
    assert repeats() == {64: 2}
    assert "1 call already tuned" in tune(capsys, "step")[2]


@pytest.mark.slow
def test_a_step_is_not_compared_with_configurations_that_fail_and_no_such_configuration_is_saved(
    program, capsys, slower, monkeypatch
):
    for candidates, wrong in (("2", ""), ("12", "2")):  # then the configuration saved earlier is wrong, too
        monkeypatch.setenv("STEP_CANDIDATES", candidates)
        monkeypatch.setenv("STEP_WRONG", wrong)
        _, out, _ = tune(capsys, "wrong_before", "--force")
        assert "step not compared: the configurations before, e.g. the heuristic's, fail." in out.replace("\n", " ")
        assert repeats() == {64: int(candidates[0])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "reason"), [("types", "random arrays for its arguments"), ("printing", "it has side effects")]
)
def test_a_step_that_should_not_run_is_not_compared_unless_asked(program, capsys, monkeypatch, target, reason):
    monkeypatch.setattr(step_check, "_MOST_DRAWN", 1 << 14)
    _, out, _ = tune(capsys, target)
    assert f"step not compared: {reason}" in out
    assert "`ejkernel bench stepped:" in out
    assert repeats() == {64: 1}
    assert "\nstep: " in tune(capsys, target, "--check-step")[1]


@pytest.mark.slow
def test_the_step_of_a_small_program_given_by_types_runs_with_random_arrays(program, capsys):
    out = tune(capsys, "types")[1]
    assert "\nstep: " in out
    assert "integer inputs" not in out
    out = tune(capsys, "integers", "--force")[1]
    assert "The integer inputs given by type alone (i32[3]) were random zeros and ones." in out


@pytest.mark.slow
def test_the_step_is_not_run_if_the_user_says_so_and_compared_by_a_later_run(program, capsys):
    _, out, err = tune(capsys, "step", "--no-check-step")
    assert "\nstep: " not in out
    assert "a speed-up is that of a call by itself; `ejkernel bench stepped:step --cache saved` compares it" in err
    _, out, err = tune(capsys, "step")
    assert "1 call already tuned" in err
    assert "\nstep: " in out
    assert "\nstep: " not in tune(capsys, "step")[1]


@pytest.mark.slow
def test_an_undecided_step_is_compared_again_by_the_next_run(program, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        chosen = step.choose
        patch.setattr(step, "choose", lambda *given: dataclasses.replace(chosen(*given), undecided=True))
        assert "the next run compares it again" in tune(capsys, "step")[1]
    assert repeats() == {64: 1}
    assert "\nstep: " in tune(capsys, "step")[1]
    assert "\nstep: " not in tune(capsys, "step")[1]


@pytest.mark.parametrize(("low", "said"), [(0.99, True), (1.01, False)])
def test_a_gain_within_the_noise_is_not_called_one(low, said):
    key = ConfigKey("cpu:chip", "step_product@v0", "0" * 16)
    winner = Winner(key=key, name="step_product", before=None, after=None, alone=1.2, gain=0.01)
    answer = step.Answer(before=0.35, after=0.34, over={"median": 1.03, "low": low, "high": 1.06}, rounds=15)
    when = datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC)
    [line] = step_check.Checked(target="train:step", answer=answer, winners=(winner,), time=when).lines()
    assert line.startswith("step: 350.0 ms -> 340.0 ms, 1.03x")
    assert ("too noisy to tell whether it is faster" in line) == said


def test_a_long_step_is_not_compared(program, capsys, monkeypatch):
    monkeypatch.setattr(step, "build", lambda name, *_, **__: timed(name, 60.0))
    assert "step not compared: that takes about 960 s more" in tune(capsys, "step")[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_ignored", [False, True], ids=["", "in the background of a script"])
def test_an_interruption_leaves_the_winners_saved_for_a_later_comparison(
    program, capsys, monkeypatch, number, is_ignored
):
    def stop(*_):
        signal.raise_signal(number)

    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(step_check, "compare_step", stop)
        status, _, err = tune(capsys, "step")
    signal.signal(signal.SIGINT, handler)
    assert status != 0
    assert "the next run compares it" in err
    assert "repeats=1" in err
    assert repeats() == {64: 1}
    assert "\nstep: " in tune(capsys, "step")[1]


@pytest.mark.slow
def test_an_entry_that_another_process_replaced_meanwhile_is_left_alone(program, capsys, slower, monkeypatch):
    chosen = step.choose

    def choose(*arguments):
        store = PersistentCache("saved")
        ((key, entry),) = store.entries()
        store.put(key, dict(entry.config, repeats=3), call=entry.call)
        return chosen(*arguments)

    monkeypatch.setattr(step, "choose", choose)
    tune(capsys, "step")
    assert repeats() == {64: 3}


@pytest.mark.slow
def test_the_step_of_a_program_runs_in_a_process_of_its_own(program, capsys):
    status, out, _ = run(capsys, "tune", "stepped:step", "--cache", "saved")
    assert status == 0
    assert "\nstep: " in out
    assert jax.devices()[0].platform == "cpu"


def test_a_step_without_its_devices_is_compared_on_another_machine():
    result = SimpleNamespace(searches=[SimpleNamespace(is_kept=False)])
    program = SimpleNamespace(target="train:step")
    (line,) = step_check.not_compared(result, program, TuneOptions(ray="auto"))
    assert "`ejkernel bench train:step` on a machine with its devices compares it" in line


def test_the_step_of_a_text_is_said_not_to_be_compared():
    result = SimpleNamespace(searches=[SimpleNamespace(is_kept=False)])
    (line,) = step_check.not_compared(result, None, TuneOptions())
    assert "`ejkernel tune MODULE:FUNCTION --check-step` drops configurations that slow a step" in line
    assert step_check.not_compared(SimpleNamespace(searches=[]), None, TuneOptions()) == []
