# SPDX-License-Identifier: Apache-2.0
"""Buckets: calls of varying lengths that share one key, and the call that represents each bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ejkernel.ops.core.callspec import CallSpec, array_names, is_call
from ejkernel.ops.errors import ArgumentError, KernelError
from ejkernel.ops.utils.values.signature import abstract, is_array

StandIn = tuple[CallSpec, list[jax.ShapeDtypeStruct]]
Retake = Callable[[tuple[Any, ...], dict[str, Any]], StandIn]


class Bucket(NamedTuple):
    """The arguments of a call, and those that represent its bucket."""

    own: StandIn
    found: StandIn


def bucketed(array: object, *axes: int, least: int = 1) -> Any:
    """Return the type of `array` with the sizes of `axes` rounded up to powers of two; see `Kernel.bucket`.

    >>> import jax
    >>> bucketed(jax.ShapeDtypeStruct((3, 100, 64), "float32"), 1).shape
    (3, 128, 64)

    Args:
        array: An array, concrete or abstract; `None` is returned as is.
        axes: The axes to round.
        least: The smallest rounded size, a power of two.

    Raises:
        ArgumentError: `array` is not an array or lacks an axis, `least` is not a power of two, or a size to round is
            symbolic, as in a program exported with symbolic shapes.
    """
    if array is None:
        return None
    if not is_array(array):
        raise ArgumentError(f"array must be an array or None, got {array!r}.")
    if type(least) is not int or least < 1 or least & (least - 1):
        raise ArgumentError(f"least must be a power of two, got {least!r}.")
    like = abstract(array)
    shape = list(like.shape)
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ArgumentError(f"axes must be axes of an array of shape {tuple(shape)}, got {axis!r}.")
        shape[axis] = _rounded(like.shape[axis], axis, least)
    return jax.ShapeDtypeStruct(tuple(shape), like.dtype, weak_type=like.weak_type)


def _rounded(size: Any, axis: int, least: int) -> int:
    if not isinstance(size, int):
        raise ArgumentError(
            f"axis {axis} has the symbolic size {size}, which cannot be rounded; export the program with concrete "
            "shapes, or give the kernel a bucket that leaves symbolic sizes unchanged."
        )
    return max(least, 1 << (size - 1).bit_length()) if size else 0


def checked_stand_in(op_id: str, answer: Any, own: StandIn, retake: Retake) -> StandIn:
    """Check the result of `Kernel.bucket`, and return the arguments that represent the call's bucket.

    Args:
        op_id: Name of the operation, for messages.
        answer: The result of `Kernel.bucket`, which should be `(args, kwargs)`.
        own: The call's own arguments; they are returned if the answer is equal to them.
        retake: Splits `(args, kwargs)` into a `CallSpec` and the types of the arrays.

    Raises:
        KernelError: The answer is not `(args, kwargs)`, or differs from the call in more than the sizes of arrays.
    """
    if not is_call(answer):
        raise KernelError(f"{op_id}: bucket must return (args, kwargs), got {answer!r}.")
    try:
        spec, types = retake(tuple(answer[0]), dict(answer[1]))
    except (TypeError, ArgumentError) as error:
        raise KernelError(f"{op_id}: bucket must return arguments of the kernel: {error}") from error
    if (spec, types) == own:
        return own
    if spec.array_structure != own[0].array_structure:
        raise KernelError(
            f"{op_id}: bucket must return arguments with the same structure as the call's, "
            f"{_shown(own)}; got {_shown((spec, types))}."
        )
    for name, mine, like in zip(array_names(spec), types, own[1], strict=True):
        if mine.dtype != like.dtype or len(mine.shape) != len(like.shape):
            raise KernelError(
                f"{op_id}: bucket may change only the sizes of arrays, but it changed {name} from "
                f"{like.dtype}{list(like.shape)} to {mine.dtype}{list(mine.shape)}."
            )
    return spec, [
        # Weak types are part of the key, and a hook that constructs types by hand loses them: keep the call's.
        jax.ShapeDtypeStruct(mine.shape, like.dtype, weak_type=like.weak_type)
        for mine, like in zip(types, own[1], strict=True)
    ]


def not_idempotent(op_id: str, bucket: Bucket, again: StandIn) -> KernelError:
    """Return the error of a bucket that is itself represented by other arguments: tuning would use another key."""
    return KernelError(
        f"{op_id}: bucket must be idempotent, but it returned {_shown(bucket.found)} for {_shown(bucket.own)}, and "
        f"{_shown(again)} for its own result."
    )


def _shown(stand_in: StandIn) -> str:
    spec, types = stand_in
    args, kwargs = spec.join(types)
    return ", ".join([*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())])
