# SPDX-License-Identifier: Apache-2.0
"""Bundles: candidates compiled on one machine and measured on another.

A bundle is a folder with `manifest.json` (the calls and the status of each candidate) and two files per program: its
compressed machine code, and facts with the digest of the code. The manifest is data: configurations decode strictly,
into types defined by the user's modules. It names the programs and ends with its own digest. Measuring a bundle runs
its machine code unchecked, so measure only bundles that you trust.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from ejkernel.ops.autotuner.compile.processes import compile_processes
from ejkernel.ops.autotuner.compile.programs import Programs, read_program
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, CompileThreads, Done
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.process.worker import worker_session
from ejkernel.ops.autotuner.trials.candidates import LISTED, CodeFile, Program, distinct, heuristic_of
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config._files import UnusableError, read_file, version
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.declared_names import config_type_of, decode_config, type_name
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import candidates_of, check_config, kernel_of, overrides
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CandidateError, ConfigError, DescriptionError, SerializationError, TuningWarning
from ejkernel.ops.utils.fingerprint import name_of_device
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.serialize import from_plain, read_object, sealed_json, to_data

SCHEMA: Final = 5
_MANIFEST = "manifest.json"
_LARGEST = 16 << 20  # bytes of a manifest; a candidate takes hundreds
_PROGRAM = re.compile("[0-9a-f]{64}")

MOST_CANDIDATES: Final = 100  # of a `ConfigSpace`

Candidates = Callable[[Invocation[Any, Any]], Collection[Any]]  # the candidates of a call
Progress = Callable[[Invocation[Any, Any], int, int], None]  # see `compile_bundle`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BundledCandidate:
    """One candidate of a bundle.

    Attributes:
        outcome: `ready`, `failed`, `same`, or `left` (compiled by the measuring machine).
        program: Its machine code, if `ready`.
    """

    outcome: Outcome
    program: Program | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BundledCall:
    """The candidates of one call.

    Attributes:
        description: The abstract call.
        candidates: Its candidates, the heuristic first.
        reference: The kernel's reference, if it has one.
    """

    description: dict[str, Any]
    candidates: tuple[BundledCandidate, ...]
    reference: Program | None = None

    @property
    def configs(self) -> list[Any]:
        """The candidates' configurations."""
        return [compiled.outcome.config for compiled in self.candidates]

    @property
    def programs(self) -> tuple[tuple[Any, Program], ...]:
        """The configurations with a compiled program, and the programs."""
        return tuple((c.outcome.config, c.program) for c in self.candidates if c.program is not None)

    @property
    def rejected(self) -> tuple[Outcome, ...]:
        """The candidates that need no measurement, with the reason."""
        return tuple(c.outcome for c in self.candidates if c.outcome.status in (Status.FAILED, Status.SAME))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A candidate in the manifest."""

    config: Any
    config_type: str
    status: Status
    reason: str = ""
    compile_seconds: float | None = None
    program: str | None = None  # its digest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    description: dict[str, Any]
    candidates: list[_Row]
    reference: _Row | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    schema: int
    target: str
    jax: str
    jaxlib: str
    calls: list[_Call]
    libtpu: str = ""


# --- compiling a bundle ---


def compile_bundle(
    calls: Iterable[Invocation[Any, Any]],
    target: Target,
    folder: Path,
    *,
    candidates: Candidates | None = None,
    max_candidates: int = MOST_CANDIDATES,
    processes: int = 0,
    progress: Progress | None = None,
) -> list[BundledCall]:
    """Compile the candidates of calls for a target and write them to a folder. Measures nothing.

    Calls without candidates are skipped with a `TuningWarning`. If this is interrupted, in whatever way, the same call
    goes on: it compiles no program again that is in the folder.

    Args:
        calls: The abstract calls, with their kernels.
        target: The device to compile for.
        folder: The output folder; created if missing, and must be empty or that of an interrupted bundle.
        candidates: Returns the candidates of a call beside its heuristic; the kernel's `config_space` by default.
        max_candidates: Number of candidates of a `ConfigSpace` to compile, chosen at random.
        processes: Number of processes that compile, where they can compile for the target; 0: threads of this process,
            which cannot report register spills.
        progress: Called with the call, the number of finished candidates and the number of all candidates.

    Raises:
        ConfigError: The folder has other files or is not writable, or this machine cannot compile for the target.
    """
    # Other processes open no device, so an accelerator needs a description.
    processes = processes if target.description or target.platform == "cpu" else 0
    # Raise once here instead of for each candidate.
    target.check(loads_compiler=not processes)
    compilers = {"target": target.fingerprint, "jax": jax.__version__, "jaxlib": str(version("jaxlib"))}
    compilers["libtpu"] = str(version("libtpu")) if target.platform == "tpu" else ""
    try:
        with Programs.opened(folder, compilers) as programs, worker_session():
            aimed = aimed_calls(calls, target, candidates, max_candidates, "compile")
            how = (target, processes, progress, programs)
            written = [_written(inv, configs, _compile_call(inv, configs, *how)) for inv, configs in aimed]
            write_file(folder / _MANIFEST, sealed_json(_Manifest(schema=SCHEMA, calls=written, **compilers)))
            programs.end({row.program for call in written for row in (*call.candidates, call.reference) if row})
    except OSError as error:
        raise ConfigError(f"the bundle's folder {folder} cannot be written: {error}") from error
    return [_bundled(call, folder) for call in written]


def _compile_call(
    inv: Invocation[Cfg, Out],
    configs: Sequence[object],
    target: Target,
    processes: int,
    progress: Progress | None,
    programs: Programs,
) -> list[Done[Program]]:
    """Return the compilation result of each candidate and, last, of the reference if the kernel has one."""
    assert inv.kernel is not None  # calls found in programs have one
    timeout = AdaptiveTimeout(first=600.0, least=60.0)
    choices = [Choice(config=config, platform=inv.platform) for config in configs]
    if overrides(inv.kernel, "reference"):
        choices.append(Choice(config=configs[0], platform=inv.platform, reference=True))
    known = programs.known
    jobs: list[Callable[[], Program]] = [
        functools.partial(compile_for, inv, choice, target, only_once=choice.reference, known=known)
        for choice in choices
    ]
    if processes:
        pool = compile_processes(processes)
        jobs = [functools.partial(pool.run, job, lambda: timeout.seconds) for job in jobs]

    def without_reference(inv: Invocation[Any, Any], ended: int, _: int) -> None:
        if progress is not None:
            progress(inv, min(ended, len(configs)), len(configs))

    done = carried_out(inv, jobs, width=processes or None, timeout=timeout, progress=without_reference)
    return sorted(map(programs.kept, done), key=lambda each: each.index)


def carried_out(
    inv: Invocation[Any, Any],
    jobs: Sequence[Callable[[], Program]],
    *,
    width: int | None,
    timeout: AdaptiveTimeout,
    progress: Progress | None,
) -> Iterator[Done[Program]]:
    """Yield the result of each job of a call as soon as it is there, from `width` threads."""
    # Kernels called inside these kernels must not be tuned.
    inside = [in_callers_context(job, deeper=True) for job in jobs]
    for count, done in enumerate(CompileThreads(inside, width=width, timeout=timeout).results(), 1):
        yield done
        if progress is not None:
            progress(inv, count, len(jobs))


def aimed_calls(
    calls: Iterable[Invocation[Any, Any]],
    target: Target,
    candidates: Candidates | None,
    max_candidates: int,
    doing: str,
) -> Iterator[tuple[Invocation[Any, Any], list[Any]]]:
    """Yield each call for a target, with its candidates; warn that there is nothing to do (`doing`) without any."""
    for inv in calls:
        aimed = dataclasses.replace(inv.abstract(), device=target.fingerprint).representative
        configs = _candidates(aimed, candidates, max_candidates)
        if configs:
            yield aimed, configs
        else:
            text = f"{inv.op_id}: nothing to {doing}; config_space(inv) returned no configuration."
            warn(text, TuningWarning)


def _candidates(inv: Invocation[Cfg, Out], candidates: Candidates | None, max_candidates: int) -> list[Any]:
    """Return the candidates of a call, its heuristic first; see `compile_bundle`."""
    kernel = kernel_of(inv)
    space = candidates_of(kernel, inv) if candidates is None else candidates(inv)
    if isinstance(space, ConfigSpace) and not space.has_at_most(max(LISTED, max_candidates)):
        others = space.sample(np.random.default_rng(0), max_candidates)
    else:
        others = list(space)
    for config in others:
        check_config(kernel, config, "each candidate")
    return distinct((*heuristic_of(inv, kernel), *others))


def _written(inv: Invocation[Cfg, Out], configs: Sequence[object], ended: Sequence[Done[Program]]) -> _Call:
    """Return a call's part of the manifest."""
    rows, first = [], dict[str, Any]()
    for config, done in zip(configs, ended, strict=False):
        row = _row(config, done)
        if row.program in first:
            reason = f"the same program as {compact(first[row.program])}"
            row = dataclasses.replace(row, status=Status.SAME, reason=reason, program=None)
        elif row.program is not None:
            first[row.program] = config
        rows.append(row)
    reference = _row(None, ended[-1]) if len(ended) > len(configs) else None
    has_program = reference is not None and reference.program is not None
    return _Call(description=inv.description, candidates=rows, reference=reference if has_program else None)


