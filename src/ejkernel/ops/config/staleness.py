# SPDX-License-Identifier: Apache-2.0
"""What an entry was measured with, and in what that differs from what is here.

The version of the kernel and the device are parts of an entry's key: what was measured with others is no answer at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, get_args

from ejkernel import settings
from ejkernel.ops.config._files import driver_of, version
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.spaces.digest import space_digest
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.printable import printable

Action = Literal["use", "retune", "refuse"]
ACTIONS: Final = get_args(Action)  # the mildest first
UNKNOWN: Final = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StalePolicy:
    """What becomes of a saved configuration that was measured with something else than what is here.

    `"use"`: it counts as measured. `"retune"`: it answers until the call is tuned, and counts as not measured: it is
    tuned where tuning is allowed, and noted as missed. `"refuse"`: it is as if it were not there. Of several
    differences the strictest counts. What an entry does not say, such as one of an earlier version, is no difference.

    Attributes:
        jax: Another version of JAX.
        jaxlib: Another version of jaxlib.
        driver: Another version of the NVIDIA driver.
        space: The kernel proposes other configurations for the call than those among which this one was found; to know
            that takes the time of `config_space` for each distinct call, unless this is `"use"`.
    """

    jax: Action = "use"
    jaxlib: Action = "use"
    driver: Action = "use"
    space: Action = "use"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value not in ACTIONS:
                raise ConfigError(f"{field.name} must be one of {', '.join(ACTIONS)}, got {value!r}.")

    def action(self, found: tuple[Difference, ...]) -> Action:
        """Return what becomes of an entry that differs so."""
        asked = [ACTIONS.index(getattr(self, difference.field)) for difference in found]
        action: Action = ACTIONS[max(asked, default=0)]
        return action


def usual_stale_policy() -> StalePolicy:
    """Return what the environment says, in `EJKERNEL_STALE`."""
    said: dict[str, Any] = dict(settings.current().stale)
    return StalePolicy(**said)


class Difference(NamedTuple):
    """What an entry was measured with, and what is here instead; `None` where there is none here."""

    field: str
    stored: str
    here: str | None

    def __str__(self) -> str:
        if self.field == "space":
            return "its space has changed since"
        return printable(f"measured with {self.field} {self.stored}, not {self.here or 'none'}")


def made_with(entry: StoredEntry) -> dict[str, str]:
    """Return what an entry says that it was measured with, `UNKNOWN` where it does not say."""
    measured: Any = entry.measured or {}
    said = {**entry.provenance, "space": measured.get("space")}
    found = {field.name: said.get(field.name) for field in dataclasses.fields(StalePolicy)}
    return {name: value if isinstance(value, str) and value else UNKNOWN for name, value in found.items()}


def differences(entry: StoredEntry, space: str | None = None) -> tuple[Difference, ...]:
    """Return in what an entry differs from what is here; what is unknown differs from nothing.

    Args:
        entry: The entry.
        space: The digest of what the kernel proposes for the call now; `None`: not known.
    """
    device = getattr(entry.key, "device", None)
    here = {"jax": version("jax"), "jaxlib": version("jaxlib"), "driver": driver_of(device), "space": space}
    asked = [name for name in here if here[name] is not None]
    said = made_with(entry)
    return tuple(Difference(name, said[name], here[name]) for name in asked if said[name] not in (UNKNOWN, here[name]))


def told(found: tuple[Difference, ...]) -> str:
    """Return differences in words."""
    return ", ".join(map(str, found))


def saved_in(persistent: Any, key: ConfigKey, cfg_type: object) -> Iterator[tuple[Any, StoredEntry | None]]:
    """Yield the configurations that a cache has for a key, with their entries; one of the user's own may have none."""
    found = getattr(persistent, "found", None)
    if found is not None:
        yield from found(key, cfg_type)
    elif (config := persistent.get(key, cfg_type=cfg_type)) is not None:
        yield config, None


def standing(
    policy: StalePolicy,
    entry: StoredEntry | None,
    kernel: Kernel[Any, Any],
    inv: Invocation[Any, Any],
    *,
    look: bool = False,
) -> tuple[Action, str]:
    """Return what becomes of the entry of a call, and in what it differs from what is here, in words.

    Args:
        policy: What becomes of such.
        entry: The entry; `None` where nothing is known of it.
        kernel: The call's kernel.
        inv: The call.
        look: Whether to look at the kernel's space also where that changes nothing.
    """
    if entry is None:
        return "use", ""
    looks = (look or policy.space != "use") and made_with(entry)["space"] != UNKNOWN
    found = differences(entry, space_digest(kernel, inv) if looks else None)
    return policy.action(found), told(found)
