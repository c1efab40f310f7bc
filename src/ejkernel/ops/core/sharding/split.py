# SPDX-License-Identifier: Apache-2.0
"""The sharding of a call, derived from the shardings of its arguments; and the computation of one shard.

The first sharded array decides. If the rule says `cheapest`, the candidates are the splits that favour each contending
axis, and the one that moves the fewest elements wins. Key heads are replicated if there are fewer than devices; each
device then slices its own, so query heads can be sharded further.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel import compat
from ejkernel.ops.core.sharding.rule import Factor, Factors
from ejkernel.ops.errors import KernelError

Shape = tuple[int, ...]
Axes = tuple[str, ...]  # axes of a mesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes of a call's arrays and the sizes of the mesh axes."""

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    mesh: Mapping[str, int]

    def size(self, axes: Sequence[str]) -> int:
        """Return the number of shards over these mesh axes."""
        return math.prod(self.mesh[axis] for axis in axes)

    def lengths(self, factors: Factors) -> dict[str, int]:
        """Return the length of each named axis."""
        named = [*zip(factors.operands, self.operands, strict=True), *zip(factors.results, self.results, strict=True)]
        return {
            name: length
            for names, shape in named
            for name, length in zip(names, shape, strict=True)
            if name is not None
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The assignment of mesh axes to a call's axes.

    Attributes:
        factors: The call's axes.
        shapes: Their lengths.
        axes: The mesh axes of each sharded axis.
        whole: Following axes that are too short to shard like their leader: they are replicated, and each device uses
            its part.
    """

    factors: Factors
    shapes: Shapes
    axes: Mapping[str, Axes]
    whole: frozenset[str]

    @property
    def operand_specs(self) -> tuple[PartitionSpec, ...]:
        """The shardings of the arguments."""
        return tuple(map(self._spec, self.factors.operands))

    @property
    def result_specs(self) -> tuple[PartitionSpec, ...]:
        """The shardings of the results."""
        return tuple(map(self._spec, self.factors.results))

    def _spec(self, names: Sequence[Factor]) -> PartitionSpec:
        found = [self.axes.get(name, ()) if name else () for name in names]
        return PartitionSpec(*[None if not axes else axes[0] if len(axes) == 1 else axes for axes in found])

    def sums(self, names: Sequence[Factor]) -> Axes:
        """Return the mesh axes over which a result with these named axes is summed."""
        found: list[str] = []
        leaders = dict(self.factors.follows)
        for name, axes in self.axes.items():
            # A follower is sharded over the same devices as its leader; the sum over them counts once, for the leader.
            if name in names or name in leaders:
                continue
            # A result may have only the follower, as a key's gradient has key heads: devices that share one are summed.
            follower = next((one for one, leader in leaders.items() if leader == name and one in names), None)
            split_too = () if follower is None else self.axes.get(follower, ())
            found += [axis for axis in axes if axis not in split_too]
        return tuple(found)

    def index(self, name: str) -> Any:
        """Return the index of this device's shard along an axis."""
        index: Any = 0
        for axis in self.axes.get(name, ()):
            index = index * self.shapes.mesh[axis] + jax.lax.axis_index(axis)
        return index

    def start(self, name: str) -> Any:
        """Return the entry of a replicated following axis that this device uses."""
        leader = dict(self.factors.follows)[name]
        lengths, parts = self.shapes.lengths(self.factors), self.shapes.size(self.axes[leader])
        return self.index(leader) * (lengths[leader] // parts) // (lengths[leader] // lengths[name])

    def moved(self, specs: Sequence[PartitionSpec]) -> int:
        """Return the number of elements that each device receives from others, given these shardings; see `split`."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class CallPart:
    """The position of one shard in the whole call; see `Kernel.part_arguments`.

    Axes have the names of `sharding_rule`. An axis that is not sharded is complete in every shard.
    """

    _split: Split

    def is_split(self, axis: str) -> bool:
        """Return whether an axis is sharded."""
        return self.length(axis) < self.whole(axis)

    def axes(self, axis: str) -> Axes:
        """Return the mesh axes over which an axis is sharded, e.g. for collectives among its shards."""
        return self._split.axes.get(axis, ())

    def start(self, axis: str) -> Any:
        """Return the index of the shard's first entry along an axis, as a traced number."""
        return self._split.index(axis) * self.length(axis)

    def length(self, axis: str) -> int:
        """Return the length of the shard along an axis."""
        return self.whole(axis) // self._split.shapes.size(self._split.axes.get(axis, ()))

    def whole(self, axis: str) -> int:
        """Return the length of an axis in the whole call.

        Raises:
            KernelError: The rule has no such axis.
        """
        lengths = self._split.shapes.lengths(self._split.factors)
        if axis not in lengths:
            raise KernelError(f"axis must be one of sharding_rule's axes, {', '.join(lengths)}; got {axis!r}.")
        return lengths[axis]


def split(factors: Factors, shapes: Shapes, specs: Sequence[PartitionSpec], *, move: bool) -> Split:
    """Choose the axes along which a call is sharded.

    The first sharded array decides, or the cheapest split. An axis that the devices do not divide stays whole.

    Args:
        factors: The call's axes.
        shapes: Their lengths.
        specs: The shardings of the arguments and then of the known results.
        move: Whether devices whose argument is sharded along an unsplittable axis, such as a sequence, shard another
            axis instead of all computing the same.
    """
    decided = functools.partial(_decided, factors, shapes, specs, move=move)
    if not factors.cheapest:
        return decided()
    others = [decided(first=name) for name in _contending(factors, specs)]
    return min(decided(), *others, key=lambda one: one.moved(specs)) if others else decided()


def _contending(factors: Factors, specs: Sequence[PartitionSpec]) -> list[str]:
    """Return the axes that are sharded over the same devices as another axis."""
    asking: dict[str, list[str]] = {}
    for names, spec in zip((*factors.operands, *factors.results), specs, strict=False):
        for name, entry in zip(names, spec, strict=False):
            for axis in mesh_axes(entry) if name in factors.splittable else ():
                asking.setdefault(axis, []).append(cast(str, name))
    return list(dict.fromkeys(name for names in asking.values() if len(set(names)) > 1 for name in names))


def _decided(
    factors: Factors, shapes: Shapes, specs: Sequence[PartitionSpec], *, move: bool, first: str | None = None
) -> Split:
    """Return the split in which the axis `first` keeps its sharding, and the others share the remaining mesh axes."""
    most: dict[str, int] = {}  # limits on the shards of leading axes, lowered until all followers can follow
    while True:
        deciding = _Deciding(factors, shapes, most)
        for names in ([first], factors.splittable):
            deciding.take(specs, names)
        if move:
            deciding.move(specs)
        ahead = deciding.follow()
        if ahead is None:
            return Split(factors=factors, shapes=shapes, axes=deciding.axes, whole=frozenset(deciding.whole))
        # start again: with fewer shards there, mesh axes are left for others
        most[ahead] = shapes.size(deciding.axes[ahead]) - 1


class _Deciding:
    def __init__(self, factors: Factors, shapes: Shapes, most: Mapping[str, int]) -> None:
        self.factors = factors
        self.shapes = shapes
        self.most = most
        self.lengths = shapes.lengths(factors)
        self.multiples = dict(factors.multiples)
        self.axes: dict[str, Axes] = {}
        self.used: set[str] = set()
        self.whole: set[str] = set()

    def take(self, specs: Sequence[PartitionSpec], wanted: Collection[str | None]) -> None:
        """Adopt the shardings of the arrays for the wanted axes."""
        for names, spec in zip((*self.factors.operands, *self.factors.results), specs, strict=False):
            for name, entry in zip(names, spec, strict=False):
                if name in wanted and name in self.factors.splittable and name not in self.axes:
                    axes = self._dividing(name, [axis for axis in mesh_axes(entry) if self._is_free(axis)])
                    self.axes |= {name: axes} if axes else {}
                    self.used.update(axes)

    def move(self, specs: Sequence[PartitionSpec]) -> None:
        """Shard other axes over the remaining mesh axes of the arguments' shardings."""
        operands = specs[: len(self.factors.operands)]
        idle = [axis for spec in operands for entry in spec for axis in mesh_axes(entry) if self._is_free(axis)]
        for axis in dict.fromkeys(idle):
            # sorted, because set order differs between processes, and their programs must not
            for name in sorted(self.factors.splittable & self.lengths.keys()):
                more = (*self.axes.get(name, ()), axis)
                # together with all followers or not at all: a shard needs the same part of each
                followers = [one for one, leader in self.factors.follows if leader == name]
                fits = all(self._divides(more, one) for one in (name, *followers))
                if fits and self.shapes.size(more) <= self.most.get(name, self.shapes.size(more)):
                    self.axes[name] = more
                    self.used.add(axis)
                    break

    def follow(self) -> str | None:
        """Shard each axis like its leader, or mark it as replicated; return a leader with too many shards."""
        for name, leader in self.factors.follows:
            axes = self.axes.get(leader, ())
            parts, length, leading = self.shapes.size(axes), self.lengths[name], self.lengths[leader]
            own = self._dividing(name, axes)
            if self.shapes.size(own) in (parts, length):
                self.axes |= {name: own} if own else {}
            elif (leading // length) % (leading // parts):
                return leader  # a device's shard would overlap parts of two entries
            else:
                self.whole.add(name)
        return None

    def _is_free(self, axis: str) -> bool:
        return axis not in self.used and axis in self.shapes.mesh

    def _dividing(self, name: str, axes: Sequence[str]) -> Axes:
        """Return the longest prefix of `axes` over which an axis can be sharded."""
        taken = tuple(axes)
        most = self.most.get(name, self.shapes.size(taken))
        while taken and (not self._divides(taken, name) or self.shapes.size(taken) > most):
            taken = taken[:-1]
        return taken

    def _divides(self, axes: Sequence[str], name: str) -> bool:
        """Return whether an axis can be sharded over these mesh axes."""
        return self.lengths[name] % (self.shapes.size(axes) * self.multiples.get(name, 1)) == 0


def mesh_axes(entry: Any) -> Axes:
    """Return the mesh axes in an entry of a `PartitionSpec`."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _is_within(spec: PartitionSpec, other: PartitionSpec) -> bool:
    """Return whether resharding from `spec` to `other` needs no communication."""
    entries = itertools.zip_longest(map(mesh_axes, spec), map(mesh_axes, other), fillvalue=())
    # a finer sharding is a local slice
    return all(theirs[: len(own)] == own for own, theirs in entries)


def shard_function(
    found: Split, run: Callable[..., Sequence[Any]], *, wide_sums: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Return the computation of one shard: slice the arguments, call `run`, sum over devices.

    Args:
        found: The split.
        run: The call on a shard.
        wide_sums: Whether 16-bit floats are summed in float32.
    """

    def shard(*arrays: Any) -> tuple[Any, ...]:
        used = [_cut(found, names, array) for names, array in zip(found.factors.operands, arrays, strict=True)]
        results = zip(found.factors.results, found.shapes.results, run(*used), strict=True)
        return tuple(_finished(found, names, shape, result, wide=wide_sums) for names, shape, result in results)

    return shard


def _cut(found: Split, names: Sequence[Factor], array: Any) -> Any:
    for axis, name in enumerate(names):
        if name in found.whole:
            array = jax.lax.dynamic_slice_in_dim(array, found.start(name), 1, axis)
    return array


def _finished(found: Split, names: Sequence[Factor], shape: Shape, result: Any, *, wide: bool) -> Any:
    for axis, name in enumerate(names):
        if name in found.whole:
            full = (*result.shape[:axis], shape[axis], *result.shape[axis + 1 :])
            # each device fills its own entry, or a part of its sum, into zeros, and the sum over devices combines them
            zeros = jnp.zeros(full, result.dtype)
            result = jax.lax.dynamic_update_slice_in_dim(zeros, result, found.start(name), axis)
    sums = found.sums(names)
    if not sums:
        return result
    return compat.partitioning.wide_sum(result, sums) if wide else jax.lax.psum(result, sums)
