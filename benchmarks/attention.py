# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention`: attention, tuned and as the library guesses, beside what else JAX users have.

Of each case, all contenders are timed in turn, forward and forward with backward, on normally distributed inputs that
are not in the cache; what is reported is their medians, and the best alternative's time over that of ours: tuned, or
as it guesses if `--contenders` leaves `tuned` out. A contender that cannot run a case says why.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from ejkernel.modules import flash_attention
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, autotune, set_default_executor
from ejkernel.ops.autotuner.measure.measurement import Runner, interleaved, sets_for_cold
from ejkernel.ops.utils.telling import error_text

Attention = Callable[..., jax.Array]
RIVALS = ("jax.nn cudnn", "jax.nn xla", "tokamax")  # what a user would pick instead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention.

    Attributes:
        heads: Query heads, and key heads.
        dims: Head size of query and key, and of values.
        segments: Lengths of documents packed into each row.
        bias: Whether a full bias is added.
        mask: Whether a random boolean mask hides keys.
    """

    batch: int
    seq: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    causal: bool = True
    window: int | None = None
    cap: float | None = None
    segments: tuple[int, ...] = ()
    bias: bool = False
    mask: bool = False

    def inputs(self, seed: int) -> dict[str, jax.Array]:
        """Return bfloat16 arrays, and segment ids."""
        keys = iter(jax.random.split(jax.random.key(seed), 5))
        size = (self.batch, self.seq)

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.bfloat16)

        arrays = {
            "query": normal(*size, self.heads[0], self.dims[0]),
            "key": normal(*size, self.heads[1], self.dims[0]),
            "value": normal(*size, self.heads[1], self.dims[1]),
        }
        if self.bias:
            arrays["bias"] = normal(self.batch, self.heads[0], self.seq, self.seq)
        if self.mask:
            shown = jax.random.bernoulli(next(keys), 0.5, (self.batch, 1, self.seq, self.seq))
            arrays["attention_mask"] = shown | jnp.eye(self.seq, dtype=bool)
        if self.segments:
            ids = np.repeat(np.arange(len(self.segments), dtype=np.int32), self.segments)
            arrays["segment_ids"] = jnp.asarray(np.broadcast_to(ids, size))
        return arrays


CASES = {
    "causal D128": Case(batch=4, seq=4096, heads=(32, 8), dims=(128, 128)),
    "causal D128 16k": Case(batch=1, seq=16384, heads=(32, 8), dims=(128, 128)),
    "causal D128 1k": Case(batch=8, seq=1024, heads=(16, 16), dims=(128, 128)),
    "causal D64": Case(batch=4, seq=4096, heads=(32, 32), dims=(64, 64)),
    "causal D256": Case(batch=2, seq=4096, heads=(16, 8), dims=(256, 256)),
    "full D128": Case(batch=4, seq=4096, heads=(16, 16), dims=(128, 128), causal=False),
    "full D64 512": Case(batch=16, seq=512, heads=(16, 16), dims=(64, 64), causal=False),
    "8 segments": Case(
        batch=1, seq=8192, heads=(32, 8), dims=(128, 128), segments=(500, 1300, 300, 1900, 900, 300, 2200, 792)
    ),
    "8 equal segments": Case(batch=1, seq=8192, heads=(32, 8), dims=(128, 128), segments=(1024,) * 8),
    "3 segments": Case(batch=1, seq=8192, heads=(32, 8), dims=(128, 128), segments=(2000, 5000, 1192)),
    "window 1k": Case(batch=1, seq=16384, heads=(16, 8), dims=(128, 128), window=1024),
    "soft cap D256": Case(batch=2, seq=4096, heads=(16, 8), dims=(256, 256), cap=50.0),
    "soft cap D128": Case(batch=2, seq=4096, heads=(32, 8), dims=(128, 128), cap=30.0),
    "D192/128": Case(batch=2, seq=4096, heads=(16, 16), dims=(192, 128)),
    "bias": Case(batch=384, seq=384, heads=(4, 4), dims=(32, 32), causal=False, bias=True),
    "mask": Case(batch=4, seq=2048, heads=(16, 16), dims=(128, 128), causal=False, mask=True),
}


def ours(case: Case, *, implementation: str | None = None) -> Attention:
    """Return the module's call, by one implementation or by any."""
    return functools.partial(
        flash_attention,
        causal=case.causal,
        sliding_window=None if case.window is None else (case.window - 1, None),
        logits_soft_cap=case.cap,
        implementation=implementation,
    )


