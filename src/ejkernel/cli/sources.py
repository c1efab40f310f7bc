# SPDX-License-Identifier: Apache-2.0
"""Finds the calls for a command."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ejkernel import compat
from ejkernel.cli import files
from ejkernel.cli.files import Found
from ejkernel.cli.programs import (
    Program,
    abstract_bytes,
    import_users,
    load_program,
    located,
    look_here,
    module_named,
    user_code,
)
from ejkernel.cli.shapes import calls_of_shapes
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.process.messages import Raised, carried_out, pickled, unpickled
from ejkernel.ops.errors import EjkernelError, OfflineWarning, TuningError
from ejkernel.ops.execution.discovery import discover_counted
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.messages.warn import warn

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.process.supervisor import WorkerStatus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of `ejkernel tune`; see its help."""

    target: str = ""
    cache: Path | None = None
    budget: float | None = None
    time: float | None = None
    force: bool = False
    undecided: bool = False
    dry_run: bool = False
    as_json: bool = False
    verbose: bool = False
    imports: tuple[str, ...] = ()
    missed: bool = False
    bundle: Path | None = None
    shapes: Path | None = None
    in_process: bool = False
    devices: int = 1
    mesh_devices: int | None = None
    ray: str | None = None
    compile_processes: int | None = None
    check_step: bool | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether only another machine has the devices of the program."""
        return self.ray is not None or self.mesh_devices is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of the calls: exactly one of the first five attributes, or `bundle` and `shapes`.

    Attributes:
        program: The function that returns the program.
        text: A file with the program's text.
        missed: The cache folder with notes of missed calls.
        bundle: The folder of a bundle.
        shapes: A file with calls that share a configuration.
        imports: Modules that define kernels.
        platform: The platform to lower the program for; this process's by default.
    """

    program: Program | None = None
    text: Path | None = None
    missed: Path | None = None
    bundle: Path | None = None
    shapes: Path | None = None
    imports: tuple[str, ...] = ()
    platform: str | None = None

    @classmethod
    def of(cls, target: str, imports: tuple[str, ...], **others: Any) -> Source:
        """Return the source of a target, and make its modules importable in this process and its workers.

        Args:
            target: MODULE:FUNCTION, or the file of a program's text; may be empty.
            imports: Modules that define kernels, as typed.
            **others: The other attributes.

        Raises:
            ArgumentError: The target does not exist or is malformed.
        """
        # A Python file without a function is an error of `located`.
        is_text = bool(target) and Path(target).is_file() and Path(target).suffix != ".py"
        source = cls(
            program=located(target) if target and not is_text else None,
            text=Path(target) if is_text else None,
            imports=tuple(map(module_named, imports)),
            **others,
        )
        if source.names_modules:  # this process unpickles a worker's answers, so it needs the modules, too
            look_here()
        return source

    @property
    def names_modules(self) -> bool:
        """Whether the user named modules, possibly of the working directory; reading files needs none."""
        return bool(self.imports) or self.program is not None


def find(source: Source) -> Found:
    """Return the calls of a source."""
    if source.names_modules:
        look_here()
    for name in source.imports:
        import_users(name)
    if source.program is not None:
        program, args, kwargs = load_program(source.program)
        with user_code(f"lowering the program of {source.program.target}"):
            calls, times = discover_counted(program, args, kwargs, platform=source.platform)
        target = source.program.target
        empty = f"the program of {target} made no call of an operation that can be tuned."
        found = Found(
            name=target, calls=tuple(calls), empty=empty, times=times, drawn_bytes=abstract_bytes((args, kwargs))
        )
    else:
        found = _in_files(source)
    # `device_fingerprint` opens the device, so skip it when compiling for another machine.
    return found if source.platform else dataclasses.replace(found, device=device_fingerprint())


def find_on(source: Source, aim: Target, mesh_devices: int | None = None) -> Found:
    """Return the calls of a source on a target, and trace its program for it.

    Args:
        source: The source.
        aim: The target.
        mesh_devices: The number of devices of the program's mesh, if this machine may lack them.
    """
    if mesh_devices is None:
        return find(source) if aim.name == "here" else _traced_for(aim, source, find).on(aim.fingerprint)
    from ejkernel.ops.autotuner.process.worker import Worker

    # In a new process: JAX fixes its number of devices at the start, and these are CPU devices.
    with contextlib.closing(Worker()) as many:
        found: Found = many.call(_find_for_mesh, source, aim, mesh_devices, doing=_finding())
    return found.on(aim.fingerprint)


