# SPDX-License-Identifier: Apache-2.0
"""Options of several operations in canonical form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._numbers import is_integer, is_number
from ejkernel.ops.errors import ArgumentError, ConfigError
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.values.scalars import Takes, given_text, python_numbers
from ejkernel.ops.utils.values.signature import array_fault, is_array, is_known

POSITIVE: Final = range(1, 1 << 62)
# Factors beyond these limits, their inverses and their products with logits may overflow or vanish in float32.
_LEAST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30


def check_values(**arrays: Any) -> None:
    """Raise an `ArgumentError` if an argument is a type without values, or an array that JAX does not support."""
    for name, array in arrays.items():
        fault = array_fault(array)
        if fault:
            raise ArgumentError(f"{name} is {fault}")
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ArgumentError(
                f"{name} is a type without values, {type_text(array)}; pass an array, or use types with jax.eval_shape "
                "or jax.jit(...).lower."
            )


def canonical_flag(name: str, value: Any) -> bool:
    """Return a boolean of Python, NumPy or JAX as a bool."""
    value = value if isinstance(value, bool) else python_numbers(value, Takes.NUMBERS)
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} must be True or False, got {given_text(value)}.")
    return bool(value)


def canonical_float(name: str, value: Any) -> str | None:
    """Return the name of a floating-point dtype; `None` stays."""
    if value is None:
        return None
    try:
        # Unless JAX enables 64-bit types, float64 means float32; equal calls need one key.
        found = jax.dtypes.canonicalize_dtype(value)
    except TypeError as error:
        raise ArgumentError(f"{name} must be a dtype or None, got {value!r}.") from error
    if not jnp.issubdtype(found, jnp.floating):
        raise ArgumentError(f"{name} must be a floating-point dtype, got {found}; pass e.g. float32.")
    return str(found)


def canonical_precision(value: Any) -> str | None:
    """Return the name of a matmul precision in lower case; `None` for JAX's default."""
    if value is None:
        return None
    name = value.name if isinstance(value, jax.lax.Precision) else value
    if not isinstance(name, str) or name.upper() not in jax.lax.Precision.__members__:
        raise ArgumentError(
            f"precision must be one of default, high, highest, a jax.lax.Precision, or None; got {value!r}"
            f"{did_you_mean(value, ('default', 'high', 'highest'))}"
        )
    return name.lower()


def positive(name: str, value: Any) -> float | None:
    """Return a positive number as a float; `None` stays."""
    if value is None:
        return None
    if not (is_integer(value) or is_number(value)) or not 0 < value < math.inf:
        raise ArgumentError(f"{name} must be a positive number or None, got {given_text(value)}.")
    if not _LEAST_FACTOR <= value <= LARGEST_FACTOR:
        raise ArgumentError(
            f"{name} must be between {_LEAST_FACTOR:g} and {LARGEST_FACTOR:g}, as a factor of float32 numbers; "
            f"got {given_text(value)}."
        )
    return float(value)


def canonical_scale(scale: Any, head_dim: Any) -> float:
    """Return the factor on the logits of attention; `head_dim ** -0.5` by default."""
    if scale is None and not is_known(head_dim):
        raise ArgumentError(
            f"softmax_scale must be given where head_dim is symbolic, got None and {head_dim}; it is a number that the "
            "program holds, not one for each head_dim."
        )
    found = positive("softmax_scale", scale)
    return float(head_dim) ** -0.5 if found is None else found


def canonical_sinks(sinks: Any, heads: int, name: str = "sinks") -> Any:
    """Return the logits of the attention sinks, `[heads]`; `name` is that of the argument, for messages."""
    if sinks is None:
        return None
    if not is_array(sinks) or not jnp.issubdtype(sinks.dtype, jnp.floating) or tuple(sinks.shape) != (heads,):
        raise ArgumentError(f"{name} must be a floating-point array [heads] = {(heads,)}; got {type_text(sinks)}.")
    return sinks


def int32(indices: Any) -> Any:
    """Return indices as int32; numbers beyond its limits become these limits, out of range, too.

    A type stays a type, for calls read from a program's text.
    """
    if indices.dtype == jnp.int32:
        return indices
    if isinstance(indices, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(indices.shape, jnp.int32)
    if indices.dtype.itemsize < 4:
        return jnp.asarray(indices).astype(jnp.int32)
    return jnp.asarray(_clipped(indices))


def _clipped(indices: Any) -> Any:
    # Before JAX sees a NumPy array: unless it enables 64-bit types, JAX keeps the lower half of each number.
    library = np if isinstance(indices, np.ndarray) else jnp
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return library.clip(indices, max(least, np.iinfo(indices.dtype).min), most).astype(np.int32)


def has_64_bits(value: Any) -> bool:
    """Return whether a value is a NumPy array of 64-bit integers.

    In an eager call, which is a jitted function of its arguments, JAX keeps the lower half of each number. So the
    functions in `modules` bring such arrays to 32 bits before the call.
    """
    return isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.dtype.itemsize == 8


def within_32_bits(value: Any) -> Any:
    """Return a NumPy array of 64-bit integers with 32 bits, as `int32` does, and any other value unchanged."""
    return _clipped(value) if has_64_bits(value) else value


def type_text(value: Any) -> str:
    """Return the type of an argument for messages, with the shape of an array."""
    return f"{value.dtype}{list(value.shape)}" if is_array(value) else type(value).__name__


def wrong_array(value: Any, dtype: str) -> str:
    """Describe an argument of a wrong dtype, or one that is no array, and how to fix it."""
    if is_array(value):
        return f"dtype {value.dtype}; cast it, e.g. to {dtype}"
    fix = "pass a JAX or NumPy array"
    if hasattr(value, "dequantize"):
        fix = "use its dequantize()"
    elif hasattr(value, "__jax_array__"):
        fix = "pass its array, e.g. head.kernel[...] for a parameter of Flax NNX"
    return f"{type(value).__name__}; {fix}"


def check_parameters(params: Any, **allowed: range | tuple[int, ...] | tuple[str, ...]) -> None:
    """Check launch parameters: the given fields, and all flags.

    Args:
        params: A dataclass. A field with the default `None` may be `None`; one with a boolean default is a flag.
        **allowed: The allowed values of fields, all of one type.

    Raises:
        ConfigError: A field has another value.
    """
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if isinstance(field.default, bool):
            is_allowed, wanted = type(value) is bool, "True or False"
        elif field.name in allowed and not (value is None and field.default is None):
            values = allowed[field.name]
            is_allowed = type(value) is type(values[0]) and value in values
            wanted = _in_words(values, optional=field.default is None)
        else:
            continue
        if not is_allowed:
            raise ConfigError(f"{field.name} must be {wanted}, got {value!r}.")


def _in_words(values: range | tuple[int, ...] | tuple[str, ...], *, optional: bool) -> str:
    if isinstance(values, range):
        multiple = "" if values.step == 1 else f"a multiple of {values.step} "
        found = "a positive integer" if values == POSITIVE else f"{multiple}from {values[0]} to {values[-1]}"
        return f"{found} or None" if optional else found
    *most, last = [*map(repr, values), *(["None"] if optional else [])]
    return f"{', '.join(most)} or {last}" if most else last
