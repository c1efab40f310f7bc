# SPDX-License-Identifier: Apache-2.0
"""The lowered form of a call: its computation under the chosen configuration, type-checked and labelled."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel import compat, settings
from ejkernel.ops.config._files import version
from ejkernel.ops.config.agreement.agreement import is_from_other_process
from ejkernel.ops.config.cache import same_config
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import effective_policy
from ejkernel.ops.config.selection import ConfigSelectorChain, Resolution
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.core.declared_names import type_name
from ejkernel.ops.core.invocation import Invocation, invocation_of
from ejkernel.ops.core.kernel import has_gradient_rule, heuristic_config
from ejkernel.ops.core.primitive import Call, known_types, types_of
from ejkernel.ops.core.sharding.parts import programs_of_parts
from ejkernel.ops.core.transformations.nodes import Choice, Node
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import AgreementError, CacheWarning, EjkernelError, KernelError, SerializationError
from ejkernel.ops.registry import record_invocation
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.fingerprint import platform_kind
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.meta import label, stamp
from ejkernel.ops.utils.storage.serialize import stable_json, to_data
from ejkernel.ops.utils.values.identity import identity
from ejkernel.ops.utils.values.signature import HasType

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedCall:
    """A call with its configuration.

    Attributes:
        call: The call.
        inv: The call as its kernel sees it.
        resolution: Its configuration and the tier that gave it.
        expected: The result types it was traced with; `None` if nothing depends on them yet.
        jaxpr: The traced computation, if the trace for the types used this configuration; else `None`.
    """

    call: Call
    inv: Invocation[Any, Any]
    resolution: Resolution[Any]
    expected: Sequence[HasType] | None
    jaxpr: Any

    def compute(self, *arrays: jax.Array) -> tuple[Any, ...]:
        """Compute the call, check the types of its results, and label one of them."""
        # Names are for profiles only. JAX's compilation cache may return another program's debug names, so they cannot
        # serve as labels.
        with jax.named_scope(self.inv.op_id):
            resolution, out = self._computed(arrays)
        _check_types(self, resolution, arrays, out)
        if self._label_and_payload is None:
            return tuple(out)
        stamped, found = stamp(out, arrays, *self._label_and_payload)
        if not found:
            self._log_unlabelled()
        return tuple(stamped)

    def label(self, values: Sequence[object], inputs: Sequence[object]) -> None:
        """Label one of the values that `jaxpr` was lowered to; their types are the expected ones."""
        text = self._label_and_payload
        if text is not None and not any(compat.programs.label_value(value, inputs, *text) for value in values):
            self._log_unlabelled()

    @functools.cached_property
    def _label_and_payload(self) -> tuple[str, str] | None:
        """The label and its payload, or `None`; also records the call if recording is on."""
        now = settings.current()
        if self.resolution.key is None:
            return None
        # Record here and not while tracing: only lowered calls run.
        if current_scope().recording or now.record:
            record_invocation(self.call.node.spec.kernel, self.inv)
        if now.stamp == "none":
            return None
        # By default the payload is the key. Descriptions are long, and only needed to rebuild calls from a text.
        payload = stable_json(self.inv.description) if now.stamp == "json" else self.inv.call_key
        return label(self.inv.op_id_v, self.inv.call_key, self.call.host().stamp_prefix), payload

    def _log_unlabelled(self) -> None:
        logger.debug("%s has no label: each of its results is one of its inputs", self.inv.op_id_v)

    def _out_tree(self, node: Node, arrays: Sequence[jax.Array]) -> Any:
        """Return the output structure of an inner node of the call, if it was traced for its own types."""
        inner = dataclasses.replace(self.call, node=node, linear=0)
        types = known_types(inner, [jax.typeof(array) for array in arrays])
        return None if types is None else types.trees[0]

    def _computed(self, arrays: Sequence[jax.Array]) -> tuple[Resolution[Any], Sequence[Any]]:
        """Compute the call; if a saved configuration does not run, warn and use another one."""
        inv, node, resolution = self.inv, self.call.node, self.resolution
        while True:
            try:
                # A gradient rule needs the structure of the outputs, which the forward's trace has found.
                choice = Choice(config=resolution.config, platform=inv.platform, out_tree=self._out_tree)
                return resolution, node.flat(choice)(*arrays)
            except Exception as error:  # noqa: BLE001 - raised again, unless another configuration replaces this one
                _raise_if_not_differentiable(inv, node, resolution, arrays, error)
                resolution = _fallback(self.call, inv, resolution, error)


def trace_with(config: object, call: Call, avals: Sequence[HasType], platform: str) -> Any:
    """Return the jaxpr that was traced for the call's types, if it is the whole call under this configuration."""
    # Other traces for types omit the derivative, or the references that the call creates.
    if any(step.data[0] != "vmap" for step in call.node.steps):
        return None
    types = types_of(call, avals)
    if types.config is None or platform_kind(types.platform) != platform:
        return None
    # The trace must hold for this program. A lowered program does not contain references (`jax.Ref`) that the trace
    # created, so such calls are traced again.
    if any(question() != said for question, said in types.answers.items()) or compat.tracing.has_references(
        types.jaxpr
    ):
        return None
    if identity(types.config) == identity(config):  # faster than JSON; dictionaries are compared below
        return types.jaxpr
    try:
        return types.jaxpr if same_config(types.config, config) else None
    except SerializationError:  # not plain data, and a different object: assume that it differs
        return None


