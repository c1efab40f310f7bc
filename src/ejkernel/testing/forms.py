# SPDX-License-Identifier: Apache-2.0
"""Checks of a kernel as an object: lowering for other platforms, pickling, export, and lookup by key."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle  # noqa: TID251 - only unpickles a copy of this process's kernel, as worker processes do
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.measure.correctness import deviations
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, hook, run_forms
from ejkernel.ops.core.transformations.nodes import Choice, Flat, is_inexact
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.execution.discovery import discover
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.utils.error_text import error_text
from ejkernel.testing.programs import Arrays, compiled, cotangents_of, pulled
from ejkernel.testing.report import CheckRow, CheckStatus
from ejkernel.testing.subject import Subject

logger = logging.getLogger(__name__)

_PLATFORMS: Final = ("cpu", "gpu", "tpu")
_CLAIMED_BY: Final = {  # variants of `run` for one platform only
    "cpu": ("run_cpu",),
    "gpu": ("run_mosaic_gpu", "run_triton", "run_gpu", "run_cuda"),
    "tpu": ("run_pallas", "run_tpu"),
}
_TARGET: Final = "nvidia_h200"  # the GPU to lower for on machines without one
_OTHER_DTYPES: Final = ("float32", "bfloat16", "float16")


def _row(check: str, config: object, reason: str, *, status: CheckStatus = CheckStatus.FAILED) -> CheckRow:
    return CheckRow(check=check, config=config, status=status if reason else CheckStatus.OK, reason=reason)


def _error_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _difference(subject: Subject, got: Sequence[object], want: Sequence[object], whose: str) -> str:
    """Return how two lists of results differ; empty if they agree."""
    inv = subject.inv
    found = deviations(got, want, platform=inv.platform, precision=inv.precision)
    return next((d.reason.replace("the reference", whose) for d in found if d.reason), "")


# --- dtypes ---


def dtype_rows(subject: Subject, rows_of: Callable[[Subject, str], Iterator[CheckRow]]) -> Iterator[CheckRow]:
    """Yield rows that check the call with other dtypes of its floating-point arrays."""
    for dtype in _OTHER_DTYPES:
        cast = [_cast(array, dtype) for array in subject.elements(1)[0]]
        if all(new.dtype == like.dtype for new, like in zip(cast, subject.types, strict=True)):
            continue
        try:
            yield from rows_of(subject.with_arrays(cast), dtype)
        except Exception as error:  # noqa: BLE001 - a kernel need not take every dtype
            yield _row(dtype, None, f"not supported: {_error_line(error)}", status=CheckStatus.SKIPPED)


def _cast(array: Any, dtype: str) -> Any:
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def weak_type_row(subject: Subject, config: object) -> CheckRow | None:
    """Return a row that compares weakly and strongly typed arrays; `None` if no array can be weakly typed.

    Arithmetic with Python numbers makes weakly typed arrays.
    """
    arrays = subject.elements(1)[0]
    default = {jnp.dtype(jnp.result_type(float)), jnp.dtype(jnp.result_type(int))}
    if not any(array.dtype in default for array in arrays):
        return None
    run = subject.executed(config)

    def both(*given: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        weak = [compat.weakly_typed(array) if array.dtype in default else array for array in given]
        return run(*given), run(*weak)

    try:
        strong, weak = compiled(both, *arrays)(*arrays)
    except Exception as error:  # noqa: BLE001 - the row has the reason
        return _row("weak types", config, _error_line(error))
    if [out.dtype for out in weak] != [out.dtype for out in strong]:
        reason = f"the results are {[str(out.dtype) for out in weak]}, not {[str(out.dtype) for out in strong]}"
        return _row("weak types", config, reason)
    return _row("weak types", config, _difference(subject, weak, strong, "that of strong types"))


# --- platforms ---


class _Named:
    """Chooses a given configuration for forward calls on one platform, and the heuristic's for all other calls."""

    def __init__(self, platform: str, config: object) -> None:
        self._platform, self._config = platform, config

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Any:
        """Return the configuration for `inv`."""
        if inv.platform == self._platform and inv.direction == "fwd":
            return self._config
        return hook(kernel, "heuristic_cfg", inv.platform)(inv)


