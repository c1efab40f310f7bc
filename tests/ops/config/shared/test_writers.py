# SPDX-License-Identifier: Apache-2.0
"""Processes write to a shared place at the same time and one is killed: no acknowledged entry is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ops.config.shared.stores import entry

from ejkernel.ops.config.shared import upkeep
from ejkernel.ops.config.shared.exchange import SharedPlace
from ejkernel.ops.config.shared.stores import Store

pytestmark = pytest.mark.slow

WRITER = """
import sys
from pathlib import Path
from tests.ops.config.shared.stores import entry
from ejkernel.ops.config.shared import upkeep
from ejkernel.ops.config.shared.exchange import SharedPlace

url, folder, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
place = SharedPlace(url, folder, may_be_new=True)
for number in range(first, first + int(sys.argv[4])):
    place.put([entry(number, number), entry(0, number, speedup=1.0 + number)])
    print(number, flush=True)
    if number % 7 == 3:
        upkeep.merge(place)
print("done", flush=True)
"""


def started(url, folder, first, count, **environ):
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", WRITER, url, str(folder), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | environ)


def acknowledged(process):
    with process.stdout as lines:
        return [int(line) for line in lines.read().split() if line.isdigit()]


def check(url, folder, written):
    found = {stored[0].config["rows"] for stored in SharedPlace(url, folder).variants()}
    best = next(stored[0] for stored in SharedPlace(url, folder).variants() if stored[0].key == entry(0).key)
    assert {number for numbers in written for number in numbers} <= found
    assert best.config == {"rows": max(found)}  # perhaps put by the killed writer, which could not acknowledge it


def test_merging_writers_and_a_killed_one_lose_nothing(tmp_path):
    pytest.importorskip("fsspec", reason="fsspec is an extra, and is not installed")
    url = f"file://{tmp_path}/team"
    writers = [started(url, tmp_path / str(n), 1000 * n, 40) for n in (1, 2)]
    killed = started(url, tmp_path / "killed", 3000, 10_000)
    seen = [int(killed.stdout.readline()) for _ in range(20)]
    killed.send_signal(signal.SIGKILL)
    written = [acknowledged(writer) for writer in writers] + [seen + acknowledged(killed)]
    assert [writer.wait() for writer in writers] == [0, 0]
    killed.wait()
    assert list(map(len, written[:2])) == [40, 40]
    check(url, tmp_path / "reader", written)


@pytest.fixture
def s3(monkeypatch):
    """The URL of a bucket on an S3-compatible server on loopback."""
    reason = "s3fs and moto's server are not installed: pip install s3fs 'moto[server]'"
    pytest.importorskip("s3fs", reason=reason)
    server = pytest.importorskip("moto.server", reason=reason).ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environ = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host.replace('0.0.0.0', '127.0.0.1')}:{port}",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    import fsspec

    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("team")
    yield "s3://team/ejkernel"
    server.stop()


@pytest.mark.filterwarnings("ignore")  # of the server and its client
def test_writers_of_one_bucket_lose_nothing(tmp_path, s3):
    writers = [started(s3, tmp_path / str(n), 1000 * n, 12) for n in (1, 2)]
    written = [acknowledged(writer) for writer in writers]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert list(map(len, written)) == [12, 12]
    check(s3, tmp_path / "reader", written)


@pytest.mark.filterwarnings("ignore")
def test_a_bucket_is_repaired_and_pruned_and_a_missing_bucket_is_detected(tmp_path, s3):
    import fsspec

    place = SharedPlace(s3, tmp_path / "mine", may_be_new=True)
    assert not place.is_there
    assert Store("s3://team").sizes() == {}
    assert not Store("s3://no-such-bucket").sizes()
    for number in range(3):
        place.put([entry(number, number), entry(number + 10, 99, jax="0.0.1")])
    objects = fsspec.filesystem("s3", skip_instance_cache=True)
    one, other, _ = sorted(place.store.sizes())
    objects.pipe_file(f"team/ejkernel/{one}", b"")  # a server rejects a range of an empty object
    objects.pipe_file(f"team/ejkernel/{other}", objects.cat_file(f"team/ejkernel/{other}")[:-9])
    assert upkeep.mend(place) == 2
    assert upkeep.prune(place, lambda stored: stored.provenance["jax"] == "0.0.1").entries == 3
    found = SharedPlace(s3, tmp_path / "theirs")
    assert (found.is_there, found.fetched) == (True, 1)
    assert sorted(variants[0].config["rows"] for variants in found.variants()) == [0, 1, 2]
