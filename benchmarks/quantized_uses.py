# SPDX-License-Identifier: Apache-2.0
"""Calls of 8-bit products in published models, for `benchmarks/shipped.py`.

Training is a step of `quantized_grouped_dense(block=128)` into the experts and out of them, or of `quantized_dense`:
the products forward and backward, the gradient of the matrices, and what quantises their operands. Decoding is
`quantized_matmul` with the weights of a dense layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.experts import MODELS, TRAINING, Experts, running
from ejkernel.kernels.quantized_matmul.quantizing.plan import QuantizeParams
from ejkernel.modules import Quantized, quantized_dense, quantized_grouped_dense, quantized_matmul
from ejkernel.ops import Invocation
from ejkernel.ops.execution.discovery import discover_for

OPERATIONS = ("quantize", "quantized_grouped_matmul", "quantized_grouped_wgrad", "quantized_matmul")
DENSE = {"Llama-3 8B": (4096, 14336), "Llama-3 70B": (8192, 28672)}  # widths of the model and of its hidden layer
FEW_ROWS = 64  # sequences of a batch that decodes
_Calls = list[Invocation[Any, Any]]


def training_of(experts: Experts) -> _Calls:
    """Return the calls of a step with both products of a layer of experts."""
    rows, matrix = TRAINING * experts.chosen, (experts.width, experts.hidden)

    def loss(x: jax.Array, into: jax.Array, out: jax.Array, sizes: jax.Array) -> jax.Array:
        hidden = quantized_grouped_dense(x, into, sizes, block=128)
        return quantized_grouped_dense(hidden, out, sizes, block=128).astype(jnp.float32).sum()

    shapes = (rows, experts.width), (experts.count, *matrix), (experts.count, *matrix[::-1])
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return calls_in(jax.grad(loss, (0, 1, 2)), *arrays, jax.ShapeDtypeStruct((experts.count,), jnp.int32))


def dense_training_of(width: int, hidden: int, *, block: Any) -> _Calls:
    """Return the calls of a step with both products of a dense layer."""

    def loss(x: jax.Array, into: jax.Array, out: jax.Array) -> jax.Array:
        return quantized_dense(quantized_dense(x, into, block=block), out, block=block).astype(jnp.float32).sum()

    shapes = (TRAINING, width), (width, hidden), (hidden, width)
    return calls_in(jax.grad(loss, (0, 1, 2)), *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))


def decoding_of(width: int, hidden: int, *, dtype: str) -> _Calls:
    """Return the two products of a dense layer with few rows of 8 bits, or of bfloat16 by int8."""
    found = []
    for k, n in ((width, hidden), (hidden, width)):
        wide = dtype == "bfloat16"
        x = jax.ShapeDtypeStruct((FEW_ROWS, k), dtype) if wide else in_8_bits((FEW_ROWS, k), dtype)
        w = in_8_bits((n, k), "int8" if wide else dtype)
        found += calls_in(functools.partial(quantized_matmul, transpose_w=True), x, w)
    return found


def in_8_bits(shape: tuple[int, int], dtype: str, block: tuple[int, int | None] = (1, None)) -> Quantized:
    """Return the type of a matrix with scales of such blocks, by default of rows."""
    counts = (-(-size // (part or size)) for size, part in zip(shape, block, strict=True))
    values: Any = jax.ShapeDtypeStruct(shape, dtype)
    scale: Any = jax.ShapeDtypeStruct(tuple(counts), jnp.float32)
    return Quantized(values, scale, block)


def calls_in(program: Any, *arrays: Any) -> _Calls:
    """Return the different calls of a program."""
    found = discover_for(jax.jit(program), arrays, {}, platform="gpu")
    return list({inv.call_key: inv for inv in found}.values())


# The most valuable first: the device may be gone before the list ends.
USES: dict[str, Callable[[], _Calls]] = {
    **{
        f"{name}, decoding in {dtype}": functools.partial(decoding_of, *own, dtype=dtype)
        for name, own in DENSE.items()
        for dtype in ("float8_e4m3fn", "int8", "bfloat16")
    },
    **{f"{name}, training": functools.partial(training_of, experts) for name, experts in MODELS.items()},
    **{f"{name}, training": functools.partial(dense_training_of, *own, block=128) for name, own in DENSE.items()},
    **{
        f"{name}, training by rows": functools.partial(dense_training_of, *own, block=None)
        for name, own in DENSE.items()
    },
}


def candidates(inv: Invocation[Any, Any]) -> list[Any]:
    """Return candidates for a call: our kernel with variants of the heuristic's parameters."""
    kernel: Any = inv.kernel
    call, own = kernel.call_of(inv), kernel.implementations["mosaic_gpu"]
    if inv.op_id == "quantize":
        found = [QuantizeParams(tiles=tiles, blocks=blocks) for tiles, blocks in ((2, 2), (1, 3), (2, 1))]
    elif inv.op_id == "quantized_matmul" and call.rows <= FEW_ROWS:
        found = [own.heuristic(call), *_few_rows(own, call)]
    else:
        found = list(running(own, call, _changes(inv.op_id)))
    return [kernel.config_type(implementation="mosaic_gpu", fwd=params) for params in dict.fromkeys(found)]


def _changes(operation: str) -> Iterator[dict[str, Any]]:
    yield {}
    yield from ({"panel": panel} for panel in (4, 8, 32))
    yield {"block_n": 192, "stages": 4, "out_slots": 3}
    if operation == "quantized_grouped_wgrad":
        yield {"largest_first": True, "snake": True}
        yield {"largest_first": False, "snake": False}


def _few_rows(own: Any, call: Any) -> list[Any]:
    """Return parameters for few rows, of each width those with the most stages."""
    deepest = {params.block_n: params for params in own.space(call) if params.block_m == FEW_ROWS}
    return [params for width, params in deepest.items() if width >= 128]
