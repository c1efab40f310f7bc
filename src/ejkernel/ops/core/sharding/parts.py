# SPDX-License-Identifier: Apache-2.0
"""The arguments of one device's part of a call, where they are more than its pieces of the whole call's arrays.

Such as which experts a device has: `Kernel.part_arguments` adds them, and the call under its transformations is rebuilt
around the new arguments. Its key is that of the call that a user would write inside `shard_map`, so that both have one
configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from ejkernel import compat
from ejkernel.ops.core.callspec import CallSpec, take_apart
from ejkernel.ops.core.hooks import overrides
from ejkernel.ops.core.sharding.nodes import factors
from ejkernel.ops.core.sharding.rule import Factor, Factors
from ejkernel.ops.core.sharding.split import Shapes, Split
from ejkernel.ops.core.transformations.autodiff import Linear, ThroughResiduals
from ejkernel.ops.core.transformations.batching import LinearVmapped, TransposedVmapped, Vmapped
from ejkernel.ops.core.transformations.nodes import Choice, Forward, MadeOf, Node, is_inexact
from ejkernel.ops.errors import KernelError
from ejkernel.ops.utils.validation import asked, named
from ejkernel.ops.utils.values.signature import HasType

_Axis = int | None
_Any = TypeVar("_Any")


@dataclasses.dataclass(frozen=True, slots=True)
class CallPart:
    """Where one device's part of a call lies in the whole: see `Kernel.part_arguments`.

    Axes have the names that `sharding_rule` gives them; one that is not split is all of it in every part.
    """

    _split: Split

    def is_split(self, axis: str) -> bool:
        """Return whether an axis is divided."""
        return self.length(axis) < self.whole(axis)

    def start(self, axis: str) -> Any:
        """Return the place in the whole at which the part begins: a number that the program computes."""
        return self._split.index(axis) * self.length(axis)

    def length(self, axis: str) -> int:
        """Return how long the part is."""
        return self.whole(axis) // self._split.shapes.size(self._split.axes.get(axis, ()))

    def whole(self, axis: str) -> int:
        """Return how long the axis is in the whole call.

        Raises:
            KernelError: there is none of that name.
        """
        lengths = self._split.shapes.lengths(self._split.factors)
        if axis not in lengths:
            raise KernelError(f"axis must be one that sharding_rule names, {', '.join(lengths)}; got {axis!r}.")
        return lengths[axis]


def with_own_arguments(node: Node, arrays: Sequence[Any], split: Split) -> tuple[Node, Sequence[Any]]:
    """Return a part of a call with the arguments that its kernel has for it; `arrays` are pieces of the whole's."""
    kernel, count = node.spec.kernel, node.spec.num_arrays
    if not overrides(kernel, "part_arguments"):
        return node, arrays
    own = arrays[node.lead : node.lead + count]
    levels = _levels(node, count)
    trace = _Trace(CallPart(split), node.spec)
    jaxpr = compat.traced(trace, _examples(own, levels))
    origins = compat.origins(jaxpr)
    _check_handed_on(kernel.op_id, own, origins)
    replacement = _Replacement(trace.spec, count, origins)
    compute: Callable[..., Any] = lambda *given: tuple(compat.evaluate(jaxpr, given))  # noqa: E731
    # The hook is for one example. A result that no batched argument leads to stays without an axis, so that the part's
    # key is that of the call that a user would write inside `shard_map`.
    for axes in levels:
        if any(axis is not None for axis in axes):
            compute = jax.vmap(compute, in_axes=tuple(axes), out_axes=tuple(replacement.axes(axes)))
    found = replacement.within(arrays, node.lead, compute(*own))
    return replacement.in_node(node), found


def programs_of_parts(node: Node, arrays: Sequence[HasType], choice: Choice) -> Iterator[str]:
    """Yield what the hook computes for a part along each axis that may be split: all that tells it from another hook.

    Nothing for a kernel without one. Arrays are the whole call's.
    """
    kernel, spec = node.spec.kernel, node.spec
    if not overrides(kernel, "part_arguments"):
        return
    types = _examples(arrays[node.lead : node.lead + spec.num_arrays], _levels(node, spec.num_arrays))
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
        # The hook may ask where its part begins: that is an index along an axis of the mesh.
        yield str(jax.make_jaxpr(_Trace(CallPart(split), spec), axis_env=[(name, count)])(*pieces))


