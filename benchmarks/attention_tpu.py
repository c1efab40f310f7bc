# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention_tpu`: attention on TPUs in simulated cycles; needs `jax[tpu]`, but no TPU.

Google's compiler for TPUs estimates the cycles of each kernel that it compiles. Nothing runs on a TPU. A figure is the
cycles of one query head: those of three heads, minus those of one, halved, which leaves out the first copies. Each
configuration is simulated with three heads, and the best of each kernel and case with one, too; `<` marks a third of
the cycles of three heads. XLA's operations beside the kernels are not counted. Ratios below 1.1 are within the
simulator's error.

The simulator knows no scalar that a kernel reads from memory, so splash attention is simulated without its tables. With
a mask, its figure is a proxy in its favour: all blocks, masked by a function as in the kernel, times the share of
blocks that it would run, as if skipped steps took no time. Flash attention has no windows, and as many key heads as
query heads. On v5p a figure is for one of the two cores.

A process simulates one configuration after the other; if the simulator aborts, the configuration counts as failed, and
another process goes on. `benchmarks.attention_tpu_cases` lists the cases.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.apart import AnsweringProcess
from benchmarks.attention_tpu_cases import SWEEPS, cases

MASKS: dict[str, dict[str, int]] = {"full": {}, "causal": {"right": 0}}
MASKS |= {f"window {keys}": {"left": keys - 1, "right": 0} for keys in (512, 1024, 2048)}
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
_MEMORY = {"v5e": 96, "v6e": 96, "v5p": 48}  # MiB of vector memory for the kernels that JAX ships
# Variables of a process that compiles for an absent TPU.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
_SHOWN = ("chip", "direction", "mask", "dtype", "head_dim", "repeats", "kernel")


# --- in the process that simulates ---


def cycles(case: dict[str, Any], groups: int, folder: Path) -> float:
    """Return the simulated cycles of some key heads and their query heads."""
    chip = None if case["kernel"] == "pallas_tpu" else case["chip"]  # our kernels state their own limit
    found: float = kernel_cycles(_lowered(case, groups), chip, folder)
    return found * (_visible_share(case) if case["kernel"] == "splash" else 1)


def _visible_share(case: dict[str, Any]) -> float:
    """Return the share of blocks that have a visible pair."""
    window, rows, columns = MASKS[case["mask"]], case["params"]["block_q"], case["params"]["block_kv"]
    found = [
        start <= first + rows - 1 + window.get("right", case["length"])
        and start + columns - 1 >= first - window.get("left", case["length"])
        for first in range(0, case["length"], rows)
        for start in range(0, case["length"], columns)
    ]
    return float(np.mean(found))


