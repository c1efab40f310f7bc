# SPDX-License-Identifier: Apache-2.0
"""Calls to tune from files: a program's text, an exported program, notes of missed calls, a bundle.

Files are data. They refer to registered kernels, functions and types, and import nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.autotuner.compile.bundles import BundledCall, read_bundle
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.config._files import UnusableError, read_file
from ejkernel.ops.config.misses.notes import MissedNotes
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ArgumentError, ConfigError, DescriptionError, OfflineWarning
from ejkernel.ops.execution.discovery import calls_in_text, listed
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.meta import SPLIT
from ejkernel.ops.utils.values.payloads import text_of_bytecode

_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_LARGEST: Final = 1 << 30  # bytes of a program's file
_BYTECODE: Final = b"ML\xefR"
_PROGRAM: Final = re.compile(r"^[ \t]*(HloModule\b|(builtin\.)?module\b[^\n]*\{|#\w+ = loc\()", re.M)  # first line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Calls to tune.

    Attributes:
        name: The source of the calls.
        calls: The calls.
        counts: A summary of usable and unusable items, for the end of the report; may be empty.
        empty: The error message for an empty `calls`; empty if that is not an error.
        notes: The notes of missed calls, if they are the source.
        compiled: The compiled candidates of a bundle, by key.
        device: The device to tune on.
        sets: The calls in sets that share a configuration, if any.
        times: How often one run of the program makes each call, by key, where known.
        drawn_bytes: Bytes of the program's arguments that are types, not arrays.
    """

    name: str
    calls: tuple[Invocation[Any, Any], ...]
    counts: str = ""
    empty: str = ""
    notes: MissedNotes | None = None
    compiled: Mapping[ConfigKey, BundledCall] = dataclasses.field(default_factory=dict)
    device: str = ""
    sets: tuple[tuple[SharedCall, ...], ...] = ()
    times: Mapping[ConfigKey, int] = dataclasses.field(default_factory=dict)
    drawn_bytes: int = 0

    @property
    def in_sets(self) -> list[Sequence[SharedCall]]:
        """The calls in sets that share a configuration; by default one call per set, forward calls first."""
        if self.sets:
            return list(self.sets)
        return [[SharedCall(inv=inv)] for inv in sorted(self.calls, key=lambda inv: inv.direction != "fwd")]

    def on(self, device: str) -> Found:
        """Return the same calls for another device."""
        calls = {inv.key: dataclasses.replace(inv, device=device) for inv in self.calls}
        times = {calls[key].key: number for key, number in self.times.items() if key in calls}
        return dataclasses.replace(self, calls=tuple(calls.values()), device=device, times=times)

    def settle(self, is_tuned: Callable[[Invocation[Any, Any]], bool]) -> None:
        """Remove the notes of tuned calls."""
        if self.notes is not None:
            for inv in filter(is_tuned, self.calls):
                self.notes.remove(inv.key)


def calls_in_file(path: Path) -> Found:
    """Return the calls in the text of a program (StableHLO or HLO) or in an exported program.

    Warns of every label without a call that can be tuned here.

    Args:
        path: The file; an exported program is the result of `jax.export`'s `Exported.serialize()`.

    Raises:
        ArgumentError: The file cannot be read, or is not a program.
    """
    text = _program_text(path)
    program = calls_in_text(text)
    if not program.labels:
        _check_program(path, text)
    # The partitioner determines the shards of such a call during compilation, so a text does not contain them.
    if SPLIT in text:
        _warn(
            f"{text.count(SPLIT)} calls of {path} are partitioned over devices, and the text does not contain their "
            "shards; tune the program as MODULE:FUNCTION, with --mesh-devices if this machine lacks its devices."
        )
    elif not program.labels:
        _warn(f"{path} has no labels of kernel calls: it makes none, or was lowered with EJKERNEL_OPS_STAMP=none.")
    if program.bare:
        _warn(
            f"labels without a description of their call: {listed(program.bare)}; lower the program with "
            "EJKERNEL_OPS_STAMP=json, or tune it as MODULE:FUNCTION."
        )
    for reason in program.why_refused():
        _warn(f"{reason}{_hint(reason)}")
    counts = (
        f"{path}: {counted(program.labels, 'label')}, {_usable(len(program.calls))}, "
        f"{len(program.bare)} without a description, {len(program.refused)} not usable here"
    )
    return Found(name=str(path), calls=program.calls, counts=counts, empty=_empty(path))


