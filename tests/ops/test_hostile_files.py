# SPDX-License-Identifier: Apache-2.0
"""Files with any content: a flipped byte, any value in any place, texts with control characters for a terminal.

A read is a miss with a warning, or returns the original; all output is printable.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.sample_kernels import Tile, Tiled
from tests.ops.sealing import lines_with_digest, with_digest

from ejkernel.cli import files as cli_files
from ejkernel.cli import main
from ejkernel.ops import (
    CacheWarning,
    ConfigError,
    ConfigSelectorChain,
    ConfigSpace,
    Executor,
    Invocation,
    PersistentCache,
)
from ejkernel.ops.autotuner.compile.bundles import SCHEMA, read_bundle
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import compare
from ejkernel.ops.autotuner.search.strategies import default_strategy
from ejkernel.ops.autotuner.store.log import lines_of
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config._files import UnusableError, location
from ejkernel.ops.config.misses.notes import MissedNotes
from ejkernel.ops.config.selection import why_no_entry
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.formatting import arguments, compact
from ejkernel.ops.utils.storage.serialize import sealed_json, sealed_lines

pytestmark = pytest.mark.slow

MARKED = "[bold red]marked[/bold red]"
NASTY = [
    "\x1b[2J",
    "\x9b31m",
    "\x07",
    "\r",
    "\n",
    "\u2028",
    "\u202e",
    "\u200b",
    "\x7f",
    "\ufeff",
    "\0",
    "\t",
    MARKED,
    "]",
]


DOUBLE = Tiled("double")
X = jax.ShapeDtypeStruct((16, 8), np.float32)
INV = Invocation(kernel=DOUBLE, args=(X,), kwargs={"causal": True})
SPACE = ConfigSpace({"rows": range(1, 40), "order": ["row", "column"]}, build=Tile)


def searched(inv):
    outcomes = tuple(
        Outcome(
            config=Tile(n),
            status=Status.MEASURED,
            measurement=Measurement(samples=(n * 1e-6, n * 2e-6), peak_bytes=n << 20),
            peak_bytes=n << 20,
        )
        for n in range(1, 5)
    )
    failed = Outcome(config=Tile(9), status=Status.FAILED, reason="it does not fit")
    figures = compare([1e-6, 1.1e-6, 1.2e-6, 1.3e-6] * 5, [2e-6] * 20, more_bytes=1 << 20)
    return AutotuneData(
        inv=inv,
        config=outcomes[1].config,
        outcomes=(*outcomes, failed),
        seconds=2.0,
        challenge=Challenge(Tile(2), figures, is_confirmation=True),
    )


@dataclasses.dataclass
class Files:
    """A cache folder with one file of each kind, and its texts as they were."""

    cache: PersistentCache
    entry: Path
    log: Path
    note: Path


@contextlib.contextmanager
def made():
    with tempfile.TemporaryDirectory() as name:
        cache = PersistentCache(Path(name) / "cache", shipped=False)
        data = searched(INV)
        cache.put(INV.key, data.config, call=INV.description, measured=data.summary_data())
        MeasurementStore(cache).save(data)
        (entry,) = cache.path.rglob("*.json")
        (log,) = cache.path.rglob("*.jsonl")
        MissedNotes(cache.path).put(INV, "heuristic")
        (note,) = MissedNotes(cache.path).folder.rglob("*.json")
        yield Files(cache, entry, log, note)


def flipped(file):
    """Put each byte of a file wrong once."""
    raw = file.read_bytes()
    for index in range(len(raw)):
        file.write_bytes(raw[:index] + bytes([raw[index] ^ (1 << index % 8)]) + raw[index + 1 :])
        yield index
    file.write_bytes(raw)


def test_a_flipped_byte_anywhere_is_a_miss_with_a_reason():
    with made() as files, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        for index in flipped(files.entry):
            assert files.cache.get(INV.key, Tile) is None, index
            assert files.cache.problem(INV.key), index
        assert files.cache.get(INV.key, Tile) == Tile(2)
        assert len(caught) == 1  # of one file one is enough
        for index in flipped(files.log):
            assert MeasurementStore(files.cache).records(INV) == [], index
        assert len(caught) == 2
        (record,) = MeasurementStore(files.cache).records(INV)
        assert len(record.times) == 5
        for index in flipped(files.note):
            assert list(MissedNotes(files.cache.path).entries()) == [], index
        assert len(caught) == 2 + files.note.stat().st_size


@pytest.mark.parametrize("text", ["", '{"schema":2}', '{"schema":2}\n[]'])
def test_a_log_without_complete_lines_is_unusable_with_any_digest(text):
    with pytest.raises(UnusableError, match="no complete lines before its digest"):
        lines_of(sealed_lines(text).encode())


def test_a_flipped_byte_of_a_manifest_is_an_error(tmp_path):
    file = tmp_path / "manifest.json"
    row = {"config": 1, "config_type": "json", "status": "ready", "program": "0" * 64}
    calls = [{"description": INV.description, "candidates": [row]}]
    file.write_text(sealed_json({"schema": SCHEMA, "target": "here", "jax": "1", "jaxlib": "1", "calls": calls}))
    with pytest.raises(ConfigError, match="was made for here"):
        read_bundle(tmp_path)
    for _ in flipped(file):
        with pytest.raises(ConfigError, match="not a usable bundle"):
            read_bundle(tmp_path)


# --- any value in any place ---

texts = st.lists(st.sampled_from(NASTY) | st.text(max_size=3), max_size=4).map("".join)
numbers = (
    st.sampled_from([0, -1, 10**30, 10**4000, 5e-324, -5e-324, 1e308, 0.0, -0.0, True])
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    st.none() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def places(data, path=()):
    """Yield the paths of all values inside."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, item in items:
        yield from places(item, (*path, name))


