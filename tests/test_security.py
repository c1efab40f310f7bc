# SPDX-License-Identifier: Apache-2.0
"""The claims of SECURITY.md, point by point: permitted and forbidden effects of texts, files and the environment.

`hostile.FIRED` lists code that ran and must not have.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import inspect
import json
import os
import pickle
import random
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from tests.hostile import (
    FIRED,
    HERE,
    HOSTILE,
    NAMES,
    TYPES,
    Config,
    Level,
    Mode,
    Nested,
    Options,
    Takes,
    by_default,
    called_with,
    fire,
    label_of,
    lazy,
    swish,
    takes,
    wrapped,
)

import ejkernel
from ejkernel.cli.files import calls_in_bundle, calls_in_file, missed_calls
from ejkernel.cli.shapes import calls_of_shapes
from ejkernel.cli.sources import Source
from ejkernel.ops import (
    AgreementError,
    AutotuningResult,
    CacheWarning,
    ConfigError,
    ConfigKey,
    ConfigSelectorChain,
    DescriptionError,
    Entry,
    Invocation,
    Kernel,
    OfflineWarning,
    PersistentCache,
    Resolution,
    nameable,
)
from ejkernel.ops.autotuner.compile import bundles
from ejkernel.ops.autotuner.compile.bundles import compile_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.store import log
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials import result
from ejkernel.ops.autotuner.trials.candidates import CodeFile, Program
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config import entries, estimates
from ejkernel.ops.config.agreement import agreement
from ejkernel.ops.config.misses.notes import MissedNotes
from ejkernel.ops.config.shared import packs, stores
from ejkernel.ops.config.shared.layer import SharedLayer
from ejkernel.ops.config.shared.stores import Store
from ejkernel.ops.core.declared_names import decode_config, names_of
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.errors import ArgumentError, CandidateError
from ejkernel.ops.execution.discovery import calls_in_text
from ejkernel.ops.utils.storage.serialize import digest_of
from ejkernel.ops.utils.values.nameable import Names
from ejkernel.ops.utils.values.payloads import text_of_bytecode
from ejkernel.ops.utils.values.signature import JAX_MODULES, describe, key_of
from ejkernel.settings import Settings

SOURCE = Path(ejkernel.__file__).parent
DOCUMENT = (Path(__file__).parents[1] / "SECURITY.md").read_text(encoding="utf-8")
X = jax.ShapeDtypeStruct((4,), jnp.float32)


def test_the_document_names_existing_tests():
    """Every point about a forbidden effect names a test."""
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    assert named <= set(globals())
    points = [point for point in re.findall(r"^- .*$", DOCUMENT, re.M) if "`test_" not in point]
    assert len(points) == 2  # running a bundle's programs, and keeping recorded values in memory, have no test


@pytest.fixture(autouse=True)
def nothing_fired():
    FIRED.clear()
    yield
    assert FIRED == []


@pytest.fixture
def modules(monkeypatch):
    """Lazy modules that react to any attribute access, and the set of loaded modules."""
    spec = importlib.util.find_spec("antigravity")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    waiting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(waiting)
    monkeypatch.setitem(sys.modules, "lazy_by_loader", waiting)
    monkeypatch.setitem(sys.modules, "lazy_by_getattr", lazy)
    decode_config({"rows": 1}, f"{HERE}.Config")  # reading itself imports these at its first use
    names_of(takes).find("")
    codecs.lookup("utf-8-sig"), codecs.lookup("ascii")
    before = set(sys.modules)
    yield
    assert set(sys.modules) == before
    assert object.__getattribute__(waiting, "__class__") is not types.ModuleType  # it was not loaded


# --- program texts, exported programs, notes ---


@pytest.mark.slow
def test_a_description_names_only_registered_objects(modules):
    names = names_of(takes)
    for number, data in enumerate(HOSTILE):
        places = list(wrapped(data))
        with pytest.raises(DescriptionError):
            rebuild(called_with(data))
        with pytest.raises(DescriptionError):
            rebuild(called_with(mode=places[number % len(places)]))
    assert names.find("os.system") is None


@pytest.mark.slow
@pytest.mark.parametrize("form", ["stablehlo", "hlo", "exported"])
def test_a_text_runs_and_imports_nothing(modules, form):
    descriptions = {label_of(called_with(data)): called_with(data) for data in HOSTILE}
    payloads = {label: json.dumps(data, sort_keys=True) for label, data in descriptions.items()}
    if form == "hlo":
        text = "\n".join(f"{label}={payload}" for label, payload in payloads.items())
    elif form == "stablehlo":
        quoted = {label: payload.replace("\\", "\\\\").replace('"', "\\22") for label, payload in payloads.items()}
        text = "\n".join(f'"{label}" = "{payload}"' for label, payload in quoted.items())
    else:
        compact = [json.dumps(data, sort_keys=True, separators=(",", ":")) for data in descriptions.values()]
        text = text_of_bytecode(b"ML\xefR" + "\0".join([*payloads, *compact, ""]).encode())
    program = calls_in_text(text)
    assert program.calls == ()
    assert len(program.refused) == len(descriptions)


def test_a_note_runs_and_imports_nothing(modules, tmp_path):
    notes = MissedNotes(tmp_path)
    inv = Invocation(kernel=takes, args=(X,))
    some = HOSTILE[:: len(HOSTILE) // 20]
    for data in some:
        description = called_with(data)
        inv.__dict__.update(description=description, call_key=key_of(description))
        notes.put(inv, "heuristic")
    with pytest.warns(OfflineWarning, match="takes"):
        found = missed_calls(tmp_path)
    assert found.calls == ()
    assert f"{len(some)} not usable here" in found.counts


def test_a_file_of_shapes_names_kernels_and_gives_them_plain_values(modules, tmp_path):
    file = tmp_path / "shapes.jsonl"
    for name in NAMES:
        file.write_text(json.dumps({"kernel": name, "args": []}))
        with pytest.raises(ArgumentError, match="line 1: there is no kernel"):
            calls_of_shapes(file)
    for data in HOSTILE[:: len(HOSTILE) // 20]:
        file.write_text(json.dumps({"kernel": "takes", "args": ["f32[4]", data]}))
        (inv,) = calls_of_shapes(file).calls
        assert inv.args[1] == data


def test_a_partial_is_made_and_not_called():
    data = {"partial": {"name": "jax.numpy.tanh"}, "args": [], "kwargs": {"map": []}}
    function = rebuild(called_with(data)).args[1]
    assert isinstance(function, functools.partial)
    assert function.func is jnp.tanh


def test_objects_declared_by_the_kernel_may_be_named():
    options = {"dataclass": f"{HERE}.Options", "fields": {"scale": describe(1.0), "nested": nested()}}
    inv = rebuild(called_with(options=options, mode={"enum": f"{HERE}.Mode", "name": "SAFE"}))
    assert inv.kwargs["options"] == Options(1.0, Nested(Level.LOW))
    assert inv.kwargs["mode"] is Mode.SAFE
    assert rebuild(called_with({"name": f"{HERE}.by_default"})).args[1] is by_default


def nested():
    return {
        "dataclass": f"{HERE}.Nested",
        "fields": {"level": {"enum": f"{HERE}.Level", "name": "LOW"}},
    }


def test_objects_marked_nameable_may_be_named():
    assert rebuild(called_with({"name": f"{HERE}.swish"})).args[1] is swish


def test_a_rebound_name_finds_nothing(monkeypatch):
    """It finds neither the current, unregistered object, nor the registered one, which lost its name."""
    monkeypatch.setattr(sys.modules[HERE], "swish", fire)
    with pytest.raises(DescriptionError):
        rebuild(called_with({"name": f"{HERE}.swish"}))


def test_jaxs_functions_that_may_be_named_touch_nothing_but_their_arguments():
    """This includes newer JAX versions: file access, callbacks and settings show in the code or in the parameters."""
    touches = re.compile(
        r"\bopen\(|(io|pure|debug)_callback\(|debug\.|\.tofile|\bsave\w*\(|np\.load|print\(|config\.update|\bexec\("
    )
    named = {"file", "fname", "filename", "path", "buffer"}
    names = Names()
    seen = 0
    for path in JAX_MODULES:
        for name, value in vars(sys.modules[path]).items():
            found = names.find(f"{path}.{name}")
            if found is None or isinstance(value, types.ModuleType):
                continue
            seen += 1
            assert found is value
            assert not isinstance(found, type)
            source = source_of(inspect.unwrap(found))
            assert not touches.search(source), f"{path}.{name}"
            assert not named & set(parameters_of(found)), f"{path}.{name}"
    assert seen > 400


def source_of(function):
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return re.sub(r'""".*?"""', "", source, flags=re.DOTALL)


def parameters_of(function):
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def test_a_kernel_sees_arguments_of_a_text_that_prepare_did_not():
    seen = []

    class Prepared(Takes):
        def prepare(self, *args, **kwargs):
            return fire()

        def run(self, x, word="", *, cfg):
            seen.append(word)
            return x * 2

    kernel = Prepared("prepared")
    description = called_with("unheard of") | {"op": "prepared.bwd@v0", "steps": [["vjp", [True]]]}
    assert rebuild(description).kernel is kernel
    assert seen == ["unheard of"]


def test_large_and_deep_descriptions_are_refused_soon():
    equal_hashes = [n * (2**61 - 1) for n in range(5000)]
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    for data in (
        {"set": equal_hashes},
        {"map": [[n, 1] for n in equal_hashes]},
        deep,
        [0] * 20_000,
        {"array": ["float32", [10**4000]]},
        {"name": "a" * 1_000_000},
    ):
        with pytest.raises(DescriptionError) as caught:
            rebuild(called_with(data))
        assert len(str(caught.value)) < 1000
    with pytest.raises(DescriptionError):
        rebuild(called_with() | {"steps": [["vmap", 10**4000, [0]]]})


@pytest.mark.slow
def test_a_text_of_labels_that_carry_nonsense_is_read_in_time():
    """A megabyte may follow every label; only so many are looked at."""
    text = "\n".join(f"ejkernel_ops#takes@v0:{n:016x}={{" + '"a":' for n in range(20_000))
    assert calls_in_text(text).calls == ()


@pytest.mark.slow
def test_an_exported_program_is_searched_and_not_parsed(tmp_path, monkeypatch):
    """Types that a user registered for serialisation would otherwise read parts of it, with `pickle` if they like."""

    @dataclasses.dataclass
    class State:
        x: Any

    def unpickled(data):
        FIRED.append("deserialize_auxdata")
        return pickle.loads(data)

    jax.tree_util.register_pytree_node(State, lambda s: ((s.x,), "aux"), lambda aux, children: State(*children))
    export.register_pytree_node_serialization(
        State, serialized_name="tests.State", serialize_auxdata=pickle.dumps, deserialize_auxdata=unpickled
    )
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")
    data = export.export(jax.jit(lambda state: takes(state.x)))(State(X)).serialize()
    file = tmp_path / "program.bin"
    file.write_bytes(data)
    (inv,) = calls_in_file(file).calls
    assert inv.op_id == "takes"
    bits = random.Random(0)
    for _ in range(200):
        broken = bytearray(data)
        for _ in range(bits.choice([1, 8])):
            broken[bits.randrange(len(broken))] = bits.randrange(256)
        with contextlib.suppress(ValueError):
            calls_in_text(text_of_bytecode(bytes(broken)))
    with pytest.raises(ValueError, match="no MLIR bytecode"):
        text_of_bytecode(b"\0nothing")


def test_a_file_is_read_without_the_working_directory(tmp_path, monkeypatch):
    """`import` searches the working directory only if the user named modules."""
    file = tmp_path / "program:step.mlir"
    file.write_text("")
    monkeypatch.chdir(tmp_path)
    for target, imports, looks in (
        (str(file), (), False),
        ("", (), False),
        (str(file), ("my_kernels",), True),
        ("my_program:step", (), True),
    ):
        monkeypatch.setattr(sys, "path", ["elsewhere"])
        assert Source.of(target, imports).names_modules is looks
        assert (sys.path != ["elsewhere"]) is looks


# Modules that Python, `multiprocessing` and JAX import; each leaves a mark when it runs.
TAKEN = ("multiprocessing", "threading", "functools", "json", "logging", "socket", "selectors", "numpy", "jax")
COMMAND = """
import sys
from ejkernel.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
TRAIN = """
import jax, jax.numpy as jnp
from ejkernel.ops import tune

@tune(space={"rows": [1, 2]})
def kernel(x, *, rows=1):
    return x * 2

def step():
    return kernel, (jax.ShapeDtypeStruct((8,), jnp.float32),)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["program.mlir", "train:step"])
def test_no_process_runs_a_file_that_only_has_a_module_s_name(tmp_path, target):
    """Neither the command, nor its workers, nor their processes that compile, nor Python's own helper."""
    folder, command = tmp_path / "here", tmp_path / "bin" / "command.py"
    folder.mkdir()
    for name in TAKEN:
        (folder / f"{name}.py").write_text(f"open(r'{tmp_path}/mark-{name}', 'w').close()")
    command.parent.mkdir()
    command.write_text(COMMAND)
    (folder / "train.py").write_text(TRAIN)
    (folder / "program.mlir").write_text("module @jit_f {\n}\n")
    env = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SOURCE.parent)}
    arguments = ["--compile-processes", "1"] if ":" in target else ["--dry-run"]
    command_line = [sys.executable, str(command), "tune", target, "--cache", str(tmp_path / "cache"), *arguments]
    done = subprocess.run(command_line, cwd=folder, env=env, check=False, capture_output=True, text=True)
    assert [file.name for file in tmp_path.glob("mark-*")] == []
    assert (done.returncode, "Traceback" in done.stderr) == (0 if ":" in target else 1, False), done.stderr
    assert len(list((tmp_path / "cache").rglob("*.json"))) == (":" in target)


