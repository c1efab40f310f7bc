# SPDX-License-Identifier: Apache-2.0
"""Estimates of a program's time on a TPU by Google's compiler for TPUs, which needs no TPU.

The compiler simulates the schedule of each kernel that it compiles. The simulator knows no value that a kernel reads
from scalar memory, and it ends the process for some programs. So a program is simulated in a process of its own, and
programs for which the simulator is known to be wrong are refused.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax

from ejkernel import compat, settings
from ejkernel.ops.autotuner.compile.schedules import cycles_of
from ejkernel.ops.autotuner.compile.targets import Target, target_names
from ejkernel.ops.autotuner.trials.candidates import Program, program_digest
from ejkernel.ops.core.context import numerics
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.nodes import factors, local
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CandidateError, ConfigError, EjkernelError

_LEAST: Final = 16  # examples of a call; a shorter one is simulated as a whole
_PERIODIC: Final = 0.02  # largest difference between the times of the second and the third example
METHOD: Final = (
    "simulated by libtpu: static schedule of each kernel, copies at the chip's bandwidth; some from a part of the call"
)
# Cycles by which a grid step that waits for a copy is estimated too long: on v5e, steps of 128-cubed products take 524
# by published times, and are estimated at 747.
_STEP_EXCESS: Final = 223
_FIELD: Final = r'{}: "?(.*?)"?\n'
_NARROW: Final = ("int8", "uint8", "int4", "uint4")


def check_simulated(target: Target) -> None:
    """Check that programs for a target can be simulated.

    Raises:
        ConfigError: It is no TPU, or the simulator fails for this chip.
    """
    names = [name for name in target_names() if _why_not(Target.named(name)) == ""]
    why = _why_not(target)
    if why:
        raise ConfigError(f"estimates need one of the targets {', '.join(names)}; got {target.name!r}: {why}.")


def _why_not(target: Target) -> str:
    if target.platform != "tpu" or not target.description:
        return "only Google's compiler for TPUs has a simulator"
    if target.property_named("not_simulated") == "programs":
        return "its simulator ends the process for programs of this chip"
    return ""


def seconds_of(cycles: float, target: Target) -> float:
    """Return the seconds that so many cycles take on a target; NaN if its clock rate is unknown."""
    return cycles / ((target.number_named("clock_rate_ghz") or math.nan) * 1e9)


def simulate_for(inv: Invocation[Cfg, Out], choice: Choice, target: Target, *, folder: str) -> Program:
    """Return a program with its estimated cycles, without its code; call it in a process for this purpose only.

    Args:
        inv: The call, for the target.
        choice: The implementation and configuration.
        target: A TPU.
        folder: A folder for the simulator's files.

    Raises:
        CandidateError: The simulator cannot estimate this program.
    """
    own, types = _prepared(folder), inv.argument_types
    with target.entered(), numerics(inv.numerics):
        traced = _traced(inv.node, types, choice, target)
        facts = compat.tracing.kernel_facts(traced.jaxpr)
        reason = _why_refused(facts, target)
        if reason:
            raise CandidateError(f"not estimated: {reason}")
        lowered = traced.lower()

        def simulate(part: Sequence[jax.ShapeDtypeStruct]) -> float:
            return _cycles(_traced(local(inv.node, part), part, choice, target).lower(), target, own)

        # XLA's own kernels change with the sizes, because it keeps short arrays in vector memory.
        parts = parts_of(inv, types) if facts.grid_steps else None
        found = None if parts is None else extrapolated(parts, simulate)
        cycles, simulated = found or (_cycles(lowered, target, own), "")
    least = max(0.0, cycles - _STEP_EXCESS * facts.grid_steps)
    digest = program_digest(lowered.as_text()) or ""
    return Program(digest=digest, cycles=cycles, least_cycles=least, simulated=simulated)


def _traced(node: Any, types: Sequence[jax.ShapeDtypeStruct], choice: Choice, target: Target) -> Any:
    return jax.jit(node.flat(choice)).trace(*map(target.placed, types))


def _cycles(lowered: Any, target: Target, own: Path) -> float:
    """Compile a program, and return its estimated cycles.

    Raises:
        CandidateError: The simulator cannot estimate it.
    """
    compiled = compiled_and_simulated(lowered, own)
    rate = (target.number_named("memory_bandwidth") or 0.0) / (target.number_named("clock_rate_ghz") or 1.0) / 1e9
    try:
        cycles = cycles_of(compiled.as_text(), profiles(own), rate)
    except CandidateError as error:
        raise CandidateError(f"not estimated: {error}") from error
    if cycles <= 0:
        raise CandidateError("not estimated: the program has no kernel")
    return cycles


def compiled_and_simulated(lowered: Any, own: Path, **options: str) -> Any:
    """Empty a folder, and compile a program so that the compiler writes its estimates there."""
    try:
        return _compiled_into(own, lowered, options)
    except jax.errors.JaxRuntimeError as error:
        # While it simulates, the v5p compiler puts arrays of XLA behind the limit of a kernel that uses less: they then
        # exceed the vector memory. Without this option only kernels use it.
        if "HLO temp" not in str(error) or "space vmem" not in str(error):
            raise
        return _compiled_into(own, lowered, options | {"xla_vf_vmem_memory_space_assignment": "false"})


def _compiled_into(own: Path, lowered: Any, options: dict[str, str]) -> Any:
    for file in own.iterdir():
        file.unlink()
    return lowered.compile(compiler_options=options)


@functools.cache
def _prepared(folder: str) -> Path:
    """Have the compiler, which is loaded later, write its estimates to a folder of this process."""
    own = Path(folder) / str(os.getpid())
    own.mkdir(parents=True, exist_ok=True)
    settings.simulate_tpu(own)
    return own


def profiles(folder: Path) -> dict[str, int]:
    """Return the estimated cycles in the simulator's files, by instruction."""
    found = {}
    for file in folder.glob("*.textproto"):
        text = file.read_text(encoding="utf-8")
        name, cycles = (re.search(_FIELD.format(key), text) for key in ("hlo_op_name", "estimated_cycles"))
        if name is not None:
            found[name[1].lstrip("%")] = int(cycles[1]) if cycles is not None else 0
    return found


