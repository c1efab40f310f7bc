# SPDX-License-Identifier: Apache-2.0
"""Input arrays for measuring and checking a call, generated from its signature."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.core.callspec import is_call, prepared, take_apart
from ejkernel.ops.core.hooks import Computation, asked
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, kernel_of, overrides
from ejkernel.ops.core.transformations.nodes import Choice, Node
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import KernelError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.random_arrays import LARGE, drawn_integers, random_array
from ejkernel.ops.utils.values.signature import is_array, is_inexact

Save = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class GivenInputs:
    """The user's inputs for measuring a call, in place of generated inputs.

    Attributes:
        source: The positional arguments, or a function that generates inputs: `rng -> args` or
            `rng -> (args, kwargs)`.
        kwargs: The keyword arguments, used if `source` gives only positional arguments.
    """

    source: Sequence[Any] | Callable[[np.random.Generator], Any]
    kwargs: Mapping[str, Any]

    def arrays(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> list[Any]:
        """Return the arrays of one set of inputs, after the kernel's `prepare`.

        Raises:
            KernelError: The inputs have the wrong form, or differ from the call's types.
        """
        kernel = kernel_of(inv)
        what = f"{kernel.op_id}: inputs"
        answer: Any = asked(what, self.source, rng) if callable(self.source) else self.source
        if not is_call(answer):
            answer = (answer if isinstance(answer, tuple | list) else (answer,), self.kwargs)
        args, kwargs = prepared(kernel, *answer)
        _, own = take_apart(kernel, args, kwargs)
        return _of_types(inv, own, what)


def makes_inputs(kernel: Computation[Any, Any]) -> bool:
    """Return whether the kernel makes the inputs for measuring its calls."""
    return overrides(kernel, "example_inputs") or overrides(kernel, "example_draws")


def why_not_finite(kernel: Computation[Any, Any], given: GivenInputs | None) -> str:
    """Return advice for results with NaN or infinity, which unsuitable inputs may cause."""
    if given is not None or makes_inputs(kernel):
        return "look at the inputs that inputs= or example_inputs gives"
    return (
        "the inputs were normal random numbers, zeros and ones, generated from shapes and dtypes alone; if the kernel "
        "needs other values (sizes that add up, indices, lengths), give it example_inputs, or pass inputs= to autotune"
    )


def example_sets(
    inv: Invocation[Cfg, Out],
    rng: np.random.Generator,
    save: Save,
    given: GivenInputs | None = None,
    *,
    scale: float = 1.0,
) -> dict[str, list[Any]]:
    """Return sets of arrays for all arguments of `inv.node`, by name: the kernel's draws, or else a single set.

    A set has residuals, the call's own arrays, and tangents or cotangents. Residuals must match the arrays, so they are
    computed by `save`; arrays that neither the kernel nor the user makes are random. Arrays outside the kernel's draws,
    such as cotangents, are the same in all sets.

    Args:
        inv: The call.
        rng: Source of random numbers.
        save: A compiled function that computes the residuals; see `saver`.
        given: The user's inputs, in place of random arrays.
        scale: Factor on the call's own floating-point arrays; see `may_be_scaled`.
    """
    kernel = kernel_of(inv)
    if given is not None:
        made = {"": given.arrays(inv, rng)}
    elif makes_inputs(kernel):
        made = _draws(kernel, inv, rng)
    else:
        lead, count = inv.node.lead, inv.node.spec.num_arrays
        made = {"": [random_array(like, rng) for like in inv.argument_types[lead : lead + count]]}
    shared: dict[int, Any] = {}
    return {name: _completed(inv, rng, save, _scaled(arrays, scale), shared) for name, arrays in made.items()}


def _scaled(arrays: list[Any], scale: float) -> list[Any]:
    if scale == 1.0:
        return arrays
    return [array * jnp.asarray(scale, array.dtype) if is_inexact(array) else array for array in arrays]


def guessed_integers(inv: Invocation[Cfg, Out]) -> str:
    """Return the types of the call's integer arrays that are random zeros and ones; empty if the kernel makes them."""
    if makes_inputs(kernel_of(inv)):
        return ""
    return drawn_integers(jax.tree.leaves((inv.abstract_args, inv.abstract_kwargs)))


def may_be_scaled(inv: Invocation[Cfg, Out], given: GivenInputs | None) -> bool:
    """Return whether the inputs are plain random numbers, which stay valid when multiplied by a factor."""
    return given is None and not makes_inputs(inv.node.spec.kernel)


