# SPDX-License-Identifier: Apache-2.0
"""`AutotunePolicy`: what may happen when a call has no configuration yet."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from ejkernel.ops.config.staleness import StalePolicy as StalePolicy
from ejkernel.ops.core.context import current_scope, entered
from ejkernel.ops.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutotunePolicy:
    """What may happen when a call has no configuration yet.

    Attributes:
        autotune: Measure the candidates there and then. Off by default: nothing is tuned at a bad moment.
        heuristic: Answer with the kernel's heuristic; off, a miss is a `NoConfigError`.
        validate: While tuning, reject candidates whose results differ from the reference; a winner's gradients, and the
            kernel's rule, are held against JAX's. `"outputs"`: results alone, where to compile and run JAX's derivative
            of a large call's reference would take long.
        budget_s: Seconds after which a search ends with the best so far, also when a candidate never returns, within a
            grace of a quarter of them, five seconds at least; `None`: no limit. The heuristic has its turn in any case,
            and stands for a reference that takes more than a third of what is left to compile.
        cold_cache: Measure with inputs that no cache of the device holds, where calls meet such inputs in the program.
        isolate: Tune in a worker process, which a candidate that crashes or never returns takes with it.
        devices: How many GPUs tune side by side, each with a worker process of its own; only with `isolate`, and where
            there are several calls to tune.
        executor: Who carries out searches elsewhere, one call's on one device: a `concurrent.futures.Executor`, such as
            a `RayExecutor`. It is not shut down. Every search has a worker process, as with `isolate`; `devices` is not
            heeded.
        compile_processes: Compile in so many processes of their own, where they can compile for the device; 0: in
            threads. Worth it for kernels that take long in Python before the compiler has them.
        max_candidates: How many candidates of a `ConfigSpace` a search measures; a list is measured whole.
        note_misses: Note each call that nothing was measured for in a file beside the persistent cache, so that
            `ejkernel tune --missed` can tune it.
        agree: In a program that several processes run, or may run, have them agree on each call's configuration; the
            first that lowers a call decides, and nothing is tuned there. Off only for a program of one process.
        stale: What becomes of saved configurations that were measured with other versions than those here.
    """

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
                f"executor must be a concurrent.futures.Executor, or have its submit(), got {self.executor!r}."
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
    """Some fields of a policy, for one chain or for all."""

    selector: Any
    changes: tuple[tuple[str, Any], ...]


def effective_policy(base: AutotunePolicy, selector: object) -> AutotunePolicy:
    """Return `base` with the overrides in force for `selector`, the innermost last."""
    for change in current_scope().policies:
        if change.selector is None or change.selector is selector:
            base = dataclasses.replace(base, **dict(change.changes))
    return base


@contextlib.contextmanager
def policy_override(selector: object = None, /, **changes: Any) -> Iterator[None]:
    """Change fields of the policy inside the `with` block, for `selector` (a chain) or for every chain.

    Functions that `jit` has compiled are traced again inside.

    Args:
        selector: The `ConfigSelectorChain` to limit it to; everyone's policy if left out.
        **changes: Fields of `AutotunePolicy`.

    Raises:
        ConfigError: a field that there is not, or a bad value for it.
    """
    known = [field.name for field in dataclasses.fields(AutotunePolicy)]
    for name in changes:
        if name not in known:
            raise ConfigError(f"AutotunePolicy has no field {name!r}; it has {', '.join(known)}.")
    # Checked here, where the mistake is, and not at the first call inside.
    AutotunePolicy(**changes)
    scope = current_scope()
    # A value, sorted: it is a part of JAX's keys, and equal changes compile nothing anew.
    change = PolicyChange(selector, tuple(sorted(changes.items())))
    with entered(dataclasses.replace(scope, policies=(*scope.policies, change))):
        yield


@contextlib.contextmanager
def looking_only() -> Iterator[None]:
    """Let the calls inside take what configurations there are.

    Nothing is tuned, or decided for other processes, and no miss is noted or an error.
    """
    with policy_override(autotune=False, heuristic=True, note_misses=False, agree=False):
        yield
