# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: measure the overhead of the library and print it; `--out` also saves it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import dispatch, distinct, import_time, report, traced


def measure(rounds: int, build_rounds: int) -> dict[str, Any]:
    """Return the result of all benchmarks, ready for JSON."""
    run: dict[str, Any] = {"environment": report.environment(), "import_time": import_time.measure()}
    run["eager"] = {name: timing.data() for name, timing in dispatch.eager_calls(rounds).items()}
    run["modules"] = {
        module: {name: timing.data() for name, timing in timings.items()}
        for module, timings in dispatch.module_calls(rounds).items()
    }
    run["forms"] = {
        form: {name: timing.data() for name, timing in timings.items()}
        for form, timings in dispatch.call_forms(rounds).items()
    }
    run["distinct"] = {
        form: {name: timing.data() for name, timing in timings.items()}
        for form, timings in distinct.distinct_calls(build_rounds).items()
    }
    run["growth_ms"] = distinct.growth()
    run["differing_programs"] = traced.differing_programs()
    run["build"] = {}
    for equal in (True, False):
        for gradient in (False, True):
            costs = traced.build_costs(build_rounds, equal=equal, gradient=gradient)
            kind = f"{'equal' if equal else 'different'} layers, {'gradient' if gradient else 'forward'}"
            for step, timings in costs.items():
                run["build"][f"{kind}, {step}"] = {name: timing.data() for name, timing in timings.items()}
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 if all bars are met, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="slices of each eager call")
    parser.add_argument("--build-rounds", type=int, default=7, help="programs to trace and compile")
    parser.add_argument("--out", type=Path, metavar="DIR", help="add the run to dispatch_<platform>.json and .md there")
    args = parser.parse_args(argv)
    run = measure(args.rounds, args.build_rounds)
    print(report.run_text(run))
    if args.out is not None:
        name = f"dispatch_{report.platform_name()}"
        kept = args.out / f"{name}.json"
        found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        found[run["environment"]["jax"]] = run  # one run for each version of JAX, the latest
        report.write(args.out, name, found, report.runs(dict(sorted(found.items()))))
    met = (
        all(forms["ejkernel"]["ratio"] <= report.bar_of(form) for form, forms in run["forms"].items())
        and all(run["distinct"][form]["ejkernel"]["ratio"] <= report.BARS["distinct"] for form in report.USUAL)
        and run["import_time"]["minimum_ms"] <= report.BARS["import_ms"]
        and run["import_time"]["initialises_no_device"]
        and not run["differing_programs"]
    )
    print(f"\nbars: {'met' if met else 'NOT MET'}", file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
