# SPDX-License-Identifier: Apache-2.0
"""Results of tuning: applied, written, read, merged and saved."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tests.ops.sample_kernels import Times
from tests.ops.sealing import with_digest

from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
)
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.errors import CacheWarning, ConfigError, SerializationError
from ejkernel.ops.utils.datacarrier import FwdParams

X = np.ones(4, np.float32)


class Pair(NamedTuple):
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int = 64


def entry(number, cfg):
    return Entry("matmul@v0", f"{number:016x}", cfg)


def result_of(*entries, device="cpu:some"):
    return AutotuningResult(device, entries)


@pytest.fixture
def kernel():
    return Times()


@pytest.fixture
def result(kernel):
    inv = Invocation(kernel=kernel, args=(X,))
    return AutotuningResult(inv.device_fingerprint, (Entry(inv.op_id_v, inv.call_key, 5),))


@pytest.fixture
def run(kernel):
    executor = Executor(ConfigSelectorChain())
    compiled = jax.jit(lambda x: executor(kernel, x))
    return lambda: int(compiled(X)[0])


# --- applying ---


def test_a_result_applies_to_a_compiled_function(result, run):
    before = run()
    with result:
        inside = run()
    assert (before, inside, run()) == (1, 5, 1)


def test_entering_gives_the_result(result):
    with result as entered:
        assert entered is result


def test_a_result_may_be_entered_again_inside_itself(result, run):
    with result:
        with result:
            inner = run()
        assert (inner, run()) == (5, 5)
    assert (run(), current_scope().layers) == (1, ())


def test_the_innermost_result_wins(result, run):
    other = dataclasses.replace(result, entries=(dataclasses.replace(result.entries[0], cfg=7),))
    with result, other:
        assert run() == 7


def test_a_result_of_another_device_changes_nothing(result, run):
    with dataclasses.replace(result, device="gpu:other"):
        assert run() == 1


def test_a_result_ends_with_an_error(result, run):
    with pytest.raises(ZeroDivisionError), result:
        1 / 0  # noqa: B018
    assert run() == 1


def test_a_result_holds_only_in_its_thread(result, run):
    seen = []
    with result:
        thread = threading.Thread(target=lambda: seen.append(run()))
        thread.start()
        thread.join()
    assert seen == [1]


def test_two_threads_may_be_inside_one_result(result, run):
    seen, both = [], threading.Barrier(2, timeout=30)

    def work():
        with result:
            both.wait()
            seen.append(run())
            both.wait()
        seen.append(run())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [1, 1, 5, 5]


def test_an_empty_result_applies(run):
    with result_of():
        assert run() == 1


# --- values ---


def test_results_of_equal_content_are_equal():
    assert result_of(entry(1, {"a": 1})) == result_of(entry(1, {"a": 1}))


def test_searches_are_not_part_of_the_value():
    assert AutotuningResult("cpu:some", (), ("anything",)) == AutotuningResult("cpu:some", ())


@pytest.mark.parametrize(
    "other", [entry(2, 1), entry(1, 2), entry(1, 1.0), entry(1, True), Entry("other@v0", f"{1:016x}", 1)]
)
def test_entries_of_different_content_are_different(other):
    assert entry(1, 1) != other


def test_equal_entries_have_equal_hashes():
    assert hash(entry(1, {"a": 1})) == hash(entry(1, {"a": 1}))


def test_a_result_has_a_length():
    assert len(result_of(entry(1, 1), entry(2, 2))) == 2


def test_entries_may_be_given_as_a_list():
    assert AutotuningResult("cpu:some", [entry(1, 1)]).entries == (entry(1, 1),)


# --- merging ---


def test_the_second_result_wins_where_both_have_an_entry():
    merged = result_of(entry(1, 1), entry(2, 2)) | result_of(entry(2, 20), entry(3, 30))
    assert merged == result_of(entry(1, 1), entry(2, 20), entry(3, 30))


def test_results_of_different_devices_cannot_be_merged():
    with pytest.raises(ConfigError, match="results of different devices cannot be merged: 'cpu:some' and 'gpu:other'"):
        _ = result_of() | result_of(device="gpu:other")


def test_a_result_is_merged_only_with_results():
    with pytest.raises(TypeError):
        _ = result_of() | {}


# --- writing and reading ---


@pytest.mark.parametrize(
    "cfg", [1, 1.5, True, "fast", {"a": [1, 2]}, Tile(8), Pair(1, 2), FwdParams(q_blocksize=8)], ids=repr
)
def test_a_result_survives_a_round_trip(cfg):
    result = result_of(entry(1, cfg))
    again = AutotuningResult.loads(result.dumps())
    assert (again, type(again.entries[0].cfg)) == (result, type(cfg))
    assert str(again).splitlines()[1].split() == ["operation", "call", "configuration"]


def test_the_text_names_the_schema_and_the_type():
    data = json.loads(result_of(entry(1, Tile(8))).dumps())
    assert data["schema"] == 2
    assert list(data)[-1] == "sha256"
    assert data["entries"] == [
        {"op": "matmul@v0", "call": f"{1:016x}", "config_type": f"{__name__}.Tile", "config": {"rows": 8}}
    ]


def edited(result, **changes):
    return with_digest({**json.loads(result.dumps()), **changes})


def edited_text(result, old, new):
    return with_digest(json.loads(result.dumps().replace(old, new)))


@pytest.mark.parametrize(("schema", "age"), [(1, "an older"), (3, "a newer")])
def test_another_schema_is_an_error(schema, age):
    with pytest.raises(SerializationError, match=f"it was written by {age} ejkernel: schema {schema}, not 2"):
        AutotuningResult.loads(edited(result_of(), schema=schema))


def test_space_around_the_text_does_not_matter():
    result = result_of(entry(1, Tile(8)))
    assert AutotuningResult.loads(result.dumps() + " \n\n") == result


def test_a_configuration_that_would_be_read_as_another_is_reported_when_it_is_written():
    with pytest.warns(CacheWarning, match=r"loads\(\) will not return .* matmul@v0: \$.rows: expected"):
        result_of(entry(1, Tile(8.0))).dumps()


def of_a_class_in_a_function(default):
    """Return a kernel and one of its configurations; the classes of all these kernels have the same names."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        rows: int = default

    class Local(Kernel[Config, jax.Array]):
        def run(self, x, *, cfg):
            return x

    return Local(f"local_{default}"), Config()


