# SPDX-License-Identifier: Apache-2.0
"""`tune`: a plain function with tunable keyword arguments as a kernel."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ejkernel.ops.config.spaces.space import ConfigSpace, given_constraints
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Out
from ejkernel.ops.errors import ConfigError, KernelError
from ejkernel.ops.utils.checks import asked, named
from ejkernel.ops.utils.storage.serialize import stable_json

Config = dict[str, Any]
Values = Sequence[Any] | Callable[[Invocation[Any, Any]], Sequence[Any]]
Listed = Mapping[str, Values] | ConfigSpace[Any] | Sequence[Mapping[str, Any]]
Space = Listed | Callable[[Invocation[Any, Any]], Listed]
Constraints = Callable[..., Any] | Iterable[Callable[..., Any]]
Bucket = Callable[[Invocation[Any, Any]], tuple[Sequence[Any], Mapping[str, Any]]]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SCALARS = (bool, int, float, str)


def tune(
    *function: Callable[..., Any],
    space: Space | None = None,
    constraints: Constraints = (),
    reference: Callable[..., Any] | None = None,
    heuristic: Callable[[Invocation[Any, Any]], Mapping[str, Any]] | None = None,
    bucket: Bucket | None = None,
    name: str | None = None,
    version: str = "0",
) -> Callable[[Callable[..., Out]], TunedFunction[Out]]:
    """Make a kernel of a function: some of its keyword arguments become its configuration.

    >>> import jax.numpy as jnp
    >>> @tune(space={"rows": [1, 2, 4]})
    ... def total(x, *, rows=2):
    ...     return x.reshape(rows, -1).sum(0).sum()
    >>> float(total(jnp.ones(8)))
    8.0

    The kernel is called as the function was, and resolves the tunable arguments that a call leaves out: from what was
    tuned, or else their defaults. A call that gives all of them runs with these, like one with `cfg=`. A call that
    gives some is a call of its own, with its own key: what it gives is fixed, also while it is tuned.

    A configuration is a dictionary of the tunable arguments; `gelu(x, w, **autotune(gelu, x, w))` is a call too. Their
    values are numbers, texts, booleans, `None`, and tuples of those; a list reaches the function as a tuple.

    Args:
        space: What the tunable arguments may be: the values of each by name, in their order, where a function of the
            invocation may stand for values that depend on shapes; a `ConfigSpace`; a list of dictionaries, which give
            the heuristic's value to what they leave out; or a function of the invocation that returns any of those.
            With that last form all keyword-only parameters are tunable.
        constraints: Conditions on configurations whose values are given by name, as `ConfigSpace` takes them.
        reference: The plain truth that candidates are checked against; called without the tunable arguments. By
            default it is what the heuristic computes.
        heuristic: Returns a good configuration from the invocation, without measuring; what it leaves out has its
            default. Arguments that the call itself gives are in `inv.kwargs`.
        bucket: See `Kernel.bucket`.
        name: Name of the operation in keys and labels; the function's by default. Two operations need two names.
        version: Raise it when old configurations or measurements no longer apply.

    Raises:
        KernelError: the function lacks a tunable argument, or takes it in a way in which it cannot be tuned.
    """

    if function or space is None:
        named = getattr(function[0], "__name__", repr(function[0])) if function else "tune()"
        raise KernelError(
            f"{named}: tune needs to know what the tunable arguments may be, and takes that by keyword; write "
            '@tune(space={"rows": [8, 16]}), with the names of your arguments.'
        )

    def decorate(function: Callable[..., Out]) -> TunedFunction[Out]:
        if not callable(function):
            raise KernelError(f"tune decorates a function, got {function!r}; write @tune(space=...).")
        _check_functions(getattr(function, "__name__", "tune"), heuristic, reference, bucket)
        declared = _Declared(function, space, constraints, heuristic)
        if not isinstance(version, str):
            raise KernelError(f"{declared.called}: version must be a text, got {version!r}.")
        members: dict[str, Any] = {
            "__module__": getattr(function, "__module__", __name__),
            "run": _run(function, declared),
            "version": version,
        }
        if reference is not None:
            members["reference"] = _reference(reference, declared)
        if bucket is not None:
            members["bucket"] = _bucket(bucket)
        # A class for each function, because a hook is something that a kernel's class has.
        cls = type(declared.called, (TunedFunction,), members)
        made: TunedFunction[Out] = cls(function, declared, name)
        return made

    return decorate


def _check_functions(called: str, heuristic: object, reference: object, bucket: object) -> None:
    for name, value in (("heuristic", heuristic), ("reference", reference), ("bucket", bucket)):
        if value is not None and not callable(value):
            raise KernelError(f"{called}: {name} must be a function or None, got {value!r}.")


class TunedFunction(Kernel[Config, Out]):
    """A function as a kernel, made by `tune`; it keeps the function's name, documentation and signature."""

    def __init__(self, function: Callable[..., Out], declared: _Declared, name: str | None) -> None:
        if name is None and not declared.called.isidentifier():
            raise KernelError(f"{declared.called} has no name to be kept under; pass tune(..., name=...).")
        super().__init__(name or declared.called)
        self._declared = declared
        self.choices = frozenset(declared.names)  # saying the default fixes what is to be tuned
        functools.update_wrapper(self, function)
        self.__signature__ = declared.signature

    def __reduce_ex__(self, protocol: object) -> str:
        """Pickle by name, as functions are: another process has a kernel of its own under it."""
        del protocol
        return str(self.__qualname__)  # type: ignore[attr-defined] # the function's

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the function as a method of `instance`, which is then the first argument of every call."""
        return self if instance is None else types.MethodType(self, instance)

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check tunable arguments; all of them together are the call's configuration."""
        fixed = {name: self._declared.checked(name, kwargs[name]) for name in self._declared.names if name in kwargs}
        if len(fixed) < len(self._declared.names):
            return args, {**kwargs, **fixed}
        return args, {**{name: value for name, value in kwargs.items() if name not in fixed}, "cfg": fixed}

    def heuristic_cfg(self, inv: Invocation[Config, Out]) -> Config:
        """Return what the call fixes, what `heuristic=` says, and defaults for the rest."""
        return self._declared.heuristic_cfg(inv)

    def config_space(self, inv: Invocation[Config, Out]) -> Collection[Config]:
        """Return the configurations that agree with what the call fixes."""
        return self._declared.config_space(inv)

    def _check_cfg(self, config: object, name: str) -> None:
        self._declared.checked_config(config, f"{self.op_id}: {name}")


