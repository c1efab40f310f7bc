# SPDX-License-Identifier: Apache-2.0
"""Names for the results of backward calls."""

from __future__ import annotations

from ejkernel.ops.core.callspec import array_names
from ejkernel.ops.core.transformations.autodiff import innermost
from ejkernel.ops.core.transformations.nodes import Node


def result_names(node: Node) -> list[str]:
    """Return the names of a backward call's results; empty for other calls, whose results have numbers."""
    root = innermost(node)
    names = [f"the gradient of {name}" for name in array_names(node.spec)]
    wrt: tuple[bool, ...] = getattr(root, "wrt", ())
    # The arguments of a second derivative have no names.
    if not root.suffix.endswith(".bwd") or len(wrt) != len(names):
        return []
    return [name for name, has in zip(names, wrt, strict=True) if has]
