# SPDX-License-Identifier: Apache-2.0
"""`tune`: turns a plain function with tunable keyword arguments into a kernel."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import numpy as np

from ejkernel.ops.config.spaces.axes import are_values
from ejkernel.ops.config.spaces.space import ConfigSpace, given_constraints
from ejkernel.ops.core.callspec import is_call
from ejkernel.ops.core.hooks import asked, is_name
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.types import Out
from ejkernel.ops.errors import ConfigError, KernelError
from ejkernel.ops.function_signature import signature_for_calls
from ejkernel.ops.utils.messages.names import did_you_mean, frames_hidden, named, names_checked
from ejkernel.ops.utils.storage.serialize import stable_json
from ejkernel.ops.utils.values.scalars import plain

Config = dict[str, Any]
Values = Sequence[Any] | Callable[[Invocation[Any, Any]], Sequence[Any]]
Listed = Mapping[str, Values] | ConfigSpace[Any] | Sequence[Mapping[str, Any]]
Space = Listed | Callable[[Invocation[Any, Any]], Listed]
Constraints = Callable[..., Any] | Iterable[Callable[..., Any]]
Heuristic = Callable[[Invocation[Any, Any]], Mapping[str, Any]]
Examples = Callable[[Invocation[Any, Any], np.random.Generator], Any]
T = TypeVar("T")
P = ParamSpec("P")
Rest = ParamSpec("Rest")
Bucket = Callable[[Invocation[Any, Any]], tuple[Sequence[Any], Mapping[str, Any]]]
Rule = ShardingRule | Callable[[Invocation[Any, Any]], ShardingRule | None]


class _Options(TypedDict, total=False):
    """The keyword arguments of `tune`."""

    space: Space | None
    bwd_space: Space | None
    constraints: Constraints
    reference: Callable[..., Any] | None
    heuristic: Heuristic | None
    bwd_heuristic: Heuristic | None
    example_inputs: Examples | None
    keeps_residuals: bool
    bucket: Bucket | None
    sharding_rule: Rule | None
    name: str | None
    version: str


@overload
def tune(function: Callable[P, Out], /, **options: Unpack[_Options]) -> TunedFunction[P, Out]: ...
@overload
def tune(**options: Unpack[_Options]) -> Callable[[Callable[P, Out]], TunedFunction[P, Out]]: ...
@names_checked(dict.fromkeys(("configs", "search_space", "values"), "space"))
def tune(
    function: Callable[..., Any] | None = None,
    /,
    *,
    space: Space | None = None,
    bwd_space: Space | None = None,
    constraints: Constraints = (),
    reference: Callable[..., Any] | None = None,
    heuristic: Heuristic | None = None,
    bwd_heuristic: Heuristic | None = None,
    example_inputs: Examples | None = None,
    keeps_residuals: bool = False,
    bucket: Bucket | None = None,
    sharding_rule: Rule | None = None,
    name: str | None = None,
    version: str = "0",
) -> Any:
    """Return a kernel made from a function: some of its keyword arguments become its configuration.

    Without `function`, return a decorator: `@tune(space=...)`.

    >>> import jax.numpy as jnp
    >>> @tune(space={"rows": [1, 2, 4]})
    ... def total(x, *, rows=2):
    ...     return x.reshape(rows, -1).sum(0).sum()
    >>> float(total(jnp.ones(8)))
    8.0

    To wrap an imported function, write `tune(function, space=...)`.

    Call the kernel like the function. It fills in omitted tunable arguments from the tuned configuration, or else with
    their defaults. A call that passes all tunable arguments runs with them, as with `cfg=`. A call that passes some of
    them has a separate key, and tuning leaves the passed values fixed.

    A configuration is a dictionary of the tunable arguments, so `gelu(x, w, **autotune(gelu, x, w))` works. Values are
    numbers, strings, booleans, `None`, and tuples of those; the function receives a list as a tuple.

    Args:
        space: The values of the tunable arguments: a mapping from name to values in order, or to a function of the
            invocation if the values depend on shapes; a `ConfigSpace`; a list of dictionaries, whose missing values
            come from the heuristic; or a function of the invocation that returns any of these. With a function, all
            keyword-only parameters are tunable.
        bwd_space: The space of the backward call, by default `space`. In both directions, arguments outside the space
            have the heuristic's values.
        constraints: Conditions on configurations, as for `ConfigSpace`; only for a space that maps names to values.
        reference: The reference function that candidates are checked against, called without the tunable arguments; by
            default the function with the heuristic's configuration.
        heuristic: Returns a good configuration for an invocation, without measuring; missing values have their
            defaults. `inv.kwargs` holds the tunable arguments that the call passes.
        bwd_heuristic: The same for the backward call. Without it, an untuned backward runs with the configuration tuned
            for its forward, or else with that of `heuristic`.
        example_inputs: Called with the invocation and a `numpy.random.Generator`; returns the arrays to measure with,
            as a tuple of the function's positional arguments or as `(args, kwargs)`. Without it floating-point arrays
            are normal, integers zeros and ones, and booleans fair coins.
        keeps_residuals: Whether the backward uses the residuals that JAX saves, e.g. those of a `jax.custom_vjp` in the
            function, instead of a second forward; see `Kernel.keeps_residuals` for the requirements.
        bucket: See `Kernel.bucket`.
        sharding_rule: A `ShardingRule`, or a function from the invocation to a rule; see `Kernel.sharding_rule`.
        name: Name of the operation in keys and labels, by default the function's; must be unique.
        version: Raise it when old configurations or measurements no longer apply.

    Raises:
        KernelError: `space` is missing, the function lacks a tunable argument or takes it in a form that cannot be
            tuned, or another argument of `tune` is not valid.
    """
    if space is None:
        called = "tune()" if function is None else _called(function, name)
        raise KernelError(
            f"{called}: tune needs the values of the tunable arguments as keyword argument space; write "
            '@tune(space={"rows": [8, 16]}), with the names of your arguments.'
        )

    @frames_hidden
    def decorate(function: Callable[P, Out]) -> TunedFunction[P, Out]:
        if not callable(function):
            raise KernelError(f"tune decorates a function, got {function!r}; write @tune(space=...).")
        called = _called(function, name)
        hooks = {"heuristic": heuristic, "bwd_heuristic": bwd_heuristic, "reference": reference}
        _check_functions(called, {**hooks, "example_inputs": example_inputs, "bucket": bucket})
        spaces = (space, space if bwd_space is None else bwd_space)
        declared = _Declared(function, called, spaces, constraints, (heuristic, bwd_heuristic or heuristic))
        if not isinstance(version, str):
            raise KernelError(f"{declared.called}: version must be a string, got {version!r}.")
        members: dict[str, Any] = {
            "__module__": getattr(function, "__module__", None) or __name__,  # for lookup, display and pickling
            "run": _run(function, declared),
            "version": version,
            "keeps_residuals": bool(keeps_residuals),
        }
        if bwd_heuristic is not None:
            members["bwd_heuristic_cfg"] = TunedFunction.heuristic_cfg  # it checks the direction
        if example_inputs is not None:
            members["example_inputs"] = _example_inputs(example_inputs)
        if reference is not None:
            members["reference"] = _reference(reference, declared)
        if bucket is not None:
            members["bucket"] = staticmethod(bucket)
        if sharding_rule is not None:
            members["sharding_rule"] = _sharding_rule(sharding_rule, declared.called)
        # One class for each function, because hooks, signature and version belong to the class of a kernel; its single
        # instance looks like the function.
        cls = type(_called(function), (TunedFunction,), members)
        made: TunedFunction[P, Out] = cls(function, declared, name)
        return made

    return decorate if function is None else decorate(function)


def _called(function: Callable[..., Any], name: str | None = None) -> str:
    """Return a kernel's name for messages, by default its function's."""
    return name if name is not None and is_name(name) else getattr(function, "__name__", None) or repr(function)


def _check_functions(called: str, functions: Mapping[str, Any]) -> None:
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise KernelError(f"{called}: {name} must be a function or None, got {value!r}.")


class TunedFunction(Kernel[Config, Out], Generic[P, Out]):
    """A kernel created from a function by `tune`, with the function's name, documentation and signature."""

    def __init__(self, function: Callable[P, Out], declared: _Declared, name: str | None) -> None:
        if name is None and not is_name(declared.called):
            raise KernelError(f"{declared.called} has no usable name; pass tune(..., name=...).")
        if name is not None and not is_name(name):
            raise KernelError(
                f"{declared.called}: name must be ASCII letters, digits, '_', '-' or '.', got {name!r}; set a version "
                "with tune(..., version=...)."
            )
        super().__init__(declared.called)
        self._declared = declared
        self.choices = frozenset(declared.names)  # passing a default fixes the value in tuning
        functools.update_wrapper(self, function)
        self.__signature__ = declared.signature

    if TYPE_CHECKING:  # a call takes the function's arguments, and optionally `cfg=`

        @overload  # type: ignore[override]
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out: ...
        @overload
        def __call__(self, *args: Any, cfg: Config | None, **kwargs: Any) -> Out: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Out:
            """Run the function through the default executor."""
            ...

    def __reduce_ex__(self, protocol: object) -> str:
        """Pickle by name, like a function; another process loads its own kernel of that name."""
        del protocol
        return str(self.__qualname__)  # type: ignore[attr-defined] # the function's

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> TunedFunction[P, Out]: ...
    @overload
    def __get__(
        self: TunedFunction[Concatenate[Any, Rest], Out], instance: object, owner: type | None = None
    ) -> Callable[Rest, Out]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the kernel as a bound method, with `instance` as the first argument of each call."""
        return self if instance is None else types.MethodType(self, instance)

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the tunable arguments; if the call passes all of them, they become its `cfg`."""
        fixed = {name: self._declared.checked(name, kwargs[name]) for name in self._declared.names if name in kwargs}
        if len(fixed) < len(self._declared.names):
            return args, {**kwargs, **fixed}
        return args, {**{name: value for name, value in kwargs.items() if name not in fixed}, "cfg": fixed}

    def heuristic_cfg(self, inv: Invocation[Config, Out]) -> Config:
        """Return the values that the call passes, then those of `heuristic=`, then the defaults."""
        return self._declared.heuristic_cfg(inv)

    def config_space(self, inv: Invocation[Config, Out]) -> Collection[Config]:
        """Return the configurations that agree with the values that the call passes."""
        return self._declared.config_space(inv)

    def _check_cfg(self, config: object, name: str) -> None:
        self._declared.checked_config(config, f"{self.op_id}: {name}")


