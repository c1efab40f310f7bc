# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.norms_tpu`: normalisations on TPUs in simulated cycles; needs `jax[tpu]`, but no TPU.

Google's compiler for TPUs estimates the cycles of each kernel and fusion that it compiles. Nothing runs on a TPU, and
ratios below 1.1 are within the simulator's error.

By default a program is a normalisation alone, and a figure the sum of its kernels. The rows are too many for XLA to
keep them in vector memory. The simulator does not limit the bandwidth of memory: the least cycles in which a chip can
read and write each array once, in the column `memory`, may exceed a figure. The ratio counts at least these.

With `--projection`, a program adds a residual, normalises the sum, and multiplies the result with a matrix, as a layer
of a transformer begins; or it computes this and its gradients. XLA may fuse its normalisation with the product. A
figure is the time of the whole schedule, with copies beside the kernels. A kernel takes at least the cycles in which
the chip reads and writes its arrays in HBM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel.ops.autotuner.compile import simulation
from ejkernel.ops.autotuner.compile.schedules import cycles_of

CHIPS = ("v5e", "v6e")
ROWS, DIM = 16_384, 4096
SHAPES = ((4096, 2048, 2048), (16_384, 2048, 512), (4096, 8192, 512))  # rows and columns, and those of the product
IMPLEMENTATIONS = ("xla", "pallas")
# Bytes per cycle: 819 and 1,640 GB/s at 1.5 and 1.75 GHz.
BANDWIDTH = {"v5e": 546, "v6e": 937}
# Arrays that a program reads or writes at least once.
ARRAYS = {"forward": 2, "forward, residual": 4, "gradient": 3, "gradient, residual": 5}
OPERATIONS = ("rms_norm", "layer_norm")
PROGRAMS = ("forward", "forward, residual", "gradient", "gradient, residual")
_TYPED = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) [a-z][a-z\-]*\((.*?)\)", re.MULTILINE)
_ARRAY = re.compile(r"[a-z]+(\d+)\w*\[([\d,]+)\](\{[^}]*\})?")


def cycles(lowered: Any, folder: Path) -> int:
    """Compile a program, and return the cycles of its kernels and fusions."""
    simulation.compiled_and_simulated(lowered, folder)
    found = simulation.profiles(folder)
    if not found or min(found.values()) < 0:
        raise ValueError(f"no estimate among {len(found)} profiles")
    return sum(found.values())


def scheduled_cycles(lowered: Any, folder: Path, bytes_per_cycle: float) -> int:
    """Compile a program, and return the cycles of its schedule, whose kernels take at least the time for their HBM."""
    text = str(simulation.compiled_and_simulated(lowered, folder).as_text())
    least = {name: size / bytes_per_cycle for name, size in bytes_in_hbm(text)}
    kernels = {name: round(max(own, least.get(name, 0))) for name, own in simulation.profiles(folder).items()}
    return round(cycles_of(text, kernels, bytes_per_cycle))


def bytes_in_hbm(text: str) -> Iterator[tuple[str, int]]:
    """Yield the bytes of operands and results in HBM of each instruction of a compiled program."""
    found = {name: (types, re.findall(r"%([\w.\-]+)", operands)) for name, types, operands in _TYPED.findall(text)}
    for name, (types, operands) in found.items():
        every = [types, *(found[operand][0] for operand in operands if operand in found)]
        yield name, sum(map(_hbm_of, every))


