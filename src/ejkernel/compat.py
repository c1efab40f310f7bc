# SPDX-License-Identifier: Apache-2.0
"""Every call into JAX that differs between its versions, or is not yet public, in one place."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api_util, array, core, effects, linear_util, tree_util
from jax._src import config as jax_config
from jax._src.interpreters import mlir as private_mlir
from jax._src.interpreters import partial_eval
from jax._src.state import types as state_types
from jax.experimental.xla_metadata import set_xla_metadata as set_xla_metadata
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

_core: Any = core
_api_util: Any = api_util
_linear_util: Any = linear_util
_partial_eval: Any = partial_eval
_jax_config: Any = jax_config
_effects: Any = effects
_state_types: Any = state_types
_mlir: Any = private_mlir
_ir: Any = _mlir.ir
make_user_context: Any = jax.make_user_context
# `jax.extend.core` names this class, but it imports Pallas: a third of the time that `import ejkernel.ops` took.
Primitive: Any = type(jax.lax.add_p)
dtypes: Any = jax.dtypes
ArrayImpl: Any = array.ArrayImpl
finfo: Any = jnp.finfo

# The stubs of `jax.config` name none of its options.
_config: Any = jax.config


def matmul_precision() -> str | None:
    """Return the default matmul precision in force, or `None`."""
    precision = _config.jax_default_matmul_precision
    return None if precision is None else str(precision)


def x64_enabled() -> bool:
    """Return whether 64-bit types are enabled."""
    return bool(_config.jax_enable_x64)


class Numerics(NamedTuple):
    """JAX's settings that decide what a traced function computes, as `jax.config` has them."""

    default_matmul_precision: str | None
    enable_x64: bool
    default_prng_impl: str
    numpy_dtype_promotion: str
    numpy_rank_promotion: str
    threefry_partitionable: bool
    softmax_custom_jvp: bool


def numerics_in_force() -> Numerics:
    """Return this thread's settings."""
    return Numerics(
        _config.jax_default_matmul_precision,
        _config.jax_enable_x64,
        _config.jax_default_prng_impl,
        _config.jax_numpy_dtype_promotion,
        _config.jax_numpy_rank_promotion,
        _config.jax_threefry_partitionable,
        _config.jax_softmax_custom_jvp,
    )


@contextlib.contextmanager
def numerics(wanted: Numerics) -> Iterator[None]:
    """Put settings in force.

    Raises:
        ValueError: JAX knows no such value of one of them.
    """
    with contextlib.ExitStack() as stack:
        for name, now, value in zip(Numerics._fields, numerics_in_force(), wanted, strict=True):
            if now != value:
                stack.enter_context(getattr(jax, name)(value))
        yield


def settings_name(value: Any) -> str:
    """Return the name of a setting's value, which is an enumeration's member in some versions of JAX."""
    return str(getattr(value, "value", value))


def jit_disabled() -> bool:
    """Return whether `jax.disable_jit` is in force."""
    return bool(_config.jax_disable_jit)


def chosen_device() -> Any:
    """Return the device or platform name that `jax.default_device` chose, or `None`."""
    return _config.jax_default_device


def varying_axes(value: Any) -> frozenset[str]:
    """Return the mesh axes over which `value` may differ between devices, inside `shard_map`."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def match_varying(primal: Any, gradient: Any) -> Any:
    """Return `gradient` summed over, or spread to, the mesh axes that `primal` varies over.

    A rule's gradient of a replicated argument differs between devices, and the argument's gradient is their sum.
    """
    have, want = varying_axes(gradient), varying_axes(primal)
    if have - want:
        gradient = jax.lax.psum(gradient, tuple(sorted(have - want)))
    if want - have:
        gradient = jax.lax.pcast(gradient, tuple(sorted(want - have)), to="varying")
    return gradient


def key_implementation(dtype: Any) -> str:
    """Return the name of the generator that random keys of this dtype are for."""
    return str(dtype._impl.name)


def weakly_typed(value: Any) -> Any:
    """Return `value` as an array whose type gives way to others', as that of a Python number does."""
    from jax._src.lax.lax import _convert_element_type

    return _convert_element_type(value, jnp.dtype(value.dtype), weak_type=True)


