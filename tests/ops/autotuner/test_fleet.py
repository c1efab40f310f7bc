# SPDX-License-Identifier: Apache-2.0
"""Tasks in the processes and threads of executors: connections, shared devices, and whole searches."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tests.ops import faulty_kernels
from tests.ops.autotuner.fake_workers import FakeWorker
from tests.ops.faulty_kernels import BEST, SHAPE

from ejkernel.ops import RayExecutor
from ejkernel.ops.autotuner.fleet import dispatch, lines, place, ray_executor
from ejkernel.ops.autotuner.fleet.lines import FolderLine
from ejkernel.ops.autotuner.fleet.place import (
    Assignment,
    RefusedError,
    devices_of,
    leased,
    location,
    tune_at_place,
    versions,
)
from ejkernel.ops.autotuner.process import worker as workers
from ejkernel.ops.autotuner.process.messages import Happened, unpickled
from ejkernel.ops.autotuner.process.watch import Instruction
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.events import SearchStarted, on_event
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.context import Scope
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import ConfigError, TuningWarning
from ejkernel.ops.execution.offline import tune_invocations
from ejkernel.ops.utils.fingerprint import device_fingerprint


def call_of(kernel, size=SHAPE[0], **more):
    return Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((size, size), jnp.float32),), **more).abstract()


# --- lines ---


@pytest.fixture
def line():
    made = FolderLine.new()
    yield made
    made.close()


def test_the_folder_of_a_process_goes_with_it_and_not_with_a_fork(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = lines._folder_of_this_process.__wrapped__(os.getpid())
    lines._remove(folder, os.getppid())  # a fork of the process exits
    assert folder.exists()
    lines._remove(folder, os.getpid())
    assert not folder.exists()


def test_messages_arrive_once_and_in_order(line):
    line.say(b"one")
    line.say(b"")
    assert list(line.heard()) == [b"one", b""]
    line.say(b"two")
    assert list(line.heard()) == [b"two"]
    assert list(line.heard()) == []


def test_half_a_message_waits_for_the_rest(line):
    line.say(b"whole")
    said = line.folder / "said"
    data = said.read_bytes()
    said.write_bytes(data[:-2])
    assert list(line.heard()) == []
    said.write_bytes(data)
    assert list(line.heard()) == [b"whole"]


def test_a_request_holds_until_a_stronger_one(line):
    assert line.instruction() == Instruction.GO_ON
    line.tell(Instruction.END)
    assert line.instruction() == Instruction.END
    line.tell(Instruction.END_AT_ONCE)
    assert line.instruction() == Instruction.END_AT_ONCE


def test_a_worker_on_a_closed_connection_must_end_at_once(line):
    line.close()
    line.say(b"anybody?")
    assert line.instruction() == Instruction.END_AT_ONCE


def test_a_machine_without_the_folder_is_not_connected(line):
    assert line.connect()
    assert not FolderLine(line.folder / "in" / "none").connect()


def test_a_worker_that_cannot_reach_the_folder_is_not_connected(line):
    assert not FolderLine(line.folder / ("too long a name" * 99) / "x").connect()
    line.folder.chmod(0o500)  # like the folder of another user
    assert FolderLine(line.folder / "x").connect() == (os.geteuid() == 0)


# --- devices shared by threads ---


def test_gpus_are_those_that_the_process_may_see(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-7")
    assert [device.environ for device in devices_of("gpu")] == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-7"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_of("gpu") == []


def test_a_device_is_one_thread_s_at_a_time_and_the_next_takes_another(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gpus = devices_of("gpu")
    with leased(gpus, lambda: False) as first, leased(gpus, lambda: False) as second:
        assert [first.name, second.name] == ["gpu-0", "gpu-1"]
        with pytest.raises(KeyboardInterrupt), leased(gpus, lambda: True):
            pass
    with leased(gpus, lambda: True) as again:
        assert again.name == "gpu-0"


def test_processors_that_have_a_core_in_common_take_turns(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    both = devices_of("cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
    others = devices_of("cpu")
    with leased(both, lambda: True), pytest.raises(KeyboardInterrupt), leased(others, lambda: True):
        pass


# --- assignment of tasks ---


def assignment_of(call, line, **changes):
    task = TuningTask(inv=call, policy=AutotunePolicy(isolate=True))
    given = {"versions": versions(), "caller": location(), **changes}
    return Assignment(task=task, scope=Scope(), line=line, **given)


def test_a_worker_with_another_jax_refuses(line):
    (answer,) = tune_at_place(assignment_of(call_of(faulty_kernels.plain), line, versions="JAX 0.1 and jaxlib 0.2"))
    assert isinstance(answer.error, RefusedError)
    assert str(answer.error).endswith(", the caller JAX 0.1 and jaxlib 0.2")


def test_a_worker_that_sees_no_gpu_refuses_a_call_for_one(line, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (answer,) = tune_at_place(assignment_of(call_of(faulty_kernels.plain, device="gpu:abacus"), line))
    assert str(answer.error).endswith("sees no GPU, but the call is for gpu:abacus")


def test_a_worker_with_another_device_refuses(line, monkeypatch):
    monkeypatch.setattr(workers, "_session", workers._Session())
    monkeypatch.setattr(place, "Worker", lambda environ: FakeWorker(environ=environ))
    (answer,) = tune_at_place(assignment_of(call_of(faulty_kernels.plain, device="cpu:abacus_x7"), line))
    assert str(answer.error).endswith("but the call is for cpu:abacus_x7")


def test_an_abandoned_task_is_not_carried_out(line):
    line.close()
    (answer,) = tune_at_place(assignment_of(call_of(faulty_kernels.plain), line))
    assert "KeyboardInterrupt" in str(answer.error)


@pytest.mark.parametrize("instruction", [Instruction.END, Instruction.END_AT_ONCE])
def test_a_caller_s_instruction_reaches_the_search_and_no_later_one(line, monkeypatch, instruction):
    def tune(task, watch):
        line.tell(instruction)
        watch("running", [BEST])
        found.append(workers.this_slot().cancellation.instruction)

    found = []
    monkeypatch.setattr(workers, "_session", workers._Session())
    monkeypatch.setattr(place, "Worker", lambda environ: FakeWorker(environ=environ))
    monkeypatch.setattr(place, "tune_isolated", tune)
    call = call_of(faulty_kernels.plain, device=device_fingerprint())
    tune_at_place(assignment_of(call, line))
    assert found == [instruction]
    *_, began = map(unpickled, line.heard())
    assert (began.what, began.configs) == ("running", [BEST])
    line = FolderLine.new()
    monkeypatch.setattr(place, "tune_isolated", lambda task, watch: found.append(task))
    tune_at_place(assignment_of(call, line))
    line.close()
    assert len(found) == 2


# --- whole searches ---

CALLS = [call_of(faulty_kernels.plain, size) for size in (16, 32)]


def tuned_by(executor, calls, cache=None):
    chain = ConfigSelectorChain(persistent=cache, policy=AutotunePolicy(executor=executor))
    return tune_invocations(chain, calls)


def spawned(count):
    return concurrent.futures.ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


@pytest.mark.slow
@pytest.mark.smoke
def test_a_process_pool_finds_the_same_winners_and_the_caller_saves_them(tmp_path):
    cache, events = PersistentCache(tmp_path / "cache"), []
    calls = [*CALLS, call_of(faulty_kernels.plain, 8)]
    with spawned(1) as executor, on_event(events.append):
        result = tuned_by(executor, calls, cache)
        assert executor.submit(os.getpid).result()  # it was not shut down, or broken
    assert [entry.cfg for entry in result.entries] == [BEST] * 3
    assert {call.key for call in calls} == {key for key, _ in cache.entries()}
    assert sum(isinstance(event, SearchStarted) for event in events) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_pool_that_forks_while_a_search_goes_on_can_be_shut_down():
    """Its processes are forks of one that has workers, and a session of them, by then."""
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
        result = tuned_by(executor, CALLS)
    assert [entry.cfg for entry in result.entries] == [BEST] * 2


@pytest.mark.slow
def test_threads_have_a_worker_process_each_turn():
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        result = tuned_by(executor, CALLS)
    assert [entry.cfg for entry in result.entries] == [BEST] * 2
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_tasks_of_a_broken_pool_are_tuned_here():
    ended = threading.Event()

    def end(event):
        if isinstance(event, SearchStarted) and not ended.is_set():
            ended.set()
            for process in list(executor._processes.values()):
                process.kill()

    executor = spawned(1)
    text = "the executor accepts no more tasks, so this process tunes the rest: BrokenProcessPool"
    with on_event(end), pytest.warns(TuningWarning, match=text):
        result = tuned_by(executor, CALLS)
    executor.shutdown()
    assert [entry.cfg for entry in result.entries] == [BEST] * 2


# --- Ray ---


def test_without_ray_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed .*pip install 'ray>=2.40'"):
        RayExecutor()


@pytest.mark.parametrize("is_there", [False, True])
def test_modules_are_sent_to_ray_by_the_process_that_connects(monkeypatch, is_there):
    said = {}

    def options(**options):
        said["task"] = options

    task = SimpleNamespace(options=options)
    fake = SimpleNamespace(
        is_initialized=lambda: is_there,
        init=lambda address, **options: said.update(init=options),
        remote=lambda function: task,
        cluster_resources=lambda: {"CPU": 2.0},
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}],
    )
    monkeypatch.setattr(ray_executor, "_ray", lambda: fake)
    RayExecutor(runtime_env={"working_dir": "."})
    assert [name for name, options in said.items() if "runtime_env" in options] == ["task" if is_there else "init"]


@pytest.mark.parametrize(("cores", "least"), [([8.0, 4.0, 0.0], 4.0), ([0.0], 1.0), ([], 1.0)])
def test_a_task_without_a_gpu_takes_the_smallest_node_with_cores(cores, least):
    nodes = [{"Alive": True, "Resources": {"CPU": count}} for count in cores]
    nodes += [{"Alive": True, "Resources": {}}, {"Alive": False, "Resources": {"CPU": 2.0}}]
    assert ray_executor._cores_of_a_node(SimpleNamespace(nodes=lambda: nodes)) == least


@pytest.fixture(scope="module")
def cluster():
    """A local cluster with two workers, unreachable for others."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for name, value in {"AUTH_MODE": "disabled", "USAGE_STATS_ENABLED": "0", "worker_niceness": "0"}.items():
            patch.setenv(f"RAY_{name}", value)
        warnings.simplefilter("ignore")  # it forks, and leaves files open
        ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.smoke
