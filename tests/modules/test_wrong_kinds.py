# SPDX-License-Identifier: Apache-2.0
"""Values of another kind than an argument takes, e.g. an array for an option, are errors that name the argument."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import modules
from ejkernel.ops.errors import EjkernelError

X, W, SCALE = jnp.ones((16, 128)), jnp.ones((128, 256)), jnp.ones(128)
QUERY, MATRICES, SIZES = jnp.ones((2, 8, 4, 32)), jnp.ones((2, 128, 64)), jnp.array([8, 8])
QUERIES, TOKENS, TABLE = jnp.ones((4, 4, 8)), jnp.ones((4, 2, 8)), jnp.arange(4).reshape(2, 2)
OFFSETS, LENGTHS, PAGE = jnp.array([0, 2, 4]), jnp.array([5, 2]), jnp.array([1])
PAGES = np.ones((8, 4, 2, 2, 8), np.float32)  # of NumPy: writing donates an array of JAX
CALLS = {
    "flash_attention": (QUERY, QUERY, QUERY),
    "rms_norm": (X, SCALE),
    "layer_norm": (X, SCALE, SCALE),
    "linear_cross_entropy": (X, W, jnp.zeros(16, int)),
    "token_log_probs": (X, W, jnp.zeros(16, int)),
    "grouped_matmul": (X, MATRICES, SIZES),
    "quantize": (X,),
    "quantized_dense": (X, W),
    "quantized_grouped_dense": (X, MATRICES, SIZES),
    "quantized_matmul": (modules.quantize(X), modules.quantize(W, axis=0)),
    "quantize_both": (W,),
    "grouped_matmul_wgrad": (X, X, SIZES),
    "paged_attention": (QUERIES, PAGES, TABLE, OFFSETS, LENGTHS),
    "append_to_pages": (PAGES, TOKENS, TOKENS, TABLE, OFFSETS, LENGTHS),
    "copy_pages": (PAGES, PAGE, PAGE),
    "ragged_paged_attention": (QUERIES, TOKENS, TOKENS, PAGES, LENGTHS, TABLE, OFFSETS, jnp.array([0, 0, 2])),
    "to_zigzag": (QUERY, 2),
    "from_zigzag": (QUERY, 2),
}
OTHERS = [
    np.ones(3),
    jnp.ones((3, 5)),
    jnp.ones((0,)),
    jax.random.key(0),
    object(),
    2.5,
    jax.ShapeDtypeStruct((3,), X.dtype),
]


def fault(name, args, options):
    """Return the error of a call if it is none of ejkernel's."""
    try:
        getattr(modules, name)(*args, **options)
    except EjkernelError:
        return None
    except Exception as error:  # noqa: BLE001 - the fault to find
        return f"{type(error).__name__}: {error}"
    return None  # the value may be right


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_options_of_another_kind_are_errors_of_ejkernel(name):
    options = inspect.signature(getattr(modules, name)).parameters.values()
    found = {
        f"{option.name}={other!r}": text
        for option in options
        for other in OTHERS
        if option.kind is option.KEYWORD_ONLY and (text := fault(name, CALLS[name], {option.name: other}))
    }
    assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_another_kind_are_errors_of_ejkernel(name):
    args = CALLS[name]
    others = [None, "text", {}, *OTHERS, jax.ShapeDtypeStruct(X.shape, X.dtype)]
    found = {
        f"{index}: {other!r}": text
        for index, arg in enumerate(args)
        for other in [*others, jax.eval_shape(lambda arg=arg: arg)]
        if (text := fault(name, (*args[:index], other, *args[index + 1 :]), {}))
    }
    assert found == {}
