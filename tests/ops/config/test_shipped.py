# SPDX-License-Identifier: Apache-2.0
"""Shipped configurations: lookup, sister devices, and messages."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import zipfile

import jax
import numpy as np
import pytest

from ejkernel.ops.config import request
from ejkernel.ops.config.entries import shipped_config, sister_of
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.registry import clear_invocations, missed

H200, H100 = "gpu:nvidia_h200", "gpu:nvidia_h100_80gb_hbm3"
KEY = ConfigKey(H200, "matmul@v1", "0123456789abcdef")
NOON = datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int


class Double(Kernel[Tile, jax.Array]):
    """Runs with up to 100 rows."""

    def run(self, x, *, cfg):
        return x + x

    def heuristic_cfg(self, inv):
        return Tile(1)

    def why_not(self, inv, config):
        return "" if config.rows <= 100 else f"rows must be at most 100, got {config.rows}."


@pytest.fixture
def inv():
    return Invocation(kernel=Double("double"), args=(np.ones(4, np.float32),))


@pytest.fixture
def chain_with(tmp_path, monkeypatch, inv):
    """Make a chain for a package that ships a configuration for a device."""

    def make(device, rows, **options):
        folder = tmp_path / "shipped"
        key = inv.key._replace(device=device)
        PersistentCache(folder, clock=lambda: NOON).put(key, Tile(rows), call=inv.description)
        monkeypatch.setattr(request, "shipped_config", functools.partial(shipped_config, folder=folder))
        return ConfigSelectorChain(persistent=PersistentCache(tmp_path / "own", **options))

    return make


def said(chain, inv):
    return {consulted.tier: consulted for consulted in chain.consult(inv, inv.kernel)}


def test_shipped_configurations_rank_after_saved_ones(chain_with, inv):
    chain = chain_with(inv.key.device, 8)
    found = said(chain, inv)["shipped"]
    assert found.resolution.config == Tile(8)
    assert found.note == f"measured on {inv.key.device} with JAX {jax.__version__}, 2026-11-22"
    chain.persistent.put(inv.key, Tile(16))
    assert chain.resolve(inv, inv.kernel).config == Tile(16)


def test_it_is_measured_and_so_no_miss(chain_with, inv):
    clear_invocations()
    chain = chain_with(inv.key.device, 8)
    assert chain.resolve(inv, inv.kernel).source == "shipped"
    assert not missed()


def test_a_sisters_serves_until_the_call_is_tuned_here(chain_with, inv, monkeypatch):
    clear_invocations()
    chain = chain_with(H200, 8)
    on_h100 = dataclasses.replace(inv, device=H100)
    found = said(chain, on_h100)
    assert found["shipped"].note == "no entry"
    assert found["sister"].resolution.config == Tile(8)
    assert found["sister"].note.startswith(f"measured on {H200} with JAX")
    assert chain.resolve(on_h100, inv.kernel).source == "sister"
    assert list(missed()) == [H100]
    chain.remember(on_h100.key, Tile(16))
    assert chain.resolve(on_h100, inv.kernel).config == Tile(16)


def test_a_search_comes_before_a_sisters(chain_with, inv):
    found = ConfigSelectorChain(persistent=chain_with(H200, 8).persistent, policy=AutotunePolicy(autotune=True))
    tiers = list(said(found, dataclasses.replace(inv, device=H100)))
    assert tiers.index("autotune") < tiers.index("sister")


@pytest.mark.parametrize("device", [None, H200])
def test_a_shipped_configuration_that_cannot_run_is_skipped_and_explained(chain_with, inv, device):
    chain = chain_with(device or inv.key.device, 1000)
    call = inv if device is None else dataclasses.replace(inv, device=H100)
    found = said(chain, call)
    assert found["shipped" if device is None else "sister"].note == "rows must be at most 100, got 1000."
    assert found["heuristic"].resolution.config == Tile(1)


@pytest.mark.parametrize("options", [{"shipped": False}, None])
def test_a_chain_asks_only_if_its_cache_requires_it(chain_with, inv, options):
    chain = chain_with(inv.key.device, 8, **(options or {}))
    if options is None:
        chain = ConfigSelectorChain()
    assert said(chain, inv)["shipped"].note == "the chain does not use shipped configurations"


def test_the_folder_of_the_user_does_not_list_it(chain_with, inv):
    chain = chain_with(inv.key.device, 8)
    assert chain.persistent.keys() == []
    assert chain.persistent.get(inv.key, cfg_type=Tile) is None


def test_an_explanation_says_where_it_was_measured(chain_with, inv):
    text = str(Executor(chain_with(inv.key.device, 8)).explain(inv.kernel, *inv.args))
    assert f"shipped    rows=8  (measured on {inv.key.device} with JAX" in text


def test_the_package_may_be_in_an_archive(tmp_path):
    PersistentCache(tmp_path / "configs").put(KEY, Tile(8))
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for file in (tmp_path / "configs").rglob("*.json"):
            archive.write(file, file.relative_to(tmp_path / "configs"))
    folder = zipfile.Path(tmp_path / "package.zip")
    assert shipped_config(KEY, Tile, folder).config == Tile(8)
    assert shipped_config(KEY._replace(call="fedcba9876543210"), Tile, folder) is None


def test_a_package_without_entries_is_fine(tmp_path):
    assert shipped_config(KEY, Tile, tmp_path / "nowhere") is None


def test_an_entry_that_cannot_be_decoded_is_a_warning_and_a_miss(tmp_path):
    PersistentCache(tmp_path).put(KEY, {"columns": 8})
    with pytest.warns(CacheWarning, match="cannot be decoded"):
        assert shipped_config(KEY, Tile, tmp_path) is None


@pytest.mark.parametrize("device", [H100, "gpu:nvidia_h100_nvl", "gpu:nvidia_gh200_480gb", "gpu:nvidia_h800"])
def test_hopper_chips_are_sisters_of_the_measured_one(device):
    assert sister_of(device) == H200


@pytest.mark.parametrize("device", [H200, f"{H100}_mig_1g_10gb", "gpu:nvidia_b200", "cpu:any", "gpu:nvidia_h20"])
def test_other_devices_have_no_sister(device):
    assert sister_of(device) is None
