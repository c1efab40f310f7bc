# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_splash_tpu`: vector memory of splash attention, estimated and compiled; needs no TPU.

Calls are drawn as in `benchmarks.memory_tpu`, also for tpu7x, with blocks of the space as if memory had no limit. Seed
0 lists common calls of that benchmark, then published forwards with their blocks, the largest first. Seeds from 100
draw published calls with their blocks. Seeds from 200 draw long calls with blocks of up to 8,192 rows, as a caller may
pass them. Google's compiler reports the bytes of vector memory that each kernel uses with the limit that we pass.
Nothing runs on a TPU. The ratio is our upper estimate over the compiler's figure.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from benchmarks import memory_tpu
from benchmarks.drawn_tpu import Draws, ratio_table

_CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
_FINGERPRINTS = {"v5e": "tpu:tpu_v5_lite", "v5p": "tpu:tpu_v5", "v6e": "tpu:tpu_v6_lite", "tpu7x": "tpu:tpu7x"}
_PUBLISHED, _LARGE = 100, 200
_LISTED = 216  # common calls of seed 0
_LONG = (4096, 8192, 16_384)
_ROWS, _STEPS = (256, 512, 1024, 2048, 2048, 4096, 4096, 8192), (256, 512, 1024, 2048, 4096)
_KERNELS = {"fwd": "fwd", "dkv": "keys", "dq": "query"}


def drawn(seed: int, index: int) -> dict[str, Any]:
    """Return a call, its blocks and our estimates."""
    from ejkernel.kernels.flash_attention import splash

    dice = random.Random(f"splash {seed} {index}")
    if seed == 0:
        case, sizes = _listed(index)
        return {"seed": seed, **case, "params": sizes, **estimates(case, sizes)}
    if seed >= _PUBLISHED:
        case, sizes = _large(dice) if seed >= _LARGE else _of_row(dice.choice(_rows()))
        return {"seed": seed, **case, "params": sizes, **estimates(case, sizes)}
    case = memory_tpu.drawn_call(dice) | {"chip": dice.choice(tuple(_CHIPS))}
    call, implementation = call_of(case), splash.Splash()
    params = dice.choice(implementation.every(call))
    if dice.random() < 0.35:
        params = implementation.params_type(backward=call.backward)()
    sizes = dataclasses.asdict(params)
    return {"seed": seed, **case, "params": sizes, **estimates(case, sizes)}


