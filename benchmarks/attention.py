# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention`: attention, tuned and untuned, beside the alternatives of JAX users.

The contenders of each case are timed interleaved, forward and forward with backward, on normally distributed inputs
outside the device's cache. The report has their medians, and the ratio of the best alternative to ours: tuned
(`--cache`, filled by `python -m benchmarks.shipped tune`), untuned, and with our own kernels alone. Each kind of call
has the geometric mean of these ratios, and the worst. Contenders that cannot run a case show the reason.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.attention_cases import CASES, KINDS, Case, case_named, short_names, small_names, widely_drawn_names
from ejkernel import compat
from ejkernel.modules import flash_attention
from ejkernel.ops import ConfigSelectorChain, Executor, Invocation, PersistentCache, set_default_executor
from ejkernel.ops.autotuner.measure.measurement import Runner, interleaved, sets_for_cold
from ejkernel.ops.autotuner.trials.candidates import Program
from ejkernel.ops.execution.discovery import discover_for
from ejkernel.ops.utils.error_text import error_text

Attention = Callable[..., jax.Array]
OURS = ("tuned", "untuned", "mosaic_gpu")
RIVALS = ("jax.nn cudnn", "jax.nn xla", "tokamax")  # the usual alternatives
DIRECTIONS = ("forward", "forward and backward")
_WIDEST, _SHORT = 256, 640  # head dimension of the kernels, and a sequence


def ours(case: Case, *, implementation: str | None = None) -> Attention:
    """Return the module's call, by one implementation or by any."""
    return functools.partial(
        flash_attention,
        causal=case.causal,
        sliding_window=None if case.window is None else (case.window - 1, None),
        logits_soft_cap=case.cap,
        implementation=implementation,
    )


def _window(case: Case) -> tuple[int, int] | None:
    """Return the window as the alternatives count it."""
    return None if case.window is None else (case.window - 1, 0 if case.causal else case.keys)


def _mask(given: dict[str, Any]) -> jax.Array | None:
    """Return the mask of a call that has no segment ids to take."""
    segments = given.get("segment_ids")
    mask: jax.Array | None = given.get("attention_mask")
    return mask if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]


def by_jax(case: Case, *, implementation: Literal["cudnn", "xla"]) -> Attention:
    """Return the call of `jax.nn.dot_product_attention`, with a mask where the segments need one."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, **given: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            given.get("bias"),
            _mask(given),
            is_causal=case.causal,
            local_window_size=_window(case),
            key_value_seq_lengths=given.get("key_lengths"),
            implementation=implementation,
        )

    if case.cap is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no soft cap")
    return attend


def by_tokamax(case: Case) -> Attention:
    """Return the call of Tokamax's attention, if that library is there."""
    import tokamax

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, **given: Any) -> jax.Array:
        result: jax.Array = tokamax.dot_product_attention(
            query,
            key,
            value,
            bias=given.get("bias"),
            mask=_mask(given),
            is_causal=case.causal,
            logits_soft_cap=case.cap,
            local_window_size=_window(case),
            key_value_seq_lengths=given.get("key_lengths"),
        )
        return result

    return attend


CONTENDERS: dict[str, Callable[[Case], Attention]] = {
    "tuned": ours,
    "untuned": ours,
    **{name: functools.partial(ours, implementation=name) for name in ("mosaic_gpu", "cudnn", "cudnn_packed", "xla")},
    "jax.nn cudnn": functools.partial(by_jax, implementation="cudnn"),
    "jax.nn xla": functools.partial(by_jax, implementation="xla"),
    "tokamax": by_tokamax,
}


def program_of(attention: Attention, *, backward: bool) -> Callable[..., Any]:
    """Return the forward, or a function of a cotangent that returns the output and all gradients.

    Without the output, XLA would leave the product with the values out of a forward that keeps its weights.
    """
    if not backward:
        return lambda arrays: attention(**arrays)

    def both(cotangent: jax.Array, arrays: dict[str, jax.Array]) -> Any:
        inexact = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        out, pull = jax.vjp(lambda some: attention(**{**arrays, **some}), inexact)
        return out, pull(cotangent)

    return both


def calls_of(case: Case) -> list[Invocation[Any, Any]]:
    """Return the forward and the backward of a case as calls of ours."""
    program = jax.jit(program_of(ours(case), backward=True))
    return discover_for(program, case.arguments(backward=True), {}, platform="gpu")


