# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention_tpu_sample`: random attention calls on TPUs in simulated cycles; needs no TPU.

Each call is drawn by a committed seed, from all combinations of chip, direction, mask, soft cap, length, head dimension
and grouped heads. It is simulated with the heuristic's parameters of `pallas_tpu` and another configuration of its
space, and with two of splash and of flash attention, lengths padded to their blocks, as in `benchmarks.attention_tpu`.
Nothing runs on a TPU. The regret is the heuristic's cycles over the best ones of its own sweep, minus 1; ratios below
1.1 are within the simulator's error. Calls with a head dimension of 64 are left out: the simulator ends its process, or
takes gigabytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import attention_tpu

SEED = 25
_DEVICES = {"v5e": "tpu:tpu_v5_lite", "v5p": "tpu:tpu_v5", "v6e": "tpu:tpu_v6_lite"}
_MASKS = ("causal", "causal", "full", "window 512", "window 1024", "window 2048")
_BLOCKS = {
    "splash": ("block_q", "block_kv", "block_kv_compute"),
    "flash": ("block_q", "block_k_major", "block_k"),
}
_SIZES = {
    "splash": ((1024, 1024, 512), (512, 512, 512)),
    "flash": ((1024, 1024, 1024), (512, 1024, 512)),
}
_CASE = ("chip", "direction", "mask", "soft_cap", "length", "head_dim", "repeats")


def drawn(index: int) -> dict[str, Any]:
    """Return the call of this index."""
    choice = random.Random(f"{SEED} {index}").choice
    case: dict[str, Any] = {"chip": choice(tuple(_DEVICES)), "direction": choice(("forward", "backward"))}
    case |= {"mask": choice(_MASKS), "soft_cap": choice((None, None, None, 30.0))}
    case |= {"length": choice((1024, 2048, 3000, 4096, 8192)), "head_dim": choice((96, 128, 192, 256))}
    return case | {"repeats": choice([heads for heads in (1, 2, 4, 8) if heads * case["length"] <= 8192])}


def configurations(index: int, others: int = 1) -> list[dict[str, Any]]:
    """Return the call with each configuration to simulate, our heuristic's first, and `others` of our space."""
    import jax

    from ejkernel.kernels.flash_attention.common import Operands, describe
    from ejkernel.kernels.flash_attention.pallas_tpu import choices

    case = drawn(index)
    like: Any = jax.ShapeDtypeStruct
    query, key = (like((1, case["length"], heads, case["head_dim"]), "bfloat16") for heads in (case["repeats"], 1))
    call = describe(
        Operands(query, key, key),
        attention_tpu.rules_of(case),
        platform="tpu",
        fingerprint=_DEVICES[case["chip"]],
        backward=case["direction"] == "backward",
    )
    heuristic, space = choices.heuristic(call), list(choices.space(call))
    more = [params for params in space if params != heuristic]
    ours = [heuristic, *random.Random(index).sample(more, min(others, len(more)))]
    found = [case | {"kernel": "pallas_tpu", "params": dataclasses.asdict(params)} for params in ours]
    for kernel, names in _BLOCKS.items():
        if kernel == "flash" and (case["mask"].startswith("window") or case["soft_cap"] or case["repeats"] > 1):
            continue
        for blocks in (blocks for blocks in _SIZES[kernel] if max(blocks) <= max(case["length"], 1024)):
            padded = -(-case["length"] // max(blocks)) * max(blocks)  # these kernels take no other lengths
            params = dict(zip(names, blocks, strict=True))
            found.append(case | {"kernel": kernel, "length": padded, "params": params})
    return found


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the cycles of each kernel for one call, the heuristic's regret and our lead over the better of JAX's."""
    best: dict[str, dict[str, Any]] = {}
    for one in results:
        if "cycles" in one and one["cycles"] < best.get(one["kernel"], one | {"cycles": float("inf")})["cycles"]:
            best[one["kernel"]] = one
    heuristic = results[0]
    found: dict[str, Any] = {name: heuristic[name] for name in _CASE}
    found |= {"heuristic": heuristic["params"], "failed": heuristic.get("error", "")}
    found["cycles"] = {name: round(one["cycles"]) for name, one in best.items()}
    found["simulated"] = {
        name: f"{sum('cycles' in one for one in results if one['kernel'] == name)} of "
        f"{sum(one['kernel'] == name for one in results)}"
        for name in dict.fromkeys(one["kernel"] for one in results)
    }
    if "cycles" in heuristic:
        own = heuristic["cycles"]
        theirs = min((one["cycles"] for name, one in best.items() if name != "pallas_tpu"), default=None)
        found |= {"heuristic_cycles": round(own), "regret": round(own / best["pallas_tpu"]["cycles"] - 1, 3)}
        found |= {"best": best["pallas_tpu"]["params"], "lead": None if theirs is None else round(theirs / own, 2)}
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the calls as a Markdown table."""
    names = (*_CASE, "heuristic", "best of our sweep", "regret", "splash", "flash", "JAX's better / heuristic")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for one in results:
        cells = [one[name] for name in _CASE]
        cycles, counts = one["cycles"], one["simulated"]
        cells.append(format(one["heuristic_cycles"], ",") if "regret" in one else one["failed"][:60])
        cells.append(f"{cycles['pallas_tpu']:,} ({counts['pallas_tpu']})" if "pallas_tpu" in cycles else "-")
        cells.append(f"{one['regret']:.1%}" if "regret" in one else "-")
        for name in _BLOCKS:
            count = counts.get(name, "-")
            cells.append(f"{cycles[name]:,} ({count})" if name in cycles else count)
        cells.append("-" if one.get("lead") is None else one["lead"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    what = "random attention calls in simulated cycles; nothing ran on a TPU"
    data = {"what": what, "versions": attention_tpu.versions(), "seed": SEED}
    lines = ",\n".join(f"    {json.dumps(one)}" for one in results)
    out.write_text(f'{json.dumps(data, indent=2)[:-2]},\n  "results": [\n{lines}\n  ]\n}}\n')
    head = f"# Random attention calls on TPUs, simulated\n\n{what}; ratios below 1.1 are within the simulator's error. "
    out.with_suffix(".md").write_text(f"{head}{json.dumps(data['versions'])}\n\n{table(results)}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, and write the results after each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20, help="how many calls to draw")
    parser.add_argument("--again", type=int, nargs="*", default=(), help="calls of the file to simulate again")
    parser.add_argument("--others", type=int, default=1, help="configurations of our space beside the heuristic")
    parser.add_argument("--seconds", type=float, default=1200.0, help="the time limit of a program")
    parser.add_argument("--out", type=Path, help="a JSON file to which results are added; a table goes beside it")
    given = parser.parse_args(arguments)
    results = json.loads(given.out.read_text())["results"] if given.out and given.out.exists() else []
    simulator = attention_tpu.Simulator(seconds=given.seconds)
    try:
        for index in (*given.again, *range(len(results), given.calls)):
            found = []
            for case in configurations(index, given.others):
                groups = max(1, 4096 // case["length"] // case["repeats"])
                answer = simulator(case, groups)
                heads = groups * case["repeats"]
                found.append(case | ({"cycles": answer["cycles"] / heads} if "cycles" in answer else answer))
            simulator.end()  # the compiler keeps gigabytes of finished programs
            results[index : index + 1] = [summary(found)]
            print(json.dumps(results[index]), flush=True)
            if given.out:
                _write(given.out, results)
    finally:
        simulator.close()


if __name__ == "__main__":
    main()
