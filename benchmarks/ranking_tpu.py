# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.ranking_tpu`: the simulator's ranks of published blocks; needs `jax[tpu]`, but no TPU.

Others measured blocks of JAX's splash attention, or of a fork of it, and of grouped products on TPUs, and published
the fastest. For each case, Google's simulator ranks a grid of blocks with the published ones among them. Nothing runs
on a TPU. A case passes if the published blocks are in the best 20 % of the ranking. Their regret is their simulated
time over the best, minus 1. Cases that cannot be simulated are listed as failures, too.

The simulator reads no scalars from memory. So splash attention is simulated without its tables, as in
`benchmarks.attention_tpu`: with a mask, a figure is that of all blocks, times the share of blocks that it would run. A
grouped product is simulated as a plain product with the same tiles and order of tiles; only published cases with one
group that is not empty are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import attention_tpu

WITHIN = 0.2  # of the ranking
_KERNELS = {"splash": ("block_q", "block_kv", "block_kv_compute"), "product": ("block_m", "block_k", "block_n")}
_TOKAMAX = "tokamax 0.0.17"
_MAXTEXT = "MaxText e591f30, model configurations for v6e"
_QUERIES = 4096  # queries of all heads that are simulated


class Winners(NamedTuple):
    """Published blocks of one chip, kernel, mask and head dimension, as `length:blocks`.

    A trailing `+` simulates all blocks with the compiler's other scheduler, as the published time was measured.
    """

    chip: str
    kernel: str
    mask: str
    head_dim: int
    published: str
    source: str = _TOKAMAX


CASES = (
    Winners("v6e", "splash", "causal", 128, "1024:1024/1024/512 2048:1024/1024/512 4096:1024/1024/512"),
    Winners("v5p", "splash", "causal", 128, "1024:1024/1024/512 2048:1024/1024/256 4096:1024/1024/256"),
    Winners("v6e", "splash", "full", 128, "1024:1024/1024/1024 2048:2048/2048/1024 4096:2048/2048/512"),
    Winners("v6e", "splash", "full", 128, "4096:2048/2048/512+"),
    Winners("v5e", "product", "-", 0, "4096:1024/512/1024"),
    Winners("v5p", "product", "-", 0, "4096:1024/1024/512"),
    Winners("v6e", "product", "-", 0, "4096:1024/1024/2048", f"{_TOKAMAX}, with three buffers"),
    Winners("v5p", "splash", "full", 128, "1024:1024/1024/1024 2048:2048/2048/256 4096:1024/4096/256"),
    Winners("v5p", "splash", "causal", 256, "1024:1024/1024/128 2048:1024/1024/512 4096:1024/1024/512"),
    Winners("v6e", "splash", "causal", 256, "1024:1024/1024/512 2048:1024/1024/512 4096:1024/1024/512"),
    Winners("v5p", "splash", "full", 256, "1024:1024/1024/1024 2048:1024/2048/512 4096:1024/1024/256"),
    Winners("v6e", "splash", "full", 256, "2048:2048/2048/1024 4096:2048/2048/512"),
    Winners("v6e", "splash", "causal", 128, "512:512/512/512"),
    Winners("v5p", "splash", "causal", 128, "512:512/512/512"),
    Winners("v6e", "splash", "causal", 64, "1024:1024/1024/512"),
    Winners("v5p", "splash", "causal", 64, "1024:1024/1024/512"),
    Winners("v6e", "splash", "causal", 128, "8192:2048/2048/512"),
    Winners("v6e", "splash", "causal", 128, "8192:2048/2048/2048", _MAXTEXT),
    Winners("v5p", "splash", "causal", 128, "8192:1024/1024/256"),
)

# Published blocks of kernels and chips that the simulator refuses.
REFUSED = {
    "tpu7x, every kernel": "the simulator ends the process for programs of this chip",
    "v5e, v5p, v6e, tpu7x, grouped products of several groups": "the blocks of a group depend on scalars in memory",
    "v5e, v5p, v6e, ragged paged attention, 1,336 calls in JAX and tpu-inference": "its loops depend on scalars",
}


# --- in the process that simulates ---


def cycles(case: dict[str, Any], groups: int, folder: Path) -> float:
    """Return the simulated cycles of some heads, or of a product."""
    if case["kernel"] == "splash":
        with _other_scheduler() if case["scheduler"] else contextlib.nullcontext():
            return attention_tpu.cycles(case, groups, folder)
    import jax

    from benchmarks.estimates_tpu import Blocks, product

    rows, inner, columns = case["params"].values()
    sharding = attention_tpu.sharding(case["chip"])
    like = jax.ShapeDtypeStruct((case["length"], case["length"]), "bfloat16", sharding=sharding)
    lowered = jax.jit(lambda a, b: product(a, b, Blocks(rows, inner, columns), columns_first=True)).lower(like, like)
    return float(attention_tpu.kernel_cycles(lowered, case["chip"], folder))


@contextlib.contextmanager
def _other_scheduler() -> Iterator[None]:
    """Compile kernels with the scheduler that some published blocks were measured with."""
    from jax.experimental.pallas import tpu as pltpu

    made: Any = pltpu.CompilerParams
    setattr(  # noqa: B010 - the type of a module's class is fixed
        pltpu, "CompilerParams", functools.partial(made, flags={"XLA_TPU_FORCE_LP_LLO_SCHEDULER": True})
    )
    try:
        yield
    finally:
        setattr(pltpu, "CompilerParams", made)  # noqa: B010


