# SPDX-License-Identifier: Apache-2.0
"""Meshes of programs under way, and the custom partitioning of an operation by XLA."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import compiler, config, core, lib, sharding_impls
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel.compat.processes import Span, placeholder, span_of_number
from ejkernel.compat.tracing import explicit_mesh

_core: Any = core
_lib: Any = lib
_config: Any = config
_compiler: Any = compiler
_sharding_impls: Any = sharding_impls
_MOST_ORDERS = 64  # orders of prime factors to try; a number with many factors has more
_NO_MESH = AbstractMesh((), ())


def rejects_shardings(error: BaseException) -> bool:
    """Return whether an error, or its cause, is JAX's about an operation on arrays sharded over explicit axes."""
    return isinstance(error, _core.ShardingTypeError) or isinstance(error.__cause__, _core.ShardingTypeError)


def explicit_sizes(mesh: Any) -> dict[str, int]:
    """Return the sizes of a mesh's explicit axes."""
    named = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in named if kind == AxisType.Explicit}


def with_spec(aval: Any, mesh: Any, spec: Iterable[Any]) -> Any:
    """Return the array's type with this sharding."""
    return aval.update(sharding=NamedSharding(mesh, _full(spec, aval)))


def whole(aval: Any) -> Any:
    """Return the type of the same array, replicated over its mesh."""
    return with_spec(aval, aval.sharding.mesh, ())


