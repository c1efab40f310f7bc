# SPDX-License-Identifier: Apache-2.0
"""`Executor`: runs kernels with the configurations that its chooser finds."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, cast, overload

import jax

from ejkernel import compat, settings
from ejkernel.ops.config.agreement.agreement import agreed
from ejkernel.ops.config.cache import HEURISTIC, ConfigCache, same_config
from ejkernel.ops.config.misses.faults import Faults
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy, StalePolicy, effective_policy
from ejkernel.ops.config.selection import BareChooser, ConfigSelectorChain, Resolution
from ejkernel.ops.core.callspec import METHODS, array_names, has_parameter, take_apart
from ejkernel.ops.core.invocation import Invocation, invocation_of
from ejkernel.ops.core.kernel import (
    Kernel,
    check_config,
    config_fault,
    heuristic_config,
    kernel_of,
    prepared,
    unbound,
    with_python_numbers,
)
from ejkernel.ops.core.primitive import Call, Override, call_p, types_of
from ejkernel.ops.core.transformations.nodes import Forward
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import (
    ArgumentError,
    ConfigError,
    EjkernelError,
    KernelError,
    NoConfigError,
    OfflineWarning,
    SerializationError,
)
from ejkernel.ops.execution.body import ResolvedCall, digest_of, runnable, trace_with
from ejkernel.ops.execution.discovery import discover
from ejkernel.ops.execution.eager import NotByEquality, Plans, Traced, is_static, raise_if_unusable
from ejkernel.ops.execution.explain import Explanation, Explanations, explain_call
from ejkernel.ops.utils import services
from ejkernel.ops.utils.error_text import where
from ejkernel.ops.utils.messages.names import check_argument, frames_hidden, hide_frames
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.meta import DEFAULT_PREFIX, is_name
from ejkernel.ops.utils.storage.serialize import stable_json
from ejkernel.ops.utils.values.identity import Strong, identity, token_of
from ejkernel.ops.utils.values.scalars import HOW_TO_KNOW
from ejkernel.ops.utils.values.signature import HasType, as_array, wraps_array

_OWN: Final = ("_plans", "_tables", "generation")  # attributes of an executor that a copy creates anew


class ConfigChooser(Protocol[Cfg, Out]):
    """An object that chooses a call's configuration, such as `ConfigSelectorChain`."""

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the configuration for `inv`."""


class Executor(Generic[Cfg, Out]):
    """Runs kernels with the configurations that `chooser` finds, under every JAX transformation.

    A call's configuration is resolved when the call is lowered, once for each distinct call of a program. Its label
    (see `ejkernel.ops.utils.meta`) appears in the program's text unless `EJKERNEL_OPS_STAMP=none`.

    Args:
        chooser: Finds the configurations.
        stamp_prefix: Prefix of labels.
    """

    def __init__(self, chooser: ConfigChooser[Cfg, Out], stamp_prefix: str = DEFAULT_PREFIX) -> None:
        if not callable(getattr(chooser, "choose", None)):
            raise ConfigError(f"chooser must have choose(inv, kernel), got {chooser!r}; use ConfigSelectorChain().")
        check_argument(is_name(stamp_prefix), "stamp_prefix", "a prefix of labels such as 'my_ops'", stamp_prefix)
        self.chooser = chooser
        self.stamp_prefix = stamp_prefix
        self._plans = Plans(weakref.ref(self))
        # Keep the table itself, so that a lookup needs no Python call.
        self._tables = self._plans.tables.by_address
        self.generation = 0  # changes when eager programs must be compiled again
        cache = getattr(chooser, "cache", None)  # a user's chooser may have none, and not report changes
        if isinstance(cache, ConfigCache):
            cache.subscribe(self._forget_plans)

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own plans, and listens to its own chooser.
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Executor.__init__(self, self.chooser, self.stamp_prefix)

    def __call__(self, kernel: Kernel[Cfg, Out], /, *args: object, cfg: Cfg | None = None, **kwargs: object) -> Out:
        """Run `kernel`.

        Args:
            kernel: The kernel to run.
            *args: Its arguments. Arrays are traced; all others are static.
            cfg: The configuration; `None` lets the chooser find one.
            **kwargs: Its keyword arguments. With `method="shard_map"` also `mesh`, `in_specs` and `out_specs`: the
                call then runs on each device's shard, and is tuned for the shard.
        """
        try:
            return self.call(kernel, args, kwargs, cfg)
        except EjkernelError as error:
            hide_frames(error)
            raise

    def call(self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None) -> Out:
        """Run `kernel`, as `executor(kernel, *args, cfg=cfg, **kwargs)` does."""
        try:
            if cfg is None and (table := self._tables.get(id(kernel))) is not None:
                plan = table[0].get((*map(type, args), *kwargs, *map(type, kwargs.values())))
                # The second time, an eager call costs only two table lookups and the call of a jitted function.
                if plan is not None:
                    try:
                        return cast(Out, plan(*args, **kwargs))
                    except (NotByEquality, Traced):
                        pass
            return self._call(kernel, args, kwargs, cfg)
        except (TypeError, ValueError) as error:
            raise_if_unusable(kernel, args, kwargs, error)
            raise

    @frames_hidden
    def choose_config(
        self, kernel: Kernel[Cfg, Out], /, *args: object, cfg: Cfg | None = None, **kwargs: object
    ) -> Cfg:
        """Return the configuration that a call with these arguments would run with.

        In a program of several processes, this is the choice of this process.
        """
        return self.resolve(self._invocation(kernel, args, kwargs, cfg)).config

    @overload
    def explain(
        self, target: Kernel[Cfg, Out], /, *args: Any, cfg: Cfg | None = None, **kwargs: Any
    ) -> Explanation: ...
    @overload
    def explain(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanations: ...
    @frames_hidden
    def explain(self, target: Any, /, *args: Any, cfg: Cfg | None = None, **kwargs: object) -> Any:
        """Return a call's key, the answer of each tier, and the configuration that the call would run with.

        For a function, such as `flash_attention` or `jax.grad(loss)`, explain each kernel call in it, forward and
        backward. The function is lowered but not run, and calls are not measured.
        """
        target, args = unbound(target, args)
        if isinstance(target, Kernel):
            return explain_call(self.chooser, self._invocation(target, args, kwargs, cfg), self.stamp_prefix)
        given = kwargs if cfg is None else {"cfg": cfg, **kwargs}
        calls = discover(target, *args, **given)
        if not calls:
            warn(f"{where(target)} made no call of an operation; there is nothing to explain.", OfflineWarning)
        return Explanations(explain_call(self.chooser, inv, self.stamp_prefix) for inv in calls)

    @frames_hidden
    def compile(
        self, kernel: Kernel[Cfg, Out], /, *example_args: object, cfg: Cfg | None = None, **example_kwargs: object
    ) -> Callable[..., Out]:
        """Return a function under `jax.jit` that runs `kernel` with the configuration found for the examples.

        The configuration stays the same for all later arguments. The example's static keyword arguments are defaults.
        """
        chosen = self._choose_for_all(self._invocation(kernel, example_args, example_kwargs, cfg))
        defaults = {name: value for name, value in example_kwargs.items() if is_static(value)}

        def compiled(*args: object, **kwargs: object) -> Out:
            return self(kernel, *args, cfg=chosen, **{**defaults, **kwargs})

        static_positions = [index for index, value in enumerate(example_args) if is_static(value)]
        return cast(
            "Callable[..., Out]", jax.jit(compiled, static_argnums=static_positions, static_argnames=list(defaults))
        )

    def resolve(self, inv: Invocation[Cfg, Out]) -> Resolution[Cfg]:
        """Return the configuration for `inv`, and the tier that gave it."""
        chooser: Any = self.chooser
        # A class that overrides only `choose` of a chain expects its own `choose` to decide, and so does an instance.
        scopes = (vars(chooser), *map(vars, type(chooser).__mro__))
        own = next((scope for scope in scopes if "choose" in scope or "resolve" in scope), ("resolve",))
        if "resolve" not in own or not hasattr(chooser, "resolve"):
            chooser = BareChooser(chooser)
        return cast("Resolution[Cfg]", chooser.resolve(inv, kernel_of(inv)))

    def _choose_for_all(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return the configuration for a program that is not compiled yet and may run in several processes."""
        span = compat.processes.any_span()
        if span is None or not effective_policy(self.chooser).agree:
            return self.resolve(inv).config
        spanning = dataclasses.replace(inv, span=span)
        return agreed(spanning, lambda: self.resolve(spanning)).config

    def body_of(
        self, call: Call, platform: str, avals: Sequence[HasType], expected: Sequence[HasType] | None
    ) -> ResolvedCall:
        """Return a call with its configuration, ready to be lowered or run.

        Args:
            call: The call.
            platform: The platform of the program, e.g. `gpu`.
            avals: Types of the arguments.
            expected: Types of the results at tracing; `None` for an eager call.
        """
        override = None if call.override is None else call.override.config
        inv = invocation_of(call.node, avals, platform=platform, override=override)
        if expected is None:  # the call runs eagerly, and its devices are not known yet
            inv = dataclasses.replace(inv, span=compat.processes.any_span())
        if inv.span is not None and effective_policy(self.chooser).agree:
            resolution = agreed(inv, lambda: runnable(inv, call, avals, self.resolve(inv)))
        else:
            resolution = self.resolve(inv)
        # If the trace for the types used this configuration, lower its jaxpr instead of tracing again.
        jaxpr = None if expected is None else trace_with(resolution.config, call, avals, inv.platform)
        return ResolvedCall(call=call, inv=inv, resolution=resolution, expected=expected, jaxpr=jaxpr)

    def instead(self, inv: Invocation[Any, Any], resolution: Resolution[Any], error: Exception) -> Resolution[Any]:
        """Return the resolution of a call whose saved configuration failed: the call is a miss.

        Raises:
            NoConfigError: The policy permits no other configuration. Without a heuristic, `error` is raised.
        """
        kernel, chooser = kernel_of(inv), self.chooser
        try:
            if isinstance(chooser, ConfigSelectorChain) and resolution.key is not None:
                chooser.faults = chooser.faults or Faults()
                chooser.faults.note(inv, kernel, resolution.config, error)
                return self.resolve(inv)
            return Resolution(heuristic_config(kernel, inv), HEURISTIC.name, resolution.key)
        except NoConfigError:
            if effective_policy(chooser).heuristic:
                raise error from None
            raise

    def digest_of(self, call: Call, platform: str, avals: Sequence[HasType]) -> str:
        """Return a digest of a call that splits itself, and of everything that decides how its shards run."""
        return digest_of(call, avals, platform, self.chooser)

    def _forget_plans(self) -> None:
        # For calls that reach the primitive without a plan, for example under an eager `vmap`.
        self.generation += 1
        self._plans.tables.clear()

    def _call(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None) -> Out:
        if not isinstance(kernel, Kernel):
            kernel, args = unbound(kernel, args)
            if not isinstance(kernel, Kernel):
                raise KernelError(f"kernel must be an instance of Kernel, got {kernel!r}.")
        if cfg is not None:
            check_config(kernel, cfg)
        if "method" in kwargs and not has_parameter(kernel, "method"):
            return self._through_method(kernel, args, kwargs, cfg)
        # Plans are jitted functions, and jit is disabled.
        if compat.settings.config.jax_disable_jit:
            return self.bind(kernel, args, kwargs, cfg)
        try:
            return cast(Out, self._plans.run(kernel, args, kwargs, cfg, None if cfg is None else _override_token(cfg)))
        except Traced:
            pass  # bind below: Python would show an error in the kernel as "during handling of" this exception
        return self.bind(kernel, args, kwargs, cfg)

    def bind(
        self,
        kernel: Kernel[Cfg, Out],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        cfg: Cfg | None,
        method: str | None = None,
        *,
        weakly: bool = False,
    ) -> Out:
        """Bind the primitive for a call; with `weakly`, for a plan, which keeps neither executor nor kernel alive."""
        name = "" if cfg is None else "cfg"
        args, kwargs, cfg = _prepared(kernel, args, kwargs, cfg)
        spec, arrays = take_apart(kernel, args, kwargs, method)
        override = None if cfg is None else Override(_override_token(cfg), cfg)
        call = Call(Strong(self), Forward(spec), override=override)
        # The plan outlives this call. The caller keeps executor and kernel alive while it is traced.
        if weakly:
            call = call.weak
        try:
            types = types_of(call, [jax.typeof(array) for array in arrays])
        except _NOT_KNOWN as error:
            unknown = [name for name, array in zip(array_names(spec), arrays, strict=True) if array.shape == ()]
            if not unknown:
                raise
            raise ArgumentError(_needs_number(kernel, unknown)) from error
        except Exception as error:
            if cfg is None or isinstance(error, EjkernelError):
                raise
            inv = invocation_of(call.node, [jax.typeof(array) for array in arrays], platform=jax.default_backend())
            fault = config_fault(inv, cfg, error, name=name)
            if not fault:
                raise
            raise ConfigError(fault) from compat.programs.without_our_frames(error)
        return cast(Out, jax.tree.unflatten(types.trees[0], call_p.bind(*arrays, call=call)))

    def _through_method(
        self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None
    ) -> Out:
        args, named = with_python_numbers(kernel, args, kwargs)
        kwargs = dict(named)
        method = kwargs.pop("method")
        if method is None:
            return self.call(kernel, args, kwargs, cfg)
        if method not in METHODS:
            raise ArgumentError(f"method must be one of {', '.join(METHODS)}, or None; got {method!r}.")
        missing = [name for name in ("mesh", "in_specs", "out_specs") if name not in kwargs]
        if missing:
            raise ArgumentError(f"method='shard_map' needs mesh=, in_specs= and out_specs=; missing {missing}.")
        mesh, in_specs, out_specs = (kwargs.pop(name) for name in ("mesh", "in_specs", "out_specs"))
        # `jax.shard_map` has specs for arrays only, so static arguments bypass it.
        given = [index for index, value in enumerate(args) if not is_static(value)]
        arrays = {name: value for name, value in kwargs.items() if value is not None and not is_static(value)}
        if arrays:
            raise ArgumentError(f"method='shard_map' takes arrays by position, got {', '.join(arrays)} by keyword.")

        def local(*shards: object) -> Out:
            filled = list(args)
            for index, shard in zip(given, shards, strict=True):
                filled[index] = shard
            return self.bind(kernel, tuple(filled), kwargs, cfg, method)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return mapped(*[args[index] for index in given])

    def _invocation(
        self, kernel: Kernel[Cfg, Out], args: tuple[object, ...], kwargs: Mapping[str, object], cfg: Cfg | None
    ) -> Invocation[Cfg, Out]:
        kernel, args = unbound(kernel, args)
        args, kwargs, cfg = _prepared(kernel, args, kwargs, cfg)
        return Invocation(kernel=kernel, args=args, kwargs=kwargs, override_cfg=cfg)


