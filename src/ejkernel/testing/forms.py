# SPDX-License-Identifier: Apache-2.0
"""Checks of a kernel as an object: lowering for other platforms, pickling, export, and lookup by key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pickle  # noqa: TID251 - only unpickles a copy of this process's kernel, as worker processes do
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.export
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, heuristic_config, run_forms
from ejkernel.ops.core.transformations.nodes import Choice, Flat
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.execution.discovery import discover
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.values.signature import is_inexact
from ejkernel.testing.numbers import Numbers
from ejkernel.testing.programs import Arrays, Results, compiled
from ejkernel.testing.rows import HOW_TO_REFUSE, CheckRow, compared, error_line, refusal, row
from ejkernel.testing.subject import Subject

logger = logging.getLogger(__name__)

_PLATFORMS: Final = ("cpu", "gpu", "tpu")
_CLAIMED_BY: Final = {  # variants of `run` for one platform only
    "cpu": ("run_cpu",),
    "gpu": ("run_mosaic_gpu", "run_triton", "run_gpu", "run_cuda"),
    "tpu": ("run_pallas", "run_tpu"),
}
_TARGET: Final = "nvidia_h200"  # the GPU to lower for on machines without one
CUDNN: Final = [  # calls whose serialized form JAX does not promise to keep
    jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmha{bias}Softmax{end}")
    for bias in ("", "ScaleBias")
    for end in ("", "Backward")
]


def weak_type_row(numbers: Numbers, config: object, want: Results) -> CheckRow | None:
    """Return a row that compares weakly and strongly typed arrays; `None` if no array can be weakly typed.

    Arithmetic with Python numbers makes weakly typed arrays.
    """
    default = {jnp.dtype(jnp.result_type(float)), jnp.dtype(jnp.result_type(int))}
    arrays, run = numbers.examples[0], numbers.subject.executed(config)
    if not any(array.dtype in default for array in arrays):
        return None

    def weakly(*given: Any) -> Sequence[Any]:
        return run(*[compat.tracing.weakly_typed(array) if array.dtype in default else array for array in given])

    def found() -> Sequence[Any]:
        outs: Sequence[Any] = compiled(weakly, *arrays)(*arrays)
        dtypes = [[str(out.dtype) for out in each] for each in (outs, want.outs)]
        if dtypes[0] != dtypes[1]:
            raise TypeError(f"the results are {dtypes[0]}, not {dtypes[1]}")
        return outs

    return _same_row(numbers, "weak types", config, found, want, "that of strong types")


def _same_row(
    numbers: Numbers, check: str, config: object, outs: Callable[[], Sequence[Any]], want: Results, whose: str
) -> CheckRow:
    """Return a row that compares the results of another form of the call with its own."""
    try:
        return compared(check, config, numbers.subject.compare(Results(outs()), want, whose))
    except Exception as error:  # noqa: BLE001 - the row has the reason
        return row(check, config, error)


# --- platforms ---


class _Named:
    """Chooses a given configuration for forward calls on one platform, and the heuristic's for all other calls."""

    def __init__(self, platform: str, config: object) -> None:
        self._platform, self._config = platform, config

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Any:
        """Return the configuration for `inv`."""
        if inv.platform == self._platform and inv.direction == "fwd":
            return self._config
        return heuristic_config(kernel, inv)


class _Noting:
    """Chooses each call's heuristic, and notes the calls; unlike `discover`, it leaves no record."""

    def __init__(self) -> None:
        self.calls: list[Invocation[Any, Any]] = []

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Any:
        """Return the configuration for `inv`."""
        self.calls.append(inv)
        return heuristic_config(kernel, inv)


def backward_call(numbers: Numbers) -> Invocation[Any, Any] | None:
    """Return the backward call of the kernel; `None` if its gradient makes no such call."""
    noting, subject = _Noting(), numbers.subject
    run = _with_executor(subject, Executor(noting)).executed(None)
    jax.jit(_gradient(run, numbers.wrt)).lower(*numbers.examples[0])
    return next((inv for inv in noting.calls if inv.op_id == f"{subject.inv.op_id}.bwd"), None)


