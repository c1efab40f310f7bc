# SPDX-License-Identifier: Apache-2.0
"""`Invocation`: a call as its kernel sees it, and its key."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic

import jax

from ejkernel import compat
from ejkernel.ops.core.bucketing import StandIn, checked_stand_in, not_idempotent
from ejkernel.ops.core.callspec import is_call, prepared, take_apart, without_defaults
from ejkernel.ops.core.context import Numerics, numerics_in_force
from ejkernel.ops.core.hooks import PLATFORMS, Computation, asked, form_of, heuristic_config, overrides
from ejkernel.ops.core.transformations.batching import Level, Vmapped
from ejkernel.ops.core.transformations.nodes import Choice, Forward, Node
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import ArgumentError, NoConfigError, UnstableKeyError, UnsupportedError
from ejkernel.ops.utils.fingerprint import device_fingerprint, platform_fingerprint, sharding_fingerprint
from ejkernel.ops.utils.messages.names import check_argument
from ejkernel.ops.utils.values.signature import (
    HasType,
    abstract,
    abstract_tree,
    describe,
    describe_static,
    is_array,
    key_of,
)

# JAX's defaults; descriptions contain only settings that differ from them.
DEFAULT_PRNG: Final = "threefry2x32"
DEFAULT_PROMOTION: Final = "standard"


# Compared by identity: comparing arrays would compute, and tracers have no truth value.
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Invocation(Generic[Cfg, Out]):
    """A call: its kernel, its arguments as `run` sees them, and the settings around it.

    Code may rely only on shapes, dtypes and static leaves of the arguments: arrays, tracers and `ShapeDtypeStruct`s are
    interchangeable here. Under `vmap` the arguments have the shapes of one example, and `batch_sizes` the batch sizes.

    Attributes:
        kernel: The kernel; optional if `op_id` is given and the call is never run.
        args: Positional arguments; if the kernel has `prepare`, those that it returns.
        kwargs: Keyword arguments; if the kernel has `prepare`, those that it returns.
        metadata: The caller's notes; stored, never read.
        op_id: Name of the operation; the kernel's by default. Derivatives have a suffix (`.bwd`, `.jvp`).
        batch_axes: For each enclosing `vmap`, outermost first: the batch axis of each array, or `None`.
        batch_sizes: The sizes of those `vmap`s.
        override_cfg: The caller's `cfg=`.
        stamp: Whether to label the call in the program's text.
        method: The requested way to run the call, such as `"shard_map"`.
        device: Fingerprint of the call's device; empty for the default device.
        precision: The default matmul precision in force.
        x64: Whether 64-bit types are enabled.
        prng: The random number implementation in force.
        promotion: The dtype promotion rule in force.
        span: The devices of the program being lowered, if several processes run it, or may run it.
        array_types: Types of all arrays that the node of a traced call takes, including batch axes and cotangents.
    """

    kernel: Computation[Cfg, Out] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Any = None
    op_id: str = ""
    batch_axes: tuple[Any, ...] | None = None
    batch_sizes: tuple[int, ...] = ()
    override_cfg: Cfg | None = None
    stamp: bool = True
    method: str | None = None
    device: str = ""
    precision: str | None = dataclasses.field(default_factory=lambda: numerics_in_force().default_matmul_precision)
    x64: bool = dataclasses.field(default_factory=lambda: numerics_in_force().enable_x64)
    prng: str = dataclasses.field(default_factory=lambda: numerics_in_force().default_prng_impl)
    promotion: str = dataclasses.field(default_factory=lambda: numerics_in_force().numpy_dtype_promotion.value)
    span: compat.processes.Span | None = dataclasses.field(default=None, repr=False)
    array_types: tuple[jax.ShapeDtypeStruct, ...] = dataclasses.field(default=(), repr=False)
    _node: Node | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kernel is None and not self.op_id:
            raise ArgumentError("Invocation needs kernel=... or op_id=...; got neither.")
        if self.kernel is not None:
            check_argument(isinstance(self.kernel, Computation), "kernel", "a Kernel", self.kernel)
        check_argument(isinstance(self.args, list | tuple), "args", "a tuple of positional arguments", self.args)
        check_argument(isinstance(self.kwargs, Mapping), "kwargs", "a mapping of keyword arguments", self.kwargs)
        set_field = functools.partial(object.__setattr__, self)
        set_field("args", tuple(self.args))
        set_field("kwargs", dict(self.kwargs))
        if self.kernel is not None and not self.op_id:
            set_field("op_id", self.kernel.op_id)
        if self.batch_axes is not None:
            set_field("batch_axes", _levels(self.batch_axes))
            if self.batch_sizes and len(self.batch_sizes) != len(self.batch_axes or ()):
                raise ArgumentError(
                    f"batch_sizes must have one size for each of the {len(self.batch_axes or ())} levels of "
                    f"batch_axes, got {self.batch_sizes!r}."
                )

    @property
    def op_id_v(self) -> str:
        """The operation's name with the kernel's version."""
        if "@v" in self.op_id:
            return self.op_id
        version = self.kernel.version if self.kernel is not None else Computation.version
        return f"{self.op_id}@v{version}"

    @property
    def direction(self) -> str:
        """The direction of the call: `fwd`, `bwd` (gradients) or `jvp` (tangents)."""
        suffix = self._node.suffix if self._node is not None else ""
        return suffix.rpartition(".")[2] if suffix else "fwd"

    @property
    def numerics(self) -> Numerics:
        """JAX's settings for the call."""
        return numerics_in_force()._replace(
            default_matmul_precision=self.precision,
            enable_x64=self.x64,
            default_prng_impl=self.prng,
            numpy_dtype_promotion=self.promotion,
        )

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """The positional arguments with `ShapeDtypeStruct`s for arrays."""
        return tuple(abstract_tree(list(self.args)))

    @property
    def abstract_kwargs(self) -> dict[str, Any]:
        """The keyword arguments with `ShapeDtypeStruct`s for arrays."""
        return dict(abstract_tree(dict(self.kwargs)))

    @property
    def input_bytes(self) -> int:
        """Bytes of all arrays that the call takes; an array under `vmap` counts once for each example."""
        if self._node is not None:
            return sum(map(_bytes_of, self.argument_types))
        # A call made by hand may have no kernel, and so no node.
        arrays = [abstract(leaf) for leaf in jax.tree.leaves((self.args, dict(self.kwargs))) if is_array(leaf)]
        axes = self.batch_axes or [(0,) * len(arrays)] * len(self.batch_sizes)  # without batch axes, assume all
        for level, size in zip(axes, self.batch_sizes, strict=True):
            arrays = [
                Level(size, level, None, None).batched(like, axis) for like, axis in zip(arrays, level, strict=True)
            ]
        return sum(map(_bytes_of, arrays))

    @functools.cached_property
    def device_fingerprint(self) -> str:
        """Backend and chip of the call's device."""
        return self.device or device_fingerprint()

    @property
    def platform(self) -> str:
        """The kind of the call's device: `gpu`, `tpu` or `cpu`."""
        return self.device_fingerprint.partition(":")[0]

    @functools.cached_property
    def representative(self) -> Invocation[Cfg, Out]:
        """The call that represents this call's bucket: it gives the key, and tuning measures it. See `Kernel.bucket`.

        Raises:
            KernelError: The kernel's `bucket` returns something that cannot represent the call.
        """
        # Most kernels have no buckets: return early instead of splitting the call for nothing.
        if self.kernel is None or not overrides(self.kernel, "bucket"):
            return self
        found = self._stand_in()
        if found is None:
            return self
        inv = self._represented_by(found)
        again = inv._stand_in()
        if again is not None:
            raise not_idempotent(self, found, again)
        return inv

    def _stand_in(self) -> StandIn | None:
        bucket = getattr(self.kernel, "bucket")  # noqa: B009 - a hook of `Kernel`
        answer: Any = asked(f"{self.op_id}: bucket", bucket, self)
        is_own = is_call(answer) and answer[0] is self.args and answer[1] is self.kwargs
        return None if is_own else checked_stand_in(self, answer)

    def _represented_by(self, stand_in: StandIn) -> Invocation[Cfg, Out]:
        spec, types = stand_in
        args, kwargs = spec.join(types)
        # Nodes hold no shapes, so the representative can use this call's node. Types of batches, residuals and
        # cotangents (`array_types`) are computed later, on the measuring thread, where no trace of the caller is open.
        node = None if self._node is None else self._node.with_spec(spec)
        return dataclasses.replace(self, args=args, kwargs=kwargs, array_types=(), _node=node)

    @functools.cached_property
    def node(self) -> Node:
        """The call as a function of its configuration."""
        if self._node is not None:
            return self._node
        if self.kernel is None:
            raise ArgumentError(f"Invocation of {self.op_id!r} has no kernel; pass kernel=...")
        spec, arrays = take_apart(self.kernel, self.args, dict(self.kwargs), self.method)
        node: Node = Forward(spec)
        for axes, size in zip(reversed(self.batch_axes or ()), reversed(self.batch_sizes), strict=True):
            if len(axes) != len(arrays):
                raise ArgumentError(f"batch_axes must have one entry for each of {len(arrays)} arrays, got {axes!r}.")
            node = Vmapped(node, Level(size, axes, None, None))
        return node

    @functools.cached_property
    def argument_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of all arrays that `node` takes: `array_types`, computed here for a call that was not traced."""
        if self.array_types:
            return self.array_types
        own = [abstract(leaf) for leaf in jax.tree.leaves((self.args, dict(self.kwargs))) if is_array(leaf)]

        # A function, because the heuristic is needed only where residuals or results must be traced. Their types are
        # the same under every configuration.
        def heuristic() -> tuple[Any, str]:
            return heuristic_config(self.node.spec.kernel, self.forward or self), self.platform

        return tuple(self.node.argument_types(Choice(platform=self.platform, config_for_types=heuristic), own))

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """The abstract call as plain data, the same in each process; `rebuild` turns it back into the call.

        Raises:
            UnstableKeyError: A static argument has no stable name.
        """
        args, kwargs, defaults = self._canonical()
        kernel: Any = self.kernel
        fields = dataclasses.fields(kernel) if dataclasses.is_dataclass(kernel) else ()
        optional: dict[str, Any] = {
            "defaults": defaults if any(defaults.values()) else None,
            "kernel": {field.name: describe_static(getattr(kernel, field.name)) for field in fields},
            "method": self.method,
            "precision": self.precision,
            "x64": self.x64,
            "prng": self.prng if self.prng != DEFAULT_PRNG else None,
            "promotion": self.promotion if self.promotion != DEFAULT_PROMOTION else None,
        }
        if self._node is not None:
            wiring = [step.wiring for step in self._node.steps]
            optional["steps"] = [_step(*step.data) for step in self._node.steps]
            optional["wiring"] = wiring if any(wiring) else None
        else:
            axes = self.batch_axes or ()
            levels = zip(reversed(axes), reversed(self.batch_sizes or (None,) * len(axes)), strict=True)
            optional["steps"] = [["vmap", size, list(level)] for level, size in levels]
        named = sorted(kwargs.items())
        try:
            described = {"op": self.op_id_v, "args": describe(args)}
            described["kwargs"] = {name: describe(value) for name, value in named}
        except UnstableKeyError as error:
            arguments = [(f"argument {index}", value) for index, value in enumerate(args)] + named
            culprit = next((name for name, value in arguments if not _is_stable(value)), "")
            raise UnstableKeyError(f"{self.op_id}: {culprit}: {error}") from error
        # Empty fields are left out, so that keys of other calls stay the same when a field is added.
        return described | {name: value for name, value in optional.items() if value}

    def _canonical(self) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Return the arguments of the representative, and which of them equal their defaults.

        A positional parameter passed by keyword becomes positional. The third value has the number of trailing
        arguments, and the keywords, that equal their defaults.
        """
        args, kwargs = self.representative.args, dict(self.representative.kwargs)
        if self.kernel is None:
            return args, kwargs, {}
        if self.representative._node is None:  # a node's arguments are in this form
            spec, arrays = take_apart(self.kernel, args, kwargs, self.method)
            args, kwargs = spec.join([abstract(array) for array in arrays])
        kept, rest = without_defaults(self.kernel, args, kwargs)
        return args, kwargs, {"args": len(args) - len(kept), "kwargs": sorted(kwargs.keys() - rest.keys())}

    @functools.cached_property
    def call_key(self) -> str:
        """The key of the call's signature, without the operation's name: 16 hexadecimal digits.

        Raises:
            UnstableKeyError: A static argument has no stable name.
        """
        return key_of(self.description)

    @property
    def key(self) -> ConfigKey:
        """The key of the call's configuration: device, operation and call."""
        return ConfigKey(self.device_fingerprint, self.op_id_v, self.call_key)

    @property
    def forward(self) -> Invocation[Cfg, Out] | None:
        """The forward call of this derivative; `None` for a forward."""
        if self._node is None or not self._node.suffix:
            return None
        spec, lead, node = self._node.spec, self._node.lead, self._node.forward
        return dataclasses.replace(
            self,
            op_id=spec.kernel.op_id,
            batch_axes=tuple(axes for _, axes in node.levels) or None,
            batch_sizes=tuple(size for size, _ in node.levels),
            array_types=self.array_types[lead : lead + spec.num_arrays],
            _node=node,
        )

    def abstract(self, *, keeps_kernel: bool = True) -> Invocation[Cfg, Out]:
        """Return the call with types in place of arrays and tracers, so that it can be stored.

        Args:
            keeps_kernel: Whether the result keeps the kernel alive; if not, it has no kernel, and
                `dataclasses.replace(call, kernel=...)` restores it.
        """
        changes: dict[str, Any] = {}
        if not self.array_types:  # `invocation_of` stores only types
            changes = {"args": self.abstract_args, "kwargs": self.abstract_kwargs, "device": self.device_fingerprint}
        if not keeps_kernel:
            changes["kernel"] = None
            changes["_node"] = None if self._node is None else self._node.with_spec(self._node.spec.weak())
        return dataclasses.replace(self, **changes) if changes else self


