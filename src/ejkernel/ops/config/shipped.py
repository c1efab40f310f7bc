# SPDX-License-Identifier: Apache-2.0
"""Configurations that the package brings along: measured on a few devices, and of use to their sisters too.

They are tiers of their own and no layer of the persistent cache, so that `ejkernel tune` takes no call for tuned that
nobody tuned here, and the commands list what the user saved. An entry for this very device comes before tuning; a
sister's, of another device with the same chip, after it, as a miss, so that any measurement here replaces it.
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

# Devices of one chip, by what they are called, and the one of them that was measured. A part of a device is none.
_SISTERS: Final = ((re.compile(r"gpu:nvidia_(h100|h200|h800|gh200)(?!.*_mig_)"), "gpu:nvidia_h200"),)


class Shipped(NamedTuple):
    """A configuration that was found, and the entry that it is from."""

    config: Any
    entry: StoredEntry

    @property
    def note(self) -> str:
        """What it was measured with."""
        known = self.entry.provenance
        versions = f"JAX {known.get('jax')}, {str(known.get('time')).partition('T')[0]}"
        found = cases(self.entry.measured)
        together = f"; {found}" if found else ""
        return f"measured on {known.get('device')} with {versions}{together}"


class ShippedConfigs:
    """The configurations in a folder of the package; where a device has none, to ask costs nothing.

    Args:
        folder: Laid out as the folder of a `PersistentCache` is.
    """

    def __init__(self, folder: Traversable) -> None:
        self.folder = folder

    def find(self, key: ConfigKey, cfg_type: object) -> Shipped | None:
        """Return what is shipped for a call on the very device of its key; an entry that cannot be used is a warning.

        Args:
            key: The key.
            cfg_type: The type to decode as; see `PersistentCache.get`.
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
        """Return what is shipped for the call on another device with the same chip."""
        sister = sister_of(key.device)
        return None if sister is None else self.find(key._replace(device=sister), cfg_type)

    @functools.cached_property
    def _devices(self) -> frozenset[str]:
        return frozenset(place.name for place in listed(self.folder))


def sister_of(device: str) -> str | None:
    """Return the device that was measured, and has the chip of another, which is slower or faster only in the rest."""
    found = next((measured for pattern, measured in _SISTERS if pattern.match(device)), None)
    return None if found == device else found


@functools.cache
def shipped_configs() -> ShippedConfigs:
    """Return what this package ships."""
    return ShippedConfigs(resources.files("ejkernel") / "data" / "configs")
