# SPDX-License-Identifier: Apache-2.0
"""Nodes for differentiation and references: linear calls, their transposes, and calls on the values of references."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Final, cast

import jax

from ejkernel import compat
from ejkernel.ops.core.transformations.batching import LinearVmapped, Vmapped, no_cotangent
from ejkernel.ops.core.transformations.nodes import Choice, Flat, Forward, Node, NonlinearWrapper, Wrapper, run_vjp
from ejkernel.ops.errors import GradientError

SUFFIXES: Final = {"vmap": "", "jvp": ".jvp", "vjp": ".bwd"}  # of the operation's name, by the kind of a step


@dataclasses.dataclass(frozen=True)
class Discharged(NonlinearWrapper):
    """`of` on the values of references; it returns its results, then the final values of the references.

    JAX discharges a call on references into this call, and needs no rule for its effects on them.
    """

    of: Node
    references: tuple[bool, ...]

    types_are_whole = False  # `flat` creates new references

    @property
    def steps(self) -> Sequence[list[Any]]:
        """See `Node`."""
        return [*self.of.steps, ["references", list(self.references)]]

    @property
    def wiring(self) -> Sequence[dict[str, Any]]:
        """See `Node`."""
        return [*self.of.wiring, {}]

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        return self.of.argument_types(choice, own)

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def discharged(*arrays: jax.Array) -> tuple[Any, ...]:
            given = [
                jax.new_ref(array) if is_reference else array
                for array, is_reference in zip(arrays, self.references, strict=True)
            ]
            out = self.of.flat(choice)(*given)
            return (*out, *[ref[...] for ref, is_reference in zip(given, self.references, strict=True) if is_reference])

        return discharged


@dataclasses.dataclass(frozen=True)
class Linear(Wrapper):
    """Base of the linear nodes.

    Attributes:
        of: The differentiated node.
        count: The number of its arguments.
        wrt: For each argument, whether it has a tangent.
        outs: For each result, whether it has a tangent.
    """

    of: Node
    count: int
    wrt: tuple[bool, ...]
    outs: tuple[bool, ...]

    types_are_whole = False  # see `flat`
    kind: ClassVar[str] = ""  # of its step: "jvp" or "vjp"

    @property
    def suffix(self) -> str:
        """See `Node`."""
        return self.of.suffix + SUFFIXES[self.kind]

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return cast(Node, _TRANSPOSES[type(self)](*fields))

    @property
    def steps(self) -> Sequence[list[Any]]:
        """See `Node`."""
        return [*self.of.steps, [self.kind, list(self.wrt)]]  # without `outs`: they follow from the result types

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        primals = self.of.argument_types(choice, own)
        if self.kind == "jvp":
            return [*primals, *[primal for primal, has in zip(primals, self.wrt, strict=True) if has]]
        return [*primals, *self._selected(jax.eval_shape(self.of.flat(choice), *primals))]

    @property
    def wiring(self) -> Sequence[dict[str, Any]]:
        """See `Node`."""
        root = innermost(self.of)
        return [*self.of.wiring, {"residuals": True} if isinstance(root, Forward) and root.residuals else {}]

    def _wanted(self, gradients: Sequence[jax.Array | None]) -> tuple[Any, ...]:
        wanted = [gradient for gradient, has in zip(gradients, self.wrt, strict=True) if has]
        if any(gradient is None for gradient in wanted):
            raise GradientError(
                f"{self.spec.kernel.op_id}: the gradient rule covers only positional arguments, but the gradient of "
                "an array passed by keyword was requested; make it a positional parameter of run."
            )
        return tuple(wanted)

    def _selected(self, results: Sequence[object]) -> tuple[Any, ...]:
        return tuple(result for result, has in zip(results, self.outs, strict=True) if has)


@dataclasses.dataclass(frozen=True)
class Jvp(Linear):
    """`(primals, tangents) -> tangents` of the results, for forward mode."""

    kind = "jvp"

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def computed(*arrays: jax.Array) -> tuple[Any, ...]:
            primals = arrays[: self.count]
            if choice.types_only:
                # Tangents have the types of the results. Do not differentiate for them: JAX may be unable to
                # differentiate the kernel, and its gradient rule applies only to the real computation.
                compute = self.of.flat(choice) if choice.as_call is None else choice.as_call(self.of)
                return self._selected(compute(*primals))
            tangents = all_tangents(primals, arrays[self.count :], self.wrt)
            return self._selected(jax.jvp(self.of.flat(choice), primals, tangents)[1])

        return computed


@dataclasses.dataclass(frozen=True)
class Vjp(Linear):
    """`(primals, cotangents) -> gradients`, for reverse mode."""

    kind = "vjp"

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            primals = arrays[: self.count]
            if choice.types_only:  # gradients have the types of the arguments
                return tuple(primal for primal, has in zip(primals, self.wrt, strict=True) if has)
            # Results without a cotangent need their shapes, which costs a trace of the forward.
            results = jax.eval_shape(self.of.flat(choice), *primals) if not all(self.outs) else self.outs
            given = iter(arrays[self.count :])
            cts = [next(given) if has else no_cotangent(r.shape) for r, has in zip(results, self.outs, strict=True)]
            return self._wanted(self.of.flat_vjp(choice, self.count)(*primals, *cts))

        return gradients


@dataclasses.dataclass(frozen=True)
class ThroughResiduals(Linear):
    """A linear call of a kernel with residuals; its arguments are `(outputs and residuals, primals, linear)`."""

    trees: tuple[Any, Any]

    @property
    def num_saved(self) -> int:
        """The number of outputs and residuals of the forward."""
        return sum(tree.num_leaves for tree in self.trees)

    @property
    def lead(self) -> int:
        """See `Node`."""
        return self.num_saved

    @property
    def wiring(self) -> Sequence[dict[str, Any]]:
        """See `Node`; `differentiate` applies the `vmap`s to the linear node, so this one differentiates a forward."""
        return super().wiring[-1:]

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        saved = jax.eval_shape(Forward(self.spec, residuals=True).flat(choice), *own)
        return [*saved, *super().argument_types(choice, own)]

    def _split(self, arrays: Sequence[jax.Array]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        first, second = self.num_saved, self.num_saved + self.count
        return arrays[:first], arrays[first:second], arrays[second:]


@dataclasses.dataclass(frozen=True)
class ResidualJvp(ThroughResiduals):
    """The tangents; forward mode ignores the residuals and differentiates `run`."""

    kind = "jvp"

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def tangents(*arrays: jax.Array) -> tuple[Any, ...]:
            saved, primals, given = self._split(arrays)
            if choice.types_only:  # tangents have the types of the saved outputs
                return self._selected(saved[: len(self.outs)])
            return Jvp(self.of, self.count, self.wrt, self.outs).flat(choice)(*primals, *given)

        return tangents


@dataclasses.dataclass(frozen=True)
class ResidualVjp(ThroughResiduals):
    """The gradients, from the kernel's `vjp` hook."""

    kind = "vjp"

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            saved, primals, given = self._split(arrays)
            if choice.types_only:
                return tuple(primal for primal, has in zip(primals, self.wrt, strict=True) if has)
            # JAX differentiates the whole forward here, without residuals.
            if choice.by_jax:
                return Vjp(self.of, self.count, self.wrt, self.outs).flat(choice)(*primals, *given)
            remaining = iter(given)
            results = zip(saved, self.outs, strict=False)
            cts = [next(remaining) if has else no_cotangent(result.shape) for result, has in results]
            return self._wanted(run_vjp(self.spec, choice, self.trees, saved, primals, cts))

        return gradients


