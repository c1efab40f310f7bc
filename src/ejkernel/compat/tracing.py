# SPDX-License-Identifier: Apache-2.0
"""Tracing: primitives, jaxprs, effects, references, tangents, dtypes and pytrees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api_util, array, core, effects, linear_util, tree_util
from jax._src import config as jax_config
from jax._src.interpreters import partial_eval
from jax._src.state import types as state_types
from jax.interpreters import ad, batching

Tree = TypeVar("Tree")
_core: Any = core
_api_util: Any = api_util
_linear_util: Any = linear_util
_partial_eval: Any = partial_eval
_config: Any = jax_config
_effects: Any = effects
_state_types: Any = state_types
_HAS_CONSTS = hasattr(_core.Jaxpr, "with_consts")  # there is one class of jaxprs, instead of one with constants
# for each function of flat arrays: inspecting a function takes as long as tracing it
_DEBUG_INFO: Any = _api_util.debug_info("ejkernel_call", lambda *arrays: arrays, (), {})._replace(arg_names=None)
_NO_MESH = jax.sharding.AbstractMesh((), ())
make_user_context: Any = jax.make_user_context
outside_traces: Callable[[], bool] = core.trace_state_clean
# `jax.extend.core` exports this class, but imports Pallas, which took a third of the time of `import ejkernel.ops`.
Primitive: Any = type(jax.lax.add_p)
jaxprs_in: Callable[[Any], Iterator[Any]] = _core.jaxprs_in_params  # of the parameters of an equation


def traced(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """Return the closed jaxpr of a function of flat arrays, in half the time of `jax.make_jaxpr` and `jit`.

    Its constants are tracers if the function uses values of an enclosing trace.
    """
    known = [
        _core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
        if isinstance(aval, jax.ShapeDtypeStruct)
        else aval
        for aval in avals
    ]
    wrapped = _linear_util.wrap_init(function, debug_info=_DEBUG_INFO)
    jaxpr, _, consts = _partial_eval.trace_to_jaxpr_dynamic(wrapped, known)
    return jaxpr.with_consts(consts) if _HAS_CONSTS else _core.ClosedJaxpr(jaxpr, consts)


def trace_context() -> Any:
    """Return a hashable value of all settings that a trace depends on."""
    context = _config.trace_context()
    # Before JAX 0.11 "no mesh" is sometimes `None` and sometimes an empty mesh.
    return (context[0], None, *context[2:]) if context[1] == _NO_MESH else context


def outer_effects(jaxpr: Any) -> Any:
    """Return the effects of a closed jaxpr that its caller inherits, without those on its own references."""
    return {
        effect for effect in _core.positional_effects(jaxpr) if not isinstance(effect, _core.InternalMutableArrayEffect)
    }


def has_references(jaxpr: Any) -> bool:
    """Return whether a closed jaxpr creates or takes references (`jax.new_ref`), which lowering removes."""
    return any(
        isinstance(effect, _core.InternalMutableArrayEffect | _effects.JaxprInputEffect) for effect in jaxpr.effects
    )


def observable(effects: Any) -> bool:
    """Return whether some effect is not a collective and must happen exactly once, such as printing."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in effects)


def cache_weakly(cls: type) -> None:
    """Make JAX's caches hold instances of `cls` weakly if they are parameters of primitives."""
    from jax._src import util

    kinds: Any = util.weakref_cache_key_types
    kinds.add(cls)


def is_reference(aval: Any) -> bool:
    """Return whether an abstract value is a reference, `jax.Ref`."""
    return isinstance(aval, _state_types.AbstractRef)


def register_batching(primitive: Any, rule: Callable[..., tuple[Any, Any]]) -> None:
    """Register the batching rule `rule(axis, values, axes, **params)`, called even if no argument is batched.

    `axis` has the name, the size and the `spmd_name`.
    """
    # The plain table skips a `vmap` that batches no argument, and a collective over its name would find no axis.
    batching.fancy_primitive_batchers[primitive] = rule


