# SPDX-License-Identifier: Apache-2.0
"""One of each kind of file that the library reads, the reader, and what it says that it may raise.

Where a file ends with a digest, or has digests inside, `seal` makes content that was changed whole again, as whoever
may write the file can. What is then read may be anything of the right form; what was not sealed again must be refused,
or be read as what was written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import export

from ejkernel.cli.files import calls_in_file
from ejkernel.cli.shapes import calls_of_shapes
from ejkernel.ops import AutotuningResult, ConfigKey, Entry, Invocation, Kernel, PersistentCache
from ejkernel.ops.autotuner.compile.bundles import device_and_versions, read_bundle
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.store.log import lines_of, load, load_header
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config._files import UnusableError, identity
from ejkernel.ops.config.entries import check_key, decoded, parsed
from ejkernel.ops.config.missed import MissedNotes
from ejkernel.ops.config.shared import packs
from ejkernel.ops.config.shared.choice import judge
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.errors import ArgumentError, ConfigError, DescriptionError
from ejkernel.ops.utils.storage.sealed import sealed_json
from ejkernel.settings import Settings


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


DOUBLE: Final = Double("double")
X: Final = jax.ShapeDtypeStruct((16, 8), jnp.float32)
_MEMBER: Final = b',\n  "sha256": "%s"\n}\n'
_LINE: Final = b'{"sha256":"%s"}\n'
_WRITTEN: Final = Tile(2)
_FIRST: Final = Tile(1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of file.

    Attributes:
        name: What it is called.
        originals: Content as it is written.
        read: Reads content as its user does, and returns what it stands for, in a form that can be compared.
        declared: What `read` says that it may raise.
        seal: Makes changed content whole again; `None` where there is no digest.
        is_json: How many JSON values there are: one, or one a line; `""` if it is no JSON.
        is_exact: Whether there are digests that tell each change of content.
        in_parts: Whether what is read is a list, of which damage may leave some.
        legal: Whether something may come of content that was changed, and sealed again if it can be.
    """

    name: str
    originals: tuple[bytes, ...]
    read: Callable[[bytes], Any]
    declared: tuple[type[BaseException], ...] = ()
    seal: Callable[[bytes], bytes] | None = None
    is_json: str = ""
    is_exact: bool = True
    in_parts: bool = False
    legal: Callable[[Any], bool] = lambda _: True


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
        (self.entry,) = (file for file in (folder / "cache").glob("*/*/*.json") if "missed" not in file.parts)
        (self.log,) = (folder / "cache").rglob("*.jsonl")
        (self.note,) = self.notes.files()
        (self.pack,) = (folder / "copy").iterdir()
        self.bundle = folder / "bundle"
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
    _write_pack(cache, inv.key, folder / "copy")
    _write_bundle(folder / "bundle", inv)
    _write_programs(folder)
    lines = (
        {"kernel": "double", "args": [f"f32[{n},8]"], "kwargs": {"causal": True}, **more}
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
    """Write a bundle, whose program is none: reading it runs nothing."""
    folder.mkdir()
    code = b"machine code"
    (folder / "000-0000.bin").write_bytes(code)
    digest = hashlib.sha256(code).hexdigest()
    row = {"config": {"rows": 2}, "config_type": f"{Tile.__module__}.Tile", "status": "ready", "file": "000-0000.bin"}
    row |= {"sha256": digest, "inputs": 1, "outputs": 1}
    other = {"config": {"rows": 3}, "config_type": row["config_type"], "status": "failed", "reason": "it does not fit"}
    target, version, jaxlib = device_and_versions()
    calls = [{"description": inv.description, "candidates": [row, other]}]
    manifest = {"schema": 2, "target": target, "jax": version, "jaxlib": jaxlib, "calls": calls}
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


# --- the formats ---


def formats(folder: Path) -> dict[str, Format]:
    """Return all formats; readers of files keep what they read in a folder."""
    files = write(folder / "files")
    inv, key = files.inv, files.inv.key
    written = parsed(files.entry.read_bytes(), None)
    manifest_then = (files.bundle / "manifest.json").read_bytes()
    canonical = identity(key)

    def entry(raw: bytes) -> Any:
        found = parsed(raw, None)
        check_key(found, canonical)
        return decoded(found, Tile)

    def untyped(raw: bytes) -> Any:
        return decoded(parsed(raw, None), None)

    def log(raw: bytes) -> Any:
        lines = lines_of(raw)
        load_header(lines)
        search = load(lines)
        search.summary(width=80)
        return search.record(cfg_type=Tile).times

    def note(raw: bytes) -> Any:
        files.note.write_bytes(raw)
        found = files.notes.read(files.note)
        assert found is not None  # it was written
        return _calls([rebuild(found.call, key=found.config_key.call, op=found.config_key.op)])

    def manifest(raw: bytes) -> Any:
        (files.bundle / "manifest.json").write_bytes(raw)
        return [(call.description, call.configs, len(call.programs)) for call in read_bundle(files.bundle)]

    def code(raw: bytes) -> Any:
        (files.bundle / "manifest.json").write_bytes(manifest_then)
        (files.bundle / "000-0000.bin").write_bytes(raw)
        return [
            (config, program.code.read()) for call in read_bundle(files.bundle) for config, program in call.programs
        ]

    def result(raw: bytes) -> Any:
        found = AutotuningResult.loads(raw.decode("utf-8", "surrogateescape"))
        str(found)
        return found

    def pack(raw: bytes) -> Any:
        packs.check(files.pack.name, raw)
        return raw

    def copy(raw: bytes) -> Any:
        files.pack.write_bytes(raw)
        copy = LocalCopy(files.pack.parent)
        entries = copy.find(key)
        for variants in copy.variants("double"):
            judge(written, variants[0])
        configs = [decoded(entry, Tile) for entry in entries]
        list(copy.best_lines())
        return configs

    def program(raw: bytes) -> Any:
        files.text.write_bytes(raw)
        return _calls(calls_in_file(files.text).calls)

    def description(raw: bytes) -> Any:
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):  # of ours: where descriptions are read, it is by others
            return []
        return _calls([rebuild(data)])

    def shapes(raw: bytes) -> Any:
        files.shapes.write_bytes(raw)
        return _calls(calls_of_shapes(files.shapes).calls)

    def environment(raw: bytes) -> Any:
        words = raw.decode("utf-8", "surrogateescape").split("\n")
        env = dict(word.partition("=")[::2] for word in words)
        return Settings.from_env(env)

    whole = AutotuningResult(key.device, (Entry(key.op, key.call, _WRITTEN), Entry("plain@v0", "0" * 16, {"a": [1]})))
    variables = "EJKERNEL_ON_MISS=tune\nEJKERNEL_OPS_STAMP=json\nEJKERNEL_STALE=jax=retune\nEJKERNEL_CACHE_DIR=a"
    programs = tuple(file.read_bytes() for file in (files.text, files.hlo, files.exported))
    unusable = (UnusableError,)
    found = [
        Format(
            name="entry",
            originals=(files.entry.read_bytes(),),
            read=entry,
            declared=unusable,
            seal=sealed_member,
            is_json="one",
            legal=lambda config: type(config) is Tile and type(config.rows) is int and type(config.order) is str,
        ),
        Format(
            name="entry, its own type",
            originals=(files.entry.read_bytes(),),
            read=untyped,
            declared=unusable,
            seal=sealed_member,
            is_json="one",
        ),
        Format(
            name="log",
            originals=(files.log.read_bytes(),),
            read=log,
            declared=unusable,
            seal=sealed_line,
            is_json="lines",
            legal=lambda times: all(
                type(config) is Tile and (seconds is None or 1e-13 < seconds < 1e10) for config, seconds in times
            ),
        ),
        Format(
            name="note",
            originals=(files.note.read_bytes(),),
            read=note,
            declared=(UnusableError, DescriptionError),
            seal=sealed_member,
            is_json="one",
            legal=lambda calls: calls == [(inv.key, canonical_json(inv.description))],
        ),
        Format(
            name="manifest",
            originals=(manifest_then,),
            read=manifest,
            declared=(ConfigError,),
            seal=sealed_member,
            is_json="one",
        ),
        Format(
            name="machine code",
            originals=((files.bundle / "000-0000.bin").read_bytes(),),
            read=code,
            declared=(ConfigError,),
            in_parts=True,
        ),
        Format(
            name="result",
            originals=(whole.dumps().encode(),),
            read=result,
            declared=(ConfigError,),
            seal=sealed_member,
            is_json="one",
        ),
        Format(name="pack", originals=(files.pack.read_bytes(),), read=pack, declared=unusable),
        Format(
            name="copy of a pack",
            originals=(files.pack.read_bytes(),),
            read=copy,
            declared=unusable,
            seal=sealed_pack,
            in_parts=True,
            legal=lambda configs: all(type(config) is Tile for config in configs),
        ),
        Format(name="program", originals=programs, read=program, declared=(ArgumentError,), in_parts=True),
        Format(
            name="description",
            originals=tuple(canonical_json(inv.description).encode() for inv in calls_in_file(files.text).calls),
            read=description,
            declared=(DescriptionError,),
            is_json="one",
            is_exact=False,
        ),
        Format(
            name="shapes",
            originals=(files.shapes.read_bytes(),),
            read=shapes,
            declared=(ArgumentError,),
            is_json="lines",
            is_exact=False,
        ),
        Format(
            name="environment",
            originals=(variables.encode(),),
            read=environment,
            declared=(ConfigError, RuntimeError),  # RuntimeError: `~` of a user that there is not
            is_exact=False,
        ),
    ]
    return {format.name: format for format in found}