def calls_in_bundle(folder: Path) -> Found:
    """Return the calls of a bundle, with their compiled candidates.

    Args:
        folder: The bundle.

    Raises:
        ConfigError: The folder is not a bundle for this device and JAX version, or the module of a kernel is missing.
    """
    compiled, calls = {}, []
    try:
        bundled = read_bundle(folder)
    except ConfigError as error:
        hint = _hint(str(error))
        if not hint:
            raise
        raise ConfigError(f"{error}{hint}") from error
    for call in bundled:
        description: Any = call.description
        op = description.get("op") if isinstance(description, dict) else "a call"
        for inv in _rebuilt(op, description):
            calls.append(inv)
            compiled[inv.key] = call
    counts = f"{folder}: {counted(len(bundled), 'call')}, {len(bundled) - len(calls)} not usable here"
    return Found(name=str(folder), calls=tuple(calls), counts=counts, empty=_empty(folder), compiled=compiled)


def missed_calls(cache_dir: Path) -> Found:
    """Return the noted missed calls of this device.

    Args:
        cache_dir: The folder of the persistent cache; the notes lie beside it.
    """
    notes, device = MissedNotes(cache_dir), device_fingerprint()
    every = list(notes.entries())
    # Tuning a call of another device would measure it for this device and save it under that key.
    here = [note for note in every if note.config_key.device == device]
    calls: list[Invocation[Any, Any]] = []
    for note in here:
        key = note.config_key
        # The file names the module, but importing it is the user's decision.
        module = note.kernel.rpartition(".")[0]
        known = module if _MODULE.fullmatch(module) and module != "__main__" else "MODULE"
        name = f"{key.op}:{key.call} (of {note.kernel})"
        calls += _rebuilt(name, note.call, module=known, key=key.call, op=key.op)
    refused = len(here) - len(calls)
    counts = (
        f"{notes.folder}: {counted(len(every), 'note')}, {_usable(len(calls))}, "
        f"{refused} not usable here, {len(every) - len(here)} of other devices"
    )
    if not every:
        counts = f"{notes.folder}: no notes; programs that run with EJKERNEL_NOTE_MISSES=1 write them"
    empty = _empty(notes.folder) if refused else ""  # no notes: all missed calls are tuned
    return Found(name=str(notes.folder), calls=tuple(calls), counts=counts, empty=empty, notes=notes)


def _rebuilt(name: object, description: Any, *, module: str = "MODULE", **expected: Any) -> list[Invocation[Any, Any]]:
    """Return a described call; empty, with a warning that names the module, if it cannot be rebuilt here."""
    try:
        return [rebuild(description, **expected)]
    except DescriptionError as error:
        _warn(f"{name}: {error}{_hint(str(error), module)}")
        return []


def _program_text(path: Path) -> str:
    try:
        data = read_file(path, _LARGEST, follow_links=True)
    except UnusableError as error:
        raise ArgumentError(f"{path}: {error}.") from error
    if data is None:
        raise ArgumentError(f"there is no file {path}.")
    if data.startswith(_BYTECODE):
        # Not parsed: MLIR's reader hangs on some corrupt programs.
        raise ArgumentError(f"{path} is MLIR bytecode; save the program as text, the result of lowered.as_text().")
    if b"\0" not in data:
        return data.decode("utf-8", "replace")  # labels are ASCII; other bytes do not matter
    try:
        # Only search the exported program's strings: `jax.export.deserialize` would run registered user functions.
        return f"module {{\n{text_of_bytecode(data)}\n}}"  # without labels, too, it is a program
    except ValueError as error:
        raise ArgumentError(f"{path} is neither a program's text nor a readable exported program: {error}.") from error


def _check_program(path: Path, text: str) -> None:
    """Check that a text without labels is the text of a program.

    Raises:
        ArgumentError: It is not.
    """
    if not _PROGRAM.search(text):
        what = "is empty" if not text.strip() else "is not a lowered program: it has no `module` of StableHLO or HLO"
        raise ArgumentError(
            f"{path} {what}. Save the result of jax.jit(f).lower(...).as_text(), lowered with EJKERNEL_OPS_STAMP=json."
        )


def _usable(count: int) -> str:
    return f"{count} of them {'a call' if count == 1 else 'calls'} that can be tuned here"


def _empty(place: Path) -> str:
    return f"{place} has no call that can be tuned here; the warnings above say why."


def _hint(reason: str, module: str = "MODULE") -> str:
    signs = ("name the module", "import its module")
    return f" (--import {module})" if any(sign in reason for sign in signs) else ""


def _warn(text: str) -> None:
    warn(text, OfflineWarning)
