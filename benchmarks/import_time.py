# SPDX-License-Identifier: Apache-2.0
"""`import ejkernel.ops` in a process that has imported JAX: the total time, and the time by module."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

_TIMED = """
import time, jax
start, cpu = time.perf_counter(), time.process_time()
import ejkernel.ops
print(time.perf_counter() - start, time.process_time() - cpu)
"""
_MARK = "everything after this is ours"
_LISTED = f"""
import sys, jax
print({_MARK!r}, file=sys.stderr, flush=True)
import ejkernel.ops
"""
_LINE = re.compile(r"import time:\s*(\d+) \|\s*(\d+) \| (\s*)(\S+)")


def _child(code: str, *options: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def import_seconds(environment: Mapping[str, str], processes: int = 9) -> tuple[list[float], list[float]]:
    """Return the seconds of the import in that many fresh processes, and the processor's share of them."""
    _child(_TIMED, environment=environment)  # writes the bytecode, and brings files into memory
    found = [tuple(map(float, _child(_TIMED, environment=environment).stdout.split())) for _ in range(processes)]
    return [wall for wall, _ in found], [cpu for _, cpu in found]


def slowest_imports(environment: Mapping[str, str], count: int = 10) -> list[tuple[str, float, float]]:
    """Return `(module, own ms, ms with what it imports)` of the modules that take the most themselves."""
    _, _, listed = _child(_LISTED, "-X", "importtime", environment=environment).stderr.partition(_MARK)
    found = [(match[4], int(match[1]) / 1000, int(match[2]) / 1000) for match in _LINE.finditer(listed)]
    return sorted(found, key=lambda entry: -entry[1])[:count]


def initialises_no_device() -> bool:
    """Return whether the import works with an unknown `JAX_PLATFORMS`, i.e. initialises no device."""
    try:
        _child("import ejkernel.ops", environment={"JAX_PLATFORMS": "no_such_platform"})
    except subprocess.CalledProcessError:
        return False
    return True


def measure() -> dict[str, Any]:
    """Return the result, ready for JSON."""
    with tempfile.TemporaryDirectory() as folder:
        # Use bytecode, as an installed package does, even if this environment disables it.
        environment = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        seconds, cpu = import_seconds(environment)
        slowest = slowest_imports(environment)
    return {
        "minimum_ms": round(min(seconds) * 1e3, 1),
        "median_ms": round(statistics.median(seconds) * 1e3, 1),
        "minimum_cpu_ms": round(min(cpu) * 1e3, 1),
        "initialises_no_device": initialises_no_device(),
        "slowest": [
            {"module": name, "own_ms": round(own, 2), "total_ms": round(total, 2)} for name, own, total in slowest
        ],
    }