def zeros_of_tangent(value: Any) -> Any:
    """Return the zero tangent of `value`: `float0` for integers, and varying as `value` does."""
    dtype = jax.typeof(value).to_tangent_aval().dtype
    if dtype == jax.dtypes.float0:
        return np.zeros(value.shape, dtype)
    return match_varying(value, jnp.zeros(value.shape, dtype))


def instantiated(aval: Any) -> Any:
    """Return zeros of a type."""
    return ad.instantiate_zeros(ad.Zero(aval))


def is_zero_tangent(tangent: Any) -> bool:
    """Return whether a differentiation rule was handed "no tangent"."""
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def zero_for(value: Any) -> Any:
    """Return the symbolic zero tangent for a result `value` of a differentiation rule."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def lowering_names(platform: str) -> tuple[str, ...]:
    """Return what JAX calls a kind of device that it lowers programs for."""
    return ("cuda",) if platform == "gpu" else (platform,)


def lacks_lowering(error: Exception) -> bool:
    """Return whether a program was not lowered for want of what jaxlib has for that platform."""
    return isinstance(error, ImportError) or "install jaxlib" in str(error)


def leave_devices_alone() -> None:
    """Let JAX use nothing but the CPU in this process, whatever there is; to be called before its first use."""
    jax.config.update("jax_platforms", "cpu")


def forget_compilations() -> None:
    """Let JAX neither use nor fill its persistent compilation cache in this process."""
    jax.config.update("jax_enable_compilation_cache", False)


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """Return the platforms that a lowering rule's program is for."""
    return tuple(ctx.module_context.platforms)


_axis_context: contextvars.ContextVar[Any] = contextvars.ContextVar("axis_context", default=None)
_platforms: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("platforms", default=())


@contextlib.contextmanager
def lowering(ctx: Any) -> Iterator[None]:
    """Let the functions below tell what the program that is being lowered is for."""
    token, platforms = _axis_context.set(ctx.module_context.axis_context), _platforms.set(lowering_platforms(ctx))
    try:
        yield
    finally:
        _axis_context.reset(token)
        _platforms.reset(platforms)


def lower_function(ctx: Any, function: Callable[..., Sequence[Any]], *values: Any) -> Any:
    """Lower `function` in place of a primitive."""
    return mlir.lower_fun(function, multiple_results=True)(ctx, *values)


def lowered_platform() -> str | None:
    """Return the platform of the program that is being lowered; `None` outside it, or for several."""
    platforms = _platforms.get()
    return _answered(lowered_platform, platforms[0] if len(platforms) == 1 else None)


def is_partitioned() -> bool:
    """Return whether XLA's partitioner spreads the program that is being lowered over several devices.

    Under `shard_map` over a whole mesh it does not: each device's part is a call of its own there.
    """
    context = _axis_context.get()
    mesh = getattr(context, "mesh", None)
    if mesh is not None:
        return _answered(is_partitioned, bool(mesh.size > 1 and set(context.manual_axes) != set(mesh.axis_names)))
    return _answered(is_partitioned, int(getattr(context, "num_devices", None) or 1) > 1)


def knows_devices() -> bool:
    """Return whether that program's devices are known while it is lowered, as custom partitioning needs it."""
    return _answered(knows_devices, getattr(_axis_context.get(), "device_assignment", None) is not None)


Answers = dict[Callable[[], Any], Any]
_answers: contextvars.ContextVar[Answers | None] = contextvars.ContextVar("answers", default=None)
T = TypeVar("T")


def _answered(question: Callable[[], T], answer: T) -> T:
    noted = _answers.get()
    if noted is not None:
        noted[question] = answer
    return answer


@contextlib.contextmanager
def noting_answers(noted: Answers) -> Iterator[None]:
    """Note what the functions above say: a trace that asked holds only where they say the same."""
    token = _answers.set(noted)
    try:
        yield
    finally:
        _answers.reset(token)


def traced(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """Return the closed jaxpr of a function of flat arrays; `jax.make_jaxpr` and `jit` take twice the time.

    Its constants are tracers where the function uses what another trace, which is still open, computes.
    """
    described = _api_util.debug_info("ejkernel_call", function, tuple(avals), {})
    known = [
        _core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
        if isinstance(aval, jax.ShapeDtypeStruct)
        else aval
        for aval in avals
    ]
    wrapped = _linear_util.wrap_init(function, debug_info=described)
    jaxpr, _, consts = _partial_eval.trace_to_jaxpr_dynamic(wrapped, known)
    return _core.ClosedJaxpr(jaxpr, consts)


def function_of(jaxpr: Any) -> Callable[..., Any]:
    """Return the function that a closed jaxpr is."""
    return lambda *arrays: tuple(_core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arrays))


