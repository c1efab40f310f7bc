# SPDX-License-Identifier: Apache-2.0
"""Eager calls: one compiled function for each sort of call, found without looking at any shape.

It is found by the types of the arguments, where these tell which are arrays and where `==` tells the others apart;
shapes are left to jit's own C++ cache. All other calls are scanned once, which gives the arrays and a key of the rest.
"""

from __future__ import annotations

import math
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.core.kernel import Kernel, with_python_numbers
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.identity import identity, identity_of_node, token_of
from ejkernel.ops.utils.values.signature import as_array, is_array, stands_for_array
from ejkernel.ops.utils.weak_caches import Bounded, PerObject

Plan = Callable[..., Any]

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.Ref)
# Equal values of one of these types are the same, but for floats: see `_is_exception`.
_BY_EQUALITY = frozenset({bool, int, float, str, bytes, type(None)})
_ARRAY_KINDS = frozenset({compat.ArrayImpl, np.ndarray})
_SCANNED, _ARRAY, _SCALAR = "scanned", "array", "scalar"
_DTYPES = (np.dtype, type(jnp.float32))


class NotByEquality(Exception):
    """A plan that goes by types met a float that `jit` takes for another: it finds 0.0 equal to -0.0."""


class Bind(Protocol):
    """Binds the primitive for a call that will be kept, on behalf of an executor that may not be."""

    def __call__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any) -> Any:
        """Bind it."""


class Plans:
    """The compiled functions of one executor, for each kernel; they keep neither of them alive.

    A plan is found by the types of the arguments where these tell which are arrays, and where `==` tells the others
    apart; else by a scan, which tells static values apart by their identity.

    Args:
        bind: Binds the primitive.
    """

    def __init__(self, bind: Bind) -> None:
        self.tables: PerObject[Bounded[Plan]] = PerObject(Bounded)
        # Plans are the executor's, and must not keep it.
        self._bind = weakref.WeakMethod(bind)

    def run(
        self,
        kernel: Kernel[Cfg, Out],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        cfg: object,
        override: Hashable | None,
    ) -> Any:
        """Run a call, and keep what was compiled for it.

        Raises:
            Traced: the call is a part of what another trace computes.
            ArgumentError: an argument is a type in the place of an array.
        """
        # The table of before the call: another may be there after it, for which this plan would be too old.
        table = self.tables.of(kernel)
        key, arrays = _scanned(args, kwargs, override)
        plan = table.get(key)
        if plan is not None:
            return plan(args, kwargs, arrays)
        # Here, where a call comes the first time: no plan is kept for the scalars that become numbers.
        numbers = with_python_numbers(kernel, args, kwargs)
        if numbers[0] is not args or numbers[1] is not kwargs:
            return self._run_with_numbers(kernel, *numbers, cfg, override)
        _refuse_types(kernel, arrays)
        values = (*args, *kwargs.values())
        types = _types_of(args, kwargs)
        if override is None and types not in table and all(map(_goes_by_type, values)):
            plan = self._by_types(kernel, args, kwargs)
            out = plan(*args, **kwargs)
            table.keep(types, plan)
            return out
        if override is None and any(map(_is_exception, values)):
            # `jit` keeps no trace that raised, so that each such call would begin one: all calls of these types are
            # scanned.
            table[types] = _Detour(self, weakref.ref(kernel))
        plan = _ScannedPlan(self._bind, weakref.ref(kernel), cfg)
        out = plan(args, kwargs, arrays)
        table.keep(key, plan)
        return out

    def _run_with_numbers(
        self,
        kernel: Kernel[Cfg, Out],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        cfg: object,
        override: Hashable | None,
    ) -> Any:
        """Run a call by the plan of the same call with Python numbers, which may be one by types."""
        plan = None if override is not None else self.tables.of(kernel).get(_types_of(args, kwargs))
        if plan is not None:
            try:
                return plan(*args, **kwargs)
            except NotByEquality:
                pass
        return self.run(kernel, args, kwargs, cfg, override)

    def _by_types(self, kernel: Kernel[Cfg, Out], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Plan:
        bind, owner = self._bind, weakref.ref(kernel)

        def run(*args: object, **kwargs: object) -> Any:
            if any(map(_is_exception, (*args, *kwargs.values()))):
                raise NotByEquality
            return _alive(bind)(_alive(owner), args, kwargs, None)

        # `jit` looks at shapes, in C++: with a key of abstract values, made in Python, a call took 1.1 to 1.5 times as
        # long.
        positions = [index for index, value in enumerate(args) if is_static(value)]
        names = [name for name, value in kwargs.items() if is_static(value)]
        plan: Plan = jax.jit(run, static_argnums=positions, static_argnames=names)
        return plan


def _types_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Hashable, ...]:
    return (*map(type, args), *kwargs, *map(type, kwargs.values()))


