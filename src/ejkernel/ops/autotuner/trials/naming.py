# SPDX-License-Identifier: Apache-2.0
"""What the results of a backward are called."""

from __future__ import annotations

from ejkernel.ops.core.transformations.autodiff import innermost
from ejkernel.ops.core.transformations.naming import array_names
from ejkernel.ops.core.transformations.nodes import Node


def result_names(node: Node) -> list[str]:
    """Return what the results of a backward are called; nothing of any other call, whose results have numbers."""
    root = innermost(node)
    names = [f"the gradient of {name}" for name in array_names(node.spec)]
    wrt: tuple[bool, ...] = getattr(root, "wrt", ())
    # a derivative of a derivative has arguments without names
    if not root.suffix.endswith(".bwd") or len(wrt) != len(names):
        return []
    return [name for name, has in zip(names, wrt, strict=True) if has]