def register_discharge(primitive: Any, rule: Callable[..., tuple[list[Any], Sequence[Any]]]) -> None:
    """Register the discharge rule `rule(in_avals, *values, **params)` of a primitive with reference arguments.

    The rule returns, for each argument, the new value of a reference or `None`; and the results.
    """
    from jax._src.state import discharge

    def discharged(first: Any, *rest: Any, **params: Any) -> tuple[list[Any], Sequence[Any]]:
        # a context from JAX 0.11 on; before, the two lists of types were separate arguments
        in_avals = getattr(first, "in_avals", None)
        return rule(first, *rest[1:], **params) if in_avals is None else rule(in_avals, *rest, **params)

    discharge.register_discharge_rule(primitive)(discharged)


def ordered_effects(function: Callable[..., Any], avals: Sequence[Any]) -> list[Any]:
    """Return the effects of a function that must happen in program order."""
    return list(_effects.ordered_effects.filter_in(jax.make_jaxpr(function)(*avals).effects))


def named_axes(effects: Any) -> set[Any]:
    """Return the axis names of the collectives among these effects."""
    return {effect.name for effect in effects if isinstance(effect, _core.NamedAxisEffect)}


def needs_axis(error: BaseException) -> bool:
    """Return whether an error says that the axis of a collective is not bound, as outside of `shard_map`."""
    return isinstance(error, NameError) and "unbound axis name" in str(error)


def is_named(axis_name: Any) -> bool:
    """Return whether the user named this `vmap` axis; the default name is a private object of JAX."""
    return axis_name is not _core.no_axis_name


class Origin(NamedTuple):
    """The dependencies of one result of a jaxpr.

    Attributes:
        name: Equal for results that are the same value.
        argument: The index of the argument that the result is, if it is one.
        needs: The indices of the arguments that it depends on.
    """

    name: Any
    argument: int | None
    needs: frozenset[int]


def origins(jaxpr: Any) -> list[Origin]:
    """Return the dependencies of each result of a closed jaxpr; a nested jaxpr depends on all of its arguments."""
    inner = jaxpr.jaxpr
    arguments = {var: index for index, var in enumerate(inner.invars)}
    needs = {var: frozenset({index}) for var, index in arguments.items()}
    nothing: frozenset[int] = frozenset()
    for equation in inner.eqns:
        known = [needs.get(var, nothing) for var in equation.invars if not _is_literal(var)]
        needs |= dict.fromkeys(equation.outvars, nothing.union(*known))
    return [
        Origin(None, None, nothing) if _is_literal(var) else Origin(var, arguments.get(var), needs.get(var, nothing))
        for var in inner.outvars
    ]


def _is_literal(var: Any) -> bool:
    return isinstance(var, _core.Literal)


