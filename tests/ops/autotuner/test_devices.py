# SPDX-License-Identifier: Apache-2.0
"""Calls spread over devices: two tests start workers, each on the same CPU; the others use workers in memory."""

from __future__ import annotations

import os
import threading

import jax
import jax.numpy as jnp
import pytest
from tests.ops.autotuner.fake_workers import FakeWorker
from tests.ops.faulty_kernels import BEST, SHAPE, plain

from ejkernel.ops.autotuner.process import devices
from ejkernel.ops.autotuner.process.devices import spread
from ejkernel.ops.autotuner.process.supervisor import WorkerDiedError
from ejkernel.ops.autotuner.process.watch import Cancellation, Instruction
from ejkernel.ops.autotuner.process.worker import (
    shared_worker,
    this_slot,
)
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import TuningError, TuningWarning
from ejkernel.ops.execution.offline import tune_together
from ejkernel.ops.utils.fingerprint import device_fingerprint


def ask(function, *args, **options):
    """Have this thread's worker call a function."""
    with shared_worker() as worker:
        return worker.call(function, *args, **options)


def pid_and_gpu():
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def in_memory(monkeypatch):
    """Use workers in memory, and return them."""
    started = []

    def make(environ):
        started.append(FakeWorker(environ=environ))
        return started[-1]

    monkeypatch.setattr(devices, "Worker", make)
    return started


@pytest.fixture
def ctrl_c(monkeypatch):
    """Have Ctrl-C come as soon as work has begun, `times` times."""
    begun, look = threading.Event(), devices._wait_for

    def come(times):
        left = [KeyboardInterrupt] * times

        def look_at(members):
            if left:
                begun.wait(60)
                raise left.pop()
            look(members)

        monkeypatch.setattr(devices, "_wait_for", look_at)
        return begun

    return come


@pytest.mark.slow
def test_each_device_has_a_worker_that_sees_only_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    together = threading.Barrier(2)  # so that no worker does it all

    def work(item):
        found = ask(pid_and_gpu)
        if item < 2:
            together.wait(60)
        return found

    found = spread(work, range(4), devices=2, fingerprint=device_fingerprint())
    assert len(found) == 4
    assert len(set(found)) == 2
    assert {gpu for _, gpu in found} == {"5", "GPU-7"}


def test_a_failure_is_a_result_and_the_other_tasks_are_done(in_memory):
    done = spread(lambda item: 6 // item, [0, 1, 2], devices=1, fingerprint=device_fingerprint())
    assert isinstance(done[0], ZeroDivisionError)
    assert done[1:] == [6, 3]


def test_missing_devices_are_a_warning_and_the_others_do_the_work(monkeypatch, in_memory):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = {"0": "rare", "1": "common"}
    monkeypatch.setattr(devices, "device_fingerprint", os.getpid)
    monkeypatch.setattr(FakeWorker, "call", lambda worker, *_: names[worker.environ["CUDA_VISIBLE_DEVICES"]])
    with pytest.warns(TuningWarning, match="1 of 2 devices are not usable: found common, not rare"):
        assert spread(ask, [os.getpid] * 3, devices=2, fingerprint="rare") == ["rare"] * 3


def test_without_any_device_nothing_is_done(in_memory):
    with pytest.raises(TuningError, match=r"no device gpu:abacus to measure on: found cpu:.*, not gpu:abacus"):
        spread(ask, [os.getpid], devices=1, fingerprint="gpu:abacus")


def ask_until(awaited, begun, started):
    """Ask a worker that answers after a certain instruction."""
    worker = started[-1]

    def wait():
        begun.set()
        if awaited not in worker.instructions:
            worker.script.append(wait)

    worker.script.append(wait)
    return ask(os.getpid, cancellation=Cancellation(within=this_slot().cancellation))


def test_ctrl_c_asks_for_the_end_and_begins_nothing_new(ctrl_c, in_memory):
    taken, results, begun = [], [], ctrl_c(1)

    def work(item):
        taken.append(item)
        results.append(ask_until(Instruction.END, begun, in_memory))

    with pytest.raises(KeyboardInterrupt):
        spread(work, range(9), devices=1, fingerprint=device_fingerprint())
    assert (taken, results) == ([0], [os.getpid()])


def test_a_second_ctrl_c_ends_the_workers(ctrl_c, in_memory):
    errors, ended, begun = [], threading.Event(), ctrl_c(2)

    def work(item):
        try:
            ask_until(None, begun, in_memory)
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        spread(work, [0], devices=1, fingerprint=device_fingerprint())
    assert ended.wait(60)
    assert isinstance(errors[0], (WorkerDiedError, KeyboardInterrupt))


@pytest.mark.slow
def test_calls_are_tuned_side_by_side():
    chain = ConfigSelectorChain(ConfigCache(), policy=AutotunePolicy(isolate=True, devices=2))
    calls = [Invocation(kernel=plain, args=(jax.ShapeDtypeStruct((2 * SHAPE[0],) * 2, jnp.float32),)).abstract()]
    calls.append(Invocation(kernel=plain, args=(jax.ShapeDtypeStruct(SHAPE, jnp.float32),)).abstract())
    sets, shown = [[SharedCall(inv=inv)] for inv in calls], []
    result = tune_together(chain, sets, lambda inv, done, total: shown.append((inv.key, done, total)))
    assert [entry.cfg for entry in result.entries] == [BEST, BEST]
    assert [data.inv.key for data in result.searches] == [inv.key for inv in calls]
    assert {(inv.key, 2, 2) for inv in calls} <= set(shown)
    assert len(chain.cache) == 2
