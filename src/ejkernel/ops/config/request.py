# SPDX-License-Identifier: Apache-2.0
"""One request for a configuration, with a method for each tier of given, remembered or saved configurations."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel.ops.config.cache import (
    ESTIMATED,
    HEURISTIC,
    MEMORY,
    OVERLAY,
    PUBLISHED,
    SHARED,
    SISTER,
    ConfigCache,
    Consulted,
    Resolution,
    Tier,
)
from ejkernel.ops.config.entries import saved_in, shipped_config, sister_of, standing
from ejkernel.ops.config.estimates import EstimateFiles, chosen
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import Action, AutotunePolicy
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.core.declared_names import check_kind, decode_config
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, check_config, heuristic_config
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import NO_HEURISTIC, CacheWarning, ConfigError, NoConfigError, SerializationError
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.messages.warn import warn

Answer = Consulted | str  # an answer, or the reason for no answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call that needs a configuration.

    Attributes:
        inv: The call.
        kernel: Its kernel.
        key: Its key; `None` if it has none.
        no_key: Why it has no key; empty if it has one.
        policy: Permitted actions.
        cache: The memory tier.
        persistent: The persistent tier, if there is one.
        dry: Whether to answer without measuring, storing or warning.
        looks: Whether to trace the call with saved configurations.
    """

    inv: Invocation[Any, Any]
    kernel: Kernel[Any, Any]
    key: ConfigKey | None
    no_key: str
    policy: AutotunePolicy
    cache: ConfigCache
    persistent: PersistentCache | None
    dry: bool
    looks: bool

    def answer(self, config: object, tier: Tier, note: str = "") -> Consulted:
        """Return a configuration as the answer of a tier."""
        return Consulted(tier.name, Resolution(config, tier.name, self.key), note)

    def _misfit(self, config: object, what: str) -> str:
        """Return why the kernel rejects a configuration, and warn; empty if the kernel accepts it."""
        try:
            check_config(self.kernel, config, what)
            check_kind(self.inv, self.kernel, config, what)
        except ConfigError as error:  # e.g. its class was redefined, or an older version saved it
            if not self.dry:
                warn(f"ignoring a configuration: {error}", CacheWarning)
            return f"it does not fit: {error}"
        return ""

    # --- the tiers ---

    def overlay(self) -> Answer:
        """Return the configuration of the innermost overlay that has one."""
        layers = current_scope().layers
        if not layers:
            return "none in force"
        if self.key is None:
            return self.no_key
        for layer in reversed(layers):
            config = layer.lookup(self.key)
            if config is not None:
                misfit = self._misfit(config, "the overlay's configuration")
                return misfit or self.answer(config, OVERLAY)
        return f"not among the entries of {counted(len(layers), 'overlay')}"

    def memory(self) -> Answer:
        """Return the configuration that this process remembers, unless it is provisional."""
        if self.key is None:
            return self.no_key
        found = self.cache.remembered(self.key)
        if found is None:
            return "nothing remembered"
        # Provisional answers are stored for reports; a later tier may have a measured configuration by now.
        if found.tier.is_provisional:
            return f"only an unmeasured answer, from {found.source}"
        misfit = self._misfit(found.config, "the configuration in memory")
        return misfit or Consulted(MEMORY.name, found)

    def saved(self, tier: Tier, wanted: Action) -> Answer:
        """Return the first saved configuration with the action `wanted` under the stale policy."""
        if self.persistent is None:
            return "the chain has no persistent cache"
        if self.key is None:
            return self.no_key
        notes = []
        # Ask each layer: the policy may refuse an entry, and a later layer may have one from the current environment.
        for config, entry in saved_in(self.persistent, self.inv, self.kernel):
            misfit = self._misfit(config, "its entry in the persistent cache")
            if misfit:
                return misfit
            action, why = standing(self.policy.stale, entry, self.kernel, self.inv, look=self.dry)
            if action == wanted:
                return self.answer(config, tier, why)
            notes.append(f"{why}: the policy says {action}")
        return Consulted(tier.name, None, "; ".join(dict.fromkeys(notes)) or "no entry", is_rejected=bool(notes))

    def shared(self) -> Answer:
        """Update the copies of shared layers, then ask the persistent cache again."""
        if self.key is None or self.persistent is None:
            return self.no_key
        self.persistent.refresh_if_due()
        return self.saved(SHARED, "use")

    def shipped(self, tier: Tier) -> Answer:
        """Return the shipped configuration for this device or, as the tier `SISTER`, for another with the same chip."""
        if self.key is None:
            return self.no_key
        if self.persistent is None or not self.persistent.shipped:
            return "the chain does not use shipped configurations"
        device = sister_of(self.key.device) if tier is SISTER else self.key.device
        key = None if device is None else self.key._replace(device=device)
        found = None if key is None else shipped_config(key, self.kernel.config_type)
        if found is None:
            return "no entry of a similar device" if tier is SISTER else "no entry"
        misfit = self._misfit(found.config, "the shipped configuration")
        # Measured elsewhere, with other versions. Only the kernel knows whether it runs with this JAX, device and
        # program. A rejection is a silent miss, listed by `explain`.
        if not misfit:
            misfit = self.kernel.why_not(self.inv, found.config)
        return misfit or self.answer(found.config, tier, found.note)

    def published(self) -> Answer:
        """Return the preferred configuration that others published, unless it does not run here."""
        if self.persistent is None or not self.persistent.shipped:
            return "the chain does not use shipped configurations"
        notes = []
        for found in self.kernel.published(self.inv):
            why = found.why_not or found.why_not_untuned
            if not why:
                return self.answer(found.config, PUBLISHED, found.note)
            notes.append(why)
        return "; ".join(dict.fromkeys(notes)) or "none for this call"

    def estimated(self) -> Answer:
        """Return the fastest configuration by estimates, if it leads the heuristic by more than their error."""
        folder = None if self.persistent is None else self.persistent.path
        if self.key is None or folder is None:
            return self.no_key or "the chain has no persistent cache"
        found = EstimateFiles(folder).load(self.key)
        if found is None:
            return "no estimates"
        best, note = chosen(found)
        note = f"{note}; {found.source()}"
        if best is None:
            return note
        try:
            config = decode_config(best.config, best.config_type, self.inv.op_id_v)
        except (ConfigError, SerializationError) as error:  # of another version of the kernel
            return f"the estimated configuration cannot be read: {error}"
        misfit = self._misfit(config, "the estimated configuration") or self.kernel.why_not(self.inv, config)
        return misfit or self.answer(config, ESTIMATED, note)

    def heuristic(self) -> Answer:
        """Return the kernel's heuristic configuration."""
        if not self.policy.heuristic:
            return "the policy does not allow it (heuristic=False)"
        try:
            config = heuristic_config(self.kernel, self.inv)
        except NoConfigError:
            return NO_HEURISTIC
        return self.answer(config, HEURISTIC)
