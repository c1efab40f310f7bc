# SPDX-License-Identifier: Apache-2.0
"""Functions under `vmap` and differentiation, and their reference results, computed one example at a time.

Batches are compared with single examples, because a batched reference could share the fault. Most of the time goes into
compiling. Therefore all functions of a configuration are compiled in one program, without optimisation. Only if this
fails, each is compiled separately, to find the one that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.core.examples import stack, stacked
from ejkernel.ops.core.transformations.nodes import Flat, in_dtypes_of
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.random_arrays import random_array
from ejkernel.ops.utils.values.signature import is_inexact

logger = logging.getLogger(__name__)

Arrays = list[jax.Array]
BATCHES: Final = (17, 3, 9)
"""Batch sizes: of all arrays, of the inner batch of nested ones, and of a single batched array."""

Levels = tuple[tuple[tuple[int | None, ...], int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """The results of a function, and its gradients or tangents (`None` if not requested)."""

    outs: Sequence[Any]
    gradients: Sequence[Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """One way to batch a call.

    Attributes:
        name: The name of its row.
        levels: For each `vmap`, outermost first: the axis of each array, and the size. Empty: the call itself.
    """

    name: str
    levels: Levels = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each `vmap`."""
        return tuple(size for _, size in self.levels)

    @property
    def count(self) -> int:
        """Number of examples in the batch."""
        return math.prod(self.sizes)

    def batched(self, function: Flat) -> Flat:
        """Return the function under the `vmap`s."""
        for axes, size in reversed(self.levels):
            function = jax.vmap(function, in_axes=axes, axis_size=size)
        return function

    def inputs(self, elements: Sequence[Arrays]) -> Arrays:
        """Return the batched arrays, made from the first `count` examples."""
        return stacked(list(elements[: self.count]), self.levels)

    def own(self, elements: Sequence[Arrays], index: int) -> Arrays:
        """Return the arrays of the example at `index` in the batch; an unbatched array is the same for all of them."""
        position = np.unravel_index(index, self.sizes) if self.sizes else ()
        chosen = []
        for number in range(len(elements[0])):
            where = [at if axes[number] is not None else 0 for at, (axes, _) in zip(position, self.levels, strict=True)]
            element = int(np.ravel_multi_index(where, self.sizes)) if where else 0
            chosen.append(elements[element][number])
        return chosen

    def gathered(self, results: Sequence[Results], wrt: Sequence[bool]) -> Results:
        """Return the results of single examples joined into a batch; gradients of unbatched arrays are summed."""
        outs = [self._joined(each, [0] * len(self.levels)) for each in zip(*(r.outs for r in results), strict=True)]
        if any(r.gradients is None for r in results):
            return Results(outs)
        numbers = [number for number, has in enumerate(wrt) if has]
        each = zip(*(r.gradients or () for r in results), strict=True)
        axes = [[axes[number] for axes, _ in self.levels] for number in numbers]
        return Results(outs, [self._joined(arrays, where) for arrays, where in zip(each, axes, strict=True)])

    def _joined(self, arrays: Sequence[Any], axes: Sequence[int | None]) -> Any:
        for axis, size in zip(reversed(axes), reversed(self.sizes), strict=True):
            groups = [arrays[index : index + size] for index in range(0, len(arrays), size)]
            arrays = [_sum(group) if axis is None else stack(group, axis) for group in groups]
        return arrays[0]


def _sum(gradients: Sequence[jax.Array]) -> Any:
    # NumPy needs no compilation.
    return jax.device_put(sum(np.asarray(gradient) for gradient in gradients))


