# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a call from its description, so that it can be tuned on a machine where its program never ran.

`rebuild` applies the recorded transformations one by one, and then compares the description of the new call with the
given one. The `wiring` of a description holds facts that rebuilding needs but the key leaves out: for linear calls
under `vmap`, the batch axes of tangents, cotangents and residuals, and whether the call is a transpose; for
derivatives, whether the forward returns its residuals. Facts that follow from the kernel, such as the structure of its
results, are traced again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax

from ejkernel.ops.core.callspec import METHODS, take_apart
from ejkernel.ops.core.context import Numerics, numerics, numerics_in_force
from ejkernel.ops.core.declared_names import names_of
from ejkernel.ops.core.invocation import DEFAULT_PRNG, DEFAULT_PROMOTION, Invocation, invocation_of
from ejkernel.ops.core.kernel import Kernel, living_kernels
from ejkernel.ops.core.primitive import Call, residual_trees, types_of
from ejkernel.ops.core.transformations.autodiff import differentiate
from ejkernel.ops.core.transformations.batching import AxisName, Level, LinearVmapped, TransposedVmapped, Vmapped
from ejkernel.ops.core.transformations.nodes import SUFFIXES, Forward, Node
from ejkernel.ops.errors import DescriptionError
from ejkernel.ops.utils import services
from ejkernel.ops.utils.fingerprint import device_kind
from ejkernel.ops.utils.storage.serialize import describe as shown
from ejkernel.ops.utils.values.description import MAX_RANK, check_size, undescribe
from ejkernel.ops.utils.values.identity import Strong
from ejkernel.ops.utils.values.signature import abstract, is_inexact

_REQUIRED: Final = {"op", "args", "kwargs"}
_OPTIONAL: Final = {"defaults", "kernel", "steps", "method", "precision", "x64", "prng", "promotion", "wiring"}
_WIRING: Final = ({"residuals"}, {"axis_name", "axes", "transposed"})  # fields for derivatives, fields for vmap
# Limits beyond any real program: descriptions come from untrusted files, and rebuilding traces the call.
_MAX_STEPS: Final = 16
_MAX_KERNELS: Final = 8  # kernels with the same name to try
_MAX_DERIVATIVES: Final = 4  # each derivative doubles the traced computation


def rebuild(description: object, *, key: str | None = None, op: str | None = None) -> Invocation[Any, Any]:
    """Return the call that `Invocation.description` describes, for the default device of this process.

    The kernel must exist already: `rebuild` tries the live kernels with the operation's name and version, latest
    first. Functions and classes among the static arguments must be declared by the kernel, marked with `nameable`, or
    be JAX's functions of arrays; `rebuild` imports nothing. The returned call always has the key of its description.

    Args:
        description: Plain data, as read from JSON; it need not be trusted.
        key: The expected `call_key`, if known.
        op: The expected versioned name of the operation, if known.

    Raises:
        DescriptionError: The description is malformed, or the call cannot be rebuilt here; the message says why.
    """
    data = _checked(description)
    if op is not None and data["op"] != op:
        raise DescriptionError(f"it describes a call of {shown(data['op'])}")
    steps = _steps(data)
    refused: DescriptionError | None = None
    for kernel in _kernels(data["op"], "".join(SUFFIXES[step[0]] for step, _ in steps)):
        try:
            return _rebuilt(kernel, data, steps, key)
        except DescriptionError as error:  # another kernel of this name may succeed, e.g. the variant with buckets
            refused = refused or error
    assert refused is not None  # `_kernels` returns at least one kernel
    raise refused


def _rebuilt(
    kernel: Kernel[Any, Any], data: dict[str, Any], steps: Sequence[tuple[list[Any], dict[str, Any]]], key: str | None
) -> Invocation[Any, Any]:
    try:
        # Settings are part of the key and affect the trace: use the description's, not those of this process.
        with numerics(_numerics(data)):
            inv = _invocation(kernel, data, steps).abstract()
            description, call_key = inv.description, inv.call_key
    except DescriptionError:
        raise
    except Exception as error:  # the kernel's own code, on arguments that it may not be written for
        raise DescriptionError(f"its call cannot be traced: {type(error).__name__}: {error}") from error
    # The final check: a forged or misread description gives an error, never a wrong call.
    if description != data or (key is not None and call_key != key):
        raise DescriptionError("the call that it describes has another key")
    return inv


