# SPDX-License-Identifier: Apache-2.0
"""Tiers: the sources of configurations, the validity of their answers, and the results of a resolution."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Generic

from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import UnstableKeyError
from ejkernel.ops.utils.services import Shown


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


class BareChooser(Generic[Cfg, Out]):
    """Adapts a user's chooser, which has only `choose`, to the interface of a chain.

    Args:
        chooser: The chooser.
    """

    def __init__(self, chooser: Any) -> None:
        self._chooser = chooser

    def resolve(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Resolution[Cfg]:
        """Return the configuration for `inv`: the override, or the chooser's choice."""
        try:
            key = inv.key
        except UnstableKeyError:
            key = None
        if inv.override_cfg is not None:
            return Resolution(inv.override_cfg, OVERRIDE.name, key)
        return Resolution(self._chooser.choose(inv, kernel), CHOOSER.name, key)

    def consult(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> list[Consulted]:
        """Return its only answer."""
        found = self.resolve(inv, kernel)
        return [Consulted(found.source, found)]
