# SPDX-License-Identifier: Apache-2.0
"""One process of `benchmarks.ranks`: it runs random programs, which all processes know in advance.

Everything else differs between processes: the content of their caches, their heuristics, which programs they lower
early and in which order, and when they forget compiled programs. A process is forked for each line of JSON on the
input.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel import compat
from ejkernel.kernels.rms_norm.operation import RmsNormConfig, rms_norm
from ejkernel.kernels.rms_norm.xla import XlaParams
from ejkernel.ops import (
    AgreementError,
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    ShardingRule,
    configuration_digest,
    overlay_cache,
)

_SPREAD = PartitionSpec("ranks")
_ROWS, _COLUMNS = 8, 16


class Scaled(Kernel[int, jax.Array]):
    """`cfg * x`: sums of it, and of its squares, tell whether all devices ran one configuration."""

    space: ClassVar[tuple[int, ...]] = (1, 2, 3, 5, 7)

    def __init__(self, name: str, heuristic: int) -> None:
        super().__init__(name)
        self._heuristic = heuristic

    def run(self, x: jax.Array, *, cfg: int) -> jax.Array:
        """Compute it."""
        return cfg * x

    def heuristic_cfg(self, inv: Invocation[int, jax.Array]) -> int:
        """Return this process's heuristic."""
        return self._heuristic


class Split(Scaled):
    """The same, partitioned by our sharding rule."""

    def sharding_rule(self, inv: Invocation[int, jax.Array]) -> ShardingRule:
        """Say that rows are apart."""
        return ShardingRule("m n -> m n", split="m")


class Summed(Scaled):
    """A sum over all devices, in as many collectives as the configuration says: others hang."""

    space = (1, 2, 4, 8)

    def run(self, x: jax.Array, *, cfg: int) -> jax.Array:
        """Compute it."""
        parts = [jax.lax.psum(part, "ranks") for part in jnp.split(x, cfg, axis=-1)]
        return jnp.concatenate(parts, axis=-1)


