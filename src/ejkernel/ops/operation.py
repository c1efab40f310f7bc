# SPDX-License-Identifier: Apache-2.0
"""`Operation`: a kernel with a list of implementations and a description of each call for them."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import jax

from ejkernel import compat
from ejkernel.ops.config.published import Published, published_params
from ejkernel.ops.config.spaces.alternatives import alternatives
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.hooks import check_candidates
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Out
from ejkernel.ops.errors import ArgumentError, ConfigError, KernelError, UnsupportedError
from ejkernel.ops.implementation import CallT, Implementation, Implementations, OperationCall, OperationConfig
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.fingerprint import lowered_place, traced_for
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.values.signature import is_array

OpCfg = TypeVar("OpCfg", bound=OperationConfig)


class Selected(NamedTuple):
    """The selected implementation, with the description of the call and the parameters."""

    implementation: Implementation[Any]
    call: Any
    params: Any


_owners: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()  # configuration types to operation names


class Operation(Kernel[OpCfg, Out], Generic[OpCfg, CallT, Out]):
    """A kernel with several implementations, each with its own parameters.

    A subclass declares the types of its configuration and its description, `Operation[MyConfig, MyCall, jax.Array]`,
    and defines `implementations` and `describe`. Like any kernel it may define `prepare`, `reference`, `cost`,
    `example_inputs` and `bucket`. This class selects an implementation and runs it.

    A caller may request one implementation, or several in order of preference. Only these run the call, with one
    exception: if none of them has a backward, other implementations with the same residuals compute the gradient.
    `prepare` returns the request as an option, `{"implementation": self.requested(implementation)}`.

    Attributes:
        implementations: The implementations by name, in order of preference.
        why_no_gradient: Why the operation has no gradient, and what to use instead; empty if it has one.
    """

    implementations: ClassVar[Implementations] = Implementations({})
    _not_for_reference = ("implementation",)  # `describe` does not get it, either
    # Whether the heuristic replaces parameters that do not fit a call, as they are of another call of its bucket.
    _replaces_invalid: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "implementations" not in vars(cls):
            return
        if not cls.implementations:
            raise KernelError(f"{cls.__name__}.implementations must have at least one implementation.")
        config: Any = cls.config_type
        if config is None or not issubclass(config, OperationConfig) or config is OperationConfig:
            raise KernelError(
                f"{cls.__name__} must name its own subclass of OperationConfig as its configuration type: "
                f"class {cls.__name__}(Operation[MyConfig, MyCall, jax.Array])."
            )
        # An operation redefined in a notebook may keep its configuration type.
        name = f"{cls.__module__}.{cls.__qualname__}"
        if _owners.setdefault(config, name) != name:
            raise KernelError(
                f"{config.__name__} is the configuration type of another operation; give {cls.__name__} its own."
            )
        # Configurations check themselves, and files are decoded, without access to the kernel.
        config.implementations = cls.implementations

    # --- hooks that an operation defines ---

    def describe(self, *args: Any, **options: Any) -> CallT:
        """Return the description of a call, from shapes, dtypes and options alone.

        Args:
            *args: The arguments from `prepare`.
            **options: The options from `prepare`, except `implementation`.

        Returns:
            The description; `call_of` fills in the fields of `OperationCall` itself.
        """
        raise KernelError(f"{type(self).__name__} has no describe.")

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return abstract arguments of a typical call; `ejkernel list` shows which implementations run it. Optional."""
        raise KernelError(f"{type(self).__name__} has no typical_call.")

    # --- derived hooks ---

    def requested(self, implementation: Any) -> str | tuple[str, ...] | None:
        """Return the argument `implementation` in the canonical form for a call's options.

        Raises:
            ArgumentError: It is neither the name of an implementation nor a sequence of such names.
        """
        if implementation is None:
            return None
        names = (implementation,) if isinstance(implementation, str) else implementation
        unknown = (
            [name for name in names if name not in self.implementations] if isinstance(names, Sequence) else [None]
        )
        if unknown or not names:
            raise ArgumentError(
                f"implementation must be one of {self.implementations.names}, or None; got {implementation!r}"
                f"{did_you_mean(unknown[0] if unknown else None, self.implementations)}"
            )
        # Equal requests get one form, and so one key.
        return cast(str, names[0]) if len(names) == 1 else tuple(dict.fromkeys(names))

    def call_of(self, inv: Invocation[OpCfg, Out]) -> CallT:
        """Return the description of the call `inv`."""
        return self._described(
            inv.args,
            inv.kwargs,
            platform=inv.platform,
            device_fingerprint=inv.device_fingerprint,
            backward=inv.direction == "bwd",
            higher=inv.direction == "jvp" or inv.op_id.removeprefix(self.op_id).count(".") > 1,
            partitioned=compat.programs.is_split_by_xla(),
            examples=math.prod(inv.batch_sizes),
            default_precision=inv.precision,
        )

    def _described(self, args: tuple[Any, ...], options: Mapping[str, Any], **fields: Any) -> CallT:
        """Return the description of a call; `fields` are those of `OperationCall` itself."""
        own = {name: value for name, value in options.items() if name != "implementation"}
        found = self.describe(*args, **own)
        if not isinstance(found, OperationCall):
            raise KernelError(f"{type(self).__name__}.describe must return an OperationCall, got {value_text(found)}.")
        return dataclasses.replace(found, **fields)

    def able(self, inv: Invocation[OpCfg, Out]) -> list[str]:
        """Return the names of the implementations that can run the call, in order of preference.

        Raises:
            UnsupportedError: No implementation can run the call; the message gives the reason for each.
        """
        return self._able(inv)[0]

    def refusals(self, inv: Invocation[OpCfg, Out]) -> dict[str, str]:
        """See `Kernel`; only for the requested implementations, if the call requests some by name."""
        call = self.call_of(inv)
        return self._select(call, self._considered(inv.kwargs, call))[1]

    def why_not(self, inv: Invocation[OpCfg, Out], config: OpCfg) -> str:
        """See `Kernel`: the implementation or its parameters may be unsupported here."""
        reason = self.refusals(inv).get(config.implementation)
        if reason is None:
            call = self.call_of(inv)
            params = config.bwd if call.backward else config.fwd
            chosen = self.implementations[config.implementation]
            reason = None if params is None else chosen.params_fault(call, params)
        return reason or ""

    def published(self, inv: Invocation[OpCfg, Out]) -> list[Published[OpCfg]]:
        """See `Kernel`. An untuned call gets the heuristic's implementation, or one published as faster than XLA."""
        names, call = self._able(inv)
        found = []
        for name in names:
            implementation = self.implementations[name]
            for row, params, fault in published_params(implementation, call):
                config = None if params is None else self._config(name, call, params)
                doubt = fault or implementation.doubt(call, params)
                untuned = f"{row.note}: {doubt}" if doubt else "" if name == names[0] else row.why_not_untuned
                why_not = fault and f"{row.note}: {fault}"
                found.append(Published(config=config, note=row.note, why_not=why_not, why_not_untuned=untuned))
        return found

    def published_on(self, device: str) -> Iterator[tuple[str, str, int]]:
        """Yield implementation, source and number of the configurations published for a device."""
        for name in self.implementations:
            if not self.implementations.elsewhere(name, device.partition(":")[0]):
                for found in self.implementations.loadable([name]):
                    counts = {} if found.published is None else found.published.counts(device)
                    yield from ((name, source, count) for source, count in counts.items())

    def completed(self, inv: Invocation[OpCfg, Out], config: OpCfg) -> OpCfg:
        """See `Kernel`: parameters of the other direction do not matter, and the heuristic replaces missing ones."""
        call, chosen = self.call_of(inv), self.implementations[config.implementation]
        params = config.bwd if call.backward else config.fwd
        if params is not None or self.implementations.unsupported(chosen.name, call) is not None:
            return config
        return self._config(chosen.name, call, chosen.heuristic(call))

    def reasons(self, call: CallT) -> dict[str, str]:
        """Return, for each implementation, why it does not run a call; `""` if it does."""
        return {name: self.implementations.unsupported(name, call) or "" for name in self.implementations}

    def reasons_on(self, device: str) -> dict[str, str]:
        """Return, for each implementation, why it does not run the typical call on a device; `""` if it does.

        Args:
            device: The device's fingerprint.
        """
        if type(self).typical_call is Operation.typical_call:
            return dict.fromkeys(self.implementations, "")
        args, options = self.typical_call()
        args, options = self.prepare(*args, **options)
        platform = device.partition(":")[0]
        return self.reasons(self._described(args, options, platform=platform, device_fingerprint=device))

    def heuristic_cfg(self, inv: Invocation[OpCfg, Out]) -> OpCfg:
        """Return the preferred implementation for the call, with the parameters of its heuristic."""
        (name, *_), call = self._able(inv)
        return self._config(name, call, self.implementations[name].heuristic(call))

    def config_space(self, inv: Invocation[OpCfg, Out]) -> Collection[OpCfg]:
        """Return the union of the spaces of all implementations that run the call."""
        names, call = self._able(inv)
        spaces = {name: _valid_params(self.implementations[name], call) for name in names}

        def read(config: OpCfg) -> tuple[str, Any]:
            params = config.bwd if call.backward else config.fwd
            return config.implementation, params if config.implementation in names else None

        # A search over several implementations starts with the heuristic of each.
        seeds = {name: self.implementations[name].heuristic(call) for name in names}
        return alternatives(spaces, lambda name, params: self._config(name, call, params), read, seeds)

    def run(self, *args: Any, cfg: OpCfg, **options: Any) -> Any:
        """Return the output."""
        # Not `forward`: without residuals, cuDNN can use a kernel that does not write the log-sum-exp.
        return self._differentiable("output", self._running(cfg, args, options), args)

    def fwd_with_residuals(self, *args: Any, cfg: OpCfg, **options: Any) -> tuple[Any, Any]:
        """Return the output, and the residuals of the implementation."""
        found = self._differentiable("_checked_forward", self._running(cfg, args, options), args)
        return cast("tuple[Any, Any]", found)

    def vjp(
        self, residuals: Any, out: Any, cotangents: tuple[Any, ...], *args: Any, cfg: OpCfg, **options: Any
    ) -> tuple[Any, ...]:
        """Return the gradient of each positional argument."""
        selected = self._running(cfg, args, options, backward=True)
        found = self._differentiable("backward", selected, (residuals, out, cotangents, *args))
        return cast("tuple[Any, ...]", found)

    def _check_cfg(self, config: Any, name: str) -> None:
        try:
            config.__post_init__()
        except ConfigError as error:  # its implementation, or the class of its parameters, was redefined
            raise ConfigError(f"{self.op_id}: {name}: {error}") from error

    # --- selection of the implementation ---

    def _config(self, name: str, call: CallT, params: Any) -> OpCfg:
        # A tuned configuration has the parameters of one direction; the other direction is tuned separately.
        config_type = cast("type[OpCfg]", self.config_type)
        if params is None:
            found = self.implementations[name]
            wanted = found.params_type(backward=call.backward).__name__
            raise KernelError(f"{type(found).__name__}.heuristic must return an instance of {wanted}, got None.")
        return config_type(implementation=name, **{"bwd" if call.backward else "fwd": params})

    def _able(self, inv: Invocation[OpCfg, Out]) -> tuple[list[str], CallT]:
        """Return the implementations that can run the call, and the description of the call that they run.

        If only types are wanted and no implementation runs here, return implementations for other platforms: the
        program may be lowered for another platform than this process's.
        """
        if self.why_no_gradient and inv.direction != "fwd":
            raise UnsupportedError(f"{self.op_id} has no gradient: {self.why_no_gradient}")
        call = self.call_of(inv)
        found, reasons = self._select(call, self._considered(inv.kwargs, call))
        if not found and not inv.array_types and (device := traced_for()):
            call = dataclasses.replace(call, platform=device.partition(":")[0], device_fingerprint=device)
            found, reasons = self._select(call, self._considered(inv.kwargs, call))
        elif not found and not inv.array_types:
            # Without a platform, so that only reasons that apply on every platform count.
            call = dataclasses.replace(call, platform=None, device_fingerprint="")
            names = self._considered(inv.kwargs, call) or self.implementations
            elsewhere = [name for name in names if self.implementations.elsewhere(name, inv.platform)]
            found, reasons_elsewhere = self._select(call, elsewhere)
            # Name the device first: on this one, changing the arguments would not help.
            for name, reason in reasons_elsewhere.items():
                reasons[name] = " ".join(dict.fromkeys([*([reasons[name]] if name in reasons else []), reason]))
        if not found:
            raise UnsupportedError(f"{inv.op_id}: {' '.join(reasons.values())}")
        return found, call

    def _considered(self, options: Mapping[str, Any], call: CallT) -> list[str] | None:
        """Return the implementations to consider for a call: those requested in its options; `None` for all.

        If no requested implementation has a backward, a backward call may use others with the same residuals.
        """
        requested = options.get("implementation")
        if requested is None:
            return None
        names = [requested] if isinstance(requested, str) else list(requested)
        if not call.backward:
            return names
        here = [name for name in self.implementations if not self.implementations.elsewhere(name, call.platform)]
        return [*names, *(name for name in here if name not in names and self._follows(name, names))]

    def _follows(self, name: str, names: Sequence[str]) -> bool:
        """Return whether the backward of `name` can follow the forwards of `names`, which lack a backward."""
        named = self.implementations.loadable(names)
        if any(found.has_backward() for found in named):
            return False
        left = {found.residuals for found in named}
        return any(found.has_backward() and found.residuals in left for found in self.implementations.loadable([name]))

    def _select(
        self, call: CallT, names: Sequence[str] | None, *, anywhere: bool = True
    ) -> tuple[list[str], dict[str, str]]:
        """Return the implementations that run a call, and the reasons why the others do not.

        Args:
            call: The call.
            names: The implementations to consider, in order of preference; `None` for all.
            anywhere: Whether implementations for other platforms, if requested by name, give their own reasons.
        """
        reasons: dict[str, str] = {}
        considered: list[str] = []
        asks_for_platform = names is None or not anywhere
        for name in self.implementations if names is None else names:
            here = call.device_fingerprint or call.platform
            elsewhere = self.implementations.elsewhere(name, call.platform, here) if asks_for_platform else ""
            if not elsewhere:
                considered.append(name)
            reason = elsewhere or self.implementations.unsupported(name, call)
            if reason is not None:
                reasons[name] = reason
        able = [name for name in considered if name not in reasons]
        matching = self._with_shared_residuals(able, considered, call)
        # `explain` shows a reason for each implementation that does not run.
        reasons |= {
            name: f"implementation={name!r} does not match the residuals of the others."
            for name in able
            if name not in matching
        }
        if names is None:
            matching = sorted(matching, key=lambda name: -self.implementations[name].preference(call))
        return matching, reasons

    def _with_shared_residuals(self, able: list[str], considered: list[str], call: CallT) -> list[str]:
        """Return those of `able` that have the residual format of this call, which forward and backward share.

        This is the format of the first considered implementation for which some implementation runs the forward and
        some implementation runs the backward. The choice is the same in both directions.
        """
        known = self.implementations.loadable(considered)
        if len({found.residuals for found in known}) < 2:
            return able
        # The same in both directions: configurations of forward and backward are chosen independently, so each backward
        # must accept the residuals of each forward.
        both = [dataclasses.replace(call, backward=backward, higher=False) for backward in (False, True)]
        for contract in dict.fromkeys(found.residuals for found in known):
            own = [found.name for found in known if found.residuals == contract]
            if all(any(self.implementations.unsupported(n, c) is None for n in own) for c in both):
                return [name for name in able if name in own]
        return able

    def _running(
        self, cfg: OpCfg, args: tuple[Any, ...], options: Mapping[str, Any], *, backward: bool = False
    ) -> Selected:
        """Return the implementation and parameters of `cfg`, or a fallback.

        A gradient may get the configuration of its forward, and a partitioned program may get a configuration measured
        on one device. If its implementation does not run the call, use another, unless the user requested it by name.

        Raises:
            ConfigError: `cfg` contradicts the argument `implementation`, or its parameters are invalid for this call.
            UnsupportedError: The implementation does not run this call.
        """
        call = self._described(args, options, backward=backward)
        considered = self._considered(options, call)
        if considered is not None and cfg.implementation not in considered:
            raise ConfigError(
                f"cfg.implementation is {cfg.implementation!r}, but the call requests "
                f"implementation={options['implementation']!r}; leave one out."
            )
        chosen, params = self.implementations[cfg.implementation], cfg.bwd if call.backward else cfg.fwd
        if not chosen.runs_everywhere(call) or params is None or (backward and not chosen.has_backward()):
            # Query the platform only if it matters: a trace that depends on it is repeated once the platform is known.
            call = dataclasses.replace(call, **lowered_place(), partitioned=compat.programs.is_split_by_xla())
            reason = self.implementations.unsupported(chosen.name, call)
            if reason is not None:
                chosen, params = self._fallback(chosen, reason, call, self._considered(options, call)), None
        if params is None:
            params = chosen.heuristic(call)
        # Reject invalid parameters before lowering: they may hang the device or corrupt its memory.
        fault = chosen.params_fault(call, params)
        if fault is not None and self._replaces_invalid:
            return Selected(chosen, call, chosen.heuristic(call))
        if fault is not None:
            raise ConfigError(f"{self._called(call)}: {params!r} is invalid for this call: {fault}")
        return Selected(chosen, call, params)

    def _fitting(
        self, cfg: OpCfg, args: tuple[Any, ...], options: Mapping[str, Any], *, backward: bool = False
    ) -> OpCfg:
        """Return `cfg`, found for another call, for this call; the heuristic replaces what does not run it.

        Raises:
            UnsupportedError: No implementation, or none of those that the caller requested, runs the call.
        """
        call = self._described(args, options, backward=backward)
        chosen, params = self.implementations[cfg.implementation], cfg.bwd if call.backward else cfg.fwd
        if not chosen.runs_everywhere(call):
            call = dataclasses.replace(call, **lowered_place(), partitioned=compat.programs.is_split_by_xla())
        if self.implementations.unsupported(chosen.name, call) is None:
            if params is None or chosen.doubt(call, params) is None:
                return cfg
            return dataclasses.replace(cfg, bwd=None) if backward else dataclasses.replace(cfg, fwd=None)
        found, reasons = self._select(call, self._considered(options, call), anywhere=False)
        if not found:
            raise UnsupportedError(f"{self._called(call)}: {' '.join(reasons.values())}")
        return self._config(found[0], call, self.implementations[found[0]].heuristic(call))

    def _fallback(
        self, chosen: Implementation[Any], reason: str, call: CallT, names: list[str] | None
    ) -> Implementation[Any]:
        if call.backward or call.partitioned:
            found, _ = self._select(call, names, anywhere=False)
            # The fallback must use the same residual format as the forward.
            for other in self.implementations.loadable(found):
                if other.residuals == chosen.residuals:
                    return other
        raise UnsupportedError(f"{self._called(call)}: {reason}")

    def _called(self, call: CallT) -> str:
        return f"{self.op_id}.bwd" if call.backward else self.op_id

    def _differentiable(self, method: str, selected: Selected, given: tuple[Any, ...]) -> Any:
        """Return the result of a method of the selected implementation, with tangents of another one if necessary."""
        implementation, call, params = selected
        own = functools.partial(getattr(implementation, method), call, params=params)
        other = None if implementation.differentiable else self._differentiable_alternative(method, selected)
        if other is None:
            return own(*given)

        leaves, tree = jax.tree.flatten(given)
        arrays = [leaf for leaf in leaves if is_array(leaf)]

        def compute(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
            remaining = iter(arrays)
            filled = [next(remaining) if is_array(leaf) else leaf for leaf in leaves]
            return function(*jax.tree.unflatten(tree, filled))

        # A rule for tangents instead of gradients, so that both modes and higher derivatives work.
        @jax.custom_jvp
        def computed(*arrays: Any) -> Any:
            return compute(own, arrays)

        @computed.defjvp
        def _tangents(primals: Any, tangents: Any) -> Any:
            return jax.jvp(lambda *arrays: compute(other, arrays), primals, tangents)

        return computed(*arrays)

    def _differentiable_alternative(self, method: str, selected: Selected) -> Callable[..., Any] | None:
        """Return the method of a differentiable implementation that computes the same; `None` without one."""
        for name in self.implementations:
            # Only implementations for all platforms, because the platform may be unknown here.
            if self.implementations.platforms(name) or not self.implementations[name].differentiable:
                continue
            other, reason = self.implementations[name], self.implementations.unsupported(name, selected.call)
            if other.residuals == selected.implementation.residuals and reason is None:
                params = other.heuristic(selected.call)
                return functools.partial(getattr(other, method), selected.call, params=params)
        return None


def _valid_params(implementation: Implementation[Any], call: Any) -> Collection[Any]:
    """Return an implementation's space without invalid parameters; a `ConfigSpace` excludes them by constraints."""
    space = check_candidates(implementation.space(call), f"the result of {type(implementation).__name__}.space")
    # A `ConfigSpace` may have millions of points, so do not list it.
    if isinstance(space, ConfigSpace):
        return space
    own = [params for params in space if implementation.params_fault(call, params) is None]
    published = [params for _, params, fault in published_params(implementation, call) if not fault]
    return list(dict.fromkeys((*own, *published))) if published else own
