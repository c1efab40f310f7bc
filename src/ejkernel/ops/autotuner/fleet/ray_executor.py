# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster as an executor; Ray does all scheduling."""

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

from ejkernel.ops.autotuner.fleet.lines import FolderLine, Line
from ejkernel.ops.autotuner.process.watch import Instruction
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.error_text import error_text

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOCAL = "local"  # a cluster of only this machine that ends with this process
_PATIENCE = 10.0  # seconds to wait for an answer of the mailbox


class RayExecutor(concurrent.futures.Executor):
    """Runs functions as Ray tasks. Ray does not retry them; the caller decides on retries.

    >>> with RayExecutor("auto") as ray:  # doctest: +SKIP
    ...     with policy_override(executor=ray):
    ...         result = autotune(step, *args)

    Workers must have this package, the same JAX, and the modules of the kernels, which `runtime_env` can transport.
    Ray uploads local folders when it connects, so pass `runtime_env` with local folders to the earlier `ray.init` if
    this process is already connected.

    Args:
        address: Address of the cluster as for `ray.init`; `"local"` starts one here. An existing connection is reused
            and left open; a connection made here ends with `shutdown`.
        num_cpus: Cores per task. By default 1 with a GPU, else all cores of the smallest node: measurements on a
            processor must not share it.
        num_gpus: GPUs per task; by default 1 if the cluster has any.
        runtime_env: Files and packages for the workers, e.g. `{"working_dir": "."}`.
        **options: Other options of `ray.remote`, e.g. `resources` or `accelerator_type`.

    Raises:
        ConfigError: Ray is not installed, or the cluster is not reachable.
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
        """See `concurrent.futures.Executor`. Cancelling a future also cancels its running task."""
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
        """Return a line between a task's worker and its caller.

        A Ray client (`ray://`) cannot pickle actor handles itself, so its messages come with the answer.
        """
        if self._is_client:
            return FolderLine.new()
        with self._lock:
            if self._mailbox is None:
                self._mailbox = self._ray.remote(_Mailbox).options(num_cpus=0, max_restarts=-1).remote()
            return RayLine(self._mailbox)


def check_installed() -> None:
    """Raise a `ConfigError` unless Ray is installed."""
    _ray()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed ({error}): pip install 'ray>=2.40'.") from error
    return ray


def _connect(ray: Any, address: str, environment: Mapping[str, Any]) -> None:
    how: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        with warnings.catch_warnings():
            # The forked process starts another program at once, without using JAX.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address, log_to_driver=False, configure_logging=False, **how, **environment)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r}: {error_text(error)}. Pass the address printed by `ray start`, "
            f"auto for the cluster of this machine, or {LOCAL} to start one here."
        ) from error


def _cores_of_a_node(ray: Any) -> float:
    """Return the number of cores of the smallest node with cores."""
    cores = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    return float(min((count for count in cores if count), default=1.0))


def _called(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return function(*args, **kwargs)


def _pass_on(done: concurrent.futures.Future[T], future: concurrent.futures.Future[T]) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled
        error = done.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())


# --- messages while a task runs ---


class _Mailbox:
    """An actor that stores the messages of each line until the caller fetches them, and the callers' instructions."""

    def __init__(self) -> None:
        self._said: dict[str, list[bytes]] = {}
        self._instructions: dict[str, int] = {}

    def say(self, line: str, message: bytes) -> None:
        if self.instruction(line) != Instruction.END_AT_ONCE:
            self._said.setdefault(line, []).append(message)

    def fetch(self, line: str) -> list[bytes]:
        return self._said.pop(line, [])

    def tell(self, line: str, instruction: int) -> None:
        self._instructions[line] = instruction

    def instruction(self, line: str) -> int:
        return self._instructions.get(line, Instruction.GO_ON.value)  # a restarted actor does not know older lines

    def close(self, line: str) -> None:
        self._said.pop(line, None)
        self._instructions[line] = Instruction.END_AT_ONCE.value


@dataclasses.dataclass(frozen=True, slots=True)
class RayLine:
    """A line through a Ray actor, reachable for caller and worker.

    Attributes:
        mailbox: The actor, which stores the messages.
        name: The name of the line in the mailbox.
    """

    mailbox: Any
    name: str = dataclasses.field(default_factory=secrets.token_hex)

    def heard(self) -> Iterator[bytes]:
        """See `Line`."""
        yield from _asked(self.mailbox.fetch.remote(self.name)) or ()

    def tell(self, instruction: Instruction) -> None:
        """See `Line`."""
        self.mailbox.tell.remote(self.name, instruction.value)

    def close(self) -> None:
        """See `Line`."""
        self.mailbox.close.remote(self.name)

    def connect(self) -> bool:
        """See `Line`."""
        return True

    def say(self, message: bytes) -> None:
        """See `Line`."""
        self.mailbox.say.remote(self.name, message)

    def instruction(self) -> Instruction:
        """See `Line`."""
        said = _asked(self.mailbox.instruction.remote(self.name))
        return Instruction.GO_ON if said is None else Instruction(said)


def _asked(answer: Any) -> Any:
    """Return the answer of the mailbox; `None` without an answer, e.g. while Ray restarts the actor."""
    try:
        # Not with `ray.get`: Ray lends the cores of a task blocked there to the next task.
        return answer.future().result(timeout=_PATIENCE)
    except (_ray().exceptions.RayError, TimeoutError) as error:
        logger.debug("the mailbox does not answer: %s", error_text(error))
        return None
