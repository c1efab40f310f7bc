# SPDX-License-Identifier: Apache-2.0
"""Values of another kind than an argument takes, e.g. an array for an option, are errors that name the argument."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device, ones

from ejkernel import modules
from ejkernel.ops.errors import EjkernelError

X, W, SCALE = ones((16, 128)), ones((128, 256)), ones(128)
X8 = modules.Quantized(ones((16, 128), jnp.float8_e4m3fn), ones((16, 1)), (1, None))
W8 = modules.Quantized(ones((128, 256), jnp.float8_e4m3fn), ones((1, 256)), (None, 1))
QUERY, MATRICES, SIZES = ones((2, 8, 4, 32)), ones((2, 128, 64)), on_device([8, 8], "int32")
QUERIES, TOKENS, TABLE = ones((4, 4, 8)), ones((4, 2, 8)), on_device([[0, 1], [2, 3]], "int32")
OFFSETS, LENGTHS, PAGE = on_device([0, 2, 4], "int32"), on_device([5, 2], "int32"), on_device([1], "int32")
PAGES = np.ones((8, 4, 2, 2, 8), np.float32)  # of NumPy: writing donates an array of JAX
CALLS = {
    "flash_attention": (QUERY, QUERY, QUERY),
    "rms_norm": (X, SCALE),
    "layer_norm": (X, SCALE, SCALE),
    "linear_cross_entropy": (X, W, on_device([0] * 16, "int32")),
    "token_log_probs": (X, W, jnp.array([0] * 16)),
    "grouped_matmul": (X, MATRICES, SIZES),
    "quantize": (X,),
    "quantized_dense": (X, W),
    "quantized_grouped_dense": (X, MATRICES, SIZES),
    "quantized_matmul": (X8, W8),
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
    ones((3, 5)),
    ones(0),
    jax.random.key(0),
    object(),
    2.5,
    jax.ShapeDtypeStruct((3,), X.dtype),
    np.array([None, "text"]),
    np.ma.masked_array(np.ones(3, np.float32), mask=True),
    np.ones(3, np.longdouble),
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
