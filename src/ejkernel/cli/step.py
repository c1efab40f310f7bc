# SPDX-License-Identifier: Apache-2.0
"""Runs a program's step without and with new configurations of its calls, and finds those that do not slow it.

A configuration that wins by itself may slow the step: with a little more temporary memory, the C library may return the
memory of each step to the system and map it anew in the next one. No measurement of a single call shows this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import jax

from ejkernel.cli.builds import Build, Loaded, build, of_mapping, prints_left_out, say
from ejkernel.cli.explain import usual_chain
from ejkernel.cli.programs import Program, look_here
from ejkernel.cli.rounds import FEWEST, WARM_UP, Comparison, compared, is_slower, run_rounds
from ejkernel.cli.show import opened
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.utils.formatting import durations, ratio

_ROUNDS: Final = 100  # of a comparison, at most
_RACE: Final = 10.0  # seconds of a comparison, at most, unless `FEWEST` rounds take longer
_DOUBT: Final = 0.98  # of the speed: once a step was slower, a configuration must not seem to slow it by more
# Names of builds.
_BEFORE, _AFTER = "without the new configurations", "with them"
_KEPT, _NEXT = "with those kept", "with one more"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """A call with a new configuration.

    Attributes:
        key: The call.
        name: The call in words.
        before: The configuration before, e.g. the heuristic's; `None` if it fails.
        after: The new one.
        alone: The speed-up of the call by itself.
        gain: Seconds of a step that this saves.
    """

    key: ConfigKey
    name: str
    before: Any
    after: Any
    alone: float | None
    gain: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A step to compare.

    Attributes:
        program: The program.
        cache: The cache folder with the configurations of the other calls.
        winners: The calls with new configurations.
        end: Value of `time.monotonic()`, a clock of the machine, when the comparison should end; compiling and the
            fewest rounds may take longer.
        why_short: Why it may not take longer, as the end of a sentence.
        insists: Whether the step runs even if it has side effects or takes long.
    """

    program: Program
    cache: Path | None
    winners: Sequence[Winner]
    end: float
    why_short: str
    insists: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The comparison of a step.

    Attributes:
        before, after: Seconds of the step without and with the new configurations that are kept.
        over: Their ratio, with its interval; 1 if none is kept.
        rounds: The rounds of this comparison.
        dropped: Why configurations are not kept, by call.
        mapping: How much memory the steps without and with all new configurations map anew; see `of_mapping`.
        guess: A sentence about integer inputs with random values; empty without any.
        undecided: Whether the new configurations seem to slow the step, but within the noise.
        skipped: Why the step was not compared; empty if it was.
    """

    before: float = 0.0
    after: float = 0.0
    over: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rounds: int = 0
    dropped: Mapping[ConfigKey, str] = dataclasses.field(default_factory=dict)
    mapping: str = ""
    guess: str = ""
    undecided: bool = False
    skipped: str = ""


Make = Callable[[str, Mapping[ConfigKey, Any]], Build]
FAILS = (click.ClickException, EjkernelError)


def compare_step(question: Question) -> Answer:
    """Run the program's step without and with the new configurations, and drop those that slow it."""
    look_here()
    with contextlib.redirect_stdout(sys.stderr):  # keep the program's prints out of the result
        loaded = Loaded.of(question.program)
        if jax.process_count() > 1:
            return Answer(skipped="it runs in several processes")
        # After the program's import, which may set the default executor.
        usual = usual_chain(None if question.cache is None else opened(question.cache, may_be_new=True))
        if not isinstance(usual, ConfigSelectorChain):
            return Answer(skipped=f"it replaces the configuration chooser by {type(usual).__name__}")

        def make(name: str, configs: Mapping[ConfigKey, Any]) -> Build:
            return build(name, loaded, usual, configs=configs, pure=not question.insists)

        say("comparing the step without and with the new configurations")
        try:
            before = make(_BEFORE, {winner.key: winner.before for winner in question.winners})
        except FAILS as error:
            return Answer(skipped=first_line(error))
        least = before.compile_seconds + 2 * (WARM_UP + FEWEST) * before.first
        if least > question.end - time.monotonic() and not question.insists:
            return Answer(skipped=f"that takes about {math.ceil(least)} s more, {question.why_short}")
        found = choose(question.winners, before, make, lambda: max(question.end - time.monotonic(), 0.0))
        return dataclasses.replace(found, guess=loaded.guess)