def _traced_for(aim: Target, source: Source, finds: Callable[[Source], Found]) -> Found:
    # A program may depend on the device that it is traced for.
    with aim.entered():
        return finds(dataclasses.replace(source, platform=aim.platform))


def _find_for_mesh(source: Source, aim: Target, count: int) -> Found:
    compat.settings.have_cpu_devices(count)
    aim.give_to_meshes()
    return _traced_for(aim, source, find_sendable)


def _in_files(source: Source) -> Found:
    importlib.import_module("ejkernel.modules")  # files may refer to these kernels without --import
    if source.bundle is not None:
        bundled = files.calls_in_bundle(source.bundle)
        if source.shapes is None:
            return bundled
        return dataclasses.replace(calls_of_shapes(source.shapes), compiled=bundled.compiled)
    if source.missed is not None:
        return files.missed_calls(source.missed)
    if source.shapes is not None:
        return calls_of_shapes(source.shapes)
    assert source.text is not None
    return files.calls_in_file(source.text)


def find_sendable(source: Source) -> Found:
    """Return the calls that can be pickled for other processes; warn of the others."""
    found = find(source)
    calls = []
    for inv in found.calls:
        try:
            # Check each call here: one that cannot be pickled would fail the whole answer.
            pickled(inv)
        except TuningError as error:
            text = (
                f"{inv.op_id}: not tuned, because its kernel cannot be sent to a worker process ({error.__cause__}); "
                "define it at the top level of a module, or tune with --in-process."
            )
            warn(text, OfflineWarning)
        else:
            calls.append(inv)
    none = "its only call cannot" if len(found.calls) == 1 else f"none of its {len(found.calls)} calls can"
    empty = f"{found.name}: {none} be tuned in a worker process; the warnings above say why."
    keys = {inv.key for inv in calls}
    return dataclasses.replace(
        found,
        calls=tuple(calls),
        empty=found.empty if len(calls) == len(found.calls) else empty,
        # Drop incomplete sets: the user asked for one configuration for all calls of a set.
        sets=tuple(each for each in found.sets if all(call.inv.key in keys for call in each)),
    )


def find_in_worker(source: Source, mesh_devices: int | None = None) -> Found:
    """Return the result of `find_sendable` in a worker process.

    Only the worker opens the device: this process could not release a device that a candidate has broken.

    Args:
        source: The source.
        mesh_devices: The number of devices of the program's mesh, if this machine may lack them.
    """
    from ejkernel.ops.autotuner.process.worker import shared_worker

    with shared_worker() as worker:
        if mesh_devices is None:
            found: Found = worker.call(find_sendable, source, doing=_finding())
            return found
        device: str = worker.call(device_fingerprint)
    # Lower for the platform of this machine's device, since its kernels run.
    return find_on(source, Target("here", device), mesh_devices)


def _finding() -> WorkerStatus:
    from ejkernel.ops.autotuner.process.supervisor import WorkerStatus

    # Lowering may take any time, and Ctrl-C can end it.
    return WorkerStatus(what="finding the calls", allowed=math.inf)


def find_by(executor: concurrent.futures.Executor, source: Source) -> Found:
    """Return the calls found by a worker of an executor, and repeat its warnings.

    Raises:
        TuningError: The worker cannot find the calls, e.g. because it lacks a module.
    """
    answer = executor.submit(_answer_of_worker, pickled(functools.partial(_found_here, source)))
    try:
        came_out = unpickled(answer.result())
        if isinstance(came_out, Raised):
            raise came_out.error
    except EjkernelError:
        raise
    except Exception as error:
        raise TuningError(f"a worker could not find the calls: {error_text(error)}") from error
    found: Found
    found, warned = came_out.value
    for warning in warned:
        warn(warning)
    return found


def _answer_of_worker(sent: bytes) -> bytes:
    return pickled(carried_out(sent))


def _found_here(source: Source) -> tuple[Found, list[Warning | str]]:
    """Return the calls found by a worker process of this machine, and its warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = find_in_worker(source)
    return found, [warning.message for warning in warned]