def test_a_file_can_ask_for_an_existing_implementation_only():
    from ejkernel.modules import FlashAttention

    for name in ("common", "reference", "..", "os", "xla.jax", f"..{HERE}"):
        with pytest.raises(ValueError, match="implementation must be one of"):
            _ = FlashAttention.implementations[name]


# --- entries, logs, results: configurations ---


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TYPES, *NAMES])
def test_a_configuration_has_a_registered_type(modules, name):
    with pytest.raises(ConfigError, match="files may name here"):
        decode_config({"rows": 1}, name)


def made(name):
    """Return a new dataclass of this module."""
    return dataclasses.dataclass(type(name, (), {"__module__": HERE, "__annotations__": {"rows": int}}))


def test_types_that_files_may_name():
    """Types that kernel classes name, marked types, and types that this process stored."""
    assert decode_config({"rows": 3}, f"{HERE}.Config") == Config(3)

    stored = made("Stored")
    with pytest.raises(ConfigError):
        decode_config({"rows": 1}, f"{HERE}.Stored")
    AutotuningResult("cpu", (Entry("a@v0", "0" * 16, stored(1)),)).dumps()
    assert decode_config({"rows": 1}, f"{HERE}.Stored") == stored(1)

    marked = nameable(made("Marked"))
    assert decode_config({"rows": 1}, f"{HERE}.Marked") == marked(1)


