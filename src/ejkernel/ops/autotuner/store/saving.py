# SPDX-License-Identifier: Apache-2.0
"""Saves the results of a search: always its log, and the configuration if it is measured, correct and confirmed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

from ejkernel.ops.autotuner.search.model import Record
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.candidates import config_id, heuristic_of, is_in
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.programs import programs
from ejkernel.ops.autotuner.trials.status import FAULTY, SearchProgress, SearchState, Status, is_kept_in
from ejkernel.ops.config.cache import AUTOTUNE, same_config
from ejkernel.ops.config.entries import Difference, StoredEntry, saved_in, space_digest, standing
from ejkernel.ops.config.misses.faults import why_not_traced
from ejkernel.ops.config.policy import effective_policy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.declared_names import why_not_decoded
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import EjkernelError, TuningError
from ejkernel.ops.utils.formatting import compact

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Saves searches on behalf of a chain.

    Attributes:
        chain: Stores the configurations.
        store: Stores the logs; `None` without a persistent cache.
        kernel: The kernel of the calls.
        validated: Whether candidates were compared with the reference.
        own_space: Whether the candidates come from the kernel's search space.
    """

    chain: ConfigSelectorChain[Any, Any]
    store: MeasurementStore | None
    kernel: Kernel[Any, Any]
    validated: bool
    own_space: bool

    def save(self, inv: Invocation[Any, Any], tuned: AutotuneData) -> AutotuneData:
        """Save a search for each of its calls; return it with the reason if its configuration is not saved.

        The result also has the configuration saved earlier that stays in force.

        An unconfirmed configuration is not saved, and an earlier entry stays. So does an earlier entry that this search
        neither beats nor measures.

        Raises:
            AdmissionError: The search named a winner without measuring, checking or confirming it.
        """
        others = [(other.key, other.inv, other) for other in tuned.of_each_call()[1:]]
        saved = [self._save_call(*each) for each in [(inv.key, inv, tuned), *others]]
        faults = [reason for reason, _ in saved if isinstance(reason, AdmissionError)]
        if faults and not tuned.interrupted:
            raise AdmissionError(f"{inv.op_id}: nothing is saved: {faults[0]}")
        first = saved[0][1]
        return dataclasses.replace(
            tuned, not_saved=first.not_saved, stays=first.stays, is_only_here=any(one.is_only_here for _, one in saved)
        )

    def save_failure(self, inv: Invocation[Any, Any], error: TuningError) -> None:
        """Store a log of a search without measurements, so that commands can report the failure."""
        if self.store is None or not self.chain.persist_autotune:
            return
        try:
            outcomes = error.outcomes or tuple(
                Outcome(config=config, status=Status.SKIPPED) for config in heuristic_of(inv, self.kernel)
            )
            if outcomes:
                data = AutotuneData(inv=inv, config=outcomes[0].config, outcomes=outcomes, seconds=error.seconds)
                self.store.save(dataclasses.replace(data, why=str(error), not_saved="nothing was measured"))
        except EjkernelError as why:  # the kernel or a configuration may be the reason for the failed search
            logger.info("%s: the failed search has no log: %s", inv.op_id_v, why)

    def _save_call(
        self, key: ConfigKey, call: Invocation[Any, Any], found: AutotuneData
    ) -> tuple[str | AdmissionError, AutotuneData]:
        """Save a search for one call; return why its configuration is not saved, if so, and the search with that."""
        earlier = self._earlier(call)
        reason: str | AdmissionError = ""
        unread = unwritten = ""
        try:
            reason = why_not_saved(found, validated=self.validated, earlier=earlier)
        except AdmissionError as fault:
            logger.warning("%s: %s; nothing is saved", call.op_id_v, fault)
            reason = fault
        if not reason:
            is_stored = self.chain.persistent is not None and self.chain.persist_autotune
            if is_stored and (why := why_not_decoded(found.config, self.kernel.op_id_v, self.kernel.config_type)):
                unread = f"{compact(found.config)} cannot be read from a file: {why}"
            unwritten = "" if unread else self._remember(key, call, found)
            reason = unread or unwritten
        has_other = earlier is not None and not same_config(earlier.config, found.config)
        stays = earlier.config if earlier and has_other and reason and not unwritten else None
        if isinstance(reason, str) and reason:
            logger.info("%s: %s is not saved: %s", call.op_id_v, found.config, reason)
            self._use_here(key, call, found.config)
        found = dataclasses.replace(
            found, not_saved=str(reason), stays=stays, is_only_here=bool(unread or unwritten) and stays is None
        )
        # Store all measurements, not only the winner: later searches start from them.
        if self.store is not None and self.chain.persist_autotune:
            self.store.save(found)
        return reason, found

    def _earlier(self, call: Invocation[Any, Any]) -> Earlier | None:
        earlier = saved_before(self.chain, self.kernel, call)
        if earlier is None or not self.own_space:
            return earlier
        return dataclasses.replace(
            earlier, has_left=not is_in(candidates_of(self.kernel, call.representative), earlier.config)
        )

    def _remember(self, key: ConfigKey, call: Invocation[Any, Any], found: AutotuneData) -> str:
        """Save a configuration; return why only the memory of this process holds it, or an empty string."""
        space = {"space": space_digest(self.kernel, call)} if self.own_space else {}
        self.chain.remember(key, found.config, call=call.description, measured=found.summary_data() | space)
        store = self.chain.persistent
        why = "" if store is None or not self.chain.persist_autotune else store.why_unwritten(key)
        if store is None or not why:
            return ""
        kept = "" if store.kept_in is None else f"; it is kept in {store.kept_in}"
        return f"{store.path} cannot be written: {why}{kept}"

    def seeds(self, calls: Iterable[Invocation[Any, Any]]) -> list[Record]:
        """Return the saved configurations of the calls as records, so that a search of a large space measures them."""
        if not self.own_space:
            return []
        saved = [earlier for inv in calls if (earlier := saved_before(self.chain, self.kernel, inv)) is not None]
        return [Record("saved", ((earlier.config, 1.0),)) for earlier in saved]

    def _use_here(self, key: ConfigKey, call: Invocation[Any, Any], config: object) -> None:
        """Let this process use the best result so far rather than search again, unless it has an earlier result."""
        before = self.chain.cache.remembered(key)
        if (before is None or before.tier.is_provisional) and saved_before(self.chain, self.kernel, call) is None:
            self.chain.cache.remember(key, config, AUTOTUNE.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Earlier:
    """The saved configuration of a call that is searched again.

    Attributes:
        config: The configuration.
        entry: Its entry; `None` if the cache has none to show.
        has_left: Whether the kernel's search space no longer contains it.
    """

    config: Any
    entry: StoredEntry | None = None
    has_left: bool = False

    @property
    def progress(self) -> SearchProgress | None:
        """The progress of its search; `None` for an entry without a search."""
        return None if self.entry is None else SearchProgress.stored_in(self.entry.measured)

    @property
    def is_settled(self) -> bool:
        """Whether it is more than the heuristic of an undecided or unfinished search."""
        progress = self.progress
        is_open = progress is not None and progress.state != SearchState.COMPLETE
        return not (is_open and self.entry is not None and is_kept_in(self.entry.measured))


def saved_before(
    chain: ConfigSelectorChain[Any, Any], kernel: Kernel[Any, Any], call: Invocation[Any, Any]
) -> Earlier | None:
    """Return the saved configuration of a call, if it counts as measured; `None` otherwise."""
    if chain.persistent is None:
        return None
    stale = effective_policy(chain).stale
    for config, entry in saved_in(chain.persistent, call, kernel):
        if standing(stale, entry, kernel, call)[0] == "use":
            return Earlier(config, entry)
    return None


def why_not_run(kernel: Kernel[Any, Any], call: Invocation[Any, Any], config: object) -> str:
    """Return the error of a call with a saved configuration; empty if it runs.

    A configuration in the kernel's space is assumed to run. Others are traced, because they may run, too.
    """
    try:
        if is_in(candidates_of(kernel, call.representative), config):
            return ""
    except EjkernelError as error:  # the kernel's own space may be empty
        logger.info("%s: the search space is unknown: %s", call.op_id_v, error)
    return why_not_traced(call, kernel, config)


def heuristic_since(
    kernel: Kernel[Any, Any], call: Invocation[Any, Any], config: object, entry: StoredEntry
) -> tuple[Difference, ...]:
    """Return the difference of an entry that kept the heuristic, if the kernel's heuristic has changed since."""
    is_kept = is_kept_in(entry.measured) and (entry.measured or {}).get("heuristic") is not None
    heuristic = heuristic_of(call.representative, kernel) if is_kept else []
    if not heuristic or same_config(config, heuristic[0]):
        return ()
    return (Difference("heuristic", compact(config), compact(heuristic[0])),)


class AdmissionError(TuningError):
    """The search named a winner without measuring, checking or confirming it: a defect of the search."""


def why_not_saved(data: AutotuneData, *, validated: bool, earlier: Earlier | None = None) -> str:
    """Return why the configuration of a search is not saved; empty if it is saved.

    A partial search has a result only if a candidate beat the heuristic, or if the saved configuration is wrong: then
    the heuristic replaces it. A saved configuration is replaced only by the winner of a search that measured it too,
    and never by an undecided search.

    Args:
        data: The search.
        validated: Whether candidates were compared with the reference.
        earlier: The configuration saved so far; `None` without one.

    Raises:
        AdmissionError: The winner is not measured, not correct, or not confirmed.
    """
    progress, winner = data.progress, _winner(data)
    if progress.state == SearchState.FAILED:
        return "nothing was measured"
    is_early = progress.state == SearchState.PARTIAL and winner is data.heuristic
    found = None if earlier is None else _tried(data, earlier.config)
    is_wrong = found is not None and found.status == Status.WRONG
    if is_early and not (winner.status == Status.MEASURED and is_wrong):
        has_other = earlier is not None and config_id(earlier.config) != config_id(data.config)
        what = f", so the saved configuration, {compact(earlier.config)}, stays" if earlier and has_other else ""
        return f"{progress.not_finished}{what}"
    _check(data, winner, validated=validated)
    return "" if earlier is None else _why_earlier_stays(progress, earlier, found)


def _why_earlier_stays(progress: SearchProgress, earlier: Earlier, found: Outcome | None) -> str:
    """Return why a saved configuration is not replaced by the winner of a search; empty if it is replaced.

    Args:
        progress: The progress of the search.
        earlier: The saved configuration.
        found: Its outcome in the search.
    """
    if found is not None and found.status in FAULTY:
        return ""
    what = f"the saved configuration, {compact(earlier.config)},"
    if progress.state == SearchState.UNDECIDED and earlier.is_settled:
        return f"undecided, so {what} stays"
    if found is not None:
        return ""
    if progress.state == SearchState.PARTIAL:
        return f"{progress.not_finished}, and {what} was not measured again"
    # A complete search replaces an entry made by hand, and one that the kernel no longer allows.
    return "" if earlier.progress is None or earlier.has_left else f"{what} was not among the candidates"


def _winner(data: AutotuneData) -> Outcome:
    token = config_id(data.config)
    found = [outcome for outcome in data.outcomes if config_id(outcome.config) == token]
    if not found:
        raise AdmissionError(f"the winner {data.config!r} is not among the candidates")
    return found[0]


def _check(data: AutotuneData, winner: Outcome, *, validated: bool) -> None:
    if winner.status != Status.MEASURED or winner.measurement is None or not winner.measurement.samples:
        raise AdmissionError(f"the winner {winner.config!r} has no samples; its status is {winner.status}")
    if validated and "outputs" not in data.checked:
        raise AdmissionError(f"the winner {winner.config!r} was not compared with the reference")
    if winner is data.heuristic or data.heuristic.status in FAULTY:
        return
    challenge = data.challenge
    if challenge is None or config_id(challenge.challenger) != config_id(winner.config):
        raise AdmissionError(f"the winner {winner.config!r} was not compared with the heuristic")
    if not (challenge.is_confirmation and challenge.comparison.wins and challenge.comparison.settled):
        raise AdmissionError(f"the winner {winner.config!r} is not confirmed: {challenge.line()}")


def _tried(data: AutotuneData, config: object) -> Outcome | None:
    """Return the outcome of the program of a measured or faulty configuration; `None` for others."""
    token = config_id(config)
    tried = FAULTY | {Status.MEASURED, Status.SAME}
    for first, twins in programs(data.outcomes):
        if first.status in tried and any(config_id(one.config) == token for one in (first, *twins)):
            return first
    return None