def _listed(index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a common call with the heuristic's blocks; behind these, a published call."""
    from ejkernel.kernels.flash_attention import splash

    if index >= _LISTED:
        return _different()[index - _LISTED]
    case = memory_tpu.common_call(index)
    return case, dataclasses.asdict(splash.Splash().heuristic(call_of(case)))


@functools.cache
def _different() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return published calls whose forward kernels have different forms, those with the largest blocks first."""
    from ejkernel.kernels.flash_attention import splash

    found: dict[str, Any] = {}
    for case, sizes in map(_of_row, _rows()):
        if case["direction"] == "forward":
            parts = parts_by_kernel(call_of(case), splash.SplashParams(**sizes))["fwd"]
            found.setdefault(parts.form, (parts.known, case, sizes))
    return [(case, sizes) for _, case, sizes in sorted(found.values(), key=lambda one: -one[0])]


def _rows() -> list[dict[str, Any]]:
    tables = json.loads(resources.files("ejkernel").joinpath("data/published/splash.json").read_text())
    return [row for rows in tables.values() for row in rows]


def _of_row(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a published call and its blocks."""
    facts, chips = row["call"], {device: chip for chip, device in _FINGERPRINTS.items()}
    case: dict[str, Any] = {"chip": chips[facts["device"]], "direction": "backward" if facts["backward"] else "forward"}
    case |= {"mask": "causal" if facts["causal"] else "full", "soft_cap": None, "segments": False, "dtype": "bfloat16"}
    case |= {"length": facts["queries"], "dims": [facts["head_dim"], facts["value_dim"]], "repeats": 2}
    return case, row["params"]


def _large(dice: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a long call, and blocks that may fit in the chip's memory; one of them has 2,048 rows or more."""
    from ejkernel.kernels.flash_attention import splash

    implementation = splash.Splash()
    while True:
        case = memory_tpu.drawn_call(dice) | {"chip": dice.choice(tuple(_CHIPS)), "length": dice.choice(_LONG)}
        call = call_of(case)
        (q, kv), step = (min(dice.choice(_ROWS), case["length"]) for _ in range(2)), dice.choice(_STEPS)
        sizes = {"block_q": q, "block_kv": kv, "block_kv_compute": min(step, kv)}
        if call.backward:
            fused = dice.random() < 0.5
            sizes |= {"block_q_dq": None if fused else q, "block_kv_dq": None if fused else kv}
        params = implementation.params_type(backward=call.backward)(**sizes)
        if max(q, kv) >= 2048 and implementation.params_fault(call, params) is None:
            return case, sizes


def estimates(case: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return our estimates for the kernels of a case with these blocks."""
    from ejkernel.kernels.flash_attention import splash
    from ejkernel.kernels.flash_attention._splash_weights import WEIGHTS

    call = call_of(case)
    params = splash.Splash().params_type(backward=call.backward)(**sizes)
    found = {name: parts.need(WEIGHTS) for name, parts in parts_by_kernel(call, params).items()}
    return {
        "estimated": {name: need.most for name, need in found.items()},
        "least": {name: need.least for name, need in found.items()},
    }


def parts_by_kernel(call: Any, params: Any) -> dict[str, Any]:
    """Return the memory of each kernel by its causes: of `fwd`, or `keys` and maybe `query`."""
    from ejkernel.kernels.flash_attention import _splash_memory, splash

    names = {"forward": "fwd", "fused": "keys"}
    blocks = splash.blocks_of(params)
    return {names.get(name, name): _splash_memory.parts_of(call, name, own) for name, own in blocks.items()}


def call_of(case: dict[str, Any]) -> Any:
    """Return the call of a case."""
    call, _ = memory_tpu.described(case | {"chip": "v5e"})
    return dataclasses.replace(call, device_fingerprint=_FINGERPRINTS[case["chip"]])


def compiled(case: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of vector memory of each kernel, and of windows that it does not have: see `tpu_windows`."""
    from benchmarks import tpu_windows
    from ejkernel.kernels.flash_attention import splash

    call, implementation = call_of(case), splash.Splash()
    operands = tpu_windows.placed(memory_tpu.described(case | {"chip": "v5e"})[1], _CHIPS[case["chip"]])
    params = implementation.params_type(backward=call.backward)(**case["params"])
    found = tpu_windows.of_attention(implementation, call, operands, params)
    by_name = {_KERNELS[re.sub("splash_mha_([a-z]+).*", r"\1", one.name)]: one for one in found}
    return {size: {name: getattr(one, size) for name, one in by_name.items()} for size in ("used", "kept")}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the distribution of the ratios by class, as a Markdown table."""
    kinds: dict[str, Callable[[dict[str, Any]], bool]] = {
        "all": lambda one: True,
        "bfloat16, without ids and cap": lambda one: bool(
            one["dtype"] == "bfloat16" and not one["segments"] and one["soft_cap"] is None
        ),
        "float32": lambda one: bool(one["dtype"] == "float32"),
    }
    classes = {
        f"{kind}, {kernel}": [
            one["estimated"][kernel] / one["used"][kernel]
            for one in results
            if kernel in one.get("used", {}) and of_kind(one)
        ]
        for kind, of_kind in kinds.items()
        for kernel in ("fwd", "keys", "query")
    }
    short = [(one, name) for one in results for name, bytes_kept in one.get("kept", {}).items() if bytes_kept]
    classes["short arrays, without the missing windows"] = [
        (one["estimated"][name] - one["kept"][name]) / one["used"][name] for one, name in short
    ]
    above = sum(one["least"][name] > used for one in results for name, used in one.get("used", {}).items())
    failed = sum("error" in one for one in results)
    rows = [
        *ratio_table(classes),
        "",
        f"The lower estimate exceeds the compiler's figure in {above} kernels. {failed} calls did not compile.",
    ]
    return "\n".join(rows)


DRAWS = Draws(
    module="memory_splash_tpu",
    about=__doc__,
    what="our estimate of splash attention's vector memory over the figure of Google's compiler; nothing ran on a TPU",
    drawn=drawn,
    compiled=compiled,
    title="Vector memory of splash attention, compiled",
    table=table,
    seconds=240.0,
)


if __name__ == "__main__":
    DRAWS.main()