def patterns(names: Sequence[str], types: Sequence[Any]) -> list[Pattern]:
    """Return ways to batch a call of arrays with these names: all arrays, nested, and each alone."""
    if not names:
        return []
    count = len(names)
    every, last = (0,) * count, tuple(like.ndim for like in types)
    many, few, alone_ = BATCHES
    found = [Pattern("vmap", ((every, many),)), Pattern("vmap of vmap", ((every, 2), (last, few)))]
    if count > 1:
        # With one batched array, the gradients of the other arrays are sums over the examples.
        found += [Pattern(f"vmap over {name}", ((_only(n, count), alone_),)) for n, name in enumerate(names)]
    return found


def brief_patterns(names: Sequence[str], types: Sequence[Any]) -> list[Pattern]:
    """Return two small batches: of all floating-point arrays, and of the first."""
    floats = [number for number, like in enumerate(types) if is_inexact(like)]
    every = tuple(0 if number in floats else None for number in range(len(types)))
    found = [Pattern("vmap", ((every, 2),))]
    return [*found, *(Pattern(f"vmap over {names[n]}", ((_only(n, len(names)), 2),)) for n in floats[:1])]


def _only(number: int, count: int) -> tuple[int | None, ...]:
    return tuple(0 if index == number else None for index in range(count))


def pulled(function: Flat, wrt: Sequence[bool]) -> Callable[[Arrays, Arrays], Results]:
    """Return a function of arrays and cotangents of floating-point results that adds the gradients."""

    def both(arrays: Arrays, cotangents: Arrays) -> Results:
        outs, pull = jax.vjp(lambda *own: function(*_merged(arrays, own, wrt)), *_selected(arrays, wrt))
        given = iter(cotangents)
        full = [next(given) if is_inexact(out) else np.zeros(out.shape, jax.dtypes.float0) for out in outs]
        return Results(outs, pull(in_dtypes_of(outs, full)))

    return both


def pushed(function: Flat, wrt: Sequence[bool]) -> Callable[[Arrays, Arrays], Results]:
    """Return a function of arrays and tangents of floating-point arrays that adds the results' tangents."""

    def both(arrays: Arrays, tangents: Arrays) -> Results:
        own = _selected(arrays, wrt)
        outs, found = jax.jvp(lambda *own: function(*_merged(arrays, own, wrt)), tuple(own), tuple(tangents))
        return Results(outs, [tangent for out, tangent in zip(outs, found, strict=True) if is_inexact(out)])

    return both


def curved(function: Flat, wrt: Sequence[bool], cotangents: int) -> Callable[[Arrays, Arrays], Results]:
    """Return a function `(arrays, more)` that computes the gradient of `directions . gradient`: a second derivative.

    `more` lists the cotangents of the function's results, then one direction for each array with a gradient.

    Args:
        function: The function to differentiate twice.
        wrt: Which arrays have a gradient.
        cotangents: The number of cotangents in `more`.
    """

    def both(arrays: Arrays, more: Arrays) -> Results:
        def along(*own: jax.Array) -> Any:
            found = pulled(function, wrt)(_merged(arrays, own, wrt), more[:cotangents]).gradients or ()
            return sum(jnp.sum(one * way) for one, way in zip(found, more[cotangents:], strict=True))

        own = _selected(arrays, wrt)
        return Results((), jax.grad(along, tuple(range(len(own))))(*own))

    return both


def alone(function: Flat) -> Callable[[Arrays, Arrays], Results]:
    """Return the function without gradients."""
    return lambda arrays, _: Results(function(*arrays))


def cotangents_of(function: Flat, arrays: Arrays, rng: np.random.Generator) -> Arrays:
    """Return random cotangents for the function's floating-point results."""
    return [random_array(out, rng) for out in jax.eval_shape(function, *arrays) if is_inexact(out)]


def _selected(arrays: Sequence[jax.Array], wrt: Sequence[bool]) -> Arrays:
    return [array for array, has in zip(arrays, wrt, strict=True) if has]


def _merged(arrays: Sequence[jax.Array], own: Sequence[jax.Array], wrt: Sequence[bool]) -> Arrays:
    given = iter(own)
    return [next(given) if has else array for array, has in zip(arrays, wrt, strict=True)]


