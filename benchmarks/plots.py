# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.plots`: plots of the figures of attention, grouped products and normalisations, beside them.

A point is the time of another implementation divided by ours, for one call; left of the line at 1 it is faster than
ours. Needs matplotlib, which the rest does not: pip install matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH, HEIGHT, FOOT = 11.0, 0.2, 1.5  # inches: width, height of one line, and height of title and axis
WIDE = 4.0  # ratio from which on an axis is logarithmic
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"))  # told apart by all
Ratios = dict[str, dict[str, dict[str, float]]]  # by direction, call and contender


class Picture(NamedTuple):
    """The plot of one results file: its title, and a function from the file's content to ratios."""

    title: str
    ratios: Callable[[Mapping[str, Any]], Ratios]


def of_attention(found: Mapping[str, Any]) -> Ratios:
    """Return the others' times over ours as tuned."""
    return {
        direction: {
            call: {
                name: us / row["us"]["tuned"] for name, us in row["us"].items() if name in ("jax.nn cudnn", "tokamax")
            }
            for call, row in found[direction].items()
        }
        for direction in ("forward", "forward and backward")
    }


def of_products(found: Mapping[str, Any]) -> Ratios:
    """Return the others' times over ours, by kind of sizes."""
    others, ratios = ("jax mgpu", "tokamax", "tokamax triton", "ragged_dot", "dense"), {}
    for kind, title in (("even", "even groups"), ("zipf", "groups by Zipf's law")):
        ratios[title] = {
            call.replace(" | ", ", "): {
                name: row[name][kind]["us"] / row["ejkernel"][kind]["us"]
                for name in others
                if kind in row.get(name, {}) and "decoding" not in call
            }
            for call, row in found.items()
            if call != "environment"
        }
    return ratios


def of_norms(found: Mapping[str, Any]) -> Ratios:
    """Return plain JAX's times over ours."""
    ratios: Ratios = {"forward": {}, "both": {}}
    for call, row in found.items():
        if call != "environment":
            name, direction = call.rsplit(", ", 1)
            ratios[direction][name] = {"plain JAX": row["xla"]["us"] / row["ejkernel"]["us"]}
    return {"forward": ratios["forward"], "forward and backward": ratios["both"]}


PICTURES = {
    "attention_gpu": Picture("Attention on one H200", of_attention),
    "grouped_matmul_gpu": Picture("Grouped products on one H200", of_products),
    "norms_gpu": Picture("Normalisations on one H200", of_norms),
    "norms_short_gpu": Picture("Normalisations of short rows on one H200", of_norms),
}


def drawn(title: str, ratios: Ratios, file: Path, *, source: str) -> None:
    """Draw a panel for each direction, a line for each call and a point for each contender, and name the source."""
    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    matplotlib.rcParams |= {
        "svg.hashsalt": file.stem,
        "svg.fonttype": "none",
        "font.size": 9,
    }  # the same file of the same figures
    calls = list(dict.fromkeys(call for panel in ratios.values() for call, row in panel.items() if row))
    names = list(dict.fromkeys(name for panel in ratios.values() for row in panel.values() for name in row))
    size = (WIDTH, HEIGHT * len(calls) + FOOT)
    figure, axes = pyplot.subplots(1, len(ratios), sharey=True, figsize=size, layout="constrained")
    for axis, (direction, panel) in zip(axes, ratios.items(), strict=True):
        for name, (color, marker) in zip(names, STYLES, strict=False):
            points = [(panel[call][name], line) for line, call in enumerate(calls) if name in panel.get(call, {})]
            xs, ys = zip(*points, strict=True) if points else ((), ())
            axis.scatter(xs, ys, s=22, color=color, marker=marker, label=name, zorder=3)
        axis.axvline(1, color="black", linewidth=1)
        axis.set(title=direction, xlabel="times as long as ejkernel", ylim=(len(calls) - 0.5, -0.5))
        if max(max(row.values(), default=1.0) for row in panel.values()) > WIDE:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_minor_formatter("")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_yticks(range(len(calls)), calls)
        axis.grid(axis="both", which="both", color="#dddddd", linewidth=0.5)
    figure.suptitle(title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.savefig(file, metadata={"Date": None, "Description": source})
    pyplot.close(figure)


def main() -> None:
    """Draw all."""
    for name, picture in PICTURES.items():
        text = (RESULTS / f"{name}.json").read_bytes()
        ratios, source = picture.ratios(json.loads(text)), hashlib.sha256(text).hexdigest()
        drawn(picture.title, ratios, RESULTS / f"{name}.svg", source=source)


if __name__ == "__main__":
    main()
