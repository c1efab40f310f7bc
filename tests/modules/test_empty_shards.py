# SPDX-License-Identifier: Apache-2.0
"""Calls without rows or tokens inside `shard_map`: their results vary over the mesh axes like those of other calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.arrays import ones, zeros
from tests.kernels.meshes import mesh_of

from ejkernel import compat
from ejkernel.kernels.linear_cross_entropy.operation import linear_cross_entropy
from ejkernel.modules import (
    append_to_pages,
    grouped_matmul,
    grouped_matmul_wgrad,
    quantize_both,
    quantized_grouped_dense,
)

SIZES = zeros(3, "int32")
CACHE = ones((4, 2, 1, 2, 8))
CALLS = {
    "rows": (lambda x: grouped_matmul(x, jnp.ones((3, 16, 8)), SIZES), (0, 16)),
    "activation": (lambda x: grouped_matmul(x, jnp.ones((3, 16, 8)), SIZES, activation="silu"), (0, 16)),
    "matrices": (lambda x: grouped_matmul_wgrad(x, jnp.ones((0, 8)), SIZES), (0, 16)),
    "columns": (lambda x: quantize_both(x, SIZES)[1].values, (0, 16)),
    "statistics": (lambda x: linear_cross_entropy(x, jnp.ones((16, 8)), jnp.zeros(0, jnp.int32))[0], (0, 16)),
    "cache": (lambda k: append_to_pages(CACHE, k, k, SIZES[:, None], jnp.zeros(4, jnp.int32), SIZES), (0, 1, 8)),
}


def in_shards(function, array):
    mesh = mesh_of("auto")
    return jax.eval_shape(jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data")), array)


@pytest.mark.parametrize("name", CALLS)
def test_the_result_of_an_empty_call_varies_like_its_arguments(name):
    function, shape = CALLS[name]
    found = []

    def local(x):
        found.append(compat.tracing.varying_axes(function(x[0])))
        return x

    in_shards(local, jnp.ones((2, *shape)))
    assert found[0] == {"data"}


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 128])
def test_layers_of_empty_shards_have_gradients(block):
    def local(x):
        def loss(x, rhs):
            return quantized_grouped_dense(x, rhs, SIZES, block=block).sum()

        return jax.grad(loss, (0, 1))(x[0], jnp.ones((3, 16, 8)))[0][None]

    assert in_shards(local, jnp.ones((2, 0, 16))).shape == (2, 0, 16)
