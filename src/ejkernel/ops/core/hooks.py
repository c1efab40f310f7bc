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
from ejkernel.ops.utils.instances import Noted, living
from ejkernel.ops.utils.random_arrays import random_inputs
from ejkernel.ops.utils.validation import asked, check_candidates, named

if typing.TYPE_CHECKING:
    from ejkernel.ops.core.invocation import Invocation
    from ejkernel.ops.core.sharding.parts import CallPart
    from ejkernel.ops.core.sharding.rule import ShardingRule

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
# The forms of a hook that may serve a platform, the first that a kernel has wins.
_FORMS = {
    "gpu": ("mosaic_gpu", "triton", "gpu", "cuda", "xla"),
    "tpu": ("pallas", "tpu", "xla"),
    "cpu": ("cpu", "xla"),
}
PLATFORMS = tuple(_FORMS)
_FORMS_ON_AMD = ("triton", "gpu", "xla")


class Kernel(Noted, Generic[Cfg, Out]):
    """An operation whose speed depends on a configuration.

    A subclass writes `run` (or `run_<platform>`), and `heuristic_cfg` or `config_space`; all else has a default.
    Every hook may have forms for one platform: `run_triton`, `heuristic_cfg_tpu`, `config_space_cpu`, ... A
    configuration with a `platform` field decides which form of `run` is meant; otherwise it is the first that exists
    of `mosaic_gpu` (Hopper and later), `triton`, `gpu`, `xla` on a GPU; `pallas`, `tpu`, `xla` on a TPU; `cpu`, `xla`
    on a CPU; and then the plain hook.

    Instances are compared by identity: make one for each operation and keep it, because programs are compiled for it.

    Args:
        name: Name of the operation in keys and labels; the class's name by default.

    Attributes:
        version: Part of every key and label; raise it when old configurations or measurements no longer apply.
        choices: Parameters of `run` for which saying the default is not the same as saying nothing.
        keeps_residuals: Whether a kernel without a gradient rule runs its forward once when it is differentiated: what
            JAX keeps of `run`, such as what a `jax.custom_vjp` inside it saves, is handed to the backward, which may
            have another configuration. So it must mean the same under every one, as the residuals of
            `fwd_with_residuals` do; tables that depend on the configuration alone need not.
    """

    version: ClassVar[str] = "0"
    keeps_residuals: ClassVar[bool] = False
    choices: frozenset[str] = frozenset()

    def __init__(self, name: str | None = None) -> None:
        if name is not None and not _is_name(name):
            raise KernelError(
                f"name must be letters, digits, '_', '-' or '.', got {name!r}; a version is set by `version = ...`."
            )
        self._name = name

    @property
    def name(self) -> str:
        """The name of the operation."""
        # A subclass need not call `__init__`.
        return getattr(self, "_name", None) or type(self).__name__

    @property
    def op_id(self) -> str:
        """The name of the operation, as keys and labels have it."""
        return self.name

    @property
    def op_id_v(self) -> str:
        """The name with its version, `<op_id>@v<version>`."""
        return f"{self.op_id}@v{self.version}"

    @property
    def config_type(self) -> type | None:
        """The configuration type that the class names, as in `Kernel[MyConfig, jax.Array]`, or `None`."""
        return config_type_of(type(self))

    def __call__(self, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Run the operation through the default executor."""
        # An attribute where it was made before: an eager call goes through as few functions as possible.
        executor = services.made.executor or services.default_executor()
        return typing.cast(Out, executor.call(self, args, kwargs, cfg))

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as `run` is to see them; runs once a call, under JAX's tracing.

        Arguments that spell out the whole configuration may be replaced by it: `cfg` among the keyword arguments that
        are returned overrides every tier, as the caller's own `cfg=` does.
        """
        return args, kwargs

    def bucket(self, inv: Invocation[Cfg, Out]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments that stand for the call in its key; by default its own.

        Calls for which equal arguments are returned share one key, and so one configuration: it is found with the
        arguments that are returned, which may differ from the call's in the sizes of arrays and in static values.
        `run` and `heuristic_cfg` see the call itself. To give the hook is to promise that every configuration runs
        for every call of the bucket.

        Args:
            inv: The call. Under `vmap` its arguments are those of one example; sizes of batches stay in the key.

        Returns:
            Positional and keyword arguments, abstract ones (`jax.ShapeDtypeStruct`) for arrays; see `bucketed`.
            For themselves these must stand too.
        """
        return inv.abstract_args, inv.abstract_kwargs

    # The hooks' signatures are the subclass's own: with *args: Any, **kwargs: Any, type checkers accept any.
    def run(self, *args: Any, **kwargs: Any) -> Out:
        """Compute the result: `run(self, ..., *, cfg, ...)`.

        Shapes and dtypes of the result must not depend on `cfg`. Arguments that are not arrays are static.
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
        """Return the configurations that tuning tries, a list or a `ConfigSpace`; by default the heuristic's alone."""
        return [hook(self, "heuristic_cfg", inv.platform)(inv)]

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Collection[Cfg]:
        """Return what `config_space` returns; another name for the same hook."""
        return typing.cast(Collection[Cfg], hook(self, "config_space", inv.platform)(inv))

    def bwd_heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a good configuration of the backward call; by default what `heuristic_cfg` returns.

        With this hook an untuned backward runs with it, and not with what was measured for its forward. The type is
        the forward's: a configuration may have fields that only one of the two looks at.
        """
        # Not by `hook`, which asks for the backward's own form: a kernel that extends this one would come here again.
        return typing.cast(Cfg, getattr(self, _form(self, "heuristic_cfg", inv.platform, None))(inv))

    def bwd_config_space(self, inv: Invocation[Cfg, Out]) -> Collection[Cfg]:
        """Return the configurations that tuning tries for the backward call; by default those of `config_space`."""
        return typing.cast(Collection[Cfg], getattr(self, _form(self, "config_space", inv.platform, None))(inv))

    def custom_vjp(
        self, primals: tuple[Any, ...], cfg: Cfg, kwargs: dict[str, Any], cotangents: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the gradient of each positional argument (`None`: zero); optional.

        Args:
            primals: The positional arguments of `run`.
            cfg: The configuration of the backward call, which is resolved apart from the forward's.
            kwargs: The keyword arguments of `run`.
            cotangents: One for each output; a single output gives a tuple of one.
        """
        raise KernelError(f"{type(self).__name__} has no custom_vjp.")

    def fwd_with_residuals(self, *args: Any, **kwargs: Any) -> tuple[Out, Any]:
        """Return what `run` returns, and what `vjp` needs of it; optional, goes with `vjp`.

        `fwd_with_residuals(self, ..., *, cfg, ...)`, with the arguments of `run`.

        Residuals mean the same under every configuration: the same structure, shapes and dtypes, and the same values up
        to rounding. Forward and backward are tuned separately, so `vjp` may run with another configuration than the
        forward that made its residuals. Tuning rejects a configuration that breaks this rule.

        Without it a kernel that has a loop computes its forward twice under `grad`.
        """
        raise KernelError(f"{type(self).__name__} has no fwd_with_residuals.")

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the gradient of each positional argument (`None`: zero); goes with `fwd_with_residuals`.

        `vjp(self, residuals, out, cotangents, ..., *, cfg, ...)`, followed by the arguments of `run`; `cotangents` is
        a tuple with one entry for each output. `cfg` is the configuration of the backward call; `residuals` may come
        from a forward with any other one.
        """
        raise KernelError(f"{type(self).__name__} has no vjp.")

    def reference(self, *args: Any, **kwargs: Any) -> Out:
        """Compute the result plainly; candidates are checked against it. Default: the heuristic's output."""
        raise KernelError(f"{type(self).__name__} has no reference.")

    def example_inputs(
        self, inv: Invocation[Cfg, Out], rng: np.random.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of `inv`'s signature to measure with; override where random values are wrong.

        By default floating-point arrays are standard normal, integers are zeros and ones, and booleans fair coins.
        """
        return random_inputs(inv.args, rng), random_inputs(inv.kwargs, rng)

    def example_draws(
        self, inv: Invocation[Cfg, Out], rng: np.random.Generator
    ) -> Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return several sets of arguments by name, where what is fast depends on values; optional.

        A candidate must be right on each of them, and is ranked by the geometric mean of its times. Arrays that are
        one object in several sets are one on the device too. By default what `example_inputs` returns is the only set.
        """
        return {"": self.example_inputs(inv, rng)}

    def sharding_rule(self, inv: Invocation[Cfg, Out]) -> ShardingRule | None:
        """Return how the call may be split over the devices of a mesh; `None`, the default, if it may not.

        With a rule the call splits itself wherever its arrays are sharded, in automatic and in explicit mode, and
        each device runs, and is tuned for, its part. Without one it sees arrays as if one device had all of them; in
        explicit mode a kernel that does not override this sees sharded types, as long as JAX takes them.

        Args:
            inv: The call, with the shapes of the whole arrays; under `vmap` those of one example.
        """
        return None

    def part_arguments(self, part: CallPart, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one device's part of a split call; by default its pieces of the whole call's.

        Override it where these do not say all: what a part computes depends on where it lies, or on sizes of all parts.

        Floating-point arrays stay what and where they are, so that gradients follow; other arrays, and static values,
        may be changed and added.

        Args:
            part: Where the part lies along the axes that `sharding_rule` names.
            *args, **kwargs: The arguments as `run` would have them: of arrays what this device has.
        """
        return args, kwargs

    def refusals(self, inv: Invocation[Cfg, Out]) -> Mapping[str, str]:
        """Return why implementations that there are do not run a call, by their names; for people to read."""
        return {}

    def why_not(self, inv: Invocation[Cfg, Out], config: Cfg) -> str:
        """Return why a configuration that was measured elsewhere must not run a call here; empty if it may."""
        return ""

    def _check_cfg(self, config: Any, name: str) -> None:
        """Raise unless `config`, which the message calls `name`, is a configuration of this kernel."""
        expected = self.config_type
        if expected is not None and dataclasses.is_dataclass(expected) and not isinstance(config, expected):
            raise ConfigError(
                f"{self.op_id}: {name} must be a {expected.__name__}, got {instance_text(config, expected)}."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a kernel that its class's module keeps by name, so that another process has one of it, not two."""
        module = type(self).__module__
        # Instances are compared by identity: in a worker this is the one that the module's own functions call. A
        # script's kernels may be made where only the script itself comes by, under `if __name__ == "__main__"`.
        if module != "__main__":
            # A copy, for another thread may import into the module meanwhile.
            for name, value in list(vars(sys.modules.get(module, object)).items()):
                if value is self:
                    return name
        return super().__reduce_ex__(protocol)

    def cost(self, inv: Invocation[Cfg, Out]) -> Cost | None:
        """Return the work that a call asks for, enclosing `vmap`s included; `None`, the default, if that is not known.

        Measured times are held against it: it tells how near a configuration is to what the device can do, and which
        is too fast to be true. `inv.direction` says whether the forward, a backward or a tangent is meant.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.op_id_v!r})"


# Weakly, and so in all tables by class: one that is defined again, as in a notebook, goes with its kernels.
_config_types: weakref.WeakKeyDictionary[type, type | None] = weakref.WeakKeyDictionary()


def config_type_of(cls: type[Kernel[Any, Any]]) -> type | None:
    """Return the configuration type that a kernel class, or one that it is based on, names; or `None`."""
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
    """Return the kernels that this process has made and still holds, by versioned name; the latest first."""
    found: dict[str, list[Kernel[Any, Any]]] = {}
    for kernel in reversed(living(Kernel)):
        found.setdefault(kernel.op_id_v, []).append(kernel)
    return found


def overrides(kernel: Kernel[Cfg, Out], name: str) -> bool:
    """Return whether `kernel` has a hook `name` of its own."""
    own = getattr(type(kernel), name, None)
    return (own is not None and own is not getattr(Kernel, name, None)) or name in vars(kernel)


def has_residual_form(kernel: Kernel[Cfg, Out]) -> bool:
    """Return whether the kernel's gradient uses residuals of its forward: by its own hooks, or what JAX keeps.

    Raises:
        KernelError: one of the two hooks is there without the other.
    """
    return writes_residual_form(kernel) or kernel.keeps_residuals


def writes_residual_form(kernel: Kernel[Cfg, Out]) -> bool:
    """Return whether the kernel has the hooks `fwd_with_residuals` and `vjp`.

    Raises:
        KernelError: one of the two hooks is there without the other.
    """
    forward, backward = overrides(kernel, "fwd_with_residuals"), overrides(kernel, "vjp")
    if forward != backward:
        there, missing = ("fwd_with_residuals", "vjp") if forward else ("vjp", "fwd_with_residuals")
        raise KernelError(f"{type(kernel).__name__} has {there} but no {missing}; define both, or custom_vjp.")
    return forward


def has_gradient_rule(kernel: Kernel[Cfg, Out]) -> bool:
    """Return whether the kernel says how it is differentiated."""
    return overrides(kernel, "custom_vjp") or writes_residual_form(kernel)


def hook(kernel: Kernel[Cfg, Out], name: str, platform: str, config: object = None) -> Callable[..., Any]:
    """Return the form of hook `name` that serves `platform` and `config`; what it returns is checked.

    Raises:
        UnsupportedError: `config.platform` asks for a form that the platform or the kernel does not have.
        KernelError: the kernel has no such hook at all.
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

    That is the default backend's where the kernel runs on it. A program may be lowered for a platform that this
    process does not have, so otherwise any platform that the kernel does run on will do.
    """
    if overrides(kernel, "run"):
        return default
    for platform in (default, *_FORMS):
        if any(overrides(kernel, f"run_{form}") for form in _FORMS.get(platform, ())):
            return platform
    raise _no_run(kernel, default)


def check_config(kernel: Kernel[Cfg, Out], config: object, name: str = "cfg") -> None:
    """Raise unless `config` is one of the kernel's: of the dataclass that its class names, if it names one.

    Raises:
        ConfigError: it is not.
    """
    kernel._check_cfg(config, name)


def _of_direction(kernel: Kernel[Cfg, Out], form: str, name: str, inv: Invocation[Cfg, Out]) -> str:
    """Return the hook that answers for the backward, if `inv` is one and the kernel has it."""
    # The two names of the forward's candidates have one counterpart.
    own = f"bwd_{name}".replace("candidate_cfgs", "config_space")
    backward = _form(kernel, own, inv.platform, None) if inv.direction == "bwd" else form
    return backward if overrides(kernel, backward) else form


def has_backward_heuristic(kernel: Kernel[Cfg, Out], platform: str) -> bool:
    """Return whether the kernel says by itself what an untuned backward runs with."""
    return overrides(kernel, _form(kernel, "bwd_heuristic_cfg", platform, None))


def _heuristic_config(kernel: Kernel[Cfg, Out], form: str, name: str, inv: Invocation[Cfg, Out]) -> Any:
    """Return what a form of `heuristic_cfg` returns, if it is a configuration."""
    form = _of_direction(kernel, form, name, inv)
    config = asked(f"{kernel.op_id}: {form}", getattr(kernel, form), inv)
    if config is None:
        raise ConfigError(
            f"{kernel.op_id}: what {form} returns must be a configuration, got None; without the hook the first of "
            "config_space is taken."
        )
    check_config(kernel, config, f"what {form} returns")
    return config


def _candidates(kernel: Kernel[Cfg, Out], form: str, name: str, inv: Invocation[Cfg, Out]) -> Collection[Any]:
    """Return what a form of `config_space` returns, if it is a collection of configurations."""
    form = _of_direction(kernel, form, name, inv)
    answer = asked(f"{kernel.op_id}: {form}", getattr(kernel, form), inv)
    found = check_candidates(answer, f"{kernel.op_id}: what {form} returns")
    if isinstance(found, Sequence):  # a space may be too large to look at
        for index, config in enumerate(found):
            check_config(kernel, config, f"item {index} of what {form} returns")
    return found


_CHECKS = {"heuristic_cfg": _heuristic_config, "config_space": _candidates, "candidate_cfgs": _candidates}


def unbound(target: object, args: tuple[object, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return a kernel that is a method of an object with that object as its first argument, and all else as it is."""
    if isinstance(target, types.MethodType) and isinstance(target.__func__, Kernel):
        return target.__func__, (target.__self__, *args)
    return target, args


def candidates_of(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out]) -> Collection[Any]:
    """Return the kernel's candidates for `inv`, under whichever of the two names it gives them."""
    name = "candidate_cfgs" if overrides(kernel, "candidate_cfgs") else "config_space"
    return typing.cast(Collection[Any], hook(kernel, name, inv.platform)(inv))