def trace_context() -> Any:
    """Return a hashable value of all in force that a trace depends on."""
    return _jax_config.trace_context()


def outer_effects(jaxpr: Any) -> Any:
    """Return the effects of a closed jaxpr that whoever calls it has too: not those on its own references."""
    return {
        effect for effect in _core.positional_effects(jaxpr) if not isinstance(effect, _core.InternalMutableArrayEffect)
    }


def has_references(jaxpr: Any) -> bool:
    """Return whether a closed jaxpr makes or takes references (`jax.new_ref`), which are gone in a lowered program."""
    return any(
        isinstance(effect, _core.InternalMutableArrayEffect | _effects.JaxprInputEffect) for effect in jaxpr.effects
    )


def observable(effects: Any) -> bool:
    """Return whether effects are more than collectives: something that must happen once, such as printing."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in effects)


def cache_weakly(cls: type) -> None:
    """Have JAX's caches refer weakly to the instances of `cls` that are parameters of primitives."""
    from jax._src import util

    kinds: Any = util.weakref_cache_key_types
    kinds.add(cls)


def is_reference(aval: Any) -> bool:
    """Return whether a type is that of a reference, `jax.Ref`."""
    return isinstance(aval, _state_types.AbstractRef)


def register_discharge(primitive: Any, rule: Callable[..., tuple[list[Any], Sequence[Any]]]) -> None:
    """Say how a primitive computes on the values of references: `rule(in_avals, *values, **params)`.

    The rule returns the new value of each argument that is a reference, `None` for others, and the results.
    """
    from jax._src.state import discharge

    def discharged(first: Any, *rest: Any, **params: Any) -> tuple[list[Any], Sequence[Any]]:
        in_avals = getattr(
            first, "in_avals", None
        )  # of a context; before JAX 0.11 both lists of types came by themselves
        return rule(first, *rest[1:], **params) if in_avals is None else rule(in_avals, *rest, **params)

    discharge.register_discharge_rule(primitive)(discharged)


def ordered_effects(function: Callable[..., Any], avals: Sequence[Any]) -> list[Any]:
    """Return those effects of a function that must happen in the order of the program."""
    return list(_effects.ordered_effects.filter_in(jax.make_jaxpr(function)(*avals).effects))


def named_axes(effects: Any) -> set[Any]:
    """Return the names of axes that collectives with these effects go over."""
    return {effect.name for effect in effects if isinstance(effect, _core.NamedAxisEffect)}


def is_named(axis_name: Any) -> bool:
    """Return whether somebody gave a `vmap` its axis name; its default is an object of JAX's own."""
    return axis_name is not _core.no_axis_name


