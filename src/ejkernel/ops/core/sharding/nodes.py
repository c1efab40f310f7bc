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
from ejkernel.ops.core.transformations.autodiff import Linear, ResidualVjp, ThroughResiduals, Vjp
from ejkernel.ops.core.transformations.batching import TransposedVmapped, Vmapped, unbatched
from ejkernel.ops.core.transformations.nodes import Forward, Node
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
    rule = kernel.sharding_rule(
        Invocation(kernel=kernel, args=args, kwargs=kwargs, method=node.spec.method, device=device)
    )
    if rule is None:
        return None
    if not isinstance(rule, ShardingRule):
        raise KernelError(f"{kernel.op_id}: sharding_rule must return a ShardingRule or None, got {rule!r}.")
    return factors_of(rule, kernel.op_id, arrays, residuals=node.residuals)


def _of_vmapped(node: Vmapped, arrays: Sequence[HasType], depth: int) -> Factors | None:
    axes = node.argument_axes(len(arrays))
    found = _factors(node.of, list(map(unbatched, arrays, axes)), depth + 1)
    if found is None:
        return None
    # Examples on a named axis may communicate; and without a batched argument a shard does not know its batch size.
    may_split = node.level.axis_name is None and any(axis is not None for axis in axes)
    name = f"vmap{depth}" if may_split else None
    out_axes: Sequence[int | None] = [0] * len(found.results)
    if isinstance(node, TransposedVmapped):
        out_axes = node.level.axes[node.original.linear_from :]
    if name is None and None in out_axes:
        return None  # such a gradient is a sum over all examples
    return dataclasses.replace(
        found,
        operands=tuple(map(_with_axis, found.operands, axes, [name] * len(axes))),
        results=tuple(map(_with_axis, found.results, out_axes, [name] * len(found.results))),
        splittable=found.splittable | ({name} if name else set()),
    )


def _of_linear(node: Linear, arrays: Sequence[HasType], depth: int) -> Factors | None:
    lead = node.lead if isinstance(node, ThroughResiduals) else 0
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
    given, found = (results, arguments) if isinstance(node, Vjp | ResidualVjp) else (arguments, results)
    return dataclasses.replace(own, operands=(*saved, *own.operands, *given), results=found)


def local(node: Any, arrays: Sequence[HasType]) -> Any:
    """Return the node of one shard, with arguments of the types `arrays` and smaller batches."""
    if isinstance(node, Vmapped):
        axes = node.argument_axes(len(arrays))
        sizes = [array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None]
        size = sizes[0] if sizes else node.level.size
        # one device has no mesh with an axis of this name
        level = dataclasses.replace(node.level, size=size, spmd_axis_name=None)
        of = local(node.of, list(map(unbatched, arrays, axes)))
        part = dataclasses.replace(node, of=of, level=level)
        if not isinstance(part, TransposedVmapped):
            return part
        return dataclasses.replace(part, original=dataclasses.replace(part.original, of=of.transpose, level=level))
    if isinstance(node, Linear):
        lead = node.lead if isinstance(node, ThroughResiduals) else 0
        return dataclasses.replace(node, of=local(node.of, arrays[lead : lead + node.count]))
    return node


def primals_of_gradients(node: Node, arrays: Sequence[HasType]) -> list[HasType] | None:
    """Return the arguments whose gradients are the call's results; `None` if the results are not gradients."""
    if isinstance(node, TransposedVmapped):
        return primals_of_gradients(node.of, arrays)
    if not isinstance(node, Vjp | ResidualVjp):
        return None
    lead = node.lead if isinstance(node, ResidualVjp) else 0
    return [array for array, has in zip(arrays[lead : lead + node.count], node.wrt, strict=True) if has]


def _with_axis(names: tuple[Factor, ...], axis: int | None, name: Factor) -> tuple[Factor, ...]:
    return names if axis is None else (*names[:axis], name, *names[axis:])
