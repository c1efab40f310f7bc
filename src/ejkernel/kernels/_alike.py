# SPDX-License-Identifier: Apache-2.0
"""Compiled code similar to that of a kernel: the facts in which it differs have little effect.

The name of code in the table lists facts that decide how many registers the compiler keeps in memory, e.g. `tpu:tpu_v5,
splash keys, 1/1, blocks 512/1024/512, left edge; right edge`. A *view* of a name leaves some of them out, and code with
the same view is alike. The most registers of such code, plus a margin, are an upper estimate. If the view leaves out a
size of the tile of scores, the registers count in proportion to the tile. `benchmarks.memory_tpu_fit` finds the margin
of each view: the shares by which compiled kernels exceed the most of the others.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Table = Mapping[str, Sequence[int]]
Margins = Mapping[str, Mapping[str, float]]
_Change = tuple[str, str | Callable[[re.Match[str]], str]]
_Views = dict[str, tuple[list[_Change], bool]]

_CHIP = (r"^tpu:tpu_v(5|5_lite|6_lite), ", "")
_MASK = (r", (ids and mask|left edge|masked|one block)\b", "")
_KEYS = (r"blocks (\d+)/\d+/", r"blocks \1/")
_QUERIES = (r"blocks \d+/", "blocks /")
_DETAILS = (r"; .*", "")
_LOOPS = (r", (unroll \d+|transposed)\b", "")
_CHUNK = (r"tile (\d+)/\d+", r"tile \1")
_EDGES, _IDS, _DIMS = (r", edges 2\b", ""), (r", ids\b", ""), (r", \d+/\d+\b", "")
_GROUPS = (r", (grouped|streamed)\b", "")
_BLOCK = (r", block \d+", "")
_TRANSPOSED = (r", transposed\b", "")


def _area(found: re.Match[str]) -> str:
    """Return the scores of a step instead of its sizes."""
    queries, _, keys = map(int, found.groups())
    return f"scores {queries * keys}"


def _area_of_block(found: re.Match[str]) -> str:
    """Return the scores of a block, and the keys of its steps."""
    queries, keys, step = map(int, found.groups())
    return f"scores {queries * keys} in steps of {step}"


_BLOCKS = r"blocks (\d+)/(\d+)/(\d+)"
_AREA, _AREA_OF_BLOCK = (_BLOCKS, _area), (_BLOCKS, _area_of_block)
# Views by kind of code: the facts that each leaves out, and whether registers grow with the tile.
_SPLASH: _Views = {
    "keys": ([_DETAILS, _KEYS], False),
    "mask": ([_DETAILS, _KEYS, _MASK], False),
    "queries": ([_DETAILS, _KEYS, _MASK, _QUERIES], True),
    "chip": ([_DETAILS, _KEYS, _MASK, _CHIP], False),
    "chip and queries": ([_DETAILS, _KEYS, _MASK, _CHIP, _QUERIES], True),
    "steps": ([_DETAILS, _MASK, (r"blocks (\d+)/\d+/\d+", r"blocks \1")], True),
    "dimensions": ([_DETAILS, _KEYS, _MASK, _DIMS], False),
    "area": ([_DETAILS, _MASK, _AREA], False),
    "chip and area": ([_DETAILS, _MASK, _CHIP, _AREA], False),
}
_VIEWS: dict[str, _Views] = {
    "splash": {"details": ([_DETAILS], False), **_SPLASH},
    # the steps of a block of keys are unrolled
    "splash forward": {
        "details": ([_DETAILS], False),
        "mask": ([_DETAILS, _MASK], False),
        "queries": ([_DETAILS, _MASK, _QUERIES], True),
        "chip": ([_DETAILS, _MASK, _CHIP], False),
        "dimensions": ([_DETAILS, _MASK, _DIMS], False),
        "area": ([_DETAILS, _MASK, _AREA_OF_BLOCK], False),
        "area and chip": ([_DETAILS, _MASK, _CHIP, _AREA_OF_BLOCK], False),
        "area and dimensions": ([_DETAILS, _MASK, _AREA_OF_BLOCK, _DIMS], False),
    },
    "loop": {
        "unroll": ([_LOOPS], False),
        "edges": ([_LOOPS, _EDGES], False),
        "ids": ([_LOOPS, _EDGES, _IDS], False),
        "chip": ([_LOOPS, _EDGES, _IDS, _CHIP], False),
        "chunk": ([_LOOPS, _EDGES, _IDS, _CHUNK], True),
        "chip and chunk": ([_LOOPS, _EDGES, _IDS, _CHIP, _CHUNK], True),
        "dimensions": ([_LOOPS, _EDGES, _IDS, _CHIP, _DIMS], False),
    },
    # chunks of one basic block overlap
    "loop of forward": {
        "edges": ([_EDGES], False),
        "ids": ([_EDGES, _IDS], False),
        "chip": ([_EDGES, _IDS, _CHIP], False),
        "chunk": ([_EDGES, _IDS, _CHUNK], True),
    },
    "other code": {
        "transposed": ([_TRANSPOSED], False),
        "groups": ([_TRANSPOSED, _GROUPS], False),
        "chip": ([_TRANSPOSED, _GROUPS, _CHIP], False),
        "block": ([_TRANSPOSED, _GROUPS, _BLOCK], True),
        "chip and block": ([_TRANSPOSED, _GROUPS, _CHIP, _BLOCK], True),
        "dimensions": ([_TRANSPOSED, _GROUPS, _CHIP, _DIMS], False),
    },
}
_SEVERAL = 3  # so much code or more with one view has a margin of its own
_TILES = (r"blocks (\d+)/\d+/(\d+)", r"tile (\d+)/(\d+)", r"block (\d+),.* strip (\d+)")


class Alike(NamedTuple):
    """The registers of code by that of others, and the share of a kernel's memory to add."""

    registers: tuple[float, ...]
    margin: float


