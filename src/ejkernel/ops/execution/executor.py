# SPDX-License-Identifier: Apache-2.0
"""`Executor`: runs kernels, with the configuration that its chooser finds."""

from __future__ import annotations

import functools
import logging
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, cast, overload

import jax
import numpy as np

from ejkernel import compat, settings
from ejkernel.ops.config.cache import ConfigCache, config_token, same_config
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain, Resolution
from ejkernel.ops.core.callspec import METHODS, take_apart
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.core.invocation import Invocation, invocation_of
from ejkernel.ops.core.kernel import Kernel, check_config, hook
from ejkernel.ops.core.nodes import Choice, Forward, Node
from ejkernel.ops.core.primitive import Call, Override, call_p, types_of
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import (
    ArgumentError,
    CacheWarning,
    ConfigError,
    KernelError,
    NoConfigError,
    SerializationError,
    UnstableKeyError,
)
from ejkernel.ops.execution.discovery import discover
from ejkernel.ops.execution.explain import Explanation, Explanations, explain_call
from ejkernel.ops.registry import record_invocation
from ejkernel.ops.utils import services
from ejkernel.ops.utils.meta import DEFAULT_PREFIX, label, stamp
from ejkernel.ops.utils.serialize import stable_json
from ejkernel.ops.utils.signature import is_array

logger = logging.getLogger(__name__)

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic)
_BY_VALUE = (bool, int, float, str, bytes, type, np.dtype)


# Where an answer comes from that was given for this very call, rather than for all calls of its bucket.
_FOR_THE_CALL_ITSELF = ("override", "heuristic", "chooser")
_SAVED = ("persistent", "forward")  # found by another process, maybe for another version of the kernel


class _SignedZero(Exception):
    """A call with 0.0 or -0.0 met a plan that does not look at signs: `jit` takes one for the other."""


