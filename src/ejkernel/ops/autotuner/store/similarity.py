# SPDX-License-Identifier: Apache-2.0
"""The distance of two calls of one operation, by the shapes of their arrays."""

from __future__ import annotations

import math
from typing import Any

from ejkernel.ops.utils.storage.serialize import stable_json

_NO_PART = ("wiring",)  # the origin of a call, not part of its identity; see `Invocation.call_key`


def dimensions_of(call: object) -> tuple[str, tuple[int, ...]]:
    """Return the part of a call that must be equal in comparable calls, and the dimensions that may differ.

    The common part has the structure of the arguments, the arrays' dtypes and ranks, all static arguments and the
    transformations. The dimensions are those of the arrays and the sizes of enclosing `vmap`s.

    Args:
        call: An invocation's `description`.
    """
    dimensions: list[int] = []
    parts = {name: part for name, part in call.items() if name not in _NO_PART} if isinstance(call, dict) else call
    common = _without_dimensions(parts, dimensions)
    return stable_json(common), tuple(dimensions)


def distance(mine: tuple[int, ...], theirs: tuple[int, ...]) -> float:
    """Return the sum of the absolute log2 ratios of the dimensions; e.g. 1 if one dimension doubles."""
    return sum(abs(_log2(one) - _log2(other)) for one, other in zip(mine, theirs, strict=True))


def _log2(dimension: int) -> float:
    return math.log2(max(dimension, 0.5))  # an empty dimension is as far from 1 as 2 is


def _without_dimensions(data: object, dimensions: list[int]) -> Any:
    """Return a copy without the arrays' dimensions, and append these to `dimensions`."""
    if isinstance(data, list):
        if len(data) == 3 and data[0] == "vmap" and type(data[1]) is int:
            dimensions.append(data[1])
            return [data[0], 0, data[2]]
        return [_without_dimensions(item, dimensions) for item in data]
    if not isinstance(data, dict):
        return data
    array = data.get("array")
    if isinstance(array, list) and len(array) == 2 and isinstance(array[1], list):
        kept = [dim if type(dim) is not int else 0 for dim in array[1]]  # a symbolic dimension is a name
        dimensions.extend(dim for dim in array[1] if type(dim) is int)
        return data | {"array": [array[0], kept]}
    return {name: _without_dimensions(item, dimensions) for name, item in sorted(data.items())}
