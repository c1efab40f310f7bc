# SPDX-License-Identifier: Apache-2.0
"""`Implementation`: one way to compute an operation; `OperationConfig`: which one runs, and with what parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax

from ejkernel.ops.errors import ArgumentError, ConfigError, KernelError, UnsupportedError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.messages.names import did_you_mean


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationCall:
    """What all implementations may know of a call; an operation adds shapes, dtypes and options to it.

    Attributes:
        platform: `gpu`, `tpu` or `cpu`; `None` if it is not known yet.
        device_fingerprint: Such as `gpu:nvidia_h200`; empty if it is not known yet.
        backward: Whether the backward is asked for, rather than the forward.
        partitioned: Whether XLA's partitioner spreads the call over devices, and cannot be told how.
        examples: How many such calls run at once, under `vmap`.
    """

    platform: str | None = None
    device_fingerprint: str = ""
    backward: bool = False
    partitioned: bool = False
    examples: int = 1

    @property
    def features(self) -> frozenset[str]:
        """What the call asks for that only an implementation which names it in its own `features` runs.

        An operation whose arguments grow names the new ones here, as its users do: an implementation that was written
        before refuses a call that has them, rather than leaves them out.
        """
        return frozenset()


CallT = TypeVar("CallT", bound=OperationCall)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoParams:
    """The parameters of an implementation that has none."""


class Implementation(Generic[CallT]):
    """One way to compute an operation, with parameters of its own. All that it says, it says of a call's description.

    Attributes:
        name: What `implementation=` and configurations call it.
        params: Type of its parameters for the forward: a frozen dataclass with defaults, of plain data.
        bwd_params: Type of its parameters for the backward; `None`: the same.
        residuals: Name of what its forward leaves for a backward: a contract. The forward of one implementation may be
            followed by the backward of another where both have the same; where nobody shares it, an implementation is
            chosen for both or for none. `None`: nothing is left, and a backward computes from the arguments alone.
        differentiable: Whether JAX can differentiate `forward` and `backward`, in both modes. The others take
            tangents and higher derivatives from one that is.
        features: Those of `OperationCall.features` that it knows; a call with others is not asked about.
    """

    name: ClassVar[str]
    params: ClassVar[type[Any]] = NoParams
    bwd_params: ClassVar[type[Any] | None] = None
    residuals: ClassVar[str | None] = None
    differentiable: ClassVar[bool] = False
    features: ClassVar[frozenset[str]] = frozenset()

    def unsupported(self, call: CallT) -> str | None:
        """Return why `call` does not run, and what would; `None` if it runs."""
        return None

    def params_fault(self, call: CallT, params: Any) -> str | None:
        """Return why `call` must not run with these parameters; `None` if it may. They are refused, and never tried."""
        return None

    def preference(self, call: CallT) -> int:
        """Return how much it is to be preferred for a call that it runs; of equals, the first of the operation is."""
        return 0

    def heuristic(self, call: CallT) -> Any:
        """Return good parameters without measuring; by default the type's defaults."""
        return self.params_type(backward=call.backward)()

    def space(self, call: CallT) -> Collection[Any]:
        """Return the parameters that tuning tries, a list or a `ConfigSpace`; by default the heuristic's alone."""
        return [self.heuristic(call)]

    def forward(self, call: CallT, /, *args: Any, params: Any) -> tuple[Any, Any]:
        """Return the output, and the residuals that `residuals` names (`()` if it names none).

        Args:
            call: The description.
            *args: The operation's positional arguments.
            params: A `params`.
        """
        raise KernelError(f"{type(self).__name__} has no forward.")

    def output(self, call: CallT, /, *args: Any, params: Any) -> Any:
        """Return the output alone; by default that of `forward`. For those that compute it faster so."""
        return self.forward(call, *args, params=params)[0]

    def backward(
        self, call: CallT, residuals: Any, out: Any, cotangents: tuple[Any, ...], /, *args: Any, params: Any
    ) -> tuple[Any, ...]:
        """Return the gradient of each positional argument (`None`: zero); optional.

        Without it JAX differentiates `forward`, if it can, with these parameters, and computes it a second time.

        Args:
            call: The description.
            residuals: What the contract names.
            out: The output.
            cotangents: One for each output; a single output gives a tuple of one.
            *args: The operation's positional arguments.
            params: A `bwd_params`.
        """

        def run(*args: Any) -> Any:
            return self.forward(dataclasses.replace(call, backward=False), *args, params=params)[0]

        cotangent = cotangents if isinstance(out, tuple | list) else cotangents[0]
        found = jax.vjp(run, *args)[1](jax.tree.unflatten(jax.tree.structure(out), jax.tree.leaves(cotangent)))
        return tuple(jax.tree.map(_gradient, gradient) for gradient in found)

    @classmethod
    def params_type(cls, *, backward: bool) -> type[Any]:
        """Return the type of the parameters of one direction."""
        return cls.bwd_params if backward and cls.bwd_params is not None else cls.params

    @classmethod
    def has_backward(cls) -> bool:
        """Return whether there is a gradient: one of its own, or JAX's."""
        return cls.differentiable or cls.backward is not Implementation.backward

    @classmethod
    def runs_everywhere(cls, call: CallT) -> bool:
        """Return whether no platform and no device would make it refuse `call`."""
        return cls.unsupported is Implementation.unsupported and call.features <= cls.features

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _gradient(gradient: Any) -> Any:
    # Of integers: rules say `None` for what JAX says with a type of its own.
    return None if gradient.dtype == jax.dtypes.float0 else gradient


