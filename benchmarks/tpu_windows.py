# SPDX-License-Identifier: Apache-2.0
"""The vector memory of kernels in a program compiled for a TPU, with and without the windows that XLA saves.

XLA keeps arrays in vector memory itself where the limits of the kernels leave room. A kernel reads and writes such an
array in place: it has no windows for it, and the compiler's figure is lower by their two buffers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from ejkernel import compat
from ejkernel.ops.autotuner.compile.targets import Target

_CALL = re.compile(r'(%[\w.\-]+) = (.*?) custom-call\((.*?)\), custom_call_target="tpu_custom_call"')
_DEFINED = re.compile(r"^\s*(?:ROOT )?(%[\w.\-]+) = (\w+\[[\d,]*\]\{[^}]*\})", re.MULTILINE)
_TYPE = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_TILE = re.compile(r":T\((\d+),(\d+)\)")


class KernelMemory(NamedTuple):
    """The vector memory of a kernel.

    Attributes:
        name: The name of the kernel in its program.
        used: The compiler's figure, in bytes.
        kept: The bytes of windows that it does not have, because XLA keeps their arrays in vector memory.
    """

    name: str
    used: int
    kept: int


def alone(traced: jax.stages.Traced, target: Target) -> jax.stages.Traced:
    """Return a program with nothing but the kernel of a traced one: it compiles faster."""
    (kernel,) = _kernels(traced.jaxpr.jaxpr)
    args = (target.placed(jax.ShapeDtypeStruct(like.aval.shape, like.aval.dtype)) for like in kernel.invars)
    return jax.jit(lambda *args: kernel.primitive.bind(*args, **kernel.params)).trace(*args)


def of_attention(implementation: Any, call: Any, operands: Any, params: Any) -> list[KernelMemory]:
    """Compile a call of attention, and return the vector memory of its kernels by name.

    Args:
        implementation: The implementation.
        call: The call.
        operands: The types of its arrays, with the sharding of a TPU.
        params: The parameters.
    """
    rules, query = call.rules, operands.query
    if not call.backward:
        return memory_of(jax.jit(lambda o: implementation.attend(o, rules, params)).trace(operands))

    def like(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=query.sharding)

    batch, length, heads, _ = query.shape
    out, lse = like(batch, length, heads, call.value[3], dtype=query.dtype), like(batch, heads, length, dtype="float32")
    run = jax.jit(lambda o, out, lse: implementation.differentiate(o, (out, lse), out, rules, params))
    return memory_of(run.trace(operands, out, lse))


def memory_of(traced: jax.stages.Traced) -> list[KernelMemory]:
    """Compile a program, and return the vector memory of its kernels by name."""
    text = str(traced.lower().compile().as_text())
    mappings = {one.params["name"]: one.params["grid_mapping"] for one in _kernels(traced.jaxpr.jaxpr)}
    types = dict(_DEFINED.findall(text))
    calls = [(name[1:], [*_types(operands, types), *_TYPE.findall(out)]) for name, out, operands in _CALL.findall(text)]
    used = compat.executables.vector_memory(text)
    return sorted(
        KernelMemory(name, size, _kept(name, each, mappings)) for (name, each), size in zip(calls, used, strict=True)
    )


def _kernels(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _kernels(inner)


def _types(operands: str, types: Mapping[str, str]) -> list[str]:
    return [types.get(name, "") for name in re.findall(r"%[\w.\-]+", operands)]


def _kept(name: str, types: list[str], mappings: Mapping[str, Any]) -> int:
    """Return the bytes of the windows of arrays in vector memory."""
    (grid,) = (grid for kernel, grid in mappings.items() if name.split(".")[0] == kernel)
    windows = types[grid.num_index_operands + grid.num_dynamic_grid_bounds :]
    pairs = zip(grid.block_mappings, windows, strict=True)
    buffers = 1 if set(grid.grid) == {1} else 2
    return sum(buffers * _window(mapping, array) for mapping, array in pairs if "S(1)" in array)


def _window(mapping: Any, array: str) -> int:
    """Return the bytes of one buffer of a window; its last two dimensions are padded to tiles."""
    block = mapping.transformed_block_aval
    tile = _TILE.search(array)
    assert tile is not None, array
    *rest, rows, columns = block.shape
    rows, columns = (
        -(-size // int(unit)) * int(unit) for size, unit in zip((rows, columns), tile.groups(), strict=True)
    )
    size: int = math.prod(rest) * rows * columns * block.dtype.itemsize
    return size
