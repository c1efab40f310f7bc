# SPDX-License-Identifier: Apache-2.0
"""The progress of searches, as it is shown on terminals of several widths."""

from __future__ import annotations

import io

import jax
import pytest
from rich.console import Console
from rich.progress import Progress

from ejkernel.cli.progress import SearchBar, bars
from ejkernel.cli.time_left import TimeLeft
from ejkernel.modules import RmsNorm, RmsNormConfig
from ejkernel.ops import CandidateFinished, Invocation, RoundsFinished, SearchFinished
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.trials.status import Status

CALLS = [
    Invocation(kernel=RmsNorm(), args=(jax.ShapeDtypeStruct((rows, 16), "float32"), None), kwargs={})
    for rows in (8, 16)
]


def measured(inv, seconds, relative=None):
    times = Measurement(samples=(seconds,) * 4, method="clock", relative=relative)
    outcome = Outcome(config=RmsNormConfig(implementation="xla"), status=Status.MEASURED, measurement=times)
    return CandidateFinished(inv.key, outcome)


@pytest.fixture(params=[80, 200])
def screen(request):
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=request.param, color_system=None), text


def test_a_terminal_shows_call_candidate_and_the_best_so_far_on_one_line(screen):
    console, text = screen
    with bars(console, TimeLeft(["rms_norm"] * 2, budget=30.0), "tuning") as shown:
        shown.step(CALLS[0], 40, 40)
        shown.hear(SearchFinished(CALLS[0].key, None))
        shown.step(CALLS[1], 12, 40)
        for seconds in (3e-5, 1.25e-5, 2e-5):
            shown.hear(measured(CALLS[1], seconds))
    last = text.getvalue().replace("\r", "\n").split("\n")
    lines = [line for line in last if "call 2 of 2, rms_norm: candidate 12 of 40, best 12.5 us" in line]
    assert lines
    assert all(line.rstrip().endswith("left") for line in lines)


def test_the_best_is_that_of_the_tables_the_smallest_share_of_the_heuristic_s_time():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=200, color_system=None)
    with bars(console, TimeLeft(["rms_norm"]), "tuning") as shown:
        shown.step(CALLS[0], 40, 40)
        for seconds, relative in ((2e-5, 1.0), (1.25e-5, 0.61), (1.2e-5, 0.7)):
            shown.hear(measured(CALLS[0], seconds, relative))
    assert "confirming the best of 40, best 12.5 us (61% of heuristic)" in text.getvalue()
    assert "12.0 us" not in text.getvalue()


def test_a_narrow_terminal_has_room_for_the_time_left():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, color_system=None)
    with bars(console, TimeLeft(["rms_norm"] * 2, budget=30.0), "tuning") as shown:
        shown.step(CALLS[0], 3, 40)
    assert "1/2 rms_norm: compiling, 3/40, about 58 s left" in text.getvalue()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (80, "call 1 of 1, rms_norm: confirming the best of 40, best 12.5 us"),
        (40, "1/1 rms_norm: confirming, best 12.5 us"),
    ],
)
def test_the_line_fits_and_names_the_confirmation_run(columns, words):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=columns, color_system=None)
    with bars(console, TimeLeft(["rms_norm"] * 1, budget=30.0), "tuning") as shown:
        shown.step(CALLS[0], 40, 40)
        shown.hear(measured(CALLS[0], 1.25e-5))
    assert words in text.getvalue()
    assert "…" not in text.getvalue()
    assert "left" not in text.getvalue()


class Seconds:
    now = 0.0

    def __call__(self):
        return self.now


ROUNDS = [
    (False, 0, 0.0, "measuring 12 candidates, round 1 of 16"),
    (False, 8, 16.0, "measuring 12 candidates, round 9 of 16, about 16 s left, then confirming"),
    (True, 0, 20.0, "confirming the best of 40, round 1 of 16"),
    (True, 4, 22.0, "confirming the best of 40, round 5 of 16, about 6 s left"),
]


def test_measurements_have_a_round_and_the_time_left():
    clock, said = Seconds(), []
    console = Console(file=io.StringIO(), width=200)
    with Progress(console=console) as progress:
        shown = SearchBar(progress, console, TimeLeft(["rms_norm"] * 1, clock=clock), "tuning")
        shown.step(CALLS[0], 40, 40)
        for is_confirmation, done, clock.now, _ in ROUNDS:
            shown.hear(RoundsFinished(CALLS[0].key, 12, done, 16, is_confirmation))
            said.append(progress.tasks[0].fields["note"].partition("rms_norm: ")[2])
    assert said == [words for *_, words in ROUNDS]


def test_candidates_count_as_compiling_until_one_has_a_time(screen):
    console, text = screen
    with bars(console, TimeLeft(["rms_norm"] * 1), "tuning") as shown:
        shown.step(CALLS[0], 3, 12)
    assert "call 1 of 1, rms_norm: compiling, 3 of 12 done" in text.getvalue()


def test_a_narrow_terminal_has_no_bar(screen):
    console, text = screen
    with bars(console, TimeLeft(["rms_norm"] * 1), "tuning") as shown:
        shown.step(CALLS[0], 1, 2)
    assert ("━" in text.getvalue()) == (console.width == 200)


def test_a_pipe_gets_the_time_left_once_the_first_call_shows_it():
    clock, text = Seconds(), io.StringIO()
    console = Console(file=text, width=200)
    with Progress(console=console, disable=True) as progress:
        shown = SearchBar(progress, console, TimeLeft(["rms_norm"] * 3, clock=clock), "tuning")
        shown.step(CALLS[0], 2, 2)
        for done, clock.now in ((0, 0.0), (5, 25.0), (6, 30.0)):
            shown.hear(RoundsFinished(CALLS[0].key, 2, done, 10, False))
    assert text.getvalue().splitlines()[1:] == ["  rms_norm: about 25 s left for its candidates, then confirming"]


def test_a_pipe_gets_the_time_left_to_compile_once_a_quarter_of_a_call_shows_it():
    clock, text = Seconds(), io.StringIO()
    console = Console(file=text, width=200)
    with Progress(console=console, disable=True) as progress:
        shown = SearchBar(progress, console, TimeLeft(["rms_norm"] * 2, measures=False, clock=clock), "compiling")
        for inv, done, clock.now in ((0, 0, 0.0), (0, 1, 5.0), (0, 2, 10.0), (1, 0, 10.0), (1, 3, 40.0), (1, 4, 50.0)):
            shown.step(CALLS[inv], done, 2 + 10 * inv)
    assert text.getvalue().splitlines() == [
        "compiling rms_norm (1 of 2), 2 candidates",
        "compiling rms_norm (1 of 2), 1 of 2 candidates, about 15 s left for all calls",
        "compiling rms_norm (2 of 2), 12 candidates, about 60 s left for all calls",
        "compiling rms_norm (2 of 2), 3 of 12 candidates, about 72 s left for all calls",
    ]


def test_a_pipe_gets_one_line_for_each_call():
    text = io.StringIO()
    with bars(Console(file=text, width=20), TimeLeft(["rms_norm"] * 2), "tuning") as shown:
        for done in range(3):
            shown.step(CALLS[0], done, 2)
        shown.hear(measured(CALLS[0], 1e-5))
        shown.step(CALLS[1], 0, 2)
    assert [line.split(",")[0] for line in text.getvalue().splitlines()] == [
        "tuning rms_norm (1 of 2)",
        "tuning rms_norm (2 of 2)",
    ]
