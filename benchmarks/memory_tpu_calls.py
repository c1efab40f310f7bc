# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_tpu_calls`: vector memory of attention in calls as models make them; needs no TPU.

Each call is drawn by a seed: its length, head dimensions, mask and grouped heads as often as models have them, one to
eight examples, and `pallas_tpu` or `splash` with the heuristic's parameters, or with other parameters of the space for
seeds from 100. Google's compiler reports the bytes of vector memory that each kernel uses. XLA keeps the arrays of a
call with few bytes in vector memory itself, so that the kernel has no windows for them; `kept` has their bytes.

Seed 0 lists the most common calls instead, one for each form of kernel that the common calls of
`benchmarks.memory_tpu` do not have, with arrays too long for vector memory.

The ratio is our upper estimate over the compiler's figure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import attention_tpu, memory_tpu
from benchmarks.drawn_tpu import Draws, ratio_table

_SHARES: dict[str, dict[Any, int]] = {
    "length": {1024: 1, 2048: 3, 4096: 4, 8192: 4, 16_384: 1, 32_768: 2},
    "dims": {(128, 128): 8, (64, 64): 3, (256, 256): 2, (192, 128): 1, (96, 96): 1},
    "mask": {"causal": 8, "full": 3, "window 1024": 1, "window 4096": 1},
    "segments": {False: 3, True: 1},
    "repeats": {1: 1, 4: 2},
    "chip": {"v5e": 1, "v5p": 1, "v6e": 1},
    "direction": {"forward": 1, "backward": 1},
}
_IMPLEMENTATIONS = {"pallas_tpu": 341, "splash": 100}  # calls that seed 0 lists
_COMPILED = {"pallas_tpu": 108, "splash": memory_tpu.COMMON}  # common calls with results of other benchmarks
_OF_SPACE = 100  # seeds from here have parameters of the space


def drawn(seed: int, index: int) -> dict[str, Any]:
    """Return a call, its parameters and our estimates."""
    dice = random.Random(f"calls {seed} {index}")
    if seed == 0:
        case = _listed()[index]
    else:
        shares = {name: dice.choices(list(values), list(values.values()))[0] for name, values in _SHARES.items()}
        sizes = {"examples": dice.choice((1, 2, 4, 8)), "key_heads": dice.choice((1, 2, 4, 8))}
        case = _case(shares) | sizes | {"implementation": dice.choice(tuple(_IMPLEMENTATIONS))}
    implementation, call, _ = described(case)
    params = implementation.heuristic(call)
    if seed >= _OF_SPACE:
        params = dice.choice([one for one in implementation.space(call) if implementation.doubt(call, one) is None])
    case = {**case, "params": dataclasses.asdict(params)}
    return case | {"estimated": [need.most for need in _needs(case)], "in table": _is_in_table(case)}


def _case(shares: Mapping[str, Any]) -> dict[str, Any]:
    return {**shares, "dims": list(shares["dims"]), "soft_cap": None, "dtype": "bfloat16"}


@functools.cache
def _listed() -> list[dict[str, Any]]:
    return [case for name, count in _IMPLEMENTATIONS.items() for case in itertools.islice(_new(name), count)]


def _new(name: str) -> Iterator[dict[str, Any]]:
    """Yield the most common calls with another form of kernel than the calls before and common ones."""
    known: set[str] = set()
    for index in range(_COMPILED[name]):
        known.update(_forms(memory_tpu.common_call(index) | {"implementation": name}))
    every = list(itertools.product(*(values.items() for values in _SHARES.values())))
    every.sort(key=lambda pairs: -math.prod(share for _, share in pairs))
    for pairs in every:
        case = _case(dict(zip(_SHARES, (value for value, _ in pairs), strict=True))) | {"implementation": name}
        if not known.issuperset(forms := _forms(case)):
            known.update(forms)
            yield case


def _forms(case: dict[str, Any]) -> list[str]:
    implementation, call, _ = described(case)
    if implementation.unsupported(call) is not None:
        return []
    return [parts.form for parts in parts_of(case | {"params": dataclasses.asdict(implementation.heuristic(call))})]


