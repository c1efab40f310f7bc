# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_attention_tpu`: vector memory of attention on TPUs, estimated and compiled; no TPU.

Each call is drawn by a seed, for `pallas_tpu` or `splash`: its length, head dimensions, mask and grouped heads as often
as models have them, with one to eight examples and the heuristic's parameters. Seeds from 100 have other parameters of
the space. Seeds from 200 also draw soft caps, float32, odd lengths and other head dimensions, and arrays of at least
160 MiB. Seed 0 has the calls of seed 100 with code that the table of compiled code lacks; `memory_tpu_fit --add` adds
their results to it. Google's compiler reports the bytes of vector memory that each kernel uses. Nothing runs on a TPU.

XLA keeps the arrays of a short call in vector memory itself, so that a kernel has no windows for them; `kept` has their
bytes. The ratio is our upper estimate over the compiler's figure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import attention_tpu
from benchmarks.drawn_tpu import TARGETS, Draws, ratio_table, ratios

_SHARES: dict[str, dict[Any, int]] = {
    "length": {1024: 1, 2048: 3, 4096: 4, 8192: 4, 16_384: 1, 32_768: 2},
    "dims": {(128, 128): 8, (64, 64): 3, (256, 256): 2, (192, 128): 1, (96, 96): 1},
    "mask": {"causal": 8, "full": 3, "window 1024": 1, "window 4096": 1},
    "segments": {False: 3, True: 1},
    "repeats": {1: 1, 4: 2},
    "chip": {"v5e": 1, "v5p": 1, "v6e": 1},
    "direction": {"forward": 1, "backward": 1},
}
_IMPLEMENTATIONS = ("pallas_tpu", "splash")
_SIZES = (1, 2, 4, 8)  # numbers of examples and key heads
_MORE: dict[str, dict[Any, int]] = {
    **_SHARES,
    "length": dict.fromkeys((128, 300, 777, 1024, 1500, 2048, 3000, 4096, 4099, 8192, 16_384), 1),
    "dims": {(head, value): 1 for head in (64, 72, 80, 112, 128, 160, 192, 256) for value in (head, 128)},
    "mask": dict.fromkeys(("causal", "full", "window 512", "window 1024", "two sides", "window 4096"), 1),
    "repeats": {1: 2, 2: 1, 4: 1, 8: 1},
    "soft_cap": {None: 4, 30.0: 1},
    "dtype": {"bfloat16": 7, "float32": 1},
}
_WINDOWS: dict[str, dict[str, int]] = {
    "two sides": {"left": 700, "right": 300},
    "window 4096": {"left": 4095, "right": 0},
}
_OF_SPACE, _ANY = 100, 200  # seeds from here have parameters of the space, and any sizes
_SMALL_MARGIN = 1.06
_CALLS = 3000  # of which those with code that the table lacks are chosen
_VALUES = 1 << 20
_LEAST = 160 << 20  # bytes of an array; a chip has 128 MiB of vector memory at most


def drawn(seed: int, index: int) -> dict[str, Any]:
    """Return a call, its parameters and our estimates."""
    if not seed:
        return missing()[index]
    dice = random.Random(f"calls {seed} {index}")
    shares = _MORE if seed >= _ANY else _SHARES
    case = {name: dice.choices(list(values), list(values.values()))[0] for name, values in shares.items()}
    case = {"soft_cap": None, "dtype": "bfloat16"} | case | {"dims": list(case["dims"])}
    if seed < _ANY:
        case |= {"examples": dice.choice(_SIZES), "key_heads": dice.choice(_SIZES)}
    case["implementation"] = dice.choice(_IMPLEMENTATIONS)
    implementation, call, _ = described(case)
    params = implementation.heuristic(call)
    if seed >= _OF_SPACE:
        space = [one for one in implementation.space(call) if implementation.doubt(call, one) is None]
        params = dice.choice(space or [params])
    case = {**case, "params": dataclasses.asdict(params)}
    return case | estimated(case)


def estimated(case: dict[str, Any]) -> dict[str, Any]:
    """Return our estimates of each kernel, and whether all are in the table of compiled ones."""
    from ejkernel.kernels.flash_attention._splash_weights import WEIGHTS
    from ejkernel.kernels.flash_attention.pallas_tpu.spilled import WEIGHTS as OWN

    found = parts_of(case)
    needs = [parts.need(WEIGHTS if case["implementation"] == "splash" else OWN) for parts in found]
    sizes = {name: [getattr(need, field) for need in needs] for name, field in _FIELDS.items()}
    return sizes | {"in table": all(parts.registers is not None for parts in found)}


@functools.cache
def missing() -> list[dict[str, Any]]:
    """Return drawn calls with code that the table lacks, each code once: frequent code of small kernels first."""
    calls = [(case, lacking(case)) for case in (drawn(_OF_SPACE, index) for index in range(_CALLS))]
    counts = Counter(code for _, lacks in calls for code in lacks)
    calls = [(case, lacks) for case, lacks in calls if lacks]
    calls.sort(key=lambda pair: -sum(counts[code] for code in pair[1]) / _work(pair[0]))
    chosen, found = set[str](), list[dict[str, Any]]()
    for case, lacks in calls:
        if not lacks <= chosen:
            found.append(case)
            chosen |= lacks
    return found


