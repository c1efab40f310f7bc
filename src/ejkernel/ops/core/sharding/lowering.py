# SPDX-License-Identifier: Apache-2.0
"""Lowers a call on sharded arrays: `shard_map` over explicit axes, XLA's partitioner over automatic axes.

Shardings over explicit axes are part of the array types: the call becomes a `shard_map` around a call on shards.
Shardings over automatic axes are known only to XLA, during compilation: the call, forward or derivative, becomes one
custom operation, and XLA asks a callback how to split it. The callback returns the same call on smaller arrays. That
call is lowered like any other: resolved, recorded and checked under the same key as inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from ejkernel import compat
from ejkernel.ops.core.callspec import array_names
from ejkernel.ops.core.hooks import overrides
from ejkernel.ops.core.sharding.nodes import factors, local, specs_of_gradients
from ejkernel.ops.core.sharding.parts import with_own_arguments
from ejkernel.ops.core.sharding.rule import WHOLE_BLOCKS, Factors
from ejkernel.ops.core.sharding.split import Shapes, Split, mesh_axes, shard_function, split
from ejkernel.ops.core.transformations.autodiff import innermost
from ejkernel.ops.core.transformations.nodes import Node
from ejkernel.ops.errors import ArgumentError, KernelError, ShardingWarning
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.meta import SPLIT
from ejkernel.ops.utils.values.signature import HasType


class Extent(enum.Enum):
    """Whether a call's arrays are whole arrays or shards, in a program for several devices."""

    WHOLE = "whole arrays"
    EXPLICIT_SHARD = "one device's shard along all explicit axes"
    LOCAL = "one device's shard along all axes"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitSplit:
    """The split of a call over explicit axes.

    Attributes:
        mesh: The mesh of the axes.
        split: The split.
        wanted: The sharding of each result in the program.
    """

    mesh: Any
    split: Split
    wanted: Sequence[PartitionSpec]

    def typed(self, avals: Sequence[Any]) -> list[Any]:
        """Return the result types with their shardings."""
        return [
            compat.partitioning.with_spec(aval, self.mesh, spec) for aval, spec in zip(avals, self.wanted, strict=True)
        ]


def explicit_split(node: Node, avals: Sequence[Any], outs: Sequence[HasType]) -> ExplicitSplit:
    """Return the split of a call that follows from the shardings in its argument types.

    Without a rule every device gets every array whole.

    Raises:
        ArgumentError: A sharded axis cannot be split.
    """
    mesh = compat.tracing.explicit_mesh(avals)
    specs = [aval.sharding.spec for aval in avals]
    found = factors(node, avals)
    if found is None:
        names = [tuple((None,) * len(array.shape) for array in arrays) for arrays in (avals, outs)]
        found = Factors(operands=names[0], results=names[1], splittable=frozenset(), follows=())
        specs = [PartitionSpec() for _ in avals]
    shapes = _shapes(node, found, avals, outs, compat.partitioning.explicit_sizes(mesh))
    # With explicit axes the program controls data movement: never reshard implicitly.
    chosen = split(found, shapes, specs, move=False)
    _check_all_axes_are_split(node, specs, chosen)
    own = [_whole_spec(aval.sharding.spec, aval) for aval in avals]
    gradients = specs_of_gradients(node, own, list(map(_whole_spec, chosen.result_specs, outs)))
    wanted = chosen.result_specs if gradients is None else [PartitionSpec(*spec) for spec in gradients]
    return ExplicitSplit(mesh=mesh, split=chosen, wanted=wanted)


def _whole_spec(spec: PartitionSpec, array: HasType) -> tuple[Any, ...]:
    """Return a sharding with an entry for each axis."""
    return (*spec, *[None] * (len(array.shape) - len(spec)))


