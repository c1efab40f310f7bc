# SPDX-License-Identifier: Apache-2.0
"""Who may say which configuration a call has, and how far their answers hold."""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """Who says which configuration a call has.

    Attributes:
        name: What `Resolution.source` calls it.
        is_provisional: Whether its answers hold only as long as nobody has measured: they are remembered, so that they
            can be reported, but never pre-empt a better tier, and never go to disk.
        is_passing: Whether its answers hold for a while, and are not remembered.
        is_for_one_call: Whether its answers are for this very call, rather than for all calls of its bucket.
        is_saved: Whether its answers were found by another process, maybe for another version of the kernel.
    """

    name: str
    is_provisional: bool = False
    is_passing: bool = False
    is_for_one_call: bool = False
    is_saved: bool = False


OVERRIDE: Final = Tier("override", is_passing=True, is_for_one_call=True)
OVERLAY: Final = Tier("overlay", is_passing=True)
MEMORY: Final = Tier("memory")
PERSISTENT: Final = Tier("persistent", is_saved=True)
SHIPPED: Final = Tier("shipped", is_saved=True)
SHARED: Final = Tier("shared", is_saved=True)  # from a shared cache whose copy here had nothing before
AUTOTUNE: Final = Tier("autotune")
AGREED: Final = Tier("agreed", is_passing=True)  # by the processes of a program; a source goes on with whom
STALE: Final = Tier("stale", is_provisional=True, is_saved=True)  # saved, and the policy wants it tuned anew
SISTER: Final = Tier("sister", is_provisional=True, is_saved=True)  # shipped, and measured on another device
FORWARD: Final = Tier("forward", is_provisional=True, is_saved=True)
HEURISTIC: Final = Tier("heuristic", is_provisional=True, is_for_one_call=True)
CHOOSER: Final = Tier("chooser", is_for_one_call=True)  # one of the user's own, which asks no tiers

_TIERS: Final = (
    *(OVERRIDE, OVERLAY, MEMORY, PERSISTENT, SHIPPED, SHARED, AUTOTUNE),
    *(STALE, SISTER, FORWARD, HEURISTIC, CHOOSER),
)
_BY_NAME: Final = {tier.name: tier for tier in _TIERS}


def tier_named(name: str) -> Tier:
    """Return the tier of that name; a chain of the user's may have others, whose answers hold for good."""
    if name.startswith(f"{AGREED.name} with "):
        return AGREED
    return _BY_NAME.get(name) or Tier(name)