def kernel_cycles(lowered: Any, chip: str | None, folder: Path) -> int:
    """Compile a program, and return the cycles of its kernels, which may use most of the vector memory of `chip`."""
    from ejkernel.ops.autotuner.compile.simulation import compiled_and_simulated

    options = {} if chip is None else {"xla_tpu_scoped_vmem_limit_kib": str(_MEMORY[chip] << 10)}
    text = compiled_and_simulated(lowered, folder, **options).as_text()
    kernels = set(re.findall(r"%([\w.\-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"", text))
    found = {}
    for file in folder.glob("*.textproto"):
        profile = file.read_text(encoding="utf-8")
        name, cycles = (re.search(rf"{key}: \"?(.*?)\"?\n", profile) for key in ("hlo_op_name", "estimated_cycles"))
        if name and cycles and name[1].lstrip("%") in kernels:
            found[name[1]] = int(cycles[1])
    if not found or min(found.values()) <= 0:
        raise ValueError(f"no estimate for {sorted(kernels)}")
    return sum(found.values())


def _lowered(case: dict[str, Any], groups: int) -> Any:
    import jax

    from ejkernel.kernels.flash_attention.common import Operands

    like: Any = functools.partial(jax.ShapeDtypeStruct, sharding=sharding(case["chip"]))
    heads, length, dim = groups * case["repeats"], case["length"], case["head_dim"]
    dtype = case.get("dtype", "bfloat16")
    lse = like((1, heads, length), "float32")
    if case["kernel"] == "pallas_tpu":
        query, key = (like((1, length, count, dim), dtype) for count in (heads, groups))
        run, operands = _ours(case), Operands(query, key, key)
        return jax.jit(run).lower(*((operands,) if case["direction"] == "forward" else (operands, (query, lse), query)))
    query, key = (like((1, count, length, dim), dtype) for count in (heads, groups))
    forward, backward = _flash(case) if case["kernel"] == "flash" else _splash(case)
    if case["direction"] == "forward":
        return jax.jit(forward).lower(query, key, key)
    return jax.jit(backward).lower(query, key, key, lse, query, lse)


@functools.cache
def sharding(chip: str) -> Any:
    """Return the placement on one device of a chip."""
    import jax
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu

    if chip == "v5p":
        # each core would take a half of a "parallel" axis, and the simulator shows the first core
        made: Any = pltpu.CompilerParams

        def on_one_core(*, dimension_semantics: Any = None, **more: Any) -> Any:
            return made(dimension_semantics=dimension_semantics and ("arbitrary",) * len(dimension_semantics), **more)

        setattr(pltpu, "CompilerParams", on_one_core)  # noqa: B010 - the type of a module's class is fixed
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def rules_of(case: dict[str, Any]) -> Any:
    """Return the static options of a case."""
    from ejkernel.kernels.flash_attention.common import Rules

    window, soft_cap = MASKS[case["mask"]], case.get("soft_cap")
    return Rules(scale=case["head_dim"] ** -0.5, left=window.get("left"), right=window.get("right"), soft_cap=soft_cap)


def _ours(case: dict[str, Any]) -> Callable[..., Any]:
    from ejkernel.kernels.flash_attention.pallas_tpu import launch
    from ejkernel.kernels.flash_attention.pallas_tpu.params import BackwardParams, ForwardParams

    rules, sizes = rules_of(case).at_lengths(case["length"], case["length"]), dict(case["params"])
    if case["direction"] == "forward":
        params = ForwardParams(**sizes)
        return lambda operands: launch.forward(operands, rules, params, with_lse=False)[0]
    if sizes.get("query") is not None:
        sizes["query"] = ForwardParams(**sizes["query"])
    backward = BackwardParams(**sizes)
    return lambda operands, residuals, dout: launch.backward(operands, residuals, dout, rules, backward)[:3]


def _flash(case: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return JAX's flash attention: forward, and both kernels of the backward with the same blocks."""
    from jax.experimental.pallas.ops.tpu import flash_attention as module

    flash: Any = module
    causal, blocks = case["mask"] == "causal", case["params"]
    common = {"sm_scale": 1.0, "causal": causal, "debug": False}

    def forward(query: Any, key: Any, value: Any) -> Any:
        return flash._flash_attention_impl(
            query, key, value, None, None, False, causal, 1.0, 1, *blocks.values(), debug=False
        )

    def backward(query: Any, key: Any, value: Any, lse: Any, dout: Any, delta: Any) -> Any:
        given = (query, key, value, None, None, lse, lse, dout, delta)
        own = {"block_k_major": blocks["block_k_major"], "block_k": blocks["block_k"]}
        q, masked = blocks["block_q"], {"mask_value": flash.DEFAULT_MASK_VALUE}
        keys = flash._flash_attention_bwd_dkv(*given, block_q_major=q, block_q=q, **own, **common, **masked)
        return keys, flash._flash_attention_bwd_dq(*given, block_q_major=q, **own, **common, **masked)[0]

    return forward, backward


def _splash(case: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return splash attention without tables, all blocks masked by a function: forward and fused backward."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as module
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

    splash: Any = module
    blocks, window = case["params"], MASKS[case["mask"]]

    def visible(query: Any, key: Any) -> Any:
        found = key <= query + window["right"]
        return found & (key >= query - window["left"]) if "left" in window else found

    rows = np.arange(case["length"], dtype=np.int32) if window else None
    common = {"mask_value": splash.DEFAULT_MASK_VALUE, "is_mqa": False, "interpret": False}
    common |= {"attn_logits_soft_cap": case.get("soft_cap"), "mask_function": visible if window else None}
    mask = masks.MaskInfo(None, None, None, None, rows)

    def forward(*arrays: Any) -> Any:
        sizes = splash.BlockSizes(**blocks)
        more = {"block_sizes": sizes, "residual_checkpoint_name": None, "save_residuals": False}
        return splash._splash_attention_forward(mask, *(x[0] for x in arrays), None, None, **more, **common)

    def backward(query: Any, key: Any, value: Any, *rows: Any) -> Any:
        layouts = {f"{name}_layout": splash.QKVLayout.HEAD_DIM_MINOR for name in "qkv"}
        sizes = {"bq": blocks["block_q"], "bkv": blocks["block_kv"], "bkv_compute": blocks["block_kv_compute"]}
        arrays = [x[0] for x in (query, key, value)]
        rows = tuple(x[0] for x in rows)
        more = {"use_fused_bwd_kernel": True, "mask_info": mask, **sizes, **layouts}
        return splash._splash_attention_bwd_dkv(*arrays, None, None, *rows, **more, **common)

    return forward, backward


def simulate(cycles: Callable[[dict[str, Any], int, Path], float] = cycles) -> None:
    """Read cases from standard input, one JSON object a line, and write their cycles or an error to standard output."""
    folder = Path(os.environ["LIBTPU_INIT_ARGS"].partition("=")[2])
    for line in sys.stdin:
        case, groups = json.loads(line)
        try:
            answer: dict[str, Any] = {"cycles": cycles(case, groups, folder)}
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is the answer
            answer = {"error": " ".join(str(error).split())[:600]}
        print(json.dumps(answer), flush=True)


# --- in the caller ---


class Simulator:
    """A process that simulates; another one takes its place if it ends.

    Args:
        module: The module of this package that simulates.
        seconds: The time limit of a program: some take gigabytes and hours.
    """

    def __init__(self, module: str = "attention_tpu", seconds: float = 1200.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        profiles = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={self._folder.name}"}
        variables = ENVIRONMENT | profiles
        self._process = AnsweringProcess(module, "--simulate", variables, seconds, "the simulator")

    def __call__(self, case: dict[str, Any], groups: int) -> dict[str, Any]:
        """Return the cycles of some key heads and their query heads, or an error."""
        return self._process([case, groups])

    def end(self) -> None:
        """End the process; the next case starts a new process."""
        self._process.end()

    def close(self) -> None:
        """End the process, and remove its files."""
        self.end()
        self._folder.cleanup()


def add(group: Sequence[dict[str, Any]], kept: list[dict[str, Any]], simulator: Simulator) -> None:
    """Add the configurations of one kernel and case, each with the cycles of three key heads or an error."""
    for case in group:
        if any(case.items() <= one.items() for one in kept):
            continue
        found = simulator(case, 3)
        kept.append(case | {"three_heads" if name == "cycles" else name: value for name, value in found.items()})
        print(json.dumps(kept[-1]), flush=True)
    simulator.end()  # the compiler keeps gigabytes of finished programs


def finish(group: Sequence[dict[str, Any]], kept: list[dict[str, Any]], simulator: Simulator) -> None:
    """Add the cycles of one query head to the best configuration of one kernel and case."""
    results = [one for one in kept if any(case.items() <= one.items() for case in group) and "three_heads" in one]
    best = min(results, key=lambda one: float(one["three_heads"]), default=None)
    if best is not None and "cycles" not in best:
        found = simulator(group[0] | {"params": best["params"]}, 1)
        if "cycles" in found:
            best["cycles"] = (best["three_heads"] - found["cycles"]) / 2 / best["repeats"]
        print(json.dumps(best), flush=True)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the best configuration of each kernel and case, as a Markdown table."""
    lines = [
        "| chip | direction | mask | dtype | head_dim | query heads per key head | kernel | simulated cycles per head "
        "| configurations | the best |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(({"dtype": "bfloat16"} | one for one in results), key=lambda one: [str(one[n]) for n in _SHOWN])
    for group, found in itertools.groupby(ordered, key=lambda one: [one[name] for name in _SHOWN]):
        several = list(found)
        if all("error" in one for one in several):
            lines.append(
                f"| {' | '.join(map(str, group))} | - | 0 of {len(several)} | {several[0].get('error', '')[:60]} |"
            )
            continue
        best = min(several, key=lambda one: float(one.get("three_heads", 3 * one.get("cycles", math.inf))))
        figure = f"{best['cycles']:,.0f}" if "cycles" in best else f"< {best['three_heads'] / 3 / best['repeats']:,.0f}"
        shown = ", ".join(f"{name}={value}" for name, value in best["params"].items())
        count = f"{sum('error' not in one for one in several)} of {len(several)}"
        lines.append(f"| {' | '.join(map(str, group))} | {figure} | {count} | {shown} |")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Return versions and date."""
    own = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {"device": "simulated", **own, "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print a line for each configuration, and write results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=(), help="words that a case must have, such as v6e, causal, flash")
    parser.add_argument("--first", type=int, help="simulate only so many configurations of each kernel and case")
    parser.add_argument("--seconds", type=float, default=1200.0, help="the time limit of a program")
    parser.add_argument("--out", type=Path, help="a JSON file to which results are added; a table goes beside it")
    given = parser.parse_args(arguments)
    if given.simulate:
        simulate()
        return
    kept = json.loads(given.out.read_text())["results"] if given.out and given.out.exists() else []
    simulator = Simulator(seconds=given.seconds)
    try:
        groups = [group[: given.first] for group in itertools.chain.from_iterable(map(cases, SWEEPS))]
        words = [set(map(str, ({"dtype": "bfloat16"} | group[0]).values())) for group in groups]
        groups = [group for group, own in zip(groups, words, strict=True) if {*given.only} <= own]
        for step, group in itertools.product((add, finish), groups):
            step(group, kept, simulator)
            if given.out:
                _write(given.out, kept)
    finally:
        simulator.close()


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    what = "simulated cycles per head; nothing ran on a TPU; ratios below 1.1 are within the simulator's error"
    lines = ",\n".join(f"    {json.dumps(one)}" for one in results)
    out.write_text(
        f'{{\n  "what": "{what}",\n  "versions": {json.dumps(versions())},\n  "results": [\n{lines}\n  ]\n}}\n'
    )
    head = f"# Attention on TPUs, simulated\n\n{what}. {json.dumps(versions())}\n\n"
    out.with_suffix(".md").write_text(f"{head}{table(results)}\n")


if __name__ == "__main__":
    main()
