# SPDX-License-Identifier: Apache-2.0
"""Checks of gradient rules: the dtypes that they return, and every backward after every forward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.autotuner.measure.correctness import Deviation
from ejkernel.ops.core.callspec import array_names
from ejkernel.ops.core.hooks import form_of, has_residual_form
from ejkernel.ops.core.kernel import has_gradient_rule, overrides
from ejkernel.ops.core.transformations.nodes import Choice, Forward, as_outputs, run_vjp
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.random_arrays import random_array
from ejkernel.ops.utils.values.signature import is_array, is_inexact
from ejkernel.testing.programs import Arrays, Results, Together, compiled
from ejkernel.testing.report import Comparison
from ejkernel.testing.rows import CheckRow, attempted, compared, error_line, row
from ejkernel.testing.subject import Subject, listed, types_of


def rule_row(subject: Subject, config: object, arrays: Arrays, cotangents: Arrays) -> Iterator[CheckRow]:
    """Yield a row that checks whether each gradient of the kernel's rule has its argument's dtype, if it has a rule."""
    if not has_gradient_rule(subject.kernel) or not cotangents:
        return
    yield row("gradient types", config, attempted(_wrong_types, subject, config, arrays, cotangents))


class Pairs:
    """A gradient rule under every pair of a forward and a backward configuration.

    Args:
        subject: The call.
        forwards: Configurations of the forward, the heuristic's first.
        backwards: Configurations of the backward call, the heuristic's first; `None`: those of the forward.
        arrays: Inputs of the call.
        cotangents: One for each floating-point result.
    """

    def __init__(
        self,
        subject: Subject,
        forwards: Sequence[Any],
        backwards: Sequence[Any] | None,
        arrays: Arrays,
        cotangents: Arrays,
    ) -> None:
        self._subject, self._cotangents = subject, cotangents
        self._spec, self._own = subject.taken_apart(arrays)
        self._leaves_residuals = has_residual_form(subject.kernel)
        # A rule that only takes the arguments does not depend on the forward's configuration.
        self._forwards = list(forwards if self._leaves_residuals else forwards[:1])
        self._has_own_space = backwards is not None
        self._backwards = list(forwards if backwards is None else backwards)
        self._trees: list[Any] = []

    def rows(self) -> Iterator[CheckRow]:
        """Yield a row for each backward configuration, and for each forward that fails or returns other types.

        Each backward must compute the same gradients after every forward.
        """
        has_rule = self._leaves_residuals or (self._has_own_space and has_gradient_rule(self._subject.kernel))
        if not self._cotangents or not has_rule or len(self._backwards) < 2:
            return
        types: list[Any] = []
        jobs: dict[int, Any] = {}
        reasons: dict[int, str] = {}
        for index, config in enumerate(self._forwards):
            found = attempted(self._types, config)
            if isinstance(found, Exception):
                reasons[index] = error_line(found)
            else:
                types = types or found
                differing = f"{listed(found[1:])}; under the heuristic {listed(types[1:])}"
                reasons[index] = "" if found == types else f"the residuals depend on the configuration: {differing}"
            if not reasons[index]:
                jobs[index] = (functools.partial(self._forward, config), self._own, [])
        saved = Together(jobs)()
        for index, config in enumerate(self._forwards):
            left = saved.get(index)
            reason = reasons[index] or (error_line(left) if isinstance(left, Exception) else "")
            if reason:
                yield row("residuals", config, reason)
                saved.pop(index, None)
        if 0 not in saved:
            return
        gradients = self._gradients(saved)
        for number, config in enumerate(self._backwards):
            if self._has_own_space or number in saved:
                yield row("residuals", config, self._difference(number, gradients))

    def _choice(self, config: Any, trees: list[Any] | None = None) -> Choice:
        return Choice(config=config, platform=self._subject.platform, trees=trees)

    def _types(self, config: Any) -> list[Any]:
        """Return the structure of the forward's residuals, followed by their types."""
        if not self._leaves_residuals:
            return []
        trees: list[Any] = []
        found = types_of(Forward(self._spec, residuals=True).flat(self._choice(config, trees)), self._own)
        self._trees = self._trees or list(trees)
        return [trees[1], *found[trees[0].num_leaves :]]

    def _forward(self, config: Any, own: Arrays, _: Arrays) -> Any:
        """Return the forward's results and residuals."""
        if not self._leaves_residuals:
            return ()
        return Forward(self._spec, residuals=True).flat(self._choice(config))(*own)

    def _backward(self, config: Any, saved: Sequence[Any], own: Arrays) -> Results:
        if self._leaves_residuals:
            outs = saved[: self._trees[0].num_leaves]
            given = jax.tree.leaves(_outputs(self._trees[0], outs, self._cotangents))
            found = run_vjp(self._spec, self._choice(config), (self._trees[0], self._trees[1]), saved, own, given)
        else:
            outs = jax.eval_shape(Forward(self._spec).flat(self._choice(self._forwards[0])), *own)
            full = jax.tree.leaves(_outputs(jax.tree.structure(list(outs)), outs, self._cotangents))
            found = Forward(self._spec).flat_vjp(self._choice(config), len(own))(*own, *full)
        return Results((), list(found))

    def _gradients(self, saved: Mapping[int, Any]) -> dict[tuple[int, int], Any]:
        """Return the gradients, or the error, of each pair of a forward and a backward, by their indices."""
        jobs = {
            number: (functools.partial(self._backward, config), saved[0], self._own)
            for number, config in enumerate(self._backwards)
        }
        program = Together(jobs)
        return {
            (forward, number): found
            for forward, left in saved.items()
            for number, found in program(dict.fromkeys(jobs, (left, self._own))).items()
        }

    def _difference(self, number: int, gradients: Mapping[tuple[int, int], Any]) -> str:
        """Return how the gradients of one backward depend on the forward's configuration; empty if they do not."""
        # Other checks cover the gradient with the same configuration for both, but not a separate backward space.
        first = (0, 0) if self._has_own_space else (number, number)
        want = gradients.get(first, gradients[0, 0])
        for (forward, backward), got in gradients.items():
            if backward != number:
                continue
            if isinstance(got, Exception):
                return error_line(got)
            if isinstance(want, Exception):
                return ""
            reason = self._first_reason(got.gradients, want.gradients)
            if reason:
                return f"after the forward of {compact(self._forwards[forward])}: {reason}"
        return ""

    def _first_reason(self, got: Sequence[Any], want: Sequence[Any]) -> str:
        names = array_names(self._spec)
        both = [each for each in zip(names, got, want, strict=False) if each[1] is not None and each[2] is not None]
        whose = "the heuristic's" if self._has_own_space else "that after its own forward"
        compare = Comparison(self._subject.platform, self._subject.inv.precision)
        called = [f"the gradient of {name}" for name, _, _ in both]
        found = compare([mine for _, mine, _ in both], [true for _, _, true in both], whose, called) if both else []
        return next((deviation.reason for deviation in found if deviation.reason), "")


