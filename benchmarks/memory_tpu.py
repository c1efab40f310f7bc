# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_tpu`: vector memory of `pallas_tpu` kernels, estimated and compiled; needs no TPU.

Each call is drawn by a seed from all combinations of chip, direction, mask, soft cap, ids, dtype, length, head
dimension and grouped heads. It has the heuristic's parameters or others of the space, also those that do not fit in our
estimate. Seed 0 lists common calls instead, with the heuristic's parameters. Google's compiler compiles each call for
arrays of at least 160 MiB, since XLA keeps short ones in vector memory (`benchmarks.memory_tpu_calls`), and reports the
bytes of vector memory that each kernel uses. Nothing runs on a TPU.

The ratio is our upper estimate over the compiler's figure. A kernel that the compiler refuses has its reason.
Parameters fit if the upper estimate does, and are refused if the lower one does not. Otherwise the compiler decides.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import attention_tpu
from benchmarks.drawn_tpu import Draws, ratio_table

_DEVICES = {"v5e": "tpu:tpu_v5_lite", "v5p": "tpu:tpu_v5", "v6e": "tpu:tpu_v6_lite"}
_DIRECTIONS = ("forward", "backward")
_WINDOWS: dict[str, dict[str, int]] = {
    "two sides": {"left": 700, "right": 300},
    "window 4096": {"left": 4095, "right": 0},
}
_MASKS = ("causal", "causal", "causal", "full", "full", "window 512", "window 1024", *_WINDOWS)
_DIMS = (64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 240, 256)
_LENGTHS = (128, 300, 777, 1024, 1500, 2048, 2048, 3000, 4096, 4096, 4099, 8192, 16_384)
# Common calls: lengths and repeats, whether they have segments, head dimension, mask, direction and chip.
_COMMON = tuple(
    itertools.chain.from_iterable(
        itertools.product((sizes,), segments, (128, 64, 256), ("causal", "full", "window 1024"), _DIRECTIONS, _DEVICES)
        for sizes, segments in (((4096, 2), (False, True)), ((8192, 2), (False,)), ((4096, 1), (False,)))
    )
)
COMMON = len(_COMMON)
_LEAST = 160 << 20  # bytes of an array; a chip has 128 MiB of vector memory at most


def drawn(seed: int, index: int) -> dict[str, Any]:
    """Return a call and its parameters."""
    from ejkernel.kernels.flash_attention.pallas_tpu import choices

    if seed == 0:
        case = common_call(index)
        return case | {"params": dataclasses.asdict(choices.heuristic(described(case)[0]))}
    dice = random.Random(f"{seed} {index}")
    case = drawn_call(dice)
    call, _ = described(case)
    space = [choices.heuristic(call), *choices.every(call)]
    return case | {"params": dataclasses.asdict(space[0] if dice.random() < 0.35 else dice.choice(space))}


def common_call(index: int) -> dict[str, Any]:
    """Return a common call without parameters."""
    (length, repeats), segments, dim, mask, direction, chip = _COMMON[index]
    case: dict[str, Any] = {"chip": chip, "direction": direction, "mask": mask, "soft_cap": None, "segments": segments}
    return case | {"dtype": "bfloat16", "length": length, "dims": [dim, dim], "repeats": repeats}


def drawn_call(dice: random.Random) -> dict[str, Any]:
    """Return a call without parameters."""
    case: dict[str, Any] = {"chip": dice.choice(tuple(_DEVICES)), "direction": dice.choice(_DIRECTIONS)}
    case |= {"mask": dice.choice(_MASKS), "soft_cap": dice.choice((None, None, None, None, 30.0))}
    case |= {"segments": dice.random() < 0.2, "dtype": dice.choice(("bfloat16",) * 7 + ("float32",))}
    head_dim = dice.choice(_DIMS)
    value_dim = head_dim if dice.random() < 0.75 else dice.choice(_DIMS)
    return case | {
        "length": dice.choice(_LENGTHS),
        "dims": [head_dim, value_dim],
        "repeats": dice.choice((1, 1, 2, 4, 8)),
    }


