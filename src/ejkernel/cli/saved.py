# SPDX-License-Identifier: Apache-2.0
"""Saved entries and searches of a program's calls: which calls are tuned, and which to tune again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ejkernel.cli.outcome import doubled
from ejkernel.ops.autotuner.store.measurements import are_alike
from ejkernel.ops.autotuner.store.saving import heuristic_since, why_not_run
from ejkernel.ops.autotuner.tasks.task import SharedCall, shares_of
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.status import SearchProgress, SearchState
from ejkernel.ops.config.entries import StoredEntry, differences, space_digest, standing
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.declared_names import config_type_of
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import kernel_of
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import arguments


@dataclasses.dataclass(frozen=True)
class SavedCalls:
    """The entries and searches behind a chain.

    Attributes:
        chain: The chain, with a persistent cache.
    """

    chain: ConfigSelectorChain[Any, Any]

    @property
    def _cache(self) -> PersistentCache:
        assert self.chain.persistent is not None  # see the class
        return self.chain.persistent

    def has_entry(self, inv: Invocation[Any, Any]) -> bool:
        """Return whether a call has a saved configuration that it uses."""
        return self.in_force(inv) is not None

    def in_force(self, inv: Invocation[Any, Any]) -> tuple[Any, StoredEntry] | None:
        """Return the saved configuration that a call uses, with its entry."""
        kernel = kernel_of(inv)
        for config, entry in self._entries(inv):
            if standing(self.chain.policy.stale, entry, kernel, inv)[0] == "use":
                return None if why_not_run(kernel, inv, config) else (config, entry)
        return None

    def is_own(self, entry: StoredEntry) -> bool:
        """Return whether an entry is in the own folder of the cache rather than in a layer."""
        folder = self._cache.path
        return folder is not None and entry.path is not None and entry.path.is_relative_to(folder)

    def is_tuned(self, inv: Invocation[Any, Any]) -> bool:
        """Return whether the search of a call is complete; a partial search continues."""
        found = self.in_force(inv)
        if found is None:
            return False
        progress = SearchProgress.stored_in(found[1].measured)
        return progress is None or progress.state.is_finished

    def are_tuned(self, calls: Sequence[SharedCall]) -> bool:
        """Return whether a set of calls is tuned: together, and with the same weights."""
        if not all(self.is_tuned(call.inv) for call in calls):
            return False
        # Entries tuned alone or with other weights may differ.
        return len(calls) == 1 or all(are_alike(self._weights(call.inv), shares_of(calls)) for call in calls)

    def is_undecided(self, inv: Invocation[Any, Any]) -> bool:
        """Return whether the search of a call ended without enough evidence."""
        return self._state_and_seconds(inv)[0] == SearchState.UNDECIDED

    def in_words(self, inv: Invocation[Any, Any], *, is_done: bool) -> str:
        """Return the tuning state of a call: that of its search, `saved` (entry without a search), `stale` or `no`.

        A finished search is not enough: its entry may have been removed, or the call may share its configuration with
        other calls now, so that all of them must be tuned together.
        """
        has_entry = self.has_entry(inv)
        if not has_entry and any(True for _ in self._entries(inv)):
            return "stale"
        progress = self.chain.store.progress(inv.key)
        if progress is None:
            return "saved" if has_entry else "no"
        if progress.state.is_finished and not has_entry:
            return "no (entry removed)"
        return "no (tuned alone)" if progress.state.is_finished and not is_done else progress.in_words

    def doubts(
        self,
        calls: Sequence[Invocation[Any, Any]],
        searches: Sequence[AutotuneData] = (),
        budget: float | None = None,
    ) -> Iterator[str]:
        """Yield a line for each call with an entry older than a change of its kernel, and a line for undecided calls.

        Args:
            calls: The calls.
            searches: The searches of this command. For the other calls, those behind the entries count.
            budget: The budget of the searches of this command.
        """
        states = {search.key: (search.progress.state, search.seconds) for search in searches}
        undecided, longest = [], 0.0
        for inv in calls:
            changed, name = self._change(inv), f"{inv.op_id_v} {arguments(inv.description)}"
            state, seconds = states.get(inv.key) or self._state_and_seconds(inv)
            if changed:
                yield printable(f"{name}: {changed}; --force tunes it again.")
            elif state == SearchState.UNDECIDED:
                undecided.append(name)
                longest = max(longest, seconds)
        if undecided:
            them, again = "it" if len(undecided) == 1 else "them", doubled(longest, budget)
            yield printable(
                f"{len(undecided)} undecided ({'; '.join(undecided)}); `--undecided --budget {again}` measures {them} "
                f"again, for up to {again} s per call. A less busy machine helps more."
            )

    def _entries(self, inv: Invocation[Any, Any]) -> Iterable[tuple[Any, StoredEntry]]:
        """Return the readable entries of a call; one that could not be written is none: it ends with this process."""
        return self._cache.on_disk().found(inv.key, config_type_of(inv, kernel_of(inv)))

    def _measured(self, inv: Invocation[Any, Any]) -> dict[str, Any]:
        entry = self._cache.load(inv.key)
        return {} if entry is None else dict(entry.measured or {})

    def _state_and_seconds(self, inv: Invocation[Any, Any]) -> tuple[str, float]:
        """Return the state and the duration of a call's stored search; an empty state without one."""
        progress = self.chain.store.progress(inv.key)
        seconds = self._measured(inv).get("seconds")
        return ("" if progress is None else progress.state), seconds if isinstance(seconds, int | float) else 0.0

    def _weights(self, inv: Invocation[Any, Any]) -> dict[str, float]:
        """Return the weights of the calls tuned together, by call key, as stored in the entry."""
        weights: dict[str, float] = {}
        for case in self._measured(inv).get("cases") or ():
            key, weight = (case.get("call"), case.get("weight")) if isinstance(case, dict) else ("", 0.0)
            if isinstance(key, str) and isinstance(weight, int | float):
                weights[key] = weights.get(key, 0.0) + weight
        return weights

    def _change(self, inv: Invocation[Any, Any]) -> str:
        """Return the change of the kernel since a call was tuned; empty if no change is known."""
        kernel = kernel_of(inv)
        for config, entry in self._cache.found(inv.key, config_type_of(inv, kernel)):
            if why_not_run(kernel, inv, config):  # the call is not tuned
                return ""
            of_space = [each for each in differences(entry, space_digest(kernel, inv)) if each.field == "space"]
            return "".join(map(str, of_space or heuristic_since(kernel, inv, config, entry)))
        return ""
