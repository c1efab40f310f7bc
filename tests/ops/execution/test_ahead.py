# SPDX-License-Identifier: Apache-2.0
"""Programs compiled in one process and run in another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops import faulty_kernels
from tests.ops.faulty_kernels import BEST, SHAPE, Fault, Faulty

from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.nodes import Choice
from ejkernel.ops.errors import TuningError
from ejkernel.ops.execution import ahead
from ejkernel.ops.execution.ahead import compile_for, compile_processes, compiler_for
from ejkernel.ops.execution.targets import Target
from ejkernel.ops.execution.tuning import Autotuner
from ejkernel.ops.utils.fingerprint import device_fingerprint

X = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
HERE = Target.named("here")


@pytest.fixture
def processes():
    """Ends the processes that a test compiles in."""
    yield
    for count in (1, 2):
        compile_processes(count).shutdown()
    compile_processes.cache_clear()


def made(run, *args):
    class Plain(Kernel[int, jax.Array]):
        def heuristic_cfg(self, inv):
            return 0

    Plain.run = lambda self, *args, cfg: run(*args)
    inv = Invocation(kernel=Plain("plain"), args=args).abstract()
    return compile_for(inv, Choice(config=0, platform="cpu"), HERE)


def test_a_program_that_was_compiled_is_loaded_and_runs():
    x = np.arange(6, dtype=np.float32)
    program = made(lambda x: (x * 3, x.sum()), x)
    assert (program.status, program.inputs, program.outputs, program.mosaic) == ("ready", 1, 2, False)
    tripled, total = program.load()(x)
    assert tripled.tolist() == (x * 3).tolist()
    assert float(total) == 15.0


def test_a_program_is_for_the_first_device_and_for_another_none_is_compiled():
    program = made(lambda x: x + 1, np.ones(3, np.float32))
    with jax.default_device(jax.devices()[-1]):
        assert compiler_for(device_fingerprint(), 1) is None
        with pytest.raises(TuningError, match=r"first device alone, not on .*; .*CUDA_VISIBLE_DEVICES"):
            program.load()


@pytest.mark.parametrize("offset", [1.0, 2.0])
def test_constants_are_part_of_a_program_and_tell_it_from_others(offset):
    constant = np.arange(1000, dtype=np.float32) + offset
    x = np.ones(1000, np.float32)
    program = made(lambda x: x + jnp.asarray(constant), x)
    assert program.digest != made(lambda x: x + jnp.asarray(constant + 1), x).digest
    assert program.load()(x)[0].tolist() == (x + constant).tolist()


def test_a_program_that_calls_back_is_left_and_is_nobody_s_twin():
    def run(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    program = made(run, np.ones(3, np.float32))
    assert (program.status, program.digest, program.payload) == ("left", "", b"")
    assert "calls back to the host" in program.reason


def test_there_is_no_compiler_without_processes_or_for_a_device_that_nobody_described():
    assert compiler_for(device_fingerprint(), 0) is None
    assert compiler_for("tpu:v9", 2) is None


def test_what_processes_compile_is_what_threads_compile(processes, monkeypatch):
    kernel = faulty_kernels.failing_on_device
    traced, run = set(), Faulty.run

    def watched(self, x, *, cfg):
        traced.add(cfg.kind)
        return run(self, x, cfg=cfg)

    monkeypatch.setattr(Faulty, "run", watched)  # in this process alone
    found = {}
    for count in (1, 0):
        traced.clear()
        data = Autotuner().tune(
            Invocation(kernel=kernel, args=(X,)), kernel, policy=AutotunePolicy(compile_processes=count)
        )
        assert data.config == BEST
        found[count] = {outcome.config: outcome.status for outcome in data.outcomes}, set(traced)
    assert found[0][0] == found[1][0]
    assert {"raise", "nan", "wrong", "terabyte"} <= found[0][1]
    assert not {"raise", "nan", "wrong", "terabyte"} & found[1][1]


def test_a_candidate_that_ends_the_process_that_compiles_it_is_found_out():
    kernel = faulty_kernels.crashing
    policy = AutotunePolicy(isolate=True, compile_processes=1)
    candidates = [Fault("abort while tracing"), Fault("wrong"), BEST]
    data = Autotuner().tune(Invocation(kernel=kernel, args=(X,)), kernel, policy=policy, candidates=candidates)
    assert [outcome.status for outcome in data.outcomes] == ["measured", "crashed", "wrong", "measured"]
    assert data.config == BEST


def test_processes_that_compile_leave_the_devices_alone(processes):
    executor = compile_processes(1)
    assert executor.submit(jax.default_backend).result() == "cpu"
    assert executor.submit(ahead.compat.chosen_device).result() is None