def _row(config: object, done: Done[Program]) -> _Row:
    """Return the manifest row of a candidate or of the reference."""
    program, error = done.result, done.error
    if program is None:
        status = Status.FAILED
        reason = str(error) if isinstance(error, CandidateError) else f"{type(error).__name__}: {error}"
    elif program.why_left:
        status, reason = Status.LEFT, f"{program.why_left}, so the measuring machine compiles it"
    else:
        status, reason = Status.READY, ""
    return _Row(
        config=to_data(config),
        config_type=type_name(config),
        status=status,
        reason=reason,
        compile_seconds=round(done.seconds, 3),
        program=program.digest if program is not None and isinstance(program.code, CodeFile) else None,
    )


# --- reading a bundle ---


def read_bundle(folder: Path) -> list[BundledCall]:
    """Return the calls of a bundle. Import the modules of their kernels first.

    A program with a damaged file gets the status `left`, with a `TuningWarning`, and is compiled on this machine. All
    programs get it, with one warning, if another version of libtpu compiled them for this TPU.

    Raises:
        ConfigError: The folder is not a bundle, or was made with other versions of JAX or for another device.
    """
    try:
        raw = read_file(folder / _MANIFEST, _LARGEST)
        if raw is None and not folder.exists():
            raise ConfigError(f"there is no folder {folder}; pass the folder of a bundle, the --output of its command.")
        if raw is None:
            raise UnusableError(f"it has no {_MANIFEST}; if it was interrupted, the same command finishes it")
        manifest = from_plain(read_object(raw, SCHEMA, "the manifest of one"), _Manifest)
    except (UnusableError, SerializationError) as error:
        raise ConfigError(f"{folder} is not a usable bundle: {error}; compile it again.") from error
    # JAX versions have different formats of executables.
    here = device_and_versions()
    if (manifest.target, manifest.jax, manifest.jaxlib) != here:
        raise ConfigError(
            f"the bundle {folder} was made for {name_of_device(manifest.target)} with JAX {manifest.jax} and jaxlib "
            f"{manifest.jaxlib}; this is {here[0]} with JAX {here[1]} and jaxlib {here[2]}. Measure it there, or "
            "compile it again."
        )
    libtpu, why_left = version("libtpu"), ""
    if manifest.libtpu not in ("", libtpu):
        why_left = f"libtpu {manifest.libtpu} compiled them; here is {libtpu}"
        warn(f"the candidates of {folder} are compiled here: {why_left}", TuningWarning)
    for call in manifest.calls:
        with contextlib.suppress(DescriptionError):  # e.g. the module of its kernel is not imported
            inv = rebuild(call.description)
            config_type_of(inv, inv.kernel)  # lets the candidates name it
    return [_bundled(call, folder, why_left) for call in manifest.calls]


