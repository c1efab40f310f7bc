# SPDX-License-Identifier: Apache-2.0
"""`Implementation`: one way to compute an operation; `OperationConfig`: an implementation and its parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import jax

from ejkernel.ops.config.published import Facts, PublishedTable
from ejkernel.ops.core.hooks import warn_of_misspelt_hooks
from ejkernel.ops.errors import ArgumentError, ConfigError, KernelError, UnsupportedError
from ejkernel.ops.utils.error_text import error_text, example_text, value_text
from ejkernel.ops.utils.fingerprint import TPU_NAMES, name_of_device
from ejkernel.ops.utils.messages.names import NamedFields, check_argument, did_you_mean
from ejkernel.ops.utils.services import Shown

_HOOKS_OF_KERNELS: Final = {"heuristic_cfg": ("heuristic",), "config_space": ("space",), "candidate_cfgs": ("space",)}
_CLOSE: Final = 0.7  # similarity of a misspelt implementation's name: `flash3` does not mean `splash`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationCall:
    """The description of a call for its implementations; an operation's subclass adds shapes, dtypes and options.

    Attributes:
        platform: `gpu`, `tpu` or `cpu`; `None` if unknown.
        device_fingerprint: E.g. `gpu:nvidia_h200`; empty if unknown.
        backward: Whether this is a backward call.
        higher: Whether the call computes tangents or higher derivatives.
        partitioned: Whether XLA's partitioner distributes the call over devices without control by the implementation.
        examples: The number of examples under `vmap`.
        default_precision: JAX's setting `jax_default_matmul_precision`.
    """

    platform: str | None = None
    device_fingerprint: str = ""
    backward: bool = False
    higher: bool = False
    partitioned: bool = False
    examples: int = 1
    default_precision: str | None = None

    @property
    def place(self) -> str:
        """The device or platform in messages."""
        return name_of_device(self.device_fingerprint or str(self.platform))

    @property
    def features(self) -> frozenset[str]:
        """The features that an implementation must list in its own `features` to run the call.

        An operation lists optional arguments here that it gained later, by their public names. An older implementation
        then rejects a call that uses them, instead of ignoring them.
        """
        return frozenset()


CallT = TypeVar("CallT", bound=OperationCall)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoParams(NamedFields):
    """The parameter type of an implementation without parameters."""


class Implementation(Generic[CallT]):
    """One way to compute an operation, with its own parameters. Its methods see only the description of a call.

    Attributes:
        name: Its name in `implementation=` and in configurations.
        params: Type of its forward parameters: a frozen dataclass of plain data with defaults.
        bwd_params: Type of its backward parameters; `None`: the same as `params`.
        residuals: Name of the format of the residuals. The forward of one implementation works with the backward of
            another if both have the same format; otherwise one implementation runs both. `None`: no residuals, the
            backward computes from the arguments alone.
        differentiable: Whether JAX can differentiate `forward` and `backward`, in both modes. The other implementations
            use the tangents and higher derivatives of a differentiable implementation.
        features: The supported members of `OperationCall.features`; calls with other features are rejected.
        unavailable: Groups of checks of `ejkernel.testing.check_kernel` that do not apply, such as `vmap` or `export`,
            each with the reason.
        published: The table of parameters that others have published for it.
    """

    name: ClassVar[str]
    params: ClassVar[type[Any]] = NoParams
    bwd_params: ClassVar[type[Any] | None] = None
    residuals: ClassVar[str | None] = None
    differentiable: ClassVar[bool] = False
    features: ClassVar[frozenset[str]] = frozenset()
    unavailable: ClassVar[Mapping[str, str]] = {}
    published: ClassVar[PublishedTable | None] = None

    def published_as(self, call: CallT) -> Facts | None:
        """Return the facts by which `published` lists such a call; `None` if it lists none."""
        return None

    def unsupported(self, call: CallT) -> str | None:
        """Return why `call` does not run, and what to use instead; `None` if it runs."""
        return None

    def params_fault(self, call: CallT, params: Any) -> str | None:
        """Return why these parameters are invalid for `call`, or `None`. Invalid parameters never run."""
        return None

    def doubt(self, call: CallT, params: Any) -> str | None:
        """Return why the compiler may refuse these parameters for `call`, or `None`. Only tuning tries them then."""
        return self.params_fault(call, params)

    def preference(self, call: CallT) -> int:
        """Return the priority for a call that it runs; of equal priorities, the first in the operation's list wins."""
        return 0

    def heuristic(self, call: CallT) -> Any:
        """Return good parameters without measuring; by default the type's defaults."""
        return self.params_type(backward=call.backward)()

    def space(self, call: CallT) -> Collection[Any]:
        """Return the parameters that tuning tries, a list or a `ConfigSpace`; by default only the heuristic's."""
        return [self.heuristic(call)]

    def forward(self, call: CallT, /, *args: Any, params: Any) -> tuple[Any, Any]:
        """Return the output, and residuals in the format `residuals` (`()` if that is `None`).

        Args:
            call: The description.
            *args: The operation's positional arguments.
            params: An instance of `params`.
        """
        raise KernelError(f"{type(self).__name__} has no forward.")

    def output(self, call: CallT, /, *args: Any, params: Any) -> Any:
        """Return only the output; by default that of `forward`. Override it if skipping the residuals is faster."""
        return self._checked_forward(call, *args, params=params)[0]

    def _checked_forward(self, call: CallT, /, *args: Any, params: Any) -> tuple[Any, Any]:
        """Return the result of `forward`, which must be a pair: of a mere array, [0] would be the first row."""
        found: object = self.forward(call, *args, params=params)
        if isinstance(found, tuple) and len(found) == 2:
            return found
        given, name = f"{len(found)} items" if isinstance(found, tuple) else value_text(found), type(self).__name__
        raise KernelError(
            f"{name}.forward must return (output, residuals), got {given}; without residuals, (output, ())."
        )

    def backward(
        self, call: CallT, residuals: Any, out: Any, cotangents: tuple[Any, ...], /, *args: Any, params: Any
    ) -> tuple[Any, ...]:
        """Return the gradient of each positional argument (`None`: zero); optional.

        By default JAX differentiates a differentiable `forward` with these parameters, and computes it a second time.

        Args:
            call: The description.
            residuals: The residuals of the forward, in the format `residuals`.
            out: The output.
            cotangents: A tuple with one cotangent for each output.
            *args: The operation's positional arguments.
            params: An instance of `bwd_params`.
        """

        def run(*args: Any) -> Any:
            return Implementation.output(self, dataclasses.replace(call, backward=False), *args, params=params)

        cotangent = cotangents if isinstance(out, tuple | list) else cotangents[0]
        found = jax.vjp(run, *args)[1](jax.tree.unflatten(jax.tree.structure(out), jax.tree.leaves(cotangent)))
        return tuple(jax.tree.map(_gradient, gradient) for gradient in found)

    @classmethod
    def params_type(cls, *, backward: bool) -> type[Any]:
        """Return the type of the parameters of one direction."""
        return cls.bwd_params if backward and cls.bwd_params is not None else cls.params

    @classmethod
    def has_backward(cls) -> bool:
        """Return whether it has a gradient: its own `backward`, or JAX's derivative."""
        return cls.differentiable or cls.backward is not Implementation.backward

    @classmethod
    def runs_everywhere(cls, call: CallT) -> bool:
        """Return whether it runs `call` on every platform and device."""
        return cls.unsupported is Implementation.unsupported and call.features <= cls.features

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _gradient(gradient: Any) -> Any:
    # The gradient of an integer is `None` in gradient rules, and float0 in JAX.
    return None if gradient.dtype == jax.dtypes.float0 else gradient


