# SPDX-License-Identifier: Apache-2.0
"""What a kernel's own code is, and what it declares, and so lets texts and files name.

Files name the types of configurations, and the way back leads to types that this process itself has spoken of.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ejkernel.ops.core.hooks import Kernel, candidates_of, config_type_of, hook, run_forms
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ConfigError, SerializationError
from ejkernel.ops.utils.error_text import instance_text
from ejkernel.ops.utils.storage.serialize import from_data, to_data
from ejkernel.ops.utils.values.nameable import Names, marked, qualified, quoted

logger = logging.getLogger(__name__)

PLAIN: Final = "json"  # the name for a configuration that is neither dataclass nor named tuple
_LOOKED_AT: Final = 64  # candidates: those of a large space are of one kind

_noted: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def same_code(left: Kernel[Cfg, Out], right: Kernel[Cfg, Out]) -> bool:
    """Return whether two kernels compute by the same code; what they hold may differ."""
    return type(left) is type(right) or _code_of(left) == _code_of(right)


def _code_of(kernel: Kernel[Cfg, Out]) -> list[Any]:
    names = [*run_forms(kernel), "run", "custom_vjp", "fwd_with_residuals", "vjp"]
    functions = [getattr(type(kernel), name, None) for name in names] + [vars(kernel).get("__wrapped__")]
    return [_code(getattr(function, "__code__", None)) for function in functions]


def _code(code: object) -> Any:
    """Return what a function does, whatever lines of whatever file it is on."""
    if not isinstance(code, types.CodeType):
        return None
    # As texts, for 1, 1.0 and True are equal.
    constants = tuple(_code(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts)
    return code.co_code, code.co_names, constants


def names_of(kernel: Kernel[Cfg, Out]) -> Names:
    """Return what the signatures of the kernel's `run`, in all its forms, and its configuration's type name."""
    names = Names()
    for form in ("run", *run_forms(kernel)):
        names.add_function(getattr(kernel, form))
    function = vars(kernel).get("__wrapped__")  # of a function that is a kernel
    if function is not None:
        names.add_function(function)
    if kernel.config_type is not None:
        names.add_annotation(kernel.config_type)
    return names


def note_config_types(inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> None:
    """Let files name the type of the configurations that the call's kernel makes, if its class names none."""
    if kernel.config_type is not None:
        return
    try:
        note_type(type(hook(kernel, "heuristic_cfg", inv.platform)(inv)))
    except Exception as error:  # noqa: BLE001 - the heuristic has its own turn, where its errors are the caller's
        logger.debug("%s: what type its configurations have is not known: %s", inv.op_id, error)


def check_kind(inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], config: object, what: str) -> None:
    """Raise unless a configuration is of a kind that the kernel makes or names.

    A class that was defined again, as in a notebook, leaves configurations of the old class under the keys of the new
    kernel. A kernel that names its configuration's dataclass refuses them by itself (`check_config`). Of any other
    kernel the heuristic, the annotations and the candidates say which kinds there are.

    Raises:
        ConfigError: it is of another kind; `what` is its name in the message.
    """
    try:
        expected = _other_kind(inv, kernel, config)
    except Exception as error:  # noqa: BLE001 - the kernel's own hooks have their turn, where errors are the caller's
        logger.debug("%s: what kind its configurations are is not known: %s", inv.op_id, error)
        return
    if expected is not None:
        raise ConfigError(
            f"{kernel.op_id}: {what} must be a {expected.__name__}, got {instance_text(config, expected)}."
        )


def _other_kind(inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], config: object) -> type | None:
    """Return the class of the kernel's configurations; `None` if `config` is one of them."""
    heuristic = hook(kernel, "heuristic_cfg", inv.platform)(inv)
    if _is_like(config, heuristic):
        return None
    names = Names()
    _add_hooks(names, type(kernel))
    if isinstance(config, tuple(names.types())):
        return None
    candidates = itertools.islice(candidates_of(kernel, inv), _LOOKED_AT)
    return None if any(_is_like(config, candidate) for candidate in candidates) else type(heuristic)


def _is_like(config: object, other: object) -> bool:
    return isinstance(config, type(other)) or _kind(config) is _kind(other)


def _kind(config: object) -> type:
    """Return a configuration's class; what JSON does not tell apart is of one kind."""
    if isinstance(config, Mapping):
        return dict
    if isinstance(config, list | tuple) and not _is_record(type(config)):
        return tuple
    return float if isinstance(config, bool | int | float) else type(config)


def _config_types() -> Iterator[type]:
    """Yield the types that the kernel classes of this process name for their configurations, the latest class first.

    Those come last that only the annotations of a class's hooks name, for it takes longer to read these.
    """
    # The latest first, for a class that was defined again has the name of the one before.
    silent = []
    for cls in reversed(list(_subclasses(Kernel))):
        declared = config_type_of(cls)
        if declared is None:
            silent.append(cls)
        else:
            yield declared
    for cls in silent:
        names = Names()
        _add_hooks(names, cls)
        yield from names.types()


def _add_hooks(names: Names, cls: type[Kernel[Any, Any]]) -> None:
    """Add the types that the annotations of a class's own hooks name for configurations."""
    names.add_annotation_of(vars(cls).get("run"), "cfg")
    for name in ("heuristic_cfg", "config_space", "candidate_cfgs"):
        names.add_annotation_of(vars(cls).get(name), "return")


def _subclasses(cls: type[object]) -> Iterator[Any]:
    for found in cls.__subclasses__():
        yield found
        yield from _subclasses(found)


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


def why_not_decoded(config: object) -> str:
    """Return why a configuration that is stored could not be decoded by its type's name; `""` if it could."""
    try:
        decode_config(to_data(config), type_name(config))
    except (ConfigError, SerializationError) as error:
        return str(error)
    return ""


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
        found = next((cls for cls in _config_types() if qualified(_name_of(cls)) == wanted), None)
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
