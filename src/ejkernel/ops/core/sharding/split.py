# SPDX-License-Identifier: Apache-2.0
"""From the shardings in which arrays arrive to those of the parts, and the computation of one part.

The first array that asks for an axis decides; or, where the rule says so, what moves the fewest numbers, of the splits
in which each axis that is asked for over the same devices goes first. Key heads that are fewer than devices go whole to
each, which cuts out its own, so that the query heads can be split further.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel import compat
from ejkernel.ops.core.sharding.rule import Factor, Factors

Shape = tuple[int, ...]
Axes = tuple[str, ...]  # of a mesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes of a call's arrays, and the sizes of the mesh's axes that it may be split over."""

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    mesh: Mapping[str, int]

    def size(self, axes: Sequence[str]) -> int:
        """Return how many parts these axes make."""
        return math.prod(self.mesh[axis] for axis in axes)

    def lengths(self, factors: Factors) -> dict[str, int]:
        """Return the length of each axis that has a name."""
        named = [*zip(factors.operands, self.operands, strict=True), *zip(factors.results, self.results, strict=True)]
        return {
            name: length
            for names, shape in named
            for name, length in zip(names, shape, strict=True)
            if name is not None
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which axes are split over which of the mesh's.

    Attributes:
        factors: The call's axes.
        shapes: Their lengths.
        axes: The mesh's axes that each name is split over.
        whole: Axes that are too short to be split as the one that they follow is: they go whole to every device, which
            uses its part of them.
    """

    factors: Factors
    shapes: Shapes
    axes: Mapping[str, Axes]
    whole: frozenset[str]

    @property
    def operand_specs(self) -> tuple[PartitionSpec, ...]:
        """How the arguments are to be sharded."""
        return tuple(map(self._spec, self.factors.operands))

    @property
    def result_specs(self) -> tuple[PartitionSpec, ...]:
        """How the results are."""
        return tuple(map(self._spec, self.factors.results))

    def _spec(self, names: Sequence[Factor]) -> PartitionSpec:
        found = [self.axes.get(name, ()) if name else () for name in names]
        return PartitionSpec(*[None if not axes else axes[0] if len(axes) == 1 else axes for axes in found])

    def sums(self, names: Sequence[Factor]) -> Axes:
        """Return the mesh's axes over which the devices' results, with axes of these names, are added up."""
        return tuple(self._sums(names))

    def _sums(self, names: Sequence[Factor]) -> Iterator[str]:
        leaders = dict(self.factors.follows)
        for name, axes in self.axes.items():
            # What follows another axis is split over the same devices, which are added up once, for their leader.
            if name in names or name in leaders:
                continue
            # A result may have the follower instead, as a key's gradient has key heads: those that share one add up.
            follower = next((one for one, leader in leaders.items() if leader == name and one in names), None)
            split_too = () if follower is None else self.axes.get(follower, ())
            yield from (axis for axis in axes if axis not in split_too)

    def index(self, name: str) -> Any:
        """Return which of the parts of an axis is this device's."""
        index: Any = 0
        for axis in self.axes.get(name, ()):
            index = index * self.shapes.mesh[axis] + jax.lax.axis_index(axis)
        return index

    def start(self, name: str) -> Any:
        """Return which entry of an axis that went whole to every device this one uses."""
        leader = dict(self.factors.follows)[name]
        lengths, parts = self.shapes.lengths(self.factors), self.shapes.size(self.axes[leader])
        return self.index(leader) * (lengths[leader] // parts) // (lengths[leader] // lengths[name])

    def moved(self, specs: Sequence[PartitionSpec]) -> int:
        """Return how many numbers each device gets from others, for arrays that are sharded so; see `split`."""
        numbers, given, of_results = 0, specs[: len(self.operand_specs)], specs[len(self.operand_specs) :]
        for shape, spec, own in zip(self.shapes.operands, given, self.operand_specs, strict=True):
            numbers += 0 if _is_within(spec, own) else self._local_size(shape, own)
        for names, shape, own in zip(self.factors.results, self.shapes.results, self.result_specs, strict=True):
            numbers += self._local_size(shape, own) if self.sums(names) else 0
        for shape, spec, own in zip(self.shapes.results, of_results, self.result_specs, strict=False):
            numbers += 0 if _is_within(own, spec) else self._local_size(shape, spec)
        return numbers

    def _local_size(self, shape: Shape, spec: PartitionSpec) -> int:
        return math.prod(shape) // self.shapes.size([axis for entry in spec for axis in mesh_axes(entry)])


def split(factors: Factors, shapes: Shapes, specs: Sequence[PartitionSpec], *, move: bool) -> Split:
    """Decide along which axes a call is split.

    The first array that asks for an axis decides, or else what is cheapest; an axis that does not divide stays whole.

    Args:
        factors: The call's axes.
        shapes: Their lengths.
        specs: How the arguments, and then as many results as are known, are sharded.
        move: Whether devices that share what cannot be split, such as a sequence, divide something else among them
            instead of all computing the same.
    """
    decided = functools.partial(_decided, factors, shapes, specs, move=move)
    if not factors.cheapest:
        return decided()
    others = [decided(first=name) for name in _contending(factors, specs)]
    return min(decided(), *others, key=lambda one: one.moved(specs)) if others else decided()


def _contending(factors: Factors, specs: Sequence[PartitionSpec]) -> list[str]:
    """Return the axes that arrays ask to split over the same devices as others."""
    asking: dict[str, list[str]] = {}
    for names, spec in zip((*factors.operands, *factors.results), specs, strict=False):
        for name, entry in zip(names, spec, strict=False):
            for axis in mesh_axes(entry) if name in factors.splittable else ():
                asking.setdefault(axis, []).append(cast(str, name))
    return list(dict.fromkeys(name for names in asking.values() if len(set(names)) > 1 for name in names))


def _decided(
    factors: Factors, shapes: Shapes, specs: Sequence[PartitionSpec], *, move: bool, first: str | None = None
) -> Split:
    """Return the split in which the axis `first` has what it asks for, and the others what is left."""
    most: dict[str, int] = {}  # parts that an axis which others follow may have: fewer, until all can follow
    while True:
        deciding = _Deciding(factors, shapes, most)
        for names in ([first], factors.splittable):
            deciding.take(specs, names)
        if move:
            deciding.move(specs)
        ahead = deciding.follow()
        if ahead is None:
            return Split(factors=factors, shapes=shapes, axes=deciding.axes, whole=frozenset(deciding.whole))
        # Decided anew from the start: with fewer parts there, axes of the mesh are left for others.
        most[ahead] = shapes.size(deciding.axes[ahead]) - 1


class _Deciding:
    def __init__(self, factors: Factors, shapes: Shapes, most: Mapping[str, int]) -> None:
        self.factors = factors
        self.shapes = shapes
        self.most = most
        self.lengths = shapes.lengths(factors)
        self.axes: dict[str, Axes] = {}
        self.used: set[str] = set()
        self.whole: set[str] = set()

    def take(self, specs: Sequence[PartitionSpec], wanted: Collection[str | None]) -> None:
        """Split what the arrays ask for, of the axes that are wanted."""
        for names, spec in zip((*self.factors.operands, *self.factors.results), specs, strict=False):
            for name, entry in zip(names, spec, strict=False):
                if name in wanted and name in self.factors.splittable and name not in self.axes:
                    axes = self._dividing(name, [axis for axis in mesh_axes(entry) if self._is_free(axis)])
                    self.axes |= {name: axes} if axes else {}
                    self.used.update(axes)

    def move(self, specs: Sequence[PartitionSpec]) -> None:
        """Split something else over what is left of the mesh's axes that the arguments ask for."""
        operands = specs[: len(self.factors.operands)]
        idle = [axis for spec in operands for entry in spec for axis in mesh_axes(entry) if self._is_free(axis)]
        for axis in dict.fromkeys(idle):
            # Sorted, since the order of a set differs between processes, and what they compile must not.
            for name in sorted(self.factors.splittable & self.lengths.keys()):
                more = (*self.axes.get(name, ()), axis)
                # With all that follow it, or not at all: a part of the one needs the same part of the others.
                followers = [one for one, leader in self.factors.follows if leader == name]
                fits = all(self.lengths[one] % self.shapes.size(more) == 0 for one in (name, *followers))
                if fits and self.shapes.size(more) <= self.most.get(name, self.shapes.size(more)):
                    self.axes[name] = more
                    self.used.add(axis)
                    break

    def follow(self) -> str | None:
        """Split each axis as the one that it follows, or note that it goes whole; return one that is too far ahead."""
        for name, leader in self.factors.follows:
            axes = self.axes.get(leader, ())
            parts, length, leading = self.shapes.size(axes), self.lengths[name], self.lengths[leader]
            own = self._dividing(name, axes)
            if self.shapes.size(own) in (parts, length):
                self.axes |= {name: own} if own else {}
            elif (leading // length) % (leading // parts):
                return leader  # a device's part would belong to two entries, and to parts of both
            else:
                self.whole.add(name)
        return None

    def _is_free(self, axis: str) -> bool:
        return axis not in self.used and axis in self.shapes.mesh

    def _dividing(self, name: str, axes: Sequence[str]) -> Axes:
        """Return the longest beginning of `axes` over which an axis can be split."""
        taken, length = tuple(axes), self.lengths[name]
        most = self.most.get(name, length)
        while taken and (length % self.shapes.size(taken) or self.shapes.size(taken) > most):
            taken = taken[:-1]
        return taken


def mesh_axes(entry: Any) -> Axes:
    """Return the mesh's axes that an entry of a `PartitionSpec` names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _is_within(spec: PartitionSpec, other: PartitionSpec) -> bool:
    """Return whether what is sharded as `spec` becomes what is sharded as `other` without another device."""
    entries = itertools.zip_longest(map(mesh_axes, spec), map(mesh_axes, other), fillvalue=())
    # A further split is a slice of what is there.
    return all(theirs[: len(own)] == own for own, theirs in entries)


def part_of(
    found: Split, run: Callable[..., Sequence[Any]], *, wide_sums: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Return the function of one device's part: `run` on what the device uses of its arguments, sums over devices.

    Args:
        found: How the call is split.
        run: The call on a part.
        wide_sums: Whether 16-bit numbers are added up in float32.
    """

    def part(*arrays: Any) -> tuple[Any, ...]:
        used = [_cut(found, names, array) for names, array in zip(found.factors.operands, arrays, strict=True)]
        results = zip(found.factors.results, found.shapes.results, run(*used), strict=True)
        return tuple(_finished(found, names, shape, result, wide=wide_sums) for names, shape, result in results)

    return part


def _cut(found: Split, names: Sequence[Factor], array: Any) -> Any:
    for axis, name in enumerate(names):
        if name in found.whole:
            array = jax.lax.dynamic_slice_in_dim(array, found.start(name), 1, axis)
    return array


def _finished(found: Split, names: Sequence[Factor], shape: Shape, result: Any, *, wide: bool) -> Any:
    for axis, name in enumerate(names):
        if name in found.whole:
            full = (*result.shape[:axis], shape[axis], *result.shape[axis + 1 :])
            # Each device has one entry, or a part of its sum: zeros elsewhere, and the sum over devices puts them
            # together.
            zeros = jnp.zeros(full, result.dtype)
            result = jax.lax.dynamic_update_slice_in_dim(zeros, result, found.start(name), axis)
    sums = found.sums(names)
    if not sums:
        return result
    return compat.wide_sum(result, sums) if wide else jax.lax.psum(result, sums)
