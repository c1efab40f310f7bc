# SPDX-License-Identifier: Apache-2.0
"""`python scripts/published_tables.py FOLDER SOURCE DATE`: import tuned blocks that tokamax publishes.

Reads `data/autotuning/<chip>/*.json` of a checkout or an unpacked wheel of tokamax, and writes the tables of
`ejkernel/data/published`. Only facts are taken: shape, chip, blocks, and their median time beside XLA's. Rows that our
implementations cannot run are skipped; the reasons are printed with their number.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel.kernels.flash_attention.common import AttentionCall, Rules
from ejkernel.kernels.flash_attention.splash import Splash, SplashBwdParams, SplashParams
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.kernels.grouped_matmul.megablox import Megablox, MegabloxParams, MegabloxWgrad
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.storage.serialize import to_data

DATA = Path(__file__).parents[1] / "src" / "ejkernel" / "data" / "published"
_UNEVEN = 2.0  # times the mean: with a larger group, a row is for an unusual call

Read = Callable[[Mapping[str, Any], Mapping[str, Any], str], tuple[Implementation[Any], Any, Any]]


class SkippedError(Exception):
    """A row that is not imported."""


def attention(asked: Mapping[str, Any], blocks: Mapping[str, Any], device: str) -> tuple[Splash, AttentionCall, Any]:
    """Return the implementation, call and parameters of a row of an attention table."""
    query, key, value = (_shape(asked[name]) for name in "qkv")
    if len(query) == 3:  # of one example, heads first
        query, key, value = ((1, size[1], size[0], size[2]) for size in (query, key, value))
    mask = dict(asked["mask"])
    causal = bool(mask.pop("is_causal", False) or mask.get("causal_mask"))
    if (mask.pop("causal_mask", None) or {"offset": 0, "window_size": None}) != {"offset": 0, "window_size": None}:
        raise SkippedError("a window, or an offset of the causal mask")
    options = ("bias", "logits_soft_cap", "attn_logits_soft_cap", "dropout_mask", "segment_ids", "sinks", "paging_info")
    given = [name for name in (*options, "dropout_rate", "is_mqa") if asked.get(name)]
    if given or any(value is not None for value in mask.values()) or (causal and query[1] != key[1]):
        raise SkippedError("a bias, a mask, dropout, or another option that the table's key does not have")
    rules = Rules(scale=1.0, right=0 if causal else None)
    call = AttentionCall(
        platform="tpu",
        device_fingerprint=device,
        backward="dout" in asked,
        query=query,
        key=key,
        value=value,
        dtype="bfloat16",
        rules=rules,
    )
    if not call.backward:
        return Splash(), call, _with(SplashParams, blocks, "block_q", "block_kv", "block_kv_compute")
    params = _with(SplashBwdParams, blocks, "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    return Splash(), call, params


def product(asked: Mapping[str, Any], blocks: Mapping[str, Any], device: str) -> tuple[Any, GroupedMatmulCall, Any]:
    """Return the implementation, call and parameters of a row of a table of grouped products."""
    if not all(isinstance(asked[name], str) for name in ("lhs", "rhs")):
        raise SkippedError("quantised operands")
    left, right, sizes = _shape(asked["lhs"]), _shape(asked["rhs"]), asked["group_sizes"]
    count = sizes["num_groups"] if isinstance(sizes, dict) else len(sizes)
    if isinstance(sizes, list) and max(sizes) > _UNEVEN * statistics.mean(sizes):
        raise SkippedError("uneven groups")
    if asked["activation"] or asked["fuse_gateup_activation"] or asked["group_offset"]:
        raise SkippedError("an epilogue, or an offset of the groups")
    if blocks["input_buffer_count"] != 2:
        raise SkippedError("more than two buffers of an operand, which JAX's kernel does not have")
    contracted = [axes[0] for axes in asked["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0]]
    if contracted == [1, 2]:
        raise SkippedError("a transposed matrix, for which tile_k and tile_n are swapped in some tables only")
    is_wgrad = contracted == [0, 0]
    call = GroupedMatmulCall(
        platform="tpu",
        device_fingerprint=device,
        rows=left[0],
        groups=count,
        inner=left[1],
        columns=right[-1],
        dtype="bfloat16",
        out_dtype="bfloat16",
    )
    params = _with(MegabloxParams, blocks, "tile_m", "tile_k", "tile_n")
    return MegabloxWgrad() if is_wgrad else Megablox(), call, params


def _with(kind: type[Any], blocks: Mapping[str, Any], *names: str) -> Any:
    own = list(kind.__dataclass_fields__)
    rest = dict.fromkeys(own[len(names) :])  # the backward's `None` fuses its kernels
    return kind(**rest, **{mine: blocks[name] for mine, name in zip(own, names, strict=False)})


def _shape(text: str) -> tuple[int, ...]:
    found = re.fullmatch(r"bf16\[([\d,]+)\]", text)
    if found is None:
        raise SkippedError("another dtype than bfloat16")
    return tuple(map(int, found[1].split(",")))


# tokamax's file without its prefix, the files with XLA's times, and the reader of a row.
FILES: tuple[tuple[str, tuple[str, ...], Read], ...] = (
    ("flash_attention", ("dot_product_attention", "xla_chunked_dot_product_attention"), attention),
    ("flash_attention_vjp", ("dot_product_attention_vjp",), attention),
    ("splash_attention", ("splash_attention",), attention),
    ("splash_attention_vjp", ("splash_attention_vjp",), attention),
    ("ragged_dot", ("ragged_dot",), product),
)
TABLES = ("splash", "megablox", "megablox_wgrad")


def rows_of(folder: Path, skipped: collections.Counter[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of a table and a row for it; count the reasons for the others."""
    for chip in sorted(path for path in folder.iterdir() if path.name.startswith("tpu")):
        for name, others, read in FILES:
            usual = [_read(chip / f"{other}.json") for other in others]
            for key, found in _read(chip / f"pallas_mosaic_tpu_{name}.json").items():
                try:
                    table, row = _row(json.loads(key), found, f"tpu:{chip.name}", read)
                except (SkippedError, ConfigError) as error:
                    reason = re.sub(r"\b[0-9]+\b", "N", str(error))
                    skipped[f"{name}: {reason}"] += 1
                    continue
                times = [_us(each[key]) for each in usual if each.get(key)]
                yield table, row | ({"xla_us": min(times)} if times else {})


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _us(found: Mapping[str, Any]) -> float:
    (result,) = found.values()
    return round(1000 * statistics.median(result["evaluation_times_ms"]), 1)


