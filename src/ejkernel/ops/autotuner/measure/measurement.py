# SPDX-License-Identifier: Apache-2.0
"""Measuring functions on the device, independently of any open JAX trace."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import jax
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.measure.sampling import (
    PROCESSOR,
    Case,
    Sample,
    Sampling,
    SamplingPlan,
    in_each,
    mean_sample,
)
from ejkernel.ops.autotuner.measure.timers import (
    WALL,
    Timer,
    TimerError,
    calls_per_sample,
    choose_timer,
    wall_sample,
    work_between,
)
from ejkernel.ops.autotuner.process.threads import on_measuring_thread
from ejkernel.ops.errors import CandidateError, ConfigError, TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.fingerprint import default_device
from ejkernel.ops.utils.formatting import size
from ejkernel.ops.utils.messages.names import check_argument, is_count

logger = logging.getLogger(__name__)

N = TypeVar("N", int, float)

WARM, COLD = "warm", "cold"
_CACHE_BYTES = 128 << 20  # covers the last-level caches of today's GPUs
_TIMES_CACHE = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measured time and memory of one call.

    Attributes:
        samples: Seconds per call, one for each round; each is the mean of calls that ran back to back or, on a CPU,
            the median of calls that were waited for. With several cases it is their weighted geometric mean.
        method: The timer: `cupti`, the GPU's time in kernels; `profiler`, the device's time in programs; `wall`; or
            `processor`, the processor time of the host's busiest thread, used if the host does the work and other
            processes disturb the clock.
        cache: `warm`: every call had the same arguments. `cold`: enough sets of arguments alternated to evict each of
            them from the last-level cache.
        compile_seconds: The time to trace, lower and compile.
        peak_bytes: Temporaries, arguments and results together, as reported by the compiler.
        output_bytes: The results, as reported by the compiler.
        cases: The cases with their times, if there are several.
        relative: The median divided by the heuristic's in the same rounds, which compares with candidates measured at
            another time or by another timer; `None` if the heuristic was not measured beside it.
    """

    samples: tuple[float, ...]
    method: str = "wall"
    cache: str = WARM
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    output_bytes: int | None = None
    cases: tuple[Case, ...] = ()
    relative: float | None = None

    @property
    def median(self) -> float:
        """The median of the samples in seconds."""
        return float(np.median(self.samples))

    def beside(self, heuristic: Sequence[float]) -> Measurement:
        """Return the measurement with the ratio to the heuristic's samples, which are of the same rounds or more."""
        same = heuristic[: len(self.samples)]
        other = float(np.median(same)) if len(same) == len(self.samples) > 0 else 0.0
        return dataclasses.replace(self, relative=self.median / other if other > 0 else None)

    @property
    def spread(self) -> float:
        """The interquartile range of the samples divided by their median; 0 for fewer than four samples."""
        if len(self.samples) < 4:
            return 0.0
        low, high = np.quantile(self.samples, (0.25, 0.75), method="weibull")
        return float(high - low) / self.median


class Runner:
    """Calls a function with the next of several sets of arguments.

    A single set stays in the device's caches; with as many sets as `sets_for_cold` returns, no call finds its arguments
    in a cache.

    Args:
        function: The function.
        argument_sets: Sets of positional arguments of equal shapes; at least one.
    """

    def __init__(self, function: Callable[..., Any], argument_sets: Sequence[Sequence[object]]) -> None:
        self.function = function
        self.argument_sets = argument_sets
        self._turns = itertools.cycle(argument_sets)

    def __call__(self) -> Any:
        """Call the function with the next set of arguments."""
        return self.function(*next(self._turns))


