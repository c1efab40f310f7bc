# SPDX-License-Identifier: Apache-2.0
"""Candidates compiled on one machine and measured on another, which has the device.

A bundle is a folder: `manifest.json` with the calls and the fate of each candidate, and one file of machine code for
each program. The manifest is data: configurations decode strictly, into types that the user's modules made; it ends
with its own digest, and has that of each program. The code runs as it is when the bundle is measured: a bundle is a
program, not data, and no check of ours would make it otherwise. Measure your own.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel.ops.autotuner.compile.ahead_of_time import compile_for
from ejkernel.ops.autotuner.compile.processes import compile_processes
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, CompileThreads, Done
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.process.worker import worker_session
from ejkernel.ops.autotuner.trials.candidates import LISTED, config_id, heuristic_of
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.trials.programs import CodeFile, Program
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config._files import UnusableError, read_file, version
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.declared_names import decode_config, type_name
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import candidates_of, check_config, overrides
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CandidateError, ConfigError, SerializationError, TuningWarning
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.sealed import digest_of, read_object, sealed_json
from ejkernel.ops.utils.storage.serialize import describe, from_plain, to_data

_SCHEMA = 2
_MANIFEST = "manifest.json"
_LARGEST = 16 << 20  # bytes of a manifest; a candidate takes hundreds
_MOST_ARRAYS = 1 << 16  # that a program takes or returns
_FILE = re.compile(r"\d+-\d+\.bin")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BundledCandidate:
    """What became of one candidate of a bundle.

    Attributes:
        outcome: `ready`, `failed`, `same`, or `left`: to be compiled where it runs.
        program: Its machine code, if it is `ready`.
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
        """The configurations that come with a program."""
        return tuple((c.outcome.config, c.program) for c in self.candidates if c.program is not None)

    @property
    def rejected(self) -> tuple[Outcome, ...]:
        """The candidates that need no measuring, with the reason."""
        return tuple(c.outcome for c in self.candidates if c.outcome.status in (Status.FAILED, Status.SAME))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A candidate in the manifest."""

    config: Any
    config_type: str
    status: Status
    reason: str = ""
    compile_seconds: float | None = None
    file: str | None = None
    sha256: str | None = None
    inputs: int = 0
    outputs: int = 0
    mosaic: bool = False
    spilled: int | None = None


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


# --- making one ---


def compile_bundle(
    calls: Iterable[Invocation[Any, Any]],
    target: Target,
    folder: Path,
    *,
    candidates: Callable[[Invocation[Any, Any]], Collection[Any]] | None = None,
    max_candidates: int = 100,
    processes: int = 0,
    executor: concurrent.futures.Executor | None = None,
    progress: Callable[[Invocation[Any, Any], int, int], None] | None = None,
) -> list[BundledCall]:
    """Compile the candidates of calls for a target, without measuring anything, and write them to a folder.

    A call that has no candidates is a `TuningWarning`, and is left out.

    Args:
        calls: The calls, abstract, with their kernels.
        target: What to compile for.
        folder: Where to write; made if it is not there, and must be empty.
        candidates: Returns what to compile for a call beside its heuristic; the kernel's `config_space` by default.
        max_candidates: How many candidates of a `ConfigSpace` are compiled, chosen at random.
        processes: How many processes compile; 0: threads of this process do, and spills of registers stay unknown.
        executor: Who compiles instead, such as a cluster's.
        progress: Called with the call, how many of its candidates are done, and how many there are.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or this machine cannot compile for the target.
    """
    target.placed(jax.ShapeDtypeStruct((), np.dtype("float32")))  # the error, if any, once and not for each candidate
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"the bundle's folder {folder} cannot be written: {error}") from error
    if not is_empty:
        raise ConfigError(f"the bundle's folder must be empty, but {folder} is not.")
    how = _How(target, processes, executor)
    bundled, written = [], []
    try:
        with worker_session():
            for number, inv in enumerate(calls):
                aimed = dataclasses.replace(inv.abstract(), device=target.fingerprint).representative
                configs = _configs(aimed, candidates, max_candidates)
                if not configs:
                    text = f"{inv.op_id}: there is nothing to compile; config_space(inv) returned no configuration."
                    warn(text, TuningWarning)
                    continue
                ended = _compile_call(aimed, configs, how, progress)
                written.append(_written(aimed, configs, ended, folder, number))
                bundled.append(_bundled(written[-1], folder))
        manifest = _Manifest(
            schema=_SCHEMA, target=target.fingerprint, jax=jax.__version__, jaxlib=str(version("jaxlib")), calls=written
        )
        write_file(folder / _MANIFEST, sealed_json(manifest))
    except BaseException as error:
        for file in folder.iterdir():  # a part of a bundle is none, and in the way of the next attempt
            if _FILE.fullmatch(file.name) or file.name == _MANIFEST:  # what others have put there stays
                file.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"the bundle's folder {folder} cannot be written: {error}") from error
        raise
    return bundled


@dataclasses.dataclass(frozen=True, slots=True)
class _How:
    """Who compiles, and for what."""

    target: Target
    processes: int
    executor: concurrent.futures.Executor | None

    def job(
        self, timeout: AdaptiveTimeout, inv: Invocation[Cfg, Out], choice: Choice, only_once: bool
    ) -> Callable[[], Program]:
        """Return what compiles a call."""
        compiler: Callable[..., Program] = compile_for
        if self.executor is None and self.processes:
            compiler = functools.partial(compile_processes(self.processes).compile, allowed=lambda: timeout.seconds)
        job = functools.partial(compiler, inv, choice, self.target, only_once=only_once)
        return job if self.executor is None else functools.partial(_submitted, self.executor, job)


def _submitted(executor: concurrent.futures.Executor, job: Callable[[], Program]) -> Program:
    return executor.submit(job).result()


def _compile_call(
    inv: Invocation[Cfg, Out],
    configs: Sequence[object],
    how: _How,
    progress: Callable[[Invocation[Any, Any], int, int], None] | None,
) -> list[Done[Program]]:
    """Return what became of each candidate, and last of the reference, if there is one."""
    assert inv.kernel is not None  # calls that are found in programs have one
    timeout = AdaptiveTimeout(first=600.0, least=60.0)
    jobs = [how.job(timeout, inv, Choice(config=c, platform=inv.platform), False) for c in configs]
    if overrides(inv.kernel, "reference"):
        choice = Choice(config=configs[0], platform=inv.platform, reference=True)
        jobs.append(how.job(timeout, inv, choice, True))
    ended: dict[int, Done[Program]] = {}
    # A kernel in a kernel is not to be tuned meanwhile.
    inside = [in_callers_context(job, deeper=True) for job in jobs]
    for done in CompileThreads(inside, width=how.processes or None, timeout=timeout).results():
        ended[done.index] = done
        if progress is not None:
            progress(inv, len(ended), len(jobs))
    return [ended[index] for index in range(len(jobs))]


def _configs(
    inv: Invocation[Cfg, Out], candidates: Callable[[Invocation[Any, Any]], Collection[Any]] | None, max_candidates: int
) -> list[Any]:
    assert inv.kernel is not None
    space = candidates_of(inv.kernel, inv) if candidates is None else candidates(inv)
    if isinstance(space, ConfigSpace) and not space.has_at_most(max(LISTED, max_candidates)):
        others = space.sample(np.random.default_rng(0), max_candidates)
    else:
        others = list(space)
    for config in others:
        check_config(inv.kernel, config, "each candidate")
    return list({config_id(config): config for config in (*heuristic_of(inv, inv.kernel), *others)}.values())


def _written(
    inv: Invocation[Cfg, Out], configs: Sequence[object], ended: Sequence[Done[Program]], folder: Path, number: int
) -> _Call:
    """Write the programs of a call, each once, and return what the manifest says of it."""
    names = (f"{number:03d}-{index:04d}.bin" for index in itertools.count())
    rows, first = [], dict[str, Any]()
    for config, done, name in zip(configs, ended, names, strict=False):
        program = done.result
        row = _row(config, done)
        if program is not None and program.digest in first:
            reason = f"the same program as {compact(first[program.digest])}"
            rows.append(dataclasses.replace(row, status=Status.SAME, reason=reason))
            continue
        if program is not None and program.digest:
            first[program.digest] = config
        rows.append(_with_file(row, program, folder / name))
    reference = None
    if len(ended) > len(configs):  # it may be a candidate's program, and needs its own file all the same
        done = ended[len(configs)]
        row = _with_file(_row(None, done), done.result, folder / next(names))
        reference = row if row.file is not None else None
    return _Call(description=inv.description, candidates=rows, reference=reference)


def _row(config: object, done: Done[Program]) -> _Row:
    """Return what the manifest says of a candidate, or of the reference, but for its file."""
    program, error = done.result, done.error
    if program is None:
        status, reason = _why_not_compiled(error)
    elif program.why_left:
        status, reason = Status.LEFT, f"{program.why_left}, so it is compiled where it runs"
    else:
        status, reason = Status.READY, ""
    return _Row(
        config=to_data(config),
        config_type=type_name(config),
        status=status,
        reason=reason,
        compile_seconds=round(done.seconds, 3),
    )


def _why_not_compiled(error: BaseException | None) -> tuple[Status, str]:
    if isinstance(error, concurrent.futures.BrokenExecutor):  # some candidate ended its process: but which one?
        return Status.LEFT, "the process that was to compile it ended"
    return Status.FAILED, str(error) if isinstance(error, CandidateError) else f"{type(error).__name__}: {error}"


def _with_file(row: _Row, program: Program | None, file: Path) -> _Row:
    """Write a program, if there is one, and return its row with what is to be known to load it."""
    if program is None or not isinstance(program.code, bytes):
        return row
    file.write_bytes(program.code)
    return dataclasses.replace(
        row,
        file=file.name,
        sha256=digest_of(program.code),
        inputs=program.inputs,
        outputs=program.outputs,
        mosaic=program.mosaic,
        spilled=program.spilled,
    )


# --- reading one ---


def read_bundle(folder: Path) -> list[BundledCall]:
    """Return the calls of a bundle. The modules of their kernels must have been imported.

    A program whose file is damaged is a `TuningWarning`, and is left to be compiled where it runs.

    Raises:
        ConfigError: it is no bundle, or was made with other versions of JAX or for another device.
    """
    try:
        raw = read_file(folder / _MANIFEST, _LARGEST)
        if raw is None:
            raise UnusableError(f"there is no {_MANIFEST}")
        manifest = from_plain(read_object(raw, _SCHEMA, "the manifest of one"), _Manifest)
    except (UnusableError, SerializationError) as error:
        raise ConfigError(f"{folder} is no bundle that can be measured: {error}; make it anew.") from error
    # The format of executables is not stable.
    here = device_and_versions()
    wanted = (manifest.target, manifest.jax, manifest.jaxlib)
    if wanted != here:
        raise ConfigError(
            f"the bundle {folder} was made for {wanted[0]} with JAX {wanted[1]} and jaxlib {wanted[2]}; this is "
            f"{here[0]} with JAX {here[1]} and jaxlib {here[2]}."
        )
    return [_bundled(call, folder) for call in manifest.calls]


def device_and_versions() -> tuple[str, str, str]:
    """Return what a bundle must have been made for to be measured here."""
    return Target.named("here").fingerprint, jax.__version__, str(version("jaxlib"))


def _bundled(call: _Call, folder: Path) -> BundledCall:
    return BundledCall(
        description=call.description,
        candidates=tuple(_compiled(row, folder) for row in call.candidates),
        reference=None if call.reference is None else _whole(_program(call.reference, folder))[0],
    )


def _compiled(row: _Row, folder: Path) -> BundledCandidate:
    try:
        config = decode_config(row.config, row.config_type)
    except SerializationError as error:
        raise ConfigError(f"the bundle {folder} has a configuration that does not fit its type: {error}") from error
    except ConfigError as error:
        name = row.config_type
        raise ConfigError(
            f"the bundle {folder} needs the module of {name!r}; import it first (--import MODULE): {error}"
        ) from error
    program, reason = _whole(_program(row, folder))
    outcome = Outcome(
        config=config,
        status=Status.LEFT if reason else row.status,
        reason=reason or row.reason,
        compile_seconds=row.compile_seconds,
        spilled=row.spilled,
    )
    return BundledCandidate(outcome=outcome, program=program)


def _whole(program: Program | None) -> tuple[Program | None, str]:
    """Return a program, or `None` and why it cannot be used, of which this warns."""
    if program is None or not isinstance(program.code, CodeFile):
        return None, ""
    try:
        # The digests tell which file belongs to which row.
        program.code.read()
    except CandidateError as error:
        warn(f"a candidate is compiled here: {error}", TuningWarning)
        return None, str(error)
    return program, ""


def _program(row: _Row, folder: Path) -> Program | None:
    if row.file is None or row.sha256 is None:
        if row.status == Status.READY or (row.file, row.sha256) != (None, None):
            raise ConfigError(f"the bundle {folder} has a program without its file or its digest; make it anew.")
        return None
    if not _FILE.fullmatch(row.file):
        raise ConfigError(f"the bundle {folder} names a file outside of it: {row.file!r}.")
    if not (0 <= row.inputs <= _MOST_ARRAYS and 0 <= row.outputs <= _MOST_ARRAYS):
        counts = f"{describe(row.inputs)} arrays and returns {describe(row.outputs)}"
        raise ConfigError(f"the bundle {folder} has a program that takes {counts}; make it anew.")
    return Program(
        code=CodeFile(folder / row.file, row.sha256),
        inputs=row.inputs,
        outputs=row.outputs,
        mosaic=row.mosaic,
        spilled=row.spilled,
    )
