# SPDX-License-Identifier: Apache-2.0
"""`layer_norm` for its users: refused arguments, and the choice of the implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from tests.arrays import ones

from ejkernel.modules import LayerNorm, layer_norm
from ejkernel.ops import ArgumentError, Invocation, UnsupportedError

X, VECTOR = ones((4, 16)), ones(16)
KERNEL = LayerNorm()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": [1.0]}, "x must be a floating-point array .* got list"),
        ({"x": jnp.ones(())}, "x must have a last axis that is not empty"),
        (
            {"bias": jnp.ones(3)},
            r"bias must be a vector of the length of x's last axis; got shapes \(3,\)",
        ),
        ({"weight": ones(16, "int32")}, "weight must be a floating-point array .* got dtype int32"),
        ({"weight": None}, "weight must be a floating-point array .* got NoneType"),
        ({"eps": -1.0}, "eps must be a number >= 0, got -1.0"),
        ({"eps": 10**400}, "eps must be a number >= 0, got 1000"),
        ({"implementation": "cudnn"}, "implementation must be one of mosaic_gpu, xla, pallas, or None; got 'cudnn'"),
    ],
)
def test_a_wrong_argument_is_named(changes, words):
    with pytest.raises(ArgumentError, match=words):
        layer_norm(**{"x": X, "weight": VECTOR, "bias": VECTOR} | changes)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((8, 1 << 20), "float32", "rows of 1048576 elements, and 'pallas' keeps 8"),
        ((8, 128), "float16", "x has dtype float16, and 'pallas' takes float32 and bfloat16"),
        ((0, 128), "float32", "a known number of rows, at least 1"),
    ],
)
def test_pallas_gives_the_reason_for_unsupported_calls(shape, dtype, words):
    vector = jax.ShapeDtypeStruct(shape[-1:], dtype)
    args, options = KERNEL.prepare(jax.ShapeDtypeStruct(shape, dtype), vector, vector, implementation="pallas")
    with pytest.raises(UnsupportedError, match=f"layer_norm: .*{words}.*'xla'"):
        KERNEL.heuristic_cfg(Invocation(kernel=KERNEL, args=args, kwargs=options, device="tpu:v5"))


def test_a_program_for_a_tpu_runs_the_kernels_of_both_directions():
    def loss(x):
        return layer_norm(x, VECTOR, VECTOR, implementation=["pallas", "xla"]).sum()

    text = jax.jit(jax.grad(loss)).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2
    with pytest.raises(UnsupportedError, match=r"needs a TPU, and this call is for cpu.*use 'xla'"):
        jax.jit(lambda x: layer_norm(x, VECTOR, VECTOR, implementation="pallas")).lower(X).compile()
