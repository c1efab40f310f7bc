# SPDX-License-Identifier: Apache-2.0
"""`ejkernel report --format svg|png`: the figures of the report."""

from __future__ import annotations

import dataclasses
import sys
import xml.etree.ElementTree as ET

import pytest
from tests.cli.searches import Tile, found, measured, save
from tests.cli.test_comparison import FAST, SLOW, timed

from ejkernel.cli import main, plots, report_data
from ejkernel.ops import PersistentCache
from ejkernel.ops.autotuner.trials.outcome import AutotuneData


def written(tmp_path, folder, form="svg", *options):
    assert main(["report", "--cache", str(folder), "--format", form, "--output", str(tmp_path / "out"), *options]) == 0
    return {file.name: file for file in (tmp_path / "out").iterdir()}


@pytest.fixture
def with_matplotlib():
    pytest.importorskip("matplotlib", reason="matplotlib is an extra, and is not installed")


@pytest.mark.slow
@pytest.mark.usefixtures("with_matplotlib")
def test_each_figure_of_the_page_is_a_file(tmp_path, capsys):
    files = written(tmp_path, save(tmp_path / "configs", found()))
    assert sorted(files) == [
        "01-reported-best.svg",
        "01-reported-candidates.svg",
        "calls.svg",
        "roofline-gpu-nvidia_h200-float32.svg",
    ]
    assert f"{tmp_path / 'out'}: 4 figures of 1 call" in capsys.readouterr().out
    assert all(ET.parse(file).getroot().tag.endswith("svg") for file in files.values())


@pytest.mark.slow
@pytest.mark.usefixtures("with_matplotlib")
def test_equal_searches_give_equal_files(tmp_path):
    folder = save(tmp_path / "configs", found())
    texts = [{name: file.read_bytes() for name, file in written(tmp_path, folder).items()} for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.usefixtures("with_matplotlib")
def test_the_figures_are_pictures_too(tmp_path):
    files = written(tmp_path, save(tmp_path / "configs", timed(*SLOW)), "png")
    assert {"01-reported-candidates.png", "calls.png"} <= files.keys()
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files.values())


@pytest.mark.slow
@pytest.mark.usefixtures("with_matplotlib")
def test_a_comparison_is_one_figure(tmp_path):
    save(tmp_path / "old", timed(*SLOW))
    folder = save(tmp_path / "new", timed(*FAST))
    assert list(written(tmp_path, folder, "svg", "--against", str(tmp_path / "old"))) == ["comparison.svg"]


@pytest.mark.slow
@pytest.mark.usefixtures("with_matplotlib")
def test_names_are_text_and_files_stay_in_the_folder(tmp_path):
    (one,) = report_data.calls_of(PersistentCache(save(tmp_path / "configs", found()), shipped=False))
    hostile = dataclasses.replace(one, op="../../up$\\frac{1}{$@v1", arguments="$x$ <b> &amp;", device="../a $b")
    files = plots.plot_report([hostile], tmp_path / "out", "svg")
    assert {file.parent for file in files} == {tmp_path / "out"}
    assert all(file.resolve().parent == (tmp_path / "out").resolve() for file in files)
    assert len(files) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("with_matplotlib")
def test_a_figure_shows_the_fastest_of_many_candidates(tmp_path):
    outcomes = tuple(measured(Tile(n), 1.0 + n, 1.1 + n) for n in range(60))
    data = AutotuneData(inv=found().inv, config=outcomes[0].config, outcomes=outcomes, seconds=1.0)
    files = written(tmp_path, save(tmp_path / "configs", data), "png")
    height = int.from_bytes(files["01-reported-candidates.png"].read_bytes()[20:24], "big")
    assert height <= 11 * 200  # a page of paper at 200 dots an inch


def test_without_matplotlib_the_error_names_the_extra(tmp_path, capsys, monkeypatch):
    folder = save(tmp_path / "configs", found())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", "--cache", str(folder), "--format", "svg", "--output", str(tmp_path / "out")]) == 1
    assert "pip install 'matplotlib>=3.9'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("with_matplotlib")
def test_the_output_of_figures_is_a_folder(tmp_path, capsys):
    folder = save(tmp_path / "configs", found())
    (tmp_path / "out").write_text("a file")
    assert main(["report", "--cache", str(folder), "--format", "svg", "--output", str(tmp_path / "out")]) == 1
    assert "is not a folder" in capsys.readouterr().err
