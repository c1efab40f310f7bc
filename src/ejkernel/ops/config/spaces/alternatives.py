# SPDX-License-Identifier: Apache-2.0
"""The union of several spaces, in which the implementation is one more axis of the search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from ejkernel.ops.config.spaces.axes import Axis
from ejkernel.ops.config.spaces.constraints import Constraint
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.errors import ConfigError

_WHICH = "implementation"


def alternatives(
    spaces: Mapping[str, Collection[Any]],
    build: Callable[[str, Any], Any],
    read: Callable[[Any], tuple[str, Any]],
    seeds: Mapping[str, Any] = MappingProxyType({}),
) -> Collection[Any]:
    """Return the union of the spaces: a list if all of them are lists, otherwise one `ConfigSpace`.

    The `ConfigSpace` has an axis of names and the axes of every space. The axes of a space vary only where the first
    axis has its name; elsewhere they stay at their first value, so numeric axes remain numeric.

    Args:
        spaces: Lists and `ConfigSpace`s, by name.
        build: Returns the configuration for a name and a member of the space with that name.
        read: The inverse of `build`.
        seeds: By name, a member that the search tries early, since sampling may never draw from a small space.
    """
    if not any(isinstance(space, ConfigSpace) for space in spaces.values()):
        return [build(name, params) for name, members in spaces.items() for params in members]
    parts = {name: _as_space(space) for name, space in spaces.items() if isinstance(space, ConfigSpace) or len(space)}
    parts = {name: space for name, space in parts.items() if not space.empty()}
    if not parts:
        return []
    axes = {_WHICH: tuple(parts)} | {
        _axis(name, axis): axis.values for name, space in parts.items() for axis in space.axes
    }

    def config(assignment: dict[str, Any]) -> Any:
        name = assignment[_WHICH]
        part = parts[name]
        point = part.locate({axis.name: assignment[_axis(name, axis)] for axis in part.axes})
        return build(name, part.config(point))

    def assignment(config: object) -> dict[str, Any]:
        name, params = read(config)
        if name not in parts:
            raise ConfigError(f"the configuration {config!r} belongs to none of {', '.join(parts)}.")
        own = parts[name].read(params)
        resting = {_axis(other, axis): axis.values[0] for other, part in parts.items() for axis in part.axes}
        return resting | {_WHICH: name} | {_axis(name, axis): own[axis.name] for axis in parts[name].axes}

    conditions = [condition for name, part in parts.items() for condition in _conditions(name, part)]
    early = [build(name, params) for name, params in seeds.items() if name in parts]
    early += [build(name, params) for name, part in parts.items() for params in part.seeds]
    return ConfigSpace(axes, constraints=conditions, build=config, read=assignment, seeds=early)


def _axis(name: str, axis: Axis) -> str:
    return f"{name}.{axis.name}"


def _as_space(space: Collection[object]) -> ConfigSpace[Any]:
    """Return `space` as a `ConfigSpace`; the members of a list need not have common fields."""
    if isinstance(space, ConfigSpace):
        return space
    members = list(space)
    try:
        return ConfigSpace.listed(members)
    except ConfigError:  # no common fields: use their index as the only axis
        return ConfigSpace(
            {"number": range(len(members))},
            build=lambda assignment: members[assignment["number"]],
            # -1 is not on the axis, so a foreign configuration is outside the space
            read=lambda params: {"number": members.index(params) if params in members else -1},
        )


def _conditions(name: str, part: ConfigSpace[Any]) -> list[Constraint]:
    """Return the constraints of one space, each of which also holds wherever another space is chosen."""
    found = [
        Constraint(functools.partial(_rests, name, axis.values[0]), (_WHICH, _axis(name, axis)), by_name=False)
        for axis in part.axes
        if len(axis) > 1
    ]
    for reads, holds in part.conditions():
        own = functools.partial(_holds, name, holds, reads)
        found.append(Constraint(own, (_WHICH, *(f"{name}.{read}" for read in reads)), by_name=False))
    return found


def _rests(name: str, resting: object, chosen: str, value: object) -> bool:
    # by type too, because 1, 1.0 and True are equal
    return chosen == name or value is resting or (type(value) is type(resting) and bool(value == resting))


def _holds(
    name: str, holds: Callable[[Mapping[str, Any]], bool], reads: tuple[str, ...], chosen: str, *values: object
) -> bool:
    return chosen != name or holds(dict(zip(reads, values, strict=True)))