# --- in the caller ---


def groups_of(winners: Winners) -> Iterator[list[dict[str, Any]]]:
    """Yield the configurations of each length, the published ones first."""
    for text in winners.published.split():
        length, _, blocks = text.partition(":")
        case: dict[str, Any] = {
            "chip": winners.chip,
            "kernel": winners.kernel,
            "direction": "forward",
            "mask": winners.mask,
        }
        case |= {"head_dim": winners.head_dim, "repeats": 1, "length": int(length), "source": winners.source}
        case["scheduler"] = "other" if blocks.endswith("+") else ""
        published = tuple(map(int, blocks.rstrip("+").split("/")))
        grid = _products if winners.kernel == "product" else _attention
        sizes = dict.fromkeys((published, *grid(int(length))))
        yield [case | {"params": dict(zip(_KERNELS[winners.kernel], one, strict=True))} for one in sizes]


def _attention(length: int) -> Iterator[tuple[int, ...]]:
    large = [size for size in (256, 512, 1024, 2048, 4096) if length // 4 <= size <= length]
    for q, k, step in itertools.product(large, large, (128, 256, 512, 1024, 2048)):
        if max(length // 16, 128) <= step <= k:
            yield q, k, step


def _products(_: int) -> Iterator[tuple[int, ...]]:
    yield from itertools.product((512, 1024, 2048), repeat=3)


def ranked(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the rank of the first configuration of a case among those with an estimate."""
    published = results[0]
    case = {name: value for name, value in published.items() if name not in ("cycles", "error")}
    case["fault"] = published.get("error", "")
    found = [float(one["cycles"]) for one in results if "cycles" in one]
    if case["fault"]:
        return case | {"of": len(found), "passes": False}
    mine = float(published["cycles"])
    rank = 1 + sum(cycles < mine for cycles in found)
    figures: dict[str, Any] = {"rank": rank, "of": len(found), "regret": round(mine / min(found) - 1, 3)}
    figures |= {"spread": round(max(found) / min(found), 2), "passes": rank <= math.ceil(WITHIN * len(found))}
    own = [float(one["cycles"]) for one in results if "cycles" in one and _is_searched(one)]
    figures["own"] = f"{1 + sum(cycles < mine for cycles in own)} of {len(own)}"
    best = min((one for one in results if "cycles" in one), key=lambda one: float(one["cycles"]))
    return case | figures | {"best": best["params"]}


def _is_searched(case: dict[str, Any]) -> bool:
    """Return whether the search that found the published blocks of attention had these among its candidates."""
    queries, keys, step = case["params"].values()
    least = min(1024, case["length"])
    return bool(case["kernel"] == "splash" and min(queries, keys) >= least and step <= 1024)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, and write the ranks after each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=False, help="a JSON file to which cases are added; a table beside")
    given = parser.parse_args(arguments)
    if given.simulate:
        attention_tpu.simulate(cycles)
        return
    kept = json.loads(given.out.read_text())["results"] if given.out and given.out.exists() else []
    simulator = attention_tpu.Simulator("ranking_tpu")
    try:
        for group in itertools.chain.from_iterable(map(groups_of, CASES)):
            if any(group[0].items() <= one.items() for one in kept):
                continue
            heads = max(1, _QUERIES // group[0]["length"])
            kept.append(ranked([case | _figure(simulator(case, heads)) for case in group]))
            print(json.dumps(kept[-1]), flush=True)
            simulator.end()  # the compiler keeps gigabytes of finished programs
            if given.out:
                _write(given.out, kept)
    finally:
        simulator.close()


def _figure(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name == "cycles" else str(value)[:120] for name, value in found.items()}


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    what = "ranks of published blocks among blocks simulated by Google's compiler; nothing ran on a TPU"
    data = {"what": what, "versions": attention_tpu.versions(), "refused": REFUSED}
    lines = ",\n".join(f"    {json.dumps(one)}" for one in results)
    out.write_text(f'{json.dumps(data, indent=2)[:-2]},\n  "results": [\n{lines}\n  ]\n}}\n')
    passed = sum(one["passes"] for one in results)
    head = f"# Published blocks in the simulator's ranking\n\n{what}. {json.dumps(data['versions'])}\n\n"
    rule = f"{passed} of {len(results)} cases have them in the best {WITHIN:.0%}.\n\n"
    out.with_suffix(".md").write_text(f"{head}{rule}{table(results)}\n")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the cases as a Markdown table."""
    names = ("chip", "kernel", "mask", "head_dim", "length", "source", "scheduler")
    more = ("published", "rank", "rank in its own search", "regret", "slowest / fastest", "simulated best", "passes")
    lines = [f"| {' | '.join((*names, *more))} |", "|---" * (len(names) + len(more)) + "|"]
    for one in results:
        blocks = "/".join(map(str, one["params"].values()))
        cells = [*(one[name] for name in names), blocks]
        if one["fault"]:
            cells += ["-", "-", "-", "-", one["fault"].replace("|", " ")[:60], "no"]
        else:
            best = "/".join(map(str, one["best"].values()))
            own = one["own"] if one["kernel"] == "splash" else "-"
            cells += [f"{one['rank']} of {one['of']}", own, f"{one['regret']:.1%}", one["spread"], best]
            cells.append("yes" if one["passes"] else "no")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Not ranked:", "", *(f"- {case}: {why}" for case, why in REFUSED.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
