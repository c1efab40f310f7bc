# SPDX-License-Identifier: Apache-2.0
"""Nodes for differentiation and references: linear calls, their transposes, and calls on the values of references."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from ejkernel import compat
from ejkernel.ops.core.transformations.batching import LinearVmapped, Vmapped, no_cotangent
from ejkernel.ops.core.transformations.nodes import Choice, Flat, Forward, Node, Step, run_vjp
from ejkernel.ops.errors import GradientError


@dataclasses.dataclass(frozen=True)
class Discharged(Node):
    """`of` on the values of references; it returns its results, then the final values of the references.

    JAX discharges a call on references into this call, and needs no rule for its effects on them.
    """

    of: Node
    references: tuple[bool, ...]

    @property
    def steps(self) -> Sequence[Step]:
        """See `Node`."""
        return [*self.of.steps, Step(["references", list(self.references)], {})]

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
class Linear(Node):
    """Base of the linear nodes; their arguments are `(outputs and residuals, if any, primals, linear)`.

    Attributes:
        of: The differentiated node.
        count: The number of its arguments.
        wrt: For each argument, whether it has a tangent.
        outs: For each result, whether it has a tangent.
        trees: The structures of outputs and residuals, for a kernel with residuals; `None`: it takes none.
    """

    of: Node
    count: int
    wrt: tuple[bool, ...]
    outs: tuple[bool, ...]
    trees: tuple[Any, Any] | None = None

    kind: ClassVar[str] = ""  # of its step: "jvp" or "vjp"

    @property
    def num_saved(self) -> int:
        """The number of outputs and residuals of the forward that it takes."""
        return sum(tree.num_leaves for tree in self.trees or ())

    @property
    def lead(self) -> int:
        """See `Node`."""
        return self.num_saved + self.of.lead

    @property
    def transpose(self) -> Node:
        """See `Node`."""
        other = Vjp if isinstance(self, Jvp) else Jvp
        return other(self.of, self.count, self.wrt, self.outs, self.trees)

    @property
    def steps(self) -> Sequence[Step]:
        """See `Node`."""
        root = innermost(self.of)
        wiring = {"residuals": True} if isinstance(root, Forward) and root.residuals else {}
        # without `outs`: they follow from the result types
        return [*self.of.steps, Step([self.kind, list(self.wrt)], wiring)]

    def argument_types(self, choice: Choice, own: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """See `Node`."""
        saved = () if self.trees is None else jax.eval_shape(Forward(self.spec, residuals=True).flat(choice), *own)
        primals = self.of.argument_types(choice, own)
        if self.kind == "jvp":
            return [*saved, *primals, *[primal for primal, has in zip(primals, self.wrt, strict=True) if has]]
        return [*saved, *primals, *self._selected(jax.eval_shape(self.of.flat(choice), *primals))]

    def _split(self, arrays: Sequence[jax.Array]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        first, second = self.num_saved, self.num_saved + self.count
        return arrays[:first], arrays[first:second], arrays[second:]

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
    """The tangents of the results, for forward mode; it ignores residuals and differentiates `run`."""

    kind = "jvp"

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def computed(*arrays: jax.Array) -> tuple[Any, ...]:
            saved, primals, given = self._split(arrays)
            if not choice.types_only:
                tangents = all_tangents(primals, given, self.wrt)
                return self._selected(jax.jvp(self.of.flat(choice), primals, tangents)[1])
            # Tangents have the types of the results. Do not differentiate for them: JAX may be unable to
            # differentiate the kernel, and its gradient rule applies only to the real computation.
            if self.trees is not None:
                return self._selected(saved[: len(self.outs)])
            compute = self.of.flat(choice) if choice.as_call is None else choice.as_call(self.of)
            return self._selected(compute(*primals))

        return computed


@dataclasses.dataclass(frozen=True)
class Vjp(Linear):
    """The gradients of the arguments, for reverse mode; for a kernel with residuals by its `vjp` hook."""

    kind = "vjp"

    def flat(self, choice: Choice) -> Flat:
        """See `Node`."""

        def gradients(*arrays: jax.Array) -> tuple[Any, ...]:
            saved, primals, given = self._split(arrays)
            if choice.types_only:  # gradients have the types of the arguments
                return tuple(primal for primal, has in zip(primals, self.wrt, strict=True) if has)
            results: Sequence[Any] = saved[: len(self.outs)]
            if self.trees is None:
                # Results without a cotangent need their shapes, which costs a trace of the forward.
                results = self.outs if all(self.outs) else jax.eval_shape(self.of.flat(choice), *primals)
            remaining = iter(given)
            pairs = zip(results, self.outs, strict=True)
            cts = [next(remaining) if has else no_cotangent(result.shape) for result, has in pairs]
            if self.trees is None or choice.by_jax:  # JAX differentiates the whole forward, without residuals
                return self._wanted(self.of.flat_vjp(choice, self.count)(*primals, *cts))
            return self._wanted(run_vjp(self.spec, choice, self.trees, saved, primals, cts))

        return gradients


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
    return node.with_residuals(), _through_residuals(node, wrt, outs, trees)


def _through_residuals(
    node: Node, wrt: tuple[bool, ...], outs: tuple[bool, ...], trees: tuple[object, object]
) -> Linear | LinearVmapped:
    if not isinstance(node, Vmapped):
        return Jvp(Forward(node.spec), len(wrt), wrt, outs, trees)
    # The `vmap`s wrap the linear node, because the kernel's hooks see one example.
    linear, level = _through_residuals(node.of, wrt, outs, trees), node.level
    tangent_axes = [axis for axis, has in zip(level.axes, wrt, strict=True) if has]
    # Outputs and residuals are batched along their first axis, and a tangent like its argument.
    axes = (*[0] * linear.lead, *level.axes, *tangent_axes)
    return LinearVmapped(linear, dataclasses.replace(level, axes=axes), linear.lead + len(wrt))


def innermost(node: Node) -> Node:
    """Return the node below all `vmap`s."""
    while isinstance(node, Vmapped):
        node = node.of
    return node
