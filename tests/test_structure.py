# SPDX-License-Identifier: Apache-2.0
"""The structure of the source: import direction, sizes of folders, files and functions, length of a first call."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import ejkernel

SOURCE = Path(ejkernel.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
OPS = [file for file in FILES if file.relative_to(SOURCE).parts[0] in ("ops", "testing")]

# --- import direction: each layer may import itself and the layers after it ---

LAYERS = {
    "package": ["testing", "cli", "modules", "kernels", "ops"],
    "ops": ["ops.execution", "ops.autotuner", "ops.config", "ops.core", "ops.utils"],
    "tuner": [
        "ops.autotuner.tier",
        "ops.autotuner.tuner",
        "ops.autotuner.fleet",
        "ops.autotuner.tasks",
        "ops.autotuner.bench",
        "ops.autotuner.store",
        "ops.autotuner.compile",
        "ops.autotuner.trials",
        "ops.autotuner.measure",
        "ops.autotuner.process",
        "ops.autotuner.search",
    ],
}

# --- sizes ---

FILES_OF_A_FOLDER = 12
LINES_OF_NINE_FUNCTIONS_IN_TEN = 15
LINES_OF_A_FUNCTION = 40  # without its signature
ANY_IN_A_THOUSAND_LINES = 100


@cache
def tree_of(file):
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file):
    return list(ast.walk(tree_of(file)))


def path_of(file):
    return file.relative_to(SOURCE).as_posix()


def name_of(file):
    """Return the dotted name, within the package, of the module in `file`."""
    return path_of(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {name_of(file): file for file in FILES}


def imported_names(file):
    """Yield the absolute dotted names that `file` imports: at its top, in a function, or for type checkers alone."""
    package = ["ejkernel", *file.relative_to(SOURCE).parent.parts]
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}"


@cache
def imports(name):
    """Return the modules of this package that the module `name` imports."""
    found = set()
    for imported in imported_names(MODULES[name]):
        inside = imported.removeprefix("ejkernel.")
        while inside and inside not in MODULES:
            inside = inside.rpartition(".")[0]
        found.add(inside)
    return found & MODULES.keys() - {name}


def layer_of(name, layers):
    return next((n for n, layer in enumerate(layers) if name == layer or name.startswith(f"{layer}.")), None)


@pytest.mark.parametrize("group", LAYERS)
def test_imports_only_go_down(group):
    def goes_up(name, other):
        here, there = layer_of(name, LAYERS[group]), layer_of(other, LAYERS[group])
        return here is not None and there is not None and there < here

    assert [f"{name} -> {other}" for name in MODULES for other in sorted(imports(name)) if goes_up(name, other)] == []


def test_every_layer_exists_and_every_folder_of_the_tuner_is_a_layer():
    assert [layer for layers in LAYERS.values() for layer in layers if layer not in MODULES] == []
    parts = {name.split(".")[2] for name in MODULES if name.startswith("ops.autotuner.")}
    assert parts == {layer.split(".")[2] for layer in LAYERS["tuner"]}


def reached(name):
    """Return all modules that importing `name` may load, directly or indirectly."""
    found, left = set(), [name]
    while left:
        new = imports(left.pop()) - found
        found |= new
        left += new
    return found


def test_no_files_import_each_other_in_a_circle():
    reach = {name: reached(name) for name in MODULES}
    inside = {name: {other for other in reach[name] if name in reach[other]} for name in MODULES}
    circles = [circle for name, circle in inside.items() if circle and name == min(circle)]
    assert circles == []


# --- folders and files ---


def test_no_folder_holds_too_many_files():
    sizes = Counter(path_of(file.parent) for file in FILES)
    held = ("ops", "testing")
    assert [folder for folder, size in sizes.items() if folder.startswith(held) and size > FILES_OF_A_FOLDER] == []


@pytest.mark.parametrize("file", FILES, ids=path_of)
def test_a_file_is_short_and_names_its_licence(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 500
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"


def files_that_mention(*texts):
    return [path_of(file) for file in FILES if any(text in file.read_text(encoding="utf-8") for text in texts)]


def test_the_environment_is_read_in_one_file():
    assert files_that_mention("os.environ", "getenv", "environb") == ["settings.py"]


def test_warnings_point_at_the_users_line():
    assert files_that_mention("warnings.warn", "stacklevel") == ["ops/utils/messages/warn.py"]


def test_private_parts_of_jax_are_used_in_one_package():
    assert {Path(file).parts[0] for file in files_that_mention("jax._src")} == {"compat"}


def test_nothing_is_unpickled_or_evaluated():
    def names(file):
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield node.func.id
        yield from {name.partition(".")[0] for name in imported_names(file)}

    forbidden = {"eval", "exec", "pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert [(file.name, name) for file in FILES for name in names(file) if name in forbidden] == [
        ("messages.py", "pickle"),  # between a process and its own child
        ("forms.py", "pickle"),  # of an existing kernel
    ]


# --- functions ---

Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(nodes):
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            yield from range(node.body[0].lineno, node.body[0].end_lineno + 1)


@cache
def code_lines(file):
    """Return the numbers of the code lines: without comments, docstrings and empty lines."""
    lines = enumerate(map(str.strip, file.read_text(encoding="utf-8").splitlines()), 1)
    code = {number for number, line in lines if line and not line.startswith("#")}
    return code.difference(docstring_lines(nodes_of(file)))


def functions(file):
    return (node for node in nodes_of(file) if isinstance(node, Function))


def length(file, node, *, first):
    """Return the lines of code of a function in `file`, counted from the line `first`."""
    return len(code_lines(file) & {*range(first, node.end_lineno + 1)})


def test_nine_functions_in_ten_are_short():
    sizes = sorted(length(file, node, first=node.lineno) for file in FILES for node in functions(file))
    assert sizes[len(sizes) * 9 // 10] <= LINES_OF_NINE_FUNCTIONS_IN_TEN


def test_no_function_is_long():
    bodies = {
        f"{path_of(file)}:{node.name}": length(file, node, first=node.body[0].lineno)
        for file in FILES
        for node in functions(file)
    }
    assert {name: lines for name, lines in bodies.items() if lines > LINES_OF_A_FUNCTION} == {}


def is_silent(handler):
    """Return whether a handler of every error neither raises nor uses the error."""
    caught = (
        {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"Exception"}
    )
    if not caught & {"Exception", "BaseException"}:
        return False
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    raises = any(isinstance(node, ast.Raise) for node in inside)
    return not raises and not any(isinstance(node, ast.Name) and node.id == handler.name for node in inside)


def test_no_handler_of_every_error_drops_the_error():
    silent = {
        path_of(file): [
            function.name
            for function in functions(file)
            for node in ast.walk(function)
            if isinstance(node, ast.ExceptHandler) and is_silent(node)
        ]
        for file in OPS
    }
    assert {path: names for path, names in silent.items() if names} == {}


def test_few_values_are_of_any_type():
    used = sum(isinstance(node, ast.Name) and node.id == "Any" for file in OPS for node in nodes_of(file))
    assert used * 1000 / sum(len(code_lines(file)) for file in OPS) <= ANY_IN_A_THOUSAND_LINES


# --- benchmarks: no other test imports them with the oldest and the newest JAX ---

ROOT = Path(__file__).parents[1]
OPTIONAL = {  # packages that may be missing
    "benchmarks.plots": "matplotlib",
    "benchmarks.rival_tokamax": "tokamax",
    "benchmarks.torture.guided": "atheris",
}
PICTURES = sorted((ROOT / "benchmarks" / "results").glob("*.svg"))


@pytest.mark.slow
def test_all_benchmarks_can_be_imported():
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert "benchmarks.split_experts" in names
    names = [name for name in names if name not in OPTIONAL or importlib.util.find_spec(OPTIONAL[name])]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("picture", PICTURES, ids=lambda file: file.stem)
def test_a_picture_is_of_the_figures_beside_it(picture):
    figures = picture.with_suffix(".json").read_bytes()
    assert hashlib.sha256(figures).hexdigest() in picture.read_text(encoding="utf-8")


def test_a_document_or_program_names_each_results_file():
    folders = ("benchmarks", "docs", "examples", "scripts", "src", "tests")
    files = [file for name in folders for ending in ("md", "py") for file in (ROOT / name).rglob(f"*.{ending}")]
    words = set(re.findall(r"[\w.]*\w", " ".join(file.read_text(encoding="utf-8") for file in files)))
    named = words | {Path(word).stem for word in words}  # with its ending, or without it by a script
    assert [file.name for file in sorted(PICTURES[0].parent.iterdir()) if file.stem not in named] == []


# --- the path of a first call ---


# Of the framework: without the operation itself (`kernels/`), and without JAX. Lower these limits, never raise them.
FUNCTIONS_OF_A_FIRST_CALL, FILES_OF_A_FIRST_CALL = 200, 30

FIRST_CALL = """
import json, pathlib, sys
import jax.numpy as jnp
import ejkernel
from ejkernel.modules import flash_attention

source, seen = str(pathlib.Path(ejkernel.__file__).parent) + "/", set()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(source) and not code.co_name.startswith("<"):
        seen.add((code.co_filename.removeprefix(source), code.co_firstlineno))

x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
sys.setprofile(note)
flash_attention(x, x, x, causal=True)
sys.setprofile(None)
print(json.dumps(sorted(seen)))
"""


@pytest.mark.slow
def test_the_first_call_of_an_operation_passes_few_functions(tmp_path):
    env = {**os.environ, "EJKERNEL_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, capture_output=True, text=True, check=True)
    passed = [(file, line) for file, line in json.loads(done.stdout) if not file.startswith("kernels/")]
    files = {file for file, _ in passed}
    assert {"modules/flash_attention.py", "ops/core/primitive.py", "ops/config/selection.py"} <= files
    assert len(passed) <= FUNCTIONS_OF_A_FIRST_CALL
    assert len(files) <= FILES_OF_A_FIRST_CALL
