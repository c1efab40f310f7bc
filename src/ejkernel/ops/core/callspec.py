# SPDX-License-Identifier: Apache-2.0
"""Splits a call into its arrays and a hashable value for everything else, and names the arrays."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.ops.core.hooks import Computation, overrides, run_forms
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CallError, KernelError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.messages.names import BUDGETS, misfit, raise_if_misfit
from ejkernel.ops.utils.values.identity import Held, Strong, by_is, identity, identity_of_node
from ejkernel.ops.utils.values.scalars import Takes, python_numbers, resolved_annotations, takes_of
from ejkernel.ops.utils.values.signature import as_array, is_array, wraps_array

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
METHODS = ("shard_map",)  # values of the executor's `method`


class _Placeholder:
    __slots__ = ()

    def __repr__(self) -> str:
        return "<array>"

    def __reduce__(self) -> str:
        return "_PLACEHOLDER"  # pickled by name: each process has one


_PLACEHOLDER = _Placeholder()
_LEAVES = frozenset({bool, int, float, complex, str, bytes, np.str_, type, type(None)})


def _placeholder() -> Any:
    return _PLACEHOLDER


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """A call without its arrays; equal for calls that may share a compiled program.

    Attributes:
        token: Identities of the kernel, of the structure of `(args, kwargs)` and of the static leaves.
        method: The requested way to run the call (`"shard_map"`), or `None`.
        treedef: Structure of `(args, kwargs)`.
        held: Functions that return the kernel and the leaves; arrays are replaced by a placeholder.
        num_arrays: The number of arrays of the call.
    """

    # Calls are compared by token: `==` equates the leaves 1, 1.0 and True, and fails for arrays in static values.
    token: Hashable
    method: str | None
    treedef: Any = dataclasses.field(compare=False, repr=False)
    held: tuple[Held, ...] = dataclasses.field(compare=False, repr=False)
    num_arrays: int = dataclasses.field(compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A PyTreeDef with nodes of the user's own classes cannot be pickled, but the tree itself can.
        return _restored, (self.kernel, jax.tree.unflatten(self.treedef, self.statics), self.method)

    @property
    def kernel(self) -> Any:
        """The kernel."""
        return self.held[0]()

    @property
    def statics(self) -> tuple[Any, ...]:
        """The leaves, with a placeholder for each array."""
        return tuple(hold() for hold in self.held[1:])

    @functools.cached_property
    def structure(self) -> tuple[Any, tuple[bool, ...]]:
        """The structure of `(args, kwargs)`, and a flag for each leaf: whether it is an array."""
        return self.treedef, tuple(hold is _placeholder for hold in self.held[1:])

    @property
    def array_structure(self) -> tuple[Any, ...]:
        """The structure without static keyword arguments, which the representative of a bucket may omit."""
        args, kwargs = jax.tree.unflatten(*self.structure)
        named = {name: flags for name, flags in kwargs.items() if any(jax.tree.leaves(flags))}
        return jax.tree.flatten((args, named))[::-1]

    def weak(self) -> CallSpec:
        """Return an equal value for long-lived caches: it keeps neither the kernel nor the user's objects alive."""
        # A set stays strong: it is our copy, without other references.
        held = [by_is(hold()) if isinstance(hold, Strong) and type(hold()) is not set else hold for hold in self.held]
        return dataclasses.replace(self, held=tuple(held))

    def join(self, arrays: Sequence[object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` with `arrays` inserted at the placeholders."""
        remaining = iter(arrays)
        leaves = [next(remaining) if hold is _placeholder else hold() for hold in self.held[1:]]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        return args, kwargs

    def flags_by_argument(self) -> list[tuple[Any, list[bool]]]:
        """Return the structure of each positional argument, and which of its leaves are arrays."""
        args, _ = jax.tree.unflatten(self.treedef, self.structure[1])
        return [(jax.tree.structure(arg), jax.tree.leaves(arg)) for arg in args]


def _restored(kernel: Computation[Cfg, Out], tree: tuple[Any, Any], method: str | None) -> CallSpec:
    return take_apart(kernel, *tree, method)[0]


def is_call(value: object) -> bool:
    """Return whether `value` is `(args, kwargs)`, and not e.g. `(array, {})`."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[0], tuple | list) and isinstance(value[1], Mapping)


def prepared(
    kernel: Computation[Cfg, Out], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call after the kernel's `prepare`, with Python numbers for static scalars.

    Raises:
        KernelError: `prepare` does not return `(args, kwargs)`.
        CallError: The arguments do not fit the signature of `prepare`.
    """
    args, kwargs = with_python_numbers(kernel, tuple(args), kwargs)
    if not overrides(kernel, "prepare"):
        return args, dict(kwargs)
    try:
        found: Any = kernel.prepare(*args, **kwargs)
    except TypeError:
        raise_if_misfit(kernel.op_id, kernel.prepare, args, kwargs, BUDGETS)
        raise
    if not is_call(found):
        raise KernelError(f"{kernel.op_id}: prepare must return (args, kwargs), got {value_text(found)}.")
    given, named = with_python_numbers(kernel, tuple(found[0]), found[1], are_prepared=True)
    return given, dict(named)


def with_python_numbers(
    kernel: Computation[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, are_prepared: bool = False
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of a call with Python numbers in place of static NumPy and JAX scalars.

    The signatures of `prepare` and `run` determine the static parameters; see `takes_of`. Without such a
    scalar the result is the same objects.

    Args:
        kernel: The kernel.
        args, kwargs: The arguments.
        are_prepared: Whether they come from `prepare`.
    """
    # Most calls have none; then nothing has to resolve the annotations of the signature.
    if all(getattr(leaf, "ndim", None) != 0 for leaf in jax.tree.leaves((args, kwargs))):
        return args, kwargs
    parameters = _taken(kernel)[are_prepared]
    found = [python_numbers(value, takes) for value, takes in zip(args, parameters.positional, strict=False)]
    if any(new is not old for new, old in zip(found, args, strict=False)):
        args = (*found, *args[len(found) :])
    others = parameters.others or Takes.ARRAYS
    changed = {}
    for name, value in kwargs.items():
        number = python_numbers(value, parameters.named.get(name, others))
        if number is not value:
            changed[name] = number
    return args, {**kwargs, **changed} if changed else kwargs


def has_parameter(kernel: Computation[Any, Any], name: str) -> bool:
    """Return whether the kernel's `run` or `prepare` has a parameter of this name."""
    return any(name in taken.named for taken in _taken(kernel))


@dataclasses.dataclass(frozen=True, slots=True)
class _Parameters:
    """The kinds of values that the parameters of a function take: by position, and by name."""

    positional: tuple[Takes, ...] = ()
    named: Mapping[str, Takes] = dataclasses.field(default_factory=dict)
    others: Takes | None = None  # for **kwargs; `None` if the function has none


@dataclasses.dataclass(slots=True)
class _Signature:
    """The signature of a kernel.

    Attributes:
        form: The name of its `run`, or of one of the platform forms.
        run: The signature of the form, with `cfg` by keyword only; `None` if the class has no such function.
        takes: The parameters of a call, and those of `run` after `prepare`; `None` until they are needed.
    """

    form: str
    run: inspect.Signature | None
    takes: tuple[_Parameters, _Parameters] | None = None


_signatures: weakref.WeakKeyDictionary[type, dict[str, _Signature]] = weakref.WeakKeyDictionary()


def _signature(kernel: Computation[Any, Any]) -> _Signature:
    """Return the signature of a kernel, cached by class: inspecting it takes longer than an eager call."""
    cls, known = type(kernel), _signatures.setdefault(type(kernel), {})
    form = "run" if overrides(kernel, "run") else next(iter(run_forms(kernel)), None)
    if form is None:
        raise KernelError(f"{cls.__name__} has no run; define run(self, ..., *, cfg) or run_<platform>.")
    if form not in known:  # a form may be set on the instance: positions then stay as given
        run = None if getattr(cls, form, None) is None else _with_cfg_by_keyword(cls, form)
        known[form] = _Signature(form, run)
    return known[form]


def _with_cfg_by_keyword(cls: type, name: str) -> inspect.Signature:
    signature = inspect.signature(getattr(cls, name))
    parameters = list(signature.parameters.values())
    at = next((index for index, parameter in enumerate(parameters) if parameter.name == "cfg"), len(parameters))
    keyword_kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    takes_cfg = at < len(parameters) or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if not takes_cfg or any(parameter.kind not in keyword_kinds for parameter in parameters[at + 1 :]):
        raise KernelError(f"{cls.__name__}.{name} must take cfg as a keyword argument: def {name}(self, ..., *, cfg).")
    # The library always passes cfg by name, so a plain last parameter is as good as a keyword-only parameter.
    parameters[at : at + 1] = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters[at : at + 1]]
    return signature.replace(parameters=parameters)


def _taken(kernel: Computation[Any, Any]) -> tuple[_Parameters, _Parameters]:
    signature = _signature(kernel)
    signature.takes = signature.takes or _parameters_taken(kernel, signature)
    return signature.takes


def _parameters_taken(kernel: Computation[Any, Any], signature: _Signature) -> tuple[_Parameters, _Parameters]:
    if signature.run is None:
        return _Parameters(), _Parameters()
    # For a kernel made by `tune`, the function has the annotations; its generated `run` has none.
    function = vars(kernel).get("__wrapped__") or getattr(kernel, signature.form)
    run = _parameters(signature.run, function, kernel.choices)
    if not overrides(kernel, "prepare"):
        return run, run
    own = _parameters(inspect.signature(type(kernel).prepare), kernel.prepare, kernel.choices)
    # If `prepare` takes *args and **kwargs, the parameters of `run` apply.
    given = _Parameters(own.positional or run.positional, {**run.named, **own.named}, own.others or run.others)
    return given, run


def _parameters(signature: inspect.Signature, function: Any, choices: frozenset[str]) -> _Parameters:
    annotations = resolved_annotations(function)
    parameters = list(signature.parameters.values())[1:]  # without the kernel itself
    takes = {p.name: takes_of(p, annotations) for p in parameters} | dict.fromkeys(choices, Takes.NUMBERS)
    others = [takes[p.name] for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    return _Parameters(
        positional=tuple(takes_of(p, annotations, by_position=True) for p in parameters if p.kind in _POSITIONAL),
        named={p.name: takes[p.name] for p in parameters if p.kind not in _VARIADIC},
        others=others[0] if others else None,
    )


def take_apart(
    kernel: Computation[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None
) -> tuple[CallSpec, list[Any]]:
    """Return the call's `CallSpec` and its arrays, in order; a keyword for a positional parameter becomes positional.

    Raises:
        CallError: The arguments do not fit the signature of the kernel's `run`.
    """
    tree = _bind(kernel, args, kwargs)
    leaves, treedef = jax.tree.flatten(tree)
    arrays: list[Any] = []
    held: list[Held] = [Strong(kernel)]
    for leaf in leaves:
        if is_array(leaf) or wraps_array(leaf):
            arrays.append(as_array(leaf))
            held.append(_placeholder)
        else:
            # Copy a set: calls compare sets by content, and the user may change the set before the call is lowered.
            held.append(_placeholder if leaf is _PLACEHOLDER else Strong(set(leaf) if type(leaf) is set else leaf))
    count = sum(hold is _placeholder for hold in held)  # of a pickled call, the leaves are placeholders already
    return CallSpec((by_is(kernel), tokens_of(tree)), method, treedef, tuple(held), count), arrays


def tokens_of(tree: Any) -> Hashable:
    """Return a token that differs for arguments with different traces: structure, static leaves, array positions."""
    kind: Any = type(tree)
    if kind is tuple or kind is list:
        return (kind, *[tokens_of(item) for item in tree])
    if kind is dict:
        names = sorted(tree)  # the order of JAX's own flattening
        return (kind, *[identity(name) for name in names], *[tokens_of(tree[name]) for name in names])
    if kind in _LEAVES:
        return identity(tree)
    if is_array(tree) or tree is _PLACEHOLDER:
        return _PLACEHOLDER
    node = jax.tree_util.default_registry.flatten_one_level(tree)
    if node is None:
        if wraps_array(tree):
            return _PLACEHOLDER
        return (set, frozenset(map(identity, tree))) if kind is set else identity(tree)
    children, aux = node
    return (kind, identity_of_node(tree, aux), *[tokens_of(child) for child in children])


def _bind(
    kernel: Computation[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    signature = _signature(kernel).run
    if signature is None:
        return args, kwargs
    try:
        bound = signature.bind(kernel, *args, cfg=None, **kwargs)
    except TypeError as error:
        parameters = list(signature.parameters.values())[1:]  # without the kernel itself
        signature = signature.replace(parameters=parameters)
        wrong = misfit(kernel.op_id, signature, args, {"cfg": None, **kwargs}, BUDGETS)
        raise wrong or CallError(f"{kernel.op_id}: {error}") from None
    # Fill in the defaults of positional parameters before the last passed argument; else `bound.args` stops early.
    positional = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
    passed = [index for index, parameter in enumerate(positional) if parameter.name in bound.arguments]
    for parameter in positional[: max(passed, default=0)]:
        bound.arguments.setdefault(parameter.name, parameter.default)
    given = dict(bound.kwargs)
    given.pop("cfg", None)
    return bound.args[1:], given


def without_defaults(
    kernel: Computation[Cfg, Out], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without those that equal the defaults of the kernel's `run`."""
    signature = _signature(kernel).run
    if signature is None:
        return args, dict(kwargs)
    positional = [p for p in signature.parameters.values() if p.kind in _POSITIONAL][1:]
    kept = len(args)
    # Only of those passed: JAX cannot flatten every default, e.g. a dictionary with names of two types.
    passed = {*kwargs, *(p.name for p in positional[:kept])} - {*kernel.choices}
    own = {name: p.default for name, p in signature.parameters.items() if name in passed and p.default is not p.empty}
    # Of arrays, only the types are known.
    defaults = {name: token for name in own if (token := tokens_of(own[name])) is not _PLACEHOLDER}
    while 0 < kept <= len(positional) and defaults.get(positional[kept - 1].name) == tokens_of(args[kept - 1]):
        kept -= 1
    rest = {name: value for name, value in kwargs.items() if defaults.get(name) != tokens_of(value)}
    return args[:kept], rest


def array_names(spec: CallSpec) -> list[str]:
    """Return the names of a call's arrays, in order, e.g. `x`, `state['step']` or `args[2]`."""
    mark = object()
    leaves = jax.tree_util.tree_leaves_with_path(spec.join([mark] * spec.num_arrays))
    return [leaf_name(spec.kernel, path) for path, leaf in leaves if leaf is mark]


def leaf_name(kernel: Computation[Any, Any], path: Any) -> str:
    """Return the name of the leaf at `path` in `(args, kwargs)` of a kernel's call."""
    part, argument, *rest = path
    if part.idx == 1:
        name = argument.key
    else:
        positional = _positional_names(kernel)
        name = positional[argument.idx] if argument.idx < len(positional) else f"args[{argument.idx}]"
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _positional_names(kernel: Computation[Any, Any]) -> list[str]:
    # A `run` with *args has no parameter names: use those of another form, or of `prepare`.
    for name in ("run", *run_forms(kernel), "prepare"):
        parameters = inspect.signature(getattr(kernel, name)).parameters.values()
        named = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        if named:
            return named
    return []
