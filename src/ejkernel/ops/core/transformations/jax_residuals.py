# SPDX-License-Identifier: Apache-2.0
"""Residuals that JAX saves for a kernel without a gradient rule.

Kernels opt in with `Kernel.keeps_residuals`. The residuals of a loop over chunks depend on the chunk size, and under
another configuration residuals of the same shapes may mean something else, which the library cannot detect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.ops.errors import GradientError
from ejkernel.ops.utils.values.signature import is_inexact, type_text

Flat = Callable[..., tuple[Any, ...]]


# The source in the backward of one array that JAX saves: its kind and its index. Arrays whose shape depends on the
# configuration, such as tables for its blocks, are mostly constants. So only arrays computed from the arguments have to
# be the same under each configuration.
_Source = tuple[Literal["argument", "output", "saved", "constant"], int]


@dataclasses.dataclass(frozen=True)
class _SavedForward:
    """A forward, traced together with the arrays that JAX saves.

    Attributes:
        jaxpr: From the arguments to the outputs, followed by the saved arrays.
        num_outputs: The number of outputs.
        pullback: Structure of the function from cotangents to gradients; its leaves are the saved arrays.
        sources: The source of each saved array.
    """

    jaxpr: Any
    num_outputs: int
    pullback: Any
    sources: tuple[_Source, ...]

    @property
    def saved_at(self) -> list[int]:
        """The indices of the results of `jaxpr` that the forward passes to the backward, in order."""
        found = {index: at for at, (kind, index) in enumerate(self.sources) if kind == "saved"}
        return [self.num_outputs + found[index] for index in sorted(found)]


def forward_with_jax_residuals(run: Flat, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the outputs of `run`, and those arrays saved by JAX that the backward cannot obtain otherwise."""
    traced = _traced(run, arrays)
    results = compat.tracing.evaluate(traced.jaxpr, arrays)
    return tuple(results[: traced.num_outputs]), [results[at] for at in traced.saved_at]


def gradients_from_jax_residuals(
    run: Flat, arrays: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any], num_outputs: int, op_id: str
) -> tuple[Any, ...]:
    """Return the gradient of each array, `None` for integers, without computing `run` again.

    Args:
        run: The forward, with the configuration of the backward.
        arrays: Its arguments.
        saved: The outputs and residuals from `forward_with_jax_residuals`.
        cotangents: One for each output.
        num_outputs: The number of outputs.
        op_id: Name of the operation, for messages.

    Raises:
        GradientError: The forward ran with a configuration that saves other residuals.
    """
    # Traced only for the pullback's structure and constants; the forward in it is not computed.
    traced = _traced(run, arrays)
    outputs, residuals = saved[:num_outputs], saved[num_outputs:]
    have = [type_text(array) for array in residuals]
    want = [type_text(traced.jaxpr.out_avals[at]) for at in traced.saved_at]
    # Only types can be compared; the kernel promises that the values mean the same.
    if have != want:
        raise GradientError(
            f"{op_id}: with keeps_residuals=True the residuals must be the same under each configuration, but they "
            f"depend on the configuration: the forward saved {have}, and the backward needs {want}; remove "
            "keeps_residuals, or define fwd_with_residuals and vjp."
        )
    constants = iter(_constants(traced))
    sources: dict[str, Sequence[Any]] = {"argument": arrays, "output": outputs, "saved": residuals}
    leaves = [next(constants) if kind == "constant" else sources[kind][index] for kind, index in traced.sources]
    found = iter(jax.tree.unflatten(traced.pullback, leaves)(tuple(cotangents)))
    return tuple(next(found) if is_inexact(array) else None for array in arrays)


def _traced(run: Flat, arrays: Sequence[Any]) -> _SavedForward:
    pullbacks, counts = [], []

    def forward(*arrays: Any) -> tuple[Any, ...]:
        # Differentiate only floating-point arrays: JAX's cotangents of integers have the special type float0.
        def of_inexact(*inexact: Any) -> tuple[Any, ...]:
            given = iter(inexact)
            return run(*[next(given) if is_inexact(array) else array for array in arrays])

        out, pullback = jax.vjp(of_inexact, *[array for array in arrays if is_inexact(array)])
        leaves, tree = jax.tree.flatten(pullback)
        pullbacks.append(tree)
        counts.append(len(out))
        # Return them from the same trace, so that arguments, outputs and constants among them can be recognised.
        return (*out, *[jnp.asarray(leaf) for leaf in leaves])

    jaxpr = compat.tracing.traced(forward, [jax.typeof(array) for array in arrays])
    sources = _sources(compat.tracing.origins(jaxpr), counts[0])
    return _SavedForward(jaxpr=jaxpr, num_outputs=counts[0], pullback=pullbacks[0], sources=sources)


def _sources(origins: Sequence[compat.tracing.Origin], num_outputs: int) -> tuple[_Source, ...]:
    """Return the source of each result after the outputs; equal arrays are saved once."""
    outputs = {origin.name: index for index, origin in reversed(list(enumerate(origins[:num_outputs])))}
    saved: dict[Any, int] = {}
    sources: list[_Source] = []
    for origin in origins[num_outputs:]:
        if origin.argument is not None:
            sources.append(("argument", origin.argument))
        elif not origin.needs:
            sources.append(("constant", 0))
        elif origin.name in outputs:
            sources.append(("output", outputs[origin.name]))
        else:
            sources.append(("saved", saved.setdefault(origin.name, len(saved))))
    return tuple(sources)


def _constants(traced: _SavedForward) -> Sequence[Any]:
    wanted = [False] * traced.num_outputs + [kind == "constant" for kind, _ in traced.sources]
    return compat.tracing.evaluate_without_arguments(traced.jaxpr, wanted) if any(wanted) else []
