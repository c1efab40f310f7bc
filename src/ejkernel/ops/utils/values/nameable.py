# SPDX-License-Identifier: Apache-2.0
"""Names that a text or file may use. A name is looked up in tables, never in modules, so a lookup runs no code.

There are three tables: objects marked with `nameable`, objects that a kernel's own code declares (`Names`), and JAX's
public array functions. Lookups in modules would be unsafe. A package contains functions that must not be called with
arguments from a text, e.g. `functools.partial(os.system, ...)`, and accessing a module's attribute may import code.
The declared objects are collected again for each call that is read, so no entry must be unregistered or kept alive.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import threading
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from ejkernel.ops.errors import KernelError
from ejkernel.ops.utils.storage.decode import alias_target
from ejkernel.ops.utils.values.identity import by_is
from ejkernel.ops.utils.values.scalars import resolved_annotations
from ejkernel.ops.utils.values.signature import JAX_MODULES, importable

T = TypeVar("T")

# Functions of these modules that access anything but their arguments.
_NOT_OF_ARRAYS: Final = {
    "jax.numpy": {"from_dlpack", "frombuffer", "fromfile", "load", "save", "savez"}
    | {"get_printoptions", "printoptions", "set_printoptions"},
    "jax.lax": {"after_all", "create_token", "dce_sink", "infeed", "outfeed", "precv", "psend", "recv", "send"},
}
_LONGEST_SHOWN: Final = 200
_PYTHONS: Final = ("builtins", "typing", "types", "collections.abc")  # modules of generic container types

_lock = threading.Lock()
_marked: dict[str, Callable[[], Any]] = {}


def nameable(thing: T) -> T:
    """Let texts and files name a function or class, and return it.

    A program's text names the functions and object types among the static arguments of its calls, and a saved
    configuration names its type. Such a name must be declared by the kernel (in the annotations and defaults of `run`,
    or as its configuration type), belong to JAX's array functions, or be marked:

    >>> @nameable
    ... class Rounding(enum.Enum):
    ...     NEAREST = 1
    ...     DOWN = 2

    A text can construct a marked class with any arguments and pass a marked function to kernels that take functions.
    So mark only classes and functions without side effects.

    Args:
        thing: A function, a class or a module. Usable as a decorator or as a call, `nameable(functions.swish)`. Held
            weakly; marking another object with the same name replaces it.

    Raises:
        KernelError: The object has no name that is the same in every process.
    """
    found: Any = thing.__func__ if isinstance(thing, staticmethod) else thing
    name = _name_of(found)
    of_object = inspect.ismethod(found) and not isinstance(found.__self__, type)
    if name is None or "<" in name or of_object:
        raise KernelError(f"nameable takes a function or class at the top level of a module, got {thing!r}.")
    with _lock:
        _marked[name] = by_is(found)
    return thing


def marked(name: str) -> Any:
    """Return the marked object with this name, or `None`."""
    with _lock:
        reference = _marked.get(name)
    return None if reference is None else reference()


def qualified(name: str) -> str:
    """Return the name in other processes of an object from this process's `__main__` script."""
    module, dot, rest = name.partition(".")
    return f"{importable(module)}{dot}{rest}" if module == "__main__" else name


def quoted(name: str) -> str:
    """Return an untrusted name in quotes for a message."""
    return repr(name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}...")


class Names:
    """The objects that a kernel's code declares, by name: in annotations and defaults, including nested ones."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def find(self, name: str) -> Any:
        """Return the declared object, marked object or JAX function with this name, or `None`."""
        found = self._found.get(name)
        if found is None:
            found = marked(name)
        return _jaxs().get(name) if found is None else found

    def types(self) -> Iterator[type]:
        """Yield the declared classes."""
        return (found for found in self._found.values() if isinstance(found, type))

    def add_function(self, function: Any) -> None:
        """Add the objects named in a function's signature; annotations that cannot be resolved are skipped."""
        self._add_annotations(function)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a callable written in another language
            return
        for parameter in parameters:
            if parameter.default is not parameter.empty:
                self.add_value(parameter.default)

    def add_annotation_of(self, function: object, name: str) -> None:
        """Add the objects named in the annotation of a parameter, or of the result (`return`)."""
        self.add_annotation(resolved_annotations(function).get(name))

    def add_annotation(self, annotation: Any) -> None:
        """Add the classes in a resolved annotation."""
        if isinstance(annotation, list):  # the arguments of Callable
            for inner in annotation:
                self.add_annotation(inner)
        elif (target := alias_target(annotation)) is not None:
            self.add_annotation(target)
        elif typing.get_origin(annotation) is typing.Literal:
            self.add_value(typing.get_args(annotation))
        elif typing.get_args(annotation):
            for inner in (typing.get_origin(annotation), *typing.get_args(annotation)):
                self.add_annotation(inner)
        elif isinstance(annotation, type):
            self._add_class(annotation)

    def add_value(self, value: object) -> None:
        """Add the functions, modules and object types in a default value, recursively."""
        if value is None or isinstance(value, enum.Enum):
            self._add_class(type(value))
        elif isinstance(value, (list, tuple, set, frozenset)):
            for item in value:
                self.add_value(item)
            self._add_class(type(value))
        elif isinstance(value, dict):
            self.add_value([*value, *value.values()])
        elif isinstance(value, functools.partial):
            self.add_value([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, type):
            self._add_class(value)
        elif (name := _name_of(value)) is not None:
            self._found[name] = value
        else:
            self._add_class(type(value))
            if dataclasses.is_dataclass(value):
                self.add_value([getattr(value, field.name, None) for field in dataclasses.fields(value)])

    def _add_class(self, cls: type) -> None:
        """Add a class and the objects that its fields name."""
        name = _name_of(cls)
        if name is None or cls.__module__ in _PYTHONS or self._found.get(name) is cls:
            return
        self._found[name] = cls
        if dataclasses.is_dataclass(cls):
            self._add_annotations(cls)
            for field in dataclasses.fields(cls):
                if field.default is not dataclasses.MISSING:
                    self.add_value(field.default)
        elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
            self._add_annotations(cls)

    def _add_annotations(self, thing: object) -> None:
        for annotation in resolved_annotations(thing).values():
            self.add_annotation(annotation)


def _name_of(thing: object) -> str | None:
    """Return the name that descriptions use for a function, class or module, without a lookup."""
    if isinstance(thing, types.ModuleType):
        return importable(thing.__name__)
    module, qualname = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if type(module) is not str or type(qualname) is not str:
        return None
    return f"{importable(module)}.{qualname}"


@functools.cache
def _jaxs() -> dict[str, Any]:
    """Return JAX's public array functions, their modules and the types of their arguments, by name."""
    found: dict[str, Any] = {}
    for path in JAX_MODULES:
        module = importlib.import_module(path)  # a fixed list, not an untrusted name
        found[path] = module
        for name, value in vars(module).items():
            if name.startswith("_") or name in _NOT_OF_ARRAYS.get(path, ()):
                continue
            if isinstance(value, type):
                if issubclass(value, enum.Enum) or (issubclass(value, tuple) and hasattr(value, "_fields")):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
            elif callable(value) and _is_jaxs(value):
                found[f"{path}.{name}"] = value
    return found


def _is_jaxs(function: object) -> bool:
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] == "jax"
