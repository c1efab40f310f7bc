# SPDX-License-Identifier: Apache-2.0
"""Candidates compiled on one machine and measured on another, which has the device.

A bundle is a folder: `manifest.json` with the calls and the fate of each candidate, and one file of machine code for
each program. The code runs as it is when the bundle is measured: a bundle is a program, not data. Measure your own.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel import compat
from ejkernel.ops.config.space import ConfigSpace
from ejkernel.ops.core.examples import example_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import candidates_of
from ejkernel.ops.core.nodes import Choice
from ejkernel.ops.errors import CandidateError, ConfigError, SerializationError
from ejkernel.ops.execution.bench import config_id, program_digest
from ejkernel.ops.execution.compiling import CompileThreads, Patience
from ejkernel.ops.execution.outcome import FAILED, READY, SAME, Outcome
from ejkernel.ops.execution.targets import Target
from ejkernel.ops.execution.task import LISTED, heuristic_of
from ejkernel.ops.utils.serialize import from_data, from_json, to_data, to_json
from ejkernel.ops.utils.typenames import decode_config, type_name

_SCHEMA = 1
_MANIFEST = "manifest.json"
_HERE = "left"  # the fate of a candidate that must be compiled where it runs
# XLA chooses how to compute these by timing on the device, and chooses badly where there is none.
_TUNED_BY_XLA = re.compile(r"stablehlo\.(dot|convolution)|__cudnn|__cublas")
_MOSAIC = re.compile(r"mosaic_gpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A candidate's machine code.

    Attributes:
        file: Where it is.
        inputs: How many arrays it takes.
        outputs: How many it returns.
        mosaic: Whether it needs the runtime of Mosaic GPU.
    """

    file: Path
    inputs: int
    outputs: int
    mosaic: bool = False

    def load(self) -> Any:
        """Return the program, ready to run on the default device."""
        if self.mosaic:
            _bring_mosaic_runtime()
        return compat.loaded(self.file.read_bytes(), inputs=self.inputs, outputs=self.outputs)


