# SPDX-License-Identifier: Apache-2.0
"""`ejkernel report`: one HTML page about the saved searches, without scripts or styles from elsewhere."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ejkernel.cli import report
from ejkernel.cli.comparison import Comparison, compare
from ejkernel.cli.programs import import_named, import_operations
from ejkernel.cli.report_data import CallReport, calls_of, steps_of
from ejkernel.cli.roofline import rooflines_of
from ejkernel.cli.show import opened
from ejkernel.ops.config._files import version
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.errors import ArgumentError, ConfigError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import counted, ratio
from ejkernel.ops.utils.pages import render

PREVIOUS = "previous"  # of --against: the search before the newest of each call


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of `ejkernel report`.

    Attributes:
        cache: The folder to read; `None` for the default one.
        against: The folder to compare with, `previous`, or empty.
        device, against_device: Only calls of devices with this text in their names.
        form: `html`, `svg` or `png`.
        output: The file or folder to write; `None` for the default one.
        imports: Modules that define kernels.
        measure_peak: Whether to measure the peak of this device.
        as_json: Whether to print the data instead.
    """

    cache: Path | None
    against: str
    device: str
    against_device: str
    form: str
    output: Path | None
    imports: Sequence[str]
    measure_peak: bool
    as_json: bool

    @property
    def is_comparison(self) -> bool:
        """Whether two sets of searches are compared."""
        return bool(self.against or self.against_device)

    @property
    def place(self) -> Path:
        """The file or folder to write."""
        name = "comparison" if self.is_comparison else "report"
        return self.output or Path(f"{name}.html" if self.form == "html" else name)


def run_report(options: ReportOptions) -> int:
    """Run `ejkernel report`; return 1 if there is nothing to show."""
    store = opened(options.cache)
    import_operations()  # they define the cost of a call
    import_named(options.imports)
    if options.is_comparison:
        return _write_comparison(options, store)
    calls = _of_device(calls_of(store, measure_peak=options.measure_peak), options.device)
    if options.as_json:
        report.echo_json([dataclasses.asdict(call) for call in calls])
    elif not calls:
        of = f" for a device with {options.device!r} in its name" if options.device else ""
        click.echo(f"No saved configurations in {store.path}{of}.", err=True)
    elif options.form == "html":
        _write(options.place, page(calls, str(store.path)))
        click.echo(f"{options.place.resolve()}: {counted(len(calls), 'call')}")
    else:
        from ejkernel.cli import plots

        files = plots.plot_report(calls, options.place, options.form)
        click.echo(f"{options.place.resolve()}: {counted(len(files), 'figure')} of {counted(len(calls), 'call')}")
    return 0 if calls else 1


def _write(file: Path, text: str) -> None:
    """Write a page.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}); choose another file with --output.") from error


def _of_device(calls: Sequence[CallReport], device: str) -> list[CallReport]:
    return [call for call in calls if device in call.device]


def _compared(side: Named, device: str, option: str) -> list[CallReport]:
    """Return the calls of one side of a comparison on the devices that an option names.

    Raises:
        ArgumentError: No device of this side has the name.
    """
    place, calls = side
    found = _of_device(calls, device)
    if calls and not found:
        names = ", ".join(sorted({call.device for call in calls}))
        raise ArgumentError(f"{option} must be part of a device's name, got {device!r}; {place} has {names}.")
    return found


def _write_comparison(options: ReportOptions, store: PersistentCache) -> int:
    before, after = _two_sides(options, store)
    option = "--against-device" if options.against_device else "--device"
    old = _compared(before, options.against_device or options.device, option)
    found = compare(old, _compared(after, options.device, "--device"), before[0], after[0])
    if options.as_json:
        report.echo_json(found.data())
    elif not found.calls:
        click.echo(f"No saved configurations in {before[0]} or {after[0]}.", err=True)
    elif options.form == "html":
        _write(options.place, comparison_page(found))
        click.echo(f"{options.place.resolve()}: {found.in_words}")
    else:
        from ejkernel.cli import plots

        files = plots.plot_comparison(found, options.place, options.form)
        click.echo(f"{options.place.resolve()}: {counted(len(files), 'figure')}; {found.in_words}")
    return 0 if found.calls else 1


Named = tuple[str, list[CallReport]]  # a side of a comparison


def _two_sides(options: ReportOptions, store: PersistentCache) -> tuple[Named, Named]:
    """Return the sides of a comparison, the old one first."""
    here = printable(store.path)
    if options.against == PREVIOUS:
        newest, before = calls_of(store, newest=0), calls_of(store, newest=1)
        return (f"{here}, the previous searches", before), (f"{here}, the newest searches", newest)
    after = here, calls_of(store)
    if not options.against:
        return after, after
    other = opened(Path(options.against), alone=True)
    return (printable(other.path), calls_of(other)), after


def page(calls: Sequence[CallReport], place: str = "") -> str:
    """Return the page as HTML.

    Args:
        calls: The calls.
        place: The folder of the cache.

    Raises:
        ConfigError: Jinja2 is not installed.
    """
    return render(
        "report.html",
        calls=calls,
        place=printable(place),
        gains=_gains(calls),
        mappings=dict.fromkeys(printable(step.mapping) for step in steps_of(calls).values() if step.mapping),
        devices=sorted({call.device for call in calls}),
        rooflines=rooflines_of(calls),
        **_stamp(),
    )


def _gains(calls: Sequence[CallReport]) -> list[tuple[str, str, str]]:
    """Return the gain of tuning for each program with a compared step, or else for the calls together.

    Each gain has a name, the figure, and how it was measured.
    """
    how = "the whole step without and with the new configurations of the last ejkernel tune, in alternation"
    newest = steps_of(calls)
    is_one = len({device for _, device in newest}) < 2
    steps = [
        (f"step of {printable(target)}{'' if is_one else f' on {device}'}", step.times, how)
        for (target, device), step in newest.items()
    ]
    return steps or [_gain_of_calls(calls)]


def _gain_of_calls(calls: Sequence[CallReport]) -> tuple[str, str, str]:
    known = [call for call in calls if call.counts and 0 < (call.before_us or 0.0) < math.inf]
    each = [((call.before_us or 0.0) * (call.times or 1), call.speedup or 1.0) for call in known]
    before, after = sum(time for time, _ in each), sum(time / speedup for time, speedup in each)
    kept = sum(call.is_kept for call in known)
    left_out = f", {len(calls) - len(known)} left out" if len(known) < len(calls) else ""
    parts = f"{len(known) - kept} faster than the heuristic, {kept} with the heuristic{left_out}"
    how = f"the sum of their times, each as often as a run makes the call ({parts}); no step was measured"
    return f"{counted(len(known), 'call')} together", ratio(before / after if after else None), how


def comparison_page(comparison: Comparison) -> str:
    """Return the page of a comparison as HTML.

    Raises:
        ConfigError: Jinja2 is not installed.
    """
    return render("comparison.html", comparison=comparison, **_stamp())


def _stamp() -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"now": now, "version": version("ejkernel-ops") or ""}
