# SPDX-License-Identifier: Apache-2.0
"""What processes have decided for each other, in the store that they share, and what each of them has used."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.errors import AgreementError, SerializationError
from ejkernel.ops.utils.storage.sealed import check_schema
from ejkernel.ops.utils.storage.serialize import from_plain, parse_json, stable_json

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
NO_OVERLAY: Final = ""  # what overlays say that do not speak of a call
_DECIDED: Final = "ejkernel/decided"
_USED: Final = "ejkernel/used"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What one process decided for all: a value in the store.

    Attributes:
        schema: The layout.
        process: Index of the process.
        source: The tier that it had the configuration from.
        overlay: Digest of the overlay that had it; empty if none had.
        digest: Digest of the configuration.
        config_type: Name of the configuration's type.
        config: The configuration as plain data.
    """

    schema: int
    process: int
    source: str
    overlay: str
    digest: str
    config_type: str
    config: Any

    @property
    def state(self) -> str:
        """What overlays say where the decision holds: a configuration's digest, or nothing."""
        return self.digest if self.overlay else NO_OVERLAY

    def serves(self, state: str) -> bool:
        """Return whether the decision is the one where overlays say `state`: also if they say what holds anyway."""
        return state in (self.state, self.digest)

    def __str__(self) -> str:
        return f"{self.config!r} ({f'from overlay {self.overlay}' if self.overlay else 'from no overlay'})"


class Book:
    """What this process knows of the decisions in one store, and which configurations it has used.

    The decisions of a call are numbered: one for where no overlay speaks of it, and one for each configuration that
    overlays name. So what is decided stays, and the same overlay in all processes has a decision of its own. Only a
    process that uses the latest decision may add one: then all go through the same overlays.
    """

    patience_s: Final = 60.0

    def __init__(self, store: compat.CoordinationStore) -> None:
        self.store = store
        self.process = jax.process_index()
        self.used: dict[str, tuple[str, ...]] = {}
        self._decisions: dict[str, list[Decision]] = {}
        self._taken: dict[str, set[int]] = {}
        self._lock = threading.RLock()

    def find(self, call: str, state: str = NO_OVERLAY) -> Decision | None:
        """Return the decision for a call where overlays say `state`, or `None`."""
        return next((decision for decision in self._all(call) if decision.serves(state)), None)

    def take(self, call: str, decision: Decision) -> Decision:
        """Note that this process runs the call so, where the others can read it."""
        with self._lock:
            self._taken.setdefault(call, set()).add(self._decisions[call].index(decision))
        self.note(call, decision.digest)
        return decision

    def decide(self, call: str, mine: Decision) -> Decision:
        """Return the decision for a call, which is `mine` if there is none.

        Raises:
            AgreementError: the other processes have entered other overlays.
        """
        with self._lock:
            known, taken = self._decisions.setdefault(call, []), self._taken.setdefault(call, set())
            while True:
                found = next((decision for decision in known if decision.serves(mine.state)), None)
                if found is not None:
                    return found
                # Another process has entered an overlay that this one has not: who goes on alone would hang with all of
                # them.
                if known and len(known) - 1 not in taken:
                    raise _out_of_step(call, known[-1], mine)
                self._add(call, known, mine)

    def _add(self, call: str, known: list[Decision], mine: Decision) -> None:
        """Put a decision behind those that are known, or learn what another process has put there."""
        place = f"{_DECIDED}/{call}/{len(known)}"
        with _answering(call):
            # Not asked before: between the question and the put another process could decide.
            if not self.store.put_if_absent(place, stable_json(mine)):
                known.append(_read(call, self.store.get(place) or ""))
                return
        self._taken[call].add(len(known))
        known.append(mine)
        if len(known) > 1:  # where the others do not follow, the program hangs, and nobody would know why
            timer = threading.Timer(self.patience_s, self.say_who_stayed, (call, mine))
            # A program that ends before is not kept waiting for a line in its log.
            timer.daemon = True
            timer.start()

    def say_who_stayed(self, call: str, decision: Decision) -> None:
        """Log which processes run a call, and not as it was decided by this one."""
        try:
            used = {process: self.used_by(process).get(call, ()) for process in range(jax.process_count())}
        except AgreementError as error:
            logger.info("who follows a decision cannot be told: %s", error)
            return
        stayed = [process for process, digests in used.items() if digests and decision.digest not in digests]
        if stayed:
            text = "%s: process %d runs it with %s for %g s by now, which these processes have not: %s"
            logger.warning(text, call, self.process, decision, self.patience_s, ", ".join(map(str, stayed)))

    def note(self, call: str, digest: str) -> None:
        """Note that this process runs a call with the configuration of that digest."""
        with self._lock:
            before = self.used.get(call, ())
            # Once a configuration: the store is asked over the network.
            if digest in before:
                return
            # Sorted, so that processes which used the same in another order compare as equal.
            self.used[call] = tuple(sorted((*before, digest)))
            with _answering(call):
                self.store.put(f"{_USED}/{self.process}/{call}", ",".join(self.used[call]))

    def used_by(self, process: int) -> dict[str, tuple[str, ...]]:
        """Return the digests of the configurations that a process has used, by call."""
        with _answering(f"what process {process} has used"):
            found = self.store.below(f"{_USED}/{process}")
        return {call: tuple(digests.split(",")) for call, digests in found.items()}

    def _all(self, call: str) -> Iterator[Decision]:
        """Yield the decisions for a call in their order, those that this process knows first."""
        number = 0
        while True:
            with self._lock:
                known = self._decisions.setdefault(call, [])
                # What is decided never changes, so that only what comes behind is asked for.
                if number == len(known):
                    with _answering(call):
                        text = self.store.get(f"{_DECIDED}/{call}/{number}")
                    if text is None:
                        return
                    known.append(_read(call, text))
                decision = known[number]
            yield decision
            number += 1


_books: list[Book] = []
_making = threading.Lock()


def book_in_force() -> Book:
    """Return the book of the coordination service that this process has joined.

    Raises:
        LookupError: it has joined none; the message says why.
    """
    with _making:
        store = compat.coordination_store()
        # Of the latest service alone: a process may leave one and join another, whose decisions are others.
        if not _books or _books[0].store is not store:
            _books[:] = [Book(store)]
        return _books[0]


def _read(call: str, text: str) -> Decision:
    try:
        data = parse_json(text)
        check_schema(data, SCHEMA, "a decision")
        return from_plain(data, Decision)
    except SerializationError as error:
        raise unusable(call, "another process", f"cannot be read: {error}") from error


def unusable(call: str, who: str, why: str) -> AgreementError:
    """Return the error of a process that cannot do as it was decided."""
    return AgreementError(
        f"{call}: the configuration that {who} decided for all {why}. Run the same version of every package in all "
        "processes."
    )


def _out_of_step(call: str, latest: Decision, mine: Decision) -> AgreementError:
    return AgreementError(
        f"{call}: process {latest.process} runs this call with {latest}, and process {mine.process} would with {mine}. "
        "All processes of a program must enter the same overlays in the same order: tune in one of them, and send "
        "AutotuningResult.dumps() to the others. A program that runs on this process's devices alone may be excepted "
        "with policy_override(agree=False)."
    )


@contextlib.contextmanager
def _answering(call: str) -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise AgreementError(
            f"{call}: the processes cannot agree on a configuration, for JAX's coordination service, which process 0 "
            f"runs, fails: {error}"
        ) from error