def lower_jaxpr(ctx: Any, jaxpr: Any, scope: str, *values: Any) -> Sequence[Any]:
    """Lower a closed jaxpr in place of a primitive, as part of the function around it, in a named scope."""
    consts = _mlir.ir_consts(jaxpr.consts, [var.aval for var in jaxpr.jaxpr.constvars])
    out, tokens = _mlir.jaxpr_subcomp(
        ctx.module_context,
        jaxpr.jaxpr,
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
    """Set a frontend attribute on the operation that made a value of a program's text.

    Returns:
        Whether there is one: a value that *is* an input, or an argument of the function around, was made elsewhere.
    """
    if any(value == given for given in inputs) or not isinstance(value.owner, _ir.Operation | _ir.OpView):
        return False
    attributes = value.owner.attributes
    known = "mhlo.frontend_attributes"
    found = {entry.name: entry.attr for entry in attributes[known]} if known in attributes else {}
    found[name] = _ir.StringAttr.get(payload)
    attributes[known] = _ir.DictAttr.get(found)
    return True


def run_on_platform(branches: Mapping[str, Callable[..., Any]], *values: Any) -> Any:
    """Return the result of the branch whose platform the program runs on, when it is lowered for several."""
    return jax.lax.platform_dependent(*values, **branches)


def lowered_text(lowered: Any) -> str:
    """Return the text of a `jax.stages.Lowered`, or of anything that has `as_text()`; a string is its own text."""
    return lowered if isinstance(lowered, str) else lowered.as_text()


def pytree_node(cls: type, aux: Any, children: Sequence[Any]) -> Any:
    """Return the object of a registered pytree type that has these children.

    jaxlib makes dataclasses without looking how many children there are, and reads beyond the last: that is checked
    before. All others are made in Python, by what their type was registered with.

    Raises:
        ValueError: it is no such type, or has another number of children.
    """
    entry = getattr(tree_util, "_registry", {}).get(cls)  # dataclasses are not there, from JAX 0.11 on
    if entry is not None:
        return entry.from_iter(aux, tuple(children))
    if not dataclasses.is_dataclass(cls):
        raise ValueError("it is no pytree type that can be made of its children")
    like = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(like, field.name, None)
    flat = jax.tree_util.default_registry.flatten_one_level(like)
    if flat is None or type(aux) is not tuple or (len(list(flat[0])), len(flat[1])) != (len(children), len(aux)):
        raise ValueError("it has another number of children, or of static fields")
    leaves, trees = [], []
    for child in children:
        more, tree = jax.tree.flatten(child)
        leaves += more
        trees.append(tree)
    tree_type: Any = jax.tree_util.PyTreeDef
    tree = tree_type.from_node_data_and_children(jax.tree_util.default_registry, (cls, aux), trees)
    return jax.tree.unflatten(tree, leaves)


def cupti_seconds(work: Callable[[], Any]) -> float | None:
    """Run `work`, and return how long the GPU's kernels took, added up; `None` if that cannot be known.

    That is where there is no CUPTI (no NVIDIA GPU, or another profiler is attached), or where no kernel ran. CUPTI
    stays attached, for attaching takes ten milliseconds; `detach_cupti` ends it.
    """
    extension = _cupti()
    try:
        if extension is None:
            return None
        extension._cupti_init()
    except RuntimeError:
        return None
    try:
        jax.block_until_ready(work())
    finally:
        timings = extension._cupti_get_timings(False)  # milliseconds by kernel
    return sum(milliseconds for _, milliseconds in timings) * 1e-3 if timings else None


def detach_cupti() -> None:
    """Leave CUPTI to other profilers."""
    extension = _cupti()
    if extension is not None:
        with contextlib.suppress(RuntimeError):  # somebody else's already
            extension._cupti_init()
            extension._cupti_get_timings(True)


def _cupti() -> Any:
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    extension = vars(mosaic_gpu).get("_mosaic_gpu_ext")
    return extension if hasattr(extension, "_cupti_get_timings") else None


def abstract_gpu(device_kind: str, num_cores: int) -> Any:
    """Return a context in which Pallas sees such a GPU as the device that it lowers for."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

    device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("target",), axis_types=(AxisType.Auto,), abstract_device=device))


def gpu_topology_sharding(description: str) -> Any:
    """Return the sharding of arrays on one GPU that is only described (`GpuTargetConfigProto`, as text)."""
    from jax._src import xla_bridge
    from jax.experimental import topologies

    xla_bridge._discover_and_register_pjrt_plugins()
    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("target",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compiled_for_one_run(lowered: Any, platform: str) -> Any:
    """Return the program compiled soon rather than well: without XLA's own search for fast algorithms on the GPU."""
    if platform == "gpu":
        with contextlib.suppress(Exception):  # such as of a version that has no such option; what follows tells
            return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    return lowered.compile()


def compiled_to_be_checked(lowered: Any, platform: str) -> Any:
    """Return a program that is small and runs once: on a CPU, optimising it takes most of the time."""
    if platform == "cpu":
        with contextlib.suppress(Exception):  # as above
            return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return compiled_for_one_run(lowered, platform)


def serialized(compiled: Any) -> bytes:
    """Return a compiled program as bytes, for `loaded` in a process with the same JAX."""
    from jax.experimental.serialize_executable import serialize

    payload, _, _ = serialize(compiled)
    return bytes(payload)


def loaded(payload: bytes, *, inputs: int, outputs: int) -> Any:
    """Return the program of flat arrays that `serialized` made bytes of, on the default device.

    The bytes are machine code and run as such: only ever load one's own.
    """
    from jax.experimental.serialize_executable import deserialize_and_load

    in_tree = jax.tree.structure(((0,) * inputs, {}))
    out_tree = jax.tree.structure((0,) * outputs)
    device = chosen_device()
    devices = [device] if isinstance(device, jax.Device) else jax.local_devices(backend=device)[:1]
    return deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)


