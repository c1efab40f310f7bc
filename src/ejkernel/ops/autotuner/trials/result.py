# SPDX-License-Identifier: Apache-2.0
"""`AutotuningResult`: tuned configurations to apply, store, send and merge."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import Any

from ejkernel.ops.autotuner.trials.challenge import clock_note
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.config.cache import ConfigCache, Overlay, same_config
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.context import current_scope, entered
from ejkernel.ops.core.declared_names import decode_config, type_name, why_not_decoded
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning, ConfigError, SerializationError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import arguments, compact, counted, durations, terminal_width, text_table
from ejkernel.ops.utils.messages.names import check_argument
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.services import Shown
from ejkernel.ops.utils.storage.serialize import describe, from_plain, read_object, sealed_json, to_data

_SCHEMA = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Entry(Shown):
    """One configuration.

    Attributes:
        op_id_v: The operation with its version.
        call_key: The call's key.
        cfg: The configuration.
    """

    op_id_v: str
    call_key: str
    cfg: Any

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Entry)
            and (self.op_id_v, self.call_key) == (other.op_id_v, other.call_key)
            and same_config(self.cfg, other.cfg)
        )

    def __hash__(self) -> int:
        return hash((self.op_id_v, self.call_key))  # configurations may be unhashable


# `stack`: the contexts entered by this thread; a result may be entered again inside itself.
_entered = threading.local()


@dataclasses.dataclass(frozen=True)
class AutotuningResult(Shown):
    """Configurations tuned on one device.

    `with result:` applies them in this thread, also to functions that `jit` has already compiled. Leaving the block
    restores the old executables. Executables compiled ahead of time never change.

    Attributes:
        device: Fingerprint of the device.
        entries: The saved configurations of the tuned calls, also those of earlier searches that stay in force.
        searches: The searches behind them; neither compared nor serialised.
        place: The folder that holds the configurations; empty if only this process does, `None` if unknown.
    """

    device: str
    entries: tuple[Entry, ...]
    searches: tuple[AutotuneData, ...] = dataclasses.field(default=(), compare=False, repr=False)
    place: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))
        for entry in self.entries:
            check_argument(isinstance(entry, Entry), "each of entries", "an Entry", entry)

    def __str__(self) -> str:
        """Return a table with the configuration of each call, and the speed-up of calls tuned here."""
        header, rows = self.table()
        optional = ("candidates", "arguments")
        title = f"{counted(len(self.entries), 'configuration')} for {printable(self.device)}{self._saved}"
        table = [text_table(header, rows, width=terminal_width(), optional=optional)] if rows else []
        return "\n".join([title, *table, *self.remarks()])

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the header and the rows of a table: the searches, then the configurations without one."""
        searched = {(search.key.op, search.key.call) for search in self.searches}
        alone = [entry for entry in self.entries if (entry.op_id_v, entry.call_key) not in searched]
        if not self.searches:  # from `loads`
            return ("operation", "call", "configuration"), [(e.op_id_v, e.call_key, compact(e.cfg)) for e in alone]
        rows: list[tuple[str, ...]] = [
            (s.key.op, arguments(s.inv.description), *times, s.in_a_word, compact(s.in_force), s.counts)
            for s, times in zip(self.searches, before_and_after(self.searches), strict=True)
        ]
        rows += [(e.op_id_v, f"call {e.call_key}", "-", "-", "-", compact(e.cfg), "-") for e in alone]
        return ("operation", "arguments", "heuristic", "tuned", "speed-up", "configuration", "candidates"), rows

    @property
    def _saved(self) -> str:
        """Where the configurations of searches are, as the end of a sentence."""
        if self.place is None or not self.entries:
            return ""
        return f", saved in {printable(self.place)}" if self.place else ", in this process only"

    def remarks(self) -> list[str]:
        """Return a line for each search without a saved result, and for each without a comparison."""
        told = [search for search in self.searches if search.not_saved not in ("", search.progress.not_finished)]
        lines = [(search, f"not saved: {search.not_saved}") for search in told]
        lines += [(search, search.why_alike) for search in self.searches if search.why_alike]
        return [printable(f"{search.inv.op_id} {arguments(search.inv.description)}: {text}") for search, text in lines]

    def __enter__(self) -> AutotuningResult:
        overlay = Overlay({ConfigKey(self.device, e.op_id_v, e.call_key): e.cfg for e in self.entries})
        scope = current_scope()
        # Each entry gets a new context on this thread's stack: JAX leaks a context entered twice.
        context = entered(dataclasses.replace(scope, layers=(*scope.layers, overlay)))
        context.__enter__()
        _entered.__dict__.setdefault("stack", []).append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.stack.pop().__exit__(*error)

    def __or__(self, other: AutotuningResult) -> AutotuningResult:
        """Return the entries of both results; for a call in both, the entry of `other`.

        Raises:
            ConfigError: The results come from different devices.
        """
        if not isinstance(other, AutotuningResult):
            return NotImplemented
        # Times of two devices are not comparable, and an overlay serves one device.
        if other.device != self.device:
            raise ConfigError(f"results of different devices cannot be merged: {self.device!r} and {other.device!r}.")
        merged = {(e.op_id_v, e.call_key): e for e in (*self.entries, *other.entries)}
        searches, is_same = (*self.searches, *other.searches), self.place == other.place
        return AutotuningResult(self.device, tuple(merged.values()), searches, self.place if is_same else None)

    def __len__(self) -> int:
        return len(self.entries)

    def save(self, cache: ConfigCache | PersistentCache) -> None:
        """Put every entry into `cache`."""
        check_argument(hasattr(cache, "put"), "cache", "a ConfigCache or a PersistentCache", cache)
        for entry in self.entries:
            cache.put(ConfigKey(self.device, entry.op_id_v, entry.call_key), entry.cfg)

    def dumps(self) -> str:
        """Return the configurations as JSON with its digest at the end, without the searches and their times.

        Warns of a configuration that `loads` could not return as it is.
        """
        for entry in self.entries:
            reason = why_not_decoded(entry.cfg, entry.op_id_v)
            if reason:
                warn(f"loads() will not return the configuration of {entry.op_id_v}: {reason}", CacheWarning)
        entries = [
            {"op": e.op_id_v, "call": e.call_key, "config_type": type_name(e.cfg), "config": to_data(e.cfg)}
            for e in self.entries
        ]
        return sealed_json({"schema": _SCHEMA, "device": self.device, "entries": entries}).rstrip()

    @classmethod
    def loads(cls, text: str) -> AutotuningResult:
        """Return the result written by `dumps`.

        This process must know the configuration types: from kernel classes, from `nameable`, or because it has stored
        configurations of these types.

        Raises:
            SerializationError: The text is not such a result, comes from another version, or was changed.
            ConfigError: A configuration type may not be named in this process.
        """
        if not isinstance(text, str):
            raise SerializationError(f"text must be what AutotuningResult.dumps() returned, got {describe(text)}.")
        # The digest covers a final newline, which `dumps` and many editors leave out.
        raw = (text.rstrip() + "\n").encode("utf-8", "surrogatepass")  # lone surrogates are then no valid UTF-8
        try:
            stored = from_plain(read_object(raw, _SCHEMA, "the text of an AutotuningResult"), _StoredResult)
        except SerializationError as error:
            raise SerializationError(f"text must be what AutotuningResult.dumps() returned: {error}") from error
        found = (Entry(e.op, e.call, decode_config(e.config, e.config_type, e.op)) for e in stored.entries)
        return cls(stored.device, tuple(found))


def before_and_after(searches: Sequence[AutotuneData]) -> list[tuple[str, str]]:
    """Return the times with the heuristic and with another winner of each search, for two columns of a table.

    Their quotient is the speed-up of the search. Processor time has the label `cpu`. A winner that replaces nothing has
    no time here.
    """
    columns = [
        [s.before for s in searches],
        [None if s.is_kept or s.stays is not None else s.tuned for s in searches],
    ]
    notes = [clock_note(s.heuristic) for s in searches]
    every = list(itertools.chain(*columns))
    labelled = zip(durations(every), every, 2 * notes, strict=True)
    times = [text if seconds is None else f"{text}{note}" for text, seconds, note in labelled]
    return list(zip(times[: len(searches)], times[len(searches) :], strict=True))


@dataclasses.dataclass(frozen=True)
class _StoredEntry:
    op: str
    call: str
    config_type: str
    config: Any


@dataclasses.dataclass(frozen=True)
class _StoredResult:
    schema: int
    device: str
    entries: tuple[_StoredEntry, ...]