# JAX raises these errors if code uses a traced array as a Python number.
_NOT_KNOWN: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)


def _needs_number(kernel: Kernel[Any, Any], names: Sequence[str]) -> str:
    return (
        f"{kernel.op_id}: run uses a traced array as a Python number, probably {' or '.join(names)}, which has no "
        f"axes. Pass a number instead: {HOW_TO_KNOW}. A parameter that is annotated as a number, such as "
        f"`{names[0]}: int`, also accepts concrete arrays."
    )


def _prepared(
    kernel: Kernel[Cfg, Out], args: tuple[object, ...], kwargs: Mapping[str, object], cfg: object
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments for `run`, and the configuration that the caller passed."""
    # Before `prepare`, so that the kernel's checks see objects with `__jax_array__` as arrays.
    if any(map(wraps_array, jax.tree.leaves((args, kwargs), is_leaf=wraps_array))):
        args, kwargs = jax.tree.map(as_array, (args, kwargs), is_leaf=wraps_array)
    args, kwargs = prepared(kernel, args, kwargs)
    if "cfg" not in kwargs:
        return args, kwargs, cfg
    spelled_out = kwargs["cfg"]
    if cfg is not None and not same_config(cfg, spelled_out):
        raise ConfigError(
            f"{kernel.op_id}: cfg is {cfg!r}, but the arguments give {spelled_out!r}; leave one of them out."
        )
    return args, {name: value for name, value in kwargs.items() if name != "cfg"}, spelled_out


def _override_token(config: object) -> Hashable:
    # Dataclasses are compared by type and fields, like static arguments, and need no hash.
    if dataclasses.is_dataclass(config):
        return token_of(config)
    try:
        return (type(config), stable_json(config))
    except SerializationError as error:
        try:
            hash(config)
        except TypeError:
            raise ConfigError(f"cfg must be hashable or plain data, got {config!r}: {error}") from error
        return identity(config)


_making_default = threading.Lock()


def default_executor() -> Executor[Any, Any]:
    """Return the executor behind `kernel(a, b)` and all modules.

    It looks up configurations in memory and in the persistent cache. On a miss it uses the heuristic, or follows
    `EJKERNEL_ON_MISS`.
    """
    with _making_default:
        if services.made.executor is None:
            now = settings.current()
            policy = AutotunePolicy(
                autotune=now.on_miss == "tune",
                heuristic=now.on_miss != "error",
                note_misses=now.note_misses,
                stale=StalePolicy(**now.stale),
            )
            services.made.executor = Executor(ConfigSelectorChain(ConfigCache(), PersistentCache(), policy=policy))
        return cast("Executor[Any, Any]", services.made.executor)


def set_default_executor(executor: Executor[Any, Any] | None) -> None:
    """Replace the executor behind `kernel(a, b)` and all modules; `None` creates a new one on next use."""
    with _making_default:
        services.made.executor = executor


def _autotune_tier() -> Any:
    from ejkernel.ops.autotuner.tier import AutotuneTier  # the tuner is only imported if needed

    return AutotuneTier()


services.provide(default_executor=default_executor, autotune_tier=_autotune_tier)
