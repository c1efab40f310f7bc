# SPDX-License-Identifier: Apache-2.0
"""`make release-check` finds what must not be released. The target itself takes a minute and needs a package index."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "scripts" / "release_check.py"
PROJECT = {
    "name": "ejkernel-ops",
    "version": "1.2.3",
    "description": "in a line",
    "license": "Apache-2.0",
    "requires-python": ">=3.11",
}
METADATA = """Metadata-Version: 2.4
Name: ejkernel-ops
Version: 1.2.3
Summary: in a line
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Description-Content-Type: text/markdown

# ejkernel
"""

pytestmark = pytest.mark.skipif(not FILE.exists(), reason="a source tree has the script")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("release_check", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_changelog_of_this_tree_can_be_released(script):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert version in script.check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)


def test_a_dated_version_is_told_from_an_unreleased_one(script):
    assert script.check_changelog("## [1.2.3] - 2026-01-31\n", "1.2.3") == "1.2.3 is dated 2026-01-31"
    assert "no date yet" in script.check_changelog("## [Unreleased]\n\n## [1.2.2] - 2026-01-31\n", "1.2.3")


def test_a_changelog_without_the_version_is_a_fault(script):
    with pytest.raises(script.FaultError, match=r"\[1\.2\.3\] - YYYY"):
        script.check_changelog("## [1.2.2] - 2026-01-31\n", "1.2.3")


def test_metadata_that_agree_pass(script):
    script.check_metadata(METADATA, PROJECT)


@pytest.mark.parametrize("line", [line for line in METADATA.splitlines()[1:] if line])
def test_missing_metadata_are_a_fault(script, line):
    with pytest.raises(script.FaultError, match="metadata"):
        script.check_metadata(METADATA.replace(f"{line}\n", ""), PROJECT)


@pytest.mark.parametrize("names", [["pkg/a.py"], ["pkg/a.py", "pkg/b.py", "tests/c.py"]], ids=["missing", "foreign"])
def test_a_missing_or_foreign_file_is_a_fault(script, names):
    script.check_contents(["pkg/a.py", "pkg/b.py"], ["pkg/b.py"], "^tests/", "wheel")
    with pytest.raises(script.FaultError, match="wheel: missing"):
        script.check_contents(names, ["pkg/b.py"], "^tests/", "wheel")


def test_a_failed_command_is_a_fault_with_its_output(script):
    with pytest.raises(script.FaultError, match=r"status 2\n.*usage"):
        script.run(script.sys.executable, "-m", "json.tool", "--wrong", quiet=True)
