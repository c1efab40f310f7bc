# SPDX-License-Identifier: Apache-2.0
"""Candidates that end, stop or mislead their process: the search ends with the right winner, and nothing leaks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tests.ops import faulty_kernels
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.faulty_kernels import BEST, SHAPE

from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.bench.oracle import Limits
from ejkernel.ops.autotuner.process.serve import reports
from ejkernel.ops.autotuner.process.supervisor import Deadline, WorkerDiedError
from ejkernel.ops.autotuner.process.worker import Worker, shared_worker, worker_session
from ejkernel.ops.autotuner.trials.events import CandidateFinished, SearchStarted, WorkerRestarted, on_event
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import TuningError, TuningWarning

pytestmark = pytest.mark.slow

X = jax.ShapeDtypeStruct(SHAPE, jnp.float32)


def tune(kernel, *, isolate=True, budget_s=None, width=1, progress=None, **limits):
    # one at a time: the heuristic comes first, and its times set the timeout
    tuner = Autotuner(limits=Limits(**limits), width=width)
    policy = AutotunePolicy(isolate=isolate, budget_s=budget_s)
    return tuner.tune(Invocation(kernel=kernel, args=(X,)), kernel, policy=policy, progress=progress)


def statuses(data):
    return {outcome.config.kind: (outcome.status, outcome.reason) for outcome in data.outcomes[1:]}


# --- candidates that end their process ---


@pytest.mark.smoke
def test_a_candidate_that_ends_its_process_fails_alone_and_is_reported_and_counted_once():
    events, counts = [], []
    with on_event(events.append):  # compiled side by side, and after a crash one by one
        data = tune(faulty_kernels.crashing, width=4, progress=lambda done, total: counts.append((done, total)))
    assert data.config == BEST
    found = statuses(data)
    assert found["abort"] == ("crashed", "the worker was killed by SIGABRT while running")
    assert found["exit"] == ("crashed", "the worker exited with status 3 while running")
    assert found["abort while tracing"][0] == "crashed"
    assert sum(isinstance(event, SearchStarted) for event in events) == 1
    restarts = [event.reason for event in events if isinstance(event, WorkerRestarted)]
    assert "the worker was killed by SIGABRT while running" in restarts
    assert len(restarts) >= 3
    finished = [event.outcome for event in events if isinstance(event, CandidateFinished)]
    crashed = [outcome.config for outcome in finished if outcome.status == "crashed"]
    assert sorted(config.kind for config in crashed) == ["abort", "abort while tracing", "exit"]
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == ((0, len(data.outcomes)), (len(data.outcomes), len(data.outcomes)))
    assert float(jnp.sum(jnp.ones(3))) == 3.0  # this process still works


def test_a_candidate_that_cannot_be_sent_is_the_error_of_the_search():
    with pytest.raises(TuningError, match=r"^unsendable: this cannot be sent to a worker process or back"):
        tune(faulty_kernels.unsendable)


def test_in_this_process_a_hanging_candidate_is_abandoned_and_the_search_continues():
    with pytest.warns(TuningWarning, match=r"no sign of life .* while running .*kind=never.* cannot be ended in this"):
        data = tune(faulty_kernels.hanging, isolate=False, budget_s=6.0)
    assert data.heuristic.status == "measured"
    assert statuses(data)["never"][0] == "skipped"


def test_files_closed_by_a_candidate_stay_open_for_others():
    data = tune(faulty_kernels.closing, width=4)
    found = statuses(data)
    assert found.pop("close all")[0] == "crashed"  # with the pipe to the parent
    assert {status for status, _ in found.values()} <= {"measured", "same"}
    assert data.heuristic.status == "measured"


# --- candidates that fail within the process ---


def test_a_candidate_that_fails_or_is_wrong_is_an_outcome():
    data = tune(faulty_kernels.failing, isolate=False)
    assert data.config == BEST
    assert data.checked == ("outputs", "gradients")
    found = statuses(data)
    assert found["raise"] == ("failed", "ValueError: it raises")
    assert found["nan"][0] == "wrong"
    assert found["wrong"][0] == "wrong"
    assert found["memory"][0] == "failed"
    assert found["terabyte"][0] == "failed"
    assert re.match(r"not enough memory for the candidate: 10\d\d\.\d GiB needed", found["terabyte"][1])


def test_a_fast_candidate_with_a_wrong_gradient_is_not_admitted(monkeypatch):
    def time_of(config):
        return 0.5 if config.kind else 1.0 + config.repeats

    monkeypatch.setattr(timing, "interleaved", interleaved_with(time_of))
    data = tune(faulty_kernels.failing, isolate=False)
    assert data.config == BEST
    assert statuses(data)["wrong gradient"][0] == "wrong"
    assert statuses(data)["wrong gradient"][1].startswith("the gradient of x differs from the reference")


def test_failed_candidates_leave_no_arrays():
    tune(faulty_kernels.failing_on_device, isolate=False)
    gc.collect()
    before = len(jax.live_arrays())
    tune(faulty_kernels.failing_on_device, isolate=False)
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_a_candidate_that_fails_in_the_middle_of_a_race_leaves_it():
    calls = []

    class Tiring(Kernel[int, jax.Array]):
        """The second candidate fails on its third call."""

        def run(self, x, *, cfg):
            def callback(x):
                calls.append(cfg)
                if cfg == 2 and calls.count(2) >= 3:
                    raise RuntimeError("tired")
                return x

            return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        def reference(self, x):
            return x

        def config_space(self, inv):
            return [1, 2, 3]

    kernel = Tiring("tiring")
    data = Autotuner().tune(Invocation(kernel=kernel, args=(X,)), kernel)
    assert [outcome.status for outcome in data.outcomes] == ["measured", "failed", "measured"]
    assert "tired" in data.outcomes[1].reason


def test_a_winner_of_a_kernel_without_a_gradient_is_checked_by_its_outputs_alone(monkeypatch):
    class Called(Kernel[int, jax.Array]):
        def run(self, x, *, cfg):
            return jax.pure_callback(lambda x: x + 0 * cfg, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        def reference(self, x):
            return x

        def config_space(self, inv):
            return [1, 2]

    monkeypatch.setattr(timing, "interleaved", interleaved_with({1: 2.0, 2: 1.0}.__getitem__))
    kernel = Called("called")
    data = Autotuner().tune(Invocation(kernel=kernel, args=(X,)), kernel)
    assert (data.config, data.checked) == (2, ("outputs",))


@pytest.mark.parametrize("isolate", [False, True], ids=["in this process", "in a worker"])
def test_any_exception_of_a_candidate_fails_only_that_candidate(isolate):
    data = tune(faulty_kernels.raising, isolate=isolate, width=2)
    assert data.config == BEST
    assert not data.interrupted
    assert {kind: reason for kind, (_, reason) in statuses(data).items()} == {
        "raise": "ValueError: it raises",
        "interrupt": "KeyboardInterrupt: no message",
        "quit": "SystemExit: 3",
        "unspeakable": "UnspeakableError: no message, because its __str__ raises ValueError",
        "": "",
    }


# --- the worker itself ---


def raise_an_interrupt():
    raise KeyboardInterrupt


def stop_in_the_middle_of_a_message():
    os.write(reports().pipe.fileno(), (1 << 20).to_bytes(8, "big") + b"the rest does not come")
    faulty_kernels.keep_the_lock()


class UntilStuck(Deadline):
    """Ends a worker with a blocked interpreter lock."""

    def silence(self, worker, *, is_stuck):
        return 0.5 if is_stuck else 120.0


def test_a_worker_answers_and_raises_and_is_ended_when_it_blocks_the_lock():
    with worker_session():
        with shared_worker() as worker:
            assert worker.call(os.getpid) == worker.pid != os.getpid()
            with pytest.raises(TuningError, match="KeyboardInterrupt: no message"):  # not the user's Ctrl-C
                worker.call(raise_an_interrupt)
            with pytest.raises(FileNotFoundError):  # not an error of the pipe
                worker.call(os.stat, "/no such file")
            assert worker.call(os.getpid) == worker.pid
        with pytest.raises(WorkerDiedError, match="no sign of life"), shared_worker() as worker:
            worker.call(stop_in_the_middle_of_a_message, deadline=UntilStuck())
    assert not is_running(worker.pid)


def test_no_worker_is_left_behind():
    with worker_session(), shared_worker() as worker:
        children = worker.call(start_a_child), worker.pid
    assert multiprocessing.active_children() == []
    assert wait_for_the_end_of(*children)


def test_a_program_from_standard_input_can_start_a_worker(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    with worker_session(), shared_worker() as worker:
        assert worker.call(os.getpid) == worker.pid


PARENT = """
import os, threading
from ejkernel.ops.autotuner.process.worker import Worker
from tests.ops.faulty_kernels import keep_the_lock

if __name__ == "__main__":
    started = []
    thread = threading.Thread(target=lambda: started.append(Worker()))
    thread.start()
    thread.join()  # whichever thread starts a worker, it lasts
    pid = started[0].call(os.getpid)
    threading.Thread(target=started[0].call, args=(keep_the_lock,), daemon=True).start()
    while not started[0].is_busy:
        os.sched_yield()
    print(pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_worker_ends_with_its_parent_also_when_its_interpreter_s_lock_is_kept(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, str(tmp_path / "parent.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert wait_for_the_end_of(int(done.stdout))


def start_a_worker_with_a_child():
    """Start a worker in this worker, and a process in its child; return their ids."""
    nested.append(Worker())
    return nested[0].pid, nested[0].call(start_a_child)


nested = []


def start_a_child():
    return subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"]).pid


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_the_end_of(*pids):
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        os.sched_yield()
    return not any(map(is_running, pids))


def test_a_worker_ends_with_its_own_workers_and_their_processes():
    worker = Worker()
    pids = worker.call(start_a_worker_with_a_child)
    assert all(map(is_running, pids))
    worker.kill()
    assert wait_for_the_end_of(*pids)