def _raise_if_not_differentiable(
    inv: Invocation[Any, Any], node: Node, resolution: Resolution[Any], arrays: Sequence[jax.Array], error: Exception
) -> None:
    """Raise if JAX cannot differentiate a kernel without a gradient rule, because no configuration would help."""
    kernel = inv.node.spec.kernel
    if inv.direction == "fwd" or has_gradient_rule(kernel) or isinstance(error, EjkernelError):
        return
    if not resolution.tier.is_saved:
        raise _no_gradient(inv, error) from error
    try:
        config = heuristic_config(kernel, inv)
        derivative = node.flat(Choice(config=config, platform=inv.platform))
        compat.tracing.traced(derivative, [jax.typeof(array) for array in arrays])
    except Exception as again:
        raise _no_gradient(inv, again) from again


def _no_gradient(inv: Invocation[Any, Any], error: Exception) -> KernelError:
    return KernelError(
        f"{inv.op_id}: the kernel has no gradient rule, and JAX could not differentiate its run: "
        f"{error_text(error).rstrip('.')}. "
        "Add a rule: override custom_vjp, or fwd_with_residuals and vjp, in the Kernel, or use a jax.custom_vjp inside "
        "the function; almost every pallas_call needs one."
    )


def _fallback(call: Call, inv: Invocation[Any, Any], resolution: Resolution[Any], error: Exception) -> Any:
    """Return another resolution, with a warning, if a saved configuration does not run; otherwise raise."""
    if compat.tracing.needs_axis(error):  # a shard's call, looked at outside of its mesh: no configuration runs there
        raise error
    # With another configuration here, this process would run a different program than the others, and all would hang.
    if is_from_other_process(resolution):
        raise AgreementError(
            f"{inv.op_id}: {resolution.config!r} (call {inv.call_key}, {resolution.source}) does not run here: "
            f"{type(error).__name__}: {error}; run the same version of every package in all processes."
        ) from error
    # The kernel promised that every configuration runs for all calls of a bucket; a fallback would hide the error.
    if inv.representative is not inv and not resolution.tier.is_for_one_call:
        raise _does_not_fit(inv, resolution) from error
    if not resolution.tier.is_saved:
        raise error
    found = call.host().instead(inv, resolution, error)
    text = (
        f"{inv.op_id}: ignoring the saved configuration {resolution.config!r} (call {inv.call_key}), which "
        f"does not run: {type(error).__name__}: {error}; `ejkernel tune` finds another."
    )
    warn(text, CacheWarning)
    return found


def runnable(
    inv: Invocation[Any, Any], call: Call, avals: Sequence[HasType], resolution: Resolution[Any]
) -> Resolution[Any]:
    """Return a configuration to offer to all processes; a saved one is traced first, to see whether it runs."""
    while resolution.tier.is_saved:
        try:
            # After the offer, the other processes use it, so the heuristic could no longer replace it here.
            compat.tracing.traced(call.node.flat(Choice(config=resolution.config, platform=inv.platform)), avals)
            break
        except Exception as error:  # noqa: BLE001 - raised again, unless another configuration replaces this one
            resolution = _fallback(call, inv, resolution, error)
    return resolution


def _does_not_fit(inv: Invocation[Cfg, Out], resolution: Resolution[Any]) -> KernelError:
    representative = (inv.representative.args, dict(inv.representative.kwargs))
    return KernelError(
        f"{inv.op_id}: {resolution.config!r} (from {resolution.source}) was found for {representative!r} and does not "
        f"run for {(inv.args, dict(inv.kwargs))!r}; a kernel with a bucket hook must run every call of a bucket with "
        "every configuration. Pad inside run, or return a separate bucket for this call."
    )


