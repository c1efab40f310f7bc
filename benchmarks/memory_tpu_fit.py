# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_tpu_fit`: write the tables and weights of vector memory on TPUs from committed figures.

Kernels of one form take the same vector memory for intermediate values. The table has these bytes for each form of the
attention calls, the highest if several kernels of a form were compiled, and the margins of code that is like other code
of it. `--add` adds new results: calls of `benchmarks.memory_attention_tpu` to the committed figures, and the registers
of listed kernels of `benchmarks.memory_others_tpu` (seeds 0 and 1) to the tables.

For other kernels of each kind, a linear program finds weights of some sizes. They minimise the sum of the estimates,
each over the compiler's figure, and give no estimate below it. The weights are then found again without a tenth of the
kernels, and the estimates of that tenth compared with the compiler's figures, for each tenth of three orders. A margin
covers most of these kernels. The sizes are those with the smallest estimates of kernels left out. `memory_tpu_fit.md`
has the shares of estimates within 10 % and 20 %, for all kernels and for those left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import heuristics_tpu, memory_attention_tpu, memory_others_tpu
from ejkernel.kernels import _alike
from ejkernel.kernels._vector_memory import REGISTER, Parts

Weights = dict[str, dict[str, float]]

_RESULTS = Path(__file__).parent / "results"
_SOURCES = Path(__file__).parents[1] / "src/ejkernel"
_TABLE = _SOURCES / "data/compiled/tpu.json"
_WEIGHTS = {
    "pallas_tpu": "kernels/flash_attention/pallas_tpu/spilled.py",
    "splash": "kernels/flash_attention/_splash_weights.py",
    "others": "kernels/_spilled.py",
}
_MARGINS = (0.08, 0.6)
_OF_NORMS, _OF_FLOAT32 = 0.3, 0.25  # the least margins of row norms, and of attention in float32
_MOST = 8  # sizes of a kind with a weight
_ESTIMATES = ("estimated", "least", "in table")  # of a result; they change with the fit
_PRICE = 1e3
_FEW = 40  # kernels of a kind; for fewer, the margin covers all that are left out
_COVERED = 0.995  # the share of the kernels left out that a margin covers
# Of the margins of code alike: the share of kernels that they need not cover, a spare, one for few kernels, and limits.
_NOT_COVERED, _SPARE, _SPARE_OF_FEW, _LEAST_MARGIN, _MOST_MARGIN = 0.01, 0.025, 0.35, 1.06, 1.2
_FEW_OF_VIEW = 8  # kernels; a view with fewer is not used
_WHAT = "registers of intermediate values in kernels compiled by Google's compiler; nothing ran on a TPU"
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
    """The weights of a kind of kernel, with its kernels, and estimates over figures of kernels left out of a fit."""

    weights: dict[str, float]
    margin: float
    kernels: list[Kernel]
    left_out: list[float]


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
        # the order of two kernels is unknown, and one that takes less than is known has no windows for some arrays
        pairs = zip(
            sorted(heuristics_tpu.parts_of(one), key=lambda parts: parts.known), sorted(one["used"]), strict=True
        )
        found[one["implementation"]] += [Kernel(parts, used) for parts, used in pairs if used > parts.known]
    for one in results_of("memory_norms_tpu_fitted"):
        found["others"] += _of_result([memory_others_tpu.parts_of(one)], one)
    found["others"] += map(Kernel, *zip(*memory_others_tpu.kernels_of_table(), strict=True))
    return found


def _of_result(parts: Sequence[Any], one: Mapping[str, Any]) -> Iterator[Kernel]:
    """Yield the kernels of a result; older ones have no windows in `kept`, and were compiled with all."""
    kept = one.get("kept", [0] * len(parts))
    yield from (Kernel(own, used + more) for own, used, more in zip(parts, one["used"], kept, strict=True))


