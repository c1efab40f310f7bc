# SPDX-License-Identifier: Apache-2.0
"""Who may say which configuration a call has, how far their answers hold, and what they have said."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Generic

from ejkernel.ops.core.types import Cfg, ConfigKey
from ejkernel.ops.utils.printable import printable


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


@dataclasses.dataclass(frozen=True, slots=True)
class Resolution(Generic[Cfg]):
    """A configuration, the tier that it came from, and the key of the call (`None` if it has none)."""

    config: Cfg
    source: str
    key: ConfigKey | None

    @property
    def tier(self) -> Tier:
        """That tier."""
        return tier_named(self.source)


@dataclasses.dataclass(frozen=True, slots=True)
class NotTaken:
    """Why what is saved for a call is no answer here, by the policy."""

    why: str


# an answer, also with a note; or why there is none
Answer = Resolution[Any] | tuple[Resolution[Any], str] | NotTaken | str


@dataclasses.dataclass(frozen=True, slots=True)
class Consulted:
    """What one tier said: an answer, with a note where there is more to say of it, or a note why it had none.

    Attributes:
        tier: Its name.
        resolution: Its answer, or `None`.
        note: What else there is to say.
        is_not_taken: Whether it has something for the call, which the policy for stale entries does not take from it.
    """

    tier: str
    resolution: Resolution[Any] | None
    note: str = ""
    is_not_taken: bool = False

    @classmethod
    def of(cls, tier: Tier, answer: Answer) -> Consulted:
        """Return what a tier said, of what it answered."""
        if isinstance(answer, NotTaken):
            return cls(tier.name, None, answer.why, is_not_taken=True)
        if isinstance(answer, str):
            return cls(tier.name, None, answer)
        return cls(tier.name, *answer) if isinstance(answer, tuple) else cls(tier.name, answer)

    def __post_init__(self) -> None:
        object.__setattr__(self, "note", printable(self.note))  # it tells of what files hold
