# SPDX-License-Identifier: Apache-2.0
"""Extra arguments of a shard, beyond its pieces of the call's arrays.

An example is the index of a device's first expert. `Kernel.part_arguments` adds such arguments, and the transformed
call is rebuilt around them. Its key equals the key of the call that a user would write inside `shard_map`, so both
share one configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from ejkernel import compat
from ejkernel.ops.core.callspec import CallSpec, take_apart
from ejkernel.ops.core.hooks import asked, overrides
from ejkernel.ops.core.sharding.nodes import factors
from ejkernel.ops.core.sharding.rule import Factor, Factors
from ejkernel.ops.core.sharding.split import CallPart, Shapes, Split
from ejkernel.ops.core.transformations.autodiff import Linear
from ejkernel.ops.core.transformations.batching import LinearVmapped, Vmapped
from ejkernel.ops.core.transformations.nodes import Choice, Forward, Node
from ejkernel.ops.errors import KernelError
from ejkernel.ops.utils.messages.names import named
from ejkernel.ops.utils.values.signature import HasType, is_inexact

_Axis = int | None
_Any = TypeVar("_Any")


def with_own_arguments(node: Node, arrays: Sequence[Any], split: Split) -> tuple[Node, Sequence[Any]]:
    """Return the node and arrays of a shard with its extra arguments; `arrays` are its pieces of the call's arrays.

    A call without names for its axes, e.g. with residuals that its rule does not describe, is whole on every device.
    """
    kernel, count = node.spec.kernel, node.spec.num_arrays
    if not overrides(kernel, "part_arguments") or not split.shapes.lengths(split.factors):
        return node, arrays
    own = arrays[node.lead : node.lead + count]
    levels = [axes for _, axes in reversed(node.levels)]
    trace = _Trace(CallPart(split), node.spec)
    jaxpr = compat.tracing.traced(trace, node.example_types(arrays))
    origins = compat.tracing.origins(jaxpr)
    _check_handed_on(kernel.op_id, own, origins)
    replacement = _Replacement(trace.spec, count, origins)
    compute: Callable[..., Any] = lambda *given: tuple(compat.tracing.evaluate(jaxpr, given))  # noqa: E731
    # The hook sees one example. A result that depends on no batched argument stays unbatched, so that the shard's key
    # equals that of the call inside `shard_map`.
    for axes in levels:
        if any(axis is not None for axis in axes):
            compute = jax.vmap(compute, in_axes=tuple(axes), out_axes=tuple(replacement.axes(axes)))
    found = replacement.within(arrays, node.lead, compute(*own))
    return replacement.in_node(node), found


def programs_of_parts(node: Node, arrays: Sequence[HasType], choice: Choice) -> Iterator[str]:
    """Yield the programs of the hook for a shard along each splittable axis, which identify the hook.

    Yields nothing for a kernel without the hook. `arrays` belong to the whole call.
    """
    kernel, spec = node.spec.kernel, node.spec
    if not overrides(kernel, "part_arguments"):
        return
    types = node.example_types(arrays)
    found = factors(Forward(spec), types)
    if found is None:
        return
    results = jax.eval_shape(Forward(spec).flat(choice), *types)
    shapes = Shapes(operands=_shapes_of(types), results=_shapes_of(results), mesh={})
    for name in sorted(found.splittable):
        length = shapes.lengths(found)[name]
        count = next((divisor for divisor in range(2, length + 1) if length % divisor == 0), 1)
        split = _along(found, shapes, name, count)
        pieces = [
            jax.ShapeDtypeStruct(_piece(like.shape, names, split), like.dtype)
            for like, names in zip(types, found.operands, strict=True)
        ]
        # the hook may ask for the start of its shard, an index along a mesh axis
        yield str(jax.make_jaxpr(_Trace(CallPart(split), spec), axis_env=[(name, count)])(*pieces))


def _along(found: Factors, shapes: Shapes, name: str, count: int) -> Split:
    """Return the split of one axis into `count` shards, over a mesh axis of the same name."""
    return Split(
        factors=found, shapes=dataclasses.replace(shapes, mesh={name: count}), axes={name: (name,)}, whole=frozenset()
    )


def _shapes_of(arrays: Sequence[HasType]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(array.shape) for array in arrays)


def _piece(shape: Sequence[int], names: Sequence[Factor], split: Split) -> tuple[int, ...]:
    parts = [split.shapes.size(split.axes.get(name, ())) if name else 1 for name in names]
    return tuple(length // count for length, count in zip(shape, parts, strict=True))


class _Trace:
    """The hook as a function of flat arrays; it stores the static arguments of the shard."""

    def __init__(self, part: CallPart, spec: CallSpec) -> None:
        self.part, self.spec = part, spec

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        kernel, whole = self.spec.kernel, self.spec
        args, kwargs = whole.join(arrays)
        with named(kernel.op_id):
            found: Any = asked("part_arguments", kernel.part_arguments, self.part, *args, **kwargs)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            raise KernelError(f"{kernel.op_id}: part_arguments must return (args, kwargs), got {found!r}.")
        own, leaves = take_apart(kernel, *found, whole.method)
        self.spec = dataclasses.replace(own, held=(whole.held[0], *own.held[1:]))  # held as strongly as before
        return tuple(leaves)


@dataclasses.dataclass(frozen=True)
class _Replacement:
    """The replacement of a call by another call on other arrays.

    Attributes:
        spec: The new call.
        count: The number of arrays of the old call.
        origins: The origin of each array of the new call.
    """

    spec: CallSpec
    count: int
    origins: Sequence[compat.tracing.Origin]

    def within(self, items: Sequence[_Any], lead: int, new: Sequence[_Any]) -> tuple[_Any, ...]:
        """Return per-argument items with `new` in place of those of the call's own arrays."""
        return (*items[:lead], *new, *items[lead + self.count :])

    def axes(self, axes: Sequence[_Axis]) -> list[_Axis]:
        """Return the batch axes of the new arrays in a `vmap`, given those of the old arrays."""
        found = []
        for origin in self.origins:
            is_batched = any(axes[index] is not None for index in origin.needs)
            found.append((0 if is_batched else None) if origin.argument is None else axes[origin.argument])
        return found

    def in_node(self, node: Any) -> Any:
        """Return the same node for the new call."""
        if isinstance(node, Forward):
            return dataclasses.replace(node, spec=self.spec)
        of = self.in_node(node.of)
        if isinstance(node, Vmapped):
            return self._in_vmapped(node, of)
        if not isinstance(node, Linear):
            raise TypeError(f"{node} is not split")
        lead = node.of.lead
        # new arrays have no tangents: derivatives are with respect to the arrays that were passed through
        own = [origin.argument is not None and node.wrt[lead + origin.argument] for origin in self.origins]
        wrt = self.within(node.wrt, lead, own)
        return dataclasses.replace(node, of=of, count=node.count + len(self.origins) - self.count, wrt=wrt)

    def _in_vmapped(self, node: Vmapped, of: Node) -> Vmapped:
        lead, axes = node.of.lead, node.level.axes
        axes = self.within(axes, lead, self.axes(axes[lead : lead + self.count]))
        found = dataclasses.replace(node, of=of, level=dataclasses.replace(node.level, axes=axes))
        if not isinstance(found, LinearVmapped):
            return found
        return dataclasses.replace(found, linear_from=found.linear_from + len(self.origins) - self.count)


def _check_handed_on(op_id: str, arrays: Sequence[HasType], origins: Sequence[compat.tracing.Origin]) -> None:
    """Raise a `KernelError` unless every differentiable array is passed through once, unchanged and in order."""
    inexact = [index for index, array in enumerate(arrays) if is_inexact(array)]
    if [origin.argument for origin in origins if origin.argument in inexact] != inexact:
        raise KernelError(
            f"{op_id}: part_arguments must pass floating-point arrays through unchanged and in place; it may replace "
            "other arrays and add keyword arguments."
        )
