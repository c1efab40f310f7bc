# SPDX-License-Identifier: Apache-2.0
"""Checks of a kernel's results, gradients and tangents, with and without `vmap`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.core.examples import stacked
from ejkernel.ops.core.hooks import writes_residual_form
from ejkernel.ops.core.kernel import has_gradient_rule
from ejkernel.ops.core.transformations.nodes import Choice, Flat, Forward
from ejkernel.ops.utils.random_arrays import random_array
from ejkernel.ops.utils.values.signature import is_inexact
from ejkernel.testing.programs import (
    BATCHES,
    Arrays,
    Job,
    Pattern,
    Results,
    Together,
    alone,
    brief_patterns,
    compiled,
    cotangents_of,
    curved,
    patterns,
    pulled,
    pushed,
)
from ejkernel.testing.report import BY_JAX, HEURISTIC, REFERENCE
from ejkernel.testing.rows import CheckRow, CheckStatus, attempted, compared, error_line, not_run_row, row
from ejkernel.testing.rules import numeric_row, rule_row
from ejkernel.testing.subject import Subject, Truth, function_of, listed, types_of

_ALONE = "under grad"
_BEFORE = "the same call before"
_REPEATS = 2  # further calls, whose results must be the same
_SECOND = "second derivative"
_NUMERIC = ("gradient", _SECOND, "tangents", "vmap")


@dataclasses.dataclass(frozen=True, slots=True)
class _Check:
    """A function of the call, and the results that it should have."""

    function: Callable[[Arrays, Arrays], Results]
    arrays: Arrays
    more: Arrays
    want: Callable[[], Results]
    what: str = "gradient"

    @property
    def job(self) -> Job:
        return self.function, self.arrays, self.more


class Numbers:
    """Compares results and derivatives of a call with the reference; without one, with the heuristic's results.

    `rows(config)` yields one row for each check of a configuration.

    Args:
        subject: The call.
        baseline: The heuristic's configuration.
        like: The comparisons of the same call on arrays of other sizes or dtypes, which know
            the derivatives that the kernel has; without them (`None`), the constructor determines these.

    Attributes:
        truth: The results and derivatives to compare with.
        whose: Their source for messages: the reference, or the heuristic's configuration.
    """

    truth: Truth

    def __init__(self, subject: Subject, baseline: object, like: Numbers | None = None) -> None:
        self.subject, self._baseline, self._scope = subject, baseline, subject.scope
        self.whose = REFERENCE if subject.has_reference else HEURISTIC
        self.examples = subject.elements(1 if like else 2 if self._scope.is_brief else max(*BATCHES, 6))
        self._kept = [[_copied(array) for array in example] for example in self.examples]
        function, rng = function_of(subject, baseline), np.random.default_rng((subject.scope.seed, 1))
        run = subject.executed(baseline)
        self.cotangents = [self._cotangents(run, function, rng) for _ in self.examples]
        self._tangents = [random_array(like, rng) for like in subject.types if is_inexact(like)]
        self._programs: dict[int, Together] = {}
        self._choose_derivatives(run, function, like)

    def _cotangents(self, run: Flat, function: Flat, rng: np.random.Generator) -> Arrays:
        if self.subject.has_reference and not self._scope.is_brief:  # the reference may return other dtypes
            found: Arrays | Exception = attempted(cotangents_of, run, self.examples[0], rng)
            if not isinstance(found, Exception):  # the row of the types reports it
                return found
        return cotangents_of(function, self.examples[0], rng)

    def _choose_derivatives(self, run: Flat, function: Flat, like: Numbers | None) -> None:
        """Determine which derivatives the kernel has, and which to compare them with."""
        self.wrt, self._why_none = self.subject.differentiable(), ""
        self.own_error: Exception | None = None
        known, rule = True, has_gradient_rule(self.subject.kernel)
        if self.subject.kernel.why_no_gradient:
            self._why_none = self.subject.kernel.why_no_gradient
        elif not any(self.wrt) or not self.cotangents[0]:
            self._why_none = f"no {'result' if any(self.wrt) else 'argument'} has a gradient"
        elif like is not None:
            self._why_none, self.own_error, known = like._why_none, like.own_error, not like.truth.has_rule
        elif not self._scope.is_brief:
            self.own_error = self._trace_error(pulled(run, self.wrt), self.cotangents[0])
            if self.own_error is not None and not rule:
                self._why_none = f"the kernel has no gradient: {error_line(self.own_error)}"
            known = self.has_gradient and self._trace_error(pulled(function, self.wrt), self.cotangents[0]) is None
        self.truth = Truth(self.subject, function, self.wrt if self._has_gradients else (), rule=None if known else run)
        # Without a reference and without a rule, the kernel's gradient is JAX's derivative of `run`, and comparing the
        # two shows nothing.
        self._is_independent = known and (self.subject.has_reference or rule)
        derivative = "the reference's" if self.subject.has_reference else BY_JAX
        self._whose_derivative = derivative if self._is_independent else HEURISTIC

    @property
    def has_gradient(self) -> bool:
        """Whether the kernel has a gradient under the heuristic's configuration."""
        return not self._why_none and self.own_error is None

    @property
    def _has_gradients(self) -> bool:
        return self.has_gradient and "gradient" not in self._scope.without

    @functools.cached_property
    def _why_no_tangents(self) -> str:
        if self.subject.kernel.why_no_gradient:
            return self.subject.kernel.why_no_gradient
        if not self._tangents or not self.cotangents[0]:
            return "no argument, or no result, has a tangent"
        pushes = (pushed(run, self._inexact) for run in (self.subject.executed(self._baseline), self.truth.function))
        return self._first_error("no tangents", pushes, self._tangents)

    @functools.cached_property
    def _why_no_second(self) -> str:
        if not self.has_gradient or not self._is_independent:
            return "no independent second derivative to compare with"
        dtypes = {array.dtype for array in (*self.examples[0], *self.cotangents[0]) if is_inexact(array)}
        if not all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4 for dtype in dtypes):
            return "these dtypes are too inaccurate"
        runs = self.subject.executed(self._baseline), self.truth.function
        return self._first_error("no second derivative", map(self._curved, runs), self._ways)

    @functools.cached_property
    def _ways(self) -> Arrays:
        """Cotangents, followed by the directions along which gradients are differentiated."""
        rng = np.random.default_rng((self._scope.seed, 2))
        likes = [like for like, has in zip(self.subject.types, self.wrt, strict=True) if has]
        return [*self.cotangents[0], *(random_array(like, rng) for like in likes)]

    @property
    def _inexact(self) -> tuple[bool, ...]:
        return tuple(map(is_inexact, self.subject.types))

    def _curved(self, run: Flat) -> Any:
        return curved(run, self.wrt, len(self.cotangents[0]))

    def _first_error(self, what: str, functions: Any, more: Arrays) -> str:
        if self._scope.is_brief:
            return ""
        errors = (self._trace_error(function, more) for function in functions)
        return next((f"{what}: {error_line(error)}" for error in errors if error is not None), "")

    def _trace_error(self, function: Any, more: Arrays) -> Exception | None:
        # JAX only calls a gradient rule when lowering.
        found = attempted(jax.jit(function).lower, self.examples[0], more)
        return found if isinstance(found, Exception) else None

    # --- one configuration ---

    def rows(self, config: object, *, fully: bool = False) -> Iterator[CheckRow]:
        """Yield all rows of a configuration; only the reason if it does not run.

        Args:
            config: The configuration.
            fully: Whether to compare second derivatives, nested batches, and batches of one array.
        """
        differs: str | Exception = "" if self._scope.is_brief else attempted(self._types_differ, config)
        yield row("types", config, differs)
        if differs:
            return
        if not self._scope.is_brief:
            outputs = list(self._eager_rows(config))
            yield from outputs
            # The call does not run, or writes to its arguments: all further checks would fail for the same reason.
            if any(found.reason and found.error is None for found in outputs):
                return
        yield from self.subject.unavailable_rows(config, *_NUMERIC)
        without = self.subject.left_out(config)
        compiled = list(self._compiled_rows(config, without, fully=fully))
        yield from compiled
        several = len({array.dtype for array in self.examples[0] if is_inexact(array)}) > 1
        if any(made.check == "gradient" and made.status == CheckStatus.FAILED for made in compiled):
            return
        if "gradient" not in without and (several or not self._scope.is_brief or "vmap" not in without):
            yield from rule_row(self.subject, config, self.examples[0], self.cotangents[0])
            # Under the heuristic only, because the other configurations are compared with it.
            if config is self._baseline and self.has_gradient and not self._is_independent:
                gradient = pulled(self.subject.executed(config), self.wrt)
                called = [name if has else None for name, has in zip(self.subject.names, self.wrt, strict=True)]
                yield numeric_row(gradient, config, self.examples[0], self.cotangents[0], called)

    def _types_differ(self, config: object) -> str:
        found, want = [self._described(which) for which in (config, self._baseline)]
        return "" if found == want else f"the results are {found}; under the heuristic {want}"

    def _described(self, config: object) -> str:
        """Return the types of the results of `run`, with the structure unless it is one array or a tuple of several."""
        trees: list[Any] = []
        choice = Choice(config=config, platform=self.subject.platform, trees=trees)
        types = types_of(self.subject.plain(choice), self.examples[0])
        usual = 0 if len(types) == 1 else (0,) * len(types)
        return listed(types) + ("" if trees[0] == jax.tree.structure(usual) else f" in {trees[0]}")

    def _eager_rows(self, config: object) -> Iterator[CheckRow]:
        run = self.subject.executed(config)
        try:
            # Use other inputs as well, because a kernel may return a previous result; and repeat the first ones,
            # because its results may be random.
            calls = [Results(run(*self.examples[index])) for index in (0, 1, *[0] * _REPEATS)]
            first, fresh, *again = jax.block_until_ready(calls)
        except Exception as error:  # noqa: BLE001 - the row has the reason
            yield row("outputs", config, error)
            return
        found = [self.subject.compare(got, self.true(n), self.whose) for n, got in enumerate((first, fresh))]
        yield compared("outputs", config, [*found[0], *found[1]])
        yield compared("repeated", config, [d for other in again for d in self.subject.compare(other, first, _BEFORE)])
        yield row("arguments", config, self._modified())

    def _modified(self) -> str:
        """Return which inputs a call has modified, and restore them."""
        changed = [
            name
            for example, kept in zip(self.examples, self._kept, strict=True)
            for name, array, before in zip(self.subject.names, example, kept, strict=True)
            if _copied(array).tobytes() != before.tobytes()
        ]
        if changed:
            self.examples = self.subject.elements(len(self.examples))  # the same numbers
        return f"the call modifies its argument {', '.join(dict.fromkeys(changed))}" if changed else ""

    def _compiled_rows(self, config: object, without: frozenset[str], *, fully: bool) -> Iterator[CheckRow]:
        run = self.subject.executed(config)
        differentiates, why = self._differentiates(config, run, without)
        checks = dict(self._checks(run, without, differentiates=differentiates, fully=fully))
        jobs = {name: check.job for name, check in checks.items()}
        if self._scope.check_residuals:
            jobs["residuals"] = self._left(config), self.examples[0], []
        program = self._programs[id(config)] = Together(jobs)
        found = program()
        rows = [made for name, c in checks.items() for made in self._check_rows(name, config, found[name], c)]
        wrong = any(made.status == CheckStatus.FAILED for made in rows if made.check.startswith("gradient of "))
        # The derivative of a wrong gradient is wrong, too.
        for made in rows:
            yield not_run_row(made.check, config, "the gradient") if wrong and made.check == _SECOND else made
        if "residuals" in jobs:
            yield self._residuals_row(config, found["residuals"])
        if "gradient" not in without and not differentiates:
            yield row("gradient", config, self._why_none or why, skipped=bool(self._why_none))
        if fully and not self._why_none and not without & {"gradient", _SECOND} and _SECOND not in checks:
            why_none = self._why_no_second if differentiates else ""
            yield (
                row(_SECOND, config, why_none, skipped=True)
                if why_none
                else not_run_row(_SECOND, config, "the gradient")
            )
        if "tangents" not in without | checks.keys():
            yield row("tangents", config, self._why_no_tangents, skipped=True)
        if "vmap" not in without and self._why_no_batches:
            yield row("vmap", config, self._why_no_batches, skipped=True)

    def _differentiates(self, config: object, run: Flat, without: frozenset[str]) -> tuple[bool, Any]:
        """Return whether to differentiate, and the error of a configuration that has no gradient."""
        if self._why_none or "gradient" in without:
            return False, ""
        error = self.own_error
        if config is not self._baseline:
            error = self._trace_error(pulled(run, self.wrt), self.cotangents[0])
        return error is None, error or ""

    def _checks(
        self, run: Flat, without: frozenset[str], *, differentiates: bool, fully: bool
    ) -> Iterator[tuple[str, _Check]]:
        """Yield the functions to compile in one program, because compiling takes longer than running."""
        arrays, cotangents = self.examples[0], self.cotangents[0]
        derived = functools.partial(pulled, wrt=self.wrt) if differentiates else alone
        if not (self._scope.is_brief and differentiates):
            yield "jit", _Check(alone(run), arrays, [], self.true)
        if differentiates:
            yield _ALONE, _Check(derived(run), arrays, cotangents, self.true)
        if "vmap" not in without and not self._why_no_batches:
            for pattern in self._patterns if fully or self._scope.is_brief else self._patterns[:1]:
                inputs, batched = pattern.inputs(self.examples), self._batched_cotangents(pattern)
                want = functools.partial(self.truth.gathered, pattern, self.examples, self.cotangents)
                yield pattern.name, _Check(derived(pattern.batched(run)), inputs, batched, want)
                if differentiates and pattern.name == "vmap" and self.has_own_forward:
                    yield "vmap, no gradient", _Check(alone(pattern.batched(run)), inputs, [], want)
        if "tangents" not in without and not self._why_no_tangents:
            push = functools.partial(pushed, wrt=self._inexact)
            want = functools.partial(self.truth.by, "tangents", push, arrays, self._tangents)
            yield "tangents", _Check(push(run), arrays, self._tangents, want, "tangent")
        if fully and differentiates and _SECOND not in without and not self._why_no_second:
            want = functools.partial(self.truth.by, "second", self._curved, arrays, self._ways)
            yield _SECOND, _Check(self._curved(run), arrays, self._ways, want, _SECOND)

    def _check_rows(self, name: str, config: object, found: Any, check: _Check) -> Iterator[CheckRow]:
        if isinstance(found, Exception):
            yield row(name, config, found)
            return
        true = check.want()
        other = self._whose_derivative
        if check.what == "tangent" and not self.subject.has_reference:
            other = "JAX's tangent of `run`"
        deviations = self.subject.compare(found, true, self.whose, what=check.what, other=other)
        own = len(true.outs) if name == _ALONE else len(deviations)
        yield compared(name, config, deviations[:own])
        if self._scope.is_brief and name == _ALONE:
            types = [(out.shape, str(out.dtype)) for out in found.outs]
            want = types_of(self.truth.function, self.examples[0])
            yield row("types", config, "" if types == want else f"the results are {listed(types)}, not {listed(want)}")
        names = [each for each, has in zip(self.subject.names, self.wrt, strict=True) if has]
        for argument, deviation in zip(names, deviations[own:], strict=False):
            yield compared(f"gradient of {argument}", config, [deviation])

    def _left(self, config: object) -> Callable[..., Any]:
        """Return a function that computes the residuals of a forward."""

        def left(arrays: Arrays, _: Arrays) -> Any:
            spec, own = self.subject.taken_apart(arrays)
            trees: list[Any] = []
            choice = Choice(config=config, platform=self.subject.platform, trees=trees)
            found = Forward(spec, residuals=True).flat(choice)(*own)
            return jax.tree.unflatten(trees[1], found[trees[0].num_leaves :])

        return left

    def _residuals_row(self, config: object, found: Any) -> CheckRow:
        assert self._scope.check_residuals is not None  # the caller asks for it
        error = found if isinstance(found, Exception) else attempted(self._scope.check_residuals, found)
        return row("residuals", config, error_line(error) if isinstance(error, Exception) else "")

    # --- other inputs ---

    def like(self, subject: Subject, baseline: object) -> Numbers:
        """Return the comparisons for `subject`, this call on arrays of other types, with the same derivatives."""
        return Numbers(subject, baseline, self)

    @property
    def has_own_forward(self) -> bool:
        """Whether a gradient runs `fwd_with_residuals` instead of `run`."""
        return self._has_gradients and not self._scope.is_brief and writes_residual_form(self.subject.kernel)

    def all_results(self, configs: Sequence[Any], *, gradients: bool = True) -> list[Any]:
        """Return results and gradients for the first example, or an error, under each configuration."""
        inputs, form = (self.examples[0], self.cotangents[0]), self.derived if gradients else alone
        runs = {index: (form(self.subject.executed(config)), *inputs) for index, config in enumerate(configs)}
        return list(Together(runs)().values())

    def same_row(self, check: str, config: object, found: Callable[[], Results], want: Results, whose: str) -> CheckRow:
        """Return a row that compares the results of another form of the call with its own."""
        got = attempted(found)
        if isinstance(got, Exception):
            return row(check, config, got)
        return compared(check, config, self.subject.compare(got, want, whose))

    def usual(self, config: object) -> Results:
        """Return the call's results and gradients for the first example."""
        found = attempted(self.results, config, self.examples[0])
        if isinstance(found, Exception):  # the row of the gradient reports it
            return Results(self.subject.executed(config)(*self.examples[0]))
        usual: Results = found[0]
        return usual

    def results_of(self, function: Flat, arrays: Arrays) -> Results:
        """Return results and gradients of `function`, another form of the call, e.g. under `vmap`."""
        found: Results = compiled(self.derived(function), arrays, self.cotangents[0])(arrays, self.cotangents[0])
        return found

    def derived(self, function: Flat) -> Any:
        """Return a function that computes `function`, and its gradients if the kernel has them."""
        return pulled(function, self.wrt) if self._has_gradients else alone(function)

    def row_of(self, check: str, config: object, found: Results) -> CheckRow:
        """Return the row of `check` that compares `found`, results for the first example, with the reference."""
        return compared(
            check, config, self.subject.compare(found, self.true(), self.whose, other=self._whose_derivative)
        )

    def true(self, index: int = 0) -> Results:
        """Return results and gradients of the reference for the example with this index."""
        return self.truth.of(self.examples[index], self.cotangents[index])

    def results(self, config: object, arrays: Arrays) -> list[Results]:
        """Return the call's results for other arrays, with gradients and without, from a checked program."""
        found: dict[str, Any] = self._programs[id(config)]({"jit": (arrays, []), _ALONE: (arrays, self.cotangents[0])})
        chosen = [found[name] for name in (_ALONE, "jit") if name in found]
        for each in chosen:
            if isinstance(each, Exception):
                raise each
        return [Results(each.outs, each.gradients) for each in chosen]

    @property
    def _why_no_batches(self) -> str:
        kinds = [compat.tracing.key_implementation(like.dtype) for like in self.subject.types if _is_key(like)]
        if any(kind in ("rbg", "unsafe_rbg") for kind in kinds):
            return "under vmap, random keys of this kind give different numbers than one by one"
        return "" if self.subject.types else "no array to batch"

    @functools.cached_property
    def _patterns(self) -> list[Pattern]:
        ways = brief_patterns if self._scope.is_brief else patterns
        return ways(self.subject.names, self.subject.types)

    def _batched_cotangents(self, pattern: Pattern) -> Arrays:
        axes = (0,) * len(self.cotangents[0])
        return stacked(self.cotangents[: pattern.count], [(axes, size) for size in pattern.sizes])


def _is_key(array: Any) -> bool:
    return bool(compat.tracing.dtypes.issubdtype(array.dtype, compat.tracing.dtypes.prng_key))


def _copied(array: Any) -> Any:
    """Return a NumPy copy of an array; of random keys, their data."""
    return np.array(jax.random.key_data(array) if _is_key(array) else array)
