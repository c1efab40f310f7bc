# SPDX-License-Identifier: Apache-2.0
"""Leading axes of arrays merged into one axis, also where several of them are sharded over explicit mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.ops.core.sharding.split import mesh_axes
from ejkernel.ops.errors import ArgumentError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """How the leading axes of a call's arrays become one axis.

    JAX merges axes if only the first is sharded over explicit mesh axes. Otherwise each device merges its own part: no
    element moves to another device, and the merged axis has the parts of the devices one after the other.

    Attributes:
        sizes: The sizes of the axes.
        mesh: The mesh with explicit axes; `None` without one.
        axes: The mesh axes of each axis.
    """

    sizes: tuple[int, ...]
    mesh: Any
    axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, array: Any, count: int) -> Merging:
        """Return the merging of the first `count` axes that fits an array or its type."""
        mesh = compat.tracing.explicit_mesh([_aval(array)])
        return cls(sizes=tuple(array.shape[:count]), mesh=mesh, axes=explicit_axes(array)[:count])

    @property
    def is_reordered(self) -> bool:
        """Whether each device merges its own part."""
        return any(self.axes[1:])

    @property
    def keeps_order(self) -> bool:
        """Whether the merged axis has the order that it has without sharding."""
        shards, own = self._parts()[::2], self._parts()[1::2]
        return not any(count > 1 and math.prod(own[:axis]) != 1 for axis, count in enumerate(shards))

    def merge(self, name: str, array: Any) -> Any:
        """Return an array with the axes merged.

        Args:
            name: The array's name, for messages.
            array: An array that begins with axes of these sizes.

        Raises:
            ArgumentError: Its axes are sharded otherwise.
        """
        count, rest = len(self.sizes), array.shape[len(self.sizes) :]
        (own, tail) = (explicit_axes(array)[part] for part in (slice(count), slice(count, None)))
        differs = any(one not in ((), wanted) for one, wanted in zip(own, self.axes, strict=True))
        if differs and (self.is_reordered or any(own[1:])):
            raise ArgumentError(
                f"{name} must be sharded like the first argument along its first {count} axes, {_spec(self.axes)}; got "
                f"{_spec(own)}. Use jax.sharding.reshard."
            )
        if not self.is_reordered:
            return jnp.reshape(array, (math.prod(self.sizes), *rest))
        parts = self._reshaped(jnp.asarray(array), (*self._parts(), *rest), (*self._of_parts(), *tail))
        ordered = jnp.transpose(parts, (*self._order(), *range(parts.ndim - len(rest), parts.ndim)))
        return self._reshaped(ordered, (math.prod(self.sizes), *rest), (sum(self.axes, ()), *tail))

    def separate(self, array: Any) -> Any:
        """Return an array, or a result with the merged axis, with the axes apart again."""
        rest = array.shape[1:]
        if not self.is_reordered:
            return jnp.reshape(array, (*self.sizes, *rest))
        tail = explicit_axes(array)[1:]
        order, parts, axes = self._order(), self._parts(), self._of_parts()
        shape, spec = [parts[index] for index in order], [axes[index] for index in order]
        ordered = self._reshaped(array, (*shape, *rest), (*spec, *tail))
        back = sorted(range(len(order)), key=order.__getitem__)
        found = jnp.transpose(ordered, (*back, *range(len(order), ordered.ndim)))
        return self._reshaped(found, (*self.sizes, *rest), (*self.axes, *tail))

    def _parts(self) -> tuple[int, ...]:
        """Return for each axis the number of its shards, and their size."""
        shards = [math.prod(self.mesh.shape[name] for name in axes) for axes in self.axes]
        return tuple(n for size, count in zip(self.sizes, shards, strict=True) for n in (count, size // count))

    def _of_parts(self) -> tuple[tuple[str, ...], ...]:
        return tuple(entry for axes in self.axes for entry in (axes, ()))

    def _order(self) -> tuple[int, ...]:
        """Return the axes of `_parts`: those of devices, then those of a device's elements."""
        count = 2 * len(self.sizes)
        return (*range(0, count, 2), *range(1, count, 2))

    def _reshaped(self, array: Any, shape: Sequence[int], spec: Sequence[Any]) -> Any:
        return jax.lax.reshape(array, shape, out_sharding=jax.sharding.NamedSharding(self.mesh, _spec(spec)))


def _spec(entries: Sequence[Any]) -> jax.sharding.PartitionSpec:
    return jax.sharding.PartitionSpec(*(entry or None for entry in entries))


def explicit_axes(array: Any, *, least: int = 1) -> tuple[tuple[str, ...], ...]:
    """Return the explicit mesh axes over which each axis of an array or type is sharded; those of `least` devices."""
    aval = _aval(array)
    mesh = compat.tracing.explicit_mesh([aval])
    rank = len(getattr(array, "shape", ()))
    entries = (*(() if mesh is None else aval.sharding.spec), *[None] * rank)[:rank]
    return tuple(tuple(name for name in mesh_axes(entry) if mesh.shape[name] >= least) for entry in entries)


def without_single_shards(array: Any) -> Any:
    """Return an array that is not sharded over explicit mesh axes of one device; its elements stay where they are."""
    axes = explicit_axes(array, least=2)
    if axes == explicit_axes(array):
        return array
    mesh = compat.tracing.explicit_mesh([_aval(array)])
    return jax.sharding.reshard(array, jax.sharding.NamedSharding(mesh, _spec(axes)))


def _aval(array: Any) -> Any:
    return jax.typeof(array) if isinstance(array, jax.Array) else array
