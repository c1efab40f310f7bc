# SPDX-License-Identifier: Apache-2.0
"""The vector memory of kernels in a program compiled for a TPU, with and without the windows that XLA saves.

XLA keeps arrays in vector memory itself where the limits of the kernels leave room. A kernel reads and writes such an
array in place: it has no windows for it, and the compiler's figure is lower by their two buffers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Var, jaxpr_as_fun, jaxprs_in_params

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
    pairs = [(one, array) for one, array in zip(grid.block_mappings, windows, strict=True) if "S(1)" in array]
    return sum((2 if _moves(one, grid.grid) else 1) * _window(one, array) for one, array in pairs)


def _moves(mapping: Any, grid: tuple[Any, ...]) -> bool:
    """Return whether a window is of another block in another step; if it is not, the compiler has one buffer for it."""
    jaxpr = mapping.index_map_jaxpr.jaxpr
    if len(jaxpr.invars) == len(grid) and all(isinstance(size, int) for size in grid):
        places = np.indices(grid, np.int32).reshape(len(grid), -1)
        found = jax.vmap(jaxpr_as_fun(mapping.index_map_jaxpr))(*places)
        return any(bool((axis != axis[0]).any()) for axis in map(np.asarray, found))
    variable = {var for var, size in zip(jaxpr.invars, grid, strict=False) if size != 1} | {*jaxpr.invars[len(grid) :]}
    for equation in jaxpr.eqns:
        if any(isinstance(var, Var) and var in variable for var in equation.invars):
            variable |= set(equation.outvars)
    return any(isinstance(var, Var) and var in variable for var in jaxpr.outvars)


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


DUMP = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=post-ra --xla_jf_dump_to="
"""The arguments of libtpu with which it writes its programs after the choice of registers; a folder follows."""
_REGION = re.compile(r"^ *\$region(\d+): .*?(?:parent=(\d+))?(?: // (\w+))?$")


def spilled_of(name: str, folder: Path) -> tuple[int, int, int]:
    """Return the registers that a kernel keeps in memory: without its loops, then during a loop its own and the loop's.

    The code of a branch or a loop is a region. Its memory is free after it, so regions that follow each other share it.
    """
    (file,) = (file for file in folder.glob(f"*-{name}-*-post-ra.txt") if "bundle" not in file.name)
    inside: dict[int, list[int]] = {}
    spilled, loops = dict[int, int](), list[int]()
    region = -1
    for line in file.read_text().splitlines():
        if found := _REGION.match(line):
            region = int(found[1])
            inside.setdefault(int(found[2] or -1), []).append(region)
            loops += [region] if found[3] == "loop_body" else []
        elif "tag = 'spilled vreg" in line:
            spilled[region] = spilled.get(region, 0) + 1

    def most(of: int) -> int:
        return spilled.get(of, 0) + max(map(most, inside.get(of, ())), default=0)

    def split(of: int, own: int) -> Iterator[tuple[int, int]]:
        """Yield the registers of each path to a loop, or to the end of a branch."""
        if of in loops[1:]:  # the first loop is that of the grid
            yield own, most(of)
            return
        own += spilled.get(of, 0)
        yield own, 0
        for one in inside.get(of, ()):
            yield from split(one, own)

    paths = list(split(-1, 0))
    return max(own for own, _ in paths), *max((path for path in paths if path[1]), key=sum, default=(0, 0))
