# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: the site also has the files beside `docs` to which its pages link.

In the repository the pages link to `../benchmarks/results/attention_gpu.md` and the like, which works where the files
are read as they are. On the site the same files are under `files/`. Notebooks become pages with the same name.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "LICENSE",
    "benchmarks/README.md",
    "benchmarks/results",
    "examples",
)
# On the site, mkdocstrings shows these signatures.
SIGNATURE = re.compile(r"<!-- signature: .*?<!-- end of signature -->\n\n", re.DOTALL)
# The site shows a docstring where a file has such a comment, which readers of the file do not see.
DOCSTRING = re.compile(r"^<!-- (::: \S+) -->$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()((?:\.\./)+)(?!https?:)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files, as pages where they are Markdown."""
    for name in SHOWN:
        place = ROOT / name
        for path in [place] if place.is_file() else sorted(x for x in place.rglob("*") if x.is_file()):
            if "__pycache__" not in path.parts:
                uri = f"files/{path.relative_to(ROOT).as_posix()}"
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in (ROOT / "docs").rglob("*.ipynb"):
        uri = path.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, uri, content=_page_of(path)))
    return files


def _page_of(notebook: Path) -> str:
    """Return a notebook as Markdown, with the stored pictures of what its cells show."""
    parts = [f"[Download this page as a notebook]({notebook.name}){{ download }}"]
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            last = source.splitlines()[-1]
            parts.append(f"![What the notebook shows for {last}](data:image/png;base64,{output['data']['image/png']})")
    title = parts.pop(1)  # starts with the heading of the page
    return "\n\n".join([title, *parts]) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links that leave `docs` at the copies, and those of a copy that lead into `docs` back."""
    source = Path(page.file.src_uri)
    inside = source.parts[0] == "files"
    # where the page is in the repository
    folder = Path(*source.parts[1:]).parent if inside else Path("docs") / source.parent

    def moved(link: re.Match[str]) -> str:
        target = os.path.normpath(folder / (link.group(1) + link.group(2)))
        return os.path.relpath(_on_site(target), source.parent)

    markdown = LINK.sub(moved, DOCSTRING.sub(r"\1", SIGNATURE.sub("", markdown)))
    markdown = re.sub(r"\.ipynb\)(?!\{)", ".md)", markdown)
    if inside:  # links of a copy that do not go up
        own = re.compile(r"(?<=\]\()(?!\.\./|https?:|#|mailto:)([^)#\s]+)")
        markdown = own.sub(lambda m: os.path.relpath(_on_site(str(folder / m.group(1))), source.parent), markdown)
    return markdown


def _on_site(target: str) -> str:
    """Return where the site has a file; a folder is shown by the nearest README.md above."""
    place = ROOT / target
    if place.is_dir():
        while not (place / "README.md").is_file():
            place = place.parent
        target = (place / "README.md").relative_to(ROOT).as_posix()
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"