def _wrong_types(subject: Subject, config: object, arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> str:
    """Return which gradients of the rule have other dtypes than their arguments; empty if none has."""
    wrong: list[str] = []

    def trace(arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> None:
        spec, own = subject.taken_apart(arrays)
        args, _ = spec.join(own)
        found = _answer(spec, config, subject.platform, own, cotangents)
        if len(found) != len(args):  # the row of the gradient reports it
            return
        names, at = array_names(spec), 0
        for argument, gradient in zip(args, found, strict=True):
            count = sum(map(is_array, jax.tree.leaves(argument)))
            wrong.extend(_misfits(argument, gradient, names[at : at + count]))
            at += count

    # Only types are needed, so trace without computing.
    jax.eval_shape(trace, arrays, cotangents)
    return "; ".join(wrong)


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
        rule = getattr(kernel, form_of(kernel, "custom_vjp", platform, config))
        # Call the rule directly, because its usual caller casts gradients to the arguments' dtypes.
        found: Sequence[Any] = rule(args, config, kwargs, _outputs(trees[0], outs, cotangents))
        return found
    forms = (form_of(kernel, name, platform, config) for name in ("fwd_with_residuals", "vjp"))
    forward, backward = (getattr(kernel, form) for form in forms)
    out, residuals = forward(*args, cfg=config, **kwargs)
    given = _outputs(jax.tree.structure(out), jax.tree.leaves(out), cotangents)
    gradients: Sequence[Any] = backward(residuals, out, given, *args, cfg=config, **kwargs)
    return gradients


def _outputs(tree: Any, outs: Sequence[Any], cotangents: Sequence[jax.Array]) -> tuple[Any, ...]:
    given = iter(cotangents)
    return as_outputs(
        tree, [next(given) if is_inexact(out) else np.zeros(out.shape, jax.dtypes.float0) for out in outs]
    )


def _misfits(argument: object, gradient: object, names: Sequence[str]) -> list[str]:
    arrays = [leaf for leaf in jax.tree.leaves(argument) if is_array(leaf)]
    gradients = jax.tree.leaves(gradient, is_leaf=lambda leaf: leaf is None)
    if len(gradients) != len(arrays):  # None for a whole subtree, or for a static argument
        return []
    return [
        f"the gradient of {name} is {found.dtype}, but {name} is {array.dtype}; return it as {array.dtype}"
        for name, array, found in zip(names, arrays, gradients, strict=True)
        if found is not None and is_inexact(array) and found.dtype != array.dtype
    ]


_CHECK: Final = "gradient, by differences"
_STEP: Final = {"float32": 1e-2, "float64": 1e-4}  # relative to an argument: balances rounding and curvature
_DIRECTIONS: Final = 3  # in addition to the gradient's own
_ALLOWED: Final = 0.1  # a wrong sign or factor gives an error near 1; a kink of the function nearby gives less


def numeric_row(
    gradient: Callable[[Arrays, Arrays], Results],
    config: object,
    arrays: Arrays,
    cotangents: Arrays,
    called: Sequence[str | None],
) -> CheckRow:
    """Return a row that compares gradients with central differences, along a few directions of each argument.

    Args:
        gradient: Computes results and gradients from arrays and cotangents.
        config: Its configuration.
        arrays, cotangents: Its arguments.
        called: The names of the arrays; `None` for arrays without a gradient.
    """
    dtypes = {str(array.dtype) for array, name in zip(arrays, called, strict=True) if name is not None}
    # Include results: the difference of two 16-bit numbers has few correct digits.
    dtypes |= {str(cotangent.dtype) for cotangent in cotangents}
    if not dtypes <= set(_STEP):
        reason = f"finite differences are too inaccurate in {', '.join(sorted(dtypes - set(_STEP)))}"
        return row(_CHECK, config, reason, skipped=True)
    program = compiled(gradient, arrays, cotangents)
    rng, worst, reason = np.random.default_rng(0), 0.0, ""
    gradients = iter(program(arrays, cotangents).gradients or ())
    for index, array in enumerate(arrays):
        if called[index] is not None:
            found = next(gradients)
            ways = [_unit(found), *(random_array(array, rng) for _ in range(_DIRECTIONS))]
            with np.errstate(all="ignore"):  # values that are not finite are reported below
                error = max(_relative_error(program, index, (arrays, cotangents), found, way) for way in ways)
            if error > max(worst, _ALLOWED):
                reason = f"the gradient of {called[index]} differs from finite differences: {error:.2g} relative"
            worst = max(worst, error)
    if not math.isfinite(worst):
        return row(_CHECK, config, "the results are not finite", skipped=True)
    return compared(_CHECK, config, [Deviation(worst, _ALLOWED, reason)])


def _relative_error(program: Any, index: int, inputs: tuple[Arrays, Arrays], gradient: object, direction: Any) -> float:
    """Return the error of the derivative along `direction`, relative to the expected size of its terms."""
    arrays, cotangents = inputs
    size = float(jnp.sqrt(jnp.mean(jnp.square(arrays[index])))) or 1.0 if arrays[index].size else 1.0
    step = size * _STEP[str(arrays[index].dtype)]

    def moved(sign: int) -> list[Any]:
        there = [array + sign * step * direction if i == index else array for i, array in enumerate(arrays)]
        return [np.asarray(out, np.float64) for out in program(there, cotangents).outs if is_inexact(out)]

    slopes = [(ahead - behind) / (2 * step) for ahead, behind in zip(moved(1), moved(-1), strict=True)]
    terms = [np.asarray(ct, np.float64) * slope for ct, slope in zip(cotangents, slopes, strict=True)]
    own = np.asarray(gradient, np.float64) * np.asarray(direction, np.float64)
    measured, claimed = sum(term.sum() for term in terms), own.sum()
    # Sums with random signs cancel, so the error is also compared with the size of the terms.
    expected = np.sqrt(sum((term**2).sum() for term in terms)) + np.sqrt((own**2).sum())
    scale = max(expected, abs(measured), abs(claimed))
    if not np.isfinite(scale):
        return math.inf
    return float(abs(measured - claimed) / scale) if scale else 0.0


def _unit(gradient: Any) -> Any:
    """Return the gradient, along which terms do not cancel, scaled to the size of a random direction."""
    size = jnp.sqrt(jnp.mean(jnp.square(gradient)))
    return gradient / jnp.where(size > 0, size, 1)
