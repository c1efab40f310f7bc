# SPDX-License-Identifier: Apache-2.0
"""Custom gradients of layers, without tangents or second derivatives: these raise an error that says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ejkernel import compat
from ejkernel.ops.errors import UnsupportedError


def once(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gradient rule; a derivative of its results raises an error."""

    @functools.wraps(rule)
    def found(recipe: Any, *args: Any) -> Any:
        return rule(recipe, *_of_first_gradient(*args))

    return found


@jax.custom_jvp
def _of_first_gradient(*args: Any) -> Any:
    return args


@_of_first_gradient.defjvp
def _no_second_derivative(*_: Any) -> Any:
    raise UnsupportedError(
        "quantized_dense and quantized_grouped_dense have no second derivative, because their gradient rounds to 8 "
        "bits. Use x @ w or grouped_matmul in what is differentiated twice, or pass jax.lax.stop_gradient of all "
        "arguments to the inner gradient."
    )


# An argument of a layer, which has gradients but no tangents, and its tangent. Gradients transpose the tangent;
# computing it raises this error before JAX's own, which names neither the layer nor what to do. `jax.custom_jvp` would
# also batch the tangents of gradients; with primitives, `vmap` batches a tangent only if it is computed.
_argument_p = compat.tracing.Primitive("quantized_dense_argument")
_tangent_p = compat.tracing.Primitive("quantized_dense_tangent")


def by_gradients(array: jax.Array) -> jax.Array:
    """Return an argument of a layer, which has gradients but no tangents."""
    found: jax.Array = _argument_p.bind(array)
    return found


def _with_tangent(primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    return _argument_p.bind(*primals), _tangent_p.bind(*tangents)


def _no_tangents(*_: Any) -> Any:
    raise UnsupportedError(
        "quantized_dense and quantized_grouped_dense have no tangents (jax.jvp, jax.jacfwd, jax.linearize), because "
        "their gradient is a rule of its own, with matmuls in 8 bits. Use jax.grad, jax.vjp or jax.jacrev, or x @ w or "
        "grouped_matmul in what needs tangents."
    )


_argument_p.def_abstract_eval(lambda array: array)
_argument_p.def_impl(lambda array: array)
compat.programs.register_lowering(_argument_p, lambda _, array: [array])
compat.tracing.register_jvp(_argument_p, _with_tangent)
compat.tracing.register_batching(_argument_p, lambda _, arrays, axes: (_argument_p.bind(*arrays), axes[0]))
_tangent_p.def_abstract_eval(lambda tangent: tangent)
_tangent_p.def_impl(_no_tangents)
compat.programs.register_lowering(_tangent_p, _no_tangents)
compat.tracing.register_jvp(_tangent_p, _no_tangents)
compat.tracing.register_transpose(_tangent_p, lambda cotangent, _: [cotangent])
compat.tracing.register_batching(_tangent_p, _no_tangents)
