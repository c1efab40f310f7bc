# SPDX-License-Identifier: Apache-2.0
"""Entries of a persistent cache: their layout, files and content; the shipped entries; and stale entries.

Shipped configurations were measured on a few devices, and are also useful on their sister devices. They are separate
tiers, not a layer of the persistent cache. So `ejkernel tune` still tunes calls that only have a shipped configuration,
and the cache commands list only the user's entries. An entry for the same device ranks before tuning. A sister's
entry, from another device with the same chip, ranks after tuning and counts as a miss, so any measurement on this
machine replaces it.

A stale entry was measured with other versions than the current ones, e.g. of JAX. The kernel's version and the device
are parts of the key, so entries of other versions or devices are misses.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, NamedTuple

from ejkernel.ops.config._files import (
    UnusableError,
    driver_of,
    location,
    or_unusable,
    provenance,
    read_file,
    version,
    warn_of,
)
from ejkernel.ops.config.policy import Action, StalePolicy
from ejkernel.ops.config.spaces.axes import Axis
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.declared_names import config_type_of, read_config, type_name
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError, EjkernelError, SerializationError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import cases, durations, ratio
from ejkernel.ops.utils.storage.serialize import describe, from_plain, read_object, sealed_json, stable_json, to_data
from ejkernel.ops.utils.values.signature import digest_of

SCHEMA: Final = 2  # raise when the layout of an entry changes; an entry of another schema is a miss with a warning
WHAT: Final = "an entry of this cache"
UNKNOWN: Final = "unknown"  # a version that an entry does not tell
LARGEST: Final = 4 << 20  # bytes of an entry; a typical entry has a few thousand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """One entry as stored in its file.

    Attributes:
        key: The key of the entry.
        config: The configuration as plain JSON data.
        config_type: `module.Qualname` of the configuration's class, or `json` for plain data.
        call: The abstract call as plain data, if given.
        measured: The measured figures, if given.
        provenance: Device, versions and time of writing.
        path: The file; `None` for an entry of a shared cache and for an unwritable entry held in memory.
    """

    key: ConfigKey
    config: Any
    config_type: str
    call: Any
    measured: Mapping[str, Any] | None
    provenance: Mapping[str, Any]
    path: Path | None = None

    # The file may contain any JSON, so the properties check its types.

    @property
    def speedup(self) -> float | None:
        """The speedup of its configuration over the heuristic; `None` if the entry has no such figure.

        It is the ratio that decided, that of the median round of the confirmation run.
        """
        found = (self.measured or {}).get("speedup")
        return found if isinstance(found, float) else None

    def median_us(self, name: str) -> float | None:
        """Return the median time of the `winner` or the `heuristic`; `None` if the entry has no such figure."""
        times = (self.measured or {}).get(name)
        found = times.get("median_us") if isinstance(times, dict) else None
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None

    @property
    def time(self) -> str:
        """The time of writing, e.g. `2026-01-31 12:00`; `-` if the entry has none."""
        return time_in(self.provenance)


def time_in(provenance: Mapping[str, Any]) -> str:
    """Return the time of writing, e.g. `2026-01-31 12:00`; `-` without one."""
    return printable(provenance.get("time", "-"))[:16].replace("T", " ")


_KEY: Final = frozenset(ConfigKey._fields)
_FIELDS: Final = {"schema", *(field.name for field in dataclasses.fields(StoredEntry))} - {"path"}  # of a file


def new_entry(
    key: ConfigKey, cfg: object, call: object, measured: Mapping[str, object] | None, time: datetime.datetime
) -> StoredEntry:
    """Return an entry with the provenance of this process.

    Raises:
        SerializationError: An argument has no JSON form.
    """
    return StoredEntry(
        key=key,
        config_type=type_name(cfg),
        config=to_data(cfg),
        call=to_data(call),
        measured=None if measured is None else dict(to_data(measured)),
        provenance=provenance(key, time),
    )


def data_of(entry: StoredEntry) -> dict[str, Any]:
    """Return an entry as plain data, as stored in its file; `entry_of` is the inverse."""
    data = {name: getattr(entry, name) for name in _FIELDS - {"schema"}}
    return data | {"schema": SCHEMA, "key": to_data(entry.key)}


def text_of(entry: StoredEntry) -> str:
    """Return the text of an entry's file; equal entries give equal texts.

    Raises:
        SerializationError: The text exceeds `LARGEST` bytes.
    """
    text = sealed_json(data_of(entry))
    if len(text.encode()) > LARGEST:
        raise SerializationError(f"$: an entry must not be larger than {LARGEST} bytes, got {len(text.encode())}.")
    return text


@or_unusable()
def entry_of(data: dict[str, Any], path: Path | None = None) -> StoredEntry:
    """Return the entry of a parsed JSON object with the right schema.

    Raises:
        UnusableError: The object is not an entry.
    """
    fields = {name: value for name, value in data.items() if name != "schema"}
    if not _is_entry(data):
        from_plain(fields, StoredEntry)  # raises an error that names the wrong field
    return StoredEntry(**fields | {"key": ConfigKey(**data["key"]), "path": path})


def check_key(entry: StoredEntry, key: ConfigKey) -> None:
    """Check that an entry belongs to a key.

    Raises:
        UnusableError: The entry belongs to another key.
    """
    # A file name holds only eight digits of the key's digest, and a user may have renamed the file.
    if entry.key != key:
        raise UnusableError(f"it holds another key: {describe(entry.key)}")


def read_entry(file: str | Path) -> StoredEntry | None:
    """Return the entry of a file found in a cache folder, or `None` if the file is gone.

    Raises:
        UnusableError: The entry is not usable, or its key belongs to another file name.
    """
    entry = read_at(file)
    if entry is not None and location(entry.key)[-1] != os.path.basename(str(file)):
        raise UnusableError(f"it holds another key: {describe(entry.key)}")
    return entry


def read_at(file: str | Path, *, root: str | Path | None = None) -> StoredEntry | None:
    """Return the entry of a file, or `None` if the file does not exist.

    Args:
        file: The file.
        root: The cache folder, to check that no folder between root and file is a link.

    Raises:
        UnusableError: The entry is not usable.
    """
    raw = read_file(file, LARGEST, root=root)
    return None if raw is None else parsed(raw, Path(file))


def saved_in(persistent: Any, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Iterator[tuple[Any, StoredEntry]]:
    """Yield the configurations of a call in a `PersistentCache` with their entries."""
    yield from persistent.found(inv.key, kernel.config_type or config_type_of(inv, kernel))


@or_unusable()
def parsed(raw: bytes, path: Path | None) -> StoredEntry:
    """Return the entry of a file's content.

    Raises:
        UnusableError: The content is not an entry.
    """
    return entry_of(read_object(raw, SCHEMA, WHAT), path)


def _is_entry(data: Mapping[str, object]) -> bool:
    """Return whether an object has the fields of an entry. Cheap; a full decode would dominate reading."""
    return (
        data.keys() == _FIELDS
        and type(data["config_type"]) is str
        and type(data["key"]) is dict
        and data["key"].keys() == _KEY
        and all(type(part) is str for part in data["key"].values())
        and type(data["provenance"]) is dict
        and (data["measured"] is None or type(data["measured"]) is dict)
    )


def decoded(entry: StoredEntry, cfg_type: object) -> Any:
    """Return the configuration of an entry; `PersistentCache.get` describes `cfg_type`.

    Raises:
        UnusableError: The configuration does not decode as that type.
    """
    try:
        return read_config(entry.config, entry.config_type, cfg_type, entry.key.op)
    except ConfigError as error:
        raise UnusableError(f"its configuration cannot be decoded: {error}") from error


# Device names with the same chip, and the measured device among them. MIG slices are excluded.
_SISTERS: Final = re.compile(r"gpu:nvidia_(h100|h200|h800|gh200)(?!.*_mig_)")
_MEASURED: Final = "gpu:nvidia_h200"


class Shipped(NamedTuple):
    """A shipped configuration and its entry."""

    config: Any
    entry: StoredEntry

    @property
    def note(self) -> str:
        """The device, version and date of the measurement, in words."""
        known = self.entry.provenance
        versions = f"JAX {known.get('jax')}, {str(known.get('time')).partition('T')[0]}"
        found = cases(self.entry.measured)
        together = f"; {found}" if found else ""
        return f"measured on {known.get('device')} with {versions}{together}"


_SHIPPED: Final = resources.files("ejkernel") / "data" / "configs"  # with the layout of a `PersistentCache`


def shipped_config(key: ConfigKey, cfg_type: object, folder: Traversable = _SHIPPED) -> Shipped | None:
    """Return the shipped configuration for the exact device of a key; warn about an unusable entry.

    Args:
        key: The key of the call.
        cfg_type: The configuration type; see `PersistentCache.get`.
        folder: The folder of the package.
    """
    try:
        entry = parsed(folder.joinpath(*location(key)).read_bytes(), None)
        check_key(entry, key)
        return Shipped(decoded(entry, cfg_type), entry)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnusableError) as error:
        warn_of(f"{key.call} of {folder}", error)
        return None


def sister_of(device: str) -> str | None:
    """Return the measured device with the same chip as `device`, or `None`; only clocks, memory and host may differ."""
    return _MEASURED if _SISTERS.match(device) and device != _MEASURED else None


# --- stale entries ---


class Difference(NamedTuple):
    """A stored version and the current version; `here` is `None` if this machine lacks the component."""

    field: str
    stored: str
    here: str | None

    def __str__(self) -> str:
        if self.field == "space":
            return "its search space has changed since"
        if self.field == "heuristic":
            return "its heuristic has changed since"
        return printable(f"measured with {self.field} {self.stored}, not {self.here or 'none'}")


def measured_with(entry: StoredEntry) -> dict[str, str]:
    """Return the versions stored with a measurement; `UNKNOWN` where the entry has no information."""
    measured: Any = entry.measured or {}
    said = {**entry.provenance, "space": measured.get("space")}
    found = {field.name: said.get(field.name) for field in dataclasses.fields(StalePolicy)}
    return {name: value if isinstance(value, str) and value else UNKNOWN for name, value in found.items()}


def differences(entry: StoredEntry, space: str | None = None) -> tuple[Difference, ...]:
    """Return the differences between an entry's versions and the current environment; unknown values are skipped.

    Args:
        entry: The entry.
        space: The digest of the kernel's current search space for the call; `None` if unknown.
    """
    here = {"jax": version("jax"), "jaxlib": version("jaxlib"), "driver": driver_of(entry.key.device), "space": space}
    asked = [name for name in here if here[name] is not None]
    said = measured_with(entry)
    return tuple(Difference(name, said[name], here[name]) for name in asked if said[name] not in (UNKNOWN, here[name]))


def text_of_differences(found: tuple[Difference, ...]) -> str:
    """Return the differences in words."""
    return ", ".join(map(str, found))


def standing(
    policy: StalePolicy,
    entry: StoredEntry,
    kernel: Kernel[Any, Any],
    inv: Invocation[Any, Any],
    *,
    look: bool = False,
) -> tuple[Action, str]:
    """Return what to do with a saved configuration (`use`, `retune` or `refuse`), and how it is stale, in words.

    Args:
        policy: The action for each difference: another JAX, jaxlib, driver or search space.
        entry: The saved entry of the call.
        kernel: The kernel of the call.
        inv: The call.
        look: Whether to compare search spaces even if that cannot change the action.
    """
    looks = (look or policy.space != "use") and measured_with(entry)["space"] != UNKNOWN
    found = differences(entry, space_digest(kernel, inv) if looks else None)
    return policy.action(difference.field for difference in found), text_of_differences(found)


def space_digest(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> str | None:
    """Return 16 hex digits for the search space of a call, the same in every process.

    For a list, the digest covers the configurations in any order. For a `ConfigSpace`, it covers the axes and the
    number of configurations, because constraints are code and cannot be compared.

    Returns:
        The digest; `None` if a value has no JSON form or the kernel's own code raises.
    """
    try:
        content = _content_of_space(candidates_of(kernel, inv.representative))
    except (EjkernelError, SerializationError):
        return None
    return digest_of(content, 16)


def _content_of_space(space: Collection[Any]) -> str:
    if isinstance(space, ConfigSpace):
        count = space.size if space.exact else "many"
        return "\n".join([*map(_text_of_axis, space.axes), str(count)])
    return "\n".join(sorted(map(stable_json, space)))


def _text_of_axis(axis: Axis) -> str:
    values = axis.values
    return f"{axis.name}: {values!r}" if isinstance(values, range) else f"{axis.name}: {stable_json(list(values))}"


# --- the effect of new configurations on a program's whole step ---

_STEP: Final = "step"  # of the measured figures of an entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """The time of a program's step without and with the new configurations of its calls.

    Attributes:
        target: The program, as typed.
        before_us, after_us: Microseconds of a step without and with those new configurations that are in force.
        speedup, low, high: Their ratio, the median of the rounds, and its 95 % interval.
        rounds: The rounds of the comparison.
        time: When it was made, in the form of ISO 8601.
        dropped: The configuration that the search of the call chose, if it is not in force, as plain data.
        why: Why it is not.
        mapping: How much memory the steps map anew, as a sentence; empty if it is little.
    """

    target: str
    before_us: float
    after_us: float
    speedup: float
    low: float
    high: float
    rounds: int
    time: str = ""
    dropped: Any = None
    why: str = ""
    mapping: str = ""

    @classmethod
    def stored_in(cls, measured: Mapping[str, Any] | None) -> StepNote | None:
        """Return the note of an entry; `None` if it has none, e.g. because its step was not compared."""
        try:
            return from_plain((measured or {})[_STEP], cls)
        except (KeyError, SerializationError):  # files may hold anything
            return None

    def added_to(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the measured figures of an entry with this note."""
        return dict(measured) | {_STEP: to_data(self)}

    @property
    def times(self) -> str:
        """The times of the step with their ratio: `12.1 ms -> 11.4 ms, 1.06x (1.04 to 1.08)`."""
        before, after = durations([self.before_us / 1e6, self.after_us / 1e6])
        spread = "" if self.low == self.high else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{before} -> {after}, {ratio(self.speedup)}{spread}"

    @property
    def in_words(self) -> str:
        """The effect on the step, or why the configuration of the search is not in force."""
        return printable(self.why or f"the step of {self.target}: {self.times}")
