# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention_tpu`: attention on TPUs in simulated cycles; needs `jax[tpu]`, but no TPU.

Google's compiler for TPUs estimates the cycles of each kernel that it compiles. Nothing runs on a TPU. A figure is the
cycles of one head: those of three heads, minus those of one, halved, which leaves out the first copies. XLA's
transpositions beside the kernels are not counted. Ratios below 1.1 are within the simulator's error.

The simulator knows no scalar that a kernel reads from memory, so splash attention is simulated without its tables, i.e.
with full attention only. A process simulates one configuration after the other; if the simulator aborts, the
configuration counts as failed, and another process goes on.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

CHIPS = ("v5e", "v6e")
LENGTH = 4096
MASKS: dict[str, dict[str, int]] = {"full": {}, "causal": {"right": 0}, "window 1024": {"left": 1023, "right": 0}}
DIRECTIONS = ("forward", "backward")
_MEMORY = 96 << 10  # KiB of vector memory for the kernels that JAX ships
Params = dict[str, Any]


def _forward(blocks: str, **more: Any) -> Params:
    """Return forward parameters from `block_q/chunk/rows/strip/unroll`."""
    names = ("block_q", "chunk", "rows", "strip", "unroll")
    return dict(zip(names, map(int, blocks.split("/")), strict=True)) | more


def _backward(blocks: str, **more: Any) -> Params:
    """Return backward parameters from `block_kv/chunk/strip/unroll`."""
    return dict(zip(("block_kv", "chunk", "strip", "unroll"), map(int, blocks.split("/")), strict=True)) | more