def _step(kind: str, *rest: object) -> list[Any]:
    return [kind, *[item if isinstance(item, int | list) else str(item) for item in rest]]  # symbolic sizes as text


def _bytes_of(array: HasType) -> int:
    return int(math.prod(array.shape) * array.dtype.itemsize)


def _levels(batch_axes: Any) -> tuple[tuple[int | None, ...], ...]:
    """Return one tuple of axes for each `vmap`; a flat sequence of axes means one `vmap`."""
    if all(axis is None or isinstance(axis, int) for axis in batch_axes):
        return (tuple(batch_axes),) if batch_axes else ()
    return tuple(tuple(level) for level in batch_axes)


def invocation_of(node: Node, avals: Sequence[HasType], *, platform: str, override: Any = None) -> Invocation[Any, Any]:
    """Return the invocation of `node` on arrays of types `avals`, under the current settings."""
    args, kwargs = node.spec.join(node.example_types(avals))
    return Invocation(
        kernel=node.spec.kernel,
        args=args,
        kwargs=kwargs,
        op_id=node.spec.kernel.op_id + node.suffix,
        batch_axes=tuple(axes for _, axes in node.levels) or None,
        batch_sizes=tuple(size for size, _ in node.levels),
        override_cfg=override,
        method=node.spec.method,
        device=platform_fingerprint(platform),
        span=compat.programs.program_span(),
        array_types=tuple(abstract(aval) for aval in avals),
        _node=node if node.suffix else node.forward,  # a forward with residuals shares the plain forward's key
    )


