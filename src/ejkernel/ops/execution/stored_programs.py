# SPDX-License-Identifier: Apache-2.0
"""What keeps JAX's persistent compilation cache from bringing back a split call with another configuration.

The text of a program has nothing of such a call but its types: its parts, and their configurations, are found while it
is compiled. A text that is equal must stand for a program that is, so it carries a digest of all that decides. By
default there is nothing to do: the text holds an address, and is never found again.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.ops.config._files import version
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import effective_policy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.core.declared_names import type_name
from ejkernel.ops.core.invocation import invocation_of
from ejkernel.ops.core.kernel import hook
from ejkernel.ops.core.primitive import Call
from ejkernel.ops.core.sharding.parts import programs_of_parts
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.storage.serialize import stable_json, to_data
from ejkernel.ops.utils.values.signature import HasType

logger = logging.getLogger(__name__)


def digest_of(call: Call, avals: Sequence[HasType], platform: str, chooser: object) -> str:
    """Return a digest of what a split call computes, and of every configuration that its parts may get.

    One that never comes again, where that cannot be told: the program is then compiled anew each time.
    """
    never = secrets.token_hex(8)
    if type(chooser) is not ConfigSelectorChain or jax.process_count() > 1:
        return never  # somebody else decides
    policy = effective_policy(chooser.policy, chooser)
    if policy.autotune:
        return never  # what is measured then decides
    try:
        content = [*_computation(call, avals, platform), *_configurations(call, chooser), str(policy)]
    except Exception as error:  # noqa: BLE001 - of the kernel's own code, on arrays that it will not be run on
        logger.debug("%s: compiled anew each time: %s", call.node.spec.kernel.op_id, error_text(error))
        return never
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def _computation(call: Call, avals: Sequence[HasType], platform: str) -> Iterator[str]:
    """Yield what the call is, as if it were whole: its code may have changed where its key has not."""
    inv = invocation_of(call.node, avals, platform=platform)
    kernel = call.node.spec.kernel
    config = hook(kernel, "heuristic_cfg", inv.platform)(inv) if call.override is None else call.override.config
    choice = Choice(config=config, platform=inv.platform)
    jaxpr = jax.make_jaxpr(call.node.flat(choice))(*avals)
    # The whole call's program does not show what is computed of a part's place.
    yield from programs_of_parts(call.node, avals, choice)
    yield from (version("ejkernel-ops") or "", *map(str, inv.key), repr(config), str(jaxpr))
    # A jaxpr's text names its constants, and does not show them.
    yield from (hashlib.sha256(np.asarray(const).tobytes()).hexdigest() for const in jaxpr.consts)


def _configurations(call: Call, chain: ConfigSelectorChain[Any, Any]) -> Iterator[str]:
    """Yield all that is in force, or was found, for the operation and its derivatives."""
    op = call.node.spec.kernel.op_id
    yield from (str(getattr(layer, "digest", layer)) for layer in current_scope().layers)
    stored = chain.persistent.entries() if isinstance(chain.persistent, PersistentCache) else ()
    found = {key: (entry.config_type, entry.config) for key, entry in stored}
    for key, config in chain.cache.items():
        known = chain.cache.remembered(key)
        if known is not None and not known.tier.is_provisional:
            found[key] = (type_name(config), to_data(config))
    # Derived calls too, whose operations begin with the kernel's name; one more that begins so costs a compilation.
    own = {key: value for key, value in found.items() if isinstance(key, ConfigKey) and key.op.startswith(op)}
    yield from sorted(f"{key}: {name} {stable_json(data)}" for key, (name, data) in own.items())