def platform_rows(
    subject: Subject, configs_for: Callable[[Subject, Invocation[Any, Any]], Sequence[Any]]
) -> Iterator[CheckRow]:
    """Yield rows that lower the call and its gradient for other platforms.

    A failure counts only if the kernel has a variant of `run` for the platform; otherwise the row is skipped. With a
    variant, the call is also lowered with odd sizes, since interpreters accept tiles and copies that compilers refuse.
    """
    forms = run_forms(subject.kernel)
    for platform in _PLATFORMS:
        if platform == subject.platform:
            continue
        claims = any(form in forms for form in _CLAIMED_BY[platform])
        check = f"lowered for {platform}"
        try:
            configs = configs_for(subject, _call_for(subject, platform))
        except Exception as error:  # noqa: BLE001 - a kernel need not support every platform
            yield row(check, None, error, skipped=not claims)
            continue
        # If the kernel has no variant for the platform, try one configuration, to report whether it works.
        errors = [_lowering_error(subject, platform, config) for config in configs[: None if claims else 1]]
        for config, failure in zip(configs, errors, strict=False):
            # It is not the kernel's fault if jaxlib lacks something here, such as the platform's compiler.
            skipped = failure is not None and (not claims or compat.programs.lacks_lowering(failure))
            yield row(check, config, failure or "", skipped=skipped)
        if claims and errors[0] is None and (other := subject.of_odd_sizes()) is not None:
            yield _odd_row(other, platform, f"{check}, odd sizes", configs_for)


def _odd_row(
    subject: Subject,
    platform: str,
    check: str,
    configs_for: Callable[[Subject, Invocation[Any, Any]], Sequence[Any]],
) -> CheckRow:
    """Return the row of a call with odd sizes under the heuristic; skipped if the kernel refuses them."""
    config = None
    try:
        config = configs_for(subject, _call_for(subject, platform))[0]
        error = _lowering_error(subject, platform, config)
    except Exception as raised:  # noqa: BLE001 - the row has the reason
        error = raised
    if error is None:
        return row(check, config)
    if refusal(error) or compat.programs.lacks_lowering(error):
        return row(check, config, error, skipped=True)
    types = ", ".join(f"{like.dtype}{list(like.shape)}" for like in subject.types)
    return row(check, config, f"{types}: {error_line(error)}. {HOW_TO_REFUSE}")


def _call_for(subject: Subject, platform: str) -> Invocation[Any, Any]:
    inv = subject.inv
    return Invocation(kernel=subject.kernel, args=inv.args, kwargs=inv.kwargs, device=f"{platform}:unknown")


def _lowering_error(subject: Subject, platform: str, config: object) -> Exception | None:
    """Return the error of lowering the call and its gradient for a platform, if there is one."""
    # Use a chooser, because `cfg=` would also set the gradient's configuration.
    run = _with_executor(subject, Executor(_Named(platform, config))).executed(None)
    with contextlib.nullcontext() if platform != "gpu" else Target.named(_TARGET).entered():
        try:
            _lower(subject, run, compat.programs.lowering_names(platform))
        except Exception as error:  # noqa: BLE001 - the row has the reason
            return error
    return None


def lowered(subject: Subject, run: Flat) -> list[Any]:
    """Return a call and its gradient as functions to be lowered."""
    wrt = subject.differentiable()
    has_gradient = any(wrt) and "gradient" not in subject.scope.without
    return [jax.jit(run), *([jax.jit(_gradient(run, wrt))] if has_gradient else [])]


def _gradient(run: Flat, wrt: Sequence[bool]) -> Any:
    """Return the gradient of the sum of the call's results."""

    def total(*arrays: jax.Array) -> Any:
        return sum(jnp.real(out).astype(jnp.float32).sum() for out in run(*arrays) if is_inexact(out))

    return jax.grad(total, [index for index, has in enumerate(wrt) if has])


def _lower(subject: Subject, run: Flat, names: tuple[str, ...]) -> None:
    call, *gradients = lowered(subject, run)
    call.trace(*subject.types).lower(lowering_platforms=names)
    for gradient in gradients:
        try:
            traced = gradient.trace(*subject.types)
        except Exception as error:  # noqa: BLE001 - another row reports the missing gradient
            logger.debug("%s: gradient not lowered: %s", subject.kernel.op_id, error_text(error))
        else:
            traced.lower(lowering_platforms=names)


def _with_executor(subject: Subject, executor: Executor[Any, Any]) -> Subject:
    return Subject(subject.kernel, subject.args, subject.kwargs, subject.inv, subject.scope, executor)


