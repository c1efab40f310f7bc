# SPDX-License-Identifier: Apache-2.0
"""`AutotunePolicy`: permitted actions for a call without a configuration; `StalePolicy`: for a stale one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, get_args

from ejkernel.ops.core.context import current_scope, entered
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.messages.names import NamedFields, did_you_mean

Action = Literal["use", "retune", "refuse"]
_ACTIONS: Final = get_args(Action)  # the mildest first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StalePolicy(NamedFields):
    """How to treat a saved configuration measured with other versions or another search space.

    `"use"`: the configuration counts as tuned. `"retune"`: the configuration answers until the call is tuned. The call
    counts as a miss: it is tuned where tuning is allowed, and noted as missed. `"refuse"`: the configuration is
    ignored. With several differences, the strictest action applies. Information missing from an entry, e.g. one of an
    earlier ejkernel, is no difference.

    Attributes:
        jax: Action for another version of JAX.
        jaxlib: Action for another version of jaxlib.
        driver: Action for another version of the NVIDIA driver.
        space: Action for a changed search space. Any action but `"use"` evaluates `config_space` for each distinct
            call.
    """

    jax: Action = "use"
    jaxlib: Action = "use"
    driver: Action = "use"
    space: Action = "use"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value not in _ACTIONS:
                raise ConfigError(f"{field.name} must be one of {', '.join(_ACTIONS)}, got {value!r}.")

    def action(self, differing: Iterable[str]) -> Action:
        """Return the action for an entry that differs in these fields."""
        actions: list[Action] = [getattr(self, field) for field in differing]
        return max(actions, key=_ACTIONS.index, default="use")


_ON_MISS: Final = "autotune=True is EJKERNEL_ON_MISS=tune, and heuristic=False is EJKERNEL_ON_MISS=error."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutotunePolicy(NamedFields):
    """Permitted actions for a call without a configuration.

    Attributes:
        autotune: Search at once, on the miss. Off by default: tuning never starts unasked.
        heuristic: Use the kernel's heuristic. If off, a miss raises `NoConfigError`.
        validate: While tuning, reject candidates whose results differ from the reference; check the winner's gradients
            and the kernel's derivative rule against JAX. `"outputs"` checks only results, for large calls where
            compiling and running JAX's derivative of the reference takes long.
        budget_s: Seconds for one search, which then ends with the best candidate so far; `None`: no limit. A candidate
            that never returns is ended after a grace period of a quarter of the budget, at least five seconds. The
            heuristic is always measured. It also replaces a reference that needs more than a third of the remaining
            budget to compile.
        cold_cache: Measure with inputs outside the device's caches, for calls with such inputs in the program.
        isolate: Tune in a worker process; a candidate that crashes or never returns costs only the worker.
        devices: Number of GPUs that tune in parallel, each with its own worker process; only with `isolate` and for
            several calls.
        executor: Runs each search elsewhere, on one device: a `concurrent.futures.Executor`, e.g. a `RayExecutor`. The
            caller shuts it down. Every search runs in a worker process, as with `isolate`; `devices` has no effect.
        compile_processes: Number of processes that compile, where they can compile for the device; 0: threads compile.
            Helps kernels that spend long in Python before the compiler starts.
        max_candidates: Candidates of a `ConfigSpace` that a search measures; a list is measured completely.
        note_misses: Record each untuned call in a file beside the persistent cache, for `ejkernel tune --missed`.
        agree: In a program of several processes, make them agree on each call's configuration: the first process that
            lowers a call decides, and none tunes. Switch it off only for a program of one process.
        stale: Treatment of saved configurations that were measured with other versions.
    """

    _names_elsewhere: ClassVar[Mapping[str, str]] = {"on_miss": _ON_MISS}

    autotune: bool = False
    heuristic: bool = True
    validate: bool | Literal["outputs"] = True
    budget_s: float | None = None
    cold_cache: bool = False
    isolate: bool = False
    devices: int = 1
    executor: concurrent.futures.Executor | None = None
    compile_processes: int = 0
    max_candidates: int = 100
    note_misses: bool = False
    agree: bool = True
    stale: StalePolicy = dataclasses.field(default_factory=StalePolicy)

    def __post_init__(self) -> None:
        for name in ("autotune", "heuristic", "cold_cache", "isolate", "note_misses", "agree"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.stale, StalePolicy):
            raise ConfigError(f"stale must be a StalePolicy, got {self.stale!r}; write StalePolicy(jax='retune').")
        if self.executor is not None and (isinstance(self.executor, type) or not hasattr(self.executor, "submit")):
            raise ConfigError(
                f"executor must be a concurrent.futures.Executor or have its submit(), got {self.executor!r}."
            )
        is_number = isinstance(self.budget_s, int | float) and not isinstance(self.budget_s, bool)
        if self.budget_s is not None and not (is_number and self.budget_s > 0):
            raise ConfigError(f"budget_s must be positive seconds or None, got {self.budget_s!r}.")
        for name, least in (("devices", 1), ("compile_processes", 0), ("max_candidates", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} must be an int >= {least}, got {value!r}.")
        if not isinstance(self.validate, bool) and self.validate != "outputs":
            raise ConfigError(f"validate must be True, False or 'outputs', got {self.validate!r}.")


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyChange:
    """Fields that `policy_override` changes in the policy of one selector chain, or of all chains.

    Attributes:
        selector: The `ConfigSelectorChain`; `None` for all.
        changes: Pairs of a field's name and its new value.
    """

    selector: Any
    changes: tuple[tuple[str, Any], ...]


def effective_policy(chooser: object) -> AutotunePolicy:
    """Return the policy of a chain with the overrides in force for it; the innermost wins.

    A user's own chooser may lack a policy; it has the default.
    """
    policy = getattr(chooser, "policy", None)
    policy = policy if isinstance(policy, AutotunePolicy) else AutotunePolicy()
    for change in current_scope().policies:
        if change.selector is None or change.selector is chooser:
            policy = dataclasses.replace(policy, **dict(change.changes))
    return policy


@contextlib.contextmanager
def policy_override(selector: object = None, /, **changes: Any) -> Iterator[None]:
    """Change fields of the policy inside the `with` block, for `selector` (a chain) or for every chain.

    Inside the block, `jit` traces compiled functions again.

    Args:
        selector: The `ConfigSelectorChain` to change; by default all chains.
        **changes: Fields of `AutotunePolicy`.

    Raises:
        ConfigError: A field does not exist or has a bad value, or `selector` is no chain, e.g. a policy.
    """
    _check_selector(selector)
    known = [field.name for field in dataclasses.fields(AutotunePolicy)]
    for name in changes:
        if name not in known:
            more = f". {_ON_MISS}" if name == "on_miss" else did_you_mean(name, known)
            raise ConfigError(f"AutotunePolicy has no field {name!r}; it has {', '.join(known)}{more}")
    # Check here, at the mistake, and not at the first call inside the block.
    AutotunePolicy(**changes)
    scope = current_scope()
    # Hashable and sorted: JAX's cache keys contain it, so equal changes share compiled programs.
    change = PolicyChange(selector, tuple(sorted(changes.items())))
    with entered(dataclasses.replace(scope, policies=(*scope.policies, change))):
        yield


def _check_selector(selector: object) -> None:
    """Raise `ConfigError` if `selector` is no chain: the override would apply to no call."""
    if selector is None or hasattr(selector, "choose"):
        return
    got, fix = value_text(selector), "pass fields of the policy by name, e.g. policy_override(autotune=True)"
    if isinstance(selector, AutotunePolicy):
        default = AutotunePolicy()
        values = {field.name: getattr(selector, field.name) for field in dataclasses.fields(selector)}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name)]
        got, fix = "an AutotunePolicy", f"pass its fields by name: policy_override({', '.join(changed)})"
    elif hasattr(selector, "chooser"):
        fix = "pass the executor's chain: policy_override(executor.chooser, ...)"
    raise ConfigError(f"selector must be a ConfigSelectorChain, got {got}; {fix}.")


@contextlib.contextmanager
def looking_only() -> Iterator[None]:
    """Let calls inside the block use existing configurations only.

    A miss neither tunes, nor decides for other processes, nor is recorded, nor raises.
    """
    with policy_override(autotune=False, heuristic=True, note_misses=False, agree=False):
        yield
