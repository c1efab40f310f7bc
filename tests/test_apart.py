# SPDX-License-Identifier: Apache-2.0
"""Measurements in a separate process, and what remains of one that fails."""

from benchmarks.apart import run_apart


def test_a_process_returns_its_lines():
    lines, reason = run_apart("platform", seconds=60.0)
    assert len(lines) == 1
    assert not reason


def test_a_failing_process_is_its_last_message():
    lines, reason = run_apart("json.tool", "/absent", seconds=60.0)
    assert not lines
    assert "/absent" in reason


def test_a_process_that_does_not_end_is_the_time_limit():
    assert run_apart("json.tool", seconds=0.0) == ([], "it took more than 0 s")
