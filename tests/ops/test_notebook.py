# SPDX-License-Identifier: Apache-2.0
"""The HTML in notebooks: results, explanations, searches, caches and configurations as HTML."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from tests.cli.searches import HOSTILE, SCRIPT, Page, Tile, found, save

from ejkernel.kernels.rms_norm.operation import RmsNormConfig
from ejkernel.ops import (
    AutotuningResult,
    BwdParams,
    ConfigCache,
    ConfigKey,
    Entry,
    FwdParams,
    Kernel,
    PersistentCache,
    Resolution,
    default_executor,
)
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.execution.explain import Explanations
from ejkernel.ops.notebook import _MOST
from ejkernel.ops.utils.services import Shown

HAS_JINJA = importlib.util.find_spec("jinja2") is not None
needs_jinja = pytest.mark.skipif(not HAS_JINJA, reason="jinja2 is an extra, and is not installed")


class Hostile(Kernel[str, jax.Array]):
    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return HOSTILE


def examples(tmp_path):
    """Return an object of each kind, with hostile texts where they can have any."""
    data = found()
    cache = PersistentCache(save(tmp_path / "configs", data), shipped=False)
    memory = ConfigCache()
    memory.put(HOSTILE, Tile(1, SCRIPT))
    why = default_executor().explain(Hostile("hostile"), jnp.ones(3))
    entry = Entry("reported@v0", HOSTILE, Tile(6, SCRIPT))
    return {
        "search": data,
        "stored search": next(MeasurementStore(cache).searches()),
        "searches": MeasurementStore(cache),
        "result": AutotuningResult(HOSTILE, (entry, Entry(data.key.op, data.key.call, Tile(6))), (data,)),
        "entry": entry,
        "explanation": why,
        "explanations": Explanations([why, dataclasses.replace(why, key=None, key_note=HOSTILE)]),
        "cache": cache,
        "memory": memory,
        "resolution": Resolution(Tile(1, HOSTILE), "memory", None),
        "configuration": RmsNormConfig(),
        "forward": FwdParams(q_blocksize=64),
        "backward": BwdParams(num_warps=4),
    }


EXPECTED = {
    "search": ("2.00x the heuristic's speed", "needs 300 bytes", "Confirmation run", "Best time so far"),
    "stored search": ("2.00x the heuristic's speed", "needs 300 bytes", "f32[16,8]"),
    "searches": ("1 search in", "2.00x"),
    "result": ("2 configurations for", "2.00x", "Search of reported@v0 f32[16,8]"),
    "entry": ("reported@v0", "rows 6", f"order {SCRIPT}"),
    "explanation": ("hostile@v0", "No answer override, overlay", f"{HOSTILE}, from heuristic"),
    "explanations": (f"none: {HOSTILE}",),
    "cache": ("1 entry in", "rows=6", "2.00x", "complete"),
    "memory": ("1 configuration in memory", f"order={SCRIPT} rows=1"),
    "resolution": ("from memory", "rows 1"),
    "configuration": ("RmsNormConfig", "implementation xla"),
    "forward": ("FwdParams", "q_blocksize 64"),
    "backward": ("BwdParams", "num_warps 4"),
}


@needs_jinja
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_notebook_shows_it_as_html_with_all_names_as_text(tmp_path, kind):
    html = examples(tmp_path)[kind]._repr_html_()
    shown = Page(html)
    assert all(text in shown.text for text in EXPECTED[kind]), shown.text
    assert not shown.all("script")
    assert not [name for _, attrs in shown.tags for name in attrs if name.startswith("on") or name in ("src", "href")]
    assert "<style>" in html


def test_every_kind_that_is_shown_is_tested(tmp_path):
    def below(kind):
        return {kind} | {lower for each in kind.__subclasses__() for lower in below(each)}

    tested = {kind.__qualname__ for each in examples(tmp_path).values() for kind in type(each).__mro__}
    ours = {kind.__qualname__ for kind in below(Shown) if kind.__module__.startswith("ejkernel.ops")}
    assert ours - tested == set()


@pytest.mark.parametrize("kind", EXPECTED)
def test_without_jinja2_a_notebook_shows_the_text(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert examples(tmp_path)[kind]._repr_html_() is None


@needs_jinja
def test_a_large_cache_is_shown_in_part():
    cache = ConfigCache()
    for number in range(_MOST + 5):
        cache.put(ConfigKey("gpu:x", "op@v1", f"{number:016x}"), Tile(number))
    html = cache._repr_html_()
    assert f"{_MOST + 5} configurations, the first {_MOST} are shown in memory" in Page(html).text
    assert html.count("<tr>") == _MOST + 1


@pytest.mark.smoke
@pytest.mark.slow
def test_importing_ejkernel_imports_no_templates():
    code = (
        "import sys, ejkernel.ops, ejkernel.modules; print([n for n in sys.modules if 'jinja' in n or 'notebook' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@needs_jinja
def test_a_search_is_shown_open_and_those_of_a_result_are_folded():
    data = found()
    result = AutotuningResult(data.key.device, (Entry(data.key.op, data.key.call, data.config),), (data,))
    opened = [["open" in attrs for attrs in Page(each._repr_html_()).all("details")] for each in (data, result)]
    assert opened == [[True], [False]]
