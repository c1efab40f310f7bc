# SPDX-License-Identifier: Apache-2.0
"""The demo: its program on a tiny model, its measurements, and its conclusions."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from ejkernel.cli import rounds

HERE = Path(__file__).resolve().parents[1] / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch):
    """Return a function that imports a module of the demo, as the demo itself does."""
    names = ("train", "compare", "demo")
    monkeypatch.syspath_prepend(str(HERE))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)  # another's, of the same name
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 5.0])
def test_plain_jax_and_ejkernel_train_equally(demo, cap):
    train = demo("train")
    model = train.Model(
        layers=1, width=32, heads=4, groups=2, batch=2, seq=96, longest=40, vocabulary=4400, dtype=jnp.float32, cap=cap
    )
    losses = []
    for operations in (train.PLAIN, train.EJKERNEL):
        step, (state, _) = train.training_step(operations, model)
        for number in range(3):
            state, loss = step(state, train.batch_of(model, number))
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_batch_is_full_of_documents_and_the_same_every_time(demo):
    train = demo("train")
    model = train.Model(layers=1, width=32, heads=4, batch=2, seq=100, longest=30, vocabulary=4400, dtype=jnp.float32)
    first, again = (train.batch_of(model, 7) for _ in range(2))
    assert jnp.array_equal(first.tokens, again.tokens)
    assert int(jnp.bincount(first.documents[0]).max()) <= 30
    assert (jnp.diff(first.documents, axis=1) >= 0).all()
    assert first.tokens.max() < model.vocabulary
    assert jnp.unique(first.tokens).size > 20


def test_the_interval_of_a_ratio_holds_its_median_and_leaves_out_the_extremes():
    found = rounds.ratio([float(n) for n in range(1, 22)], [1.0] * 21)
    assert found == {"median": 11.0, "low": 6.0, "high": 16.0}  # ranks 6 and 16 of 21: 97 %
    assert rounds.ratio([1.0, 3.0, 2.0] * 2, [1.0] * 6)["low"] == 1.0


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ((1.2, 1.1, 1.3), "Tuned is 1.20 times as fast as plain (1.10 to 1.30)."),
        (
            (0.8, 0.7, 0.9),
            "Tuned is SLOWER than plain: 0.80 times as fast (0.70 to 0.90). docs/troubleshooting.md, Slow programs, "
            "lists causes and remedies.",
        ),
        ((0.995, 0.987, 0.999), "Tuned and plain are equally fast within 2% (0.99 to 1.00)."),
        ((1.0, 0.98, 1.03), "Tuned and plain are equally fast (0.98 to 1.03)."),
        ((1.07, 0.8, 1.3), "This machine is too noisy to tell whether tuned is faster than plain (0.80 to 1.30)."),
    ],
)
def test_a_decision_depends_only_on_the_interval(ratio, words):
    median, low, high = ratio
    assert words == rounds.verdict("tuned", "plain", {"median": median, "low": low, "high": high})


class Steps:
    """A compiled step with times chosen by a test, on a fake clock."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __call__(self, state, batch):
        self.clock[0] += self.seconds(batch)
        return state, jnp.float32(1.0)


