# SPDX-License-Identifier: Apache-2.0
"""The state in which every test starts: eight host devices, an empty cache folder, and no remembered configurations."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import sys
import textwrap
import types
from collections import defaultdict

import hypothesis
import jax
import pytest
from tests import forked

# Before any test touches a device: meshes and `pmap` need several, and a CUDA plugin compiles without a GPU.
jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# NumPy's threads wait for each other longer than they work on matrices as small as a search's. This is in time for the
# processes that run tests and for those that tests start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Most of the time of these tests is XLA's, and what it makes of small programs runs once: let it try less, compile each
# in one piece, and write loops as it did before it went through MLIR (an option that newer versions ignore), here and
# in the processes that tests start. Flags that were given come last, so they win.
_QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
os.environ["XLA_FLAGS"] = " ".join((*_QUICK, os.environ.get("XLA_FLAGS", ""))).rstrip()

# An example may be the one that compiles, on a machine that is busy.
hypothesis.settings.register_profile("ejkernel", deadline=None)
hypothesis.settings.load_profile("ejkernel")


pytest_plugins = ["tests.cpu_seconds"]

_FOLDERS = itertools.count()


# Tests of files, processes, types and the command depend little on the version of JAX: CI runs them with one version.
WITHOUT_JAX = (
    "cli",
    "ops/autotuner",
    "ops/config/shared",
    "ops/config/test_hard_spaces.py",
    "ops/config/test_persistent.py",
    "ops/config/test_space.py",
    "ops/config/test_writing.py",
    "ops/test_hostile_files.py",
    "ops/utils/storage",
    "test_structure.py",
    "test_torture.py",
    "typing",
)


def pytest_addoption(parser):
    parser.addoption("--require", choices=["gpu"], help="fail, rather than skip, where this is missing")
    parser.addoption("--whole-spaces", action="store_true", help="lower all configurations of spaces, not a sample")
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the tests, K from 0; see _in_part")


def pytest_configure(config):
    """Have processes that run tests side by side share the memory of a required GPU."""
    if config.getoption("--require") == "gpu":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the tests that depend on JAX, and apply `--part`."""
    here = os.path.dirname(__file__)
    for item in items:
        if not os.path.relpath(item.path, here).startswith(WITHOUT_JAX):
            item.add_marker("jax")
    if part := config.getoption("--part"):
        kept = set(_in_part(items, *map(int, part.split("/"))))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def _in_part(items, part, parts):
    """Yield the tests of one part: one in `parts` cases of the slow tests, and a case of every second other test.

    Parts with an even number have one half of the quick tests, the others the other half. Tests marked `smoke` are in
    every part. The choice is the same in every process and on every machine.
    """
    cases = defaultdict(list)
    for item in items:
        smoke = item.get_closest_marker("smoke") is not None
        if item.get_closest_marker("slow") is not None and not smoke:
            if _hash_of(item.nodeid) % parts == part:
                yield item
        elif smoke or _hash_of(item.nodeid.partition("[")[0]) % 2 == part % 2:
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        same.sort(key=lambda item: _hash_of(item.nodeid))
        yield from same[part % len(same) :: parts]


def _hash_of(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest())


def pytest_collection_finish():
    """Have the collector pass over what is imported, which takes a twentieth of all time else, and come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def fresh_process_state(tmp_path_factory, monkeypatch):
    """Give each test a cache folder, default executor and registry of its own."""
    from ejkernel import ops
    from ejkernel.ops.registry import clear_invocations

    names = (
        "EJKERNEL_AUTOTUNE",
        "EJKERNEL_BATCHES",
        "EJKERNEL_CACHE_LAYERS",
        "EJKERNEL_ON_MISS",
        "EJKERNEL_NOTE_MISSES",
        "EJKERNEL_OPS_RECORD",
        "EJKERNEL_OPS_STAMP",
        "EJKERNEL_STALE",
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    # `mktemp` lists all folders of earlier tests to find a free name, and there are thousands.
    folder = tmp_path_factory.getbasetemp() / f"cache-{next(_FOLDERS)}"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
    # what a test writes need not survive the end of the machine, and waiting for the disk takes most of many a test
    monkeypatch.setattr("ejkernel.ops.config._writing._sync", lambda *_: None)
    ops.set_default_executor(None)
    clear_invocations()
    yield
    ops.set_default_executor(None)
    clear_invocations()


@pytest.fixture(scope="session", autouse=True)
def no_server_left():
    """End the process that runs programs in forks before the results of coverage are combined."""
    yield
    forked.stop()


@pytest.fixture
def collect():
    """`gc.collect`, which passes over all that came before the test: looking through that takes a second."""
    gc.freeze()
    return gc.collect


@pytest.fixture
def page(monkeypatch):
    """A module to run examples in; `page(source, name=value, ...)` returns it."""
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)

    def run(source, **names):
        vars(module).update(names)
        exec(compile(textwrap.dedent(source), "<page>", "exec"), vars(module))
        return module

    return run


@pytest.fixture
def gpu(request):
    """A GPU. Absent: skip; under --require=gpu: fail, so that a GPU run cannot pass by skipping."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        outcome = pytest.fail if request.config.getoption("--require") == "gpu" else pytest.skip
        return outcome(f"needs a GPU: {error}")


@pytest.fixture
def chain():
    """A chain that has only memory of its own."""
    from ejkernel.ops import ConfigSelectorChain

    return ConfigSelectorChain()


@pytest.fixture
def executor(chain):
    from ejkernel.ops import Executor

    return Executor(chain)
