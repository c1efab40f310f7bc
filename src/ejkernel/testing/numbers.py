# SPDX-License-Identifier: Apache-2.0
"""Checks of a kernel's results, gradients and tangents, with and without `vmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.measure.correctness import Deviation, deviations
from ejkernel.ops.core.examples import stacked
from ejkernel.ops.core.kernel import has_gradient_rule
from ejkernel.ops.core.transformations.nodes import Choice, Flat, is_inexact
from ejkernel.ops.errors import CandidateError
from ejkernel.ops.utils.random_arrays import random_array
from ejkernel.testing.numeric import numeric_row
from ejkernel.testing.programs import (
    BATCHES,
    Arrays,
    Job,
    Pattern,
    Results,
    alone,
    compiled,
    computed,
    cotangents_of,
    curved,
    gradient_deviations,
    patterns,
    pulled,
    pushed,
)
from ejkernel.testing.report import CheckRow, CheckStatus
from ejkernel.testing.rules import pair_rows, rule_row
from ejkernel.testing.subject import Subject

_ALONE = Pattern("under grad")
_ELEMENTS = max(*BATCHES, 6)  # examples for the largest batch
_BEFORE = "the same call before"
_REPEATS = 2  # further calls, whose results must be the same


def error_line(error: Exception) -> str:
    """Return the error's type and message, as the reason in a row."""
    return f"{type(error).__name__}: {error}"