def choose(winners: Sequence[Winner], before: Build, make: Make, left: Callable[[], float]) -> Answer:
    """Return the comparison with all winners or, if they slow the step, with those that do not.

    They are then added one at a time, those that save the most first, and the next only if the step gets no slower.

    Args:
        winners: The calls with new configurations.
        before: The step without them.
        make: Builds the step with given configurations.
        left: Returns the seconds left.
    """
    configs = {winner.key: winner.before for winner in winners}
    builds, seconds = [before], before.first
    try:
        builds.append(make(_AFTER, configs | {winner.key: winner.after for winner in winners}))
    except FAILS as error:
        together = f"does not run: {first_line(error)}"
    else:
        found = _race(builds, left())
        if not is_slower(found.over[_BEFORE]):
            undecided = _may_be_slower(found.over[_BEFORE])
            return dataclasses.replace(_answer_of(found), undecided=undecided, mapping=of_mapping(builds))
        seconds, together = found.seconds[_BEFORE], _slowed(found, _AFTER)
    answer = Answer(before=seconds, after=seconds, over={"median": 1.0, "low": 1.0, "high": 1.0})
    if len(winners) == 1:
        why = _why_dropped(winners[0], f"with it {together}")
        answer = dataclasses.replace(answer, dropped={winners[0].key: why})
    else:
        say(f"with all of them the step {together}; adding them one at a time")
        answer = _one_by_one(winners, before, make, left, answer, together)
    return dataclasses.replace(answer, mapping=of_mapping(builds))


def _one_by_one(
    winners: Sequence[Winner], before: Build, make: Make, left: Callable[[], float], answer: Answer, together: str
) -> Answer:
    """Return the comparison with the winners that do not slow the step; `together`: how all of them do."""
    configs, best, dropped = {winner.key: winner.before for winner in winners}, before, dict[ConfigKey, str]()
    for winner in sorted(winners, key=lambda winner: -winner.gain):
        if left() <= 0:
            why = f"with all new configurations {together}; no time was left to try this one alone"
            dropped[winner.key] = _why_dropped(winner, why)
            continue
        try:
            build = make(_NEXT, configs | {winner.key: winner.after})
        except FAILS as error:
            dropped[winner.key] = _why_dropped(winner, f"with it does not run: {first_line(error)}")
            continue
        found = _race([before, *([] if best is before else [best]), build], left())
        if any(map(_may_be_slower, found.over.values())):
            dropped[winner.key] = _why_dropped(winner, f"with it {_slowed(found, _NEXT)}")
            continue
        build.name = _KEPT
        best, answer = build, _answer_of(found)
        configs[winner.key] = winner.after
    return dataclasses.replace(answer, dropped=dropped)


def _why_dropped(winner: Winner, why: str) -> str:
    alone = "" if winner.alone is None else f"{ratio(winner.alone)} by itself, but "
    return f"{alone}the step {why}"


def _answer_of(found: Comparison) -> Answer:
    """Return the comparison of `before` with the reference."""
    over, before = found.over[_BEFORE], found.seconds[_BEFORE]
    return Answer(before=before, after=before / over["median"], over=over, rounds=found.rounds)


def _race(builds: Sequence[Build], seconds: float) -> Comparison:
    """Run the builds in interleaved rounds, for longer if the last seems slower; it is the reference."""
    for each in builds:
        each.forget()
    started = time.monotonic()
    for deadline in (min(seconds / 3, _RACE), seconds * 2 / 3):
        with prints_left_out():
            run_rounds([each.step for each in builds], _ROUNDS, deadline=started + deadline, say=say)
        found = compared({each.name: each.samples for each in builds}, builds[-1].name)
        if not any(_may_be_slower(over) and not is_slower(over) for over in found.over.values()):
            break
    return found


def _may_be_slower(over: Mapping[str, float]) -> bool:
    """Return whether a step seems slower than another; after a slower step with all winners, this is enough."""
    return is_slower(over) or over["median"] < _DOUBT


def _slowed(found: Comparison, name: str) -> str:
    before, after = durations([found.seconds[_BEFORE], found.seconds[name]])
    return f"takes {after} instead of {before}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    text = error.message if isinstance(error, click.ClickException) else str(error)
    return next(iter(text.splitlines()), type(error).__name__)
