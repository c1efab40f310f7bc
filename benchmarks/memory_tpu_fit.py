# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_tpu_fit WHAT RESULTS...`: fit the estimates of vector memory on TPUs to figures.

The results are files of `benchmarks.memory_tpu`, `memory_splash_tpu`, `memory_tpu_calls`, `memory_others_tpu` and
`heuristics_tpu`.

`table` adds to the table of compiled kernels. Kernels of one form take the same vector memory for intermediate values.
The table has these bytes for each form, the highest if several kernels of a form were compiled, and the registers of
`tpu_ragged`. Prints how far the kernels of a form differ.

`pallas_tpu`, `splash` and `others` fit the estimates of kernels that are not in the table. For each kind of kernel, a
linear program finds weights of the sizes that the estimate has. They minimise the sum of the estimates, each over the
compiler's figure, and give no estimate below it. The weights are then found again without a tenth of the kernels, and
the estimates of that tenth compared with the compiler's figures, for each tenth of three orders. A margin covers most
of these kernels. Prints the shares of estimates within 10 % and 20 %, and of those below the compiler's figure in this
comparison.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import attention_tpu, heuristics_tpu, memory_others_tpu, memory_splash_tpu, memory_tpu, memory_tpu_calls
from benchmarks.drawn_tpu import Draws

