# SPDX-License-Identifier: Apache-2.0
"""Every configuration that the package ships is one that the code of today would run, on the device it was found on."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path

import pytest

import ejkernel.modules  # noqa: F401 - makes the kernels that entries are of
from ejkernel import compat
from ejkernel.ops.config.entries import decoded, shipped_config, sister_of
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.description import rebuild

FOLDER = Path(str(resources.files("ejkernel") / "data" / "configs"))
ENTRIES = list(PersistentCache(FOLDER, shipped=False).entries())
DEVICES = {"gpu:nvidia_h200": "gpu:nvidia_h200", "gpu:nvidia_h100_80gb_hbm3": "gpu:nvidia_h200"}


def called(value):
    return value[0].call


def test_shipped_configurations_exist_and_are_readable():
    files = list(FOLDER.rglob("*.json"))
    assert files
    assert len(files) == len(ENTRIES)
    assert sum(file.stat().st_size for file in files) < 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("found", ENTRIES, ids=called)
def test_an_entry_describes_its_call_and_its_search(found):
    key, entry = found
    assert rebuild(entry.call, key=key.call, op=key.op).call_key == key.call
    assert entry.provenance["device"] == key.device in DEVICES
    assert None not in [entry.provenance[name] for name in ("driver", "jax", "jaxlib", "time")]
    assert entry.measured["winner"]["median_us"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("found", ENTRIES, ids=called)
def test_an_entry_runs_on_its_device_and_on_a_sister(found):
    key, entry = found
    own = rebuild(entry.call, key=key.call, op=key.op)
    config = decoded(entry, own.kernel.config_type)
    for device in DEVICES:
        inv = dataclasses.replace(own, device=device)
        reason = inv.kernel.why_not(inv, config)
        if config.implementation in ("mosaic_gpu", "jax_mgpu") and compat.kernels.mosaic_gpu_reason() is not None:
            pytest.skip(reason)
        assert reason == ""
        measured = inv.key._replace(device=sister_of(device) or device)
        assert shipped_config(measured, inv.kernel.config_type).config == config