_TRANSPOSES: dict[type, type] = {Jvp: Vjp, Vjp: Jvp, ResidualJvp: ResidualVjp, ResidualVjp: ResidualJvp}


def all_tangents(primals: Sequence[jax.Array], tangents: Sequence[jax.Array], wrt: Sequence[bool]) -> tuple[Any, ...]:
    """Return the tangent of each argument, those that have none being zero."""
    given = iter(tangents)
    return tuple(
        next(given) if has else compat.tracing.zeros_of_tangent(p) for p, has in zip(primals, wrt, strict=True)
    )


def differentiate(
    node: Node, wrt: tuple[bool, ...], outs: tuple[bool, ...], trees: tuple[object, object] | None
) -> tuple[Node, Node]:
    """Return the forward node and the linear node for its tangents.

    With `trees`, the structures of `(out, residuals)`, the forward also returns the residuals, and the linear node
    takes them before the primals.
    """
    if trees is None:
        return node, Jvp(node, len(wrt), wrt, outs)
    # The `vmap`s wrap both nodes, because the kernel's hooks see one example.
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
        # Outputs and residuals are batched along their first axis, and a tangent like its argument.
        axes = (*[0] * lead, *level.axes, *tangent_axes)
        linear = LinearVmapped(linear, dataclasses.replace(level, axes=axes), lead + len(wrt))
    return forward, linear


def innermost(node: Node) -> Node:
    """Return the node below all `vmap`s."""
    while isinstance(node, Vmapped):
        node = node.of
    return node
