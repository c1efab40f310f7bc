# SPDX-License-Identifier: Apache-2.0
"""Device times from the device's own profilers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def cupti_seconds(work: Callable[[], Any]) -> float | None:
    """Run `work` and return the total time of its GPU kernels in seconds.

    Returns `None` without CUPTI (no NVIDIA GPU, or another profiler is attached) and if no kernel ran. CUPTI stays
    attached, because attaching takes ten milliseconds; `detach_cupti` releases it.
    """
    extension = _cupti()
    try:
        if extension is None:
            return None
        extension._cupti_init()
    except RuntimeError:
        return None
    try:
        jax.block_until_ready(work())
    finally:
        timings = extension._cupti_get_timings(False)  # milliseconds by kernel
    return sum(milliseconds for _, milliseconds in timings) * 1e-3 if timings else None


def detach_cupti() -> None:
    """Release CUPTI for other profilers."""
    extension = _cupti()
    if extension is not None:
        with contextlib.suppress(RuntimeError):  # another profiler is attached
            extension._cupti_init()
            extension._cupti_get_timings(True)


def _cupti() -> Any:
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    extension = vars(mosaic_gpu).get("_mosaic_gpu_ext")
    return extension if hasattr(extension, "_cupti_get_timings") else None


def profiled_planes(work: Callable[[], Any]) -> list[Any]:
    """Run `work` under the profiler and return the planes of its trace, each with a `name` and `lines` of `events`.

    Raises:
        RuntimeError: The profiler is not available, e.g. because another trace is running.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # the device's own events are enough
    with tempfile.TemporaryDirectory(prefix="ejkernel-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(work())
        return [
            plane
            for file in sorted(Path(folder).rglob("*.xplane.pb"))
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        ]