def by_jax(case: Case, *, implementation: str) -> Attention:
    """Return the call of `jax.nn.dot_product_attention`, with a mask where the segments need one."""

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        mask = attention_mask
        if segment_ids is not None:
            mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        window: Any = None if case.window is None else (case.window - 1, 0)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=case.causal,
            local_window_size=window,
            implementation=implementation,  # type: ignore[arg-type]  # one of two literals
        )

    if case.cap is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no soft cap")
    return attend


def by_tokamax(case: Case) -> Attention:
    """Return the call of Tokamax's attention, if that library is there."""
    import tokamax

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, **others: Any) -> jax.Array:
        segments = others.get("segment_ids")
        mask = others.get("attention_mask")
        if segments is not None:
            mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        result: jax.Array = tokamax.dot_product_attention(
            query,
            key,
            value,
            bias=others.get("bias"),
            mask=mask,
            is_causal=case.causal,
            logits_soft_cap=case.cap,
            local_window_size=None if case.window is None else (case.window - 1, 0),
        )
        return result

    return attend


def with_gradient(attention: Attention) -> Callable[..., Any]:
    """Return what computes the gradients of all floating-point inputs, for a random cotangent."""

    def both(cotangent: jax.Array, arrays: dict[str, jax.Array]) -> Any:
        inexact = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        _, pull = jax.vjp(lambda some: attention(**{**arrays, **some}), inexact)
        return pull(cotangent)

    return both


