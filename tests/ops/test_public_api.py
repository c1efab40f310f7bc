# SPDX-License-Identifier: Apache-2.0
"""What is public, where it is found, what importing it does, and the order of the floors that it is built in."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ejkernel
from ejkernel import ops

SOURCE = Path(ejkernel.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

DOCUMENTED = [
    "ArgumentError",
    "AutotuneData",
    "AutotunePolicy",
    "Autotuner",
    "AutotuningResult",
    "BwdParams",
    "CacheWarning",
    "CandidateError",
    "CandidateFinished",
    "Cfg",
    "CheckReport",
    "CheckRow",
    "ConfigCache",
    "ConfigChooser",
    "ConfigError",
    "ConfigKey",
    "ConfigSelectorChain",
    "ConfigSpace",
    "Cost",
    "DescriptionError",
    "DeviceLostError",
    "EjkernelError",
    "EjkernelWarning",
    "Entry",
    "Event",
    "Executor",
    "FwdParams",
    "GradientError",
    "GradientWarning",
    "Implementation",
    "Invocation",
    "Kernel",
    "KernelCheckError",
    "KernelError",
    "KernelWarning",
    "LABEL_RE",
    "LazyImplementation",
    "Measurement",
    "NoConfigError",
    "NoParams",
    "OfflineWarning",
    "Operation",
    "OperationCall",
    "OperationConfig",
    "Out",
    "Outcome",
    "PersistentCache",
    "Resolution",
    "SearchFinished",
    "SearchStarted",
    "SerializationError",
    "TuningError",
    "TuningWarning",
    "UnstableKeyError",
    "UnstableKeyWarning",
    "UnsupportedError",
    "WorkerRestarted",
    "autotune",
    "autotune_lowered",
    "autotune_recorded",
    "benchmark",
    "bucketed",
    "check_kernel",
    "default_executor",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "from_json",
    "get_device_platform",
    "get_invocations",
    "label",
    "labels_to_configs",
    "missed",
    "nameable",
    "on_event",
    "overlay_cache",
    "pmap_with_config",
    "policy_override",
    "record_invocation",
    "recording",
    "set_default_executor",
    "sharding_fingerprint",
    "stable_json",
    "to_json",
    "tune",
    "vmap_with_config",
]


def imported_modules(file):
    """Return the modules of this package that `file` imports, at its top level or inside a function."""
    package = ["ejkernel", *file.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def in_a_fresh_process(probe):
    done = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_the_documented_ones():
    public = [
        name
        for name, value in vars(ops).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert sorted(public) == DOCUMENTED


PATHS = {
    "ejkernel.ops.core.kernel": ["Kernel", "Invocation"],
    "ejkernel.ops.core.types": ["Cfg", "Out"],
    "ejkernel.ops.config.cache": ["ConfigCache", "overlay_cache"],
    "ejkernel.ops.config.persistent": ["PersistentCache"],
    "ejkernel.ops.config.selection": ["ConfigSelectorChain", "AutotunePolicy"],
    "ejkernel.ops.execution.executor": ["Executor", "ConfigChooser"],
    "ejkernel.ops.execution.batch": ["vmap_with_config", "pmap_with_config"],
    "ejkernel.ops.execution.offline": ["autotune_lowered"],
    "ejkernel.ops.execution.tuning": [
        "Autotuner",
        "AutotuningResult",
        "Entry",
        "autotune",
        "autotune_recorded",
        "benchmark",
    ],
    "ejkernel.ops.registry": ["get_invocations", "missed", "record_invocation"],
    "ejkernel.ops.utils.fingerprint": ["device_fingerprint", "get_device_platform"],
    "ejkernel.ops.utils.meta": [
        "LABEL_RE",
        "extract_labels_from_hlo_text",
        "find_labels_in_lowered",
        "label",
        "labels_to_configs",
    ],
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names])
def test_a_name_is_found_at_its_documented_path_and_in_ops(path, name):
    assert getattr(importlib.import_module(path), name) is getattr(ops, name)


@pytest.mark.parametrize("path", ["ejkernel.ops.core.kernel", "ejkernel.ops.execution.tuning"])
def test_a_module_has_no_names_but_its_own(path):
    with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'nothing'"):
        _ = importlib.import_module(path).nothing


# --- importing ---


def test_import_leaves_the_environment_alone():
    in_a_fresh_process("import os; before = dict(os.environ); import ejkernel.ops; assert before == dict(os.environ)")


def test_import_initialises_no_device():
    in_a_fresh_process(
        "import ejkernel.ops, jax; jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count('cpu') == 3"
    )


def test_import_makes_no_folder(tmp_path):
    in_a_fresh_process(
        f"import os; os.environ['EJKERNEL_CACHE_DIR'] = '{tmp_path}/cache'; import ejkernel.ops;"
        f"ejkernel.ops.default_executor(); assert not os.path.exists('{tmp_path}/cache')"
    )


@pytest.fixture(scope="module")
def loaded():
    """Names of all modules that are there after `import ejkernel.ops` alone."""
    probe = "import sys, ejkernel.ops; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize(
    "module",
    ["jax.experimental.pallas", "rich", "click", "ray", "jaxtyping", "cattrs", "ejkernel.modules", "ejkernel.cli"],
)
def test_import_does_not_load(loaded, module):
    assert module not in loaded


# --- floors ---

FLOORS = ["utils", "core", "config", "execution"]
ABOVE_OPS = ("ejkernel.modules", "ejkernel.kernels", "ejkernel.cli")


@pytest.mark.parametrize("floor", ["ops", "kernels"])
def test_imports_never_go_up_from(floor):
    above = ABOVE_OPS if floor == "ops" else ("ejkernel.modules", "ejkernel.cli")
    up = [
        (file.name, name)
        for file in FILES
        if file.is_relative_to(SOURCE / floor)
        for name in imported_modules(file)
        if name.startswith(above)
    ]
    assert up == []


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_only_go_down_within_ops_from(floor):
    above = tuple(f"ejkernel.ops.{name}" for name in FLOORS[FLOORS.index(floor) + 1 :])
    up = [
        (file.name, name)
        for file in FILES
        if file.is_relative_to(SOURCE / "ops" / floor)
        for name in imported_modules(file)
        if above and name.startswith(above)
    ]
    assert up == []


# --- files ---


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_is_short_and_names_its_licence(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 500
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"


def files_that_mention(*texts):
    return [
        str(file.relative_to(SOURCE))
        for file in FILES
        if any(text in file.read_text(encoding="utf-8") for text in texts)
    ]


def test_the_environment_is_read_in_one_file():
    assert files_that_mention("os.environ", "getenv", "environb") == ["settings.py"]


def test_private_parts_of_jax_are_used_in_one_package():
    assert {Path(file).parts[0] for file in files_that_mention("jax._src")} == {"compat"}


def test_nothing_is_unpickled_or_evaluated():
    def names(file):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield node.func.id
        yield from imported_modules(file)

    forbidden = {"eval", "exec", "pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert [(file.name, name) for file in FILES for name in names(file) if name in forbidden] == [
        ("forms.py", "pickle"),  # of a kernel that is there already
        ("serve.py", "pickle"),  # between a process and its own child
    ]