def _check_all_axes_are_split(node: Node, specs: Sequence[PartitionSpec], chosen: Split) -> None:
    arrays = zip(specs, chosen.factors.operands, chosen.operand_specs, chosen.shapes.operands, strict=True)
    for index, (given, names, taken, sizes) in enumerate(arrays):
        for axis, (entry, name, own) in enumerate(zip(given, names, taken, strict=False)):
            left = [a for a in mesh_axes(entry) if chosen.shapes.mesh[a] > 1 and a not in mesh_axes(own)]
            if not left:
                continue
            over = ", ".join(map(repr, left))
            most = f"can be split only over {', '.join(mesh_axes(own))}" if mesh_axes(own) else "cannot be split"
            why = (
                f"but here it {most}: another array is sharded differently, {WHOLE_BLOCKS}, or "
                "its shards would not match those of a dependent axis"
                if name in chosen.factors.splittable
                else "but every device needs all of it"
            )
            raise ArgumentError(
                f"{node.spec.kernel.op_id}: axis {axis} of {_name(node, index)}, of shape {list(sizes)} in the kernel, "
                f"is sharded over {over}, {why}; use jax.sharding.reshard to shard it as {taken} first."
            )


def _name(node: Node, index: int) -> str:
    """Return the name of an array of the call; residuals, tangents and cotangents have only a number."""
    names, own = array_names(node.spec), index - innermost(node).lead
    if 0 <= own < len(names):
        return names[own]
    return f"array {index} of its derivative"


def lower_split(ctx: Any, values: Sequence[Any], call: Any, *, gathered: bool) -> Any:
    """Lower a call of a program for several devices that splits itself; return `None` if it cannot be split.

    Args:
        ctx: The lowering context.
        values: The arguments.
        call: The parameter of the primitive, a `Call`.
        gathered: Whether a kernel without a rule gets whole arrays over explicit axes.
    """
    may_split = overrides(call.node.spec.kernel, "sharding_rule")
    if not (may_split or gathered):
        return None
    # XLA may split a shard along explicit axes further, along automatic axes.
    if call.extent is Extent.WHOLE and compat.tracing.explicit_mesh(ctx.avals_in) is not None:
        return _lower_explicit(ctx, values, call, explicit_split(call.node, ctx.avals_in, ctx.avals_out))
    return _lower_auto(ctx, values, call) if may_split and compat.programs.is_partitioned() else None


def _lower_explicit(ctx: Any, values: Sequence[Any], call: Any, found: ExplicitSplit) -> Any:
    run = functools.partial(_bound, call, Extent.EXPLICIT_SHARD, found.split)
    shard = shard_function(found.split, run, wide_sums=AxisType.Auto in found.mesh.axis_types)
    over_axes = compat.partitioning.over_explicit_axes(
        shard,
        found.mesh,
        given=found.split.operand_specs,
        split=found.split.result_specs,
        sums=compat.partitioning.missing_sums(ctx),
        wanted=found.wanted,
    )
    return compat.programs.lower_function(ctx, over_axes, *values)


def _bound(call: Any, extent: Extent, found: Split, *arrays: Any) -> Any:
    node, own = with_own_arguments(local(call.node, arrays), arrays, found)
    return call.bind_part(node, extent, own)


def _lower_auto(ctx: Any, values: Sequence[Any], call: Any) -> Any:
    found = factors(call.node, ctx.avals_in)
    if found is None:
        return None
    meshes = compat.partitioning.logical_meshes(ctx)
    reason = _why_not_split(ctx, meshes)
    if reason:
        _warn_once(call.node.spec.kernel.op_id, reason)
        return None
    if meshes[0].everything is not None and all(0 in aval.shape for aval in ctx.avals_in):
        return None  # see `compat.partitioning.lower_to_be_split`; there is nothing to split
    shapes = _shapes(call.node, found, ctx.avals_in, ctx.avals_out, {})

    # XLA calls this during compilation, when the shardings are known; `compat` may call it earlier, to find the shards.
    def asked(mesh: Mapping[str, int], specs: list[PartitionSpec]) -> compat.partitioning.AskedToSplit:
        chosen = split(found, dataclasses.replace(shapes, mesh=mesh), specs, move=True)
        shard = shard_function(chosen, functools.partial(_bound, call, Extent.LOCAL, chosen))
        shard = compat.partitioning.on_one_device()(shard)
        return compat.partitioning.AskedToSplit(chosen.operand_specs, chosen.result_specs, shard)

    out = compat.partitioning.lower_to_be_split(
        ctx,
        lambda *arrays: call.bind_part(call.node, Extent.LOCAL, arrays),
        *values,
        meshes=meshes,
        asked=asked,
        axes=_numbered(found, ctx.avals_in, ctx.avals_out),
    )
    kernel = call.node.spec.kernel
    # Computed only if JAX stores such programs, because it needs a trace and all saved entries.
    digest = ""
    if compat.partitioning.stores_split_programs():
        digest = f":{call.host().digest_of(call, ctx.module_context.platforms[0], ctx.avals_in)}"
    compat.programs.label_value(out[0], values, SPLIT, f"{kernel.op_id}{call.node.suffix}@v{kernel.version}{digest}")
    return compat.partitioning.lower_sums_over_manual_axes(ctx, *out)


