# SPDX-License-Identifier: Apache-2.0
"""Nodes that differentiation and references make of a call: linear calls, their transposes, calls on values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.ops.core.callspec import CallSpec
from ejkernel.ops.core.transformations.batching import LinearVmapped, TransposedVmapped, Vmapped, no_cotangent
from ejkernel.ops.core.transformations.nodes import (
    Around,
    Choice,
    Flat,
    Forward,
    MadeOf,
    Node,
    run_vjp,
    zero_tangent,
)
from ejkernel.ops.errors import GradientError


@dataclasses.dataclass(frozen=True)
class Discharged(Around):
    """`of` on the values of references: its results are followed by the values that the references have then.

    So JAX can move a call that takes references to where they are made, and needs no rule for what it does to them.
    """

    of: Node
    references: tuple[bool, ...]

    types_are_whole = False  # they make references of their own

    def steps(self) -> list[list[Any]]:
        """See `Node`."""
        return [*self.of.steps(), ["references", list(self.references)]]

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        return self.of.argument_types(choice, own)

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def discharged(*arrays: jax.Array) -> tuple[Any, ...]:
            given = [
                jax.new_ref(array) if is_one else array for array, is_one in zip(arrays, self.references, strict=True)
            ]
            out = self.of.flat(choice)(*given)
            return (*out, *[ref[...] for ref, is_one in zip(given, self.references, strict=True) if is_one])

        return discharged


@dataclasses.dataclass(frozen=True)
class Linear(MadeOf):
    """What the linear nodes share.

    Attributes:
        of: The node that is differentiated.
        count: How many arguments it has.
        wrt: Which of them have a tangent.
        outs: Which of its results have a tangent.
    """

    of: Node
    count: int
    wrt: tuple[bool, ...]
    outs: tuple[bool, ...]

    types_are_whole = False  # see `flat`

    def _all_tangents(self, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, ...]:
        given = iter(tangents)
        return tuple(next(given) if has else zero_tangent(p) for p, has in zip(primals, self.wrt, strict=True))

    def _wanted(self, gradients: Sequence[jax.Array | None]) -> tuple[Any, ...]:
        wanted = [gradient for gradient, has in zip(gradients, self.wrt, strict=True) if has]
        if any(gradient is None for gradient in wanted):
            raise GradientError(
                f"{self.spec.kernel.op_id}: its gradient rule answers for positional arguments alone, but the "
                "gradient of an array passed by keyword was asked for; make it a positional parameter of run."
            )
        return tuple(wanted)

    def _tangent_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        primals = self.of.argument_types(choice, own)
        return [*primals, *[primal for primal, has in zip(primals, self.wrt, strict=True) if has]]

    def _cotangent_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        primals = self.of.argument_types(choice, own)
        return [*primals, *self._selected(jax.eval_shape(self.of.flat(choice), *primals))]

    def _selected(self, results: Sequence[object]) -> tuple[Any, ...]:
        return tuple(result for result, has in zip(results, self.outs, strict=True) if has)

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Jvp(Linear):
    """`(primals, tangents) -> tangents` of the results; what forward mode runs."""

    @property
    def suffix(self) -> str:
        """See `Node`."""
        return self.of.suffix + ".jvp"

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        return Vjp(self.of, self.count, self.wrt, self.outs)

    def steps(self) -> list[list[Any]]:
        """See `Node`."""
        # Without `outs`, which follow from the types of the results.
        return [*self.of.steps(), ["jvp", list(self.wrt)]]

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        return self._tangent_types(choice, own)

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def tangents(*arrays: jax.Array) -> tuple[Any, ...]:
            primals = arrays[: self.count]
            if choice.types_only:
                # Tangents have the types of the results. To differentiate for them would ask JAX for the derivative of
                # a kernel that it may not be able to differentiate, although the kernel has a rule for when it counts.
                compute = self.of.flat(choice) if choice.as_call is None else choice.as_call(self.of)
                return self._selected(compute(*primals))
            all_tangents = self._all_tangents(primals, arrays[self.count :])
            return self._selected(jax.jvp(self.of.flat(choice), primals, all_tangents)[1])

        return tangents


@dataclasses.dataclass(frozen=True)
class Vjp(Linear):
    """`(primals, cotangents) -> gradients`; what reverse mode runs."""

    @property
    def suffix(self) -> str:
        """See `Node`."""
        return self.of.suffix + ".bwd"

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        return Jvp(self.of, self.count, self.wrt, self.outs)

    def steps(self) -> list[list[Any]]:
        """See `Node`."""
        return [*self.of.steps(), ["vjp", list(self.wrt)]]

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        return self._cotangent_types(choice, own)

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            primals = arrays[: self.count]
            if choice.types_only:  # gradients have the types of the arguments
                return tuple(primal for primal, has in zip(primals, self.wrt, strict=True) if has)
            # Shapes of results are needed where some have no cotangent: to find them is to trace the forward.
            results = jax.eval_shape(self.of.flat(choice), *primals) if not all(self.outs) else self.outs
            given = iter(arrays[self.count :])
            cts = [next(given) if has else no_cotangent(r.shape) for r, has in zip(results, self.outs, strict=True)]
            return self._wanted(self.of.flat_vjp(choice, self.count)(*primals, *cts))

        return gradients


@dataclasses.dataclass(frozen=True)
class ThroughResiduals(Linear):
    """A linear call of a kernel with residuals: `(outputs and residuals, primals, linear)`."""

    trees: tuple[Any, Any]

    @property
    def num_saved(self) -> int:
        """How many arrays the forward left."""
        return sum(tree.num_leaves for tree in self.trees)

    @property
    def lead(self) -> int:
        """See `Node`."""
        return self.num_saved

    def _saved_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        return list(jax.eval_shape(Forward(self.spec, residuals=True).flat(choice), *own))

    def _split(self, arrays: Sequence[jax.Array]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        first, second = self.num_saved, self.num_saved + self.count
        return arrays[:first], arrays[first:second], arrays[second:]


@dataclasses.dataclass(frozen=True)
class ResidualJvp(ThroughResiduals):
    """The tangents; forward mode has no use for residuals and differentiates `run`."""

    suffix = ".jvp"

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        return ResidualVjp(self.of, self.count, self.wrt, self.outs, self.trees)

    def steps(self) -> list[list[Any]]:
        """See `Node`."""
        return [["jvp", list(self.wrt)]]

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        return [*self._saved_types(choice, own), *self._tangent_types(choice, own)]

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def tangents(*arrays: jax.Array) -> tuple[Any, ...]:
            saved, primals, given = self._split(arrays)
            if choice.types_only:  # the outputs are there already
                return self._selected(saved[: len(self.outs)])
            return Jvp(self.of, self.count, self.wrt, self.outs).flat(choice)(*primals, *given)

        return tangents


@dataclasses.dataclass(frozen=True)
class ResidualVjp(ThroughResiduals):
    """The gradients, by the kernel's `vjp` hook."""

    suffix = ".bwd"

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        return ResidualJvp(self.of, self.count, self.wrt, self.outs, self.trees)

    def steps(self) -> list[list[Any]]:
        """See `Node`."""
        return [["vjp", list(self.wrt)]]

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        return [*self._saved_types(choice, own), *self._cotangent_types(choice, own)]

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            saved, primals, given = self._split(arrays)
            if choice.types_only:
                return tuple(primal for primal, has in zip(primals, self.wrt, strict=True) if has)
            # A reference leaves no residuals: JAX differentiates it as a whole.
            if choice.reference:
                return Vjp(self.of, self.count, self.wrt, self.outs).flat(choice)(*primals, *given)
            remaining = iter(given)
            results = zip(saved, self.outs, strict=False)
            cts = [next(remaining) if has else no_cotangent(result.shape) for result, has in results]
            return self._wanted(run_vjp(self.spec, choice, self.trees, saved, primals, cts))

        return gradients