class _Problem(NamedTuple):
    """The kernels of a kind as arrays: bytes of each size, by name, bytes used, and those that the sizes explain."""

    names: list[str]
    sizes: Any
    used: Any
    spilled: Any

    @classmethod
    def of(cls, found: Sequence[Kernel]) -> _Problem:
        """Return the problem of kernels, without sizes that are 0 in all."""
        names = [name for name in found[0].parts.sizes if any(one.parts.sizes[name] for one in found)]
        sizes = [[4.0 * one.parts.sizes[name] for name in names] for one in found]
        used, known = (
            [float(size) for size in column] for column in zip(*((k.used, k.parts.known) for k in found), strict=True)
        )
        return cls(names, np.array(sizes), np.array(used), np.array(used) - np.array(known))

    def solved(self, columns: Sequence[int], rows: Any = slice(None)) -> tuple[Any, float]:
        """Return the weights of some sizes for some kernels, and their cost: the sum of the estimates over the figures.

        A share of all figures, at a high price, stands for sizes that are missing.
        """
        from scipy.optimize import linprog  # type: ignore[import-untyped, unused-ignore]

        used = self.used[rows]
        sizes = np.column_stack([self.sizes[rows][:, list(columns)], used])
        # the second term prefers few weights where several sizes are equal
        cost = (sizes / used[:, None]).sum(0) + 1e-3 * sizes.mean(0) / used.mean() + 1e-9
        cost[-1] *= _PRICE
        solved = linprog(
            cost, A_ub=-sizes, b_ub=-self.spilled[rows], bounds=[(0, None)] * sizes.shape[1], method="highs"
        )
        return solved.x, float(solved.fun)

    def left_out(self, columns: Sequence[int]) -> list[tuple[int, float]]:
        """Return random kernels, each with its spilled bytes by weights that are fitted to other kernels."""
        pairs: list[tuple[int, float]] = []
        for seed in range(1, 4):
            order = np.array(random.Random(seed).sample(range(len(self.used)), len(self.used)))
            for start in range(min(10, len(order))):
                tenth, others = order[start::10], np.delete(order, slice(start, None, 10))
                weights, _ = self.solved(columns, others)
                pairs += zip(tenth, self.sizes[tenth][:, list(columns)] @ weights[:-1], strict=True)
        return pairs

    def margin(self, pairs: Sequence[tuple[int, float]]) -> float:
        """Return the share of the spilled bytes to add to them, to cover most of the kernels left out."""
        lacking = sorted(self.spilled[index] / max(spilled, 1) - 1 for index, spilled in pairs)
        covered = _COVERED if len(self.used) >= _FEW else 1.0
        least, most = _MARGINS
        return float(min(max(lacking[int(covered * (len(lacking) - 1))], least), most))

    def ratios(self, pairs: Sequence[tuple[int, float]], margin: float) -> list[float]:
        """Return the estimates of kernels left out over their figures."""
        return [float(1 + (spilled * (1 + margin) - self.spilled[i]) / self.used[i]) for i, spilled in pairs]

    def chosen(self) -> list[int]:
        """Return the sizes with the smallest estimates of kernels left out.

        Sizes are added one by one, each the best beside those before. More sizes are closer to the kernels of the fit,
        but need a larger margin for others.
        """
        columns: list[int] = []
        found: list[tuple[float, list[int]]] = []
        for _ in range(min(_MOST, len(self.names))):
            others = [column for column in range(len(self.names)) if column not in columns]
            columns = [*columns, min(others, key=lambda column: self.solved([*columns, column])[1])]
            pairs = self.left_out(columns)
            missing = self.solved(columns)[0][-1] > 1e-9
            score = statistics.fmean(self.ratios(pairs, self.margin(pairs)))
            found.append((math.inf if missing else score, columns))
        return min(found)[1]


def fit_of(found: Sequence[Kernel]) -> Fit:
    """Return the weights of a kind of kernel."""
    problem = _Problem.of(found)
    columns = problem.chosen()
    pairs = problem.left_out(columns)
    margin = problem.margin(pairs)
    kind = found[0].parts.kind
    margin = max(margin, _OF_NORMS if "norm" in kind else _OF_FLOAT32 if kind.endswith("float32") else 0)
    # rounded up, so that no estimate of the fit is below the compiler's figure
    weights = (round(float(weight) * (1 + margin) + 5e-4, 3) for weight in problem.solved(columns)[0])
    table = {problem.names[column]: weight for column, weight in zip(columns, weights, strict=False)}
    return Fit(table, margin, list(found), problem.ratios(pairs, margin))


def fits(found: Iterable[Kernel]) -> dict[str, Fit]:
    """Return the weights of each kind of kernel."""
    by_kind: dict[str, list[Kernel]] = {}
    for one in found:
        by_kind.setdefault(one.parts.kind, []).append(one)
    return {kind: fit_of(several) for kind, several in sorted(by_kind.items())}


def estimate(one: Kernel, weights: Mapping[str, float]) -> float:
    """Return the upper estimate of a kernel."""
    return float(one.parts.known + 4 * sum(one.parts.sizes[name] * weight for name, weight in weights.items()))


