# SPDX-License-Identifier: Apache-2.0
"""Types and functions that files may name.

Files store the type names of configurations. Decoding resolves a name only to types that this process has declared or
used; it never looks into modules.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ejkernel.ops.core.hooks import Computation, heuristic_config, run_forms
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of, living_kernels
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ConfigError, SerializationError
from ejkernel.ops.utils.error_text import instance_text, value_text
from ejkernel.ops.utils.storage.decode import with_tuples
from ejkernel.ops.utils.storage.encode import child
from ejkernel.ops.utils.storage.serialize import from_plain, to_data
from ejkernel.ops.utils.values.nameable import Names, marked, qualified, quoted

logger = logging.getLogger(__name__)

# The type names of configurations that are neither a dataclass, a named tuple nor an enum. JSON does not distinguish
# tuples from lists: the arrays of plain data are tuples, as in hashable configurations, and lists if it has any list.
PLAIN: Final = "json"
_WITH_LISTS: Final = "json with lists"
_MAX_INSPECTED: Final = 64  # candidates to inspect; the candidates of a large space have one type

_noted: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def names_of(kernel: Kernel[Cfg, Out]) -> Names:
    """Return the names in the signatures of all forms of the kernel's `run`, and in its configuration type."""
    names = Names()
    for form in ("run", *run_forms(kernel)):
        names.add_function(getattr(kernel, form))
    names.add_function(vars(kernel).get("__wrapped__"))  # the function of a kernel made by `tune`
    if kernel.config_type is not None:
        names.add_annotation(kernel.config_type)
    return names


def config_type_of(inv: Invocation[Cfg, Out], kernel: Computation[Cfg, Out] | None) -> type | None:
    """Return the configuration type that the kernel's class declares; if none, files may name its heuristic's type."""
    if kernel is None:
        return None
    if kernel.config_type is not None:
        return kernel.config_type
    try:
        note_type(type(heuristic_config(kernel, inv)))
    except Exception as error:  # noqa: BLE001 - the heuristic runs again later, and raises its errors to the caller
        logger.debug("%s: the type of its configurations is unknown: %s", inv.op_id, error)
    return None


def check_kind(inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], config: object, what: str) -> None:
    """Raise unless a configuration has a type that the kernel produces or declares.

    A class redefined in a notebook leaves configurations of the old class under the keys of the new kernel. A kernel
    that declares its configuration dataclass rejects them itself (`check_config`). For any other kernel, the heuristic,
    the annotations and the candidates determine the valid types.

    Raises:
        ConfigError: The configuration has another type; the message calls it `what`.
    """
    try:
        expected = _other_kind(inv, kernel, config)
    except Exception as error:  # noqa: BLE001 - the hooks run again later, and raise their errors to the caller
        logger.debug("%s: the type of its configurations is unknown: %s", inv.op_id, error)
        return
    if expected is not None:
        raise ConfigError(
            f"{kernel.op_id}: {what} must be a {expected.__name__}, got {instance_text(config, expected)}."
        )


def _other_kind(inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], config: object) -> type | None:
    """Return the class of the kernel's configurations; `None` if `config` is such a configuration."""
    heuristic = heuristic_config(kernel, inv)
    if _is_like(config, heuristic):
        return None
    names = Names()
    _add_hooks(names, type(kernel))
    if isinstance(config, tuple(names.types())):
        return None
    candidates = itertools.islice(candidates_of(kernel, inv), _MAX_INSPECTED)
    return None if any(_is_like(config, candidate) for candidate in candidates) else type(heuristic)


def _is_like(config: object, other: object) -> bool:
    return isinstance(config, type(other)) or _kind(config) is _kind(other)


def _kind(config: object) -> type:
    """Return the class of a configuration; values that JSON does not distinguish have one class."""
    if isinstance(config, Mapping):
        return dict
    if isinstance(config, list | tuple) and not _is_record(type(config)):
        return tuple
    return float if isinstance(config, bool | int | float) else type(config)


def _config_types(op: str) -> Iterator[type]:
    """Yield the configuration types that the kernel classes of this process declare, those of an operation first.

    Types declared only in annotations of hooks come last, because reading annotations takes longer.
    """
    # Classes of one function share a name. Derivatives have suffixes, such as `.bwd`.
    own = living_kernels().get(re.sub(r"(\.bwd|\.jvp)+(?=@)", "", op), ())
    yield from (kernel.config_type for kernel in own if kernel.config_type is not None)
    # The latest first: a redefined class has the name of its predecessor.
    silent = []
    for cls in reversed(list(_subclasses(Kernel))):
        declared = cls.config_type
        if declared is None:
            silent.append(cls)
        else:
            yield declared
    for cls in silent:
        names = Names()
        _add_hooks(names, cls)
        yield from names.types()


