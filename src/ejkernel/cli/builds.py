# SPDX-License-Identifier: Apache-2.0
"""Builds of a program's step, compiled with the configurations of a chain, for `ejkernel bench` and `tune`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import click
import jax
import numpy as np

from ejkernel.cli.programs import Program, is_abstract, load_program, user_code
from ejkernel.cli.rounds import WARM_UP
from ejkernel.ops.config.cache import overlay_cache
from ejkernel.ops.config.policy import looking_only
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import TuningError
from ejkernel.ops.execution.discovery import local_calls, numbers_of, of_arrays
from ejkernel.ops.execution.executor import Executor, default_executor, set_default_executor
from ejkernel.ops.registry import recording
from ejkernel.ops.utils.fingerprint import device_kind
from ejkernel.ops.utils.formatting import counted, durations, size
from ejkernel.ops.utils.random_arrays import drawn_integers, random_array

_MAPPED: Final = 8 << 20  # bytes mapped anew in a step that are reported
_KEEP: Final = "MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824"


@dataclasses.dataclass(kw_only=True)
class Build:
    """A compiled step with its arguments.

    Attributes:
        name: Name in the table.
        compiled: The step.
        arguments: Its positional and keyword arguments.
        donated: Whether the step consumes an argument, for each leaf of `arguments`.
        compile_seconds: Time to trace, lower and compile.
        first: Seconds of the first step.
        calls: The calls of operations.
        times: How often a step makes each call, by key, where known.
        samples: Seconds of each step, warm-up included.
        mapping: Bytes of memory that each step mapped anew, and the process's seconds in the system during it.
    """

    name: str
    compiled: Callable[..., Any]
    arguments: tuple[Sequence[Any], dict[str, Any]]
    donated: Sequence[bool]
    compile_seconds: float
    calls: Sequence[Invocation[Any, Any]]
    times: Mapping[ConfigKey, int] = dataclasses.field(default_factory=dict)
    first: float = 0.0
    samples: list[float] = dataclasses.field(default_factory=list)
    mapping: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    def step(self, number: int) -> None:
        """Run one step and record its time; see `run`."""
        del number
        self.run()

    def run(self) -> Any:
        """Run one step, record its time, without the time for copying donated arguments, and return its results."""
        leaves, tree = jax.tree.flatten(self.arguments)
        leaves = [
            leaf.copy() if gone and isinstance(leaf, jax.Array) else leaf
            for leaf, gone in zip(leaves, self.donated, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(tree, jax.block_until_ready(leaves))
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        found = jax.block_until_ready(self.compiled(*args, **kwargs))
        self.samples.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        mapped = (after.ru_minflt - before.ru_minflt) * resource.getpagesize()
        self.mapping.append((mapped, after.ru_stime - before.ru_stime))
        return found

    def forget(self) -> None:
        """Forget the recorded steps."""
        self.samples.clear()
        self.mapping.clear()

    @property
    def mapped(self) -> tuple[int, float]:
        """The bytes that a step maps anew and the seconds that the system takes for it, as medians."""
        mapped, seconds = zip(*self.mapping[WARM_UP:] or [(0, 0.0)], strict=True)
        return int(statistics.median(mapped)), statistics.median(seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A program with its arguments; abstract arrays were replaced by random ones.

    Attributes:
        target: The program as the user named it.
        function: The step.
        args, kwargs: Its arguments.
        is_random: Whether some arrays were abstract.
        drawn: The types of the abstract integer arrays; see `drawn_integers`.
    """

    target: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_random: bool = False
    drawn: str = ""

    @property
    def guess(self) -> str:
        """A sentence about integer arrays with random values; empty without any."""
        return self.drawn and (
            f"The integer inputs given by type alone ({self.drawn}) were random zeros and ones. If the time depends "
            f"on their values, let {self.target} return arrays for them."
        )

    @classmethod
    def of(cls, program: Program) -> Loaded:
        """Import a program and create its arrays."""
        function, args, kwargs = load_program(program)
        rng = np.random.default_rng(0)  # the same numbers for a baseline with the same arguments
        drawn = [leaf for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_abstract) if is_abstract(leaf)]
        args, kwargs = jax.tree.map(lambda leaf: _array(leaf, rng), (args, kwargs), is_leaf=is_abstract)
        return cls(program.target, function, args, kwargs, bool(drawn), drawn_integers(drawn))


def _array(leaf: Any, rng: np.random.Generator) -> Any:
    if not is_abstract(leaf):
        return leaf
    made = random_array(leaf, rng)
    return made if leaf.sharding is None else jax.device_put(made, leaf.sharding)


