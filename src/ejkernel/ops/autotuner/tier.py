# SPDX-License-Identifier: Apache-2.0
"""The autotune tier of a `ConfigSelectorChain`: a cache miss starts a search."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ejkernel.ops.autotuner.bench.residuals import partners_in_force
from ejkernel.ops.autotuner.measure.sampling import geometric_mean
from ejkernel.ops.autotuner.process.supervisor import interrupts_held_back
from ejkernel.ops.autotuner.search.model import Record
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.store.saving import AdmissionError, Saver
from ejkernel.ops.autotuner.tasks.task import SharedCall, shares_of
from ejkernel.ops.autotuner.trials.candidates import config_id, heuristic_of
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.cache import AUTOTUNE, ESTIMATED, PUBLISHED
from ejkernel.ops.config.estimates import PRUNED_FROM, EstimatedTime, EstimateFiles
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain, Resolution
from ejkernel.ops.core.context import is_measuring
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import TuningError, TuningWarning
from ejkernel.ops.utils.messages.warn import warn


class AutotuneTier:
    """The searches of one chain."""

    def __init__(self) -> None:
        self._store: MeasurementStore | None = None
        # Reentrant, because a tuner may resolve the call that it tunes.
        self._locks: dict[ConfigKey, threading.RLock] = {}

    @functools.cached_property
    def default_tuner(self) -> Autotuner:
        """The tuner of a chain without an explicit tuner."""
        return Autotuner()

    def store_beside(self, persistent: PersistentCache | None) -> MeasurementStore | None:
        """Return the store of earlier measurements; `None` without a persistent cache."""
        if persistent is None:
            return None
        if self._store is None or self._store.cache is not persistent:
            self._store = MeasurementStore(persistent)
        return self._store

    def search(
        self,
        chain: ConfigSelectorChain[Any, Any],
        inv: Invocation[Any, Any],
        kernel: Any,
        tuner: Autotuner | None,
        *,
        resume: bool = True,
        **options: Any,
    ) -> AutotuneData:
        """See `ConfigSelectorChain.search`; without `resume`, the times of a partial search are measured again."""
        tuner, store = chain.tuner if tuner is None else tuner, self.store_beside(chain.persistent)
        policy, others = options.get("policy") or AutotunePolicy(), options.get("others") or ()
        own_space = options.get("candidates") is None and kernel is not None
        saver = Saver(chain=chain, store=store, kernel=kernel, validated=bool(policy.validate), own_space=own_space)
        if store is not None:
            has_tables = kernel is not None and inv.platform == "tpu"
            published = kernel.published(inv.representative) if has_tables else ()
            first = [Record(PUBLISHED.name, ((each.config, 1.0),)) for each in published if not each.why_not]
            options["records"] = [*first, *saver.seeds([inv, *(other.inv for other in others)]), *store.records(inv)]
        calls = [SharedCall(inv=inv, weight=options.get("weight", 1.0)), *others]
        found = estimates_of(chain.persistent, calls, kernel)
        if found:
            options["records"] = [
                *options["records"],
                Record(ESTIMATED.name, tuple((each.config, each.seconds) for each in found)),
            ]
            options["rejected"] = pruned_by(found, calls, kernel)
        # Tune the representative of the bucket rather than its first call: the result must not depend on the order of
        # calls in a program.
        if others:
            options["others"] = [
                dataclasses.replace(o, inv=o.inv.representative, partners=partners_in_force(chain, o.inv, kernel))
                for o in others
            ]
        if store is not None and resume:
            options["known"] = store.unfinished(inv, shares_of(calls))
        options["partners"] = partners_in_force(chain, inv, kernel)
        saved = _tuned_and_saved(tuner, inv, kernel, saver, options)
        if saved.interrupted:  # after saving the measurements so far
            raise KeyboardInterrupt
        return saved

    def answer(
        self,
        chain: ConfigSelectorChain[Any, Any],
        inv: Invocation[Cfg, Out],
        kernel: Kernel[Cfg, Out],
        policy: AutotunePolicy,
        known: Callable[[], Resolution[Any] | None],
    ) -> Resolution[Any] | str:
        """Search for a configuration; return it, or the reason if none was found. Concurrent threads share one search.

        Args:
            chain: The chain that asks.
            inv: The call; it must have a key.
            kernel: Its kernel.
            policy: The policy of the search.
            known: Returns the result of another thread that finished first, or `None`.
        """
        lock = self._locks.setdefault(inv.key, threading.RLock())
        # A candidate that calls a kernel comes here on a measuring thread. The thread with the lock may be waiting for
        # this measuring thread, so never block here: measuring twice is better than a deadlock.
        held = lock.acquire(blocking=not is_measuring())
        try:
            found = known()
            if found is None:
                tuned = chain.search(inv, kernel, policy=policy)
                found = Resolution(tuned.config, AUTOTUNE.name, inv.key)
            return found
        except TuningError as error:
            text = f"{inv.op_id}: tuning found no configuration, the heuristic is used: {error}"
            warn(text, TuningWarning)
            return str(error)
        finally:
            if held:
                lock.release()


def _tuned_and_saved(
    tuner: Autotuner, inv: Invocation[Any, Any], kernel: Any, saver: Saver, options: dict[str, Any]
) -> AutotuneData:
    """Run a search and save its result first: a later Ctrl-C, listener or warning may raise."""
    saved: list[AutotuneData] = []

    def save(found: AutotuneData) -> AutotuneData:
        with interrupts_held_back():
            saved.append(saver.save(inv, found))
        return saved[-1]

    try:
        tuned: object = tuner.tune(inv.representative, kernel, conclude=save, **options)
    except AdmissionError:  # from `save`
        raise
    except TuningError as error:
        saver.save_failure(inv, error)
        raise
    if not isinstance(tuned, AutotuneData):
        raise TuningError(f"{type(tuner).__name__}.tune returned {type(tuned).__name__}; it must be AutotuneData.")
    # A user's tuner may not call `conclude`, or may return something else.
    return tuned if saved and tuned is saved[-1] else save(tuned)


def estimates_of(persistent: PersistentCache | None, calls: Sequence[SharedCall], kernel: Any) -> list[EstimatedTime]:
    """Return the configurations with an estimate for every call, the fastest by the geometric mean first."""
    is_simulated = all(call.inv.platform == "tpu" for call in calls)
    if kernel is None or not is_simulated or persistent is None or persistent.path is None:
        return []
    files, shares, found = EstimateFiles(persistent.path), shares_of(calls), []
    for call in calls:
        estimates = files.load(call.inv.key)
        times = [] if estimates is None else estimates.times(call.inv, kernel)
        found.append({config_id(each.config): each for each in times})
    weights = [shares[call.inv.call_key] for call in calls]
    common = [[each[name] for each in found] for name in found[0] if all(name in each for each in found)]
    means = [
        EstimatedTime(
            several[0].config,
            geometric_mean(zip((each.seconds for each in several), weights, strict=True)),
            geometric_mean(zip((each.least for each in several), weights, strict=True)),
        )
        for several in common
    ]
    return sorted(means, key=lambda each: each.seconds)


def pruned_by(
    found: Sequence[EstimatedTime], calls: Sequence[SharedCall], kernel: Kernel[Any, Any]
) -> tuple[Outcome, ...]:
    """Return the candidates that are not measured because their estimated time is long; never a heuristic's."""
    kept = {config_id(config) for call in calls for config in heuristic_of(call.inv, kernel)}
    best = min((each.seconds for each in found), default=0.0)
    return tuple(
        Outcome(
            config=each.config,
            status=Status.PRUNED,
            reason=f"its estimated time is {each.seconds / best:.2f} times the best estimate; it was not measured",
        )
        for each in found
        if each.least >= PRUNED_FROM * best and config_id(each.config) not in kept
    )
