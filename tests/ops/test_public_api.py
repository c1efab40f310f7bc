# SPDX-License-Identifier: Apache-2.0
"""Public names, their modules, and the side effects of importing them."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import types
from importlib import metadata

import pytest

import ejkernel
from ejkernel import modules, ops

DOCUMENTED = [
    "AgreementError",
    "AgreementWarning",
    "ArgumentError",
    "ArgumentWarning",
    "AutotuneData",
    "AutotunePolicy",
    "Autotuner",
    "AutotuningResult",
    "BwdParams",
    "CacheWarning",
    "CallError",
    "CallPart",
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
    "ConfigurationDigest",
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
    "Implementations",
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
    "RayExecutor",
    "Resolution",
    "RoundsFinished",
    "SearchFinished",
    "SearchStarted",
    "SerializationError",
    "SettingsWarning",
    "ShardingRule",
    "ShardingWarning",
    "StalePolicy",
    "TuningError",
    "TuningWarning",
    "UnstableKeyError",
    "UnstableKeyWarning",
    "UnsupportedError",
    "WorkerRestarted",
    "autotune",
    "autotune_kernel",
    "autotune_lowered",
    "autotune_recorded",
    "benchmark",
    "bucketed",
    "check_kernel",
    "configuration_digest",
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


def test_public_names_are_the_documented_ones():
    assert [name for name in dir(ops) if not name.startswith("__")] == DOCUMENTED
    assert sorted(ops.__all__) == DOCUMENTED
    assert all(hasattr(ops, name) for name in DOCUMENTED)


def test_a_star_import_brings_all_public_names_and_nothing_else():
    found = {}
    exec("from ejkernel.ops import *", found)
    assert sorted(found.keys() - {"__builtins__"}) == DOCUMENTED


def test_a_star_import_of_the_modules_brings_functions_and_no_modules():
    found = {}
    exec("from ejkernel.modules import *", found)
    assert {"flash_attention", "rms_norm", "FlashAttentionConfig"} <= found.keys()
    assert [name for name, value in found.items() if isinstance(value, types.ModuleType)] == []


def test_type_checkers_can_read_the_names_of_the_modules():
    listed = [node.value for node in ast.parse(inspect.getsource(modules)).body if isinstance(node, ast.Assign)]
    assert [ast.literal_eval(value) for value in listed] == [modules.__all__]  # they do not run a comprehension
    public = {name for name, value in vars(modules).items() if not isinstance(value, types.ModuleType)}
    assert modules.__all__ == sorted(name for name in public if not name.startswith("_"))


def test_the_version_is_that_of_the_distribution():
    assert ejkernel.__version__ == metadata.version("ejkernel-ops")
    with pytest.raises(AttributeError, match="module 'ejkernel' has no attribute 'nothing'"):
        _ = ejkernel.nothing


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


PROBE = """
import json, os, sys
before = dict(os.environ)
import ejkernel.ops
found = {"environment": before == dict(os.environ), "modules": [*sys.modules]}
import jax
jax.config.update("jax_num_cpu_devices", 3)  # an error if there are devices already
found["devices"] = jax.device_count("cpu")
ejkernel.ops.default_executor()
found["folder"] = os.path.exists(os.environ["EJKERNEL_CACHE_DIR"])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return the report of a fresh process about `import ejkernel.ops`: modules, devices, environment and folder."""
    environment = os.environ | {"EJKERNEL_CACHE_DIR": str(tmp_path_factory.mktemp("import") / "cache")}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_import_does_not_change_the_environment(imported):
    assert imported["environment"]


@pytest.mark.slow
def test_import_initialises_no_device(imported):
    assert imported["devices"] == 3


@pytest.mark.slow
def test_import_makes_no_folder(imported):
    assert not imported["folder"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        *["jax.experimental.pallas", "rich", "click", "ray", "jaxtyping", "ejkernel.modules", "ejkernel.cli"],
        *["ejkernel.ops.autotuner", "ejkernel.testing", "ejkernel.ops.execution.offline"],
    ],
)
def test_import_does_not_load(imported, module):
    assert module not in imported["modules"]