class Numbers:
    """Compares a call under every configuration with the reference, or without one with the heuristic.

    Args:
        subject: The call.
        baseline: The heuristic's configuration.
        without: Groups of checks to leave out.
    """

    def __init__(self, subject: Subject, baseline: object, without: Sequence[str] = ()) -> None:
        self._subject, self._baseline, self._without = subject, baseline, without
        self._truth = subject.plain(Choice(config=baseline, platform=subject.platform, reference=subject.has_reference))
        self._wrt = subject.differentiable()
        self._elements = subject.elements(_ELEMENTS)
        self._kept = [[_copied(array) for array in element] for element in self._elements]
        rng = np.random.default_rng((subject.seed, 1))  # different numbers than for the arguments
        self._cotangents = [cotangents_of(self._truth, self._elements[0], rng) for _ in self._elements]
        self._tangents = [random_array(like, rng) for like in subject.types if is_inexact(like)]
        self._batches: dict[str, Results] = {}
        self._choose_derivatives()

    def _choose_derivatives(self) -> None:
        """Determine whether the kernel has a gradient, and which derivative to compare it with."""
        run = self._subject.executed(self._baseline)
        self._why_none = ""
        if not any(self._wrt):
            self._why_none = "no argument has a gradient"
        elif not self._cotangents[0]:
            self._why_none = "no result has a gradient"
        own = None if self._why_none else self._trace_error(pulled(run, self._wrt), self._cotangents[0])
        self._own_error = own
        if own is not None and not has_gradient_rule(self._subject.kernel):
            self._why_none = f"the kernel has no gradient: {error_line(own)}"
        known = self.has_gradient and self._trace_error(pulled(self._truth, self._wrt), self._cotangents[0]) is None
        self._derivative = self._truth if known else run
        rule = has_gradient_rule(self._subject.kernel)
        # Without a reference and without a rule, the kernel's gradient is JAX's derivative of `run`, and comparing the
        # two shows nothing.
        self._is_independent = known and (self._subject.has_reference or rule)
        self._tangents_of = tuple(map(is_inexact, self._subject.types))
        pushes = pushed(run, self._tangents_of), pushed(self._truth, self._tangents_of)
        errors = [] if not self._tangents else [self._trace_error(push, self._tangents) for push in pushes]
        self._why_no_tangents = next((f"no tangents: {error_line(e)}" for e in errors if e is not None), "")
        if not self._tangents or not self._cotangents[0]:
            self._why_no_tangents = "no argument, or no result, has a tangent"

    @functools.cached_property
    def _why_no_second(self) -> str:
        """Reason for not comparing second derivatives; empty if they are compared."""
        if not self.has_gradient or not self._is_independent:
            return "no independent second derivative to compare with"
        dtypes = {array.dtype for array in (*self._elements[0], *self._cotangents[0]) if is_inexact(array)}
        if not all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4 for dtype in dtypes):
            return "these dtypes are too inaccurate"
        runs = self._subject.executed(self._baseline), self._truth
        errors = (self._trace_error(self._curved(run), self._ways) for run in runs)
        return next((f"no second derivative: {error_line(error)}" for error in errors if error is not None), "")

    @functools.cached_property
    def _ways(self) -> Arrays:
        """Cotangents, followed by the directions along which gradients are differentiated."""
        rng = np.random.default_rng((self._subject.seed, 2))
        likes = [like for like, has in zip(self._subject.types, self._wrt, strict=True) if has]
        return [*self._cotangents[0], *(random_array(like, rng) for like in likes)]

    def _curved(self, run: Flat) -> Any:
        return curved(run, self._wrt, len(self._cotangents[0]))

    @property
    def has_gradient(self) -> bool:
        """Whether the kernel has a gradient under the heuristic's configuration."""
        return not self._why_none and self._own_error is None

    def _trace_error(self, function: Any, more: Arrays) -> Exception | None:
        try:
            jax.jit(function).lower(self._elements[0], more)  # JAX only calls a gradient rule when lowering
        except Exception as error:  # noqa: BLE001 - the function returns the error
            return error
        return None

    # --- one configuration ---

    def rows(self, config: object, *, second: bool = False) -> Iterator[CheckRow]:
        """Yield all rows of a configuration; only the reason if it does not run.

        Args:
            config: The configuration.
            second: Whether to compare second derivatives.
        """
        try:
            differs = self._types_differ(config)
        except Exception as error:  # noqa: BLE001 - a configuration may fail in any way; the row has the reason
            yield CheckRow(check="types", config=config, status=CheckStatus.FAILED, reason=error_line(error))
            return
        yield CheckRow(
            check="types", config=config, status=CheckStatus.FAILED if differs else CheckStatus.OK, reason=differs
        )
        if differs:
            return
        outputs = list(self._eager_rows(config))
        yield from outputs
        # The call does not run, or writes to its arguments: all further checks would fail for the same reason.
        if any(row.reason and row.error is None for row in outputs):
            return
        yield from self._compiled_rows(config, second=second and "second derivative" not in self._without)
        if "gradient" not in self._without:
            yield from rule_row(self._subject, config, self._elements[0], self._cotangents[0])
            # Under the heuristic only, because the other configurations are compared with it.
            if config is self._baseline and self.has_gradient and not self._is_independent:
                gradient = pulled(self._subject.executed(config), self._wrt)
                called = [name if has else None for name, has in zip(self._subject.names, self._wrt, strict=True)]
                yield numeric_row(gradient, config, self._elements[0], self._cotangents[0], called)

    def _types_differ(self, config: object) -> str:
        platform = self._subject.platform
        found, want = (
            [_type(out) for out in jax.eval_shape(self._subject.plain(choice), *self._elements[0])]
            for choice in (
                Choice(config=config, platform=platform),
                Choice(config=self._baseline, platform=platform),
            )
        )
        return "" if found == want else f"the results are {_listed(found)}; under the heuristic {_listed(want)}"

    def _eager_rows(self, config: object) -> Iterator[CheckRow]:
        run = self._subject.executed(config)
        try:
            # Use other inputs as well, because a kernel may return a previous result; and repeat the first ones,
            # because its results may be random.
            first, fresh, *again = (run(*self._elements[index]) for index in (0, 1, *[0] * _REPEATS))
            jax.block_until_ready((first, fresh, again))
        except Exception as error:  # noqa: BLE001 - the row has the reason
            yield CheckRow(check="outputs", config=config, status=CheckStatus.FAILED, reason=error_line(error))
            return
        truths = [self._true(_ALONE, element).outs for element in (0, 1)]
        found = [*self._deviations(first, truths[0]), *self._deviations(fresh, truths[1])]
        yield self._judged("outputs", config, found)
        repeated = [deviation for other in again for deviation in self._deviations(other, first, whose=_BEFORE)]
        yield self._judged("repeated", config, repeated)
        yield self._intact(config)

    def _intact(self, config: object) -> CheckRow:
        """Return a row that checks whether the call has modified its inputs, and restore them if so."""
        changed = [
            name
            for element, kept in zip(self._elements, self._kept, strict=True)
            for name, array, before in zip(self._subject.names, element, kept, strict=True)
            if _copied(array).tobytes() != before.tobytes()
        ]
        if not changed:
            return CheckRow(check="arguments", config=config, status=CheckStatus.OK)
        types = self._subject.types
        self._elements = [
            [_restored(array, like) for array, like in zip(kept, types, strict=True)] for kept in self._kept
        ]
        reason = f"the call modifies its argument {', '.join(dict.fromkeys(changed))}"
        return CheckRow(check="arguments", config=config, status=CheckStatus.FAILED, reason=reason)

    def _compiled_rows(self, config: object, *, second: bool) -> Iterator[CheckRow]:
        run = self._subject.executed(config)
        differentiates, why = self._differentiates(config, run)
        with_gradient = differentiates and "gradient" not in self._without
        batches = [] if "vmap" in self._without or self._why_no_batches else self._patterns
        jobs = self._jobs(run, batches, with_gradient=with_gradient)
        with_tangents = "tangents" not in self._without
        if with_tangents and not self._why_no_tangents:
            jobs["tangents"] = (pushed(run, self._tangents_of), self._elements[0], self._tangents)
        second = second and with_gradient
        if second and not self._why_no_second:
            jobs["second derivative"] = (self._curved(run), self._elements[0], self._ways)
        found = computed(jobs)
        yield self._outputs_row("jit", config, found["jit"])
        for pattern in batches:
            yield self._pattern_row(config, pattern, found[pattern.name])
        if self._why_no_batches and "vmap" not in self._without:
            yield CheckRow(check="vmap", config=config, status=CheckStatus.SKIPPED, reason=self._why_no_batches)
        if with_gradient:
            rows = list(self._gradient_rows(config, found[_ALONE.name]))
            yield from rows
            # The derivative of a wrong gradient is wrong, too.
            if second and not any(row.status == CheckStatus.FAILED for row in rows):
                yield self._second_row(config, found.get("second derivative"))
        elif "gradient" not in self._without:
            status = CheckStatus.SKIPPED if self._why_none else CheckStatus.FAILED
            yield CheckRow(check="gradient", config=config, status=status, reason=self._why_none or why)
        if "tangents" in jobs:
            yield self._tangent_row(config, found["tangents"])
        elif with_tangents:
            yield CheckRow(check="tangents", config=config, status=CheckStatus.SKIPPED, reason=self._why_no_tangents)

    def _jobs(self, run: Flat, batches: Sequence[Pattern], *, with_gradient: bool) -> dict[str, Job]:
        """Return the functions to compile in one program, because compiling takes longer than running."""
        jobs: dict[str, Job] = {"jit": (alone(run), self._elements[0], [])}
        for pattern in [*([_ALONE] if with_gradient else []), *batches]:
            batched = pattern.batched(run)
            function = pulled(batched, self._wrt) if with_gradient else alone(batched)
            jobs[pattern.name] = (function, pattern.inputs(self._elements), self._batched_cotangents(pattern))
        return jobs

    def _differentiates(self, config: object, run: Flat) -> tuple[bool, str]:
        """Return whether a configuration has a gradient, and an error if only this configuration has none."""
        if self._why_none:
            return False, ""
        if config is self._baseline:
            error = self._own_error
        else:
            error = self._trace_error(pulled(run, self._wrt), self._cotangents[0])
        return error is None, "" if error is None else error_line(error)

    def _outputs_row(self, check: str, config: object, found: Results | Exception) -> CheckRow:
        if isinstance(found, Exception):
            return CheckRow(check=check, config=config, status=CheckStatus.FAILED, reason=error_line(found))
        return self._judged(check, config, self._deviations(found.outs, self._true(_ALONE, 0).outs))

    def _pattern_row(self, config: object, pattern: Pattern, found: Results | Exception) -> CheckRow:
        if isinstance(found, Exception):
            return CheckRow(check=pattern.name, config=config, status=CheckStatus.FAILED, reason=error_line(found))
        true = self._gathered(pattern)
        gradients = [] if found.gradients is None else self._gradient_deviations(found.gradients, true.gradients)
        return self._judged(pattern.name, config, [*self._deviations(found.outs, true.outs), *gradients])

    def _gradient_rows(self, config: object, found: Results | Exception) -> Iterator[CheckRow]:
        """Yield a row for each argument's gradient, and one for the results, which a rule with residuals recomputes."""
        yield self._outputs_row(_ALONE.name, config, found)
        if not isinstance(found, Exception):
            names = [name for name, has in zip(self._subject.names, self._wrt, strict=True) if has]
            deviations_ = self._gradient_deviations(found.gradients, self._true(_ALONE, 0).gradients)
            for name, deviation in zip(names, deviations_, strict=True):
                yield self._judged(f"gradient of {name}", config, [deviation])

    def _gradient_deviations(
        self, got: Sequence[jax.Array] | None, want: Sequence[jax.Array] | None, what: str = "gradient"
    ) -> list[Deviation]:
        names = [name for name, has in zip(self._subject.names, self._wrt, strict=True) if has]
        called = [f"the {what} of {name}" for name in names]
        return self._deviations(got or (), want or (), called, self._whose_derivative, compare=gradient_deviations)

    def _tangent_row(self, config: object, found: Results | Exception) -> CheckRow:
        if isinstance(found, Exception):
            return CheckRow(check="tangents", config=config, status=CheckStatus.FAILED, reason=error_line(found))
        true = self._true_tangents
        names = [f"the tangent of result {index}" for index in range(len(true.gradients or ()))]
        whose = "the reference's" if self._subject.has_reference else "JAX's tangent of `run`"
        compared = self._deviations(found.gradients or (), true.gradients or (), names, whose)
        return self._judged("tangents", config, [*self._deviations(found.outs, true.outs), *compared])

    def _second_row(self, config: object, found: Results | Exception | None) -> CheckRow:
        check = "second derivative"
        if found is None:
            return CheckRow(check=check, config=config, status=CheckStatus.SKIPPED, reason=self._why_no_second)
        if isinstance(found, Exception):
            return CheckRow(check=check, config=config, status=CheckStatus.FAILED, reason=error_line(found))
        true = self._true_second.gradients
        return self._judged(check, config, self._gradient_deviations(found.gradients, true, "second derivative"))

    # --- one input of several configurations ---

    def pair_rows(self, forwards: Sequence[Any], backwards: Sequence[Any] | None) -> Iterator[CheckRow]:
        """Yield rows that check every backward after every forward; see `rules.pair_rows`."""
        if self.has_gradient and "gradient" not in self._without:
            yield from pair_rows(self._subject, forwards, backwards, self._elements[0], self._cotangents[0])

    def brief_rows(self, configs: Sequence[Any]) -> Iterator[CheckRow]:
        """Yield a row for each configuration that checks results and gradients of one input, in one program."""
        differentiates = self.has_gradient and "gradient" not in self._without
        of = functools.partial(pulled, wrt=self._wrt) if differentiates else alone
        runs = {str(index): of(self._subject.executed(config)) for index, config in enumerate(configs)}
        inputs = self._elements[0], self._cotangents[0]
        found, true = computed({key: (run, *inputs) for key, run in runs.items()}), self.true_of(inputs[0])
        for config, one in zip(configs, found.values(), strict=True):
            if isinstance(one, Exception):
                yield CheckRow(check="outputs", config=config, status=CheckStatus.FAILED, reason=error_line(one))
                continue
            gradients = [] if one.gradients is None else self._gradient_deviations(one.gradients, true.gradients)
            yield self._judged("outputs", config, [*self._deviations(one.outs, true.outs), *gradients])

    def program(self, config: object) -> Callable[[Arrays], Results]:
        """Return a compiled function from the call's arrays to its results and gradients under a configuration."""
        run, differentiates = self._subject.executed(config), self.has_gradient and "gradient" not in self._without
        function = pulled(run, self._wrt) if differentiates else alone(run)
        program = compiled(function, self._elements[0], self._cotangents[0])
        return lambda arrays: program(arrays, self._cotangents[0])

    def true_of(self, arrays: Arrays, index: int = 0) -> Results:
        """Return the reference results for other arrays, with the cotangents of one example."""
        found: Results = self._truth_program(arrays, self._cotangents[index])
        # In this case `found` is computed by the kernel itself, so take the outputs from the reference.
        if self.has_gradient and self._derivative is not self._truth:
            return Results(self._outputs_program(arrays, self._cotangents[index]).outs, found.gradients)
        return found

    @property
    def examples(self) -> list[Arrays]:
        """Inputs of the call, the given ones first."""
        return [list(element) for element in self._elements[:2]]

    @property
    def cotangents(self) -> Arrays:
        """Cotangents of the results for the first inputs."""
        return self._cotangents[0]

    # --- reference results ---

    @property
    def _why_no_batches(self) -> str:
        kinds = [compat.key_implementation(like.dtype) for like in self._subject.types if _is_key(like)]
        if any(kind in ("rbg", "unsafe_rbg") for kind in kinds):
            return "under vmap, random keys of this kind give different numbers than one by one"
        return "" if self._subject.types else "no array to batch"

    @functools.cached_property
    def _patterns(self) -> list[Pattern]:
        return patterns(self._subject.names, self._subject.types)

    @functools.cached_property
    def _true_tangents(self) -> Results:
        inputs = self._elements[0], self._tangents
        found: Results = compiled(pushed(self._truth, self._tangents_of), *inputs)(*inputs)
        return found

    @functools.cached_property
    def _true_second(self) -> Results:
        inputs = self._elements[0], self._ways
        found: Results = compiled(self._curved(self._truth), *inputs)(*inputs)
        return found

    @functools.cached_property
    def _truth_program(self) -> Any:
        function = pulled(self._derivative, self._wrt) if self.has_gradient else alone(self._truth)
        return compiled(function, self._elements[0], self._cotangents[0])

    @functools.cached_property
    def _outputs_program(self) -> Any:
        return compiled(alone(self._truth), self._elements[0], self._cotangents[0])

    def _true(self, pattern: Pattern, index: int) -> Results:
        """Return the reference results for one example of a batch, or of the call if the pattern has no batch."""
        own = pattern.own(self._elements, index) if pattern.levels else self._elements[index]
        return self.true_of(own, index)

    def _gathered(self, pattern: Pattern) -> Results:
        """Return the reference results for a batch, computed one example at a time."""
        if pattern.name not in self._batches:
            results = [self._true(pattern, index) for index in range(pattern.count)]
            self._batches[pattern.name] = pattern.gathered(results, self._wrt)
        return self._batches[pattern.name]

    def _batched_cotangents(self, pattern: Pattern) -> Arrays:
        axes = (0,) * len(self._cotangents[0])
        return stacked(self._cotangents[: pattern.count], [(axes, size) for size in pattern.sizes])

    @property
    def _whose_derivative(self) -> str:
        if not self._is_independent:
            return "the heuristic's"
        return "the reference's" if self._subject.has_reference else "JAX's gradient of `run`"

    def _deviations(
        self,
        got: Sequence[jax.Array],
        want: Sequence[jax.Array],
        names: Sequence[str] = (),
        whose: str = "",
        compare: Callable[..., Iterable[Deviation]] = deviations,
    ) -> list[Deviation]:
        """Return the deviations of results. NaN is only correct where the reference has NaN."""
        inv = self._subject.inv
        whose = whose or ("the reference" if self._subject.has_reference else "the heuristic's")
        try:
            found = list(compare(got, want, platform=inv.platform, precision=inv.precision, names=names))
        except CandidateError as error:
            return [Deviation(np.inf, 0.0, str(error))]
        called = names or [f"result {index}" for index in range(len(got))]
        return [
            _with_nan(name, array, d._replace(reason=d.reason.replace("the reference", whose)), whose)
            for name, array, d in zip(called, got, found, strict=True)
        ]

    def _judged(self, check: str, config: object, found: Sequence[Deviation]) -> CheckRow:
        found = found or [Deviation(0.0, 0.0)]
        wrong = next((deviation for deviation in found if deviation.reason), None)
        worst = wrong or max(found, key=lambda d: d.error / d.allowed if d.allowed else 0.0)
        status = CheckStatus.OK if wrong is None else CheckStatus.FAILED
        return CheckRow(
            check=check,
            config=config,
            status=status,
            reason=worst.reason,
            error=float(worst.error),
            allowed=worst.allowed,
        )


def _with_nan(name: str, array: jax.Array, deviation: Deviation, whose: str) -> Deviation:
    # If two configurations both compute NaN, both are wrong, unless a reference has NaN as well.
    if deviation.reason or whose.startswith(("the reference", _BEFORE)) or not _has_nan(array):
        return deviation
    return Deviation(np.inf, deviation.allowed, f"{name} has NaN, and no reference confirms it")


def _type(out: Any) -> tuple[tuple[int, ...], str]:
    return tuple(out.shape), str(out.dtype)


def _listed(types: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in types)


def _is_key(array: Any) -> bool:
    return bool(compat.dtypes.issubdtype(array.dtype, compat.dtypes.prng_key))


def _copied(array: Any) -> Any:
    """Return a NumPy copy of an array; of random keys, their data."""
    return np.array(jax.random.key_data(array) if _is_key(array) else array)


def _restored(kept: Any, like: Any) -> Any:
    if not _is_key(like):
        return jnp.array(kept)
    return jax.random.wrap_key_data(jnp.array(kept), impl=compat.key_implementation(like.dtype))


def _has_nan(array: jax.Array) -> bool:
    return is_inexact(array) and bool(np.isnan(np.asarray(array)).any())