class LazyImplementation(NamedTuple):
    """An implementation whose module is imported on first use.

    Attributes:
        target: Its class, as `module:Class`.
        platforms: Its platforms: `gpu`, `tpu`, `cpu`; empty for all. Elsewhere it is considered only if requested by
            name.
    """

    target: str
    platforms: tuple[str, ...] = ()


_SUGGESTED: Final = re.compile(r"(; |, or | )use ('\w+'(?:(?:,| or|, or) '\w+')*)")

Declared = Implementation[Any] | LazyImplementation | str


class Implementations(Mapping[str, Implementation[Any]]):
    """The implementations of an operation by name, in order of preference: `implementations["xla"]`.

    A lookup loads an implementation the first time. It raises `ArgumentError` for an unknown name, and
    `UnsupportedError` if the implementation's module cannot be imported here.

    Args:
        declared: By name: an `Implementation`, its class as `"module:Class"`, or a `LazyImplementation`.
    """

    def __init__(self, declared: Mapping[str, Declared]) -> None:
        wanted = 'a mapping from names to implementations, e.g. {"xla": Xla()}'
        check_argument(isinstance(declared, Mapping), "the argument of Implementations", wanted, declared)
        self._declared = {
            name: LazyImplementation(found) if isinstance(found, str) else found for name, found in declared.items()
        }
        self._platforms = {name: getattr(found, "platforms", ()) for name, found in self._declared.items()}
        self._loaded: dict[str, Implementation[Any]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._declared

    def __getitem__(self, name: str) -> Implementation[Any]:
        """Return the implementation `name`.

        Raises:
            ArgumentError: The name is unknown, e.g. in a call read from a file.
            UnsupportedError: Its module cannot be imported here.
        """
        if name not in self._declared:
            raise ArgumentError(self.unknown(name))
        if name in self._loaded:
            return self._loaded[name]
        found: Any = self._declared[name]
        if isinstance(found, LazyImplementation):
            module, _, attribute = found.target.partition(":")
            try:
                found = getattr(importlib.import_module(module), attribute)()
            # A missing dependency makes the implementation unsupported here.
            except ImportError as error:
                raise UnsupportedError(
                    f"implementation={name!r} needs {module}, which cannot be imported: {error_text(error)}"
                ) from error
        if not isinstance(found, Implementation) or found.name != name:
            raise KernelError(
                f"implementations must map each name to the Implementation with that name, got {name!r}: {found!r}."
            )
        if not type(found).__module__.startswith("ejkernel."):
            what = "method of an implementation"
            warn_of_misspelt_hooks(type(found), (Implementation,), _HOOKS_OF_KERNELS, what=what)
        self._loaded[name] = found
        return found

    @property
    def names(self) -> str:
        """All names, for messages."""
        return ", ".join(self._declared)

    def unknown(self, name: object) -> str:
        """Return the message about an unknown name."""
        return f"implementation must be one of {self.names}; got {name!r}{did_you_mean(name, self, _CLOSE)}"

    def platforms(self, name: str) -> tuple[str, ...]:
        """Return the platforms of an implementation; empty for all."""
        return self._platforms[name]

    def elsewhere(self, name: str, platform: str | None, device: str | None = None) -> str:
        """Return why an implementation is not for a platform; `""` if it is. `None` is any platform."""
        platforms = self._platforms[name]
        if not platforms or platform in (None, *platforms):
            return ""
        wanted = " or ".join(kind.upper() for kind in platforms)
        place = TPU_NAMES.get(device or "", device or platform)
        return f"implementation={name!r} needs a {wanted}, and this call is for {place}."

    def loadable(self, names: Iterable[str]) -> list[Implementation[Any]]:
        """Return those named implementations that can be imported here."""
        found = []
        for name in names:
            with contextlib.suppress(UnsupportedError):  # `unsupported` reports the reason
                found.append(self[name])
        return found

    def unsupported(self, name: str, call: OperationCall) -> str | None:
        """Return why an implementation does not run `call`; `None` if it does.

        The implementations that the reason suggests run the call.
        """
        reason: object = self._reason(name, call)
        if not isinstance(reason, str | None):
            kind = type(self[name]).__name__
            raise KernelError(f"{kind}.unsupported must return a sentence, or None if the call runs; got {reason!r}.")
        if reason is None or " use '" not in reason:
            return reason

        def usable(match: re.Match[str]) -> str:
            able = [other for other in re.findall(r"'(\w+)'", match[2]) if self._runs(other, call)]
            named = " or ".join(repr(other) for other in able)
            return f"{match[1]}use {named}" if able else "" if match[1] == "; " else match[0]

        return _SUGGESTED.sub(usable, reason)

    def _runs(self, name: str, call: OperationCall) -> bool:
        if name not in self:  # a value of another argument
            return True
        return not self.elsewhere(name, call.platform) and self._reason(name, call) is None

    def _reason(self, name: str, call: OperationCall) -> str | None:
        try:
            found = self[name]
        except UnsupportedError as error:
            return self.elsewhere(name, call.platform, call.device_fingerprint) or str(error)
        if call.backward and not found.has_backward():
            return f"implementation={name!r} has no gradient."
        unknown = call.features - found.features
        reason = self._why_unknown(name, call, sorted(unknown)) if unknown else found.unsupported(call)
        if reason is not None or found.differentiable or not call.higher:
            return reason
        others = [other for other in self if self[other].differentiable]
        hint = f"; use {others[0]!r}." if others else "."
        return f"forward-mode differentiation is not available with implementation={name!r}{hint}"

    def _why_unknown(self, name: str, call: OperationCall, unknown: list[str]) -> str:
        # Suggest only implementations for all platforms: another platform's would not help here.
        others = [other for other in self if not self.platforms(other) and call.features <= self[other].features]
        where = "the gradient of " if call.backward else ""
        return (
            f"{', '.join(unknown)}: not available with {where}implementation={name!r}"
            f"{f'; use {others[0]!r}' if others else ''}."
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationConfig(NamedFields, Shown):
    """The configuration of a call of an operation; each operation has its own subclass.

    A tagged union: the implementation's name determines the types of the parameters, in memory and in files.

    Passed as `cfg=`, it applies to the call and to its gradient. A tuned configuration holds only the parameters of the
    direction of its call.

    Attributes:
        implementation: Name of the implementation.
        fwd: Its parameters for the forward, of type `params`; `None`: its heuristic's.
        bwd: Its parameters for the backward, of type `bwd_params`; `None`: its heuristic's.

    Raises:
        ConfigError: The implementation is unknown, or the parameters belong to another implementation.
    """

    implementation: str
    fwd: Any = None
    bwd: Any = None

    implementations: ClassVar[Implementations] = Implementations({})  # the operation's

    def __post_init__(self) -> None:
        if self.implementation not in self.implementations:
            raise ConfigError(self.implementations.unknown(self.implementation))
        for name, params in (("fwd", self.fwd), ("bwd", self.bwd)):
            if params is None:
                continue
            expected = self.implementations[self.implementation].params_type(backward=name == "bwd")
            if not isinstance(params, expected):
                raise ConfigError(
                    f"{name} must be an instance of {expected.__name__} for implementation={self.implementation!r}, "
                    f"got {params!r}{example_text(expected)}"
                )

    @classmethod
    def field_types(cls, data: Mapping[str, object]) -> dict[str, Any]:
        """Return the field types for stored data; they depend on the implementation's name in the data."""
        name: Any = data.get("implementation")
        # A file may contain any name, e.g. one from a later version.
        if name not in cls.implementations:
            return {"implementation": str, "fwd": Any, "bwd": Any}  # __post_init__ rejects it and lists the valid names
        found = cls.implementations[name]
        forward, backward = (found.params_type(backward=backward) for backward in (False, True))
        return {"implementation": str, "fwd": forward | None, "bwd": backward | None}
