# SPDX-License-Identifier: Apache-2.0
"""A search that saves nothing leaves an earlier configuration in force, and every view says so."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from ejkernel.cli import main
from ejkernel.cli.report import result_as_data, searches
from ejkernel.cli.report_data import calls_of
from ejkernel.ops import ConfigSelectorChain, PersistentCache
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.store.saving import Earlier, why_not_saved
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.autotuner.trials.view import SearchView, view_of
from ejkernel.ops.execution.explain import explain_call

from .searches import Tile, call, found, measured, save

SAVED = "order=row rows=6"


def unfinished():
    """A later search that ended before it measured the saved configuration."""
    early = dataclasses.replace(found(), challenge=None, outcomes=found().outcomes[:2], planned=9)
    early = dataclasses.replace(early, config=early.outcomes[0].config)
    earlier = Earlier(Tile(6))
    reason = why_not_saved(early, validated=False, earlier=earlier)
    return dataclasses.replace(early, not_saved=reason, stays=earlier.config)


@pytest.fixture
def cache(tmp_path):
    """A saved configuration, and a later search that saved nothing."""
    save(tmp_path / "configs", found())
    return PersistentCache(save(tmp_path / "configs", unfinished(), entry=False), shipped=False)


def test_a_search_that_is_not_finished_names_the_configuration_that_stays():
    assert unfinished().not_saved == f"not finished (2 of 9), so the saved configuration, {SAVED}, stays"
    (line,) = [line for line in unfinished().summary().splitlines() if "of 9" in line and "candidates" in line]
    assert line.endswith(f"not finished (2 of 9); in force is {SAVED}, saved by another search")


def test_the_log_shows_the_search_behind_the_configuration_and_the_newer_one(cache, capsys):
    assert main(["show", "--cache", str(cache.path), "--log", "reported"]) == 0
    behind, newer = capsys.readouterr().out.split("\n\n")
    assert re.search(r"^\* +rows=6", behind.replace("order=row ", ""), re.M)
    assert "2.00x the heuristic's speed" in behind
    assert not re.search(r"^\*", newer.partition("of heuristic\n")[2].partition("* in force")[0], re.M)
    assert f"in force is {SAVED}" in newer
    assert "* in force, saved by another search, h heuristic" in newer


def test_a_row_of_the_saved_configuration_has_the_mark():
    first = unfinished()
    again = dataclasses.replace(first, outcomes=(*first.outcomes, measured(Tile(6), 2.0, 2.0)))
    assert [line[:2] for line in again.summary().splitlines() if " measured " in line] == ["* ", "  ", "h "]
    rows = SearchView(**view_of(again)).rows
    assert [row.mark for row in rows] == ["in force", "", "heuristic"]


def test_a_winner_that_is_not_saved_is_no_result():
    lost = dataclasses.replace(found(), stays=Tile(2), not_saved="it was not among the candidates")
    marks = {row.name: row.mark for row in SearchView(**view_of(lost)).rows}
    assert (marks["order=row rows=6"], marks["order=row rows=2"]) == ("winner, not in force", "in force")
    assert (lost.in_a_word, lost.in_force) == ("2.00x, saved one in force", Tile(2))


def test_the_report_shows_the_search_behind_the_configuration(cache):
    (report,) = calls_of(cache)
    assert (report.config, report.result, report.search, report.kind) == (SAVED, "2.00x", "complete", "faster")
    assert [row.mark for row in report.rows if row.mark] == ["winner", "heuristic"]
    (note,) = [note for note in report.notes if note.startswith("a newer search")]
    assert note.endswith("saved nothing: not finished (2 of 9), so the saved configuration, order=row rows=6, stays")


def test_the_report_takes_the_times_of_an_entry_whose_search_is_gone_from_the_entry(tmp_path):
    cache = PersistentCache(save(tmp_path / "configs", unfinished(), entry=False), shipped=False)
    cache.put(found().key, Tile(6), call=found().inv.description, measured=found().summary_data())
    (report,) = calls_of(cache)
    assert (report.config, report.result, report.search) == (SAVED, "2.00x", "complete")
    assert (report.after_us, report.throughput) == (2.0, ())
    assert any(note.startswith("the candidates are those of a search that saved nothing") for note in report.notes)


def test_a_comparison_of_two_searches_shows_each_ones_winner(cache):
    assert [calls_of(cache, newest=number)[0].config for number in (0, 1)] == ["order=row rows=1", SAVED]


class Text(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_data(self, data):
        self.found.append(data)


def test_notebooks_show_the_configuration_in_force(cache):
    pytest.importorskip("jinja2")
    newest = next(MeasurementStore(cache).searches())
    facts = Text(newest._repr_html_()).found
    assert facts[facts.index("Configuration") + 1] == f"{SAVED}, saved by another search"
    assert not any("which is kept" in text for text in facts)
    cells = Text(MeasurementStore(cache)._repr_html_()).found
    assert cells.count(SAVED) == 2
    assert "not finished (2 of 9), saved one in force" in cells


def test_explain_names_the_newer_search(cache):
    why = explain_call(ConfigSelectorChain(persistent=cache), call(), "ejkernel")
    assert why.search.in_words == "complete"
    says = f"complete; a newer search is not saved: not finished (2 of 9), so the saved configuration, {SAVED}, stays"
    assert why.search_text == says


def test_the_table_of_the_command_has_the_configuration_in_force():
    result = AutotuningResult(found().key.device, (), (unfinished(),))
    row = searches(result).splitlines()[1]
    assert row.split("  ")[-2:] == [SAVED, "2 of 9 measured"]
    assert "not finished (2 of 9), saved one in force" in row
    assert result_as_data(result)["entries"][0]["in_force"] == {"rows": 6, "order": "row"}


def test_fields_that_all_candidates_have_in_common_stand_above_the_table():
    view = SearchView(**view_of(found()))
    assert view.common == ""  # one of them has another order
    data = found()
    alike = tuple(one for one in data.outcomes if one.config.order == "row")
    view = SearchView(**view_of(dataclasses.replace(data, outcomes=alike)))
    assert (view.common, next(view.rows_and_times())[0].name) == ("order=row", "rows=6")
