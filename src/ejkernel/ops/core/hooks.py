# SPDX-License-Identifier: Apache-2.0
"""The computation of a kernel: `run`, its gradient and its reference; the form and the checked answer of each hook."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

from ejkernel import compat
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CallError, ConfigError, EjkernelError, KernelError, KernelWarning, UnsupportedError
from ejkernel.ops.utils.error_text import error_text, example_text, instance_text, value_text
from ejkernel.ops.utils.fingerprint import has_mosaic_gpu, platform_kind
from ejkernel.ops.utils.messages.names import field_advice
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.weak_caches import Noted

_NEXT_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# A program's text escapes all other letters, so labels cannot hold them.
_NAME = re.compile(r"[A-Za-z_][\w.\-]*", re.ASCII)
_VERSION = re.compile(r"\w[\w.]*", re.ASCII)
# The forms of a hook for each platform, in order of precedence.
_FORMS = {
    "gpu": ("mosaic_gpu", "triton", "gpu", "cuda", "xla"),
    "tpu": ("pallas", "tpu", "xla"),
    "cpu": ("cpu", "xla"),
}
PLATFORMS = tuple(_FORMS)
_RUN_FORMS = tuple(sorted({f"run_{form}" for forms in _FORMS.values() for form in forms}))
_MISSPELT = 0.9  # similarity of a method's name to that of a hook from which it is probably misspelt
_USUAL_NAMES = {  # names of other libraries and of `Implementation`, and the hooks of kernels that they mean
    **dict.fromkeys(("heuristic", "heuristics", "default_config", "default_cfg"), ("heuristic_cfg",)),
    **dict.fromkeys(("space", "search_space", "configs", "candidates"), ("config_space", "candidate_cfgs")),
}
_FORMS_ON_AMD = ("triton", "gpu", "xla")
_OF_OPERATIONS = ("describe", "unsupported", "heuristic", "space", "params_fault", "doubt", "preference")
T = TypeVar("T")


class Computation(Noted, Generic[Cfg, Out]):
    """The part of a kernel below `Invocation`: hooks that take arrays. `Kernel` adds the hooks that take a call."""

    version: ClassVar[str] = "0"
    keeps_residuals: ClassVar[bool] = False
    why_no_gradient: ClassVar[str] = ""  # see `Operation`
    choices: frozenset[str] = frozenset()
    config_type: ClassVar[type | None] = None
    _interface: ClassVar[type]  # the class with the defaults of all hooks
    _not_for_reference: ClassVar[tuple[str, ...]] = ()  # options of `prepare` that the reference does not get

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = _named_config_type(cls)
        if named is not None and "config_type" not in vars(cls):
            cls.config_type = named
        version: Any = cls.version
        if not isinstance(version, property) and not _VERSION.fullmatch(str(version)):
            raise KernelError(
                f"{cls.__name__}.version must be ASCII letters, digits, '_' or '.', got {version!r}; keys and "
                "labels contain it."
            )
        interface = getattr(cls, "_interface", None)  # `Kernel` itself has none yet
        if interface is not None and not cls.__module__.startswith("ejkernel."):
            warn_of_misspelt_hooks(cls, (interface, Computation), _USUAL_NAMES)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a kernel, unless the arguments are those of a call."""
        _check_created(cls, args, kwargs)
        return super().__new__(cls)

    def __init__(self, name: str | None = None) -> None:
        used = type(self).__name__ if name is None else name
        if not is_name(used):
            raise KernelError(
                f"name must be ASCII letters, digits, '_', '-' or '.', got {used!r}; set a version with "
                "`version = ...`."
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

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for `run`; called once for each call, possibly with tracers.

        A kernel whose arguments spell out the whole configuration may return it as keyword argument `cfg`, which
        overrides every tier, like the caller's `cfg=`.
        """
        return args, kwargs

    # Subclasses choose the hooks' signatures: with *args: Any, **kwargs: Any, type checkers accept all of them.
    def run(self, *args: Any, **kwargs: Any) -> Out:
        """Compute the result: `run(self, ..., *, cfg, ...)`.

        `cfg` must not affect the result's shape or dtype. All arguments except arrays are static.
        """
        raise KernelError(f"{type(self).__name__} has no run; define run(self, ..., *, cfg) or run_<platform>.")

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

    def _check_cfg(self, config: Any, name: str) -> None:
        """Raise unless `config` is a configuration of this kernel; see `check_config`, which checks its type."""

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.op_id_v!r})"


def _check_created(cls: type[Computation[Any, Any]], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise an error that says how to create a kernel, if the arguments are those of a call.

    Raises:
        CallError: An argument is an array, or the class has no own `__init__` and takes no such arguments.
    """
    signature, is_usual = inspect.signature(cls.__init__), cls.__init__ is Computation.__init__
    given = [*args, *kwargs.values()]
    has_array = any(hasattr(value, "shape") for value in given)
    try:
        signature.bind(None, *args, **kwargs)
        fits = True
    except TypeError:
        fits = False
    if (fits and not (is_usual and has_array)) or not (is_usual or has_array):
        return
    if not has_array:
        raise CallError(f"{cls.__name__} takes only the name of the operation; set the rest in the class.")
    raise CallError(f"{no_instance(cls)} and call that.")


def no_instance(cls: type) -> str:
    """Return the begin of a message about a kernel class in place of its instance: how to create the instance."""
    is_usual = cls.__init__ is Computation.__init__  # type: ignore[misc]  # only compared
    name, has_more = _NEXT_WORD.sub("_", cls.__name__).lower(), len(inspect.signature(cls).parameters) > 0
    given = repr(name) if is_usual else "..." if has_more else ""
    return f"{cls.__name__} is a kernel class: create the kernel first, {name} = {cls.__name__}({given}),"


def _named_config_type(cls: type[Computation[Any, Any]]) -> type | None:
    """Return the configuration type that a class names in its bases, as in `Kernel[MyConfig, jax.Array]`.

    `Any` and `object` name none: each configuration then tells its own type.
    """
    for base in vars(cls).get("__orig_bases__", ()):
        origin, args = typing.get_origin(base), typing.get_args(base)
        if isinstance(origin, type) and issubclass(origin, Computation) and args and isinstance(args[0], type):
            return None if args[0] in (Any, object) else args[0]
    return None


def warn_of_misspelt_hooks(
    cls: type, interfaces: Sequence[type], usual: Mapping[str, tuple[str, ...]], *, what: str = "hook"
) -> None:
    """Warn of methods that are never called, because their names are almost those of hooks.

    Args:
        cls: A new class of a user.
        interfaces: The classes with the hooks.
        usual: Names that mean hooks; a class with one of these hooks may use the name for its own method.
        what: The word for a hook in the warning.
    """
    hooks = [name for each in interfaces for name, value in vars(each).items() if name[0] != "_" and callable(value)]
    for name, value in vars(cls).items():
        if name[0] == "_" or not callable(value) or any(hasattr(base, name) for base in cls.__mro__[1:]):
            continue
        meant = _hook_meant(cls, name, hooks, usual.get(name, ()))
        is_form = name not in usual and any(name.startswith(f"{hook}_") for hook in hooks)  # such as `run_gpu`
        if meant and not is_form:
            text = f"{cls.__qualname__}.{name} is no {what} and is never called; did you mean {meant!r}?"
            warn(text, KernelWarning)


def _hook_meant(cls: type, name: str, hooks: Sequence[str], usual: tuple[str, ...]) -> str | None:
    """Return the hook that a method's name probably means; `None` if it may be the author's own method."""
    if usual:  # a class with the hook may call the method in it
        own = [each for base in cls.__mro__ if not base.__module__.startswith("ejkernel.") for each in vars(base)]
        return None if any(each.startswith(usual) and each != name for each in own) else usual[0]
    by_short = {hook.replace("config", "cfg"): hook for hook in hooks}
    close = difflib.get_close_matches(name.replace("config", "cfg"), by_short, n=1, cutoff=_MISSPELT)
    return by_short[close[0]] if close else None


def is_name(name: object) -> bool:
    """Return whether a kernel may have this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def overrides(kernel: Computation[Cfg, Out], name: str) -> bool:
    """Return whether `kernel` overrides the hook `name`."""
    own = getattr(type(kernel), name, None)
    return (own is not None and own is not getattr(kernel._interface, name, None)) or name in vars(kernel)


def reference_result(kernel: Computation[Cfg, Out], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Out:
    """Return the reference's result for the arguments from `prepare`."""
    own = {name: value for name, value in kwargs.items() if name not in kernel._not_for_reference}
    return kernel.reference(*args, **own)


def has_residual_form(kernel: Computation[Cfg, Out]) -> bool:
    """Return whether the kernel's gradient uses residuals: those of its own hooks, or those that JAX saves.

    Raises:
        KernelError: The kernel has only one of the two hooks.
    """
    return writes_residual_form(kernel) or kernel.keeps_residuals


def writes_residual_form(kernel: Computation[Cfg, Out]) -> bool:
    """Return whether the kernel has the hooks `fwd_with_residuals` and `vjp`.

    Raises:
        KernelError: The kernel has only one of the two hooks.
    """
    forward, backward = overrides(kernel, "fwd_with_residuals"), overrides(kernel, "vjp")
    if forward != backward:
        there, missing = ("fwd_with_residuals", "vjp") if forward else ("vjp", "fwd_with_residuals")
        raise KernelError(f"{type(kernel).__name__} has {there} but no {missing}; define both, or custom_vjp.")
    return forward and not kernel.why_no_gradient


def has_gradient_rule(kernel: Computation[Cfg, Out]) -> bool:
    """Return whether the kernel has a gradient rule."""
    return overrides(kernel, "custom_vjp") or writes_residual_form(kernel)


def form_of(kernel: Computation[Cfg, Out], name: str, platform: str, config: object = None) -> str:
    """Return the name of the method that is the form of hook `name` for `platform` and `config`.

    Raises:
        UnsupportedError: `config.platform` names a form that the platform or the kernel does not have.
        KernelError: The kernel does not have the hook in any form.
    """
    kind = platform_kind(platform)
    forms = _FORMS_ON_AMD if kind == "gpu" and compat.programs.lowers_for_amd() else _FORMS.get(kind, (kind, "xla"))
    asked = getattr(config, "platform", None)
    if asked is not None and asked != "auto":
        return _asked_form(kernel, name, str(asked), kind, forms)
    for form in forms:
        if overrides(kernel, f"{name}_{form}") and (form != "mosaic_gpu" or has_mosaic_gpu()):
            return f"{name}_{form}"
    if name == "run" and not overrides(kernel, "run"):
        raise _no_run(kernel, kind)
    return name


def _asked_form(kernel: Computation[Cfg, Out], name: str, asked: str, kind: str, forms: tuple[str, ...]) -> str:
    if asked not in forms:
        raise UnsupportedError(
            f"cfg.platform={asked!r} does not run on {kind!r}; use one of {', '.join(forms)}, or 'auto'."
        )
    if overrides(kernel, f"{name}_{asked}"):
        return f"{name}_{asked}"
    if name == "run" and not overrides(kernel, "run"):
        raise UnsupportedError(f"cfg.platform={asked!r}, but {type(kernel).__name__} has no run_{asked} and no run.")
    return name


def _no_run(kernel: Computation[Cfg, Out], kind: str) -> Exception:
    forms = run_forms(kernel)
    if not forms:
        return KernelError(f"{type(kernel).__name__} has no run; define run(self, ..., *, cfg) or run_<platform>.")
    return UnsupportedError(
        f"{type(kernel).__name__} does not run on {kind!r}: it has {', '.join(forms)} and no plain run."
    )


def run_forms(kernel: Computation[Cfg, Out]) -> list[str]:
    """Return the names of the platform forms of `run` that the kernel has, sorted."""
    return [form for form in _RUN_FORMS if overrides(kernel, form)]


def platform_to_trace_for(kernel: Computation[Cfg, Out], default: str) -> str:
    """Return the platform with the hooks that give the types of a call before its platform is known.

    This is the platform of the default backend if the kernel runs on it, else any platform on which the kernel runs: a
    program may be lowered for a platform that this process does not have.
    """
    if overrides(kernel, "run"):
        return default
    for platform in (default, *_FORMS):
        if any(overrides(kernel, f"run_{form}") for form in _FORMS.get(platform, ())):
            return platform
    raise _no_run(kernel, default)


def check_config(kernel: Computation[Cfg, Out], config: object, name: str = "cfg") -> None:
    """Check that `config` is a configuration of the kernel, of its type if the kernel declares a dataclass.

    Raises:
        ConfigError: It is not.
    """
    expected = kernel.config_type
    if expected is not None and dataclasses.is_dataclass(expected) and not isinstance(config, expected):
        raise ConfigError(
            f"{kernel.op_id}: {name} must be a {expected.__name__}, got {instance_text(config, expected)}"
            f"{example_text(expected)}"
        )
    kernel._check_cfg(config, name)


def _form_for(kernel: Computation[Cfg, Out], name: str, inv: Any) -> str:
    """Return the form of a hook for a call: for a backward call the backward's own hook, if the kernel has it."""
    if inv.direction == "bwd":
        # Both names of the forward's space, `config_space` and `candidate_cfgs`, map to `bwd_config_space`.
        own = form_of(kernel, f"bwd_{name}".replace("candidate_cfgs", "config_space"), inv.platform)
        if overrides(kernel, own):
            return own
    return form_of(kernel, name, inv.platform)


def has_backward_heuristic(kernel: Computation[Cfg, Out], platform: str) -> bool:
    """Return whether the kernel has a heuristic for the backward call."""
    return overrides(kernel, form_of(kernel, "bwd_heuristic_cfg", platform))


def asked(what: str, function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call a user's function and return its result; `what` names the function in the error.

    Raises:
        KernelError: The function raised an exception that is not an ejkernel error.
    """
    try:
        return function(*args, **kwargs)
    except EjkernelError:
        raise
    except Exception as error:
        inner = _inner_hook(error)
        raise KernelError(f"{what}{inner and f': {inner}'} raised {error_text(error)}{field_advice(error)}") from error


def _inner_hook(error: BaseException) -> str:
    """Return the name of the user's method, of an operation or an implementation, that raised; empty if none did."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, _, name = frame.f_code.co_qualname.rpartition(".")
        if owner and name in _OF_OPERATIONS and not str(frame.f_globals.get("__name__")).startswith("ejkernel."):
            found = f"{owner.rpartition('.')[2]}.{name}"
    return found


def heuristic_config(kernel: Computation[Cfg, Out], inv: Any) -> Any:
    """Return the configuration of the kernel's heuristic for a call, checked."""
    form = _form_for(kernel, "heuristic_cfg", inv)
    config = asked(f"{kernel.op_id}: {form}", getattr(kernel, form), inv)
    if config is None:
        raise ConfigError(
            f"{kernel.op_id}: {form} must return a configuration, got None; without the hook, the first configuration "
            "of config_space applies."
        )
    check_config(kernel, config, f"the result of {form}")
    return config


def candidates(kernel: Computation[Cfg, Out], name: str, inv: Any) -> Collection[Any]:
    """Return the kernel's candidates for a call from the hook `name`, `config_space` or `candidate_cfgs`, checked."""
    form = _form_for(kernel, name, inv)
    answer = asked(f"{kernel.op_id}: {form}", getattr(kernel, form), inv)
    found = check_candidates(answer, f"{kernel.op_id}: the result of {form}")
    if isinstance(found, Sequence):  # only lists: a `ConfigSpace` may be too large to iterate over
        for index, config in enumerate(found):
            check_config(kernel, config, f"item {index} of the result of {form}")
    return found


def check_candidates(found: object, what: str) -> Collection[Any]:
    """Return the candidates after checking that they are a collection; `what` names them in the message.

    Raises:
        ConfigError: The candidates are not a collection.
    """
    if isinstance(found, Collection) and not isinstance(found, str | bytes | Mapping):
        return found
    hint = "; a generator can be iterated only once" if hasattr(found, "__next__") else ""
    raise ConfigError(f"{what} must be a list of configurations or a ConfigSpace, got {value_text(found)}{hint}.")


def same_code(left: Computation[Cfg, Out], right: Computation[Cfg, Out]) -> bool:
    """Return whether two kernels run the same code; their attributes may differ."""
    names = (*_RUN_FORMS, "run", "custom_vjp", "fwd_with_residuals", "vjp")
    mine, other = (
        [getattr(type(kernel), name, None) for name in names] + [vars(kernel).get("__wrapped__")]
        for kernel in (left, right)
    )
    return all(a is b or _code(a) == _code(b) for a, b in zip(mine, other, strict=True))


def _code(function: object) -> Any:
    """Return the bytecode, names and constants of a function or code, without file names and line numbers."""
    code = getattr(function, "__code__", function)
    if not isinstance(code, types.CodeType):
        return None
    # As text, because 1, 1.0 and True compare equal.
    constants = tuple(_code(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts)
    return code.co_code, code.co_names, constants
