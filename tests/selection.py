# SPDX-License-Identifier: Apache-2.0
"""Selects the tests to run: a covering sample of large matrices and, with `--part`, a part of all tests.

For a parametrized test in `tests/kernels`, `tests/modules` or `tests/tpu` that is marked `slow`, `make test` runs a few
cases that cover each value of each parameter. `make test-all` runs every case (`--whole`). The cases are chosen among
those that `-k`, `-m` and the command line leave, alike in every process and on every machine. The mark `sampled`
requests a sample for other tests. Its arguments are functions of a case's parameters:

- `by` returns the set that a case covers, by default the values of its parameters; for example pairs of values;
- `runs` returns whether the case runs here, because a skipped case covers nothing.

A test or case marked `whole` runs only with `--whole`, because a cheaper one checks the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from pathlib import Path

import pytest

SAMPLED = tuple(Path(__file__).parent / folder for folder in ("kernels", "modules", "tpu"))


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="run all cases, not samples of them")
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the tests, K from 0; see in_part")


def pytest_configure(config):
    config.addinivalue_line("markers", "sampled(by): runs a covering sample of its cases; see tests/selection.py")
    config.addinivalue_line("markers", "whole: runs only with --whole, because a cheaper test checks the same")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Apply the marks `whole` and `sampled`, and `--part`."""
    kept = items if config.getoption("--whole") else list(sampled(items))
    if part := config.getoption("--part"):
        kept = list(in_part(kept, *map(int, part.split("/"))))
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def sampled(items):
    """Yield all items of unsampled tests, and a covering sample of each sampled test, except those marked `whole`."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("whole") is not None:
            continue
        if _is_sampled(item):
            tests[test_of(item)].append(item)
        else:
            yield item
    for cases in tests.values():
        yield from _sample(cases)


def _sample(cases):
    mark = cases[0].get_closest_marker("sampled")
    given = mark.kwargs if mark else {}
    by, runs = given.get("by", _values), given.get("runs", lambda **_: True)
    parameters = [item.callspec.params for item in cases]
    chosen = covering([set(by(**own)) for own in parameters], lambda index: runs(**parameters[index]))
    return [cases[index] for index in chosen]


def _is_sampled(item):
    if not hasattr(item, "callspec"):
        return False
    is_large = item.get_closest_marker("slow") is not None and _is_in_sampled(item.path)
    return is_large or item.get_closest_marker("sampled") is not None


@functools.cache
def _is_in_sampled(path):
    return any(map(path.is_relative_to, SAMPLED))


def _values(**parameters):
    return {(name, _hashable(value)) for name, value in parameters.items()}


def _hashable(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def covering(cases, runs=lambda index: True):
    """Return the indices of a few of these sets, always the same, that cover all elements of the sets that run.

    Among sets with equally many new elements, those with the rarest elements come first.
    """
    holders = defaultdict(list)  # by element, the indices of its sets
    for index, case in enumerate(cases):
        for element in case:
            holders[element].append(index)
    left, kept, seen = [*range(len(cases))], [], set()
    new, common = [*map(len, cases)], [0] * len(cases)  # of each set: new elements; how often others have its own
    while left := [index for index in left if new[index]]:
        best = max(left, key=lambda index: (new[index], -common[index]))
        left.remove(best)
        if runs(best):
            kept.append(best)
            for element in cases[best]:
                for index in holders[element]:
                    new[index] -= element not in seen
                    common[index] += 1
            seen |= cases[best]
    return kept


def in_part(items, part, parts):
    """Yield the tests of one part: one of `parts` cases of the slow tests, and a case of every second quick test.

    Parts with even numbers have one half of the quick tests, parts with odd numbers the other half. Tests marked
    `smoke` are in every part.
    """
    cases = defaultdict(list)
    for item in items:
        smoke = item.get_closest_marker("smoke") is not None
        if item.get_closest_marker("slow") is not None and not smoke:
            if _hash_of(item.nodeid) % parts == part:
                yield item
        elif smoke or _hash_of(test_of(item)) % 2 == part % 2:
            cases[test_of(item)].append(item)
    for same in cases.values():
        same.sort(key=lambda item: _hash_of(item.nodeid))
        yield from same[part % len(same) :: parts]


def test_of(item):
    """Return the name of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def _hash_of(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest())