@contextlib.contextmanager
def executor_of(cache: Path | None) -> Iterator[None]:
    """Run calls inside with the configurations of a folder, or with the heuristic."""
    persistent = None if cache is None else PersistentCache(cache, shipped=False)
    set_default_executor(Executor(ConfigSelectorChain(persistent=persistent)))
    try:
        yield
    finally:
        set_default_executor(None)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One contender in one case and direction; compiled in a separate process, since tracing takes most of the time."""

    case: str
    direction: str
    contender: str
    cache: Path | None

    def lowered(self) -> Any:
        """Return the program, lowered for flat arrays."""
        case, backward = case_named(self.case), self.direction != "forward"
        leaves, tree = jax.tree.flatten(case.arguments(backward=backward))
        with executor_of(self.cache if self.contender == "tuned" else None):
            program = program_of(CONTENDERS[self.contender](case), backward=backward)
            return jax.jit(lambda *flat: program(*jax.tree.unflatten(tree, flat))).lower(*leaves)

    def compiled(self) -> Program | str:
        """Return the program, or the reason for having none."""
        try:
            lowered = self.lowered()
            code = compat.executables.serialized(lowered.compile())
        except Exception as error:  # noqa: BLE001 - any error of a contender is its result
            return error_text(error)[:300]
        counts = [len(jax.tree.leaves(tree)) for tree in (lowered.in_avals, lowered.out_info)]
        return Program(code=code, inputs=counts[0], outputs=counts[1], mosaic="mosaic_gpu" in lowered.as_text())

    def loaded(self, program: Program) -> Any:
        """Return a function that runs; compile again if the program cannot be loaded from another process."""
        try:
            return program.load()
        except Exception:  # noqa: BLE001 - the compilation below raises the error if there is a real one
            return self.lowered().compile()


AnyEntry = TypeVar("AnyEntry", bound=Entry)


def compiled_in_parallel(entries: Sequence[AnyEntry], processes: int | None) -> dict[AnyEntry, Program | str]:
    """Return the program of each entry, or the reason for having none.

    XLA tries its algorithms on the device, and all processes share its memory: programs that lacked it are compiled
    again by fewer processes, at last by one.
    """
    found: dict[AnyEntry, Program | str] = {}
    left, most = list(entries), processes or os.cpu_count() or 1
    for count in sorted({most, min(most, 4), 1}, reverse=True):
        found |= _compiled(left, count)
        left = [entry for entry in left if _lacked_memory(found[entry])]
        if not left:
            break
    return found


def _compiled(entries: Sequence[AnyEntry], processes: int) -> dict[AnyEntry, Program | str]:
    """Return the same, by this many processes."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, _return_memory) as pool:
        jobs = {entry: pool.submit(entry.compiled) for entry in entries}
        return {entry: _result_of(job) for entry, job in jobs.items()}


def _return_memory() -> None:
    """Make this process, which has not yet initialised its device, return memory as soon as a program is compiled."""
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


def _result_of(job: concurrent.futures.Future[Program | str]) -> Program | str:
    try:
        return job.result()
    except concurrent.futures.BrokenExecutor as error:
        return error_text(error)


def _lacked_memory(found: Program | str) -> bool:
    # XLA reports NOT_FOUND if all algorithms fail, also for lack of memory.
    return isinstance(found, str) and ("RESOURCE_EXHAUSTED" in found or "NOT_FOUND" in found)


def measured(entries: Sequence[Entry], programs: dict[str, Program | str], rounds: int) -> dict[str, Any]:
    """Return each contender's median in microseconds, or why it has none, and how ours stand."""
    case, backward = case_named(entries[0].case), entries[0].direction != "forward"
    by_name = {entry.contender: entry for entry in entries}
    reasons = {name: found for name, found in programs.items() if isinstance(found, str)}
    first = case.inputs(0, backward=backward)
    sets = [first, *(case.inputs(s, backward=backward) for s in range(1, min(3, sets_for_cold(_bytes(first)))))]
    flat = [jax.tree.leaves(arguments) for arguments in sets]
    runners: dict[str, Runner] = {}
    for name, found in programs.items():
        if isinstance(found, Program):
            try:
                runners[name] = Runner(by_name[name].loaded(found), flat)
            except Exception as error:  # noqa: BLE001 - as above
                reasons[name] = error_text(error)[:300]
    names = list(runners)
    apart = apart_from_first(runners)

    def failed(index: int, error: BaseException) -> None:
        reasons[names[index]] = error_text(error)[:300]

    times = interleaved([[runner] for runner in runners.values()], rounds=rounds, on_error=failed)
    medians = {name: 1e6 * time.median for name, time in zip(names, times, strict=True) if time.samples}
    rivals = [time for name, time in medians.items() if name in RIVALS]
    ratios = {name: min(rivals) / medians[name] for name in OURS if name in medians and rivals}
    return {"us": medians, "ratios": ratios, "apart": apart, "reasons": reasons}


def apart_from_first(runners: dict[str, Runner]) -> dict[str, float]:
    """Return how far each contender's results are from those of the first, at most, by the norms of both."""
    first: list[jax.Array] | None = None
    apart = {}
    for name, runner in runners.items():
        try:
            found = jax.tree.leaves(runner.function(*runner.argument_sets[0]))
        except Exception:  # noqa: BLE001 - timing it tells why
            continue
        first = found if first is None else first
        pairs = zip(found, first, strict=True)
        apart[name] = max(float(_distance(one, other)) for one, other in pairs)
    return apart


