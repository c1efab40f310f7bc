# SPDX-License-Identifier: Apache-2.0
"""Tune an unmodified training program, and compare it with plain JAX: the whole story in about four minutes.

The program trains on packed documents. Tuning and comparing run in separate processes, so that the comparison sees
only what tuning saved to disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ejkernel.cli.rounds import busy, verdict

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".demo-cache"
TARGET = "train:training_step"
LIMIT = 240.0  # seconds for the whole demo
TUNING = 0.6  # part of the limit for tuning, which compares the step at its end
COMPARING = 0.3  # part of the limit that the comparison gets in any case
HANGS = 4  # times the limit: a part that takes longer is stopped; on a busy machine, parts take twice the limit
WIDTH = "150"  # columns of tables in a pipe
END = 15.0  # seconds that a process gets to end
STOPPED = 130  # exit status of `ejkernel tune` after SIGINT
NONE_SAVED = 1  # exit status of `ejkernel tune` if every search ended early
# Implementations round differently, and every step builds on the last.
TOLERANCE = 0.02


def run(seconds: float, *arguments: str, capture: bool = False) -> tuple[int, str]:
    """Run this Python with `arguments` beside the demo; return its exit status and output.

    After so many seconds the process is interrupted, as by Ctrl-C.
    """
    # XLA raises its errors in Python too; its log would drown the demo's output.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": WIDTH} | os.environ | {"EJKERNEL_CACHE_DIR": str(CACHE)}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=HERE,
        env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE if capture else None,
        text=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                out, _ = process.communicate(timeout=END)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
        return process.returncode, out or ""


def show(result: dict[str, Any]) -> None:
    """Print the table and the conclusions."""
    print(f"  {'':16}{'a step':>12}{'tokens/s':>12}{'memory':>12}  times the tuned step (95 % interval)")
    for name, why in result["missing"].items():
        print(f"  {name:16}{why}")
    for name, seconds in result["seconds"].items():
        memory, over = result["temporary_bytes"][name] / 2**20, result["over tuned"][name]
        against = "1" if name == "tuned" else f"{over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f})"
        print(f"  {name:16}{1e3 * seconds:9.1f} ms{result['tokens'] / seconds:12,.0f}{memory:8,.0f} MiB  {against}")
    print(
        f"  {result['device']}: {result['shape']}. Medians of {result['rounds']} rounds that ran each build once;\n"
        "  a step is the tuned build's median times the ratio beside it.\n"
    )
    for sentence in sentences(result):
        print(f"  {sentence}")


def sentences(result: dict[str, Any]) -> list[str]:
    """Return the conclusions from the table."""
    said = []
    for name, over in result["over tuned"].items():
        if name not in {"untuned", "tuned"}:
            memory = result["temporary_bytes"]["tuned"] / result["temporary_bytes"][name]
            said.append(f"{verdict('tuned ejkernel', name, over)} It needs {100 * memory:.0f} % of the memory.")
    said.append(
        verdict("tuned ejkernel", "untuned ejkernel", result["over tuned"]["untuned"])
        if result["changed"]
        else "Tuning found no faster configuration, so untuned and tuned are the same program."
    )
    calls, saved, unfinished = len(result["configurations"]), result["saved"], result.get("unfinished", 0)
    if saved < calls:
        said.append(f"Tuning saved a configuration for {saved} of {calls} calls; the others use the heuristic.")
    if left := max(unfinished, calls - saved):
        said.append(
            f"{left} of {calls} searches did not finish in the demo's time, so these calls may become faster. Run the\n"
            f"  demo again to continue with them, or, without a limit:\n    {_tuning()}"
        )
    said.append(busy("tuned", result["middle half of the tuned steps"]))
    return [sentence for sentence in said if sentence]


def _tuning() -> str:
    """Return the command that tunes the program, to be typed in any folder."""
    command = shlex.join([sys.executable, "-m", "ejkernel", "tune", TARGET])
    return f"cd {shlex.quote(str(HERE))} && EJKERNEL_CACHE_DIR={shlex.quote(str(CACHE))} {command}"


def losses_agree(losses: dict[str, list[float]]) -> bool:
    """Print how far the losses of the builds are apart, and return whether rounding explains it."""
    first = next(iter(losses.values()))
    agree = all(abs(a - b) <= TOLERANCE * abs(b) for each in losses.values() for a, b in zip(each, first, strict=True))
    apart = max(abs(a - b) / abs(b) for each in losses.values() for a, b in zip(each, first, strict=True))
    word = f"agree to {apart:.0e}" if agree else f"DO NOT AGREE: they differ by {apart:.0e}"
    tuned = losses["tuned"]
    ends = f"from {tuned[0]:.3f} to {tuned[-1]:.3f} nats per token in {len(tuned)} steps"
    print(f"  Losses {word}; they fall {ends}.")
    return agree


def main() -> int:
    """Run the demo; 1 when a part failed or the losses disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=LIMIT, help="time for all of it (default: %(default).0f)")
    limit = parser.parse_args().seconds
    started = time.monotonic()
    before = f"It continues with the configurations in {CACHE}.\n" if CACHE.exists() else ""
    about = f"{limit:.0f} seconds" if limit < 120 else f"{limit / 60:.2g} minutes"
    print(
        f"The demo takes about {about}, or more on a busy machine.\n{before}"
        f"== 1. ejkernel tune {TARGET} --time {TUNING * limit:.0f}",
        flush=True,
    )
    status, _ = run(HANGS * limit, "-m", "ejkernel.cli", "tune", TARGET, "--time", f"{TUNING * limit:.0f}")
    if status in (STOPPED, NONE_SAVED) and CACHE.exists():
        print("  The demo's time for tuning is over: the calls left use the heuristic.")
    elif status != 0:
        return _failed("tuning", status, limit)
    elapsed = time.monotonic() - started
    print(f"\n== 2. The same steps by each build ({elapsed:.0f} of {limit:.0f} s have passed)", flush=True)
    left = max(limit - elapsed, COMPARING * limit)
    status, out = run(HANGS * limit, "compare.py", str(CACHE), "--seconds", f"{left - END:.0f}", capture=True)
    if status != 0:
        return _failed("comparing", status, limit)
    result = json.loads(out)
    show(result)
    agree = losses_agree(result["losses"])
    look = shlex.join([sys.executable, "-m", "ejkernel", "report", "--cache", str(CACHE)])
    took = time.monotonic() - started
    print(f"  The demo took {took:.0f} s. A page about its searches (`show` instead of `report` prints them):")
    print(f"    {look}")
    return 0 if agree else 1


def _failed(part: str, status: int, limit: float) -> int:
    if status in (STOPPED, -signal.SIGINT):
        why = f"was interrupted, by Ctrl-C or because it took more than {HANGS * limit:.0f} s"
    else:
        why = f"failed with status {status}; its messages are above"
    print(f"demo: {part} {why}. Run the demo again: it continues with what is saved.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
