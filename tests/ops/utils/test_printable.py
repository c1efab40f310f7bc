# SPDX-License-Identifier: Apache-2.0
"""Untrusted text made printable."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops import CandidateError, EjkernelError, NoConfigError, TuningWarning, WorkerRestarted, to_json
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.error_text import printable, printable_json, printable_lines
from ejkernel.ops.utils.formatting import arguments, compact, text_table

any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates too


def is_harmless(text):
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, [bold]marked[/bold] and über", "plain, [bold]marked[/bold] and über"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\u202eabc\u200b\ufeff", r"\u202eabc\u200b\ufeff"),
        ("\ud800\x9b\U000e0041", r"\ud800\x9b\U000e0041"),
    ],
)
def test_unprintable_characters_become_python_escapes(text, shown):
    assert printable(text) == shown


@given(any_text)
def test_printable_text_is_one_line_and_unchanged_by_a_second_call(text):
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown


@given(any_text)
def test_lines_are_printable_and_only_the_first_is_at_the_margin(text):
    shown = printable_lines(text)
    assert is_harmless(shown)
    assert all(not line or line.startswith(" ") for line in shown.split("\n")[1:])
    assert printable_lines(shown) == shown


@given(st.text(), st.text())
def test_json_for_people_is_printable_and_says_the_same(key, value):
    text = to_json({key: [value]})
    assert is_harmless(text)
    assert json.loads(text) == {key: [value]}
    assert printable_json("\ud800") == r"\ud800"


@given(any_text)
def test_errors_warnings_outcomes_and_events_are_harmless(text):
    key = ConfigKey("cpu", "op@v0", "0")
    texts = [
        EjkernelError(text),
        CandidateError(f"{ValueError.__name__}: {text}"),
        NoConfigError(text, (text,), text),
        TuningWarning(text),
        Outcome(config=1, status=Status.FAILED, reason=text).reason,
        WorkerRestarted(key, text).reason,
        text_table((text,), [(text,)]),
        compact({text: text}) if text.isascii() else "",
        arguments({"args": [{"array": [text, [text]]}], "kwargs": {text: text}, "steps": [["vmap", text], text]}),
    ]
    assert all(is_harmless(str(item)) for item in texts)


def test_an_error_keeps_its_fields():
    error = pickle.loads(pickle.dumps(CandidateError("a\x1bb\nc")))
    assert error.args == ("a\x1bb\nc",)
    assert str(error) == "a\\x1bb\n  c"


def test_a_cell_of_a_table_is_one_line():
    assert text_table(("a",), [("x\ny",)]) == "a\nx\\ny"
