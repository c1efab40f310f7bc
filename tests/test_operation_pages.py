# SPDX-License-Identifier: Apache-2.0
"""`docs/operations`: each public operation has one page, whose support table is that of its implementations."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import compat, modules
from ejkernel.modules import quantize
from ejkernel.ops import CallError

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "operations").glob("*.md"))}
INDEX = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
FUNCTIONS = sorted(name for name in modules.__all__ if name.islower())
EXAMPLES = [
    pytest.param(name, code, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.S))
    if not code.startswith((">>> ", "def "))
]


@pytest.fixture(scope="module")
def script():
    file = ROOT / "scripts" / "operation_pages.py"
    if not file.exists():
        pytest.skip("a source tree has the script, and these are tests of an installed package")
    spec = importlib.util.spec_from_file_location("operation_pages", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(text):
    return re.findall(r"^<!-- ::: ejkernel\.modules\.\w+\.(\w+) -->$", text, re.M)


def test_every_public_function_has_one_page():
    assert sorted(name for text in PAGES.values() for name in documented(text) if name.islower()) == FUNCTIONS


def test_the_index_and_the_navigation_have_every_page():
    assert re.findall(r"\]\(operations/(\w+)\.md\)", INDEX) == [*dict.fromkeys(re.findall(r"operations/(\w+)", INDEX))]
    assert set(re.findall(r"\]\(operations/(\w+)\.md\)", INDEX)) == set(PAGES)
    if (ROOT / "mkdocs.yml").exists():
        navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
        assert set(re.findall(r": operations/(\w+)\.md$", navigation, re.M)) == set(PAGES)


@pytest.mark.slow
def test_the_index_lists_the_implementations_of_each_operation(script):
    rows = dict(re.findall(r"^\| \[.*?\]\(operations/(\w+)\.md\) \| .*? \| (.*) \|$", INDEX, re.M))
    for name, cells in rows.items():
        args, options = script.CALLS[name].plain("bfloat16")
        page = script.CALLS[name]
        kernel = script._calls_of(page.function, args, options, has_gradient=page.has_gradient)[0].kernel
        assert sorted(re.findall(r"`(\w+)`", cells)) == sorted(kernel.implementations)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_what_a_reader_looks_for(name):
    titles = re.findall(r"^## (.*)$", PAGES[name], re.M)
    assert {"What it computes", "Support", "Measured", "Signature"} <= set(titles)
    measured = PAGES[name].split("## Measured\n")[1].split("\n## ")[0]
    assert "benchmarks/results/" in measured
    assert re.search(r"H200|CPU", measured)
    assert re.search(r"20\d\d-\d\d-\d\d", measured)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.skipif(compat.kernels.mosaic_gpu_reason() is not None, reason="this JAX lacks Mosaic GPU")
def test_a_support_table_is_that_of_the_implementations(script, name):
    assert script.written(PAGES[name], name) == PAGES[name], "run scripts/operation_pages.py"


@pytest.mark.slow
@pytest.mark.skipif(compat.kernels.mosaic_gpu_reason() is not None, reason="this JAX lacks Mosaic GPU")
def test_an_implementation_that_refuses_a_feature_changes_the_table(script, monkeypatch):
    page = script.CALLS["rms_norm"]
    table = script.Table(page)
    (column,) = [n for n, name in enumerate(table.names, start=2) if name == "mosaic_gpu"]
    before = [line.split("|") for line in str(table).splitlines()]
    implementation = type(modules.RmsNorm.implementations["mosaic_gpu"])
    usual = implementation.unsupported
    monkeypatch.setattr(
        implementation, "unsupported", lambda self, call: "not today" if call.residual else usual(self, call)
    )
    after = [line.split("|") for line in str(script.Table(page)).splitlines()]
    (changed,) = [new for old, new in zip(before, after, strict=True) if old != new]
    assert (changed[1].strip(), changed[column].strip()) == ("`residual`", "-")


def names_elsewhere():
    """Return each function whose page has a table of the names of other libraries, with each name of the table."""
    pairs = []
    for page, text in PAGES.items():
        for table in re.findall(r"The same arguments elsewhere;.*?\n\n(\|.*?)\n\n", text, re.S):
            cells = [cell for row in table.splitlines()[2:] for cell in row.split("|")[2:-1]]
            found = {name for cell in cells for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)}
            pairs += [(page, name) for name in sorted(found)]
    return pairs


@pytest.mark.parametrize(("function", "name"), names_elsewhere())
def test_a_name_of_another_library_is_an_error_with_the_name_to_use(function, name):
    public = getattr(modules, function)
    if name in inspect.signature(public).parameters or hasattr(modules, name):  # the same name, or a function of ours
        return
    with pytest.raises(CallError) as raised:
        public(**{name: None})
    assert f"{function} has no argument `{name}`" in str(raised.value)
    assert "; its arguments are" not in str(raised.value)


def members(public):
    """Return the public fields, properties and methods of a class, without those that only JAX calls."""
    own = [*vars(public), *getattr(public, "__annotations__", {})]
    return sorted({name for name in own if not name.startswith(("_", "tree_"))})


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_each_member_of_its_classes(name):
    classes = [getattr(modules, each) for each in documented(PAGES[name]) if isinstance(getattr(modules, each), type)]
    for public in classes:
        missing = [each for each in members(public) if not re.search(rf"`[^`]*\b{each}\b[^`]*`", PAGES[name])]
        assert missing == [], f"{public.__name__} on {name}.md"


def arrays(name):
    """The arrays that the examples of a page use."""
    rng, m, k, n, experts = np.random.default_rng(0), 256, 128, 384, 4

    def array(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    if name == "flash_attention":
        return {"q": array(1, 64, 4, 16), "k": array(1, 64, 2, 16), "v": array(1, 64, 2, 16)}
    if name != "grouped_matmul":
        named = {"w": array(k, n), "x": array(m, k), "y": array(m, n), "weight": array(k), "steps": 2}
        blocks = {"x8": quantize(array(m, k), block=128), "up": array(k, n), "gate": array(k, n), "down": array(n, k)}
        return named | blocks
    up, gate, down = array(experts, k, n), array(experts, k, n), array(experts, n, k)
    weights = {"weights": up, "w1": up, "w3": gate, "w2": down, "tokens": array(m, k), "dout": array(m, n)}
    eight = {"up8": up, "gate8": gate, "down8": down}
    return weights | {
        "group_sizes": jnp.array([100, 50, 0, 106]),
        "router_weights": array(m, dtype=jnp.float32),
        "tokens8": quantize(weights["tokens"], block=128),
        **{each: quantize(w.swapaxes(1, 2), block=128, axis=(1, 2)) for each, w in eight.items()},
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), EXAMPLES)
def test_an_example_of_a_page_runs_as_it_is_written(page, name, code):
    page(code, jax=jax, jnp=jnp, **{each: getattr(modules, each) for each in modules.__all__}, **arrays(name))
