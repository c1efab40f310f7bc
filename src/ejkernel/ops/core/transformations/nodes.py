# SPDX-License-Identifier: Apache-2.0
"""What a call becomes under JAX's transformations: a tree of small, hashable nodes over the kernel's forward.

Every node is a function of flat arrays that is still to be given its configuration. Equal nodes share traces and
compiled programs. Linear nodes take `(*residuals, *primals, *linear)` and know their transpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.ops.core.callspec import CallSpec
from ejkernel.ops.core.hooks import has_residual_form, hook, overrides, writes_residual_form
from ejkernel.ops.core.transformations.kept import forward_keeping, gradients_from
from ejkernel.ops.core.transformations.naming import array_names
from ejkernel.ops.core.transformations.rules import call_rule
from ejkernel.ops.errors import GradientError
from ejkernel.ops.utils.values.signature import HasType, is_array

Flat = Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Choice:
    """How a node is to compute.

    Attributes:
        config: The configuration.
        platform: The platform whose hooks run.
        reference: Use the kernel's `reference` and plain differentiation instead of its hooks.
        config_for_types: Only types are wanted: a function from `(args, kwargs)` to any valid configuration, and the
            platform whose hooks run with that one.
        as_call: Gives the function that makes a call of its own of a node, where only types are wanted.
        out_tree: Gives the structure of a node's output on such arrays, where it was traced before.
        trees: Where the forward leaves the structure of its output (and residuals), if somebody asks.
    """

    config: Any = None
    platform: str = "cpu"
    reference: bool = False
    config_for_types: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, str]] | None = None
    as_call: Callable[[Any], Flat] | None = None
    out_tree: Callable[[Any, Sequence[Any]], Any] | None = None
    trees: list[Any] | None = None

    @property
    def types_only(self) -> bool:
        """Whether nothing but shapes and dtypes of the result will be used."""
        return self.config_for_types is not None


class Node(Protocol):
    """A call under transformations."""

    @property
    def spec(self) -> CallSpec:
        """The call without its arrays."""

    @property
    def forward(self) -> Node:
        """The forward call that this one belongs to, under the same `vmap`s."""

    @property
    def suffix(self) -> str:
        """What differentiation added to the operation's name: `""`, `".bwd"`, `".jvp"`, ..."""

    @property
    def lead(self) -> int:
        """How many residuals come before the call's own arrays."""

    @property
    def types_are_whole(self) -> bool:
        """Whether the trace that gives the call's types is all of its computation."""

    @property
    def transpose(self) -> Node:
        """The transpose of a linear node."""

    def steps(self) -> list[list[Any]]:
        """The transformations, innermost first, as plain data: a part of the call's key."""

    def argument_types(self, choice: Choice, own: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Types of all arguments, from those of the kernel's own arrays without any batch axis."""

    def flat(self, choice: Choice) -> Flat:
        """The function."""

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """The function from `count` arguments and all cotangents to `count` gradients; `None` for integers."""


class MadeOf:
    """What a node has of the one that it is made of.

    Attributes:
        of: That node.
    """

    of: Node

    @property
    def spec(self) -> CallSpec:
        """See `Node`."""
        return self.of.spec

    @property
    def forward(self) -> Node:
        """See `Node`."""
        return self.of.forward

    @property
    def lead(self) -> int:
        """See `Node`."""
        return self.of.lead

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""
        raise NotImplementedError

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """See `Node`; what JAX finds by differentiating `flat`."""
        return autodiff_vjp(self.flat(choice), count)


class Around(MadeOf):
    """What a node that is not linear has of the one that it is made of."""

    @property
    def suffix(self) -> str:
        """See `Node`."""
        return self.of.suffix

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        raise TypeError(f"{self.spec.kernel.op_id} is not linear.")


def is_inexact(value: HasType) -> bool:
    """Return whether `value` has a gradient."""
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def autodiff_vjp(function: Flat, count: int) -> Flat:
    """Return the reverse-mode derivative that JAX finds for `function`."""

    def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
        found = jax.vjp(function, *arrays[:count])[1](tuple(arrays[count:]))
        return tuple(None if g.dtype == jax.dtypes.float0 else g for g in found)

    return gradients


def zero_tangent(value: jax.Array) -> Any:
    """Return the zero of `value`'s tangent space."""
    return compat.zeros_of_tangent(value)


@dataclasses.dataclass(frozen=True)
class Forward:
    """The kernel's forward; with `residuals`, its outputs are followed by what the backward needs of it."""

    spec: CallSpec
    residuals: bool = False

    suffix = ""
    lead = 0
    types_are_whole = True

    @property
    def forward(self) -> Node:
        """The plain forward."""
        return Forward(self.spec)

    @property
    def transpose(self) -> Node:
        """A forward is not linear."""
        raise TypeError(f"{self.spec.kernel.op_id} is not linear.")

    def steps(self) -> list[list[Any]]:
        """No transformation."""
        return []

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """The kernel's own."""
        del choice
        return list(own)

    def flat(self, choice: Choice) -> Flat:
        """The kernel's hook on flat arrays."""

        def call(*arrays: jax.Array) -> tuple[Any, ...]:
            args, kwargs = self.spec.join(arrays)
            out = self._compute(choice, args, kwargs)
            if choice.trees is not None:
                parts = out if self.residuals else (out,)
                # On the side, for a function that JAX traces may return nothing but arrays.
                choice.trees[:] = [jax.tree.structure(part) for part in parts]
            return tuple(jnp.asarray(leaf) for leaf in jax.tree.leaves(out))

        return call

    def _compute(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = self.spec.kernel
        if choice.reference:
            return kernel.reference(*args, **kwargs)
        if choice.config_for_types:
            config, platform = choice.config_for_types(args, kwargs)
            choice = dataclasses.replace(choice, config=config, platform=platform, config_for_types=None)
        if self.residuals and not writes_residual_form(kernel):
            return self._keeping(choice, args, kwargs)
        if not self.residuals:
            return hook(kernel, "run", choice.platform, choice.config)(*args, cfg=choice.config, **kwargs)
        form = (choice.platform, choice.config)
        out = call_rule(kernel, "fwd_with_residuals", form, args, {"cfg": choice.config, **kwargs})
        if not (isinstance(out, tuple) and len(out) == 2):
            raise GradientError(f"{kernel.op_id}: fwd_with_residuals must return (out, residuals), got {type(out)}.")
        return out

    def _keeping(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The output of `run`, and what JAX keeps of it."""
        trees: list[Any] = []
        run = Forward(self.spec).flat(dataclasses.replace(choice, trees=trees))
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]
        out, saved = forward_keeping(run, arrays)
        return jax.tree.unflatten(trees[0], out), saved

    def flat_vjp(self, choice: Choice, count: int) -> Flat:
        """The kernel's gradient rule, or what JAX finds by differentiating `run`."""
        kernel = self.spec.kernel
        if self.residuals or choice.reference:
            return autodiff_vjp(self.flat(choice), count)
        if overrides(kernel, "custom_vjp"):
            return self._custom_vjp(choice)
        if has_residual_form(kernel):
            return self._vjp_through_residuals(choice)
        # Of `run`, and not of the jaxpr that its types came from: the small jitted functions that it calls JAX has
        # differentiated before; a jaxpr has them inlined, and takes three times as long.
        return autodiff_vjp(self.flat(choice), count)

    def _custom_vjp(self, choice: Choice) -> Flat:
        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            primals, cts = arrays[: self.spec.num_arrays], arrays[self.spec.num_arrays :]
            args, kwargs = self.spec.join(primals)
            cotangents = as_outputs(self._out_tree(choice, primals), cts)
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
        # To trace the forward for it takes as long as to trace it for its result.
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
    """Call the kernel's `vjp` hook on flat arrays; `saved` are the outputs and then the residuals."""
    out_tree, residual_tree = trees
    if not writes_residual_form(spec.kernel):
        run = Forward(spec).flat(choice)
        return gradients_from(run, primals, saved, cts, out_tree.num_leaves, spec.kernel.op_id)
    out = jax.tree.unflatten(out_tree, saved[: out_tree.num_leaves])
    residuals = jax.tree.unflatten(residual_tree, saved[out_tree.num_leaves :])
    args, kwargs = spec.join(primals)
    given = (residuals, out, as_outputs(out_tree, cts), *args)
    form = (choice.platform, choice.config)
    found = call_rule(spec.kernel, "vjp", form, given, {"cfg": choice.config, **kwargs})
    return flat_gradients(spec, primals, found)


def as_outputs(tree: object, leaves: Sequence[object]) -> tuple[Any, ...]:
    """Return the cotangents as a tuple with one entry for each output."""
    cotangents = jax.tree.unflatten(tree, leaves)
    return tuple(cotangents) if isinstance(cotangents, tuple | list) else (cotangents,)


def flat_gradients(spec: CallSpec, primals: Sequence[jax.Array], found: object) -> tuple[Any, ...]:
    """Return one gradient for each array of the call, in its dtype, from what a gradient rule returned.

    Raises:
        GradientError: number, structure or shapes do not fit the positional arguments.
    """
    op = spec.kernel.op_id
    arguments = spec.flags_by_argument()
    if not isinstance(found, tuple | list) or len(found) != len(arguments):
        got = f"{len(found)} gradients" if isinstance(found, tuple | list) else type(found).__name__
        raise GradientError(
            f"{op}: the gradient rule must return a tuple of {len(arguments)} gradients, one for each positional "
            f"argument of run (None where there is none); got {got}."
        )
    flat: list[Any] = []
    for position, ((tree, flags), gradient) in enumerate(zip(arguments, found, strict=True)):
        leaves = _match_structure(op, position, tree, gradient)
        flat += [leaf for leaf, array in zip(leaves, flags, strict=True) if array]
    names = array_names(spec)
    fitted = [_fit(op, *each) for each in zip(names, primals, flat, strict=False)]
    return (*fitted, *[None] * (len(primals) - len(fitted)))  # arrays passed by keyword have no place in the answer


def _match_structure(op: str, position: int, tree: Any, gradient: Any) -> list[Any]:
    """Return one gradient a leaf of `tree`; `None` may stand for a leaf or for a whole branch."""
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
    # Of an argument that is the same on all devices of a `shard_map` each device has found another gradient: it is the
    # sum of them.
    # In the array's dtype: `jax.custom_vjp` would hand on a float32 gradient of a bfloat16 array as it is.
    fitted: jax.Array = compat.match_varying(primal, jnp.asarray(gradient, primal.dtype))
    return fitted
