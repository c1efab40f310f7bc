# SPDX-License-Identifier: Apache-2.0
"""The last check of a winner: on inputs that no search has seen, and of its gradient."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.ops.core.derived import Vjp, innermost
from ejkernel.ops.core.examples import random_array
from ejkernel.ops.core.nodes import Choice, Forward, Node, is_inexact
from ejkernel.ops.errors import CandidateError
from ejkernel.ops.execution.bench import REFERENCE, Bench, Candidate
from ejkernel.ops.utils.telling import error_text

logger = logging.getLogger(__name__)


def confirm(bench: Bench, candidate: Candidate) -> tuple[str, ...]:
    """Check a winner on fresh inputs: its results and, if the call is a forward that has one, its gradient.

    Returns:
        What was checked: nothing, `("outputs",)` or `("outputs", "gradients")`.

    Raises:
        CandidateError: it is wrong, or fails where the reference does not.
    """
    if not bench.policy.validate:
        return ()
    bench.renew()
    bench.watch.begin("confirming", [candidate.config], bench.limits.compile.first)
    results = bench.check_again(candidate)
    return ("outputs", "gradients") if _has_right_gradient(bench, candidate, results) else ("outputs",)


def _has_right_gradient(bench: Bench, candidate: Candidate, results: Sequence[Any]) -> bool:
    """Return whether there is a gradient, which then is right.

    Raises:
        CandidateError: it is wrong, or fails where the reference's does not.
    """
    inv, arrays = bench.inv, bench.arrays
    if not isinstance(innermost(inv.node), Forward):
        return False
    choice = Choice(config=candidate.config, platform=inv.platform)
    wrt, outs = (tuple(map(is_inexact, values)) for values in (arrays, results))
    if not any(wrt) or not any(outs):
        return False
    gradient = Vjp(inv.node, len(arrays), wrt, outs)
    rng = np.random.default_rng(bench.seed)
    inputs = [*arrays, *(random_array(like, rng) for like, has in zip(results, outs, strict=True) if has)]
    try:
        lowered = jax.jit(gradient.flat(choice)).lower(*inputs)
    except BaseException as error:  # noqa: BLE001 - whether that is the candidate's fault, the heuristic tells
        return _excuse(bench, gradient, inputs, error)
    try:
        bench.watch.begin(f"{REFERENCE}'s gradient", [], bench.limits.compile.first)
        truth = bench.truth_about(gradient, inputs)
    except BaseException as error:  # noqa: BLE001 - what the reference cannot do, nobody can be compared with
        logger.info("%s: gradients are not checked, the reference has none: %s", inv.op_id, error_text(error))
        return False
    bench.watch.begin("confirming", [candidate.config], bench.limits.compile.first)
    try:
        found = jax.block_until_ready(lowered.compile()(*inputs))
    except BaseException as error:  # noqa: BLE001 - see above
        return _excuse(bench, gradient, inputs, error)
    try:
        bench.compare(found, truth)
    except CandidateError as error:
        raise CandidateError(f"gradient: {error}") from None
    return True


def _excuse(bench: Bench, gradient: Node, inputs: Sequence[Any], error: BaseException) -> bool:
    """Return `False`, there is no gradient, if the heuristic has none either.

    Raises:
        CandidateError: it has one; so the candidate is to blame.
    """
    if _works(gradient, Choice(config=bench.baseline, platform=bench.inv.platform), inputs):
        raise CandidateError(f"gradient: {error_text(error)}") from None
    logger.info("%s: gradients are not checked, the kernel has none: %s", bench.inv.op_id, error_text(error))
    return False


def _works(node: Node, choice: Choice, inputs: Sequence[Any]) -> bool:
    try:
        jax.block_until_ready(jax.jit(node.flat(choice))(*inputs))
    except BaseException:  # noqa: BLE001 - that is the question
        return False
    return True
