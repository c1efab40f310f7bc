# SPDX-License-Identifier: Apache-2.0
"""Checks of gradient rules: the dtypes that they return, and every backward after every forward."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.ops.core.callspec import array_names
from ejkernel.ops.core.hooks import has_residual_form
from ejkernel.ops.core.kernel import has_gradient_rule, hook, overrides
from ejkernel.ops.core.transformations.nodes import Choice, Forward, as_outputs, is_inexact, run_vjp
from ejkernel.ops.execution.checks.programs import compiled, gradient_deviations
from ejkernel.ops.execution.checks.report import CheckRow, CheckStatus
from ejkernel.ops.execution.checks.subject import Subject
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import compact

logger = logging.getLogger(__name__)


def rule_row(
    subject: Subject, config: object, arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> Iterator[CheckRow]:
    """Yield a row that checks whether each gradient of the kernel's rule has its argument's dtype, if it has a rule."""
    if not has_gradient_rule(subject.kernel) or not cotangents:
        return
    try:
        reasons = _wrong_types(subject, config, arrays, cotangents)
    except Exception as error:  # noqa: BLE001 - a rule may fail in any way; the row has the reason
        reasons = [f"{type(error).__name__}: {error}"]
    yield CheckRow(
        check="gradient types",
        config=config,
        status=CheckStatus.FAILED if reasons else CheckStatus.OK,
        reason="; ".join(reasons),
    )


def pair_rows(
    subject: Subject,
    forwards: Sequence[Any],
    backwards: Sequence[Any] | None,
    arrays: Sequence[Any],
    cotangents: Sequence[Any],
) -> Iterator[CheckRow]:
    """Yield rows that check whether each backward configuration computes the same gradients after every forward one.

    Args:
        subject: The call.
        forwards: Configurations of the forward, the heuristic's first.
        backwards: Configurations of the backward call, the heuristic's first; `None`: those of the forward.
        arrays: Inputs of the call.
        cotangents: One for each floating-point result.
    """
    if not cotangents or not (has_residual_form(subject.kernel) or has_gradient_rule(subject.kernel)):
        return
    pairs = _Pairs(subject, forwards, backwards, arrays, cotangents)
    if pairs.count > 1:
        yield from pairs.rows()


class _Pairs:
    """A gradient rule under every pair of a forward and a backward configuration."""

    def __init__(
        self,
        subject: Subject,
        forwards: Sequence[Any],
        backwards: Sequence[Any] | None,
        arrays: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> None:
        self._subject, self._cotangents = subject, cotangents
        self._spec, self._own = subject.taken_apart(arrays)
        self._leaves_residuals = has_residual_form(subject.kernel)
        # A rule that only takes the arguments does not depend on the forward's configuration.
        self._forwards = list(forwards if self._leaves_residuals else forwards[:1])
        self._has_own_space = backwards is not None
        self._backwards = list(forwards if backwards is None else backwards)
        self._trees: list[Any] = []

    @property
    def count(self) -> int:
        """Number of pairs that no other check covers."""
        return len(self._backwards) if self._has_own_space or self._leaves_residuals else 0

    def rows(self) -> Iterator[CheckRow]:
        """Yield a row for each backward configuration, and for each forward that fails or returns other types."""
        saved: dict[int, Any] = {}
        types: list[Any] = []
        for index, config in enumerate(self._forwards):
            try:
                found = self._types(config)
                types = types or found
                reason = "" if found == types else _differing_types(found, types)
                saved[index] = self._saved(config) if not reason else None
            except Exception as error:  # noqa: BLE001 - a forward may fail in any way; the row has the reason
                reason = f"{type(error).__name__}: {error}"
            if reason:
                yield _pair_row(config, reason)
                if index == 0:
                    return
                saved.pop(index, None)
        gradients = self._gradients(saved)
        for number, config in enumerate(self._backwards):
            if self._has_own_space or number in saved:
                yield _pair_row(config, self._difference(number, gradients))

    def _choice(self, config: Any, trees: list[Any] | None = None) -> Choice:
        return Choice(config=config, platform=self._subject.platform, trees=trees)

    def _types(self, config: Any) -> list[Any]:
        """Return the structure of the forward's residuals, followed by their types."""
        if not self._leaves_residuals:
            return []
        trees: list[Any] = []
        found = jax.eval_shape(Forward(self._spec, residuals=True).flat(self._choice(config, trees)), *self._own)
        self._trees = self._trees or list(trees)
        results = trees[0].num_leaves
        return [trees[1], *((like.shape, str(like.dtype)) for like in found[results:])]

    def _saved(self, config: Any) -> Any:
        """Return the forward's results and residuals."""
        if not self._leaves_residuals:
            return ()
        run = Forward(self._spec, residuals=True).flat(self._choice(config))
        return compiled(lambda own: run(*own), self._own)(self._own)

    def _backward(self, config: Any, saved: Sequence[Any], own: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        if self._leaves_residuals:
            count = self._trees[0].num_leaves
            given = jax.tree.leaves(_outputs(self._trees[0], saved[:count], cotangents))
            found = run_vjp(self._spec, self._choice(config), (self._trees[0], self._trees[1]), saved, own, given)
        else:
            outs = jax.eval_shape(Forward(self._spec).flat(self._choice(self._forwards[0])), *own)
            full = jax.tree.leaves(_outputs(jax.tree.structure(list(outs)), outs, cotangents))
            found = Forward(self._spec).flat_vjp(self._choice(config), len(own))(*own, *full)
        return list(found)

    def _gradients(self, saved: dict[int, Any]) -> dict[tuple[int, int], Any]:
        """Return the gradients, or the error, of each pair of a forward and a backward, by their indices."""
        numbers = range(len(self._backwards))
        try:
            programs = [(numbers, self._compiled(numbers, saved[0]))]
        except Exception as error:  # noqa: BLE001 - compiling each alone shows which of them fails
            logger.debug("backwards are compiled one by one, because together they fail: %s", error_text(error))
            programs = [(range(number, number + 1), self._alone(number, saved[0])) for number in numbers]
        found: dict[tuple[int, int], Any] = {}
        for forward, left in saved.items():
            for which, program in programs:
                answers = program(left, self._own, self._cotangents) if callable(program) else [program]
                found |= {(forward, number): answer for number, answer in zip(which, answers, strict=True)}
        return found

    def _compiled(self, numbers: Sequence[int], saved: Any) -> Any:
        configs = [self._backwards[number] for number in numbers]

        def program(saved: Any, own: Any, cotangents: Any) -> list[Any]:
            return [self._backward(config, saved, own, cotangents) for config in configs]

        return compiled(program, saved, self._own, self._cotangents)

    def _alone(self, number: int, saved: Any) -> Any:
        try:
            return self._compiled([number], saved)
        except Exception as error:  # noqa: BLE001 - the row has the reason
            return error

    def _difference(self, number: int, gradients: dict[tuple[int, int], Any]) -> str:
        """Return how the gradients of one backward depend on the forward's configuration; empty if they do not."""
        # Other checks cover the gradient with the same configuration for both, but not a separate backward space.
        first = (0, 0) if self._has_own_space else (number, number)
        want = gradients.get(first, gradients[0, 0])
        names = array_names(self._spec)
        for (forward, backward), got in gradients.items():
            if backward != number:
                continue
            if isinstance(got, Exception):
                return f"{type(got).__name__}: {got}"
            if isinstance(want, Exception):
                return ""
            reason = self._first_reason(names, got, want)
            if reason:
                return f"after the forward of {compact(self._forwards[forward])}: {reason}"
        return ""

    def _first_reason(self, names: Sequence[str], got: Sequence[Any], want: Sequence[Any]) -> str:
        both = [(name, g, w) for name, g, w in zip(names, got, want, strict=False) if g is not None and w is not None]
        if not both:
            return ""
        called, mine, theirs = zip(*both, strict=True)
        found = gradient_deviations(
            mine,
            theirs,
            platform=self._subject.platform,
            precision=self._subject.inv.precision,
            names=[f"the gradient of {name}" for name in called],
        )
        whose = "the heuristic's" if self._has_own_space else "that after its own forward"
        return next((d.reason.replace("the reference", whose) for d in found if d.reason), "")


def _pair_row(config: object, reason: str) -> CheckRow:
    status = CheckStatus.FAILED if reason else CheckStatus.OK
    return CheckRow(check="residuals", config=config, status=status, reason=reason)


def _differing_types(found: Sequence[Any], want: Sequence[Any]) -> str:
    listed = [", ".join(f"{dtype}{list(shape)}" for shape, dtype in types[1:]) for types in (found, want)]
    return f"the residuals depend on the configuration: {listed[0]}; under the heuristic {listed[1]}"


def _wrong_types(
    subject: Subject, config: object, arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> list[str]:
    wrong: list[str] = []

    def trace(arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> None:
        spec, own = subject.taken_apart(arrays)
        args, _ = spec.join(own)
        found = _answer(spec, config, subject.platform, own, cotangents)
        if len(found) != len(args):  # the row of the gradient reports it
            return
        names, at = array_names(spec), 0
        for argument, gradient in zip(args, found, strict=True):
            count = sum(spec_is_array for spec_is_array in map(_is_array, jax.tree.leaves(argument)))
            wrong.extend(_misfits(argument, gradient, names[at : at + count]))
            at += count

    # Only types are needed, so trace without computing.
    jax.eval_shape(trace, arrays, cotangents)
    return wrong


def _answer(
    spec: Any, config: object, platform: str, own: Sequence[object], cotangents: Sequence[jax.Array]
) -> Sequence[Any]:
    """Return the unmodified result of the kernel's rule."""
    kernel = spec.kernel
    trees: list[Any] = []
    args, kwargs = spec.join(own)
    choice = Choice(config=config, platform=platform, trees=trees)
    if overrides(kernel, "custom_vjp"):
        outs = Forward(spec).flat(choice)(*own)
        rule = hook(kernel, "custom_vjp", platform, config)
        # Call the rule directly, because its usual caller casts gradients to the arguments' dtypes.
        found: Sequence[Any] = rule(args, config, kwargs, _outputs(trees[0], outs, cotangents))
        return found
    out, residuals = hook(kernel, "fwd_with_residuals", platform, config)(*args, cfg=config, **kwargs)
    given = _outputs(jax.tree.structure(out), jax.tree.leaves(out), cotangents)
    gradients: Sequence[Any] = hook(kernel, "vjp", platform, config)(residuals, out, given, *args, cfg=config, **kwargs)
    return gradients


def _outputs(tree: Any, outs: Sequence[Any], cotangents: Sequence[jax.Array]) -> tuple[Any, ...]:
    given = iter(cotangents)
    return as_outputs(
        tree, [next(given) if is_inexact(out) else np.zeros(out.shape, jax.dtypes.float0) for out in outs]
    )


def _misfits(argument: object, gradient: object, names: Sequence[str]) -> list[str]:
    arrays = [leaf for leaf in jax.tree.leaves(argument) if _is_array(leaf)]
    gradients = jax.tree.leaves(gradient, is_leaf=lambda leaf: leaf is None)
    if len(gradients) != len(arrays):  # None for a whole subtree, or for a static argument
        return []
    return [
        f"the gradient of {name} is {found.dtype}, but {name} is {array.dtype}; return it as {array.dtype}"
        for name, array, found in zip(names, arrays, gradients, strict=True)
        if found is not None and is_inexact(array) and found.dtype != array.dtype
    ]


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")
