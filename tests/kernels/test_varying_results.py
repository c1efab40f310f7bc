# SPDX-License-Identifier: Apache-2.0
"""Inside `shard_map` the results of every implementation vary like its arguments, or gradients are summed wrongly."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.kernels.meshes import mesh_of
from tests.kernels.test_lowering import ROWS, described, params, platforms, unsupported

from ejkernel import compat
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.core.kernel import overrides

pytestmark = pytest.mark.slow


def first_call(row, platform, *, backward):
    """Return dtype and name of the first call that an implementation runs."""
    names = (*row.subject.briefly, *row.subject.calls, *row.subject.odd, *row.subject.spaces)
    for dtype in row.backend.dtypes:
        for name in names:
            if not any(unsupported(row, platform, dtype, name, backward=way) for way in {False, backward}):
                return dtype, name
    pytest.skip("it runs none of the calls")


def has_backward(row):
    """Return whether an implementation computes gradients itself, and no call of another operation does."""
    operation = row.subject.operation
    by_calls = operation.why_no_gradient or overrides(operation, "custom_vjp")
    return not by_calls and row.implementation.has_backward()


CASES = [(row, platforms(row)[0], way) for row in ROWS for way in ((False, True) if has_backward(row) else (False,))]


@pytest.mark.parametrize("varying", ["all", "the first", "none"])
@pytest.mark.parametrize(("row", "platform", "backward"), params(CASES))
def test_results_vary_like_arguments(row, platform, backward, varying):
    found, implementation = [], row.implementation
    call, args, _ = described(row, platform, *first_call(row, platform, backward=backward))
    leaves, tree = jax.tree.flatten(args)
    count = {"all": len(leaves), "the first": 1, "none": 0}[varying]

    def local(shards, rest):
        args = jax.tree.unflatten(tree, [*(x[0] for x in shards), *rest])
        results = out, residuals = implementation.forward(call, *args, params=implementation.heuristic(call))
        if backward:  # a gradient rule gets arrays that vary alike
            args, out, residuals = unify_varying((args, out, residuals))
            own = dataclasses.replace(call, backward=True)
            given = tuple(map(jnp.ones_like, jax.tree.leaves(out)))
            results = implementation.backward(own, residuals, out, given, *args, params=implementation.heuristic(own))
        found.extend(compat.tracing.varying_axes(x) for x in jax.tree.leaves(results))
        return shards

    stacked = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in leaves[:count]]
    run = jax.shard_map(local, mesh=mesh_of("auto"), in_specs=(P("data"), P()), out_specs=P("data"))
    jax.eval_shape(run, stacked, leaves[count:])
    assert set(found) == {frozenset({"data"} if count else ())}
