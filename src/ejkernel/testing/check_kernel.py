# SPDX-License-Identifier: Apache-2.0
"""`check_kernel`: checks a kernel in its author's tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel.ops.autotuner.process.threads import on_measuring_thread
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ArgumentError
from ejkernel.testing.advice import GROUPS
from ejkernel.testing.crashes import reported_crashes
from ejkernel.testing.report import CheckReport
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
        **kwargs: Keyword arguments of the call.

    Returns:
        The report; `str()` of it is a table.

    Raises:
        KernelCheckError: A check failed; an `AssertionError` whose message is the table.
        ArgumentError: `kernel` is not a kernel, or `without` or `unavailable` names an unknown group.
    """
    if not isinstance(kernel, Kernel):
        raise ArgumentError(f"kernel must be a Kernel or a function under tune, got {kernel!r}.")
    for argument, names in (("without", without), ("unavailable", unavailable or {})):
        unknown = [name for name in names if name not in GROUPS]
        if unknown:
            raise ArgumentError(f"{argument} must name groups of checks, {', '.join(GROUPS)}; got {unknown[0]!r}.")
    scope = Scope(without=frozenset(without), unavailable=unavailable or {}, seed=seed)
    # A new thread is outside the caller's traces and meshes; its settings are carried over.
    with reported_crashes():
        report = on_measuring_thread(lambda: checked(kernel, args, kwargs, configs, scope))
    if strict:
        report.raise_if_failed()
    return report