@pytest.fixture
def results_of(demo, monkeypatch):
    """Return a function that compares builds with steps of `seconds(round)`, by name."""
    compare, clock = demo("compare"), [0.0]
    monkeypatch.setattr(compare.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(compare.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(compare, "batch_of", lambda model, number: number)

    def results(seconds, deadline=float("inf"), missing=()):
        builds = [
            compare.Build(name=name, compiled=Steps(clock, each), temporary_bytes=1) for name, each in seconds.items()
        ]
        compare.run(builds, None, 21, deadline)
        gone = [compare.Build(name=name, missing="does not fit") for name in missing]
        return compare.summary([*gone, *builds], demo("train").SMALL)

    return results


def busy(slow):
    """Return a step with the machine's load as its time, except for one burst during this build."""
    return lambda number: (1 + number % 7) * (3.0 if number in slow else 1.0)


def test_the_table_and_the_sentences_come_from_the_same_ratios(demo, results_of, capsys):
    builds = {"plain JAX": lambda number: 2 * busy(())(number), "untuned": busy(range(11)), "tuned": busy(range(9, 20))}
    result = results_of(builds) | {"configurations": dict.fromkeys("abcd"), "saved": 4, "changed": True}
    untuned, tuned = result["seconds"]["untuned"], result["seconds"]["tuned"]
    assert untuned / tuned == pytest.approx(result["over tuned"]["untuned"]["median"])
    demo("demo").show(result)
    said = capsys.readouterr().out
    assert "too noisy to tell whether tuned ejkernel is faster than untuned ejkernel" in said
    assert "The machine was busy: half of the tuned steps took" in said


def test_a_calm_machine_gives_a_calm_verdict(demo, results_of):
    result = results_of({"plain JAX": lambda _: 3.0, "untuned": lambda _: 2.0, "tuned": lambda _: 1.0}) | {
        "changed": True
    }
    assert result["rounds"] == 21
    assert [text[:43] for text in demo("demo").sentences(result)] == [
        "Tuned ejkernel is 3.00 times as fast as pla",
        "Tuned ejkernel is 2.00 times as fast as unt",
    ]


def test_rounds_end_at_the_deadline_but_not_without_an_interval(results_of):
    builds = {"untuned": lambda _: 1.0, "tuned": lambda _: 1.0}
    assert results_of(builds, deadline=0.0)["rounds"] == 6
    assert results_of(builds, deadline=100.0)["rounds"] == 21


def test_a_baseline_that_does_not_run_here_is_a_row_with_the_reason(demo, results_of, capsys):
    result = results_of({"untuned": lambda _: 1.0, "tuned": lambda _: 1.0}, missing=["plain JAX"])
    result |= {"configurations": {"a": "b"}, "saved": 0}
    demo("demo").show(result | {"unfinished": 1})
    said = capsys.readouterr().out
    assert "  plain JAX       does not fit\n" in said
    assert "Tuning found no faster configuration, so untuned and tuned are the same program." in said
    command = rf"cd {re.escape(str(HERE))} && EJKERNEL_CACHE_DIR=\S+ {re.escape(sys.executable)} -m ejkernel tune train"
    assert re.search(rf"1 of 1 searches did not finish in the demo's time.*\s+demo again.*:\s+{command}", said)
    assert "Tuning saved a configuration for 0 of 1 calls" in demo("demo").sentences(result)[1]
    assert demo("demo").losses_agree(result["losses"])


def test_a_build_that_does_not_fit_beside_the_others_is_dropped_before_it_runs(demo):
    compare = demo("compare")
    state = jnp.zeros(2**18)  # 1 MiB
    small, large = (
        compare.Build(name=name, compiled=print, state=state, needed_bytes=size * 2**20)
        for name, size in [("tuned", 10), ("plain JAX", 100)]
    )
    compare.drop_too_large([large, small], 100 * 2**20)
    assert (small.missing, large.missing, large.state) == ("", "does not fit: a step needs 0.1 of 0.1 GiB", None)
    compare.drop_too_large([small], None)
    assert small.compiled is not None


def test_a_baseline_that_cannot_be_compiled_or_comes_too_late_is_reported(demo, monkeypatch, capsys):
    compare = demo("compare")

    def refused(*_):
        raise RuntimeError("cuDNN is not detected.\nmore")

    monkeypatch.setattr(compare, "training_step", refused)
    assert compare.baseline("cuDNN", None, None, float("inf")).missing == "not available: cuDNN is not detected."
    assert "no time left" in compare.baseline("cuDNN", None, None, 0.0).missing


@pytest.mark.parametrize(
    ("gib", "sizes"), [(104.8, (2, 8192)), (200.0, (4, 8192)), (60.0, (1, 8192)), (30.0, (1, 4096)), (0.0, (1, 2048))]
)
def test_the_model_is_as_large_as_plain_jax_can_train_on_the_device(demo, gib, sizes):
    model = demo("train").fitting_model(int(gib * 2**30))
    assert (model.batch, model.seq) == sizes


@pytest.mark.parametrize(
    ("statuses", "exit_status", "words"),
    [
        ((0, 0), 0, "1 of 1 searches did not finish"),
        ((130, 0), 0, "The demo's time for tuning is over"),
        ((1, 0), 0, "It continues with the configurations in"),
        ((2,), 1, ""),
        ((0, 1), 1, ""),
    ],
)
def test_the_demo_ends_with_a_table_or_with_the_part_that_failed(
    demo, results_of, monkeypatch, capsys, tmp_path, statuses, exit_status, words
):
    module = demo("demo")
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    data = results_of({"untuned": lambda _: 1.0, "tuned": lambda _: 1.0})
    data |= {"configurations": {"a": "b"}, "saved": 1, "unfinished": 1}
    left = list(statuses)

    def run(seconds, *arguments, capture=False):
        return left.pop(0), json.dumps(data) if capture else ""

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--seconds", "60"])
    assert module.main() == exit_status
    assert words in capsys.readouterr().out


def test_an_interrupted_part_says_how_to_go_on(demo, monkeypatch, capsys, tmp_path):
    module = demo("demo")
    monkeypatch.setattr(module, "CACHE", tmp_path)
    statuses = [0, -signal.SIGINT]
    monkeypatch.setattr(module, "run", lambda *_, **__: (statuses.pop(0), ""))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--seconds", "60"])
    assert module.main() == 1
    assert "Run the demo again: it continues with what is saved." in capsys.readouterr().err


class Slow:
    """A child process that ends only after `needed` signals."""

    def __init__(self, needed):
        self.needed, self.signals = needed, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def communicate(self, timeout=None):
        if len(self.signals) < self.needed:
            raise subprocess.TimeoutExpired("python", timeout)
        self.returncode = -self.signals[-1] if self.signals else 0
        return "printed", None

    def send_signal(self, number):
        self.signals.append(int(number))

    def kill(self):
        self.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(("needed", "status"), [(0, 0), (1, -signal.SIGINT), (2, -signal.SIGKILL)])
def test_a_part_that_takes_too_long_is_interrupted_and_then_killed(demo, monkeypatch, needed, status):
    process = Slow(needed)
    monkeypatch.setattr(demo("demo").subprocess, "Popen", lambda *_, **__: process)
    assert demo("demo").run(1.0, "-c", "pass", capture=True) == (status, "printed")
    assert process.signals == [signal.SIGINT, signal.SIGKILL][:needed]