def _refuse_types(kernel: Kernel[Cfg, Out], arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ArgumentError(
                f"{kernel.op_id}: an argument is a type, {array.dtype}{list(array.shape)}, which has no values; pass "
                "an array, or types to jax.eval_shape, jax.jit(...).lower or explain."
            )


class _Detour:
    """In the place of a plan that goes by types, where one of the values must not be compared by `==`."""

    def __init__(self, plans: Plans, kernel: weakref.ref[Any]) -> None:
        self._plans, self._kernel = weakref.ref(plans), kernel

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return _alive(self._plans).run(_alive(self._kernel), args, kwargs, None, None)


class _ScannedPlan:
    """A compiled function of the arrays of a call; all else is taken from the call that has it traced."""

    def __init__(self, bind: Callable[[], Any], kernel: weakref.ref[Any], cfg: object) -> None:
        # Of this thread: two may run the same plan, and static values come from the call that has it traced.
        current = self._current = threading.local()

        def run(*arrays: jax.Array) -> Any:
            leaves, tree = jax.tree.flatten(current.call, is_leaf=stands_for_array)
            given = iter(arrays)
            filled = [next(given) if _is_given(leaf) else leaf for leaf in leaves]
            args, kwargs = jax.tree.unflatten(tree, filled)
            return _alive(bind)(_alive(kernel), args, kwargs, cfg)

        self._jitted: Any = jax.jit(run)

    def __call__(self, args: tuple[object, ...], kwargs: Mapping[str, object], arrays: Sequence[jax.Array]) -> Any:
        self._current.call = args, kwargs
        try:
            return self._jitted(*arrays)
        finally:
            # The plan lives on, and must not keep the call's arguments.
            del self._current.call


class Traced(Exception):
    """One of the arguments is traced."""


def _scanned(
    args: tuple[object, ...], kwargs: Mapping[str, object], override: Hashable | None
) -> tuple[tuple[Hashable, ...], list[Any]]:
    """Return what tells apart calls that share no plan, and the arrays in the order of `jax.tree.flatten`."""
    key: list[Hashable] = [_SCANNED, override]
    arrays: list[Any] = []
    for value in args:
        _scan(value, key, arrays)
    if kwargs:
        for name in sorted(kwargs):
            key.append(name)
            _scan(kwargs[name], key, arrays)
    return tuple(key), arrays


def _scan(value: Any, key: list[Hashable], arrays: list[Any]) -> None:
    kind: Any = type(value)
    if kind in _ARRAY_KINDS:
        arrays.append(value)
        key.append(_ARRAY)
    elif kind in _BY_EQUALITY and kind is not float:
        key += (kind, value)
    elif kind is float:
        key.append(struct.pack("d", value))
    elif kind is tuple or kind is list:
        # With lengths, for the key is flat: ((1,), 2) is not ((1, 2),).
        key += (kind, len(value))
        for item in value:
            _scan(item, key, arrays)
    elif kind is dict:
        key += (kind, len(value))
        for name in sorted(value):
            key.append(identity(name))
            _scan(value[name], key, arrays)
    else:
        _scan_other(value, key, arrays)


def _scan_other(value: object, key: list[Hashable], arrays: list[Any]) -> None:
    if isinstance(value, jax.core.Tracer):
        # A traced argument belongs to an outer trace, where the primitive is bound as it is; a plan would be a `jit`
        # within.
        raise Traced
    if _is_given(value):
        array = as_array(value)
        if isinstance(array, jax.core.Tracer):
            raise Traced
        arrays.append(array)
        # A scalar is no array to every parameter that takes one.
        key.append(_SCALAR if isinstance(value, np.generic) else _ARRAY)
        return
    node = jax.tree_util.default_registry.flatten_one_level(value)
    if node is None:
        key.append(token_of(value))
        return
    children, aux = tuple(node[0]), node[1]
    kind: Any = type(value)
    key += (kind, identity_of_node(value, aux), len(children))
    for child in children:
        _scan(child, key, arrays)


def _is_given(leaf: object) -> bool:
    return is_array(leaf) or stands_for_array(leaf)


def is_static(value: object) -> bool:
    """Return whether an argument holds no array."""
    return not any(map(_is_given, jax.tree.leaves(value, is_leaf=stands_for_array))) and value is not None


def _goes_by_type(value: object) -> bool:
    """Return whether the type of `value` tells whether it is an array, and equal values of the type are the same."""
    if type(value) in _BY_EQUALITY:
        return not _is_exception(value)
    return isinstance(value, _DTYPES) or (isinstance(value, _ARRAY_TYPES) and is_array(value))


def _is_exception(value: object) -> bool:
    # 0.0 equals -0.0, and NaN not even itself.
    return type(value) is float and (value == 0.0 or math.isnan(value))


def _alive(reference: Callable[[], Any]) -> Any:
    """Return what is referred to weakly; whoever calls holds it."""
    found = reference()
    assert found is not None
    return found
