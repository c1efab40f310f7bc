# SPDX-License-Identifier: Apache-2.0
"""How a call is split where its arrays are: by their types over explicit axes, by XLA's partitioner over the others.

Explicit axes are in the types of arrays: the call becomes a `shard_map` over these axes, around a call that is marked
as a part. Automatic axes are known to XLA alone, and while it compiles: there the whole call, forward or derived, is
one operation that XLA asks how to split. What it is told is the same call on smaller arrays, whose lowering is that of
any other: it is resolved, recorded and checked as it would be inside `shard_map`, under the same key.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel import compat
from ejkernel.ops.core.sharding.nodes import factors, has_rule, local, primals_of_gradients
from ejkernel.ops.core.sharding.parts import with_own_arguments
from ejkernel.ops.core.sharding.rule import Factors
from ejkernel.ops.core.sharding.split import Shapes, Split, mesh_axes, part_of, split
from ejkernel.ops.core.transformations.autodiff import innermost
from ejkernel.ops.core.transformations.naming import array_names
from ejkernel.ops.core.transformations.nodes import Node
from ejkernel.ops.errors import ArgumentError, KernelError, ShardingWarning
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.meta import SPLIT
from ejkernel.ops.utils.values.signature import HasType


class Part(enum.Enum):
    """What a call's arrays are in a program for several devices."""

    WHOLE = "whole"
    OF_EXPLICIT_AXES = "one device's along all explicit axes"
    LOCAL = "one device's"


