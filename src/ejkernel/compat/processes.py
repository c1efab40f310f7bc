# SPDX-License-Identifier: Apache-2.0
"""The processes of one program: which of them run it, and the key-value store that they share."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar, cast

import jax
from jax._src import mesh as private_mesh

_mesh: Any = private_mesh
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The devices of a program that several processes run, or may run.

    A lowering rule learns how many devices a program has, and not which: JAX takes what it lowered for some devices for
    others of that number. (Its `prim_requires_devices_during_lowering` would change that, but refuses programs with two
    meshes.) So programs on one device are local, those under a `shard_map` that was given its mesh are known, and all
    others on several devices count as being of several processes, which does not hurt them.

    Attributes:
        devices: How many there are; 0 if that is not known.
        processes: Indices of the processes that they belong to; empty if JAX does not say.
        partitioned: Whether XLA's partitioner spreads the program over them.
    """

    devices: int
    processes: tuple[int, ...] = ()
    partitioned: bool = False


def span_of(devices: Iterable[Any]) -> Span | None:
    """Return what a program on these devices spans; `None` if they belong to one process.

    So it is too where one process alone lowers a program for the devices of others.
    """
    listed = list(devices)
    processes = tuple(sorted({device.process_index for device in listed}))
    return Span(len(listed), processes) if len(processes) > 1 and jax.process_count() > 1 else None


def span_of_number(devices: int) -> Span | None:
    """Return what a program spans of which so many devices are known to be, and not which."""
    return Span(devices) if devices > 1 and jax.process_count() > 1 else None


def any_span() -> Span | None:
    """Return what a program spans of which no device is known; `None` if there is one process alone."""
    return Span(0) if jax.process_count() > 1 else None


_span: contextvars.ContextVar[Span | None] = contextvars.ContextVar("span", default=None)


def program_span() -> Span | None:
    """Return what the program that is being lowered spans; `None` outside it, and for one of a single process."""
    return _span.get()


@contextlib.contextmanager
def spanning(span: Span | None) -> Iterator[None]:
    """Let what is lowered inside the `with` block be part of a program with this span."""
    token = _span.set(span)
    try:
        yield
    finally:
        _span.reset(token)


_placeholders: weakref.WeakSet[jax.sharding.Mesh] = weakref.WeakSet()


def placeholder(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Return a mesh that stands for any of so many devices."""
    _placeholders.add(mesh)
    return mesh


def span_of_context(context: Any, partitioned: bool) -> Span | None:
    """Return what a program spans that is lowered in an axis context.

    Of most programs JAX says how many devices they have, and not which: what it lowered for some it takes for others
    of that number. So does what is lowered for the mesh in force (`jax.set_mesh`).
    """
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh) and mesh not in _placeholders and mesh is not _mesh.get_concrete_mesh():
        known = span_of(mesh.devices.flat)
        return None if known is None else dataclasses.replace(known, partitioned=partitioned)
    count = int(mesh.size if mesh is not None else getattr(context, "num_devices", None) or 1)
    found = span_of_number(count)
    return None if found is None else dataclasses.replace(found, partitioned=partitioned)


class CoordinationStore:
    """The key-value store of JAX's coordination service; every operation is done, or fails, within `patience_s`.

    All raise `ConnectionError` where the service fails or does not answer.
    """

    patience_s: Final = 60.0

    def __init__(self, client: Any) -> None:
        self.client = client
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        # One thread for all questions: one that the service never answers keeps it, and who asks next is told after the
        # same patience.
        threading.Thread(target=self._work, name="ejkernel-coordination", daemon=True).start()

    def get(self, key: str) -> str | None:
        """Return the value of a key, or `None`."""
        try:
            # Never the blocking call: nobody waits for another process.
            return str(self._answer(lambda: self.client.key_value_try_get(key)))
        except _RefusedError as refusal:
            if not refusal.says("NOT_FOUND"):
                raise
            return None

    def put_if_absent(self, key: str, value: str) -> bool:
        """Store the value of a key that has none; return whether it had none."""
        try:
            self._answer(lambda: self.client.key_value_set(key, value))
        except _RefusedError as refusal:
            if not refusal.says("ALREADY_EXISTS"):
                raise
            return False
        return True

    def put(self, key: str, value: str) -> None:
        """Store the value of a key, whatever it had."""
        self._answer(lambda: self.client.key_value_set(key, value, allow_overwrite=True))

    def below(self, folder: str) -> dict[str, str]:
        """Return the values of all keys that begin with `folder/`, by what follows that."""
        found = self._answer(lambda: self.client.key_value_dir_get(f"{folder}/"))
        return {key.removeprefix(f"{folder}/"): value for key, value in found}

    def _answer(self, ask: Callable[[], T]) -> T:
        """Return what the service answers; JAX itself gives up on it much later, by ending the process."""
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
        """Ask the service what this process asks of it, on a thread that need not come back."""
        while True:
            ask, reply = self._questions.get()
            try:
                reply.put((ask(), None))
            except Exception as error:  # noqa: BLE001 - raised by whoever asked
                reply.put((None, error))


class _RefusedError(ConnectionError):
    """The service answered with an error, whose text names its kind."""

    def says(self, kind: str) -> bool:
        """Return whether it is of that kind."""
        return kind in str(self)


_stores: list[CoordinationStore] = []  # the latest alone: a process may leave one service and join another


def coordination_store() -> CoordinationStore:
    """Return the store of the service that this process has joined (`jax.distributed.initialize`).

    Raises:
        LookupError: there is none; the message says why.
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
