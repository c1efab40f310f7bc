# SPDX-License-Identifier: Apache-2.0
"""Finding the kernel calls in a function, without running it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ejkernel import compat
from ejkernel.ops.config.policy import looking_only
from ejkernel.ops.core.invocation import Invocation, invocation_of
from ejkernel.ops.core.primitive import Call, call_p
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.registry import recording
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.values.signature import HasType, is_array

logger = logging.getLogger(__name__)


def discover(fn: Callable[..., Any], *args: object, **kwargs: object) -> list[Invocation[Any, Any]]:
    """Return the distinct calls of `fn(*args, **kwargs)`, forward and backward, in the order of lowering.

    Nothing is run, measured or noted on disk, and no policy makes a call without a configuration an error. Arrays may
    be abstract (`jax.ShapeDtypeStruct`). Unless `fn` is under `jax.jit` already, arguments that are not arrays are
    static.

    Raises:
        ArgumentError: `fn` cannot be called.
    """
    return discover_for(fn, args, kwargs)


def discover_for(
    fn: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], *, platform: str | None = None
) -> list[Invocation[Any, Any]]:
    """Return what `discover` returns, of the program that `fn` is on `platform` (`cpu`, `gpu` or `tpu`)."""
    if not callable(fn):
        raise ArgumentError(f"a kernel or a function is needed, got {fn!r}.")
    jitted, values, named = (fn, args, kwargs) if hasattr(fn, "trace") else _of_arrays(fn, args, kwargs)
    # Recording is in the key of JAX's caches: a function that was compiled before is traced anew, and its calls are
    # seen.
    with recording() as seen, looking_only():
        traced = jitted.trace(*values, **named)
        platforms = None if platform is None else compat.lowering_names(platform)
        lowered = traced.lower() if platforms is None else traced.lower(lowering_platforms=platforms)
    # By key, since equal calls may be in several places of a program.
    return list({inv.key: inv for inv in (*seen, *local_calls(lowered))}.values())


def local_calls(lowered: object) -> list[Invocation[Any, Any]]:
    """Return the calls that each device will make for its part, where a lowered program's calls split themselves.

    Such a program says nothing of them: XLA asks for them when it compiles, and knows the shardings then. Here its
    partitioner's first stage runs alone, on a copy.
    """
    # What a user's `trace` lowers to need not be JAX's.
    if not hasattr(lowered, "compiler_ir"):
        return []
    return [
        inv
        for operation in compat.split_operations(lowered)
        for params, avals in operation.calls(call_p)
        for inv in _with_inner_calls(params["call"], avals, operation)
    ]


def _with_inner_calls(
    call: Call, avals: Sequence[HasType], operation: compat.SplitOperation
) -> Iterator[Invocation[Any, Any]]:
    """Yield a part's call, and the calls that its kernel makes, such as those of a gradient rule."""
    own = _invocation(call, avals, operation)
    yield own
    try:
        with call.settings.entered(), compat.on_one_device(), looking_only():
            body = call.host.body_of(call, operation.platform, avals, None)
            inner = compat.calls_of(call_p, body.compute, avals)
    except NameError as error:  # it talks over axes of a mesh that is around its program
        logger.debug("%s: its inner calls are not known: %s", own.op_id, error_text(error))
        return
    for params, types in inner:
        yield from _with_inner_calls(params["call"], types, operation)


def _invocation(call: Call, avals: Sequence[HasType], operation: compat.SplitOperation) -> Invocation[Any, Any]:
    override = None if call.override is None else call.override.config
    with call.settings.entered(), compat.spanning(operation.span):
        return invocation_of(call.node, avals, platform=operation.platform, override=override).abstract()


def _of_arrays(
    fn: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return `fn` as a jitted function of the arrays alone, and these arrays."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    positions = [index for index, leaf in enumerate(leaves) if is_array(leaf)]

    def of_arrays(*arrays: jax.Array) -> Any:
        filled = list(leaves)
        for index, array in zip(positions, arrays, strict=True):
            filled[index] = array
        all_args, all_kwargs = jax.tree.unflatten(tree, filled)
        return fn(*all_args, **all_kwargs)

    return jax.jit(of_arrays), [leaves[index] for index in positions], {}