# --- keys, pickles, exports ---


def key_row(subject: Subject) -> CheckRow:
    """Return a row that checks whether another process would compute the same keys for the call and derived calls."""
    run, arrays = subject.executed(subject.inv.override_cfg), subject.elements(3)
    try:
        calls = [subject.inv, *_derived(subject, run, arrays)]
        return row("key", None, next(filter(None, (_key_error(inv) for inv in calls)), ""))
    except Exception as error:  # noqa: BLE001 - the row has the reason
        return row("key", None, error)


def _derived(subject: Subject, run: Any, elements: Sequence[Arrays]) -> list[Invocation[Any, Any]]:
    """Return the calls that differentiating and batching make, if these are possible."""
    arrays, wrt = elements[0], subject.differentiable()
    programs = [(run, arrays)]
    if arrays:
        batched = [jnp.stack(examples) for examples in zip(*elements, strict=True)]
        programs.append((jax.vmap(run), batched))
    if any(wrt):
        programs.append((_gradient(run, wrt), arrays))
    found: list[Invocation[Any, Any]] = []
    for function, given in programs:
        try:
            found += discover(function, *given)
        except Exception as error:  # noqa: BLE001 - another row reports that it cannot be traced
            logger.debug("%s: keys of derived calls not checked: %s", subject.kernel.op_id, error_text(error))
    return found


def _key_error(inv: Invocation[Cfg, Out]) -> str:
    """Return why another process would not find a call by its key; empty if it would."""
    try:
        # Through JSON, as in labels and in notes of misses.
        again = rebuild(json.loads(json.dumps(inv.description)), key=inv.call_key)
    except EjkernelError as error:
        return f"{inv.op_id}: {error_line(error)}"
    same = again.call_key == inv.call_key
    return "" if same else f"{inv.op_id}: the call's description gives another key: {again.call_key}"


def pickle_row(numbers: Numbers, config: object, want: Results) -> CheckRow:
    """Return a row that checks whether a pickled copy of the kernel is the same, because workers receive a copy."""
    subject, kernel = numbers.subject, numbers.subject.kernel
    if kernel.__module__ == "__main__":
        reason = "the kernel is defined in a script, which cannot be imported"
        return row("pickle", None, reason, skipped=True)
    try:
        copy = pickle.loads(pickle.dumps(kernel))  # noqa: S301 - see above
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        return row("pickle", None, f"it cannot be sent to a worker process: {error_line(error)}")
    if copy is kernel:
        return row("pickle")
    if type(copy) is not type(kernel) or copy.op_id_v != kernel.op_id_v:
        return row("pickle", None, f"{kernel!r} is unpickled as {copy!r}")

    def outs() -> Sequence[Any]:
        calls = [Invocation(kernel=which, args=subject.inv.args, kwargs=subject.inv.kwargs) for which in (copy, kernel)]
        if calls[0].call_key != calls[1].call_key:
            raise ValueError("the call has a different key with the unpickled kernel")
        return subject.executed(config, kernel=copy)(*numbers.examples[0])

    return _same_row(numbers, "pickle", None, outs, want, "that of the original kernel")


def export_row(numbers: Numbers, config: object, want: Results) -> CheckRow:
    """Return a row that compares the exported call and its gradient; skipped if plain JAX cannot export them either."""
    run = numbers.subject.executed(config)
    try:
        return compared("export", config, numbers.subject.compare(_exported(numbers, run), want, "the call itself"))
    except Exception as error:  # noqa: BLE001 - the row has the reason
        reason = error_line(error)
    try:
        _exported(numbers, numbers.subject.plain(Choice(config=config, platform=numbers.subject.platform)))
    except Exception as error:  # noqa: BLE001 - then it is not the kernel's fault
        logger.debug("plain JAX cannot export it either: %s", error_text(error))
        return row("export", config, reason, skipped=True)
    return row("export", config, reason)


def _exported(numbers: Numbers, function: Flat) -> Results:
    derived, inputs = numbers.derived(function), (numbers.examples[0], numbers.cotangents[0])
    program = jax.jit(lambda *given: dataclasses.astuple(derived(*given)))
    exported = jax.export.export(program, disabled_checks=CUDNN)(*inputs)
    return Results(*jax.export.deserialize(exported.serialize()).call(*inputs))