class _Recording:
    """Chooses each call's heuristic, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[Invocation[Any, Any]] = []

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Any:
        """Return the configuration for `inv`."""
        self.calls.append(inv)
        return hook(kernel, "heuristic_cfg", inv.platform)(inv)


def backward_call(subject: Subject, cotangents: Sequence[Any]) -> Invocation[Any, Any] | None:
    """Return the backward call of the kernel; `None` if its gradient makes no such call."""
    recording, arrays = _Recording(), subject.elements(1)[0]
    run = _with_executor(subject, Executor(recording)).executed(None)
    jax.jit(pulled(run, subject.differentiable())).lower(arrays, cotangents)
    return next((inv for inv in recording.calls if inv.op_id == f"{subject.inv.op_id}.bwd"), None)


def platform_rows(subject: Subject, configs_for: Callable[[Invocation[Any, Any]], Sequence[Any]]) -> Iterator[CheckRow]:
    """Yield rows that lower the call and its gradient for other platforms.

    A failure counts only if the kernel has a variant of `run` for the platform; otherwise the row is skipped.
    """
    forms = run_forms(subject.kernel)
    for platform in _PLATFORMS:
        if platform == subject.platform:
            continue
        claims = any(form in forms for form in _CLAIMED_BY[platform])
        check = f"lowered for {platform}"
        inv = Invocation(
            kernel=subject.kernel, args=subject.inv.args, kwargs=subject.inv.kwargs, device=f"{platform}:unknown"
        )
        try:
            configs = configs_for(inv)
        except Exception as error:  # noqa: BLE001 - a kernel need not support every platform
            yield _row(check, None, _error_line(error), status=CheckStatus.FAILED if claims else CheckStatus.SKIPPED)
            continue
        # If the kernel has no variant for the platform, try one configuration, to report whether it works.
        for config in configs if claims else configs[:1]:
            with _target_context(platform):
                yield _lowered_row(subject, check, platform, config, claims)


def _target_context(platform: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which traced code sees a GPU, for lowering in a process without one."""
    return contextlib.nullcontext() if platform != "gpu" else Target.named(_TARGET).entered()


def _lowered_row(subject: Subject, check: str, platform: str, config: object, claims: bool) -> CheckRow:
    # Use a chooser, because `cfg=` would also set the gradient's configuration.
    run = _with_executor(subject, Executor(_Named(platform, config))).executed(None)
    arrays = subject.elements(1)[0]
    names = compat.lowering_names(platform)
    try:
        jax.jit(run).trace(*arrays).lower(lowering_platforms=names)
    except Exception as error:  # noqa: BLE001 - the row has the reason
        # It is not the kernel's fault if jaxlib lacks something here, such as the platform's compiler.
        is_fault = claims and not compat.lacks_lowering(error)
        return _row(check, config, _error_line(error), status=CheckStatus.FAILED if is_fault else CheckStatus.SKIPPED)
    wrt = subject.differentiable()
    try:
        cotangents = cotangents_of(run, arrays, np.random.default_rng((subject.seed, 1)))
        traced = jax.jit(pulled(run, wrt)).trace(arrays, cotangents) if any(wrt) and cotangents else None
    except Exception as error:  # noqa: BLE001 - another row reports the missing gradient
        logger.debug("%s: gradient not lowered for %s: %s", subject.kernel.op_id, platform, error_text(error))
        return _row(check, config, "")
    try:
        if traced is not None:
            traced.lower(lowering_platforms=names)
    except Exception as error:  # noqa: BLE001 - the row has the reason
        return _row(
            check,
            config,
            f"gradient: {_error_line(error)}",
            status=CheckStatus.FAILED if claims else CheckStatus.SKIPPED,
        )
    return _row(check, config, "")


def _with_executor(subject: Subject, executor: Executor[Any, Any]) -> Subject:
    return Subject(subject.kernel, subject.args, subject.kwargs, subject.inv, subject.seed, executor)


# --- keys, pickles, exports ---


def key_row(subject: Subject) -> CheckRow:
    """Return a row that checks whether another process would compute the same keys for the call and derived calls."""
    run, arrays = subject.executed(subject.inv.override_cfg), subject.elements(3)
    reason = ""
    try:
        calls = [subject.inv, *_derived(subject, run, arrays)]
        reason = next(filter(None, (_key_error(inv) for inv in calls)), "")
    except Exception as error:  # noqa: BLE001 - the row has the reason
        reason = _error_line(error)
    return _row("key", None, reason)