def _along(found: Factors, shapes: Shapes, name: str, count: int) -> Split:
    """Return the split of one axis into so many parts, over an axis of a mesh that has its name."""
    return Split(
        factors=found, shapes=dataclasses.replace(shapes, mesh={name: count}), axes={name: (name,)}, whole=frozenset()
    )


def _shapes_of(arrays: Sequence[HasType]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(array.shape) for array in arrays)


def _piece(shape: Sequence[int], names: Sequence[Factor], split: Split) -> tuple[int, ...]:
    parts = [split.shapes.size(split.axes.get(name, ())) if name else 1 for name in names]
    return tuple(length // count for length, count in zip(shape, parts, strict=True))


class _Trace:
    """The hook as a function of flat arrays, which leaves the rest of the part's arguments behind."""

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
    """Another call, and its arrays, in the place of one.

    Attributes:
        spec: The other call.
        count: How many arrays the one has.
        origins: Where each of the other's arrays comes from.
    """

    spec: CallSpec
    count: int
    origins: Sequence[compat.Origin]

    def within(self, items: Sequence[_Any], lead: int, new: Sequence[_Any]) -> tuple[_Any, ...]:
        """Return what belongs to arguments one by one, with `new` in the place of what belongs to the call's own."""
        return (*items[:lead], *new, *items[lead + self.count :])

    def axes(self, axes: Sequence[_Axis]) -> list[_Axis]:
        """Return the batch axes of the arrays in a `vmap` from those of the arrays before."""
        found = []
        for origin in self.origins:
            is_batched = any(axes[index] is not None for index in origin.needs)
            found.append((0 if is_batched else None) if origin.argument is None else axes[origin.argument])
        return found

    def in_node(self, node: Any) -> Any:
        """Return the node, of the same structure, of the other call."""
        if isinstance(node, Forward):
            return dataclasses.replace(node, spec=self.spec)
        of = self.in_node(node.of)
        if isinstance(node, Vmapped):
            return self._in_vmapped(node, of)
        if not isinstance(node, Linear):
            raise TypeError(f"{node} is not split")
        lead = 0 if isinstance(node, ThroughResiduals) else node.of.lead
        # What is new has no tangent: derivatives are by the arrays that were handed on.
        own = [origin.argument is not None and node.wrt[lead + origin.argument] for origin in self.origins]
        wrt = self.within(node.wrt, lead, own)
        return dataclasses.replace(node, of=of, count=node.count + len(self.origins) - self.count, wrt=wrt)

    def _in_vmapped(self, node: Vmapped, of: Node) -> Vmapped:
        if isinstance(node, TransposedVmapped):
            original = self.in_node(node.original)
            return dataclasses.replace(node, of=of, level=original.level, original=original)
        lead, axes = node.of.lead, node.level.axes
        axes = self.within(axes, lead, self.axes(axes[lead : lead + self.count]))
        found = dataclasses.replace(node, of=of, level=dataclasses.replace(node.level, axes=axes))
        if not isinstance(found, LinearVmapped):
            return found
        return dataclasses.replace(found, linear_from=found.linear_from + len(self.origins) - self.count)


def _levels(node: Any, count: int) -> list[tuple[_Axis, ...]]:
    """Return the batch axes of the call's own arrays in each `vmap` around it, the innermost first."""
    if not isinstance(node, MadeOf):
        return []
    inner = _levels(node.of, count)
    return [*inner, node.level.axes[node.lead : node.lead + count]] if isinstance(node, Vmapped) else inner


def _examples(arrays: Sequence[HasType], levels: Sequence[Sequence[_Axis]]) -> list[jax.ShapeDtypeStruct]:
    """Return the types that one example's arrays have."""
    found = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    for axes in reversed(levels):
        shapes = [
            like.shape if axis is None else like.shape[:axis] + like.shape[axis + 1 :]
            for like, axis in zip(found, axes, strict=True)
        ]
        found = [jax.ShapeDtypeStruct(shape, like.dtype) for shape, like in zip(shapes, found, strict=True)]
    return found


def _check_handed_on(op_id: str, arrays: Sequence[HasType], origins: Sequence[compat.Origin]) -> None:
    """Raise unless all that has a gradient is among the new arrays, once, as it was, in its order."""
    inexact = [index for index, array in enumerate(arrays) if is_inexact(array)]
    if [origin.argument for origin in origins if origin.argument in inexact] != inexact:
        raise KernelError(
            f"{op_id}: part_arguments must hand on arrays of floating-point numbers as they are, each in its place; it "
            "may replace others, and add some by keyword."
        )
