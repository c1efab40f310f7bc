# SPDX-License-Identifier: Apache-2.0
"""The primitive `ejkernel_call`: a kernel's call that JAX carries through its transformations unopened.

Its configuration is resolved in its lowering rule, where everything that decides is known at last: the axes of every
enclosing `vmap`, the platform, the overlay in force - and only what really runs arrives there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from ejkernel import compat
from ejkernel.compat import ad
from ejkernel.ops.core.derived import Level, LinearVmapped, Vmapped, differentiate, innermost
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import has_residual_form, hook, overrides, platform_to_trace_for
from ejkernel.ops.core.nodes import Choice, Forward, Node, is_inexact
from ejkernel.ops.errors import NoConfigError


class Host(Protocol):
    """Who runs a call: an executor."""

    @property
    def generation(self) -> int:
        """A number that changes when eager programs must be compiled again."""

    def lower_call(
        self, call: Call, platform: str, expected: Sequence[Any] | None, arrays: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Resolve the call's configuration, compute it, and check the results against the `expected` types."""

    def choose_for_types(self, inv: Invocation[Any, Any]) -> Any:
        """Return any configuration for a kernel that has no heuristic."""


@dataclasses.dataclass(frozen=True)
class Override:
    """The configuration that a caller insists on; equal by type and content."""

    token: Any
    config: Any = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Call:
    """The primitive's parameter: all of a call but its arrays.

    Attributes:
        host: The executor.
        node: What is computed.
        linear: How many of the last arguments the call is linear in.
        override: The configuration that the caller insists on, for the call and its gradients.
    """

    host: Host
    node: Node
    linear: int = 0
    override: Override | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Types:
    """What is known of a call before it has a configuration."""

    avals: Sequence[Any]
    effects: Any
    trees: tuple[Any, ...]


call_p = compat.Primitive("ejkernel_call")
call_p.multiple_results = True


def types_of(call: Call, avals: Sequence[Any]) -> Types:
    """Return the result types, effects and structure of `call`, with any valid configuration and no measurement."""
    function, trees = _typed_function(call)
    out_avals, effects = compat.typed_jaxpr(function, avals)
    return Types(out_avals, effects, trees.get(_shapes(avals), ()))


