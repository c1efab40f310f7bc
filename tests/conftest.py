# SPDX-License-Identifier: Apache-2.0
"""The initial state of every test: eight host devices, an empty cache folder, and no remembered configurations."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import os
import re
import signal
import sys
import textwrap
import types

import hypothesis
import jax
import pytest
from jax._src import traceback_util
from tests import forked, quick

# Before any test touches a device: meshes and `pmap` need several, and a CUDA plugin compiles without a GPU.
jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.pop("COLUMNS", None)  # pytest's workers have it, and output to a pipe has no width without it
quick.start()
# JAX asks the file system about each frame of an error's traceback, for each prefix of paths that it hides.
traceback_util._path_starts_with = functools.cache(traceback_util._path_starts_with)
# Background jobs of a shell ignore SIGINT, programs under `nohup` ignore SIGHUP, and child processes inherit that.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)

# No deadline: an example may have to compile a program, on a busy machine.
hypothesis.settings.register_profile("sample", deadline=None, max_examples=20)
hypothesis.settings.register_profile("whole", deadline=None)


pytest_plugins = ["tests.cpu_seconds", "tests.selection"]

_FOLDERS = itertools.count()
_ALL_SLOW = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)


# Tests of files, processes, types and the command depend little on JAX's version, so CI runs them with one version.
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
    parser.addoption("--require", choices=["gpu"], help="fail instead of skipping tests if this is missing")


def pytest_configure(config):
    """Choose the number of examples and JAX's compilation cache, and share the memory of a required GPU."""
    if not getattr(config.option, "numprocesses", None):  # in a process that collects tests, until it has them all
        gc.disable()
    hypothesis.settings.load_profile("whole" if config.getoption("--whole") else "sample")
    if config.getoption("--require") == "gpu":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if config.getoption("markexpr") == "not slow" and hasattr(config, "cache"):
        # Each run of the quick tests compiles the same small programs, in a quarter of its time: keep them in
        # `.pytest_cache`.
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    elif jax.config.jax_compilation_cache_dir is None:
        # JAX computes the key of each program, a tenth of the time to compile a small one, even if it has no cache.
        jax.config.update("jax_enable_compilation_cache", False)


def pytest_ignore_collect(collection_path, config):
    """Skip a file whose tests are all deselected, because importing it takes time."""
    expression = config.getoption("markexpr")
    if collection_path.suffix != ".py" or expression not in {"not slow", "jax or smoke"}:
        return None
    text = collection_path.read_text(encoding="utf-8")
    if expression == "not slow":
        return True if _ALL_SLOW.search(text) else None
    return True if not _depends_on_jax(collection_path) and "mark.smoke" not in text else None


def _depends_on_jax(path):
    return not os.path.relpath(path, os.path.dirname(__file__)).startswith(WITHOUT_JAX)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, obj):
    """Skip a slow test if these are deselected, because creating its cases takes time."""
    marks = getattr(obj, "pytestmark", ()) if inspect.isfunction(obj) else ()
    is_slow = any(mark.name == "slow" for mark in marks)
    return [] if is_slow and collector.config.getoption("markexpr") == "not slow" else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Have every second worker import the files in reverse, so that each compiles half of them."""
    report = yield
    if isinstance(collector, pytest.Dir) and os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Restore the order of the files, and mark the tests that depend on JAX."""
    items.sort(key=lambda item: item.path)
    for item in items:
        if _depends_on_jax(item.path):
            item.add_marker("jax")


def pytest_collection_finish():
    """Collect garbage less often, without imported objects: otherwise it takes 5 % of the time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def fresh_process_state(tmp_path_factory, monkeypatch):
    """Give each test its own cache folder, default executor and registry."""
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
    # The first save creates the folder. Creating and removing one for each test would take seconds.
    folder = tmp_path_factory.getbasetemp() / f"cache-{next(_FOLDERS)}"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
    # Files of tests need not survive a power failure, and waiting for the disk would dominate many tests.
    monkeypatch.setattr("ejkernel.ops.config._writing._sync", lambda *_: None)
    monkeypatch.setattr("ejkernel.ops.config._writing._new_folder", lambda: tmp_path_factory.mktemp("rescue"))
    ops.set_default_executor(None)
    clear_invocations()
    yield
    ops.set_default_executor(None)
    clear_invocations()


@pytest.fixture(scope="session", autouse=True)
def no_server_left():
    """End the process of `tests.forked` before the results of coverage are combined."""
    yield
    forked.stop()


@pytest.fixture
def collect():
    """`gc.collect` for objects created in the test; collecting the older ones takes a second."""
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
    """A GPU. Without one the test is skipped; with --require=gpu it fails, so that no GPU run passes by skipping."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        outcome = pytest.fail if request.config.getoption("--require") == "gpu" else pytest.skip
        return outcome(f"needs a GPU: {error}")


@pytest.fixture
def chain():
    """A chain with only its own memory tier."""
    from ejkernel.ops import ConfigSelectorChain

    return ConfigSelectorChain()


@pytest.fixture
def executor(chain):
    from ejkernel.ops import Executor

    return Executor(chain)