KEY = ConfigKey("cpu", "takes@v0", "0" * 16)


def test_an_entry_of_an_unregistered_type_is_a_miss_with_a_warning(tmp_path, monkeypatch):
    cache = PersistentCache(tmp_path, shipped=False)
    monkeypatch.setattr(entries, "type_name", lambda config: f"{HERE}.Fires")
    cache.put(KEY, Config(2))
    with pytest.warns(CacheWarning, match="files may name here"):
        assert cache.get(KEY) is None
    assert cache.get(KEY, Config) == Config(2)


def test_a_link_in_a_cache_leads_nowhere(tmp_path):
    """`tests/ops/config/test_locks.py` and `tests/cli/test_cache.py` have each kind of link."""
    there, here = (PersistentCache(tmp_path / name, shipped=False) for name in ("there", "here"))
    there.put(KEY, Config(1))
    here.path.mkdir()
    (here.path / "cpu").symlink_to(there.path / "cpu")
    with pytest.warns(CacheWarning, match="this folder is a link"):
        assert here.get(KEY, Config) is None
    with pytest.warns(CacheWarning, match="this folder is a link"):
        here.put(KEY, Config(2))
    assert there.get(KEY, Config) == Config(1)


@pytest.mark.parametrize("url", ["reference://team", "zip://team", "reference://::s3://team/refs.json"])
def test_a_url_has_one_of_a_few_protocols(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)  # nothing of it is imported
    with pytest.raises(ConfigError, match="allowed are file, "):
        Store(url).sizes()


