# SPDX-License-Identifier: Apache-2.0
"""The decisions of all processes in their shared store, and the configurations that each process has used."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.errors import AgreementError, SerializationError
from ejkernel.ops.utils.messages.names import check_argument
from ejkernel.ops.utils.storage.serialize import check_schema, digest_of, from_plain, parse_json, stable_json

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
NO_OVERLAY: Final = ""  # the state without an overlay's answer for the call
_DECIDED: Final = "ejkernel/decided"
_USED: Final = "ejkernel/used"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The configuration that one process decided for all processes; a value in the store.

    Attributes:
        schema: Version of the layout.
        process: Index of the deciding process.
        source: The tier that answered in the deciding process.
        overlay: Digest of the overlay that answered; empty if no overlay did.
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
        """The overlay state that the decision is for: a configuration's digest, or `NO_OVERLAY`."""
        return self.digest if self.overlay else NO_OVERLAY

    def serves(self, state: str) -> bool:
        """Return whether the decision holds in an overlay state; naming the decided configuration changes nothing."""
        return state in (self.state, self.digest)

    def __str__(self) -> str:
        return f"{self.config!r} ({f'from overlay {self.overlay}' if self.overlay else 'from no overlay'})"


class Book:
    """The decisions in one store as known to this process, and the configurations that it has used.

    The decisions of a call are numbered. There is one for calls without an overlay's answer, and one for each
    configuration that overlays name. So decisions never change, and entering the same overlay in all processes adds
    one decision. Only a process that uses the latest decision may add another; so all processes must enter the same
    overlays in the same order.
    """

    patience_s: Final = 60.0

    def __init__(self, store: compat.processes.CoordinationStore) -> None:
        self.store = store
        self.process = jax.process_index()
        self.used: dict[str, tuple[str, ...]] = {}
        self._decisions: dict[str, list[Decision]] = {}
        self._taken: dict[str, set[int]] = {}
        self._lock = threading.RLock()

    def find(self, call: str, state: str = NO_OVERLAY) -> Decision | None:
        """Return the decision for a call in an overlay state, or `None`."""
        with self._lock:
            known = self._decisions.setdefault(call, [])
            while (found := _serving(known, state)) is None:
                # Decisions never change, so the store is only asked for later ones.
                with _answering(call):
                    text = self.store.get(f"{_DECIDED}/{call}/{len(known)}")
                if text is None:
                    return None
                known.append(_read(call, text))
            return found

    def take(self, call: str, decision: Decision) -> Decision:
        """Record in the store that this process runs the call with this decision."""
        with self._lock:
            self._taken.setdefault(call, set()).add(self._decisions[call].index(decision))
        self.note(call, decision.digest)
        return decision

    def decide(self, call: str, mine: Decision) -> Decision:
        """Return the decision for a call; without one, add `mine` to the store.

        Raises:
            AgreementError: The other processes have entered other overlays.
        """
        with self._lock:
            known, taken = self._decisions.setdefault(call, []), self._taken.setdefault(call, set())
            while (found := _serving(known, mine.state)) is None:
                # Another process has entered an overlay that this process has not. Continuing would hang them all.
                if known and len(known) - 1 not in taken:
                    raise _out_of_step(call, known[-1], mine)
                self._add(call, known, mine)
            return found

    def _add(self, call: str, known: list[Decision], mine: Decision) -> None:
        """Append a decision to the store, or read the decision that another process has put in its place."""
        place = f"{_DECIDED}/{call}/{len(known)}"
        with _answering(call):
            # No lookup first: another process could decide between the lookup and the put.
            if not self.store.put_if_absent(place, stable_json(mine)):
                known.append(_read(call, self.store.get(place) or ""))
                return
        self._taken[call].add(len(known))
        known.append(mine)
        if len(known) > 1:  # if the other processes do not follow, the program hangs; log the reason
            timer = threading.Timer(self.patience_s, self.log_processes_left_behind, (call, mine))
            # A daemon, so that the timer does not delay the end of the program.
            timer.daemon = True
            timer.start()

    def log_processes_left_behind(self, call: str, decision: Decision) -> None:
        """Log the processes that run a call but have not adopted the decision of this process."""
        try:
            used = {process: self.used_by(process).get(call, ()) for process in range(jax.process_count())}
        except AgreementError as error:
            logger.info("the configurations of the other processes cannot be read: %s", error)
            return
        stayed = [process for process, digests in used.items() if digests and decision.digest not in digests]
        if stayed:
            text = "%s: process %d has run it with %s for %g s, but these processes have not: %s"
            logger.warning(text, call, self.process, decision, self.patience_s, ", ".join(map(str, stayed)))

    def note(self, call: str, digest: str) -> None:
        """Record in the store that this process runs a call with the configuration of this digest."""
        with self._lock:
            before = self.used.get(call, ())
            # Once per configuration, because the store is accessed over the network.
            if digest in before:
                return
            # Sorted, so that the order of use does not matter in comparisons.
            self.used[call] = tuple(sorted((*before, digest)))
            with _answering(call):
                self.store.put(f"{_USED}/{self.process}/{call}", ",".join(self.used[call]))

    def used_by(self, process: int) -> dict[str, tuple[str, ...]]:
        """Return the digests of the configurations that a process has used, by call."""
        with _answering(f"the configurations of process {process}"):
            found = self.store.below(f"{_USED}/{process}")
        return {call: tuple(digests.split(",")) for call, digests in found.items()}


