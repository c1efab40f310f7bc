# SPDX-License-Identifier: Apache-2.0
"""Eager calls: a cache of compiled functions (plans), with lookups that do not inspect shapes.

Most calls are looked up by the Python types of their arguments, and jit's C++ cache distinguishes shapes. This works if
the types show which arguments are arrays, and if `==` distinguishes the other values. All other calls are scanned,
which collects the arrays and builds a key from the other values.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.core.callspec import leaf_name
from ejkernel.ops.core.kernel import Kernel, with_python_numbers
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.identity import identity, identity_of_node, token_of
from ejkernel.ops.utils.values.signature import array_fault, as_array, is_array, wraps_array
from ejkernel.ops.utils.weak_caches import Bounded, PerObject

Plan = Callable[..., Any]

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.Ref)
_NOT_STATIC = (*_ARRAY_TYPES, type(None))
# Equal values of these types are interchangeable, except for some floats: see `_has_telling_type`.
_BY_EQUALITY = frozenset({bool, int, float, str, bytes, type(None)})
_ARRAY_KINDS = frozenset({compat.tracing.ArrayImpl, np.ndarray})
_SCANNED, _ARRAY, _SCALAR = "scanned", "array", "scalar"
_DTYPES = (np.dtype, type(jnp.float32))


class NotByEquality(Exception):
    """A typed plan got a float that `jit` would confuse with another, such as 0.0 and -0.0."""


@dataclasses.dataclass(eq=False, repr=False)
class Plans:
    """The compiled functions of one executor, by kernel; they keep neither the executor nor the kernels alive.

    A typed plan is looked up by the types of the arguments. A scanned plan is looked up by a key in which static values
    are distinguished by identity.

    Attributes:
        executor: A weak reference; the caller of a plan keeps executor and kernel alive.
        tables: The plans of each kernel.
    """

    executor: Callable[[], Any]
    tables: PerObject[Bounded[Plan]] = dataclasses.field(default_factory=lambda: PerObject(Bounded))

    def run(
        self,
        kernel: Kernel[Cfg, Out],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        cfg: object,
        override: Hashable | None,
    ) -> Any:
        """Run a call, and cache its compiled function.

        Raises:
            Traced: An argument belongs to an outer trace, or a trace is under way and the call has no plan.
            ArgumentError: An argument is a type instead of an array.
        """
        # Get the table before the call: configurations may change during it, and this plan is too old for a new table.
        table = self.tables.of(kernel)
        parts: list[Hashable] = [_SCANNED, override]
        arrays: list[Any] = []  # in the order of `jax.tree.flatten`
        _scan((args, kwargs), parts, arrays)
        key = tuple(parts)
        plan = table.get(key)
        if plan is not None:
            return plan(args, kwargs, arrays)
        # Only on a call's first run: scalars that become numbers have no plan.
        numbers = with_python_numbers(kernel, args, kwargs)
        if numbers[0] is not args or numbers[1] is not kwargs:
            return self.executor().call(kernel, *numbers, cfg)
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
            raise _has_a_type(kernel, args, kwargs)
        if not compat.tracing.outside_traces():  # the kernel may be gone when the trace is lowered, and a plan with it
            raise Traced
        values = (*args, *kwargs.values())
        types = (*map(type, args), *kwargs, *map(type, kwargs.values()))
        if override is None and types not in table and all(map(_has_telling_type, values)):
            plan = self._typed_plan(kernel, args, kwargs)
            out = plan(*args, **kwargs)
            table.keep(types, plan)
            return out
        if override is None and any(type(value) is float and not _has_telling_type(value) for value in values):
            # `jit` does not cache a trace that raised, so each such call would trace again. Scan all calls of these
            # types instead.
            table[types] = _redirect_to_scan(self, weakref.ref(kernel))
        plan = _scanned_plan(self.executor, weakref.ref(kernel), cfg)
        out = plan(args, kwargs, arrays)
        table.keep(key, plan)
        return out

    def _typed_plan(self, kernel: Kernel[Cfg, Out], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Plan:
        executor = self.executor
        owner: Callable[[], Any] = weakref.ref(kernel)

        def run(*args: object, **kwargs: object) -> Any:
            if not all(map(_has_telling_type, (*args, *kwargs.values()))):
                raise NotByEquality
            return executor().bind(owner(), args, kwargs, None, weakly=True)

        # `jit` compares shapes in C++. With a key of abstract values, built in Python, calls took 1.1 to 1.5 times as
        # long. All types here are telling.
        positions = [index for index, value in enumerate(args) if not isinstance(value, _NOT_STATIC)]
        names = [name for name, value in kwargs.items() if not isinstance(value, _NOT_STATIC)]
        plan: Plan = jax.jit(run, static_argnums=positions, static_argnames=names)
        return plan


def _has_a_type(kernel: Kernel[Cfg, Out], args: Sequence[object], kwargs: Mapping[str, object]) -> ArgumentError:
    leaves = jax.tree.leaves_with_path((args, kwargs))
    path, array = next((path, leaf) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct))
    name = leaf_name(kernel, path)
    return ArgumentError(
        f"{kernel.op_id}: {name} is a type without values, {array.dtype}{list(array.shape)}; pass an array, or use "
        "types with jax.eval_shape, jax.jit(...).lower or explain."
    )


def raise_if_unusable(
    kernel: Any, args: Sequence[object], kwargs: Mapping[str, object], error: TypeError | ValueError
) -> None:
    """Raise if a call failed because JAX does not support its arrays; JAX's own errors name no argument.

    Raises:
        ArgumentError: JAX does not support an array, or arrays are on different devices.
    """
    if not isinstance(kernel, Kernel):
        return
    is_of_devices = "incompatible devices" in str(error)
    devices: dict[Any, str] = {}
    for path, leaf in jax.tree.leaves_with_path((args, kwargs)):
        fault = array_fault(leaf)
        if fault:
            raise ArgumentError(f"{leaf_name(kernel, path)} is {fault}") from None
        if is_of_devices and isinstance(leaf, compat.tracing.ArrayImpl) and leaf.committed:
            devices.setdefault(frozenset(leaf.devices()), leaf_name(kernel, path))
    if len(devices) > 1:
        where = " and ".join(f"{name} on {_shown(held)}" for held, name in devices.items())
        raise ArgumentError(f"arrays must be on the same devices, got {where}; use jax.device_put.") from None


def _shown(devices: Collection[Any]) -> str:
    """Return a few of the devices for a message."""
    numbers = sorted(device.id for device in devices)
    some = ", ".join(map(str, numbers[:4])) + ", ..." * (len(numbers) > 4)
    return f"{next(iter(devices)).platform}:{some}"


def _redirect_to_scan(plans: Plans, kernel: weakref.ref[Any]) -> Plan:
    """Return the plan of calls with a value that must not be compared by `==`: it sends them to the scan."""
    owner: Callable[[], Any] = weakref.ref(plans)
    return lambda *args, **kwargs: owner().run(kernel(), args, kwargs, None, None)


def _scanned_plan(executor: Callable[[], Any], kernel: weakref.ref[Any], cfg: object) -> Plan:
    """Return a compiled function of a call's arrays; other values are read from the call during tracing."""
    # Thread-local: two threads may run the same plan, and static values come from the call that is being traced.
    current = threading.local()

    def run(*arrays: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(current.call, is_leaf=wraps_array)
        given = iter(arrays)
        filled = [next(given) if _is_given(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return executor().bind(kernel(), args, kwargs, cfg, weakly=True)

    jitted = jax.jit(run)

    def plan(args: tuple[object, ...], kwargs: Mapping[str, object], arrays: Sequence[jax.Array]) -> Any:
        current.call = args, kwargs
        try:
            return jitted(*arrays)
        finally:
            del current.call  # the plan lives on, and must not keep the call's arguments alive

    return plan


class Traced(Exception):
    """An argument is traced, or a trace is under way and the call has no plan."""


def _scan(value: Any, key: list[Hashable], arrays: list[Any]) -> None:
    """Append the arrays in a value to `arrays`, and everything else that identifies it to the key of a plan."""
    kind: Any = type(value)
    if kind in _ARRAY_KINDS:
        arrays.append(value)
        key.append(_ARRAY)
    elif kind in _BY_EQUALITY and kind is not float:
        key += (kind, value)
    elif kind is float:
        key.append(struct.pack("d", value))
    elif kind is tuple or kind is list:
        # Include lengths, because the key is flat: ((1,), 2) must differ from ((1, 2),).
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
        # A traced argument belongs to an outer trace, which binds the primitive directly; a plan would nest a `jit`.
        raise Traced
    if _is_given(value):
        array = as_array(value)
        if isinstance(array, jax.core.Tracer):
            raise Traced
        arrays.append(array)
        # Some parameters accept arrays but treat scalars as numbers.
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
    return is_array(leaf) or wraps_array(leaf)


def is_static(value: object) -> bool:
    """Return whether an argument contains no array."""
    return not any(map(_is_given, jax.tree.leaves(value, is_leaf=wraps_array))) and value is not None


def _has_telling_type(value: object) -> bool:
    """Return whether the type of `value` shows if it is an array, and equal values of this type are interchangeable."""
    if type(value) is float:
        return value != 0.0 and not math.isnan(value)  # 0.0 equals -0.0, and NaN does not equal itself
    if type(value) in _BY_EQUALITY or isinstance(value, _DTYPES):
        return True
    return isinstance(value, _ARRAY_TYPES) and is_array(value)
