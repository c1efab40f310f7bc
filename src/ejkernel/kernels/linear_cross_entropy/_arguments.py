# SPDX-License-Identifier: Apache-2.0
"""Checks and canonical forms of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._numbers import is_integer, is_number
from ejkernel.kernels._options import (
    LARGEST_FACTOR,
    canonical_flag,
    canonical_float,
    canonical_precision,
    positive,
    wrong_array,
)
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.values.scalars import given_text
from ejkernel.ops.utils.values.signature import is_array

from .common import GRADIENTS, STATISTICS


def check_operands(x: Any, weight: Any, labels: Any, bias: Any, *, transpose_weight: bool) -> None:
    """Raise an `ArgumentError` unless the arrays fit together."""
    kinds: list[Any] = [x.dtype if is_array(x) else None for x in (weight, labels)]
    if None not in kinds and jnp.issubdtype(kinds[0], jnp.integer) and jnp.issubdtype(kinds[1], jnp.floating):
        raise ArgumentError("weight and labels are in each other's place; the order is (x, weight, labels).")
    _check_floating("x", x, "[*batch, d]", 1)
    axes = "[V, d]" if transpose_weight else "[d, V]"
    _check_floating("weight", weight, axes, 0)
    if len(weight.shape) != 2:
        raise ArgumentError(f"weight must be {axes}, got shape {tuple(weight.shape)}; reshape it.")
    if x.dtype != weight.dtype:
        raise ArgumentError(f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}; cast one of them.")
    inner, columns = (weight.shape[1], weight.shape[0]) if transpose_weight else weight.shape
    if x.shape[-1] != inner:
        transposed = inner != columns and x.shape[-1] == columns
        hint = f"; pass transpose_weight={not transpose_weight}" if transposed else ""
        raise ArgumentError(
            f"weight must be {axes} with d = {x.shape[-1]}, the last axis of x, got shape {tuple(weight.shape)}{hint}."
        )
    if is_integer(columns) and columns < 1:
        raise ArgumentError(f"weight must have a column of logits at least, got shape {tuple(weight.shape)}.")
    check_labels(labels, x)
    if bias is None:
        return
    _check_floating("bias", bias, "[V]", 1)
    if tuple(bias.shape) != (columns,):
        raise ArgumentError(f"bias must be [V] = {(columns,)}, got shape {tuple(bias.shape)}.")


def check_labels(labels: Any, x: Any) -> None:
    """Raise an `ArgumentError` unless `labels` has an integer for each row of `x`."""
    if not is_array(labels) or not jnp.issubdtype(labels.dtype, jnp.integer):
        got = f"dtype {labels.dtype}" if is_array(labels) else type(labels).__name__
        one_hot = is_array(labels) and len(labels.shape) == len(x.shape)
        fix = "pass labels.argmax(-1) for one-hot labels" if one_hot else "cast them, e.g. to int32"
        raise ArgumentError(f"labels must be an array of integers [*batch], got {got}; {fix}.")
    if tuple(labels.shape) != tuple(x.shape[:-1]):
        raise ArgumentError(
            f"labels must have the shape of x without its last axis, {tuple(x.shape[:-1])}, got {tuple(labels.shape)}."
        )


def check_token_weights(token_weights: Any, x: Any) -> None:
    """Raise an `ArgumentError` unless there is a weight for each row of `x`."""
    if not is_array(token_weights) or not (
        jnp.issubdtype(token_weights.dtype, jnp.floating)
        or jnp.issubdtype(token_weights.dtype, jnp.integer)
        or token_weights.dtype == np.bool_
    ):
        got = f"dtype {token_weights.dtype}" if is_array(token_weights) else type(token_weights).__name__
        raise ArgumentError(f"token_weights must be an array of numbers or booleans [*batch], got {got}.")
    if tuple(token_weights.shape) != tuple(x.shape[:-1]):
        raise ArgumentError(
            f"token_weights must have the shape of x without its last axis, {tuple(x.shape[:-1])}, got "
            f"{tuple(token_weights.shape)}; broadcast them."
        )


def _check_floating(name: str, array: Any, axes: str, least: int) -> None:
    if not is_array(array) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError(f"{name} must be a floating-point array {axes}, got {wrong_array(array, 'bfloat16')}.")
    if len(array.shape) < least:
        raise ArgumentError(f"{name} must be {axes}, got shape {tuple(array.shape)}.")


def canonical_options(
    *,
    transpose_weight: Any = False,
    label_smoothing: Any = 0.0,
    z_loss: Any = 0.0,
    logits_soft_cap: Any = None,
    logits_scale: Any = None,
    accumulation_dtype: Any = None,
    precision: Any = None,
    memory_limit: Any = None,
    vocab_axis: Any = None,
) -> dict[str, Any]:
    """Return the options in canonical form, without defaults, which the key omits."""
    scale = positive("logits_scale", logits_scale)
    options = {
        "transpose_weight": canonical_flag("transpose_weight", transpose_weight),
        "label_smoothing": fraction("label_smoothing", label_smoothing),
        "z_loss": nonnegative("z_loss", z_loss),
        "logits_soft_cap": positive("logits_soft_cap", logits_soft_cap),
        "logits_scale": None if scale == 1 else scale,
        "accumulation_dtype": canonical_float("accumulation_dtype", accumulation_dtype),
        "precision": canonical_precision(precision),
        "memory_limit": canonical_limit(memory_limit),
    }
    # The mesh axes are present in every call: the representative of a bucket has the same options as the call.
    said = {name: value for name, value in options.items() if value}
    return said | {"vocab_axis": ",".join(canonical_axis(vocab_axis))}


def nonnegative(name: str, value: Any) -> float:
    """Return a non-negative number as a float."""
    if not is_number(value) or not 0 <= value <= LARGEST_FACTOR:
        raise ArgumentError(f"{name} must be a number from 0 to {LARGEST_FACTOR:g}, got {given_text(value)}.")
    return float(value)


def fraction(name: str, value: Any) -> float:
    """Return a number from 0 to 1 as a float."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ArgumentError(f"{name} must be a number from 0 to 1, got {given_text(value)}.")
    return float(value)


def canonical_limit(value: Any) -> int | None:
    """Return a number of bytes."""
    if value is None:
        return None
    if not is_integer(value) or value < 1:
        raise ArgumentError(f"memory_limit must be a number of bytes >= 1, or None, got {given_text(value)}.")
    return int(value)


def canonical_axis(value: Any) -> tuple[str, ...]:
    """Return the names of mesh axes as a tuple."""
    names = () if value is None else value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"vocab_axis must be the name of a mesh axis, several names, or None, got {value!r}.")
    return tuple(name for name in names if name)


def canonical_names(name: str, values: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return some of the known names, in their order."""
    unknown = [value for value in values if value not in known]
    if unknown:
        raise ArgumentError(
            f"{name} must be some of {', '.join(known)}; got {values!r}{did_you_mean(unknown[0], known)}"
        )
    return tuple(value for value in known if value in values)


def canonical_statistics(values: Any) -> tuple[str, ...]:
    """Return the optional statistics, in order."""
    return canonical_names("statistics", values, STATISTICS)


def canonical_gradients(values: Any) -> tuple[str, ...]:
    """Return the names of the gradients, in order."""
    return canonical_names("gradients", values, GRADIENTS)
