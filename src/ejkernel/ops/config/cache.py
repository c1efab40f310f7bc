# SPDX-License-Identifier: Apache-2.0
"""Tiers, the sources of configurations; `ConfigCache`, the configurations in memory; and `overlay_cache`."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ClassVar, Final, Generic

from ejkernel.ops.core.context import current_scope, entered
from ejkernel.ops.core.types import Cfg, ConfigKey
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.services import Shown
from ejkernel.ops.utils.storage.serialize import digest_of, stable_json
from ejkernel.ops.utils.weak_caches import Copied, Records


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """A source of configurations.

    Attributes:
        name: The name in `Resolution.source`.
        is_provisional: Whether the answers hold only until the call is measured. They are remembered for reports, but
            never hide a better tier and are never saved to disk.
        is_temporary: Whether the answers are temporary and not remembered.
        is_for_one_call: Whether an answer is for the exact call, rather than for all calls of its bucket.
        is_saved: Whether another process found the answers, maybe with another version of the kernel.
        only: The only situation in which the tier is asked, e.g. `on TPUs`; empty if it is always asked.
    """

    name: str
    is_provisional: bool = False
    is_temporary: bool = False
    is_for_one_call: bool = False
    is_saved: bool = False
    only: str = ""


OVERRIDE: Final = Tier("override", is_temporary=True, is_for_one_call=True)
OVERLAY: Final = Tier("overlay", is_temporary=True)
MEMORY: Final = Tier("memory")
PERSISTENT: Final = Tier("persistent", is_saved=True)
SHIPPED: Final = Tier("shipped", is_saved=True)
# found by a refresh of a shared cache's copy
SHARED: Final = Tier("shared", is_saved=True, only="with a URL in EJKERNEL_CACHE_LAYERS")
AUTOTUNE: Final = Tier("autotune")
# by the processes of a program; a source continues with the process
AGREED: Final = Tier("agreed", is_temporary=True, only="in programs of several processes")
# saved, but the policy asks to tune it again
STALE: Final = Tier("stale", is_provisional=True, is_saved=True, only="if EJKERNEL_STALE asks to tune entries again")
SISTER: Final = Tier("sister", is_provisional=True, is_saved=True)  # shipped, but measured on another device
FORWARD: Final = Tier("forward", is_provisional=True, is_saved=True, only="for derivatives")
# measured by others
PUBLISHED: Final = Tier("published", is_provisional=True, is_saved=True, only="on TPUs")
# by a compiler's simulator, not measured
ESTIMATED: Final = Tier("estimated", is_provisional=True, is_saved=True, only="on TPUs")
HEURISTIC: Final = Tier("heuristic", is_provisional=True, is_for_one_call=True)
CHOOSER: Final = Tier("chooser", is_for_one_call=True)  # a user-defined chooser, which asks no tiers

ORDER: Final = (
    *(OVERRIDE, OVERLAY, AGREED, MEMORY, PERSISTENT, SHIPPED, SHARED, AUTOTUNE),
    *(STALE, SISTER, FORWARD, PUBLISHED, ESTIMATED, HEURISTIC),
)
_BY_NAME: Final = {tier.name: tier for tier in (*ORDER, CHOOSER)}


@dataclasses.dataclass(frozen=True, slots=True)
class Resolution(Shown, Generic[Cfg]):
    """A configuration, the name of its tier, and the key of the call (`None` if it has no key)."""

    config: Cfg
    source: str
    key: ConfigKey | None

    @property
    def tier(self) -> Tier:
        """The tier that answered; an unknown name is a user-defined tier with permanent answers."""
        if self.source.startswith(f"{AGREED.name} with "):
            return AGREED
        return _BY_NAME.get(self.source) or Tier(self.source)


@dataclasses.dataclass(frozen=True, slots=True)
class Consulted:
    """The result of asking one tier: an answer with an optional note, or a note with the reason for no answer.

    Attributes:
        tier: The name of the tier.
        resolution: The answer, or `None`.
        note: More about the answer, or the reason for no answer; it may quote the content of files.
        is_rejected: Whether the tier has an entry that the policy for stale entries rejects.
    """

    tier: str
    resolution: Resolution[Any] | None
    note: str = ""
    is_rejected: bool = False


def key_and_config(arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return `(key, cfg)` for `put(key, cfg)` and for `put(device, op, call, cfg)`."""
    if len(arguments) not in (2, 4):
        raise TypeError(f"put takes (key, cfg) or (device, op, call, cfg), got {len(arguments)} arguments.")
    return key_of(arguments[:-1]), arguments[-1]