class Bucket:
    """Imitates fsspec's view of a place with a hostile writer."""

    protocol = "bucket"

    def __init__(self, **objects):
        self.objects = objects
        self.read = []

    def invalidate_cache(self):
        pass

    def ls(self, root, detail):
        return [{"name": f"{root}/{name}", "size": size, "type": "file"} for name, size in self.objects.items()]

    def cat_file(self, path, start, end):
        self.read.append(path)
        return b"x" * (end - start)


def layer_over(tmp_path, bucket):
    def connect(url):
        store = Store(url)
        store._system = lambda: (bucket, "root")
        return store

    return SharedLayer("bucket://team", tmp_path, connect=connect)


def test_names_in_a_shared_place_name_no_files(tmp_path):
    names = ("../../evil.pack", "/etc/passwd", ".layers", "0.pack", f"{'0' * 32}.pack\n", "..", f"{'0' * 32}.json")
    bucket = Bucket(**dict.fromkeys(names, 10))
    assert layer_over(tmp_path, bucket).refresh() == 0
    assert (bucket.read, list(tmp_path.rglob("*"))) == ([], [])


def test_downloads_from_a_shared_place_are_bounded_and_must_match_their_digest(tmp_path):
    small, large = (f"{digit * 32}.pack" for digit in "0f")
    bucket = Bucket(**{small: 10, large: packs.LARGEST + 1})
    layer = layer_over(tmp_path, bucket)
    assert layer.refresh() == 0
    assert (bucket.read, list(tmp_path.rglob("*.pack"))) == ([f"root/{small}"], [])
    assert "2 packs of entries cannot be used" in layer.problem
    many = Bucket(**{f"{number:032x}.pack": 1 for number in range(stores.MOST + 1)})
    with pytest.raises(stores.UnreachableError, match="more than 10000 packs"):
        layer_over(tmp_path, many).refresh()


