# SPDX-License-Identifier: Apache-2.0
"""Tangents: symbolic zeros, and the mesh axes over which tangents vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad


def varying_axes(value: Any) -> frozenset[str]:
    """Return the mesh axes over which `value` may differ between devices, inside `shard_map`."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def match_varying(primal: Any, gradient: Any) -> Any:
    """Return `gradient`, summed over or broadcast to the mesh axes over which `primal` varies.

    The gradient of a replicated argument differs between devices, and the argument's gradient is their sum.
    """
    have, want = varying_axes(gradient), varying_axes(primal)
    if have - want:
        gradient = jax.lax.psum(gradient, tuple(sorted(have - want)))
    if want - have:
        gradient = jax.lax.pcast(gradient, tuple(sorted(want - have)), to="varying")
    return gradient


def zeros_of_tangent(value: Any) -> Any:
    """Return the zero tangent of `value`: `float0` for integers, and varying as `value` does."""
    dtype = jax.typeof(value).to_tangent_aval().dtype
    if dtype == jax.dtypes.float0:
        return np.zeros(value.shape, dtype)
    # Inside `shard_map` a tangent must vary over the same mesh axes as its primal; fresh zeros do not.
    return match_varying(value, jnp.zeros(value.shape, dtype))


def instantiated(aval: Any) -> Any:
    """Return zeros with this abstract value."""
    return ad.instantiate_zeros(ad.Zero(aval))


def is_zero_tangent(tangent: Any) -> bool:
    """Return whether the tangent of a differentiation rule is a symbolic zero."""
    return isinstance(tangent, ad.Zero) or jax.typeof(tangent).dtype == jax.dtypes.float0


def zero_for(value: Any) -> Any:
    """Return the symbolic zero tangent for a result `value` of a differentiation rule."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def without_symbolic_zeros(tangent: Any) -> Any:
    """Return a tangent or cotangent as an array, zeros where it is a symbolic zero."""
    return ad.instantiate_zeros(tangent)


def is_undefined_primal(argument: Any) -> bool:
    """Return whether a transpose rule must return the cotangent of this argument."""
    return bool(ad.is_undefined_primal(argument))


def register_jvp(primitive: Any, rule: Callable[..., tuple[Any, Any]]) -> None:
    """Register the JVP rule `rule(primals, tangents, **params)` of a primitive."""
    ad.primitive_jvps[primitive] = rule


def register_transpose(primitive: Any, rule: Callable[..., Sequence[Any]]) -> None:
    """Register the transpose rule `rule(cotangents, *arguments, **params)` of a primitive."""
    ad.primitive_transposes[primitive] = rule