def device_and_versions() -> tuple[str, str, str]:
    """Return the device fingerprint and the versions that a bundle needs to run here."""
    return Target.named("here").fingerprint, jax.__version__, str(version("jaxlib"))


def _bundled(call: _Call, folder: Path, why_left: str = "") -> BundledCall:
    """Return a call of a manifest; without its programs if `why_left` says why they are not used."""
    reference = None if call.reference is None else _program(call.reference, folder, why_left)[0]
    op = str(call.description.get("op", ""))
    return BundledCall(
        description=call.description,
        candidates=tuple(_compiled(row, op, folder, why_left) for row in call.candidates),
        reference=reference,
    )


def _compiled(row: _Row, op: str, folder: Path, why_left: str) -> BundledCandidate:
    try:
        config = decode_config(row.config, row.config_type, op)
    except SerializationError as error:
        raise ConfigError(f"the bundle {folder} has a configuration that does not fit its type: {error}") from error
    except ConfigError as error:
        name = row.config_type
        raise ConfigError(
            f"the bundle {folder} needs the module of {name!r}; import it first (--import MODULE): {error}"
        ) from error
    program, reason = _program(row, folder, why_left)
    outcome = Outcome(
        config=config,
        status=Status.LEFT if reason else row.status,
        reason=reason or row.reason,
        compile_seconds=row.compile_seconds,
        spilled=None if program is None else program.spilled,
    )
    return BundledCandidate(outcome=outcome, program=program)


def _program(row: _Row, folder: Path, why_left: str) -> tuple[Program | None, str]:
    """Return the program of a row, if it has one, or why this machine compiles it, with a warning if it is damaged."""
    if row.program is None:
        if row.status == Status.READY:
            raise ConfigError(f"the bundle {folder} has a candidate without its program; compile it again.")
        return None, ""
    if not _PROGRAM.fullmatch(row.program):
        raise ConfigError(f"the bundle {folder} names a file outside of it: {row.program!r}.")
    if why_left:
        return None, why_left
    try:
        # Nothing compares programs of a bundle, so the digest is not needed any longer.
        return dataclasses.replace(read_program(folder, row.program).program, digest=""), ""
    except CandidateError as error:
        warn(f"a candidate is compiled here: {error}", TuningWarning)
        return None, str(error)