def test_an_entry_of_a_shared_cache_is_read_as_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(entries, "type_name", lambda config: f"{HERE}.Fires")
    entry = entries.new_entry(KEY, Config(2), None, None, datetime.datetime.now(datetime.UTC))
    cache = PersistentCache(tmp_path, layers=["bucket://team"], shipped=False)
    for name, raw in packs.packed([packs.line_of(entry)]):
        cache.shared[0].copy.add(name, raw)
    with pytest.warns(CacheWarning, match="files may name here"):
        assert cache.get(KEY) is None
    assert cache.get(KEY, Config) == Config(2)


def test_a_url_is_shown_without_its_secrets(tmp_path):
    url = "s3://id:secret@team/x?signature=secret"
    cache = PersistentCache(tmp_path, layers=[url])
    assert "secret" not in f"{cache!r} {cache.shared[0]} {Store(url)!r} {cache.shared[0].copy.folder}"


def test_writers_of_the_folder_choose_the_configuration(tmp_path):
    """Among those that the kernel's type accepts."""
    inv = Invocation(kernel=takes, args=(X,))
    cache = PersistentCache(tmp_path, shipped=False)
    cache.put(inv.key, Config(10**9))
    assert ConfigSelectorChain(persistent=cache).resolve(inv, takes).config == Config(10**9)
    cache.put(inv.key, {"rows": "os.system"})
    with pytest.warns(CacheWarning, match="expected int"):
        assert ConfigSelectorChain(persistent=cache).resolve(inv, takes).source == "heuristic"


def test_a_result_of_an_unregistered_type_is_an_error(monkeypatch):
    monkeypatch.setattr(result, "type_name", lambda config: f"{HERE}.Fires")
    text = AutotuningResult("cpu", (Entry(KEY.op, KEY.call, Config(2)),)).dumps()
    with pytest.raises(ConfigError, match="files may name here"):
        AutotuningResult.loads(text)


def test_a_decision_has_a_registered_type(monkeypatch):
    class Untyped(Kernel):
        def run(self, x, *, cfg):
            return x

        def heuristic_cfg(self, inv):
            return Config(1)

    monkeypatch.setattr(agreement, "type_name", lambda config: f"{HERE}.Fires")
    inv = Invocation(kernel=Untyped(), args=(X,))
    decision = agreement.decision_of(1, inv, Resolution(Config(2), "memory", inv.key))
    with pytest.raises(
        AgreementError, match=r"process 1 decided for all processes cannot be used .*files may name here"
    ):
        agreement.decoded("untyped", decision, inv)


def test_an_estimate_has_a_registered_type(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "type_name", lambda config: f"{HERE}.Fires")
    inv = dataclasses.replace(Invocation(kernel=takes, args=(X,)).abstract(), device="tpu:tpu_v6_lite")
    rows = [estimates.row_of(Config(2), us=1.0), estimates.row_of(Config(1), us=9.0, is_heuristic=True)]
    estimates.EstimateFiles(tmp_path).put(estimates.Estimates.of(inv, "by hand", rows))
    asked = ConfigSelectorChain(persistent=PersistentCache(tmp_path)).consult(inv, takes)
    notes = {each.tier: each.note for each in asked}
    assert re.match(r"the estimated configuration cannot be read: .*files may name here", notes["estimated"])


def test_a_log_of_an_unregistered_type_is_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "type_name", lambda config: f"{HERE}.Fires")
    store = MeasurementStore(tmp_path)
    store.save(Autotuner(rounds=1, warmup=1).tune(Invocation(kernel=takes, args=(jnp.ones(4),)), takes))
    (search,) = store.searches()
    assert search.record().times == ()


