# SPDX-License-Identifier: Apache-2.0
"""Checks that the forward and backward configurations of a call agree on its residuals.

Forward and backward calls are keyed and tuned separately, so any forward configuration may meet any backward
configuration. Residuals must therefore mean the same under every configuration; a search rejects a winner that does
not keep this contract.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax

from ejkernel.ops.autotuner.bench.gradients import differentiable, run_once
from ejkernel.ops.autotuner.bench.oracle import Oracle, Workload
from ejkernel.ops.autotuner.measure.correctness import check_results
from ejkernel.ops.autotuner.trials.candidates import Candidate, config_id, distinct, heuristic_of
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.hooks import has_residual_form, overrides
from ejkernel.ops.core.invocation import Invocation, invocation_of
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.transformations.autodiff import Vjp, differentiate, innermost
from ejkernel.ops.core.transformations.nodes import Choice, Forward, Node
from ejkernel.ops.errors import CandidateError, KernelError
from ejkernel.ops.utils.error_text import error_text, message_of
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.values.signature import is_inexact, type_text

logger = logging.getLogger(__name__)


CONTRACT: Final = (
    "residuals must have the same structure, shapes, dtypes and values (up to rounding) under every configuration, "
    "because forward and backward are tuned separately"
)


class ResidualError(CandidateError):
    """A configuration breaks the contract of residuals."""


def leaves_residuals(node: Node) -> bool:
    """Return whether a call is a forward that hands residuals to its backward."""
    root, kernel = innermost(node), node.spec.kernel
    try:
        return isinstance(root, Forward) and not overrides(kernel, "custom_vjp") and has_residual_form(kernel)
    except KernelError:  # it has one hook without the other, which its gradient reports
        return False


def takes_residuals(node: Node) -> bool:
    """Return whether a call is a backward with residuals of its forward as arguments."""
    root = innermost(node)
    return isinstance(root, Vjp) and root.trees is not None


def backward_of(forward: Node, choice: Choice, arrays: Sequence[Any]) -> tuple[Node, list[Any]] | None:
    """Return the backward of a forward that leaves residuals, and its argument types; `None` without a gradient.

    Args:
        forward: The forward call.
        choice: The configuration that gives the structure of the residuals.
        arrays: The forward's arrays, or their types.
    """
    wrt = differentiable(forward.spec, arrays)
    trees: list[Any] = []
    saved = jax.eval_shape(forward.with_residuals().flat(dataclasses.replace(choice, trees=trees)), *arrays)
    outputs = saved[: trees[0].num_leaves]
    outs = tuple(map(is_inexact, outputs))
    if not any(wrt) or not any(outs):
        return None
    _, linear = differentiate(forward, wrt, outs, (trees[0], trees[1]))
    cotangents = [output for output, has in zip(outputs, outs, strict=True) if has]
    return linear.transpose, [*saved, *arrays, *cotangents]


def backward_call(inv: Invocation[Any, Any], choice: Choice) -> Invocation[Any, Any] | None:
    """Return the backward call of a forward, for the gradient of all its arrays; `None` if it takes no residuals."""
    if not leaves_residuals(inv.node):
        return None
    found = backward_of(inv.node, choice, inv.argument_types)
    if found is None:
        return None
    call = invocation_of(found[0], found[1], platform=inv.platform)
    settings = {name: getattr(inv, name) for name in ("device", "precision", "x64", "prng", "promotion", "span")}
    return dataclasses.replace(call, **settings)


def partner_call(inv: Invocation[Any, Any]) -> Invocation[Any, Any] | None:
    """Return the call of the other direction, if residuals pass between the two."""
    kernel = inv.node.spec.kernel
    if takes_residuals(inv.node):
        return inv.forward
    heuristic = heuristic_of(inv, kernel) if leaves_residuals(inv.node) else []
    return backward_call(inv, Choice(config=heuristic[0], platform=inv.platform)) if heuristic else None


def has_other_partners(oracle: Oracle) -> bool:
    """Return whether the other direction runs with a configuration other than the heuristics'."""
    for one in oracle.all:
        known = [config_id(one.baseline), config_id(one.forward_choice.config)]
        if leaves_residuals(one.inv.node):
            known.append(config_id(next(_backward_configs(one))))
        if any(config_id(config) not in known for config in one.partners):
            return True
    return False