def _check_types(
    resolved: ResolvedCall, resolution: Resolution[Any], arrays: Sequence[jax.Array], out: Sequence[Any]
) -> None:
    """Raise if the result types differ from the traced ones, because they depend on configuration or platform.

    Otherwise MLIR's verifier would raise, without naming the kernel or the configuration.
    """
    inv, expected = resolved.inv, resolved.expected
    if expected is None:
        return
    want = [(tuple(aval.shape), aval.dtype) for aval in expected]
    got = [(tuple(value.shape), value.dtype) for value in out]
    if want != got:
        keeps = inv.kernel is not None and inv.kernel.keeps_residuals
        kept = " With keeps_residuals=True the residuals count as results." if keeps else ""
        here, there = _platforms_named(resolved, arrays)
        raise KernelError(
            f"{inv.op_id}: results must have the same shapes and dtypes under every configuration; "
            f"{resolution.config!r} (from {resolution.source}) gives {_shown(got)}{here}, the heuristic gives "
            f"{_shown(want)}{there}.{kept}"
        )


def _platforms_named(resolved: ResolvedCall, arrays: Sequence[jax.Array]) -> tuple[str, str]:
    """Return phrases that name the platforms of lowering and of tracing; empty if they are the same."""
    types, here = known_types(resolved.call, [jax.typeof(array) for array in arrays]), resolved.inv.platform
    there = here if types is None else platform_kind(types.platform)
    return ("", "") if here == there else (f" on {here}", f" on {there}, which the program was traced for")


def _shown(types: Sequence[tuple[tuple[int, ...], object]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types)


# --- digests for JAX's persistent compilation cache ---

# For a call that splits itself, the program's text only shows the types of the whole call. Its shards and their
# configurations are found during compilation. Because equal texts must mean equal programs, the text carries a digest
# of everything that decides them. By default the digest is not needed: the text contains an address, so the cache never
# returns the program.


def digest_of(call: Call, avals: Sequence[HasType], platform: str, chooser: object) -> str:
    """Return a digest of a split call's computation, and of every configuration that its shards may use.

    If these cannot be determined, the digest is random, and the program is compiled again each time.
    """
    unique = secrets.token_hex(8)
    if type(chooser) is not ConfigSelectorChain or jax.process_count() > 1:
        return unique  # the user's chooser, or another process, decides
    policy = effective_policy(chooser)
    if policy.autotune:
        return unique  # the search decides
    try:
        content = [*_computation(call, avals, platform), *_configurations(call, chooser), str(policy)]
    except Exception as error:  # noqa: BLE001 - the kernel's code may fail on the whole arrays, which it never runs on
        logger.debug("%s: compiled again each time: %s", call.node.spec.kernel.op_id, error_text(error))
        return unique
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def _computation(call: Call, avals: Sequence[HasType], platform: str) -> Iterator[str]:
    """Yield the program of the call, as if it were whole, because code may change while the key stays the same."""
    inv = invocation_of(call.node, avals, platform=platform)
    kernel = call.node.spec.kernel
    config = heuristic_config(kernel, inv) if call.override is None else call.override.config
    choice = Choice(config=config, platform=inv.platform)
    jaxpr = jax.make_jaxpr(call.node.flat(choice))(*avals)
    # The whole call's program does not show computations that depend on a shard's position.
    yield from programs_of_parts(call.node, avals, choice)
    yield from (version("ejkernel-ops") or "", *map(str, inv.key), repr(config), str(jaxpr))
    # A jaxpr's text contains the names of its constants, not their values.
    yield from (hashlib.sha256(np.asarray(const).tobytes()).hexdigest() for const in jaxpr.consts)


def _configurations(call: Call, chain: ConfigSelectorChain[Any, Any]) -> Iterator[str]:
    """Yield all overlays, and all known configurations of the operation and its derivatives."""
    op = call.node.spec.kernel.op_id
    yield from (str(getattr(layer, "digest", layer)) for layer in current_scope().layers)
    stored = chain.persistent.entries() if isinstance(chain.persistent, PersistentCache) else ()
    found = {key: (entry.config_type, entry.config) for key, entry in stored}
    for key, config in chain.cache.items():
        known = chain.cache.remembered(key)
        if isinstance(key, ConfigKey) and known is not None and not known.tier.is_provisional:
            found[key] = (type_name(config), to_data(config))
    # Names of derived operations start with the kernel's name. An unrelated match only costs a compilation.
    own = {key: value for key, value in found.items() if key.op.startswith(op)}
    yield from sorted(f"{key}: {name} {stable_json(data)}" for key, (name, data) in own.items())