class SplitCall(NamedTuple):
    """A call that is to be split.

    Attributes:
        node: What is computed.
        part: What its arrays are.
        bind: Makes the call of another node, on arrays that are such a part.
        digest: Gives what stands for the call, and all that decides how its parts run.
    """

    node: Node
    part: Part
    bind: Callable[[Node, Part, Sequence[Any]], Sequence[Any]]
    digest: Callable[[], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitSplit:
    """How a call is split over explicit axes.

    Attributes:
        mesh: Their mesh.
        split: The split.
        wanted: How each result is sharded for the program.
    """

    mesh: Any
    split: Split
    wanted: Sequence[PartitionSpec]

    def typed(self, avals: Sequence[Any]) -> list[Any]:
        """Return the types of the results with their shardings."""
        return [compat.with_spec(aval, self.mesh, spec) for aval, spec in zip(avals, self.wanted, strict=True)]


def explicit_split(node: Node, avals: Sequence[Any], outs: Sequence[HasType]) -> ExplicitSplit:
    """Return how a call is split by the types of its arguments, which have explicit axes.

    Without a rule every device gets all of every array.

    Raises:
        ArgumentError: an axis is sharded that cannot be split.
    """
    mesh = compat.explicit_mesh(avals)
    specs = [compat.spec_of(aval) for aval in avals]
    found = factors(node, avals)
    if found is None:
        names = [tuple((None,) * len(array.shape) for array in arrays) for arrays in (avals, outs)]
        found = Factors(operands=names[0], results=names[1], splittable=frozenset(), follows=())
        specs = [PartitionSpec() for _ in avals]
    shapes = _shapes(node, found, avals, outs, compat.explicit_sizes(mesh))
    # What explicit axes say is the program's: nothing is moved that it did not ask to be moved.
    chosen = split(found, shapes, specs, move=False)
    _check_nothing_is_left(node, specs, chosen)
    primals = primals_of_gradients(node, avals)  # the type of a gradient is its primal's
    wanted = chosen.result_specs if primals is None else [compat.spec_of(primal) for primal in primals]
    return ExplicitSplit(mesh=mesh, split=chosen, wanted=wanted)


def _check_nothing_is_left(node: Node, specs: Sequence[PartitionSpec], chosen: Split) -> None:
    arrays = zip(specs, chosen.factors.operands, chosen.operand_specs, chosen.shapes.operands, strict=True)
    for index, (given, names, taken, sizes) in enumerate(arrays):
        for axis, (entry, name, own) in enumerate(zip(given, names, taken, strict=False)):
            left = [a for a in mesh_axes(entry) if chosen.shapes.mesh[a] > 1 and a not in mesh_axes(own)]
            if not left:
                continue
            over = ", ".join(map(repr, left))
            alone = ", ".join(mesh_axes(own)) or "nothing"
            why = (
                f"and it can be split over {alone} here: another array asks for something else, or its parts would not "
                "fit those of the axes that go with it"
                if name in chosen.factors.splittable
                else "and every device needs all of it"
            )
            raise ArgumentError(
                f"{node.spec.kernel.op_id}: axis {axis} of {_name(node, index)}, of shape {list(sizes)} as the kernel "
                f"has it, is sharded over {over}, {why}; use jax.sharding.reshard to shard it as {taken} first."
            )


def _name(node: Node, index: int) -> str:
    """Return what the array of that number is called; what comes beside a call's own arrays has no name."""
    names, own = array_names(node.spec), index - innermost(node).lead
    if 0 <= own < len(names):
        return names[own]
    return f"array {index} of its derivative"


def lower_split(ctx: Any, values: Sequence[Any], call: SplitCall, *, gathered: bool) -> Any:
    """Lower a call as one that splits itself; `None` if it is one device's already, or does not split.

    Args:
        ctx: Of the lowering.
        values: The arguments.
        call: The call.
        gathered: Whether a kernel without a rule gets whole arrays over explicit axes.
    """
    may_split = has_rule(call.node.spec.kernel)
    if call.part is Part.LOCAL or not (may_split or gathered):
        return None
    # What is one device's along explicit axes XLA may still divide, along automatic ones.
    if call.part is Part.WHOLE and compat.explicit_mesh(ctx.avals_in) is not None:
        return _lower_explicit(ctx, values, call, explicit_split(call.node, ctx.avals_in, ctx.avals_out))
    return _lower_auto(ctx, values, call) if may_split and compat.is_partitioned() else None


def _lower_explicit(ctx: Any, values: Sequence[Any], call: SplitCall, found: ExplicitSplit) -> Any:
    run = functools.partial(_bound, call, Part.OF_EXPLICIT_AXES, found.split)
    part = part_of(found.split, run, wide_sums=compat.has_auto_axes(found.mesh))
    over_axes = compat.over_explicit_axes(
        part,
        found.mesh,
        given=found.split.operand_specs,
        split=found.split.result_specs,
        sums=compat.missing_sums(ctx),
        wanted=found.wanted,
    )
    return compat.lower_function(ctx, over_axes, *values)


def _bound(call: SplitCall, part: Part, found: Split, *arrays: Any) -> Sequence[Any]:
    node, own = with_own_arguments(local(call.node, arrays), arrays, found)
    return call.bind(node, part, own)


def _lower_auto(ctx: Any, values: Sequence[Any], call: SplitCall) -> Any:
    found = factors(call.node, ctx.avals_in)
    if found is None:
        return None
    meshes = compat.logical_meshes(ctx)
    reason = _standing_back(ctx, meshes)
    if reason:
        _say_once(call.node.spec.kernel.op_id, reason)
        return None
    shapes = _shapes(call.node, found, ctx.avals_in, ctx.avals_out, {})

    # Called while XLA compiles, or by who looks for parts before: only then are the shardings known.
    def asked(mesh: Mapping[str, int], specs: list[PartitionSpec]) -> compat.AskedToSplit:
        chosen = split(found, dataclasses.replace(shapes, mesh=mesh), specs, move=True)
        part = part_of(chosen, functools.partial(_bound, call, Part.LOCAL, chosen))
        return compat.AskedToSplit(chosen.operand_specs, chosen.result_specs, _alone(part))

    out = compat.lower_to_be_split(
        ctx,
        lambda *arrays: call.bind(call.node, Part.LOCAL, arrays),
        *values,
        meshes=meshes,
        asked=asked,
        axes=_numbered(found, ctx.avals_in, ctx.avals_out),
    )
    kernel = call.node.spec.kernel
    # Asked for only where JAX stores such programs, for it takes a trace and all saved entries.
    digest = f":{call.digest()}" if compat.stores_split_programs() else ""
    compat.label_value(out[0], values, SPLIT, f"{kernel.op_id}{call.node.suffix}@v{kernel.version}{digest}")
    return compat.lower_sums_over_manual_axes(ctx, *out)


def _alone(part: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*arrays: Any) -> Any:
        with compat.on_one_device():
            return part(*arrays)

    return computed


def _shapes(
    node: Node, found: Factors, avals: Sequence[HasType], outs: Sequence[HasType], mesh: Mapping[str, int]
) -> Shapes:
    if list(map(len, found.results)) != [len(out.shape) for out in outs]:
        named = ", ".join(" ".join(name or "_" for name in names) for names in found.results)
        raise KernelError(
            f"{node.spec.kernel.op_id}: sharding_rule names the axes of results {named!r}, and their shapes are "
            f"{', '.join(str(list(out.shape)) for out in outs)}."
        )
    for names, out in zip(found.results, outs, strict=True):
        lacking = found.splittable - set(names) - dict(found.follows).keys()
        if out.dtype == np.bool_ and lacking & {name for axes in found.operands for name in axes}:
            raise KernelError(
                f"{node.spec.kernel.op_id}: sharding_rule lets {', '.join(sorted(lacking))} be split, and a result of "
                "booleans that lacks them has no sum; leave them out of split."
            )
    shapes = [tuple(tuple(array.shape) for array in arrays) for arrays in (avals, outs)]
    return Shapes(operands=shapes[0], results=shapes[1], mesh=mesh)


def _standing_back(ctx: Any, meshes: Sequence[compat.LogicalMesh]) -> str:
    """Return why a call of this program cannot be split; `""` if it can."""
    if compat.is_exporting(ctx):
        return "a program that is exported cannot ask how to split it"
    if not compat.uses_shardy():
        return "GSPMD partitions this program, and Shardy alone knows the rule (jax_use_shardy_partitioner=True)"
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in (*ctx.avals_in, *ctx.avals_out)):
        return "XLA's partitioner cannot be told of keys of jax.random (pass jax.random.key_data instead)"
    return "this process has fewer devices than the program's mesh" if not meshes else ""


@functools.cache
def _say_once(op_id: str, reason: str) -> None:
    warn(
        f"{op_id}: the call is not split over the devices of its program, each computes all of it: {reason}; inside "
        "jax.shard_map it is one device's.",
        ShardingWarning,
    )


def _numbered(
    found: Factors, arrays: Sequence[HasType], results: Sequence[HasType]
) -> tuple[list[list[str]], list[list[str]]]:
    """Return names of axes as the partitioner takes them: one for axes that are split alike, others for all others."""
    named = zip((*found.operands, *found.results), (*arrays, *results), strict=True)
    lengths = {name: length for names, array in named for name, length in zip(names, array.shape, strict=True) if name}
    # Axes of two lengths need two names: under one, JAX raises an `IndivisibleError` where the shorter cannot be split.
    same = {one: leader for one, leader in found.follows if lengths.get(one) == lengths.get(leader)}
    numbers = itertools.count()
    known: dict[str, str] = {}

    def numbered(names: Sequence[str | None]) -> list[str]:
        own = [f"axis{next(numbers)}" for _ in names]
        return [
            fresh if name is None else known.setdefault(same.get(name, name), fresh)
            for name, fresh in zip(names, own, strict=True)
        ]

    return list(map(numbered, found.operands)), list(map(numbered, found.results))
