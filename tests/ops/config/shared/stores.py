# SPDX-License-Identifier: Apache-2.0
"""Entries to share, and a store without a network."""

from __future__ import annotations

import dataclasses
import datetime

from ejkernel.ops.config.entries import StoredEntry, new_entry
from ejkernel.ops.config.shared.exchange import FolderPlace
from ejkernel.ops.config.shared.packs import line_of, packed
from ejkernel.ops.config.shared.stores import UnreachableError
from ejkernel.ops.core.types import ConfigKey

KEY = ConfigKey("gpu:nvidia_h200", "matmul@v1", "0123456789abcdef")
NOW = datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)


def entry(number=0, rows=64, *, speedup=1.5, days=0, note="", measured=True, **provenance) -> StoredEntry:
    """Return an entry of a key of that number."""
    found = new_entry(
        KEY._replace(call=f"{number:016x}"),
        {"rows": rows},
        {"args": [note]},
        {"winner": {"median_us": 10.0}, "speedup": speedup} if measured else None,
        NOW - datetime.timedelta(days=days),
    )
    return dataclasses.replace(found, provenance={**found.provenance, **provenance})


def tuned_together(*numbers, rows=64, speedup=1.5, **made) -> list[StoredEntry]:
    """Return the entries of calls that share one configuration; `speedup` belongs to their mean."""
    cases = [{"call": f"{number:016x}", "draw": "", "weight": 1.0, "winner_us": 10.0} for number in numbers]
    mean = {"winner_us": 10.0, "heuristic_us": 10.0 * speedup}
    found = [entry(number, rows, **{"speedup": speedup} | made) for number in numbers]
    return [dataclasses.replace(e, measured={**e.measured, "cases": cases, "geometric_mean": mean}) for e in found]


def folder(path, *entries):
    """Return the folder of a cache that has these entries."""
    place = FolderPlace(path)
    place.put(entries)
    return place


def rows(place):
    """Return, for all entries of a place, the value of `rows`."""
    return sorted(found.config["rows"] for variants in place.variants() for found in variants)


def pack(*entries):
    """Return the name and the content of a pack."""
    ((name, raw),) = packed(map(line_of, entries))
    return name, raw


class FakeStore:
    """A store in memory, which counts requests; `down` is why it does not answer."""

    def __init__(self, *packs):
        self.objects = dict(packs)
        self.asked = []
        self.down = ""
        self.url = "fake://team"
        self.is_there = True

    def __call__(self, url):
        return self

    def _ask(self, what):
        self.asked.append(what)
        if self.down:
            raise UnreachableError(self.down)

    def sizes(self, most=10_000):
        self._ask("list")
        if len(self.objects) > most:
            raise UnreachableError("too many")
        return {name: len(raw) for name, raw in self.objects.items()}

    def raw(self, name):
        self._ask("read")
        return self.objects.get(name)

    def read(self, name):
        from ejkernel.ops.config.shared.packs import check

        raw = self.raw(name)
        if raw is not None:
            check(name, raw)
        return raw

    def write(self, name, raw):
        self._ask("write")
        self.objects[name] = raw

    def remove(self, name):
        self._ask("remove")
        self.objects.pop(name, None)
