# SPDX-License-Identifier: Apache-2.0
"""The `Kernel` base class, and the entry point of this package for others: queries about kernels and calls."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ejkernel.ops.core.callspec import prepared as prepared
from ejkernel.ops.core.callspec import with_python_numbers as with_python_numbers
from ejkernel.ops.core.hooks import Computation, candidates, form_of, no_instance
from ejkernel.ops.core.hooks import check_config as check_config
from ejkernel.ops.core.hooks import has_backward_heuristic as has_backward_heuristic
from ejkernel.ops.core.hooks import has_gradient_rule as has_gradient_rule
from ejkernel.ops.core.hooks import heuristic_config as heuristic_config
from ejkernel.ops.core.hooks import overrides as overrides
from ejkernel.ops.core.hooks import run_forms as run_forms
from ejkernel.ops.core.hooks import same_code as same_code
from ejkernel.ops.core.invocation import Invocation as Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.sharding.split import CallPart
from ejkernel.ops.core.types import Cfg, Cost, Out
from ejkernel.ops.errors import ArgumentError, CallError, NoConfigError
from ejkernel.ops.utils import services
from ejkernel.ops.utils.error_text import error_text, value_text
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.messages.names import hide_frames, named
from ejkernel.ops.utils.random_arrays import random_inputs
from ejkernel.ops.utils.weak_caches import living

logger = logging.getLogger(__name__)


class Kernel(Computation[Cfg, Out]):
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
        config_type: The configuration type in the class definition, as in `Kernel[MyConfig, jax.Array]`, or `None`.
        choices: Parameters of `run` for which passing the default differs from omitting the argument.
        keeps_residuals: Whether a kernel without a gradient rule computes its forward only once under `grad`. The
            residuals that JAX saves for `run`, e.g. those of an inner `jax.custom_vjp`, then go to the backward, which
            may have another configuration. So they must mean the same under each configuration, like the residuals of
            `fwd_with_residuals`; tables computed from the configuration alone are exempt.
    """

    def __call__(self, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Run the operation through the default executor."""
        # The attribute is faster than a call; eager calls avoid every extra function call.
        executor = services.made.executor or services.made.default_executor()
        try:
            return typing.cast(Out, executor.call(self, args, kwargs, cfg))
        except Exception as error:  # also an error of the user's code in `run`
            hide_frames(error)
            raise

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a good configuration without measuring; by default the first candidate."""
        hooks = (form_of(self, "config_space", inv.platform), "candidate_cfgs")
        if not any(overrides(self, hook) for hook in hooks):
            raise NoConfigError(self.op_id, ("heuristic",))
        with named(self.op_id):
            for first in candidates_of(self, inv):
                return typing.cast(Cfg, first)
        raise NoConfigError(self.op_id, ("heuristic", "config_space"))

    def config_space(self, inv: Invocation[Cfg, Out]) -> Collection[Cfg]:
        """Return the configurations that tuning tries, a list or a `ConfigSpace`; by default only the heuristic's."""
        return [heuristic_config(self, inv)]

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Collection[Cfg]:
        """Alias of `config_space`."""
        return candidates(self, "config_space", inv)

    def bwd_heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a good configuration for the backward call; by default that of `heuristic_cfg`.

        A kernel with this hook uses it for untuned backward calls, instead of the configuration tuned for the forward.
        Forward and backward share one configuration type, which may have fields for only one of them.
        """
        # Not `heuristic_config`, which prefers the backward's own form: a subclass would recurse.
        return typing.cast(Cfg, getattr(self, form_of(self, "heuristic_cfg", inv.platform))(inv))

    def bwd_config_space(self, inv: Invocation[Cfg, Out]) -> Collection[Cfg]:
        """Return the configurations that tuning tries for the backward call; by default `config_space`."""
        return typing.cast(Collection[Cfg], getattr(self, form_of(self, "config_space", inv.platform))(inv))

    def bucket(self, inv: Invocation[Cfg, Out]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments that represent the call in its key; by default its own.

        Calls with equal representatives share one key and one configuration. Tuning measures the representative, whose
        array sizes and static values may differ from the call's. `run` and `heuristic_cfg` see the call itself. A
        kernel with this hook promises that every configuration runs for every call of the bucket.

        Args:
            inv: The call. Under `vmap` its arguments have the shapes of one example; batch sizes stay in the key.

        Returns:
            Positional and keyword arguments, with `jax.ShapeDtypeStruct` for arrays; see `bucketed`. Static keyword
            arguments may be omitted. `inv.args, inv.kwargs` is the call itself. The hook must be idempotent: these
            arguments represent themselves.
        """
        return inv.abstract_args, inv.abstract_kwargs

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

    def completed(self, inv: Invocation[Cfg, Out], config: Cfg) -> Cfg:
        """Return a configuration of another call with the parameters that this call runs with; for display."""
        return config

    def why_not(self, inv: Invocation[Cfg, Out], config: Cfg) -> str:
        """Return why a configuration measured elsewhere must not run a call here; `""` if it may."""
        return ""

    def published(self, inv: Invocation[Cfg, Out]) -> Sequence[Any]:
        """Return the configurations that others published for a call, the preferred first; see `Published`."""
        return ()

    def cost(self, inv: Invocation[Cfg, Out]) -> Cost | None:
        """Return the work of a call, including enclosing `vmap`s; `None`, the default, if it is unknown.

        Reports compare measured times with it, to show how close a configuration comes to the device's peak, and
        `ejkernel tune --time` begins with the most work. `inv.direction` tells forward, backward and tangents apart.
        """
        return None


Kernel._interface = Kernel


def living_kernels() -> dict[str, list[Kernel[Any, Any]]]:
    """Return the live kernels of this process by versioned name, the latest first."""
    found: dict[str, list[Kernel[Any, Any]]] = {}
    for kernel in reversed(living(Kernel)):
        found.setdefault(kernel.op_id_v, []).append(kernel)
    return found


def unbound(target: object, args: tuple[object, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the kernel behind a bound method, with the object as its first argument; return other targets as is.

    Raises:
        CallError: The target is a kernel class rather than an instance.
    """
    if isinstance(target, type) and issubclass(target, Kernel):
        raise CallError(f"{no_instance(target)} and pass that.")
    if isinstance(target, types.MethodType) and isinstance(target.__func__, Kernel):
        return target.__func__, (target.__self__, *args)
    return target, args


def kernel_of(inv: Invocation[Cfg, Out]) -> Kernel[Cfg, Out]:
    """Return the kernel of a call.

    Raises:
        ArgumentError: The invocation has none.
    """
    if not isinstance(inv.kernel, Kernel):
        raise ArgumentError(f"Invocation of {inv.op_id!r} has no kernel; pass kernel=...")
    return inv.kernel


def candidates_of(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out]) -> Collection[Any]:
    """Return the kernel's candidates for `inv`, from `candidate_cfgs` or `config_space`."""
    return candidates(kernel, "candidate_cfgs" if overrides(kernel, "candidate_cfgs") else "config_space", inv)


_SHOWN: Final = 3  # configurations of a space in a message
_ACCEPTED: Final[dict[Any, Any]] = {
    int: int | np.integer,
    float: int | float | np.integer | np.floating,
    str: str,
    bool: bool | np.bool_,
}


def config_fault(inv: Invocation[Cfg, Out], config: object, error: Exception, *, name: str = "cfg") -> str:
    """Return how a configuration with which a call failed differs from those of its kernel; empty if it does not.

    A configuration outside the space is only at fault if the call failed: the space lists what is worth measuring.

    Args:
        inv: The call.
        config: The caller's configuration.
        error: The exception.
        name: The argument that passed it; empty if several arguments spell it out.
    """
    try:
        space = candidates_of(kernel_of(inv), inv)
        shown = [value_text(each) if name else compact(each) for each in itertools.islice(iter(space), _SHOWN)]
        is_outside = bool(shown) and config not in space
    except Exception as raised:  # noqa: BLE001 - the user's hooks and `__eq__`; the first error matters more
        logger.debug("no space of %s for a message: %s", inv.op_id, error_text(raised))
        shown, is_outside = [], False
    field = _misfit(config)
    if not field and not is_outside:
        return ""
    given = f"{name}={value_text(config)}" if name else compact(config)
    problem = f"{given}: {field}" if field else f"{given} is not in the space of this call"
    advice = f"; pass e.g. {' or '.join(shown)}" if shown else ""
    advice += f", or leave {name} out" if name and advice else ""
    return f"{inv.op_id}: {problem}{advice}. The call failed with {error_text(error)}"


def _misfit(config: object) -> str:
    """Return which field of a dataclass has a value of another type than declared; empty if none is known to."""
    if not dataclasses.is_dataclass(config):
        return ""
    try:
        declared = typing.get_type_hints(type(config))
    except Exception as raised:  # noqa: BLE001 - an annotation may be any text
        logger.debug("no types of %s: %s", type(config).__name__, error_text(raised))
        return ""
    for field in dataclasses.fields(config):
        kind: Any = declared.get(field.name)
        value = getattr(config, field.name)
        allowed = _ACCEPTED.get(kind)
        if allowed is not None and not (isinstance(value, allowed) and (kind is bool) == isinstance(value, bool)):
            return f"{field.name} must be of type {kind.__name__}, got {value_text(value)}"
    return ""
