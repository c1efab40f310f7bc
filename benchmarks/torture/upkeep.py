# SPDX-License-Identifier: Apache-2.0
"""Commands that remove, replace and share entries, beside processes that put and get, all killed at random moments.

Each writer has its own keys. It puts an old entry first, which every command may remove or replace, then a new one,
which no command may touch: it must stay until its writer replaces it. Pushers push new entries to a shared cache that
other processes merge and prune; after a successful push, the shared cache must have that entry or a later one.

`python -m benchmarks.torture.upkeep` is the process that forks all of them: it has imported the library and started no
threads of JAX.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import io
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.torture.crashes import _content, is_whole
from benchmarks.torture.part import Budget, Tally
from ejkernel.cli import main as command
from ejkernel.ops import PersistentCache
from ejkernel.ops.config.shared.exchange import SharedPlace
from ejkernel.ops.core.types import ConfigKey

_WRITERS, _PUSHERS, _OWN = 4, 2, 6  # processes of each kind, and keys per process
_EVERY: Final = 0.25  # seconds, about, between two kills
_QUIET: Final = 60.0  # seconds without an acknowledgement that are a hang
_TELLING: Final = 8  # bytes of an acknowledgement
_OLD: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of one run.

    Attributes:
        folder: The folder of all files.
        seed: Determines the kills.
        seconds: Time limit.
        puts: Acknowledged puts after which the run ends early.
    """

    folder: str
    seed: int
    seconds: float
    puts: int | None = None

    @property
    def cache(self) -> str:
        """The folder that writers and commands share."""
        return f"{self.folder}/cache"

    def url(self, name: str) -> str:
        """Return a shared cache."""
        return f"file://{self.folder}/{name}"


def _put(folder: str, key: ConfigKey, content: Any, *, speedup: float, is_old: bool = False) -> None:
    store = PersistentCache(folder, shipped=False, clock=(lambda: _OLD) if is_old else None)
    store.put(key, content, measured={"winner": {"median_us": 10.0}, "speedup": speedup})


# --- the processes ---


class Writer:
    """A process that puts under its own keys.

    Args:
        plan: The parameters of the run.
        index: The number of the process.
        acknowledged: The number of the last new entry of each key, except the key being written.
    """

    def __init__(self, plan: Plan, index: int, acknowledged: dict[int, int]) -> None:
        self.plan, self.index, self.acknowledged = plan, index, acknowledged
        self._cache = PersistentCache(plan.cache, shipped=False)

    def key(self, own: int) -> ConfigKey:
        """Return one of its keys."""
        return ConfigKey("gpu", "own@v0", f"{self.index}-{own}")

    def do(self, number: int) -> None:
        """Put an old entry and a new one."""
        own, size = number % _OWN, random.Random(number).choice((0, 10, 1000))
        self.check()
        self.acknowledged.pop(own, None)
        old, new = (_content(self.index, 2 * number + more, size) for more in (0, 1))
        _put(self.plan.cache, self.key(own), old, speedup=1.1, is_old=True)
        _put(self.plan.cache, self.key(own), new, speedup=3.0)
        self.acknowledged[own] = number

    def check(self) -> None:
        """Raise unless all acknowledged entries are there.

        Raises:
            AssertionError: An entry is lost.
        """
        for own, number in self.acknowledged.items():
            found = self._cache.get(self.key(own))
            if found is None or found["writer"] != self.index or found["number"] != 2 * number + 1:
                what = "nothing" if found is None else f"{found['number']} of writer {found['writer']}"
                raise AssertionError(f"lost: {2 * number + 1} of {self.key(own)} was stored, and {what} is there")


class Pusher(Writer):
    """A process that pushes entries of its own folder to a shared cache."""

    def do(self, number: int) -> None:
        """Push a new entry."""
        folder, own = f"{self.plan.folder}/pusher-{self.index}", number % _OWN
        content = _content(self.index, number, 10)
        _put(folder, self.key(own), content, speedup=3.0 + number * 1e-6)
        run("push", self.plan.url("pushed"), "--cache", folder, *(["--merge"] if number % 7 == 0 else []))
        self.acknowledged[own] = number
        if number % _OWN == 0:
            self.check()

    def check(self) -> None:
        """See `Writer`."""
        place = SharedPlace(self.plan.url("pushed"), Path(f"{self.plan.folder}/pusher-{self.index}"))
        for own, number in self.acknowledged.items():
            found = [entry.config["number"] for entry in place.copy.find(self.key(own))]
            if max(found, default=-1) < number:
                raise AssertionError(f"lost: {number} of {self.key(own)} was pushed, and {found} is there")


