# SPDX-License-Identifier: Apache-2.0
"""The shards of a lowered program's calls, found by sharding propagation without compiling it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src.lib import mlir
from jax._src.lib.mlir import dialects
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.compat.partitioning import AskedToSplit, LogicalMesh, asked_of, primes
from ejkernel.compat.processes import Span
from ejkernel.compat.tracing import uses_of

_mlir: Any = mlir
_ir: Any = _mlir.ir
_dialects: Any = dialects
_sdy: Any = _dialects.sdy
_PIPELINE = "builtin.module(sdy-propagation-pipeline)"


class SplitOperation(NamedTuple):
    """An operation of `lower_to_be_split` with the shardings that the partitioner will use.

    Attributes:
        asked: The answer that the partitioner will get.
        types: The types of one device's arguments.
        mesh: The mesh of the shardings.
        platform: The target platform of the program.
        span: The devices of the program, if several processes run it or may run it.
    """

    asked: AskedToSplit
    types: Sequence[jax.ShapeDtypeStruct]
    mesh: Mesh
    platform: str
    span: Span | None

    def calls(self, primitive: Any) -> list[tuple[dict[str, Any], list[Any]]]:
        """Return the parameters and argument types of each use of a primitive in one device's shard."""
        return uses_of(primitive, jax.make_jaxpr(self.asked.part, axis_env=list(self.mesh.shape.items()))(*self.types))


def split_operations(lowered: Any) -> Iterator[SplitOperation]:
    """Yield the operations of a lowered program that use our custom partitioning.

    Shardy's own propagation finds their shardings on a copy of the program.
    """
    module = lowered.compiler_ir()
    if module is None:
        return
    with module.context:
        # propagation changes the program, which the caller may still compile or print
        copied = module.operation.clone()
        # most programs have no such operation, and propagation takes tens of milliseconds
        if not any(True for _ in _operations(copied.operation)):
            return
        _inline(copied.operation)
        _mlir.passmanager.PassManager.parse(_PIPELINE).run(copied.operation)
        meshes = _meshes(copied.operation)
        for operation, asked in _operations(copied.operation):
            yield _split(operation, asked, meshes)


def _inline(module: Any) -> None:
    """Inline all function calls, as XLA does before propagation, which stops at calls.

    jaxlib does not include the inlining pass.
    """
    functions = {
        _ir.StringAttr(operation.attributes["sym_name"]).value: operation
        for operation in _walked(module)
        if operation.name == "func.func"
    }
    while calls := [operation for operation in _walked(module) if operation.name == "func.call"]:
        for call in calls:
            callee = _ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            if any(inner.name == "func.call" for inner in _walked(functions[callee])):
                continue  # its own calls come first
            _put_in_place(call, functions[callee])
    for name, function in functions.items():
        if name != "main":
            function.erase()


def _put_in_place(call: Any, function: Any) -> None:
    block = function.regions[0].blocks[0]
    known = dict(zip(block.arguments, call.operands, strict=True))
    for operation in block.operations:
        if operation.operation.name == "func.return":
            for result, value in zip(call.results, operation.operands, strict=True):
                result.replace_all_uses_with(known.get(value, value))
            break
        copied = operation.operation.clone(_ir.InsertionPoint(call)).operation
        known |= dict(zip(operation.operation.results, copied.results, strict=True))
        for inner in (copied, *_walked(copied)):
            for index, operand in enumerate(inner.operands):
                if operand in known:
                    inner.operands[index] = known[operand]
    call.erase()


def _operations(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each operation with our custom partitioning and the data stored at its lowering."""
    for operation in _walked(module):
        if operation.name == "stablehlo.custom_call":
            key = str(operation.attributes["backend_config"]) if "backend_config" in operation.attributes else ""
            asked = asked_of(str(operation.attributes["call_target_name"]).strip('"'), key.strip('"'))
            if asked is not None:
                yield operation, asked


def _walked(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _walked(inner.operation)


def _meshes(module: Any) -> dict[str, list[tuple[str, int]]]:
    """Return the axes of each mesh of a program, by the mesh's name."""
    return {
        _ir.StringAttr(operation.attributes["sym_name"]).value: _axes(operation.attributes["mesh"])
        for operation in _walked(module)
        if operation.name == "sdy.mesh"
    }


def _split(operation: Any, kept: Any, meshes: dict[str, list[tuple[str, int]]]) -> SplitOperation:
    manual = _manual_axes(operation)
    shardings = [*map(_sharding_of_value, operation.operands), *map(_sharding_of_value, operation.results)]
    mesh = _mesh_of(shardings, kept.meshes, meshes, manual)
    specs = [_spec(sharding, mesh, meshes, manual) for sharding in shardings]
    # the same request that XLA makes while it compiles
    asked = kept.splitting(dict(mesh.shape), specs)
    types = [
        jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(aval.shape), aval.dtype)
        for spec, aval in zip(asked.operand_specs, kept.types, strict=True)
    ]
    return SplitOperation(asked, types, mesh, kept.platforms[0], kept.span)


