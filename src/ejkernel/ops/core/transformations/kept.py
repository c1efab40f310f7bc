# SPDX-License-Identifier: Apache-2.0
"""What JAX keeps of a forward to differentiate it, as residuals of a kernel that writes no rule of its own.

It has to be asked for (`Kernel.keeps_residuals`): what is kept of a loop over chunks depends on the chunks, and of the
same shapes it may mean something else under another configuration, which nobody can tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.ops.errors import GradientError

Flat = Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where one of the arrays that JAX keeps can be had in the backward.

    What a configuration decides the shape of, such as tables for its blocks, is mostly a constant; so only what was
    computed of the arguments has to be the same under every configuration.
    """

    kind: Literal["argument", "output", "saved", "constant"]
    index: int


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A forward, traced together with what JAX keeps of it.

    Attributes:
        jaxpr: From the arguments to the outputs, followed by what is kept.
        num_outputs: How many outputs there are.
        pullback: Structure of the function from cotangents to gradients, whose leaves are what is kept.
        sources: Where each of these comes from.
    """

    jaxpr: Any
    num_outputs: int
    pullback: Any
    sources: tuple[_Source, ...]

    @property
    def saved_at(self) -> list[int]:
        """Which results of `jaxpr` go from the forward to the backward, in order."""
        found = {source.index: at for at, source in enumerate(self.sources) if source.kind == "saved"}
        return [self.num_outputs + found[index] for index in sorted(found)]


def forward_keeping(run: Flat, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the outputs of `run`, and of what JAX keeps for its derivative all that only the forward can tell."""
    kept = _traced(run, arrays)
    results = compat.evaluate(kept.jaxpr, arrays)
    return tuple(results[: kept.num_outputs]), [results[at] for at in kept.saved_at]


def gradients_from(
    run: Flat, arrays: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any], num_outputs: int, op_id: str
) -> tuple[Any, ...]:
    """Return the gradient of each array, `None` of integers, without computing `run` again.

    Args:
        run: The forward, with the configuration of the backward.
        arrays: Its arguments.
        saved: Its outputs, and what `forward_keeping` returned beside them.
        cotangents: One for each output.
        num_outputs: How many outputs there are.
        op_id: Name of the operation, for messages.

    Raises:
        GradientError: the forward ran with a configuration under which it keeps something else.
    """
    # For the pullback's structure and its constants: the forward in it is not computed.
    kept = _traced(run, arrays)
    outputs, residuals = saved[:num_outputs], saved[num_outputs:]
    have = [_type(array) for array in residuals]
    want = [_type(kept.jaxpr.out_avals[at]) for at in kept.saved_at]
    # Types are all that can be compared; that the content means the same is what the kernel promises.
    if have != want:
        raise GradientError(
            f"{op_id}: what its forward keeps for the backward depends on the configuration: {have} was kept, and "
            f"{want} is needed; with keeps_residuals=True it must not, so leave that out, or write fwd_with_residuals "
            "and vjp."
        )
    constants = iter(_constants(kept))
    sources: dict[str, Sequence[Any]] = {"argument": arrays, "output": outputs, "saved": residuals}
    leaves = [
        next(constants) if source.kind == "constant" else sources[source.kind][source.index] for source in kept.sources
    ]
    found = iter(jax.tree.unflatten(kept.pullback, leaves)(tuple(cotangents)))
    return tuple(next(found) if _is_inexact(array) else None for array in arrays)


def _traced(run: Flat, arrays: Sequence[Any]) -> _Kept:
    pullbacks, counts = [], []

    def forward(*arrays: Any) -> tuple[Any, ...]:
        # By integers there is no derivative, and JAX's cotangents of them have a type of their own.
        def of_inexact(*inexact: Any) -> tuple[Any, ...]:
            given = iter(inexact)
            return run(*[next(given) if _is_inexact(array) else array for array in arrays])

        out, pullback = jax.vjp(of_inexact, *[array for array in arrays if _is_inexact(array)])
        leaves, tree = jax.tree.flatten(pullback)
        pullbacks.append(tree)
        counts.append(len(out))
        # Results of the same trace, so that it can be told which of them are arguments, outputs or constants.
        return (*out, *[jnp.asarray(leaf) for leaf in leaves])

    jaxpr = compat.traced(forward, [jax.typeof(array) for array in arrays])
    sources = _sources(compat.origins(jaxpr), counts[0])
    return _Kept(jaxpr=jaxpr, num_outputs=counts[0], pullback=pullbacks[0], sources=sources)


def _sources(origins: Sequence[compat.Origin], num_outputs: int) -> tuple[_Source, ...]:
    """Return where each result behind the outputs comes from; what is kept twice is saved once."""
    outputs = {origin.name: index for index, origin in reversed(list(enumerate(origins[:num_outputs])))}
    saved: dict[Any, int] = {}
    sources = []
    for origin in origins[num_outputs:]:
        if origin.argument is not None:
            sources.append(_Source("argument", origin.argument))
        elif origin.is_constant:
            sources.append(_Source("constant", 0))
        elif origin.name in outputs:
            sources.append(_Source("output", outputs[origin.name]))
        else:
            sources.append(_Source("saved", saved.setdefault(origin.name, len(saved))))
    return tuple(sources)


def _constants(kept: _Kept) -> Sequence[Any]:
    wanted = [False] * kept.num_outputs + [source.kind == "constant" for source in kept.sources]
    return compat.evaluate_without_arguments(kept.jaxpr, wanted) if any(wanted) else []


def _type(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