class _Declared:
    """What `tune` was told of a function, checked against it."""

    def __init__(
        self,
        function: Callable[..., Any],
        space: Space,
        constraints: Constraints,
        heuristic: Callable[[Invocation[Any, Any]], Mapping[str, Any]] | None,
    ) -> None:
        self.called: str = getattr(function, "__name__", None) or repr(function)
        with named(self.called):
            self._constraints = given_constraints(constraints)
        self._space, self._heuristic = space, heuristic
        parameters = inspect.signature(function).parameters
        self.names = _names_in(space, parameters, self.called)
        self.signature = _signature(parameters, self.names, self.called)
        defaults = {name: parameters[name].default for name in self.names}
        self._defaults = {
            name: plain(value, f"{self.called}: the default of {name}")
            for name, value in defaults.items()
            if value is not inspect.Parameter.empty
        }
        missing = [name for name in self.names if name not in self._defaults]
        if missing and heuristic is None:
            raise KernelError(
                f"{self.called}: {', '.join(missing)} must have a default, which untuned calls run with; or pass "
                "tune(..., heuristic=...)."
            )
        with named(self.called):
            is_known = not callable(space) and not _depends_on_shapes(space)
            self._static = self._listed(space, {}, self._defaults) if is_known else None
        self._types = _types(self._static, self.names, self._defaults)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Config:
        """Return the configuration of a call that nobody tuned."""
        found = {} if self._heuristic is None else asked(f"{self.called}: heuristic", self._heuristic, inv)
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self.called}: heuristic must return a dictionary, got {found!r}.")
        merged = {**self._defaults, **found, **self._fixed(inv)}
        return self.checked_config(merged, f"{self.called}: what heuristic returns, with the defaults,")

    def config_space(self, inv: Invocation[Any, Any]) -> Collection[Config]:
        """Return the candidates of a call; the heuristic alone where nothing else is left."""
        fixed, base = self._fixed(inv), self.heuristic_cfg(inv)
        if isinstance(self._static, ConfigSpace) and not fixed:
            return self._static
        space = asked(f"{self.called}: space", self._space, inv) if callable(self._space) else self._space
        if isinstance(space, Mapping):
            space = {
                name: asked(f"{self.called}: space[{name!r}]", values, inv) if callable(values) else values
                for name, values in space.items()
            }
        return self._listed(space, fixed, base)

    def checked(self, name: str, value: object) -> Any:
        """Return the value of a tunable argument as plain data.

        Raises:
            ConfigError: it is not, or it is of another type than the values that it may have.
        """
        value = plain(value, f"{self.called}: {name}")
        types = self._types.get(name)
        if types and type(value) not in types and not (type(value) is int and float in types):
            wanted = " or ".join(sorted(kind.__name__ for kind in types))
            raise ConfigError(
                f"{self.called}: {name} must be of type {wanted}, as its other values are; got {value!r}."
            )
        return value

    def checked_config(self, config: object, what: str) -> Config:
        """Return a configuration with plain values.

        Raises:
            ConfigError: it is no dictionary of exactly the tunable arguments, or a value is wrong.
        """
        if not isinstance(config, Mapping) or set(config) != set(self.names):
            raise ConfigError(f"{what} must be a dictionary with {', '.join(self.names)}; got {config!r}.")
        return {name: self.checked(name, config[name]) for name in self.names}

    def _fixed(self, inv: Invocation[Any, Any]) -> Config:
        return {name: inv.kwargs[name] for name in self.names if name in inv.kwargs}

    def _listed(self, space: object, fixed: Config, base: Config) -> Collection[Config]:
        """Return the configurations of `space`, whichever form it has, that agree with `fixed`."""
        if isinstance(space, Mapping):
            self._check_names(space)
            axes = {name: [fixed[name]] if name in fixed else self._values(name, space[name], base) for name in space}
            return _some(ConfigSpace(axes, constraints=self._constraints), base)
        if self._constraints:
            raise KernelError(f"{self.called}: constraints belong to values by name; put them into the ConfigSpace.")
        if isinstance(space, ConfigSpace):
            self._check_names(space.names)
            return _narrowed(space, fixed, base) if fixed else space
        if not isinstance(space, Sequence) or not all(isinstance(entry, Mapping) for entry in space):
            raise KernelError(
                f"{self.called}: space must be values by name, a ConfigSpace or a list of dictionaries; got {space!r}."
            )
        # An entry may be short of what `heuristic=` is yet to say; what is left out is filled in for each call.
        listed = [{**base, **entry} for entry in space]
        return [entry for entry in listed if _agree(entry, fixed)] or [base]

    def _values(self, name: str, values: object, base: Config) -> Sequence[Any]:
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise KernelError(f"{self.called}: space[{name!r}] must be a sequence of values, got {values!r}.")
        if isinstance(values, range):
            return values or ([base[name]] if name in base else [])
        listed = [plain(value, f"{self.called}: a value of {name}") for value in values]
        return listed or ([base[name]] if name in base else [])

    def _check_names(self, names: Iterable[str]) -> None:
        if set(names) != set(self.names):
            raise ConfigError(
                f"{self.called}: space must have values for {', '.join(self.names)}, which are its tunable arguments; "
                f"got {', '.join(names)}. With a function as the space every keyword-only parameter is tunable."
            )


