# SPDX-License-Identifier: Apache-2.0
"""`ejkernel bench`: a program's step untuned, tuned, and beside a baseline."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import jax
import jax.numpy as jnp

from ejkernel.cli import report
from ejkernel.cli.builds import Build, Loaded, build, of_mapping, prints_left_out, say
from ejkernel.cli.explain import counts_in_words, is_measured, usual_chain
from ejkernel.cli.programs import located, look_here, with_cache
from ejkernel.cli.rounds import CLOSE, WARM_UP, Comparison, busy, compared, run_rounds, verdict
from ejkernel.cli.show import opened
from ejkernel.ops.autotuner.measure.measurement import peak_bytes
from ejkernel.ops.config.policy import looking_only
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.errors import ArgumentError, TuningError
from ejkernel.ops.execution.explain import Explanation, explain_call
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.formatting import arguments, counted, durations, size
from ejkernel.ops.utils.meta import DEFAULT_PREFIX

_CALLS: Final = 6  # shown with their numbers
_ROUNDING: Final = 0.01  # of the norm: more than rounding alone explains
_FAR: Final = 0.05  # of the norm; gradients in bfloat16 may differ by a few percent
UNTUNED: Final = "untuned"
TUNED: Final = "tuned"
BASELINE: Final = "baseline"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `ejkernel bench`; see its help."""

    target: str = ""
    baseline: str = ""
    op: str = ""
    shapes: tuple[str, ...] = ()
    kwargs: str | None = None
    gradient: bool = False
    measure_peak: bool = False
    cache: Path | None = None
    rounds: int
    seconds: float
    per_step: float | None = None
    unit: str = "items"
    as_json: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The comparison of all builds, and the configurations of the untuned and tuned build.

    Attributes:
        apart: See `_apart`.
        has_nan: Whether results of the last build contain NaN.
        program: The program.
    """

    builds: Sequence[Build]
    missing: dict[str, str]
    found: Comparison
    untuned: Sequence[Explanation]
    tuned: Sequence[Explanation]
    apart: Mapping[str, float | None]
    has_nan: bool
    program: Loaded

    @property
    def own(self) -> Build:
        """The tuned build, or the untuned one if it is the same program."""
        return next(build for build in reversed(self.builds) if build.name != BASELINE)

    @property
    def measured(self) -> int:
        """The number of calls with a measured configuration."""
        return sum(map(is_measured, self.tuned))

    @property
    def changed(self) -> bool:
        """Whether tuning changed a configuration."""
        return not same_configurations(self.untuned, self.tuned)


def run_bench(options: BenchOptions) -> None:
    """Run `ejkernel bench TARGET`."""
    store = None if options.cache is None else opened(options.cache)
    targets = [located(options.target)]
    if options.baseline:
        try:
            targets.append(located(options.baseline))
        except ArgumentError as error:
            raise ArgumentError(f"--baseline: {error}") from None
    look_here()
    with contextlib.redirect_stdout(sys.stderr):  # keep the program's prints out of the result
        program = Loaded.of(targets[0])
        # After the program's import, which may set the default executor.
        usual = usual_chain(store)
        if not isinstance(usual, ConfigSelectorChain):
            raise ArgumentError(
                f"{options.target} replaces the configuration chooser by {type(usual).__name__}, so it has no untuned "
                "build; call ejkernel.ops.set_default_executor outside the module to compare it."
            )
        result = _compared(options, program, Loaded.of(targets[1]) if options.baseline else None, usual)
    _print(options, result)


def _compared(
    options: BenchOptions, program: Loaded, baseline: Loaded | None, usual: ConfigSelectorChain[Any, Any]
) -> _Result:
    heuristics: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(policy=usual.policy)
    builds, missing = [], {}
    if baseline is not None:
        try:
            builds.append(build(BASELINE, baseline, usual))
        except click.ClickException as error:  # e.g. plain JAX needs more memory than there is
            missing[BASELINE] = error.message.splitlines()[0]
    untuned = build(UNTUNED, program, heuristics)
    if not untuned.calls:
        raise TuningError(f"the program of {options.target} made no call of an operation that can be tuned.")
    with looking_only():
        whys = [[explain_call(chain, inv, DEFAULT_PREFIX) for inv in untuned.calls] for chain in (heuristics, usual)]
    builds.append(untuned)
    if not any(map(is_measured, whys[1])):
        command = f"ejkernel tune {with_cache(options.target, options.cache)}"
        missing[TUNED] = f"no saved configuration yet; run `{command}`, again if searches did not finish"
    elif same_configurations(*whys):
        untuned.name = TUNED
        missing[UNTUNED] = _why_same(whys[1])
    else:
        builds.append(build(TUNED, program, usual))
    with prints_left_out():
        apart, has_nan = _apart(builds)
        found = race(options, builds)
    return _Result(
        builds=builds,
        missing=missing,
        found=found,
        untuned=whys[0],
        tuned=whys[1],
        apart=apart,
        has_nan=has_nan,
        program=program,
    )


def _why_same(tuned: Sequence[Explanation]) -> str:
    """Return why the tuned program is the untuned one."""
    calls, saved = len(tuned), sum(map(is_measured, tuned))
    which = "every call" if saved == calls else f"{saved} of {calls} calls; {calls - saved} not tuned"
    return f"the same program as tuned: tuning kept the heuristic's configuration for {which}"


def _apart(builds: Sequence[Build]) -> tuple[dict[str, float | None], bool]:
    """Return how far the results of each build are from those of the last, and whether those contain NaN.

    The distance is the largest of all results, relative to the larger norm; `None` if the results have other shapes, or
    no floating-point numbers.
    """
    *others, last = builds
    expected = jax.tree.leaves(last.run())
    found = {build.name: _distance(jax.tree.leaves(build.run()), expected) for build in others}
    for each in builds:
        each.forget()
    return found, any(bool(jnp.isnan(x).any()) for x in expected if jnp.issubdtype(x.dtype, jnp.inexact))


def _distance(some: Sequence[jax.Array], others: Sequence[jax.Array]) -> float | None:
    if [x.shape for x in some] != [x.shape for x in others]:
        return None
    pairs = zip(some, others, strict=True)
    inexact = [pair for pair in pairs if all(jnp.issubdtype(x.dtype, jnp.floating) for x in pair)]
    return max((float(_relative(*pair)) for pair in inexact), default=None)


@jax.jit
def _relative(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the norm of the difference over the larger norm; 0 if both are zero, or not finite in the same places."""
    one, other = one.astype(jnp.float32).ravel(), other.astype(jnp.float32).ravel()
    same = ~jnp.isfinite(one) & ((one == other) | (jnp.isnan(one) & jnp.isnan(other)))
    one, other = jnp.where(same, 0, one), jnp.where(same, 0, other)
    largest = jnp.maximum(jnp.linalg.norm(one), jnp.linalg.norm(other))
    return jnp.where(largest == 0, 0, jnp.linalg.norm(one - other) / jnp.where(largest == 0, 1, largest))