@pytest.mark.filterwarnings("error")
def test_configurations_of_classes_with_one_name_are_read_as_those_of_their_operation(tmp_path):
    kernels = [of_a_class_in_a_function(default) for default in (8, 16)]
    result = result_of(*(Entry(kernel.op_id_v, f"{1:016x}", cfg) for kernel, cfg in kernels))
    assert AutotuningResult.loads(result.dumps()) == result
    result.save(PersistentCache(tmp_path))
    for kernel, cfg in kernels:
        assert PersistentCache(tmp_path).get("cpu:some", kernel.op_id_v, f"{1:016x}") == cfg


@pytest.mark.parametrize("suffix", [".bwd", ".jvp", ".jvp.bwd"])
def test_derivatives_read_the_configurations_of_their_operation(suffix):
    kernels = [of_a_class_in_a_function(default) for default in (8, 16)]
    names = [kernel.op_id_v.replace("@", f"{suffix}@") for kernel, _ in kernels]
    result = result_of(*(Entry(name, f"{1:016x}", cfg) for name, (_, cfg) in zip(names, kernels, strict=True)))
    assert AutotuningResult.loads(result.dumps()) == result


def test_a_text_with_any_change_is_an_error():
    text = result_of(entry(1, Tile(8))).dumps()
    for index, character in enumerate(text):
        with pytest.raises(SerializationError):
            AutotuningResult.loads(text[:index] + chr(ord(character) ^ 1) + text[index + 1 :])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 1}', '{"schema": 2}', "\ud800", b"{}", None])
def test_an_invalid_text_is_an_error(text):
    with pytest.raises(SerializationError):
        AutotuningResult.loads(text)


def test_an_unknown_field_is_an_error():
    with pytest.raises(SerializationError, match="surprise"):
        AutotuningResult.loads(edited(result_of(), surprise=1))


@pytest.mark.parametrize("name", ["os.system", "nowhere.Tile", "builtins.dict", "subprocess.Popen", "json"])
def test_an_unknown_type_is_never_imported_or_called(name):
    text = edited_text(result_of(entry(1, Tile(8))), f"{__name__}.Tile", name)
    if name == "json":  # plain data
        assert AutotuningResult.loads(text).entries[0].cfg == {"rows": 8}
    else:
        with pytest.raises(ConfigError, match=name):
            AutotuningResult.loads(text)


def test_values_that_do_not_fit_their_type_are_an_error():
    text = edited_text(result_of(entry(1, Tile(8))), '"rows": 8', '"rows": "eight"')
    with pytest.raises(SerializationError, match="rows"):
        AutotuningResult.loads(text)


# --- saving ---


def test_a_result_is_saved_to_memory(result, kernel):
    cache = ConfigCache()
    result.save(cache)
    assert cache.get(Invocation(kernel=kernel, args=(X,)).key) == 5


def test_a_result_is_saved_to_disk(result, kernel, tmp_path):
    result.save(PersistentCache(tmp_path))
    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    found = chain.resolve(Invocation(kernel=kernel, args=(X,)), kernel)
    assert (found.config, found.source) == (5, "persistent")