def plain(value: object, what: str) -> Any:
    """Return `value` as it comes back from JSON, with tuples for lists.

    Raises:
        ConfigError: it is no such data.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(plain(item, what) for item in value)
    if value is None or (type(value) in _SCALARS and (type(value) is not float or math.isfinite(value))):
        return value
    raise ConfigError(
        f"{what} must be a number, a text, a boolean, None or a tuple of those, got {value!r}; for a dtype or an enum "
        "pass its name. It is static under jit."
    )


def _names_in(space: object, parameters: Mapping[str, inspect.Parameter], called: str) -> tuple[str, ...]:
    """Return the names of the tunable arguments."""
    if isinstance(space, ConfigSpace):
        names = space.names
    elif isinstance(space, Mapping):
        names = tuple(space)
    elif callable(space):
        names = tuple(name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY)
    elif isinstance(space, Sequence) and all(isinstance(entry, Mapping) for entry in space):
        names = tuple(dict.fromkeys(name for entry in space for name in entry))
    else:
        raise KernelError(
            f"{called}: space must be values by name, a ConfigSpace, a list of dictionaries, or a function of the "
            f"invocation that returns one of those; got {space!r}."
        )
    if not names:
        raise KernelError(f"{called}: space must name at least one tunable argument, got {space!r}.")
    return names


def _signature(parameters: Mapping[str, inspect.Parameter], names: Sequence[str], called: str) -> inspect.Signature:
    """Return the function's signature, with tunable arguments as keyword-only ones."""
    for name in names:
        if name not in parameters or parameters[name].kind not in (*_POSITIONAL[1:], inspect.Parameter.KEYWORD_ONLY):
            raise KernelError(
                f"{called}: space names {name!r}, which must be a parameter that can be passed by keyword; the "
                f"parameters are {', '.join(parameters)}."
            )
    if "cfg" in parameters:
        raise KernelError(f"{called}: the parameter cfg must have another name; calls pass a configuration as cfg=...")
    positional = [p for p in parameters.values() if p.kind in (*_POSITIONAL, inspect.Parameter.VAR_POSITIONAL)]
    while positional and positional[-1].name in names:
        positional.pop()
    behind = [p.name for p in positional if p.name in names]
    if behind:
        raise KernelError(
            f"{called}: {', '.join(behind)} must come after all arguments that are not tunable, behind *."
        )
    kept = {p.name for p in positional}
    rest = [p for p in parameters.values() if p.name not in kept and p.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in rest]
    last = [p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    return inspect.Signature([*positional, *named, *last])


def _run(function: Callable[..., Any], declared: _Declared) -> Callable[..., Any]:
    def run(self: TunedFunction[Any], *args: Any, cfg: Any, **kwargs: Any) -> Any:
        config = declared.checked_config(cfg, f"{self.op_id}: the configuration")
        fixed = {name: kwargs[name] for name in declared.names if name in kwargs}
        if not _agree(config, fixed):
            raise ConfigError(f"{self.op_id}: cfg is {config!r}, but the call says {fixed!r}; leave one of them out.")
        return function(*args, **{**kwargs, **config})

    empty = inspect.Parameter.empty
    cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY)
    parameters = [
        p.replace(default=None) if p.name in declared.names and p.default is empty else p
        for p in declared.signature.parameters.values()
    ]
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    first = inspect.Parameter("_kernel", inspect.Parameter.POSITIONAL_ONLY)  # a method's function has a self of its own
    run.__signature__ = inspect.Signature([first, *parameters[:at], cfg, *parameters[at:]])  # type: ignore[attr-defined]
    return run


