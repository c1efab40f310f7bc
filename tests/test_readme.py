# SPDX-License-Identifier: Apache-2.0
"""What README.md and the guides say of the command, of the environment and of names, held against what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click
import pytest

from ejkernel import ops, settings
from ejkernel.cli import cache_commands, main
from ejkernel.cli.app import cli
from ejkernel.ops.autotuner.trials.status import Status

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("tuning", "kernels", "operations", "caches"))]
TEXTS = {guide: guide.read_text(encoding="utf-8") for guide in GUIDES}
README = "".join(TEXTS.values())
COMMANDS = re.findall(r"^\$ (?:\w+=\S+ )*ejkernel (\w+)(?: ([^\n#]*))?", README, re.M)


def block(first_line):
    """Return the code block that begins with a line."""
    return next(code for code in re.findall(r"```python\n(.*?)```", README, re.S) if code.startswith(first_line))


def test_the_program_of_the_first_page_is_found_forward_and_backward(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(block("# train.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--in-process", "train:training_step", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "flash_attention.bwd@v0" in printed.out
    assert "2 distinct calls, 1 forward and 1 backward" in printed.err


@pytest.mark.parametrize(("command", "arguments"), COMMANDS)
def test_a_command_has_the_options_that_it_is_shown_with(command, arguments):
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    if isinstance(found, click.Group):
        found = found.commands[arguments.split()[0]]
    known = {name for parameter in found.params for name in parameter.opts}
    shown = set(re.findall(r"(?<!\S)--?[a-z-]+", arguments))
    assert shown <= known


@pytest.mark.parametrize("name", sorted(set(re.findall(r"EJKERNEL_\w+", README))))
def test_a_variable_is_one_that_is_read(name):
    assert f'"{name}"' in Path(settings.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("field", sorted(set(re.findall(r"AutotunePolicy\((\w+)=", README))))
def test_a_field_of_the_policy_is_there(field):
    assert field in [known.name for known in dataclasses.fields(ops.AutotunePolicy)]


def test_every_status_that_a_table_shows_is_explained():
    explained = set(re.findall(r"^\| `(\w+)` \|", README, re.M))
    assert set(Status) - {Status.READY, Status.LEFT} <= explained  # which are of a search or a bundle under way


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_a_link_leads_somewhere(guide):
    for place, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", TEXTS[guide]):
        target = (guide.parent / place).resolve() if place else guide
        assert target.exists(), place
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_options_of_cache_prune_that_the_readme_names_are_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = next(part for part in text.split(". ") if part.startswith("`ejkernel cache prune` removes"))
    named = set(re.findall(r"--[a-z-]+", sentence))
    assert named == {"--unreadable", "--older-than", "--not-for-this-jax"}
    assert named <= {option for parameter in cache_commands.cache.commands["prune"].params for option in parameter.opts}
