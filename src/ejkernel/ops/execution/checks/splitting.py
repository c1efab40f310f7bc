# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel's sharding rule is right: its calls, split over devices, compute what the whole ones do."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.core.sharding.nodes import factors, has_rule
from ejkernel.ops.core.sharding.rule import Factor, Factors
from ejkernel.ops.core.transformations.nodes import Flat, Forward
from ejkernel.ops.execution.checks.programs import Arrays, all_deviations, alone, cotangents_of, pulled
from ejkernel.ops.execution.checks.report import CheckRow, CheckStatus
from ejkernel.ops.execution.checks.subject import Subject
from ejkernel.ops.utils.error_text import error_text

logger = logging.getLogger(__name__)
_AXIS = "devices"


class _Placing(NamedTuple):
    """How a call's arrays are sharded, so that one of its axes is split.

    Attributes:
        devices: Over how many devices.
        operands: How its arguments are.
        results: How its results are asked for, where no argument has the axis.
    """

    devices: int
    operands: list[PartitionSpec]
    results: list[PartitionSpec] | None

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return Mesh(np.array(jax.devices()[: self.devices]), (_AXIS,))

    def place(self, arrays: Arrays) -> Arrays:
        """Return the arguments so."""
        pairs = zip(arrays, self.operands, strict=True)
        return [jax.device_put(array, NamedSharding(self.mesh, spec)) for array, spec in pairs]

    def asking(self, run: Flat) -> Flat:
        """Return the call with its results so."""
        if self.results is None:
            return run
        wanted = tuple(NamedSharding(self.mesh, spec) for spec in self.results)
        return lambda *arrays: jax.lax.with_sharding_constraint(run(*arrays), wanted)


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
        yield _split_row(subject, config, name, arrays, _placing(subject, config, found, own, name))


def _row(check: str, config: object, status: CheckStatus, reason: str = "") -> CheckRow:
    return CheckRow(check=check, config=config, status=status, reason=reason)


def _placing(subject: Subject, config: object, found: Factors, own: Sequence[Any], name: str) -> _Placing | None:
    """Return how a call is placed to be split along an axis; `None` if its arrays are not the kernel's."""
    # The rule speaks of the kernel's arrays, and only the call's own can be placed.
    if [array.shape for array in own] != [like.shape for like in subject.types]:
        return None
    specs = [
        [PartitionSpec(*[_AXIS if other == name else None for other in names]) for names in arrays]
        for arrays in (found.operands, found.results)
    ]
    lengths, results = _lengths(found.operands, own, name), None
    if not lengths:
        # No argument has the axis, so that only the result can ask for it.
        results = specs[1]
        lengths = _lengths(found.results, jax.eval_shape(subject.executed(config), *own), name)
    count = next((n for n in range(jax.device_count(), 1, -1) if lengths and lengths[0] % n == 0), 1)
    return _Placing(count, specs[0], results)


def _lengths(factors: Sequence[Sequence[Factor]], arrays: Sequence[Any], name: str) -> list[int]:
    return [
        length
        for names, array in zip(factors, arrays, strict=True)
        for length, other in zip(array.shape, names, strict=True)
        if other == name
    ]


def _split_row(subject: Subject, config: object, name: str, arrays: Arrays, placing: _Placing | None) -> CheckRow:
    check = f"split along {name}"
    if placing is None:
        return _row(check, config, CheckStatus.SKIPPED, "prepare changes the arrays' shapes")
    if placing.devices == 1:
        reason = f"none of 2 to {jax.device_count()} devices divides it" if jax.device_count() > 1 else "one device"
        return _row(check, config, CheckStatus.SKIPPED, reason)
    try:
        reason = _difference(subject, config, arrays, placing)
    except Exception as error:  # noqa: BLE001 - the row has the reason
        reason = f"{type(error).__name__}: {error}"
    return _row(check, config, CheckStatus.FAILED if reason else CheckStatus.OK, reason)


def _difference(subject: Subject, config: object, arrays: Arrays, placing: _Placing) -> str:
    """Return how results and gradients of the split call differ from those of the whole one."""
    run, wrt, inv = subject.executed(config), subject.differentiable(), subject.inv
    cotangents = cotangents_of(run, arrays, np.random.default_rng(subject.seed))
    computed = (lambda run: pulled(run, wrt)) if any(wrt) and cotangents else alone
    try:
        whole = jax.jit(computed(run))(arrays, cotangents)
    except Exception as error:  # noqa: BLE001 - a kernel need not have a gradient; another row says it
        logger.debug("%s: split without its gradient: %s", inv.op_id, error_text(error))
        computed = alone
        whole = jax.jit(computed(run))(arrays, cotangents)
    # Automatic axes, where arrays are placed as a user's are, so that XLA's partitioner asks the rule.
    split = jax.jit(computed(placing.asking(run)))(placing.place(arrays), cotangents)
    for what, one in all_deviations(split, whole, platform=inv.platform, precision=inv.precision):
        if one.reason:
            return f"{what}{one.reason.replace('the reference', 'the whole call')}"
    return ""
