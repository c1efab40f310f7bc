# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.norms_tpu`: normalisations on TPUs in simulated cycles; needs `jax[tpu]`, but no TPU.

Google's compiler for TPUs estimates the cycles of each kernel and fusion that it compiles; a figure is their sum for
one program. Nothing runs on a TPU, and ratios below 1.1 are within the simulator's error. The rows are too many for
XLA to keep them in vector memory. The simulator does not limit the bandwidth of memory: the least cycles in which a
chip can read and write each array once, in the column `memory`, may exceed a figure. The ratio counts at least these.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHIPS = ("v5e", "v6e")
ROWS, DIM = 16_384, 4096
IMPLEMENTATIONS = ("xla", "pallas")
# Bytes per cycle: 819 and 1,640 GB/s at 1.5 and 1.75 GHz.
BANDWIDTH = {"v5e": 546, "v6e": 937}
# Arrays that a program reads or writes at least once.
ARRAYS = {"forward": 2, "forward, residual": 4, "gradient": 3, "gradient, residual": 5}
OPERATIONS = ("rms_norm", "layer_norm")
PROGRAMS = ("forward", "forward, residual", "gradient", "gradient, residual")


def cycles(lowered: Any, folder: Path) -> int:
    """Compile a program, and return the cycles of its kernels and fusions."""
    for file in folder.iterdir():
        file.unlink()
    lowered.compile()
    profiles = [file.read_text(encoding="utf-8") for file in folder.glob("*.textproto")]
    found = [int(x) for profile in profiles for x in re.findall(r"estimated_cycles: (-?\d+)", profile)[:1]]
    if not found or min(found) < 0:
        raise ValueError(f"no estimate among {len(profiles)} profiles")
    return sum(found)


def lowered(chip: str, operation: str, program: str, implementation: str) -> Any:
    """Return a program that normalises rows, or differentiates that with its forward's statistics computed, too."""
    import jax
    from jax.experimental import topologies

    from ejkernel import modules

    device = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2").devices[0]
    like: Any = functools.partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
    rows, vector = like((ROWS, DIM), "bfloat16"), like((DIM,), "bfloat16")
    vectors = (vector,) * (1 + (operation == "layer_norm"))
    has_residual = program.endswith("residual")
    args = (rows, *vectors, *((rows,) if has_residual else ()))
    function = getattr(modules, operation)

    def run(rows: Any, *more: Any) -> Any:
        vectors, residual = more[: len(args) - 1 - has_residual], more[-1] if has_residual else None
        return function(rows, *vectors, residual=residual, implementation=implementation)

    if program.startswith("forward"):
        return jax.jit(run).lower(*args)
    cotangents = (rows, rows) if has_residual else rows
    return jax.jit(lambda cotangents, *args: jax.vjp(run, *args)[1](cotangents)).lower(cotangents, *args)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all cases, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a JSON file to which results are added; a table goes beside it")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    given = parser.parse_args(arguments)
    results = json.loads(given.out.read_text())["results"] if given.out and given.out.exists() else []
    with tempfile.TemporaryDirectory() as name:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={name}"  # read when libtpu is loaded
        for chip, operation, program in itertools.product(given.chips, OPERATIONS, PROGRAMS):
            case: dict[str, Any] = {"chip": chip, "operation": operation, "program": program}
            if any(case.items() <= one.items() for one in results):
                continue
            for implementation in IMPLEMENTATIONS:
                case[implementation] = cycles(lowered(chip, operation, program, implementation), Path(name))
            memory = ARRAYS[program] * ROWS * DIM * 2 // BANDWIDTH[chip]
            ratio = round(max(case["xla"], memory) / max(case["pallas"], memory), 2)
            results.append(case | {"memory": memory, "xla / pallas": ratio})
            print(json.dumps(results[-1]), flush=True)
            if given.out:
                _write(given.out, results)


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    from benchmarks.attention_tpu import versions

    what = f"simulated cycles of programs on bf16[{ROWS},{DIM}]; nothing ran on a TPU"
    lines = ",\n".join(f"    {json.dumps(one)}" for one in results)
    head = f'{{\n  "what": "{what}",\n  "versions": {json.dumps(versions())},\n  "results": [\n'
    out.write_text(f"{head}{lines}\n  ]\n}}\n")
    names = list(results[0])
    rows = [
        names,
        ["---"] * len(names),
        *([format(x, ",") if isinstance(x, int) else x for x in r.values()] for r in results),
    ]
    table = "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
    out.with_suffix(".md").write_text(
        f"# Normalisations on TPUs, simulated\n\n{what}; ratios below 1.1 are within the simulator's error. "
        f"{json.dumps(versions())}\n\n{table}\n"
    )


if __name__ == "__main__":
    main()
