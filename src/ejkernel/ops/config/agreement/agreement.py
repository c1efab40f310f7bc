# SPDX-License-Identifier: Apache-2.0
"""One configuration for a call in all processes of a program, whatever each of them would have chosen.

The first process that lowers a call decides: it puts its configuration into the key-value store of JAX's coordination
service, unless one is there; the others take what is there. Nobody waits for another process: were it process 0 that
decides for all, whoever lowers what process 0 does not, such as an evaluation, would hang; so do collectives while
tracing.

What is sent is plain data, and all processes decode it, also the one that decided: so all have the same, and what does
not survive it is found where it is decided. It must run as well: a saved configuration is traced before it is offered,
because the heuristic cannot stand in for it later. Calls without a key are not agreed on, for their heuristic is the
same everywhere, nor is `cfg=`, which the digest has all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.config.agreement.decisions import NO_OVERLAY, SCHEMA, Book, Decision, book_in_force, unusable
from ejkernel.ops.config.cache import config_token
from ejkernel.ops.config.policy import AutotunePolicy, effective_policy
from ejkernel.ops.config.selection import Consulted, Resolution
from ejkernel.ops.config.tiers import AGREED, OVERLAY
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.core.declared_names import decode_config, note_config_types, type_name
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import check_config
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import AgreementError, AgreementWarning, ConfigError, SerializationError, UnstableKeyError
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.serialize import from_data, stable_json, to_data
from ejkernel.ops.utils.values.signature import describe

_DIGITS: Final = 16


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
        # Not agreed on, for the program says it; compared all the same, since processes may pass different ones.
        book.note(call, _digest_of_any(own.config))
        return own
    # What overlays say of the call only the chooser knows; without any, nobody need be asked once it is decided.
    found = None if current_scope().layers else book.find(call)
    if found is None:
        mine = decision_of(book.process, inv, ask())
        decoded(call, mine, inv)  # which fails here, rather than everywhere
        found = book.decide(call, mine)
    return _resolution(book.take(call, found), decoded(call, found, inv), key)


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
    call, state = call_name(inv), NO_OVERLAY
    # Overlays that speak of the call have a decision of their own; all others share the one without.
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
        warn(text, AgreementWarning)
        return None


def _key_of(inv: Invocation[Cfg, Out]) -> ConfigKey | None:
    """Return the key of a call that can be named to other processes."""
    try:
        call_name(inv)
        return inv.key
    except UnstableKeyError:
        return None


def call_name(inv: Invocation[Cfg, Out]) -> str:
    """Return what the processes call a call of a program that they run: not by its device, which may differ."""
    span = inv.span or compat.Span(0)
    where = f"{span.devices} {'partitioned ' * span.partitioned}devices" if span.devices else "any devices"
    return f"{inv.op_id_v}:{inv.call_key}{_own_form(inv)} on {inv.platform}, {where}{_of(span.processes)}"


def _own_form(inv: Invocation[Cfg, Out]) -> str:
    """Return what tells a call from others of its bucket: a heuristic's answer for it may not do for them."""
    if inv.representative is inv:
        return ""
    return "." + _hashed(stable_json([describe(inv.abstract_args), describe(inv.abstract_kwargs)]))


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
            schema=SCHEMA,
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
            # The innermost that has an answer, as resolving looks; a backward is answered by its forward's, too.
            if layer.lookup(key) is not None:
                return str(getattr(layer, "digest", None) or _hashed(repr(layer)))[:_DIGITS]
    return _hashed("an overlay")


def decoded(call: str, decision: Decision, inv: Invocation[Any, Any]) -> Any:
    """Return the configuration of a decision; whoever decided decodes it too, so that all have the same.

    Raises:
        AgreementError: this process knows no such configuration.
    """
    who, kernel = f"process {decision.process}", inv.kernel
    try:
        cfg_type = None
        if kernel is not None:
            # This process may have made no such configuration yet, by which its type would be known.
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
        raise unusable(call, who, f"cannot be used here: {decision.config!r}: {error}") from error
    # JSON may lose something, such as the type of a field: whoever decided would run something else than the others.
    if found != decision.digest:
        raise unusable(call, who, f"does not come back from JSON as it was: {decision.config!r} as {config!r}")
    return config
