# SPDX-License-Identifier: Apache-2.0
"""Each kind of file with its reader, and the errors that the reader may raise.

If a file ends with a digest, or contains digests, `seal` computes them again after a change, as anyone with write
access can. Sealed content may be read as anything of the right form; content that was not sealed must be refused, or
be read as originally written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.torture.material import WRITTEN, Files, Tile, write
from ejkernel.cli.files import calls_in_file
from ejkernel.cli.shapes import calls_of_shapes
from ejkernel.ops import AutotuningResult, ConfigKey, Entry, Invocation
from ejkernel.ops.autotuner.compile.bundles import read_bundle
from ejkernel.ops.autotuner.store.log import lines_of, load, load_header
from ejkernel.ops.autotuner.trials.candidates import CodeFile, Program
from ejkernel.ops.config._files import UnusableError
from ejkernel.ops.config.entries import check_key, decoded, parsed
from ejkernel.ops.config.estimates import chosen
from ejkernel.ops.config.shared import packs
from ejkernel.ops.config.shared.choice import judge
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.kernel import kernel_of
from ejkernel.ops.errors import ArgumentError, ConfigError, DescriptionError
from ejkernel.settings import Settings

_MEMBER: Final = b',\n  "sha256": "%s"\n}\n'
_LINE: Final = b'{"sha256":"%s"}\n'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of file.

    Attributes:
        name: Its name in reports.
        originals: Valid contents.
        read: Reads content as its user does, and returns a comparable result.
        declared: The errors that `read` may raise.
        seal: Computes digests of changed content again; `None` if the format has none.
        is_json: `"one"` JSON value, or one on each of the `"lines"`; `""` if not JSON.
        is_exact: Whether digests detect each change of content.
        in_parts: Whether `read` returns a list, and damage may remove some of its items.
        legal: Whether changed content, sealed again, may be read as this result.
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


class Readers:
    """Readers of content, from files if their users read files.

    Args:
        files: Valid files; the readers overwrite them.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.key = files.inv.key
        self._manifest = (files.bundle / "manifest.json").read_bytes()
        self._entry = parsed(files.entry.read_bytes(), None)

    def entry(self, raw: bytes) -> Any:
        """Read an entry as the type that the kernel says."""
        found = parsed(raw, None)
        check_key(found, self.key)
        return decoded(found, Tile)

    def untyped(self, raw: bytes) -> Any:
        """Read an entry as the type that it names."""
        return decoded(parsed(raw, None), None)

    def log(self, raw: bytes) -> Any:
        """Read the log of a search, as a later search does, and for people."""
        lines = lines_of(raw)
        load_header(lines)
        search = load(lines)
        search.summary(width=80)
        return search.record(cfg_type=Tile).times

    def note(self, raw: bytes) -> Any:
        """Read the note of a missed call."""
        self.files.note.write_bytes(raw)
        found = self.files.notes.read(self.files.note)
        assert found is not None  # it was written
        return _calls([rebuild(found.call, key=found.config_key.call, op=found.config_key.op)])

    def estimate(self, raw: bytes) -> Any:
        """Read the estimates of a call."""
        self.files.estimate.write_bytes(raw)
        found = self.files.estimates.read(self.files.estimate)
        assert found is not None  # it was written
        return [(chosen(found), found.source()), found.times(self.files.inv, kernel_of(self.files.inv))]

    def manifest(self, raw: bytes) -> Any:
        """Read a bundle with this manifest."""
        (self.files.bundle / "manifest.json").write_bytes(raw)
        return [(call.description, call.configs, len(call.programs)) for call in read_bundle(self.files.bundle)]

    def machine_code(self, raw: bytes) -> Any:
        """Read a bundle with this program in it."""
        (self.files.bundle / "manifest.json").write_bytes(self._manifest)
        self.files.code.write_bytes(raw)
        found = [program for call in read_bundle(self.files.bundle) for program in call.programs]
        return [(config, _code_of(program)) for config, program in found]

    def result(self, raw: bytes) -> Any:
        """Read the text of a result."""
        found = AutotuningResult.loads(raw.decode("utf-8", "surrogateescape"))
        str(found)
        return found

    def pack(self, raw: bytes) -> Any:
        """Check a downloaded pack against the digest in its name."""
        packs.check(self.files.pack.name, raw)
        return raw

    def copy(self, raw: bytes) -> Any:
        """Look a key up in the copy of a shared cache, and merge and compare its entries."""
        self.files.pack.write_bytes(raw)
        copy = LocalCopy(self.files.pack.parent)
        entries = copy.find(self.key)
        for variants in copy.variants("tortured"):
            judge(self._entry, variants[0])
        configs = [decoded(entry, Tile) for entry in entries]
        list(copy.best_lines())
        return configs

    def program(self, raw: bytes) -> Any:
        """Find the calls of a program, as a text or exported."""
        self.files.text.write_bytes(raw)
        return _calls(calls_in_file(self.files.text).calls)

    def description(self, raw: bytes) -> Any:
        """Make a call of its description."""
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):  # of ours: where descriptions are read, it is by others
            return []
        return _calls([rebuild(data)])

    def shapes(self, raw: bytes) -> Any:
        """Read a file of shapes."""
        self.files.shapes.write_bytes(raw)
        return _calls(calls_of_shapes(self.files.shapes).calls)

    def environment(self, raw: bytes) -> Any:
        """Read the variables of an environment."""
        words = raw.decode("utf-8", "surrogateescape").split("\n")
        settings = Settings(dict(word.partition("=")[::2] for word in words))
        return [getattr(settings, name) for name in _SETTINGS]


