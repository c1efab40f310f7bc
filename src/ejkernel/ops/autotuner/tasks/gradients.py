# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel's gradient is the derivative of what it computes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.measure.correctness import check_results
from ejkernel.ops.autotuner.measure.memory import check_room, peak_bytes
from ejkernel.ops.autotuner.tasks.bench import Bench
from ejkernel.ops.autotuner.trials.naming import array_names, result_names
from ejkernel.ops.config.policy import looking_only
from ejkernel.ops.core.callspec import CallSpec
from ejkernel.ops.core.derived import Vjp, innermost, with_spec
from ejkernel.ops.core.examples import random_array
from ejkernel.ops.core.kernel import Kernel, has_gradient_rule, hook, overrides
from ejkernel.ops.core.nodes import Choice, Forward, Node, is_inexact
from ejkernel.ops.errors import CandidateError, GradientError
from ejkernel.ops.utils.identity import Strong

logger = logging.getLogger(__name__)


def differentiable(spec: CallSpec, arrays: Sequence[Any]) -> tuple[bool, ...]:
    """Return which of a call's arrays have a gradient: a rule answers for floating-point positional ones alone."""
    own = sum(sum(flags) for _, flags in spec.flags_by_argument())
    count = own if has_gradient_rule(spec.kernel) else len(arrays)
    return tuple(is_inexact(array) and index < count for index, array in enumerate(arrays))


class _RunAsReference:
    """Stands for a kernel whose `reference` is its `run` under one configuration."""

    def __init__(self, kernel: Kernel[Any, Any], choice: Choice) -> None:
        self.op_id = kernel.op_id
        self._kernel, self._choice = kernel, choice

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `run` returns."""
        config = self._choice.config
        return hook(self._kernel, "run", self._choice.platform, config)(*args, cfg=config, **kwargs)


def without_rule(node: Node, choice: Choice) -> Node:
    """Return a node that differentiates `run`, under `choice`, where `node` has the kernel's rule; for truths alone."""
    spec, stand_in = node.spec, _RunAsReference(node.spec.kernel, choice)
    changed: Node = with_spec(
        node, dataclasses.replace(spec, token=(stand_in, spec.token), held=(Strong(stand_in), *spec.held[1:]))
    )
    return changed


def gradient_of(bench: Bench, results: Sequence[Any]) -> tuple[Node, list[Any], list[str]] | None:
    """Return the backward of a bench's forward call, inputs for it, and names for what comes out; `None`: it has none.

    Args:
        bench: The call.
        results: Of the forward, or their types.
    """
    spec, arrays = bench.inv.node.spec, bench.arrays
    wrt, outs = differentiable(spec, arrays), tuple(map(is_inexact, results))
    if not isinstance(innermost(bench.inv.node), Forward) or not any(wrt) or not any(outs):
        return None
    rng = np.random.default_rng(bench.seed)
    cotangents = [random_array(like, rng) for like, has in zip(results, outs, strict=True) if has]
    names = [f"the gradient of {name}" for name, has in zip(array_names(spec), wrt, strict=True) if has]
    return Vjp(bench.inv.node, len(arrays), wrt, outs), [*arrays, *cotangents], names


@looking_only()
def rule_fault(bench: Bench) -> str:
    """Return how the gradients of the bench's baseline differ from JAX's of `reference`, or of `run` without one.

    Nothing is held against a kernel whose gradients, or the others, cannot be had; the log says why.
    """
    inv, kernel = bench.inv, bench.inv.node.spec.kernel
    has_reference = overrides(kernel, "reference")
    if not (has_reference or has_gradient_rule(kernel)) or inv.direction == "jvp":
        return ""
    choice = Choice(config=bench.baseline, platform=inv.platform)
    bench.watch.begin("checking the gradient rule", [], bench.limits.compile.first)
    try:
        found = _backward(bench, choice)
        if found is None:
            return ""
        node, inputs, names = found
        gradients = _run_once(node, choice, inputs, inv.platform)
    except GradientError as error:
        return f"its gradient rule fails: {error}"
    except Exception as error:  # noqa: BLE001 - a kernel need not have a gradient for every call
        logger.info("%s: gradients are not checked, the kernel has none: %s", inv.op_id, error)
        return ""
    truth_node = node if has_reference else without_rule(node, choice)
    try:
        truth = _run_once(truth_node, dataclasses.replace(choice, reference=True), inputs, inv.platform)
    except Exception as error:  # noqa: BLE001 - what JAX cannot differentiate, nobody can be compared with
        logger.info("%s: gradients are not checked, JAX finds none: %s", inv.op_id, error)
        return ""
    try:
        check_results(gradients, truth, platform=inv.platform, precision=inv.precision, names=names)
    except CandidateError as error:
        whose = "`reference`" if has_reference else "`run`"
        return f"its gradients are not JAX's derivatives of {whose}: {error}"
    return ""


def _backward(bench: Bench, choice: Choice) -> tuple[Node, list[Any], list[str]] | None:
    """Return the backward that belongs to a bench's call: the call itself, if it is one."""
    if bench.inv.direction == "fwd":
        if not any(differentiable(bench.inv.node.spec, bench.arrays)):
            return None
        return gradient_of(bench, jax.eval_shape(bench.inv.node.flat(choice), *bench.arrays))
    return bench.inv.node, bench.arrays, result_names(bench.inv.node)


def baseline_gradient(bench: Bench, node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the gradients of the bench's baseline, by the kernel's own rule."""
    platform = bench.inv.platform
    return _run_once(node, Choice(config=bench.baseline, platform=platform), inputs, platform)


def _run_once(node: Node, choice: Choice, inputs: Sequence[Any], platform: str) -> Sequence[Any]:
    compiled = compat.compiled_for_one_run(jax.jit(node.flat(choice)).lower(*inputs), platform)
    check_room(peak_bytes(compiled) or 0, "the gradient")
    results: Sequence[Any] = jax.block_until_ready(compiled(*inputs))
    return results
