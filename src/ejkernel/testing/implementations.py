# SPDX-License-Identifier: Apache-2.0
"""One implementation of an operation as a kernel, to be checked alone or with the backward of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.operation import Operation, Selected
from ejkernel.ops.utils.fingerprint import device_fingerprint, device_kind


def paired(
    operation: Operation[Any, Any, Any],
    forward: str,
    backward: str | None = None,
    *,
    simulated: bool = False,
    params: tuple[Any, Any] = (None, None),
) -> Operation[Any, Any, Any]:
    """Return the operation with one implementation, and the backward of another if it has none.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import LayerNorm
    >>> from ejkernel.testing import check_kernel
    >>> norm = paired(LayerNorm(), "xla", backward="xla")
    >>> check_kernel(norm, jnp.ones((4, 8)), jnp.ones(8), jnp.ones(8), without=["vmap", "pickle"]).ok
    True

    Args:
        operation: The operation.
        forward: The implementation that runs.
        backward: The implementation whose backward follows; by default its own, or the first for all platforms with the
            same residuals.
        simulated: Whether it runs on a platform that is not its own, through an interpreter.
        params: Parameters of forward and backward; `None`: the heuristic's.

    Raises:
        ArgumentError: No backward takes the residuals of `forward`.
    """
    found = operation.implementations[forward]
    successor = operation.implementations[backward] if backward else _successor(operation, found)
    if operation.why_no_gradient and backward is None:
        successor = found
    elif successor is None or not successor.has_backward() or successor.residuals != found.residuals:
        raise ArgumentError(f"backward must take the residuals of {forward!r}, {found.residuals!r}; got {backward!r}.")
    place = {} if simulated else {"platform": device_kind(), "device_fingerprint": device_fingerprint()}

    def running(_: Any, args: tuple[Any, ...], options: Mapping[str, Any], *, backward: bool = False) -> Selected:
        own = {name: value for name, value in options.items() if name != "implementation"}
        call = dataclasses.replace(operation.describe(*args, **own), backward=backward, **place)
        chosen, given = successor if backward else found, params[backward]
        return Selected(chosen, call, chosen.heuristic(call) if given is None else given)

    config: Any = operation.config_type
    chosen = config(implementation=forward)
    one: Operation[Any, Any, Any] = object.__new__(type(operation))
    # These replace methods, for this object alone.
    hooks = {"_running": running, "heuristic_cfg": lambda _: chosen, "config_space": lambda _: [chosen]}
    vars(one).update(vars(operation) | hooks)
    return one


def _successor(operation: Operation[Any, Any, Any], found: Implementation[Any]) -> Implementation[Any] | None:
    if found.has_backward():
        return found
    implementations = operation.implementations
    others = (implementations[name] for name in implementations if not implementations.platforms(name))
    return next((other for other in others if other.has_backward() and other.residuals == found.residuals), None)
