# SPDX-License-Identifier: Apache-2.0
"""Buckets: calls of varying lengths that share one key, and the call that represents each bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from ejkernel.ops.core.callspec import CallSpec, take_apart
from ejkernel.ops.core.hooks import Kernel
from ejkernel.ops.core.transformations.autodiff import with_spec
from ejkernel.ops.core.transformations.naming import array_names
from ejkernel.ops.core.transformations.nodes import Node
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ArgumentError, KernelError
from ejkernel.ops.utils.validation import asked
from ejkernel.ops.utils.values.signature import abstract, is_array

if TYPE_CHECKING:
    from ejkernel.ops.core.invocation import Invocation

_StandIn = tuple[CallSpec, list[jax.ShapeDtypeStruct]]


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


def representative_of(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], node: Node | None) -> Invocation[Any, Any]:
    """Return the call that represents the bucket of `inv`, according to `kernel.bucket`; it may be `inv` itself.

    Args:
        inv: The call.
        kernel: Its kernel.
        node: The node of a traced call.

    Raises:
        KernelError: `bucket` returns something that cannot represent the call.
    """
    own = _taken_apart(kernel, inv.args, inv.kwargs, inv.method)
    stand_in = _asked(kernel, inv, own)
    if stand_in == own:
        return inv
    spec, types = stand_in
    args, kwargs = spec.join(types)
    # Nodes hold no shapes, so the representative can use this call's node. Types of batches, residuals and cotangents
    # (`array_types`) are computed later, on the measuring thread, where no trace of the caller is open.
    other = dataclasses.replace(
        inv, args=args, kwargs=kwargs, array_types=(), _node=None if node is None else with_spec(node, spec)
    )
    # If the representative were in another bucket than the call, tuning would save under another key.
    again = _asked(kernel, other, stand_in)
    if again != stand_in:
        raise KernelError(
            f"{kernel.op_id}: bucket must be idempotent, but it returned {_shown(stand_in)} for {_shown(own)}, and "
            f"{_shown(again)} for its own result."
        )
    return other


def _asked(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out], own: _StandIn) -> _StandIn:
    """Return the representative's spec and types from the kernel's hook, checked against the call's, `own`."""
    answer: Any = asked(f"{kernel.op_id}: bucket", kernel.bucket, inv)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        raise KernelError(f"{kernel.op_id}: bucket must return (args, kwargs), got {answer!r}.")
    try:
        spec, types = _taken_apart(kernel, answer[0], answer[1], inv.method)
    except (TypeError, ArgumentError) as error:
        raise KernelError(f"{kernel.op_id}: bucket must return arguments of the kernel: {error}") from error
    if spec.structure != own[0].structure:
        raise KernelError(
            f"{kernel.op_id}: bucket must return arguments with the same structure as the call's, "
            f"{_shown(own)}; got {_shown((spec, types))}."
        )
    for name, mine, like in zip(array_names(spec), types, own[1], strict=True):
        if mine.dtype != like.dtype or len(mine.shape) != len(like.shape):
            raise KernelError(
                f"{kernel.op_id}: bucket may change only the sizes of arrays, but it changed {name} from "
                f"{like.dtype}{list(like.shape)} to {mine.dtype}{list(mine.shape)}."
            )
    return spec, [
        # Weak types are part of the key, and a hook that constructs types by hand loses them: keep the call's.
        jax.ShapeDtypeStruct(mine.shape, like.dtype, weak_type=like.weak_type)
        for mine, like in zip(types, own[1], strict=True)
    ]


def _taken_apart(kernel: Kernel[Any, Any], args: Any, kwargs: Mapping[str, Any], method: str | None) -> _StandIn:
    spec, arrays = take_apart(kernel, tuple(args), dict(kwargs), method)
    return spec, [abstract(array) for array in arrays]


def _shown(stand_in: _StandIn) -> str:
    spec, types = stand_in
    args, kwargs = spec.join(types)
    return ", ".join([*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())])