def _derived(subject: Subject, run: Any, elements: Sequence[Arrays]) -> list[Invocation[Any, Any]]:
    """Return the calls that differentiating and batching make, if these are possible."""
    arrays, wrt = elements[0], subject.differentiable()
    programs = [(run, arrays)]
    if arrays:
        batched = [jnp.stack(examples) for examples in zip(*elements, strict=True)]
        programs.append((jax.vmap(run), batched))
    if any(wrt):
        programs.append((lambda *own: _summed_gradient(run, own, wrt), arrays))
    found: list[Invocation[Any, Any]] = []
    for function, given in programs:
        try:
            found += discover(function, *given)
        except Exception as error:  # noqa: BLE001 - another row reports that it cannot be traced
            logger.debug("%s: keys of derived calls not checked: %s", subject.kernel.op_id, error_text(error))
    return found


def _summed_gradient(run: Flat, arrays: Sequence[jax.Array], wrt: Sequence[bool]) -> Any:
    outs = jax.eval_shape(run, *arrays)
    cotangents = [jnp.ones(out.shape, out.dtype) for out in outs if is_inexact(out)]
    return pulled(run, wrt)(list(arrays), cotangents).gradients


def _key_error(inv: Invocation[Cfg, Out]) -> str:
    """Return why another process would not find a call by its key; empty if it would."""
    try:
        # Through JSON, as in labels and in notes of misses.
        again = rebuild(json.loads(json.dumps(inv.description)), key=inv.call_key)
    except EjkernelError as error:
        return f"{inv.op_id}: {_error_line(error)}"
    same = again.call_key == inv.call_key
    return "" if same else f"{inv.op_id}: the call's description gives another key: {again.call_key}"


def pickle_row(subject: Subject, config: object) -> CheckRow:
    """Return a row that checks whether a pickled copy of the kernel is the same, because workers receive a copy."""
    kernel = subject.kernel
    if kernel.__module__ == "__main__":
        return _row(
            "pickle", None, "the kernel is defined in a script, which cannot be imported", status=CheckStatus.SKIPPED
        )
    try:
        copy = pickle.loads(pickle.dumps(kernel))  # noqa: S301 - see above
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        return _row("pickle", None, f"it cannot be sent to a worker process: {_error_line(error)}")
    return _row("pickle", None, _copy_error(subject, copy, config))


def _copy_error(subject: Subject, copy: object, config: object) -> str:
    kernel, inv = subject.kernel, subject.inv
    if copy is kernel:
        return ""
    if type(copy) is not type(kernel) or copy.op_id_v != kernel.op_id_v:
        return f"{kernel!r} is unpickled as {copy!r}"
    try:
        again = Invocation(kernel=copy, args=inv.args, kwargs=inv.kwargs)
        if again.call_key != Invocation(kernel=kernel, args=inv.args, kwargs=inv.kwargs).call_key:
            return "the call has a different key with the unpickled kernel"
        arrays = subject.elements(1)[0]
        results = [subject.executed(config, kernel=which)(*arrays) for which in (copy, kernel)]
        return _difference(subject, results[0], results[1], "that of the original kernel")
    except Exception as error:  # noqa: BLE001 - the row has the reason
        return f"with the unpickled kernel: {_error_line(error)}"


def export_row(subject: Subject, config: object) -> CheckRow:
    """Return a row that compares the exported call with the call; skipped if plain JAX cannot export it either."""
    arrays, run = subject.elements(1)[0], subject.executed(config)
    try:
        results = _exported(run, arrays)
    except Exception as error:  # noqa: BLE001 - the kernel's fault only if plain JAX can export it
        plain = subject.plain(Choice(config=config, platform=subject.platform))
        status = CheckStatus.SKIPPED if _fails(plain, arrays) else CheckStatus.FAILED
        return _row("export", config, _error_line(error), status=status)
    return _row("export", config, _difference(subject, results, jax.jit(run)(*arrays), "that of the call itself"))


def _exported(function: Any, arrays: Arrays) -> Sequence[Any]:
    import jax.export

    exported = jax.export.export(jax.jit(function))(*arrays)
    found: Sequence[Any] = jax.export.deserialize(exported.serialize()).call(*arrays)
    return found


def _fails(function: object, arrays: Arrays) -> bool:
    try:
        _exported(function, arrays)
    except Exception as error:  # noqa: BLE001 - the function returns whether it fails
        logger.debug("plain JAX cannot export it either: %s", error_text(error))
        return True
    return False