def _work(case: Mapping[str, Any]) -> float:
    """Return roughly how long the compiler takes for a call: it grows with the largest values of the kernels."""
    values: int = sum(max(parts.sizes.values()) for parts in parts_of(case))
    return 1 + values / _VALUES


def lacking(case: Mapping[str, Any]) -> set[str]:
    """Return the code of a call that is not in the table, and less like code of it than a small margin covers."""
    from ejkernel.kernels._vector_memory import alike

    kernels = [parts for parts in parts_of(case) if parts.registers is None]
    found = {name: alike(name) for parts in kernels for name in (parts.form, parts.loop) if name}
    return {name for name, like in found.items() if like is None or like.margin > _SMALL_MARGIN}


_FIELDS = {"estimated": "most", "least": "least"}


def described(case: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return implementation, call and operands of a case."""
    import jax

    from ejkernel.kernels.flash_attention import splash
    from ejkernel.kernels.flash_attention.common import Operands, Rules, describe
    from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu

    like: Any = jax.ShapeDtypeStruct
    length, (head_dim, value_dim) = case["length"], case["dims"]
    batch = math.ceil(_LEAST / (length * min(head_dim, value_dim) * (4 if case["dtype"] == "float32" else 2)))
    batch, heads = case.get("examples", batch), case.get("key_heads", 1)
    query = like((batch, length, heads * case["repeats"], head_dim), case["dtype"])
    key, value = (like((batch, length, heads, dim), case["dtype"]) for dim in (head_dim, value_dim))
    ids = like((batch, length), "int32") if case["segments"] else None
    operands = Operands(query, key, value, query_segments=ids, key_segments=ids)
    window = _WINDOWS.get(case["mask"]) or attention_tpu.MASKS[case["mask"]]
    rules = Rules(scale=head_dim**-0.5, left=window.get("left"), right=window.get("right"), soft_cap=case["soft_cap"])
    place: Any = {"platform": "tpu", "fingerprint": TARGETS[case["chip"]].fingerprint}
    call = describe(operands, rules, **place, backward=case["direction"] == "backward")
    return splash.Splash() if case["implementation"] == "splash" else PallasTpu(), call, operands


def parts_of(case: Mapping[str, Any]) -> list[Any]:
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


def params_of(implementation: Any, call: Any, sizes: Mapping[str, Any]) -> Any:
    """Return parameters with these sizes."""
    own = dict(sizes)
    if own.get("query") is not None:
        own["query"] = implementation.params_type(backward=False)(**own["query"])
    return implementation.params_type(backward=call.backward)(**own)


def compiled(case: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of vector memory of each kernel, and of the windows that it does not have."""
    import jax

    from benchmarks import tpu_windows

    implementation, call, operands = described(case)
    operands = jax.tree.map(TARGETS[case["chip"]].placed, operands)
    params = params_of(implementation, call, case["params"])
    folder = Path(os.environ["LIBTPU_INIT_ARGS"].removeprefix(tpu_windows.DUMP))
    for file in folder.iterdir():  # of the call before, which may have failed
        file.unlink()
    found = tpu_windows.of_attention(implementation, call, operands, params)
    spilled = [tpu_windows.spilled_of(one.name, folder) for one in found]
    return {"used": [one.used for one in found], "kept": [one.kept for one in found], "spilled": spilled}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the distribution of the ratios by class, as a Markdown table."""
    kinds: dict[str, Callable[[dict[str, Any]], bool]] = {
        "all": lambda one: True,
        "in the table": lambda one: bool(one["in table"]),
        "others": lambda one: not one["in table"],
    }
    for name in ("implementation", "chip", "direction"):
        for value in dict.fromkeys(one[name] for one in results):
            kinds[value] = functools.partial(_has, name, value)
    classes = {kind: [x for one in results if of_kind(one) for x in ratios(one)] for kind, of_kind in kinds.items()}
    classes["missing windows added"] = [x for one in results for x in ratios(one, with_kept=True)]
    compiled = [(one["least"], one["used"], one["kept"]) for one in results if "used" in one]
    above = sum(least > used + kept for lists in compiled for least, used, kept in zip(*lists, strict=True))
    notes = f"The lower estimate exceeds the compiler's figure in {above} kernels."
    failed = sum("error" in one for one in results)
    return "\n".join([*ratio_table(classes), "", f"{notes} {failed} calls did not compile."])


def _has(name: str, value: str, one: dict[str, Any]) -> bool:
    return bool(one[name] == value)


DRAWS = Draws(
    module="memory_attention_tpu",
    about=__doc__,
    what="our estimate of vector memory over the figure of Google's compiler; nothing ran on a TPU",
    drawn=drawn,
    compiled=compiled,
    title="Vector memory of attention, compiled",
    table=table,
    seconds=240.0,
    dumps=True,
)


if __name__ == "__main__":
    DRAWS.main()
