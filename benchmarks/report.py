# SPDX-License-Identifier: Apache-2.0
"""Results as tables, and where they are kept. Imports JAX and nothing of ours: rivals' environments use it too."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

BARS = {"arrays": 1.25, "forms": 2.5, "distinct": 1.5, "import_ms": 60.0}
USUAL = ("a usual kernel, forward", "a usual kernel, gradient")  # the bar of distinct calls applies to these


def platform_name() -> str:
    """Return the platform that the benchmark runs on, as file names have it."""
    return jax.default_backend()


def environment() -> dict[str, Any]:
    """Return the environment that the figures depend on: device, versions, date and load."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"(?m)^model name\s*:\s*(.+)$", info.read_text()) if info.exists() else None
    device = jax.devices()[0].device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chip = model[1] if model else platform.machine()
    return {
        "device": f"{chip}, {cores} cores" if jax.default_backend() == "cpu" else f"{device}; {chip}, {cores} cores",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }


def bar_of(form: str) -> float:
    """Return the bar for an eager call of this form, as a ratio to `jax.jit`."""
    return BARS["arrays" if form.startswith("arrays") and "NumPy" not in form else "forms"]


def ratios(found: Mapping[str, Mapping[str, Mapping[str, float]]], unit: str) -> str:
    """Return a Markdown table of comparisons of two, a line each."""
    factor = {"us": 1e6, "ms": 1e3}[unit]
    names = list(next(iter(found.values())))
    lines = [
        f"| | {names[0]}, {unit} | {names[1]}, {unit} | ratio of minima | median ratio |",
        "|---|---|---|---|---|",
    ]
    for name, (base, ours) in ((name, timings.values()) for name, timings in found.items()):
        times = f"{base['minimum'] * factor:.2f} | {ours['minimum'] * factor:.2f}"
        lines.append(f"| {name} | {times} | {ours['ratio']:.2f} | {ours['median_ratio']:.2f} |")
    return "\n".join(lines)


def table(timings: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Return a Markdown table of timings, in `unit` (`us` or `ms`)."""
    factor = {"us": 1e6, "ms": 1e3}[unit]
    lines = [f"| | minimum, {unit} | median, {unit} | ratio of minima | median ratio |", "|---|---|---|---|---|"]
    lines += [
        f"| `{name}` | {t['minimum'] * factor:.2f} | {t['median'] * factor:.2f} "
        f"| {t['ratio']:.2f} | {t['median_ratio']:.2f} |"
        for name, t in timings.items()
    ]
    return "\n".join(lines)


def heading(run: Mapping[str, Any]) -> str:
    """Return one line with versions, device, load and date."""
    env = run["environment"]
    return f"JAX {env['jax']}, Python {env['python']}; {env['device']}; load {env['load']}; {env['date']}"


def run_text(run: Mapping[str, Any]) -> str:
    """Return one run of all benchmarks as Markdown."""
    imported = run["import_time"]
    parts = [
        f"## {heading(run)}",
        f"### Eager calls of every form, 16 x 16 (bars: {BARS['arrays']} for arrays, {BARS['forms']} for the rest)",
        ratios(run["forms"], "us"),
        f"### 200 distinct calls, traced and lowered (bar: {BARS['distinct']} for a usual kernel; processor time)",
        ratios(run["distinct"], "ms"),
        "Milliseconds a call of programs of many distinct calls of three operations: "
        + ", ".join(f"{name} {value}" for name, value in run["growth_ms"].items())
        + ".",
        "### Eager calls, 16 x 16, microseconds",
        table(run["eager"], "us"),
        *(table(part, "us") for part in run["modules"].values()),
        "### Inside a traced program: 24 calls",
        f"Optimised programs that differ from plain JAX's: {', '.join(run['differing_programs']) or 'none'}.",
    ]
    for name, timings in run["build"].items():
        parts += [f"{name}:", table(timings, "ms")]
    parts += [
        f"### `import ejkernel.ops` after `import jax` (bar: {BARS['import_ms']:.0f} ms)",
        f"Nine processes: minimum {imported['minimum_ms']} ms, median {imported['median_ms']} ms; the least processor "
        f"time {imported['minimum_cpu_ms']} ms. Initialises no "
        f"device: {'yes' if imported['initialises_no_device'] else 'NO'}. The slowest modules, themselves (and with "
        "what they import), under `-X importtime`: "
        + ", ".join(f"`{m['module']}` {m['own_ms']} ({m['total_ms']})" for m in imported["slowest"])
        + ".",
    ]
    return "\n\n".join(parts)


def runs(found: Mapping[str, Any]) -> str:
    """Return all runs as Markdown."""
    lead = (
        "# Dispatch, tracing and import\n\n"
        "`python -m benchmarks --out benchmarks/results`. Slices of about 1 ms are interleaved; ratios are to the "
        "first line of each table. The load is the whole machine's at the start. On a busy machine rely on the minima "
        "and their ratios; the medians mostly show how busy it was."
    )
    return "\n\n".join([lead, *(run_text(run) for run in found.values())]) + "\n"


def rivals(found: Mapping[str, Any]) -> str:
    """Return the rivals' results as Markdown."""
    parts = [
        "# Eager calls of comparable libraries",
        "`python -m benchmarks.rivals --make-envs DIR`: each in a separate environment with the JAX version that "
        "it requires, on 16 x 16 arrays. Ratios are to plain `jax.jit` in that environment. `ejkernel` on PyPI is an "
        "earlier system with this name.",
    ]
    for name, run in found.items():
        parts.append(f"## {name}")
        parts += [f"failed: {run['failed']}"] if "failed" in run else [heading(run), table(run["calls"], "us")]
    return "\n\n".join(parts) + "\n"


def write(folder: Path, name: str, found: Any, text: str) -> None:
    """Write a result as JSON, and as text for people."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