@jax.jit
def _distance(one: jax.Array, other: jax.Array) -> jax.Array:
    one, other = one.astype(jnp.float32), other.astype(jnp.float32)
    apart: jax.Array = jnp.linalg.norm((one - other).ravel()) / jnp.linalg.norm(other.ravel())
    return apart


def _bytes(arguments: tuple[Any, ...]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arguments))


Found = dict[str, dict[str, dict[str, Any]]]


def table(found: Found) -> str:
    """Return Markdown tables: for each direction a line a case, and then a line a kind."""
    lines = []
    for direction in DIRECTIONS:
        cases = found.get(direction, {})
        names = list(dict.fromkeys(name for case in cases.values() for name in case["us"]))
        lines += [f"### {direction}, us", "", f"| | {' | '.join(names)} | {' | '.join(map(_over, OURS))} |"]
        lines.append("|---" * (len(names) + len(OURS) + 1) + "|")
        for title, case in cases.items():
            cells = [f"{case['us'][name]:,.0f}" if name in case["us"] else "" for name in names]
            cells += [_number(case["ratios"].get(name)) for name in OURS]
            lines.append(f"| {title} | {' | '.join(cells)} |")
        lines += ["", *_kinds(cases), ""]
    return "\n".join(lines)


def _over(name: str) -> str:
    return f"best of the others / {name}"


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _kinds(cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the geometric mean and the worst of the ratios of each kind."""
    kinds = dict.fromkeys(case_named(title).kind for title in cases)
    yield f"| kind | cases | {' | '.join(f'{name}: mean | worst' for name in OURS)} |"
    yield "|---" * (2 + 2 * len(OURS)) + "|"
    for kind in [*kinds, "all"]:
        ratios = [case["ratios"] for title, case in cases.items() if kind in ("all", case_named(title).kind)]
        cells = [str(sum(map(bool, ratios)))]  # in the others no rival ran
        for name in OURS:
            own = [found[name] for found in ratios if name in found]
            cells += [f"{np.exp(np.mean(np.log(own))):.2f}", f"{min(own):.2f}"] if own else ["", ""]
        yield f"| {kind} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, and keep them with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write attention_<device>.json and .md there")
    parser.add_argument(
        "--cases", nargs="*", default=list(CASES), metavar="CASE", help="which; also drawn ones, by name"
    )
    parser.add_argument("--draw", type=int, metavar="SEED", help="draw other cases at random")
    parser.add_argument("--count", type=int, default=24, help="how many cases to draw (default: %(default)s)")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=sorted(set(KINDS)), metavar="KIND", help="to draw")
    drawn = parser.add_mutually_exclusive_group()
    drawn.add_argument("--few-tiles", action="store_true", help="with --draw: calls that cannot fill a GPU")
    drawn.add_argument("--short", action="store_true", help="with --draw: many short sequences")
    parser.add_argument("--at-once", type=int, default=12, metavar="N", help="cases to compile before their times")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--cache", type=Path, help="cache for the contender `tuned`, which is left out without it")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each contender (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: one a core)")
    args = parser.parse_args(argv)
    if (args.few_tiles or args.short) and args.draw is None:
        parser.error("--few-tiles and --short need --draw SEED")
    names = [name for name in args.contenders if name != "tuned" or args.cache is not None]
    cases = args.cases
    if args.few_tiles or args.short:
        cases = (small_names if args.few_tiles else short_names)(args.draw, args.count)
    elif args.draw is not None:
        cases = widely_drawn_names(args.draw, args.count, args.kinds)
    found: Found = {}
    for first in range(0, len(cases), args.at_once):
        for name, direction, case in _all_measured(cases[first : first + args.at_once], names, args):
            found.setdefault(direction, {})[name] = case
            print(name, direction, json.dumps(case), file=sys.stderr, flush=True)
            if args.out is not None:  # save after each case, since a later one may end the process
                kept = {"environment": report.environment(), **found}
                report.write(args.out, f"attention_{report.platform_name()}", kept, table(found))
    print(table(found))
    return 0


def _all_measured(
    cases: Sequence[str], contenders: Sequence[str], args: argparse.Namespace
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Compile these cases in parallel, then yield the name, direction and times of each."""
    start = time.perf_counter()
    entries = {
        (case, direction): [Entry(case, direction, name, args.cache) for name in contenders if _worthwhile(case, name)]
        for case in cases
        for direction in DIRECTIONS
    }
    programs = compiled_in_parallel([entry for each in entries.values() for entry in each], args.processes)
    print(f"compiled {len(programs)} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    for (name, direction), each in entries.items():
        yield name, direction, measured(each, {entry.contender: programs[entry] for entry in each}, args.rounds)


def _worthwhile(name: str, contender: str) -> bool:
    """Return whether to time a contender: of drawn cases, plain XLA only has wide heads and short sequences."""
    case = case_named(name)
    return name in CASES or contender != "jax.nn xla" or max(case.dims) > _WIDEST or case.seq <= _SHORT


if __name__ == "__main__":
    sys.exit(main())
