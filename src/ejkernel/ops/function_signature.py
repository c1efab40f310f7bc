# SPDX-License-Identifier: Apache-2.0
"""The signature of a kernel created from a function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from ejkernel.ops.errors import KernelError
from ejkernel.ops.utils.messages.names import did_you_mean

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def signature_for_calls(
    parameters: Mapping[str, inspect.Parameter], names: Sequence[str], called: str
) -> inspect.Signature:
    """Return the function's signature, with tunable arguments as keyword-only ones.

    Raises:
        KernelError: A tunable argument cannot be passed by keyword, or precedes an argument that is not tunable.
    """
    for name in names:
        if name not in parameters:
            raise KernelError(
                f"{called}: space names {name!r}, but its function has no such parameter; its parameters are "
                f"{', '.join(parameters)}{did_you_mean(name, parameters)}"
            )
        if parameters[name].kind not in (*_POSITIONAL[1:], inspect.Parameter.KEYWORD_ONLY):
            raise KernelError(
                f"{called}: space names {name!r}, which must be a parameter that can be passed by keyword."
            )
    if "cfg" in parameters:
        raise KernelError(f"{called}: rename the parameter cfg; calls pass a configuration as cfg=...")
    positional = [p for p in parameters.values() if p.kind in (*_POSITIONAL, inspect.Parameter.VAR_POSITIONAL)]
    at = next((index for index, p in enumerate(positional) if p.name in names), len(positional))
    # Parameters after a tunable argument become keyword-only, so they must have defaults.
    behind = [p for p in positional[at:] if p.name not in names]
    if any(p.kind not in _POSITIONAL[1:] or p.default is p.empty for p in behind):
        first = ", ".join(p.name for p in positional[at:] if p.name in names)
        raise KernelError(f"{called}: {first} must come after all arguments that are not tunable, after *.")
    positional = positional[:at]
    kept = {p.name for p in positional}
    rest = [p for p in parameters.values() if p.name not in kept and p.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in rest]
    last = [p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    return inspect.Signature([*positional, *named, *last])
