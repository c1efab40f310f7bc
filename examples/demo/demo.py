# SPDX-License-Identifier: Apache-2.0
"""The whole story in a few minutes: train, tune the very same program, train again, compare.

Each part is a process of its own, so that only what was saved to disk can carry over. The program is not changed.
The untuned program runs a second time at the end: what it differs from itself is what this machine wavers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from run import show

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".demo-cache"
TUNED, EMPTY = CACHE / "tuned", CACHE / "empty"
# Implementations round differently, and every step builds on the last.
TOLERANCE = 0.02


def child(*arguments: str, cache: Path = TUNED, capture: bool = False) -> str:
    """Run this Python with `arguments` beside the demo, with `cache` as its cache folder; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE,
        env=os.environ | {"EJKERNEL_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=True,
    )
    return done.stdout or ""


def train(title: str, cache: Path) -> dict[str, Any]:
    """Train in a fresh process, show the result and return it."""
    print(f"\n== {title}", flush=True)
    result: dict[str, Any] = json.loads(child("run.py", "--json", cache=cache, capture=True))
    show(result)
    return result


def compare(before: dict[str, Any], after: dict[str, Any], again: dict[str, Any]) -> bool:
    """Print the speeds and return whether the losses agree."""
    untuned = [before["ms_per_step"], again["ms_per_step"]]
    apart = max(abs(a - b) / abs(b) for a, b in zip(after["losses"], before["losses"], strict=True))
    agree = apart <= TOLERANCE
    print("\n== Result")
    for name, result in (("untuned", before), ("tuned", after), ("untuned again", again)):
        print(f"  {name:14}{result['ms_per_step']:9.1f} ms a step {result['tokens_per_s']:12,.0f} tokens/s")
    print(f"  tuned is {sum(untuned) / 2 / after['ms_per_step']:.2f} times as fast as untuned (mean of both runs);")
    print(f"  the two untuned runs are a factor of {max(untuned) / min(untuned):.2f} apart")
    if before["calls"] == after["calls"]:
        print("  tuning kept every configuration, so a difference in speed is this machine's unrest")
    word = "agree" if agree else "DO NOT AGREE"
    print(f"  losses {word}: at most {apart:.1e} apart, relative to their size ({TOLERANCE} allowed)")
    return agree


def main() -> int:
    """Run the demo; 1 when a part failed or the losses disagree."""
    shutil.rmtree(CACHE, ignore_errors=True)
    try:
        before = train("1. Training, with what the library guesses", EMPTY)
        print("\n== 2. ejkernel tune train:training_step", flush=True)
        child("-m", "ejkernel.cli", "tune", "train:training_step")
        after = train("3. The same program again, with what was measured", TUNED)
        again = train("4. And once more without it, for the noise of this machine", EMPTY)
    except subprocess.CalledProcessError as error:
        print(f"demo: this part failed with status {error.returncode}: {' '.join(error.cmd)}", file=sys.stderr)
        return 1
    return 0 if compare(before, after, again) else 1


if __name__ == "__main__":
    sys.exit(main())