CONTENDERS: dict[str, Callable[[Case], Attention]] = {
    "tuned": ours,
    "untuned": ours,
    **{name: functools.partial(ours, implementation=name) for name in ("mosaic_gpu", "cudnn", "cudnn_packed", "xla")},
    "jax.nn cudnn": functools.partial(by_jax, implementation="cudnn"),
    "jax.nn xla": functools.partial(by_jax, implementation="xla"),
    "tokamax": by_tokamax,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How the cases are measured.

    Attributes:
        contenders: Who takes part.
        rounds: Samples of each.
        budget: Seconds that tuning one call may take.
    """

    contenders: Sequence[str]
    rounds: int
    budget: float


class Contest:
    """One case in one direction: its contenders are compiled side by side, and timed in turn later."""

    def __init__(self, case: Case, plan: Plan, *, backward: bool) -> None:
        self.case, self.plan, self.backward = case, plan, backward
        self.reasons: dict[str, str] = {}
        self.configurations: list[str] = []
        self._programs: dict[str, concurrent.futures.Future[Any]] = {}

    def prepare(self, pool: concurrent.futures.Executor) -> None:
        """Tune, if that is wanted, and begin to compile."""
        arguments = jax.eval_shape(lambda: self._arguments(0))
        tuned, untuned = (ConfigSelectorChain(policy=AutotunePolicy(budget_s=self.plan.budget)) for _ in range(2))
        if "tuned" in self.plan.contenders:
            with executor_of(tuned):
                found = autotune(jax.jit(self._program(ours(self.case))), *arguments)
            self.configurations = [repr(entry.cfg) for entry in found.entries]
        for name in self.plan.contenders:
            with executor_of(tuned if name == "tuned" else untuned):
                try:
                    program = jax.jit(self._program(CONTENDERS[name](self.case))).lower(*arguments)
                except Exception as error:  # noqa: BLE001 - whatever a contender does is a result
                    self.reasons[name] = error_text(error)[:300]
                else:
                    self._programs[name] = pool.submit(program.compile)

    def measure(self) -> dict[str, Any]:
        """Return each contender's median in microseconds, or why it has none, and what was tuned."""
        first = self._arguments(0)
        sets = [first, *(self._arguments(seed) for seed in range(1, min(4, sets_for_cold(_bytes(first)))))]
        runners: dict[str, Runner] = {}
        for name, program in self._programs.items():
            try:
                runners[name] = Runner(program.result(), sets)
            except Exception as error:  # noqa: BLE001 - as above
                self.reasons[name] = error_text(error)[:300]
        names = list(runners)

        def failed(index: int, error: BaseException) -> None:
            self.reasons[names[index]] = error_text(error)[:300]

        times = interleaved(list(runners.values()), rounds=self.plan.rounds, on_error=failed)
        medians = {name: 1e6 * time.median for name, time in zip(names, times, strict=True) if time.samples}
        own = medians.get("tuned", medians.get("untuned"))
        rivals = [time for name, time in medians.items() if name in RIVALS]
        return {
            "us": medians,
            "ratio": min(rivals) / own if rivals and own else None,
            "reasons": self.reasons,
            "configurations": self.configurations,
        }

    def _arguments(self, seed: int) -> tuple[Any, ...]:
        case = self.case
        if not self.backward:
            return (case.inputs(seed),)
        out = (case.batch, case.seq, case.heads[0], case.dims[1])
        return jax.random.normal(jax.random.key(seed + 100), out, jnp.bfloat16), case.inputs(seed)

    def _program(self, attention: Attention) -> Callable[..., Any]:
        return with_gradient(attention) if self.backward else lambda arrays: attention(**arrays)


@contextlib.contextmanager
def executor_of(chain: ConfigSelectorChain[Any, Any]) -> Iterator[None]:
    """Make calls inside run with what a chain knows."""
    set_default_executor(Executor(chain))
    try:
        yield
    finally:
        set_default_executor(None)


def _bytes(arguments: tuple[Any, ...]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arguments))


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return Markdown tables, one a direction, a line a case."""
    lines = []
    for direction, cases in found.items():
        names = list(dict.fromkeys(name for case in cases.values() for name in case["us"]))
        lines += [f"### {direction}, us", f"| | {' | '.join(names)} | best of the others / ours |"]
        lines.append("|---" * (len(names) + 2) + "|")
        for title, case in cases.items():
            cells = [f"{case['us'][name]:,.0f}" if name in case["us"] else "" for name in names]
            ratio = "" if case["ratio"] is None else f"{case['ratio']:.2f}"
            lines.append(f"| {title} | {' | '.join(cells)} | {ratio} |")
        ratios = [case["ratio"] for case in cases.values() if case["ratio"]]
        mean = float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")
        lines += [f"| geometric mean |{' |' * len(names)} {mean:.2f} |", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, and keep them with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write attention_<device>.json and .md there")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE", help="which")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each contender (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds to tune a call (default: %(default)s)")
    args = parser.parse_args(argv)
    plan = Plan(contenders=args.contenders, rounds=args.rounds, budget=args.budget)
    contests = {
        direction: {name: Contest(CASES[name], plan, backward=direction != "forward") for name in args.cases}
        for direction in ("forward", "forward and backward")
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for contest in itertools.chain(*(cases.values() for cases in contests.values())):
            contest.prepare(pool)
    found: dict[str, dict[str, dict[str, Any]]] = {direction: {} for direction in contests}
    for direction, cases in contests.items():
        for name, contest in cases.items():
            found[direction][name] = contest.measure()
            print(name, direction, json.dumps(found[direction][name]), file=sys.stderr, flush=True)
            if args.out is not None:  # what was measured is kept, should a later case end the process
                kept = {"environment": report.environment(), **found}
                report.write(args.out, f"attention_{report.platform_name()}", kept, table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
