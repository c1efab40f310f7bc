# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_others_tpu`: vector memory of kernels other than attention's; needs no TPU.

Each call is drawn by a seed, with sizes as models have them: a product of `megablox` or its weights' gradient, a
normalisation of `pallas`, forward or backward, or a step of `tpu_ragged`. It has the heuristic's parameters, or others
of the space for seeds from 100. Seed 0 lists the kernels of the tables instead: all tiles of `megablox`, then
`tpu_ragged` for common numbers of heads and blocks, small ones first. These are compiled alone, without the program
around them. Seed 1 lists the normalisations of the table. `memory_tpu_fit --add` adds the results to the tables.
Google's compiler reports the bytes of vector memory that a kernel uses. Nothing runs on a TPU.

XLA keeps short arrays of normalisations in vector memory itself; `kept` has the bytes of the windows that the kernel
then does not have. The ratio is our upper estimate over the compiler's figure and these.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.drawn_tpu import TARGETS, Draws, ratio_table, ratios

_KINDS = ("megablox", "megablox wgrad", "rms_norm", "layer_norm", "tpu_ragged", "tpu_ragged")
# Query heads for each key head, by dtype and the key heads of a block; and queries of a block.
_HEADS: dict[str, dict[int, tuple[int, ...]]] = {
    "bfloat16": {
        1: (2, 4, 8, 16),
        2: (1, 2, 4, 8, 16),
        4: (1, 2, 4, 8, 12, 16),
        8: (1, 2, 4, 6, 8, 10, 12, 16),
        16: (3, 5, 7),
    },
    "float32": {1: (1, 2, 4, 8, 16), 2: (1, 2, 4, 8, 12, 16), 4: (1, 2, 4, 6, 8, 10, 12, 16), 8: (3, 5, 7)},
}
_TILES = (128, 256, 512, 1024)
# Columns of the last tile along the sum of a product, by those of the others.
_RESTS = {128: (64,), 256: (64, 128), 512: (64, 128, 256, 384), 1024: (64, *range(128, 1024, 128))}
_FEW_RESTS = {128: (64,), 256: (128,), 512: (128, 256, 384), 1024: (128, 384, 512, 768)}
_WITH_RESTS = {("v5e", "bfloat16"): _RESTS, ("v6e", "bfloat16"): _RESTS, ("tpu7x", "bfloat16"): _FEW_RESTS}
_ROWS = 1 << 19  # so many that XLA keeps no array of a listed product in vector memory
# Dtype, rows, and rows of a block: several strips of 16 or 8 rows, a single one, or a part of one.
_PARTS = (("bfloat16", 8, 16),)
_BLOCKS_OF_NORMS = (
    ("bfloat16", 1 << 16, 32),
    ("float32", 1 << 16, 32),
    *_PARTS,
    ("float32", 1 << 16, 8),
    ("float32", 8, 8),
    ("bfloat16", 16, 16),
)
_QUERIES = (8, 16, 32, 64, 128)
_DIMS = (4096, 2048, 5120, 8192, 1024, 3072, 7168, 6144, 2880, 3584, 1536, 768)
# Columns of the listed normalisations. From 4,096 on they stand for all with the same rest of a chunk, but for parts.
_LISTED_DIMS = (4096, 2048, 3072, 5120, 1024, 2880, 3584, 1536, 768, 6144, 7168, 8192, 2560, 4608, 5632, 2304, 512)
_LONG = 6144
_NO_TILES = (("v4", "float32"), ("tpu7x", "float32"))
_OF_SPACE = 100  # seeds from here have parameters of the space


def drawn(seed: int, index: int) -> dict[str, Any]:
    """Return a call, its parameters and our estimates."""
    if seed in _LISTS:
        listed: dict[str, Any] = _LISTS[seed]()[index]
        return listed | estimated(listed)
    dice = random.Random(f"others {seed} {index}")
    while True:
        kind = dice.choice(_KINDS)
        sizes = (_product if "megablox" in kind else _norm if "norm" in kind else _paged)(dice)
        case: dict[str, Any] = {"chip": dice.choice(tuple(TARGETS)), "kind": kind, "sizes": sizes}
        case["backward"] = "norm" in kind and dice.random() < 0.5
        implementation, call = described(case)
        if implementation.unsupported(call) is None:
            break
    params = implementation.heuristic(call)
    if seed >= _OF_SPACE:
        params = dice.choice([one for one in implementation.space(call) if implementation.doubt(call, one) is None])
    case["params"] = dataclasses.asdict(params)
    return case | estimated(case)