def _reference(reference: Callable[..., Any], declared: _Declared) -> Callable[..., Any]:
    def called(self: TunedFunction[Any], *args: Any, **kwargs: Any) -> Any:
        del self
        return reference(*args, **{name: value for name, value in kwargs.items() if name not in declared.names})

    return called


def _bucket(bucket: Bucket) -> Callable[..., Any]:
    def called(self: TunedFunction[Any], inv: Invocation[Any, Any]) -> Any:
        del self
        return bucket(inv)

    return called


def _depends_on_shapes(space: object) -> bool:
    return isinstance(space, Mapping) and any(map(callable, space.values()))


def _types(space: Collection[Config] | None, names: Sequence[str], defaults: Config) -> dict[str, set[type]]:
    """Return the types of each tunable argument's values, where these are all known."""
    if space is None:
        return {}
    if isinstance(space, ConfigSpace):
        values: dict[str, Sequence[Any]] = {
            axis.name: axis.values[:1] if isinstance(axis.values, range) else axis.values for axis in space.axes
        }
    else:
        values = {name: [entry[name] for entry in space if name in entry] for name in names}
    own = {name: [*values[name], *([defaults[name]] if name in defaults else [])] for name in names}
    return {name: {type(plain(value, name)) for value in given} for name, given in own.items()}


def _agree(config: Mapping[str, object], fixed: Config) -> bool:
    return all(stable_json(config.get(name)) == stable_json(value) for name, value in fixed.items())


def _some(space: ConfigSpace[Config], base: Config) -> Collection[Config]:
    return space if base in space or not space.empty() else [base]  # the former is cheap: it lists nothing


def _narrowed(space: ConfigSpace[Config], fixed: Config, base: Config) -> Collection[Config]:
    """Return the part of a space that agrees with `fixed`; what is fixed at another value leaves nothing to choose."""
    narrowed = space.narrowed(fixed)
    return [base] if narrowed is None else _some(narrowed, base)