def over_explicit_axes(
    part: Callable[..., Any],
    mesh: Any,
    *,
    given: Sequence[Any],
    split: Sequence[Any],
    sums: Sequence[tuple[str, ...]],
    wanted: Sequence[Any],
) -> Callable[..., list[Any]]:
    """Return a function that runs `part` on the shards of each device of an explicit mesh.

    Args:
        part: The computation on one device's shards.
        mesh: The mesh.
        given: The sharding of each argument of `part`.
        split: The sharding of each result of `part`.
        sums: See `missing_sums`.
        wanted: The final sharding of each result.
    """

    def resharded(arrays: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        return [
            jax.sharding.reshard(array, NamedSharding(mesh, _full(spec, array)))
            for array, spec in zip(arrays, specs, strict=True)
        ]

    def mapped(*arrays: Any) -> list[Any]:
        arguments = resharded(arrays, given)
        with jax.sharding.use_abstract_mesh(mesh):
            parts = jax.shard_map(
                part,
                mesh=mesh,
                in_specs=tuple(given),
                out_specs=tuple(split),
                axis_names=set(explicit_sizes(mesh)),
                # the part has no varying types: `summed` adds sums over enclosing manual axes afterwards
                check_vma=False,
            )
            return resharded(summed(parts(*arguments), sums), wanted)

    return mapped


def _full(spec: Iterable[Any], array: Any) -> PartitionSpec:
    entries = tuple(spec)
    return PartitionSpec(*entries, *[None] * (array.ndim - len(entries)))


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """Trace the computation of one shard: without a mesh in force, and with errors that reach the user.

    XLA turns an exception of the partitioner's callback into text; the user's compilation raises the original.
    """
    # With a mesh from `jax.set_mesh`, JAX 0.11.2 and 0.12 put shardings into the shard's program, and XLA fails: "No
    # registered implementation for untyped custom call to Sharding".
    # The frames of the callback alone, not those of the program; see `without_frames`.
    with jax.sharding.use_abstract_mesh(_NO_MESH), _keeping_errors(), _lib._jax.TracebackScope():
        yield


def without_frames(ctx: Any) -> Any:
    """Return a lowering context for the computation of one shard: its operations have no locations.

    XLA mixes up the stack frames of the shard's program and of the whole. If the frames then form a cycle, XLA never
    ends while it inlines a loop.
    """
    with _config.traceback_in_locations_limit(0):
        caches = type(ctx.module_context.traceback_caches)()
    return ctx.replace(module_context=ctx.module_context.replace(traceback_caches=caches))


def is_exporting(ctx: Any) -> bool:
    """Return whether a program is lowered for export, which cannot contain callbacks."""
    return bool(getattr(ctx.module_context.lowering_parameters, "for_export", False))


def uses_shardy() -> bool:
    """Return whether Shardy partitions programs, rather than GSPMD."""
    return bool(_config.use_shardy_partitioner.value)


def stores_split_programs() -> bool:
    """Return whether JAX's persistent compilation cache can restore programs with custom partitioning.

    By default it cannot, because their text contains a memory address.
    """
    return bool(_config.remove_custom_partitioning_ptr_from_cache_key.value)


class LogicalMesh(NamedTuple):
    """A mesh whose axes are the prime factors of the number of devices, so it can express every sharding.

    Only the numbers of the devices enter the program, so any devices will do.

    Attributes:
        auto: The mesh of the automatic axes.
        everything: The mesh of all devices if some axes are manual; manual axes keep their names.
    """

    auto: Mesh
    everything: Mesh | None


def logical_meshes(ctx: Any) -> list[LogicalMesh]:
    """Return the possible meshes of the program under way; none if this process has too few devices.

    If only the number of devices is known, each order of its prime factors gives one mesh: a mesh of 3 x 2 devices
    shards arrays differently from one of 2 x 3.
    """
    known, count = _axes_by_manual_name(ctx.module_context.axis_context)
    devices = _devices_of(ctx.module_context.platforms[0])
    if len(devices) < count:
        return []
    if known is None:
        orders = itertools.islice(_orders(primes(count)), _MOST_ORDERS)
        return [_logical([(None, prime) for prime in order], devices) for order in orders]
    parts: list[tuple[str | None, int]] = []
    for name, size in known:
        parts += [(None, prime) for prime in primes(size)] if name is None else [(name, size)]
    return [_logical(parts, devices)]


def _devices_of(platform: str) -> Sequence[jax.Device]:
    """Return this process's devices of a program's platform, or its default devices without that platform."""
    try:
        return jax.devices(platform)
    except RuntimeError:  # this process does not have the platform
        return jax.devices()


def _axes_by_manual_name(context: Any) -> tuple[list[tuple[str | None, int]] | None, int]:
    """Return the sizes of a program's mesh axes (with names for manual ones), or `None`; and the number of devices."""
    mesh = getattr(context, "mesh", None) or getattr(context, "abstract_mesh", None)
    count = getattr(context, "num_devices", None)
    if mesh is None or count not in (None, mesh.size):
        return None, int(count or 1)
    manual = getattr(context, "manual_axes", ())
    named = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    return [(name if name in manual else None, size) for name, size in named], mesh.size


def _orders(factors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the distinct permutations of some numbers."""
    if not factors:
        yield ()
    for first in sorted(set(factors)):
        rest = list(factors)
        rest.remove(first)
        yield from ((first, *others) for others in _orders(rest))


def _logical(parts: Sequence[tuple[str | None, int]], devices: Sequence[jax.Device]) -> LogicalMesh:
    everything = [(name or f"part{index}", size) for index, (name, size) in enumerate(parts)]
    auto = [pair for pair, (name, _) in zip(everything, parts, strict=True) if name is None]
    return LogicalMesh(_mesh(auto, devices), _mesh(everything, devices) if len(auto) < len(everything) else None)


def _mesh(axes: Sequence[tuple[str, int]], devices: Sequence[jax.Device]) -> Mesh:
    sizes = [size for _, size in axes]
    some = np.array(devices[: math.prod(sizes)])
    return placeholder(Mesh(some.reshape(sizes), tuple(name for name, _ in axes)))


def primes(number: int) -> list[int]:
    """Return the prime factors of a number in ascending order."""
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found


class AskedToSplit(NamedTuple):
    """The answer to XLA's partitioner: the shardings of arguments and results, and the computation of one shard."""

    operand_specs: Sequence[PartitionSpec]
    result_specs: Sequence[PartitionSpec]
    part: Callable[..., Any]


Splitting = Callable[[Mapping[str, int], list[PartitionSpec]], AskedToSplit]
_KEPT = "ejkernel_kept"


class Kept(NamedTuple):
    """The data stored with an operation that uses custom partitioning.

    Attributes:
        splitting: Returns the answer for given shardings.
        meshes: The possible meshes of the shardings.
        types: The types of the unsharded arguments.
        platforms: The target platforms of the program.
        span: The devices of the program, if several processes run it or may run it.
    """

    splitting: Splitting
    meshes: Sequence[LogicalMesh]
    types: Sequence[Any]
    platforms: tuple[str, ...]
    span: Span | None


class _Empty:
    """The arguments without elements inside a partly manual mesh: each shard makes its own.

    XLA aborts the process if an operation with custom partitioning has such an operand there.

    Args:
        types: The types of all arguments.
        is_partly_manual: Whether the mesh is.
    """

    def __init__(self, types: Sequence[Any], *, is_partly_manual: bool) -> None:
        self.types = types
        self.is_empty = [is_partly_manual and 0 in aval.shape for aval in types]

    def others(self, of_arguments: Sequence[Any]) -> list[Any]:
        """Return the entries of the other arguments."""
        return [entry for entry, is_empty in zip(of_arguments, self.is_empty, strict=True) if not is_empty]

    def filled(self, others: Sequence[Any], specs: Sequence[Any] = (), sizes: Mapping[str, int] | None = None) -> Any:
        """Return the arrays of all arguments, given the others, and the shardings of all where these are shards."""
        remaining, mesh = iter(others), AbstractMesh(tuple((sizes or {}).values()), tuple(sizes or {}))
        found = []
        every: Any = itertools.zip_longest(self.types, self.is_empty, specs, fillvalue=PartitionSpec())
        for aval, is_empty, spec in every:
            shape = NamedSharding(mesh, spec).shard_shape(aval.shape) if is_empty else ()
            with jax.sharding.use_abstract_mesh(_NO_MESH):  # see `on_one_device`
                found.append(jax.numpy.zeros(shape, aval.dtype) if is_empty else next(remaining))
        return found

    def splitting(self, asked: Splitting) -> Splitting:
        """Return the splitting of an operation with the other arguments."""

        def of_others(mesh: Mapping[str, int], specs: list[PartitionSpec]) -> AskedToSplit:
            given, count = iter(specs), len(self.types) - sum(self.is_empty)
            every = [PartitionSpec() if is_empty else next(given) for is_empty in self.is_empty]
            found = asked(mesh, [*every, *specs[count:]])
            part = lambda *arrays: found.part(*self.filled(arrays, found.operand_specs, mesh))  # noqa: E731
            return AskedToSplit(self.others(found.operand_specs), found.result_specs, part)

        return of_others


def lower_to_be_split(
    ctx: Any,
    whole: Callable[..., Any],
    *values: Any,
    meshes: Sequence[LogicalMesh],
    asked: Splitting,
    axes: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]],
) -> Any:
    """Lower a primitive to an operation with custom partitioning.

    Args:
        ctx: The context of the primitive's lowering rule.
        whole: The unsharded computation, used for its types.
        values: Its arguments.
        meshes: The possible meshes of the program.
        asked: Returns the answer for the mesh's sizes and the shardings of arguments and results.
        axes: A name for each axis of each argument and each result; axes with the same name are sharded alike.
    """
    from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning

    empty = _Empty(ctx.avals_in, is_partly_manual=meshes[0].everything is not None)
    asked, values, axes = empty.splitting(asked), tuple(empty.others(values)), (empty.others(axes[0]), axes[1])

    def partition(_: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        with _keeping_errors():
            mesh, specs = _read([array.sharding for array in (*arguments, *results)], meshes)
            found = asked(dict(mesh.auto.shape), specs)
        placed = [
            tuple(NamedSharding(mesh.auto, spec) for spec in specs)
            for specs in (found.result_specs, found.operand_specs)
        ]
        # Inside a partly manual `shard_map`, collectives of the shard need the whole mesh, but shardings over it would
        # abort the process, because XLA knows only the automatic axes.
        return mesh.everything or mesh.auto, found.part, *placed

    # without varying types, which the part does not have; `summed` adds the missing sums afterwards
    plain = [_core.ShapedArray(aval.shape, aval.dtype) for aval in (*empty.others(ctx.avals_in), *ctx.avals_out)]
    arguments = plain[: len(values)]
    span = span_of_number((meshes[0].everything or meshes[0].auto).size)
    setattr(partition, _KEPT, Kept(asked, meshes, arguments, tuple(ctx.module_context.platforms), span))
    rule = SdyShardingRule(*[tuple(ArrayMapping(*names) for names in arrays) for arrays in axes])
    # around the whole call: an implementation alone would have no batching rule and no derivative
    split: Any = custom_partitioning(lambda *arrays: tuple(whole(*empty.filled(arrays))))
    split.def_partition(partition, infer_sharding_from_operands=None, decode_shardings=False, sharding_rule=rule)
    # The rule of `custom_partitioning` takes devices and names from the context and does not support manual axes.
    mesh = meshes[0].auto
    inner = ctx.replace(
        module_context=ctx.module_context.replace(
            axis_context=_sharding_impls.ShardingContext(mesh.size, tuple(mesh.devices.flat), mesh.abstract_mesh)
        ),
        avals_in=arguments,
        avals_out=plain[len(values) :],
    )
    return mlir.lower_fun(split, multiple_results=True)(inner, *values)


_failed: list[Exception] = []  # the last exception of a partitioner's callback


@contextlib.contextmanager
def _keeping_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _failed[:] = [error]
        raise


def _own_error(raised: Any) -> Exception | None:
    # match the name in XLA's text, because the stored exception may belong to an earlier compilation
    own = _failed.pop() if _failed else None
    return own if own is not None and type(own).__name__ in str(raised) else None


_compiler.register_xla_runtime_error_handler(_own_error)


def asked_of(target: str, key: str) -> Kept | None:
    """Return the data of an operation with our custom partitioning; `None` for any other operation.

    Args:
        target: The call target of the operation.
        key: Its backend configuration.
    """
    from jax._src import custom_partitioning

    module: Any = custom_partitioning
    if target != module._CUSTOM_PARTITIONING_CALL_NAME:
        return None
    info = module._sharding_callbacks.get(key.encode())
    return None if info is None else getattr(info.partition, _KEPT, None)


def _read(shardings: Sequence[Any], meshes: Sequence[LogicalMesh]) -> tuple[LogicalMesh, list[PartitionSpec]]:
    """Return the first mesh that can express all shardings, and the shardings as partition specs on it."""
    for mesh in meshes:
        try:
            return mesh, [_spec(sharding, mesh.auto) for sharding in shardings]
        except (ValueError, AssertionError, NotImplementedError) as error:
            reason = error  # another order of the factors may work
    raise ValueError(f"no mesh of {meshes[0].auto.size} devices has axes for {shardings}") from reason


def _spec(sharding: Any, mesh: Mesh) -> PartitionSpec:
    if sharding is None:
        return PartitionSpec()
    spec: PartitionSpec = _sharding_impls.parse_flatten_op_sharding(sharding._hlo_sharding, mesh)[0]
    return spec


def lower_sums_over_manual_axes(ctx: Any, *values: Any) -> Any:
    """Sum the results of a shard over the enclosing manual axes.

    A result that varies over fewer axes than the arguments, such as the gradient of a weight, is a sum over the other
    axes. Types inside custom partitioning do not carry this information.
    """
    missing = missing_sums(ctx)
    if not any(missing):
        return values
    flat = [value[0] if isinstance(value, list | tuple) else value for value in values]
    after = ctx.replace(avals_in=ctx.avals_out)
    return mlir.lower_fun(lambda *arrays: summed(arrays, missing), multiple_results=True)(after, *flat)


def missing_sums(ctx: Any) -> list[tuple[str, ...]]:
    """Return the manual axes over which each result of a primitive must still be summed."""
    have: frozenset[str] = frozenset().union(*map(_varying, ctx.avals_in))
    return [tuple(sorted(have - _varying(aval))) for aval in ctx.avals_out]


def summed(arrays: Sequence[Any], missing: Sequence[tuple[str, ...]]) -> list[Any]:
    """Return each array summed over its missing manual axes."""
    return [
        wide_sum(jax.lax.pcast(array, axes, to="varying"), axes) if axes else array
        for array, axes in zip(arrays, missing, strict=True)
    ]


def as_gradient_of(aval: Any, gradient: Any) -> Any:
    """Return the gradient of an array of this type in that type.

    It is summed over the manual axes over which the array is the same on all devices, and sharded over explicit axes
    like the array.
    """
    missing = tuple(sorted(_varying(jax.typeof(gradient)) - _varying(aval)))
    found = wide_sum(gradient, missing) if missing else gradient
    return found if explicit_mesh([aval]) is None else jax.sharding.reshard(found, aval.sharding)


def wide_sum(array: Any, axes: tuple[str, ...]) -> Any:
    """Return an array summed over mesh axes, with 16-bit floats summed in float32.

    With automatic axes present, XLA's CPU compiler aborts the process on a 16-bit all-reduce.
    """
    is_narrow = jax.numpy.issubdtype(array.dtype, jax.numpy.floating) and array.dtype.itemsize < 4
    return jax.lax.psum(array.astype("float32") if is_narrow else array, axes).astype(array.dtype)


def _varying(aval: Any) -> frozenset[str]:
    return frozenset(aval.manual_axis_type.varying)
