# SPDX-License-Identifier: Apache-2.0
"""Nodes for `vmap`: batched calls, and the transposes of batched linear calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.callspec import CallSpec
from ejkernel.ops.core.transformations.nodes import Choice, Flat, Node, NonlinearWrapper, autodiff_vjp
from ejkernel.ops.utils.values.signature import HasType


@dataclasses.dataclass(frozen=True)
class AxisName:
    """The name of a `vmap` axis: any hashable value, even `None`."""

    name: Hashable


@dataclasses.dataclass(frozen=True)
class Level:
    """One `vmap`: its size, the axis of each argument, and its name for collectives, if it has one."""

    size: int
    axes: tuple[int | None, ...]
    axis_name: AxisName | None
    spmd_axis_name: Hashable

    def map(self, function: Flat, axes: Sequence[int | None]) -> Flat:
        """Return `function` batched over `axes`; they may all be `None`."""
        named: dict[str, Any] = {} if self.axis_name is None else {"axis_name": self.axis_name.name}
        options: dict[str, Any] = {"axis_size": self.size, "spmd_axis_name": self.spmd_axis_name, **named}
        if any(axis is not None for axis in axes):
            return jax.vmap(function, in_axes=tuple(axes), **options)
        # `jax.vmap` needs a batched argument: pass an unused array of the batch size.
        counted: Any = jax.vmap(lambda _, *arrays: function(*arrays), in_axes=(0, *axes), **options)
        return lambda *arrays: counted(np.zeros(self.size, np.bool_), *arrays)

    def batched(self, like: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        """Return the type `like` with this level's batch axis inserted."""
        shape = list(like.shape)
        if axis is not None:
            shape.insert(axis, self.size)
        return jax.ShapeDtypeStruct(tuple(shape), like.dtype, weak_type=like.weak_type)


def unbatched(array: HasType, axis: int | None) -> jax.ShapeDtypeStruct:
    """Return the type of one example of an array with batch axis `axis`."""
    shape = tuple(length for index, length in enumerate(array.shape) if index != axis)
    return jax.ShapeDtypeStruct(shape, array.dtype, weak_type=bool(getattr(array, "weak_type", False)))


def _unbatch(gradient: jax.Array | None, axis: int | None) -> jax.Array | None:
    """Return the gradient of an argument with batch axis `axis`; the gradient of an unbatched argument is the sum."""
    if gradient is None:
        return None
    return gradient.sum(0) if axis is None else jnp.moveaxis(gradient, 0, axis)


def no_cotangent(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the float0 placeholder for the cotangent of an integer result."""
    return np.zeros(shape, jax.dtypes.float0)


@dataclasses.dataclass(frozen=True)
class Vmapped(NonlinearWrapper):
    """`of` under one `vmap`; results are batched along their first axis."""

    of: Node
    level: Level

    @property
    def forward(self) -> Node:
        """See `Node`."""
        axes = self.level.axes[self.of.lead : self.of.lead + self.spec.num_arrays]
        return Vmapped(self.of.forward, dataclasses.replace(self.level, axes=axes))

    @property
    def types_are_whole(self) -> bool:
        """See `Node`."""
        return self.of.types_are_whole

    @property
    def steps(self) -> Sequence[list[Any]]:
        """See `Node`."""
        axes = self.level.axes[self.lead : self.lead + self.spec.num_arrays]
        return [*self.of.steps, ["vmap", self.level.size, list(axes)]]

    @property
    def wiring(self) -> Sequence[dict[str, Any]]:
        """See `Node`."""
        name = None if self.level.axis_name is None else self.level.axis_name.name
        return [*self.of.wiring, {"axis_name": name} if type(name) is str else {}]

    def argument_axes(self, count: int) -> list[int | None]:
        """Return the batch axis of each of `count` arguments."""
        del count
        return list(self.level.axes)

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        types = self.of.argument_types(choice, own)
        return list(map(self.level.batched, types, self.argument_axes(len(types))))

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""
        return self.level.map(self.of.flat(choice), self.level.axes)

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """See `Node`."""

        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            cts = [no_cotangent(ct.shape[1:]) if ct.dtype == jax.dtypes.float0 else ct for ct in arrays[count:]]
            cotangent_axes = [None if ct.dtype == jax.dtypes.float0 else 0 for ct in cts]
            batched = self.level.map(self.of.flat_vjp(choice, count), [*self.level.axes, *cotangent_axes])
            return tuple(map(_unbatch, batched(*arrays[:count], *cts), self.level.axes))

        return gradients


@dataclasses.dataclass(frozen=True)
class LinearVmapped(Vmapped):
    """A linear call under one `vmap`; it is linear in the arguments from `linear_from` on."""

    linear_from: int = 0

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        return TransposedVmapped(self.of.transpose, self.level, self)

    @property
    def wiring(self) -> Sequence[dict[str, Any]]:
        """See `Node`."""
        *inner, own = super().wiring
        return [*inner, {**own, "axes": list(self.level.axes)}]

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """See `Node`."""
        return autodiff_vjp(self.flat(choice), count)


@dataclasses.dataclass(frozen=True)
class TransposedVmapped(Vmapped):
    """The transpose of a `LinearVmapped`: gradients of unbatched arguments are summed."""

    # Stored so that transposing twice gives an equal node, with shared traces.
    original: LinearVmapped

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        return self.original

    def with_spec(self, spec: CallSpec) -> TransposedVmapped:
        """See `Node`."""
        return dataclasses.replace(self, of=self.of.with_spec(spec), original=self.original.with_spec(spec))

    @property
    def wiring(self) -> Sequence[dict[str, Any]]:
        """See `Node`."""
        *inner, own = super().wiring
        return [*inner, {**own, "axes": list(self.level.axes), "transposed": True}]

    def argument_axes(self, count: int) -> list[int | None]:
        """Return the batch axis of each argument; cotangents are batched along their first."""
        fixed = self.level.axes[: self.original.linear_from]
        return [*fixed, *[0] * (count - len(fixed))]

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def transposed(*arrays: jax.Array) -> tuple[Any, ...]:
            batched = self.level.map(self.of.flat(choice), self.argument_axes(len(arrays)))(*arrays)
            return tuple(map(_unbatch, batched, self.level.axes[self.original.linear_from :]))

        return transposed

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """See `Node`."""
        return autodiff_vjp(self.flat(choice), count)