def replaced(data, path, value):
    """Return a copy with another value in one place."""
    if not path:
        return value
    changed = copy.deepcopy(data)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return changed


def spoilt(draw, data):
    """Return JSON data with other values in some places."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(places(data), key=repr)))
        data = replaced(data, path, draw(values)) if path else data
    return data


def is_printable(text):
    return all(line.isprintable() for line in text.split("\n"))


def everything_printed(cache):
    """Return everything that readers of a cache folder print, raise or warn."""
    out, err = io.StringIO(), io.StringIO()
    printed = []
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("always")
        PersistentCache.get(cache, INV.key)
        cache.get(INV.key, Tile)
        store = MeasurementStore(cache)
        printed += [search.summary() for search in store.searches()]
        strategy = default_strategy(SPACE, seeds=[Tile(1)], records=store.records(INV))
        strategy.tell(strategy.ask(1)[0], 1e-5)
        chain = ConfigSelectorChain(persistent=cache)
        printed += [str(Executor(chain).explain(DOUBLE, X, causal=causal)) for causal in (True, False)]
        other = Invocation(kernel=DOUBLE, args=(jax.ShapeDtypeStruct((4, 4), np.float32),))
        printed.append(why_no_entry(cache, other, other.key))
        for note in MissedNotes(cache.path).entries():
            printed.append(note.config_key.op if is_printable(note.config_key.op) else "")
        cli_files.missed_calls(cache.path)
        for arguments in (["show"], ["show", "--json"], ["show", "--log", ""], ["show", "--log", "", "--json"]):
            assert main([*arguments, "--cache", str(cache.path)]) in (0, 1)
    return [*printed, out.getvalue(), err.getvalue(), *(str(warning.message) for warning in caught)]


ODD = [
    None,
    True,
    -1,
    0,
    10**4000,
    5e-324,
    1e308,
    "\x1b",
    "0x1p99999",
    [],
    {},
    [None, 8],
    {"array": [None, [None, 10**999]]},
]


def test_each_odd_value_in_each_place_of_an_entry_is_a_miss_or_that_value():
    other = Invocation(kernel=DOUBLE, args=(jax.ShapeDtypeStruct((4, 4), np.float32),), kwargs={"causal": 0.5})
    with made() as files, warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        data = json.loads(files.entry.read_text())
        data["call"] = other.description
        for path in list(places(data))[1:]:
            for value in ODD:
                files.entry.write_text(with_digest(replaced(data, path, value)))
                files.cache.get(INV.key, Tile)
                entry = files.cache.load(INV.key)
                assert entry is None or is_printable(f"{arguments(entry.call)}{compact(entry.config)}")
                assert why_no_entry(files.cache, other, other.key).startswith("no entry")


def test_each_odd_value_in_each_place_of_a_log_is_skipped_or_that_value():
    with made() as files, warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        store = MeasurementStore(files.cache)
        lines = [json.loads(line) for line in files.log.read_text().splitlines()[:-1]]
        for path in list(places(lines[:2]))[2:]:
            for value in ODD:
                text = "".join(json.dumps(line) + "\n" for line in replaced(lines, path, value))
                files.log.write_text(lines_with_digest(text))
                for search in store.searches():
                    assert is_printable(search.summary())
                for record in store.records(INV):
                    assert all(seconds is None or 1e-13 < seconds < 1e10 for _, seconds in record.times)


@given(st.data())
def test_any_value_in_any_place_is_no_exception_and_is_printed_harmlessly(data):
    with made() as files:
        file = data.draw(st.sampled_from([files.entry, files.note]), "file")
        text = with_digest(spoilt(data.draw, json.loads(file.read_text())))
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        assert all(map(is_printable, everything_printed(files.cache)))


@given(st.data())
def test_any_value_in_any_line_of_a_log_is_no_exception_and_is_printed_harmlessly(data):
    with made() as files:
        lines = [json.loads(line) for line in files.log.read_text().splitlines()[:-1]]
        lines = spoilt(data.draw, lines)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        files.log.write_text(lines_with_digest(text), encoding="utf-8")
        assert all(map(is_printable, everything_printed(files.cache)))


# --- texts that would drive a terminal ---


@given(nasty=texts)
def test_no_text_of_an_entry_a_log_or_a_note_drives_a_terminal(nasty):
    key = ConfigKey(INV.key.device, f"double@v0{nasty}", f"call{nasty}")
    data = searched(INV)
    outcomes = (
        dataclasses.replace(data.outcomes[0], config={"rows": nasty, nasty: nasty}),
        Outcome(config={"rows": 2, nasty: [nasty]}, status=f"{Status.FAILED}{nasty}", reason=nasty),
    )
    search = dataclasses.replace(data, config=outcomes[0].config, outcomes=outcomes)
    call = {"op": nasty, "args": [{"array": [nasty, [nasty]]}], "kwargs": {nasty: nasty}, "steps": [["vmap", nasty, 0]]}
    with made() as files:
        folder = files.entry.parent
        files.cache.put(key, {nasty: nasty}, call=call, measured={"speedup": nasty, nasty: nasty})
        MeasurementStore(files.cache).save(search)
        for file in (files.log, *folder.glob("*.jsonl")):
            first, *rest = file.read_text().splitlines()
            header = {**json.loads(first), "call": call, "provenance": {"time": nasty}, "key": key._asdict()}
            name = file.name.replace(location(INV.key)[2].removesuffix(".json"), location(key)[2].removesuffix(".json"))
            text = "\n".join([json.dumps(header), *rest, ""])
            beside = files.cache.path.joinpath(*location(key)[:2], name)
            beside.parent.mkdir(exist_ok=True)
            beside.write_text(lines_with_digest(text), encoding="utf-8")
        note = files.note.parents[2].joinpath(*location(key))
        note.parent.mkdir(exist_ok=True)
        changes = {"key": key._asdict(), "source": nasty, "kernel": nasty, "first": nasty, "last": nasty}
        note.write_text(with_digest(json.loads(files.note.read_text()) | changes), encoding="utf-8")
        printed = everything_printed(files.cache)
        assert all(map(is_printable, printed))
        if MARKED in nasty:
            assert any(MARKED in text for text in printed)


def test_markup_is_shown_unchanged(capsys):
    with made() as files:
        files.cache.put(INV.key, {"a": MARKED}, call={"kwargs": {"b": MARKED}})
        assert main(["show", "--cache", str(files.cache.path)]) == 0
    assert capsys.readouterr().out.count(MARKED) == 2
