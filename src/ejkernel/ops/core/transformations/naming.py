# SPDX-License-Identifier: Apache-2.0
"""Names of a call's arrays, from the parameters of the kernel's `run`."""

from __future__ import annotations

import inspect
from typing import Any

import jax

from ejkernel.ops.core.callspec import CallSpec
from ejkernel.ops.core.hooks import Computation, run_forms
from ejkernel.ops.core.types import Cfg, Out

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def array_names(spec: CallSpec) -> list[str]:
    """Return the names of a call's arrays, in order, e.g. `x`, `state['step']` or `args[2]`."""
    mark = object()
    leaves = jax.tree_util.tree_leaves_with_path(spec.join([mark] * spec.num_arrays))
    return [leaf_name(spec.kernel, path) for path, leaf in leaves if leaf is mark]


def leaf_name(kernel: Computation[Any, Any], path: Any) -> str:
    """Return the name of the leaf at `path` in `(args, kwargs)` of a kernel's call."""
    part, argument, *rest = path
    if part.idx == 1:
        name = argument.key
    else:
        positional = _parameters(kernel)
        name = positional[argument.idx] if argument.idx < len(positional) else f"args[{argument.idx}]"
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _parameters(kernel: Computation[Cfg, Out]) -> list[str]:
    # A `run` with *args has no parameter names: use those of another form, or of `prepare`.
    for name in ("run", *run_forms(kernel), "prepare"):
        parameters = inspect.signature(getattr(kernel, name)).parameters.values()
        named = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        if named:
            return named
    return []
