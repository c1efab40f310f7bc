# SPDX-License-Identifier: Apache-2.0
"""Agreement: all processes of a program run a call with the same configuration.

The first process that lowers a call decides. It puts its configuration into the key-value store of JAX's coordination
service, and the other processes read it there. No process waits for another. If process 0 always decided, a process
that lowers a call which process 0 never lowers, e.g. an evaluation, would hang. A collective during tracing would hang
in the same way.

The decision is sent as plain data and decoded by all processes, including the deciding process. So all processes get
the same object, and data that does not survive the encoding fails in the deciding process. The configuration must also
run: a saved configuration is traced before it is offered, because later the heuristic cannot replace it. Calls without
a key are not agreed on, since their heuristic is the same in all processes. `cfg=` is not agreed on either, but it is
part of the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.config.agreement.decisions import NO_OVERLAY, SCHEMA, Book, Decision, current_book, unusable
from ejkernel.ops.config.cache import AGREED, OVERLAY, config_token
from ejkernel.ops.config.selection import Consulted, Resolution
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.core.declared_names import config_type_of, read_config, type_name
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import check_config
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import AgreementError, AgreementWarning, ConfigError, SerializationError, UnstableKeyError
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.serialize import digest_of, stable_json, to_data
from ejkernel.ops.utils.values.signature import describe

_DIGITS: Final = 16


def agreed(inv: Invocation[Cfg, Out], ask: Callable[[], Resolution[Cfg]]) -> Resolution[Cfg]:
    """Return the configuration of a call, the same in all processes that run the program.

    The first process that lowers the call decides, and the others read its decision. A call with `cfg=` keeps that.
    Without a coordination service, or if the call has no key, this is the result of `ask()`.

    Args:
        inv: The call; its `span` names the devices of the program.
        ask: Returns the configuration that this process would choose. That configuration must be able to run.

    Raises:
        AgreementError: The overlays of this process and another differ; or the configuration cannot be sent or read;
            or the coordination service does not answer.
    """
    book, key = _book_or_warning(), _key_of(inv)
    if book is None or key is None:
        return ask()
    call = call_name(inv)
    if inv.override_cfg is not None:
        own = ask()
        # `cfg=` is the program's choice. It is only recorded for the digest, since processes may pass different ones.
        book.note(call, _digest_of_any(own.config))
        return own
    # Only the chooser knows the answer of overlays. Without overlays, an existing decision needs no chooser.
    found = None if current_scope().layers else book.find(call)
    if found is None:
        mine = decision_of(book.process, inv, ask())
        decoded(call, mine, inv)  # fail in this process, rather than in all
        found = book.decide(call, mine)
    return _resolution(book.take(call, found), decoded(call, found, inv), key)


def agreed_before(inv: Invocation[Cfg, Out], own: Resolution[Cfg] | None) -> Consulted | None:
    """Return the existing decision for a call that this process would run with `own`, without making one.

    `None` means that the call is not agreed on.
    """
    key = _key_of(inv)
    try:
        book = current_book()
    except LookupError:
        return None
    if inv.span is None or key is None or inv.override_cfg is not None:
        return None
    call, state = call_name(inv), NO_OVERLAY
    # An overlay with an answer for the call has a separate decision; all other scopes share one decision.
    if own is not None and own.tier is OVERLAY:
        state = decision_of(book.process, inv, own).state
    found = book.find(call, state)
    if found is None:
        return Consulted(AGREED.name, None, "the first process that lowers the call decides")
    note = f"process {found.process} took it from its {found.source} tier"
    return Consulted(AGREED.name, _resolution(found, decoded(call, found, inv), key), note)


def _resolution(decision: Decision, config: Any, key: ConfigKey) -> Resolution[Any]:
    return Resolution(config, _source(decision.process), key)


def _source(process: int) -> str:
    return f"{AGREED.name} with process {process}"


def is_from_other_process(resolution: Resolution[Any]) -> bool:
    """Return whether another process decided."""
    return resolution.tier is AGREED and resolution.source != _source(jax.process_index())


def _book_or_warning() -> Book | None:
    try:
        return current_book()
    except LookupError as error:
        text = (
            "the processes of this program cannot agree on configurations, so each chooses for itself. If the choices "
            f"differ, the program may hang: {error}. Give all processes the same cache folder."
        )
        warn(text, AgreementWarning)
        return None


def _key_of(inv: Invocation[Cfg, Out]) -> ConfigKey | None:
    """Return the key of a call, or `None` if its name would differ between processes."""
    try:
        call_name(inv)
        return inv.key
    except UnstableKeyError:
        return None


def call_name(inv: Invocation[Cfg, Out]) -> str:
    """Return the name of a call in the store. It omits the device, which may differ between processes."""
    span = inv.span or compat.processes.Span(0)
    where = f"{span.devices} {'partitioned ' * span.partitioned}devices" if span.devices else "any devices"
    return f"{inv.op_id_v}:{inv.call_key}{_own_form(inv)} on {inv.platform}, {where}{_of(span.processes)}"


def _own_form(inv: Invocation[Cfg, Out]) -> str:
    """Return a suffix for a call that is not its bucket's representative: its heuristic may not suit the others."""
    if inv.representative is inv:
        return ""
    return "." + digest_of(stable_json([describe(inv.abstract_args), describe(inv.abstract_kwargs)]), _DIGITS)


