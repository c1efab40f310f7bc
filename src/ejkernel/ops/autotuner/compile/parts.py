# SPDX-License-Identifier: Apache-2.0
"""Calls with many examples are simulated for a few of them, if each further one takes the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax

from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.nodes import factors
from ejkernel.ops.errors import CandidateError, EjkernelError

_LEAST: Final = 16  # examples of a call; a shorter one is simulated as a whole
_PERIODIC: Final = 0.02  # largest difference between the times of the second and the third example


class Parts(NamedTuple):
    """The examples of a call: the first axis of its first array, along which it may be split over devices.

    Attributes:
        number: Number of examples.
        name: Name of the axis.
        types: The types of the arguments for 1, 2 and 3 examples.
    """

    number: int
    name: str
    types: tuple[list[jax.ShapeDtypeStruct], ...]


def parts_of(inv: Invocation[Any, Any], types: Sequence[jax.ShapeDtypeStruct]) -> Parts | None:
    """Return the examples of a call; `None` if it has few, or its kernel has no rule that splits them."""
    found = factors(inv.node, types)
    # the axes of a matrix are cut into blocks
    if found is None or not types or len(types[0].shape) < 3 or types[0].shape[0] < _LEAST:
        return None
    count, name = types[0].shape[0], found.operands[0][0]
    named = list(zip(types, found.operands, strict=True))
    sizes = {size for like, names in named for size, axis in zip(like.shape, names, strict=True) if axis == name}
    if name is None or name not in found.splittable or sizes != {count}:
        return None

    def first(few: int) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                [few if axis == name else size for size, axis in zip(like.shape, names, strict=True)], like.dtype
            )
            for like, names in named
        ]

    return Parts(count, name, (first(1), first(2), first(3)))


def extrapolated(parts: Parts, simulate: Callable[[Sequence[jax.ShapeDtypeStruct]], float]) -> tuple[float, str] | None:
    """Return the cycles of all examples and what was simulated; `None` if examples do not take equal times."""
    try:
        one, two, three = map(simulate, parts.types)
    except (CandidateError, EjkernelError):  # e.g. a block is longer than a part
        return None
    each = three - two
    if each <= 0 or abs(two - one - each) > _PERIODIC * each:
        return None
    return three + (parts.number - 3) * each, f"1, 2 and 3 of {parts.number} along {parts.name!r}"
