# SPDX-License-Identifier: Apache-2.0
"""Counts how often a traced program makes each of its calls."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ejkernel.ops.core.invocation import invocation_of
from ejkernel.ops.core.primitive import call_p
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.utils.error_text import error_text

logger = logging.getLogger(__name__)

Name = tuple[str, str]
"""Operation with its version, and key of a call on any device."""


def occurrences(jaxpr: Any, platform: str) -> Mapping[Name, int]:
    """Return how often one run of a traced program makes each call: in a `scan`, once for each step.

    A `while_loop` counts as one step, and a `cond` as the branch with the most calls, so the numbers are lower bounds.
    Calls that split themselves over a mesh are not counted, because their shards have other keys.
    """
    return _Counter(platform).count(jaxpr)


class _Counter:
    def __init__(self, platform: str) -> None:
        self._platform = platform
        self._names: dict[Any, Name | None] = {}

    def count(self, jaxpr: Any) -> collections.Counter[Name]:
        """Return the number of each call in a jaxpr, with its inner ones."""
        found: collections.Counter[Name] = collections.Counter()
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive is call_p:
                name = self._name(eqn)
                found.update([] if name is None else [name])
                continue
            inner = [self.count(one) for one in _jaxprs_in(eqn.params)]
            if eqn.primitive.name == "cond":
                inner = [collections.Counter({name: max(one[name] for one in inner) for name in set().union(*inner)})]
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for one in inner:
                found.update({name: times * number for name, number in one.items()})
        return found

    def _name(self, eqn: Any) -> Name | None:
        call, avals = eqn.params["call"], tuple(var.aval for var in eqn.invars)
        if (call, avals) not in self._names:
            try:
                with call.settings.entered():
                    inv = invocation_of(call.node, avals, platform=self._platform)
                    self._names[call, avals] = inv.op_id_v, inv.call_key
            except EjkernelError as error:  # e.g. a call without a key
                logger.debug("a call is not counted: %s", error_text(error))
                self._names[call, avals] = None
        return self._names[call, avals]


def _jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else [value]:
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield one
