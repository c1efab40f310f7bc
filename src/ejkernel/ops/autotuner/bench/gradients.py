# SPDX-License-Identifier: Apache-2.0
"""Checks that a kernel's gradient is the derivative of its outputs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.bench.oracle import Oracle, result_names
from ejkernel.ops.autotuner.measure.measurement import check_room, peak_bytes
from ejkernel.ops.config.policy import looking_only
from ejkernel.ops.core.callspec import CallSpec, array_names
from ejkernel.ops.core.kernel import has_gradient_rule, overrides
from ejkernel.ops.core.transformations.autodiff import Vjp, innermost
from ejkernel.ops.core.transformations.nodes import Choice, Forward, Node
from ejkernel.ops.errors import CandidateError, GradientError
from ejkernel.ops.utils.random_arrays import random_array
from ejkernel.ops.utils.values.signature import HasType, is_inexact

logger = logging.getLogger(__name__)


def differentiable(spec: CallSpec, arrays: Sequence[jax.Array]) -> tuple[bool, ...]:
    """Return which arrays of a call have a gradient; a gradient rule covers floating-point positional arrays only."""
    if spec.kernel.why_no_gradient:
        return (False,) * len(arrays)
    own = sum(sum(flags) for _, flags in spec.flags_by_argument())
    count = own if has_gradient_rule(spec.kernel) else len(arrays)
    return tuple(is_inexact(array) and index < count for index, array in enumerate(arrays))


def gradient_of(oracle: Oracle, results: Sequence[HasType]) -> tuple[Node, list[Any], list[str]] | None:
    """Return the backward of a forward call with inputs and names of its results; `None` without a gradient.

    Args:
        oracle: The forward call.
        results: The results of the forward, or their types.
    """
    spec, arrays = oracle.inv.node.spec, oracle.arrays
    wrt, outs = differentiable(spec, arrays), tuple(map(is_inexact, results))
    if not isinstance(innermost(oracle.inv.node), Forward) or not any(wrt) or not any(outs):
        return None
    # Other numbers than the arguments: the derivative along these may be zero.
    rng = np.random.default_rng((oracle.seed, 1))
    cotangents = [random_array(like, rng) for like, has in zip(results, outs, strict=True) if has]
    names = [f"the gradient of {name}" for name, has in zip(array_names(spec), wrt, strict=True) if has]
    return Vjp(oracle.inv.node, len(arrays), wrt, outs), [*arrays, *cotangents], names


@looking_only()
def rule_fault(oracle: Oracle) -> str:
    """Return how the baseline's gradients differ from JAX's derivative of `reference`, or of `run` without reference.

    The result is empty if they agree, or if either gradient cannot be computed; the log then gives the reason.
    """
    inv, kernel = oracle.inv, oracle.inv.node.spec.kernel
    has_reference = overrides(kernel, "reference")
    # Without reference and rule, the gradient is JAX's derivative of `run` already.
    if not (has_reference or has_gradient_rule(kernel)) or inv.direction == "jvp":
        return ""
    if has_reference and (inv.direction == "bwd" or not oracle.has_reference):
        return ""  # each candidate, also the baseline, was compared with JAX's derivative; or nothing can be
    choice = oracle.choice
    oracle.begin("checking the gradient rule")
    try:
        found = _backward(oracle, choice)
        if found is None:
            return ""
        node, inputs, names = found
        gradients = run_once(node, choice, inputs, inv.platform)
    except GradientError as error:
        return f"its gradient rule fails: {error}"
    except Exception as error:  # noqa: BLE001 - a kernel need not have a gradient for every call
        logger.info("%s: gradients are not checked, the kernel has none: %s", inv.op_id, error)
        return ""
    # A rule may be equally wrong under every configuration. It would pass a comparison with the heuristic, and reject
    # all candidates in a comparison with the reference. So the heuristic's gradient is compared with JAX's derivative
    # before the decision. If it is wrong, tuning continues with the heuristic's gradients as reference.
    try:
        if has_reference:
            expected = oracle.reference_results(node, inputs)
        else:
            expected = run_once(node, dataclasses.replace(choice, without_rule=True), inputs, inv.platform)
    except Exception as error:  # noqa: BLE001 - without JAX's derivative, nothing can be compared
        logger.info("%s: gradients are not checked, JAX finds none: %s", inv.op_id, error)
        return ""
    if has_reference and not oracle.has_reference:
        return ""  # the time did not suffice for compiling the reference
    try:
        oracle.compare(gradients, expected, names)
    except CandidateError as error:
        whose = "`reference`" if has_reference else "`run`"
        return f"its gradients are not JAX's derivatives of {whose}: {error}"
    return ""


def _backward(oracle: Oracle, choice: Choice) -> tuple[Node, list[Any], list[str]] | None:
    """Return the backward of the oracle's call, or the call itself if it is a backward."""
    if oracle.inv.direction == "fwd":
        if not any(differentiable(oracle.inv.node.spec, oracle.arrays)):
            return None
        return gradient_of(oracle, jax.eval_shape(oracle.inv.node.flat(choice), *oracle.arrays))
    return oracle.inv.node, oracle.arrays, result_names(oracle.inv.node)


def run_once(node: Node, choice: Choice, inputs: Sequence[object], platform: str) -> Sequence[Any]:
    """Compile a node, run it once and return its results."""
    compiled = compat.executables.compiled_for_one_run(jax.jit(node.flat(choice)).lower(*inputs), platform)
    check_room(peak_bytes(compiled) or 0, "the gradient")
    results: Sequence[Any] = jax.block_until_ready(compiled(*inputs))
    return results
