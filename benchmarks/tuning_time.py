# SPDX-License-Identifier: Apache-2.0
"""How long tuning takes on a GPU: JAX's own attention with 17 candidates, from call to result.

    python -m benchmarks.tuning_time [--bundle FOLDER] --output FILE

Each figure is of a fresh process. `--bundle` measures candidates that `ejkernel tune --compile-only` compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import environment


def once(bundle: Path | None, isolate: bool, processes: int) -> dict[str, object]:
    """Tune in this process, and return time and result."""
    import jax
    import jax.numpy as jnp

    from benchmarks.attention_mgpu import SHAPE, mgpu_attention
    from ejkernel.ops import AutotunePolicy, Invocation
    from ejkernel.ops.autotuner.compile.bundles import read_bundle
    from ejkernel.ops.autotuner.tuner import Autotuner

    jax.block_until_ready(jnp.ones(8) + 1)  # the device is up before the clock starts
    array = jax.ShapeDtypeStruct(SHAPE, jnp.float16)
    inv = Invocation(kernel=mgpu_attention, args=(array, array, array))
    policy = AutotunePolicy(isolate=isolate, compile_processes=processes)
    start = time.perf_counter()
    compiled = None if bundle is None else read_bundle(bundle)[0]
    data = Autotuner().tune(inv, mgpu_attention, policy=policy, compiled=compiled)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 3),
        "config": str(data.config),
        "microseconds": round(data.winner.measurement.median * 1e6, 1) if data.winner.measurement else None,
        "speedup": data.speedup,
        "checked": data.checked,
        "method": data.winner.measurement.method if data.winner.measurement else None,
        "outcomes": [[str(o.config), o.status, o.reason[:120]] for o in data.outcomes],
    }


def main() -> None:
    """Measure each way in separate processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--isolate", action="store_true")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes for each way")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.bundle, options.isolate, options.processes)))
        return
    cores = str(os.cpu_count())
    ways: dict[str, list[str]] = {
        "compiled in threads": [],
        "compiled in processes": ["--processes", cores],
        "compiled in processes, measured in a worker": ["--processes", cores, "--isolate"],
    }
    if options.bundle is not None:
        ways["compiled before"] = ["--bundle", str(options.bundle)]
    results = {name: [_fresh(arguments) for _ in range(options.repeats)] for name, arguments in ways.items()}
    for name, runs in results.items():
        print(f"{name}: {[run['seconds'] for run in runs]} s, {runs[0]['config']}, {runs[0]['microseconds']} us")
    if options.output is not None:
        found = {"environment": environment(), "results": results}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def _fresh(arguments: list[str]) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.tuning_time", "--once", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