jax.tree_util.register_dataclass(Results, ["outs", "gradients"], [])


def compiled(function: Callable[..., Any], *inputs: object) -> Callable[..., Any]:
    """Return the function compiled for inputs of these types, with short compile time and few optimisations."""
    program: Callable[..., Any] = compat.executables.compiled_to_be_checked(
        jax.jit(function).lower(*inputs), jax.default_backend()
    )
    return program


Job = tuple[Callable[..., Any], Any, Any]
"""A function, its arrays, and its cotangents or tangents."""


class Together:
    """Functions in one program, because each program has a fixed cost; one by one if some of them fail.

    Args:
        jobs: The functions and their arguments, by name.
    """

    def __init__(self, jobs: Mapping[Any, Job]) -> None:
        self._jobs = dict(jobs)
        self._programs: dict[tuple[Any, ...], Any] = {}
        if jobs:
            self._compile(tuple(jobs))

    def _compile(self, names: tuple[Any, ...]) -> None:
        def program(inputs: dict[Any, Any]) -> dict[Any, Any]:
            return {name: self._jobs[name][0](*given) for name, given in inputs.items()}

        try:
            self._programs[names] = compiled(program, {name: self._jobs[name][1:] for name in names})
        except Exception as error:  # noqa: BLE001 - a kernel may fail in any way; the row has the reason
            self._programs[names] = error
            self._separate(names, error)

    def _separate(self, names: tuple[Any, ...], error: Exception) -> None:
        if len(names) > 1:
            logger.debug("%s: compiled one by one, because together they fail: %s", names, error_text(error))
            del self._programs[names]
            for name in names:
                self._compile((name,))

    def __call__(self, changed: Mapping[Any, tuple[Any, Any]] | None = None) -> dict[Any, Any]:
        """Return each function's results, or its error.

        Args:
            changed: Other arguments of some functions, of the same types.
        """
        found: dict[Any, Any] = {}
        for names, program in list(self._programs.items()):
            if isinstance(program, Exception):
                found |= dict.fromkeys(names, program)
                continue
            inputs = {name: (changed or {}).get(name, self._jobs[name][1:]) for name in names}
            try:
                found |= jax.block_until_ready(program(inputs))
            except Exception as error:  # noqa: BLE001 - as above
                if len(names) > 1:
                    self._separate(names, error)
                    return self(changed)
                found |= dict.fromkeys(names, error)
        return {name: found[name] for name in self._jobs}


# --- crashes ---

_FILE: Final = "check_kernel"


@contextlib.contextmanager
def reported_crashes() -> Iterator[None]:
    """Write the stack to stderr if the process dies inside the context; leave an active `faulthandler` alone.

    The calls of a kernel run below a frame with the name of their configuration (`named_after`), so the stack has it.
    """
    try:
        descriptor = -1 if faulthandler.is_enabled() or sys.stderr is None else sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # a replaced stderr, which has no file
        descriptor = -1
    if descriptor < 0:
        yield
        return
    faulthandler.enable(file=descriptor)
    try:
        yield
    finally:
        faulthandler.disable()


@contextlib.contextmanager
def without_exits() -> Iterator[None]:
    """Turn `SystemExit` and `KeyboardInterrupt` into failures; only kernels raise them on a measuring thread."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if not threading.main_thread().is_alive():  # the process ends
            raise
        raise RuntimeError(f"the kernel would end the process: {error_text(error)}") from error


def named_after(config: object, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which runs below a frame with the name of the configuration."""
    called = "the heuristic" if config is None else compact(config)
    code = _frame.__code__.replace(co_filename=_FILE, co_name=f"configuration {called}", co_firstlineno=1)
    frame = types.FunctionType(code, {})
    return without_exits()(lambda *args: frame(function, *args))


def _frame(function: Callable[..., Any], *args: object) -> Any:
    return function(*args)
