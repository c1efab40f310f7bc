# SPDX-License-Identifier: Apache-2.0
"""`check_kernel` checks a kernel in its author's tests; `paired` makes a kernel of one implementation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ejkernel.ops.autotuner.process.threads import on_measuring_thread
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.operation import Operation, Selected
from ejkernel.ops.utils.fingerprint import device_fingerprint, device_kind
from ejkernel.ops.utils.messages.names import check_argument, did_you_mean
from ejkernel.testing.programs import reported_crashes, without_exits
from ejkernel.testing.report import CheckReport, to_stderr
from ejkernel.testing.rows import GROUPS
from ejkernel.testing.running import checked
from ejkernel.testing.subject import Scope


def check_kernel(
    kernel: Kernel[Cfg, Out],
    *args: object,
    configs: Collection[object] | None = None,
    without: Collection[str] = (),
    unavailable: Mapping[str, str] | None = None,
    strict: bool = True,
    seed: int = 0,
    progress: bool | Callable[[str], object] = True,
    **kwargs: object,
) -> CheckReport:
    """Check that a kernel keeps its contract for one call; meant for its author's tests.

    Under every configuration, results and gradients are compared with the kernel's `reference` and with JAX's
    derivative of it. Without a reference they are compared with the heuristic's results and JAX's derivative of `run`.

    - Results and gradients are also compared under `vmap` of all arrays, of each alone, and nested; and for small and
      large values, zeros, odd sizes and other dtypes. Second derivatives are compared if the kernel has them.
    - Any forward configuration must work with any backward configuration.
    - Repeated calls must agree, arguments must not be modified, types must not depend on the configuration, and a
      gradient rule must return the arguments' dtypes.
    - Under the heuristic, the call is lowered for other platforms, exported, and looked up by its key, and its kernel
      is pickled. A kernel with a `sharding_rule` is split along each axis of the rule, over as many devices of this
      process as divide the axis.

    Checks that do not apply are listed as skipped, with the reason, and so are checks that were not run because an
    earlier one failed. `not_checked` of the report lists the omissions.

    A kernel that ends the process, e.g. by a segmentation fault, ends the checks as well. Then the stack on stderr has
    a line such as `File "check_kernel", line 2 in configuration rows=64`. To continue after crashes, use
    `ejkernel tune`, which measures in a worker process and lists such candidates as crashed.

    A kernel refuses sizes and dtypes by raising `UnsupportedError`, or another error of ejkernel, with the reason. Any
    other exception is a failure, unless the reference rejects the same arrays.

    >>> import jax.numpy as jnp
    >>> from ejkernel.ops import tune
    >>> @tune(space={"rows": lambda inv: [n for n in (1, 2, 4) if inv.args[0].size % n == 0]})
    ... def total(x, *, rows=1):
    ...     return x.reshape(rows, -1).sum(0).sum()
    >>> check_kernel(total, jnp.ones(8), without=["pickle"]).ok
    True

    Args:
        kernel: The kernel, or a function under `tune`.
        *args: Arguments of the call; arrays may be abstract. Keep them small, because checks compile many programs.
            `Kernel.example_inputs` makes the batches.
        configs: The configurations to check in addition to the heuristic; by default all of `config_space`, or a
            sample of a `ConfigSpace` of more than 24.
        without: Groups of checks to leave out: `gradient`, `second derivative`, `tangents`, `vmap`, `inputs` (other
            values and odd sizes), `dtypes`, `platforms`, `key`, `pickle`, `export` or `split`.
        unavailable: Groups of checks that the kernel cannot pass, each with the reason, such as
            `{"vmap": "the callback takes one example"}`. The report lists them as skipped.
        strict: Raise if a check fails; otherwise return the report.
        seed: Seed of random inputs and of the sample.
        progress: Every five seconds a line says which step runs, e.g. `step 3 of 12: configuration rows=64`. By default
            it goes to stderr. A function, such as `logger.info`, gets it instead; `False` turns it off.
        **kwargs: Keyword arguments of the call.

    Returns:
        The report; `str()` of it is a table.

    Raises:
        KernelCheckError: A check failed; an `AssertionError` whose message is the table.
        ArgumentError: `kernel` is not a kernel, or `without` or `unavailable` names an unknown group.
        CallError: The arguments do not fit the kernel.
        ConfigError: `configs` contains something else than configurations of the kernel.
    """
    hint = "; for an operation of ejkernel.modules, pass its kernel, e.g. FlashAttention()"
    if isinstance(kernel, type) and issubclass(kernel, Kernel):
        hint = f"; create one, e.g. {kernel.__name__}('name')"
    check_argument(isinstance(kernel, Kernel), "kernel", f"a Kernel or a function under tune{hint}", kernel)
    for argument, names in (("without", without), ("unavailable", unavailable or {})):
        if isinstance(names, str):
            raise ArgumentError(f"{argument} must be a list of names, got {names!r}; write {argument}=[{names!r}].")
        unknown = [name for name in names if name not in GROUPS]
        if unknown:
            raise ArgumentError(
                f"{argument} must name groups of checks, {', '.join(GROUPS)}; got {unknown[0]!r}"
                f"{did_you_mean(unknown[0], GROUPS)}"
            )
    check_argument(isinstance(progress, bool) or callable(progress), "progress", "a bool or a function", progress)
    scope = Scope(configs=configs, without=frozenset(without), unavailable=unavailable or {}, seed=seed)
    tell = progress if callable(progress) else to_stderr
    shown = scope.steps.shown(lambda line: tell(f"check_kernel {kernel.op_id_v}, {line}"))
    # A new thread is outside the caller's traces and meshes; its settings are carried over.
    with reported_crashes(), shown if progress else contextlib.nullcontext():
        report = on_measuring_thread(without_exits()(lambda: checked(kernel, args, kwargs, scope)))
    if strict:
        report.raise_if_failed()
    return report


def paired(
    operation: Operation[Any, Any, Any],
    forward: str,
    backward: str | None = None,
    *,
    simulated: bool = False,
    params: tuple[Any, Any] = (None, None),
) -> Operation[Any, Any, Any]:
    """Return the operation with one implementation, and the backward of another if it has none.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import LayerNorm
    >>> from ejkernel.testing import check_kernel
    >>> norm = paired(LayerNorm(), "xla", backward="xla")
    >>> check_kernel(norm, jnp.ones((4, 8)), jnp.ones(8), jnp.ones(8), without=["vmap", "pickle"]).ok
    True

    Args:
        operation: The operation.
        forward: The implementation that runs.
        backward: The implementation whose backward follows; by default its own, or the first for all platforms with the
            same residuals.
        simulated: Whether it runs on a platform that is not its own, through an interpreter.
        params: Parameters of forward and backward; `None`: the heuristic's.

    Raises:
        ArgumentError: No backward takes the residuals of `forward`.
    """
    found = operation.implementations[forward]
    successor = operation.implementations[backward] if backward else _successor(operation, found)
    if operation.why_no_gradient and backward is None:
        successor = found
    elif successor is None or not successor.has_backward() or successor.residuals != found.residuals:
        raise ArgumentError(f"backward must take the residuals of {forward!r}, {found.residuals!r}; got {backward!r}.")
    place = {} if simulated else {"platform": device_kind(), "device_fingerprint": device_fingerprint()}

    def running(_: Any, args: tuple[Any, ...], options: Mapping[str, Any], *, backward: bool = False) -> Selected:
        own = {name: value for name, value in options.items() if name != "implementation"}
        call = dataclasses.replace(operation.describe(*args, **own), backward=backward, **place)
        chosen, given = successor if backward else found, params[backward]
        return Selected(chosen, call, chosen.heuristic(call) if given is None else given)

    config: Any = operation.config_type
    chosen = config(implementation=forward)
    one: Operation[Any, Any, Any] = object.__new__(type(operation))
    # These replace methods, for this object alone.
    hooks = {"_running": running, "heuristic_cfg": lambda _: chosen, "config_space": lambda _: [chosen]}
    vars(one).update(vars(operation) | hooks)
    return one


def _successor(operation: Operation[Any, Any, Any], found: Implementation[Any]) -> Implementation[Any] | None:
    if found.has_backward():
        return found
    implementations = operation.implementations
    others = (implementations[name] for name in implementations if not implementations.platforms(name))
    return next((other for other in others if other.has_backward() and other.residuals == found.residuals), None)
