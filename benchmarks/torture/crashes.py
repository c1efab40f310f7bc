# SPDX-License-Identifier: Apache-2.0
"""Processes that put and get in the same folder, and are killed at random moments.

Every put that was reported as stored must still be readable, or a later one. Every read must return a complete entry of
the right key, not older than the last reported put. The processes are forked from one that has imported the library
without JAX's threads: `python -m benchmarks.torture.crashes`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any, Final

from ejkernel.ops import PersistentCache

_OWN: Final = 20  # keys of each process
_SHARED: Final = 7  # keys that all processes write
_TELLING: Final = 8  # bytes of an acknowledgement
_PUT_OWN, _PUT_SHARED, _GET_OWN, _GET_SHARED = range(4)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of one run.

    Attributes:
        folder: The cache's folder.
        seed: Determines entries and kills.
        processes: Number of concurrent processes.
        operations: Puts and gets per process.
        every: Average number of operations, of all processes, between two kills.
    """

    folder: str
    seed: int
    processes: int
    operations: int
    every: int


# --- in a process that puts and gets ---


def _content(writer: int, number: int, size: int) -> dict[str, Any]:
    padding = "x" * size
    return {
        "writer": writer,
        "number": number,
        "padding": padding,
        "sum": zlib.crc32(f"{writer} {number} {size}".encode()),
    }


def is_whole(found: Any) -> bool:
    """Return whether a configuration was put by one of the processes."""
    return bool(found == _content(found["writer"], found["number"], len(found["padding"])))


def _operation(plan: Plan, index: int, number: int) -> tuple[random.Random, int]:
    """Return the kind of operation with this number, and the source of randomness for its details."""
    chance = random.Random(f"{plan.seed} {index} {number}")
    return chance, chance.randrange(_GET_SHARED + 1)


class Writer:
    """One writing and reading process.

    Args:
        plan: The parameters of the run.
        index: The number of the process.
        acknowledged: For each own key, the number of the last put reported as stored.
    """

    def __init__(self, plan: Plan, index: int, acknowledged: dict[int, int]) -> None:
        self._plan, self._index, self._acknowledged = plan, index, acknowledged
        self._cache = PersistentCache(plan.folder, shipped=False)

    def do(self, number: int) -> None:
        """Do the operation of that number; a replacement process repeats it identically."""
        chance, kind = _operation(self._plan, self._index, number)
        size, own = chance.choice((0, 10, 1000, 20_000)), number % _OWN
        if kind == _PUT_OWN:
            self._cache.put("gpu", "own@v0", f"{self._index}-{own}", _content(self._index, number, size))
            self._acknowledged[own] = number
        elif kind == _PUT_SHARED:
            shared = chance.randrange(_SHARED)
            self._cache.put("gpu", "shared@v0", f"{shared}", _content(self._index, number, size))
        elif kind == _GET_OWN:
            found = self._cache.get("gpu", "own@v0", f"{self._index}-{own}")
            self.check(own, found, number)
        else:
            found = self._cache.get("gpu", "shared@v0", f"{chance.randrange(_SHARED)}")
            if found is not None and not is_whole(found):
                raise AssertionError(f"wrong: read {str(found)[:200]}")

    def check(self, own: int, found: Any, limit: int) -> None:
        """Raise unless `found`, read under one of its own keys, is as it must be.

        Raises:
            AssertionError: The entry is lost or wrong.
        """
        least = self._acknowledged.get(own)
        if found is None:
            if least is not None:
                raise AssertionError(f"lost: put {least} of {self._index}-{own} is not there")
        elif not is_whole(found) or found["writer"] != self._index or found["number"] % _OWN != own:
            raise AssertionError(f"wrong: {self._index}-{own} is {str(found)[:200]}")
        elif not (-1 if least is None else least) <= found["number"] <= limit:
            raise AssertionError(f"lost: {self._index}-{own} is {found['number']}, after {least} was stored")


def _run(writer: Writer, numbers: range, tell: int) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing here may be warned of
            for number in numbers:
                writer.do(number)
                os.write(tell, number.to_bytes(_TELLING))
    except BaseException as error:  # noqa: BLE001 - reported through the pipe
        os.write(tell, b"!" * _TELLING + f"{type(error).__name__}: {error}".encode()[:3000])
        os._exit(1)
    os._exit(0)


# --- in the process that starts and kills them ---


