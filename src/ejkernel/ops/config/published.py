# SPDX-License-Identifier: Apache-2.0
"""Parameters that other projects measured and published: tables of the package, or of an installed library.

An implementation names its table and the facts by which the table lists a call. A search tries the parameters of a call
first. An untuned call uses them only if nothing was measured for it here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Final, Generic, NamedTuple, TypeVar

from ejkernel.ops.config.estimates import WITHIN_ERROR
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.formatting import durations
from ejkernel.ops.utils.storage.serialize import from_plain

FOLDER: Final = "published"  # in the package's data
Facts = Mapping[str, int | str]
ConfigT = TypeVar("ConfigT")


class PublishedRow(NamedTuple):
    """One row of a table.

    Attributes:
        params: The parameters as plain data.
        source: Project, version and date.
        us: Published microseconds; `None` if unknown.
        xla_us: Published microseconds of XLA for the same call; `None` if unknown.
    """

    params: Mapping[str, Any]
    source: str
    us: float | None = None
    xla_us: float | None = None

    @property
    def gain(self) -> float:
        """XLA's time over theirs; 0 if unknown."""
        return 0.0 if self.us is None or self.xla_us is None else self.xla_us / self.us

    @property
    def note(self) -> str:
        """Source and times in words."""
        if self.us is None or self.xla_us is None:
            return f"published in {self.source}"
        mine, theirs = durations((self.us / 1e6, self.xla_us / 1e6))
        return f"published in {self.source}, whose call took {mine}, and {theirs} by XLA"

    @property
    def why_not_untuned(self) -> str:
        """Why an untuned call must not prefer these parameters to XLA; empty if it may."""
        if self.us is None or self.xla_us is None:
            return f"{self.note}, without a comparison with XLA"
        return "" if self.gain >= WITHIN_ERROR else f"{self.note}, no gain"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published(Generic[ConfigT]):
    """A configuration that was published for a call.

    Attributes:
        config: The configuration; `None` if it cannot be decoded.
        note: Source and times in words.
        why_not: Why the call cannot run with it; empty if it can.
        why_not_untuned: Why the call does not run with it unless tuning chooses it; empty if it does.
    """

    config: ConfigT | None
    note: str
    why_not: str = ""
    why_not_untuned: str = ""


class PublishedTable:
    """A table in the package's data; a subclass reads another one.

    Args:
        name: Name of its file, without suffix.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return rows with `call`, `params` and optional times, by source."""
        file = resources.files("ejkernel") / "data" / FOLDER / f"{self.name}.json"
        found: dict[str, list[dict[str, Any]]] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def rows(self, facts: Facts) -> Sequence[PublishedRow]:
        """Return the rows for a call; those with the largest gain over XLA come first.

        Args:
            facts: The call as the table describes it, with its `device`.
        """
        return self._by_call.get(frozenset(facts.items()), ())

    def counts(self, device: str) -> dict[str, int]:
        """Return the number of rows for a device, by source."""
        found: dict[str, int] = {}
        for call, rows in self._by_call.items():
            for row in rows if ("device", device) in call else ():
                found[row.source] = found.get(row.source, 0) + 1
        return found

    @functools.cached_property
    def _by_call(self) -> dict[frozenset[tuple[str, int | str]], list[PublishedRow]]:
        found: dict[frozenset[tuple[str, int | str]], list[PublishedRow]] = {}
        for source, rows in self.read().items():
            for row in rows:
                made = PublishedRow(row["params"], source, row.get("us"), row.get("xla_us"))
                found.setdefault(frozenset(row["call"].items()), []).append(made)
        for several in found.values():
            several.sort(key=lambda row: -row.gain)
        return found


def published_params(implementation: Any, call: Any) -> Iterator[tuple[PublishedRow, Any, str]]:
    """Yield the rows published for a call of an implementation, with their parameters and why these are invalid."""
    facts = None if implementation.published is None else implementation.published_as(call)
    if facts is None:
        return
    for row in implementation.published.rows({"device": call.device_fingerprint, **facts}):
        try:
            params = from_plain(row.params, implementation.params_type(backward=call.backward))
        except ConfigError as error:  # of another version of the implementation
            yield row, None, str(error)
        else:
            yield row, params, implementation.params_fault(call, params) or ""
