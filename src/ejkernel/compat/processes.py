# SPDX-License-Identifier: Apache-2.0
"""Multi-process programs: the processes that run one, and the key-value store that they share."""

from __future__ import annotations

import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, cast

import jax
from jax._src import mesh as private_mesh

_mesh: Any = private_mesh
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The devices of a program that several processes run, or may run.

    A lowering rule knows the number of devices, but not which ones, because JAX reuses a lowering for other devices of
    the same number. (JAX's `prim_requires_devices_during_lowering` would change that, but refuses programs with two
    meshes.) A program on one device is therefore local; under a `shard_map` with an explicit mesh the devices are
    known; and every other program on several devices counts as multi-process, which is harmless.

    Attributes:
        devices: The number of devices; 0 if unknown.
        processes: The indices of their processes; empty if unknown.
        partitioned: Whether XLA's partitioner spreads the program over them.
    """

    devices: int
    processes: tuple[int, ...] = ()
    partitioned: bool = False


def span_of(devices: Iterable[Any]) -> Span | None:
    """Return the span of a program on these devices; `None` if they belong to one process.

    Also `None` if a single process lowers a program for the devices of others.
    """
    listed = list(devices)
    processes = tuple(sorted({device.process_index for device in listed}))
    return Span(len(listed), processes) if len(processes) > 1 and jax.process_count() > 1 else None


def span_of_number(devices: int) -> Span | None:
    """Return the span of a program of which only the number of devices is known."""
    return Span(devices) if devices > 1 and jax.process_count() > 1 else None


def any_span() -> Span | None:
    """Return the span of a program with unknown devices; `None` in a single-process run."""
    return Span(0) if jax.process_count() > 1 else None


_placeholders: weakref.WeakSet[jax.sharding.Mesh] = weakref.WeakSet()


def placeholder(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Mark a mesh as a placeholder for any mesh of the same size, and return it."""
    _placeholders.add(mesh)
    return mesh


def span_of_context(context: Any, partitioned: bool) -> Span | None:
    """Return the span of a program lowered in this axis context.

    For most programs JAX knows only the number of devices; the same holds for the mesh set by `jax.set_mesh`.
    """
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh) and mesh not in _placeholders and mesh is not _mesh.get_concrete_mesh():
        found = span_of(mesh.devices.flat)
    else:
        found = span_of_number(int(mesh.size if mesh is not None else getattr(context, "num_devices", None) or 1))
    return None if found is None else dataclasses.replace(found, partitioned=partitioned)


class CoordinationStore:
    """The key-value store of JAX's coordination service, with a timeout of `patience_s` for every operation.

    Every method raises `ConnectionError` if the service fails or does not answer in time.
    """

    patience_s: Final = 60.0

    def __init__(self, client: Any) -> None:
        self.client = client
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        # One thread makes all requests. If the service never answers, the thread is stuck, and later requests time out.
        threading.Thread(target=self._work, name="ejkernel-coordination", daemon=True).start()

    def get(self, key: str) -> str | None:
        """Return the value of a key, or `None`."""
        try:
            # not the blocking call: no process waits for another
            return str(self._answer(lambda: self.client.key_value_try_get(key)))
        except _RefusedError as refusal:
            if not refusal.says("NOT_FOUND"):
                raise
            return None

    def put_if_absent(self, key: str, value: str) -> bool:
        """Store a value unless the key has one; return whether it was stored."""
        try:
            self._answer(lambda: self.client.key_value_set(key, value))
        except _RefusedError as refusal:
            if not refusal.says("ALREADY_EXISTS"):
                raise
            return False
        return True

    def put(self, key: str, value: str) -> None:
        """Store or replace the value of a key."""
        self._answer(lambda: self.client.key_value_set(key, value, allow_overwrite=True))

    def below(self, folder: str) -> dict[str, str]:
        """Return the values of all keys below `folder/`, by the rest of the key."""
        found = self._answer(lambda: self.client.key_value_dir_get(f"{folder}/"))
        return {key.removeprefix(f"{folder}/"): value for key, value in found}

    def _answer(self, ask: Callable[[], T]) -> T:
        """Return the service's answer; JAX's own timeout is much longer and ends the process."""
        reply: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        self._questions.put((ask, reply))
        try:
            answer, refusal = reply.get(timeout=self.patience_s)
        except queue.Empty:
            raise ConnectionError(f"no answer for {self.patience_s:g} s") from None
        if refusal is not None:
            raise _RefusedError(str(refusal)) from refusal
        return cast(T, answer)

    def _work(self) -> None:
        """Send the requests of this process, on a thread that may block forever."""
        while True:
            ask, reply = self._questions.get()
            try:
                reply.put((ask(), None))
            except Exception as error:  # noqa: BLE001 - raised in the requesting thread
                reply.put((None, error))


class _RefusedError(ConnectionError):
    """The service answered with an error; its text names the kind."""

    def says(self, kind: str) -> bool:
        """Return whether it is of that kind."""
        return kind in str(self)


_stores: list[CoordinationStore] = []  # only the latest: a process may leave one service and join another


def coordination_store() -> CoordinationStore:
    """Return the store of the coordination service that `jax.distributed.initialize` connected to.

    Raises:
        LookupError: This process has no such service; the message gives the reason.
    """
    try:
        from jax._src import distributed

        client: Any = distributed.global_state.client
    except (ImportError, AttributeError) as error:
        raise LookupError(f"JAX {jax.__version__} has no coordination service where it was: {error}") from error
    if client is None:
        raise LookupError("jax.distributed.initialize() was not called")
    missing = [name for name in _NEEDED if not hasattr(client, name)]
    if missing:
        raise LookupError(f"the coordination service of JAX {jax.__version__} has no {', '.join(missing)}")
    if not _stores or _stores[0].client is not client:
        _stores[:] = [CoordinationStore(client)]
    return _stores[0]


_NEEDED: Final = ("key_value_set", "key_value_try_get", "key_value_dir_get")
