# SPDX-License-Identifier: Apache-2.0
"""The call under check: functions of its arrays, inputs for them, and its reference."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.autotuner.measure.correctness import Deviation
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.callspec import leaf_name, take_apart
from ejkernel.ops.core.examples import example_sets, saver
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, has_gradient_rule, overrides, prepared, with_python_numbers
from ejkernel.ops.core.transformations.nodes import Choice, Flat, Forward
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.implementation import OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.random_arrays import random_array
from ejkernel.ops.utils.values.signature import is_array, is_inexact
from ejkernel.testing.programs import Arrays, Pattern, Results, alone, compiled, named_after, pulled
from ejkernel.testing.report import REFERENCE, Comparison, Steps
from ejkernel.testing.rows import CheckRow, attempted, row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """What is checked, and how.

    Attributes:
        configs: The configurations to check in addition to the heuristic; `None`: those of the kernel.
        without: Groups of checks to leave out.
        unavailable: Groups that the kernel does not have, with the reason.
        seed: Seed of random inputs and of samples.
        tolerance: See `Comparison`; `None`: the tolerances of tuning.
        is_brief: Whether this is one of many calls of a suite. Then the reference computes in at least float32, batches
            are small, and no call runs eagerly.
        programs: Compiled references, for calls with equal shapes and options.
        check_residuals: Raises an error if a forward leaves wrong residuals.
        steps: Told about each step that begins.
    """

    configs: Collection[object] | None = None
    without: frozenset[str] = frozenset()
    unavailable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seed: int = 0
    tolerance: float | None = None
    is_brief: bool = False
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    check_residuals: Callable[[Any], None] | None = None
    steps: Steps = dataclasses.field(default_factory=Steps)

    def reasons(self, kernel: object, config: object) -> dict[str, str]:
        """Return the groups that a kernel does not have under a configuration, with the reasons."""
        declared: Mapping[str, str] = {}
        if isinstance(kernel, Operation) and isinstance(config, OperationConfig):
            declared = kernel.implementations[config.implementation].unavailable
        given = {**declared, **self.unavailable}
        return {group: reason for group, reason in given.items() if group not in self.without}


@dataclasses.dataclass(eq=False)
class Subject:
    """A call of a kernel as the user writes it.

    Attributes:
        kernel: The kernel.
        args, kwargs: The arguments of the call; arrays may be abstract.
        scope: What is checked, and how.
        executor: Runs the call; it does not share or save configurations.
        inv: The call as the kernel sees it.
    """

    kernel: Kernel[Any, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scope: Scope
    executor: Executor[Any, Any] = dataclasses.field(default_factory=lambda: Executor(ConfigSelectorChain()))
    inv: Invocation[Any, Any] = dataclasses.field(init=False)

    @classmethod
    def of(cls, kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope) -> Subject:
        """Return the subject of a call."""
        args, named = with_python_numbers(kernel, args, kwargs)
        subject = cls(kernel, args, dict(named), scope)

        def prepare(*arrays: jax.Array) -> None:
            given, options = prepared(kernel, *subject.join(arrays))
            rest = {name: value for name, value in options.items() if name != "cfg"}
            inv = Invocation(kernel=kernel, args=given, kwargs=rest, override_cfg=options.get("cfg"))
            _ = inv.node  # raises if the arguments do not fit `run`
            subject.inv = inv.abstract()

        # `prepare` runs under JAX's tracing, and the arrays may be abstract.
        jax.eval_shape(prepare, *subject.given)
        return subject

    def with_executor(self, executor: Executor[Any, Any]) -> Subject:
        """Return the same call, which another executor runs."""
        other = copy.copy(self)
        other.executor = executor
        return other

    def __post_init__(self) -> None:
        paths, self._tree = jax.tree_util.tree_flatten_with_path((self.args, self.kwargs))
        self._leaves = [leaf for _, leaf in paths]
        self._at = [index for index, leaf in enumerate(self._leaves) if is_array(leaf)]
        self._paths = [paths[index][0] for index in self._at]
        self.names = [leaf_name(self.kernel, path) for path in self._paths]
        self.types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.given]

    @property
    def given(self) -> Arrays:
        """The call's arrays as the user passed them."""
        return [self._leaves[index] for index in self._at]

    @property
    def platform(self) -> str:
        """Platform on which the checks run."""
        return self.inv.platform

    def compare(
        self, got: Results, want: Results, whose: str = REFERENCE, *, what: str = "gradient", other: str = ""
    ) -> list[Deviation]:
        """Return the deviations of results and of derivatives; `other` names the origin of the wanted derivatives."""
        compare = Comparison(self.platform, self.inv.precision, self.scope.tolerance)
        found = compare(got.outs, want.outs, whose)
        if got.gradients is None or want.gradients is None:
            return found
        has = zip(self.names, self.differentiable(), strict=True)
        names = [f"the {what} of {name}" for name, has_gradient in has if has_gradient]
        if what == "tangent":
            names = [f"the tangent of result {index}" for index in range(len(want.gradients))]
        return [*found, *compare(got.gradients, want.gradients, other or whose, names)]

    @property
    def has_reference(self) -> bool:
        """Whether the kernel has a reference."""
        return overrides(self.kernel, "reference")

    def with_arrays(self, arrays: Sequence[Any]) -> Subject:
        """Return the same call with other arrays, which may be abstract."""
        args, kwargs = self.join(arrays)
        return Subject.of(self.kernel, args, kwargs, self.scope)

    def left_out(self, config: object) -> frozenset[str]:
        """Return the groups of checks that the user leaves out, or the kernel does not have under a configuration."""
        return self.scope.without | self.scope.reasons(self.kernel, config).keys()

    def unavailable_rows(self, config: object, *groups: str) -> Iterator[CheckRow]:
        """Yield a skipped row for each of some groups of checks that the kernel does not have."""
        reasons = self.scope.reasons(self.kernel, config)
        yield from (row(name, config, reasons[name], skipped=True) for name in groups if name in reasons)

    def free_lengths(self) -> list[int]:
        """Return the lengths of axes that may change, in order: those above 1 that no argument gives as a number."""
        taken = [leaf for leaf in self._leaves if isinstance(leaf, int | np.integer) and not is_array(leaf)]
        return sorted({length for like in self.types for length in like.shape if length > 1 and length not in taken})

    def of_odd_sizes(self) -> Subject | None:
        """Return the call with odd lengths; `None` if its reference does not take them, or it has no reference."""
        arrays = resized(self.types, self.free_lengths())
        if not self.has_reference or arrays == self.types:
            return None
        reference = self.plain(Choice(platform=self.platform, reference=True))
        if isinstance(attempted(jax.eval_shape, reference, *arrays), Exception):  # not every length can change
            return None
        found: Subject | Exception = attempted(self.with_arrays, arrays)
        return None if isinstance(found, Exception) else found

    def join(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `arrays` in their places."""
        leaves = list(self._leaves)
        for index, array in zip(self._at, arrays, strict=True):
            leaves[index] = array
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return args, kwargs

    def executed(self, config: object, *, kernel: Kernel[Cfg, Out] | None = None) -> Flat:
        """Return the user's call as a function of its arrays, with `config`, or the heuristic's for `None`."""

        def call(*arrays: jax.Array) -> tuple[Any, ...]:
            args, kwargs = self.join(arrays)
            return tuple(jax.tree.leaves(self.executor(kernel or self.kernel, *args, cfg=config, **kwargs)))

        return named_after(config, call)

    def plain(self, choice: Choice) -> Flat:
        """Return the kernel's `run` or `reference` as a plain function, which JAX differentiates without the rule."""

        def call(*arrays: jax.Array) -> tuple[Any, ...]:
            spec, own = self.taken_apart(arrays)
            return Forward(spec).flat(choice)(*own)

        return call if choice.reference else named_after(choice.config, call)

    def taken_apart(self, arrays: Sequence[jax.Array]) -> tuple[Any, Arrays]:
        """Return the call's spec as the kernel sees it, and its arrays."""
        args, kwargs = self.join(arrays)
        args, kwargs = prepared(self.kernel, args, kwargs)
        return take_apart(self.kernel, args, {name: value for name, value in kwargs.items() if name != "cfg"})

    def differentiable(self) -> tuple[bool, ...]:
        """Return which arrays have a gradient: floating-point arrays, with a rule only positional ones."""
        if self.kernel.why_no_gradient:
            return (False,) * len(self.types)
        _, by_keyword = self.inv.node.spec.join(self.inv.argument_types)
        # A rule returns gradients of positional arguments only; JAX differentiates keyword arguments as well.
        fixed = by_keyword if has_gradient_rule(self.kernel) else {}
        return tuple(
            is_inexact(like) and not (kind.idx == 1 and argument.key in fixed)
            for like, (kind, argument, *_) in zip(self.types, self._paths, strict=True)
        )

    def elements(self, count: int) -> list[Arrays]:
        """Return `count` inputs of the call: the given one, unless it is abstract, and examples."""
        rng = np.random.default_rng(self.scope.seed)
        concrete = not any(isinstance(array, jax.ShapeDtypeStruct) for array in self.given)
        # Copy, so that a kernel that writes to its arguments does not modify its author's arrays.
        first = [[_copied(array) for array in self.given]] if concrete else []
        if self.scope.is_brief and concrete:
            # Other integers, such as the sizes of groups, need not make sense.
            turned = [
                jax.device_put(np.asarray(array)[::-1]) if is_inexact(array) and array.ndim else array
                for array in first[0]
            ]
            return [*first, turned][:count]
        return [*first, *(self._example(rng) for _ in range(count - len(first)))]

    def _example(self, rng: np.random.Generator) -> Arrays:
        made, *_ = example_sets(self.inv, rng, saver(self.inv.node.forward, Choice())).values()
        fits = [(like.shape, like.dtype) for like in made] == [(like.shape, like.dtype) for like in self.types]
        # If `prepare` reshapes or casts, examples for the kernel do not fit the call's arguments.
        return made if fits else [random_array(like, rng) for like in self.types]


class Truth:
    """Results of the reference, or of `run` under the heuristic's configuration, and JAX's derivatives of them.

    Args:
        subject: The call.
        function: The call without rules; see `function_of`. JAX traces each function once.
        wrt: Which arrays have a gradient; none of them: no gradients are computed.
        rule: If JAX cannot differentiate the reference: the call itself, whose gradient rule is used instead.
    """

    def __init__(self, subject: Subject, function: Flat, wrt: Sequence[bool], rule: Flat | None = None) -> None:
        self.function, self.has_rule = function, rule is not None
        self._subject, self._wrt, self._rule = subject, wrt, rule
        self._programs = subject.scope.programs if subject.scope.is_brief else {}
        self._batches: dict[str, Results] = {}

    def of(self, arrays: Arrays, cotangents: Arrays) -> Results:
        """Return the results for these arrays, and the gradients for these cotangents."""
        if not any(self._wrt) or not cotangents:
            return self.by("outputs", alone, arrays, cotangents)
        if self._rule is None:
            return self.by("gradients", lambda function: pulled(function, self._wrt), arrays, cotangents)
        outs = self.by("outputs", alone, arrays, cotangents).outs
        # These gradients come from the kernel itself, so take the results from the reference.
        found = self.by("rule", lambda _: pulled(self._rule or _, self._wrt), arrays, cotangents)
        return Results(outs, found.gradients)

    def by(self, kind: str, transform: Callable[[Flat], Any], arrays: Arrays, more: Arrays) -> Results:
        """Return the results of the transformed reference, whose program is compiled once."""
        if self._subject.scope.is_brief:
            arrays, more = _widened(arrays), _widened(more)
        key = (kind, *(str(array.dtype) for array in arrays))
        if key not in self._programs:
            self._programs[key] = compiled(transform(self.function), arrays, more)
        found: Results = self._programs[key](arrays, more)
        return found

    def gathered(self, pattern: Pattern, examples: Sequence[Arrays], cotangents: Sequence[Arrays]) -> Results:
        """Return the results of a batch."""
        if pattern.name not in self._batches:
            each = [self.of(pattern.own(examples, index), cotangents[index]) for index in range(pattern.count)]
            self._batches[pattern.name] = pattern.gathered(each, self._wrt)
        return self._batches[pattern.name]


def function_of(subject: Subject, baseline: object) -> Flat:
    """Return the reference, or without one `run`, as a plain function."""
    return subject.plain(Choice(config=baseline, platform=subject.platform, reference=subject.has_reference))


def odd(length: int) -> int:
    """Return the next odd number, or the second next of an odd one."""
    return length + 1 + length % 2


def resized(arrays: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """Return the types of the arrays, with odd sizes instead of the given lengths."""
    shapes = [tuple(odd(n) if n in lengths else n for n in array.shape) for array in arrays]
    return [jax.ShapeDtypeStruct(shape, array.dtype) for shape, array in zip(shapes, arrays, strict=True)]


def _copied(array: Any) -> jax.Array:
    # Unlike `jnp.array`, this compiles no program for a new shape.
    copy: jax.Array = jax.device_put(array, may_alias=False)
    return copy


def _widened(arrays: Arrays) -> list[Any]:
    # 8-bit numbers are arguments of kernels made for them.
    return [
        np.asarray(array).astype(jnp.promote_types(array.dtype, jnp.float32))
        if is_inexact(array) and array.dtype.itemsize > 1
        else array
        for array in arrays
    ]


def types_of(function: Flat, arrays: Arrays) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each result."""
    return [(tuple(out.shape), str(out.dtype)) for out in jax.eval_shape(function, *arrays)]


def listed(types: Sequence[tuple[tuple[int, ...], str]]) -> str:
    """Return types in words."""
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in types)
