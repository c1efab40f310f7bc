# SPDX-License-Identifier: Apache-2.0
"""The call under check: functions of its arrays, inputs for them, and its reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.callspec import leaf_name, take_apart
from ejkernel.ops.core.examples import example_arrays
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, has_gradient_rule, overrides, prepared, with_python_numbers
from ejkernel.ops.core.transformations.nodes import Choice, Flat, Forward, is_inexact
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.utils.random_arrays import random_array
from ejkernel.ops.utils.values.signature import is_array

Arrays = list[Any]


@dataclasses.dataclass(eq=False)
class Subject:
    """A call of a kernel as the user writes it.

    Attributes:
        kernel: The kernel.
        args, kwargs: The arguments of the call; arrays may be abstract.
        inv: The call as the kernel sees it.
        seed: Seed of the random inputs.
        executor: Runs the call; it does not share or save configurations.
    """

    kernel: Kernel[Any, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inv: Invocation[Any, Any]
    seed: int = 0
    executor: Executor[Any, Any] = dataclasses.field(default_factory=lambda: Executor(ConfigSelectorChain()))

    @classmethod
    def of(cls, kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> Subject:
        """Return the subject of a call."""
        args, named = with_python_numbers(kernel, args, kwargs)
        kwargs = dict(named)
        leaves, tree = jax.tree.flatten((args, kwargs))
        at = [index for index, leaf in enumerate(leaves) if is_array(leaf)]
        seen: list[Invocation[Any, Any]] = []

        def prepare(*arrays: jax.Array) -> None:
            given = dict(zip(at, arrays, strict=True))
            own = jax.tree.unflatten(tree, [given.get(index, leaf) for index, leaf in enumerate(leaves)])
            given_args, named = prepared(kernel, *own)
            rest = {name: value for name, value in named.items() if name != "cfg"}
            inv = Invocation(kernel=kernel, args=given_args, kwargs=rest, override_cfg=named.get("cfg"))
            seen.append(inv.abstract())

        # `prepare` runs under JAX's tracing, and the arrays may be abstract.
        jax.eval_shape(prepare, *(leaves[index] for index in at))
        return cls(kernel, args, kwargs, seen[0], seed)

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

    @property
    def has_reference(self) -> bool:
        """Whether the kernel has a reference."""
        return overrides(self.kernel, "reference")

    def with_arrays(self, arrays: Sequence[Any]) -> Subject:
        """Return the same call with other arrays, which may be abstract."""
        args, kwargs = self.join(arrays)
        return Subject.of(self.kernel, args, kwargs, self.seed)

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

        return call

    def plain(self, choice: Choice) -> Flat:
        """Return the kernel's `run` or `reference` as a plain function, which JAX differentiates without the rule."""

        def call(*arrays: jax.Array) -> tuple[Any, ...]:
            spec, own = self.taken_apart(arrays)
            return Forward(spec).flat(choice)(*own)

        return call

    def taken_apart(self, arrays: Sequence[jax.Array]) -> tuple[Any, Arrays]:
        """Return the call's spec as the kernel sees it, and its arrays."""
        args, kwargs = self.join(arrays)
        args, kwargs = prepared(self.kernel, args, kwargs)
        return take_apart(self.kernel, args, {name: value for name, value in kwargs.items() if name != "cfg"})

    def differentiable(self) -> tuple[bool, ...]:
        """Return which arrays have a gradient: floating-point arrays, with a rule only positional ones."""
        _, by_keyword = self.inv.node.spec.join(self.inv.argument_types)
        # A rule returns gradients of positional arguments only; JAX differentiates keyword arguments as well.
        fixed = by_keyword if has_gradient_rule(self.kernel) else {}
        return tuple(
            is_inexact(like) and not (kind.idx == 1 and argument.key in fixed)
            for like, (kind, argument, *_) in zip(self.types, self._paths, strict=True)
        )

    def elements(self, count: int) -> list[Arrays]:
        """Return `count` inputs of the call: the given one, unless it is abstract, and examples."""
        rng = np.random.default_rng(self.seed)
        concrete = not any(isinstance(array, jax.ShapeDtypeStruct) for array in self.given)
        # Copy, so that a kernel that writes to its arguments does not modify its author's arrays.
        first = [[jnp.array(array) for array in self.given]] if concrete else []
        return [*first, *(self._example(rng) for _ in range(count - len(first)))]

    def _example(self, rng: np.random.Generator) -> Arrays:
        made = example_arrays(self.inv, rng, Choice())
        fits = [(like.shape, like.dtype) for like in made] == [(like.shape, like.dtype) for like in self.types]
        # If `prepare` reshapes or casts, examples for the kernel do not fit the call's arguments.
        return made if fits else [random_array(like, rng) for like in self.types]
