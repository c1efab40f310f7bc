# SPDX-License-Identifier: Apache-2.0
"""Stale entries: differences between the versions that an entry was measured with and the current environment.

The kernel's version and the device are parts of the key, so entries of other versions or devices are misses.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from ejkernel.ops.config._files import driver_of, version
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.policy import Action, StalePolicy
from ejkernel.ops.config.spaces.axes import Axis
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of
from ejkernel.ops.errors import EjkernelError, SerializationError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.storage.serialize import stable_json

UNKNOWN: Final = "unknown"


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
    device = getattr(entry.key, "device", None)
    here = {"jax": version("jax"), "jaxlib": version("jaxlib"), "driver": driver_of(device), "space": space}
    asked = [name for name in here if here[name] is not None]
    said = measured_with(entry)
    return tuple(Difference(name, said[name], here[name]) for name in asked if said[name] not in (UNKNOWN, here[name]))


def text_of_differences(found: tuple[Difference, ...]) -> str:
    """Return the differences in words."""
    return ", ".join(map(str, found))


def standing(
    policy: StalePolicy,
    entry: StoredEntry | None,
    kernel: Kernel[Any, Any],
    inv: Invocation[Any, Any],
    *,
    look: bool = False,
) -> tuple[Action, str]:
    """Return what to do with a saved configuration (`use`, `retune` or `refuse`), and how it is stale, in words.

    Args:
        policy: The action for each difference: another JAX, jaxlib, driver or search space.
        entry: The saved entry of the call; without one (`None`) the answer is `("use", "")`.
        kernel: The kernel of the call.
        inv: The call.
        look: Whether to compare search spaces even if that cannot change the action.
    """
    if entry is None:
        return "use", ""
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
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _content_of_space(space: Collection[Any]) -> str:
    if isinstance(space, ConfigSpace):
        count = space.size if space.exact else "many"
        return "\n".join([*map(_text_of_axis, space.axes), str(count)])
    return "\n".join(sorted(map(stable_json, space)))


def _text_of_axis(axis: Axis) -> str:
    values = axis.values
    return f"{axis.name}: {values!r}" if isinstance(values, range) else f"{axis.name}: {stable_json(list(values))}"
