# SPDX-License-Identifier: Apache-2.0
"""Do two searches find the same winner? One call is tuned many times on the GPU, from compiled candidates.

    python -m benchmarks.repeatability --bundle FOLDER --output FILE

`ejkernel tune --compile-only` makes the bundle from `benchmarks.attention_mgpu:program`. Two searches agree if
they name the same configuration, or two whose times, pooled over all searches, are within 2 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter, defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_mgpu import SHAPE, mgpu_attention
from benchmarks.report import environment
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.compile.bundles import read_bundle
from ejkernel.ops.autotuner.tuner import Autotuner

_NEAR = 1.02


def main() -> None:
    """Tune over and over, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    array = jax.ShapeDtypeStruct(SHAPE, jnp.float16)
    inv = Invocation(kernel=mgpu_attention, args=(array, array, array))
    (compiled,) = read_bundle(options.bundle)
    winners, seconds = [], []
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for seed in range(options.repeats):
        start = time.perf_counter()
        data = Autotuner(seed=1000 * seed).tune(inv, mgpu_attention, compiled=compiled)
        seconds.append(time.perf_counter() - start)
        winners.append(str(data.config))
        for outcome in data.outcomes:
            if outcome.measurement is not None:
                samples[str(outcome.config)] += outcome.measurement.samples
    pooled = {config: float(np.median(values)) for config, values in samples.items()}
    pairs = list(itertools.combinations(winners, 2))
    agree = sum(max(pooled[a], pooled[b]) <= _NEAR * min(pooled[a], pooled[b]) for a, b in pairs)
    found = {
        "environment": environment(),
        "winners": dict(Counter(winners)),
        "pooled_microseconds": {config: round(value * 1e6, 2) for config, value in sorted(pooled.items())},
        "pairs": len(pairs),
        "agreeing": agree,
        "share": agree / len(pairs),
        "seconds_median": round(float(np.median(seconds)), 2),
    }
    print(json.dumps(found, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