def _add_hooks(names: Names, cls: type[Kernel[Any, Any]]) -> None:
    """Add the configuration types in the annotations of a class's own hooks."""
    names.add_annotation_of(vars(cls).get("run"), "cfg")
    for name in ("heuristic_cfg", "config_space", "candidate_cfgs"):
        names.add_annotation_of(vars(cls).get(name), "return")


def _subclasses(cls: type[object]) -> Iterator[Any]:
    for found in cls.__subclasses__():
        yield found
        yield from _subclasses(found)


def type_name(config: object) -> str:
    """Return `module.Qualname` of a configuration's class, or `json` for plain data; files may name it from then on."""
    cls = type(config)
    if not _has_name(cls):
        return _WITH_LISTS if _has_list(config) else PLAIN
    note_type(cls)
    return _name_of(cls)


def note_type(cls: type) -> None:
    """Let files name a class while it is alive, because this process created a configuration of it.

    Classes inside functions are left out: many of them may share a name.
    """
    if "<" not in cls.__qualname__:
        _noted[qualified(_name_of(cls))] = cls


def decode_config(data: object, name: str, op: str = "") -> Any:
    """Return the configuration of a versioned operation stored as `data` under the type name `name`.

    Raises:
        ConfigError: Files may not name this type here.
        SerializationError: The data do not fit the type.
    """
    if name == PLAIN:
        return with_tuples(data)
    return data if name == _WITH_LISTS else from_plain(data, known_type(name, op))


def read_config(data: object, name: str, declared: Any, op: str) -> Any:
    """Return the configuration stored as plain `data`: of the kernel's type, or else of the type with that name.

    Raises:
        ConfigError: Files may not name this type here.
        SerializationError: The data do not fit the type.
    """
    if declared is None:
        return decode_config(data, name, op)
    found = from_plain(data, declared)
    return with_tuples(found) if declared is dict and name == PLAIN else found  # the items of a `dict` have no types


def why_not_decoded(config: object, op: str, declared: Any = None) -> str:
    """Return why a stored configuration would not be decoded to an equal one; `""` if it would.

    Args:
        config: The configuration.
        op: The versioned operation that it configures.
        declared: The kernel's configuration type; without one, the type of `config` is looked up by its name.
    """
    try:
        found = read_config(to_data(config), type_name(config), declared, op)
    except (ConfigError, SerializationError) as error:
        return str(error)
    if not _is_like(found, config):
        name = type(config).__name__
        return f"a {name} is read as {value_text(found)} unless the kernel declares it, Kernel[{name}, ...]"
    return next(_differences(config, found), "")


def _differences(config: Any, found: Any, path: str = "$") -> Iterator[str]:
    """Yield the values of a configuration that are decoded to another kind of value, each with its path.

    An annotation as general as `Any` does not tell that a field holds an enum, a tuple or a dataclass.
    """
    if isinstance(config, enum.Enum | set | frozenset) or _is_record(type(config)):
        is_read = type(found) is type(config) or (found == config and not _is_record(type(config)))
    else:
        is_read = not isinstance(found, list) or isinstance(config, list)  # a list is not hashable
    if not is_read:
        yield f"{path}: {value_text(config)} is read as {value_text(found)}; annotate its field with its type"
    elif _is_record(type(config)):
        for name in to_data(config):
            yield from _differences(getattr(config, name), getattr(found, name), child(path, name))
    elif isinstance(config, Mapping):
        for name in config:
            yield from _differences(config[name], found[name], child(path, name))
    elif isinstance(config, list | tuple):
        for index, (own, read) in enumerate(zip(config, found, strict=True)):
            yield from _differences(own, read, child(path, index))


def known_type(name: str, op: str) -> type:
    """Return the dataclass, named tuple or enum with that name, if files may name it; modules are never searched.

    If several have this name, it is that of the operation.

    Files may name a type if a kernel class of this process declares it as its configuration type, if it is marked with
    `nameable`, or if this process has stored a configuration of that type.

    Raises:
        ConfigError: The type does not exist, or files may not name it.
    """
    wanted = qualified(name)
    found: Any = marked(wanted)
    if found is None:
        found = next((cls for cls in _config_types(op) if qualified(_name_of(cls)) == wanted), None)
    if found is None:
        found = _noted.get(wanted)
    if isinstance(found, type) and _has_name(found):
        return found
    raise ConfigError(
        f"type {quoted(name)} is no dataclass, named tuple or enum that files may name here; import its module, which "
        "must declare it as its kernel's configuration, Kernel[Config, ...], or mark it with @ejkernel.ops.nameable; "
        "or pass cfg_type=."
    )


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _has_name(cls: type) -> bool:
    return _is_record(cls) or issubclass(cls, enum.Enum)


def _has_list(config: object) -> bool:
    if isinstance(config, Mapping):
        return any(map(_has_list, config.values()))
    return isinstance(config, list) or (isinstance(config, tuple) and any(map(_has_list, config)))


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