def described(case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return implementation, call and operands of a case."""
    from ejkernel.kernels.flash_attention import splash
    from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu

    implementation = splash.Splash() if case["implementation"] == "splash" else PallasTpu()
    return implementation, *memory_tpu.described(case)


def parts_of(case: dict[str, Any]) -> list[Any]:
    """Return the memory of each kernel by its causes, in the order of the kernels' names."""
    implementation, call, _ = described(case)
    return parts_of_call(implementation, call, params_of(implementation, call, case["params"]))


def parts_of_call(implementation: Any, call: Any, params: Any) -> list[Any]:
    """Return the memory of each kernel of a call by its causes."""
    from ejkernel.kernels.flash_attention import _splash_memory, splash
    from ejkernel.kernels.flash_attention.pallas_tpu import choices

    if implementation.name == "splash":
        return [_splash_memory.parts_of(call, name, own) for name, own in splash.blocks_of(params).items()]
    return choices.parts_of(call, params)


def params_of(implementation: Any, call: Any, sizes: dict[str, Any]) -> Any:
    """Return parameters with these sizes."""
    own = dict(sizes)
    if own.get("query") is not None:
        own["query"] = implementation.params_type(backward=False)(**own["query"])
    return implementation.params_type(backward=call.backward)(**own)


def _needs(case: dict[str, Any]) -> list[Any]:
    from ejkernel.kernels.flash_attention._splash_weights import WEIGHTS
    from ejkernel.kernels.flash_attention.pallas_tpu.spilled import WEIGHTS as OWN

    weights = WEIGHTS if case["implementation"] == "splash" else OWN
    return [parts.need(weights) for parts in parts_of(case)]


def _is_in_table(case: dict[str, Any]) -> bool:
    from ejkernel.kernels._vector_memory import compiled as known

    return all(parts.form in known() for parts in parts_of(case))


def compiled(case: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of vector memory of each kernel, and of the windows that it does not have."""
    from benchmarks import tpu_windows

    implementation, call, operands = described(case)
    operands = tpu_windows.placed(operands, attention_tpu.TOPOLOGIES[case["chip"]])
    params = params_of(implementation, call, case["params"])
    found = tpu_windows.of_attention(implementation, call, operands, params)
    return {"used": [one.used for one in found], "kept": [one.kept for one in found]}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the distribution of the ratios by class, as a Markdown table."""
    kinds: dict[str, Callable[[dict[str, Any]], bool]] = {
        "all": lambda one: True,
        "in the table": lambda one: bool(one["in table"]),
        "others": lambda one: not one["in table"],
        **{name: functools.partial(_has, "implementation", name) for name in _IMPLEMENTATIONS},
        **{chip: functools.partial(_has, "chip", chip) for chip in _SHARES["chip"]},
    }
    ratios = [(one, ratio, kept) for one in results for ratio, kept in zip(*_ratios(one), strict=True)]
    classes = {kind: [ratio for one, ratio, _ in ratios if of_kind(one)] for kind, of_kind in kinds.items()}
    classes["arrays in HBM"] = [ratio for _, ratio, kept in ratios if kept is None]
    classes["short arrays, without the missing windows"] = [kept for _, _, kept in ratios if kept is not None]
    return "\n".join([*ratio_table(classes), "", f"{sum('error' in one for one in results)} calls did not compile."])


def _ratios(one: dict[str, Any]) -> tuple[list[float], list[float | None]]:
    """Return the ratio of each kernel, and the ratio without missing windows, `None` if it has all."""
    kernels = list(zip(one["estimated"], one.get("used", ()), one.get("kept", ()), strict=False))
    without = [(estimate - kept) / used if kept else None for estimate, used, kept in kernels]
    return memory_tpu.ratios(one), without


def _has(name: str, value: str, one: dict[str, Any]) -> bool:
    return bool(one[name] == value)


DRAWS = Draws(
    module="memory_tpu_calls",
    about=__doc__,
    what="our estimate of vector memory over the figure of Google's compiler; nothing ran on a TPU",
    drawn=drawn,
    compiled=compiled,
    title="Vector memory of attention in common calls, compiled",
    table=table,
    seconds=240.0,
)


if __name__ == "__main__":
    DRAWS.main()
