# SPDX-License-Identifier: Apache-2.0
"""Names of configuration types in files, and the way back - to types that this process itself has spoken of."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Final

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils import services
from ejkernel.ops.utils.storage.serialize import from_data
from ejkernel.ops.utils.values.nameable import marked, qualified, quoted

PLAIN: Final = "json"  # the name for a configuration that is neither dataclass nor named tuple

_noted: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def type_name(config: object) -> str:
    """Return `module.Qualname` of a configuration's class, or `json` for plain data; files may name the class then."""
    cls = type(config)
    if not _is_record(cls):
        return PLAIN
    note_type(cls)
    return _name_of(cls)


def note_type(cls: type) -> None:
    """Let files name a class, as long as it lives: this process made a configuration of it.

    Not a class inside a function, of which there may be many of one name.
    """
    if "<" not in cls.__qualname__:
        _noted[qualified(_name_of(cls))] = cls


def decode_config(data: object, name: str) -> Any:
    """Return the configuration that was stored as `data` under the type name `name`.

    Raises:
        ConfigError: files may name no such type here.
        SerializationError: the data do not fit the type.
    """
    return data if name == PLAIN else from_data(data, known_type(name))


def known_type(name: str) -> type:
    """Return the dataclass or named tuple of that name, if files may name it; nothing is looked up in modules.

    That is the case if a kernel class of this process names it as its configurations' type, if it was marked with
    `nameable`, or if this process has stored a configuration of it.

    Raises:
        ConfigError: it may not be named, or there is no such type.
    """
    wanted = qualified(name)
    found: Any = marked(wanted)
    if found is None:
        found = next((cls for cls in services.config_types() if qualified(_name_of(cls)) == wanted), None)
    if found is None:
        found = _noted.get(wanted)
    if isinstance(found, type) and _is_record(found):
        return found
    raise ConfigError(
        f"type {quoted(name)} is no dataclass or named tuple that files may name here; import its module, which "
        "must name it as its kernel's configuration, Kernel[Config, ...], or mark it with @ejkernel.ops.nameable; or "
        "pass cfg_type=."
    )


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
