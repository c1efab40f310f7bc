# SPDX-License-Identifier: Apache-2.0
"""Check that this tree can be released: `make release-check`.

It builds the sdist, and the wheel from the sdist; checks their contents, metadata and README; installs the wheel in a
new environment, with its dependencies from the package index of pip; and runs the command and a gradient there, in an
empty folder. Nothing is uploaded; the distributions are left in `dist/`.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IN_WHEEL = ("ejkernel/__init__.py", "ejkernel/py.typed", "ejkernel/cli/app.py", "ejkernel/data/targets/")
IN_SDIST = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src/ejkernel/__init__.py", "tests/conftest.py")
PROGRAM = """
import jax, jax.numpy as jnp, pathlib, sys, ejkernel
from ejkernel.modules import flash_attention
from ejkernel.ops import default_executor

home = pathlib.Path(ejkernel.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), home
x = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))
gradient = jax.jit(jax.grad(lambda x: flash_attention(x, x, x, causal=True).sum()))(x)
assert bool(jnp.isfinite(gradient).all())
print("smoke test:", ejkernel.__version__, "with JAX", jax.__version__)
"""


class FaultError(Exception):
    """Something that must not be released."""


def check_changelog(text: str, version: str) -> str:
    """Return the date of a version in the changelog, or a note that it has none yet.

    Raises:
        FaultError: The changelog has neither the version nor a section for what is not released.
    """
    dated = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", text, re.MULTILINE)
    if dated:
        return f"{version} is dated {dated[1]}"
    if not re.search(r"^## \[Unreleased\]$", text, re.MULTILINE):
        raise FaultError(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`, and no `## [Unreleased]`.")
    return f"{version} has no date yet: rename [Unreleased] to [{version}] - YYYY-MM-DD before the release"


def check_contents(names: Iterable[str], wanted: Iterable[str], unwanted: str, where: str) -> None:
    """Check the files of a distribution.

    Raises:
        FaultError: A wanted file is missing, or a file matches the pattern `unwanted`.
    """
    found = list(names)
    missing = [name for name in wanted if not any(one.startswith(name) for one in found)]
    foreign = [name for name in found if re.search(unwanted, name)]
    if missing or foreign:
        raise FaultError(f"{where}: missing {missing}, and it must not have {foreign[:5]}.")


def check_metadata(text: str, project: dict[str, object]) -> None:
    """Check the metadata of the wheel against `[project]`.

    Raises:
        FaultError: A field differs or is empty.
    """
    found = email.message_from_string(text)
    expected = {
        "Name": project["name"],
        "Version": project["version"],
        "Summary": project["description"],
        "License-Expression": project["license"],
        "Requires-Python": project["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    wrong = {name: found[name] for name, value in expected.items() if found[name] != value}
    if wrong or not str(found.get_payload()).startswith("# ejkernel") or not found.get_all("License-File"):
        raise FaultError(f"the metadata of the wheel is wrong: {wrong or 'its description or its licence is missing'}.")


def build(dist: Path) -> tuple[Path, Path]:
    """Return a new wheel and the sdist that it was built from."""
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT))
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def check_files(wheel: Path, sdist: Path, project: dict[str, object]) -> None:
    """Check contents and metadata of both distributions."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        text = opened.read(metadata).decode()
    check_contents(names, IN_WHEEL, r"^(?!ejkernel/|ejkernel_ops-)|__pycache__", wheel.name)
    check_metadata(text, project)
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
    check_contents(inside, IN_SDIST, r"__pycache__|\.egg-info|^\.venv|^build/", sdist.name)


def try_out(wheel: Path) -> None:
    """Install the wheel in a new environment, and run the command and a program in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        venv, away = Path(folder, "venv"), Path(folder, "away")
        away.mkdir()
        run(sys.executable, "-m", "venv", str(venv))
        python, command = str(venv / "bin" / "python"), str(venv / "bin" / "ejkernel")
        run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", str(wheel))
        run(python, "-m", "pip", "check")
        # Not this shell's PYTHONPATH, settings and caches.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EJKERNEL"))}
        environment = kept | {"HOME": str(away), "JAX_PLATFORMS": "cpu"}
        for arguments in (["--version"], ["--help"], ["list"], ["doctor"]):
            run(command, *arguments, cwd=away, env=environment, quiet=True)
        run(python, "-c", PROGRAM, cwd=away, env=environment)


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None, quiet: bool = False) -> None:
    """Run a command.

    Raises:
        FaultError: It failed.
    """
    shown = Path(command[0]).name + "".join(f" {part}" for part in command[1:] if len(part) < 200)
    print(f"release-check: {shown}", flush=True)
    found = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=quiet, check=False)
    if found.returncode:
        raise FaultError(f"`{shown}` failed with status {found.returncode}\n{found.stdout or ''}{found.stderr or ''}")


def main() -> int:
    """Run all checks; return 1 at the first fault."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        note = check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), project["version"])
        wheel, sdist = build(ROOT / "dist")
        check_files(wheel, sdist, project)
        run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        try_out(wheel)
    except FaultError as fault:
        print(f"release-check: {fault}", file=sys.stderr)
        return 1
    print(f"release-check: {wheel.name} and {sdist.name} can be released; {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
