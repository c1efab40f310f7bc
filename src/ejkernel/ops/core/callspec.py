# SPDX-License-Identifier: Apache-2.0
"""A call taken apart: its arrays, and everything else as one hashable value."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.ops.core.kernel import Kernel, overrides, run_forms
from ejkernel.ops.errors import ArgumentError, KernelError, UnstableKeyError
from ejkernel.ops.utils.signature import is_array, typed_token

METHODS = ("shard_map",)  # ways in which an executor can be asked to run a call


class _Hole:
    __slots__ = ()

    def __repr__(self) -> str:
        return "<array>"

    def __reduce__(self) -> str:
        return "_HOLE"  # there is one in every process


_HOLE = _Hole()


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """All of a call but its arrays; equal for calls that may share a compiled program.

    Attributes:
        kernel: The kernel, compared by identity.
        treedef: Structure of `(args, kwargs)`.
        tokens: Hashable stand-ins for the static leaves, which tell `1`, `1.0` and `True` apart.
        method: How the executor was asked to run the call (`"shard_map"`), or `None`.
        statics: The leaves, with a placeholder where an array goes.
    """

    kernel: Kernel[Any, Any]
    treedef: Any
    tokens: tuple[Any, ...]
    method: str | None
    statics: tuple[Any, ...] = dataclasses.field(compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A PyTreeDef with nodes of the user's own classes cannot be pickled, but the tree itself can; nor can the type
        # of functions, which tokens have.
        return _restored, (self.kernel, jax.tree.unflatten(self.treedef, self.statics), self.method)

    @property
    def num_arrays(self) -> int:
        """How many arrays the call has."""
        return sum(leaf is _HOLE for leaf in self.statics)

    @property
    def structure(self) -> tuple[Any, tuple[bool, ...]]:
        """The structure of `(args, kwargs)`, and which of their leaves are arrays."""
        return self.treedef, tuple(leaf is _HOLE for leaf in self.statics)

    def join(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` with `arrays` in their places."""
        remaining = iter(arrays)
        leaves = [next(remaining) if leaf is _HOLE else leaf for leaf in self.statics]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        return args, kwargs

    def flags_by_argument(self) -> list[tuple[Any, list[bool]]]:
        """Return, for each positional argument, its structure and which of its leaves are arrays."""
        args, _ = jax.tree.unflatten(self.treedef, [leaf is _HOLE for leaf in self.statics])
        return [(jax.tree.structure(arg), jax.tree.leaves(arg)) for arg in args]


def _restored(kernel: Kernel[Any, Any], tree: Any, method: str | None) -> CallSpec:
    leaves, treedef = jax.tree.flatten(tree)
    tokens = tuple(None if leaf is _HOLE else typed_token(leaf) for leaf in leaves)
    return CallSpec(kernel, treedef, tokens, method, tuple(leaves))


def take_apart(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None
) -> tuple[CallSpec, list[Any]]:
    """Return the call's `CallSpec` and its arrays, in order; a keyword for a positional parameter becomes positional.

    Raises:
        TypeError: the arguments do not fit the signature of the kernel's `run`.
        ArgumentError: a static argument is not hashable.
    """
    args, kwargs = _bind(kernel, args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    try:
        tokens = tuple(None if is_array(leaf) else typed_token(leaf) for leaf in leaves)
    except UnstableKeyError as error:
        raise ArgumentError(f"{kernel.op_id}: a static argument must be hashable, got {error}") from None
    statics = tuple(_HOLE if is_array(leaf) else leaf for leaf in leaves)
    return CallSpec(kernel, treedef, tokens, method, statics), [leaf for leaf in leaves if is_array(leaf)]


def _bind(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cls: Any = type(kernel)
    signature = _run_signature(cls, _signature_source(kernel))
    if signature is None:
        return args, kwargs
    try:
        bound = signature.bind(kernel, *args, cfg=None, **kwargs)
    except TypeError as error:
        raise TypeError(f"{kernel.op_id}: {error}") from None
    _fill_gaps(bound)
    given = dict(bound.kwargs)
    given.pop("cfg", None)
    return bound.args[1:], given


def _fill_gaps(bound: inspect.BoundArguments) -> None:
    """Give a positional parameter its default if a later one was passed; `bound.args` would end before it."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in bound.signature.parameters.values() if p.kind in positional]
    passed = [index for index, parameter in enumerate(parameters) if parameter.name in bound.arguments]
    for parameter in parameters[: max(passed, default=0)]:
        bound.arguments.setdefault(parameter.name, parameter.default)


def _signature_source(kernel: Kernel[Any, Any]) -> str:
    if overrides(kernel, "run"):
        return "run"
    forms = run_forms(kernel)
    if not forms:
        raise KernelError(f"{type(kernel).__name__} has no run; define run(self, ..., *, cfg) or run_<platform>.")
    return forms[0]


@functools.lru_cache(maxsize=1024)
def _run_signature(cls: Any, name: str) -> inspect.Signature | None:
    """Return the signature of `cls.<name>`, or `None` where it cannot take a keyword `cfg` by name."""
    function = getattr(cls, name, None)
    if function is None:  # set on the instance: positions are taken as given
        return None
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    at = next((index for index, parameter in enumerate(parameters) if parameter.name == "cfg"), len(parameters))
    keyword_kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    takes_cfg = at < len(parameters) or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if not takes_cfg or any(parameter.kind not in keyword_kinds for parameter in parameters[at + 1 :]):
        raise KernelError(f"{cls.__name__}.{name} must take cfg as a keyword argument: def {name}(self, ..., *, cfg).")
    # cfg is always passed by name, so a plain last parameter is as good as a keyword-only one
    parameters[at : at + 1] = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters[at : at + 1]]
    return signature.replace(parameters=parameters)
