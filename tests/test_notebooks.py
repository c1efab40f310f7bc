# SPDX-License-Identifier: Apache-2.0
"""The notebook of the documentation: its cells run, and its stored pictures are of this code."""

from __future__ import annotations

import base64
import json

import pytest

pictures = pytest.importorskip("scripts.pictures", reason="the scripts are not here")

NOTEBOOK = json.loads(pictures.NOTEBOOK.read_text(encoding="utf-8"))
OUTPUTS = [cell["outputs"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_every_cell_runs_and_shows_a_table():
    pytest.importorskip("jinja2", reason="jinja2 is an extra, and is not installed")
    values = list(pictures.shown(pictures.code_of(NOTEBOOK)))
    pieces = [value._repr_html_() for value in values if value is not None]
    assert [value is None for value in values] == [not outputs for outputs in OUTPUTS]
    expected = ["for cpu:", "Candidates without a time", "No answer", "in "]
    assert all(text in piece for text, piece in zip(expected, pieces, strict=True))


def test_the_pictures_are_of_this_code():
    assert NOTEBOOK["metadata"]["pictures_of"] == pictures.digest_of(NOTEBOOK), "run scripts/pictures.py notebook"
    stored = [base64.b64decode(output["data"]["image/png"]) for outputs in OUTPUTS for output in outputs]
    assert len(stored) == 4
    assert all(picture.startswith(b"\x89PNG") for picture in stored)
    assert pictures.NOTEBOOK.stat().st_size <= 400_000


def test_the_notebook_has_the_form_that_jupyter_reads():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 4)
    for cell in NOTEBOOK["cells"]:
        assert {"cell_type", "metadata", "source"} <= cell.keys()
        assert cell["cell_type"] == "markdown" or {"execution_count", "outputs"} <= cell.keys()
