# SPDX-License-Identifier: Apache-2.0
"""The environment of the files: killed processes, full disks, folders of other users, clocks.

If a value cannot be stored, it stays in memory and the earlier file stays intact. Reading something that is not a
regular file never blocks.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.torture.commands import status_of
from benchmarks.torture.crashes import Plan, started
from benchmarks.torture.material import Files, Tile, call, quiet, search_of, write
from benchmarks.torture.part import Budget, Tally
from ejkernel.cli.files import calls_in_file, missed_calls
from ejkernel.cli.shapes import calls_of_shapes
from ejkernel.ops import PersistentCache
from ejkernel.ops.autotuner.compile.bundles import compile_bundle, read_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.config.misses.notes import MissedNotes
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.errors import ArgumentError, ConfigError, DescriptionError

_NOBODY: Final = 65534
_PROCESSES: Final = 16
_OPERATIONS: Final = 10_000  # of each
_EVERY: Final = 800  # operations, about, after which one of the processes is killed


def crashes(budget: Budget, tally: Tally) -> None:
    """Have processes put and get, and kill them."""
    operations = _OPERATIONS if budget.inputs is None else budget.inputs
    processes = _PROCESSES if operations > 1000 else 4
    every = min(_EVERY, operations)
    folder = budget.folder / "crashes"
    found = started(Plan(folder=str(folder), seed=budget.seed, processes=processes, operations=operations, every=every))
    tally.counts["puts and gets"] += found["operations"]
    tally.counts["kills"] += found["kills"]
    for problem in found["problems"]:
        kind = problem.partition(":")[0]
        tally.found(kind if kind in ("lost", "hang", "wrong") else "uncaught", "puts and gets", 0, problem)


# --- full disks, folders of other users ---


def _stored(cache: PersistentCache, number: int) -> None:
    """Put one of everything."""
    inv = call()
    cache.put(inv.key, Tile(number), call="x" * 3000)
    MeasurementStore(cache).save(search_of(inv))
    if cache.path is not None:
        MissedNotes(cache.path).put(call(causal=False), "heuristic")


def _check_stored(folder: Path, before: int, cache: PersistentCache, now: int) -> str:
    """Return the problem after a put that may have failed to store, or `""`."""
    key = call().key
    on_disk, told = PersistentCache(folder, shipped=False).get(key, Tile), cache.get(key, Tile)
    if on_disk not in (Tile(before), Tile(now)):
        return f"lost: {on_disk} is on the disk, where {before} was"
    if told != Tile(now):
        return f"lost: {told} is read, and {now} was put"
    left = [file.name for file in folder.rglob(".*.tmp")]
    return f"wrong: {left} is left" if left else ""


def _check_kept(folder: Path, cache: PersistentCache, now: int) -> str:
    """Return the problem if neither the cache folder nor another one has the last entry, or `""`."""
    places = [folder, *([] if cache.kept_in is None else [cache.kept_in])]
    found = [PersistentCache(place, shipped=False).get(call().key, Tile) for place in places]
    return "" if Tile(now) in found else f"lost: {now} was put, and {found} are in {places}"


def disks(budget: Budget, tally: Tally) -> None:
    """Write to full disks and to folders without write permission."""
    quiet()
    tempfile.tempdir = str(budget.folder)  # results that a cache does not take are kept there
    _limited(budget, tally)
    _full(budget, tally)
    _not_writable(budget, tally)
    _bundles(budget, tally)


def _limited(budget: Budget, tally: Tally) -> None:
    """Let files have so many bytes and no more: each write ends in the middle."""
    cache, folder = None, budget.folder / "limited"
    _stored(PersistentCache(folder, shipped=False), 0)
    before = 0
    for number in range(1, (budget.inputs or 4000) + 1):
        cache = PersistentCache(folder, shipped=False)
        with _file_size(budget.random("limit", number).randrange(6000)):
            tally.try_("writes beyond a limit of the file size", number, functools.partial(_stored, cache, number))
        problem = _check_stored(folder, before, cache, number)
        _tell(tally, "writes beyond a limit of the file size", number, problem)
        found = PersistentCache(folder, shipped=False).get(call().key, Tile)
        before = before if found is None else found.rows


@contextlib.contextmanager
def _file_size(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def _full(budget: Budget, tally: Tally) -> None:
    """Fill a small disk."""
    disk = budget.folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "torture", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        tally.left_out.append("no right to mount a small disk: a limit of files' sizes stands for a full one")
        return
    try:
        folder, filling = disk / "cache", disk / "filling"
        _stored(PersistentCache(folder, shipped=False), 0)
        for number in range(1, (budget.inputs or 1000) + 1):
            before = PersistentCache(folder, shipped=False).get(call().key, Tile).rows
            with contextlib.suppress(OSError), filling.open("ab", buffering=0) as stream:
                while stream.write(b"x" * 4096):
                    pass
            os.truncate(filling, max(0, filling.stat().st_size - 4096 * budget.random("full", number).randrange(6)))
            cache = PersistentCache(folder, shipped=False)
            tally.try_("writes to a full disk", number, functools.partial(_stored, cache, number))
            problem = _check_stored(folder, before, cache, number) or _check_kept(folder, cache, number)
            _tell(tally, "writes to a full disk", number, problem)
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def _not_writable(budget: Budget, tally: Tally) -> None:
    """Use folders that cannot be written, or are none."""
    where = "folders that cannot be written"
    ours, file = budget.folder / "read-only", budget.folder / "file"
    _stored(PersistentCache(ours, shipped=False), 7)
    file.write_text("")
    os.chmod(budget.folder, 0o755)
    for item in (ours, *ours.rglob("*")):
        os.chmod(item, 0o555 if item.is_dir() else 0o444)
    for words in _READING:
        status_of([*words, "--cache", str(budget.folder / "limited"), *(["--dry-run"] if len(words) > 2 else [])])
    places = {ours: Tile(7), ours / "new": None, file: None, file / "cache": None, Path("/proc/cache"): None}
    with _as_nobody():
        for number, (folder, before) in enumerate(places.items()):
            cache = PersistentCache(folder, shipped=False)
            if cache.get(call().key, Tile) != before:
                tally.found("lost", where, number, f"{folder}: {cache.get(call().key, Tile)}")
            tally.try_(where, number, functools.partial(_stored, cache, 8))
            if cache.get(call().key, Tile) != Tile(8):
                tally.found("lost", where, number, f"{folder} has lost the new entry")
            for words in _READING:
                tally.try_(where, number, functools.partial(status_of, [*words, "--cache", str(folder)]))
            tally.counts[where] += 1
    os.chmod(ours, 0o755)
    if PersistentCache(ours, shipped=False).get(call().key, Tile) != Tile(7):
        tally.found("lost", where, 0, "a read-only entry has changed")


_READING: Final = (
    ["show"],
    ["cache", "verify"],
    ["cache", "clear", "--yes"],
    ["cache", "prune", "--older-than", "1m"],
)


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    """Drop the superuser's rights, which allow writing everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _bundles(budget: Budget, tally: Tally) -> None:
    """Write bundles to a full disk: the result is a clear error, and an attempt with more room finishes the bundle."""
    where = "bundles on a full disk"
    target = Target.named("here")
    for number in range(min(4, budget.inputs or 4)):
        folder = budget.folder / f"bundle-{number}"
        with _file_size((0, 100, 3000, 10_000)[number]):
            tally.try_(where, number, functools.partial(compile_bundle, [call()], target, folder), (ConfigError,))
        tally.counts[where] += 1
        if not (folder / "manifest.json").exists():
            tally.try_(where, number, functools.partial(compile_bundle, [call()], target, folder))
            tally.try_(where, number, functools.partial(read_bundle, folder))


