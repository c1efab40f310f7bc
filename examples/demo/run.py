# SPDX-License-Identifier: Apache-2.0
"""Train for a few steps; print the losses, the speed and the configuration that each ejkernel call ran with."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from train import batch_of, default_model, training_step

from ejkernel.ops import default_executor, labels_to_configs

WARM_UP = 2  # the first executions fault in memory and fill caches


def configurations(lowered: jax.stages.Lowered) -> list[dict[str, str | None]]:
    """Return one entry for each distinct ejkernel call of the program, in order of first appearance."""
    pairs = labels_to_configs(lowered, default_executor().chooser)
    return [{"label": label, "config": None if config is None else repr(config)} for label, config in pairs]


def train(steps: int) -> dict[str, Any]:
    """Run `steps` timed steps after the warm-up and return what was seen, ready for JSON."""
    model = default_model()
    function, (state, batch) = training_step()
    lowered = function.lower(state, batch)
    compiled = lowered.compile()
    losses, seconds = [], []
    for index in range(WARM_UP + steps):
        batch = jax.block_until_ready(batch_of(model, index))
        start = time.perf_counter()
        state, loss = jax.block_until_ready(compiled(state, batch))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    median = statistics.median(seconds[WARM_UP:])
    return {
        "device": jax.devices()[0].device_kind,
        "steps": steps,
        "losses": losses,
        "ms_per_step": 1e3 * median,
        "ms_fastest": 1e3 * min(seconds[WARM_UP:]),
        "tokens_per_s": model.tokens / median,
        "calls": configurations(lowered),
    }


def show(result: dict[str, Any]) -> None:
    """Print `result` for a person."""
    print(f"  device        {result['device']}")
    print(f"  loss          {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f} nats a byte")
    print(f"  step          {result['ms_per_step']:.1f} ms (median of {result['steps']})")
    print(f"  speed         {result['tokens_per_s']:,.0f} tokens/s")
    for call in result["calls"]:
        print(f"  {call['label']}\n      {call['config'] or 'no configuration remembered'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    result = train(args.steps)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
