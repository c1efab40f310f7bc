# SPDX-License-Identifier: Apache-2.0
"""Checks of a kernel as an object: lowering for other platforms, pickling, export, and lookup by key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
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
from ejkernel.ops.utils.values.signature import is_inexact
from ejkernel.testing.numbers import Numbers
from ejkernel.testing.programs import Results, compiled
from ejkernel.testing.rows import HOW_TO_REFUSE, CheckRow, attempted, compared, error_line, refusal, row
from ejkernel.testing.subject import Subject

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

    def found() -> Results:
        outs: Sequence[Any] = compiled(weakly, *arrays)(*arrays)
        dtypes = [[str(out.dtype) for out in each] for each in (outs, want.outs)]
        if dtypes[0] != dtypes[1]:
            raise TypeError(f"the results are {dtypes[0]}, not {dtypes[1]}")
        return Results(outs)

    return numbers.same_row("weak types", config, found, want, "that of strong types")


# --- platforms ---


class _Chooser:
    """Chooses a given configuration for forward calls on one platform, and the heuristic's for all other calls.

    It notes the calls; unlike `discover`, it leaves no record.
    """

    def __init__(self, platform: str = "", config: object = None) -> None:
        self._platform, self._config = platform, config
        self.calls: list[Invocation[Any, Any]] = []

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Any:
        """Return the configuration for `inv`."""
        self.calls.append(inv)
        if inv.platform == self._platform and inv.direction == "fwd":
            return self._config
        return heuristic_config(kernel, inv)


def backward_call(numbers: Numbers) -> Invocation[Any, Any] | None:
    """Return the backward call of the kernel; `None` if its gradient makes no such call."""
    chooser, subject = _Chooser(), numbers.subject
    run = subject.with_executor(Executor(chooser)).executed(None)
    jax.jit(_gradient(run, numbers.wrt)).lower(*numbers.examples[0])
    return next((inv for inv in chooser.calls if inv.op_id == f"{subject.inv.op_id}.bwd"), None)


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
        configs = attempted(configs_for, subject, _call_for(subject, platform))
        if isinstance(configs, Exception):  # a kernel need not support every platform
            yield row(check, None, configs, skipped=not claims)
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
    configs = attempted(configs_for, subject, _call_for(subject, platform))
    config, error = (None, configs) if isinstance(configs, Exception) else (configs[0], None)
    error = error or _lowering_error(subject, platform, config)
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
    run = subject.with_executor(Executor(_Chooser(platform, config))).executed(None)
    with contextlib.nullcontext() if platform != "gpu" else Target.named(_TARGET).entered():
        error: Exception | None = attempted(_lower, subject, run, compat.programs.lowering_names(platform))
    return error


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
        traced = attempted(gradient.trace, *subject.types)
        if not isinstance(traced, Exception):  # another row reports the missing gradient
            traced.lower(lowering_platforms=names)


# --- keys, pickles, exports ---


def key_row(subject: Subject) -> CheckRow:
    """Return a row that checks whether another process would compute the same keys for the call and derived calls."""

    def error() -> str:
        return next(filter(None, map(_key_error, [subject.inv, *_derived(subject)])), "")

    return row("key", None, attempted(error))


def _derived(subject: Subject) -> list[Invocation[Any, Any]]:
    """Return the calls that differentiating and batching make, if these are possible."""
    run, elements = subject.executed(subject.inv.override_cfg), subject.elements(3)
    arrays, wrt = elements[0], subject.differentiable()
    programs = [(run, arrays)]
    if arrays:
        batched = [jnp.stack(examples) for examples in zip(*elements, strict=True)]
        programs.append((jax.vmap(run), batched))
    if any(wrt):
        programs.append((_gradient(run, wrt), arrays))
    found: list[Invocation[Any, Any]] = []
    for function, given in programs:
        calls = attempted(discover, function, *given)
        found += [] if isinstance(calls, Exception) else calls  # another row reports that it cannot be traced
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
    copy = attempted(lambda: pickle.loads(pickle.dumps(kernel)))  # noqa: S301 - see above
    if isinstance(copy, Exception):
        return row("pickle", None, f"it cannot be sent to a worker process: {error_line(copy)}")
    if copy is kernel:
        return row("pickle")
    if type(copy) is not type(kernel) or copy.op_id_v != kernel.op_id_v:
        return row("pickle", None, f"{kernel!r} is unpickled as {copy!r}")

    def found() -> Results:
        calls = [Invocation(kernel=which, args=subject.inv.args, kwargs=subject.inv.kwargs) for which in (copy, kernel)]
        if calls[0].call_key != calls[1].call_key:
            raise ValueError("the call has a different key with the unpickled kernel")
        return Results(subject.executed(config, kernel=copy)(*numbers.examples[0]))

    return numbers.same_row("pickle", None, found, want, "that of the original kernel")


def export_row(numbers: Numbers, config: object, want: Results) -> CheckRow:
    """Return a row that compares the exported call and its gradient; skipped if plain JAX cannot export them either."""
    subject = numbers.subject
    found = attempted(_exported, numbers, subject.executed(config))
    if isinstance(found, Exception):
        plain = attempted(_exported, numbers, subject.plain(Choice(config=config, platform=subject.platform)))
        return row("export", config, error_line(found), skipped=isinstance(plain, Exception))
    return compared("export", config, subject.compare(found, want, "the call itself"))


def _exported(numbers: Numbers, function: Flat) -> Results:
    derived, inputs = numbers.derived(function), (numbers.examples[0], numbers.cotangents[0])
    program = jax.jit(lambda *given: dataclasses.astuple(derived(*given)))
    exported = jax.export.export(program, disabled_checks=CUDNN)(*inputs)
    return Results(*jax.export.deserialize(exported.serialize()).call(*inputs))
