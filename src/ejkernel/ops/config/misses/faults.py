# SPDX-License-Identifier: Apache-2.0
"""Saved configurations with which their calls do not run, e.g. of a candidate that the kernel no longer has."""

from __future__ import annotations

from typing import Any

from ejkernel import compat
from ejkernel.ops.config.cache import Consulted, config_token
from ejkernel.ops.core.context import numerics
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, heuristic_config
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import NoConfigError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.weak_caches import PerObject


class Faults:
    """The errors of calls with saved configurations, per kernel object: a corrected kernel starts without any."""

    def __init__(self) -> None:
        self._known: PerObject[dict[tuple[ConfigKey, tuple[str, str]], str]] = PerObject(dict)

    def __reduce__(self) -> tuple[type[Faults], tuple[()]]:
        return Faults, ()  # a copy starts without any

    def note(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], config: object, error: Exception) -> None:
        """Note the error of a call with a configuration."""
        self._known.of(kernel)[inv.key, config_token(config)] = error_text(error)

    def forget(self, key: ConfigKey, config: object) -> None:
        """Forget the error of a call, because a search has measured the configuration."""
        for known, _ in tuple(self._known.by_address.values()):
            known.pop((key, config_token(config)), None)

    def checked(
        self, consulted: Consulted, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, look: bool
    ) -> Consulted:
        """Return the result of asking a tier; no answer if it is a saved configuration that does not run.

        Args:
            consulted: The result.
            inv: The call.
            kernel: Its kernel.
            look: Whether to trace the call if no error is known.
        """
        found, known = consulted.resolution, self._known.of(kernel)
        if found is None or found.key is None or not found.tier.is_saved or not (known or look):
            return consulted
        why = known.get((found.key, config_token(found.config)), "")
        why = why or (why_not_traced(inv, kernel, found.config) if look else "")
        note = f"the saved configuration {found.config!r} does not run: {why}"
        return Consulted(consulted.tier, None, note, is_rejected=True) if why else consulted


def why_not_traced(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], config: object) -> str:
    """Return the error of a call traced with a configuration; empty if it runs, or fails with the heuristic's too.

    For example, collectives fail with every configuration here, outside the mesh of their program.
    """
    error = _traced(inv, config)
    if error is None:
        return ""
    try:
        usual = heuristic_config(kernel, inv)
    except NoConfigError:
        return error_text(error)
    return "" if _traced(inv, usual) is not None else error_text(error)


def _traced(inv: Invocation[Any, Any], config: object) -> Exception | None:
    """Return the error of a call traced with a configuration, or `None`."""
    try:
        with numerics(inv.numerics):
            compat.tracing.traced(inv.node.flat(Choice(config=config, platform=inv.platform)), inv.argument_types)
    except Exception as error:  # noqa: BLE001 - returned
        return error
    return None