def _completed(
    inv: Invocation[Any, Any], rng: np.random.Generator, save: Save, made: list[Any], shared: dict[int, Any]
) -> list[Any]:
    """Return the arrays of all arguments: the residuals of `made`, `made` itself, and random arrays for the rest."""
    lead = inv.node.lead
    made = list(map(_typed_as, made, inv.argument_types[lead:]))
    made = [*(save(*made) if lead else ()), *made]
    for index, like in enumerate(inv.argument_types):
        if not (index < len(made) and made[index].shape == like.shape) and index not in shared:
            shared[index] = _typed_as(random_array(like, rng), like)
    return [shared[index] if index in shared else made[index] for index in range(len(inv.argument_types))]


def _typed_as(array: Any, like: jax.ShapeDtypeStruct) -> Any:
    """Return an array, weakly typed if `like` is: a weak type affects the types that `run` computes with."""
    if not like.weak_type or jax.typeof(array).weak_type or array.shape != like.shape:
        return array
    return jax.jit(lambda x: x).lower(like).compile()(array)


def saver(forward: Node, choice: Choice) -> Save:
    """Return a compiled function from a forward's arrays to its outputs and residuals."""
    compiled: Save = jax.jit(forward.with_residuals().flat(choice))
    return compiled


def _arrays_of(answer: Any, what: str) -> list[Any]:
    if not is_call(answer):
        raise KernelError(f"{what} must return (args, kwargs), such as `(x, y), {{}}`, got {value_text(answer)}.")
    args, kwargs = answer
    return [leaf for leaf in jax.tree.leaves((tuple(args), dict(kwargs))) if is_array(leaf)]


def _draws(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out], rng: np.random.Generator) -> dict[str, list[Any]]:
    """Return the arrays of the forward call for each of the kernel's draws, by its name."""
    # The hooks make one example, so they are called once for each batch element.
    count = max(1, int(np.prod(inv.batch_sizes)))
    examples = [_one_of_each_draw(kernel, inv, rng) for _ in range(count)]
    if any(example.keys() != examples[0].keys() for example in examples):
        raise KernelError(f"{kernel.op_id}: example_draws must return draws with the same names each time.")
    levels = list(zip(inv.batch_axes or (), inv.batch_sizes, strict=True))
    return {name: stacked([example[name] for example in examples], levels) for name in examples[0]}


def _one_of_each_draw(
    kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out], rng: np.random.Generator
) -> dict[str, list[Any]]:
    answer: Any
    if overrides(kernel, "example_draws"):
        what = f"{kernel.op_id}: example_draws"
        answer = asked(what, kernel.example_draws, inv, rng)
    else:
        what = f"{kernel.op_id}: example_inputs"
        answer = {"": asked(what, kernel.example_inputs, inv, rng)}
    if not isinstance(answer, Mapping) or not answer or not all(isinstance(name, str) for name in answer):
        raise KernelError(f"{what} must return (args, kwargs) by name, got {value_text(answer)}.")
    # All arrays before the first id: an array that a draw's flattening makes must outlive the comparison of ids.
    named = {name: f"{what}: {name!r}" if name else what for name in answer}
    made = {name: _arrays_of(answer[name], text) for name, text in named.items()}
    placed: dict[int, Any] = {}  # device arrays by the id of the host array, so that draws share common arrays
    found = {}
    for name, arrays in made.items():
        new = _of_types(inv, arrays, named[name])
        found[name] = [placed.setdefault(id(old), array) for old, array in zip(arrays, new, strict=True)]
    return found


def _of_types(inv: Invocation[Any, Any], made: Sequence[Any], what: str) -> list[Any]:
    """Return the arrays on the device.

    Raises:
        KernelError: Their types differ from the types of the call's arrays.
    """
    wanted = [leaf for leaf in jax.tree.leaves((inv.args, dict(inv.kwargs))) if is_array(leaf)]
    got = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in made]
    want = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in wanted]
    if got != want:
        raise KernelError(f"{what} must be arrays of types {want}, got {got}.")
    # On the device, so that no measured call copies from the host.
    return [jax.device_put(leaf) for leaf in made]


def stacked(examples: list[list[Any]], levels: Sequence[tuple[Any, int]]) -> list[Any]:
    """Combine one example per batch element into batched arrays; unbatched arguments come from the first example."""
    for axes, size in reversed(levels):
        groups = [examples[index : index + size] for index in range(0, len(examples), size)]
        examples = [
            [
                group[0][i] if axis is None else stack([example[i] for example in group], axis)
                for i, axis in enumerate(axes)
            ]
            for group in groups
        ]
    return examples[0]


def stack(arrays: Sequence[jax.Array], axis: int) -> Any:
    """Stack arrays along a new axis; small arrays are stacked on the host, which compiles nothing."""
    first = arrays[0]
    if first.size > LARGE or compat.tracing.dtypes.issubdtype(first.dtype, compat.tracing.dtypes.prng_key):
        return jnp.stack(arrays, axis)
    return jax.device_put(np.stack([np.asarray(array) for array in arrays], axis))
