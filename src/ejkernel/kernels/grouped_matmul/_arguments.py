# SPDX-License-Identifier: Apache-2.0
"""The arguments of grouped products: checked, and brought into one form."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from ejkernel.kernels._options import canonical_precision
from ejkernel.ops.core.sharding.parts import CallPart
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.scalars import given_text
from ejkernel.ops.utils.values.signature import is_array, is_known

from .common import Groups, row_ends, taken_apart


def check_operand(name: str, array: Any, axes: str) -> None:
    """Raise unless an operand is a floating-point array with as many axes as `axes` names."""
    if not is_array(array) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError(
            f"{name} must be a floating-point array {axes}, got {_other_than_asked(array, 'bfloat16')}."
        )
    if len(array.shape) != len(axes.split(",")):
        raise ArgumentError(f"{name} must be {axes}, got shape {tuple(array.shape)}; reshape it.")


def _other_than_asked(value: Any, dtype: str) -> str:
    """Return what an argument is instead of an array of such a dtype, and what to do."""
    if is_array(value):
        return f"dtype {value.dtype}; cast it, such as to {dtype}"
    return f"{type(value).__name__}; pass an array of JAX's or NumPy's"


def check_product(lhs: Any, rhs: Any, *, transpose_rhs: bool) -> None:
    """Raise unless these are rows, and a matrix for each group that they can be multiplied with."""
    check_operand("lhs", lhs, "[m, k]")
    check_operand("rhs", rhs, "[groups, n, k]" if transpose_rhs else "[groups, k, n]")
    check_pair(lhs, rhs, (1, 2 if transpose_rhs else 1), f"have one k where transpose_rhs is {transpose_rhs}")


def check_gate(gate: Any, rhs: Any) -> None:
    """Raise unless the gate's matrices are as those of `rhs` are."""
    check_operand("gate", gate, "[groups, k, n]")
    if (gate.shape, gate.dtype) != (rhs.shape, rhs.dtype):
        raise ArgumentError(
            f"gate must have rhs's shape and dtype, {tuple(rhs.shape)} and {rhs.dtype}; got {tuple(gate.shape)} and "
            f"{gate.dtype}."
        )


def check_row_scale(row_scale: Any, lhs: Any) -> None:
    """Raise unless there is a factor for each row."""
    check_operand("row_scale", row_scale, "[m]")
    if row_scale.shape[0] != lhs.shape[0]:
        raise ArgumentError(
            f"row_scale must have a number for each row of lhs; got shapes {tuple(row_scale.shape)} and "
            f"{tuple(lhs.shape)}."
        )


def check_pair(lhs: Any, rhs: Any, axes: tuple[int, int], what: str) -> None:
    """Raise unless the operands have one dtype, and one length along these axes."""
    if lhs.dtype != rhs.dtype:
        raise ArgumentError(f"lhs and rhs must have one dtype, got {lhs.dtype} and {rhs.dtype}; cast one of them.")
    if lhs.shape[axes[0]] != rhs.shape[axes[1]]:
        shapes = f"{tuple(lhs.shape)} and {tuple(rhs.shape)}"
        raise ArgumentError(
            f"lhs and rhs must {what}; got shapes {shapes}, of which axes {axes[0]} and {axes[1]} differ."
        )


def check_sizes(group_sizes: Any, groups: int | None = None) -> None:
    """Raise unless sizes are integers, one for each group."""
    if not is_array(group_sizes) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        got = _other_than_asked(group_sizes, "int32")
        raise ArgumentError(f"group_sizes must be an array of integers [groups], got {got}.")
    if len(group_sizes.shape) != 1 or groups not in (None, group_sizes.shape[0]):
        wanted = "[groups]" if groups is None else f"[{groups}], one for each matrix of rhs"
        some = len(group_sizes.shape) == 1 and groups is not None and group_sizes.shape[0] > groups
        more = "; if rhs has some of the groups alone, say with first_group which" if some else ""
        raise ArgumentError(f"group_sizes must be {wanted}; got shape {tuple(group_sizes.shape)}{more}.")
    if not is_known(group_sizes.shape[0]):
        raise ArgumentError(
            f"group_sizes must have a length that is a number, got {group_sizes.shape[0]}; export for one of each."
        )