class Reader:
    """A process that reads the writers' entries."""

    def __init__(self, plan: Plan) -> None:
        self._cache = PersistentCache(plan.cache, shipped=False)
        self._last: dict[Any, int] = {}

    def do(self, number: int) -> None:
        """Read all keys of a writer, or list the folder."""
        keys = [ConfigKey("gpu", "own@v0", f"{number % _WRITERS}-{own}") for own in range(_OWN)]
        found = self._cache.entries() if number % 5 == 0 else ((key, self._cache.load(key)) for key in keys)
        for key, entry in found:
            if entry is None or entry.config["writer"] < 0:  # removed while it was old, or replaced by `merge`
                continue
            if not is_whole(entry.config):
                raise AssertionError(f"wrong: read {str(entry.config)[:200]}")
            step = entry.config["number"] // 2  # a killed writer repeats its last step
            if step < self._last.get(key, -1):
                raise AssertionError(f"lost: {key} was {self._last[key]}, and is {step}")
            self._last[key] = step


def run(*words: str) -> None:
    """Run `ejkernel cache`.

    Raises:
        RuntimeError: it fails.
    """
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = command(["cache", *words])
    if status:
        raise RuntimeError(f"{' '.join(words)}: status {status}: {said.getvalue()[-1000:]}")


def _jobs(plan: Plan) -> dict[str, Callable[[int], object]]:
    """Return the repeated commands of the other processes."""
    cache, rival, team = ("--cache", plan.cache), f"{plan.folder}/rival", plan.url("team")
    found: dict[str, tuple[str, ...]] = {
        "prune": ("prune", "--older-than", "52w", *cache),
        "prune --older-than": ("prune", "--older-than", "52w", "--not-for-this-jax", "--unreadable", *cache),
        "clear": ("clear", "--older-than", "52w", "--yes", *cache),
        "pull": ("pull", plan.url("shared"), *cache),
        "merge": ("merge", rival, *cache),
        "push": ("push", team, "--merge", *cache),
        "prune URL": ("prune", plan.url("pushed"), "--older-than", "52w", "--cache", f"{plan.folder}/pruner"),
    }
    return {name: functools.partial(_run_once, words) for name, words in found.items()}


def _run_once(words: tuple[str, ...], number: int) -> None:
    del number
    run(*words)


# --- the process that starts and kills them ---


class Child:
    """A process and its replacements after kills.

    Args:
        name: The kind of process.
        make: Returns the function for one step, given the acknowledged entries.
    """

    def __init__(self, name: str, make: Callable[[dict[int, int]], Callable[[int], object]]) -> None:
        self.name, self._make = name, make
        self.acknowledged: dict[int, int] = {}
        self.done, self.kills = 0, 0
        self.error = ""
        self.pid = self.descriptor = -1

    def start(self) -> None:
        """Continue after the last acknowledged entry."""
        self.descriptor, tell = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _serve(self._make, self.acknowledged, self.done, tell)
        os.close(tell)
        self._rest = b""

    def read(self) -> bool:
        """Read the process's reports; return whether it is still running."""
        chunk = os.read(self.descriptor, 1 << 16)
        self._rest += chunk
        while len(self._rest) >= _TELLING and not self._rest.startswith(b"!"):
            self._note(int.from_bytes(self._rest[:_TELLING], signed=True))
            self._rest = self._rest[_TELLING:]
        if not chunk and self._rest.startswith(b"!"):
            self.error = self._rest[_TELLING:].decode("utf-8", "replace")
        return bool(chunk)

    def _note(self, number: int) -> None:
        if number < 0:  # it begins to write under this key
            self.acknowledged.pop((-number - 1) % _OWN, None)
        else:
            self.acknowledged[number % _OWN] = number
            self.done = number + 1

    def end(self) -> None:
        """Let go of a process that has ended."""
        os.close(self.descriptor)
        os.waitpid(self.pid, 0)


def _serve(
    make: Callable[[dict[int, int]], Callable[[int], object]], acknowledged: dict[int, int], begin: int, tell: int
) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            do, number = make(dict(acknowledged)), begin
            while True:
                os.write(tell, (-number - 1).to_bytes(_TELLING, signed=True))
                do(number)
                os.write(tell, number.to_bytes(_TELLING))
                number += 1
    except BaseException as error:  # noqa: BLE001 - reported through the pipe
        os.write(tell, b"!" * _TELLING + f"{type(error).__name__}: {error}".encode()[:3000])
    os._exit(1)


def _children(plan: Plan) -> Iterator[Child]:
    for index in range(_WRITERS):
        yield Child("put", functools.partial(_writing, Writer, plan, index))
    for index in range(_PUSHERS):
        yield Child("own push", functools.partial(_writing, Pusher, plan, index))
    yield Child("get", lambda acknowledged: Reader(plan).do)
    for name, job in _jobs(plan).items():
        yield Child(name, functools.partial(_doing, job))