OURS: dict[tuple[str, str], list[Params]] = {
    ("full", "forward"): [
        _forward("1024/1024/1024/512/4"),
        _forward("2048/1024/2048/512/4"),
        _forward("2048/1024/2048/512/2"),
        _forward("1024/1024/1024/512/2"),
        _forward("1024/512/1024/512/4"),
        _forward("512/1024/512/512/4"),
    ],
    ("causal", "forward"): [
        _forward("2048/2048/2048/512/2"),
        _forward("2048/2048/2048/512/1"),
        _forward("2048/1024/512/256/2"),
        _forward("2048/1024/2048/256/2"),
        _forward("2048/1024/2048/512/2"),
        _forward("1024/1024/1024/256/2"),
        _forward("1024/1024/1024/512/4"),
    ],
    ("window 1024", "forward"): [
        _forward("1024/1024/1024/256/2"),
        _forward("1024/1024/1024/512/2"),
        _forward("1024/1024/1024/128/2"),
        _forward("512/512/512/256/2"),
    ],
    ("full", "backward"): [
        _backward("1024/2048/512/1"),
        _backward("1024/1024/512/1"),
        _backward("1024/1024/512/2"),
        _backward("2048/1024/512/1"),
    ],
    ("causal", "backward"): [
        _backward("2048/1024/512/2"),
        _backward("2048/1024/256/1"),
        _backward("1024/1024/256/1"),
        _backward("1024/1024/512/2"),
    ],
    ("window 1024", "backward"): [
        _backward("1024/1024/256/1"),
        _backward("1024/1024/512/1"),
        _backward("512/512/256/1"),
    ],
}
FLASH: list[Params] = [
    {"block_q": q, "block_k_major": major, "block_k": k}
    for q, major, k in ((2048, 2048, 1024), (2048, 1024, 1024), (1024, 1024, 1024), (1024, 2048, 2048))
]
SPLASH: list[Params] = [
    {"block_q": q, "block_kv": kv, "block_kv_compute": compute}
    for q, kv, compute in ((2048, 2048, 1024), (1024, 2048, 1024), (1024, 1024, 1024), (512, 512, 512))
]


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the cases to simulate: chip, kernel, mask, direction, sizes and parameters."""

    def chosen(candidates: list[Params]) -> list[Params]:
        numbers = arguments.candidates
        return candidates if numbers is None else [candidates[at] for at in numbers if at < len(candidates)]

    for chip, mask, direction, dim in itertools.product(
        arguments.chips, arguments.masks, arguments.directions, arguments.head_dims
    ):
        case = {"chip": chip, "mask": mask, "direction": direction, "head_dim": dim, "length": arguments.length}
        flag = "sum_by_product" if direction == "forward" else "transpose"
        # a product of 128 columns fills half of the matrix unit of v6e, and one of 64 half of that of v5e
        flags = (True, False) if arguments.both_flags else (chip == "v6e" or dim == 64,)
        for kernel in arguments.kernels:
            if kernel == "pallas_tpu":
                for params, value in itertools.product(chosen(OURS[mask, direction]), flags):
                    yield case | {"kernel": kernel, "params": params | {flag: value}}
            elif kernel == "flash" and "window" not in mask:
                yield from (case | {"kernel": kernel, "params": params} for params in chosen(FLASH))
            elif kernel == "splash" and mask == "full":
                yield from (case | {"kernel": kernel, "params": params} for params in chosen(SPLASH))


# --- in the process that simulates ---


def cycles_per_head(case: dict[str, Any], folder: Path) -> float:
    """Return the simulated cycles of one head."""
    # our kernels state their own limit
    options = {} if case["kernel"] == "pallas_tpu" else {"xla_tpu_scoped_vmem_limit_kib": str(_MEMORY)}
    one, three = (_cycles(_lowered(case, heads), options, folder) for heads in (1, 3))
    return (three - one) / 2


def _cycles(lowered: Any, options: dict[str, str], folder: Path) -> int:
    """Compile a program, and return the cycles of its kernels."""
    for file in folder.iterdir():
        file.unlink()
    text = lowered.compile(compiler_options=options).as_text()
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


def _lowered(case: dict[str, Any], heads: int) -> Any:
    import jax

    from ejkernel.kernels.flash_attention.common import Operands

    like: Any = functools.partial(jax.ShapeDtypeStruct, sharding=_sharding(case["chip"]))
    x = like((1, case["length"], heads, case["head_dim"]), "bfloat16")
    lse = like((1, heads, case["length"]), "float32")
    if case["kernel"] == "pallas_tpu":
        run, operands = _ours(case), Operands(x, x, x)
        return jax.jit(run).lower(*((operands,) if case["direction"] == "forward" else (operands, (x, lse), x)))
    first = like((1, heads, case["length"], case["head_dim"]), "bfloat16")
    forward, backward = _flash(case) if case["kernel"] == "flash" else _splash(case)
    if case["direction"] == "forward":
        return jax.jit(forward).lower(first, first, first)
    return jax.jit(backward).lower(first, first, first, lse, first, lse)


@functools.cache
def _sharding(chip: str) -> Any:
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def _ours(case: dict[str, Any]) -> Callable[..., Any]:
    from ejkernel.kernels.flash_attention.common import Rules
    from ejkernel.kernels.flash_attention.pallas_tpu import launch
    from ejkernel.kernels.flash_attention.pallas_tpu.params import BackwardParams, ForwardParams

    window = MASKS[case["mask"]]
    rules = Rules(scale=case["head_dim"] ** -0.5, left=window.get("left"), right=window.get("right"))
    if case["direction"] == "forward":
        params = ForwardParams(**case["params"])
        return lambda operands: launch.forward(operands, rules, params, with_lse=False)[0]
    backward = BackwardParams(**case["params"])
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
    """Return splash attention without tables: forward and fused backward."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as module
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

    splash: Any = module
    none, blocks = masks.MaskInfo(None, None, None, None, None), case["params"]
    common = {"mask_value": splash.DEFAULT_MASK_VALUE, "is_mqa": False, "mask_function": None, "interpret": False}
    common["attn_logits_soft_cap"] = None

    def forward(*arrays: Any) -> Any:
        sizes = splash.BlockSizes(**blocks)
        more = {"block_sizes": sizes, "residual_checkpoint_name": None, "save_residuals": False}
        return splash._splash_attention_forward(none, *(x[0] for x in arrays), None, None, **more, **common)

    def backward(query: Any, key: Any, value: Any, *rows: Any) -> Any:
        layouts = {f"{name}_layout": splash.QKVLayout.HEAD_DIM_MINOR for name in "qkv"}
        sizes = {"bq": blocks["block_q"], "bkv": blocks["block_kv"], "bkv_compute": blocks["block_kv_compute"]}
        arrays = [x[0] for x in (query, key, value)]
        rows = tuple(x[0] for x in rows)
        more = {"use_fused_bwd_kernel": True, "mask_info": none, **sizes, **layouts}
        return splash._splash_attention_bwd_dkv(*arrays, None, None, *rows, **more, **common)

    return forward, backward


