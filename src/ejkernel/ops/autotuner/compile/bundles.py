# SPDX-License-Identifier: Apache-2.0
"""Candidates compiled on one machine and measured on another, which has the device.

A bundle is a folder: `manifest.json` with the calls and the fate of each candidate, and one file of machine code for
each program. The manifest ends with its own digest, and has that of each program. The code runs as it is when the
bundle is measured: a bundle is a program, not data. Measure your own.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel.ops.autotuner.compile.ahead_of_time import LEFT, Made, compile_for, load_program
from ejkernel.ops.autotuner.compile.processes import compile_processes
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, CompileThreads
from ejkernel.ops.autotuner.process.threads import carried
from ejkernel.ops.autotuner.process.worker import worker_session
from ejkernel.ops.autotuner.trials.candidates import LISTED, config_id, heuristic_of
from ejkernel.ops.autotuner.trials.outcome import FAILED, READY, SAME, Outcome
from ejkernel.ops.config._files import UnusableError, read_file, version
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.config.space import ConfigSpace
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import candidates_of, check_config, overrides
from ejkernel.ops.core.nodes import Choice
from ejkernel.ops.errors import CandidateError, ConfigError, SerializationError, TuningWarning
from ejkernel.ops.utils.sealed import digest_of, read_object, sealed_json
from ejkernel.ops.utils.serialize import describe, from_plain, to_data
from ejkernel.ops.utils.typenames import decode_config, type_name

_SCHEMA = 2
_MANIFEST = "manifest.json"
_LARGEST = 16 << 20  # bytes of a manifest; a candidate takes hundreds
_LARGEST_PROGRAM = 1 << 30
_MOST_ARRAYS = 1 << 16  # that a program takes or returns
_FILE = re.compile(r"\d+-\d+\.bin")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A candidate's machine code.

    Attributes:
        file: Where it is.
        sha256: The digest of what is in the file.
        inputs: How many arrays it takes.
        outputs: How many it returns.
        mosaic: Whether it needs the runtime of Mosaic GPU.
        spilled: Bytes of registers that a thread of it spills to memory, as far as that is known.
    """

    file: Path
    sha256: str
    inputs: int
    outputs: int
    mosaic: bool = False
    spilled: int | None = None

    def load(self) -> Any:
        """Return the program, ready to run on the default device.

        Raises:
            CandidateError: the file is not there, or is not the one that was written for this configuration.
        """
        payload = self.payload()
        return load_program(payload, inputs=self.inputs, outputs=self.outputs, mosaic=self.mosaic)

    def payload(self) -> bytes:
        """Return the machine code.

        Raises:
            CandidateError: the file is not there, or is not the one that was written for this configuration.
        """
        try:
            payload = read_file(self.file, _LARGEST_PROGRAM)
        except UnusableError as error:
            raise CandidateError(f"its program {self.file.name} cannot be used: {error}") from error
        if payload is None:
            raise CandidateError(f"its program {self.file.name} is not there")
        if digest_of(payload) != self.sha256:
            raise CandidateError(f"its program {self.file.name} is not the one that was written for it")
        return payload


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
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
    candidates: tuple[Compiled, ...]
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
        return tuple(c.outcome for c in self.candidates if c.outcome.status in (FAILED, SAME))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A candidate in the manifest."""

    config: Any
    config_type: str
    status: str
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
                configs = _configs(aimed, max_candidates)
                if not configs:
                    text = f"{inv.op_id}: there is nothing to compile; config_space(inv) returned no configuration."
                    warnings.warn(text, TuningWarning, stacklevel=2)
                    continue
                written.append(_written(aimed, _compile_call(aimed, configs, how, progress), folder, number))
                bundled.append(_bundled(written[-1], folder))
        manifest = _Manifest(
            schema=_SCHEMA, target=target.fingerprint, jax=jax.__version__, jaxlib=str(version("jaxlib")), calls=written
        )
        write_file(folder / _MANIFEST, sealed_json(manifest))
    except BaseException:
        for file in folder.iterdir():  # a part of a bundle is none, and in the way of the next attempt
            file.unlink()
        raise
    return bundled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Fate:
    """What became of one configuration; `None` is the reference."""

    config: Any
    made: Made | None
    error: BaseException | None
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _How:
    """Who compiles, and for what."""

    target: Target
    processes: int
    executor: concurrent.futures.Executor | None

    def job(
        self, timeout: AdaptiveTimeout, inv: Invocation[Any, Any], choice: Choice, only_once: bool
    ) -> Callable[[], Made]:
        """Return what compiles a call."""
        compiler: Callable[..., Made] = compile_for
        if self.executor is None and self.processes:
            compiler = functools.partial(compile_processes(self.processes).compile, allowed=lambda: timeout.seconds)
        job = functools.partial(compiler, inv, choice, self.target, only_once=only_once)
        return job if self.executor is None else functools.partial(_submitted, self.executor, job)


def _submitted(executor: concurrent.futures.Executor, job: Callable[[], Made]) -> Made:
    return executor.submit(job).result()


def _compile_call(
    inv: Invocation[Any, Any],
    configs: list[Any],
    how: _How,
    progress: Callable[[Invocation[Any, Any], int, int], None] | None,
) -> list[_Fate]:
    """Return the fate of each candidate, and last that of the reference, if there is one."""
    assert inv.kernel is not None  # calls that are found in programs have one
    timeout = AdaptiveTimeout(first=600.0, least=60.0)
    jobs = [how.job(timeout, inv, Choice(config=c, platform=inv.platform), False) for c in configs]
    if overrides(inv.kernel, "reference"):
        choice = Choice(config=configs[0], platform=inv.platform, reference=True)
        jobs.append(how.job(timeout, inv, choice, True))
        configs = [*configs, None]
    fates: dict[int, _Fate] = {}
    carried_jobs = [carried(job, deeper=True) for job in jobs]  # a kernel in a kernel is not to be tuned meanwhile
    for done in CompileThreads(carried_jobs, width=how.processes or None, timeout=timeout).results():
        fates[done.index] = _Fate(
            config=configs[done.index], made=done.result, error=done.error, seconds=round(done.seconds, 3)
        )
        if progress is not None:
            progress(inv, len(fates), len(jobs))
    return [fates[index] for index in range(len(jobs))]


def _configs(inv: Invocation[Any, Any], max_candidates: int) -> list[Any]:
    assert inv.kernel is not None
    space = candidates_of(inv.kernel, inv)
    if isinstance(space, ConfigSpace) and not space.has_at_most(max(LISTED, max_candidates)):
        others = space.sample(np.random.default_rng(0), max_candidates)
    else:
        others = list(space)
    for config in others:
        check_config(inv.kernel, config, "each candidate")
    return list({config_id(config): config for config in (*heuristic_of(inv, inv.kernel), *others)}.values())


def _written(inv: Invocation[Any, Any], fates: Sequence[_Fate], folder: Path, number: int) -> _Call:
    rows, reference, first = [], None, dict[str, Any]()
    for index, fate in enumerate(fates):
        name = f"{number:03d}-{index:04d}.bin"
        if fate.config is not None:
            rows.append(_row(fate, folder, name, first))
            continue
        row = _row(fate, folder, name, {})  # which may be a candidate's program, and needs its own file all the same
        reference = row if row.file is not None else None
    return _Call(description=inv.description, candidates=rows, reference=reference)


def _row(fate: _Fate, folder: Path, name: str, first: dict[str, Any]) -> _Row:
    """Write a program, unless it was written for another configuration before, and return what is to be known of it."""
    row = _Row(config=to_data(fate.config), config_type=type_name(fate.config), compile_seconds=fate.seconds, status="")
    made = fate.made
    if made is None:
        error = fate.error
        if isinstance(error, concurrent.futures.BrokenExecutor):  # some candidate ended its process: but which one?
            return dataclasses.replace(row, status=LEFT, reason="the process that was to compile it ended")
        reason = str(error) if isinstance(error, CandidateError) else f"{type(error).__name__}: {error}"
        return dataclasses.replace(row, status=FAILED, reason=reason)
    if made.digest and made.digest in first:
        return dataclasses.replace(row, status=SAME, reason=f"the same program as {first[made.digest]!r}")
    if made.digest:
        first[made.digest] = fate.config
    if made.status == LEFT:
        return dataclasses.replace(row, status=LEFT, reason=f"{made.reason}, so it is compiled where it runs")
    (folder / name).write_bytes(made.payload)
    return dataclasses.replace(
        row,
        status=READY,
        file=name,
        sha256=digest_of(made.payload),
        inputs=made.inputs,
        outputs=made.outputs,
        mosaic=made.mosaic,
        spilled=made.spilled,
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


def _compiled(row: _Row, folder: Path) -> Compiled:
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
        status=LEFT if reason else row.status,
        reason=reason or row.reason,
        compile_seconds=row.compile_seconds,
        spilled=row.spilled,
    )
    return Compiled(outcome=outcome, program=program)


def _whole(program: Program | None) -> tuple[Program | None, str]:
    """Return a program, or `None` and why it cannot be used, of which this warns."""
    if program is None:
        return None, ""
    try:
        program.payload()
    except CandidateError as error:
        warnings.warn(f"a candidate is compiled here: {error}", TuningWarning, stacklevel=2)
        return None, str(error)
    return program, ""


def _program(row: _Row, folder: Path) -> Program | None:
    if row.file is None or row.sha256 is None:
        if row.status == READY or (row.file, row.sha256) != (None, None):
            raise ConfigError(f"the bundle {folder} has a program without its file or its digest; make it anew.")
        return None
    if not _FILE.fullmatch(row.file):
        raise ConfigError(f"the bundle {folder} names a file outside of it: {row.file!r}.")
    if not (0 <= row.inputs <= _MOST_ARRAYS and 0 <= row.outputs <= _MOST_ARRAYS):
        counts = f"{describe(row.inputs)} arrays and returns {describe(row.outputs)}"
        raise ConfigError(f"the bundle {folder} has a program that takes {counts}; make it anew.")
    return Program(
        file=folder / row.file,
        sha256=row.sha256,
        inputs=row.inputs,
        outputs=row.outputs,
        mosaic=row.mosaic,
        spilled=row.spilled,
    )
