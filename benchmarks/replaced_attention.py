# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.replaced_attention`: the steps of two examples, before and after their attention is replaced.

The examples are `examples/gemma` and `examples/triangle_attention`, untuned. Time is the median of interleaved runs,
memory that of temporaries, as XLA plans it. Needs the extra `examples`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.attention_cpu import side_by_side

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def gemma(seq: int) -> dict[str, Step]:
    """Return the training step of the example for each form of its attention."""
    module: Any = _example("gemma")
    return {"before": module.training_step(module.Attention, seq=seq), "after": module.training_step(seq=seq)}


def triangle(residues: int) -> dict[str, Step]:
    """Return the step of the example for each form of its attention."""
    module: Any = _example("triangle_attention")
    plain = module.training_step(module.plain_attention, residues=residues)
    return {"before": plain, "after": module.training_step(residues=residues)}


CASES = {
    "Gemma, 1,024 tokens": functools.partial(gemma, 1024),
    "Gemma, 2,048 tokens": functools.partial(gemma, 2048),
    "triangle attention, 128 residues": functools.partial(triangle, 128),
    "triangle attention, 256 residues": functools.partial(triangle, 256),
}


def _example(name: str) -> Any:
    sys.path.insert(0, str(EXAMPLES / name))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def measured(steps: dict[str, Step]) -> dict[str, Any]:
    """Return milliseconds and MiB of a step before and after, and the difference of the results."""
    programs = {name: step.lower(*args).compile() for name, (step, args) in steps.items()}  # type: ignore[attr-defined]
    return side_by_side({name: (programs[name], steps[name][1]) for name in ("after", "before")})


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    where = f"{found['device']}, load {found['load']}; JAX {found['jax']}, {found['date']}"
    lines = [
        f"A training step with its gradients, float32, untuned. {where}.",
        "",
        "| step | before, ms | after, ms | before / after | MiB before | MiB after |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        times, memory = row["ms"], row["temporary_mib"]
        cells = (times["before"], times["after"], f"{row['ratio']}x", memory["before"], memory["after"])
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure all cases, print a table, and write JSON and Markdown with `--out`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, help="a folder for replaced_attention_<platform>.json and .md")
    given = options.parse_args()
    found = {**report.environment(), "rows": {name: measured(case()) for name, case in CASES.items()}}
    text = table(found)
    sys.stdout.write(text)
    if given.out:
        name = f"replaced_attention_{report.platform_name()}"
        (given.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (given.out / f"{name}.md").write_text(f"# Replaced attention\n\n{text}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