def _why_refused(facts: compat.tracing.KernelFacts, target: Target) -> str:
    if facts.scalar_prefetch:
        return "a kernel's blocks depend on scalars in memory (scalar prefetch), which the simulator does not know"
    if facts.dynamic_grid:
        return "a kernel's grid depends on scalars in memory, which the simulator does not know"
    narrow = sorted(facts.dtypes.intersection(_NARROW))
    if narrow and target.property_named("not_simulated") == "int8":
        return f"the simulator is wrong for {narrow[0]} on {target.name}"
    return ""


class Parts(NamedTuple):
    """The examples of a call: the first axis of its first array, along which it may be split over devices.

    Attributes:
        number: Number of examples.
        name: Name of the axis.
        types: The types of the arguments for 1, 2 and 3 examples.
    """

    number: int
    name: str
    types: tuple[list[jax.ShapeDtypeStruct], ...]


def parts_of(inv: Invocation[Any, Any], types: Sequence[jax.ShapeDtypeStruct]) -> Parts | None:
    """Return the examples of a call; `None` if it has few, or its kernel has no rule that splits them."""
    found = factors(inv.node, types)
    # the axes of a matrix are cut into blocks
    if found is None or not types or len(types[0].shape) < 3 or types[0].shape[0] < _LEAST:
        return None
    count, name = types[0].shape[0], found.operands[0][0]
    named = list(zip(types, found.operands, strict=True))
    sizes = {size for like, names in named for size, axis in zip(like.shape, names, strict=True) if axis == name}
    if name is None or name not in found.splittable or sizes != {count}:
        return None

    def first(few: int) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                [few if axis == name else size for size, axis in zip(like.shape, names, strict=True)], like.dtype
            )
            for like, names in named
        ]

    return Parts(count, name, (first(1), first(2), first(3)))


def extrapolated(parts: Parts, simulate: Callable[[Sequence[jax.ShapeDtypeStruct]], float]) -> tuple[float, str] | None:
    """Return the cycles of all examples and what was simulated; `None` if examples do not take equal times."""
    try:
        one, two, three = map(simulate, parts.types)
    except (CandidateError, EjkernelError):  # e.g. a block is longer than a part
        return None
    each = three - two
    if each <= 0 or abs(two - one - each) > _PERIODIC * each:
        return None
    return three + (parts.number - 3) * each, f"1, 2 and 3 of {parts.number} along {parts.name!r}"