def sets_for_cold(bytes_of_one: int) -> int:
    """Return the number of argument sets to alternate so that each call finds a cold last-level cache.

    Together the sets are three times as large as the cache, which also flushes caches with random replacement. Small
    arguments need very many sets. Without array arguments the result is 1.

    Args:
        bytes_of_one: The size of one set.
    """
    return 1 if bytes_of_one <= 0 else max(2, -(-_TIMES_CACHE * _CACHE_BYTES // bytes_of_one))


def interleaved(
    functions: Sequence[Sequence[Callable[[], Any]]],
    *,
    cases: Sequence[Case] = (),
    rounds: int = 10,
    sampling: Sampling | None = None,
    warmup: int = 2,
    stop: Callable[[], bool] = lambda: False,
    on_error: Callable[[int, BaseException], None] | None = None,
) -> list[Measurement]:
    """Measure functions in interleaved rounds, so that drift of the machine affects all of them alike.

    All functions use the same timer. If the device stops reporting times, all are measured again by the wall clock,
    with a logged warning. The first sample of each does not count. If the host does the work and other processes
    disturb the clock, the samples are processor time.

    Args:
        functions: For each candidate one function, or one for each of `cases`; each round then samples all of them, and
            their mean is the round's sample.
        cases: The cases, if there are several.
        rounds: The number of samples of each function, without `sampling`.
        sampling: The rules that decide which functions to sample, and which is the best.
        warmup: Calls of each function before its first sample.
        stop: Called between samples; returns whether to stop. Functions not sampled by then have no samples.
        on_error: Called with the index of a function that raised and the error. The function is no longer sampled
            and keeps its samples. Without it, the error is raised.
    """
    sampling = sampling or Sampling(len(functions), plan=SamplingPlan.fixed(rounds), incumbents=())
    sampler = _Sampler(functions, cases, sampling, stop, on_error)
    calls = sampler.warmed_up(warmup)
    # one timer for all: times of different timers do not compare
    timer = choose_timer([function for index in sampling.running for function in functions[index]])
    try:
        try:
            sampler.run(timer, calls)
        finally:
            timer.end()
    except TimerError as error:
        logger.warning("measuring anew, all by the wall clock: %s", error)
        timer = WALL
        sampling.restart()
        sampler.run(timer, calls)
    witness, _ = sampling.judged
    return measurements_of(sampling, cases, PROCESSOR if witness == PROCESSOR else timer.method)


def measurements_of(sampling: Sampling, cases: Sequence[Case], method: str) -> list[Measurement]:
    """Return the measurement of each function of a sampling, with its samples in each case; `method` made them."""
    witness, samples = sampling.judged
    measurements = []
    for noted, values in zip(sampling.noted, samples, strict=True):
        times = in_each(noted, by_work=witness == PROCESSOR) or [()] * len(cases)
        own = tuple(dataclasses.replace(case, samples=each) for case, each in zip(cases, times, strict=True))
        measurements.append(Measurement(samples=values, method=method, cases=own))
    return measurements


@dataclasses.dataclass(frozen=True, slots=True)
class _Sampler:
    """Samples functions as a `Sampling` decides, case by case."""

    functions: Sequence[Sequence[Callable[[], Any]]]
    cases: Sequence[Case]
    sampling: Sampling
    stop: Callable[[], bool]
    on_error: Callable[[int, BaseException], None] | None

    def warmed_up(self, warmup: int) -> dict[int, list[int]]:
        """Return the number of calls per sample of each function; after `stop`, only that of the first."""
        calls: dict[int, list[int]] = {}
        # As many calls a sample as a candidate's work says: the clock would say too few on a busy machine.
        count_calls = functools.partial(calls_per_sample, timer=choose_timer([]))
        for index in list(self.sampling.running):
            if calls and self.stop():
                self.sampling.drop(index)
                continue
            counts = [self.tried(index, case, count_calls, warmup) for case in self._cases(index)]
            if index in self.sampling.running:
                calls[index] = [count for count in counts if count is not None]
        return calls

    def run(self, timer: Timer, calls: Mapping[int, Sequence[int]]) -> None:
        """Sample the functions that the sampling asks for, until it is decided or `stop` ends it."""
        while indices := self.sampling.next_round():
            taken: dict[int, list[Sample]] = {index: [] for index in indices}
            for case in range(len(self.functions[indices[0]])):
                for index in self.sampling.next_round():  # without those that have failed in this round
                    # by now some function has a sample, so an interrupted search has an answer
                    if any(self.sampling.samples) and self.stop():
                        return
                    self._sample(index, case, timer, calls[index], taken[index])

    def _sample(self, index: int, case: int, timer: Timer, calls: Sequence[int], taken: list[Sample]) -> None:
        """Sample one case of a function; after its last case, record the round's sample."""
        before = timer.threads()
        seconds = self.tried(index, case, timer.sample, calls[case])
        if seconds is None:
            return
        taken.append(Sample(seconds, work_between(before, timer.threads(), calls[case])))
        if len(taken) == len(self.functions[index]):
            mean = mean_sample(taken, [case.weight for case in self.cases])
            self.sampling.note(index, mean.seconds, mean.work, mean.cases)

    def _cases(self, index: int) -> Iterator[int]:
        """Yield the cases of a function until it fails."""
        for case in range(len(self.functions[index])):
            if index in self.sampling.running:
                yield case

    def tried(self, index: int, case: int, time: Callable[[Callable[[], Any], int], N], count: int) -> N | None:
        """Time a function; return `None` if it raised; it is then no longer sampled."""
        try:
            return time(self.functions[index][case], count)
        except TimerError:
            raise
        except BaseException as error:  # the measuring thread receives no Ctrl-C, so the function raised this
            if self.on_error is None:
                raise
            self.sampling.fail(index)
            if self.cases:
                error = CandidateError(f"on {self.cases[case].name}: {error_text(error)}")
            self.on_error(index, error)
            return None


def benchmark(
    fn: Callable[..., Any], /, *args: object, num_iters: int = 100, num_warmup: int = 3, **kwargs: object
) -> float:
    """Return the median time in milliseconds of `num_iters` calls `fn(*args, **kwargs)`, each waited for.

    The first `num_warmup` calls, which compile, do not count.

    Raises:
        ConfigError: `num_iters` is not positive, or `num_warmup` is negative.
    """
    check_argument(callable(fn), "fn", "a function", fn)
    if not (is_count(num_iters, 1) and is_count(num_warmup, 0)):
        raise ConfigError(f"num_iters must be positive and num_warmup >= 0, got {num_iters!r} and {num_warmup!r}.")

    def work() -> float:
        for _ in range(num_warmup):
            jax.block_until_ready(fn(*args, **kwargs))
        # each call alone, as a user would see it
        times = [wall_sample(lambda: fn(*args, **kwargs), 1) for _ in range(num_iters)]
        return float(np.median(times)) * 1e3

    return on_measuring_thread(work)


# --- the memory that a call needs, and the memory of the device ---

_NOTABLE: Final = 1 << 20  # bytes; see `more_bytes`
_NOTABLE_SHARE: Final = 0.1


def num_bytes(like: Any) -> int:
    """Return the size in bytes of an array of this shape and dtype; a random key counts as eight bytes."""
    is_key = compat.tracing.dtypes.issubdtype(like.dtype, compat.tracing.dtypes.prng_key)
    each: int = 8 if is_key else like.dtype.itemsize
    return int(math.prod(like.shape)) * each


def peak_bytes(compiled: Any) -> int | None:
    """Return the bytes that a call of a compiled program needs, with inputs and results; `None` if unknown."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")
    argument, output, temp, alias = (int(getattr(analysis, part)) for part in parts)
    # donated arrays are counted among both arguments and results
    return argument + output + temp - alias


def more_bytes(mine: int | None, theirs: int | None) -> int:
    """Return how many more bytes one program needs than another; 0 if unknown or not notable.

    Notable are 1 MiB and a tenth more.
    """
    if mine is None or theirs is None:
        return 0
    more = mine - theirs
    return more if more >= max(_NOTABLE, _NOTABLE_SHARE * theirs) else 0


def preferred(times: Sequence[float], needs: Sequence[int | None], *, margin: float) -> int:
    """Return the index of the candidate to prefer by time and memory.

    Of the candidates within `margin` of the first, those that need notably more memory than the leanest are passed
    over, and the first of the others is preferred.

    Args:
        times: The time of each candidate, the best candidate first.
        needs: The bytes that each candidate needs; `None` if unknown.
        margin: Share of a candidate's time by which the first must be faster to be preferred to it.
    """
    close = [at for at, time in enumerate(times) if times[0] >= time * (1 - margin)]
    known = {at: need for at in close if (need := needs[at]) is not None}
    if 0 not in known:
        return 0
    least = min(known.values())
    return next(at for at, need in known.items() if not more_bytes(need, least))


def output_bytes(compiled: Any) -> int | None:
    """Return the bytes of a compiled program's results; `None` if the compiler cannot tell."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.output_size_in_bytes)


def largest(sizes: Iterable[int | None]) -> int | None:
    """Return the largest size; `None` if one is unknown."""
    known = list(sizes)
    return None if None in known else max(size for size in known if size is not None)


def device_bytes() -> int | None:
    """Return the memory of the default device in bytes; `None` if unknown."""
    device = default_device()
    stats = device.memory_stats()
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def check_room(needed: int, what: str) -> None:
    """Raise if the default device has less memory than `needed` bytes.

    Raises:
        TuningError: The device is too small.
    """
    available = device_bytes()
    if available is not None and needed > available:
        raise TuningError(f"not enough memory for {what}: {size(needed)} needed, {size(available)} on the device.")
