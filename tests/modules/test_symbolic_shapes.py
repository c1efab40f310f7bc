# SPDX-License-Identifier: Apache-2.0
"""Modules exported with symbolic dimensions: at every size, the program agrees with the direct call."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import (
    flash_attention,
    grouped_matmul,
    quantize,
    quantized_dense,
    quantized_grouped_dense,
    rms_norm,
)
from ejkernel.ops import ArgumentError

pytestmark = pytest.mark.slow

SIZES = (2, 5)
_rng = np.random.default_rng(0)
attend = functools.partial(flash_attention, causal=True)


def norm_gradients(x, weight):
    return jax.grad(lambda x, weight: (rms_norm(x, weight) ** 2).sum(), (0, 1))(x, weight)


def product_gradients(lhs, rhs):
    sizes = jnp.array([1, 0, 3])
    return jax.grad(lambda lhs, rhs: (grouped_matmul(lhs, rhs, sizes) ** 2).sum(), (0, 1))(lhs, rhs)


def attention_gradients(*arrays, **options):
    return jax.grad(lambda *arrays: (attend(*arrays, **options) ** 2).sum(), (0, 1, 2))(*arrays)


def dense_gradients(x, w, **options):
    return jax.grad(lambda x, w: (quantized_dense(x, w, **options) ** 2).sum(), (0, 1))(x, w)


NORMS = {
    "batch": (rms_norm, "b, 8", "8"),
    "batch and width": (rms_norm, "b, 4*b", "4*b"),
    "vmap": (jax.vmap(rms_norm, (0, None)), "b, 4, 8", "8"),
    "symbolic rows under vmap": (jax.vmap(rms_norm, (0, None)), "3, b, 8", "8"),
    "gradient": (norm_gradients, "b, 8", "8"),
    "gradient under vmap": (jax.vmap(norm_gradients, (0, None)), "b, 4, 8", "8"),
}
ATTENTIONS = {
    "batch": (attend, "b, 16, 2, 8"),
    "length": (attend, "2, b, 2, 8"),
    "vmap": (jax.vmap(attend), "b, 2, 16, 2, 8"),
    "length under vmap": (jax.vmap(attend), "3, 2, b, 2, 8"),
    "gradient": (attention_gradients, "b, 16, 2, 8"),
    "gradient over length": (attention_gradients, "2, b, 2, 8"),
    "gradient over head_dim": (functools.partial(attention_gradients, softmax_scale=0.3), "2, 8, 2, b"),
}


def check(function, *shapes):
    scope = jax.export.SymbolicScope()
    symbolic = [jax.export.symbolic_shape(shape, scope=scope) for shape in shapes]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in symbolic]
    exported = jax.export.export(jax.jit(function))(*types)
    program = jax.export.deserialize(exported.serialize())
    for size in SIZES:
        sizes = [[eval(part, {"b": size}) for part in shape.split(",")] for shape in shapes]
        arrays = [_rng.standard_normal(shape, np.float32) for shape in sizes]
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5),
            program.call(*arrays),
            function(*arrays),
        )


@pytest.mark.parametrize(("function", "x", "weight"), NORMS.values(), ids=NORMS.keys())
def test_an_exported_rms_norm_agrees_with_the_call(function, x, weight):
    check(function, x, weight)


@pytest.mark.parametrize(("function", "shape"), ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_an_exported_flash_attention_agrees_with_the_call(function, shape):
    check(function, shape, shape, shape)


@pytest.mark.parametrize("shape", ["2, b, 2, 64", "2, 8, b, 64", "2, 8, 2, b"], ids=["length", "heads", "head_dim"])
@pytest.mark.parametrize("function", [attend, attention_gradients])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_flash_attention_is_exported_for_a_gpu(function, shape, dtype):
    """Our kernels refuse symbolic sizes before their rules compare them."""
    array = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), dtype)
    exported = jax.export.export(jax.jit(functools.partial(function, softmax_scale=0.3)), platforms=["cuda"])
    assert exported(array, array, array).platforms == ("cuda",)


def test_a_symbolic_head_dim_asks_for_the_scale():
    array = jax.ShapeDtypeStruct(jax.export.symbolic_shape("2, 8, 2, d"), jnp.float32)
    with pytest.raises(ArgumentError, match="softmax_scale must be given where head_dim is symbolic, got None and d"):
        jax.eval_shape(attend, array, array, array)


@pytest.mark.parametrize("shapes", [("b, 8", "3, 8, 4"), ("16, b", "3, b, 2*b")], ids=["rows", "columns"])
def test_an_exported_gradient_of_a_grouped_product_agrees_with_the_call(shapes):
    check(product_gradients, *shapes)


@pytest.mark.parametrize("axis", [0, 1, None])
def test_an_exported_quantisation_agrees_with_the_call(axis):
    check(lambda x: quantize(x, axis=axis).dequantize(), "b, 3*b")


@pytest.mark.parametrize("block", [None, 128])
def test_an_exported_gradient_of_a_layer_in_8_bits_agrees_with_the_call(block):
    check(functools.partial(dense_gradients, block=block), "b, 16", "16, 4")


def test_columns_in_groups_of_unknown_sizes_ask_for_a_program_for_each():
    types = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32) for shape in ("b, 8", "2, 8, 4")]
    layer = lambda lhs, rhs: quantized_grouped_dense(lhs, rhs, jnp.asarray([1, 1]), block=128).sum()  # noqa: E731
    with pytest.raises(ArgumentError, match=r"known sizes, .* got float32\[b, 8\]; export a program for each size"):
        jax.eval_shape(jax.grad(layer), *types)
