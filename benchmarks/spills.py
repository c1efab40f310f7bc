# SPDX-License-Identifier: Apache-2.0
"""The cost of register spills: every candidate of three of JAX's own GPU kernels, beside the compiler's report.

    ejkernel tune --compile-only --target nvidia_h200 benchmarks.gpu_kernels:program --output BUNDLE
    python -m benchmarks.spills BUNDLE --output FILE

The first command needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import benchmarks.gpu_kernels  # noqa: F401 - the bundle's kernels
from benchmarks.report import environment
from ejkernel.ops import AutotunePolicy
from ejkernel.ops.autotuner.compile.bundles import BundledCall, read_bundle
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.kernel import kernel_of


def measured(call: BundledCall) -> dict[str, Any]:
    """Measure all candidates of a call, those that spill too."""
    inv = rebuild(call.description)
    assert inv.kernel is not None  # it is rebuilt of a kernel
    unknown = tuple(
        candidate
        if candidate.program is None
        else dataclasses.replace(candidate, program=dataclasses.replace(candidate.program, spilled=None))
        for candidate in call.candidates
    )
    data = Autotuner().tune(
        inv, kernel_of(inv), policy=AutotunePolicy(), compiled=dataclasses.replace(call, candidates=unknown)
    )
    rows = [
        {
            "config": str(found.config),
            "spilled": compiled.outcome.spilled,
            "status": found.status,
            "microseconds": None if found.measurement is None else round(found.measurement.median * 1e6, 1),
            "reason": found.reason[:120],
        }
        for compiled, found in zip(call.candidates, data.outcomes, strict=True)
    ]
    return {"operation": inv.op_id, "candidates": sorted(rows, key=lambda row: row["microseconds"] or 1e9)}


def main() -> None:
    """Measure a bundle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    results = [measured(call) for call in read_bundle(options.bundle)]
    for result in results:
        print(result["operation"])
        for row in result["candidates"]:
            print(f"  {row['microseconds'] or '-':>9} us  {row['spilled']!s:>6} B  {row['config']}  {row['reason']}")
    options.output.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