def _tell(tally: Tally, where: str, number: int, problem: str) -> None:
    tally.counts[where] += 1
    if problem:
        tally.found(problem.partition(":")[0], where, number, problem)


# --- nodes that are not regular files ---


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _socket(place: Path) -> None:
    here = Path.cwd()
    os.chdir(place.parent)  # a socket's name must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(place.name)
    finally:
        os.chdir(here)


def _sparse(place: Path) -> None:
    with place.open("wb") as stream:
        stream.truncate(1 << 40)


def _not_readable(place: Path) -> None:
    place.write_text("{}")
    place.chmod(0)


NODES: Final[dict[str, Callable[[Path], Any]]] = {
    "nothing": lambda place: None,
    "an empty file": lambda place: place.write_bytes(b""),
    "a folder": lambda place: place.mkdir(),
    "a link to itself": lambda place: place.symlink_to(place.name),
    "a link to nothing": lambda place: place.symlink_to("nothing"),
    "a link to its folder": lambda place: place.symlink_to("."),
    "a link to /dev/zero": lambda place: place.symlink_to("/dev/zero"),
    "a link to /dev/full": lambda place: place.symlink_to("/dev/full"),
    "a link to /proc/self/mem": lambda place: place.symlink_to("/proc/self/mem"),
    "a link to /proc/self/environ": lambda place: place.symlink_to("/proc/self/environ"),
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a terabyte of nothing": _sparse,
    "a file that may not be read": _not_readable,
}


def places(budget: Budget, tally: Tally) -> None:
    """Replace each file and each folder by every other kind of file-system node."""
    quiet()
    whole = write(budget.folder / "whole")
    os.chmod(budget.folder, 0o755)
    # a pipe named on the command line blocks by design
    cases = [case for case in itertools.product(NODES, _places(whole)) if case != ("a pipe", "shapes")]
    for number in budget.chosen(len(cases)):
        name, place = cases[number]
        where = f"{name} as {place}"
        if budget.only and where not in budget.only:
            continue
        files = Files(Path(shutil.copytree(whole.folder, budget.folder / f"{number}")))
        at = _places(files)[place]
        _remove(at)
        NODES[name](at)
        with _as_nobody() if name == "a file that may not be read" else contextlib.nullcontext():
            _read_all(files, where, number, tally)
        _write_again(files, where, number, tally)
        tally.counts["places"] += 1