def estimated(case: dict[str, Any]) -> dict[str, Any]:
    """Return our estimates for a case, and whether its kernel is in a table of compiled ones."""
    from ejkernel.kernels.paged_attention import _ragged_memory

    implementation, call = described(case)
    params = _params_of(case)
    need = _estimator(implementation).memory(call, params)
    known = case["kind"] == "tpu_ragged" and _ragged_memory.is_listed(call, params)
    return {"estimated": [need.most], "least": [need.least], "in table": known}


@functools.cache
def _listed() -> list[dict[str, Any]]:
    """Return products with all tiles of the space, then kernels of ragged paged attention."""
    chips = [chip for chip in TARGETS if chip != "v5p"]  # like v5e
    pairs = [(chip, dtype) for chip, dtype in itertools.product(chips, _HEADS) if (chip, dtype) not in _NO_TILES]
    products = [_with_tile(*pair, tile) for pair in pairs for tile in _tiles(*pair)]
    ragged = [_alone(chip, *place) for chip in TARGETS for dtype in _HEADS for place in _blocks_of(dtype)]
    return [*products, *sorted(ragged, key=lambda case: case["work"])]


@functools.cache
def _listed_norms() -> list[dict[str, Any]]:
    """Return normalisations for each number in the table."""
    flags = (False, True)
    blocks = itertools.product(_LISTED_DIMS, _BLOCKS_OF_NORMS)
    places = [(dim, *block) for dim, block in blocks if dim < _LONG or block in _PARTS]
    return [
        _norm_of(place, chip, kind, residual=residual, backward=backward)
        for place in places
        for residual, kind, backward, chip in itertools.product(flags, ("rms_norm", "layer_norm"), flags, TARGETS)
    ]


def _norm_of(
    place: tuple[int, str, int, int], chip: str, kind: str, *, residual: bool, backward: bool
) -> dict[str, Any]:
    dim, dtype, rows, block = place
    sizes = {"rows": rows, "dim": dim, "residual": residual, "dtype": dtype, "eps": 1e-6}
    return {"chip": chip, "kind": kind, "sizes": sizes, "backward": backward, "params": {"block_rows": block}}


_LISTS = {0: _listed, 1: _listed_norms}  # by seed