def test_killing_a_ray_worker_loses_no_result(cluster, monkeypatch):
    receive, killed, reasons = dispatch.ExecutorWorker.receive, [], []

    def kill_the_first(worker):
        message = receive(worker)
        if message is not None and isinstance(unpickled(message), Happened) and not killed:
            killed.append(worker.where)
            os.kill(int(worker.where.split()[1]), signal.SIGKILL)  # "process 7 on host"
        return message

    monkeypatch.setattr(dispatch.ExecutorWorker, "receive", kill_the_first)
    with RayExecutor("auto", num_cpus=2) as executor, on_event(lambda e: reasons.append(getattr(e, "reason", ""))):
        result = tuned_by(executor, CALLS)
    assert [entry.cfg for entry in result.entries] == [BEST] * 2
    assert f"a worker was lost ({killed[0]}): WorkerCrashedError" in "".join(reasons)
    assert cluster.is_initialized()  # started by the test, so ended by the test


@pytest.mark.slow
def test_a_future_of_ray_brings_results_and_errors_and_can_be_cancelled(cluster):
    executor = RayExecutor("auto", num_cpus=2)
    assert executor.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 7, 0).result()
    waiting = executor.submit(divmod, 7, 2)
    assert waiting.cancel() or waiting.done()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="the executor was shut down"):
        executor.submit(divmod, 7, 2)
