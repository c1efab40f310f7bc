# SPDX-License-Identifier: Apache-2.0
"""Lowering: the target of the program under way, the rules of a primitive, the program's text, and its tracebacks."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _traceback_util
from jax._src.interpreters import mlir as private_mlir
from jax.experimental.xla_metadata import set_xla_metadata as set_xla_metadata
from jax.interpreters import mlir

import ejkernel
from ejkernel.compat.processes import Span, span_of_context
from ejkernel.compat.tracing import evaluate

_mlir: Any = private_mlir
_ir: Any = _mlir.ir
_E = TypeVar("_E", bound=BaseException)
T = TypeVar("T")

# JAX's own filter then leaves our frames out of tracebacks, unless JAX_TRACEBACK_FILTERING=off. Unlike its
# `register_exclusion`, this leaves the source lines in programs as they are.
_PARTS = ("_exclude_paths", "_filtering_mode", "filter_traceback")
_filters_frames = all(hasattr(_traceback_util, name) for name in _PARTS)  # without them tracebacks are only longer
if _filters_frames:
    _traceback_util._exclude_paths.append(str(Path(str(ejkernel.__file__)).parent))

_points_at_lines = _filters_frames and all(
    hasattr(_source_info, name) for name in ("JaxStackTraceBeforeTransformation", "current", "has_user_context")
)
_HERE = "The line above called ejkernel. The error itself follows below, after the line that compiled the program."


def lowering_names(platform: str) -> tuple[str, ...]:
    """Return JAX's lowering names for a kind of device: `gpu` is `cuda`."""
    return ("cuda",) if platform == "gpu" else (platform,)


def lacks_lowering(error: Exception) -> bool:
    """Return whether lowering failed because jaxlib lacks support for that platform."""
    return isinstance(error, ImportError) or "install jaxlib" in str(error)


Answers = dict[Callable[[], Any], Any]


class _Target(NamedTuple):
    """The program being lowered or traced.

    Attributes:
        platforms: Its platforms; empty while it is traced.
        backend: JAX's backend.
        is_partitioned: Whether XLA's partitioner spreads it over several devices.
        is_split_by_xla: Whether XLA's partitioner alone splits it.
        span: Its span.
        answers: Collects the answers that its trace got about it, if any.
    """

    platforms: tuple[str, ...] = ()
    backend: Any = None
    is_partitioned: bool = False
    is_split_by_xla: bool = False
    span: Span | None = None
    answers: Answers | None = None


_NO_TARGET = _Target()
# a context variable and not an argument, because kernels ask from deep inside a lowering
_target: contextvars.ContextVar[_Target] = contextvars.ContextVar("target", default=_NO_TARGET)


@contextlib.contextmanager
def program_under_way(ctx: Any = None, answers: Answers | None = None) -> Iterator[None]:
    """Make the target of the program under way available to the functions below, inside a `with` block.

    Args:
        ctx: The context of a lowering rule; `None` while a call is traced: its target is not known yet.
        answers: Collects the answers of the functions below; a trace that used them is valid only where they are the
            same.
    """
    target = _Target(answers=answers)
    if ctx is not None:
        module, context = ctx.module_context, ctx.module_context.axis_context
        mesh = getattr(context, "mesh", None)
        count = (getattr(context, "num_devices", None) or 1) if mesh is None else mesh.size
        # Under `shard_map` over a whole mesh each shard is a separate call.
        spreads = count > 1 and (mesh is None or set(context.manual_axes) != set(mesh.axis_names))
        is_split = spreads and getattr(context, "device_assignment", None) is None
        span = None if jax.process_count() == 1 else span_of_context(context, spreads)
        target = _Target(tuple(module.platforms), module.backend, spreads, is_split, span, answers)
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def program_span() -> Span | None:
    """Return the span of the program under way; `None` outside lowering and for a single-process program."""
    return _target.get().span


def register_lowering(primitive: Any, rule: Callable[..., Any]) -> None:
    """Register the lowering rule `rule(ctx, *values, **params)` of a primitive."""
    mlir.register_lowering(primitive, rule)


def register_for_export(cls: type, name: str, written: Callable[[Any], str], read: Callable[[str], Any]) -> None:
    """Let `jax.export` store programs whose arguments or results are pytrees of a class.

    Args:
        cls: The class.
        name: Its name in stored programs.
        written, read: Convert the static part of an object to text and back.
    """
    from jax import export

    export.register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=lambda static: written(static).encode(),
        deserialize_auxdata=lambda data: read(bytes(data).decode()),
    )


def lower_function(ctx: Any, function: Callable[..., Sequence[Any]], *values: Any) -> Any:
    """Lower `function` in place of a primitive."""
    return mlir.lower_fun(function, multiple_results=True)(ctx, *values)


def lower_each_platform(ctx: Any, rule: Callable[..., Any], *values: Any) -> Any:
    """Return the lowered results of a primitive, with `rule` called once for each target platform.

    Each call has a context for its platform alone. JAX lowers its own platform branches for all platforms, which fails
    if a branch needs a primitive of one platform.

    Args:
        ctx: The context of JAX's lowering rule.
        rule: A lowering rule, `rule(ctx, *values)`.
        *values: The lowered operands.
    """
    module = ctx.module_context

    def rule_for(platform: str) -> Callable[..., Any]:
        # fresh caches, so that no lowering for another platform is reused
        own = module.replace(platforms=(platform,), lowering_cache={}, cached_primitive_lowerings={})
        return lambda inner, *values: rule(inner.replace(module_context=own, platforms=None), *values)

    rules = {platform: rule_for(platform) for platform in module.platforms}
    return _mlir.lower_per_platform(ctx, str(ctx.primitive), rules, None, ctx.tokens_in.effects(), *values)


