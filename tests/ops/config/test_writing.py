# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: durability, and clean-up of abandoned temporary files."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ejkernel.ops.config import _writing
from ejkernel.ops.config._writing import LEFT_OVER, remove_abandoned, write_file
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning

KEY = ConfigKey("gpu:nvidia_h200", "matmul@v1", "0123456789abcdef")
SYNC = _writing._sync  # the tests replace it


@pytest.fixture
def steps(monkeypatch):
    """The synced and renamed files, in order."""
    found = []
    replace = os.replace

    def fsync(descriptor):
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def renamed(source, target):
        found.append(("renamed", Path(target)))
        replace(source, target)

    monkeypatch.setattr(_writing, "_sync", SYNC)
    monkeypatch.setattr(_writing.os, "fsync", fsync)
    monkeypatch.setattr(_writing.os, "replace", renamed)
    return found


def beside(file, pid=1, age=0.0, text="half"):
    """The temporary file of a process killed during a write."""
    file.parent.mkdir(parents=True, exist_ok=True)
    left = file.with_name(f".{file.name}.{pid}-0123abcd.tmp")
    left.write_text(text, encoding="utf-8")
    now = file.parent.stat().st_mtime
    os.utime(left, (now - age, now - age))
    return left


# --- durability ---


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_before_put_returns(steps, tmp_path):
    file = tmp_path / "file.json"
    write_file(file, "text")
    written, *rest = steps
    assert written.name.startswith(".file.json.")
    assert rest == [("renamed", file), tmp_path]


def test_the_names_of_new_folders_are_kept_too(steps, tmp_path):
    file = tmp_path / "device" / "op" / "file.json"
    write_file(file, "text")
    assert set(steps[2:]) == {tmp_path, tmp_path / "device", tmp_path / "device" / "op"}


def test_a_non_durable_write_does_not_sync(steps, tmp_path):
    write_file(tmp_path / "file.json", "text", durable=False)
    assert steps == [("renamed", tmp_path / "file.json")]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_fsync_is_no_error(monkeypatch, tmp_path, number):
    monkeypatch.setattr(_writing, "_sync", SYNC)
    monkeypatch.setattr(_writing.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(number, "cannot")))
    write_file(tmp_path / "file.json", "text")
    assert (tmp_path / "file.json").read_text() == "text"


def test_a_folder_that_cannot_be_opened_is_written_all_the_same(monkeypatch, tmp_path):
    open_file = os.open

    def refused(path, flags, *mode):
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "no")
        return open_file(path, flags, *mode)

    monkeypatch.setattr(_writing.os, "open", refused)
    write_file(tmp_path / "file.json", "text")
    assert (tmp_path / "file.json").read_text() == "text"


def test_each_entry_in_memory_has_its_own_reason(monkeypatch, tmp_path):
    store, errors = PersistentCache(tmp_path), iter(["disk full", "read-only"])

    def failing(*args, **kwargs):
        raise OSError(next(errors))

    monkeypatch.setattr("ejkernel.ops.config.persistent.write_file", failing)
    with pytest.warns(CacheWarning, match="cannot be written"):
        store.put("cpu:some", "one@v0", "1", 1)
    store.put("cpu:some", "two@v0", "1", 1)
    keys = [ConfigKey("cpu:some", name, "1") for name in ("one@v0", "two@v0")]
    assert list(map(store.why_unwritten, keys)) == ["disk full", "read-only"]
    monkeypatch.undo()
    store.put(keys[1], 2)
    assert list(map(store.why_unwritten, keys)) == ["disk full", ""]


