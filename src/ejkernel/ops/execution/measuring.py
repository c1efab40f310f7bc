# SPDX-License-Identifier: Apache-2.0
"""Times of functions, as the device spends them, measured apart from whatever trace is open."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel import compat
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.execution.threads import apart
from ejkernel.ops.utils.fingerprint import default_device, platform_kind

_CLOCK = time.perf_counter
_SAMPLE_SECONDS = 2e-3  # a sample is as many calls as take this long, so that the clock and dispatch do not count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How long one call takes.

    Attributes:
        samples: Seconds a call, one figure a round; each is the mean of calls that run back to back.
        method: How the time was taken: `cupti`, the GPU's own time of its kernels, or `wall`.
    """

    samples: tuple[float, ...]
    method: str = "wall"

    @property
    def median(self) -> float:
        """The median of the samples, seconds."""
        return float(np.median(self.samples))

    @property
    def spread(self) -> float:
        """Interquartile range of the samples over their median; 0 for fewer than four samples."""
        if len(self.samples) < 4:
            return 0.0
        low, high = np.quantile(self.samples, (0.25, 0.75), method="weibull")
        return float(high - low) / self.median


def calls_per_sample(function: Callable[[], Any], warmup: int) -> int:
    """Return how many calls of `function` make one sample, after `warmup` calls of it (one at least)."""
    once = [sample(function, 1) for _ in range(max(2, warmup))][1:]
    return max(1, min(1000, round(_SAMPLE_SECONDS / max(min(once), 1e-7))))


def sample(function: Callable[[], Any], calls: int) -> float:
    """Return seconds a call, of `calls` calls that are issued back to back and waited for once."""
    start = _CLOCK()
    out = None
    for _ in range(calls):
        out = function()
    jax.block_until_ready(out)
    return (_CLOCK() - start) / calls


def cupti_sample(function: Callable[[], Any], calls: int) -> float | None:
    """Return the GPU's own seconds a call, of `calls` calls; `None` where the GPU does not tell."""

    def work() -> Any:
        return [function() for _ in range(calls)][-1]

    seconds = compat.cupti_seconds(work)
    return None if seconds is None else seconds / calls


def choose_timer(functions: Sequence[Callable[[], Any]]) -> tuple[str, Callable[[Callable[[], Any], int], Any]]:
    """Return how to time `functions`, all alike: by what the device says of itself, or else by the wall clock."""
    on_gpu = platform_kind(default_device().platform) == "gpu"
    if on_gpu and all(cupti_sample(function, 1) is not None for function in functions):
        return "cupti", cupti_sample
    return "wall", sample


def interleaved(
    functions: Sequence[Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    keep: Callable[[Sequence[Sequence[float]]], Sequence[bool]] | None = None,
    deadline: float | None = None,
) -> list[Measurement]:
    """Measure functions in turn, round by round, so that drift of the machine hits all of them alike.

    Args:
        functions: What to measure.
        rounds: Samples of each.
        warmup: Calls of each before its first sample.
        keep: Given all samples so far, says which functions are worth another round; all, if left out.
        deadline: `time.perf_counter()` after which no new round begins; each function has one sample at least.
    """
    calls = [calls_per_sample(function, warmup) for function in functions]
    method, timer = choose_timer(functions)
    samples: list[list[float]] = [[] for _ in functions]
    alive = [True] * len(functions)
    for index in range(rounds):
        if index and deadline is not None and _CLOCK() > deadline:
            break
        for position, function in enumerate(functions):
            if alive[position]:
                samples[position].append(timer(function, calls[position]))
        if keep is not None:
            alive = [was and now for was, now in zip(alive, keep(samples), strict=True)]
    return [Measurement(samples=tuple(values), method=method) for values in samples]


def benchmark(fn: Callable[..., Any], *args: Any, num_iters: int = 100, num_warmup: int = 3, **kwargs: Any) -> float:
    """Return the milliseconds that a call `fn(*args, **kwargs)` takes: the median over `num_iters` calls.

    The first `num_warmup` calls, which compile, do not count. Results are waited for.

    Raises:
        ConfigError: `num_iters` is not positive, or `num_warmup` is negative.
    """
    if num_iters < 1 or num_warmup < 0:
        raise ConfigError(f"num_iters must be positive and num_warmup >= 0, got {num_iters!r} and {num_warmup!r}.")

    def work() -> float:
        for _ in range(num_warmup):
            jax.block_until_ready(fn(*args, **kwargs))
        times = [sample(lambda: fn(*args, **kwargs), 1) for _ in range(num_iters)]
        return float(np.median(times)) * 1e3

    return apart(work)