def _serving(known: Iterable[Decision], state: str) -> Decision | None:
    return next((decision for decision in known if decision.serves(state)), None)


_books: list[Book] = []
_making = threading.Lock()


def current_book() -> Book:
    """Return the `Book` of the coordination service that this process has joined.

    Raises:
        LookupError: The process has joined no service; the message has the reason.
    """
    with _making:
        store = compat.processes.coordination_store()
        # Only for the latest service: a process may leave a service and join another with other decisions.
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
    """Return the error of a process that cannot use a decision."""
    return AgreementError(
        f"{call}: the configuration that {who} decided for all processes {why}. Run the same version of every package "
        "in all processes."
    )


def _out_of_step(call: str, latest: Decision, mine: Decision) -> AgreementError:
    return AgreementError(
        f"{call}: process {latest.process} runs this call with {latest}, but process {mine.process} would use {mine}. "
        "All processes of a program must enter the same overlays in the same order: tune in one process and send "
        "AutotuningResult.dumps() to the others. For a program that runs only on this process's devices, use "
        "policy_override(agree=False)."
    )


@contextlib.contextmanager
def _answering(call: str) -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise AgreementError(
            f"{call}: the processes cannot agree on a configuration because JAX's coordination service (in process 0) "
            f"failed: {error}"
        ) from error


@dataclasses.dataclass(frozen=True)
class ConfigurationDigest:
    """The configurations that a process has used in programs that several processes run; compared by content.

    `str()` returns 16 hex digits that represent all of them.

    Attributes:
        keys: The digests of the configurations used for each call. A call is named by its key and its program's
            devices; it has several digests if overlays were entered or `cfg=` was passed.
    """

    keys: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return digest_of(stable_json(self.keys), 16)

    def __hash__(self) -> int:
        return hash(str(self))

    def difference(self, other: ConfigurationDigest) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the calls that two processes ran differently, each with this process's and the other's digests.

        A process that has not run the call yet has no digests.
        """
        check_argument(isinstance(other, ConfigurationDigest), "other", "a ConfigurationDigest", other)
        calls = sorted({*self.keys, *other.keys})
        both = {call: (self.keys.get(call, ()), other.keys.get(call, ())) for call in calls}
        return {call: (mine, theirs) for call, (mine, theirs) in both.items() if mine != theirs}


def configuration_digest(process: int | None = None) -> ConfigurationDigest:
    """Return the configurations that a process has used so far in programs that several processes run.

    The digests of other processes come from JAX's coordination service; this does not wait for those processes.

    Args:
        process: Index of the process; `None` means the current process.

    Raises:
        AgreementError: `process` is another process, and the coordination service is missing or fails.
    """
    try:
        book = current_book()
    except LookupError as error:
        if process is None:
            return ConfigurationDigest({})
        raise AgreementError(f"process must be None, got {process!r}: {error}.") from error
    if process is None:
        # Copied, since this process continues to record configurations.
        return ConfigurationDigest(dict(book.used))
    check_argument(isinstance(process, int), "process", "the index of a process, or None", process)
    return ConfigurationDigest(book.used_by(process))