def _mesh_of(
    shardings: Sequence[Any], known: Sequence[LogicalMesh], meshes: dict[str, list[tuple[str, int]]], manual: set[str]
) -> Mesh:
    """Return the logical mesh that matches the program's mesh."""
    for sharding in shardings:
        if sharding is not None:
            sizes = [prime for _, prime in _parts(_axes_of(sharding.mesh_or_ref, meshes), manual)]
            found = next((mesh.auto for mesh in known if list(mesh.auto.shape.values()) == sizes), None)
            if found is None:
                raise ValueError(f"the program's mesh, {sizes}, is none of {[dict(mesh.auto.shape) for mesh in known]}")
            return found
    return known[0].auto


def _parts(axes: Sequence[tuple[str, int]], manual: set[str]) -> list[tuple[str, int]]:
    """Return the prime factors of the automatic axes, each with the name of its axis."""
    return [(name, prime) for name, size in axes if name not in manual for prime in primes(size)]


def _manual_axes(operation: Any) -> set[str]:
    found: set[str] = set()
    parent = operation.parent
    while parent is not None:
        if parent.name == "sdy.manual_computation":
            found |= set(_sdy.ManualAxesAttr(parent.attributes["manual_axes"]))
        parent = parent.parent
    return found


def _sharding_of_value(value: Any) -> Any:
    """Return the propagated sharding of a value; `None` if it is replicated."""
    owner = value.owner
    if hasattr(owner, "owner"):  # the argument of a block
        parent, index = owner.owner.operation, value.arg_number
        if parent.name == "func.func":
            return _of_argument(parent, index)
        name = "in_shardings" if parent.name == "sdy.manual_computation" else "sdy.sharding"
        return _one(parent, name, index)
    sharding = _one(owner, "sdy.sharding", getattr(value, "result_number", 0))
    return sharding if sharding is not None else _one(owner, "sharding", 0)  # of a constraint


def _of_argument(function: Any, index: int) -> Any:
    if "arg_attrs" not in function.attributes:
        return None
    attributes = _ir.DictAttr(_ir.ArrayAttr(function.attributes["arg_attrs"])[index])
    return _sdy.TensorShardingAttr(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else None


def _one(operation: Any, name: str, index: int) -> Any:
    if name not in operation.attributes:
        return None
    found = operation.attributes[name]
    if not _sdy.TensorShardingPerValueAttr.isinstance(found):
        return _sdy.TensorShardingAttr(found)
    return _sdy.TensorShardingAttr(_sdy.TensorShardingPerValueAttr(found).shardings[index])


def _spec(sharding: Any, mesh: Mesh, meshes: dict[str, list[tuple[str, int]]], manual: set[str]) -> PartitionSpec:
    """Return a sharding as a partition spec over the logical mesh, whose axes are prime factors of the program's."""
    if sharding is None:
        return PartitionSpec()
    parts = _parts(_axes_of(sharding.mesh_or_ref, meshes), manual)
    by_axis: dict[str, list[tuple[str, int]]] = {}
    for logical, (name, prime) in zip(mesh.axis_names, parts, strict=True):
        by_axis.setdefault(name, []).append((logical, prime))
    return PartitionSpec(
        *[
            tuple(logical for axis in axes for logical in _logical_axes(axis, by_axis)) or None
            for axes in (_sdy.DimensionShardingAttr(dimension).axes for dimension in sharding.dimension_shardings)
        ]
    )


def _axes_of(mesh: Any, meshes: dict[str, list[tuple[str, int]]]) -> list[tuple[str, int]]:
    name = str(mesh)
    return meshes[name.removeprefix("@")] if name.startswith("@") else _axes(mesh)


def _axes(mesh: Any) -> list[tuple[str, int]]:
    return [(axis.name, axis.size) for axis in map(_sdy.MeshAxisAttr, _sdy.MeshAttr(mesh).axes)]


def _logical_axes(axis: Any, by_axis: dict[str, list[tuple[str, int]]]) -> list[str]:
    """Return the logical axes of an axis reference, which names a whole axis or a factor of its size."""
    axis = _sdy.AxisRefAttr(axis)
    parts = by_axis.get(axis.name, [])  # none for a manual axis
    if axis.sub_axis_info is None:
        return [name for name, _ in parts]
    part = _sdy.SubAxisInfoAttr(axis.sub_axis_info)
    first, last = part.pre_size, part.pre_size * part.size
    found, before = [], 1
    for name, prime in parts:
        if first <= before < last:
            found.append(name)
        before *= prime
    return found
