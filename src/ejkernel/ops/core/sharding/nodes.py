# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of transformed calls, and the transformed call on one shard.

A kernel declares the rule of its forward call. The rules of other calls follow: a gradient has the axes of its
argument, a tangent the axes of its result, and residuals the axes that the rule gives them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.ops.core.hooks import overrides, platform_to_trace_for
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import Factor, Factors, ShardingRule, factors_of
from ejkernel.ops.core.transformations.autodiff import Jvp, Linear, Vjp
from ejkernel.ops.core.transformations.batching import TransposedVmapped, Vmapped
from ejkernel.ops.core.transformations.nodes import Forward, Node, unbatched
from ejkernel.ops.errors import KernelError
from ejkernel.ops.utils.fingerprint import platform_fingerprint
from ejkernel.ops.utils.values.signature import HasType, abstract


def factors(node: Node, arrays: Sequence[HasType]) -> Factors | None:
    """Return the named axes of a call's arguments and results; `None` if its kernel declares none.

    A result that lacks a sharded axis is the sum over shards, for example the gradient of a replicated argument.
    """
    return _factors(node, arrays, 0) if overrides(node.spec.kernel, "sharding_rule") else None


def _factors(node: Node, arrays: Sequence[HasType], depth: int) -> Factors | None:
    if isinstance(node, Forward):
        return _of_forward(node, arrays)
    if isinstance(node, Vmapped):
        return _of_vmapped(node, arrays, depth)
    if isinstance(node, Linear):
        return _of_linear(node, arrays, depth)
    return None  # it takes references, which belong to one device


def _of_forward(node: Forward, arrays: Sequence[HasType]) -> Factors | None:
    kernel = node.spec.kernel
    args, kwargs = node.spec.join([abstract(array) for array in arrays])
    device = platform_fingerprint(platform_to_trace_for(kernel, jax.default_backend()))
    inv = Invocation(kernel=kernel, args=args, kwargs=kwargs, method=node.spec.method, device=device)
    rule = rule_of(kernel, inv)
    return None if rule is None else factors_of(rule, kernel.op_id, arrays, residuals=node.residuals)


def rule_of(kernel: Any, inv: Invocation[Any, Any]) -> ShardingRule | None:
    """Return the sharding rule of a forward call.

    Raises:
        KernelError: The kernel returned something else.
    """
    rule: ShardingRule | None = kernel.sharding_rule(inv)
    if rule is not None and not isinstance(rule, ShardingRule):
        raise KernelError(f"{kernel.op_id}: sharding_rule must return a ShardingRule or None, got {rule!r}.")
    return rule


def _of_vmapped(node: Vmapped, arrays: Sequence[HasType], depth: int) -> Factors | None:
    axes = node.argument_axes(len(arrays))
    found = _factors(node.of, list(map(unbatched, arrays, axes)), depth + 1)
    if found is None:
        return None
    # Examples on a named axis may communicate; and without a batched argument a shard does not know its batch size.
    may_split = node.level.axis_name is None and any(axis is not None for axis in axes)
    name = f"vmap{depth}" if may_split else None
    out_axes = _axes_of_results(node, len(found.results))
    if name is None and None in out_axes:
        return None  # such a gradient is a sum over all examples
    return dataclasses.replace(
        found,
        operands=tuple(map(_with_axis, found.operands, axes, [name] * len(axes))),
        results=tuple(map(_with_axis, found.results, out_axes, [name] * len(found.results))),
        splittable=found.splittable | ({name} if name else set()),
    )


def _of_linear(node: Linear, arrays: Sequence[HasType], depth: int) -> Factors | None:
    lead = node.num_saved
    own_arrays = arrays[lead : lead + node.count]
    own = _factors(node.of, own_arrays, depth)
    if own is None:
        return None
    saved: tuple[tuple[Factor, ...], ...] = ()
    if lead:
        forward = _factors(Forward(node.spec, residuals=True), own_arrays, depth)
        if forward is None:
            return None
        saved = forward.results
    arguments = tuple(names for names, has in zip(own.operands, node.wrt, strict=True) if has)
    results = tuple(names for names, has in zip(own.results, node.outs, strict=True) if has)
    given, found = (results, arguments) if isinstance(node, Vjp) else (arguments, results)
    return dataclasses.replace(own, operands=(*saved, *own.operands, *given), results=found)


def local(node: Any, arrays: Sequence[HasType]) -> Any:
    """Return the node of one shard, with arguments of the types `arrays` and smaller batches."""
    if isinstance(node, Vmapped):
        axes = node.argument_axes(len(arrays))
        sizes = (array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
        size = next(sizes, node.level.size)
        # one device has no mesh with an axis of this name
        level = dataclasses.replace(node.level, size=size, spmd_axis_name=None)
        of = local(node.of, list(map(unbatched, arrays, axes)))
        return dataclasses.replace(node, of=of, level=level)
    if isinstance(node, Linear):
        own = arrays[node.num_saved : node.num_saved + node.count]
        return dataclasses.replace(node, of=local(node.of, own))
    return node


def specs_of_gradients(
    node: Node, specs: Sequence[tuple[Any, ...]], found: Sequence[tuple[Any, ...]]
) -> list[tuple[Any, ...]] | None:
    """Return the shardings of a call's results if they are gradients or their tangents, with the types of primals.

    Args:
        node: The call.
        specs: The sharding of each argument, with an entry for each axis.
        found: The sharding of each result without regard to primals, which decides about batch axes.

    Returns:
        An entry for each axis of each result; `None` for other results.
    """
    positions = _primals(node)
    if isinstance(node, Jvp) and positions is not None:  # a gradient is floating-point, so each one has a tangent
        return specs_of_gradients(node.of, specs[: node.count], found)
    if positions is None or not isinstance(node, Vmapped):
        return None if positions is None else [specs[position] for position in positions]
    axes, out_axes = node.argument_axes(len(specs)), _axes_of_results(node, len(found))
    inner = specs_of_gradients(
        node.of, list(map(_without_axis, specs, axes)), list(map(_without_axis, found, out_axes))
    )
    entries = [None if axis is None else spec[axis] for spec, axis in zip(found, out_axes, strict=True)]
    if isinstance(node, TransposedVmapped):  # the gradient of a batched argument has its type, the batch axis included
        pairs = zip(positions, entries, strict=True)
        entries = [entry if (axis := axes[own]) is None else specs[own][axis] for own, entry in pairs]
    return None if inner is None else list(map(_with_axis, inner, out_axes, entries))


def _primals(node: Node) -> list[int] | None:
    """Return the positions of the arguments whose gradients, or their tangents, are the results; `None` for others."""
    if isinstance(node, Vmapped | Jvp):
        return _primals(node.of)
    if not isinstance(node, Vjp):
        return None
    return [node.num_saved + index for index, has in enumerate(node.wrt) if has]


def _axes_of_results(node: Vmapped, count: int) -> Sequence[int | None]:
    """Return the batch axis of each result."""
    return node.level.axes[node.linear_from :] if isinstance(node, TransposedVmapped) else [0] * count


def _without_axis(names: tuple[Any, ...], axis: int | None) -> tuple[Any, ...]:
    return names if axis is None else (*names[:axis], *names[axis + 1 :])


def _with_axis(names: tuple[Any, ...], axis: int | None, name: Any) -> tuple[Any, ...]:
    return names if axis is None else (*names[:axis], name, *names[axis:])