# --- bundles ---


def test_reading_a_bundle_runs_none_of_it(tmp_path, monkeypatch):
    """Its programs are loaded, and run, when they are measured."""
    monkeypatch.setattr(Program, "load", fire)
    folder = tmp_path / "bundle"
    compile_bundle([Invocation(kernel=takes, args=(X,))], Target.named("here"), folder)
    assert len(calls_in_bundle(folder).calls) == 1


def test_a_linked_program_is_not_read(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"code")
    (tmp_path / "000-0000.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CandidateError, match="not a regular file but a link"):
        CodeFile(tmp_path / "000-0000.bin", digest_of(b"code")).read()


def test_a_bundle_of_unregistered_types_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "type_name", lambda config: f"{HERE}.Fires")
    with pytest.raises(ConfigError, match=r"needs the module of .*files may name here"):  # it reads its own output
        compile_bundle([Invocation(kernel=takes, args=(X,))], Target.named("here"), tmp_path / "bundle")


# --- the environment, the command, the workers ---


@pytest.mark.parametrize("value", ["os.system", f"{HERE}.fire", "__import__('os')", "$(true)", "/etc/passwd", "\0"])
def test_a_variable_chooses_among_words_or_names_a_folder(value):
    fields = {
        "EJKERNEL_ON_MISS": "on_miss",
        "EJKERNEL_AUTOTUNE": "on_miss",
        "EJKERNEL_NOTE_MISSES": "note_misses",
        "EJKERNEL_OPS_STAMP": "stamp",
        "EJKERNEL_STALE": "stale",
    }
    for name, field in fields.items():
        with pytest.raises(ConfigError, match=name):
            getattr(Settings({name: value}), field)
    assert isinstance(Settings({"EJKERNEL_CACHE_DIR": value}).cache_dir, Path)


def calls_by_name():
    """Yield each module, and the functions that it calls by name."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield str(file.relative_to(SOURCE)), ast.unparse(node.func)


@pytest.mark.slow
def test_only_these_places_turn_names_or_bytes_into_code():
    dangerous = re.compile(
        r"(?:^|\.)(?:eval|exec|compile_command|__import__|import_module|run_path|run_module|loads|CDLL|deserialize"
        r"|deserialize_and_load|system|Popen)$"
    )
    found = {(file, call) for file, call in calls_by_name() if dangerous.search(call)}
    assert found == {
        ("cli/sources.py", "importlib.import_module"),  # our modules only
        ("cli/programs.py", "importlib.import_module"),  # our own modules, and those that the user named
        ("compat/executables.py", "deserialize_and_load"),  # a bundle's programs, and of our own compiler processes
        ("testing/forms.py", "jax.export.deserialize"),  # what it has just written itself
        ("testing/forms.py", "pickle.loads"),  # the same
        ("ops/utils/services.py", "importlib.import_module"),  # one of our own modules, by a fixed name
        ("ops/autotuner/process/lifetime.py", "ctypes.CDLL"),  # the C library that this process has
        ("ops/__init__.py", "importlib.import_module"),  # our own modules
        ("ops/autotuner/process/messages.py", "pickle.loads"),  # between a process and its own child, or an executor's
        ("ops/implementation.py", "importlib.import_module"),  # what an operation lists
        ("ops/utils/values/nameable.py", "importlib.import_module"),  # of a fixed list
        ("ops/utils/values/signature.py", "importlib.import_module"),  # of a fixed list
    } | {call for call in found if call[1] == "json.loads"}


def test_loaded_modules_are_not_searched_by_a_files_names():
    users = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if "sys.modules" in file.read_text("utf-8")}
    assert users == {
        "cli/app.py",  # whether our errors module was imported yet
        "ops/utils/error_text.py",  # whether two modules of ours export a class, for an example in a message
        "ops/core/hooks.py",  # where an instance is kept, to be pickled by name
        "ops/utils/values/scalars.py",  # where annotations of registered classes are to be resolved
        "ops/utils/values/signature.py",  # whether a value has the name that it says it has
    }


def test_only_readable_values_are_described():
    """The two directions speak of the same names."""
    for value in (swish, by_default, Mode.SAFE, Options(2.0, Nested()), jnp.tanh, jax.lax.Precision.HIGHEST):
        description = called_with(describe(value))
        assert rebuild(description).description == description
