# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster as an executor; all that is scheduled is scheduled by Ray."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ejkernel.ops.autotuner.fleet.lines import FolderLine, Line, Wish
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.error_text import error_text

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOCAL = "local"  # a cluster of this machine alone, which ends with this process
_PATIENCE = 10.0  # seconds in which a caller answers


class RayExecutor(concurrent.futures.Executor):
    """Submits what it is given as tasks of Ray, which are not tried again: whoever submits them decides that.

    >>> with RayExecutor("auto") as ray:  # doctest: +SKIP
    ...     with policy_override(executor=ray):
    ...         result = autotune(step, *args)

    Workers must have this package, the same JAX, and the modules of the kernels; `runtime_env` brings those. Folders
    of this machine are brought by whoever connects, so a connection that there is by now must have been given them.

    Args:
        address: Of the cluster, as `ray.init` takes it; `"local"` starts one here. A connection that there is by now
            is used, and left as it is; one that is made here ends with `shutdown`.
        num_cpus: Cores that a task has. By default, 1 with a GPU, and else all that the smallest node has: what is
            measured on a processor must not share it.
        num_gpus: GPUs that a task has; by default 1, if the cluster has any.
        runtime_env: What Ray brings to the workers, such as `{"working_dir": "."}`.
        **options: Others of `ray.remote`, such as `resources` or `accelerator_type`.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._ray = _ray()
        self._is_client = address.startswith("ray://")
        self._is_mine = not self._ray.is_initialized()
        environment = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
        if self._is_mine:
            _connect(self._ray, address, environment)
        else:
            options |= environment
        gpus = float("GPU" in self._ray.cluster_resources()) if num_gpus is None else num_gpus
        cpus = (1.0 if gpus else _cores_of_a_node(self._ray)) if num_cpus is None else num_cpus
        self._remote = self._ray.remote(_called).options(num_cpus=cpus, num_gpus=gpus, **{**options, "max_retries": 0})
        self._lock = threading.Lock()
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self._is_shut_down = False
        self._mailbox: Any = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """See `concurrent.futures.Executor`. A future that is cancelled cancels its task, which may have begun."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the executor was shut down")
            self._pending.add(future)
        task = self._remote.remote(fn, args, kwargs)

        def ended(future: concurrent.futures.Future[T]) -> None:
            with self._lock:
                self._pending.discard(future)
            if future.cancelled():
                self._ray.cancel(task)

        future.add_done_callback(ended)
        task.future().add_done_callback(lambda done: _pass_on(done, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor`."""
        with self._lock:
            self._is_shut_down = True
            pending = list(self._pending)
        for future in pending if cancel_futures else ():
            future.cancel()
        if wait:
            concurrent.futures.wait(pending)
        if self._mailbox is not None:
            self._ray.kill(self._mailbox)
            self._mailbox = None
        if self._is_mine and self._ray.is_initialized():
            self._is_mine = False
            self._ray.shutdown()

    def line(self) -> Line:
        """Return what a task's worker and its caller talk by, wherever they are.

        A client of Ray (`ray://`) has handles that only Ray can send on; it hears what happened with the answer.
        """
        if self._is_client:
            return FolderLine()
        with self._lock:
            if self._mailbox is None:
                self._mailbox = self._ray.remote(_Mailbox).options(num_cpus=0, max_restarts=-1).remote()
            return RayLine(self._mailbox)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed ({error}): pip install ray.") from error
    return ray


def _connect(ray: Any, address: str, environment: Mapping[str, Any]) -> None:
    how: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        with warnings.catch_warnings():
            # A process that is forked to become another program does not use JAX before.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address, log_to_driver=False, configure_logging=False, **how, **environment)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address!r}: {error_text(error)}. Give the address that `ray start` printed, "
            f"auto for the one that this machine is part of, or {LOCAL} to start one here."
        ) from error


def _cores_of_a_node(ray: Any) -> float:
    """Return how many cores the smallest node has that has any."""
    cores = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    return float(min((count for count in cores if count), default=1.0))


def _called(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return function(*args, **kwargs)


def _pass_on(done: concurrent.futures.Future[T], future: concurrent.futures.Future[T]) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled meanwhile
        error = done.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())


# --- what is said meanwhile ---


class _Mailbox:
    """An actor that keeps what was said on each line until it is fetched, and what the callers want."""

    def __init__(self) -> None:
        self._said: dict[str, list[bytes]] = {}
        self._wishes: dict[str, int] = {}

    def say(self, line: str, message: bytes) -> None:
        if self.wish(line) != Wish.END_AT_ONCE:
            self._said.setdefault(line, []).append(message)

    def fetch(self, line: str) -> list[bytes]:
        return self._said.pop(line, [])

    def tell(self, line: str, wish: int) -> None:
        self._wishes[line] = wish

    def wish(self, line: str) -> int:
        return self._wishes.get(line, Wish.GO_ON.value)  # this may be another one, in place of one that was lost

    def close(self, line: str) -> None:
        self._said.pop(line, None)
        self._wishes[line] = Wish.END_AT_ONCE.value


@dataclasses.dataclass(frozen=True, slots=True)
class RayEnd:
    """The other end of a `RayLine`.

    Attributes:
        mailbox: Who keeps what is said.
        name: What the line is called there.
    """

    mailbox: Any
    name: str

    def connect(self) -> bool:
        """See `LineEnd`."""
        return True

    def say(self, message: bytes) -> None:
        """See `LineEnd`."""
        self.mailbox.say.remote(self.name, message)

    def wish(self) -> Wish:
        """See `LineEnd`."""
        said = _asked(self.mailbox.wish.remote(self.name))
        return Wish.GO_ON if said is None else Wish(said)


class RayLine:
    """A line by way of an actor of Ray, which caller and worker both reach.

    Args:
        mailbox: The actor.
    """

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self._name = secrets.token_hex()
        self.end = RayEnd(mailbox, self._name)

    def heard(self) -> Iterator[bytes]:
        """See `Line`."""
        yield from _asked(self._mailbox.fetch.remote(self._name)) or ()

    def tell(self, wish: Wish) -> None:
        """See `Line`."""
        self._mailbox.tell.remote(self._name, wish.value)

    def close(self) -> None:
        """See `Line`."""
        self._mailbox.close.remote(self._name)


def _asked(answer: Any) -> Any:
    """Return what the mailbox answers; `None` if it does not, as while another is started in its place."""
    try:
        # Not by `ray.get`: a task that waits there lends its cores to the next.
        return answer.future().result(timeout=_PATIENCE)
    except (_ray().exceptions.RayError, TimeoutError) as error:
        logger.debug("a mailbox does not answer: %s", error_text(error))
        return None