class Case:
    """A call in a program: how to lower and run it, and its configurations."""

    def __init__(self, rank: Rank, kind: str, name: str) -> None:
        self.rank, self.kind, self.name = rank, kind, name
        self.kernel: Kernel[Any, Any]
        self.space: tuple[int, ...] = ()
        self.keywords: dict[str, float] = {}
        if kind == "norm":
            self.kernel = rms_norm
            self.keywords = {"eps": 1e-6 * (1 + rank.shared.randrange(1 << 20))}
        else:
            cls = {"summed": Summed, "split": Split}.get(kind, Scaled)
            self.kernel, self.space = cls(name, rank.own.choice(cls.space)), cls.space
        local = jax.ShapeDtypeStruct((_ROWS, _COLUMNS), jnp.float32)
        shape = rank.x if kind == "scaled" else local
        args, kwargs = self.kernel.prepare(*((shape, rank.weight) if kind == "norm" else (shape,)), **self.keywords)
        inv: Invocation[Any, Any] = Invocation(kernel=self.kernel, args=args, kwargs=kwargs)
        self.key = inv.key

    def config(self, rng: random.Random) -> Any:
        """Return some configuration."""
        if self.kind == "norm":
            return RmsNormConfig(implementation="xla", fwd=XlaParams(block_rows=rng.choice((None, 1, 2, 4))))
        return rng.choice(self.space)

    def program(self) -> Any:
        """Return the program, not compiled yet."""
        function = self.rank.executor
        if self.kind in ("scaled", "split"):
            return jax.jit(lambda x: self._sums(function(self.kernel, x)))
        return jax.jit(jax.shard_map(self._local(), mesh=self.rank.mesh, in_specs=_SPREAD, out_specs=PartitionSpec()))

    def _local(self) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
        def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            if self.kind == "summed":
                return self._sums(0 * self.rank.executor(self.kernel, x) + 1)
            if self.kind == "norm":
                x = jax.grad(lambda x: self.rank.executor(rms_norm, x, self.rank.weight, **self.keywords).sum())(x)
                return self._sums(0 * jax.lax.psum(x, "ranks") + 1)
            return self._sums(jax.lax.psum(self.rank.executor(self.kernel, x), "ranks"))

        return local

    @staticmethod
    def _sums(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.mean(y), jnp.mean(y * y)


class Rank:
    """This process in one run."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.index, self.count, self.folder = plan["index"], plan["count"], Path(plan["folder"])
        self.shared, self.own = random.Random(plan["seed"]), random.Random(f"{plan['seed']} {self.index}")
        self.mesh = Mesh(np.array(jax.devices()), ("ranks",))
        shape = (_ROWS * len(jax.devices()), _COLUMNS)
        self.x = jax.make_array_from_callback(
            shape, NamedSharding(self.mesh, _SPREAD), lambda part: np.ones(shape, np.float32)[part]
        )
        self.weight = np.ones(_COLUMNS, np.float32)
        policy = AutotunePolicy(autotune=self.own.random() < 0.2, agree=plan["agree"])
        saved = PersistentCache(self.folder / f"cache{self.index}", shipped=False)
        persistent = saved if self.own.random() < 0.5 else None
        self.chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(ConfigCache(), persistent, policy=policy)
        self.executor = Executor(self.chain)
        self.service = compat.processes.coordination_store().client
        self.mixed: list[str] = []
        self.errors = 0

    def meet(self, name: str, last: bool) -> None:
        """Wait for the other processes, except in the last round, when one may be gone."""
        if last:
            return
        self.service.wait_at_barrier(name, 60_000)

    def remember(self, case: Case) -> None:
        """Let a cache of this process know the call, or not."""
        where, config = self.own.randrange(3), case.config(self.own)
        if where == 1:
            self.chain.cache.put(case.key, config)
        if where == 2 and self.chain.persistent is not None:
            self.chain.persistent.put(case.key, config)

    def run(self, case: Case, program: Any) -> None:
        """Run a program in all processes."""
        mean, of_squares = (float(np.asarray(value)) for value in program(self.x))
        if abs(mean * mean - of_squares) > 1e-4 * of_squares:
            self.mixed.append(case.name)

    def lower_some(self, cases: list[Case]) -> None:
        """Lower some of the programs in an order of this process's own, some of them side by side."""
        some = self.own.sample(cases, self.own.randrange(len(cases) + 1))
        with concurrent.futures.ThreadPoolExecutor(self.own.choice((1, 2))) as pool:
            list(pool.map(lambda case: case.program().lower(self.x), some))

    def odd_overlay(self, case: Case, name: str) -> None:
        """Enter an overlay in one process only: later lowerings of the same call must raise."""
        odd, entries = self.shared.randrange(self.count), {case.key: case.config(self.shared)}
        with overlay_cache(entries if odd == self.index else {}):
            try:
                case.program().lower(self.x)
            except AgreementError:
                self.errors += 1
        self.meet(name, last=False)


def rounds_of(rank: Rank, plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Go through the rounds, and yield the configurations in use after each."""
    for number in range(plan["rounds"]):
        last = number == plan["rounds"] - 1
        kinds = rank.shared.choices(("scaled", "split", "mapped", "summed", "norm"), k=rank.shared.randrange(2, 5))
        cases = [Case(rank, kind, f"{kind}_{number}_{at}") for at, kind in enumerate(kinds)]
        for case in cases:
            rank.remember(case)
        if last and plan["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        rank.lower_some(cases)
        if not (last and plan["someone_killed"]):
            _run_together(rank, cases)
            rank.odd_overlay(Case(rank, "scaled", f"odd_{number}"), f"odd {number}")
        yield {"used": configuration_digest().keys, "mixed": rank.mixed, "errors": rank.errors}
        rank.errors = 0


def _run_together(rank: Rank, cases: list[Case]) -> None:
    """Run every program, plain and under the same overlays in all processes; each process forgets some in between."""
    rank.shared.shuffle(cases)
    overlaid = rank.shared.sample(cases, rank.shared.randrange(len(cases) + 1))
    overlay = {case.key: case.config(rank.shared) for case in overlaid}
    programs = [case.program() for case in cases]
    for entries in ({}, overlay, {}):
        for case, program in zip(cases, programs, strict=True):
            with overlay_cache(entries):
                rank.run(case, program)
            if rank.own.random() < 0.2:
                rank.remember(case)
            if rank.own.random() < 0.05:
                jax.clear_caches()


def run(plan: dict[str, Any]) -> None:
    """Be one process of a run."""
    warnings.simplefilter("ignore")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{plan['port']}", plan["count"], plan["index"], heartbeat_timeout_seconds=100)
    rank = Rank(plan)
    alive = open(_alive(rank, rank.index), "w")  # noqa: SIM115 - for as long as the process lives
    fcntl.flock(alive, fcntl.LOCK_EX)
    rank.meet("all alive", last=False)
    with open(rank.folder / f"{rank.index}.jsonl", "w", encoding="utf-8") as file:
        for entry in rounds_of(rank, plan):
            print(json.dumps(entry), file=file, flush=True)
    if rank.index == 0:  # this process runs the service, and JAX ends processes that lose it
        for other in range(1, rank.count):
            with open(_alive(rank, other)) as file:
                fcntl.flock(file, fcntl.LOCK_SH)


def _alive(rank: Rank, index: int) -> Path:
    """Return the file that a process has locked until it ends."""
    return rank.folder / f"{index}.alive"


def main() -> None:
    """Fork a process for each line of the input, and tell its number and how it ended."""
    warnings.filterwarnings("ignore", message=".*os.fork")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            os.dup2(2, 1)  # Gloo talks
            try:
                run(json.loads(line))
                status = 0
            except Exception:  # noqa: BLE001 - printed, and told by the status
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)  # skip JAX's shutdown, which would wait for a killed process
        os.write(1, f"{pid}\n".encode())
        os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


if __name__ == "__main__":
    main()
