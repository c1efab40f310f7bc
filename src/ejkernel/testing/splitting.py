# SPDX-License-Identifier: Apache-2.0
"""Checks a kernel's sharding rule: calls split over devices must give the same results as whole calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.core.kernel import overrides
from ejkernel.ops.core.sharding.nodes import factors
from ejkernel.ops.core.sharding.rule import Factor, Factors
from ejkernel.ops.core.transformations.nodes import Flat, Forward
from ejkernel.testing.numbers import Numbers
from ejkernel.testing.programs import Arrays, Results
from ejkernel.testing.rows import CheckRow, attempted, row
from ejkernel.testing.subject import Subject

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


def split_rows(numbers: Numbers, config: object, whole: Results) -> Iterator[CheckRow]:
    """Yield a row for each axis of the sharding rule that compares the split call and its gradient with the whole one.

    A kernel without a rule has no rows.
    """
    subject, arrays = numbers.subject, numbers.examples[0]
    if not overrides(subject.kernel, "sharding_rule"):
        return
    spec, own = subject.taken_apart(arrays)
    found = attempted(factors, Forward(spec), own)
    if found is None or isinstance(found, Exception):
        reason = found or "the rule does not split this call"
        yield row("split", config, reason, skipped=found is None)
        return
    yield _shard_map_row(numbers, config, whole, found)
    if subject.scope.is_brief:
        return
    # The rule describes the kernel's arrays, but only the arguments of the call can be placed.
    changes = [array.shape for array in own] != [like.shape for like in subject.types]
    for name in sorted(found.splittable):
        placement = None if changes else _placement(subject, config, found, own, name)
        yield _split_row(numbers, config, f"split along {name}", whole, placement)


def _split_row(numbers: Numbers, config: object, check: str, whole: Results, placement: _Placement | None) -> CheckRow:
    if placement is None or placement.devices == 1:
        count = jax.device_count()
        one = f"no number from 2 to {count} divides it" if count > 1 else "one device"
        return row(check, config, one if placement else "prepare changes the arrays' shapes", skipped=True)
    # Use automatic axes and arrays placed like a user's, so that XLA's partitioner uses the rule.
    function = placement.constrain(numbers.subject.executed(config))

    def split() -> Results:
        return numbers.results_of(function, placement.place(numbers.examples[0]))

    return numbers.same_row(check, config, split, whole, "the whole call")


def _shard_map_row(numbers: Numbers, config: object, whole: Results, found: Factors) -> CheckRow:
    """Return a row that runs the call and its gradient inside a `shard_map`: split, if its parts are calls as well."""
    subject, arrays, run = numbers.subject, numbers.examples[0], numbers.subject.executed(config)
    mesh = Mesh(np.array(jax.devices()[:2]), (_AXIS,))
    name, inside = None, [PartitionSpec()] * len(arrays)
    if len(found.operands) == len(arrays) and not overrides(subject.kernel, "part_arguments"):
        # Other axes may need more than their parts, as heads that share a key head.
        first = found.operands[0][0] if found.operands and arrays[0].ndim else None
        shared = first in found.splittable and all(first in names for names in found.results)
        name = first if shared and arrays[0].shape[0] % mesh.size == 0 else None
        inside = _specs(found.operands, name)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=tuple(inside), out_specs=tuple(_specs(found.results, name)))
    split = functools.partial(numbers.results_of, mapped, arrays)
    return numbers.same_row("shard_map", config, split, whole, "the call itself")


def _specs(factors: Sequence[Sequence[Factor]], name: str | None) -> list[PartitionSpec]:
    return [PartitionSpec(*[_AXIS if name and other == name else None for other in names]) for names in factors]


def _placement(subject: Subject, config: object, found: Factors, own: Sequence[Any], name: str) -> _Placement:
    """Return the shardings that split a call along an axis."""
    lengths, results = _lengths(found.operands, own, name), None
    if not lengths:
        # No argument has the axis, so shard the results.
        results = _specs(found.results, name)
        lengths = _lengths(found.results, jax.eval_shape(subject.executed(config), *own), name)
    count = next((n for n in range(jax.device_count(), 1, -1) if lengths and lengths[0] % n == 0), 1)
    return _Placement(count, _specs(found.operands, name), results)


def _lengths(factors: Sequence[Sequence[Factor]], arrays: Sequence[Any], name: str) -> list[int]:
    return [
        length
        for names, array in zip(factors, arrays, strict=True)
        for length, other in zip(array.shape, names, strict=True)
        if other == name
    ]