_MARGINS = (0.04, 0.6)
_OF_PRODUCTS = 0.3  # the margin of grouped products, and the weight of a constant; twice that in float32
_OF_NORMS = 0.12  # the least margin of row norms
_FEW = 40  # kernels of a kind; for fewer, the margin covers all that are left out
_FOLDER = Path(__file__).parents[1] / "src/ejkernel/kernels"
_WEIGHTS = {
    "pallas_tpu": "flash_attention/pallas_tpu/spilled.py",
    "splash": "flash_attention/_splash_weights.py",
    "others": "_spilled.py",
}
_DRAWS: dict[str, tuple[Draws, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "pallas_tpu": (memory_tpu.DRAWS, memory_tpu.estimated),
    "splash": (memory_splash_tpu.DRAWS, lambda one: memory_splash_tpu.estimates(one, one["params"])),
    "others": (memory_others_tpu.DRAWS, memory_others_tpu.estimated),
}
_TABLE = Path(__file__).parents[1] / "src/ejkernel/data/compiled/tpu.json"
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


def implementation_of(result: dict[str, Any]) -> str:
    """Return the implementation of a result: those of `memory_splash_tpu` have a figure by kernel."""
    if "sizes" in result:
        return "others"
    name: str = result.get("implementation") or ("splash" if isinstance(result["estimated"], dict) else "pallas_tpu")
    return name


def kernels(results: Sequence[dict[str, Any]]) -> Iterator[Kernel]:
    """Yield the compiled kernels of results."""
    for one in results:
        if "used" not in one:
            continue
        if "sizes" in one:
            (parts,) = memory_others_tpu.parts_of(one)
            yield Kernel(parts, one["used"][0] + one.get("kept", (0,))[0])
            continue
        if "kv_heads" in one:
            parts = heuristics_tpu.parts_of(one)
            yield from map(Kernel, parts, one["used"] if len(parts) == 1 else ())  # the order of several is unknown
            continue
        if isinstance(one["used"], dict):
            yield from _of_splash(one)
            continue
        parts = memory_tpu_calls.parts_of({"implementation": "pallas_tpu"} | one)
        kept = one.get("kept", [0] * len(parts))  # older results are of kernels that have all windows but small ones
        yield from map(Kernel, parts, map(sum, zip(one["used"], kept, strict=True)))


def _of_splash(one: dict[str, Any]) -> Iterator[Kernel]:
    from ejkernel.kernels.flash_attention.splash import Splash

    call = memory_splash_tpu.call_of(one)
    params = Splash().params_type(backward=call.backward)(**one["params"])
    for name, parts in memory_splash_tpu.parts_by_kernel(call, params).items():
        yield Kernel(parts, one["used"][name] + one.get("kept", {}).get(name, 0))


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


def estimate(one: Kernel, weights: dict[str, float], margin: float = 0.0) -> float:
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
            others = [found[index] for index in order if index not in tenth]
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


def shares(ratios: Sequence[float]) -> str:
    """Return the distribution of the ratios in words."""
    within = (f"{sum(1 <= ratio <= most for ratio in ratios) / len(ratios):.0%}" for most in (1.1, 1.2))
    below = sum(ratio < 1 for ratio in ratios) / len(ratios)
    return (
        f"{' and '.join(within)} within 1.1 and 1.2, median {statistics.median(ratios):.3f}, {below:.2%} below 1, the "
        f"least {min(ratios):.3f}"
    )


def weights_of(what: str) -> dict[str, dict[str, float]]:
    """Return the weights that the package has; kinds without results keep theirs."""
    module = _WEIGHTS[what].removesuffix(".py").replace("/", ".")
    found: dict[str, dict[str, float]] = importlib.import_module(f"ejkernel.kernels.{module}").WEIGHTS
    return found


def merged(results: Sequence[dict[str, Any]], what: str, table: dict[str, dict[str, float]], out: Path) -> None:
    """Write all results for `what` with the estimates of new weights, and their table."""
    weights = weights_of(what)
    weights.clear()
    weights.update(table)
    draws, estimated = _DRAWS[what]
    found = [one | estimated(one) for one in results]
    seeds = {one["seed"] for one in found}
    by_hand = " and chosen by hand" if None in seeds else ""
    names = ", ".join(map(str, sorted(seeds - {None})))
    about = f"{draws.what}; seeds {names}{by_hand}. The estimate is fitted to these kernels"
    data = {"what": about, "versions": attention_tpu.versions() | {"device": "compiled"}}
    lines = ",\n".join(f"    {json.dumps(one)}" for one in found)
    out.write_text(f'{json.dumps(data, indent=2)[:-2]},\n  "results": [\n{lines}\n  ]\n}}\n')
    head = f"# {draws.title}\n\n{about}. {json.dumps(data['versions'])}"
    out.with_suffix(".md").write_text(f"{head}\n\n{draws.table(found)}\n")


def write_table(results: Sequence[dict[str, Any]]) -> None:
    """Add kernels to the table of compiled ones, and print how far those of one form differ."""
    tables = json.loads(_TABLE.read_text())
    by_form: dict[str, list[Kernel]] = {}
    whole = [one for one in results if "sizes" not in one or memory_others_tpu.has_all_windows(one)]
    for one in kernels(whole):
        if one.parts.form:
            by_form.setdefault(one.parts.form, []).append(one)
    found = {form: max(one.used - one.parts.known for one in several) for form, several in by_form.items()}
    above = [(one.parts.known + found[form]) / one.used for form, several in by_form.items() for one in several]
    furthest = max(above, default=1.0) - 1
    print(f"{len(above)} kernels of {len(found)} forms; the highest of a form is up to {furthest:.1%} above")
    tables["bytes"] = dict(sorted((tables["bytes"] | found).items()))
    for result in results:
        if result.get("alone") and "used" in result:
            memory_others_tpu.add_registers(tables["registers"], result)
    tables |= {"what": _WHAT, "versions": attention_tpu.versions() | {"device": "compiled"}}
    registers = ",\n".join(
        f"  {json.dumps(form)}: {json.dumps(row)}" for form, row in sorted(tables.pop("registers").items())
    )
    _TABLE.write_text(f'{json.dumps(tables, indent=1)[:-2]},\n "registers": {{\n{registers}\n }}\n}}\n')


def fit(found: Iterable[Kernel], covered: float) -> dict[str, dict[str, float]]:
    """Return the weights of each kind of kernel, and print how good they are."""
    by_kind: dict[str, list[Kernel]] = {}
    for one in found:
        by_kind.setdefault(one.parts.kind, []).append(one)
    table, of_fit, of_others = {}, [], []
    for kind, several in sorted(by_kind.items()):
        weights, pairs = fitted(several), left_out(several)
        margin = margin_of(pairs, covered if len(several) >= _FEW else 1.0)
        if "norm" in kind:
            margin = max(margin, _OF_NORMS)
        if kind.startswith("grouped"):
            # their values are few, or none, so that a share of them says little
            margin = _OF_PRODUCTS * (2 if "float32" in kind else 1)
            weights["constant"] = weights.get("constant", 0.0) + margin
        print(f"{kind}: {len(several)} kernels, margin {margin:.2f}")
        # rounded up, so that no estimate of the fit is below the compiler's figure
        table[kind] = {name: round(weight * (1 + margin) + 5e-4, 3) for name, weight in weights.items()}
        of_fit += [estimate(one, table[kind]) / one.used for one in several]
        of_others += [estimate(one, weights, margin) / one.used for one, weights in pairs]
    print(f"{len(of_fit)} kernels of the fit: {shares(of_fit)}")
    print(f"each left out of the fit: {shares(of_others)}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table or the weights, and print how good they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", *_WEIGHTS))
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--covered", type=float, default=0.99, help="the share of the kernels left out to cover")
    parser.add_argument("--merged", type=Path, help="a JSON file for all results with the new estimates")
    given = parser.parse_args(arguments)
    results = []
    for file in given.results:
        data = json.loads(file.read_text())
        results += [{"seed": data.get("seed")} | one for one in data["results"]]
    if given.what == "table":
        write_table(results)
        return
    results = [one for one in results if implementation_of(one) == given.what]
    table = weights_of(given.what) | fit(kernels(results), given.covered)
    (_FOLDER / _WEIGHTS[given.what]).write_text(f"{_HEAD}{json.dumps(table, indent=4)}\n")
    if given.merged is not None:
        merged(results, given.what, table, given.merged)


if __name__ == "__main__":
    main()
