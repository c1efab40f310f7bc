# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention_choice`: implementations of attention beside each other, for the heuristic's choice.

Forward and backward are measured separately, as the heuristic chooses for each of them. The contenders of a case are
timed interleaved, with the parameters of their heuristics, on inputs outside the device's cache. Without `--cases` they
are the grid: cases that both our kernels and cuDNN run. `--out FILE` stores the medians as the data from which the
heuristic chooses. `--changed` measures the rows of the data whose launch parameters are no longer the ones that were
measured, and `--update FILE` puts rows of another run in their places. `--with "fwd kv_block=192 ping_pong=False"`
times our kernels with these launch parameters, too, in this direction.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from benchmarks import report
from benchmarks.attention import Entry, apart_from_first, compiled_in_parallel, executor_of
from benchmarks.attention_cases import (
    CASES,
    GRID_CASES,
    Case,
    case_named,
    drawn_names,
    small_names,
    widely_drawn_names,
    words_of,
)
from ejkernel.kernels.flash_attention.operation import FlashAttentionConfig
from ejkernel.kernels.flash_attention.operation import flash_attention as operation
from ejkernel.ops.autotuner.measure.measurement import Runner, interleaved, sets_for_cold
from ejkernel.ops.autotuner.trials.candidates import Program
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.fingerprint import device_fingerprint

FILE = Path(ejkernel.__file__).parent / "data/measured/flash_attention_h200.json"
DIRECTIONS = ("fwd", "bwd")
_WIDEST = 256  # head dimension of our kernels and cuDNN


def grid_names() -> list[str]:
    """Return the names of the cases of the grid: fixed and drawn ones, in kinds that models use."""
    names = [*CASES, *GRID_CASES, *drawn_names(7, 40), *drawn_names(24, 114), *drawn_names(2611, 28)]
    names += [*widely_drawn_names(27182, 60), *widely_drawn_names(161803, 44)]
    names += small_names(28, 28)
    names += [name for name in widely_drawn_names(31415, 420) if case_named(name).dtype == "float16"]
    return [name for name in names if is_open(case_named(name))]


def is_open(case: Case) -> bool:
    """Return whether cuDNN runs a case too, and is not far slower."""
    return (
        case.dtype != "float32"
        and case.dims[0] == case.dims[1] <= _WIDEST
        and not (case.cap or case.segments or case.bias or case.shared or case.sinks)
    )


