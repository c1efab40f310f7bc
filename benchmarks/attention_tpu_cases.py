# SPDX-License-Identifier: Apache-2.0
"""The configurations that `benchmarks.attention_tpu` simulates, most important cases first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

LENGTH = 4096

# Names of parameters in the order of a configuration's sizes, and the flag that a trailing `+` sets.
_NAMES = {
    ("pallas_tpu", "forward"): (("block_q", "chunk", "rows", "strip", "unroll"), "sum_by_product"),
    ("pallas_tpu", "backward"): (("block_kv", "chunk", "strip", "unroll"), "transpose"),
    ("flash", "forward"): (("block_q", "block_k_major", "block_k"), None),
    ("flash", "backward"): (("block_q", "block_k_major", "block_k"), None),
    ("splash", "forward"): (("block_q", "block_kv", "block_kv_compute"), None),
    ("splash", "backward"): (("block_q", "block_kv", "block_kv_compute"), None),
}


class Sweep(NamedTuple):
    """One case, and the configurations of each kernel; `repeats` is the number of query heads of one key head."""

    chips: str
    direction: str
    mask: str
    head_dim: int
    repeats: int
    pallas_tpu: str
    flash: str = ""
    splash: str = ""
    dtype: str = "bfloat16"


_FLASH = "2048/2048/1024 1024/1024/1024 2048/1024/1024 1024/1024/512"
_SPLASH = "1024/1024/1024 2048/2048/1024 1024/1024/512 512/1024/512 512/512/512 1024/2048/1024"
_FLASH_BACKWARD = "1024/1024/1024 512/1024/1024 1024/2048/1024"
_SPLASH_BACKWARD = "1024/1024/1024 1024/2048/1024 512/1024/512 1024/1024/512"

# The heuristic's parameters, and others that take the compiler less than a few minutes.
_FLOAT32 = [
    Sweep(chip, direction, mask, 128, 1, pallas_tpu=blocks, dtype="float32")
    for direction, blocks in (
        (
            "forward",
            "1024/512/1024/256/1 512/512/512/256/1 1024/512/256/256/1 2048/512/1024/256/1 1024/1024/512/256/1 "
            "1024/512/1024/256/1+",
        ),
        ("backward", "1024/512/256/1 1024/512/256/1+ 512/512/256/1 2048/512/256/1 1024/1024/256/1"),
    )
    for mask in ("causal", "full")
    for chip in ("v6e", "v5e")
]

SWEEPS = (
    Sweep(
        *("v5e", "forward", "causal", 128, 1),
        pallas_tpu="2048/1024/512/256/2 4096/1024/512/256/2 2048/1024/512/256/1 2048/1024/256/256/2 "
        "2048/1024/1024/256/2 2048/2048/512/256/1 2048/512/512/256/4 1024/1024/512/256/2",
        flash=_FLASH,
        splash=_SPLASH,
    ),
    Sweep(
        *("v5e", "forward", "window 1024", 128, 1),
        pallas_tpu="1024/1024/1024/256/2 512/512/512/256/2 2048/1024/1024/256/2 4096/1024/1024/256/2 "
        "1024/1024/512/128/2",
        splash="512/512/512 1024/1024/1024 256/1024/512 512/1024/512 256/512/512",
    ),
    Sweep(
        *("v6e", "forward", "window 1024", 128, 1),
        pallas_tpu="1024/1024/1024/256/2+ 512/512/512/256/2+ 2048/1024/1024/256/2+ 4096/1024/1024/256/2+ "
        "2048/1024/1024/512/2+",
        splash="512/512/512 1024/1024/1024 256/1024/512 512/1024/512 256/512/512",
    ),
    Sweep(
        *("v6e", "forward", "causal", 128, 1),
        pallas_tpu="2048/2048/2048/512/1+ 2048/1024/2048/512/2+ 4096/2048/2048/512/1+ 4096/2048/2048/256/1+",
        flash=_FLASH,
        splash=_SPLASH,
    ),
    Sweep(
        *("v6e", "forward", "causal", 64, 1),
        pallas_tpu="2048/2048/2048/512/1+ 2048/1024/2048/512/2+ 4096/2048/2048/512/1+",
        flash="2048/2048/1024 1024/1024/1024 2048/1024/1024",
        splash="1024/1024/1024 2048/2048/1024 1024/1024/512 512/1024/512",
    ),
    Sweep(
        *("v5e", "forward", "causal", 64, 1),
        pallas_tpu="4096/1024/512/256/2+ 2048/1024/512/256/2+ 4096/1024/512/256/2",
        flash="1024/1024/1024 2048/2048/1024 2048/1024/1024",
        splash="1024/1024/1024 2048/2048/1024 1024/1024/512 512/1024/512",
    ),
    Sweep(
        *("v6e", "forward", "causal", 256, 1),
        pallas_tpu="2048/2048/2048/512/1 4096/1024/512/256/1 1024/1024/1024/256/2",
        flash="1024/1024/1024 2048/1024/1024 512/1024/1024",
        splash="1024/1024/1024 2048/2048/1024 1024/1024/512 512/1024/512",
    ),
    Sweep(
        *("v5e", "forward", "causal", 256, 1),
        pallas_tpu="2048/1024/512/256/2 4096/1024/512/256/1 1024/1024/512/256/2",
        flash="1024/1024/1024 2048/1024/1024 512/1024/1024",
        splash="1024/1024/1024 2048/2048/1024 1024/1024/512 512/1024/512",
    ),
    Sweep(
        *("v6e", "backward", "causal", 128, 1),
        pallas_tpu="2048/1024/512/2+ 4096/1024/512/2+ 2048/1024/256/1+",
        flash=_FLASH_BACKWARD,
        splash=_SPLASH_BACKWARD,
    ),
    Sweep(
        *("v5e", "backward", "causal", 128, 1),
        pallas_tpu="2048/1024/256/1 4096/1024/256/1 1024/1024/256/1",
        flash=_FLASH_BACKWARD,
        splash=_SPLASH_BACKWARD,
    ),
    Sweep(
        *("v6e", "backward", "window 1024", 128, 1),
        pallas_tpu="1024/1024/256/1+ 512/512/256/1+ 2048/1024/256/1+",
        splash="512/512/512 1024/1024/1024 512/1024/512",
    ),
    Sweep(
        *("v5e", "backward", "window 1024", 128, 1),
        pallas_tpu="1024/1024/256/1 512/512/256/1 2048/1024/256/1",
        splash="512/512/512 1024/1024/1024 512/1024/512",
    ),
    Sweep(
        *("v5e v6e", "forward", "full", 128, 1),
        pallas_tpu="1024/1024/1024/512/4 2048/1024/2048/512/4+",
        flash="2048/2048/1024 1024/2048/2048",
        splash="2048/2048/1024 1024/2048/1024 1024/1024/1024",
    ),
    Sweep(
        *("v6e", "forward", "causal", 128, 8),
        pallas_tpu="2048/2048/2048/512/1+",
        splash="1024/1024/1024 2048/2048/1024",
    ),
    Sweep(
        *("v5e", "forward", "causal", 128, 8),
        pallas_tpu="4096/1024/512/256/2",
        splash="1024/1024/1024 2048/2048/1024",
    ),
    Sweep(
        *("v6e", "backward", "causal", 128, 8),
        pallas_tpu="2048/1024/512/2+",
        splash="1024/1024/1024 1024/2048/1024",
    ),
    Sweep(
        *("v5e", "backward", "causal", 128, 8),
        pallas_tpu="2048/1024/256/1",
        splash="1024/1024/1024 1024/2048/1024",
    ),
    Sweep(
        *("v5p", "forward", "causal", 128, 1),
        pallas_tpu="2048/1024/512/256/2 4096/1024/512/256/2",
        flash="1024/1024/1024 2048/2048/1024",
        splash="1024/1024/1024 2048/2048/1024 1024/1024/512",
    ),
    Sweep(
        *("v6e", "backward", "causal", 64, 1),
        pallas_tpu="2048/1024/512/2+ 2048/1024/256/1",
        flash="1024/1024/1024 512/1024/1024",
        splash="1024/1024/1024 1024/2048/1024",
    ),
    Sweep(
        *("v5e", "backward", "causal", 64, 1),
        pallas_tpu="2048/1024/256/1 2048/1024/512/2+",
        flash="1024/1024/1024 512/1024/1024",
        splash="1024/1024/1024 1024/2048/1024",
    ),
    Sweep(
        *("v6e", "backward", "causal", 256, 1),
        pallas_tpu="1024/1024/256/1 1024/1024/256/1+ 2048/1024/512/2+",
        flash="1024/1024/1024 512/1024/1024",
        splash="1024/1024/1024 1024/2048/1024",
    ),
    Sweep(
        *("v5e", "backward", "causal", 256, 1),
        pallas_tpu="2048/1024/256/1 1024/1024/256/1",
        flash="1024/1024/1024 512/1024/1024",
        splash="1024/1024/1024 1024/2048/1024",
    ),
    Sweep(
        *("v6e", "backward", "causal", 128, 2),
        pallas_tpu="2048/1024/512/2+",
        splash="1024/1024/1024 1024/2048/1024",
    ),
    Sweep(
        *("v5e", "backward", "causal", 128, 2),
        pallas_tpu="2048/1024/256/1",
        splash="1024/1024/1024 1024/2048/1024",
    ),
    *_FLOAT32,
)


def cases(sweep: Sweep) -> Iterator[list[dict[str, Any]]]:
    """Yield the configurations of one chip and kernel."""
    for chip in sweep.chips.split():
        for kernel in ("pallas_tpu", "flash", "splash"):
            found = []
            for blocks in getattr(sweep, kernel).split():
                names, flag = _NAMES[kernel, sweep.direction]
                sizes: dict[str, Any] = dict(zip(names, map(int, blocks.rstrip("+").split("/")), strict=True))
                if flag is not None:
                    sizes[flag] = blocks.endswith("+")
                case = {"chip": chip, "mask": sweep.mask, "direction": sweep.direction, "head_dim": sweep.head_dim}
                case |= {"repeats": sweep.repeats, "length": LENGTH, "kernel": kernel, "params": sizes}
                case |= {} if sweep.dtype == "bfloat16" else {"dtype": sweep.dtype}
                found.append(case)
            if found:
                yield found
