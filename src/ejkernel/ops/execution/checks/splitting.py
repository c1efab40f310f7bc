# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel's sharding rule is right: its calls, split over devices, compute what the whole ones do."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.autotuner.measure.correctness import deviations
from ejkernel.ops.core.sharding.nodes import factors, has_rule
from ejkernel.ops.core.sharding.rule import Factors
from ejkernel.ops.core.transformations.nodes import Forward
from ejkernel.ops.execution.checks.programs import Arrays, alone, cotangents_of, pulled
from ejkernel.ops.execution.checks.report import CheckRow, CheckStatus
from ejkernel.ops.execution.checks.subject import Subject
from ejkernel.ops.utils.error_text import error_text

logger = logging.getLogger(__name__)
_AXIS = "devices"


def split_rows(subject: Subject, config: object) -> Iterator[CheckRow]:
    """Yield whether the call and its gradient, split along each axis that the rule names, compute the same.

    Nothing, if the kernel has no rule.
    """
    if not has_rule(subject.kernel):
        return
    try:
        arrays = subject.elements(1)[0]
        spec, own = subject.taken_apart(arrays)
        found = factors(Forward(spec), own)
    except Exception as error:  # noqa: BLE001 - the author's rule; the reason is the row's
        yield _row("split", config, CheckStatus.FAILED, f"{type(error).__name__}: {error}")
        return
    if found is None:
        yield _row("split", config, CheckStatus.SKIPPED, "the rule splits no such call")
        return
    for name in sorted(found.splittable):
        yield _split_row(subject, config, name, arrays, _specs(found, own, arrays, name))


def _row(check: str, config: object, status: CheckStatus, reason: str = "") -> CheckRow:
    return CheckRow(check=check, config=config, status=status, reason=reason)


def _specs(
    found: Factors, own: Sequence[Any], arrays: Sequence[Any], name: str
) -> tuple[int, list[PartitionSpec]] | None:
    """Return over how many devices an axis may be split, and how the call's arrays are sharded then."""
    if [array.shape for array in own] != [array.shape for array in arrays]:
        return None
    lengths = [
        array.shape[axis]
        for names, array in zip(found.operands, own, strict=True)
        for axis, other in enumerate(names)
        if other == name
    ]
    count = next((n for n in range(jax.device_count(), 1, -1) if lengths and lengths[0] % n == 0), 1)
    specs = [PartitionSpec(*[_AXIS if other == name else None for other in names]) for names in found.operands]
    return count, specs


def _split_row(
    subject: Subject,
    config: object,
    name: str,
    arrays: Arrays,
    found: tuple[int, list[PartitionSpec]] | None,
) -> CheckRow:
    check = f"split along {name}"
    if found is None:
        return _row(check, config, CheckStatus.SKIPPED, "prepare changes the arrays' shapes")
    count, specs = found
    if count == 1:
        reason = f"none of 2 to {jax.device_count()} devices divides it" if jax.device_count() > 1 else "one device"
        return _row(check, config, CheckStatus.SKIPPED, reason)
    mesh = Mesh(np.array(jax.devices()[:count]), (_AXIS,))
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    try:
        reason = _difference(subject, config, arrays, placed)
    except Exception as error:  # noqa: BLE001 - the reason is the row's
        reason = f"{type(error).__name__}: {error}"
    return _row(check, config, CheckStatus.FAILED if reason else CheckStatus.OK, reason)


def _difference(subject: Subject, config: object, arrays: Arrays, placed: Arrays) -> str:
    """Return how results and gradients of the split call differ from those of the whole one."""
    run, wrt, inv = subject.executed(config), subject.differentiable(), subject.inv
    cotangents = cotangents_of(run, arrays, np.random.default_rng(subject.seed))
    program = jax.jit(pulled(run, wrt) if any(wrt) and cotangents else alone(run))
    try:
        whole = program(arrays, cotangents)
    except Exception as error:  # noqa: BLE001 - a kernel need not have a gradient; another row says it
        logger.debug("%s: split without its gradient: %s", inv.op_id, error_text(error))
        program = jax.jit(alone(run))
        whole = program(arrays, cotangents)
    split = program(placed, cotangents)
    pairs = [("", split.outs, whole.outs), ("gradient: ", split.gradients or (), whole.gradients or ())]
    for what, got, want in pairs:
        apart = deviations(got, want, platform=inv.platform, precision=inv.precision)
        reason = next((d.reason.replace("the reference", "the whole call") for d in apart if d.reason), "")
        if reason:
            return f"{what}{reason}"
    return ""
