# SPDX-License-Identifier: Apache-2.0
"""`ejkernel show --log`: searches as data, and logs with impossible figures."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.ops.sealing import lines_with_digest

from ejkernel.cli import main
from ejkernel.ops import CacheWarning
from ejkernel.ops.autotuner.measure.paired import compare
from ejkernel.ops.autotuner.store.log import lines_of, load
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.config._files import UnusableError

from .searches import Tile, found, save


def with_figures():
    """A search with every figure of its outcomes and comparison."""
    search = found()
    outcomes = [
        dataclasses.replace(one, peak_bytes=1 << 20, spilled=1 << 21)
        if one.measurement is None
        else dataclasses.replace(one, measurement=dataclasses.replace(one.measurement, output_bytes=1 << 22))
        for one in search.outcomes
    ]
    comparison = dataclasses.replace(search.challenge.comparison, more_bytes=1 << 23, interval=(1.5, 2.5))
    return dataclasses.replace(
        search,
        config=outcomes[5].config,
        outcomes=tuple(outcomes),
        challenge=dataclasses.replace(search.challenge, comparison=comparison),
    )


def test_the_data_of_a_log_has_the_time_of_each_candidate_and_why_it_lost(tmp_path, capsys):
    tie = Challenge(Tile(6), compare([4e-6] * 10, [4e-6] * 10), is_confirmation=True)
    searched = found()
    kept = dataclasses.replace(searched, config=searched.heuristic.config, challenge=tie)
    folder = save(tmp_path / "configs", kept)
    assert main(["show", "--cache", str(folder), "--log", "reported", "--json"]) == 0
    (search,) = json.loads(capsys.readouterr().out)
    outcomes = search["outcomes"]
    assert [one["median_us"] for one in outcomes] == [4.0, 3.0, None, None, None, 2.0]
    reasons = ["", "ranked behind", "needs 300 bytes", "needs 400 bytes", "out of range", "fastest in the run"]
    assert [one["reason"][: len(reason)] for one, reason in zip(outcomes, reasons, strict=True)] == reasons
    assert outcomes[0]["reason"] == ""
    assert search.keys().isdisjoint({"path", "is_only_here"})


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        (0, '"speedup":2.0', '"speedup":0.0'),
        (0, '"speedup":2.0', '"speedup":1e-300'),
        (0, '"interval":[1.5,2.5]', '"interval":[1.5,1e300]'),
        (0, '"challenger":2e-06', '"challenger":1e300'),
        (0, '"more_bytes":8388608', f'"more_bytes":1{"0" * 400}'),
        (0, '"more_bytes":8388608', '"more_bytes":-1'),
        (0, '"seconds":1.0', f'"seconds":1.0,"times":1{"0" * 400}'),
        (1, '"output_bytes":4194304', f'"output_bytes":1{"0" * 400}'),
        (3, '"peak_bytes":1048576', f'"peak_bytes":1{"0" * 400}'),
        (3, '"spilled":2097152', '"spilled":-1'),
    ],
)
def test_a_log_with_impossible_figures_is_skipped_with_a_warning(tmp_path, line, old, new):
    folder = save(tmp_path / "configs", with_figures())
    (file,) = folder.rglob("*.jsonl")
    lines = lines_of(file.read_bytes())
    load(lines)
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new)
    with pytest.raises(UnusableError, match=r"inconsistent|bytes must be|times"):
        load(lines)
    file.write_text(lines_with_digest("".join(f"{each}\n" for each in lines)))
    with pytest.warns(CacheWarning):
        assert list(MeasurementStore(folder).searches()) == []