class ConfigChooser(Protocol[Cfg, Out]):
    """Whoever can say which configuration a call is to run with; `ConfigSelectorChain` is one."""

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the configuration for `inv`."""


class Executor(Generic[Cfg, Out]):
    """Runs kernels with the configurations that `chooser` finds, under every JAX transformation.

    A call's configuration is resolved when the call is lowered, once for each distinct call of a program. Its label
    (see `ejkernel.ops.utils.meta`) appears in the program's text unless `EJKERNEL_OPS_STAMP=none`.

    Args:
        chooser: Who finds configurations.
        stamp_prefix: What labels begin with.
    """

    def __init__(self, chooser: ConfigChooser[Cfg, Out], stamp_prefix: str = DEFAULT_PREFIX) -> None:
        if not callable(getattr(chooser, "choose", None)):
            raise ConfigError(f"chooser must have choose(inv, kernel), got {chooser!r}; use ConfigSelectorChain().")
        self.chooser = chooser
        self.stamp_prefix = stamp_prefix
        # One compiled function for each kernel and tuple of argument types; shapes are left to jit's own C++ cache.
        self._plans: dict[tuple[Any, ...], Callable[..., Out]] = {}
        self._generation = 0
        subscribe = getattr(chooser, "subscribe", None)
        if subscribe is not None:
            subscribe(self._forget_plans)

    def __call__(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Run `kernel`.

        Args:
            kernel: What to run.
            *args: Its arguments. Arrays are traced; all else is static.
            cfg: The configuration to run with; `None` lets the chooser find one.
            **kwargs: Its keyword arguments. With `method="shard_map"` also `mesh`, `in_specs` and `out_specs`: the
                call then runs on each device's part, and is tuned for it.
        """
        if cfg is None:
            plan = self._plans.get((kernel, *map(type, args), *kwargs, *map(type, kwargs.values())))
            if plan is not None:
                try:
                    return plan(*args, **kwargs)
                except _SignedZero:
                    return self._first_call(kernel, args, kwargs, None)
        return self._first_call(kernel, args, kwargs, cfg)

    def choose_config(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Cfg:
        """Return the configuration that a call with these arguments would run with."""
        return self.resolve(self._invocation(kernel, args, kwargs, cfg)).config

    @overload
    def explain(self, target: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Explanation: ...
    @overload
    def explain(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanations: ...
    def explain(self, target: Any, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Any:
        """Say which key a call has, what every tier answers, and which configuration it would run with.

        Nothing is measured. For a function, such as `flash_attention` or `jax.grad(loss)`, each kernel call in it is
        explained, forward and backward; the function is lowered for that, not run.
        """
        if isinstance(target, Kernel):
            return explain_call(self.chooser, self._invocation(target, args, kwargs, cfg), self.stamp_prefix)
        given = kwargs if cfg is None else {"cfg": cfg, **kwargs}
        calls = discover(target, *args, **given)
        return Explanations(explain_call(self.chooser, inv, self.stamp_prefix) for inv in calls)

    def compile(
        self, kernel: Kernel[Cfg, Out], *example_args: Any, cfg: Cfg | None = None, **example_kwargs: Any
    ) -> Callable[..., Out]:
        """Return a function under `jax.jit` that runs `kernel` with the configuration found for the examples.

        The configuration stays, whatever arguments follow. Static keyword arguments of the example are defaults.
        """
        chosen = self.choose_config(kernel, *example_args, cfg=cfg, **example_kwargs)
        defaults = {name: value for name, value in example_kwargs.items() if _is_static(value)}

        def compiled(*args: Any, **kwargs: Any) -> Out:
            return self(kernel, *args, cfg=chosen, **{**defaults, **kwargs})

        static_positions = [index for index, value in enumerate(example_args) if _is_static(value)]
        return cast(
            "Callable[..., Out]", jax.jit(compiled, static_argnums=static_positions, static_argnames=list(defaults))
        )

    def resolve(self, inv: Invocation[Cfg, Out]) -> Resolution[Cfg]:
        """Return the configuration for `inv`, and who says so."""
        kernel = inv.kernel
        if kernel is None:
            raise ArgumentError(f"Invocation of {inv.op_id!r} has no kernel; pass kernel=...")
        resolve = getattr(self.chooser, "resolve", None)
        if resolve is not None:
            return cast("Resolution[Cfg]", resolve(inv, kernel))
        try:
            key = inv.key
        except UnstableKeyError:
            key = None
        if inv.override_cfg is not None:
            return Resolution(inv.override_cfg, "override", key)
        return Resolution(self.chooser.choose(inv, kernel), "chooser", key)

    @property
    def generation(self) -> int:
        """A number that changes when eager programs must be compiled again."""
        return self._generation

    def lower_call(
        self, call: Call, platform: str, expected: Sequence[Any] | None, arrays: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Resolve the call's configuration, compute it, and check the results against the `expected` types."""
        override = None if call.override is None else call.override.config
        avals = [jax.typeof(array) for array in arrays]
        inv = invocation_of(call.node, avals, platform=platform, override=override)
        with jax.named_scope(inv.op_id):
            resolution, out = self._computed(call.node, inv, arrays)
        _check_types(inv, resolution, expected, out)
        if resolution.key is None:
            return tuple(out)
        if current_scope().recording or settings.current().record:
            record_invocation(call.node.spec.kernel, inv)
        return self._stamped(inv, out, arrays)

    def _computed(
        self, node: Node, inv: Invocation[Any, Any], arrays: Sequence[Any]
    ) -> tuple[Resolution[Any], Sequence[Any]]:
        """Compute the call; where a configuration that was saved does not run, with the heuristic's, and a warning."""
        resolution = self.resolve(inv)
        try:
            return resolution, node.flat(Choice(config=resolution.config, platform=inv.platform))(*arrays)
        except Exception as error:
            if inv.representative is not inv and resolution.source not in _FOR_THE_CALL_ITSELF:
                raise _does_not_fit(inv, resolution) from error
            if resolution.source not in _SAVED:
                raise
            try:
                config = hook(node.spec.kernel, "heuristic_cfg", inv.platform)(inv)
            except NoConfigError:
                raise error from None
            text = (
                f"{inv.op_id}: ignoring the saved configuration {resolution.config!r} (call {inv.call_key}), which "
                f"does not run: {type(error).__name__}: {error}; `ejkernel tune --force` finds another."
            )
            warnings.warn(text, CacheWarning, stacklevel=2)
        out = node.flat(Choice(config=config, platform=inv.platform))(*arrays)
        return Resolution(config, "heuristic", resolution.key), out

    def choose_for_types(self, inv: Invocation[Any, Any]) -> Any:
        """Return any configuration for a kernel that has no heuristic."""
        return self.resolve(inv).config

    def _stamped(self, inv: Invocation[Cfg, Out], out: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
        mode = settings.current().stamp
        if mode == "none":
            return tuple(out)
        payload = stable_json(inv.description) if mode == "json" else inv.call_key
        stamped, found = stamp(out, arrays, label(inv.op_id_v, inv.call_key, self.stamp_prefix), payload)
        if not found:
            logger.debug("%s carries no label: each of its results is one of its inputs", inv.op_id_v)
        return tuple(stamped)

    def _forget_plans(self) -> None:
        self._generation += 1
        self._plans = {}

    def _first_call(
        self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None
    ) -> Out:
        if not isinstance(kernel, Kernel):
            raise KernelError(f"kernel must be an instance of Kernel, got {kernel!r}.")
        if cfg is not None:
            check_config(kernel, cfg)
        if "method" in kwargs:
            return self._through_method(kernel, args, kwargs, cfg)
        values = (*args, *kwargs.values())
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
        if traced or compat.jit_disabled() or not all(map(_is_atom, values)):
            return self._bind(kernel, args, kwargs, cfg)
        # Without `cfg` the key must be the one that `__call__` makes.
        token = () if cfg is None else (_override_token(cfg),)
        key = (kernel, *token, *map(type, args), *kwargs, *map(type, kwargs.values()))
        plans = self._plans
        plan = None if cfg is None else plans.get(key)
        if plan is not None:
            return plan(*args, **kwargs)
        plan = self._plan(kernel, cfg, args, kwargs)
        out = plan(*args, **kwargs)
        # Into the table of before the call: another thread may have put a new one, for which this plan is too old.
        plans[key] = plan
        return out

    def _plan(
        self, kernel: Kernel[Cfg, Out], cfg: Cfg | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Out]:
        """Return a compiled function for calls with arguments of the types of `args` and `kwargs`."""
        static_positions = [index for index, value in enumerate(args) if _is_static(value)]
        static_names = [name for name, value in kwargs.items() if _is_static(value)]
        # Looking at signs costs a microsecond a call, so it waits for a zero; with `cfg` a call is slower anyway.
        signed = cfg is not None or any(map(_is_zero, (*args, *kwargs.values())))

        def bind(*args: Any, **kwargs: Any) -> Out:
            if not signed and any(map(_is_zero, (*args, *kwargs.values()))):
                raise _SignedZero
            return self._bind(kernel, args, kwargs, cfg)

        def compiled() -> Callable[..., Out]:
            jitted = jax.jit(functools.partial(bind), static_argnums=static_positions, static_argnames=static_names)
            return cast("Callable[..., Out]", jitted)

        return _by_signs(compiled, args, kwargs) if signed else compiled()

    def _bind(
        self,
        kernel: Kernel[Cfg, Out],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cfg: Cfg | None,
        method: str | None = None,
    ) -> Out:
        args, kwargs, cfg = _prepared(kernel, args, kwargs, cfg)
        spec, arrays = take_apart(kernel, args, kwargs, method)
        call = Call(self, Forward(spec), override=None if cfg is None else Override(_override_token(cfg), cfg))
        types = types_of(call, [jax.typeof(array) for array in arrays])
        return cast(Out, jax.tree.unflatten(types.trees[0], call_p.bind(*arrays, call=call)))

    def _through_method(
        self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None
    ) -> Out:
        kwargs = dict(kwargs)
        method = kwargs.pop("method")
        if method is None:
            return self(kernel, *args, cfg=cfg, **kwargs)
        if method not in METHODS:
            raise ArgumentError(f"method must be one of {', '.join(METHODS)}, or None; got {method!r}.")
        missing = [name for name in ("mesh", "in_specs", "out_specs") if name not in kwargs]
        if missing:
            raise ArgumentError(f"method='shard_map' needs mesh=, in_specs= and out_specs=; missing {missing}.")
        mesh, in_specs, out_specs = (kwargs.pop(name) for name in ("mesh", "in_specs", "out_specs"))
        given = [index for index, value in enumerate(args) if not _is_static(value)]
        arrays = {name: value for name, value in kwargs.items() if not _is_static(value)}
        if arrays:
            raise ArgumentError(f"method='shard_map' takes arrays by position, got {', '.join(arrays)} by keyword.")

        def local(*parts: Any) -> Out:
            filled = list(args)
            for index, part in zip(given, parts, strict=True):
                filled[index] = part
            return self._bind(kernel, tuple(filled), kwargs, cfg, method)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return mapped(*[args[index] for index in given])

    def _invocation(
        self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None
    ) -> Invocation[Cfg, Out]:
        args, kwargs, cfg = _prepared(kernel, args, kwargs, cfg)
        return Invocation(kernel=kernel, args=args, kwargs=kwargs, override_cfg=cfg)


def _prepared(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments as `run` is to see them, and the configuration that the caller insists on."""
    args, kwargs = kernel.prepare(*args, **kwargs)
    if "cfg" not in kwargs:
        return args, kwargs, cfg
    spelled_out = kwargs["cfg"]
    if cfg is not None and not same_config(cfg, spelled_out):
        raise ConfigError(
            f"{kernel.op_id}: cfg is {cfg!r}, but the arguments say {spelled_out!r}; leave one of them out."
        )
    return args, {name: value for name, value in kwargs.items() if name != "cfg"}, spelled_out


def _by_signs(
    compiled: Callable[[], Callable[..., Out]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Out]:
    """Return a function that has one of its own for each combination of signs of the floats among the arguments."""
    floats = [index for index, value in enumerate(args) if type(value) is float]
    names = [name for name, value in kwargs.items() if type(value) is float]
    variants: dict[tuple[float, ...], Callable[..., Out]] = {}

    def by_signs(*args: Any, **kwargs: Any) -> Out:
        values = (*[args[index] for index in floats], *[kwargs[name] for name in names])
        signs = tuple([math.copysign(1.0, value) for value in values])
        if signs not in variants:
            variants[signs] = compiled()
        return variants[signs](*args, **kwargs)

    return by_signs


def _is_zero(value: Any) -> bool:
    return type(value) is float and value == 0.0


def _is_static(value: Any) -> bool:
    return not any(is_array(leaf) for leaf in jax.tree.leaves(value)) and value is not None


def _is_atom(value: Any) -> bool:
    """Return whether the type of `value` tells whether it is an array, and equal values of the type are the same.

    Neither holds for containers, nor for an object that compares by content: `Options(1) == Options(1.0)`.
    """
    if value is None or isinstance(value, (*_ARRAY_TYPES, *_BY_VALUE)):
        return True
    compare: Any = type(value).__eq__
    by_identity = compare is object.__eq__ and type(value).__hash__ is not None
    return by_identity and jax.tree_util.treedef_is_leaf(jax.tree.structure(value))


def _override_token(config: Any) -> Any:
    try:
        return config_token(config)
    except SerializationError as error:
        try:
            hash(config)
        except TypeError:
            raise ConfigError(f"cfg must be hashable or plain data, got {config!r}: {error}") from error
        return (type(config), config)


def _does_not_fit(inv: Invocation[Any, Any], resolution: Resolution[Any]) -> KernelError:
    stands_for_it = (inv.representative.args, dict(inv.representative.kwargs))
    return KernelError(
        f"{inv.op_id}: {resolution.config!r} (from {resolution.source}) was found for {stands_for_it!r} and does not "
        f"run for {(inv.args, dict(inv.kwargs))!r}; a kernel with a bucket hook must run every call of a bucket with "
        "every configuration. Pad inside run, or return a bucket of its own for such a call."
    )


def _check_types(
    inv: Invocation[Any, Any], resolution: Resolution[Any], expected: Sequence[Any] | None, out: Sequence[Any]
) -> None:
    """Raise if the results are not what the call was traced with: then shapes depend on the configuration."""
    if expected is None:
        return
    want = [(tuple(aval.shape), aval.dtype) for aval in expected]
    got = [(tuple(value.shape), value.dtype) for value in out]
    if want != got:
        raise KernelError(
            f"{inv.op_id}: results must have the same shapes and dtypes under every configuration; "
            f"{resolution.config!r} (from {resolution.source}) gives {_shown(got)}, the heuristic gives {_shown(want)}."
        )


def _shown(types: list[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types)


class _Default:
    """The process's default executor, made when it is first needed."""

    def __init__(self) -> None:
        self._executor: Executor[Any, Any] | None = None
        self._lock = threading.Lock()

    def get(self) -> Executor[Any, Any]:
        if self._executor is None:
            with self._lock:
                if self._executor is None:
                    now = settings.current()
                    policy = AutotunePolicy(autotune=now.autotune, heuristic=now.heuristic, note_misses=now.note_misses)
                    self._executor = Executor(ConfigSelectorChain(ConfigCache(), PersistentCache(), policy=policy))
        return self._executor

    def set(self, executor: Executor[Any, Any] | None) -> None:
        with self._lock:
            self._executor = executor


_default = _Default()


def default_executor() -> Executor[Any, Any]:
    """Return the executor behind `kernel(a, b)` and all modules.

    It looks in memory and in the persistent cache; `EJKERNEL_ON_MISS` says what happens on a miss, the heuristic's
    answer by default.
    """
    return _default.get()


def set_default_executor(executor: Executor[Any, Any] | None) -> None:
    """Put another executor behind `kernel(a, b)` and all modules; `None` has a fresh one made."""
    _default.set(executor)


services.provide(default_executor=default_executor)