def as_config_key(key: object) -> ConfigKey | None:
    """Return three strings as a `ConfigKey`; `None` for any other object."""
    is_key = isinstance(key, (tuple, list)) and len(key) == 3 and all(isinstance(part, str) for part in key)
    return ConfigKey(*key) if is_key else None  # type: ignore[misc]  # of three strings


def key_of(parts: tuple[Any, ...]) -> Any:
    """Return the key of `get(key)` and of `get(device, op, call)`."""
    if len(parts) == 1:
        return as_config_key(parts[0]) or parts[0]
    if len(parts) == 3:
        found = as_config_key(parts)
        if found is None:
            raise ConfigError(f"device, op and call must be str, got {parts!r}.")
        return found
    raise TypeError(f"get takes (key) or (device, op, call), got {len(parts)} arguments; a key is one value.")


class ConfigCache(Copied, Shown):
    """Configurations in the memory of this process, under any hashable key. Thread-safe."""

    _anew: ClassVar = {"_lock": threading.Lock, "_listeners": list}

    def __init__(self) -> None:
        self._entries: dict[Hashable, Resolution[Any]] = {}
        # Bounded, because new static values keep adding these, and the next call repeats its lookup anyway.
        self._provisional = Records[Resolution[Any]]()
        self._answered_provisionally: set[Hashable] = set()  # operations
        self._lock = threading.Lock()
        # Weak references: a cache may outlive the executors that listen to it.
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []

    def put(self, *arguments: object) -> None:
        """Store a configuration: `put(key, cfg)` or `put(device, op, call, cfg)`.

        Eager calls use it at once. A compiled function keeps its configuration; see `overlay_cache`.
        """
        key, config = key_and_config(arguments)
        self.remember(key, config, "memory")

    def get(self, *arguments: object) -> Any:
        """Return the configuration under `key` (or `device, op, call`), or `None`."""
        found = self.remembered(key_of(arguments))
        return None if found is None else found.config

    def remember(self, key: Hashable, config: object, source: str, *, keeps_first: bool = False) -> None:
        """Store a configuration and the tier that found it.

        With `keeps_first`, an earlier configuration of the same type and from the same provisional tier stays.
        """
        own = key if isinstance(key, ConfigKey) else None
        entry = Resolution(config, source, own)
        # The operation: a backward call falls back to the entry of its forward call, so a new entry may change both.
        family = own.op.partition("@")[0].partition(".")[0] if own else key
        with self._lock:
            before = self._entries.pop(key, None) or self._provisional.pop(key, None)
            if entry.tier.is_provisional:
                # Only measured configurations invalidate earlier answers.
                is_like = before is not None and before.source == source and type(before.config) is type(config)
                self._provisional.keep(key, before if keeps_first and before and is_like else entry)
                self._answered_provisionally.add(family)
                return
            self._entries[key] = entry
        # This entry replaces provisional answers, also those of calls that look up this entry.
        provisional = before.tier.is_provisional if before else family in self._answered_provisionally
        if provisional or (before is not None and not same_config(before.config, config)):
            self._changed()

    def remembered(self, key: Hashable) -> Resolution[Any] | None:
        """Return the configuration under `key` with its source, or `None`."""
        with self._lock:
            return self._entries.get(key) or self._provisional.get(key)

    def remove(self, *arguments: object) -> bool:
        """Remove a configuration; return whether the key had one."""
        with self._lock:
            key = key_of(arguments)
            found = self._entries.pop(key, None) or self._provisional.pop(key, None)
        if found is not None:
            self._changed()
        return found is not None

    def clear(self) -> None:
        """Remove all configurations."""
        with self._lock:
            self._entries.clear()
            self._provisional.clear()
        self._changed()

    def items(self) -> list[tuple[Hashable, Any]]:
        """Return all keys with their configurations."""
        with self._lock:
            return [(key, entry.config) for key, entry in (*self._provisional.items(), *self._entries.items())]

    def __contains__(self, key: Hashable) -> bool:
        return self.remembered(key) is not None

    def __len__(self) -> int:
        return len(self.items())

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the bound method `listener` whenever an earlier answer becomes invalid."""
        with self._lock:
            self._listeners.append(weakref.WeakMethod(listener))

    def _changed(self) -> None:
        with self._lock:
            self._listeners = [reference for reference in self._listeners if reference() is not None]
            listeners = [reference() for reference in self._listeners]
        # Outside the lock: a listener may use the cache.
        for listener in filter(None, listeners):
            listener()


def same_config(left: object, right: object) -> bool:
    """Return whether two configurations are of one type and equal as JSON."""
    # As JSON: 1, 1.0 and True are equal under `==`, and a user's class may not define it.
    return left is right or (type(left) is type(right) and config_token(left) == config_token(right))


def config_token(config: object) -> tuple[str, str]:
    """Return the type name and stable JSON of a configuration; equal configurations have equal tokens.

    Raises:
        SerializationError: The configuration holds a value without a JSON form.
    """
    return f"{type(config).__module__}.{type(config).__qualname__}", stable_json(config)


class Overlay:
    """Configurations by `ConfigKey`. Overlays compare by content, so equal overlays share compiled programs.

    Args:
        entries: A mapping from `ConfigKey` (or triples of strings) to configurations.

    Attributes:
        digest: SHA-256 of the content.
    """

    __slots__ = ("_entries", "digest")

    def __init__(self, entries: Mapping[Any, object]) -> None:
        self._entries = {_overlay_key(key): config for key, config in entries.items()}
        # JAX's cache keys contain the digest, so it must not depend on the order of the entries.
        content = stable_json(sorted([*key, *config_token(config)] for key, config in self._entries.items()))
        self.digest = digest_of(content)

    def lookup(self, key: ConfigKey) -> Any:
        """Return the configuration under `key`, or `None`."""
        return self._entries.get(key)

    def __eq__(self, other: object) -> bool:
        # Configurations of a redefined class have equal content, but the kernel rejects them.
        return isinstance(other, Overlay) and other.digest == self.digest and other._types == self._types

    @property
    def _types(self) -> dict[ConfigKey, type]:
        return {key: type(config) for key, config in self._entries.items()}

    def __hash__(self) -> int:
        return hash(self.digest)


def _overlay_key(key: object) -> ConfigKey:
    found = as_config_key(key)
    if found is None:
        raise ConfigError(f"keys of an overlay must be ConfigKey(device, op, call), got {key!r}.")
    return found


@contextlib.contextmanager
def overlay_cache(cache: ConfigCache | Mapping[Any, object]) -> Iterator[None]:
    """Put the configurations of `cache` in force inside the `with` block, above every tier but an explicit `cfg=`.

    Inside the block, `jit` traces compiled functions again; outside it uses their old executables. The overlay holds
    in this thread. `cache` is read once, on entry. Executables compiled ahead of time (`.compile()`) never change.

    Args:
        cache: A `ConfigCache` or a mapping from `ConfigKey(device, op, call)` to configurations.
    """
    # A snapshot: configurations in force must not change while programs are traced under them.
    entries = dict(cache.items()) if isinstance(cache, ConfigCache) else cache
    if not isinstance(entries, Mapping):
        raise ConfigError(f"cache must be a ConfigCache or a mapping, got {type(cache).__name__}.")
    scope = current_scope()
    with entered(dataclasses.replace(scope, layers=(*scope.layers, Overlay(entries)))):
        yield
