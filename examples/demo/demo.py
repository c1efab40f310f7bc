# SPDX-License-Identifier: Apache-2.0
"""The whole story in a few minutes: tune a training program that is not changed for it, and see what that brings.

The program trains on packed documents. Tuning and comparing are processes of their own, so that only what was saved
to disk can carry over.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".demo-cache"
# Implementations round differently, and every step builds on the last.
TOLERANCE = 0.02


def child(*arguments: str, capture: bool = False) -> str:
    """Run this Python with `arguments` beside the demo; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE,
        env=os.environ | {"EJKERNEL_CACHE_DIR": str(CACHE), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=True,
    )
    return done.stdout or ""


def show(result: dict[str, Any]) -> None:
    """Print one table and what it means."""
    print(f"  {'':12}{'a step':>12}{'tokens/s':>12}{'memory':>12}")
    for name, seconds in result["seconds"].items():
        memory = result["temporary_bytes"][name] / 2**20
        print(f"  {name:12}{1e3 * seconds:9.1f} ms{result['tokens'] / seconds:12,.0f}{memory:8,.0f} MiB")
    plain, untuned = result["tuned over plain JAX"], result["tuned over untuned"]
    memory = result["temporary_bytes"]["tuned"] / result["temporary_bytes"]["plain JAX"]
    print(
        f"\n  On this {result['device']}, ejkernel trains {plain['median']:.2f} times as fast as plain JAX "
        f"(95 % sure: {plain['low']:.2f} to {plain['high']:.2f}) in {100 * memory:.0f} % of its memory;"
    )
    print(f"  {_tuning(untuned, changed=result['changed'])}.")


def _tuning(ratio: dict[str, float], *, changed: bool) -> str:
    spread = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
    if not changed:
        return "tuning kept every configuration: what it guesses is the best that it found here"
    if ratio["low"] > 1:
        return f"of that, tuning brought a factor of {ratio['median']:.2f} ({spread})"
    if ratio["high"] < 1:
        return f"tuning made the program slower, by a factor of {1 / ratio['median']:.2f} ({spread}): please report it"
    return f"whether tuning made the whole program faster, these steps cannot tell (a factor of {spread})"


def losses_agree(losses: dict[str, list[float]]) -> bool:
    """Print how far the losses of the builds are apart, and return whether that is rounding."""
    apart = max(abs(a - b) / abs(b) for name in losses for a, b in zip(losses[name], losses["plain JAX"], strict=True))
    word = "agree" if apart <= TOLERANCE else "DO NOT AGREE"
    first, last = losses["tuned"][0], losses["tuned"][-1]
    print(f"  Losses {word}: {first:.3f} to {last:.3f} nats a byte in {len(losses['tuned'])} steps, {apart:.0e} apart.")
    return apart <= TOLERANCE


def main() -> int:
    """Run the demo; 1 when a part failed or the losses disagree."""
    shutil.rmtree(CACHE, ignore_errors=True)
    try:
        print("== 1. ejkernel tune train:training_step", flush=True)
        child("-m", "ejkernel.cli", "tune", "train:training_step")
        print("\n== 2. Plain JAX, ejkernel untuned, and tuned, taking turns", flush=True)
        result = json.loads(child("compare.py", str(CACHE), capture=True))
    except subprocess.CalledProcessError as error:
        print(f"demo: this part failed with status {error.returncode}: {' '.join(error.cmd)}", file=sys.stderr)
        return 1
    show(result)
    return 0 if losses_agree(result["losses"]) else 1


if __name__ == "__main__":
    sys.exit(main())
