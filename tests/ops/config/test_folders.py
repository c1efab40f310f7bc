# SPDX-License-Identifier: Apache-2.0
"""Folders named by mistake: missing ones, and those above or inside a cache folder."""

from __future__ import annotations

import os

import pytest

from ejkernel.ops import CacheWarning, Kernel, NoConfigError
from ejkernel.ops.config.persistent import PersistentCache, fault_of

VARIABLE = "EJKERNEL_CACHE_DIR"


@pytest.fixture
def copy(tmp_path):
    """A cache folder inside other folders."""
    cache = PersistentCache(tmp_path / "a copy" / "of" / "configs", shipped=False)
    cache.put("cpu:some", "op@v0", "0123456789abcdef", {"rows": 3})
    return cache.path


@pytest.mark.parametrize("place", ["..", "../..", "cpu-some", "cpu-some/op-v0"])
def test_a_folder_above_or_inside_a_cache_folder_names_it(copy, place):
    wrong = type(copy)(os.path.normpath(copy / place))
    assert fault_of(wrong, VARIABLE) == f"{wrong} has no configurations, but {copy} has some: set {VARIABLE}={copy}"


@pytest.mark.parametrize("place", ["configs", "configs/deeper"])
def test_a_cache_folder_and_an_empty_one_have_no_fault(copy, tmp_path, place):
    (tmp_path / "configs" / "deeper").mkdir(parents=True)
    assert [fault_of(copy), fault_of(tmp_path / place)] == ["", ""]


def test_a_missing_folder_suggests_a_similar_one(copy):
    wrong = copy.parent / "config"
    assert fault_of(wrong) == f"there is no folder {wrong}, but there is {copy}"
    assert fault_of(copy / "none" / "at all") == f"there is no folder {copy / 'none' / 'at all'}"


def test_a_program_with_the_folder_above_its_cache_warns_once(copy, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(copy.parent))
    with pytest.warns(CacheWarning, match=f"set {VARIABLE}={copy}"):
        assert PersistentCache().get("cpu:some", "op@v0", "0123456789abcdef") is None
    assert PersistentCache().get("cpu:some", "op@v0", "0123456789abcdef") is None  # another warning would be an error


def test_a_layer_above_a_cache_folder_is_a_warning(copy, tmp_path):
    cache = PersistentCache(tmp_path / "mine", layers=[copy.parent], shipped=False)
    with pytest.warns(CacheWarning, match=f"has no configurations, but {copy} has some"):
        assert cache.keys() == []


class Double(Kernel):
    """`2 * x`."""

    def run(self, x, *, cfg):
        return cfg * x

    def heuristic_cfg(self, inv):
        return 2


def test_a_served_program_without_its_cache_folder_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_ON_MISS", "error")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(NoConfigError, match=rf"\n  There is no folder {tmp_path / 'absent'}, named by {VARIABLE}\."):
        Double("double")(1.0)