def simulate() -> None:
    """Read cases from standard input, one JSON object a line, and write their cycles or an error to standard output."""
    folder = Path(os.environ["LIBTPU_INIT_ARGS"].partition("=")[2])
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"cycles": cycles_per_head(json.loads(line), folder)}
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is the answer
            answer = {"error": " ".join(str(error).split())[:600]}
        print(json.dumps(answer), flush=True)


# --- in the caller ---


class Simulator:
    """A process that simulates; another one takes its place if it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()

    def __call__(self, case: dict[str, Any]) -> dict[str, Any]:
        """Return the case with its cycles, or with an error."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(case) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            self._process = None
            return case | {"error": f"the simulator ended with {process.wait()}"}
        found: dict[str, Any] = json.loads(answer)
        return case | found

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = os.environ | {
                "LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={self._folder.name}",
                "JAX_PLATFORMS": "cpu",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.attention_tpu", "--simulate"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        self._folder.cleanup()


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the best configuration of each kernel and case, as a Markdown table."""
    lines = [
        "| chip | direction | mask | head_dim | kernel | simulated cycles per head | configurations | the best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("chip", "direction", "mask", "head_dim", "kernel")
    ordered = sorted(results, key=lambda found: [str(found[name]) for name in names])
    for group, found in itertools.groupby(ordered, key=lambda found: [found[name] for name in names]):
        several = list(found)
        done = [one for one in several if "cycles" in one]
        if not done:
            lines.append(f"| {' | '.join(map(str, group))} | - | 0 of {len(several)} | {several[0]['error'][:60]} |")
            continue
        best = min(done, key=lambda one: one["cycles"])
        shown = ", ".join(f"{name}={value}" for name, value in best["params"].items())
        count = f"{len(done)} of {len(several)}"
        lines.append(f"| {' | '.join(map(str, group))} | {best['cycles']:,.0f} | {count} | {shown} |")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Return versions and date."""
    own = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return own | {"date": datetime.datetime.now(tz=datetime.UTC).date().isoformat()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print a line for each configuration, and write results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--kernels", nargs="+", default=("pallas_tpu", "flash", "splash"))
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=tuple(MASKS))
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--head-dims", nargs="+", type=int, default=(128,))
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--both-flags", action="store_true", help="try `sum_by_product` and `transpose` both ways")
    parser.add_argument("--candidates", nargs="+", type=int, help="simulate only these of each kernel's, from 0")
    parser.add_argument("--out", type=Path, help="a JSON file to which results are added; a table goes beside it")
    given = parser.parse_args(arguments)
    if given.simulate:
        simulate()
        return
    kept = json.loads(given.out.read_text())["results"] if given.out and given.out.exists() else []
    simulator = Simulator()
    try:
        for case in cases(given):
            if any(case.items() <= one.items() for one in kept):
                continue
            kept.append(simulator(case))
            print(json.dumps(kept[-1]), flush=True)
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
