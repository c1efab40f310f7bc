# SPDX-License-Identifier: Apache-2.0
"""The figures of a report as SVG or PNG, for papers; Matplotlib is an extra."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ejkernel.cli.comparison import Comparison
from ejkernel.cli.report_data import CallReport
from ejkernel.cli.roofline import Roofline, rooflines_of
from ejkernel.ops.autotuner.trials.view import Row
from ejkernel.ops.config._files import slug
from ejkernel.ops.errors import ConfigError

_ACCENT, _WIN, _SPREAD, _SOFT = "#0b5cad", "#11734b", "#9dbfe3", "#596068"
_WIDTH: Final = 6.3  # inches: the text of an A4 page
_ROW: Final = 0.36  # inches for a row: its name above its marks
_MOST: Final = 24  # candidates in a figure, which fill a page; of more it shows the fastest
_LABEL: Final = 100  # characters of a line
_CLOCK: Final = ", in processor time"
_STYLE: Final[Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "svg.hashsalt": "ejkernel",  # equal figures give equal files
    "text.parse_math": False,  # names are text, also with dollar signs
}


def plot_report(calls: Sequence[CallReport], folder: Path, form: str) -> list[Path]:
    """Write the figures of a report, and return the files.

    Args:
        calls: The calls.
        folder: The folder to write; it is created.
        form: `svg` or `png`.

    Raises:
        ConfigError: Matplotlib is not installed.
    """
    with _matplotlib(folder, form) as draw:
        timed = [call for call in calls if call.before_us and call.tuned_us]
        if timed:
            draw("calls", _before_and_after, timed, len(timed))
        for roofline in rooflines_of(calls):
            draw(f"roofline-{slug(roofline.device)}-{slug(roofline.peak.dtype)}", _roofline, roofline, 8)
        for number, call in enumerate(calls, 1):
            name = f"{number:02}-{slug(call.op.partition('@')[0])}"
            rows = [row for row in call.rows if row.time_us is not None and not row.clock]
            if rows:
                draw(f"{name}-candidates", _candidates, (call, rows), min(len(rows), _MOST))
            if len(call.best) > 1:
                draw(f"{name}-best", _best_so_far, call, 4)
        return draw.files


def plot_comparison(comparison: Comparison, folder: Path, form: str) -> list[Path]:
    """Write the figure of a comparison, and return the files; none if no call has a ratio with its range.

    Raises:
        ConfigError: Matplotlib is not installed.
    """
    with _matplotlib(folder, form) as draw:
        count = sum(call.ratio is not None and call.ratio.low is not None for call in comparison.calls)
        if count:
            draw("comparison", _ratios, comparison, count)
        return draw.files


class _Draw:
    """Draws one figure at a time into a folder."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.form, self.files = folder, form, list[Path]()

    def __call__(self, name: str, draw: Callable[[Any, Any], None], what: object, rows: int) -> None:
        """Draw a figure with space for a number of rows, and write it."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH, 0.9 + _ROW * rows))
        draw(figure.add_subplot(), what)
        file = self.folder / f"{name}.{self.form}"
        metadata = {"Date": None} if self.form == "svg" else None
        figure.savefig(file, metadata=metadata)
        self.files.append(file)


@contextlib.contextmanager
def _matplotlib(folder: Path, form: str) -> Iterator[_Draw]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(f"Matplotlib is not installed ({error}): pip install 'matplotlib>=3.9'.") from error
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; figures need one: choose it with --output.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(_STYLE):
            yield _Draw(folder, form)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); choose another folder with --output."
        ) from error


def _before_and_after(axes: Any, calls: Sequence[CallReport]) -> None:
    for place, call in enumerate(calls):
        axes.plot([call.before_us, call.tuned_us], [place, place], color=_SPREAD, linewidth=3, zorder=1)
    befores, afters = [call.before_us for call in calls], [call.tuned_us for call in calls]
    axes.scatter(befores, range(len(calls)), facecolor="white", edgecolor=_ACCENT, s=28, label="heuristic", zorder=2)
    axes.scatter(afters, range(len(calls)), color=_WIN, s=16, label="tuned", zorder=3)
    _name_rows(axes, [f"{call.result}: {_name(call)}{_CLOCK if call.note else ''}" for call in calls])
    _time_axis(axes, [time for time in (*befores, *afters) if time is not None])
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


def _candidates(axes: Any, what: tuple[CallReport, Sequence[Row]]) -> None:
    call, timed = what
    rows = timed[:_MOST]
    for place, row in enumerate(rows):
        colour = _WIN if row.mark in ("winner", "heuristic kept") else _ACCENT
        _bar(axes, place, row.low_us, row.high_us)
        face = "white" if row.mark == "heuristic" else colour
        axes.scatter([row.time_us], [place], facecolor=face, edgecolor=colour, s=22, zorder=3)
    times = [time for row in rows for time in (row.low_us, row.high_us)]
    if call.before_us:
        axes.axvline(call.before_us, color=_SOFT, linewidth=0.8, zorder=0)
        times.append(call.before_us)
    _name_rows(axes, [f"{row.name}{f' ({row.mark})' if row.mark else ''}" for row in rows])
    _time_axis(axes, times)
    more = f"; the {len(rows)} fastest of {len(timed)}" if len(timed) > len(rows) else ""
    more += f"; {call.measured - len(timed)} by another clock left out" if call.measured > len(timed) else ""
    what_is_shown = f"dot: median; bar: the middle half of the samples; line: the heuristic{more}"
    axes.set_xlabel(f"{axes.get_xlabel()}\n{what_is_shown}")
    _title(axes, _name(call))


def _best_so_far(axes: Any, call: CallReport) -> None:
    factor, unit = _unit([time for _, time in call.best])
    counts, times = [count for count, _ in call.best], [time * factor for _, time in call.best]
    axes.step([*counts, call.measured], [*times, times[-1]], where="post", color=_ACCENT)
    axes.scatter(counts, times, color=_ACCENT, s=14)
    axes.set_ylim(bottom=0, top=1.08 * times[0])
    axes.set_xlabel("measured candidates")
    axes.set_ylabel(f"best time ({unit})")
    _title(axes, _name(call))


def _roofline(axes: Any, roofline: Roofline) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot(*zip(*roofline.corners, strict=True), color=_SOFT, linewidth=1.5)
    for dot in roofline.dots:
        if dot.before_tflops is not None:
            axes.plot([dot.intensity] * 2, [dot.before_tflops, dot.tflops], color=_SPREAD, linewidth=3, zorder=1)
            axes.scatter([dot.intensity], [dot.before_tflops], facecolor="white", edgecolor=_ACCENT, s=28, zorder=2)
        axes.scatter([dot.intensity], [dot.tflops], color=_WIN, s=16, zorder=3)
        axes.annotate(f"{dot.number}", (dot.intensity, dot.tflops), xytext=(5, 0), textcoords="offset points")
    for axis, (low, high) in ((axes.xaxis, roofline.x_ends), (axes.yaxis, roofline.y_ends)):
        _ticks(axis, [10.0**power for power in range(low, high + 1)])
    axes.set_xlim(10.0 ** roofline.x_ends[0], 10.0 ** roofline.x_ends[1])
    axes.set_ylim(10.0 ** roofline.y_ends[0], 10.0 ** roofline.y_ends[1])
    axes.set_xlabel("floating-point operations per byte\nring: heuristic; dot: tuned; numbers as in the other files")
    axes.set_ylabel("TFLOP/s")
    _title(axes, f"{roofline.device}, {roofline.peak.in_words}")


def _ratios(axes: Any, comparison: Comparison) -> None:
    found = [(call, call.ratio) for call in comparison.calls if call.ratio is not None and call.ratio.low is not None]
    for place, (_, each) in enumerate(found):
        _bar(axes, place, each.low, each.high)
        axes.scatter([each.median], [place], color=_ACCENT, s=22, zorder=2)
    axes.axvline(1, color=_SOFT, linewidth=0.8, zorder=0)
    _name_rows(axes, [f"{each.in_words}, {call.verdict}: {call.op}  {call.arguments}" for call, each in found])
    axes.set_xscale("log")
    _ticks(axes.xaxis, _plain([end for _, each in found for end in (each.low, each.high, 1.0) if end]))
    axes.set_xlabel("time before / time after: above 1 is faster after; bar: 95 % range")


def _name(call: CallReport) -> str:
    return f"{call.op}  {call.arguments}"


def _bar(axes: Any, place: int, low: float | None, high: float | None) -> None:
    axes.plot([low, high], [place, place], color=_SPREAD, linewidth=5, solid_capstyle="butt", zorder=1)


def _title(axes: Any, text: str) -> None:
    axes.set_title("\n".join(textwrap.wrap(text, _LABEL)[:3]), loc="left", fontsize=8)


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """Write the name of each row above its marks; the first row is at the top."""
    for place, name in enumerate(names):
        text = name if len(name) <= _LABEL else f"{name[: _LABEL - 3]}..."
        text = axes.text(0.005, place - 0.28, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # hides the heuristic's line behind it
        text.set_in_layout(False)  # a long name must not shrink the axes
        axes.axhline(place - 0.55, color=_SPREAD, linewidth=0.3)
    axes.set_ylim(len(names) - 0.55, -0.55)
    axes.set_yticks([])


def _time_axis(axes: Any, times: Sequence[float]) -> None:
    """Give the horizontal axis a logarithmic scale, with times in one unit."""
    factor, unit = _unit(times)
    axes.set_xscale("log")
    margin = 1.02 * (max(times) / min(times)) ** 0.02
    axes.set_xlim(min(times) / margin, max(times) * margin)
    _ticks(axes.xaxis, [value / factor for value in _plain([time * factor for time in times])], factor)
    axes.set_xlabel(f"time ({unit})")


def _unit(times: Sequence[float]) -> tuple[float, str]:
    return (1e-3, "ms") if max(times) >= 1e3 else (1.0, "us")


def _plain(values: Sequence[float]) -> list[float]:
    """Return round numbers between the ends of a logarithmic axis; Matplotlib finds none on a short one."""
    low, high = min(values), max(values)
    if high > 5 * low:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high < 1000 * low else (1,)
        return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
    from matplotlib.ticker import MaxNLocator

    return [float(tick) for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high and tick > 0]


def _ticks(axis: Any, places: Sequence[float], factor: float = 1.0) -> None:
    """Put plain numbers beside an axis, where Matplotlib would write powers."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(places, [f"{place * factor:,.6g}" for place in places])
    axis.set_minor_locator(NullLocator())
