# SPDX-License-Identifier: Apache-2.0
"""The `Kernel` base class: an operation, its configurations and its gradient, and the forms of its hooks."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic

import numpy as np

from ejkernel import compat
from ejkernel.ops.core.types import Cfg, Cost, Out
from ejkernel.ops.errors import ConfigError, KernelError, NoConfigError, UnsupportedError
from ejkernel.ops.utils import services
from ejkernel.ops.utils.error_text import instance_text
from ejkernel.ops.utils.fingerprint import has_mosaic_gpu, platform_kind
from ejkernel.ops.utils.random_arrays import random_inputs
from ejkernel.ops.utils.validation import asked, check_candidates, named
from ejkernel.ops.utils.weak_caches import Noted, living

if typing.TYPE_CHECKING:
    from ejkernel.ops.core.invocation import Invocation
    from ejkernel.ops.core.sharding.parts import CallPart
    from ejkernel.ops.core.sharding.rule import ShardingRule

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
# The forms of a hook for each platform, in order of precedence.
_FORMS = {
    "gpu": ("mosaic_gpu", "triton", "gpu", "cuda", "xla"),
    "tpu": ("pallas", "tpu", "xla"),
    "cpu": ("cpu", "xla"),
}
PLATFORMS = tuple(_FORMS)
_FORMS_ON_AMD = ("triton", "gpu", "xla")


class Kernel(Noted, Generic[Cfg, Out]):
    """An operation whose speed depends on a configuration.

    A subclass defines `run` (or `run_<platform>`), and `heuristic_cfg` or `config_space`; the other hooks are optional.
    Each hook may have a form for one platform, e.g. `run_triton`, `heuristic_cfg_tpu`, `config_space_cpu`. The
    `platform` field of a configuration selects the form of `run`. Without it, the first existing form applies:
    `mosaic_gpu` (Hopper and later), `triton`, `gpu`, `xla` on a GPU; `pallas`, `tpu`, `xla` on a TPU; `cpu`, `xla` on a
    CPU; and finally the plain hook.

    Instances are compared by identity: create one for each operation and keep it, because compiled programs belong to
    it.

    Args:
        name: Name of the operation in keys and labels; the class's name by default.

    Attributes:
        version: Part of every key and label; raise it when old configurations or measurements no longer apply.
        choices: Parameters of `run` for which passing the default differs from omitting the argument.
        keeps_residuals: Whether a kernel without a gradient rule computes its forward only once under `grad`. The
            residuals that JAX saves for `run`, e.g. those of an inner `jax.custom_vjp`, then go to the backward, which
            may have another configuration. So they must mean the same under each configuration, like the residuals of
            `fwd_with_residuals`; tables computed from the configuration alone are exempt.
    """

    version: ClassVar[str] = "0"
    keeps_residuals: ClassVar[bool] = False
    choices: frozenset[str] = frozenset()

    def __init__(self, name: str | None = None) -> None:
        if name is not None and not _is_name(name):
            raise KernelError(
                f"name must be letters, digits, '_', '-' or '.', got {name!r}; set a version with `version = ...`."
            )
        self._name = name

    @property
    def name(self) -> str:
        """The name of the operation."""
        # A subclass need not call `__init__`.
        return getattr(self, "_name", None) or type(self).__name__

    @property
    def op_id(self) -> str:
        """The name of the operation in keys and labels."""
        return self.name

    @property
    def op_id_v(self) -> str:
        """The name with its version, `<op_id>@v<version>`."""
        return f"{self.op_id}@v{self.version}"

    @property
    def config_type(self) -> type | None:
        """The configuration type in the class definition, as in `Kernel[MyConfig, jax.Array]`, or `None`."""
        return config_type_of(type(self))

    def __call__(self, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Run the operation through the default executor."""
        # The attribute is faster than `default_executor()`; eager calls avoid every extra function call.
        executor = services.made.executor or services.default_executor()
        return typing.cast(Out, executor.call(self, args, kwargs, cfg))

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for `run`; called once for each call, possibly with tracers.

        A kernel whose arguments spell out the whole configuration may return it as keyword argument `cfg`, which
        overrides every tier, like the caller's `cfg=`.
        """
        return args, kwargs

    def bucket(self, inv: Invocation[Cfg, Out]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments that represent the call in its key; by default its own.

        Calls with equal representatives share one key and one configuration. Tuning measures the representative, whose
        array sizes and static values may differ from the call's. `run` and `heuristic_cfg` see the call itself. A
        kernel with this hook promises that every configuration runs for every call of the bucket.

        Args:
            inv: The call. Under `vmap` its arguments have the shapes of one example; batch sizes stay in the key.

        Returns:
            Positional and keyword arguments, with `jax.ShapeDtypeStruct` for arrays; see `bucketed`. The hook must be
            idempotent: these arguments represent themselves.
        """
        return inv.abstract_args, inv.abstract_kwargs

    # Subclasses choose the hooks' signatures: with *args: Any, **kwargs: Any, type checkers accept all of them.
    def run(self, *args: Any, **kwargs: Any) -> Out:
        """Compute the result: `run(self, ..., *, cfg, ...)`.

        Shapes and dtypes of the result must not depend on `cfg`. All arguments except arrays are static.
        """
        raise KernelError(f"{type(self).__name__} has no run; define run(self, ..., *, cfg) or run_<platform>.")

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a good configuration without measuring; by default the first candidate."""
        if not overrides(self, _form(self, "config_space", inv.platform, None)) and not overrides(
            self, "candidate_cfgs"
        ):
            raise NoConfigError(self.op_id, ("heuristic",))
        with named(self.op_id):
            for first in candidates_of(self, inv):
                return typing.cast(Cfg, first)
        raise NoConfigError(self.op_id, ("heuristic", "config_space"))

    def config_space(self, inv: Invocation[Cfg, Out]) -> Collection[Cfg]:
        """Return the configurations that tuning tries, a list or a `ConfigSpace`; by default only the heuristic's."""
        return [hook(self, "heuristic_cfg", inv.platform)(inv)]

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Collection[Cfg]:
        """Alias of `config_space`."""
        return typing.cast(Collection[Cfg], hook(self, "config_space", inv.platform)(inv))

    def bwd_heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a good configuration for the backward call; by default that of `heuristic_cfg`.

        A kernel with this hook uses it for untuned backward calls, instead of the configuration tuned for the forward.
        Forward and backward share one configuration type, which may have fields for only one of them.
        """
        # Not `hook`, which prefers the backward's own form: a subclass would recurse.
        return typing.cast(Cfg, getattr(self, _form(self, "heuristic_cfg", inv.platform, None))(inv))

    def bwd_config_space(self, inv: Invocation[Cfg, Out]) -> Collection[Cfg]:
        """Return the configurations that tuning tries for the backward call; by default `config_space`."""
        return typing.cast(Collection[Cfg], getattr(self, _form(self, "config_space", inv.platform, None))(inv))

    def custom_vjp(
        self, primals: tuple[Any, ...], cfg: Cfg, kwargs: dict[str, Any], cotangents: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the gradient of each positional argument (`None`: zero); optional.

        Args:
            primals: The positional arguments of `run`.
            cfg: The configuration of the backward call, resolved independently of the forward's.
            kwargs: The keyword arguments of `run`.
            cotangents: A tuple with one cotangent for each output.
        """
        raise KernelError(f"{type(self).__name__} has no custom_vjp.")

    def fwd_with_residuals(self, *args: Any, **kwargs: Any) -> tuple[Out, Any]:
        """Return the result of `run`, and the residuals for `vjp`; optional, requires `vjp`.

        `fwd_with_residuals(self, ..., *, cfg, ...)`, with the arguments of `run`.

        Residuals mean the same under every configuration: the same structure, shapes and dtypes, and the same values up
        to rounding. Forward and backward are tuned separately, so `vjp` may run with another configuration than the
        forward that made its residuals. Tuning rejects a configuration that breaks this rule.

        Without this hook, a kernel with a loop computes its forward twice under `grad`.
        """
        raise KernelError(f"{type(self).__name__} has no fwd_with_residuals.")

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the gradient of each positional argument (`None`: zero); requires `fwd_with_residuals`.

        `vjp(self, residuals, out, cotangents, ..., *, cfg, ...)`, with the arguments of `run` after `cotangents`, a
        tuple with one entry for each output. `cfg` is the configuration of the backward call; `residuals` may come from
        a forward with another configuration.
        """
        raise KernelError(f"{type(self).__name__} has no vjp.")

    def reference(self, *args: Any, **kwargs: Any) -> Out:
        """Compute the reference result, which candidates are checked against. Default: the heuristic's output."""
        raise KernelError(f"{type(self).__name__} has no reference.")

    def example_inputs(
        self, inv: Invocation[Cfg, Out], rng: np.random.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for measuring `inv`, with its shapes and dtypes; override it if random values are invalid.

        By default floating-point arrays are standard normal, integers are zeros and ones, and booleans fair coins.
        """
        return random_inputs(inv.args, rng), random_inputs(inv.kwargs, rng)

    def example_draws(
        self, inv: Invocation[Cfg, Out], rng: np.random.Generator
    ) -> Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return several sets of arguments by name, for kernels whose speed depends on values; optional.

        A candidate must be correct on each set, and is ranked by the geometric mean of its times. An array object that
        occurs in several sets is copied to the device once. By default the only set is that of `example_inputs`.
        """
        return {"": self.example_inputs(inv, rng)}

    def sharding_rule(self, inv: Invocation[Cfg, Out]) -> ShardingRule | None:
        """Return the rule for splitting the call over the devices of a mesh; `None`, the default, forbids splitting.

        With a rule, a call on sharded arrays splits itself, in automatic and in explicit mode; each device runs its
        shard, with a configuration tuned for the shard. Without a rule, the call sees whole arrays. In explicit mode, a
        kernel that does not override this hook sees sharded types as long as JAX accepts them.

        Args:
            inv: The call, with the shapes of the whole arrays; under `vmap` those of one example.
        """
        return None

    def part_arguments(self, part: CallPart, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one shard of a split call; by default the shards of the call's arrays.

        Override it if a shard needs more, such as its position or the sizes of all shards.

        Floating-point arrays must keep their values and positions, so that gradients stay correct. Other arrays and
        static values may be changed and added.

        Args:
            part: The position of the shard along the axes in `sharding_rule`.
            *args, **kwargs: The arguments of `run`, with this device's shard of each array.
        """
        return args, kwargs

    def refusals(self, inv: Invocation[Cfg, Out]) -> Mapping[str, str]:
        """Return the reason why each unsuitable implementation does not run a call, by its name; for display."""
        return {}

    def why_not(self, inv: Invocation[Cfg, Out], config: Cfg) -> str:
        """Return why a configuration measured elsewhere must not run a call here; `""` if it may."""
        return ""

    def _check_cfg(self, config: Any, name: str) -> None:
        """Raise unless `config` is a configuration of this kernel; the message calls it `name`."""
        expected = self.config_type
        if expected is not None and dataclasses.is_dataclass(expected) and not isinstance(config, expected):
            raise ConfigError(
                f"{self.op_id}: {name} must be a {expected.__name__}, got {instance_text(config, expected)}."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a module-level kernel by name, so that another process uses its own instance instead of a copy."""
        module = type(self).__module__
        # Instances are compared by identity, and functions of the module call the module's instance. A script may
        # create kernels under `if __name__ == "__main__"`, which a worker does not execute.
        if module != "__main__":
            # Iterate over a copy: another thread may import into the module at the same time.
            for name, value in list(vars(sys.modules.get(module, object)).items()):
                if value is self:
                    return name
        return super().__reduce_ex__(protocol)

    def cost(self, inv: Invocation[Cfg, Out]) -> Cost | None:
        """Return the work of a call, including enclosing `vmap`s; `None`, the default, if it is unknown.

        Tuning compares measured times with it, to report how close a configuration comes to the device's peak, and to
        reject impossibly fast times. `inv.direction` tells forward, backward and tangents apart.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.op_id_v!r})"


# Weak, like all tables by class: a class redefined in a notebook is collected together with its kernels.
_config_types: weakref.WeakKeyDictionary[type, type | None] = weakref.WeakKeyDictionary()


def config_type_of(cls: type[Kernel[Any, Any]]) -> type | None:
    """Return the configuration type that a kernel class or one of its bases declares, or `None`."""
    if cls not in _config_types:
        _config_types[cls] = _named_config_type(cls)
    return _config_types[cls]


def _named_config_type(cls: type[Kernel[Any, Any]]) -> type | None:
    for owner in cls.__mro__:
        for base in vars(owner).get("__orig_bases__", ()):
            origin, args = typing.get_origin(base), typing.get_args(base)
            if isinstance(origin, type) and issubclass(origin, Kernel) and args and isinstance(args[0], type):
                return args[0]
    return None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def living_kernels() -> dict[str, list[Kernel[Any, Any]]]:
    """Return the live kernels of this process by versioned name, the latest first."""
    found: dict[str, list[Kernel[Any, Any]]] = {}
    for kernel in reversed(living(Kernel)):
        found.setdefault(kernel.op_id_v, []).append(kernel)
    return found


def overrides(kernel: Kernel[Cfg, Out], name: str) -> bool:
    """Return whether `kernel` overrides the hook `name`."""
    own = getattr(type(kernel), name, None)
    return (own is not None and own is not getattr(Kernel, name, None)) or name in vars(kernel)


def has_residual_form(kernel: Kernel[Cfg, Out]) -> bool:
    """Return whether the kernel's gradient uses residuals: those of its own hooks, or those that JAX saves.

    Raises:
        KernelError: The kernel has only one of the two hooks.
    """
    return writes_residual_form(kernel) or kernel.keeps_residuals


def writes_residual_form(kernel: Kernel[Cfg, Out]) -> bool:
    """Return whether the kernel has the hooks `fwd_with_residuals` and `vjp`.

    Raises:
        KernelError: The kernel has only one of the two hooks.
    """
    forward, backward = overrides(kernel, "fwd_with_residuals"), overrides(kernel, "vjp")
    if forward != backward:
        there, missing = ("fwd_with_residuals", "vjp") if forward else ("vjp", "fwd_with_residuals")
        raise KernelError(f"{type(kernel).__name__} has {there} but no {missing}; define both, or custom_vjp.")
    return forward


def has_gradient_rule(kernel: Kernel[Cfg, Out]) -> bool:
    """Return whether the kernel has a gradient rule."""
    return overrides(kernel, "custom_vjp") or writes_residual_form(kernel)


def hook(kernel: Kernel[Cfg, Out], name: str, platform: str, config: object = None) -> Callable[..., Any]:
    """Return the form of hook `name` for `platform` and `config`, with a check of its result.

    Raises:
        UnsupportedError: `config.platform` names a form that the platform or the kernel does not have.
        KernelError: The kernel does not have the hook in any form.
    """
    form = _form(kernel, name, platform, config)
    check = _CHECKS.get(name)
    if check is not None:
        return functools.partial(check, kernel, form, name)
    return typing.cast(Callable[..., Any], getattr(kernel, form))


def _form(kernel: Kernel[Cfg, Out], name: str, platform: str, config: object) -> str:
    """Return the name of the form; see `hook`."""
    kind = platform_kind(platform)
    forms = _FORMS_ON_AMD if kind == "gpu" and compat.lowers_for_amd() else _FORMS.get(kind, (kind, "xla"))
    asked = getattr(config, "platform", None)
    if asked is not None and asked != "auto":
        return _asked_form(kernel, name, str(asked), kind, forms)
    for form in forms:
        if overrides(kernel, f"{name}_{form}") and (form != "mosaic_gpu" or has_mosaic_gpu()):
            return f"{name}_{form}"
    if name == "run" and not overrides(kernel, "run"):
        raise _no_run(kernel, kind)
    return name


def _asked_form(kernel: Kernel[Cfg, Out], name: str, asked: str, kind: str, forms: tuple[str, ...]) -> str:
    if asked not in forms:
        raise UnsupportedError(
            f"cfg.platform={asked!r} does not run on {kind!r}; use one of {', '.join(forms)}, or 'auto'."
        )
    if overrides(kernel, f"{name}_{asked}"):
        return f"{name}_{asked}"
    if name == "run" and not overrides(kernel, "run"):
        raise UnsupportedError(f"cfg.platform={asked!r}, but {type(kernel).__name__} has no run_{asked} and no run.")
    return name


def _no_run(kernel: Kernel[Cfg, Out], kind: str) -> Exception:
    forms = run_forms(kernel)
    if not forms:
        return KernelError(f"{type(kernel).__name__} has no run; define run(self, ..., *, cfg) or run_<platform>.")
    return UnsupportedError(
        f"{type(kernel).__name__} does not run on {kind!r}: it has {', '.join(forms)} and no plain run."
    )


def run_forms(kernel: Kernel[Cfg, Out]) -> list[str]:
    """Return the names of the platform forms of `run` that the kernel has, sorted."""
    known = sorted({form for forms in _FORMS.values() for form in forms})
    return [f"run_{form}" for form in known if overrides(kernel, f"run_{form}")]


def platform_to_trace_for(kernel: Kernel[Cfg, Out], default: str) -> str:
    """Return the platform whose hooks give the types of a call before its platform is known.

    This is the platform of the default backend if the kernel runs on it, else any platform on which the kernel runs: a
    program may be lowered for a platform that this process does not have.
    """
    if overrides(kernel, "run"):
        return default
    for platform in (default, *_FORMS):
        if any(overrides(kernel, f"run_{form}") for form in _FORMS.get(platform, ())):
            return platform
    raise _no_run(kernel, default)


def check_config(kernel: Kernel[Cfg, Out], config: object, name: str = "cfg") -> None:
    """Check that `config` has the configuration type of the kernel, if the kernel declares a dataclass.

    Raises:
        ConfigError: `config` has another type.
    """
    kernel._check_cfg(config, name)


def _of_direction(kernel: Kernel[Cfg, Out], form: str, name: str, inv: Invocation[Cfg, Out]) -> str:
    """Return the name of the backward's hook if `inv` is a backward call and the kernel has that hook; else `form`."""
    # Both names of the forward's space, `config_space` and `candidate_cfgs`, map to `bwd_config_space`.
    own = f"bwd_{name}".replace("candidate_cfgs", "config_space")
    backward = _form(kernel, own, inv.platform, None) if inv.direction == "bwd" else form
    return backward if overrides(kernel, backward) else form


def has_backward_heuristic(kernel: Kernel[Cfg, Out], platform: str) -> bool:
    """Return whether the kernel has a heuristic for the backward call."""
    return overrides(kernel, _form(kernel, "bwd_heuristic_cfg", platform, None))


def _heuristic_config(kernel: Kernel[Cfg, Out], form: str, name: str, inv: Invocation[Cfg, Out]) -> Any:
    """Return the result of a form of `heuristic_cfg`, checked."""
    form = _of_direction(kernel, form, name, inv)
    config = asked(f"{kernel.op_id}: {form}", getattr(kernel, form), inv)
    if config is None:
        raise ConfigError(
            f"{kernel.op_id}: {form} must return a configuration, got None; without the hook, the first configuration "
            "of config_space applies."
        )
    check_config(kernel, config, f"the result of {form}")
    return config


def _candidates(kernel: Kernel[Cfg, Out], form: str, name: str, inv: Invocation[Cfg, Out]) -> Collection[Any]:
    """Return the result of a form of `config_space`, checked."""
    form = _of_direction(kernel, form, name, inv)
    answer = asked(f"{kernel.op_id}: {form}", getattr(kernel, form), inv)
    found = check_candidates(answer, f"{kernel.op_id}: the result of {form}")
    if isinstance(found, Sequence):  # only lists: a `ConfigSpace` may be too large to iterate over
        for index, config in enumerate(found):
            check_config(kernel, config, f"item {index} of the result of {form}")
    return found


_CHECKS = {"heuristic_cfg": _heuristic_config, "config_space": _candidates, "candidate_cfgs": _candidates}


def unbound(target: object, args: tuple[object, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the kernel behind a bound method, with the object as its first argument; return other targets as is."""
    if isinstance(target, types.MethodType) and isinstance(target.__func__, Kernel):
        return target.__func__, (target.__self__, *args)
    return target, args


def candidates_of(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out]) -> Collection[Any]:
    """Return the kernel's candidates for `inv`, from `candidate_cfgs` or `config_space`."""
    name = "candidate_cfgs" if overrides(kernel, "candidate_cfgs") else "config_space"
    return typing.cast(Collection[Any], hook(kernel, name, inv.platform)(inv))
