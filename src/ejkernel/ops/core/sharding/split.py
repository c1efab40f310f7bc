# SPDX-License-Identifier: Apache-2.0
"""From the shardings in which arrays arrive to those of the parts, and the computation of one part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

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
            if name in names or name in leaders:
                continue
            follower = next((one for one, leader in leaders.items() if leader == name and one in names), None)
            split_too = () if follower is None else self.axes.get(follower, ())
            yield from (axis for axis in axes if axis not in split_too)

    def start(self, name: str) -> Any:
        """Return which entry of an axis that went whole to every device this one uses."""
        leader = dict(self.factors.follows)[name]
        index: Any = 0
        for axis in self.axes[leader]:
            index = index * self.shapes.mesh[axis] + jax.lax.axis_index(axis)
        lengths = self.shapes.lengths(self.factors)
        return index * (lengths[leader] // self.shapes.size(self.axes[leader])) // (lengths[leader] // lengths[name])


def split(factors: Factors, shapes: Shapes, specs: Sequence[PartitionSpec], *, move: bool) -> Split:
    """Decide along which axes a call is split.

    The first array that asks for an axis decides, and an axis that does not divide stays whole.

    Args:
        factors: The call's axes.
        shapes: Their lengths.
        specs: How the arguments, and then as many results as are known, are sharded.
        move: Whether devices that share what cannot be split, such as a sequence, divide something else among them
            instead of all computing the same.
    """
    return _Deciding(factors, shapes).split(specs, move=move)


class _Deciding:
    def __init__(self, factors: Factors, shapes: Shapes) -> None:
        self.factors = factors
        self.shapes = shapes
        self.lengths = shapes.lengths(factors)
        self.axes: dict[str, Axes] = {}
        self.used: set[str] = set()

    def split(self, specs: Sequence[PartitionSpec], *, move: bool) -> Split:
        for names, spec in zip((*self.factors.operands, *self.factors.results), specs, strict=False):
            for name, entry in zip(names, spec, strict=False):
                if name in self.factors.splittable and name not in self.axes:
                    self._take(name, [axis for axis in mesh_axes(entry) if self._is_free(axis)])
        if move:
            self._move(specs)
        whole = frozenset(name for name, leader in self.factors.follows if not self._follow(name, leader))
        return Split(factors=self.factors, shapes=self.shapes, axes=self.axes, whole=whole & self._in_use(whole))

    def _is_free(self, axis: str) -> bool:
        return axis not in self.used and axis in self.shapes.mesh

    def _take(self, name: str, axes: Sequence[str]) -> None:
        taken = self._dividing(self.lengths[name], axes)
        if taken:
            self.axes[name] = taken
            self.used.update(taken)

    def _dividing(self, length: int, axes: Sequence[str]) -> Axes:
        """Return the longest beginning of `axes` that divides a length."""
        taken = tuple(axes)
        while taken and length % self.shapes.size(taken):
            taken = taken[:-1]
        return taken

    def _move(self, specs: Sequence[PartitionSpec]) -> None:
        operands = specs[: len(self.factors.operands)]
        idle = [axis for spec in operands for entry in spec for axis in mesh_axes(entry) if self._is_free(axis)]
        for axis in dict.fromkeys(idle):
            for name in sorted(self.factors.splittable & self.lengths.keys()):
                more = (*self.axes.get(name, ()), axis)
                followers = [one for one, leader in self.factors.follows if leader == name]
                if all(self.lengths[one] % self.shapes.size(more) == 0 for one in (name, *followers)):
                    self.axes[name] = more
                    self.used.add(axis)
                    break

    def _follow(self, name: str, leader: str) -> bool:
        """Split an axis as the one that it follows; return whether that can be, or there is nothing to follow."""
        axes = self.axes.get(leader, ())
        parts, length, leading = self.shapes.size(axes), self.lengths[name], self.lengths[leader]
        own = self._dividing(length, axes)
        if self.shapes.size(own) in (parts, length):
            if own:
                self.axes[name] = own
            return True
        if (leading // length) % (leading // parts):
            del self.axes[leader]  # a device's part would belong to two entries, and to parts of both
            return True
        return False

    def _in_use(self, names: frozenset[str]) -> set[str]:
        leaders = dict(self.factors.follows)
        return {name for name in names if leaders[name] in self.axes}


def mesh_axes(entry: Any) -> Axes:
    """Return the mesh's axes that an entry of a `PartitionSpec` names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def part_of(found: Split, run: Callable[..., Sequence[Any]]) -> Callable[..., tuple[Any, ...]]:
    """Return the function of one device's part: `run` on what the device uses of its arguments, sums over devices."""

    def part(*arrays: Any) -> tuple[Any, ...]:
        used = [_cut(found, names, array) for names, array in zip(found.factors.operands, arrays, strict=True)]
        results = zip(found.factors.results, found.shapes.results, run(*used), strict=True)
        return tuple(_finished(found, names, shape, result) for names, shape, result in results)

    return part


def _cut(found: Split, names: Sequence[Factor], array: Any) -> Any:
    for axis, name in enumerate(names):
        if name in found.whole:
            array = jax.lax.dynamic_slice_in_dim(array, found.start(name), 1, axis)
    return array


def _finished(found: Split, names: Sequence[Factor], shape: Shape, result: Any) -> Any:
    for axis, name in enumerate(names):
        if name in found.whole:
            full = (*result.shape[:axis], shape[axis], *result.shape[axis + 1 :])
            zeros = jnp.zeros(full, result.dtype)
            result = jax.lax.dynamic_update_slice_in_dim(zeros, result, found.start(name), axis)
    sums = found.sums(names)
    return jax.lax.psum(result, sums) if sums else result