def _places(files: Files) -> dict[str, Path]:
    return {
        "entry": files.entry,
        "op": files.entry.parent,
        "device": files.entry.parents[1],
        "log": files.log,
        "note": files.note,
        "notes": files.notes.folder,
        "manifest": files.bundle / "manifest.json",
        "program": files.code,
        "pack": files.pack,
        "text": files.text,
        "shapes": files.shapes,
    }


_DRY: Final = ("--dry-run", "--in-process")


def _read_all(files: Files, where: str, number: int, tally: Tally) -> None:
    """Have everything read by everything that reads."""
    cache, key = files.cache, files.inv.key
    reads: list[Callable[[], Any]] = [
        lambda: cache.get(key, Tile),
        lambda: cache.problem(key),
        cache.keys,
        lambda: list(MeasurementStore(cache).searches()),
        lambda: MeasurementStore(cache).records(files.inv),
        lambda: list(files.notes.entries()),
        lambda: missed_calls(files.folder / "cache"),
        lambda: read_bundle(files.bundle),
        lambda: LocalCopy(files.pack.parent).find(key),
        lambda: list(LocalCopy(files.pack.parent).entries()),
        lambda: calls_in_file(files.text),
        lambda: calls_of_shapes(files.shapes),
    ]
    for read in reads:
        found = tally.try_(where, number, read, (ConfigError, ArgumentError, DescriptionError))
        if isinstance(found, Tile) and found != Tile(2):
            tally.found("wrong", where, number, f"read as {found}")
    folder = str(cache.path)
    for words in (
        ["show", "--cache", folder],
        ["show", "--log", "", "--cache", folder],
        ["cache", "verify", "--cache", folder],
        ["cache", "prune", "--unreadable", "--dry-run", "--cache", folder],
        ["tune", str(files.text), *_DRY, "--cache", folder],
        ["tune", "--shapes", str(files.shapes), *_DRY, "--cache", folder],
        ["tune", "--from", str(files.bundle), *_DRY, "--cache", folder],
    ):
        tally.try_(where, number, functools.partial(status_of, words))


def _write_again(files: Files, where: str, number: int, tally: Tally) -> None:
    """Store over the replaced nodes, and read the result."""
    cache = PersistentCache(files.cache.path, shipped=False)
    tally.try_(where, number, lambda: _stored(cache, 3))
    if tally.try_(where, number, lambda: cache.get(files.inv.key, Tile)) != Tile(3):
        tally.found("lost", where, number, "the new entry is not there")
    folder = str(cache.path)
    for words in (["cache", "prune", "--unreadable"], ["cache", "clear", "--yes"]):
        tally.try_(where, number, functools.partial(status_of, [*words, "--cache", folder]))
    for target in ("/dev/zero", "/dev/full"):
        if not stat.S_ISCHR(os.stat(target).st_mode):
            tally.found("lost", where, number, f"{target} is no device any more")


# --- clocks ---


def clocks(budget: Budget, tally: Tally) -> None:
    """Have the clock jump, back and far ahead, and files have any time."""
    quiet()
    for number in budget.numbers():
        chance = budget.random("clock", number)
        times = [_time(chance.choice(_TIMES), chance.randrange(-3600, 3600)) for _ in range(12)]
        folder = budget.folder / f"{number}"
        tally.try_("clock", number, functools.partial(_under, folder, times, number, tally, chance))
        shutil.rmtree(folder, ignore_errors=True)
        tally.counts["changes of the clock"] += 1


_TIMES: Final = (0, 1, 1_000_000_000, 1_763_800_000, 2**31 - 1, 2**31, 2**33, 250_000_000_000)


def _time(seconds: float, more: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(max(0.0, seconds + more), datetime.UTC)


def _stopped(time: datetime.datetime) -> Callable[[], datetime.datetime]:
    return lambda: time


def _under(folder: Path, times: list[datetime.datetime], number: int, tally: Tally, chance: Any) -> None:
    """Store several entries, each at its own time; reading must return the last."""
    inv = call()
    for at, time in enumerate(times):
        cache = PersistentCache(folder, shipped=False, clock=_stopped(time))
        cache.put(inv.key, Tile(at))
        MeasurementStore(cache).save(search_of(inv, Tile(100 + at)))
        MissedNotes(folder, clock=_stopped(time)).put(inv, "heuristic")
        if PersistentCache(folder, shipped=False).get(inv.key, Tile) != Tile(at):
            tally.found("wrong", "clock", number, f"an older entry answers after {at}")
        newest = next(iter(MeasurementStore(cache).searches())).record(cfg_type=Tile).times[0][0]
        if newest != Tile(100 + at):
            tally.found("wrong", "clock", number, f"an older search is the newest: {newest} after {at}")
        for file in folder.rglob("*"):
            if chance.random() < 0.3:
                seconds = chance.choice(_TIMES)
                os.utime(file, (seconds, seconds))
    (note,) = MissedNotes(folder).entries()
    if note.processes != len(times):
        tally.found("lost", "clock", number, f"a note counts {note.processes} processes, not {len(times)}")
    for words in (["prune", "--older-than", "1m", "--dry-run"], ["verify"], ["list"]):
        status_of(["cache", *words, "--cache", str(folder)])
