# SPDX-License-Identifier: Apache-2.0
"""Launches of Pallas kernels for TPUs: their vector memory, and mesh axes that they do not declare."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

from ejkernel.compat.tracing import varying_axes


class KernelMemory(NamedTuple):
    """The memory of a kernel's launch.

    Attributes:
        limit: The most bytes of vector memory that the kernel may take; `None` for the compiler's default.
        in_hbm: Whether operands and results are in HBM. Otherwise XLA may keep short ones in vector memory; the kernel
            then reads and writes them in place, without windows.
    """

    limit: int | None
    in_hbm: bool


def launched(run: Callable[..., Any], args: tuple[Any, ...], memory: KernelMemory) -> Any:
    """Return the results of `run(*args)`, with its kernels launched in this memory."""
    traced, shape = jax.make_jaxpr(run, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shape), _evaluated(traced, jax.tree.leaves(args), memory))


def _evaluated(traced: ClosedJaxpr, leaves: Sequence[Any], memory: KernelMemory) -> Any:
    equations = [own for each in traced.eqns for own in _placed(each, memory)]
    # inside of `jit`, the equations are not checked again after `unchecked`
    program = jax.jit(jaxpr_as_fun(ClosedJaxpr(traced.jaxpr.replace(eqns=equations), traced.consts)))
    if not memory.in_hbm:
        return program(*leaves)
    # JAX cannot map arrays with the type of HBM by `vmap`, so it maps the kernel before the arrays have this type.
    launch: Any = custom_vmap(program)

    def batched(size: int, is_mapped: Sequence[bool], *leaves: Any) -> Any:
        axes = tuple(0 if mapped else None for mapped in is_mapped)
        found = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(traced), in_axes=axes, axis_size=size))(*leaves)
        return _evaluated(found, leaves, memory), [True] * len(found.out_avals)

    launch.def_vmap(batched)
    return launch(*leaves)


def _placed(equation: Any, memory: KernelMemory) -> list[Any]:
    """Return the equations that launch a kernel in this memory; other equations stay."""
    if equation.primitive.name != "pallas_call":
        return [equation]
    params, before = dict(equation.params), []
    if memory.limit is not None:
        params["compiler_params"] = dataclasses.replace(params["compiler_params"], vmem_limit_bytes=memory.limit)
    operands = list(equation.invars)
    if memory.in_hbm and not params["interpret"]:
        space, grid = _hbm(), params["grid_mapping"]
        params["out_avals"] = tuple(aval.update(memory_space=space) for aval in params["out_avals"])
        for index in range(grid.num_dynamic_grid_bounds + grid.num_index_operands, len(operands)):
            (own,) = jax.make_jaxpr(_in_hbm().bind)(operands[index].aval).eqns
            before.append(own.replace(invars=[operands[index]]))
            operands[index] = own.outvars[0]
    return [*before, equation.replace(params=params, invars=operands)]


@functools.cache
def _in_hbm() -> Any:
    """Return the identity with a result of the type of an array in HBM."""
    from jax.interpreters import mlir

    same: Any = Primitive("in_hbm")
    same.def_abstract_eval(lambda x: x.update(memory_space=_hbm()))
    mlir.register_lowering(same, lambda context, x: [x])
    return same


def _hbm() -> Any:
    from jax.experimental.pallas import tpu

    return tpu.HBM


def unchecked(compute: Callable[[], Any], like: Any) -> Any:
    """Run a kernel that does not declare the mesh axes of its results; they vary over the axes of `like`.

    64-bit mode is off during the call, because the kernels use 32-bit indices.
    """
    from jax._src import config

    axes = tuple(sorted(varying_axes(like)))
    # Inside `shard_map` also where no argument varies: JAX wants the axes of every result declared.
    with jax.enable_x64(False), config._check_vma(False):
        out = compute()
    return jax.lax.pcast(out, axes, to="varying") if axes else out
