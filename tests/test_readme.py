# SPDX-License-Identifier: Apache-2.0
"""The README and the documentation name only commands, variables, messages and names that exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import pytest

from ejkernel import ops, settings
from ejkernel.cli import cache_commands, main
from ejkernel.cli.app import cli
from ejkernel.modules import flash_attention, rms_norm
from ejkernel.ops.autotuner.trials.status import Status

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {guide: guide.read_text(encoding="utf-8") for guide in GUIDES}
README = "".join(TEXTS.values())
COMMANDS = re.findall(r"^\$ (?:\w+=\S+ )*ejkernel (\w+)(?: ([^\n#]*))?", README, re.M)


def block(first_line):
    """Return the code block that begins with a line."""
    return next(code for code in re.findall(r"```python\n(.*?)```", README, re.S) if code.startswith(first_line))


def test_the_first_lines_run_as_they_are_written(page):
    first = page(re.findall(r"```python\n(.*?)```", TEXTS[GUIDES[0]], re.S)[0])
    assert first.out.shape == first.q.shape == (1, 1024, 8, 64)


def test_the_program_of_the_first_page_is_found_forward_and_backward(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(block("# train.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--in-process", "train:training_step", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "flash_attention.bwd@v0" in printed.out
    assert "2 distinct calls, 1 forward and 1 backward" in printed.err


@pytest.mark.slow
def test_the_model_in_flax_nnx_is_tuned(page):
    pytest.importorskip("flax.nnx")
    names = {"flash_attention": flash_attention, "rms_norm": rms_norm, "autotune": ops.autotune}
    page_run = page(block("from flax import nnx"), jax=jax, jnp=jnp, x=jnp.ones((2, 32, 64)), **names)
    assert len(page_run.result.entries) == 4


@pytest.mark.parametrize(("command", "arguments"), COMMANDS)
def test_a_command_has_the_options_that_it_is_shown_with(command, arguments):
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    if isinstance(found, click.Group):
        found = found.commands[arguments.split()[0]]
    known = {name for parameter in found.params for name in parameter.opts}
    shown = set(re.findall(r"(?<!\S)--?[a-z-]+", arguments))
    assert shown <= known


@pytest.mark.parametrize("name", sorted(set(re.findall(r"(?<!_)EJKERNEL_\w+", README))))
def test_only_variables_in_use_are_documented(name):
    assert f'"{name}"' in Path(settings.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("field", sorted(set(re.findall(r"AutotunePolicy\((\w+)=", README))))
def test_a_field_of_the_policy_is_there(field):
    assert field in [known.name for known in dataclasses.fields(ops.AutotunePolicy)]


def test_every_status_that_a_table_shows_is_explained():
    explained = set(re.findall(r"^\| `(\w+)` \|", README, re.M))
    assert set(Status) - {Status.READY, Status.LEFT} <= explained  # used only during a search, or in a bundle


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_a_link_leads_somewhere(guide):
    for place, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", TEXTS[guide]):
        target = (guide.parent / place).resolve() if place else guide
        assert target.exists(), place
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_options_of_cache_prune_in_the_guide_are_there():
    text = (ROOT / "docs" / "configurations.md").read_text(encoding="utf-8")
    sentence = next(part for part in text.split(". ") if part.startswith("`ejkernel cache prune` removes"))
    named = set(re.findall(r"--[a-z-]+", sentence))
    assert named == {"--unreadable", "--older-than", "--not-for-this-jax", "--failed"}
    assert named <= {option for parameter in cache_commands.cache.commands["prune"].params for option in parameter.opts}


def test_every_table_has_a_header():
    for file, text in TEXTS.items():
        for block in re.findall(r"(?:^\|.*\n?)+", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M):
            assert re.search(r"^\|[-:| ]+\|$", block, re.M), f"{file.name}: a row outside its table: {block}"
            assert not re.search(r"\| *\|", block.splitlines()[0]), f"{file.name}: a column without a title: {block}"


def test_the_readme_is_short():
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= 180


def test_the_reference_has_every_public_name():
    reference = TEXTS[ROOT / "docs" / "reference" / "ops.md"]
    documented = set(re.findall(r"^::: ejkernel\.ops\.(\w+)$", reference, re.M))
    errors = {name for name in ops.__all__ if name.endswith(("Error", "Warning"))}  # documented with their module
    type_variables = {"Cfg", "Out"}
    assert set(ops.__all__) - errors - type_variables == documented - {"errors"}


def test_troubleshooting_has_every_error_and_warning():
    titles = re.findall(r"^## (.*)$", TEXTS[ROOT / "docs" / "troubleshooting.md"], re.M)
    described = {name for title in titles for name in re.findall(r"\w+(?:Error|Warning)\b", title)}
    public = {name for name in ops.__all__ if name.endswith(("Error", "Warning"))}
    assert described == public - {"EjkernelError", "EjkernelWarning"}


@pytest.mark.slow
@pytest.mark.parametrize("message", re.findall(r"^\| `(.*?)` \|", TEXTS[ROOT / "docs" / "troubleshooting.md"], re.M))
def test_messages_in_troubleshooting_exist_in_the_source(message):
    assert any(message in text for text in _texts_of_the_package())


@functools.cache
def _texts_of_the_package():
    """Return every string in the sources, with `{}` for values."""
    files = Path(ops.__file__).parents[1].rglob("*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return [text for node in nodes if (text := _text_of(node))]


def _text_of(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""
