# SPDX-License-Identifier: Apache-2.0
"""A shared layer: read from its copy alone, and brought up to date when nothing else has an answer."""

from __future__ import annotations

import dataclasses
import sys
import threading
import warnings

import jax.numpy as jnp
import pytest
from tests.ops.config.shared.stores import FakeStore, entry, pack

from ejkernel.ops import ConfigSelectorChain, Invocation, PersistentCache, tune
from ejkernel.ops.config.shared import layer as layers
from ejkernel.ops.config.shared import stores
from ejkernel.ops.config.shared.layer import AGAIN, SharedLayer
from ejkernel.ops.config.shared.packs import token_of
from ejkernel.ops.errors import CacheWarning, ConfigError


@tune(space={"rows": [1, 2]})
def doubled(x, *, rows=1):
    return x * 2 if rows else x


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store():
    return FakeStore(pack(entry(1), entry(2)))


@pytest.fixture
def layer(tmp_path, store, clock):
    return SharedLayer("fake://team", tmp_path, connect=store, clock=clock)


@pytest.fixture
def cache(tmp_path, layer):
    """A persistent cache over the layer."""
    made = PersistentCache(tmp_path, layers=["fake://team"], shipped=False)
    made.layers = made.shared = (layer,)
    return made


def test_a_lookup_asks_the_store_nothing(cache, store):
    assert cache.get(entry(1).key) is None
    assert list(cache.entries()) == []
    assert store.asked == []


def test_a_url_may_have_bytes_that_are_no_text(tmp_path, store):
    made = [SharedLayer(f"fake://team{byte}", tmp_path, connect=store) for byte in ("\udcfe", "\udcff")]
    assert len({each.copy.folder for each in made}) == 2


def test_fetched_entries_are_found_without_the_store(cache, layer, store):
    layer.refresh_if_due()
    store.asked.clear()
    store.down = "no network"
    assert cache.get(entry(1).key) == {"rows": 64}
    assert cache.load(entry(2).key) == entry(2)
    assert sorted(cache.keys()) == [entry(1).key, entry(2).key]
    assert store.asked == []


def test_the_own_folder_answers_first(cache, layer):
    layer.refresh_if_due()
    cache.put(entry(1).key, {"rows": 3})
    assert cache.get(entry(1).key) == {"rows": 3}
    assert dict(cache.entries())[entry(1).key].config == {"rows": 3}
    cache.remove(entry(1).key)
    assert cache.get(entry(1).key) == {"rows": 64}


def test_packs_are_fetched_once_and_the_store_is_not_asked_again_soon(layer, store, clock):
    layer.refresh_if_due()
    layer.refresh_if_due()
    assert store.asked == ["list", "read"]
    clock.now += AGAIN
    store.objects.update([pack(entry(3))])
    layer.refresh_if_due()
    assert store.asked == ["list", "read"] * 2
    assert layer.find(entry(3).key) == [entry(3)]


def test_an_unavailable_store_is_one_warning_and_the_copy_answers(layer, store, clock):
    layer.refresh_if_due()
    store.down = "no network"
    clock.now += AGAIN
    with pytest.warns(CacheWarning, match=r"fake://team could not be read and its earlier copy is used: no network"):
        layer.refresh_if_due()
    clock.now += AGAIN
    layer.refresh_if_due()  # where warnings are errors
    assert layer.find(entry(1).key) == [entry(1)]
    store.down = ""
    store.objects.update([pack(entry(3))])
    clock.now += AGAIN
    layer.refresh_if_due()
    assert layer.find(entry(3).key) == [entry(3)]


def test_a_store_that_does_not_answer_is_waited_for_once(layer, store):
    answers = threading.Event()
    sizes = store.sizes
    store.sizes = lambda *most: answers.wait() and sizes(*most)
    with pytest.warns(CacheWarning, match="it has not answered for 0.01 s"):
        layer.refresh_if_due(0.01)
    layer.refresh_if_due(600)  # returns at once: the first call has waited
    assert layer._running.daemon  # a program ends without an answer
    answers.set()
    layer._running.join()
    assert layer.find(entry(1).key) == [entry(1)]