def _shapes(avals: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((aval.shape, aval.dtype) for aval in avals)


@functools.lru_cache(maxsize=1024)
def _typed_function(call: Call) -> tuple[Callable[..., Any], dict[tuple[Any, ...], tuple[Any, ...]]]:
    trees: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    platform = platform_to_trace_for(call.node.spec.kernel, jax.default_backend())

    def typed(*arrays: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        pick = functools.partial(_config_for_types, call, platform)
        out = call.node.flat(Choice(platform=platform, config_for_types=pick, trees=found))(*arrays)
        trees[_shapes(arrays)] = tuple(found)
        return out

    return jax.jit(typed), trees  # jit remembers the trace under everything that it depends on


def _config_for_types(call: Call, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if call.override is not None:
        return call.override.config
    kernel = call.node.spec.kernel
    inv = Invocation(kernel=kernel, args=args, kwargs=kwargs, method=call.node.spec.method).abstract()
    try:
        return hook(kernel, "heuristic_cfg", platform)(inv)
    except NoConfigError:
        return call.host.choose_for_types(inv)


def _abstract_eval(*avals: Any, call: Call) -> tuple[Sequence[Any], Any]:
    types = types_of(call, avals)
    return types.avals, types.effects


@functools.lru_cache(maxsize=4096)
def _eager(call: Call, generation: int) -> Callable[..., Any]:
    del generation  # a part of the key: a new one makes a new function, which is lowered anew
    return jax.jit(lambda *arrays: call_p.bind(*arrays, call=call))


def _impl(*arrays: Any, call: Call) -> Sequence[Any]:
    if compat.jit_disabled():
        return _run(call, (jax.default_backend(),), None, *arrays)
    return list(_eager(call, call.host.generation)(*arrays))


def _run(call: Call, platforms: Sequence[str], expected: Sequence[Any] | None, *arrays: Any) -> Sequence[Any]:
    if len(platforms) == 1:
        return call.host.lower_call(call, platforms[0], expected, arrays)
    branches = {platform: functools.partial(_run, call, (platform,), expected) for platform in platforms}
    out: Sequence[Any] = compat.run_on_platform(branches, *arrays)
    return out


def _lower(ctx: Any, *values: Any, call: Call) -> Any:
    run = functools.partial(_run, call, compat.lowering_platforms(ctx), ctx.avals_out)
    return compat.lower_function(ctx, run, *values)


call_p.def_effectful_abstract_eval(_abstract_eval)
call_p.def_impl(_impl)
compat.mlir.register_lowering(call_p, _lower)


def _batch(axis_data: Any, arrays: Sequence[Any], axes: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    if all(axis is None for axis in axes):  # also called when nothing is batched
        out = call_p.bind(*arrays, call=call)
        return out, [None] * len(out)
    # vmap's own default name is a bare object: only names that somebody gave are passed on
    name = axis_data.name if isinstance(axis_data.name, str) else None
    level = Level(axis_data.size, tuple(axes), name, axis_data.spmd_name)
    node: Node = (
        LinearVmapped(call.node, level, len(arrays) - call.linear) if call.linear else Vmapped(call.node, level)
    )
    out = call_p.bind(*arrays, call=dataclasses.replace(call, node=node))
    return out, [0] * len(out)


compat.batching.fancy_primitive_batchers[call_p] = _batch


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    wrt = tuple(not compat.is_zero_tangent(tangent) for tangent in tangents)
    fixed = len(primals) - call.linear
    if call.linear and not any(wrt[:fixed]):
        given = [ad.instantiate_zeros(tangent) for tangent in tangents[fixed:]]
        out = call_p.bind(*primals, call=call)
        return out, call_p.bind(*primals[:fixed], *given, call=call)
    return _differentiate(primals, [t for t, has in zip(tangents, wrt, strict=True) if has], wrt, call)


def _differentiate(
    primals: Sequence[Any], tangents: Sequence[Any], wrt: tuple[bool, ...], call: Call
) -> tuple[Any, Any]:
    avals = [jax.typeof(p) for p in primals]
    trees = residual_trees(call, avals)
    plain_types = types_of(call, avals)
    outs = tuple(is_inexact(aval) for aval in plain_types.avals)
    forward, linear = differentiate(call.node, wrt, outs, trees)
    results = call_p.bind(*primals, call=dataclasses.replace(call, node=forward))
    out, saved = results[: len(outs)], results if trees is not None else ()
    derived = dataclasses.replace(call, node=linear, linear=len(tangents))
    found = iter(call_p.bind(*saved, *primals, *tangents, call=derived) if any(outs) else ())
    return out, [next(found) if has else compat.zero_for(value) for value, has in zip(out, outs, strict=True)]


def residual_trees(call: Call, avals: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return the structures of output and residuals, if the call is a forward whose kernel has the residual form."""
    root = innermost(call.node)
    kernel = call.node.spec.kernel
    if not isinstance(root, Forward) or root.residuals or overrides(kernel, "custom_vjp"):
        return None
    if not has_residual_form(kernel):
        return None
    with_residuals, _ = differentiate(call.node, (False,) * len(avals), (), _EMPTY_TREES)
    probe = dataclasses.replace(call, node=with_residuals)
    out_tree, residual_tree = types_of(probe, avals).trees
    return out_tree, residual_tree


_EMPTY_TREES = (jax.tree.structure(()), jax.tree.structure(()))
ad.primitive_jvps[call_p] = _jvp


def _transpose(cotangents: Sequence[Any], *arguments: Any, call: Call) -> list[Any]:
    fixed = len(arguments) - call.linear
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    transposed = dataclasses.replace(call, node=call.node.transpose, linear=len(given))
    return [None] * fixed + list(call_p.bind(*arguments[:fixed], *given, call=transposed))


ad.primitive_transposes[call_p] = _transpose