def formats(folder: Path) -> dict[str, Format]:
    """Return all formats; their readers use files in a folder."""
    files = write(folder / "files")
    readers = Readers(files)
    return {format.name: format for format in (*_sealed(files, readers), *_others(files, readers))}


_SETTINGS: Final = [name for name, value in vars(Settings).items() if hasattr(value, "__get__") and name[0] != "_"]
_UNUSABLE: Final = (UnusableError,)


def _is_tile(config: object) -> bool:
    return type(config) is Tile and type(config.rows) is int and type(config.order) is str


def _sealed(files: Files, readers: Readers) -> Iterator[Format]:
    """Yield formats that end with a digest, or contain digests."""
    inv, key = files.inv, files.inv.key
    entry = (files.entry.read_bytes(),)
    one: Any = {"seal": sealed_member, "is_json": "one"}
    yield Format(name="entry", originals=entry, read=readers.entry, declared=_UNUSABLE, legal=_is_tile, **one)
    yield Format(name="entry, its own type", originals=entry, read=readers.untyped, declared=_UNUSABLE, **one)
    yield Format(
        name="log",
        originals=(files.log.read_bytes(),),
        read=readers.log,
        declared=_UNUSABLE,
        seal=sealed_line,
        is_json="lines",
        legal=lambda times: all(_is_tile(config) and (s is None or 1e-13 < s < 1e10) for config, s in times),
    )
    yield Format(
        name="note",
        originals=(files.note.read_bytes(),),
        read=readers.note,
        declared=(UnusableError, DescriptionError),
        legal=lambda calls: calls == _calls([inv]),  # its name has the key, and the key is of the call
        **one,
    )
    yield Format(
        name="estimate", originals=(files.estimate.read_bytes(),), read=readers.estimate, declared=_UNUSABLE, **one
    )
    manifest = (files.bundle / "manifest.json").read_bytes()
    yield Format(name="manifest", originals=(manifest,), read=readers.manifest, declared=(ConfigError,), **one)
    entries = (Entry(key.op, key.call, WRITTEN), Entry("plain@v0", "0" * 16, {"a": [1]}))
    result = AutotuningResult(key.device, entries).dumps().encode()
    yield Format(name="result", originals=(result,), read=readers.result, declared=(ConfigError,), **one)
    yield Format(
        name="copy of a pack",
        originals=(files.pack.read_bytes(),),
        read=readers.copy,
        declared=_UNUSABLE,
        seal=sealed_pack,
        in_parts=True,
        legal=lambda configs: all(map(_is_tile, configs)),
    )


def _others(files: Files, readers: Readers) -> Iterator[Format]:
    """Yield formats without digests, or with the digest elsewhere."""
    yield Format(name="pack", originals=(files.pack.read_bytes(),), read=readers.pack, declared=_UNUSABLE)
    yield Format(
        name="machine code",
        originals=(files.code.read_bytes(),),
        read=readers.machine_code,
        declared=(ConfigError,),
        in_parts=True,
    )
    yield Format(
        name="program",
        originals=tuple(file.read_bytes() for file in (files.text, files.hlo, files.exported)),
        read=readers.program,
        declared=(ArgumentError,),
        in_parts=True,
    )
    calls = [inv.description for inv in calls_in_file(files.text).calls]
    yield Format(
        name="description",
        originals=tuple(canonical_json(call).encode() for call in calls),
        read=readers.description,
        declared=(DescriptionError,),
        is_json="one",
        is_exact=False,
    )
    yield Format(
        name="shapes",
        originals=(files.shapes.read_bytes(),),
        read=readers.shapes,
        declared=(ArgumentError,),
        is_json="lines",
        is_exact=False,
    )
    variables = "EJKERNEL_ON_MISS=tune\nEJKERNEL_OPS_STAMP=json\nEJKERNEL_STALE=jax=retune\nEJKERNEL_CACHE_DIR=a"
    yield Format(
        name="environment",
        originals=(variables.encode(),),
        read=readers.environment,
        declared=(ConfigError, RuntimeError),  # RuntimeError: `~` of an unknown user
        is_exact=False,
    )


def _code_of(program: Program) -> bytes:
    assert isinstance(program.code, CodeFile)  # where a bundle has its programs
    return program.code.read()


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