def _directed(pair: tuple[T, T], inv: Invocation[Any, Any]) -> T:
    """Return the value for the direction of a call, from those for the forward and the backward."""
    forward, backward = pair
    return backward if inv.direction == "bwd" else forward


class _Declared:
    """The arguments of `tune`, checked against the function's signature."""

    def __init__(
        self,
        function: Callable[..., Any],
        called: str,
        spaces: tuple[Space, Space],
        constraints: Constraints,
        heuristics: tuple[Heuristic | None, Heuristic | None],
    ) -> None:
        self.called = called
        with named(self.called):
            self._constraints = given_constraints(constraints)
        self._spaces, self._heuristics = spaces, heuristics
        parameters = inspect.signature(function).parameters
        forward, backward = (_names_in(space, parameters, self.called) for space in spaces)
        self.names = tuple(dict.fromkeys([*forward, *backward]))
        self._own = (forward, backward)
        self.signature = signature_for_calls(parameters, self.names, self.called)
        defaults = {name: parameters[name].default for name in self.names}
        self._defaults = {
            name: plain(value, f"{self.called}: the default of {name}")
            for name, value in defaults.items()
            if value is not inspect.Parameter.empty
        }
        missing = [name for name in self.names if name not in self._defaults]
        if missing and heuristics[0] is None:
            raise KernelError(
                f"{self.called}: {', '.join(missing)} must have a default, which untuned calls run with; or pass "
                "tune(..., heuristic=...)."
            )
        with named(self.called):
            self._static = (self._known(spaces[0], forward), self._known(spaces[1], backward))
        self._types = _types(self._static, self.names, self._defaults)

    def _known(self, space: Space, own: Sequence[str]) -> Collection[Config] | None:
        """Return the candidates of a space that is the same for all calls; `None` if it depends on the call."""
        if callable(space) or _depends_on_shapes(space) or not self._defaults.keys() >= set(self.names) - set(own):
            return None
        return self._listed(space, {}, self._defaults, own, is_static=True)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Config:
        """Return the configuration of an untuned call."""
        heuristic = _directed(self._heuristics, inv)
        found = {} if heuristic is None else asked(f"{self.called}: heuristic", heuristic, inv)
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self.called}: heuristic must return a dictionary, got {found!r}.")
        merged = {**self._defaults, **found, **self._fixed(inv)}  # the call's own values take precedence
        return self.checked_config(merged, f"{self.called}: the result of heuristic, with the defaults,")

    def config_space(self, inv: Invocation[Any, Any]) -> Collection[Config]:
        """Return the candidates of a call; only the heuristic's if the space is empty."""
        fixed, base = self._fixed(inv), self.heuristic_cfg(inv)
        static, space = _directed(self._static, inv), _directed(self._spaces, inv)
        if isinstance(static, ConfigSpace) and not fixed:
            return static
        if callable(space):
            space = asked(f"{self.called}: space", space, inv)
        if isinstance(space, Mapping):
            space = {
                name: asked(f"{self.called}: space[{name!r}]", values, inv) if callable(values) else values
                for name, values in space.items()
            }
        return self._listed(space, fixed, base, _directed(self._own, inv))

    def checked(self, name: str, value: object) -> Any:
        """Return the value of a tunable argument as plain data.

        Raises:
            ConfigError: It is not plain data, or has another type than the values in the space.
        """
        value = plain(value, f"{self.called}: {name}")  # e.g. a dtype object would not survive the process
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
            ConfigError: It is not a dictionary of exactly the tunable arguments, or a value is invalid.
        """
        if not isinstance(config, Mapping) or set(config) != set(self.names):
            unknown = [name for name in config if name not in self.names] if isinstance(config, Mapping) else []
            more = did_you_mean(unknown[0] if unknown else None, self.names)
            raise ConfigError(f"{what} must be a dictionary with {', '.join(self.names)}; got {config!r}{more}")
        return {name: self.checked(name, config[name]) for name in self.names}

    def _fixed(self, inv: Invocation[Any, Any]) -> Config:
        return {name: inv.kwargs[name] for name in self.names if name in inv.kwargs}

    def _listed(
        self, space: Any, fixed: Config, base: Config, own: Sequence[str], *, is_static: bool = False
    ) -> Collection[Config]:
        """Return the configurations of `space`, in any form, that agree with `fixed`.

        Arguments outside `own` are tuned only in the other direction, and have their values from `base`. Without such
        arguments, constraints that reject a whole static space are an error.
        """
        others = {name: base[name] for name in self.names if name not in own}
        if isinstance(space, Mapping):
            self._check_names(space, own)
            axes = {name: [fixed[name]] if name in fixed else self._values(name, space[name], base) for name in space}
            axes |= {name: [value] for name, value in others.items()}
            made: ConfigSpace[Config] = ConfigSpace(axes, constraints=self._constraints)
            found = _or_base(made, base)
            if is_static and not others and found is not made:
                raise made.none_valid()
            return found
        if self._constraints:
            raise KernelError(
                f"{self.called}: constraints need a space that maps names to values; put them into the ConfigSpace."
            )
        if isinstance(space, ConfigSpace):
            self._check_names(space.names, self.names)
            return _narrowed(space, fixed, base) if fixed else space
        if not isinstance(space, Sequence) or not all(isinstance(entry, Mapping) for entry in space):
            raise KernelError(
                f"{self.called}: space must be values by name, a ConfigSpace or a list of dictionaries; got {space!r}."
            )
        # Entries may omit values; each call fills them in from `heuristic=`.
        listed = [{**base, **entry} for entry in space]
        return [entry for entry in listed if _agree(entry, fixed)] or [base]

    def _values(self, name: str, values: object, base: Config) -> Sequence[Any]:
        if not are_values(values):
            raise KernelError(f"{self.called}: space[{name!r}] must be a sequence of values, got {values!r}.")
        # A range is not listed: it may have millions of values.
        found = values if isinstance(values, range) else [plain(v, f"{self.called}: a value of {name}") for v in values]
        return found or ([base[name]] if name in base else [])

    def _check_names(self, names: Iterable[str], own: Sequence[str]) -> None:
        if set(names) != set(own):
            raise ConfigError(
                f"{self.called}: space must have values for the tunable arguments {', '.join(own)}; got "
                f"{', '.join(names)}. With a function as the space, every keyword-only parameter is tunable."
            )


def _names_in(space: Any, parameters: Mapping[str, inspect.Parameter], called: str) -> tuple[str, ...]:
    """Return the names of the tunable arguments."""
    if isinstance(space, ConfigSpace):
        names = space.names
    elif isinstance(space, Mapping):
        names = tuple(space)
        empty = [name for name, values in space.items() if isinstance(values, Sequence) and not values]
        if empty:
            raise KernelError(
                f"{called}: space[{empty[0]!r}] must have at least one value, got {space[empty[0]]!r}; list the values "
                "to measure, e.g. [64, 128]."
            )
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


def _run(function: Callable[..., Any], declared: _Declared) -> Callable[..., Any]:
    def run(self: TunedFunction[..., Any], *args: Any, cfg: Any, **kwargs: Any) -> Any:
        config = declared.checked_config(cfg, f"{self.op_id}: the configuration")
        fixed = {name: kwargs[name] for name in declared.names if name in kwargs}
        if not _agree(config, fixed):
            raise ConfigError(f"{self.op_id}: cfg is {config!r}, but the call passes {fixed!r}; leave one of them out.")
        return function(*args, **{**kwargs, **config})

    empty = inspect.Parameter.empty
    cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY)
    parameters = [
        p.replace(default=None) if p.name in declared.names and p.default is empty else p
        for p in declared.signature.parameters.values()
    ]
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    first = inspect.Parameter("_kernel", inspect.Parameter.POSITIONAL_ONLY)  # the function may have its own `self`
    run.__signature__ = inspect.Signature([first, *parameters[:at], cfg, *parameters[at:]])  # type: ignore[attr-defined]
    return run


def _reference(reference: Callable[..., Any], declared: _Declared) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return reference(*args, **{name: value for name, value in kwargs.items() if name not in declared.names})

    return staticmethod(called)


def _sharding_rule(rule: Rule, called: str) -> Callable[..., Any]:
    if not isinstance(rule, ShardingRule) and not callable(rule):
        raise KernelError(
            f"{called}: sharding_rule must be a ShardingRule, or a function that returns one, got {rule!r}."
        )
    return staticmethod((lambda _: rule) if isinstance(rule, ShardingRule) else rule)


def _example_inputs(examples: Examples) -> Callable[..., Any]:
    def called(self: TunedFunction[..., Any], inv: Invocation[Any, Any], rng: np.random.Generator) -> Any:
        found = examples(inv, rng)  # a tuple of arrays is enough for most functions
        return found if is_call(found) else (found if isinstance(found, tuple | list) else (found,), dict(inv.kwargs))

    return called


def _depends_on_shapes(space: Any) -> bool:
    return isinstance(space, Mapping) and any(map(callable, space.values()))


def _types(spaces: Sequence[Collection[Config] | None], names: Sequence[str], defaults: Config) -> dict[str, set[type]]:
    """Return the types of each tunable argument's values, if all values are known."""
    own: dict[str, list[Any]] = {name: [defaults[name]] if name in defaults else [] for name in names}
    for space in spaces:
        if space is None:
            return {}
        if isinstance(space, ConfigSpace):
            for axis in space.axes:
                own[axis.name] += axis.values[:1] if isinstance(axis.values, range) else axis.values
        else:
            for name in names:
                own[name] += [entry[name] for entry in space if name in entry]
    return {name: {type(plain(value, name)) for value in given} for name, given in own.items()}


def _agree(config: Mapping[str, object], fixed: Config) -> bool:
    return all(stable_json(config.get(name)) == stable_json(value) for name, value in fixed.items())


def _or_base(space: ConfigSpace[Config], base: Config) -> Collection[Config]:
    return space if base in space or not space.empty() else [base]  # the membership test is cheap: it lists nothing


def _narrowed(space: ConfigSpace[Config], fixed: Config, base: Config) -> Collection[Config]:
    """Return the subspace that agrees with `fixed`; only `base` if a fixed value is outside the space."""
    narrowed = space.narrowed(fixed)
    return [base] if narrowed is None else _or_base(narrowed, base)