def described(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return the call of a case, and its operands."""
    import jax

    from ejkernel.kernels.flash_attention.common import Operands, describe

    like: Any = jax.ShapeDtypeStruct
    length, (head_dim, value_dim) = case["length"], case["dims"]
    batch = math.ceil(_LEAST / (length * min(head_dim, value_dim) * (4 if case["dtype"] == "float32" else 2)))
    batch, heads = case.get("examples", batch), case.get("key_heads", 1)
    query = like((batch, length, heads * case["repeats"], head_dim), case["dtype"])
    key, value = (like((batch, length, heads, dim), case["dtype"]) for dim in (head_dim, value_dim))
    ids = like((batch, length), "int32") if case["segments"] else None
    operands = Operands(query, key, value, query_segments=ids, key_segments=ids)
    fingerprint, backward = _DEVICES[case["chip"]], case["direction"] == "backward"
    return describe(operands, rules_of(case), platform="tpu", fingerprint=fingerprint, backward=backward), operands


def rules_of(case: dict[str, Any]) -> Any:
    """Return the static options of a case."""
    from ejkernel.kernels.flash_attention.common import Rules

    window = _WINDOWS.get(case["mask"]) or attention_tpu.MASKS[case["mask"]]
    scale: float = case["dims"][0] ** -0.5
    return Rules(scale=scale, left=window.get("left"), right=window.get("right"), soft_cap=case["soft_cap"])


def params_of(case: dict[str, Any]) -> Any:
    """Return the parameters of a case."""
    from ejkernel.kernels.flash_attention.pallas_tpu.params import BackwardParams, ForwardParams

    sizes = dict(case["params"])
    if case["direction"] == "forward":
        return ForwardParams(**sizes)
    if sizes.get("query") is not None:
        sizes["query"] = ForwardParams(**sizes["query"])
    return BackwardParams(**sizes)


# --- in the process that compiles ---


def compiled(case: dict[str, Any]) -> dict[str, list[int]]:
    """Return the bytes of vector memory of each kernel, and of windows that it does not have: see `tpu_windows`."""
    from benchmarks import tpu_windows
    from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu

    call, operands = described(case)
    operands = tpu_windows.placed(operands, attention_tpu.TOPOLOGIES[case["chip"]])
    found = tpu_windows.of_attention(PallasTpu(), call, operands, params_of(case))
    return {"used": [one.used for one in found], "kept": [one.kept for one in found]}


# --- in the caller ---


def estimated(case: dict[str, Any]) -> dict[str, Any]:
    """Return our estimates for the kernels of a case, and who decides whether they fit: `fits`, `no` or `compiler`."""
    from ejkernel.kernels.flash_attention.pallas_tpu import choices, memory

    call, params = described(case)[0], params_of(case)
    needs = [memory.need_of(parts) for parts in choices.parts_of(call, params)]
    refused = choices.params_fault(call, params) is not None
    fits = "no" if refused else "fits" if choices.doubt(call, params) is None else "compiler"
    return {"estimated": [need.most for need in needs], "least": [need.least for need in needs], "fits": fits}


def ratios(one: dict[str, Any]) -> list[float]:
    """Return the estimate over the compiler's figure for each kernel of a result."""
    return [estimate / size for estimate, size in zip(one["estimated"], one.get("used", ()), strict=False)]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the distribution of the ratios by class, as a Markdown table, and the refused calls."""
    classes: dict[str, Callable[[dict[str, Any]], bool]] = {
        "all": lambda one: True,
        "forward": lambda one: bool(one["direction"] == "forward"),
        "backward": lambda one: bool(one["direction"] == "backward"),
        "without ids and soft cap": lambda one: not one["segments"] and one["soft_cap"] is None,
        "of 4 MiB or more": lambda one: bool(max(one.get("used", [0])) >= 4 << 20),
        "float32": lambda one: bool(one["dtype"] == "float32"),
        **{chip: functools.partial(_is_for, chip) for chip in _DEVICES},
    }
    found = {name: [x for one in results if of_class(one) for x in ratios(one)] for name, of_class in classes.items()}
    lines = ratio_table(found)
    refused = [one for one in results if "error" in one]
    lines += ["", f"{len(refused)} of {len(results)} calls were not compiled:", ""]
    for one in refused:
        reason = "memory" if "RESOURCE_EXHAUSTED" in one["error"] else one["error"][:100]
        ours = {"no": "refused before", "compiler": "left to the compiler", "fits": "passed by the estimate"}[
            one["fits"]
        ]
        lines.append(
            f"- {one['chip']}, {one['direction']}, {one['mask']}, {one['dtype']}, {one['params']}: {reason}; {ours}"
        )
    compiled = Counter(one["fits"] for one in results if "used" in one)
    above = [low - size for one in results for low, size in zip(one["least"], one.get("used", ()), strict=False)]
    return "\n".join(
        [
            *lines,
            "",
            f"Of the compiled calls, the estimate passed {compiled['fits']}, left {compiled['compiler']} to the "
            f"compiler, and refused {compiled['no']}. The lower estimate exceeds the compiler's figure in "
            f"{sum(size > 0 for size in above)} kernels, by at most {max(0, *above)} bytes.",
        ]
    )


def _is_for(chip: str, one: dict[str, Any]) -> bool:
    return bool(one["chip"] == chip)


def _called(seed: int, index: int) -> dict[str, Any]:
    """Return a call with our estimates."""
    case = drawn(seed, index)
    return case | estimated(case)


DRAWS = Draws(
    module="memory_tpu",
    about=__doc__,
    what="our estimate of vector memory over the figure of Google's compiler; nothing ran on a TPU",
    drawn=_called,
    compiled=compiled,
    title="Vector memory of `pallas_tpu`, compiled",
    table=table,
    seconds=240.0,
)


if __name__ == "__main__":
    DRAWS.main()