def test_a_wrong_pack_is_left_out_with_a_warning(layer, store):
    name, raw = pack(entry(3))
    store.objects |= {name: raw[:-1], "f" * 32 + ".pack": b"", "e" * 32 + ".pack": b"{}"}
    with pytest.warns(CacheWarning, match="3 packs of entries cannot be used, e.g."):
        layer.refresh_if_due()
    assert (layer.find(entry(1).key), layer.find(entry(3).key)) == ([entry(1)], [])


def test_a_too_large_pack_is_not_fetched(layer, store, monkeypatch):
    monkeypatch.setattr(layers, "LARGEST", 10)
    with pytest.warns(CacheWarning, match="more than the maximum of 10"):
        layer.refresh_if_due()
    assert store.asked == ["list"]


def test_a_too_large_pack_does_not_block_others(layer, store, monkeypatch):
    _, raw = pack(entry(3))
    store.objects |= {"a" * 32 + ".pack": raw * 10}
    monkeypatch.setattr(layers, "LARGEST", 5 * len(raw))
    monkeypatch.setattr(layers, "_MOST", 5 * len(raw))
    with pytest.warns(CacheWarning, match="1 pack of entries cannot be used, e.g. aaa"):
        layer.refresh_if_due()
    assert layer.find(entry(1).key) == [entry(1)]


def test_a_copy_has_a_limit(layer, monkeypatch):
    monkeypatch.setattr(layers, "_MOST", 10)
    with pytest.warns(CacheWarning, match="larger than 10 bytes"):
        layer.refresh_if_due()


def test_packs_removed_or_merged_in_the_store_are_removed_from_the_copy(layer, store):
    layer.refresh()
    store.objects = dict([pack(entry(2), entry(3))])
    layer.refresh()
    assert [found.key for found in layer.entries()] == sorted([entry(2).key, entry(3).key], key=token_of)
    store.objects = {}
    layer.refresh()  # an empty store may just not be mounted
    assert layer.find(entry(2).key) == [entry(2)]


def test_packs_merged_during_the_listing_are_not_lost(layer, store):
    layer.refresh()
    merged = pack(entry(1), entry(2), entry(9))
    listings = [dict([pack(entry(5))]), dict([pack(entry(5)), merged])]  # the first has neither the old nor the new

    def sizes(*_):
        store.objects = listings.pop(0) if len(listings) > 1 else listings[0]
        return {name: len(raw) for name, raw in store.objects.items()}

    store.sizes = sizes
    layer.refresh()
    assert sorted(found.key.call[-1] for found in layer.entries()) == ["1", "2", "5", "9"]


def test_many_packs_are_one_file_here_and_are_not_fetched_again(layer, store):
    for number in range(10):
        store.objects.update([pack(entry(number, note="many"))])
    layer.refresh()
    store.asked.clear()
    assert (len(layer.copy.packs()), layer.refresh(), store.asked) == (1, 0, ["list"])


def test_without_a_folder_a_shared_cache_warns_and_misses(store):
    layer = SharedLayer("fake://team", None, connect=store)
    assert (layer.find(entry(1).key), list(layer.entries())) == ([], [])
    with pytest.warns(CacheWarning, match="set EJKERNEL_CACHE_DIR"):
        layer.refresh_if_due()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, store):
    (tmp_path / ".layers").write_text("a file")
    with pytest.warns(CacheWarning, match="could not be read and there is no copy of it here"):
        SharedLayer("fake://team", tmp_path, connect=store).refresh_if_due()


def test_a_missing_place_is_one_warning_with_its_name(layer, store, clock):
    store.objects, store.is_there = {}, False
    with pytest.warns(CacheWarning, match=r"shared cache fake://team .*it does not exist, .*check the URL"):
        layer.refresh_if_due()
    clock.now += AGAIN
    layer.refresh_if_due()


def test_an_empty_place_is_not_a_warning(layer, store):
    store.objects = {}
    layer.refresh_if_due()


# --- in a chain ---


@pytest.fixture
def inv():
    return Invocation(kernel=doubled, args=(jnp.ones(4),))


def share(store, inv, rows):
    store.objects.update([pack(dataclasses.replace(entry(), key=inv.key, config={"rows": rows}))])


