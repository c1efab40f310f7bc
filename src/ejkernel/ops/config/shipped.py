# SPDX-License-Identifier: Apache-2.0
"""Shipped configurations: measured on a few devices, and also useful on their sister devices.

They are separate tiers, not a layer of the persistent cache. So `ejkernel tune` still tunes calls that only have a
shipped configuration, and the cache commands list only the user's entries. An entry for the same device ranks before
tuning. A sister's entry, from another device with the same chip, ranks after tuning and counts as a miss, so any
measurement on this machine replaces it.
"""

from __future__ import annotations

import functools
import re
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final, NamedTuple

from ejkernel.ops.config._files import UnusableError, listed, slug, warn_of
from ejkernel.ops.config.entries import StoredEntry, decoded, entry_in
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.formatting import cases

# Device names with the same chip, and the measured device among them. MIG slices are excluded.
_SISTERS: Final = ((re.compile(r"gpu:nvidia_(h100|h200|h800|gh200)(?!.*_mig_)"), "gpu:nvidia_h200"),)


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


class ShippedConfigs:
    """The configurations in a folder of the package. A lookup for a device without any reads no file.

    Args:
        folder: A folder with the layout of a `PersistentCache`.
    """

    def __init__(self, folder: Traversable) -> None:
        self.folder = folder

    def find(self, key: ConfigKey, cfg_type: object) -> Shipped | None:
        """Return the shipped configuration for the exact device of a key; warn about an unusable entry.

        Args:
            key: The key of the call.
            cfg_type: The configuration type; see `PersistentCache.get`.
        """
        if slug(key.device) not in self._devices:
            return None
        try:
            entry = entry_in(self.folder, key, follow_links=True)  # some installers link files
            return None if entry is None else Shipped(decoded(entry, cfg_type), entry)
        except UnusableError as error:
            warn_of(f"{key.call} of {self.folder}", error)
            return None

    def find_of_sister(self, key: ConfigKey, cfg_type: object) -> Shipped | None:
        """Return the shipped configuration of another device with the same chip."""
        sister = sister_of(key.device)
        return None if sister is None else self.find(key._replace(device=sister), cfg_type)

    @functools.cached_property
    def _devices(self) -> frozenset[str]:
        return frozenset(place.name for place in listed(self.folder))


def sister_of(device: str) -> str | None:
    """Return the measured device with the same chip as `device`, or `None`; only clocks, memory and host may differ."""
    found = next((measured for pattern, measured in _SISTERS if pattern.match(device)), None)
    return None if found == device else found


@functools.cache
def shipped_configs() -> ShippedConfigs:
    """Return the configurations that this package ships."""
    return ShippedConfigs(resources.files("ejkernel") / "data" / "configs")
