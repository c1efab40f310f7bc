# SPDX-License-Identifier: Apache-2.0
"""The primitive `ejkernel_call`: a kernel's call that JAX carries through its transformations unopened.

Its lowering rule resolves the configuration: only there are the axes of every enclosing `vmap`, the platform and the
overlay in force known, and only calls that really run arrive there. See docs/design.md for the alternatives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
from jax.ad_checkpoint import checkpoint_name

from ejkernel import compat
from ejkernel.ops.core.context import Settings, settings_in_force
from ejkernel.ops.core.hooks import has_gradient_rule, has_residual_form, overrides, platform_to_trace_for
from ejkernel.ops.core.invocation import Invocation, config_for_types
from ejkernel.ops.core.sharding.lowering import Part, SplitCall, explicit_split, lower_split
from ejkernel.ops.core.sharding.nodes import has_rule
from ejkernel.ops.core.transformations.autodiff import Discharged, Jvp, differentiate, innermost, with_spec
from ejkernel.ops.core.transformations.batching import AxisName, Level, LinearVmapped, Vmapped
from ejkernel.ops.core.transformations.nodes import Choice, Forward, Node, is_inexact, zero_tangent
from ejkernel.ops.errors import ArgumentError, GradientError
from ejkernel.ops.utils.fingerprint import default_device, platform_kind, platform_of
from ejkernel.ops.utils.values.identity import Held, Strong, held_weakly
from ejkernel.ops.utils.values.signature import HasType, abstract_tree
from ejkernel.ops.utils.weak_caches import Bounded, PerObject


# Protocols, for whoever runs calls and puts their bodies together is on a floor above.
class Body(Protocol):
    """A call with its configuration: what is put in the primitive's place."""

    @property
    def jaxpr(self) -> Any:
        """The computation, where the trace that gave its types is it; else `None`."""

    @property
    def scope(self) -> str:
        """The name that the computation has for people who read profiles."""

    def compute(self, *arrays: Any) -> Sequence[Any]:
        """Compute it, label included."""

    def label(self, values: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Label what was made of `jaxpr`: results and arguments are values of the program's text."""


class Host(Protocol):
    """Who runs a call: an executor."""

    @property
    def generation(self) -> int:
        """A number that changes when eager programs must be compiled again."""

    def body_of(
        self,
        call: Call,
        platform: str,
        avals: Sequence[HasType],
        expected: Sequence[HasType] | None,
    ) -> Body:
        """Resolve the call's configuration; what it computes is checked against the `expected` types."""

    def digest_of(self, call: Call, platform: str, avals: Sequence[HasType]) -> str:
        """Return what stands for a call that splits itself, and for all that decides how its parts run."""

    def choose_for_types(self, inv: Invocation[Any, Any]) -> Any:
        """Return any configuration for a kernel that has no heuristic."""


@dataclasses.dataclass(frozen=True)
class Override:
    """The configuration that a caller insists on; equal by type and content."""

    token: Any
    config: Any = dataclasses.field(compare=False)  # it need not be hashable


@dataclasses.dataclass(frozen=True)
class Call:
    """The primitive's parameter: all of a call but its arrays.

    Attributes:
        held: The executor, behind a function.
        node: What is computed.
        linear: How many of the last arguments the call is linear in.
        override: The configuration that the caller insists on, for the call and its gradients.
        settings: What was in force where the call was made; its gradients are computed under the same.
        part: What its arrays are, in a program for several devices.
    """

    held: Held
    node: Node
    linear: int = 0
    override: Override | None = None
    settings: Settings = dataclasses.field(default_factory=settings_in_force)
    part: Part = Part.WHOLE

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property  # JAX asks for it with every look into its caches
    def _hash(self) -> int:
        return hash((self.held, self.node, self.linear, self.override, self.settings, self.part))

    @property
    def host(self) -> Host:
        """The executor."""
        return cast(Host, self.held())

    @functools.cached_property
    def weak(self) -> Call:
        """The same for what outlives the call: it keeps neither executor nor kernel nor the user's objects alive.

        JAX keeps a jaxpr as long as its function, and the jaxpr keeps the call, which must not keep the kernel then.
        What is traced for a program holds them all the same: a kernel that `run` makes for itself would be gone when
        the trace that calls it is lowered.
        """
        held = held_weakly(self.held()) if isinstance(self.held, Strong) else self.held
        return dataclasses.replace(self, held=held, node=with_spec(self.node, self.node.spec.weak()))


def call_of(host: Host, node: Node, override: Override | None = None) -> Call:
    """Return the call of a node under what is in force."""
    return Call(Strong(host), node, override=override)


@dataclasses.dataclass(slots=True)
class _Found:
    """What a trace for types left: structures of its results, its configuration, and what it asked of the program."""

    trees: list[Any] = dataclasses.field(default_factory=list)
    config: Any = None
    platform: str = ""
    answers: compat.Answers = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """What is known of a call before it has a configuration.

    Attributes:
        jaxpr: The computation that its types were taken from.
        effects: Its effects.
        platform: The platform whose hooks it is of.
        avals: Types of the results.
        gathered: Whether a kernel without a rule gets whole arrays, for JAX refused those that are sharded.
    """

    jaxpr: Any
    effects: Any
    platform: str
    avals: Sequence[HasType]
    found: _Found
    gathered: bool = False

    @property
    def trees(self) -> tuple[Any, ...]:
        """Structure of the output, and of residuals if there are any."""
        return tuple(self.found.trees)

    @property
    def config(self) -> Any:
        """The configuration of the trace."""
        return self.found.config

    def still_hold(self, platform: str) -> bool:
        """Return whether a trace for the program that is being lowered would be the same, with that configuration."""
        answers = self.found.answers.items()
        return platform_kind(self.platform) == platform and all(question() == said for question, said in answers)


call_p = compat.Primitive("ejkernel_call")
call_p.multiple_results = True


class _Traces:
    """A call's traces for its types, under everything that they depend on."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.platform = platform_to_trace_for(call.node.spec.kernel, jax.default_backend())
        self.known: Bounded[Types] = Bounded()

    def of(self, avals: Sequence[HasType]) -> Types:
        key = (tuple(avals), compat.trace_context())
        known = self.known.get(key)
        return self.known.keep(key, self._traced(avals)) if known is None else known

    def _traced(self, avals: Sequence[HasType]) -> Types:
        mesh = compat.explicit_mesh(avals) if self.call.part is Part.WHOLE else None
        if mesh is None:
            return self._traced_as_it_is(avals)
        may_split = has_rule(self.call.node.spec.kernel)
        if not may_split:
            with contextlib.suppress(compat.ShardingTypeError):  # it gets whole arrays if JAX refuses those in parts
                return self._traced_as_it_is(avals)
        # JAX refuses some operations on arrays that are sharded over explicit axes, such as `dynamic_update_slice`:
        # types are found for whole arrays, and get the shardings of the split.
        with jax.sharding.use_abstract_mesh(mesh):
            types = self._traced_as_it_is([compat.whole(aval) for aval in avals])
        split = explicit_split(self.call.node, avals, types.avals)
        return dataclasses.replace(types, avals=split.typed(types.avals), gathered=not may_split)

    def _traced_as_it_is(self, avals: Sequence[HasType]) -> Types:
        found = _Found()  # for each trace: two threads may be here at once
        # Types are those of this process's platform, also of a call inside a kernel that is being lowered for another.
        with compat.not_lowering():
            jaxpr = compat.traced(functools.partial(self._typed, found), avals)
        # JAX transforms what a call is given: a tracer that comes in by another way has no gradient and no batch axis.
        foreign = [jax.typeof(const) for const in jaxpr.consts if isinstance(const, jax.core.Tracer)]
        if foreign:
            raise _closed_over(self.call, foreign)
        return Types(
            jaxpr=jaxpr,
            effects=compat.outer_effects(jaxpr),
            platform=found.platform or self.platform,
            avals=jaxpr.out_avals,
            found=found,
        )

    def _typed(self, found: _Found, *arrays: jax.Array) -> tuple[Any, ...]:
        def pick(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Any, str]:
            call, (args, kwargs) = self.call, abstract_tree((args, kwargs))
            insisted = None if call.override is None else call.override.config
            spec = call.node.spec
            inv = Invocation(kernel=spec.kernel, args=args, kwargs=kwargs, method=spec.method, override_cfg=insisted)
            found.config, found.platform = config_for_types(inv, self.platform, call.host.choose_for_types)
            return found.config, found.platform

        def as_call(node: Node) -> Callable[..., Any]:
            return functools.partial(call_p.bind, call=dataclasses.replace(self.call, node=node, linear=0))

        choice = Choice(platform=self.platform, config_for_types=pick, as_call=as_call, trees=found.trees)
        with compat.noting_answers(found.answers):
            return self.call.node.flat(choice)(*arrays)


_traces: PerObject[Bounded[_Traces]] = PerObject(Bounded)  # what was traced for a kernel goes with it
_eager: PerObject[Bounded[tuple[int, Callable[..., Any]]]] = PerObject(Bounded)


def types_of(call: Call, avals: Sequence[HasType]) -> Types:
    """Return the result types, effects and structure of `call`, with any valid configuration and no measurement.

    Raises:
        ArgumentError: the kernel computes with a traced array that is not among its arguments.
    """
    traces = _traces.of(call.node.spec.kernel)
    found = traces.get(call.weak)
    if found is None:
        found = traces.keep(call.weak, _Traces(call.weak))
    known = found.known.get((tuple(avals), compat.trace_context()))  # which has the call's settings, if it is there
    if known is not None:
        return known
    with call.settings.entered():
        return found.of(avals)


def known_types(call: Call, avals: Sequence[HasType]) -> Types | None:
    """Return what `types_of` found before, if it was asked."""
    found = _traces.of(call.node.spec.kernel).get(call.weak)
    return None if found is None else found.known.get((tuple(avals), compat.trace_context()))


def _closed_over(call: Call, avals: Sequence[HasType]) -> ArgumentError:
    kernel = call.node.spec.kernel
    shown = ", ".join(str(aval) for aval in avals)
    return ArgumentError(
        f"{kernel.op_id}: a traced array that is not among the arguments is used, {shown}: it was closed over, or is "
        "part of the kernel or of a static argument; pass it as an argument of the call."
    )


def _abstract_eval(*avals: HasType, call: Call) -> tuple[Sequence[HasType], Any]:
    types = types_of(call, avals)
    return types.avals, types.effects


def _impl(*arrays: jax.Array, call: Call) -> Sequence[Any]:
    if compat.jit_disabled() or compat.looks_for_nans():  # a jitted function would come back here for ever
        return _compute(call, platform_of(arrays), *arrays)
    # Calls under an eager `vmap` or gradient get here. When an answer that was given before no longer holds, the
    # generation changes, and the program compiled for the old one is dropped.
    compiled, weak, generation = _eager.of(call.node.spec.kernel), call.weak, call.host.generation
    found = compiled.get(weak)
    if found is None or found[0] != generation:
        # JAX keeps what it traced as long as the function, which must not keep the kernel.
        found = generation, jax.jit(lambda *arrays: call_p.bind(*arrays, call=weak))
        compiled.replace(weak, found)
    return list(found[1](*arrays))


def _compute(call: Call, platform: str, *arrays: jax.Array) -> Sequence[Any]:
    avals = [jax.typeof(array) for array in arrays]
    return call.host.body_of(call, platform, avals, None).compute(*arrays)


def _lower(ctx: Any, *values: Any, call: Call) -> Any:
    platforms = compat.lowering_platforms(ctx)
    if len(platforms) > 1:
        return compat.lower_each_platform(ctx, functools.partial(_lower, call=call), *values)
    # A program may be lowered in another block, or on another thread, than it was traced in.
    with call.settings.entered(), compat.lowering(ctx):
        if call.part is Part.LOCAL:
            with compat.on_one_device():
                return _lower_here(ctx, *values, call=call, platform=platforms[0])
        digest = functools.partial(call.host.digest_of, call, platforms[0], ctx.avals_in)
        parts = SplitCall(call.node, call.part, functools.partial(_bind_part, call), digest)
        out = lower_split(ctx, values, parts, gathered=_is_gathered(call, ctx.avals_in))
        try:
            return _lower_here(ctx, *values, call=call, platform=platforms[0]) if out is None else out
        except compat.ShardingTypeError:  # of a gradient rule, which runs only now: its types are its arguments'
            if (out := lower_split(ctx, values, parts, gathered=True)) is None:
                raise
            return out


def _lower_here(ctx: Any, *values: Any, call: Call, platform: str) -> Any:
    # Equal calls of a program come here once: JAX keeps what the first becomes, and repeats it. A call that is there
    # once takes 4 % longer for it, and 24 equal ones as long as plain JAX's, rather than 2.6 times that.
    body = call.host.body_of(call, platform, ctx.avals_in, ctx.avals_out)
    if body.jaxpr is None:
        return _lower_computed(ctx, body, call, *values)
    out = compat.lower_jaxpr(ctx, body.jaxpr, body.scope, *values)
    body.label(out, values)
    return out


def _is_gathered(call: Call, avals: Sequence[HasType]) -> bool:
    whole = call.part is Part.WHOLE and compat.explicit_mesh(avals) is not None
    return whole and types_of(call, avals).gathered


def _bind_part(call: Call, node: Node, part: Part, arrays: Sequence[Any]) -> Sequence[Any]:
    return cast("Sequence[Any]", call_p.bind(*arrays, call=dataclasses.replace(call, node=node, part=part)))


def _lower_computed(ctx: Any, body: Body, call: Call, *values: object) -> Any:
    try:
        return compat.lower_function(ctx, body.compute, *values)
    except KeyError as error:  # what JAX says of an ordered effect that it was not told of
        if not call.linear or not compat.ordered_effects(body.compute, ctx.avals_in):
            raise
        raise GradientError(
            f"{body.scope}: the gradient rule has ordered effects (such as jax.debug.print(..., ordered=True)), which "
            "a program's order has no place for; make them unordered, or move them into run."
        ) from error


call_p.def_effectful_abstract_eval(_abstract_eval)
call_p.def_impl(_impl)
compat.register_lowering(call_p, _lower)


def _batch(axis_data: Any, arrays: Sequence[object], axes: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    named = compat.is_named(axis_data.name)
    alike = all(axis is None for axis in axes)  # also called when nothing is batched
    # Left out of this `vmap`, a collective over its name would find another axis of that name, or none.
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
    """Return the names of axes that collectives in the call go over."""
    node = call.node
    if not call.linear:
        return compat.named_axes(types_of(call, avals).effects)
    # The trace that gives a linear call's types leaves its computation out.
    own = avals[node.lead : node.lead + node.spec.num_arrays]
    forward = types_of(dataclasses.replace(call, node=node.forward, linear=0), own)
    with call.settings.entered(), compat.not_lowering():  # as the types were found, whose configuration this is
        whole = compat.traced(jax.jit(node.flat(Choice(config=forward.config, platform=forward.platform))), avals)
    return compat.named_axes(forward.effects) | compat.named_axes(compat.outer_effects(whole))


compat.register_batching(call_p, _batch)


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    wrt = tuple(not compat.is_zero_tangent(tangent) for tangent in tangents)
    fixed = len(primals) - call.linear
    if call.linear and not any(wrt[:fixed]):  # linear in all that varies, it is its own derivative
        given = [compat.without_symbolic_zeros(tangent) for tangent in tangents[fixed:]]
        out = call_p.bind(*primals, call=call)
        return out, call_p.bind(*primals[:fixed], *given, call=call)
    return _differentiate(primals, [t for t, has in zip(tangents, wrt, strict=True) if has], wrt, call)


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], wrt: tuple[bool, ...], call: Call
) -> tuple[Any, Any]:
    avals = [jax.typeof(p) for p in primals]
    if any(map(compat.is_reference, avals)):
        # JAX differentiates what writes to one where the value does not depend on what is differentiated, which of a
        # call that is not opened cannot be told; in the open it would have another key than the call that is tuned.
        raise GradientError(
            f"{call.node.spec.kernel.op_id}: a call that takes a reference (jax.Ref) has no gradient; pass the "
            "reference's value, and write the result back outside."
        )
    trees = residual_trees(call, avals)
    plain_types = types_of(call, avals)
    if compat.observable(plain_types.effects) and not has_gradient_rule(call.node.spec.kernel):
        return _through(primals, tangents, wrt, call)
    outs = tuple(is_inexact(aval) for aval in plain_types.avals)
    forward, linear = differentiate(call.node, wrt, outs, trees)
    results = call_p.bind(*primals, call=dataclasses.replace(call, node=forward))
    if trees is not None:  # here, since a policy of `jax.checkpoint` looks at the program's own equations alone
        results = _named(results, len(outs), call.node.spec.kernel.op_id)
    out, saved = results[: len(outs)], results if trees is not None else ()
    derived = dataclasses.replace(call, node=linear, linear=len(tangents))
    found = iter(call_p.bind(*saved, *primals, *tangents, call=derived) if any(outs) else ())
    return out, [next(found) if has else compat.zero_for(value) for value, has in zip(out, outs, strict=True)]


def _named(results: Sequence[object], count: int, op_id: str) -> list[Any]:
    """Return outputs and residuals with the names by which a policy of `jax.checkpoint` may save them."""
    names = (f"{op_id}.out" if index < count else f"{op_id}.residuals" for index in range(len(results)))
    return [checkpoint_name(value, name) for value, name in zip(results, names, strict=True)]


def _through(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], wrt: tuple[bool, ...], call: Call
) -> tuple[Any, Any]:
    """Differentiate the call as if the primitive were not there: computed anew, effects would happen twice."""
    given = iter(tangents)
    all_tangents = [next(given) if has else zero_tangent(p) for p, has in zip(primals, wrt, strict=True)]
    # Inside a kernel that is being lowered the platform is known; elsewhere it is taken to be the default one.
    platform = compat.lowered_platform() or default_device().platform
    with call.settings.entered():
        compute = functools.partial(_compute, call, platform)
        out, found = jax.jvp(lambda *arrays: tuple(compute(*arrays)), tuple(primals), tuple(all_tangents))
    pairs = zip(out, found, strict=True)
    return list(out), [compat.zero_for(v) if compat.is_zero_tangent(t) else t for v, t in pairs]


def residual_trees(call: Call, avals: Sequence[HasType]) -> tuple[Any, Any] | None:
    """Return the structures of output and residuals, if the call is a forward whose kernel has the residual form."""
    root = innermost(call.node)
    kernel = call.node.spec.kernel
    if not isinstance(root, Forward) or root.residuals or overrides(kernel, "custom_vjp"):
        return None
    if not has_residual_form(kernel):
        return None
    with_residuals, _ = differentiate(call.node, (False,) * len(avals), (), _EMPTY_TREES)
    # The structures are known once the forward was traced, and its node does not hold them: any will do.
    probe = dataclasses.replace(call, node=with_residuals)
    out_tree, residual_tree = types_of(probe, avals).trees
    return out_tree, residual_tree


_EMPTY_TREES = (jax.tree.structure(()), jax.tree.structure(()))
compat.register_jvp(call_p, _jvp)


def _transpose(cotangents: Sequence[object], *arguments: object, call: Call) -> list[Any]:
    if not call.linear:
        return _transpose_forward(cotangents, arguments, call)
    fixed = len(arguments) - call.linear
    given = [compat.without_symbolic_zeros(cotangent) for cotangent in cotangents]
    transposed = dataclasses.replace(call, node=call.node.transpose, linear=len(given))
    return [None] * fixed + list(call_p.bind(*arguments[:fixed], *given, call=transposed))


def _transpose_forward(cotangents: Sequence[object], arguments: Sequence[Any], call: Call) -> list[Any]:
    """Transpose a call that is linear in what is asked for: its gradient, at zero as well as anywhere."""
    wanted = tuple(compat.is_undefined_primal(argument) for argument in arguments)
    pairs = zip(arguments, wanted, strict=True)
    primals = [compat.instantiated(argument.aval) if unknown else argument for argument, unknown in pairs]
    given = [ct for ct in map(compat.without_symbolic_zeros, cotangents) if ct.dtype != jax.dtypes.float0]
    outs = tuple(is_inexact(aval) for aval in types_of(call, [jax.typeof(primal) for primal in primals]).avals)
    node = Jvp(call.node, len(primals), wanted, outs).transpose
    found = iter(call_p.bind(*primals, *given, call=dataclasses.replace(call, node=node, linear=len(given))))
    return [next(found) if unknown else None for unknown in wanted]


def _discharge(in_avals: Sequence[HasType], *arrays: jax.Array, call: Call) -> tuple[list[Any], Sequence[Any]]:
    references = tuple(map(compat.is_reference, in_avals))
    out = call_p.bind(*arrays, call=dataclasses.replace(call, node=Discharged(call.node, references)))
    after = iter(out[len(out) - sum(references) :])
    return [next(after) if is_one else None for is_one in references], out[: len(out) - sum(references)]


# JAX's cache of abstract evaluation would keep every call, and with it its kernel, for good.
compat.cache_weakly(Call)
compat.register_discharge(call_p, _discharge)
compat.register_transpose(call_p, _transpose)
