# SPDX-License-Identifier: Apache-2.0
"""Checks a kernel's sharding rule: calls split over devices must give the same results as whole calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.core.kernel import overrides
from ejkernel.ops.core.sharding.nodes import factors
from ejkernel.ops.core.sharding.rule import Factor, Factors
from ejkernel.ops.core.transformations.nodes import Flat, Forward
from ejkernel.ops.execution.checks.programs import Arrays, all_deviations, alone, cotangents_of, pulled
from ejkernel.ops.execution.checks.report import CheckRow, CheckStatus
from ejkernel.ops.execution.checks.subject import Subject
from ejkernel.ops.utils.error_text import error_text

logger = logging.getLogger(__name__)
_AXIS = "devices"


class _Placement(NamedTuple):
    """Shardings of a call's arrays that split one of its axes.

    Attributes:
        devices: Number of devices.
        operands: Partition specs of the arguments.
        results: Partition specs of the results, if no argument has the axis.
    """

    devices: int
    operands: list[PartitionSpec]
    results: list[PartitionSpec] | None

    @property
    def mesh(self) -> Mesh:
        """Mesh of the devices."""
        return Mesh(np.array(jax.devices()[: self.devices]), (_AXIS,))

    def place(self, arrays: Arrays) -> Arrays:
        """Return the arguments with their shardings."""
        pairs = zip(arrays, self.operands, strict=True)
        return [jax.device_put(array, NamedSharding(self.mesh, spec)) for array, spec in pairs]

    def constrain(self, run: Flat) -> Flat:
        """Return the call with sharding constraints on its results."""
        if self.results is None:
            return run
        wanted = tuple(NamedSharding(self.mesh, spec) for spec in self.results)
        return lambda *arrays: jax.lax.with_sharding_constraint(run(*arrays), wanted)


def split_rows(subject: Subject, config: object) -> Iterator[CheckRow]:
    """Yield a row for each axis of the sharding rule that compares the split call and its gradient with the whole one.

    A kernel without a rule has no rows.
    """
    if not overrides(subject.kernel, "sharding_rule"):
        return
    try:
        arrays = subject.elements(1)[0]
        spec, own = subject.taken_apart(arrays)
        found = factors(Forward(spec), own)
    except Exception as error:  # noqa: BLE001 - the author's rule; the row has the reason
        yield _row("split", config, CheckStatus.FAILED, f"{type(error).__name__}: {error}")
        return
    if found is None:
        yield _row("split", config, CheckStatus.SKIPPED, "the rule does not split this call")
        return
    for name in sorted(found.splittable):
        yield _split_row(subject, config, name, arrays, _placement(subject, config, found, own, name))


def _row(check: str, config: object, status: CheckStatus, reason: str = "") -> CheckRow:
    return CheckRow(check=check, config=config, status=status, reason=reason)


def _placement(subject: Subject, config: object, found: Factors, own: Sequence[Any], name: str) -> _Placement | None:
    """Return the shardings that split a call along an axis; `None` if `prepare` changes its arrays' shapes."""
    # The rule describes the kernel's arrays, but only the arguments of the call can be placed.
    if [array.shape for array in own] != [like.shape for like in subject.types]:
        return None
    specs = [
        [PartitionSpec(*[_AXIS if other == name else None for other in names]) for names in arrays]
        for arrays in (found.operands, found.results)
    ]
    lengths, results = _lengths(found.operands, own, name), None
    if not lengths:
        # No argument has the axis, so shard the results.
        results = specs[1]
        lengths = _lengths(found.results, jax.eval_shape(subject.executed(config), *own), name)
    count = next((n for n in range(jax.device_count(), 1, -1) if lengths and lengths[0] % n == 0), 1)
    return _Placement(count, specs[0], results)


def _lengths(factors: Sequence[Sequence[Factor]], arrays: Sequence[Any], name: str) -> list[int]:
    return [
        length
        for names, array in zip(factors, arrays, strict=True)
        for length, other in zip(array.shape, names, strict=True)
        if other == name
    ]


def _split_row(subject: Subject, config: object, name: str, arrays: Arrays, placement: _Placement | None) -> CheckRow:
    check = f"split along {name}"
    if placement is None:
        return _row(check, config, CheckStatus.SKIPPED, "prepare changes the arrays' shapes")
    if placement.devices == 1:
        reason = f"no number from 2 to {jax.device_count()} divides it" if jax.device_count() > 1 else "one device"
        return _row(check, config, CheckStatus.SKIPPED, reason)
    try:
        reason = _difference(subject, config, arrays, placement)
    except Exception as error:  # noqa: BLE001 - the row has the reason
        reason = f"{type(error).__name__}: {error}"
    return _row(check, config, CheckStatus.FAILED if reason else CheckStatus.OK, reason)


def _difference(subject: Subject, config: object, arrays: Arrays, placement: _Placement) -> str:
    """Return how results and gradients of the split call differ from those of the whole call; empty if they agree."""
    run, wrt, inv = subject.executed(config), subject.differentiable(), subject.inv
    cotangents = cotangents_of(run, arrays, np.random.default_rng(subject.seed))
    computed = (lambda run: pulled(run, wrt)) if any(wrt) and cotangents else alone
    try:
        whole = jax.jit(computed(run))(arrays, cotangents)
    except Exception as error:  # noqa: BLE001 - a kernel need not have a gradient; another row reports it
        logger.debug("%s: split without its gradient: %s", inv.op_id, error_text(error))
        computed = alone
        whole = jax.jit(computed(run))(arrays, cotangents)
    # Use automatic axes and arrays placed like a user's, so that XLA's partitioner uses the rule.
    split = jax.jit(computed(placement.constrain(run)))(placement.place(arrays), cotangents)
    for what, one in all_deviations(split, whole, platform=inv.platform, precision=inv.precision):
        if one.reason:
            return f"{what}{one.reason.replace('the reference', 'the whole call')}"
    return ""