def lowered_platform() -> str | None:
    """Return the platform of the program under way; `None` outside lowering or for several platforms."""
    platforms = _target.get().platforms
    return _answered(lowered_platform, platforms[0] if len(platforms) == 1 else None)


class DeviceKind(NamedTuple):
    """A kind of device: its platform, and the name of its chip."""

    platform: str
    chip: str


def absent_device() -> DeviceKind | None:
    """Return the kind of device of the program under way, if this process has none of it; else `None`.

    It is that of the arguments' shardings, e.g. over a topology, or of an abstract mesh. JAX does not tell it in every
    lowering.
    """
    backend = _target.get().backend
    devices = [] if backend is None or backend.local_devices() else backend.devices()
    device = devices[0] if devices else getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return _answered(absent_device, device and DeviceKind(str(device.platform), str(device.device_kind)))


def target_kind() -> str:
    """Return `gpu`, `tpu` or `cpu`: the target of the program under way, or the default backend outside lowering.

    Prefer it to `lowered_platform` in a kernel that must be traced again only if the two differ.
    """
    platforms = _target.get().platforms
    name = platforms[0] if len(platforms) == 1 else jax.default_backend()
    return _answered(target_kind, "gpu" if name in ("cuda", "rocm") else name)


def lowers_for_amd() -> bool:
    """Return whether the program under way is for an AMD GPU."""
    return _answered(lowers_for_amd, _target.get().platforms == ("rocm",))


def is_partitioned() -> bool:
    """Return whether XLA's partitioner spreads the program under way over several devices."""
    return _answered(is_partitioned, _target.get().is_partitioned)


def is_split_by_xla() -> bool:
    """Return whether XLA's partitioner alone splits the program under way.

    If the program's devices are known, custom partitioning can control the split.
    """
    return _answered(is_split_by_xla, _target.get().is_split_by_xla)


def _answered(question: Callable[[], T], answer: T) -> T:
    noted = _target.get().answers
    if noted is not None:
        noted[question] = answer
    return answer


def lower_jaxpr(ctx: Any, jaxpr: Any, scope: str, *values: Any) -> Sequence[Any]:
    """Lower a closed jaxpr in place of a primitive, as part of the function around it, in a named scope."""
    inner = jaxpr.jaxpr
    if getattr(inner, "is_high", False):  # it has high-level operations, which JAX decomposes while tracing
        return list(lower_function(ctx, jax.named_scope(scope)(lambda *arrays: evaluate(jaxpr, arrays)), *values))
    consts = _mlir.ir_consts(jaxpr.consts, [var.aval for var in inner.constvars])
    out, tokens = _mlir.jaxpr_subcomp(
        ctx.module_context,
        inner,
        ctx.name_stack.extend(scope),
        ctx.tokens_in,
        consts,
        *values,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=None,
    )
    ctx.set_tokens_out(tokens)
    return list(out)


def label_value(value: Any, inputs: Sequence[Any], name: str, payload: str) -> bool:
    """Set a frontend attribute on the operation that produces a value of the program.

    Returns:
        Whether that was possible: an input, or an argument of the enclosing function, has no producing operation.
    """
    if any(value == given for given in inputs) or not isinstance(value.owner, _ir.Operation | _ir.OpView):
        return False
    attributes = value.owner.attributes
    known = "mhlo.frontend_attributes"
    found = {entry.name: entry.attr for entry in attributes[known]} if known in attributes else {}
    found[name] = _ir.StringAttr.get(payload)
    attributes[known] = _ir.DictAttr.get(found)
    return True


def without_our_frames(error: _E) -> _E:
    """Return an error without the frames of JAX and ejkernel, which `JAX_TRACEBACK_FILTERING=off` keeps."""
    if not _filters_frames or error.__traceback__ is None or _traceback_util._filtering_mode() == "off":
        return error
    return error.with_traceback(_traceback_util.filter_traceback(error.__traceback__))


@contextlib.contextmanager
def pointing_at_the_call(kind: type[Exception]) -> Iterator[None]:
    """Show the line of the call being lowered in the traceback of errors of this kind.

    JAX does so too, but repeats the whole message there. It lowers an inner function while it handles a `KeyError` of
    its cache, with the text of the whole function; the traceback leaves that error out.
    """
    handled = sys.exception()
    try:
        yield
    except kind as error:
        last: BaseException = error
        while last.__context__ is not None and last.__context__ is not handled:
            last = last.__context__
        last.__context__ = None
        source: Any = _source_info.current().traceback if _points_at_lines else None
        if source is not None and not _source_info.has_user_context(error):
            lines = _traceback_util.filter_traceback(source.as_python_traceback())
            if lines is not None:
                shown = _source_info.JaxStackTraceBeforeTransformation(_HERE).with_traceback(lines)
                shown.__cause__, shown.__context__ = error.__cause__, error.__context__
                shown.__suppress_context__ = error.__suppress_context__
                error.__context__, error.__cause__ = None, shown
        raise
