# SPDX-License-Identifier: Apache-2.0
"""The row norms' kernels on TPUs, interpreted: rows of several chunks, and blocks of several strips."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device
from tests.kernels.layer_norm_cases import interpret_pallas

from ejkernel.kernels._row_norms import strips
from ejkernel.kernels._row_norms.pallas import Pallas, PallasParams
from ejkernel.kernels.layer_norm.operation import LayerNormCall


def reference(x, weight, bias, residual):
    x = x + residual
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * weight + bias, x


# chunks of 256 columns: several, with a rest of whole and partial rows of registers, or a rest alone
@pytest.mark.parametrize("dim", [1000, 640, 300, 60])
@pytest.mark.parametrize("block_rows", [8, 48])
def test_rows_in_chunks_and_their_gradients_are_right(monkeypatch, dim, block_rows):
    interpret_pallas(monkeypatch)
    monkeypatch.setattr(strips, "CHUNK", 256)
    rng = np.random.default_rng(dim)
    x, residual, *cotangents = (on_device(rng.standard_normal((50, dim)), "float32") for _ in range(4))
    weight, bias = (on_device(rng.standard_normal(dim), "float32") for _ in range(2))
    call = LayerNormCall(rows=50, dim=dim, dtype="float32", eps=1e-6, residual=True, platform="tpu")
    implementation, args, params = Pallas(), (x, weight, bias, residual), PallasParams(block_rows=block_rows)

    def ours(*args):
        out, statistics = implementation.forward(call, *args, params=params)
        return out, implementation.backward(call, statistics, out, tuple(cotangents), *args, params=params)

    def plain(*args):
        out, differentiate = jax.vjp(reference, *args)
        return out, differentiate(tuple(cotangents))

    (out, found), (wanted, gradients) = (jax.jit(run)(*args) for run in (ours, plain))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=3e-5), out, wanted)
    for got, want in zip(found, gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-4)
