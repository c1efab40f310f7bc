# SPDX-License-Identifier: Apache-2.0
"""Why the persistent cache has no entry for a call: the nearest entry, and how its call differs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.utils.error_text import printable, shortened
from ejkernel.ops.utils.formatting import array_text, counted

_SHOWN = 3  # differences to report
_OTHER = 8.0  # distance of two values that are not sizes
_LONGEST = 60


class CallDifference(NamedTuple):
    """A difference between two calls: its path, and the two values (`None` if a call has none)."""

    path: str
    wanted: Any
    stored: Any


def why_no_entry(store: PersistentCache, inv: Invocation[Cfg, Out], key: ConfigKey) -> str:
    """Return why `store` has no configuration for a call: a sentence for `explain`."""
    problem = store.problem(key, None if inv.kernel is None else inv.kernel.config_type)
    if problem is not None:
        return f"there is an entry that cannot be used: {printable(problem)}"
    # Include other versions of the operation, because they show that it was tuned before.
    name = key.op.rpartition("@v")[0]
    known = [(other, entry.call) for other, entry in store.entries(name) if other.op.rpartition("@v")[0] == name]
    same = [other for other, _ in known if other.call == key.call]
    if same:
        others = [_elsewhere(other, key) for other in same]
        return f"no entry; this call was tuned {' and '.join(dict.fromkeys(others))}"
    here = [call for other, call in known if other[:2] == key[:2] and isinstance(call, dict)]
    if not here:
        elsewhere = dict.fromkeys(_elsewhere(other, key) for other, _ in known if other[:2] != key[:2])
        text = "other calls of the operation were tuned"
        why = f"{text} {' and '.join(elsewhere)}" if elsewhere else store.why_nothing
        return f"no entry; {why}" if why else "no entry"
    nearest = min((differences(inv.description, call) for call in here), key=_distance)
    return f"no entry; closest tuned call: {_differences_text(nearest)}"


def differences(wanted: object, stored: object, path: str = "") -> list[CallDifference]:
    """Return the differences of two call descriptions, at the innermost level where both have the same structure."""
    if json.dumps(wanted, sort_keys=True) == json.dumps(stored, sort_keys=True):  # as data, 1 and True are equal
        return []
    mine, theirs = _parts(wanted, path), _parts(stored, path)
    if mine is None or theirs is None:
        return [CallDifference(path, wanted, stored)]
    names = [*mine, *(name for name in theirs if name not in mine)]
    return [found for name in names for found in _differing(mine, theirs, name)]


def _differing(mine: Mapping[str, object], theirs: Mapping[str, object], name: str) -> list[CallDifference]:
    if name in mine and name in theirs:
        return differences(mine[name], theirs[name], name)
    return [CallDifference(name, mine.get(name), theirs.get(name))]


def _parts(data: object, path: str) -> dict[str, Any] | None:
    """Return the items of a described container, by their paths; `None` for other values."""
    if isinstance(data, list):
        return {f"{path}[{index}]": item for index, item in enumerate(data)}
    if not isinstance(data, dict):
        return None
    if not path:  # a whole call; its wiring is not part of its identity
        given = data.get("kwargs")
        kwargs = {f"{name}=": value for name, value in given.items()} if isinstance(given, dict) else {}
        rest = {name: value for name, value in data.items() if name not in ("op", "kwargs", "wiring")}
        return rest | kwargs
    if set(data) == {"dataclass", "fields"} and isinstance(data["fields"], dict):
        return {f"{path}.{name}": value for name, value in data["fields"].items()}
    if set(data) == {"map"} and isinstance(data["map"], list):
        pairs = [pair for pair in data["map"] if isinstance(pair, list) and len(pair) == 2]
        return {f"{path}[{_short(key)}]": item for key, item in pairs}
    if set(data) == {"list"}:
        return _parts(data["list"], path)
    return None


def _distance(found: list[CallDifference]) -> float:
    return sum(_value_distance(difference.wanted, difference.stored) for difference in found)


def _value_distance(wanted: object, stored: object) -> float:
    """Return a distance of two values; for arrays it grows with the logarithms of the ratios of their sizes."""
    mine, theirs = _array(wanted), _array(stored)
    if mine is None or theirs is None or len(mine[1]) != len(theirs[1]):
        return _OTHER
    sizes = [pair for pair in zip(mine[1], theirs[1], strict=True) if pair[0] != pair[1]]
    known = all(type(size) is int and size > 0 for pair in sizes for size in pair)
    return (_OTHER / 2 if mine[0] != theirs[0] else 0.0) + (
        sum(1 + abs(math.log2(one) - math.log2(other)) for one, other in sizes) if known else _OTHER
    )


def _array(data: object) -> tuple[str, list[Any]] | None:
    parts = data.get("array") if isinstance(data, dict) else None
    return tuple(parts) if isinstance(parts, list) and len(parts) == 2 and isinstance(parts[1], list) else None


def _differences_text(found: list[CallDifference]) -> str:
    """Return the differences as text, e.g. `args[0] is f32[4,16]; this call has f32[4,8]`."""
    parts = [
        f"{_cut(path)} is {_short(stored)}; this call has {'none' if wanted is None else _short(wanted)}"
        for path, wanted, stored in found[:_SHOWN]
    ]
    more = len(found) - _SHOWN
    return "; ".join(parts) + (f"; and {counted(more, 'other difference')}" if more > 0 else "")


def _short(data: Any) -> str:
    """Return a short form of a described value, such as `bf16[4,1024]`."""
    array = _array(data)
    if array is not None:
        return _cut(array_text(*array)) + ("" if "weak" not in data else " (weak)")
    if data is None:
        return "not given"
    if isinstance(data, dict) and len(data) == 1:
        ((form, value),) = data.items()
        if form == "float":
            return _float(value)
        if form in ("name", "dtype"):
            return _cut(str(value))
    return _cut(json.dumps(data, ensure_ascii=False))


def _cut(text: str) -> str:
    return printable(shortened(text, _LONGEST))


def _float(text: Any) -> str:
    try:
        return repr(float.fromhex(text))
    except (TypeError, ValueError, OverflowError):  # files may contain anything
        return _cut(str(text))


def _elsewhere(other: ConfigKey, key: ConfigKey) -> str:
    """Return how a key of the same operation differs from the wanted one: in device, version, or both."""
    version = f"as version {printable(other.op.rpartition('@v')[2])}" if other.op != key.op else ""
    device = f"on {printable(other.device)}" if other.device != key.device else ""
    return " ".join(part for part in (version, device) if part) or "here"
