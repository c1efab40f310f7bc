# SPDX-License-Identifier: Apache-2.0
"""The example of a server: no request, text or page is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "serving"


def test_every_request_gets_the_text_of_the_model_without_a_cache(monkeypatch, capsys):
    """With forks, early stops, cancelled and preempted requests; the script fails otherwise."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import serve

    monkeypatch.setattr(sys, "argv", ["serve.py", "--requests", "24"])
    assert serve.main() == 0
    report = capsys.readouterr().out
    assert "missing requests: 0, wrong texts: 0, lost pages: 0" in report
    for what in ("forked", "cancelled", "preempted", "copied pages", "generated tokens"):
        assert f"{what}: 0" not in report
