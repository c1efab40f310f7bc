# SPDX-License-Identifier: Apache-2.0
"""Calls to tune that come from files: a program's text, an exported program, notes of missed calls, a bundle.

What a file says is data: it names kernels that are there, and what may be named with them, and imports nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.autotuner.compile.bundles import BundledCall, read_bundle
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.config._files import UnusableError, read_file
from ejkernel.ops.config.missed import MissedNotes
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ArgumentError, ConfigError, DescriptionError, OfflineWarning
from ejkernel.ops.execution.program_text import calls_in_text, listed
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.meta import SPLIT
from ejkernel.ops.utils.values.payloads import text_of_bytecode

_LARGEST: Final = 1 << 30  # bytes of a program's file
_BYTECODE: Final = b"ML\xefR"
_PROGRAM: Final = re.compile(r"^[ \t]*(HloModule\b|(builtin\.)?module\b[^\n]*\{|#\w+ = loc\()", re.M)  # how one begins


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Calls to tune.

    Attributes:
        name: Where they were found.
        calls: The calls.
        counts: What became of everything that was there, for the end of the report; `""` if there is nothing to say.
        empty: Why it is a failure if there are no calls; `""` if it is none.
        notes: The notes that they come from, if they do.
        compiled: Their candidates, where they are compiled already.
        device: The device that they would be tuned on.
        sets: The calls, in sets that are to share a configuration, if they are.
    """

    name: str
    calls: tuple[Invocation[Any, Any], ...]
    counts: str = ""
    empty: str = ""
    notes: MissedNotes | None = None
    compiled: Mapping[ConfigKey, BundledCall] = dataclasses.field(default_factory=dict)
    device: str = ""
    sets: tuple[tuple[SharedCall, ...], ...] = ()

    def settle(self, is_tuned: Callable[[Invocation[Any, Any]], bool]) -> None:
        """Remove the notes of the calls that are tuned by now."""
        for inv in self.calls if self.notes is not None else ():
            if self.notes is not None and is_tuned(inv):
                self.notes.remove(inv.key)


def calls_in_file(path: Path) -> Found:
    """Return the calls that a program's text names, StableHLO or HLO, or that of an exported program.

    Every label that names no call that can be tuned here is accounted for in a warning.

    Args:
        path: The file; an exported program is what `Exported.serialize()` of `jax.export` returns.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    text = _program_text(path)
    program = calls_in_text(text)
    if not program.labels:
        _check_program(path, text)
    # The partitioner asks for the parts of such a call while XLA compiles, and a text does not ask.
    if SPLIT in text:
        _warn(
            f"{text.count(SPLIT)} calls of {path} split themselves over devices, and a text does not say how; tune the "
            "program itself, as MODULE:FUNCTION, with --mesh-devices if its mesh is not here."
        )
    elif not program.labels:
        _warn(f"no kernel call is named in {path}; was the program lowered with EJKERNEL_OPS_STAMP=none?")
    if program.bare:
        _warn(
            f"labels that carry no description of their call: {listed(program.bare)}; lower the program with "
            "EJKERNEL_OPS_STAMP=json, or tune it as MODULE:FUNCTION."
        )
    for reason in program.why_refused():
        _warn(f"{reason}{_hint(reason)}")
    counts = (
        f"{path}: {counted(program.labels, 'label')}, {_usable(len(program.calls))}, "
        f"{len(program.bare)} without a description, {len(program.refused)} of no use here"
    )
    return Found(name=str(path), calls=program.calls, counts=counts, empty=_empty(path))


def calls_in_bundle(folder: Path) -> Found:
    """Return the calls of a bundle, with their compiled candidates.

    Args:
        folder: The bundle.

    Raises:
        ConfigError: it is no bundle, not for this device and this JAX, or of kernels whose module was not named.
    """
    compiled, calls, refused = {}, [], 0
    try:
        bundled = read_bundle(folder)
    except ConfigError as error:
        hint = _hint(str(error))
        if not hint:
            raise
        raise ConfigError(f"{error}{hint}") from error
    for call in bundled:
        try:
            inv = rebuild(call.description)
        except DescriptionError as error:
            refused += 1
            description: Any = call.description
            op = description.get("op") if isinstance(description, dict) else "a call"
            _warn(f"{op}: {error}{_hint(str(error))}")
            continue
        calls.append(inv)
        compiled[inv.key] = call
    counts = f"{folder}: {counted(len(calls) + refused, 'call')}, {refused} of no use here"
    return Found(name=str(folder), calls=tuple(calls), counts=counts, empty=_empty(folder), compiled=compiled)


def missed_calls(cache_dir: Path) -> Found:
    """Return the calls that were noted as missed on this device.

    Args:
        cache_dir: The folder of the persistent cache, which the notes are beside.
    """
    notes, device = MissedNotes(cache_dir), device_fingerprint()
    calls, refused, elsewhere = [], 0, 0
    for note in notes.entries():
        key = note.config_key
        # It would be measured, and saved, for the device that is here.
        if key.device != device:
            elsewhere += 1
            continue
        try:
            calls.append(rebuild(note.call, key=key.call, op=key.op))
        except DescriptionError as error:
            refused += 1
            _warn(f"{key.op}:{key.call} (of {note.kernel}): {error}{_hint(str(error))}")
    counts = (
        f"{notes.folder}: {counted(len(calls) + refused + elsewhere, 'note')}, {_usable(len(calls))}, "
        f"{refused} of no use here, {elsewhere} of other devices"
    )
    empty = _empty(notes.folder) if refused else ""  # without notes all that was missed is tuned
    return Found(name=str(notes.folder), calls=tuple(calls), counts=counts, empty=empty, notes=notes)


def _program_text(path: Path) -> str:
    try:
        data = read_file(path, _LARGEST, follow_links=True)
    except UnusableError as error:
        raise ArgumentError(f"{path}: {error}.") from error
    if data is None:
        raise ArgumentError(f"there is no file {path}.")
    if data.startswith(_BYTECODE):
        # Not parsed: MLIR's reader does not come back from some programs with a flipped byte.
        raise ArgumentError(f"{path} is MLIR bytecode; write the program as text, as lowered.as_text() gives it.")
    if b"\0" not in data:
        return data.decode("utf-8", "replace")  # labels are ASCII, whatever else is there
    try:
        # An exported program is searched for its strings too: `jax.export.deserialize` calls what users registered.
        return text_of_bytecode(data)
    except ValueError as error:
        raise ArgumentError(
            f"{path} is neither a program's text nor one that this process can read: {error}."
        ) from error


def _check_program(path: Path, text: str) -> None:
    """Raise unless a text that names no call is that of a program.

    Raises:
        ArgumentError: it is not.
    """
    if not _PROGRAM.search(text):
        what = "is empty" if not text.strip() else "is no text of a lowered program: no `module` of StableHLO or HLO"
        raise ArgumentError(
            f"{path} {what}. Write what jax.jit(f).lower(...).as_text() returns, of a program that is lowered with "
            "EJKERNEL_OPS_STAMP=json."
        )


def _usable(count: int) -> str:
    return f"{count} of them {'a call' if count == 1 else 'calls'} that can be tuned here"


def _empty(place: Path) -> str:
    return f"{place} holds no call that can be tuned here; the warnings above say why."


def _hint(reason: str) -> str:
    signs = ("name the module", "import its module")
    return " (--import MODULE)" if any(sign in reason for sign in signs) else ""


def _warn(text: str) -> None:
    warn(text, OfflineWarning)