def shares(ratios: Sequence[float]) -> str:
    """Return the distribution of ratios as cells of a Markdown table."""
    within = (f"{sum(1 <= ratio <= most for ratio in ratios) / len(ratios):.0%}" for most in (1.1, 1.2))
    cells = (f"{min(ratios):.3f}", *within, f"{statistics.median(ratios):.3f}", f"{max(ratios):.2f}")
    return " | ".join((*cells, f"{sum(ratio < 1 for ratio in ratios) / len(ratios):.1%}"))


def rows_of(name: str, found: Mapping[str, Fit]) -> Iterator[str]:
    """Yield the quality of the weights in a file as rows of a Markdown table."""
    groups: dict[str, list[Fit]] = {}
    for kind, fit in found.items():
        whole = {"paged": "tpu_ragged"}.get(kind.split(",")[0], "row norms") if name == "others" else name
        groups.setdefault(f"**{whole}**", []).append(fit)
    for label, several in (groups | {f"{name}: {kind}": [fit] for kind, fit in found.items()}).items():
        own = [estimate(one, fit.weights) / one.used for fit in several for one in fit.kernels]
        others = [ratio for fit in several for ratio in fit.left_out]
        yield f"| {label} | {len(own)} | {shares(own)} | {shares(others)} |"


def code_of_forms() -> dict[str, list[int]]:
    """Return the registers of compiled code: all without loops and those during a loop, and those of each loop.

    The compiler's program of a kernel names them. If it was not kept, its figure gives those of the loops or of the
    other code, where another kernel has told one of them. The listed calls have all registers of the others.
    """
    found: dict[str, list[int]] = {}
    sums: list[tuple[Parts, int]] = []
    for parts, one, index in _of_attention():
        if "spilled" in one:
            straight, around, loop = one["spilled"][index]
            # scratch arrays of code without loops may be registers, or not
            straight = straight if parts.loop else max(straight, registers_of(parts, one, index))
            _add(found, parts.form, straight, around)
            _add(found, parts.loop, loop)
        else:
            sums.append((parts, registers_of(parts, one, index)))
    known = -1
    while known < len(found):
        known = len(found)
        _add_from_sums(found, sums)
    for one in results_of("memory_attention_tpu_listed"):
        for index, parts in enumerate(memory_attention_tpu.parts_of(one)):
            if parts.loop and not (parts.form in found and parts.loop in found):
                _add(found, parts.whole, registers_of(parts, one, index))
    return {form: found[form] for form in sorted(found) if form}


def margins_of_views(code: Mapping[str, Sequence[int]]) -> dict[str, dict[str, float]]:
    """Return the margin of each view of code outside the table, by kind.

    With it, the estimates of kernels in the table by other code with the same view are not below their figures. Views
    with the least estimates come first.
    """
    found: dict[str, dict[str, list[float]]] = {}
    likeness, seen = _alike.Likeness(code, {}), set[tuple[Any, ...]]()
    for parts, one, _ in _of_attention():
        names = [name for name in (parts.form, parts.loop) if name]
        if not names or not all(name in code for name in names) or (*names, parts.known) in seen:
            continue
        seen.add((*names, parts.known))
        for name in (name for name in names if _is_exact(name, one)):
            for view, ratio in _ratios_of_views(likeness, parts, name, code):
                found.setdefault(_alike.kind_of(name), {}).setdefault(view, []).append(ratio)
    return {kind: dict(_margins_of_kind(views)) for kind, views in sorted(found.items())}


def _is_exact(name: str, one: Mapping[str, Any]) -> bool:
    """Return whether the registers of code are known apart from those of loops in other branches."""
    return "spilled" in one or ", loop" in name or not any(word in name.split(", ") for word in ("ids", "streamed"))


def _ratios_of_views(
    likeness: Any, parts: Parts, name: str, code: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, float]]:
    """Yield each view of code with the estimate of a kernel's memory by other code in its place, over the figure."""
    start = name.partition(";")[0]

    def is_other(other: str, view: str) -> bool:
        return other != name if view == "details" else other.partition(";")[0] != start

    def memory(given: Mapping[str, Sequence[float]]) -> float:
        straight, around = given[parts.form]
        loop = given[parts.loop][0] if parts.loop else 0
        return parts.known + REGISTER * max(straight, around + loop)

    for view, registers in likeness.found(name, is_other).items():
        yield view, memory({**code, name: registers}) / memory(code)


