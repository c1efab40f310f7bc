# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_tpu_fit`: write the tables and weights of vector memory on TPUs from committed figures.

Kernels of one form take the same vector memory for intermediate values. The table has these bytes for each form of the
listed attention calls, the highest if several kernels of a form were compiled. `--add` adds the registers that kernels
of `megablox` and `tpu_ragged` spill, from results of `benchmarks.memory_others_tpu` with seed 0.

For other kernels of each kind, a linear program finds weights of the sizes that the estimate has. They minimise the sum
of the estimates, each over the compiler's figure, and give no estimate below it. The weights are then found again
without a tenth of the kernels, and the estimates of that tenth compared with the compiler's figures, for each tenth of
three orders. A margin covers most of these kernels. `memory_tpu_fit.md` has the shares of estimates within 10 % and
20 %, for all kernels and for those left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import attention_tpu, heuristics_tpu, memory_attention_tpu, memory_others_tpu

Weights = dict[str, dict[str, float]]

_RESULTS = Path(__file__).parent / "results"
_SOURCES = Path(__file__).parents[1] / "src/ejkernel"
_TABLE = _SOURCES / "data/compiled/tpu.json"
_WEIGHTS = {
    "pallas_tpu": "kernels/flash_attention/pallas_tpu/spilled.py",
    "splash": "kernels/flash_attention/_splash_weights.py",
    "others": "kernels/_spilled.py",
}
_MARGINS = (0.04, 0.6)
_OF_NORMS = 0.12  # the least margin of row norms
_FEW = 40  # kernels of a kind; for fewer, the margin covers all that are left out
_COVERED = 0.99  # the share of the kernels left out that a margin covers
_WHAT = "bytes of intermediate values in kernels compiled by Google's compiler; nothing ran on a TPU"
_HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = '''


class Kernel(NamedTuple):
    """A compiled kernel: the causes of its memory, and the bytes that the compiler reports for it with all windows."""

    parts: Any
    used: int


class Fit(NamedTuple):
    """The weights of a kind of kernel, with its kernels, and each left out of the fit with the weights found then."""

    weights: dict[str, float]
    margin: float
    kernels: list[Kernel]
    left_out: list[tuple[Kernel, dict[str, float]]]


def results_of(name: str) -> list[dict[str, Any]]:
    """Return the compiled results of a committed file."""
    found: list[dict[str, Any]] = json.loads((_RESULTS / f"{name}.json").read_text())["results"]
    return [one for one in found if "used" in one]


def kernels() -> dict[str, list[Kernel]]:
    """Return the committed kernels, by the file of their weights."""
    found: dict[str, list[Kernel]] = {name: [] for name in _WEIGHTS}
    for file in ("memory_attention_tpu_listed", "memory_attention_tpu_fitted"):
        for one in results_of(file):
            found[one["implementation"]] += _of_result(memory_attention_tpu.parts_of(one), one)
    for one in results_of("heuristics_tpu"):
        parts = heuristics_tpu.parts_of(one)
        # the order of several kernels is unknown, and one that takes less has no windows for some arrays
        if len(parts) == 1 and one["used"][0] > parts[0].known:
            found[one["implementation"]] += _of_result(parts, one)
    for one in results_of("memory_norms_tpu_fitted"):
        found["others"] += _of_result([memory_others_tpu.parts_of(one)], one)
    found["others"] += map(Kernel, *zip(*memory_others_tpu.kernels_of_table(), strict=True))
    return found


def _of_result(parts: Sequence[Any], one: Mapping[str, Any]) -> Iterator[Kernel]:
    """Yield the kernels of a result; older ones have no windows in `kept`, and were compiled with all."""
    kept = one.get("kept", [0] * len(parts))
    yield from (Kernel(own, used + more) for own, used, more in zip(parts, one["used"], kept, strict=True))


def fitted(found: Sequence[Kernel]) -> dict[str, float]:
    """Return the weights for kernels of one kind."""
    from scipy.optimize import linprog  # type: ignore[import-untyped, unused-ignore]

    names = list(found[0].parts.sizes)
    sizes = 4 * np.array([[one.parts.sizes[name] for name in names] for one in found], float)
    used = np.array([one.used for one in found], float)
    spilled = used - np.array([one.parts.known for one in found], float)
    # the second term prefers few weights where several sizes are equal
    cost = (sizes / used[:, None]).sum(0) + 1e-3 * sizes.mean(0) / used.mean() + 1e-9
    solved = linprog(cost, A_ub=-sizes, b_ub=-spilled, bounds=[(0, None)] * len(names), method="highs")
    return {name: float(weight) for name, weight in zip(names, solved.x, strict=True) if weight > 1e-4}


def estimate(one: Kernel, weights: Mapping[str, float], margin: float = 0.0) -> float:
    """Return the upper estimate of a kernel."""
    spilled = 4 * sum(one.parts.sizes[name] * weight for name, weight in weights.items())
    return float(one.parts.known + spilled * (1 + margin))


def left_out(found: Sequence[Kernel]) -> list[tuple[Kernel, dict[str, float]]]:
    """Return random kernels, each with weights fitted to other kernels."""
    pairs = []
    for seed in range(1, 4):
        order = random.Random(seed).sample(range(len(found)), len(found))
        for start in range(10):
            tenth = order[start::10]
            others = [found[index] for index in order if index not in set(tenth)]
            if tenth and len(others) > 1:
                weights = fitted(others)
                pairs += [(found[index], weights) for index in tenth]
    return pairs


def margin_of(pairs: Sequence[tuple[Kernel, dict[str, float]]], covered: float) -> float:
    """Return the share of the weighted sum to add to it, to cover that share of the kernels left out."""
    lacking = sorted(
        (one.used - one.parts.known) / max(estimate(one, weights) - one.parts.known, 1) - 1 for one, weights in pairs
    )
    least, most = _MARGINS
    return min(max(lacking[int(covered * (len(lacking) - 1))], least), most) if lacking else most


def fits(found: Iterable[Kernel]) -> dict[str, Fit]:
    """Return the weights of each kind of kernel."""
    by_kind: dict[str, list[Kernel]] = {}
    for one in found:
        by_kind.setdefault(one.parts.kind, []).append(one)
    table = {}
    for kind, several in sorted(by_kind.items()):
        weights, pairs = fitted(several), left_out(several)
        margin = margin_of(pairs, _COVERED if len(several) >= _FEW else 1.0)
        margin = max(margin, _OF_NORMS) if "norm" in kind else margin
        # rounded up, so that no estimate of the fit is below the compiler's figure
        rounded = {name: round(weight * (1 + margin) + 5e-4, 3) for name, weight in weights.items()}
        table[kind] = Fit(rounded, margin, several, pairs)
    return table


def shares(ratios: Sequence[float]) -> str:
    """Return the distribution of ratios as cells of a Markdown table."""
    within = (f"{sum(1 <= ratio <= most for ratio in ratios) / len(ratios):.0%}" for most in (1.1, 1.2))
    cells = (f"{min(ratios):.3f}", *within, f"{statistics.median(ratios):.3f}", f"{max(ratios):.2f}")
    return " | ".join((*cells, f"{sum(ratio < 1 for ratio in ratios) / len(ratios):.1%}"))


def rows_of(name: str, found: Mapping[str, Fit]) -> Iterator[str]:
    """Yield the quality of the weights in a file as rows of a Markdown table."""
    kinds = {f"{name}: {kind}": [fit] for kind, fit in found.items()}
    for label, several in ({f"**{name}**": list(found.values())} | kinds).items():
        own = [estimate(one, fit.weights) / one.used for fit in several for one in fit.kernels]
        others = [estimate(one, w, fit.margin) / one.used for fit in several for one, w in fit.left_out]
        yield f"| {label} | {len(own)} | {shares(own)} | {shares(others) if others else '| | | | |'} |"


def bytes_of_forms() -> dict[str, int]:
    """Return the bytes of intermediate values of each form in the listed calls."""
    found: dict[str, int] = {}
    for result in results_of("memory_attention_tpu_listed"):
        for one in _of_result(memory_attention_tpu.parts_of(result), result):
            found[one.parts.form] = max(
                one.used - one.parts.known, found.get(one.parts.form, one.used - one.parts.known)
            )
    return dict(sorted(found.items()))


def written_weights(table: Weights) -> str:
    """Return a module with these weights, each on a line as `ruff format` leaves it."""
    lines = []
    for kind, weights in table.items():
        lines += [f'    "{kind}": {{', *(f'        "{name}": {weight},' for name, weight in weights.items()), "    },"]
    return "\n".join([f"{_HEAD}{{", *lines, "}", ""])


def add_registers(files: Iterable[Path]) -> None:
    """Add the registers of listed kernels to the tables."""
    tables = json.loads(_TABLE.read_text())
    for result in (one for file in files for one in json.loads(file.read_text())["results"] if "used" in one):
        memory_others_tpu.add_registers(tables, result)
    write_tables(tables | {"versions": attention_tpu.versions() | {"device": "compiled"}})


def write_tables(tables: dict[str, Any]) -> None:
    """Write the tables of compiled kernels, one form a line."""
    text = json.dumps({"what": _WHAT, "versions": tables["versions"]}, indent=1)[:-2]
    for name in ("bytes", "registers", "tiles"):
        rows = (f"  {json.dumps(form)}: {json.dumps(row)}" for form, row in sorted(tables[name].items()))
        text += f',\n "{name}": {{\n' + ",\n".join(rows) + "\n }"
    _TABLE.write_text(f"{text}\n}}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table, the weights and how good they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="*", default=(), help="results with registers for the tables")
    given = parser.parse_args(arguments)
    if given.add:
        add_registers(given.add)
    write_tables(json.loads(_TABLE.read_text()) | {"bytes": bytes_of_forms()})
    heads = ("least", "within 1.1", "within 1.2", "median", "largest", "below 1")
    columns = ("kernels", "compiled", *heads, *(f"left out: {head}" for head in heads))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, found in kernels().items():
        table = fits(found)
        (_SOURCES / _WEIGHTS[name]).write_text(written_weights({kind: fit.weights for kind, fit in table.items()}))
        lines += rows_of(name, table)
    head = "# The estimates of vector memory on TPUs, beside the figures that they are fitted to\n\n"
    about = (
        "An estimate over the compiler's figure, without the tables; left out: with weights found without the kernel."
    )
    text = f"{head}{about} {json.dumps(json.loads(_TABLE.read_text())['versions'])}\n\n"
    (_RESULTS / "memory_tpu_fit.md").write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
