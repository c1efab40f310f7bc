# SPDX-License-Identifier: Apache-2.0
"""A kernel, and one of each kind of file that the library keeps or is given."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import export

from ejkernel.ops import ConfigKey, Invocation, Kernel, PersistentCache
from ejkernel.ops.autotuner.compile.bundles import SCHEMA, device_and_versions
from ejkernel.ops.autotuner.compile.programs import Programs
from ejkernel.ops.autotuner.compile.threads import Done
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.candidates import Program
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config.estimates import EstimateFiles, Estimates, row_of
from ejkernel.ops.config.misses.notes import MissedNotes
from ejkernel.ops.config.shared import packs
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.utils.storage.serialize import sealed_json


@dataclasses.dataclass(frozen=True)
class Tile:
    """A configuration."""

    rows: int
    order: str = "row"


class Double(Kernel[Tile, jax.Array]):
    """Takes an array and static arguments."""

    def run(
        self,
        x: jax.Array,
        *,
        causal: bool = False,
        then: Callable[[jax.Array], jax.Array] = jnp.tanh,
        scale: float | None = None,
        cfg: Tile,
    ) -> jax.Array:
        """Compute the result."""
        return x * then(x)

    def heuristic_cfg(self, inv: Invocation[Tile, jax.Array]) -> Tile:
        """Return where a search begins."""
        return Tile(1)


DOUBLE: Final = Double("tortured")
X: Final = jax.ShapeDtypeStruct((16, 8), jnp.float32)
WRITTEN: Final = Tile(2)
_FIRST: Final = Tile(1)


def search_of(inv: Invocation[Any, Any], first: Tile = _FIRST) -> AutotuneData:
    """Return a search with candidates of several fates."""
    outcomes = tuple(
        Outcome(config=config, status=Status.MEASURED, measurement=Measurement(samples=(n * 1e-6, n * 2e-6)))
        for n, config in enumerate((first, Tile(2), Tile(3), Tile(4)), 1)
    )
    failed = Outcome(config=Tile(9), status=Status.FAILED, reason="it does not fit")
    return AutotuneData(inv=inv, config=outcomes[1].config, outcomes=(*outcomes, failed), seconds=2.0)


def call(causal: bool = True) -> Invocation[Any, Any]:
    """Return a call."""
    return Invocation(kernel=DOUBLE, args=(X,), kwargs={"causal": causal})


class Files:
    """One file of each kind.

    Args:
        folder: Where `write` has written them, or a copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inv = call()
        self.cache = PersistentCache(folder / "cache", shipped=False)
        self.notes = MissedNotes(folder / "cache")
        self.estimates = EstimateFiles(folder / "cache")
        (self.entry,) = (folder / "cache").glob("*/*/*.json")  # notes and estimates are one folder deeper
        (self.log,) = (folder / "cache").rglob("*.jsonl")
        (self.note,) = self.notes.files()
        (self.estimate,) = self.estimates.files()
        (self.pack,) = (folder / "copy").iterdir()
        self.bundle = folder / "bundle"
        (self.code,) = self.bundle.glob("*.bin")
        self.text, self.hlo, self.exported = (folder / f"program.{kind}" for kind in ("mlir", "hlo", "bin"))
        self.shapes = folder / "shapes.jsonl"


def write(folder: Path) -> Files:
    """Write one file of each kind into a new folder."""
    inv = call()
    cache = PersistentCache(folder / "cache", shipped=False)
    data = search_of(inv)
    cache.put(inv.key, data.config, call=inv.description, measured=data.summary_data())
    MeasurementStore(cache).save(data)
    MissedNotes(folder / "cache").put(inv, "heuristic")
    rows = [row_of(data.config, us=2.5, cycles=4375.0, is_heuristic=True), row_of(data.config, reason="a fifo is full")]
    EstimateFiles(folder / "cache").put(Estimates.of(inv, "by hand", rows))
    _write_pack(cache, inv.key, folder / "copy")
    _write_bundle(folder / "bundle", inv)
    _write_programs(folder)
    lines = (
        {"kernel": "tortured", "args": [f"f32[{n},8]"], "kwargs": {"causal": True}, **more}
        for n, more in ((16, {"weight": 2}), (32, {}), (8, {"set": "other"}))
    )
    (folder / "shapes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Files(folder)


def _write_pack(cache: PersistentCache, key: ConfigKey, folder: Path) -> None:
    """Write a pack with some entries: two of one key, of different versions of JAX, and others."""
    entry = cache.load(key)
    assert entry is not None  # it was put
    others = [dataclasses.replace(entry, key=key._replace(call=f"{n:016x}")) for n in range(3)]
    others.append(dataclasses.replace(entry, provenance={**entry.provenance, "jax": "0.1"}))
    ((name, raw),) = packs.packed(map(packs.line_of, [entry, *others]))
    LocalCopy(folder).add(name, raw)


def _write_bundle(folder: Path, inv: Invocation[Any, Any]) -> None:
    """Write a bundle with a dummy program; reading it runs nothing."""
    folder.mkdir()
    program = Program(digest="0" * 64, code=b"machine code", inputs=1, outputs=1)
    Programs(folder, {}).kept(Done(0, program, None, 0.5))
    config_type = f"{Tile.__module__}.Tile"
    row = {"config": {"rows": 2}, "config_type": config_type, "status": "ready", "program": program.digest}
    other = {"config": {"rows": 3}, "config_type": config_type, "status": "failed", "reason": "it does not fit"}
    target, version, jaxlib = device_and_versions()
    calls = [{"description": inv.description, "candidates": [row, other]}]
    manifest = {"schema": SCHEMA, "target": target, "jax": version, "jaxlib": jaxlib, "calls": calls}
    (folder / "manifest.json").write_text(sealed_json(manifest))


def _write_programs(folder: Path) -> None:
    """Write a program that calls the kernel as texts and as it is exported."""
    os.environ["EJKERNEL_OPS_STAMP"] = "json"

    def program(x: jax.Array) -> Any:
        return jax.value_and_grad(lambda x: jnp.sum(jax.vmap(lambda row: DOUBLE(row, causal=True))(x)))(x)

    lowered = jax.jit(program).lower(X)
    (folder / "program.mlir").write_text(lowered.as_text())
    (folder / "program.hlo").write_text(lowered.as_text("hlo"))
    (folder / "program.bin").write_bytes(export.export(jax.jit(program))(X).serialize())


def quiet() -> None:
    """Silence warnings: the library warns once for each damaged file."""
    warnings.simplefilter("ignore")