def race(options: BenchOptions, builds: Sequence[Build]) -> Comparison:
    """Run the builds in interleaved rounds and return their times relative to the last build."""
    names = ", ".join(each.name for each in builds)
    say(f"comparing {names}" if len(builds) > 1 else f"timing {names}")
    deadline = time.monotonic() + options.seconds
    run_rounds([each.step for each in builds], options.rounds, deadline=deadline, say=say)
    return compared({each.name: each.samples for each in builds}, builds[-1].name)


def same_configurations(some: Sequence[Explanation], others: Sequence[Explanation]) -> bool:
    """Return whether two builds with the same calls are the same program."""
    return [repr(why.config) for why in some] == [repr(why.config) for why in others]


def _print(options: BenchOptions, result: _Result) -> None:
    if options.as_json:
        report.echo_json(_as_data(options, result))
        return
    print_table(options, result.builds, result.found, result.missing)
    for sentence in _sentences(options, result):
        click.echo(report.wrapped(sentence))


def print_table(
    options: BenchOptions,
    builds: Sequence[Build],
    found: Comparison,
    missing: Mapping[str, str],
    more: Mapping[str, Callable[[Build], str]] | None = None,
) -> None:
    """Print the builds, the reasons for missing ones, and the conditions; `more` adds columns."""
    added = dict(more or {})
    if options.per_step is not None:
        per_step = options.per_step
        added[f"{options.unit}/s"] = lambda build: f"{per_step / found.seconds[build.name]:,.0f}"
    reference = f"relative to {builds[-1].name}"
    header = ["", "step", "quartiles", reference, "memory", "compiled in", *added]
    rows = [[*_row(build, found), *(cell(build) for cell in added.values())] for build in builds]
    click.echo(report.table(header, rows, "compiled in", "quartiles"))
    for name, why in missing.items():
        click.echo(report.wrapped(f"{name}: {why}"))
    click.echo(f"\nOn {device_fingerprint()}: {found.rounds} rounds, each with one step of every build.")
    times = f" A step takes {builds[-1].name}'s median times this ratio." if len(builds) > 1 else ""
    click.echo(report.wrapped(f"{reference}: the median of the rounds' ratios, with its 95 % interval.{times}"))