def _hbm_of(types: str) -> int:
    """Return the bytes of the arrays of a type that are in HBM; the layouts of others name their memory."""
    arrays = ((int(bits), dims, layout) for bits, dims, layout in _ARRAY.findall(types) if "S(" not in layout)
    return sum(bits * math.prod(map(int, dims.split(","))) // 8 for bits, dims, _ in arrays)


def lowered(chip: str, operation: str, program: str, implementation: str) -> Any:
    """Return a program that normalises rows, or differentiates that with its forward's statistics computed, too."""
    from ejkernel import modules

    rows, vector = _types(chip, (ROWS, DIM), (DIM,))
    vectors = (vector,) * (1 + (operation == "layer_norm"))
    has_residual = program.endswith("residual")
    args = (rows, *vectors, *((rows,) if has_residual else ()))
    function = getattr(modules, operation)

    def run(rows: Any, *more: Any) -> Any:
        vectors, residual = more[: len(args) - 1 - has_residual], more[-1] if has_residual else None
        return function(rows, *vectors, residual=residual, implementation=implementation)

    return _lowered(run, args, (rows, rows) if has_residual else rows, program)


def lowered_projection(case: Mapping[str, Any], implementation: str) -> Any:
    """Return a program that adds a residual, normalises the sum and multiplies it with a matrix, or differentiates."""
    import jax.numpy as jnp

    from ejkernel import modules

    rows, dim, projected = case["rows"], case["columns"], case["projected"]
    shapes = (rows, dim), (dim, projected), (rows, projected), (dim,)
    x, matrix, out, vector = _types(case["chip"], *shapes)
    function = getattr(modules, case["operation"])

    def run(x: Any, residual: Any, matrix: Any, *vectors: Any) -> Any:
        normalised, added = function(x, *vectors, residual=residual, implementation=implementation)
        return added, jnp.dot(normalised, matrix)

    vectors = (vector,) * (1 + (case["operation"] == "layer_norm"))
    return _lowered(run, (x, x, matrix, *vectors), (x, out), case["program"])


def _types(chip: str, *shapes: tuple[int, ...]) -> list[Any]:
    import jax
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    return [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding) for shape in shapes]


def _lowered(run: Callable[..., Any], args: tuple[Any, ...], cotangents: Any, program: str) -> Any:
    import jax

    if program.startswith("forward"):
        return jax.jit(run).lower(*args)
    return jax.jit(lambda cotangents, *args: jax.vjp(run, *args)[1](cotangents)).lower(cotangents, *args)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all cases, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a JSON file to which results are added; a table goes beside it")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--projection", action="store_true", help="programs with a residual and a product")
    given = parser.parse_args(arguments)
    results = json.loads(given.out.read_text())["results"] if given.out and given.out.exists() else []
    with tempfile.TemporaryDirectory() as name:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={name}"  # read when libtpu is loaded
        for case in _projections(given.chips) if given.projection else _alone(given.chips):
            if any(case.items() <= one.items() for one in results):
                continue
            results.append(case | (_compared_projection if given.projection else _compared)(case, Path(name)))
            print(json.dumps(results[-1]), flush=True)
            if given.out:
                _write(given.out, results)


def _alone(chips: Sequence[str]) -> Iterator[dict[str, Any]]:
    for chip, operation, program in itertools.product(chips, OPERATIONS, PROGRAMS):
        yield {"chip": chip, "operation": operation, "program": program}


def _projections(chips: Sequence[str]) -> Iterator[dict[str, Any]]:
    programs = itertools.product(SHAPES, chips, OPERATIONS, ("forward", "gradient"))
    for (rows, columns, projected), chip, operation, program in programs:
        sizes = {"rows": rows, "columns": columns, "projected": projected}
        yield {"chip": chip, "operation": operation, "program": program, **sizes}


def _compared(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: cycles(lowered(**case, implementation=name), folder) for name in IMPLEMENTATIONS}
    memory = ARRAYS[case["program"]] * ROWS * DIM * 2 // BANDWIDTH[case["chip"]]
    return found | {
        "memory": memory,
        "xla / pallas": round(max(found["xla"], memory) / max(found["pallas"], memory), 2),
    }


def _compared_projection(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    rate = BANDWIDTH[case["chip"]]
    found: dict[str, Any] = {
        name: scheduled_cycles(lowered_projection(case, name), folder, rate) for name in IMPLEMENTATIONS
    }
    return found | {"xla / pallas": round(found["xla"] / found["pallas"], 2)}


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    from benchmarks.attention_tpu import versions

    programs = "a residual, a normalisation and a product" if "rows" in results[0] else f"bf16[{ROWS},{DIM}]"
    what = f"simulated cycles of programs on {programs}; nothing ran on a TPU"
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