def check_forward(
    oracle: Oracle, candidate: Candidate, inputs: Sequence[Any], expected: Sequence[Any], names: Sequence[str]
) -> None:
    """Check a forward candidate with each backward configuration that will run beside it.

    Args:
        oracle: The forward call.
        candidate: The candidate.
        inputs: The call's arrays, and cotangents.
        expected: The reference gradients for these.
        names: The gradients' names in messages.

    Raises:
        ResidualError: Its residuals differ from the heuristic's.
        CandidateError: The gradient of a pair is wrong.
    """
    if not leaves_residuals(oracle.inv.node):
        return
    count = len(oracle.arrays)
    primals, cotangents = inputs[:count], inputs[count:]
    own = oracle.saver_of(candidate.config)(*primals)
    usual = _usual(oracle, primals)
    if usual is None:
        return  # the search of the backward will compare it with this forward
    _check_values(oracle, own, usual, len(_types(oracle, oracle.baseline).outputs))
    found = backward_of(oracle.inv.node, oracle.choice, primals)
    assert found is not None  # the call has a gradient, which was checked before

    def check(config: object, saved: Sequence[Any]) -> None:
        choice = dataclasses.replace(oracle.choice, config=config)
        gradients = run_once(found[0], choice, [*saved, *primals, *cotangents], oracle.inv.platform)
        oracle.compare(gradients, expected, names)

    for config in _backward_configs(oracle):
        if config_id(config) == config_id(candidate.config):
            continue  # the gradient under one configuration was checked before
        wrong = _why_not(functools.partial(check, config, own))
        if wrong:
            beside = f"the backward configuration {compact(config)}, which runs with it,"
            if _why_not(functools.partial(check, config, usual)):
                again = "tune the backward call again (`ejkernel tune --force`)"
                raise ResidualError(f"{beside} is wrong with any residuals: {wrong}; {again}")
            raise ResidualError(f"with its residuals, {beside} is wrong: {wrong}; {CONTRACT}")


def check_types(oracle: Oracle, config: object) -> None:
    """Check that a forward configuration leaves residuals of the heuristic's types.

    Raises:
        ResidualError: The types differ, and a program would refuse the configuration.
    """
    if not leaves_residuals(oracle.inv.node):
        return
    try:
        want, got = _types(oracle, oracle.baseline), _types(oracle, config)
    except Exception as error:  # noqa: BLE001 - a kernel need not have a gradient for every call
        logger.info("%s: residuals are not compared: %s", oracle.inv.op_id, error_text(error))
        return
    if got != want:
        mine, usual = (", ".join(types.residuals) or "nothing" for types in (got, want))
        text = f"its residuals are {mine}, the heuristic's {usual}"
        raise ResidualError(f"{text}: {CONTRACT}")


def check_backward(oracle: Oracle, candidate: Candidate) -> None:
    """Check a backward candidate with the residuals of each forward configuration in force.

    The search has already checked it with the residuals of the forward's heuristic.

    Raises:
        ResidualError: The gradient is wrong, or fails, with those residuals.
    """
    for workload in oracle.workloads:
        one = workload.oracle
        lead, forward = one.inv.node.lead, one.inv.forward
        if forward is None or not takes_residuals(one.inv.node):
            continue
        for config in distinct(one.partners, but=[one.forward_choice.config]):
            oracle.begin("confirming", candidate.config)
            arrays = workload.arrays
            count = one.inv.node.spec.num_arrays
            _check_with(workload, candidate, config, list(arrays[lead : lead + count]))


