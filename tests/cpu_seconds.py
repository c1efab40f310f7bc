# SPDX-License-Identifier: Apache-2.0
"""`pytest --cpu-limit SECONDS` lists tests that took longer, so that the mark `slow` stays accurate.

CPU seconds include those of processes that a test started and waited for. They depend little on other work of the
machine, but no test fails because of them.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

_took = pytest.StashKey[float]()
_seconds = defaultdict(float)  # by test name without parameters: the sum of its cases
_marked = set()


def pytest_addoption(parser):
    help = "list unmarked tests that took more CPU seconds, and files with marked tests that took less"
    parser.addoption("--cpu-limit", type=float, metavar="SECONDS", help=help)


def _now():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if item.config.getoption("--cpu-limit") is not None:  # the clock takes a tenth of a millisecond
        item.stash[_took] = -_now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown" and _took in item.stash:
        report.user_properties.append(("cpu_seconds", item.stash[_took] + _now()))
    return report


def pytest_runtest_logreport(report):
    """Record the CPU seconds of a test, from any xdist worker."""
    took = dict(report.user_properties).get("cpu_seconds")
    if took is not None:
        name = report.nodeid.partition("[")[0]
        _seconds[name] += took
        if "slow" in report.keywords:
            _marked.add(name)


def pytest_terminal_summary(terminalreporter, config):
    limit = config.getoption("--cpu-limit")
    if limit is None:
        return
    slow = {name: took for name, took in _seconds.items() if took > limit and name not in _marked}
    quick = defaultdict(float)
    for name in _marked:
        quick[name.partition("::")[0]] += _seconds[name]
    terminalreporter.section(f"more than {limit:g} s of CPU, and not marked slow")
    for name, took in sorted(slow.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{took:6.2f} s  {name}")
    terminalreporter.section(f"marked slow, and less than {limit:g} s of CPU for the file")
    for path, took in sorted(quick.items()):
        if took < limit:
            terminalreporter.write_line(f"{took:6.2f} s  {path}")
