# SPDX-License-Identifier: Apache-2.0
"""Every byte of every kind of file cut and flipped, and mutated content, to each reader.

Half of the mutated content is made whole again, so that it comes behind the digests.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.torture.formats import Format, body_of, formats
from benchmarks.torture.material import quiet
from benchmarks.torture.mutation import json_text, mutated, spoilt
from benchmarks.torture.part import Budget, Tally


class Judge:
    """Judges the results of one reader.

    Args:
        format: The format and its reader.
        tally: Receives the findings.
    """

    def __init__(self, format: Format, tally: Tally) -> None:
        self.format = format
        self._tally = tally
        self._answers = [format.read(raw) for raw in format.originals]
        self._parts = [part for answer in self._answers for part in answer] if format.in_parts else []
        assert all(map(format.legal, self._answers))  # otherwise findings would mean nothing

    def judge(self, number: int, raw: bytes, *, sealed: bool) -> None:
        """Have the content read, and report any violation."""
        format = self.format
        answer = self._tally.try_(format.name, number, lambda: [format.read(raw)], format.declared)
        if answer is None:
            return
        if not format.legal(answer[0]):
            self._tally.found("wrong", format.name, number, f"read as {str(answer[0])[:300]}")
        elif format.is_exact and not sealed and not self._is_as_written(answer[0]):
            self._tally.found("wrong", format.name, number, f"damaged, and read as {str(answer[0])[:300]}")

    def _is_as_written(self, answer: Any) -> bool:
        return all(part in self._parts for part in answer) if self.format.in_parts else answer in self._answers


def _judges(budget: Budget, tally: Tally) -> list[Judge]:
    quiet()
    wanted = formats(budget.folder)
    return [Judge(wanted[name], tally) for name in budget.only or wanted if name in wanted]


# --- damage ---


def damage(budget: Budget, tally: Tally) -> None:
    """Cut each kind of file behind each of its bytes, and flip each bit; or so many of them, spread evenly."""
    for judge in _judges(budget, tally):
        name = judge.format.name
        changes = sum(9 * len(raw) for raw in judge.format.originals)
        chosen = budget.chosen(changes)
        for number, raw in enumerate(_damaged(judge.format.originals)):
            if number in chosen:
                judge.judge(number, raw, sealed=False)
                tally.counts[name] += 1


def _damaged(originals: Sequence[bytes]) -> Iterator[bytes]:
    for raw in originals:
        for at in range(len(raw)):
            yield raw[:at]
            for bit in range(8):
                yield raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :]


# --- mutation ---


def mutation(budget: Budget, tally: Tally) -> None:
    """Feed randomly changed content to each reader."""
    judges = _judges(budget, tally)
    others = [raw for judge in judges for raw in judge.format.originals]
    for judge in judges:
        name = judge.format.name
        for number in budget.numbers(1 / len(judges)):
            raw, sealed = input_of(judge.format, budget.random(name, number), others)
            judge.judge(number, raw, sealed=sealed)
            tally.counts[name] += 1


def input_of(format: Format, random: random.Random, others: Sequence[bytes]) -> tuple[bytes, bool]:
    """Return changed content, and whether it was sealed again."""
    original = random.choice(format.originals)
    sealed = format.seal is not None and random.random() < 0.6
    body = body_of(original) if sealed else original
    if format.is_json and random.random() < 0.6:
        body = _other_json(format, random, original)
        body = body.removesuffix(b"}").rstrip() if sealed and format.is_json == "one" else body
    else:
        body = mutated(random, body, others)
    if sealed and format.seal is not None:
        return format.seal(body), True
    return body, False


def _other_json(format: Format, random: random.Random, original: bytes) -> bytes:
    """Return JSON with other values in it, without a digest."""
    if format.is_json == "one":
        data = json.loads(original)
        data.pop("sha256", None)
        return json_text(random, spoilt(random, data))
    lines = [json.loads(line) for line in body_of(original).splitlines()]
    return b"".join(json_text(random, line) + b"\n" for line in _spoilt_lines(random, lines))


def _spoilt_lines(random: random.Random, lines: list[Any]) -> list[Any]:
    found = spoilt(random, lines)
    return found if isinstance(found, list) else [found]


# --- guided by coverage ---


def guided(budget: Budget, tally: Tally) -> None:
    """Have `atheris` find content that goes new ways through each reader, in a process for each."""
    if budget.inputs == 0:
        tally.left_out.append("to prepare a reader for it takes longer than all the rest")
        return
    if find_spec("atheris") is None:
        tally.left_out.append("atheris is not installed (pip install atheris): nothing was guided by coverage")
        return
    wanted = budget.only or GUIDED
    for name in wanted:
        folder = budget.folder / name.replace(" ", "-")
        folder.mkdir()
        limits = [f"-max_total_time={int(budget.seconds / len(wanted)) + 1}"]
        if budget.inputs is not None:
            limits = [f"-runs={budget.inputs}"]
        command = [sys.executable, "-m", "benchmarks.torture.guided", name, str(folder), f"-seed={budget.seed + 1}"]
        done = subprocess.run([*command, *limits], check=False, capture_output=True, text=True, errors="replace")
        tally.counts[name] += runs_of(done.stderr)
        if done.returncode:
            kept = f"; {' '.join(command)} repeats it"
            tally.found("uncaught", name, 0, " | ".join(done.stderr.strip().splitlines()[-12:])[:2000] + kept)


GUIDED = (
    "entry",
    "log",
    "note",
    "estimate",
    "manifest",
    "result",
    "copy of a pack",
    "program",
    "description",
    "shapes",
    "environment",
)


def runs_of(text: str) -> int:
    """Return how many inputs libFuzzer says that it ran."""
    numbers = [int(line.split()[0][1:]) for line in text.splitlines() if line.startswith("#") and "\t" in line]
    done = [int(line.split()[1]) for line in text.splitlines() if line.startswith("Done ")]
    return max([0, *numbers, *done])
