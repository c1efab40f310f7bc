# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the documentation, with headless Chromium and Pillow.

    python scripts/pictures.py notebook          # runs docs/tutorials/notebook.ipynb, and stores pictures
    python scripts/pictures.py report CACHE      # docs/pictures/report.png: the report of this cache

The report in the documentation is of the step below, tuned on two CPU cores:

    ejkernel tune ./scripts/pictures.py:training_step --cache CACHE
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import html
import io
import json
import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"
USUAL = "~/.cache/ejkernel/configs"  # shown instead of the folder of the pictures
REPORT = ROOT / "docs" / "pictures" / "report.png"


def training_step() -> tuple[Any, tuple[Any, ...]]:
    """Return the gradient of a small language model with one layer, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    from ejkernel.modules import flash_attention, linear_cross_entropy, rms_norm

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        qkv, out, scale, head = params
        q, k, v = jnp.einsum("bsd,dnhk->nbshk", rms_norm(x, scale), qkv)
        x = x + jnp.einsum("bshk,hkd->bsd", flash_attention(q, k, v, causal=True), out)
        return jnp.mean(linear_cross_entropy(x.reshape(-1, x.shape[-1]), head, labels.reshape(-1)))

    sizes = (256, 3, 4, 64), (4, 64, 256), (256,), (256, 8192), (2, 512, 256)
    *params, x = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    return jax.jit(jax.grad(loss)), (tuple(params), x, jax.ShapeDtypeStruct((2, 512), jnp.int32))


def code_of(notebook: dict[str, Any]) -> list[str]:
    """Return the code of each code cell."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest_of(notebook: dict[str, Any]) -> str:
    """Return the digest of all code, which the notebook stores with the pictures of its results."""
    return hashlib.sha256("\0".join(code_of(notebook)).encode()).hexdigest()


def shown(codes: list[str]) -> Iterator[object]:
    """Run cells one after another, and yield the value of the last line of each, or `None`."""
    # Kernels look up their module, as in a notebook.
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(codes):
        tree, last = ast.parse(code), None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        exec(compile(tree, f"<cell {number}>", "exec"), names)  # noqa: S102 - our own notebook
        yield None if last is None else eval(compile(last, f"<cell {number}>", "eval"), names)  # noqa: S307


def picture(page: Path, width: int, height: int, *, scale: float = 1.5, colours: int = 64) -> bytes:
    """Return a picture of a page in the light theme, without the empty lines below it."""
    from PIL import Image, ImageChops

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("pictures need Chromium or Chrome")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "picture.png")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--force-device-scale-factor={scale}",
        ]
        subprocess.run(
            [chromium, *options, f"--window-size={width},{height}", f"--screenshot={file}", page.as_uri()],
            check=True,
            capture_output=True,
        )
        image = Image.open(file).convert("RGB")
    ends = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    image = image.crop((0, 0, image.width, min(image.height, ends[3] + 12 if ends else 1)))
    found = io.BytesIO()
    image.quantize(colours).save(found, "png", optimize=True)
    return found.getvalue()


def take_notebook() -> None:
    """Run the notebook, and replace its outputs by pictures."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, value) in enumerate(zip(cells, shown(code_of(notebook)), strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, []
        if value is not None:
            cell["outputs"] = [{"output_type": "execute_result", "execution_count": number, "metadata": {}}]
            cell["outputs"][0]["data"] = _data(value)
    notebook["metadata"]["pictures_of"] = digest_of(notebook)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _data(value: object) -> dict[str, str]:
    """Return a value as a notebook stores it: as text, and as a picture if it has HTML."""
    folder = os.environ["EJKERNEL_CACHE_DIR"]
    found = {"text/plain": textwrap.shorten(repr(value).replace(folder, USUAL), 300)}
    piece = getattr(value, "_repr_html_", lambda: None)()
    if piece is not None:
        piece = piece.replace(folder, USUAL)
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "page.html")
            page.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{piece}</body>", encoding="utf-8")
            found["image/png"] = base64.b64encode(picture(page, 900, 1600)).decode()
    return found


def take_report(cache: Path) -> None:
    """Write the report of a cache, open the first search, and take its picture."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        subprocess.run(["ejkernel", "report", "--cache", str(cache), "--output", str(page)], check=True)
        text = page.read_text(encoding="utf-8")
        text = text.replace('<details id="c1">', '<details id="c1" open>', 1)
        page.write_text(text.replace(html.escape(str(cache)), USUAL), encoding="utf-8")
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_bytes(picture(page, 1280, 1840, scale=1.2, colours=96))


def main() -> None:
    """Take the pictures that the command line names."""
    options = argparse.ArgumentParser(description="Take the pictures of the documentation.")
    options.add_argument("what", choices=["notebook", "report"])
    options.add_argument("cache", type=Path, nargs="?", help="the cache of the report")
    given = options.parse_args()
    if given.what == "report":
        take_report(given.cache)
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["EJKERNEL_CACHE_DIR"] = str(Path(folder, "configs"))
            take_notebook()


if __name__ == "__main__":
    main()