def _row(asked: Mapping[str, Any], found: Mapping[str, Any], device: str, read: Read) -> tuple[str, dict[str, Any]]:
    if len(found) != 1:
        raise SkippedError("no single fastest configuration")
    if asked["return_residuals"] and "dout" not in asked:
        raise SkippedError("a second time, with residuals")
    implementation, call, params = read(asked, json.loads(next(iter(found))), device)
    fault, facts = implementation.params_fault(call, params), implementation.published_as(call)
    if fault is not None or facts is None or implementation.published is None:
        raise SkippedError(fault or "a call that the table does not describe")
    return implementation.published.name, {
        "call": {"device": device, **facts},
        "params": to_data(params),
        "us": _us(found),
    }


def main(arguments: list[str] | None = None) -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder that has data/autotuning")
    parser.add_argument("source", help="project and version, e.g. 'tokamax 0.0.17'")
    parser.add_argument("date", help="its date, e.g. 2026-10-20")
    parser.add_argument("--out", type=Path, default=DATA)
    given = parser.parse_args(arguments)
    skipped: collections.Counter[str] = collections.Counter()
    tables: dict[str, dict[str, dict[str, Any]]] = {table: {} for table in TABLES}
    for table, row in rows_of(given.folder / "data" / "autotuning", skipped):
        same = json.dumps([row["call"], row["params"]], sort_keys=True)
        tables[table].setdefault(same, row)
    for table, rows in tables.items():
        lines = ",\n".join(json.dumps(row) for row in rows.values())
        text = f'{{"{given.source}, {given.date}": [\n{lines}\n]}}\n'
        (given.out / f"{table}.json").write_text(text, encoding="utf-8")
        print(f"{len(rows)} rows of {table}")
    for reason, count in skipped.most_common():
        print(f"{count} rows skipped, {reason}")


if __name__ == "__main__":
    main()