def _of(processes: Sequence[int]) -> str:
    if not processes:
        return ""
    first, last = processes[0], processes[-1]
    if len(processes) == last - first + 1:
        return f" of processes {first}-{last}"
    return f" of {len(processes)} processes ({digest_of(str(tuple(processes)), _DIGITS)})"


# --- encoding ---


def digest_of_config(config: object) -> str:
    """Return the digest of a configuration's type and content.

    Raises:
        SerializationError: The configuration holds a value that is not data.
    """
    return digest_of("\n".join(config_token(config)), _DIGITS)


def _digest_of_any(config: object) -> str:
    try:
        return digest_of_config(config)
    except SerializationError:  # cfg= may be any object; only the name of its type can be compared
        return digest_of(type(config).__qualname__, _DIGITS)


def decision_of(process: int, inv: Invocation[Any, Any], own: Resolution[Any]) -> Decision:
    """Return the decision that a process offers to the others.

    Raises:
        AgreementError: The configuration is not plain data.
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
            f"processes: {error}; use a configuration of plain data, or pass cfg=."
        ) from error


def _overlay_digest(inv: Invocation[Any, Any]) -> str:
    """Return the digest of the overlay that answers for a call or for its forward call."""
    keys = [inv.key, *([] if inv.forward is None else [inv.forward.key])]
    for key in keys:
        for layer in reversed(current_scope().layers):
            # The innermost overlay with an answer, as in resolution. A forward call's entry also answers its backward.
            if layer.lookup(key) is not None:
                return str(getattr(layer, "digest", None) or digest_of(repr(layer)))[:_DIGITS]
    return digest_of("an overlay", _DIGITS)


def decoded(call: str, decision: Decision, inv: Invocation[Any, Any]) -> Any:
    """Return the configuration of a decision. All processes decode it, also the deciding process.

    Args:
        call: The name of the call in the store, for messages.
        decision: The configuration as plain data, with its type and digest.
        inv: The call.

    Raises:
        AgreementError: The configuration does not fit the kernel, or its digest differs from the decision's.
    """
    who, kernel = f"process {decision.process}", inv.kernel
    try:
        config = read_config(decision.config, decision.config_type, config_type_of(inv, kernel), inv.op_id_v)
        if kernel is not None:
            check_config(kernel, config, "the configuration")
        found = digest_of_config(config)
    except ConfigError as error:
        raise unusable(call, who, f"cannot be used here: {decision.config!r}: {error}") from error
    # JSON may lose information, e.g. the type of a field. The processes would then run different configurations.
    if found != decision.digest:
        raise unusable(call, who, f"changes when it is sent as JSON: {decision.config!r} becomes {config!r}")
    return config