def kind_of(name: str) -> str:
    """Return the kind of code: its kernel, whether it is a loop, has none or has strips, and whether ids branch."""
    words = name.split(", ")
    found = next((kind for kind in ("loop", "no loop", "strip") if any(word.startswith(kind) for word in words)), "")
    has_branches = "ids" in words and found != "loop" and not words[1].startswith("splash")
    return ", ".join(filter(None, (words[1], found, "ids" if has_branches else "")))


def views_of(name: str) -> Iterator[tuple[str, str, float]]:
    """Yield each view of code: its name, what it has in common with other code, and the unit of its registers."""
    kernel, is_loop = name.split(", ")[1], ", loop" in name
    if kernel.startswith("splash"):
        views = _VIEWS["splash forward" if kernel == "splash forward" else "splash"]
    elif is_loop:
        views = _VIEWS["loop of forward" if kernel == "forward" else "loop"]
    else:
        views = _VIEWS["other code"]
    if not re.match(_CHIP[0], name):  # few kernels of other chips were compiled
        views = {view: row for view, row in views.items() if view == "details"}
    for view, (left_out, is_scaled) in views.items():
        common = name
        for pattern, replacement in left_out:
            common = re.sub(pattern, replacement, common)
        yield view, f"{view}: {common}", tile_of(name) if is_scaled else 1.0


def tile_of(name: str) -> float:
    """Return the registers of a tile of scores."""
    found = next(filter(None, (re.search(pattern, name) for pattern in _TILES)), None)
    return int(found[1]) * int(found[2]) / 1024 if found else 1.0


@functools.cache
def _dims(name: str) -> tuple[int, ...]:
    """Return the registers of a row of head and value: wider ones take more."""
    return tuple(map(int, name.split(", ")[2].split("/")))


class Likeness:
    """Compiled code by the facts that it shares with other code, for heads as wide or wider."""

    def __init__(self, table: Table, margins: Margins) -> None:
        self._margins = margins
        self._names: dict[str, list[str]] = {}
        for name in table:
            if " with " not in name:
                self._names.setdefault(kind_of(name), []).append(name)
        self._table, self._known = table, dict[str, Alike | None]()
        self._found: dict[str, dict[str, list[tuple[str, tuple[float, ...]]]]] = {}

    def found(self, name: str, is_other: Callable[[str, str], bool]) -> dict[str, tuple[float, ...]]:
        """Return the most registers of similar code, by view; a view's name includes the amount of code.

        Args:
            name: The code.
            is_other: Returns whether code counts, by its name and the view's.
        """
        found, dims, code = {}, _dims(name), self._of_kind(kind_of(name))
        for view, common, unit in views_of(name):
            rows = [(other, row) for other, row in code.get(common, ()) if is_other(other, view)]
            rows = [(other, row) for other, row in rows if all(map(operator.ge, _dims(other), dims))]
            several = min(len({other.partition(";")[0] for other, _ in rows}), _SEVERAL)
            if several > (unit > 1):  # one piece of code does not tell how registers grow with the tile
                columns = zip(*(row for _, row in rows), strict=True)
                found[f"{view} of {several}"] = tuple(unit * max(column) for column in columns)
        return found

    def __call__(self, name: str) -> Alike | None:
        """Return the registers of similar code, by the first view that has some; `None` without any."""
        if name not in self._known:
            views, margins = self.found(name, lambda *_: True), self._margins.get(kind_of(name), {})
            found = (Alike(views[view], margin) for view, margin in margins.items() if view in views)
            self._known[name] = next(found, None)
        return self._known[name]

    def _of_kind(self, kind: str) -> dict[str, list[tuple[str, tuple[float, ...]]]]:
        """Return the code of a kind by its shared facts, with registers in units of the tile."""
        if kind not in self._found:
            code: dict[str, list[tuple[str, tuple[float, ...]]]] = {}
            for name in self._names.get(kind, ()):
                for _, common, unit in views_of(name):
                    code.setdefault(common, []).append((name, tuple(size / unit for size in self._table[name])))
            self._found[kind] = code
        return self._found[kind]