@functools.cache
def _bring_mosaic_runtime() -> None:
    compat.load_mosaic_gpu_runtime()


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
    """

    description: dict[str, Any]
    candidates: tuple[Compiled, ...]

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
    inputs: int = 0
    outputs: int = 0
    mosaic: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    description: Any
    candidates: list[_Row]


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
    executor: concurrent.futures.Executor | None = None,
    progress: Callable[[Invocation[Any, Any], int, int], None] | None = None,
) -> list[BundledCall]:
    """Compile the candidates of calls for a target, without measuring anything, and write them to a folder.

    Args:
        calls: The calls, abstract, with their kernels.
        target: What to compile for.
        folder: Where to write; made if it is not there, and must be empty.
        max_candidates: How many candidates of a `ConfigSpace` are compiled, chosen at random.
        executor: Who compiles, such as a `ProcessPoolExecutor` or a cluster's; threads of this process by default.
        progress: Called with the call, how many of its candidates are done, and how many there are.

    Raises:
        ConfigError: the folder is not empty, or this machine cannot compile for the target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"the bundle's folder must be empty, but {folder} is not.")
    target.placed(jax.ShapeDtypeStruct((), np.dtype("float32")))  # the error, if any, once and not for each candidate
    bundled, written = [], []
    for number, inv in enumerate(calls):
        aimed = dataclasses.replace(inv.abstract(), device=target.fingerprint).representative
        made = _compile_call(aimed, target, max_candidates, executor, progress)
        rows = [_row(one, folder, f"{number:03d}-{index:04d}.bin") for index, one in enumerate(made)]
        written.append(_Call(description=aimed.description, candidates=rows))
        bundled.append(_bundled(written[-1], folder))
    manifest = _Manifest(
        schema=_SCHEMA, target=target.fingerprint, jax=jax.__version__, jaxlib=_jaxlib_version(), calls=written
    )
    (folder / _MANIFEST).write_text(to_json(manifest) + "\n", encoding="utf-8")
    return bundled


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A candidate that was compiled, or not; fit to be sent from another process."""

    config: Any
    digest: str = ""
    payload: bytes = b""
    inputs: int = 0
    outputs: int = 0
    mosaic: bool = False
    status: str = READY
    reason: str = ""
    seconds: float | None = None


def _compile_call(
    inv: Invocation[Any, Any],
    target: Target,
    max_candidates: int,
    executor: concurrent.futures.Executor | None,
    progress: Callable[[Invocation[Any, Any], int, int], None] | None,
) -> list[_Made]:
    configs = _configs(inv, max_candidates)
    jobs = [functools.partial(_compile, inv, target, config) for config in configs]
    made: dict[int, _Made] = {}
    for done in _carried_out(jobs, executor):
        made[done.index] = done.result or _failed(configs[done.index], done.error)
        made[done.index] = dataclasses.replace(made[done.index], seconds=done.seconds)
        if progress is not None:
            progress(inv, len(made), len(configs))
    return _without_repeats([made[index] for index in range(len(configs))])


def _configs(inv: Invocation[Any, Any], max_candidates: int) -> list[Any]:
    assert inv.kernel is not None  # calls that are found in programs have one
    space = candidates_of(inv.kernel, inv)
    if isinstance(space, ConfigSpace) and space.size > max(LISTED, max_candidates):
        others: Iterable[Any] = space.sample(np.random.default_rng(0), max_candidates)
    else:
        others = space
    return list({config_id(config): config for config in (*heuristic_of(inv, inv.kernel), *others)}.values())


def _carried_out(jobs: Sequence[Callable[[], _Made]], executor: concurrent.futures.Executor | None) -> Iterator[Any]:
    if executor is None:
        yield from CompileThreads(jobs, patience=Patience(first=600.0, least=60.0)).results()
        return
    futures = [executor.submit(job) for job in jobs]
    for index, future in enumerate(futures):
        error = future.exception()
        yield _Answer(index, None if error else future.result(), error, None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    index: int
    result: _Made | None
    error: BaseException | None
    seconds: float | None


def _compile(inv: Invocation[Any, Any], target: Target, config: Any) -> _Made:
    """Compile one candidate; this may run in another process."""
    types = [target.placed(like) for like in example_types(inv)]
    with target.entered(), jax.default_matmul_precision(inv.precision), jax.enable_x64(inv.x64):
        lowered = jax.jit(inv.node.flat(Choice(config=config, platform=inv.platform))).lower(*types)
        text = lowered.as_text()
        digest = program_digest(text) or ""
        if target.platform == "gpu" and target.description and _TUNED_BY_XLA.search(text):
            reason = "XLA tunes a part of it on the device, so it is compiled where it runs"
            return _Made(config, digest, status=_HERE, reason=reason)
        payload = compat.serialized(lowered.compile())
    outputs = len(jax.tree.leaves(lowered.out_info))
    return _Made(config, digest, payload, len(types), outputs, bool(_MOSAIC.search(text)))


def _failed(config: Any, error: BaseException | None) -> _Made:
    text = str(error) if isinstance(error, CandidateError) else f"{type(error).__name__}: {error}"
    return _Made(config, status=FAILED, reason=text)


def _without_repeats(made: Sequence[_Made]) -> list[_Made]:
    first: dict[str, Any] = {}
    for one in made:
        if one.digest:
            first.setdefault(one.digest, one.config)
    return [
        dataclasses.replace(one, payload=b"", status=SAME, reason=f"the same program as {first[one.digest]!r}")
        if one.digest and first[one.digest] is not one.config
        else one
        for one in made
    ]


def _row(one: _Made, folder: Path, name: str) -> _Row:
    if one.payload:
        (folder / name).write_bytes(one.payload)
    return _Row(
        config=to_data(one.config),
        config_type=type_name(one.config),
        status=one.status,
        reason=one.reason,
        compile_seconds=None if one.seconds is None else round(one.seconds, 3),
        file=name if one.payload else None,
        inputs=one.inputs,
        outputs=one.outputs,
        mosaic=one.mosaic,
    )


# --- reading one ---


def read_bundle(folder: Path) -> list[BundledCall]:
    """Return the calls of a bundle. The configurations' types must have been imported.

    Raises:
        ConfigError: it is no bundle, or was made with other versions of JAX or for another device.
    """
    try:
        manifest = from_data(from_json((folder / _MANIFEST).read_text(encoding="utf-8"), Any), _Manifest)
    except (OSError, UnicodeDecodeError, SerializationError) as error:
        raise ConfigError(f"{folder} is no bundle: {error}") from error
    here = device_and_versions()
    wanted = (manifest.target, manifest.jax, manifest.jaxlib)
    if manifest.schema != _SCHEMA or wanted != here:
        raise ConfigError(
            f"the bundle {folder} was made for {wanted[0]} with JAX {wanted[1]} and jaxlib {wanted[2]}; this is "
            f"{here[0]} with JAX {here[1]} and jaxlib {here[2]}."
        )
    return [_bundled(call, folder) for call in manifest.calls]


def device_and_versions() -> tuple[str, str, str]:
    """Return what a bundle must have been made for to be measured here."""
    return Target.named("here").fingerprint, jax.__version__, _jaxlib_version()


def _jaxlib_version() -> str:
    return metadata.version("jaxlib")


def _bundled(call: _Call, folder: Path) -> BundledCall:
    candidates = tuple(_compiled(row, folder) for row in call.candidates)
    return BundledCall(description=call.description, candidates=candidates)


def _compiled(row: _Row, folder: Path) -> Compiled:
    outcome = Outcome(
        config=decode_config(row.config, row.config_type),
        status=row.status,
        reason=row.reason,
        compile_seconds=row.compile_seconds,
    )
    if row.file is None:
        return Compiled(outcome=outcome)
    if Path(row.file).name != row.file:
        raise ConfigError(f"the bundle {folder} names a file outside of it: {row.file!r}.")
    program = Program(file=folder / row.file, inputs=row.inputs, outputs=row.outputs, mosaic=row.mosaic)
    return Compiled(outcome=outcome, program=program)