def canonical_groups(group_sizes: Any, first_group: Any, count: int | None) -> Groups:
    """Return the groups in the form in which a call has them; raise unless they are `count`, or contain as many."""
    if first_group is None and isinstance(group_sizes, tuple) and len(group_sizes) == 2 and is_array(group_sizes[0]):
        group_sizes, first_group = group_sizes  # of a call of ours
    if first_group is None:
        check_sizes(group_sizes, count)
        return cast(jax.Array, group_sizes)
    check_sizes(group_sizes)
    if count is None:
        raise ArgumentError("groups must be how many groups the result is of, with first_group; got None.")
    if group_sizes.shape[0] < count:
        raise ArgumentError(
            f"group_sizes must be of all groups, of which {count} have matrices here; got shape "
            f"{tuple(group_sizes.shape)}."
        )
    return group_sizes, _canonical_first(first_group, group_sizes.shape[0])


def canonical_count(groups: Any) -> int | None:
    """Return how many groups a call is asked for; `None`: all."""
    if groups is not None and (type(groups) is not int or groups < 0):
        raise ArgumentError(f"groups must be an int >= 0, or None; got {given_text(groups)}.")
    return groups


def check_count(groups: int | None, group_sizes: Any, first_group: Any) -> None:
    """Raise unless it is said which groups a result of some of them is of."""
    if first_group is not None or groups is None or not is_array(group_sizes) or len(group_sizes.shape) != 1:
        return
    if group_sizes.shape[0] != groups:
        raise ArgumentError(
            f"groups must be {group_sizes.shape[0]}, as many as group_sizes has, or come with first_group, which says "
            f"which they are; got {groups}."
        )


def _canonical_first(first_group: Any, groups: int) -> Any:
    is_number = type(first_group) is int or (
        is_array(first_group) and jnp.issubdtype(first_group.dtype, jnp.integer) and first_group.shape == ()
    )
    if not is_number:
        shown = f"{first_group.dtype}{list(first_group.shape)}" if is_array(first_group) else repr(first_group)
        raise ArgumentError(f"first_group must be an integer, or an array of one without axes; got {shown}.")
    if type(first_group) is int and not 0 <= first_group <= groups:
        raise ArgumentError(f"first_group must be from 0 to {groups}, the number of groups; got {first_group}.")
    return first_group if isinstance(first_group, jax.ShapeDtypeStruct) else jnp.asarray(first_group, jnp.int32)


def groups_of_part(part: CallPart, groups: Groups) -> Groups:
    """Return the sizes that groups have in the rows of a part, and which is its first where it has some of them."""
    # A group begins where all before it end, so that every device has all sizes, which are a few bytes.
    sizes, first = taken_apart(groups)
    if part.is_split("rows"):
        ends = row_ends(groups, part.whole("rows")) - part.start("rows")
        sizes = jnp.diff(jnp.clip(ends, 0, part.length("rows")), prepend=jnp.zeros(1, ends.dtype))
    if part.is_split("groups"):
        first = part.start("groups") + (0 if first is None else first)
    return sizes if first is None else (sizes, first)


def canonical_dtype(preferred: Any, dtype: Any) -> str | None:
    """Return the name of the dtype that is asked for, `None` where that is the operands' own."""
    if preferred is None:
        return None
    try:
        # Without 64 bits JAX has float32 for float64, and equal calls have one key.
        wanted = jax.dtypes.canonicalize_dtype(preferred)
    except TypeError as error:
        raise ArgumentError(f"preferred_element_type must be a dtype or None, got {preferred!r}.") from error
    if not jnp.issubdtype(wanted, jnp.floating):
        raise ArgumentError(f"preferred_element_type must be a floating-point dtype, got {wanted}.")
    return None if wanted == dtype else str(wanted)


def said_options(dtype: Any, *, preferred_element_type: Any, precision: Any, **others: Any) -> dict[str, Any]:
    """Return what all operations are told, and `others`, in one form; what says nothing is left out of the key."""
    options = {
        "preferred_element_type": canonical_dtype(preferred_element_type, dtype),
        "precision": canonical_precision(precision),
        **others,
    }
    return {name: value for name, value in options.items() if value}