def _tiles(chip: str, dtype: str) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield the kind of each product, its tile, and the columns of the left operand."""
    rests = _WITH_RESTS.get((chip, dtype), dict.fromkeys(_TILES, ()))
    for m, n in itertools.product(_TILES, _TILES):
        for k in (*_TILES, 768):
            yield from (("megablox", m, k, n, k), ("megablox wgrad", m, k, n, 4 * k))
        for k in _TILES:
            yield from (("megablox", m, k, n, 3 * k + rest) for rest in (k, *rests[k]))


def _with_tile(chip: str, dtype: str, tile: tuple[str, int, int, int, int]) -> dict[str, Any]:
    kind, m, k, n, inner = tile
    sizes = {"rows": _ROWS, "groups": 8, "inner": inner, "columns": 4 * n, "dtype": dtype, "out_dtype": dtype}
    case = {"chip": chip, "kind": kind, "sizes": sizes, "backward": False, "alone": True}
    return case | {"params": {"block_m": m, "block_k": k, "block_n": n}}


def _blocks_of(dtype: str) -> Iterator[tuple[str, int, int, int, int]]:
    for kv_heads, groups in _HEADS[dtype].items():
        for group, queries, power in itertools.product(groups, _QUERIES, range(4, 13)):
            yield dtype, kv_heads, group, queries, 1 << power


def _alone(chip: str, dtype: str, kv_heads: int, group: int, queries: int, keys: int) -> dict[str, Any]:
    """Return a kernel with these heads and blocks."""
    page, heads = min(keys, 64), kv_heads * group
    sizes = {"q": (2 * queries, heads, 128), "pages": (512, page, kv_heads, 2, 128), "dtype": dtype, "scale": 0.1}
    sizes |= {"table": (8, max(64, keys // page)), "cache_dtype": dtype}
    params = {"block_pages": keys // page, "block_queries": queries}
    case = {"chip": chip, "kind": "tpu_ragged", "sizes": sizes, "backward": False, "params": params}
    return case | {"alone": True, "work": heads * queries * keys}


def _product(dice: random.Random) -> dict[str, Any]:
    dtype = dice.choice(("bfloat16",) * 4 + ("float32",))
    rows, groups = dice.choice((512, 2048, 4096, 16_384, 65_536)), dice.choice((4, 8, 16, 64))
    inner, columns = (dice.choice((768, 1024, 1408, 2048, 2880, 4096, 7168)) for _ in range(2))
    return {
        "rows": rows,
        "groups": groups,
        "inner": inner,
        "columns": columns,
        "dtype": dtype,
        "out_dtype": dtype,
    }


def _norm(dice: random.Random) -> dict[str, Any]:
    sizes: dict[str, Any] = {"rows": dice.choice((8, 512, 4096, 16_384, 65_536)), "dim": dice.choice(_DIMS)}
    dtype = dice.choice(("bfloat16", "bfloat16", "float32"))
    return sizes | {"residual": dice.random() < 0.5, "dtype": dtype, "eps": 1e-6}


def _paged(dice: random.Random) -> dict[str, Any]:
    kv_heads, page = dice.choice((1, 2, 4, 8)), dice.choice((16, 32, 64, 128))
    sequences, tokens = dice.choice(((8, 8), (64, 64), (256, 256), (8, 512), (16, 2048), (4, 4096)))
    dtype = dice.choice(("bfloat16",) * 3 + ("float32",))
    sizes: dict[str, Any] = {"q": (tokens, kv_heads * dice.choice((1, 2, 4, 5, 8)), 128), "dtype": dtype}
    sizes |= {"pages": (2048, page, kv_heads, 2, 128), "table": (sequences, dice.choice((8, 32, 128, 256)))}
    sizes |= {"window": dice.choice((None, None, 1023)), "soft_cap": dice.choice((None, None, None, 30.0))}
    return sizes | {"cache_dtype": dtype, "scale": 0.1}


def described(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return implementation and call of a case."""
    from ejkernel.kernels._row_norms.pallas import Pallas
    from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
    from ejkernel.kernels.grouped_matmul.megablox import Megablox, MegabloxWgrad
    from ejkernel.kernels.layer_norm.operation import LayerNormCall
    from ejkernel.kernels.paged_attention.common import PagedCall
    from ejkernel.kernels.paged_attention.tpu_ragged import TpuRagged
    from ejkernel.kernels.rms_norm.operation import RmsNormCall

    by_kind: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
        "megablox": (Megablox, GroupedMatmulCall),
        "megablox wgrad": (MegabloxWgrad, GroupedMatmulCall),
        "rms_norm": (Pallas, RmsNormCall),
        "layer_norm": (Pallas, LayerNormCall),
        "tpu_ragged": (TpuRagged, PagedCall),
    }
    implementation, call = by_kind[case["kind"]]
    sizes = {name: tuple(size) if isinstance(size, list) else size for name, size in case["sizes"].items()}
    place = {"platform": "tpu", "device_fingerprint": TARGETS[case["chip"]].fingerprint, "backward": case["backward"]}
    return implementation(), call(**sizes, **place)


def parts_of(case: dict[str, Any]) -> Any:
    """Return the memory of a normalisation or a kernel of `tpu_ragged` by its causes."""
    implementation, call = described(case)
    return _estimator(implementation).parts_of(call, _params_of(case))


