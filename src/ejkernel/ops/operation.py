# SPDX-License-Identifier: Apache-2.0
"""`Operation`: a kernel that is declared by what all its implementations share, and by a list of these."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import jax

from ejkernel import compat
from ejkernel.ops.config.spaces.alternatives import alternatives
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, config_type_of
from ejkernel.ops.core.types import Out
from ejkernel.ops.errors import ArgumentError, ConfigError, KernelError, UnsupportedError
from ejkernel.ops.implementation import CallT, Implementation, Implementations, OperationConfig
from ejkernel.ops.utils.fingerprint import device_fingerprint, device_kind, platform_fingerprint, platform_kind
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.values.signature import is_array

OpCfg = TypeVar("OpCfg", bound=OperationConfig)


class _Running(NamedTuple):
    """What runs: an implementation, the call as it sees it, and its parameters."""

    implementation: Implementation[Any]
    call: Any
    params: Any


_owners: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()  # configurations' types: operations' names


class Operation(Kernel[OpCfg, Out], Generic[OpCfg, CallT, Out]):
    """A kernel with implementations, each of which has parameters of its own.

    A subclass names its configuration's and its description's types, `Operation[MyConfig, MyCall, jax.Array]`, and
    gives `implementations` and `describe`. Like any kernel it may give `prepare`, `reference`, `cost`,
    `example_inputs`, `bucket`. Choosing among implementations, and running what was chosen, is done here.

    A caller may name one implementation, or several in the order of preference. No other then runs the call, with one
    exception: if none of them has a backward, the gradient is computed by others that take their residuals. The
    request goes into the options as `prepare` returns them, `{"implementation": self.requested(implementation)}`.

    Attributes:
        implementations: By name, the one to prefer first.
    """

    implementations: ClassVar[Implementations] = Implementations({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "implementations" not in vars(cls):
            return
        config: Any = config_type_of(cls)
        if config is None or not issubclass(config, OperationConfig) or config is OperationConfig:
            raise KernelError(
                f"{cls.__name__} must name a subclass of OperationConfig as its configuration's type, which is then "
                f"its own: class {cls.__name__}(Operation[MyConfig, MyCall, jax.Array])."
            )
        # An operation that is defined again, as in a notebook, keeps its configuration's type.
        name = f"{cls.__module__}.{cls.__qualname__}"
        if _owners.setdefault(config, name) != name:
            raise KernelError(
                f"{config.__name__} is the configuration's type of another operation; give {cls.__name__} its own."
            )
        # So that configurations check themselves, and files are decoded, without the kernel at hand.
        config.implementations = cls.implementations

    # --- what an operation declares ---

    def describe(self, *args: Any, **options: Any) -> CallT:
        """Return the description of a call, from shapes, dtypes and options alone.

        Args:
            *args: As `prepare` returns them.
            **options: As `prepare` returns them, but for `implementation`.

        Returns:
            The description; what `OperationCall` itself has is filled in here.
        """
        raise KernelError(f"{type(self).__name__} has no describe.")

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of a plain call, abstract ones; `ejkernel list` tells what runs that one here. Optional."""
        raise KernelError(f"{type(self).__name__} has no typical_call.")

    # --- what follows from it ---

    def requested(self, implementation: Any) -> str | tuple[str, ...] | None:
        """Return the argument `implementation` in the form that it has in a call's options.

        Raises:
            ArgumentError: it is neither a name nor a sequence of names, of implementations that there are.
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
        # One form for equal requests, and so one key.
        return cast(str, names[0]) if len(names) == 1 else tuple(dict.fromkeys(names))

    def call_of(self, inv: Invocation[OpCfg, Out]) -> CallT:
        """Return the description of the call that `inv` is."""
        described = self.describe(*inv.args, **_without_request(inv.kwargs))
        return dataclasses.replace(
            described,
            platform=inv.platform,
            device_fingerprint=inv.device_fingerprint,
            backward=inv.direction == "bwd",
            partitioned=_is_partitioned(),
            examples=math.prod(inv.batch_sizes),
        )

    def able(self, inv: Invocation[OpCfg, Out]) -> list[str]:
        """Return the names of the implementations that may run the call, the one to prefer first.

        Raises:
            UnsupportedError: there is none; the message says of each why not.
        """
        return [name for name, _ in self._able(inv)]

    def refusals(self, inv: Invocation[OpCfg, Out]) -> dict[str, str]:
        """See `Kernel`; where implementations were asked for by name, of these."""
        return self._sorted_out_for(inv)[1]

    def why_not(self, inv: Invocation[OpCfg, Out], config: OpCfg) -> str:
        """See `Kernel`: the implementation may not run here, or not with these parameters."""
        reason = self.refusals(inv).get(config.implementation)
        if reason is None:
            call = self.call_of(inv)
            params = _params_of(config, call)
            chosen = self.implementations[config.implementation]
            reason = None if params is None else chosen.params_fault(call, params)
        return reason or ""

    def reasons(self, call: CallT) -> dict[str, str]:
        """Return why each implementation does not run a call; `""` if it does."""
        return {name: self.implementations.unsupported(name, call) or "" for name in self.implementations}

    def reasons_here(self) -> dict[str, str]:
        """Return why each implementation does not run the typical call on this process's device; `""` if it does."""
        if type(self).typical_call is Operation.typical_call:
            return dict.fromkeys(self.implementations, "")
        args, options = self.typical_call()
        args, options = self.prepare(*args, **options)
        call = self.describe(*args, **_without_request(options))
        return self.reasons(dataclasses.replace(call, platform=device_kind(), device_fingerprint=device_fingerprint()))

    def heuristic_cfg(self, inv: Invocation[OpCfg, Out]) -> OpCfg:
        """Return the implementation to prefer of those that run the call, with its own heuristic's parameters."""
        name, call = self._able(inv)[0]
        return self._config(name, call, self.implementations[name].heuristic(call))

    def config_space(self, inv: Invocation[OpCfg, Out]) -> Collection[OpCfg]:
        """Return what is in the spaces of all implementations that run the call."""
        able = dict(self._able(inv))
        spaces = {name: _faultless(self.implementations[name], call) for name, call in able.items()}

        def read(config: OpCfg) -> tuple[str, Any]:
            call = able.get(config.implementation)
            return config.implementation, None if call is None else _params_of(config, call)

        # A search over several implementations begins with the heuristic of each.
        seeds = {name: self.implementations[name].heuristic(call) for name, call in able.items()}
        return alternatives(spaces, lambda name, params: self._config(name, able[name], params), read, seeds)

    def run(self, *args: Any, cfg: OpCfg, **options: Any) -> Any:
        """Return the output."""
        running = self._running(cfg, args, options)

        def output(running: _Running, *args: Any) -> Any:
            return running.implementation.output(running.call, *args, params=running.params)

        # Not `forward` and its first result: cuDNN has a kernel that does not write the log-sum-exp, and is asked for
        # that here.
        return self._differentiable(output, running, args)

    def fwd_with_residuals(self, *args: Any, cfg: OpCfg, **options: Any) -> tuple[Any, Any]:
        """Return the output, and what the implementations' contract leaves for the backward."""
        running = self._running(cfg, args, options)

        def forward(running: _Running, *args: Any) -> Any:
            return running.implementation.forward(running.call, *args, params=running.params)

        return cast("tuple[Any, Any]", self._differentiable(forward, running, args))

    def vjp(
        self, residuals: Any, out: Any, cotangents: tuple[Any, ...], *args: Any, cfg: OpCfg, **options: Any
    ) -> tuple[Any, ...]:
        """Return the gradient of each positional argument."""
        running = self._running(cfg, args, options, backward=True)

        def backward(running: _Running, *given: Any) -> Any:
            return running.implementation.backward(running.call, *given, params=running.params)

        found = self._differentiable(backward, running, (residuals, out, cotangents, *args))
        return cast("tuple[Any, ...]", found)

    def _check_cfg(self, config: Any, name: str) -> None:
        super()._check_cfg(config, name)
        try:
            config.__post_init__()
        except ConfigError as error:  # its implementation, or the class of its parameters, was defined again
            raise ConfigError(f"{self.op_id}: {name}: {error}") from error

    # --- which implementation ---

    def _config(self, name: str, call: CallT, params: Any) -> OpCfg:
        # What is tuned has the parameters of one direction; the other's are found apart, or are its heuristic's.
        config_type = cast("type[OpCfg]", self.config_type)
        return config_type(implementation=name, **{"bwd" if call.backward else "fwd": params})

    def _able(self, inv: Invocation[OpCfg, Out]) -> list[tuple[str, CallT]]:
        """Return the implementations that may run the call, each with the description that it does run.

        As long as only types are wanted the program may be lowered for another platform than this process's: where
        nothing runs here, what runs elsewhere will do.
        """
        found, reasons = self._sorted_out_for(inv)
        if not found and not inv.array_types:
            # No platform: whether it runs here is no longer the question, and other reasons hold anywhere.
            away = dataclasses.replace(self.call_of(inv), platform=None, device_fingerprint="")
            names = self._asked(inv.kwargs, away) or self.implementations
            elsewhere = [name for name in names if inv.platform not in self._platforms(name)]
            found, reasons_elsewhere = self._sorted_out(away, elsewhere, higher=self._is_higher(inv), named=True)
            reasons |= reasons_elsewhere
        if not found:
            raise UnsupportedError(f"{inv.op_id}: {' '.join(reasons.values())}")
        return found

    def _sorted_out_for(self, inv: Invocation[OpCfg, Out]) -> tuple[list[tuple[str, CallT]], dict[str, str]]:
        call = self.call_of(inv)
        names = self._asked(inv.kwargs, call)
        return self._sorted_out(call, names, higher=self._is_higher(inv), named=names is not None)

    def _is_higher(self, inv: Invocation[OpCfg, Out]) -> bool:
        """Return whether the call is of tangents, or of derivatives of a derivative."""
        return inv.direction == "jvp" or inv.op_id.removeprefix(self.op_id).count(".") > 1

    def _platforms(self, name: str) -> tuple[str, ...]:
        return self.implementations.platforms(name) or ("gpu", "tpu", "cpu")

    def _names(self, options: Mapping[str, Any]) -> list[str] | None:
        """Return which implementations were asked for, in the order of preference; `None`: none by name."""
        requested = options.get("implementation")
        if requested is None:
            return None
        return [requested] if isinstance(requested, str) else list(requested)

    def _asked(self, options: Mapping[str, Any], call: CallT) -> list[str] | None:
        """Return the implementations to ask about a call: those named in its options; `None`: all.

        If none of the named ones has a backward, a backward call is answered by others that take their residuals.
        """
        names = self._names(options)
        if names is None or not call.backward:
            return names
        here = [name for name in self.implementations if call.platform in (None, *self._platforms(name))]
        return [*names, *(name for name in here if name not in names and self._follows(name, names))]

    def _follows(self, name: str, names: Sequence[str]) -> bool:
        """Return whether the backward of `name` follows the forwards of `names`, none of which has a backward."""
        named = self.implementations.loadable(names)
        if any(found.has_backward() for found in named):
            return False
        left = {found.residuals for found in named}
        return any(found.has_backward() and found.residuals in left for found in self.implementations.loadable([name]))

    def _sorted_out(
        self, call: CallT, names: Sequence[str] | None, *, higher: bool = False, named: bool
    ) -> tuple[list[tuple[str, CallT]], dict[str, str]]:
        """Return which implementations run a call, and why the others do not.

        Args:
            call: The call.
            names: Whom to ask, in the order of preference; `None`: all.
            higher: Whether tangents, or derivatives of a derivative, are wanted.
            named: Whether the user named them: then they are asked on any platform, for their own reasons.
        """
        reasons: dict[str, str] = {}
        asked: list[str] = []
        for name in self.implementations if names is None else names:
            if not named and call.platform not in (None, *self._platforms(name)):
                reasons[name] = f"implementation={name!r} runs on {', '.join(self._platforms(name))}."
                continue
            asked.append(name)
            reason = self.implementations.unsupported(name, call)
            if reason is None and higher and not self.implementations[name].differentiable:
                others = [other for other in self.implementations if self.implementations[other].differentiable]
                hint = f"; use {others[0]!r}." if others else "."
                reason = f"forward-mode differentiation is not available with implementation={name!r}{hint}"
            if reason is not None:
                reasons[name] = reason
        able = [name for name in asked if name not in reasons]
        kept = self._of_one_contract(able, asked, call)
        # Why a contract was passed over is told as well: `explain` shows a reason for each that does not run.
        reasons |= {
            name: f"implementation={name!r} does not go with the residuals of others."
            for name in able
            if name not in kept
        }
        if names is None:
            kept = sorted(kept, key=lambda name: -self.implementations[name].preference(call))
        return [(name, call) for name in kept], reasons

    def _of_one_contract(self, able: list[str], asked: list[str], call: CallT) -> list[str]:
        """Return those of `able` that leave the residuals that all calls of this form leave, forward and backward.

        These are the first implementation's of those that were asked for which some forward and some backward run the
        call; it is the same in both directions.
        """
        known = self.implementations.loadable(asked)
        if len({found.residuals for found in known}) < 2:
            return able
        # In both directions alike: the backward's configurations are chosen apart, and must take what any forward
        # leaves.
        forward, backward = (dataclasses.replace(call, backward=backward) for backward in (False, True))
        for contract in dict.fromkeys(found.residuals for found in known):
            own = [found.name for found in known if found.residuals == contract]
            if all(any(self.implementations.unsupported(n, c) is None for n in own) for c in (forward, backward)):
                return [name for name in able if name in own]
        return able

    def _running(
        self, cfg: OpCfg, args: tuple[Any, ...], options: Mapping[str, Any], *, backward: bool = False
    ) -> _Running:
        """Return what runs: what `cfg` says, where that is possible.

        A forward's configuration may reach a gradient, and one that was measured on one device may reach a program that
        is partitioned over several: another stands in there, unless the implementation was asked for by name.

        Raises:
            ConfigError: `cfg` contradicts the `implementation` argument, or its parameters must not run this call.
            UnsupportedError: the implementation does not run this call.
        """
        names, name = self._names(options), cfg.implementation
        if not (names is None or name in names or (backward and self._follows(name, names))):
            raise ConfigError(
                f"cfg.implementation is {cfg.implementation!r}, but implementation={options['implementation']!r} was "
                "asked for; leave one out."
            )
        call = dataclasses.replace(self.describe(*args, **_without_request(options)), backward=backward)
        chosen, params = self.implementations[cfg.implementation], _params_of(cfg, call)
        if not chosen.runs_everywhere(call) or params is None or (backward and not chosen.has_backward()):
            # Asked only where it matters: a trace that asks has to be made anew once the program's platform is known.
            call = dataclasses.replace(call, **_lowered_place(), partitioned=_is_partitioned())
            reason = self.implementations.unsupported(chosen.name, call)
            if reason is not None:
                chosen, params = self._stand_in(chosen, reason, call, self._asked(options, call)), None
        if params is None:
            params = chosen.heuristic(call)
        # Refused before it is lowered: such parameters may hang or corrupt the device.
        fault = chosen.params_fault(call, params)
        if fault is not None:
            raise ConfigError(f"{self._called(call)}: {params!r} is not for this call: {fault}")
        return _Running(chosen, call, params)

    def _stand_in(
        self, chosen: Implementation[Any], reason: str, call: CallT, names: list[str] | None
    ) -> Implementation[Any]:
        if call.backward or call.partitioned:
            found, _ = self._sorted_out(call, names, named=False)
            # Who takes the residuals that the forward has left.
            for other in self.implementations.loadable(name for name, _ in found):
                if other.residuals == chosen.residuals:
                    return other
        raise UnsupportedError(f"{self._called(call)}: {reason}")

    def _called(self, call: CallT) -> str:
        return f"{self.op_id}.bwd" if call.backward else self.op_id

    def _differentiable(self, function: Callable[..., Any], running: _Running, given: tuple[Any, ...]) -> Any:
        """Return `function(running, *given)`; where JAX cannot differentiate it, with another's tangents."""
        other = None if running.implementation.differentiable else self._source_of_tangents(running)
        if other is None:
            return function(running, *given)

        leaves, tree = jax.tree.flatten(given)
        arrays = [leaf for leaf in leaves if is_array(leaf)]

        def compute(running: _Running, arrays: tuple[Any, ...]) -> Any:
            remaining = iter(arrays)
            filled = [next(remaining) if is_array(leaf) else leaf for leaf in leaves]
            return function(running, *jax.tree.unflatten(tree, filled))

        # Tangents rather than a gradient rule, so that both modes are there, and higher derivatives follow.
        @jax.custom_jvp
        def computed(*arrays: Any) -> Any:
            return compute(running, arrays)

        @computed.defjvp
        def _tangents(primals: Any, tangents: Any) -> Any:
            return jax.jvp(lambda *arrays: compute(other, arrays), primals, tangents)

        return computed(*arrays)

    def _source_of_tangents(self, running: _Running) -> _Running | None:
        for name in self.implementations:
            # One that runs everywhere, since the platform need not be known yet.
            if self.implementations.platforms(name) or not self.implementations[name].differentiable:
                continue
            other, reason = self.implementations[name], self.implementations.unsupported(name, running.call)
            if other.residuals == running.implementation.residuals and reason is None:
                return _Running(other, running.call, other.heuristic(running.call))
        return None


def _without_request(options: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "implementation"}


def _params_of(config: OperationConfig, call: Any) -> Any:
    return config.bwd if call.backward else config.fwd


def _faultless(implementation: Implementation[Any], call: object) -> Collection[Any]:
    """Return an implementation's space without what must not run; of a `ConfigSpace` that is for its constraints."""
    space = implementation.space(call)
    # To list it would go through millions; its author has the faults as constraints.
    if isinstance(space, ConfigSpace):
        return space
    return [params for params in space if implementation.params_fault(call, params) is None]


def _is_partitioned() -> bool:
    # Where devices are known, an implementation can tell XLA how it is split.
    return compat.is_partitioned() and not compat.knows_devices()


def _lowered_place() -> dict[str, Any]:
    """Return what is known of the device that the program is being lowered for, if it is being lowered."""
    platform = compat.lowered_platform()
    if platform is None:
        return {"platform": None}
    # Which of NVIDIA's GPUs it is need not be known yet.
    is_amd = platform.lower() == "rocm"
    return {
        "platform": platform_kind(platform),
        "device_fingerprint": platform_fingerprint(platform) if is_amd else "",
    }