def differentiate(
    node: Node, wrt: tuple[bool, ...], outs: tuple[bool, ...], trees: tuple[object, object] | None
) -> tuple[Node, Node]:
    """Return the node to run forward and the linear node for its tangents.

    With `trees`, the structures of `(out, residuals)`, the first also returns the residuals, and the second takes
    them before the primals.
    """
    if trees is None:
        return node, Jvp(node, len(wrt), wrt, outs)
    # The `vmap`s go around both, for the kernel's hooks see one example.
    levels = []
    while isinstance(node, Vmapped):
        levels.append(node.level)
        node = node.of
    plain = Forward(node.spec)
    linear: Node = ResidualJvp(plain, len(wrt), wrt, outs, trees)
    forward: Node = Forward(node.spec, residuals=True)
    lead = linear.lead
    for level in reversed(levels):
        tangent_axes = [axis for axis, has in zip(level.axes, wrt, strict=True) if has]
        forward = Vmapped(forward, level)
        # Outputs and residuals come batched along their first axis; a tangent is batched as its argument is.
        axes = (*[0] * lead, *level.axes, *tangent_axes)
        linear = LinearVmapped(linear, dataclasses.replace(level, axes=axes), lead + len(wrt))
    return forward, linear


def with_spec(node: Any, spec: CallSpec) -> Any:
    """Return the node with another kernel call, of the same structure, at its root."""
    if isinstance(node, Forward):
        return dataclasses.replace(node, spec=spec)
    nested = ("of", "original") if isinstance(node, TransposedVmapped) else ("of",)
    return dataclasses.replace(node, **{name: with_spec(getattr(node, name), spec) for name in nested})


def innermost(node: Node) -> Node:
    """Return the node below all `vmap`s."""
    while isinstance(node, Vmapped):
        node = node.of
    return node


def wiring(node: object) -> list[dict[str, Any]]:
    """Return, for each of `node.steps()`, what rebuilding it needs and the key leaves out; mostly nothing.

    A linear call has arguments beside the forward's, whose batch axes are free; and what is differentiated may be a
    forward that also returns its residuals. `spmd_axis_name` is left out: it says where on a mesh results are put, not
    what they are.
    """
    if isinstance(node, Discharged):
        return [*wiring(node.of), {}]
    if isinstance(node, Linear):
        root = innermost(node.of)
        through = {"residuals": True} if isinstance(root, Forward) and root.residuals else {}
        return [*([] if isinstance(node, ThroughResiduals) else wiring(node.of)), through]
    if not isinstance(node, Vmapped):
        return []
    name = None if node.level.axis_name is None else node.level.axis_name.name
    more: dict[str, Any] = {"axis_name": name} if type(name) is str else {}
    if isinstance(node, LinearVmapped | TransposedVmapped):
        more["axes"] = list(node.level.axes)
    if isinstance(node, TransposedVmapped):
        more["transposed"] = True
    return [*wiring(node.of), more]
