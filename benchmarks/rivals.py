# SPDX-License-Identifier: Apache-2.0
"""Eager calls of comparable libraries, each in a separate environment, beside plain `jax.jit` there.

`python -m benchmarks.rivals --make-envs DIR` makes the environments (once) and measures; `--out DIR` stores the result.
The distribution `ejkernel` on PyPI is an earlier system with that name, not this library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RIVALS = {"ejkernel": "ejkernel==0.0.80.3", "tokamax": "tokamax==0.0.12"}


def make_environment(folder: Path, requirement: str) -> Path:
    """Return the Python of a virtual environment with `requirement` and the JAX that it asks for."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-qq", requirement], check=True)
    return python


def measure(python: Path, name: str, rounds: int) -> dict[str, Any]:
    """Return the output of the rival's probe, run by its own Python."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), "-m", f"benchmarks.rival_{name}", str(rounds)]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rivals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-envs", type=Path, required=True, metavar="DIR", help="where the environments are")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write rivals_<platform>.json and .md there")
    args = parser.parse_args(argv)
    from benchmarks import report  # imports nothing of ours: JAX alone

    found = {}
    for name, requirement in RIVALS.items():
        python = make_environment(args.make_envs.resolve() / name, requirement)
        found[requirement] = measure(python, name, args.rounds)
    text = report.rivals(found)
    print(text)
    if args.out is not None:
        report.write(args.out, f"rivals_{report.platform_name()}", found, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
