# SPDX-License-Identifier: Apache-2.0
"""The results that a call should have, with derivatives; of batches, computed one example at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.transformations.nodes import Choice, Flat, is_inexact
from ejkernel.testing.programs import Arrays, Pattern, Results, alone, compiled, pulled
from ejkernel.testing.subject import Subject


class Truth:
    """Results of the reference, or of `run` under the heuristic's configuration, and JAX's derivatives of them.

    Args:
        subject: The call.
        baseline: The heuristic's configuration.
        wrt: Which arrays have a gradient; none of them: no gradients are computed.
        rule: If JAX cannot differentiate the reference: the call itself, whose gradient rule is used instead.
    """

    def __init__(self, subject: Subject, baseline: object, wrt: Sequence[bool], rule: Flat | None = None) -> None:
        self.function, self.has_rule = function_of(subject, baseline), rule is not None
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


def _widened(arrays: Arrays) -> list[Any]:
    return [
        np.asarray(array).astype(jnp.promote_types(array.dtype, jnp.float32)) if is_inexact(array) else array
        for array in arrays
    ]


def types_of(function: Flat, arrays: Arrays) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each result."""
    return [(tuple(out.shape), str(out.dtype)) for out in jax.eval_shape(function, *arrays)]


def listed(types: Sequence[tuple[tuple[int, ...], str]]) -> str:
    """Return types in words."""
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in types)
