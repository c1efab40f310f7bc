# SPDX-License-Identifier: Apache-2.0
"""Checks and canonical forms of the arguments of grouped products."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from ejkernel.kernels._options import canonical_float, canonical_precision, type_text, wrong_array
from ejkernel.ops.core.sharding.split import CallPart
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.scalars import given_text
from ejkernel.ops.utils.values.signature import is_array, is_known

from .common import Groups, row_ends, taken_apart


def check_operand(name: str, array: Any, axes: str) -> None:
    """Raise an `ArgumentError` unless the operand is a floating-point array with as many axes as `axes` names.

    Numbers in 8 bits lack their scales: a result in their dtype would overflow.
    """
    if is_array(array) and array.dtype.itemsize == 1 and array.dtype != bool:
        raise ArgumentError(
            f"{name} must be a floating-point array {axes} of 16 bits or more, got {type_text(array)}; pass "
            "Quantized(values, scale, block), or cast numbers that have no scales to bfloat16."
        )
    if not is_array(array) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError(f"{name} must be a floating-point array {axes}, got {wrong_array(array, 'bfloat16')}.")
    if len(array.shape) != len(axes.split(",")):
        raise ArgumentError(f"{name} must be {axes}, got shape {tuple(array.shape)}; reshape it.")


def check_product(lhs: Any, rhs: Any, *, transpose_rhs: bool) -> None:
    """Raise an `ArgumentError` unless `lhs` has rows, and `rhs` a matrix of matching shape for each group."""
    check_operand("lhs", lhs, "[m, k]")
    check_operand("rhs", rhs, "[groups, n, k]" if transpose_rhs else "[groups, k, n]")
    check_pair(lhs, rhs, (1, 2 if transpose_rhs else 1), f"have one k where transpose_rhs is {transpose_rhs}")


def check_gate(gate: Any, rhs: Any) -> None:
    """Raise an `ArgumentError` unless the gate has the shape and dtype of `rhs`."""
    check_operand("gate", gate, "[groups, k, n]")
    if (gate.shape, gate.dtype) != (rhs.shape, rhs.dtype):
        raise ArgumentError(
            f"gate must have rhs's shape and dtype, {tuple(rhs.shape)} and {rhs.dtype}; got {tuple(gate.shape)} and "
            f"{gate.dtype}."
        )


def check_row_scale(row_scale: Any, lhs: Any) -> None:
    """Raise an `ArgumentError` unless `row_scale` has one factor per row of `lhs`."""
    check_operand("row_scale", row_scale, "[m]")
    if row_scale.shape[0] != lhs.shape[0]:
        raise ArgumentError(
            f"row_scale must have a number for each row of lhs; got shapes {tuple(row_scale.shape)} and "
            f"{tuple(lhs.shape)}."
        )


def check_pair(lhs: Any, rhs: Any, axes: tuple[int, int], what: str) -> None:
    """Raise an `ArgumentError` unless the operands have the same dtype, and the same length along these axes."""
    if lhs.dtype != rhs.dtype:
        raise ArgumentError(f"lhs and rhs must have one dtype, got {lhs.dtype} and {rhs.dtype}; cast one of them.")
    if lhs.shape[axes[0]] != rhs.shape[axes[1]]:
        shapes = f"{tuple(lhs.shape)} and {tuple(rhs.shape)}"
        raise ArgumentError(f"lhs and rhs must {what}; got shapes {shapes}: axes {axes[0]} and {axes[1]} differ.")


def check_sizes(group_sizes: Any, groups: int | None = None) -> None:
    """Raise an `ArgumentError` unless `group_sizes` has an integer for each group."""
    if not is_array(group_sizes) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        got = wrong_array(group_sizes, "int32")
        raise ArgumentError(f"group_sizes must be an array of integers [groups], got {got}.")
    if len(group_sizes.shape) != 1 or groups not in (None, group_sizes.shape[0]):
        wanted = "[groups]" if groups is None else f"[{groups}], one for each matrix of rhs"
        some = len(group_sizes.shape) == 1 and groups is not None and group_sizes.shape[0] > groups
        more = "; if rhs has only some of the groups, pass first_group" if some else ""
        raise ArgumentError(f"group_sizes must be {wanted}; got shape {tuple(group_sizes.shape)}{more}.")
    if not is_known(group_sizes.shape[0]):
        raise ArgumentError(
            f"group_sizes must have a length that is a number, got {group_sizes.shape[0]}; export a program per length."
        )


def canonical_groups(group_sizes: Any, first_group: Any, count: int | None) -> Groups:
    """Return the groups in canonical form; raise unless there are `count`, or with `first_group` at least `count`."""
    if first_group is None and isinstance(group_sizes, tuple) and len(group_sizes) == 2 and is_array(group_sizes[0]):
        group_sizes, first_group = group_sizes  # already canonical
    if first_group is None:
        check_sizes(group_sizes, count)
        return cast(jax.Array, group_sizes)
    check_sizes(group_sizes)
    if count is None:
        raise ArgumentError("groups must be the number of groups in the result if first_group is given; got None.")
    if group_sizes.shape[0] < count:
        raise ArgumentError(
            f"group_sizes must have the sizes of all groups, at least the {count} with matrices here; got shape "
            f"{tuple(group_sizes.shape)}."
        )
    return group_sizes, _canonical_first(first_group, group_sizes.shape[0])


def canonical_count(groups: Any) -> int | None:
    """Return the requested number of groups; `None` means all."""
    if groups is not None and (type(groups) is not int or groups < 0):
        raise ArgumentError(f"groups must be an int >= 0, or None; got {given_text(groups)}.")
    return groups


def check_count(groups: int | None, group_sizes: Any, first_group: Any) -> None:
    """Raise an `ArgumentError` if `groups` differs from the number of sizes, and no `first_group` selects them."""
    if first_group is not None or groups is None or not is_array(group_sizes) or len(group_sizes.shape) != 1:
        return
    if group_sizes.shape[0] != groups:
        raise ArgumentError(
            f"groups must be {group_sizes.shape[0]}, the length of group_sizes; got {groups}. For some of the "
            "groups, pass first_group as well."
        )


def _canonical_first(first_group: Any, groups: int) -> Any:
    is_number = type(first_group) is int or (
        is_array(first_group) and jnp.issubdtype(first_group.dtype, jnp.integer) and first_group.shape == ()
    )
    if not is_number:
        shown = f"{first_group.dtype}{list(first_group.shape)}" if is_array(first_group) else repr(first_group)
        raise ArgumentError(f"first_group must be an integer, or an integer array of shape (); got {shown}.")
    if type(first_group) is int and not 0 <= first_group <= groups:
        raise ArgumentError(f"first_group must be from 0 to {groups}, the number of groups; got {first_group}.")
    return first_group if isinstance(first_group, jax.ShapeDtypeStruct) else jnp.asarray(first_group, jnp.int32)


def groups_of_part(part: CallPart, groups: Groups) -> Groups:
    """Return the sizes of the groups in the rows of a shard, and its first group if groups are split."""
    # The start of a group depends on all sizes before it, so each device gets all sizes; they are a few bytes.
    sizes, first = taken_apart(groups)
    if part.is_split("rows"):
        ends = row_ends(groups, part.whole("rows")) - part.start("rows")
        sizes = jnp.diff(jnp.clip(ends, 0, part.length("rows")), prepend=jnp.zeros(1, ends.dtype))
    if part.is_split("groups"):
        first = part.start("groups") + (0 if first is None else first)
    return sizes if first is None else (sizes, first)


def canonical_dtype(preferred: Any, dtype: Any) -> str | None:
    """Return the name of the requested dtype; `None` if it is the dtype of the operands."""
    wanted = canonical_float("preferred_element_type", preferred)
    return None if wanted == str(dtype) else wanted


def said_options(dtype: Any, *, preferred_element_type: Any, precision: Any, **others: Any) -> dict[str, Any]:
    """Return the options of all operations and `others` in canonical form, without defaults, which the key omits."""
    options = {
        "preferred_element_type": canonical_dtype(preferred_element_type, dtype),
        "precision": canonical_precision(precision),
        **others,
    }
    return {name: value for name, value in options.items() if value}
