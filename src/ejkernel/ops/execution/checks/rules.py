# SPDX-License-Identifier: Apache-2.0
"""Whether a gradient rule returns what it should, before it is brought into the arguments' dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.ops.autotuner.measure.correctness import deviations
from ejkernel.ops.core.kernel import has_gradient_rule, hook, overrides
from ejkernel.ops.core.transformations.naming import array_names
from ejkernel.ops.core.transformations.nodes import Choice, Forward, as_outputs, is_inexact, run_vjp
from ejkernel.ops.execution.checks.report import CheckRow, CheckStatus
from ejkernel.ops.execution.checks.subject import Subject


def rule_row(
    subject: Subject, config: object, arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> Iterator[CheckRow]:
    """Yield whether each gradient of a kernel's own rule has its argument's dtype; nothing if there is no rule."""
    if not has_gradient_rule(subject.kernel) or not cotangents:
        return
    try:
        reasons = _wrong_types(subject, config, arrays, cotangents)
    except Exception as error:  # noqa: BLE001 - a rule may fail in every way; the reason is the row's
        reasons = [f"{type(error).__name__}: {error}"]
    yield CheckRow(
        check="gradient types",
        config=config,
        status=CheckStatus.FAILED if reasons else CheckStatus.OK,
        reason="; ".join(reasons),
    )


def kept_row(
    subject: Subject, config: Any, baseline: Any, arrays: Sequence[Any], cotangents: Sequence[Any]
) -> Iterator[CheckRow]:
    """Yield whether a backward with `config` may follow a forward with `baseline`, if the kernel promises that."""
    if not subject.kernel.keeps_residuals or has_gradient_rule(subject.kernel) or not cotangents:
        return
    try:
        reason = _misunderstood(subject, config, baseline, arrays, cotangents)
    except Exception as error:  # noqa: BLE001 - as of any rule; the reason is the row's
        reason = f"{type(error).__name__}: {error}"
    status = CheckStatus.FAILED if reason else CheckStatus.OK
    yield CheckRow(check="kept residuals", config=config, status=status, reason=reason)


def _misunderstood(
    subject: Subject, config: Any, baseline: Any, arrays: Sequence[Any], cotangents: Sequence[Any]
) -> str:
    """Return how gradients from what another configuration kept differ from those from its own."""
    spec, own = subject.taken_apart(arrays)

    def gradients(forward: Any) -> list[Any]:
        trees: list[Any] = []
        choice = Choice(config=forward, platform=subject.platform, trees=trees)
        saved = Forward(spec, residuals=True).flat(choice)(*own)
        cts = jax.tree.leaves(_outputs(trees[0], saved[: trees[0].num_leaves], cotangents))
        backward = dataclasses.replace(choice, config=config, trees=None)
        found = run_vjp(spec, backward, (trees[0], trees[1]), saved, own, cts)
        return [gradient for gradient in found if gradient is not None]

    found = deviations(
        gradients(baseline), gradients(config), platform=subject.platform, precision=subject.inv.precision
    )
    wrong = next((deviation.reason for deviation in found if deviation.reason), "")
    return f"with what the heuristic's forward kept: {wrong}".replace("result", "gradient") if wrong else ""


def _wrong_types(
    subject: Subject, config: object, arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> list[str]:
    wrong: list[str] = []

    def trace(arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> None:
        spec, own = subject.taken_apart(arrays)
        args, _ = spec.join(own)
        found = _answer(spec, config, subject.platform, own, cotangents)
        if len(found) != len(args):  # the row of the gradient says it
            return
        names, at = array_names(spec), 0
        for argument, gradient in zip(args, found, strict=True):
            count = sum(spec_is_array for spec_is_array in map(_is_array, jax.tree.leaves(argument)))
            wrong.extend(_misfits(argument, gradient, names[at : at + count]))
            at += count

    # Types are asked for, so nothing is computed.
    jax.eval_shape(trace, arrays, cotangents)
    return wrong


def _answer(
    spec: Any, config: object, platform: str, own: Sequence[object], cotangents: Sequence[jax.Array]
) -> Sequence[Any]:
    """Return what the kernel's rule returns, as it is."""
    kernel = spec.kernel
    trees: list[Any] = []
    args, kwargs = spec.join(own)
    choice = Choice(config=config, platform=platform, trees=trees)
    if overrides(kernel, "custom_vjp"):
        outs = Forward(spec).flat(choice)(*own)
        rule = hook(kernel, "custom_vjp", platform, config)
        # The rule itself, because what calls it brings gradients into the arguments' dtypes.
        found: Sequence[Any] = rule(args, config, kwargs, _outputs(trees[0], outs, cotangents))
        return found
    out, residuals = hook(kernel, "fwd_with_residuals", platform, config)(*args, cfg=config, **kwargs)
    given = _outputs(jax.tree.structure(out), jax.tree.leaves(out), cotangents)
    gradients: Sequence[Any] = hook(kernel, "vjp", platform, config)(residuals, out, given, *args, cfg=config, **kwargs)
    return gradients


def _outputs(tree: Any, outs: Sequence[Any], cotangents: Sequence[jax.Array]) -> tuple[Any, ...]:
    given = iter(cotangents)
    return as_outputs(
        tree, [next(given) if is_inexact(out) else np.zeros(out.shape, jax.dtypes.float0) for out in outs]
    )


def _misfits(argument: object, gradient: object, names: Sequence[str]) -> list[str]:
    arrays = [leaf for leaf in jax.tree.leaves(argument) if _is_array(leaf)]
    gradients = jax.tree.leaves(gradient, is_leaf=lambda leaf: leaf is None)
    if len(gradients) != len(arrays):  # None for a whole branch, or for what is static
        return []
    return [
        f"the gradient of {name} is {found.dtype}, and {name} is {array.dtype}; return it as that"
        for name, array, found in zip(names, arrays, gradients, strict=True)
        if found is not None and is_inexact(array) and found.dtype != array.dtype
    ]


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")