def _checked(data: object) -> dict[str, Any]:
    if type(data) is not dict or not _REQUIRED <= set(data) <= _REQUIRED | _OPTIONAL:
        fields = ", ".join(sorted(data)) if type(data) is dict and all(type(name) is str for name in data) else data
        raise DescriptionError(f"it needs op, args and kwargs, but has {shown(fields)}")
    types: dict[str, type] = {"args": list, "kwargs": dict, "steps": list, "wiring": list, "x64": bool}
    types |= {"defaults": dict, "kernel": dict}
    for name, value in data.items():
        if type(value) is not types.get(name, str):
            raise DescriptionError(f"its {name} is {shown(value)}")
    if data.get("method", METHODS[0]) not in METHODS:
        raise DescriptionError(f"there is no method {data['method']!r}")
    return data


def _steps(data: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return each step with its wiring, checked for form; later code checks the content against the call's arrays."""
    steps = data.get("steps", [])
    wiring = data.get("wiring") or [{}] * len(steps)
    if len(steps) > _MAX_STEPS or len(wiring) != len(steps):
        raise DescriptionError(f"it has {len(steps)} steps (at most {_MAX_STEPS}) and {len(wiring)} wirings")
    derivatives = 0
    for step, more in zip(steps, wiring, strict=True):
        kind = step[0] if type(step) is list and step and type(step[0]) is str else None
        if kind not in SUFFIXES or len(step) != (3 if kind == "vmap" else 2) or type(step[-1]) is not list:
            raise DescriptionError(f"there is no step {shown(step)}")
        if type(more) is not dict or not set(more) <= _WIRING[kind == "vmap"]:
            raise DescriptionError(f"there is no wiring {shown(more)} of {kind}")
        derivatives += kind != "vmap"
    if derivatives > _MAX_DERIVATIVES:
        raise DescriptionError(f"it is a derivative of order {derivatives} (at most {_MAX_DERIVATIVES})")
    return list(zip(steps, wiring, strict=True))


def _kernels(op: str, suffix: str) -> list[Kernel[Any, Any]]:
    """Return the latest kernel of each class with the operation's name and version; at least one.

    Several classes may share a name, such as attention with and without buckets.

    Raises:
        DescriptionError: No kernel has that name and version.
    """
    name, _, version = op.rpartition("@v")
    wanted = f"{name.removesuffix(suffix)}@v{version}"
    known = living_kernels()
    if name.endswith(suffix) and wanted in known:
        latest: dict[type, Kernel[Any, Any]] = {}
        for kernel in known[wanted]:
            latest.setdefault(type(kernel), kernel)
        return list(latest.values())[:_MAX_KERNELS]
    others = [other for other in known if other.rpartition("@v")[0] == wanted.rpartition("@v")[0]]
    if others:
        raise DescriptionError(f"there is no kernel {wanted!r} here, only {', '.join(others)}")
    raise DescriptionError(f"there is no kernel {wanted!r} here; name the module that creates it at its top level")


def _invocation(
    kernel: Kernel[Any, Any], data: dict[str, Any], steps: Sequence[tuple[list[Any], dict[str, Any]]]
) -> Invocation[Any, Any]:
    names = names_of(kernel)
    args = undescribe(data["args"], names)
    kwargs = {name: undescribe(value, names) for name, value in data["kwargs"].items()}
    spec, arrays = take_apart(kernel, args, kwargs, data.get("method"))
    builder = _Builder(Forward(spec), [abstract(array) for array in arrays])
    for step, more in steps:
        builder = builder.vmapped(step, more) if step[0] == "vmap" else builder.derived(step, more)
    return invocation_of(builder.node, builder.types, platform=device_kind())


def _numerics(data: dict[str, Any]) -> Numerics:
    """Return the settings in a description; missing settings have JAX's defaults."""
    return numerics_in_force()._replace(
        default_matmul_precision=data.get("precision"),
        enable_x64=data.get("x64", False),
        default_prng_impl=data.get("prng", DEFAULT_PRNG),
        numpy_dtype_promotion=data.get("promotion", DEFAULT_PROMOTION),
    )


@dataclasses.dataclass(frozen=True)
class _Builder:
    """A node under construction.

    Attributes:
        node: The node built so far.
        types: The types of all its arguments.
        linear: The number of trailing arguments in which the node is linear.
        results: The number of results of a linear node.
    """

    node: Node
    types: list[jax.ShapeDtypeStruct]
    linear: int = 0
    results: int = 0

    @property
    def call(self) -> Call:
        return Call(Strong(services.made.default_executor()), self.node, linear=self.linear)

    def vmapped(self, step: Sequence[object], more: Mapping[str, object]) -> _Builder:
        """Return the node under one `vmap`."""
        size, own = step[1], step[2]
        axes = more.get("axes") if self.linear else own
        name = more.get("axis_name")
        if type(size) is not int or size < 0 or type(name) not in (str, type(None)):
            raise DescriptionError(f"there is no vmap of size {shown(size)} with the name {shown(name)}")
        # The transpose of a batched linear call keeps the axes of the arguments whose gradients it computes.
        transposed = bool(self.linear) and more.get("transposed") is True
        fixed = len(self.types) - self.linear
        count = fixed + self.results if transposed else len(self.types)
        if type(axes) is not list or len(axes) != count or not all(map(_is_axis, axes, self._ranks(count))):
            raise DescriptionError(f"the axes {shown(axes)} do not fit {count} arrays")
        level = Level(size, tuple(axes), None if name is None else AxisName(name), None)
        node = Vmapped(self.node, level)
        if self.linear:
            node = (TransposedVmapped if transposed else LinearVmapped)(self.node, level, fixed)
        types = _batched(level, self.types, node.argument_axes(len(self.types)))
        return _Builder(node, types, self.linear, self.results)

    def _ranks(self, count: int) -> list[int]:
        """Return the ranks of `count` arguments; for arguments beyond the node's own, the highest allowed rank."""
        own = len(self.types) if count == len(self.types) else len(self.types) - self.linear
        return [len(like.shape) for like in self.types[:own]] + [MAX_RANK] * (count - own)

    def derived(self, step: list[Any], more: dict[str, Any]) -> _Builder:
        """Return the linear node for the node's tangents or gradients."""
        if more.get("residuals") is True:
            return dataclasses.replace(self, node=self.node.with_residuals()).derived(step, {})
        kind, wrt = step
        if len(wrt) != len(self.types) or any(type(has) is not bool for has in wrt) or not any(wrt):
            raise DescriptionError(f"{kind} needs one flag for each of {len(self.types)} arrays, got {shown(wrt)}")
        tangents = [like for like, has in zip(self.types, wrt, strict=True) if has]
        if not all(map(is_inexact, tangents)):
            raise DescriptionError(f"{kind} of arrays without tangents: {shown(wrt)}")
        results = [abstract(aval) for aval in types_of(self.call, self.types).avals]
        outs = tuple(map(is_inexact, results))
        if not any(outs):
            raise DescriptionError(f"{kind} of a call whose results have no tangents")
        trees = residual_trees(self.call, self.types)
        forward, linear = differentiate(self.node, tuple(wrt), outs, trees)
        saved = types_of(dataclasses.replace(self.call, node=forward), self.types).avals if trees is not None else ()
        given, found = tangents, [like for like, has in zip(results, outs, strict=True) if has]
        if kind == "vjp":
            linear, given, found = linear.transpose, found, given
        return _Builder(linear, [*map(abstract, saved), *self.types, *given], len(given), len(found))


def _is_axis(axis: object, rank: int) -> bool:
    return axis is None or (type(axis) is int and 0 <= axis <= rank)


def _batched(level: Level, types: Sequence[jax.ShapeDtypeStruct], axes: Sequence[int | None]) -> list[Any]:
    """Return the types of the arguments with the batch axis inserted."""
    batched = list(map(level.batched, types, axes))
    for like in batched:
        check_size(like.shape, like.dtype)
    return batched