def _row(build: Build, found: Comparison) -> list[str]:
    over, memory = found.over[build.name], peak_bytes(build.compiled)
    seconds, low, high = durations([found.seconds[build.name], *found.middle[build.name]])
    return [
        build.name,
        seconds,
        f"{low} to {high}",
        "1" if over["low"] == over["high"] == 1 else f"{over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f})",
        "-" if memory is None else size(memory),
        f"{build.compile_seconds:.1f} s",
    ]


def _sentences(options: BenchOptions, result: _Result) -> list[str]:
    """Return the conclusions from the table."""
    found, said = result.found, []
    best = result.builds[-1].name
    if BASELINE in found.over:
        said.append(verdict(f"{best} ejkernel", "the baseline", found.over[BASELINE]))
    if best == TUNED:
        if UNTUNED in found.over:
            said.append(verdict("tuned ejkernel", "untuned ejkernel", found.over[UNTUNED]))
        if result.measured < len(result.tuned):
            said.append(f"{counts_in_words(result.tuned, with_cache(options.target, options.cache))}.")
    said.append(of_mapping(result.builds))
    said += [_agreement(name, best, apart, result.program.is_random) for name, apart in result.apart.items()]
    said += _of_inputs(result)
    said.append(_made(result.own))
    said.append(busy(best, found.middle[best]))
    is_wide = any(over["high"] > CLOSE * over["low"] for over in found.over.values())
    if is_wide and found.rounds < options.rounds:
        said.append(f"More rounds narrow the interval: --seconds {2 * max(options.seconds, 1):.0f}")
    return [sentence for sentence in said if sentence]


def _of_inputs(result: _Result) -> list[str]:
    """Return sentences about random inputs, and about NaN in the results."""
    program = result.program
    said = [program.guess] if program.guess else []
    if result.has_nan:
        said.append("Some results are NaN.")
    if result.has_nan and program.is_random:
        said[-1] += (
            " Inputs given by type alone are normal random numbers: negative numbers give NaN e.g. as the variances of "
            f"Adam. To compare all results, let {program.target} return arrays."
        )
    return said


def _agreement(name: str, best: str, apart: float | None, is_random: bool) -> str:
    """Return whether the results of two builds agree."""
    if apart is None:
        return f"The results of {name} and {best} were not compared: they have different shapes, or no floating-point."
    if not apart <= _FAR:
        return f"The results of {name} and {best} DIFFER by {apart:.2g} of their norm: do both compute the same?"
    inputs = "the same random inputs" if is_random else "the same inputs"
    text = (
        f"The results of {name} and {best} agree to {apart:.1e} of their norm: after one step with {inputs}, this is "
        f"the largest difference of a floating-point result. Up to {_FAR} may be rounding."
    )
    if apart > _ROUNDING:
        text += (
            " An optimizer like Adam turns rounding errors of tiny gradients into full updates; compare the gradients."
        )
    return text


def _made(build: Build) -> str:
    """Return how often a step makes each of its calls; empty if it makes all of them once."""
    numbers = sorted(((build.times.get(inv.key, 1), inv) for inv in build.calls), key=lambda each: -each[0])
    if all(times == 1 for times, _ in numbers):
        return ""
    named = [f"{inv.op_id} ({arguments(inv.description)}) {counted(times, 'time')}" for times, inv in numbers[:_CALLS]]
    more = [counted(len(numbers) - _CALLS, "other")] if len(numbers) > _CALLS else []
    return f"A step makes {report.number_made(build.calls, build.times)} calls: {', '.join([*named, *more])}."


def _as_data(options: BenchOptions, result: _Result) -> dict[str, Any]:
    found = result.found
    return {
        "target": options.target,
        "device": device_fingerprint(),
        "rounds": found.rounds,
        "reference": result.builds[-1].name,
        "builds": [build_as_data(options, build, found) for build in result.builds],
        "unit": options.unit if options.per_step is not None else None,
        "missing": result.missing,
        "calls": len(result.tuned),
        "measured_calls": result.measured,
        "times": {f"{inv.op_id_v}:{inv.call_key}": result.own.times.get(inv.key) for inv in result.own.calls},
        "changed": result.changed,
        "apart": dict(result.apart),
        "conclusions": _sentences(options, result),
    }


def build_as_data(options: BenchOptions, build: Build, found: Comparison) -> dict[str, Any]:
    """Return the figures of a build, for JSON."""
    seconds = found.seconds[build.name]
    return {
        "name": build.name,
        "seconds": seconds,
        "quartiles": list(found.middle[build.name]),
        "over_reference": found.over[build.name],
        "peak_bytes": peak_bytes(build.compiled),
        "mapped_bytes": build.mapped[0],
        "compile_seconds": build.compile_seconds,
        "per_second": None if options.per_step is None else options.per_step / seconds,
        "samples": build.samples[WARM_UP:],
    }
