# SPDX-License-Identifier: Apache-2.0
"""One configuration for a call in all processes of a program, whatever each of them would have chosen.

The first process that lowers a call decides: it puts its configuration into the key-value store of JAX's coordination
service, unless one is there; the others take what is there. Nobody waits for another process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.config.cache import config_token
from ejkernel.ops.config.policy import AutotunePolicy, effective_policy
from ejkernel.ops.config.selection import Consulted, Resolution
from ejkernel.ops.config.tiers import AGREED, OVERLAY
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.core.declared import note_config_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import check_config
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import AgreementError, AgreementWarning, ConfigError, SerializationError, UnstableKeyError
from ejkernel.ops.utils.storage.sealed import check_schema
from ejkernel.ops.utils.storage.serialize import from_data, from_plain, parse_json, stable_json, to_data
from ejkernel.ops.utils.values.typenames import decode_config, type_name

logger = logging.getLogger(__name__)

_SCHEMA: Final = 1
_DECIDED: Final = "ejkernel/decided"
_USED: Final = "ejkernel/used"
_NO_OVERLAY: Final = ""
_DIGITS: Final = 16


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
        return self.digest if self.overlay else _NO_OVERLAY

    def __str__(self) -> str:
        return f"{self.config!r} ({f'from overlay {self.overlay}' if self.overlay else 'from no overlay'})"


class Book:
    """What this process knows of the decisions in one store, and which configurations it has used.

    The decisions of a call are numbered: one for where no overlay speaks of it, and one for each configuration that
    overlays name. So what is decided stays, and the same overlay in all processes has a decision of its own. Only a
    process that uses the latest decision may add one: then all go through the same overlays.
    """

    def __init__(self, store: compat.CoordinationStore) -> None:
        self.store = store
        self.process = jax.process_index()
        self.used: dict[str, tuple[str, ...]] = {}
        self._decisions: dict[str, list[Decision]] = {}
        self._taken: dict[str, set[int]] = {}
        self._lock = threading.RLock()

    def find(self, call: str, state: str = _NO_OVERLAY) -> Decision | None:
        """Return the decision for a call where overlays say `state`, or `None`."""
        return next((decision for decision in self._all(call) if decision.state == state), None)

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
                found = next((decision for decision in known if decision.state == mine.state), None)
                if found is not None:
                    return found
                if known and len(known) - 1 not in taken:
                    raise _out_of_step(call, known[-1], mine)
                self._add(call, known, mine)

    def _add(self, call: str, known: list[Decision], mine: Decision) -> None:
        """Put a decision behind those that are known, or learn what another process has put there."""
        place = f"{_DECIDED}/{call}/{len(known)}"
        with _answering(call):
            if not self.store.put_if_absent(place, stable_json(mine)):
                known.append(_read(call, self.store.get(place) or ""))
                return
        # Who hangs may want to know who was the first to enter an overlay, and was not followed.
        logger.log(logging.INFO if known else logging.DEBUG, "decided for all: %s: %s", call, mine)
        self._taken[call].add(len(known))
        known.append(mine)

    def note(self, call: str, digest: str) -> None:
        """Note that this process runs a call with the configuration of that digest."""
        with self._lock:
            before = self.used.get(call, ())
            if digest in before:
                return
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
        if not _books or _books[0].store is not store:
            _books[:] = [Book(store)]
        return _books[0]


def agrees(chooser: object) -> bool:
    """Return whether the policy lets the configurations of a chooser be agreed on."""
    policy = getattr(chooser, "policy", None)
    return effective_policy(policy if isinstance(policy, AutotunePolicy) else AutotunePolicy(), chooser).agree


def agreed(inv: Invocation[Cfg, Out], ask: Callable[[], Resolution[Cfg]]) -> Resolution[Cfg]:
    """Return the configuration that all processes run a call with, of a program that several of them run.

    Args:
        inv: The call, with the `span` of its program.
        ask: Returns what this process would run it with, which must be able to run.

    Raises:
        AgreementError: this process's overlays say otherwise than another's; the configuration cannot be sent, or be
            read; the coordination service does not answer.
    """
    book, key = _book_or_warning(), _key_of(inv)
    if book is None or key is None:
        return ask()
    call = call_name(inv)
    if inv.override_cfg is not None:
        own = ask()
        book.note(call, _digest_of_any(own.config))
        return own
    # What overlays say of the call only the chooser knows; without any, nobody need be asked once it is decided.
    found = None if current_scope().layers else book.find(call)
    if found is None:
        found = book.decide(call, decision_of(book.process, inv, ask()))
    config = decoded(call, found, inv)
    return _resolution(book.take(call, found), config, key)


def agreed_before(inv: Invocation[Cfg, Out], own: Resolution[Cfg] | None) -> Consulted | None:
    """Return what was decided for a call that this process would run with `own`; nothing is decided here.

    `None` stands for a call that is not agreed on.
    """
    key = _key_of(inv)
    try:
        book = book_in_force()
    except LookupError:
        return None
    if inv.span is None or key is None or inv.override_cfg is not None:
        return None
    call, state = call_name(inv), _NO_OVERLAY
    if own is not None and own.tier is OVERLAY:
        state = decision_of(book.process, inv, own).state
    found = book.find(call, state)
    if found is None:
        return Consulted(AGREED.name, None, "the first process that lowers the call decides")
    note = f"process {found.process} had it from its {found.source} tier"
    return Consulted(AGREED.name, _resolution(found, decoded(call, found, inv), key), note)


def _resolution(decision: Decision, config: Any, key: ConfigKey) -> Resolution[Any]:
    return Resolution(config, _source(decision.process), key)


def _source(process: int) -> str:
    return f"{AGREED.name} with process {process}"


def is_from_elsewhere(resolution: Resolution[Any]) -> bool:
    """Return whether another process decided."""
    return resolution.tier is AGREED and resolution.source != _source(jax.process_index())


def _book_or_warning() -> Book | None:
    try:
        return book_in_force()
    except LookupError as error:
        text = (
            "the processes of this program cannot agree on configurations, and each chooses its own; they may differ, "
            f"and the program hang: {error}. Give all of them the same cache folder."
        )
        warnings.warn(text, AgreementWarning, stacklevel=2)
        return None


def _key_of(inv: Invocation[Cfg, Out]) -> ConfigKey | None:
    try:
        return inv.key
    except UnstableKeyError:
        return None


def call_name(inv: Invocation[Cfg, Out]) -> str:
    """Return what the processes call a call of a program that they run: not by its device, which may differ."""
    span = inv.span or compat.Span(0)
    where = f"{span.devices} {'partitioned ' * span.partitioned}devices" if span.devices else "any devices"
    return f"{inv.op_id_v}:{inv.call_key} on {inv.platform}, {where}{_of(span.processes)}"


def _of(processes: Sequence[int]) -> str:
    if not processes:
        return ""
    first, last = processes[0], processes[-1]
    if len(processes) == last - first + 1:
        return f" of processes {first}-{last}"
    return f" of {len(processes)} processes ({_hashed(str(tuple(processes)))})"


# --- what is sent ---


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def digest_of_config(config: object) -> str:
    """Return a name for a configuration's type and content.

    Raises:
        SerializationError: it holds something that is not data.
    """
    return _hashed("\n".join(config_token(config)))


def _digest_of_any(config: object) -> str:
    try:
        return digest_of_config(config)
    except SerializationError:  # cfg= may be anything; the name of its type is what can be compared
        return _hashed(type(config).__qualname__)


def decision_of(process: int, inv: Invocation[Any, Any], own: Resolution[Any]) -> Decision:
    """Return what a process offers the others: what it would run a call with.

    Raises:
        AgreementError: the configuration is not data.
    """
    try:
        return Decision(
            schema=_SCHEMA,
            process=process,
            source=own.source,
            overlay=_overlay_digest(inv) if own.tier is OVERLAY else "",
            digest=digest_of_config(own.config),
            config_type=type_name(own.config),
            config=to_data(own.config),
        )
    except SerializationError as error:
        raise AgreementError(
            f"{call_name(inv)}: the configuration {own.config!r} (from {own.source}) cannot be sent to the other "
            f"processes: {error}; make it of plain data, or pass cfg=."
        ) from error


def _overlay_digest(inv: Invocation[Any, Any]) -> str:
    """Return the digest of the overlay that speaks of a call, or of its forward."""
    keys = [inv.key, *([] if inv.forward is None else [inv.forward.key])]
    for key in keys:
        for layer in reversed(current_scope().layers):
            if layer.lookup(key) is not None:
                return str(getattr(layer, "digest", None) or _hashed(repr(layer)))[:_DIGITS]
    return _hashed("an overlay")


def _read(call: str, text: str) -> Decision:
    try:
        data = parse_json(text)
        check_schema(data, _SCHEMA, "a decision")
        return from_plain(data, Decision)
    except SerializationError as error:
        raise _unusable(call, "another process", f"cannot be read: {error}") from error


def decoded(call: str, decision: Decision, inv: Invocation[Any, Any]) -> Any:
    """Return the configuration of a decision; whoever decided decodes it too, so that all have the same.

    Raises:
        AgreementError: this process knows no such configuration.
    """
    who, kernel = f"process {decision.process}", inv.kernel
    try:
        cfg_type = None
        if kernel is not None:
            note_config_types(inv, kernel)
            cfg_type = kernel.config_type
        if cfg_type is None:
            config = decode_config(decision.config, decision.config_type)
        else:
            config = from_data(decision.config, cfg_type)
        if kernel is not None:
            check_config(kernel, config, "the configuration")
        found = digest_of_config(config)
    except ConfigError as error:
        raise _unusable(call, who, f"cannot be used here: {decision.config!r}: {error}") from error
    if found != decision.digest:
        raise _unusable(call, who, f"does not come back from JSON as it was: {decision.config!r} as {config!r}")
    return config


def _unusable(call: str, who: str, why: str) -> AgreementError:
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
