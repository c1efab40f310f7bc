# SPDX-License-Identifier: Apache-2.0
"""`autotune(..., target=...)`: candidates for another device, estimated or compiled, never measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ejkernel.ops.autotuner.compile.bundles import MOST_CANDIDATES, aimed_calls, compile_bundle
from ejkernel.ops.autotuner.compile.estimating import estimate_calls
from ejkernel.ops.autotuner.compile.prepared import PreparedCalls
from ejkernel.ops.autotuner.compile.simulation import check_simulated
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import default_width
from ejkernel.ops.autotuner.tasks.task import Configurations, SharedCall, TuningTask, calls_in
from ejkernel.ops.config.estimates import EstimateFiles
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import ArgumentError, ConfigError
from ejkernel.ops.utils.fingerprint import device_fingerprint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Candidates to prepare for the device `aim`: a bundle in `folder`, or estimates without a folder."""

    aim: Target
    folder: Path | None

    @classmethod
    def asked(
        cls, target: str | Target, estimate: bool = False, output: str | PathLike[str] | None = None
    ) -> Preparation:
        """Return the preparation for these arguments of `autotune`.

        Raises:
            ArgumentError: The arguments do not fit together, or ask to measure.
            ConfigError: No target has this name, or its programs cannot be simulated.
        """
        if estimate and output is not None:
            raise ArgumentError("estimate=True and output= exclude each other: estimates go to the cache folder.")
        aim = target if isinstance(target, Target) else Target.named(target)
        if estimate:
            check_simulated(aim)
        elif output is None:
            raise ArgumentError(_why_not_measured(aim))
        return cls(aim=aim, folder=None if output is None else Path(output))

    def run(
        self,
        sets: Sequence[Sequence[SharedCall]],
        cache: PersistentCache | None,
        configs: Collection[Any] | None = None,
        **options: Any,
    ) -> PreparedCalls:
        """Estimate or compile the candidates of calls.

        Args:
            sets: The calls, for the device; those of a set share a configuration.
            cache: Its folder takes the estimates; `None` stores none.
            configs: Candidates beside the heuristic; those of the kernels by default.
            **options: Of `compile_bundle` or `estimate_calls`: `processes`, by default one per core, and `progress`.
        """
        calls = calls_in(sets)
        candidates = shared_candidates(sets, self.aim) if configs is None else lambda _: configs
        options = {"candidates": candidates, "processes": default_width(), **options}
        if self.folder is not None:
            bundled = compile_bundle(calls, self.aim, self.folder, **options)
            return PreparedCalls(device=self.aim.fingerprint, bundled=tuple(bundled), folder=self.folder)
        store = EstimateFiles(cache.path) if cache is not None and cache.path is not None else None
        estimates = tuple(estimate_calls(calls, self.aim, store=store, **options))
        return PreparedCalls(device=self.aim.fingerprint, estimates=estimates)

    def planned(self, sets: Sequence[Sequence[SharedCall]]) -> list[tuple[Invocation[Any, Any], list[Any]]]:
        """Return the calls and candidates that `run` estimates or compiles."""
        doing = "estimate" if self.folder is None else "compile"
        return list(aimed_calls(calls_in(sets), self.aim, shared_candidates(sets, self.aim), MOST_CANDIDATES, doing))


def _why_not_measured(aim: Target) -> str:
    if aim.fingerprint == device_fingerprint():
        return f"target={aim.name!r} is the device of this process; leave out target to measure on it."
    others = "output='FOLDER' to compile the candidates, and measure them there with `ejkernel tune --from FOLDER`"
    try:
        check_simulated(aim)
    except ConfigError:
        pass
    else:
        others = f"estimate=True for simulated times, or {others}"
    return f"target={aim.name!r} cannot be measured here: this process runs on {device_fingerprint()}. Pass {others}."


def shared_candidates(
    sets: Sequence[Sequence[SharedCall]], aim: Target
) -> Callable[[Invocation[Any, Any]], Collection[Any]] | None:
    """Return a function from a call to the candidates of its set, those that all calls of the set accept.

    `None` if each call has its own configuration.
    """
    if all(len(each) == 1 for each in sets):
        return None
    by_call: dict[str, Collection[Any]] = {}
    for calls in sets:
        invs = [dataclasses.replace(call.inv.abstract(), device=aim.fingerprint) for call in calls]
        shared = Configurations(TuningTask(inv=invs[0], others=tuple(SharedCall(inv=inv) for inv in invs[1:])))
        own = shared.others
        if not isinstance(own, ConfigSpace):  # a space is sampled identically for all of them
            own = [config for config in (*shared.first, *own) if not shared.why_refused(config)]
        by_call |= {inv.call_key: own for inv in invs}
    return lambda inv: by_call[inv.call_key]