def _calls(calls: Sequence[Invocation[Any, Any]]) -> list[tuple[ConfigKey, str]]:
    return [(inv.key, canonical_json(inv.description)) for inv in calls]


def canonical_json(data: object) -> str:
    """Return plain data in one form."""
    return json.dumps(data, sort_keys=True)


# --- digests ---


def body_of(raw: bytes) -> bytes:
    """Return content without the digest that it ends with."""
    return re.sub(rb'(,\n  "sha256": "[0-9a-f]{64}"\n\}|\{"sha256":"[0-9a-f]{64}"\})\n?\Z', b"", raw)


def sealed_member(body: bytes) -> bytes:
    """Return the text of an object with its digest as the last member."""
    return body + _MEMBER % hashlib.sha256(body).hexdigest().encode()


def sealed_line(body: bytes) -> bytes:
    """Return lines with a last one that has their digest."""
    return body + _LINE % hashlib.sha256(body).hexdigest().encode()


def sealed_pack(body: bytes) -> bytes:
    """Return the lines of a pack, each with its digest."""
    return b"".join(map(_sealed_pack_line, body.splitlines(keepends=True)))


def _sealed_pack_line(line: bytes) -> bytes:
    parts = line.split(b'"', 4)
    if len(parts) != 5:
        return line
    text = parts[4][1:].removesuffix(b"\n").removesuffix(b"]")
    parts[3] = hashlib.sha256(parts[1] + text).hexdigest()[:32].encode()
    return b'"'.join(parts)


def quiet() -> None:
    """Have no warning shown: what is damaged is warned of, each file once."""
    warnings.simplefilter("ignore")