def _check_with(workload: Workload, candidate: Candidate, config: object, primals: Sequence[Any]) -> None:
    """Check a backward candidate with the residuals of one forward configuration."""
    oracle, lead, program = workload.oracle, workload.oracle.inv.node.lead, candidate.compiled
    usual = workload.arrays[:lead]
    saved: list[Any] = []

    def check() -> None:
        saved[:] = jax.block_until_ready(oracle.saver_of(config)(*primals))
        got, want = (list(map(type_text, each)) for each in (saved, usual))
        if got != want:
            raise CandidateError(f"it leaves {', '.join(got)} instead of {', '.join(want)}")
        workload.judge(jax.block_until_ready(program[workload.number](*saved, *workload.arrays[lead:])))

    wrong = _why_not(check)
    if wrong:
        forward = f"the forward configuration {compact(config)}, which runs with it"
        raise ResidualError(f"it is wrong with the residuals of {forward}: {wrong}; {CONTRACT}")


class _Types(NamedTuple):
    outputs: list[str]
    residuals: list[str]
    trees: list[Any]


def _types(oracle: Oracle, config: object) -> _Types:
    """Return the types of the forward's outputs and residuals under a configuration, as text."""
    trees: list[Any] = []
    choice = dataclasses.replace(oracle.choice, config=config, trees=trees)
    node = oracle.inv.node.with_residuals()
    found = list(map(type_text, jax.eval_shape(node.flat(choice), *oracle.inv.argument_types)))
    count = trees[0].num_leaves
    return _Types(found[:count], found[count:], trees)


def _check_values(oracle: Oracle, own: Sequence[Any], usual: Sequence[Any], outputs: int) -> None:
    """Compare the floating-point residuals; rounding may change others, e.g. masks, and there the gradients decide."""
    places = [index for index, one in enumerate(own) if is_inexact(one)]
    try:
        check_results(
            [own[index] for index in places],
            [usual[index] for index in places],
            platform=oracle.inv.platform,
            precision=oracle.inv.precision,
            names=[f"output {index}" if index < outputs else f"residual {index - outputs}" for index in places],
            inputs=[array.dtype for array in oracle.arrays if is_inexact(array)],
            of="the heuristic's",
        )
    except CandidateError as error:
        raise ResidualError(f"{error}: {CONTRACT}") from None


def _backward_configs(oracle: Oracle) -> Iterator[Any]:
    """Yield the backward configurations that may run: the heuristic's, and the one in force."""
    call = backward_call(oracle.inv, oracle.choice)
    heuristic = [] if call is None else heuristic_of(call, oracle.inv.node.spec.kernel)
    first = heuristic[0] if heuristic else oracle.baseline
    yield first
    yield from distinct(oracle.partners, but=[first])


def _usual(oracle: Oracle, primals: Sequence[Any]) -> Any:
    """Return the outputs and residuals under the baseline; `None` if it does not run."""
    try:
        return oracle.saver_of(oracle.baseline)(*primals)
    except Exception as error:  # noqa: BLE001 - kernels may raise anything
        logger.info("%s: residuals are not compared: %s", oracle.inv.op_id, error_text(error))
        return None


def _why_not(check: Callable[[], None]) -> str:
    """Return the reason why a check fails; empty if it passes."""
    try:
        check()
    except BaseException as error:  # noqa: BLE001 - candidates may raise anything
        return message_of(error) if isinstance(error, CandidateError) else error_text(error)
    return ""


def partners_in_force(
    chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any], kernel: Kernel[Any, Any] | None
) -> tuple[Any, ...]:
    """Return the chain's configurations for the backward of a forward call, or for the forward of a backward call.

    The result is empty if no residuals pass between the two. Nothing is tuned or remembered.
    """
    if kernel is None:
        return ()
    inv = dataclasses.replace(inv, kernel=kernel, override_cfg=None)
    try:
        partner = partner_call(inv)
    except Exception as error:  # noqa: BLE001 - a kernel need not have a gradient for every call
        logger.info("%s: the call of the other direction is not known: %s", inv.op_id, error_text(error))
        return ()
    if partner is None:
        return ()
    found = [consulted.resolution for consulted in chain.consult(partner, kernel)]
    return tuple(resolution.config for resolution in found if resolution is not None)
