# SPDX-License-Identifier: Apache-2.0
"""Nodes for `vmap`: batched calls, and the transposes of batched linear calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.transformations.nodes import Choice, Flat, Node, Step


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


def _unbatch(gradient: jax.Array | None, axis: int | None) -> jax.Array | None:
    """Return the gradient of an argument with batch axis `axis`; the gradient of an unbatched argument is the sum."""
    if gradient is None:
        return None
    return gradient.sum(0) if axis is None else jnp.moveaxis(gradient, 0, axis)


def no_cotangent(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the float0 placeholder for the cotangent of an integer result."""
    return np.zeros(shape, jax.dtypes.float0)


@dataclasses.dataclass(frozen=True)
class Vmapped(Node):
    """`of` under one `vmap`; results are batched along their first axis."""

    of: Node
    level: Level

    @property
    def forward(self) -> Node:
        """See `Node`."""
        axes = self.level.axes[self.of.lead : self.of.lead + self.spec.num_arrays]
        return Vmapped(self.of.forward, dataclasses.replace(self.level, axes=axes))

    @property
    def steps(self) -> Sequence[Step]:
        """See `Node`."""
        axes = self.level.axes[self.lead : self.lead + self.spec.num_arrays]
        name = None if self.level.axis_name is None else self.level.axis_name.name
        wiring = {"axis_name": name} if type(name) is str else {}
        return [*self.of.steps, Step(["vmap", self.level.size, list(axes)], wiring)]

    def with_residuals(self) -> Node:
        """See `Node`."""
        return Vmapped(self.of.with_residuals(), self.level)

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

    linear_from: int

    @property
    def forward(self) -> Node:
        """See `Node`; a `vmap` over tangents or cotangents alone has no example of the forward to batch."""
        fixed = self.level.axes[: self.lead + self.spec.num_arrays]
        # A collective over a named axis batches a forward without batched arguments; its residuals are then batched.
        may_collect = self.level.axis_name is not None and not self.lead
        return super().forward if may_collect or any(axis is not None for axis in fixed) else self.of.forward

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        return TransposedVmapped(self.of.transpose, self.level, self.linear_from)

    @property
    def steps(self) -> Sequence[Step]:
        """See `Node`."""
        *inner, own = super().steps
        return [*inner, Step(own.data, {**own.wiring, "axes": list(self.level.axes)})]

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """See `Node`."""
        return Node.flat_vjp(self, choice, count)


@dataclasses.dataclass(frozen=True)
class TransposedVmapped(LinearVmapped):
    """The transpose of a `LinearVmapped`, with its axes: gradients of unbatched arguments are summed."""

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        return LinearVmapped(self.of.transpose, self.level, self.linear_from)

    @property
    def steps(self) -> Sequence[Step]:
        """See `Node`."""
        *inner, own = super().steps
        return [*inner, Step(own.data, {**own.wiring, "transposed": True})]

    def argument_axes(self, count: int) -> list[int | None]:
        """Return the batch axis of each argument; cotangents are batched along their first."""
        fixed = self.level.axes[: self.linear_from]
        return [*fixed, *[0] * (count - len(fixed))]

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def transposed(*arrays: jax.Array) -> tuple[Any, ...]:
            batched = self.level.map(self.of.flat(choice), self.argument_axes(len(arrays)))(*arrays)
            return tuple(map(_unbatch, batched, self.level.axes[self.linear_from :]))

        return transposed
