# SPDX-License-Identifier: Apache-2.0
"""The demo's program at the size of a real one, with capped logits and grouped heads, on one accelerator.

    python examples/packed_training/run.py [--turns N]

It tunes the step in this process, and then trains plain JAX, ejkernel untuned and ejkernel tuned in interleaved rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from compare import compare
from demo import losses_agree, show
from train import Model, training_step

from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, PersistentCache, autotune, set_default_executor

MODEL = Model(
    layers=8,
    width=2048,
    heads=16,  # of 128 features each
    groups=8,
    batch=1,
    seq=8192,
    longest=2048,
    vocabulary=50_304,
    dtype=jnp.bfloat16,
    cap=50.0,
)


def main() -> int:
    """Print the table and the conclusions; return 1 if the losses disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=21, help="timed steps of each build (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to tune a call (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="keep the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        policy = AutotunePolicy(budget_s=args.budget)
        set_default_executor(Executor(ConfigSelectorChain(persistent=PersistentCache(cache), policy=policy)))
        step, arguments = training_step(model=MODEL)
        print(autotune(step, *arguments))
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        result = {"jax": jax.__version__, "date": today, **compare(cache, args.turns, MODEL)}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)
    return 0 if losses_agree(result["losses"]) else 1


if __name__ == "__main__":
    sys.exit(main())
