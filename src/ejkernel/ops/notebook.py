# SPDX-License-Identifier: Apache-2.0
"""Results, explanations, searches, caches and configurations as HTML in notebooks, from the templates of the report."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from ejkernel.ops.autotuner.store.measurements import MeasurementStore, StoredSearch
from ejkernel.ops.autotuner.trials.challenge import clock_note
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Findings, remarks
from ejkernel.ops.autotuner.trials.result import AutotuningResult, Entry
from ejkernel.ops.autotuner.trials.status import SearchState, stored_in_brief, stored_in_words
from ejkernel.ops.autotuner.trials.view import SearchView, view_of
from ejkernel.ops.config.cache import ConfigCache, Resolution
from ejkernel.ops.config.entries import time_in
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.execution.explain import Explanation, Explanations
from ejkernel.ops.implementation import OperationConfig
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.error_text import printable, printable_lines
from ejkernel.ops.utils.formatting import arguments, compact, counted, durations
from ejkernel.ops.utils.pages import is_available, render
from ejkernel.ops.utils.storage.serialize import to_data

_MOST: Final = 100  # rows of a table

Facts = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Section:
    """One part of the HTML of an object.

    Attributes:
        title: The first line.
        facts: Names with their values.
        header, rows: A table.
        searches: Searches with their names.
        is_open: Whether the searches are unfolded.
    """

    title: str
    facts: Facts = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    searches: tuple[tuple[str, SearchView], ...] = ()
    is_open: bool = False


def html_of(value: object) -> str | None:
    """Return a value as HTML; `None` without Jinja2, so that the notebook shows its text."""
    return render("notebook.html", sections=_sections(value)) if is_available() else None


@functools.singledispatch
def _sections(value: object) -> Sequence[_Section]:
    raise NotImplementedError(type(value))


def _rows(rows: Iterable[Sequence[object]]) -> tuple[tuple[str, ...], ...]:
    """Return the first rows of a table, with printable text."""
    found = list(itertools.islice(rows, _MOST))
    return tuple(tuple(printable(cell) for cell in row) for row in found)


def _counted_rows(count: int, noun: str, plural: str = "") -> str:
    shown = f", the first {_MOST} are shown" if count > _MOST else ""
    return f"{counted(count, noun, plural)}{shown}"


@_sections.register
def _(search: Findings) -> list[_Section]:
    before, after = (f"{time}{clock_note(search.heuristic)}" for time in durations((search.before, search.tuned)))
    call = search.inv.description if isinstance(search, AutotuneData) else None
    call = search.call if isinstance(search, StoredSearch) else call
    candidates = counted(len(search.outcomes), "candidate")
    facts = [
        ("Result", search.in_words),
        ("Configuration", _in_force(search)),
        ("Time", f"{before} with the heuristic{_and_tuned(search, after)}"),
        ("Search", f"{search.progress.in_words}, {candidates} in {search.seconds:.1f} s"),
        ("Key", f"{search.key.call} on {search.key.device}"),
        *(("Note", remark) for remark in remarks(dataclasses.replace(search, challenge=None))),
    ]
    title = printable(f"{search.key.op}  {arguments(call)}")
    printed = tuple((name, printable_lines(text)) for name, text in facts)
    views = (("Candidates and progress", SearchView(**view_of(search))),)
    return [_Section(title=title, facts=printed, searches=views, is_open=True)]


def _in_force(search: Findings) -> str:
    if search.stays is not None:
        return f"{compact(search.stays)}, saved by another search"
    return "-" if search.winner.measurement is None else compact(search.winner.config)


def _and_tuned(search: Findings, after: str) -> str:
    if search.stays is None:
        is_open = search.progress.state == SearchState.PARTIAL
        kept = "used until the search is finished" if is_open else "which is kept"
        return f", {kept if search.is_kept else f'{after} tuned'}"
    return "" if search.is_kept else f", {after} with {compact(search.winner.config)}, which is not in force"


@_sections.register
def _(result: AutotuningResult) -> list[_Section]:
    header, rows = result.table()
    views = tuple(
        (printable(f"Search of {row[0]} {row[1]}"), SearchView(**view_of(search)))
        for row, search in zip(rows, result.searches, strict=False)
    )
    title = f"{_counted_rows(len(result.entries), 'configuration')} for {printable(result.device)}"
    names = tuple(name.capitalize() for name in header)
    return [_Section(title=title, header=names, rows=_rows(rows), searches=views[:_MOST])]


@_sections.register
def _(entry: Entry) -> list[_Section]:
    facts = (("Call", printable(entry.call_key)), *_fields(entry.cfg))
    return [_Section(title=printable(entry.op_id_v), facts=facts)]


@_sections.register
def _(why: Explanation) -> list[_Section]:
    facts = tuple((name.capitalize(), printable(text)) for name, text in (("configuration", why.answer), *why.facts()))
    return [_Section(title=printable(f"{why.op_id_v} {why.arguments}".rstrip()), facts=facts)]


@_sections.register
def _(whys: Explanations) -> list[_Section]:
    return [section for why in whys for section in _sections(why)] or [_Section(title="no kernel is called")]


@_sections.register
def _(cache: ConfigCache) -> list[_Section]:
    items = cache.items()
    rows = ((*(key if isinstance(key, ConfigKey) else ("", "", key)), compact(config)) for key, config in items)
    header = ("Device", "Operation", "Call", "Configuration")
    title = f"{_counted_rows(len(items), 'configuration')} in memory"
    return [_Section(title=title, header=header, rows=_rows(rows))]


@_sections.register
def _(cache: PersistentCache) -> list[_Section]:
    found = [entry for _, entry in cache.entries()]
    rows = (
        (
            *entry.key,
            arguments(entry.call),
            compact(entry.config),
            stored_in_brief(entry.measured, entry.speedup),
            stored_in_words(entry.measured),
            entry.time,
        )
        for entry in found
    )
    header = ("Device", "Operation", "Call", "Arguments", "Configuration", "Speed-up", "Search", "Measured")
    title = f"{_counted_rows(len(found), 'entry', 'entries')} in {printable(cache.path or 'memory')}"
    return [_Section(title=title, header=header, rows=_rows(rows))]


@_sections.register
def _(store: MeasurementStore) -> list[_Section]:
    searches = list(store.searches())
    rows = (
        (*s.key, arguments(s.call), s.in_a_word, s.progress.in_words, compact(s.in_force), time_in(s.provenance))
        for s in searches
    )
    header = ("Device", "Operation", "Call", "Arguments", "Speed-up", "Search", "In force", "Measured")
    title = f"{_counted_rows(len(searches), 'search', 'searches')} in {printable(store.cache.path or 'memory')}"
    return [_Section(title=title, header=header, rows=_rows(rows))]


@_sections.register
def _(found: Resolution) -> list[_Section]:  # type: ignore[type-arg]
    key = "none" if found.key is None else f"{found.key.call} on {found.key.device}"
    return [_Section(title=printable(f"from {found.source}"), facts=(*_fields(found.config), ("Key", printable(key))))]


@_sections.register(OperationConfig)
@_sections.register(FwdParams)
@_sections.register(BwdParams)
def _(config: object) -> list[_Section]:
    return [_Section(title=type(config).__name__, facts=_fields(config))]


def _fields(config: object) -> Facts:
    """Return the fields of a configuration that are not `None`; a nested one is text."""
    data = to_data(config)
    if not isinstance(data, dict):
        return (("Configuration", compact(config)),)
    return tuple((printable(name), compact(value)) for name, value in data.items() if value is not None)
