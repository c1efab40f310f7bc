# SPDX-License-Identifier: Apache-2.0
"""The primitive `ejkernel_call`: a kernel call that stays opaque to JAX's transformations.

Its lowering rule resolves the configuration. Only lowering knows the axes of every enclosing `vmap`, the platform and
the overlay in force, and only calls that really run are lowered. See docs/design.md for the alternatives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.ad_checkpoint import checkpoint_name

from ejkernel import compat
from ejkernel.ops.core.context import Settings
from ejkernel.ops.core.hooks import (
    has_gradient_rule,
    has_residual_form,
    overrides,
    platform_to_trace_for,
    writes_residual_form,
)
from ejkernel.ops.core.invocation import Invocation, config_for_types
from ejkernel.ops.core.sharding.lowering import Extent, explicit_split, lower_split
from ejkernel.ops.core.transformations.autodiff import Discharged, Jvp, all_tangents, differentiate, innermost
from ejkernel.ops.core.transformations.batching import AxisName, Level, LinearVmapped, Vmapped
from ejkernel.ops.core.transformations.nodes import Choice, Forward, Node
from ejkernel.ops.errors import ArgumentError, EjkernelError, GradientError, KernelError
from ejkernel.ops.utils.fingerprint import default_device, platform_of
from ejkernel.ops.utils.values.identity import Strong, by_is
from ejkernel.ops.utils.values.signature import HasType, is_inexact
from ejkernel.ops.utils.weak_caches import Bounded, PerObject


@dataclasses.dataclass(frozen=True)
class Override:
    """The configuration that a caller passes as `cfg=`; compared by type and content."""

    token: Any
    config: Any = dataclasses.field(compare=False)  # not necessarily hashable


@dataclasses.dataclass(frozen=True)
class Call:
    """The primitive's parameter: a call without its arrays.

    Attributes:
        host: A function that returns the executor, which resolves and runs calls; its package imports this one.
        node: The computation.
        linear: The number of trailing arguments in which the call is linear.
        override: The caller's `cfg=`, for the call and its gradients.
        settings: The settings in force where the call was made; its gradients use the same settings.
        extent: Whether the arrays are whole arrays or shards, in a program for several devices.
    """

    host: Callable[[], Any]
    node: Node
    linear: int = 0
    override: Override | None = None
    settings: Settings = dataclasses.field(default_factory=Settings)
    extent: Extent = Extent.WHOLE

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")  # JAX hashes a call at every lookup in its caches
        if known is None:
            parts = (self.host, self.node, self.linear, self.override, self.settings, self.extent)
            known = self.__dict__["_hash"] = hash(parts)
        return known

    def bind_part(self, node: Node, extent: Extent, arrays: Sequence[Any]) -> Sequence[Any]:
        """Bind the same call with another node, on arrays of the given extent."""
        return cast("Sequence[Any]", call_p.bind(*arrays, call=dataclasses.replace(self, node=node, extent=extent)))

    @functools.cached_property
    def weak(self) -> Call:
        """An equal call for long-lived caches: it keeps neither executor nor kernel nor the user's objects alive.

        JAX keeps a jaxpr as long as its function, and the jaxpr keeps the call, so this call must not keep the kernel.
        Traces for programs use strong references: otherwise a kernel that `run` creates would be collected before its
        trace is lowered.
        """
        host = by_is(self.host()) if isinstance(self.host, Strong) else self.host
        return dataclasses.replace(self, host=host, node=self.node.with_spec(self.node.spec.weak()))


@dataclasses.dataclass(slots=True)
class Types:
    """Types and effects of a call whose configuration is not resolved yet.

    Attributes:
        trees: Structure of the output, and of the residuals, if any.
        config: The configuration of the trace.
        platform: The platform whose hooks were traced.
        answers: Answers about the program that the trace depends on.
        jaxpr: The traced computation.
        effects: Its effects.
        avals: Types of the results.
        gathered: Whether a kernel without a sharding rule gets whole arrays, because JAX rejects sharded ones.
    """

    trees: list[Any] = dataclasses.field(default_factory=list)
    config: Any = None
    platform: str = ""
    answers: compat.programs.Answers = dataclasses.field(default_factory=dict)
    jaxpr: Any = None
    effects: Any = None
    avals: Sequence[HasType] = ()
    gathered: bool = False


call_p = compat.tracing.Primitive("ejkernel_call")
call_p.multiple_results = True


_Traces = Bounded[Types]  # by the types of the arguments and the context of the trace
_traces: PerObject[Bounded[_Traces]] = PerObject(Bounded)  # traces live as long as their kernel
_eager: PerObject[Bounded[tuple[int, Callable[..., Any]]]] = PerObject(Bounded)


def types_of(call: Call, avals: Sequence[HasType]) -> Types:
    """Return the result types, effects and structure of `call`, with any valid configuration and no measurement.

    Raises:
        ArgumentError: The kernel uses a traced array that is not among its arguments.
    """
    known = known_types(call, avals)  # a hit has the call's settings; entering them takes several times as long
    if known is not None:
        return known
    with call.settings.entered():
        known = known_types(call, avals)
        if known is not None:
            return known
        mesh = compat.tracing.explicit_mesh(avals) if call.extent is Extent.WHOLE else None
        found = _traced(call.weak, avals) if mesh is None else _traced_over(mesh, call.weak, avals)
        traces = _traces.of(call.node.spec.kernel).keep(call.weak, Bounded())
        return traces.keep((tuple(avals), compat.tracing.trace_context()), found)


def known_types(call: Call, avals: Sequence[HasType]) -> Types | None:
    """Return the cached result of `types_of`, or `None`."""
    found = _traces.of(call.node.spec.kernel).get(call.weak)
    return None if found is None else found.get((tuple(avals), compat.tracing.trace_context()))


def _traced_over(mesh: Any, call: Call, avals: Sequence[HasType]) -> Types:
    """Trace a call on arrays that are sharded over the explicit axes of a mesh."""
    may_split = overrides(call.node.spec.kernel, "sharding_rule")
    if not may_split:
        try:
            return _traced(call, avals)
        except Exception as error:
            if not compat.partitioning.rejects_shardings(error):  # otherwise the kernel gets whole arrays
                raise
    # JAX rejects some operations on arrays sharded over explicit axes, such as `dynamic_update_slice`. So trace with
    # whole arrays, and then add the shardings of the split to the result types.
    with jax.sharding.use_abstract_mesh(mesh):
        types = _traced(call, [compat.partitioning.whole(aval) for aval in avals])
    split = explicit_split(call.node, avals, types.avals)
    return dataclasses.replace(types, avals=split.typed(types.avals), gathered=not may_split)


def _traced(call: Call, avals: Sequence[HasType]) -> Types:
    platform = platform_to_trace_for(call.node.spec.kernel, jax.default_backend())
    types = Types(platform=platform)

    def pick() -> tuple[Any, str]:
        insisted = None if call.override is None else call.override.config
        spec = call.node.spec
        args, kwargs = spec.join(call.node.example_types(avals))
        inv: Invocation[Any, Any] = Invocation(
            kernel=spec.kernel, args=args, kwargs=kwargs, method=spec.method, override_cfg=insisted
        )
        types.config, types.platform = config_for_types(inv, platform, call.host().resolve)
        return types.config, types.platform

    def as_call(node: Node) -> Callable[..., Any]:
        return functools.partial(call_p.bind, call=dataclasses.replace(call, node=node, linear=0))

    choice = Choice(platform=platform, config_for_types=pick, as_call=as_call, trees=types.trees)
    # Use the platform of this process, even for a call inside a kernel being lowered for another platform.
    with compat.programs.program_under_way(answers=types.answers):
        jaxpr = compat.tracing.traced(call.node.flat(choice), avals)
    # JAX transforms only the arguments of a call: a closed-over tracer would lose its gradient and batch axis.
    foreign = [jax.typeof(const) for const in jaxpr.consts if isinstance(const, jax.core.Tracer)]
    if foreign:
        raise _closed_over(call, foreign)
    types.jaxpr, types.effects, types.avals = jaxpr, compat.tracing.outer_effects(jaxpr), jaxpr.out_avals
    if not types.avals and not types.effects and isinstance(call.node, Forward):
        raise KernelError(f"{call.node.spec.kernel.op_id}: run returned no array and has no effect; add its `return`.")
    return types


def _closed_over(call: Call, avals: Sequence[HasType]) -> ArgumentError:
    kernel = call.node.spec.kernel
    shown = ", ".join(str(aval) for aval in avals)
    return ArgumentError(
        f"{kernel.op_id}: the kernel uses a traced array that is not among its arguments, {shown}: it was closed over, "
        "or is part of the kernel or of a static argument; pass it as an argument of the call."
    )


def _abstract_eval(*avals: HasType, call: Call) -> tuple[Sequence[HasType], Any]:
    types = types_of(call, avals)
    return types.avals, types.effects


def _impl(*arrays: jax.Array, call: Call) -> Sequence[Any]:
    if compat.settings.avoids_jit():  # a jitted function would call this function forever
        return _compute(call, platform_of(arrays), *arrays)
    # Calls under an eager `vmap` or gradient come here. When an earlier configuration no longer applies, the
    # generation changes, and the program compiled for the old generation is dropped.
    compiled, weak, generation = _eager.of(call.node.spec.kernel), call.weak, call.host().generation
    found = compiled.get(weak)
    if found is None or found[0] != generation:
        # JAX keeps the trace as long as the function, so the function must not keep the kernel alive.
        found = generation, jax.jit(lambda *arrays: call_p.bind(*arrays, call=weak))
        compiled.replace(weak, found)
    return list(found[1](*arrays))


def _compute(call: Call, platform: str, *arrays: jax.Array) -> Sequence[Any]:
    avals = [jax.typeof(array) for array in arrays]
    return cast("Sequence[Any]", call.host().body_of(call, platform, avals, None).compute(*arrays))


def _lower(ctx: Any, *values: Any, call: Call) -> Any:
    platforms = ctx.module_context.platforms
    if len(platforms) > 1:
        return compat.programs.lower_each_platform(ctx, functools.partial(_lower, call=call), *values)
    # A program may be lowered outside the `with` block, or on another thread, than its trace.
    with (
        call.settings.entered(),
        compat.programs.program_under_way(ctx),
        compat.programs.pointing_at_the_call(EjkernelError),
    ):
        if call.extent is Extent.LOCAL:
            with compat.partitioning.on_one_device():
                return _lower_here(compat.partitioning.without_frames(ctx), *values, call=call, platform=platforms[0])
        is_explicit = call.extent is Extent.WHOLE and compat.tracing.explicit_mesh(ctx.avals_in) is not None
        if not is_explicit and not compat.programs.is_partitioned():
            return _lower_here(ctx, *values, call=call, platform=platforms[0])
        gathered = is_explicit and types_of(call, ctx.avals_in).gathered
        out = lower_split(ctx, values, call, gathered=gathered)
        try:
            return _lower_here(ctx, *values, call=call, platform=platforms[0]) if out is None else out
        except Exception as error:
            if not compat.partitioning.rejects_shardings(error):
                raise
            # From a gradient rule, which is traced only now: the types of its results came from the arguments.
            if (out := lower_split(ctx, values, call, gathered=True)) is None:
                raise
            return out


def _lower_here(ctx: Any, *values: Any, call: Call, platform: str) -> Any:
    # Equal calls of a program come here once: JAX caches the lowering of the first call. With this cache a single call
    # lowers 4 % slower, and 24 equal calls take as long as plain JAX's, instead of 2.6 times as long.
    body = call.host().body_of(call, platform, ctx.avals_in, ctx.avals_out)
    if body.jaxpr is None:
        return _lower_computed(ctx, body, call, *values)
    out = compat.programs.lower_jaxpr(ctx, body.jaxpr, body.inv.op_id, *values)
    body.label(out, values)
    return out


def _lower_computed(ctx: Any, body: Any, call: Call, *values: object) -> Any:
    try:
        return compat.programs.lower_function(ctx, body.compute, *values)
    except KeyError as error:  # JAX's error for an undeclared ordered effect
        if not call.linear or not compat.tracing.ordered_effects(body.compute, ctx.avals_in):
            raise
        raise GradientError(
            f"{body.inv.op_id}: the gradient rule has ordered effects (such as jax.debug.print(..., ordered=True)), "
            "which JAX does not support here; make them unordered, or move them into run."
        ) from error


call_p.def_effectful_abstract_eval(_abstract_eval)
call_p.def_impl(_impl)
compat.programs.register_lowering(call_p, _lower)


def _batch(axis_data: Any, arrays: Sequence[object], axes: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    named = compat.tracing.is_named(axis_data.name)
    alike = all(axis is None for axis in axes)  # JAX calls this rule also when no argument is batched
    # A call without batched arguments may still contain a collective over this `vmap`'s axis name.
    if alike and not (named and axis_data.name in _axes_of(call, [jax.typeof(array) for array in arrays])):
        out = call_p.bind(*arrays, call=call)
        return out, [None] * len(out)
    level = Level(axis_data.size, tuple(axes), AxisName(axis_data.name) if named else None, axis_data.spmd_name)
    node: Node = (
        LinearVmapped(call.node, level, len(arrays) - call.linear) if call.linear else Vmapped(call.node, level)
    )
    out = call_p.bind(*arrays, call=dataclasses.replace(call, node=node))
    return out, [0] * len(out)


def _axes_of(call: Call, avals: Sequence[HasType]) -> set[Any]:
    """Return the axis names of the collectives in the call."""
    node = call.node
    if not call.linear:
        return compat.tracing.named_axes(types_of(call, avals).effects)
    # The trace for a linear call's types omits its computation.
    own = avals[node.lead : node.lead + node.spec.num_arrays]
    forward = types_of(dataclasses.replace(call, node=node.forward, linear=0), own)
    computation = jax.jit(node.flat(Choice(config=forward.config, platform=forward.platform)))
    with call.settings.entered(), compat.programs.program_under_way():  # as in the trace for types
        whole = compat.tracing.traced(computation, avals)
    return compat.tracing.named_axes(forward.effects) | compat.tracing.named_axes(compat.tracing.outer_effects(whole))


compat.tracing.register_batching(call_p, _batch)


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    wrt = tuple(not compat.tracing.is_zero_tangent(tangent) for tangent in tangents)
    # A function linear in all varying arguments is its own derivative.
    if call.linear and not any(wrt[: -call.linear]):
        given = [compat.tracing.without_symbolic_zeros(tangent) for tangent in tangents[-call.linear :]]
        out = call_p.bind(*primals, call=call)
        return out, call_p.bind(*primals[: -call.linear], *given, call=call)
    return _differentiate(primals, [t for t, has in zip(tangents, wrt, strict=True) if has], wrt, call)


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], wrt: tuple[bool, ...], call: Call
) -> tuple[Any, Any]:
    avals = [jax.typeof(p) for p in primals]
    if any(map(compat.tracing.is_reference, avals)):
        # JAX differentiates writes to a reference only if the value is independent of the differentiated arguments.
        # An opaque call cannot show that, and an inlined call would have another key than the tuned call.
        raise GradientError(
            f"{call.node.spec.kernel.op_id}: a call that takes a reference (jax.Ref) has no gradient; pass the "
            "reference's value, and write the result back outside."
        )
    trees = residual_trees(call, avals)
    plain_types = types_of(call, avals)
    if compat.tracing.observable(plain_types.effects) and not has_gradient_rule(call.node.spec.kernel):
        return _differentiate_inline(primals, tangents, wrt, call)
    outs = tuple(is_inexact(aval) for aval in plain_types.avals)
    forward, linear = differentiate(call.node, wrt, outs, trees)
    results = call_p.bind(*primals, call=dataclasses.replace(call, node=forward))
    if trees is not None:  # here, because a policy of `jax.checkpoint` sees only the program's own equations
        _check_outputs(call, (plain_types.trees[0], plain_types.avals), (trees[0], results[: trees[0].num_leaves]))
        results = _named(results, len(outs), call.node.spec.kernel.op_id)
    out, saved = results[: len(outs)], results if trees is not None else ()
    derived = dataclasses.replace(call, node=linear, linear=len(tangents))
    found = iter(call_p.bind(*saved, *primals, *tangents, call=derived) if any(outs) else ())
    return out, [next(found) if has else compat.tracing.zero_for(value) for value, has in zip(out, outs, strict=True)]


def _check_outputs(call: Call, plain: tuple[Any, Sequence[HasType]], saving: tuple[Any, Sequence[HasType]]) -> None:
    """Check that a forward returns the same structure and types with and without residuals."""
    is_same = plain[0] == saving[0]  # then their numbers of arrays are equal
    if is_same and all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(plain[1], saving[1], strict=True)):
        return
    if not writes_residual_form(call.node.spec.kernel):  # both are `run`; static values may be new in each trace
        return
    raise KernelError(
        f"{call.node.spec.kernel.op_id}: the forward with residuals returns {_outputs_text(*saving)}, without them "
        f"{_outputs_text(*plain)}: `fwd_with_residuals` and `run`, or an implementation's `forward` and `output`, must "
        "return outputs of the same structure, shapes and dtypes."
    )


def _outputs_text(tree: Any, types: Sequence[HasType]) -> str:
    """Return the structure of outputs with their types; it creates no object of a class that may check its fields."""
    text = str(tree).removeprefix("PyTreeDef(").removesuffix(")")
    for each in types:
        text = text.replace("*", f"{each.dtype}{list(each.shape)}", 1)
    return text


def _named(results: Sequence[object], count: int, op_id: str) -> list[Any]:
    """Return outputs and residuals with checkpoint names, so that a policy of `jax.checkpoint` can save them."""
    names = (f"{op_id}.out" if index < count else f"{op_id}.residuals" for index in range(len(results)))
    return [checkpoint_name(value, name) for value, name in zip(results, names, strict=True)]


def _differentiate_inline(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], wrt: tuple[bool, ...], call: Call
) -> tuple[Any, Any]:
    """Differentiate the call inline, without the primitive: a second forward would repeat its effects."""
    # The platform is known inside a kernel being lowered; elsewhere, assume the default platform.
    platform = compat.programs.lowered_platform() or default_device().platform
    with call.settings.entered():
        compute = functools.partial(_compute, call, platform)
        given = all_tangents(primals, tangents, wrt)
        out, found = jax.jvp(lambda *arrays: tuple(compute(*arrays)), tuple(primals), given)
    pairs = zip(out, found, strict=True)
    return list(out), [compat.tracing.zero_for(v) if compat.tracing.is_zero_tangent(t) else t for v, t in pairs]


def residual_trees(call: Call, avals: Sequence[HasType]) -> tuple[Any, Any] | None:
    """Return the structures of output and residuals, if the call is a forward of a kernel with the residual form."""
    root = innermost(call.node)
    kernel = call.node.spec.kernel
    if not isinstance(root, Forward) or root.residuals or overrides(kernel, "custom_vjp"):
        return None
    if not has_residual_form(kernel):
        return None
    out_tree, residual_tree = types_of(dataclasses.replace(call, node=call.node.with_residuals()), avals).trees
    return out_tree, residual_tree


compat.tracing.register_jvp(call_p, _jvp)


def _transpose(cotangents: Sequence[object], *arguments: object, call: Call) -> list[Any]:
    if not call.linear:
        return _transpose_forward(cotangents, arguments, call)
    fixed = len(arguments) - call.linear
    given = [compat.tracing.without_symbolic_zeros(cotangent) for cotangent in cotangents]
    transposed = dataclasses.replace(call, node=call.node.transpose, linear=len(given))
    return [None] * fixed + list(call_p.bind(*arguments[:fixed], *given, call=transposed))


def _transpose_forward(cotangents: Sequence[object], arguments: Sequence[Any], call: Call) -> list[Any]:
    """Transpose a call that is linear in the wanted arguments: its gradient at zero, as at any other point."""
    wanted = tuple(compat.tracing.is_undefined_primal(argument) for argument in arguments)
    pairs = zip(arguments, wanted, strict=True)
    primals = [compat.tracing.instantiated(argument.aval) if unknown else argument for argument, unknown in pairs]
    given = [ct for ct in map(compat.tracing.without_symbolic_zeros, cotangents) if ct.dtype != jax.dtypes.float0]
    outs = tuple(is_inexact(aval) for aval in types_of(call, [jax.typeof(primal) for primal in primals]).avals)
    node = Jvp(call.node, len(primals), wanted, outs).transpose
    found = iter(call_p.bind(*primals, *given, call=dataclasses.replace(call, node=node, linear=len(given))))
    return [next(found) if unknown else None for unknown in wanted]


def _discharge(in_avals: Sequence[HasType], *arrays: jax.Array, call: Call) -> tuple[list[Any], Sequence[Any]]:
    references = tuple(map(compat.tracing.is_reference, in_avals))
    out = call_p.bind(*arrays, call=dataclasses.replace(call, node=Discharged(call.node, references)))
    after = iter(out[len(out) - sum(references) :])
    return [next(after) if is_reference else None for is_reference in references], out[: len(out) - sum(references)]


# JAX's cache of abstract evaluation would keep every call, and so its kernel, alive forever.
compat.tracing.cache_weakly(Call)
compat.tracing.register_discharge(call_p, _discharge)
compat.tracing.register_transpose(call_p, _transpose)