class Child:
    """One process and its replacements after kills.

    Args:
        plan: The parameters of the run.
        index: The number of the process.
    """

    def __init__(self, plan: Plan, index: int) -> None:
        self.plan, self.index = plan, index
        self.acknowledged: dict[int, int] = {}
        self.done = 0  # reported operations
        self.error = ""
        self._rest = b""
        self.pid = self.descriptor = -1

    def start(self) -> None:
        """Continue after the last reported operation."""
        self.descriptor, tell = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _run(Writer(self.plan, self.index, self.acknowledged), range(self.done, self.plan.operations), tell)
        os.close(tell)

    def read(self) -> bool:
        """Read the process's reports; return whether it is still running."""
        chunk = os.read(self.descriptor, 1 << 16)
        self._rest += chunk
        while len(self._rest) >= _TELLING and not self._rest.startswith(b"!"):
            self._acknowledge(int.from_bytes(self._rest[:_TELLING]))
            self._rest = self._rest[_TELLING:]
        if not chunk:
            self.error = self._rest[_TELLING:].decode("utf-8", "replace")
            self._rest = b""
        return bool(chunk)

    def end(self) -> None:
        """Let go of a process that has ended."""
        os.close(self.descriptor)
        os.waitpid(self.pid, 0)

    def _acknowledge(self, number: int) -> None:
        if _operation(self.plan, self.index, number)[1] == _PUT_OWN:
            self.acknowledged[number % _OWN] = number
        self.done = number + 1


def torture(plan: Plan) -> dict[str, Any]:
    """Run all processes to their end, and return operations, kills and problems."""
    chance = random.Random(plan.seed)
    children = [Child(plan, index) for index in range(plan.processes)]
    selector = selectors.DefaultSelector()
    for child in children:
        child.start()
        selector.register(child.descriptor, selectors.EVENT_READ, child)
    kills, total, last = 0, 0, time.monotonic()
    next_kill = chance.expovariate(1 / plan.every)
    problems: list[str] = []
    while selector.get_map() and not problems:
        ready = selector.select(timeout=60.0)
        if not ready and time.monotonic() - last > 60.0:
            problems.append("hang: no process has reported anything for a minute")
        for key, _ in ready:
            child, last = key.data, time.monotonic()
            before = child.done
            if child.read():
                total += child.done - before
                continue
            selector.unregister(key.fd)  # while it is open: others of the processes have it too
            child.end()
            if child.error:
                problems.append(child.error)
            elif child.done < plan.operations:  # it was killed
                child.start()
                selector.register(child.descriptor, selectors.EVENT_READ, child)
        running = [key.data for key in selector.get_map().values()]
        if total >= next_kill and running:
            os.kill(chance.choice(running).pid, signal.SIGKILL)
            kills, next_kill = kills + 1, next_kill + chance.expovariate(1 / plan.every)
    for key in selector.get_map().values():
        os.kill(key.data.pid, signal.SIGKILL)
        os.waitpid(key.data.pid, 0)
    problems += [] if problems else _left(plan, children)
    return {"operations": total, "kills": kills, "problems": problems}


def _left(plan: Plan, children: list[Child]) -> list[str]:
    """Return the problems of the final content."""
    problems = []
    cache = PersistentCache(plan.folder, shipped=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for child in children:
            reader = Writer(plan, child.index, child.acknowledged)
            for own in range(_OWN):
                try:
                    reader.check(own, cache.get("gpu", "own@v0", f"{child.index}-{own}"), plan.operations)
                except AssertionError as error:
                    problems.append(str(error))
        listed = len(cache.keys())
    if listed > plan.processes * _OWN + _SHARED:
        problems.append(f"wrong: there are {listed} entries")
    for file in Path(plan.folder).rglob(".*.tmp"):
        os.utime(file, (0, 0))
    cache.put("gpu", "own@v0", "last", 1)
    cache.put("gpu", "shared@v0", "last", 1)
    left = list(Path(plan.folder).rglob(".*.tmp"))
    problems += [f"wrong: {len(left)} files of killed processes stay"] if left else []
    return problems + [f"wrong: {warning.message}" for warning in caught]


def main() -> None:
    """Run the plan on the command line, and print the result."""
    print(json.dumps(torture(Plan(**json.loads(sys.argv[1])))))


def started(plan: Plan) -> dict[str, Any]:
    """Run `torture` in a new process.

    Raises:
        RuntimeError: The process failed.
    """
    command = [sys.executable, "-m", "benchmarks.torture.crashes", json.dumps(dataclasses.asdict(plan))]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