def config_for_types(
    inv: Invocation[Any, Any], platform: str, resolve: Callable[[Invocation[Any, Any]], Any]
) -> tuple[Any, str]:
    """Return any configuration that is valid for finding the call's types, and a platform on which it runs.

    The program may be lowered for another platform than this process's. The kernel may have a configuration, an
    implementation or the requested form only there. So if nothing runs on the preferred platform, try the others. If
    the program is then lowered for the preferred platform, lowering raises the error instead.

    Args:
        inv: The call, with the caller's `cfg=`, if any.
        platform: The preferred platform.
        resolve: Finds a configuration for a kernel without a heuristic.

    Raises:
        NoConfigError: No platform has a configuration; the message is for the preferred platform.
        UnsupportedError: No platform can run the call; the message is for the preferred platform.
    """
    assert inv.kernel is not None  # it is being traced
    refused: list[Exception] = []
    for each in dict.fromkeys((platform, *PLATFORMS)):
        # The fingerprint of a platform, not of the device here: the program may be lowered for another device.
        there = dataclasses.replace(inv, device=platform_fingerprint(each))
        try:
            config = inv.override_cfg
            if config is None:
                with contextlib.suppress(NoConfigError):
                    config = heuristic_config(inv.kernel, there)
            if config is None:
                config = resolve(there).config
            form_of(inv.kernel, "run", each, config)  # raises if the platform has no form of `run`
        except (NoConfigError, UnsupportedError) as error:
            refused.append(error)
        else:
            return config, each
    raise refused[0]


def _is_stable(value: object) -> bool:
    try:
        describe(value)
    except UnstableKeyError:
        return False
    return True


def default_key_builder_with_sharding(
    kernel: Computation[Cfg, Out] | Invocation[Cfg, Out],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> ConfigKey:
    """Return the key of a call including the sharding of its arrays, for executors that tune for each layout.

    Takes a kernel with the arguments of a call, `args` and `kwargs`, or an `Invocation`.
    """
    if isinstance(kernel, Computation):
        args, kwargs = prepared(kernel, args, kwargs or {})
        kwargs = {name: x for name, x in kwargs.items() if name != "cfg"}  # `prepare` may return it; no key contains it
    inv = (
        kernel
        if isinstance(kernel, Invocation)
        else Invocation(kernel=kernel, args=tuple(args), kwargs=dict(kwargs or {}))
    )
    shardings = [sharding_fingerprint(leaf) for leaf in jax.tree.leaves((inv.args, dict(inv.kwargs)))]
    # The usual key has no shardings, because shardings over automatic axes are unknown during tracing.
    text = json.dumps([inv.call_key, shardings])
    return inv.key._replace(call=hashlib.sha256(text.encode("ascii")).hexdigest()[:16])