def call_of(case: Case, arrays: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the operation's arguments for a case."""
    segments, lengths = arrays.get("segment_ids"), arrays.get("key_lengths")
    return operation.prepare(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays.get("bias"),
        arrays.get("attention_mask"),
        None if segments is None else (segments, segments),
        (None, lengths),
        arrays.get("sinks"),
        causal=case.causal,
        sliding_window=None if case.window is None else (case.window - 1, None),
        logits_soft_cap=case.cap,
    )


def contenders_of(case: Case) -> tuple[str, ...]:
    """Return the contenders of a case: implementations, and for wide heads blocks of XLA as large as the scores."""
    return ("mosaic_gpu", "xla", "xla whole") if max(case.dims) > _WIDEST else ("mosaic_gpu", "cudnn")


def config_of(case: Case, contender: str, direction: str, params: Any = None) -> FlashAttentionConfig:
    """Return the configuration of a contender."""
    name, *whole = contender.split()
    of_direction = FwdParams if direction == "fwd" else BwdParams
    if whole:
        params = of_direction(q_blocksize=case.seq, kv_blocksize=case.keys)
    return FlashAttentionConfig(implementation=name, **{direction: params})


@dataclasses.dataclass(frozen=True)
class Direction(Entry):
    """One contender's forward, with residuals, or its backward alone."""

    params: Any = None

    def lowered(self) -> Any:
        """Return the program, lowered for flat arrays."""
        case = case_named(self.case)
        leaves, tree = jax.tree.flatten(types_of(case, self.direction))
        with executor_of(None):
            reason = reason_of(case, self.contender.split()[0], self.direction)
            if reason is not None:
                raise NotImplementedError(reason)
            program = program_of(case, config_of(case, self.contender, self.direction, self.params), self.direction)
            return jax.jit(lambda *flat: program(*jax.tree.unflatten(tree, flat))).lower(*leaves)


def abstract(case: Case, direction: str) -> Any:
    """Return the abstract call of a direction on this device."""
    found: list[Any] = []

    def note(arrays: dict[str, Any]) -> None:
        args, options = call_of(case, arrays)
        found.append(operation.describe(*args, **{name: x for name, x in options.items() if name != "implementation"}))

    jax.eval_shape(note, case.types())
    place = {"platform": "gpu", "device_fingerprint": device_fingerprint()}
    return dataclasses.replace(found[0], backward=direction == "bwd", **place)


def changed_params(case: Case, direction: str, changes: Sequence[str] = ()) -> Any:
    """Return the launch parameters of our kernels, with changes such as `stages=3`."""
    params = operation.implementations["mosaic_gpu"].heuristic(abstract(case, direction))
    pairs = [change.partition("=") for change in changes]
    return dataclasses.replace(params, **{name: ast.literal_eval(value) for name, _, value in pairs})


def launch_of(case: Case, direction: str) -> dict[str, Any]:
    """Return the launch parameters of our kernels that differ from the defaults."""
    return _unusual(changed_params(case, direction))


def _unusual(params: Any) -> dict[str, Any]:
    fields = {} if params is None else {field.name: field.default for field in dataclasses.fields(params)}
    return {name: getattr(params, name) for name, usual in fields.items() if getattr(params, name) != usual}


def reason_of(case: Case, name: str, direction: str) -> str | None:
    """Return why an implementation does not run a direction of a case; without it, another would run in its place."""
    return operation.implementations.unsupported(name, abstract(case, direction))


def types_of(case: Case, direction: str) -> tuple[Any, ...]:
    """Return the types of a program's arguments: the inputs, and for the backward its cotangent and residuals."""
    dout, arrays = case.arguments(backward=True)
    if direction == "fwd":
        return (arrays,)
    rows = (case.batch, case.heads[0], case.seq)
    return arrays, dout, (dout, jax.ShapeDtypeStruct(rows, jnp.float32))


def program_of(case: Case, config: FlashAttentionConfig, direction: str) -> Callable[..., Any]:
    """Return a direction of a case as a function of `types_of`."""

    def forward(arrays: dict[str, Any]) -> Any:
        args, options = call_of(case, arrays)
        return operation.fwd_with_residuals(*args, cfg=config, **options)

    def backward(arrays: dict[str, Any], dout: jax.Array, residuals: Any) -> Any:
        args, options = call_of(case, arrays)
        found = operation.vjp(residuals[1], residuals[0], (dout,), *args, cfg=config, **options)
        return [x for x in found if x is not None]

    return forward if direction == "fwd" else backward


def measured(
    entries: Sequence[Direction], programs: dict[Direction, Program | str], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each direction of a case."""
    case = case_named(entries[0].case)
    dout, first = case.inputs(0, backward=True)
    count = min(3, sets_for_cold(sum(x.nbytes for x in jax.tree.leaves((dout, first)))))
    sets = [(dout, first), *(case.inputs(seed, backward=True) for seed in range(1, count))]
    residuals: list[Any] = []
    for direction in dict.fromkeys(entry.direction for entry in entries):
        reasons, runners = {}, {}
        for entry in [entry for entry in entries if entry.direction == direction]:
            found = programs[entry]
            try:
                if isinstance(found, str):
                    raise RuntimeError(found)
                function = entry.loaded(found)
                if direction == "fwd" and not residuals:
                    residuals = [_residuals(function(*jax.tree.leaves(arrays))) for _, arrays in sets]
                given = [(x,) if direction == "fwd" else (x, d, r) for (d, x), r in zip(sets, residuals, strict=True)]
                runner = Runner(function, [jax.tree.leaves(x) for x in given])
                jax.block_until_ready(runner())
                runners[title_of(entry)] = runner
            except Exception as error:  # noqa: BLE001 - any error of a contender is its result
                reasons[title_of(entry)] = error_text(error)[:200]
        times = interleaved([[runner] for runner in runners.values()], rounds=rounds)
        medians = {name: round(1e6 * x.median, 1) for name, x in zip(runners, times, strict=True)}
        apart = {name: float(f"{x:.1e}") for name, x in apart_from_first(runners).items()}
        row = {"case": entries[0].case, "direction": direction, "us": medians, "apart": apart, "reasons": reasons}
        yield row | _fields(case) | {"params": launch_of(case, direction)}


def _residuals(found: Any) -> Any:
    out, lse = found if len(found) == 2 else (found[0], found[-1])
    return out, lse


def title_of(entry: Direction) -> str:
    """Return the name of a contender in a row."""
    if entry.params is None:
        return entry.contender
    unusual = [f"{name}={x}" for name, x in _unusual(entry.params).items()]
    return " ".join([entry.contender, *(unusual or ["defaults"])])


def _fields(case: Case) -> dict[str, Any]:
    """Return the call in words of the data file."""
    heads, groups = case.heads
    more: dict[str, Any] = {"lengths": True} if case.lengths else {}
    if case.dtype != "bfloat16":
        more["dtype"] = case.dtype
    if case.causal:
        more["right"] = 0
    if case.window is not None:
        more["left"] = case.window - 1
    return {"sizes": [case.batch, case.seq, case.keys, heads, groups, case.dims[0]], **more}


def measure(entries: Sequence[Direction], rounds: int, processes: int | None) -> Iterator[dict[str, Any]]:
    """Compile all contenders in parallel, then measure them case by case."""
    start = time.perf_counter()
    slow_first = sorted(entries, key=lambda x: (x.direction != "bwd", x.contender != "mosaic_gpu"))
    programs = compiled_in_parallel(slow_first, processes)
    print(f"compiled {len(entries)} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    for case in dict.fromkeys(entry.case for entry in entries):
        for row in measured([entry for entry in entries if entry.case == case], programs, rounds):
            print(json.dumps(row), flush=True)
            yield row


def entries_of(cases: Mapping[str, Sequence[str]], changes: Sequence[str] = ()) -> list[Direction]:
    """Return all contenders of these cases in these directions; a backward takes the residuals of a forward."""
    found = []
    for name, directions in cases.items():
        case = case_named(name)
        for direction in DIRECTIONS[: 2 if "bwd" in directions else 1]:
            found += [Direction(name, direction, contender, None) for contender in contenders_of(case)]
            for changed, *pairs in map(str.split, changes):
                if changed == direction:
                    params = changed_params(case, direction, pairs)
                    found.append(Direction(name, direction, "mosaic_gpu", None, params))
    return found


def case_of(row: dict[str, Any]) -> Case:
    """Return the case of a row of the data."""
    batch, seq, keys, heads, groups, dim = row["sizes"]
    return Case(
        batch=batch,
        seq=seq,
        heads=(heads, groups),
        dims=(dim, dim),
        causal="right" in row,
        window=row["left"] + 1 if "left" in row else None,
        lengths=row.get("lengths", False),
        dtype=row.get("dtype", "bfloat16"),
        other=None if keys == seq else keys,
    )


def changed(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the cases and directions of rows with other launch parameters than today's, or unknown ones."""
    found: dict[str, list[str]] = {}
    for row in rows:
        case, direction = case_of(row), row["direction"]
        if row.get("params") != launch_of(case, direction):
            found.setdefault(words_of(case), []).append(direction)
    return found


def updated(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows, with those of the same calls in the data `found` in their places, and its other ones at the end."""
    device, *_ = found["environment"]["device"].split(";")
    both = [row for row in found["calls"] if {"mosaic_gpu", "cudnn"} <= set(row["us"])]
    new = {_call(row): row | {"device": device} for row in both}
    return list({**{_call(row): row for row in rows}, **new}.values())


def _call(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a row: its call and direction."""
    return (tuple(row["sizes"]), *(row.get(name) for name in ("direction", "left", "right", "lengths", "dtype")))


def load(file: Path = FILE) -> dict[str, Any]:
    """Return the content of a data file."""
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


def store(rows: Sequence[dict[str, Any]], file: Path, environment: dict[str, Any]) -> None:
    """Write a data file, a line for each row; rows of the environment's device do not name it."""
    kept = ("direction", "sizes", "left", "right", "lengths", "dtype", "params", "us", "device")
    rows = [{name: row[name] for name in kept if name in row} for row in rows]
    lines = ",\n".join(
        json.dumps({name: x for name, x in row.items() if (name, x) != ("device", environment["device"])})
        for row in rows
    )
    file.write_text(f'{{"environment": {json.dumps(environment)},\n"calls": [\n{lines}\n]}}\n', encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and store the data."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_choice", description=__doc__)
    parser.add_argument("--cases", nargs="*", metavar="CASE", help="instead of the grid")
    parser.add_argument("--changed", action="store_true", help="rows of the data with other launch parameters now")
    parser.add_argument("--with", action="append", default=[], metavar="PARAMETERS", help="of ours, to time as well")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the rows that --out wrote into the data")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each contender (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: one a core)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"write the data there, e.g. {FILE.name}")
    args = parser.parse_args(argv)
    data = load()
    if args.update is not None:
        store(updated(data["calls"], load(args.update)), FILE, data["environment"])
        return 0
    cases: Mapping[str, Sequence[str]]
    changes = vars(args)["with"]
    directions = tuple(change.split()[0] for change in changes) or DIRECTIONS
    cases = changed(data["calls"]) if args.changed else dict.fromkeys(args.cases or grid_names(), directions)
    rows = []
    for row in measure(entries_of(cases, changes), args.rounds, args.processes):
        rows.append(row)
        if args.out is not None:  # after each row, since a later one may end the process
            store(rows, args.out, report.environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
