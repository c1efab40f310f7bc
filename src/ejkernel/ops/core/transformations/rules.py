# SPDX-License-Identifier: Apache-2.0
"""Calls a kernel's gradient rules, after a check of their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ejkernel.ops.core.hooks import Computation, hook
from ejkernel.ops.errors import KernelError

_LEADING = {  # the leading positional parameters of a rule; the arguments of `run` may follow
    "custom_vjp": ("primals", "cfg", "kwargs", "cotangents"),
    "vjp": ("residuals", "out", "cotangents"),
    "fwd_with_residuals": (),
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_rule(
    kernel: Computation[Any, Any], name: str, form: tuple[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a gradient rule of a kernel.

    Args:
        kernel: The kernel.
        name: The rule, such as `custom_vjp`.
        form: The platform and the configuration, which choose the form of the rule.
        args, kwargs: Its arguments.

    Raises:
        KernelError: The rule cannot take these arguments; the message shows the required signature.
    """
    rule = hook(kernel, name, *form)
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):  # a builtin function may have none
        return rule(*args, **kwargs)
    problem = _problem(signature, _LEADING[name], args, kwargs)
    if problem:
        got = f"{getattr(rule, '__name__', name)}(self, {str(signature).removeprefix('(')}"
        raise KernelError(
            f"{kernel.op_id}: {name} must have the signature {_wanted(kernel, name)}, got {got}: {problem}."
        )
    return rule(*args, **kwargs)


def _problem(
    signature: inspect.Signature, leading: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return the fault of a rule's signature; `""` if it has none."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    names = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
    for index, name in enumerate(leading):
        if name in names and names.index(name) != index:
            return f"{name} is argument {index + 1}, not {names.index(name) + 1}"
    return ""


def _wanted(kernel: Computation[Any, Any], name: str) -> str:
    if name == "custom_vjp":
        return f"custom_vjp(self, {', '.join(_LEADING[name])})"
    run = [p for p in inspect.signature(type(kernel).run).parameters.values() if p.name not in ("self", "cfg")]
    plain = [p.replace(annotation=p.empty) for p in run]
    positional = [str(p) for p in plain if p.kind in (*_POSITIONAL, p.VAR_POSITIONAL)]
    named = [str(p) for p in plain if p.kind is p.KEYWORD_ONLY]
    rest = [str(p) for p in plain if p.kind is p.VAR_KEYWORD]
    star = [] if any(text.startswith("*") for text in positional) else ["*"]
    return f"{name}({', '.join(['self', *_LEADING[name], *positional, *star, 'cfg', *named, *rest])})"