class LazyImplementation(NamedTuple):
    """An implementation whose module is imported when it is first asked for.

    Attributes:
        target: Where its class is, `module:Class`.
        platforms: Where it runs, of `gpu`, `tpu` and `cpu`; empty: everywhere. It is asked for elsewhere only by name.
    """

    target: str
    platforms: tuple[str, ...] = ()


Declared = Implementation[Any] | LazyImplementation | str


class Implementations(Mapping[str, Implementation[Any]]):
    """The implementations of an operation by name, the one to prefer first; each is loaded when it is looked up.

    Args:
        declared: By name, an `Implementation`, or where its class is: `"module:Class"`, or a `LazyImplementation`.
    """

    def __init__(self, declared: Mapping[str, Declared]) -> None:
        self._declared = {
            name: LazyImplementation(found) if isinstance(found, str) else found for name, found in declared.items()
        }
        self._loaded: dict[str, Implementation[Any]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._declared

    def __getitem__(self, name: str) -> Implementation[Any]:
        """Return the implementation of that name.

        Raises:
            ArgumentError: there is none; a call that was read from a file may ask for any.
            UnsupportedError: its module cannot be imported here.
        """
        if name not in self:
            raise ArgumentError(f"implementation must be one of {self.names}; got {name!r}{did_you_mean(name, self)}")
        if name not in self._loaded:
            self._loaded[name] = _loaded(name, self._declared[name])
        return self._loaded[name]

    @property
    def names(self) -> str:
        """All names, for messages."""
        return ", ".join(self._declared)

    def platforms(self, name: str) -> tuple[str, ...]:
        """Return the platforms that an implementation runs on; none: all."""
        declared = self._declared[name]
        return declared.platforms if isinstance(declared, LazyImplementation) else ()

    def loadable(self, names: Iterable[str]) -> list[Implementation[Any]]:
        """Return those of these names that can be imported here."""
        found = []
        for name in names:
            with contextlib.suppress(UnsupportedError):  # which `unsupported` gives as a reason
                found.append(self[name])
        return found

    def unsupported(self, name: str, call: OperationCall) -> str | None:
        """Return why an implementation does not run `call`; `None` if it does."""
        try:
            found = self[name]
        except UnsupportedError as error:
            return str(error)
        if call.backward and not found.has_backward():
            return f"implementation={name!r} has no gradient."
        return self._unknown_features(found, call) or found.unsupported(call)

    def _unknown_features(self, found: Implementation[Any], call: OperationCall) -> str | None:
        unknown = sorted(call.features - found.features)
        if not unknown:
            return None
        # To be told of one that is for another platform helps nobody here.
        others = [name for name in self if not self.platforms(name) and call.features <= self[name].features]
        where = "the gradient of " if call.backward else ""
        return (
            f"{', '.join(unknown)}: not available with {where}implementation={found.name!r}"
            f"{f'; use {others[0]!r}' if others else ''}."
        )


def _loaded(name: str, declared: Declared) -> Implementation[Any]:
    if isinstance(declared, LazyImplementation):
        module, _, attribute = declared.target.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)()
        # What it needs may be missing here, which is a reason as any other.
        except ImportError as error:
            raise UnsupportedError(
                f"implementation={name!r} needs {module}, which cannot be imported: {error_text(error)}"
            ) from error
    else:
        found = declared
    if not isinstance(found, Implementation) or found.name != name:
        raise KernelError(
            f"implementations must map a name to the Implementation of that name, got {name!r}: {found!r}."
        )
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationConfig:
    """How one call of an operation runs. An operation has a subclass of its own, which it is declared with.

    A tagged union: the name decides of which types the parameters are, in memory and in files.

    Passed as `cfg=`, it is for the call and for its gradient. What is found for a call holds the parameters of that
    call's direction.

    Attributes:
        implementation: Which implementation runs.
        fwd: Its parameters for the forward, a `params`; `None`: its heuristic's.
        bwd: Its parameters for the gradient, a `bwd_params`; `None`: its heuristic's.

    Raises:
        ConfigError: there is no such implementation, or the parameters are another's.
    """

    implementation: str
    fwd: Any = None
    bwd: Any = None

    implementations: ClassVar[Implementations] = Implementations({})  # the operation's

    def __post_init__(self) -> None:
        if self.implementation not in self.implementations:
            raise ConfigError(
                f"implementation must be one of {self.implementations.names}; got {self.implementation!r}"
                f"{did_you_mean(self.implementation, self.implementations)}"
            )
        for name, params in (("fwd", self.fwd), ("bwd", self.bwd)):
            if params is None:
                continue
            expected = self.implementations[self.implementation].params_type(backward=name == "bwd")
            if not isinstance(params, expected):
                raise ConfigError(
                    f"{name} must be a {expected.__name__} for implementation={self.implementation!r}, got {params!r}."
                )

    @classmethod
    def field_types(cls, data: Mapping[str, object]) -> dict[str, Any]:
        """Return the types of the fields of stored data, which the implementation's name among them decides."""
        name: Any = data.get("implementation")
        # A file may say any name, and one of a later version.
        if name not in cls.implementations:
            return {"implementation": str, "fwd": Any, "bwd": Any}  # refused in __post_init__, with the names there are
        found = cls.implementations[name]
        forward, backward = (found.params_type(backward=backward) for backward in (False, True))
        return {"implementation": str, "fwd": forward | None, "bwd": backward | None}