def add_registers(tables: dict[str, Any], case: dict[str, Any]) -> None:
    """Add the registers that a listed kernel keeps in memory to the tables."""
    from ejkernel.kernels._vector_memory import REGISTER
    from ejkernel.kernels.grouped_matmul import _megablox_memory
    from ejkernel.kernels.paged_attention import _ragged_memory

    (implementation, call), params = described(case), _params_of(case)
    if "norm" in case["kind"]:
        _add_norm(tables, case)
        return
    if case["kind"] == "tpu_ragged":
        known, (queries, keys) = parts_of(case).known, _ragged_memory.block_of(call, params)
        row = tables["registers"].setdefault(_ragged_memory.form_of_heads(call), {}).setdefault(str(queries), {})
        place: Any = str(keys)
    else:
        tile, known = implementation.tile_of(call, params)
        form, name = _megablox_memory.row_of(tile, call.device_fingerprint, call.dtype)
        row = tables["tiles"].setdefault(form, {}).setdefault(name, [None] * len(_TILES))
        place = _TILES.index(tile.columns)
    row[place] = -(-(case["used"][0] - known) // REGISTER)


def _add_norm(tables: dict[str, Any], case: dict[str, Any]) -> None:
    """Add the registers of a normalisation, or leave those of one with the same place that has more."""
    from ejkernel.kernels._row_norms import pallas
    from ejkernel.kernels._vector_memory import REGISTER

    form, columns, place = pallas.place_in_table(described(case)[1], _params_of(case))
    row = tables.setdefault("norms", {}).setdefault(form, {}).setdefault(columns, [None] * 3)
    registers = -(-(case["used"][0] + case.get("kept", [0])[0] - parts_of(case).known) // REGISTER)
    row[place] = max(registers, row[place] or 0)


def kernels_of_table() -> Iterator[tuple[Any, int]]:
    """Yield the kernels of `tpu_ragged` in the table: their memory by its causes, and their bytes."""
    from ejkernel.kernels._vector_memory import REGISTER, spilled_registers
    from ejkernel.kernels.paged_attention import _ragged_memory

    for case in (one for one in _listed() if one["kind"] == "tpu_ragged"):
        call, parts = described(case)[1], parts_of(case)
        queries, keys = _ragged_memory.block_of(call, _params_of(case))
        row = spilled_registers().get(_ragged_memory.form_of_heads(call), {}).get(str(queries), {})
        if str(keys) in row:
            yield parts, parts.known + REGISTER * row[str(keys)]


def _params_of(case: dict[str, Any]) -> Any:
    implementation, call = described(case)
    return implementation.params_type(backward=call.backward)(**case["params"])


def _estimator(implementation: Any) -> Any:
    """Return the object with the estimate of an implementation."""
    from ejkernel.kernels._row_norms import pallas
    from ejkernel.kernels.paged_attention import _ragged_memory

    return {"pallas": pallas, "tpu_ragged": _ragged_memory}.get(implementation.name, implementation)


# --- in the process that compiles ---


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of vector memory of the kernel, and of windows that it does not have."""
    import jax

    from benchmarks import tpu_windows
    from ejkernel import compat

    (implementation, call), target, params = described(case), TARGETS[case["chip"]], _params_of(case)

    def like(shape: tuple[int, ...], dtype: str) -> Any:
        return target.placed(jax.ShapeDtypeStruct(shape, dtype))

    def run(*args: Any) -> Any:
        if call.backward:
            return implementation.backward(call, *args, params=params)
        return implementation.forward(call, *args, params=params)[0]

    with target.entered():
        traced = jax.jit(run).trace(*_arguments(case["kind"], call, like))
        if implementation.name == "pallas":
            (found,) = tpu_windows.memory_of(traced)
            return {"used": [found.used], "kept": [found.kept]}
        traced = tpu_windows.alone(traced, target) if case.get("alone") else traced
        return {"used": [max(compat.executables.vector_memory(str(traced.lower().compile().as_text())))], "kept": [0]}


def _arguments(kind: str, call: Any, like: Callable[..., Any]) -> tuple[Any, ...]:
    own = call.dtype
    if kind == "tpu_ragged":
        (sequences, _), number = call.table, "int32"
        scalars = (like((size,), number) for size in (sequences + 1, sequences))
        return (like(call.q, own), like(call.pages, own), like(call.table, number), *scalars, *[None] * 4)
    if "megablox" in kind:
        matrix = (call.columns, call.inner) if call.transpose_rhs else (call.inner, call.columns)
        rhs = like((call.groups, *matrix) if kind == "megablox" else (call.rows, call.columns), own)
        return like((call.rows, call.inner), own), rhs, like((call.groups,), "int32")
    x, vector, column = (
        like((call.rows, call.dim), own),
        like((call.dim,), own),
        like((call.rows,), "float32"),
    )
    args = (x, *[vector] * (1 if kind == "rms_norm" else 2), *[x] * call.residual)
    if not call.backward:
        return args
    stats = column if kind == "rms_norm" else (column, column)
    out = (x, x) if call.residual else x
    return stats, out, out if call.residual else (x,), *args


# --- in the caller ---


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the distribution of the ratios by kind, as a Markdown table."""
    compiled = [one for one in results if "used" in one]
    classes: dict[str, list[float]] = {}
    for kind in dict.fromkeys(_KINDS):
        own = [one for one in compiled if one["kind"] == kind]
        classes[kind] = [ratio for one in own if not one["kept"][0] for ratio in ratios(one)]
        short = [one for one in own if one["kept"][0]]
        classes[f"{kind}, missing windows added"] = [ratio for one in short for ratio in ratios(one, with_kept=True)]
    above = sum(one["least"][0] > one["used"][0] + one["kept"][0] for one in compiled)
    notes = f"The lower estimate exceeds the compiler's figure in {above} kernels."
    return "\n".join([*ratio_table(classes), "", f"{notes} {len(results) - len(compiled)} calls did not compile."])


DRAWS = Draws(
    module="memory_others_tpu",
    about=__doc__,
    what="our estimate of vector memory over the figure of Google's compiler; nothing ran on a TPU",
    drawn=drawn,
    compiled=measured,
    title="Vector memory of kernels other than attention's, compiled",
    table=table,
    seconds=240.0,
)


if __name__ == "__main__":
    DRAWS.main()