def _shapes(
    node: Node, found: Factors, avals: Sequence[HasType], outs: Sequence[HasType], mesh: Mapping[str, int]
) -> Shapes:
    if list(map(len, found.results)) != [len(out.shape) for out in outs]:
        named = ", ".join(" ".join(name or "_" for name in names) for names in found.results)
        raise KernelError(
            f"{node.spec.kernel.op_id}: sharding_rule names the axes of results {named!r}, but their shapes are "
            f"{', '.join(str(list(out.shape)) for out in outs)}."
        )
    for names, out in zip(found.results, outs, strict=True):
        lacking = found.splittable - set(names) - dict(found.follows).keys()
        if out.dtype == np.bool_ and lacking & {name for axes in found.operands for name in axes}:
            raise KernelError(
                f"{node.spec.kernel.op_id}: sharding_rule allows splitting {', '.join(sorted(lacking))}, but a boolean "
                "result lacks these axes and cannot be summed over shards; leave them out of split."
            )
    shapes = [tuple(tuple(array.shape) for array in arrays) for arrays in (avals, outs)]
    return Shapes(operands=shapes[0], results=shapes[1], mesh=mesh)


def _why_not_split(ctx: Any, meshes: Sequence[compat.partitioning.LogicalMesh]) -> str:
    """Return why a call of this program cannot be split; `""` if it can."""
    if compat.partitioning.is_exporting(ctx):
        return "an exported program cannot call Python to split it"
    if not compat.partitioning.uses_shardy():
        return "GSPMD partitions this program, but only Shardy supports the rule (jax_use_shardy_partitioner=True)"
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in (*ctx.avals_in, *ctx.avals_out)):
        return "XLA's partitioner does not support jax.random keys here (pass jax.random.key_data instead)"
    return "this process has fewer devices than the program's mesh" if not meshes else ""


@functools.cache
def _warn_once(op_id: str, reason: str) -> None:
    warn(
        f"{op_id}: the call is not split over the devices of its program, so each device computes all of it: {reason}; "
        "use jax.shard_map to split it by hand.",
        ShardingWarning,
    )


def _numbered(
    found: Factors, arrays: Sequence[HasType], results: Sequence[HasType]
) -> tuple[list[list[str]], list[list[str]]]:
    """Return axis names for the partitioner: axes that are split together share a name, all others are unique."""
    named = zip((*found.operands, *found.results), (*arrays, *results), strict=True)
    lengths = {name: length for names, array in named for name, length in zip(names, array.shape, strict=True) if name}
    # Axes of different lengths need different names, or JAX raises `IndivisibleError` for the shorter.
    same = {name: leader for name, leader in found.follows if lengths.get(name) == lengths.get(leader)}
    numbers = itertools.count()
    known: dict[object, str] = {}

    def numbered(names: Sequence[str | None]) -> list[str]:
        keys = [object() if name is None else same.get(name, name) for name in names]
        return [known.setdefault(key, f"axis{next(numbers)}") for key in keys]

    return list(map(numbered, found.operands)), list(map(numbered, found.results))
