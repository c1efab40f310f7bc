# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.attention_drawn`: tables of measured cases."""

from __future__ import annotations

import json

from benchmarks import attention_drawn


def case(ours, **others):
    times = {"untuned": ours, **{name.replace("_", " "): time for name, time in others.items()}}
    return {"us": times, "ratios": {"untuned": min(others.values()) / ours} if others else {}}


def test_cases_of_all_files_have_a_line_and_later_files_replace_earlier_ones(tmp_path, capsys):
    forward = {"5-0 causal": case(100.0, tokamax=90.0), "5-1 full": case(2000.0)}
    runs = [
        {"forward": forward, "forward and backward": {"5-0 causal": case(50.0, tokamax=90.0)}},
        {"forward": {"5-0 causal": case(80.0, tokamax=90.0) | {"us": {"untuned": 80.0, "jax.nn cudnn": 90.04}}}},
    ]
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    assert attention_drawn.main([str(file) for file in files]) == 0
    printed = capsys.readouterr().out
    assert "| forward | 1 | 1.12 | 1.12 | 0 |" in printed
    assert "| forward and backward | 1 | 1.80 | 1.80 | 0 |" in printed
    assert "| causal | 80.0 | 90.0 (cuDNN) | 1.13 | 50.0 | 90.0 (Tokamax) | 1.80 |" in printed
    assert "| full | 2,000 | - |  |  | - |  |" in printed


def test_lost_cases_are_counted(tmp_path):
    found = {"forward": {"5-0 a": case(100.0, tokamax=97.0), "5-1 b": case(100.0, tokamax=98.5)}}
    assert "| forward | 2 | 0.98 | 0.97 | 1 |" in list(attention_drawn.summary(found))