def test_a_miss_refreshes_the_copy_and_uses_new_entries(cache, store, inv):
    share(store, inv, 2)
    found = ConfigSelectorChain(persistent=cache).resolve(inv, doubled)
    assert (found.config, found.source) == ({"rows": 2}, "shared")
    assert ConfigSelectorChain(persistent=cache).resolve(inv, doubled).source == "persistent"


def test_a_call_that_has_an_answer_does_not_ask_the_store(cache, store, inv):
    cache.put(inv.key, {"rows": 1})
    assert ConfigSelectorChain(persistent=cache).resolve(inv, doubled).source == "persistent"
    assert ConfigSelectorChain(persistent=cache).resolve(inv, doubled).config == {"rows": 1}
    assert store.asked == []


def test_a_miss_everywhere_goes_on_and_asks_once(cache, store, inv):
    chain = ConfigSelectorChain(persistent=cache)
    assert chain.resolve(inv, doubled).source == "heuristic"
    assert chain.resolve(inv, doubled).source == "heuristic"
    assert store.asked.count("list") == 1


def test_explain_shows_the_answer_of_the_shared_cache(cache, inv):
    said = {c.tier: c.note for c in ConfigSelectorChain(persistent=cache).consult(inv, doubled)}
    assert said["shared"] == "no entry"
    assert "shared" not in {c.tier for c in ConfigSelectorChain().consult(inv, doubled)}


# --- by the environment ---


def test_layers_of_the_environment_are_read(tmp_path, monkeypatch):
    folder = tmp_path / "others"
    PersistentCache(folder).put(entry(5).key, {"rows": 5})
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", f" fake://user:secret@team/x , {folder}")
    cache = PersistentCache()
    assert [str(layer) for layer in cache.layers] == ["fake://team/x", str(folder)]
    assert cache.get(entry(5).key) == {"rows": 5}
    assert "secret" not in repr(cache)
    assert PersistentCache(tmp_path).layers == ()


@pytest.mark.parametrize(
    ("url", "packages"),
    [("s3://team/x", "fsspec s3fs"), ("gs://team", "fsspec gcsfs"), ("file:///team", "fsspec")],
)
def test_a_missing_store_package_is_a_warning_with_the_install_command(tmp_path, monkeypatch, url, packages):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    cache = PersistentCache(tmp_path, layers=[url], shipped=False)
    with pytest.warns(CacheWarning, match=rf"there is no copy of it here: .*: pip install {packages}$"):
        cache.refresh_if_due()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.refresh_if_due()
        assert cache.get(entry(1).key) is None


@pytest.mark.parametrize(
    "url",
    [
        "reference://team",
        "reference://::s3://team/refs.json",
        "zip://x::s3://team/a.zip",
        "simplecache::s3://team",
        "git://team",
        "github://team",
        "ssh://team/x",
        "REFERENCE://team",
        "s3://team?x::reference://",
    ],
)
def test_protocols_that_do_more_than_list_read_and_write_are_refused_by_name(url, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)  # nothing of it is imported
    with pytest.raises(ConfigError, match=r"shared cache .* protocol '\w+'; allowed are file, .*CACHE_PROTOCOLS"):
        stores.Store(url).sizes()
    cache = PersistentCache(tmp_path, layers=[url], shipped=False)
    with pytest.warns(CacheWarning, match="allowed are file"):
        cache.refresh_if_due()


def test_a_store_is_opened_again_after_a_fork(tmp_path, monkeypatch):
    core = pytest.importorskip("fsspec.core", reason="fsspec is an extra, and is not installed")
    real, opened = core.url_to_fs, []
    monkeypatch.setattr(core, "url_to_fs", lambda url: opened.append(url) or real(url))
    store = stores.Store(tmp_path.as_uri())
    for process in (1, 1, 2):
        monkeypatch.setattr(stores.os, "getpid", lambda process=process: process)
        assert store.sizes() == {}
    assert len(opened) == 2


@pytest.mark.parametrize("url", ["hdfs://team", "simplecache::s3://team"])
def test_the_user_may_allow_another_protocol(url, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_PROTOCOLS", "hdfs, simplecache")
    stores.check_protocols(url)
    for usual in ("s3://team", "gs://team", "az://team", "https://team", "file:///team", "memory://team"):
        stores.check_protocols(usual)
