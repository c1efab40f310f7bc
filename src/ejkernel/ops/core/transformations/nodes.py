# SPDX-License-Identifier: Apache-2.0
"""Nodes: calls under JAX's transformations, as trees of small hashable values with the kernel's forward at the root.

A node gives a function of flat arrays for each configuration. Equal nodes share traces and compiled programs. Linear
nodes take `(*residuals, *primals, *linear)` and know their transpose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.ops.core.callspec import CallSpec, array_names
from ejkernel.ops.core.hooks import (
    Computation,
    form_of,
    has_residual_form,
    overrides,
    reference_result,
    writes_residual_form,
)
from ejkernel.ops.core.transformations.jax_residuals import forward_with_jax_residuals, gradients_from_jax_residuals
from ejkernel.ops.errors import EjkernelError, GradientError, KernelError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.messages.names import array_advice
from ejkernel.ops.utils.values.signature import HasType, abstract, is_array, is_inexact

Flat = Callable[..., tuple[Any, ...]]
SUFFIXES: Final = {"vmap": "", "jvp": ".jvp", "vjp": ".bwd"}  # of the operation's name, by the kind of a step

_RAN_WITH = " ran with "
_LEADING = {  # the leading positional parameters of a rule; the arguments of `run` may follow
    "custom_vjp": ("primals", "cfg", "kwargs", "cotangents"),
    "vjp": ("residuals", "out", "cotangents"),
    "fwd_with_residuals": (),
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Choice:
    """How a node computes.

    Attributes:
        config: The configuration.
        platform: The platform whose hooks run.
        reference: Use the kernel's `reference` and plain differentiation instead of its hooks.
        without_rule: Differentiate the kernel's `run` instead of using its gradient rule.
        config_for_types: Set if only types are wanted: returns any valid configuration, and the platform whose hooks
            run with it.
        as_call: Set if only types are wanted: turns a node into a function that binds it as a separate call.
        out_tree: Returns the structure of a node's output on the given arrays, if it was traced before.
        trees: A list that receives the structures of the forward's output and residuals, or `None`.
    """

    config: Any = None
    platform: str = "cpu"
    reference: bool = False
    without_rule: bool = False
    config_for_types: Callable[[], tuple[Any, str]] | None = None
    as_call: Callable[[Any], Flat] | None = None
    out_tree: Callable[[Any, Sequence[Any]], Any] | None = None
    trees: list[Any] | None = None

    @property
    def by_jax(self) -> bool:
        """Whether JAX differentiates the forward as a whole."""
        return self.reference or self.without_rule

    @property
    def types_only(self) -> bool:
        """Whether the caller uses only shapes and dtypes of the result."""
        return self.config_for_types is not None


class Step(NamedTuple):
    """A transformation of a call.

    Attributes:
        data: Its kind and arguments, as plain data for the call's key.
        wiring: The facts that rebuilding the call needs and its key leaves out; mostly empty. These are the batch axes
            of a linear call's additional arguments, and whether a differentiated forward returns its residuals.
            `spmd_axis_name` is left out: it affects the placement of results on a mesh, not their values.
    """

    data: list[Any]
    wiring: dict[str, Any]


class Node:
    """A call under transformations; the defaults are those of a nonlinear node that wraps another one.

    Attributes:
        of: The wrapped node.
    """

    of: Node

    @functools.cached_property
    def spec(self) -> CallSpec:
        """The call without its arrays."""
        return self.of.spec

    @property
    def forward(self) -> Node:
        """The forward call of this node, under the same `vmap`s."""
        return self.of.forward

    @property
    def suffix(self) -> str:
        """The suffix of the operation's name for derivatives: `""`, `".bwd"`, `".jvp"`, ..."""
        return "".join(SUFFIXES.get(step.data[0], "") for step in self.steps)

    @property
    def lead(self) -> int:
        """The number of residuals before the call's own arrays."""
        return self.of.lead

    @property
    def transpose(self) -> Node:
        """The transpose of a linear node."""
        raise TypeError(f"{self.spec.kernel.op_id} is not linear.")

    @property
    def steps(self) -> Sequence[Step]:
        """The transformations, innermost first."""
        raise NotImplementedError

    @property
    def levels(self) -> Sequence[tuple[int, tuple[int | None, ...]]]:
        """The size of each enclosing `vmap`, and the batch axes of the call's own arrays, outermost first."""
        return [(step.data[1], tuple(step.data[2])) for step in reversed(self.steps) if step.data[0] == "vmap"]

    def example_types(self, arrays: Sequence[HasType]) -> list[jax.ShapeDtypeStruct]:
        """The types of the call's own arrays in one example, given all arguments."""
        found = list(map(abstract, arrays[self.lead : self.lead + self.spec.num_arrays]))
        for _, axes in self.levels:
            found = list(map(unbatched, found, axes))
        return found

    def with_spec(self, spec: CallSpec) -> Any:
        """The same node for `spec`, a kernel call of the same structure."""
        return dataclasses.replace(cast(Any, self), of=self.of.with_spec(spec))

    def with_residuals(self) -> Node:
        """The forward, under the same `vmap`s, with residuals among its results."""
        raise TypeError(f"{self.spec.kernel.op_id}{self.suffix} has no residuals.")

    def argument_types(self, choice: Choice, own: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Types of all arguments, given the types of the kernel's own arrays without batch axes."""
        return self.of.argument_types(choice, own)

    def flat(self, choice: Choice) -> Flat:
        """The function of flat arrays."""
        raise NotImplementedError

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """The function from `count` arguments and all cotangents to `count` gradients; `None` for integers.

        By default this is JAX's derivative of `flat`.
        """
        return autodiff_vjp(self.flat(choice), count)


def unbatched(array: HasType, axis: int | None) -> jax.ShapeDtypeStruct:
    """Return the type of one example of an array with batch axis `axis`."""
    shape = tuple(length for index, length in enumerate(array.shape) if index != axis)
    return jax.ShapeDtypeStruct(shape, array.dtype, weak_type=bool(getattr(array, "weak_type", False)))


def autodiff_vjp(function: Flat, count: int) -> Flat:
    """Return JAX's reverse-mode derivative of `function`."""

    def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
        outs, pull = jax.vjp(function, *arrays[:count])
        found = pull(in_dtypes_of(outs, arrays[count:]))
        return tuple(None if g.dtype == jax.dtypes.float0 else g for g in found)

    return gradients


def in_dtypes_of(outs: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """Return cotangents in the dtypes of the results: a reference may compute in wider dtypes than `run`."""
    both = zip(outs, cotangents, strict=True)
    return tuple(ct.astype(out.dtype) if is_inexact(out) and ct.dtype != out.dtype else ct for out, ct in both)


@dataclasses.dataclass(frozen=True)
class Forward(Node):
    """The kernel's forward; with `residuals`, it returns its residuals after its outputs."""

    spec: CallSpec = dataclasses.field()  # without `field()`, the property of `Node` would be its default
    residuals: bool = False

    suffix = ""
    lead = 0
    steps = ()
    levels = ()

    @property
    def forward(self) -> Node:
        """The plain forward."""
        return Forward(self.spec)

    def with_spec(self, spec: CallSpec) -> Forward:
        """See `Node`."""
        return dataclasses.replace(self, spec=spec)

    def with_residuals(self) -> Node:
        """See `Node`."""
        return Forward(self.spec, residuals=True)

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """The types of the kernel's own arrays."""
        del choice
        return list(own)

    def flat(self, choice: Choice) -> Flat:
        """The kernel's hook on flat arrays."""

        def call(*arrays: jax.Array) -> tuple[Any, ...]:
            args, kwargs = self.spec.join(arrays)
            out = self._compute(choice, args, kwargs)
            if choice.trees is not None:
                trees = out if self.residuals else (out,)
                # A side effect, because a function traced by JAX can return only arrays.
                choice.trees[:] = [jax.tree.structure(tree) for tree in trees]
            return tuple(jnp.asarray(leaf) for leaf in jax.tree.leaves(out))

        return call

    def _compute(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = self.spec.kernel
        if choice.reference:
            return reference_result(kernel, args, kwargs)
        if choice.config_for_types:
            config, platform = choice.config_for_types()
            choice = dataclasses.replace(choice, config=config, platform=platform, config_for_types=None)
        if self.residuals and not writes_residual_form(kernel):
            return self._with_jax_residuals(choice, args, kwargs)
        with noting(kernel.op_id, choice.config, (args, kwargs)):
            if not self.residuals:
                run = getattr(kernel, form_of(kernel, "run", choice.platform, choice.config))
                return run(*args, cfg=choice.config, **kwargs)
            form = (choice.platform, choice.config)
            out = call_rule(kernel, "fwd_with_residuals", form, args, {"cfg": choice.config, **kwargs})
        if not (isinstance(out, tuple) and len(out) == 2):
            given = value_text(out)
            raise GradientError(f"{kernel.op_id}: fwd_with_residuals must return (out, residuals), got {given}.")
        return out

    def _with_jax_residuals(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the output of `run`, and the residuals that JAX saves for it."""
        trees: list[Any] = []
        run = Forward(self.spec).flat(dataclasses.replace(choice, trees=trees))
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
        out, saved = forward_with_jax_residuals(run, arrays)
        return jax.tree.unflatten(trees[0], out), saved

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """The kernel's gradient rule, or JAX's derivative of `run`."""
        kernel = self.spec.kernel
        if self.residuals or choice.by_jax:
            return autodiff_vjp(self.flat(choice), count)
        if overrides(kernel, "custom_vjp"):
            return self._custom_vjp(choice)
        if has_residual_form(kernel):
            return self._vjp_through_residuals(choice)
        # Differentiate `run`, not the jaxpr from the trace for types: JAX caches derivatives of the small jitted
        # functions that `run` calls. The jaxpr has them inlined, and takes three times as long.
        return autodiff_vjp(self.flat(choice), count)

    def _custom_vjp(self, choice: Choice) -> Flat:
        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            primals, cts = arrays[: self.spec.num_arrays], arrays[self.spec.num_arrays :]
            out_tree = self._out_tree(choice, primals)
            alike, own = compat.tracing.varying_alike(primals, cts)  # `flat_gradients` sums over devices
            args, kwargs = self.spec.join(alike)
            cotangents = as_outputs(out_tree, own)
            given = (args, choice.config, kwargs, cotangents)
            found = call_rule(self.spec.kernel, "custom_vjp", (choice.platform, choice.config), given, {})
            return flat_gradients(self.spec, primals, found)

        return gradients

    def _vjp_through_residuals(self, choice: Choice) -> Flat:
        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            primals, cts = arrays[: self.spec.num_arrays], arrays[self.spec.num_arrays :]
            trees: list[Any] = []
            saved = Forward(self.spec, residuals=True).flat(dataclasses.replace(choice, trees=trees))(*primals)
            return run_vjp(self.spec, choice, (trees[0], trees[1]), saved, primals, cts)

        return gradients

    def _out_tree(self, choice: Choice, primals: Sequence[jax.Array]) -> Any:
        # Use the known structure: finding it again costs a full trace of the forward.
        known = None if choice.out_tree is None else choice.out_tree(self, primals)
        if known is not None:
            return known
        trees: list[Any] = []
        jax.eval_shape(self.flat(dataclasses.replace(choice, trees=trees)), *primals)
        return trees[0]


def run_vjp(
    spec: CallSpec,
    choice: Choice,
    trees: tuple[Any, Any],
    saved: Sequence[Any],
    primals: Sequence[Any],
    cts: Sequence[object],
) -> tuple[Any, ...]:
    """Call the kernel's `vjp` hook on flat arrays; `saved` holds the outputs, then the residuals."""
    out_tree, residual_tree = trees
    if not writes_residual_form(spec.kernel):
        run = Forward(spec).flat(choice)
        return gradients_from_jax_residuals(run, primals, saved, cts, out_tree.num_leaves, spec.kernel.op_id)
    (saved, alike), cts = compat.tracing.varying_alike((saved, primals), cts)  # `flat_gradients` sums over devices
    out = jax.tree.unflatten(out_tree, saved[: out_tree.num_leaves])
    residuals = jax.tree.unflatten(residual_tree, saved[out_tree.num_leaves :])
    args, kwargs = spec.join(alike)
    given = (residuals, out, as_outputs(out_tree, cts), *args)
    form = (choice.platform, choice.config)
    found = call_rule(spec.kernel, "vjp", form, given, {"cfg": choice.config, **kwargs})
    return flat_gradients(spec, primals, found)


def as_outputs(tree: object, leaves: Sequence[object]) -> tuple[Any, ...]:
    """Return the cotangents as a tuple with one entry for each output."""
    cotangents = jax.tree.unflatten(tree, leaves)
    return tuple(cotangents) if isinstance(cotangents, tuple | list) else (cotangents,)


def _kind_of(found: object, count: int) -> str:
    if not is_array(found):
        return f"{type(found).__name__}, not a tuple"
    return "an array; return (gradient,)" if count == 1 else "an array, not a tuple"


def flat_gradients(spec: CallSpec, primals: Sequence[jax.Array], found: object) -> tuple[Any, ...]:
    """Return one gradient for each array of the call, in its dtype, from `found`, the result of a gradient rule.

    Raises:
        GradientError: Number, structure or shapes do not match the positional arguments.
    """
    op = spec.kernel.op_id
    arguments = spec.flags_by_argument()
    if not isinstance(found, tuple | list) or len(found) != len(arguments):
        got = f"{len(found)} gradients" if isinstance(found, tuple | list) else _kind_of(found, len(arguments))
        raise GradientError(
            f"{op}: the gradient rule must return a tuple of {len(arguments)} gradients, one for each positional "
            f"argument of run (None for zero); got {got}."
        )
    flat: list[Any] = []
    for position, ((tree, flags), gradient) in enumerate(zip(arguments, found, strict=True)):
        leaves = _match_structure(op, position, tree, gradient)
        flat += [leaf for leaf, array in zip(leaves, flags, strict=True) if array]
    names = array_names(spec)
    fitted = [_fit(op, *each) for each in zip(names, primals, flat, strict=False)]
    return (*fitted, *[None] * (len(primals) - len(fitted)))  # gradient rules omit arrays passed by keyword


def _match_structure(op: str, position: int, tree: Any, gradient: Any) -> list[Any]:
    """Return one gradient for each leaf of `tree`; `None` may replace a leaf or a whole branch."""
    leaves: list[Any] = []

    def visit(given: object, branch: object) -> None:
        if given is not None and not jax.tree_util.treedef_is_leaf(jax.tree.structure(branch)):
            raise ValueError("an array where the argument has a container")
        leaves.extend([given] * len(jax.tree.leaves(branch)))

    try:
        jax.tree.map(visit, gradient, jax.tree.unflatten(tree, [0] * tree.num_leaves), is_leaf=lambda x: x is None)
    except ValueError as error:
        raise GradientError(
            f"{op}: the gradient of positional argument {position} must have the argument's structure {tree}, "
            f"got {jax.tree.structure(gradient)}."
        ) from error
    return leaves


def _fit(op: str, name: str, primal: jax.Array, gradient: Any) -> jax.Array | None:
    if not is_inexact(primal):
        return None
    if gradient is None:
        return jnp.zeros_like(primal)
    if jnp.shape(gradient) != primal.shape:
        raise GradientError(
            f"{op}: the gradient of {name} must have its shape {primal.shape}, got {jnp.shape(gradient)}."
        )
    # If an argument is replicated over the devices of a `shard_map`, its gradient is the sum over these devices.
    # Cast to the array's dtype: `jax.custom_vjp` would pass on a float32 gradient of a bfloat16 array unchanged.
    fitted: jax.Array = compat.tracing.match_varying(primal, jnp.asarray(gradient, primal.dtype))
    return fitted


def call_rule(
    kernel: Computation[Any, Any], name: str, form: tuple[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a gradient rule of a kernel.

    Args:
        kernel: The kernel.
        name: The rule, such as `custom_vjp`.
        form: The platform and the configuration, which choose the form of the rule.
        args, kwargs: Its arguments.

    Raises:
        KernelError: The rule cannot take these arguments; the message shows the required signature.
    """
    rule = getattr(kernel, form_of(kernel, name, *form))
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):  # a builtin function may have none
        return rule(*args, **kwargs)
    problem = _problem(signature, _LEADING[name], args, kwargs)
    if problem:
        got = f"{getattr(rule, '__name__', name)}(self, {str(signature).removeprefix('(')}"
        raise KernelError(
            f"{kernel.op_id}: {name} must have the signature {_wanted(kernel, name)}, got {got}: {problem}."
        )
    return rule(*args, **kwargs)


def _problem(
    signature: inspect.Signature, leading: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return the fault of a rule's signature; `""` if it has none."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    names = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
    for index, name in enumerate(leading):
        if name in names and names.index(name) != index:
            return f"{name} is argument {index + 1}, not {names.index(name) + 1}"
    return ""


def _wanted(kernel: Computation[Any, Any], name: str) -> str:
    if name == "custom_vjp":
        return f"custom_vjp(self, {', '.join(_LEADING[name])})"
    run = [p for p in inspect.signature(type(kernel).run).parameters.values() if p.name not in ("self", "cfg")]
    plain = [p.replace(annotation=p.empty) for p in run]
    positional = [str(p) for p in plain if p.kind in (*_POSITIONAL, p.VAR_POSITIONAL)]
    named = [str(p) for p in plain if p.kind is p.KEYWORD_ONLY]
    rest = [str(p) for p in plain if p.kind is p.VAR_KEYWORD]
    star = [] if any(text.startswith("*") for text in positional) else ["*"]
    return f"{name}({', '.join(['self', *_LEADING[name], *positional, *star, 'cfg', *named, *rest])})"


@contextlib.contextmanager
def noting(op_id: str, config: object, arguments: object) -> Iterator[None]:
    """Add notes to an exception in a `with` block, unless it is ejkernel's.

    They have the configuration and the types of the arrays, and say if an argument must be an array.
    """
    try:
        yield
    except EjkernelError:
        raise
    except Exception as error:
        arrays = ", ".join(str(jax.typeof(leaf)) for leaf in jax.tree.leaves(arguments) if is_array(leaf))
        error.add_note(f"{op_id}{_RAN_WITH}{compact(config)}{f' for {arrays}' if arrays else ''}.")
        if advice := array_advice(error):
            error.add_note(f"{advice[:1].upper()}{advice[1:]}")
        if isinstance(error, TypeError) and _has_list_of_numbers(arguments):
            error.add_note("An argument is a list of numbers, which JAX does not convert: pass jnp.asarray(...).")
        raise


def _has_list_of_numbers(arguments: object) -> bool:
    """Return whether some argument is a list, perhaps nested, of nothing but numbers or tracers of numbers."""
    lists = jax.tree.leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, list))
    return any(
        isinstance(one, list) and all(getattr(leaf, "ndim", 0) == 0 for leaf in jax.tree.leaves(one)) for one in lists
    )


def call_that_raised(error: BaseException) -> str:
    """Return the note of `noting` with the call that raised an exception; empty without one."""
    return next((note for note in getattr(error, "__notes__", ()) if _RAN_WITH in note), "")
