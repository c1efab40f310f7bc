# SPDX-License-Identifier: Apache-2.0
"""Names of configuration types in files, and the way back - without importing what a file names."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Final, cast

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.serialize import from_data

PLAIN: Final = "json"  # the name for a configuration that is neither dataclass nor named tuple


def type_name(config: Any) -> str:
    """Return `module.Qualname` of a configuration's class, or `json` for plain data."""
    cls = type(config)
    return f"{cls.__module__}.{cls.__qualname__}" if _is_record(cls) else PLAIN


def decode_config(data: Any, name: str) -> Any:
    """Return the configuration that was stored as `data` under the type name `name`.

    Raises:
        ConfigError: no loaded module has such a type.
        SerializationError: the data do not fit the type.
    """
    return data if name == PLAIN else from_data(data, loaded_type(name))


def loaded_type(name: str) -> type:
    """Return the class of that name among the modules that are loaded; a file never causes an import.

    Raises:
        ConfigError: there is no such dataclass or named tuple.
    """
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:]:
            # not getattr: a module's __getattr__ may import
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if _is_record(found) and f"{found.__module__}.{found.__qualname__}" == name:
            return cast(type, found)
    raise ConfigError(
        f"type {name!r} is no dataclass or named tuple of a loaded module; import its module first, or pass cfg_type=."
    )


def _is_record(cls: Any) -> bool:
    return isinstance(cls, type) and (
        dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )
