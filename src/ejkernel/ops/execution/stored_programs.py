# SPDX-License-Identifier: Apache-2.0
"""Digests that keep JAX's persistent compilation cache from returning a split call with an old configuration.

For a call that splits itself, the program's text only shows the types of the whole call. Its shards and their
configurations are found during compilation. Because equal texts must mean equal programs, the text carries a digest of
everything that decides them. By default the digest is not needed: the text contains an address, so the cache never
returns the program.
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
from ejkernel.ops.core.kernel import heuristic_config
from ejkernel.ops.core.primitive import Call
from ejkernel.ops.core.sharding.parts import programs_of_parts
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.storage.serialize import stable_json, to_data
from ejkernel.ops.utils.values.signature import HasType

logger = logging.getLogger(__name__)


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