def test_a_disk_that_fails_is_a_warning_and_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(_writing, "_sync", SYNC)
    monkeypatch.setattr(_writing.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken disk")))
    cache = PersistentCache(tmp_path, shipped=False)
    with pytest.warns(CacheWarning, match="broken disk"):
        cache.put(KEY, 1)
    assert cache.get(KEY) == 1
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


# --- abandoned temporary files ---


def test_old_temporary_files_are_removed_by_the_first_write_into_their_folder(tmp_path):
    file = tmp_path / "file.json"
    old, new = beside(file, 1, age=LEFT_OVER + 60), beside(file, 2, age=LEFT_OVER - 60)
    mine = tmp_path / ".mine.tmp"
    mine.write_text("mine")
    os.utime(mine, (0, 0))
    write_file(file, "text")
    assert set(tmp_path.iterdir()) == {file, new, mine}
    os.utime(new, (0, 0))
    write_file(file, "text")  # it was looked for already
    assert new.exists()
    assert old.exists() is False


def test_the_clock_that_counts_is_the_file_system_s(tmp_path):
    left = beside(tmp_path / "file.json", age=10.0)
    written = left.stat().st_mtime
    for age in (LEFT_OVER - 1, LEFT_OVER + 1):
        assert left.exists()
        os.utime(tmp_path, (written + age, written + age))  # as of a write at this time
        remove_abandoned(tmp_path)
    assert not left.exists()
    remove_abandoned(tmp_path / "none")


def test_a_temporary_file_that_cannot_be_removed_does_not_block_others(tmp_path, caplog):
    left = beside(tmp_path / "z.json")
    (tmp_path / ".a.json.1-0123abcd.tmp").mkdir()
    later = left.stat().st_mtime + 2 * LEFT_OVER
    os.utime(tmp_path, (later, later))
    with caplog.at_level("INFO"):
        remove_abandoned(tmp_path)
    assert not left.exists()
    assert "an abandoned temporary file cannot be removed" in caplog.text


def test_a_process_rewrites_a_temporary_file_removed_as_abandoned(monkeypatch, tmp_path):
    replace, taken = os.replace, []

    def take(source, target):
        if not taken:
            taken.append(source)
            Path(source).unlink()
        replace(source, target)

    monkeypatch.setattr(_writing.os, "replace", take)
    write_file(tmp_path / "file.json", "text")
    assert (tmp_path / "file.json").read_text() == "text"
    assert len(list(tmp_path.iterdir())) == 1


# --- killed processes ---

KILLED = """
import os, signal, sys, warnings
from ejkernel.ops.config.persistent import PersistentCache

cache = PersistentCache(sys.argv[1], shipped=False)
warnings.simplefilter("ignore")  # JAX has no threads yet that a fork could lose
for round in range(25):
    receive, tell = os.pipe()
    child = os.fork()
    if not child:
        for number in range(1000):
            cache.put("gpu", "op@v0", f"call{number % 7}", {"round": round, "number": number, "padding": "x" * 999})
            os.write(tell, b".")
    os.close(tell)
    count = 1 + round % 9
    for _ in range(count):
        assert os.read(receive, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while os.read(receive, 1):
        count += 1
    os.close(receive)
    for number in range(max(0, count - 7), count):
        found = cache.get("gpu", "op@v0", f"call{number % 7}")
        assert (found["round"], found["number"]) in ((round, number), (round, number + 7)), (round, number, found)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_stored_entries_survive_killed_processes(tmp_path):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], check=False, capture_output=True, env=environment
    )
    assert done.returncode == 0, done.stderr.decode()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 1 <= len(PersistentCache(tmp_path, shipped=False).keys()) <= 7
    for left in tmp_path.rglob(".*.tmp"):
        os.utime(left, (0, 0))
    PersistentCache(tmp_path, shipped=False).put("gpu", "op@v0", "call0", 1)
    assert list(tmp_path.rglob(".*.tmp")) == []


def test_a_file_beside_its_place_names_its_writer(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(os, "replace", lambda beside, file: names.append(Path(beside).name))
    write_file(tmp_path / "a.json", "{}")
    assert re.fullmatch(rf"\.a\.json\.{os.getpid()}-[0-9a-f]{{8}}\.tmp", names[0])
