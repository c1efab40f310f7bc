# SPDX-License-Identifier: Apache-2.0
"""The tuner's folders: which may import which, and how many files each has."""

from __future__ import annotations

import ast
import functools
import itertools
from pathlib import Path

import pytest

from ejkernel.ops import autotuner

ROOT = Path(autotuner.__file__).parent
# Each may import those before it; so does docs/design.md list them.
ORDER = ["process", "measure", "trials", "search", "store", "compile", "bench", "tasks", "tuner", "tier"]
MOST = 12  # files of a folder that a reader still takes in


@functools.cache
def imported(path):
    """Return the modules that a file imports anywhere in it, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def place(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def test_every_folder_has_its_place_in_the_order():
    found = {place(path) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert found == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_folder_imports_those_before_it_alone(name):
    for path in (path for path in ROOT.rglob("*.py") if place(path) == name):
        for module in imported(path):
            assert not module.startswith("ejkernel.ops.execution"), f"{path}: {module}"
            if module.startswith("ejkernel.ops.autotuner."):
                other = module.split(".")[3]
                assert ORDER.index(other) <= ORDER.index(name), f"{path}: {module}"


@pytest.mark.parametrize("name", ORDER[:-2])
def test_a_folder_is_no_larger_than_a_reader_takes_in(name):
    assert len(list((ROOT / name).glob("*.py"))) <= MOST


def test_no_two_files_import_each_other():
    names = {path: ".".join(path.relative_to(ROOT.parents[2]).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    for one, other in itertools.combinations(names, 2):
        assert not (names[one] in imported(other) and names[other] in imported(one)), f"{one} and {other}"