def build(
    name: str,
    program: Loaded,
    chain: ConfigSelectorChain[Any, Any],
    *,
    configs: Mapping[ConfigKey, Any] = MappingProxyType({}),
    pure: bool = False,
) -> Build:
    """Compile a program with the configurations of a chain, and run it once: it may need too much memory.

    Args:
        name: The name in tables.
        program: The program.
        chain: Its configurations.
        configs: Configurations that take precedence.
        pure: Whether side effects are an error.

    Raises:
        TuningError: The program has side effects.
        ClickException: The program does not compile or run.
    """
    say(f"compiling {name}")
    with (
        _executor(Executor(chain)),
        overlay_cache(configs) if configs else contextlib.nullcontext(),
        user_code(f"compiling {program.target}"),
        recording() as seen,  # JAX traces a function again that another build has traced
        looking_only(),
    ):
        start = time.perf_counter()
        traced, lowered, args, kwargs = _lowered(program)
        if pure and traced.jaxpr.effects:
            raise TuningError("it has side effects, e.g. a callback")
        local = local_calls(lowered)
        calls = {inv.key: inv for inv in (*seen, *local)}
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
    made = Build(
        name=name,
        compiled=compiled,
        arguments=(args, kwargs),
        donated=[leaf.donated for leaf in jax.tree.leaves(lowered.args_info)],
        compile_seconds=seconds,
        calls=list(calls.values()),
        times=numbers_of(traced, list(calls.values()), is_split=bool(local)),
    )
    with user_code(f"running {program.target}"):
        made.step(0)
    made.first = made.samples[0]
    made.forget()
    return made


def _lowered(program: Loaded) -> tuple[Any, Any, Sequence[Any], dict[str, Any]]:
    """Return the traced and the lowered program, and the arguments of the compiled one."""
    args: Sequence[Any]
    function, args, kwargs = program.function, program.args, program.kwargs
    if hasattr(function, "trace"):
        traced = function.trace(*args, **kwargs)
        lowered = traced.lower()
        if lowered.in_tree == jax.tree.structure((args, kwargs)):
            return traced, lowered, args, kwargs
    # The function is not under `jit`, or has static arguments, which a compiled program does not take.
    function, args, kwargs = of_arrays(function, args, kwargs)
    traced = function.trace(*args, **kwargs)
    return traced, traced.lower(), args, kwargs


@contextlib.contextmanager
def _executor(executor: Executor[Any, Any]) -> Iterator[None]:
    before = default_executor()
    set_default_executor(executor)
    try:
        yield
    finally:
        set_default_executor(before)


def say(text: str) -> None:
    """Print progress."""
    click.echo(text, err=True)


class _Lines(io.TextIOBase):
    """Counts the lines written to it and keeps none of them: a step may print an array in each of its runs."""

    def __init__(self) -> None:
        self._ends, self._last = 0, "\n"

    def write(self, text: str) -> int:
        """Count the ends of lines."""
        self._ends, self._last = self._ends + text.count("\n"), text[-1:] or self._last
        return len(text)

    @property
    def count(self) -> int:
        """Number of lines; the last may be unfinished."""
        return self._ends + (self._last != "\n")


@contextlib.contextmanager
def prints_left_out() -> Iterator[None]:
    """Leave out the lines that steps print inside the `with` block, e.g. with `jax.debug.print`, and say how many."""
    lines = _Lines()
    with contextlib.redirect_stdout(lines):
        try:
            yield
        finally:
            jax.effects_barrier()  # a step does not wait for its callbacks
            if lines.count:
                printed = counted(lines.count, "line")
                say(f"left out {printed} that the steps printed; their printing is part of the times")


def of_mapping(builds: Sequence[Build]) -> str:
    """Return how much memory the steps map anew on a CPU, and the remedy; empty if it is little.

    The C library of Linux returns much freed memory to the system, above all arrays of more than 32 MiB, and the system
    clears each page when it is used again. A configuration with little more temporary memory may so slow a step a lot.
    """
    found = {build.name: build.mapped for build in builds}
    if device_kind() != "cpu" or platform.libc_ver()[0] != "glibc" or max(found.values())[0] < _MAPPED:
        return ""
    each = ", ".join(
        f"{name} {size(mapped)} ({durations([seconds])[0]} of system time)" if mapped >= _MAPPED else f"{name} little"
        for name, (mapped, seconds) in found.items()
    )
    return (
        f"Memory that each step maps anew, which no measurement of a single call shows: {each}. The C library returns "
        f"freed memory to the system; it keeps it if the program starts with {_KEEP}"
    )
