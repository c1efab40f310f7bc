# SPDX-License-Identifier: Apache-2.0
"""The last check of a winner: its results and its gradient on new inputs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import jax

from ejkernel.ops.autotuner.bench.checking import check_again, check_on_more
from ejkernel.ops.autotuner.bench.gradients import gradient_of, run_once
from ejkernel.ops.autotuner.bench.oracle import REFERENCE, Oracle
from ejkernel.ops.autotuner.bench.residuals import (
    ResidualError,
    check_backward,
    check_forward,
    check_types,
    has_other_partners,
)
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.config.policy import looking_only
from ejkernel.ops.core.transformations.nodes import Node
from ejkernel.ops.errors import CandidateError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.values.signature import HasType

logger = logging.getLogger(__name__)


def confirm(
    oracle: Oracle, candidate: Candidate, *, gradients: bool = True, rule_is_faulty: bool = False
) -> tuple[str, ...]:
    """Check a winner on new sets of inputs: its results and, for a differentiable forward call, its gradient.

    Args:
        oracle: The call.
        candidate: The winner.
        gradients: Whether to check its gradient.
        rule_is_faulty: Whether the heuristic's gradient is known to be wrong. The winner's must then agree with it.

    Returns:
        The checks that it passed: `()`, `("outputs",)` or `("outputs", "gradients")`.

    Raises:
        CandidateError: Its results are wrong, or it fails where the reference does not.
    """
    try:
        with oracle.settings.during(repr(candidate.config)):
            for one in oracle.all:
                check_types(one, candidate.config)
            return _checked(oracle, candidate, gradients, rule_is_faulty)
    except ResidualError as error:
        oracle.contract_fault = f"{compact(candidate.config)} is not used: {error}"
        raise


def _checked(oracle: Oracle, candidate: Candidate, gradients: bool, rule_is_faulty: bool) -> tuple[str, ...]:
    if not oracle.validate:
        return ()
    # A candidate may be correct on some inputs only. E.g. a kernel that writes nothing may find the results of the
    # previous candidate in its output buffer.
    oracle.renew()
    oracle.begin("confirming", candidate.config)
    types = check_again(oracle, candidate)
    # The sets that all candidates ran on, as many new ones, and further sets.
    candidate.input_sets = 2 * len(oracle.sets) + check_on_more(oracle, candidate)
    check_backward(oracle, candidate)
    if not gradients:
        return ("outputs",)
    # A configuration with correct outputs may still break the gradient.
    agrees = [
        _has_right_gradient(one, candidate, own, rule_is_faulty) for one, own in zip(oracle.all, types, strict=True)
    ]
    return ("outputs", "gradients") if all(agrees) and not rule_is_faulty else ("outputs",)


def pair_fault(oracle: Oracle, kept: Candidate | None) -> str:
    """Return how forward and backward disagree on residuals, if the search found a fault; empty otherwise.

    Args:
        oracle: The call.
        kept: The heuristic, if it stays. It is checked with the saved configurations of the other direction.
    """
    if oracle.contract_fault or kept is None or not kept.compiled or not oracle.validate:
        return oracle.contract_fault
    try:
        if has_other_partners(oracle):
            _checked(oracle, kept, True, False)
    except CandidateError as error:
        return f"the heuristic, {compact(kept.config)}, stays, and its gradients are wrong: {error}"
    return ""


@looking_only()
def _has_right_gradient(oracle: Oracle, candidate: Candidate, results: Sequence[HasType], rule_is_faulty: bool) -> bool:
    """Return whether the candidate has a gradient, which then is correct.

    Raises:
        CandidateError: The gradient is wrong, or fails where the reference's does not.
    """
    inv = oracle.inv
    choice = dataclasses.replace(oracle.choice, config=candidate.config)
    backward = gradient_of(oracle, results)
    if backward is None:
        return False
    gradient, inputs, names = backward
    try:
        lowered = jax.jit(gradient.flat(choice)).lower(*inputs)
    except BaseException as error:  # noqa: BLE001 - the heuristic's gradient shows whether this is the candidate's fault
        return _excuse(oracle, gradient, inputs, error)
    try:
        oracle.begin(f"{REFERENCE}'s gradient")
        if rule_is_faulty:
            expected = run_once(gradient, oracle.choice, inputs, inv.platform)
        else:
            expected = oracle.reference_results(gradient, inputs)
    except BaseException as error:  # noqa: BLE001 - without a reference gradient, nothing can be compared
        logger.info("%s: gradients are not checked, the reference has none: %s", inv.op_id, error_text(error))
        return False
    oracle.begin("confirming", candidate.config)
    try:
        found = jax.block_until_ready(lowered.compile()(*inputs))
    except BaseException as error:  # noqa: BLE001 - see above
        return _excuse(oracle, gradient, inputs, error)
    oracle.compare(found, expected, names)
    check_forward(oracle, candidate, inputs, expected, names)
    return True


def _excuse(oracle: Oracle, gradient: Node, inputs: Sequence[object], error: BaseException) -> bool:
    """Return `False` (no gradient) if the heuristic has no gradient either.

    Raises:
        CandidateError: The heuristic has a gradient, so the error is the candidate's.
    """
    try:
        jax.block_until_ready(jax.jit(gradient.flat(oracle.choice))(*inputs))
    except BaseException as usual:  # noqa: BLE001 - any error means that it does not work
        logger.debug("%s: the heuristic's gradient fails too: %s", oracle.inv.op_id, error_text(usual))
        logger.info("%s: gradients are not checked, the kernel has none: %s", oracle.inv.op_id, error_text(error))
        return False
    raise CandidateError(f"gradient: {error_text(error)}") from None