def load_mosaic_gpu_runtime() -> None:
    """Bring the runtime of Mosaic GPU kernels into this process, which a program compiled elsewhere expects there."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    def double(source: Any, target: Any) -> None:
        target[...] = source[...] + source[...]

    ones = jnp.ones((128,), jnp.float32)
    shape = jax.ShapeDtypeStruct(ones.shape, ones.dtype)
    jax.block_until_ready(plgpu.kernel(double, out_type=shape, grid=(1,), grid_names=("x",))(ones))


def profiled_planes(work: Callable[[], Any]) -> list[Any]:
    """Run `work` under the profiler, and return the planes of its trace: `name`, and `lines` of `events`.

    Raises:
        RuntimeError: the profiler cannot be had, such as when another trace is being taken.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # the device's own events are enough
    with tempfile.TemporaryDirectory(prefix="ejkernel-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(work())
        return [
            plane
            for file in sorted(Path(folder).rglob("*.xplane.pb"))
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        ]


def cudnn_attention_forward(
    query: Any, key: Any, value: Any, bias: Any | None, *, scale: float, causal: bool, window: int
) -> tuple[Any, Any]:
    """Run cuDNN's fused attention, and return its output and the float32 log-sum-exp `[batch, heads, queries]`.

    `jax.nn.dot_product_attention` rounds the log-sum-exp to the output's dtype and has no way to hand it to a
    backward of one's own, so the primitives beneath are bound here.

    Args:
        query, key, value: `[batch, length, heads, head_dim]`.
        bias: `[batch or 1, heads or 1, queries, keys]`, of the query's dtype.
        scale: Factor on the product of query and key.
        causal: Hide later keys; the first query is aligned with the first key.
        window: How many keys a query sees, itself included; 0: all. Needs `causal`.
    """
    static = _cudnn_parameters(scale, causal, window, (bias is not None, False)) | {"is_training": True}
    out, stats = _call_cudnn_attention("fwd", _cudnn_operands(query, key, value, bias), static)
    return out, stats


def cudnn_attention_backward(
    operands: tuple[Any, Any, Any, Any | None],
    residuals: tuple[Any, Any],
    dout: Any,
    *,
    scale: float,
    causal: bool,
    window: int,
    bias_gradient: bool,
) -> tuple[Any, ...]:
    """Return cuDNN's gradients of query, key, value and, with `bias_gradient`, bias.

    Args:
        operands: Query, key, value and bias, as `cudnn_attention_forward` takes them.
        residuals: Output and log-sum-exp of the forward.
        dout: Cotangent of the output.
        scale, causal, window: As in the forward.
        bias_gradient: Whether the gradient of the bias is wanted; it is summed where the bias was broadcast.
    """
    static = _cudnn_parameters(scale, causal, window, (operands[3] is not None, bias_gradient))
    out, stats = residuals
    return tuple(_call_cudnn_attention("bwd", (*_cudnn_operands(*operands), stats, out, dout), static))


def _cudnn_operands(query: Any, key: Any, value: Any, bias: Any | None) -> tuple[Any, ...]:
    absent = jnp.zeros(0, query.dtype)  # stands for each of the six optional operands that are not given
    return (query, key, value, absent if bias is None else bias, *[absent] * 6)


def _cudnn_parameters(scale: float, causal: bool, window: int, biases: tuple[bool, bool]) -> dict[str, Any]:
    from jax._src.cudnn import fused_attention_stablehlo as module

    return {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": biases,
        "mask_type": module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": window or None,
    }


def _call_cudnn_attention(direction: str, arrays: tuple[Any, ...], static: dict[str, Any]) -> Any:
    from jax._src.cudnn import fused_attention_stablehlo as module

    function = getattr(module, f"_dot_product_attention_{direction}_impl")
    has_score_mod = "score_mod" in inspect.signature(function).parameters  # since JAX 0.12
    if is_partitioned():  # the form that tells XLA how to spread it
        primitive = getattr(module, f"_dot_product_attention_{direction}_p_wrapper")
        return primitive.bind(*arrays, **static, **({"score_mod": None} if has_score_mod else {}))
    return function(*arrays, **static, **({"score_mod": None, "score_mod_args": ()} if has_score_mod else {}))