def _margins_of_kind(views: Mapping[str, list[float]]) -> Iterator[tuple[str, float]]:
    """Yield the views of a kind of code with their margins, those with the least estimates first."""
    found = []
    for view, ratios in views.items():
        if len(ratios) >= _FEW_OF_VIEW:
            spare = _SPARE + _SPARE_OF_FEW / len(ratios)
            margin = max(1 / float(np.quantile(ratios, _NOT_COVERED)) + spare, _LEAST_MARGIN)
            found.append((statistics.fmean(ratios) * margin, view, round(margin, 3)))
    yield from ((view, margin) for _, view, margin in sorted(found) if margin <= _MOST_MARGIN)


def registers_of(parts: Parts, one: Mapping[str, Any], index: int) -> int:
    """Return the registers of a kernel that are in memory by its figure."""
    kept = one.get("kept", [0] * (index + 1))[index]
    registers: int = -(-(one["used"][index] + kept - parts.known) // REGISTER)
    return max(registers, 0)


def _add_from_sums(found: dict[str, list[int]], sums: Iterable[tuple[Parts, int]]) -> None:
    """Add code of kernels whose other code is known."""
    before = {form: list(numbers) for form, numbers in found.items()}
    for parts, registers in sums:
        if not parts.loop:
            _add(found, parts.form, registers, 0)
        elif parts.loop in before and parts.form not in before:
            around = max(registers - before[parts.loop][0], 0)
            _add(found, parts.form, registers if _has_branches(parts) else around, around)
        elif parts.form in before and parts.loop not in before:
            _add(found, parts.loop, max(registers - before[parts.form][1], 0))


def _of_attention() -> Iterator[tuple[Parts, dict[str, Any], int]]:
    """Yield the compiled kernels of attention: their memory by its causes, their result, and their place in it."""
    for file in ("memory_attention_tpu_listed", "memory_attention_tpu_fitted"):
        for one in results_of(file):
            for index, parts in enumerate(memory_attention_tpu.parts_of(one)):
                yield parts, one, index


def _add(found: dict[str, list[int]], form: str, *numbers: int) -> None:
    found[form] = [max(pair) for pair in zip(numbers, found.get(form, numbers), strict=True)]


def _has_branches(parts: Parts) -> bool:
    """Return whether code outside of loops may be in branches, which do not add up with loops."""
    return any(word in ("ids", "streamed") for word in parts.form.split(", "))


def written_weights(table: Weights) -> str:
    """Return a module with these weights, each on a line as `ruff format` leaves it."""
    lines = []
    for kind, weights in table.items():
        lines += [f'    "{kind}": {{', *(f'        "{name}": {weight},' for name, weight in weights.items()), "    },"]
    return "\n".join([f"{_HEAD}{{", *lines, "}", ""])


def add_results(files: Iterable[Path]) -> None:
    """Add calls of attention to the figures, and the registers of other kernels to the tables."""
    tables, calls = json.loads(_TABLE.read_text()), []
    for data in (json.loads(file.read_text()) for file in files):
        tables["versions"] = data["versions"]
        for result in (one for one in data["results"] if "used" in one):
            if "implementation" in result:
                calls.append({name: value for name, value in result.items() if name not in _ESTIMATES})
            else:
                memory_others_tpu.add_registers(tables, result)
    if calls:
        _add_calls(calls, tables["versions"])
    write_tables(tables)


def _add_calls(calls: Sequence[dict[str, Any]], versions: dict[str, str]) -> None:
    path = _RESULTS / "memory_attention_tpu_fitted.json"
    data = json.loads(path.read_text())
    lines = dict.fromkeys(map(json.dumps, [*data.pop("results"), *calls]))
    text = json.dumps(data | {"versions": versions}, indent=2)[:-2]
    path.write_text(f'{text},\n  "results": [\n' + ",\n".join(f"    {line}" for line in lines) + "\n  ]\n}\n")


def write_tables(tables: dict[str, Any]) -> None:
    """Write the tables of compiled kernels, one form a line."""
    text = json.dumps({"what": _WHAT, "versions": tables["versions"]}, indent=1)[:-2]
    for name in ("margins", "code", "registers", "tiles", "norms"):
        rows = (f"  {json.dumps(form)}: {json.dumps(row)}" for form, row in sorted(tables.get(name, {}).items()))
        text += f',\n "{name}": {{\n' + ",\n".join(rows) + "\n }"
    _TABLE.write_text(f"{text}\n}}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table, the weights and how good they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="*", default=(), help="results with registers for the tables")
    given = parser.parse_args(arguments)
    if given.add:
        add_results(given.add)
    code = code_of_forms()
    write_tables(json.loads(_TABLE.read_text()) | {"code": code, "margins": margins_of_views(code)})
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