def evaluate(jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of a closed jaxpr."""
    return list(_core.jaxpr_as_fun(jaxpr)(*arrays))


def evaluate_without_arguments(jaxpr: Any, wanted: Sequence[bool]) -> list[Any]:
    """Compute and return only the wanted results of a closed jaxpr, which must depend on no argument."""
    # the other results may depend on arguments, and no arguments are given
    pruned, used = _partial_eval.dce_jaxpr(jaxpr.jaxpr, list(wanted))
    assert not any(used)  # the caller has checked `origins`
    closed = pruned if _HAS_CONSTS else _core.ClosedJaxpr(pruned, jaxpr.consts)
    return list(_core.jaxpr_as_fun(closed)())


def uses_of(primitive: Any, program: Any) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the parameters and argument types of each use of a primitive in a closed jaxpr."""
    found = [equation for equation in _equations(program.jaxpr) if equation.primitive is primitive]
    return [(equation.params, [var.aval for var in equation.invars]) for equation in found]


class KernelFacts(NamedTuple):
    """Properties of the Pallas kernels in a program.

    Attributes:
        scalar_prefetch: Whether scalars in memory choose the blocks of a kernel.
        dynamic_grid: Whether the grid of a kernel depends on values.
        dtypes: The dtypes of all values of the program.
        grid_steps: The number of grid steps of all kernels, each counted once.
    """

    scalar_prefetch: bool
    dynamic_grid: bool
    dtypes: frozenset[str]
    grid_steps: int


def kernel_facts(closed: Any) -> KernelFacts:
    """Return the properties of the Pallas kernels in a traced program (`jax.stages.Traced.jaxpr`)."""
    equations = list(_equations(closed.jaxpr))
    grids = [each.params["grid_mapping"] for each in equations if each.primitive.name == "pallas_call"]
    values = [var.aval for each in equations for var in (*each.invars, *each.outvars)]
    return KernelFacts(
        any(grid.num_index_operands for grid in grids),
        any(grid.num_dynamic_grid_bounds for grid in grids),
        frozenset(str(aval.dtype) for aval in values if hasattr(aval, "dtype")),
        sum(math.prod(size for size in grid.grid if isinstance(size, int)) for grid in grids),
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in(equation.params):
            yield from _equations(inner)


def varying_axes(value: Any) -> frozenset[str]:
    """Return the mesh axes over which `value` may differ between devices, inside `shard_map`."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def in_mesh_order(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of bound mesh axes, inside `shard_map`, in the order of the mesh."""
    # Without a mesh in force, as in the partitioner's callback, the axes were bound in the mesh's order.
    names = [*jax.sharding.get_abstract_mesh().axis_names, *_core.get_axis_env().axis_sizes]
    return tuple(sorted(axes, key=names.index))


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """Return the mesh with explicit axes in the types of these arrays; `None` if no type has one."""
    for aval in avals:
        mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


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


def varying_alike(arrays: Tree, cotangents: Sequence[Any]) -> tuple[Tree, Sequence[Any]]:
    """Return the arguments of a gradient rule with every array varying over the union of their mesh axes.

    A rule may multiply an array that varies by one that does not; JAX would then sum only some terms over devices. The
    cotangent of a result that does not vary belongs to all devices together: the first keeps it, the others get zeros.
    """
    every = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((arrays, cotangents))))
    if not every:
        return arrays, cotangents
    return jax.tree.map(lambda x: _over(x, every), arrays), [_on_first(x, every) for x in cotangents]


def _over(x: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _on_first(x: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - varying_axes(x)))
    if not missing or x.dtype == jax.dtypes.float0:  # without a cotangent
        return x
    return jnp.where(jax.lax.axis_index(missing) == 0, _over(x, axes), jnp.zeros((), x.dtype))


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


dtypes: Any = jax.dtypes
ArrayImpl: Any = array.ArrayImpl
finfo: Any = jnp.finfo


def key_implementation(dtype: Any) -> str:
    """Return the name of the random generator of a key dtype."""
    return str(dtype._impl.name)


def weakly_typed(value: Any) -> Any:
    """Return `value` as a weakly typed array, which is promoted like a Python number."""
    # The public function cannot create weak types.
    from jax._src.lax.lax import _convert_element_type

    return _convert_element_type(value, jnp.dtype(value.dtype), weak_type=True)


def pytree_node(cls: type, aux: Any, children: Sequence[Any]) -> Any:
    """Return an instance of a registered pytree type with these children.

    jaxlib does not check the number of children of a dataclass and would read past the last one, so this function
    checks it first. Other types are built in Python by their registered function.

    Raises:
        ValueError: `cls` is not a pytree type, or the number of children differs.
    """
    entry = getattr(tree_util, "_registry", {}).get(cls)  # without dataclasses from JAX 0.11 on
    if entry is not None:
        return entry.from_iter(aux, tuple(children))
    if not dataclasses.is_dataclass(cls):
        raise ValueError("it is not a pytree type that can be built from its children")
    like = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(like, field.name, None)
    flat = jax.tree_util.default_registry.flatten_one_level(like)
    if flat is None or type(aux) is not tuple or (len(list(flat[0])), len(flat[1])) != (len(children), len(aux)):
        raise ValueError("it has another number of children, or of static fields")
    leaves, trees = [], []
    for child in children:
        more, tree = jax.tree.flatten(child)
        leaves += more
        trees.append(tree)
    tree_type: Any = jax.tree_util.PyTreeDef
    tree = tree_type.from_node_data_and_children(jax.tree_util.default_registry, (cls, aux), trees)
    return jax.tree.unflatten(tree, leaves)