def _writing(kind: type[Writer], plan: Plan, index: int, acknowledged: dict[int, int]) -> Callable[[int], object]:
    return kind(plan, index, acknowledged).do


def _doing(job: Callable[[int], object], acknowledged: dict[int, int]) -> Callable[[int], object]:
    del acknowledged
    return job


def _prepare(plan: Plan) -> None:
    """Make entries for `pull` and `merge`: better than old entries, and worse than new ones."""
    for index in range(_WRITERS):
        for own in range(_OWN):
            key = ConfigKey("gpu", "own@v0", f"{index}-{own}")
            _put(f"{plan.folder}/rival", key, _content(-1, own, 10), speedup=2.0)
    run("push", plan.url("shared"), "--cache", f"{plan.folder}/rival")
    _put(plan.cache, ConfigKey("gpu", "other@v0", "0"), _content(-1, 0, 0), speedup=1.0)
    _put(f"{plan.folder}/pruner", ConfigKey("gpu", "other@v0", "0"), _content(-1, 0, 0), speedup=1.0, is_old=True)
    run("push", plan.url("pushed"), "--cache", f"{plan.folder}/pruner")


def torture(plan: Plan) -> dict[str, Any]:
    """Run all processes, and return counts and problems."""
    _prepare(plan)
    chance, children, selector = random.Random(plan.seed), list(_children(plan)), selectors.DefaultSelector()
    for child in children:
        child.start()
        selector.register(child.descriptor, selectors.EVENT_READ, child)
    begin = last = time.monotonic()
    next_kill, problems = begin + 1.0, list[str]()
    while not problems and time.monotonic() - begin < plan.seconds:
        puts = sum(child.done for child in children if child.name == "put")
        if plan.puts is not None and puts >= plan.puts and all(child.done for child in children):
            break
        for key, _ in selector.select(timeout=0.05):
            child, last = key.data, time.monotonic()
            if child.read():
                continue
            selector.unregister(key.fd)
            child.end()
            if child.error:
                problems.append(_problem(child))
            else:
                child.start()
                selector.register(child.descriptor, selectors.EVENT_READ, child)
        if time.monotonic() - last > _QUIET:
            problems.append(f"hang: no process has reported anything for {_QUIET:g} s")
        if time.monotonic() > next_kill:
            child = chance.choice(children)
            os.kill(child.pid, signal.SIGKILL)
            child.kills, next_kill = child.kills + 1, time.monotonic() + chance.expovariate(1 / _EVERY)
    problems += _stopped(selector)
    return _seen(plan, children, problems)


def _problem(child: Child) -> str:
    _, _, said = child.error.partition("AssertionError: ")
    return said or f"uncaught: {child.name}: {child.error}"


def _stopped(selector: selectors.BaseSelector) -> list[str]:
    """Kill all processes, and return the problems in their last reports."""
    left: list[Child] = [key.data for key in selector.get_map().values()]
    for child in left:
        os.kill(child.pid, signal.SIGKILL)
    for child in left:
        while child.read():
            pass
        child.end()
    return [_problem(child) for child in left if child.error]


def _seen(plan: Plan, children: list[Child], problems: list[str]) -> dict[str, Any]:
    for number, child in enumerate(child for child in children if child.name in ("put", "own push")):
        make = Writer if child.name == "put" else Pusher
        try:
            make(plan, number if child.name == "put" else number - _WRITERS, child.acknowledged).check()
        except AssertionError as error:
            problems.append(str(error))
    counts = collections.Counter[str]()
    for child in children:
        words = {"put": "puts", "get": "reads", "own push": "pushes that were checked"}
        counts[words.get(child.name, f"`{child.name}`")] += child.done
    counts["kills"] = sum(child.kills for child in children)
    return {"counts": counts, "problems": problems}


def upkeep(budget: Budget, tally: Tally) -> None:
    """Run commands beside writers and readers, and kill all of them."""
    plan = Plan(folder=str(budget.folder / "upkeep"), seed=budget.seed, seconds=budget.seconds, puts=budget.inputs)
    words = [sys.executable, "-m", "benchmarks.torture.upkeep", json.dumps(dataclasses.asdict(plan))]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        tally.found("uncaught", "commands beside puts", 0, done.stderr[-2000:])
        return
    found = json.loads(done.stdout)
    tally.counts.update(found["counts"])
    for problem in found["problems"]:
        kind = problem.partition(":")[0]
        tally.found(kind if kind in ("lost", "hang", "wrong") else "uncaught", "commands beside puts", 0, problem)


if __name__ == "__main__":
    print(json.dumps(torture(Plan(**json.loads(sys.argv[1])))))
