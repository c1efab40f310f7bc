# SPDX-License-Identifier: Apache-2.0
"""A digest of the search space of a call, which tells whether an entry was chosen from the same space."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

from ejkernel.ops.config.spaces.axes import Axis
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of
from ejkernel.ops.errors import EjkernelError, SerializationError
from ejkernel.ops.utils.storage.serialize import stable_json


def space_digest(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> str | None:
    """Return 16 hex digits for the search space of a call, the same in every process.

    For a list, the digest covers the configurations in any order. For a `ConfigSpace`, it covers the axes and the
    number of configurations, because constraints are code and cannot be compared.

    Returns:
        The digest; `None` if a value has no JSON form or the kernel's own code raises.
    """
    try:
        content = _content(candidates_of(kernel, inv.representative))
    except (EjkernelError, SerializationError):
        return None
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _content(space: Collection[Any]) -> str:
    if isinstance(space, ConfigSpace):
        count = space.size if space.exact else "many"
        return "\n".join([*map(_axis, space.axes), str(count)])
    return "\n".join(sorted(map(stable_json, space)))


def _axis(axis: Axis) -> str:
    values = axis.values
    return f"{axis.name}: {values!r}" if isinstance(values, range) else f"{axis.name}: {stable_json(list(values))}"
