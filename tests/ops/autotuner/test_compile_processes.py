# SPDX-License-Identifier: Apache-2.0
"""Processes that compile."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from tests.ops.autotuner.fake_workers import FakeWorker, killed
from tests.ops.faulty_kernels import BEST, SHAPE, Fault, Faulty, failing_on_device, plain, spill, spilling

from ejkernel.ops.autotuner.compile import processes
from ejkernel.ops.autotuner.compile.bundles import compile_bundle
from ejkernel.ops.autotuner.compile.processes import CompileProcesses, CompileWorker, compile_processes, compiler_for
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, GivenUpError
from ejkernel.ops.autotuner.process.messages import Returned
from ejkernel.ops.autotuner.process.worker import worker_session
from ejkernel.ops.autotuner.trials.candidates import Program
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.errors import CandidateError, TuningError
from ejkernel.ops.utils.fingerprint import device_fingerprint

pytestmark = pytest.mark.slow

X = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
HERE = Target.named("here")


@pytest.fixture(scope="module", autouse=True)
def _one_process():
    """Keep the process that the tests of this module share."""
    with worker_session():
        yield


def compiled(config, **options):
    inv = Invocation(kernel=plain, args=(X,)).abstract()
    return compile_processes(1).run(work_of(inv, config), **options)


def work_of(inv, config):
    return functools.partial(compile_for, inv, Choice(config=config, platform="cpu"), HERE)


def tune(candidates, kernel=plain):
    policy = AutotunePolicy(compile_processes=1)
    return Autotuner().tune(Invocation(kernel=kernel, args=(X,)), kernel, policy=policy, candidates=candidates)


def platforms_and_caching():
    return jax.config.jax_platforms, jax.config.jax_enable_compilation_cache


TIMEOUT = AdaptiveTimeout(first=600.0, least=600.0)


def statuses(data):
    return {outcome.config: outcome.status for outcome in data.outcomes}


def test_a_program_compiled_by_a_process_runs_here():
    x = jnp.ones(SHAPE)
    program = compiled(BEST)
    assert (program.why_left, program.inputs, program.outputs, program.spilled) == ("", 1, 1, 0)
    assert (program.load()(x)[0] == x).all()


def test_compile_processes_need_a_count_and_a_described_device():
    assert compiler_for(device_fingerprint(), 0, TIMEOUT, lambda: 60.0) is None
    assert compiler_for("tpu:v9", 2, TIMEOUT, lambda: 60.0) is None
    with jax.default_device(jax.devices()[1]):
        assert compiler_for(device_fingerprint(), 1, TIMEOUT, lambda: 60.0) is None


def test_a_bundle_for_an_undescribed_gpu_of_this_machine_is_compiled_by_threads(tmp_path, monkeypatch):
    inv = Invocation(kernel=plain, args=(X,))
    monkeypatch.setattr("ejkernel.ops.autotuner.compile.bundles.compile_processes", None)
    gpu = dataclasses.replace(HERE, fingerprint="gpu:another")
    (call,) = compile_bundle([inv], gpu, tmp_path / "bundle", processes=1)
    assert [str(candidate.outcome.status) for candidate in call.candidates] == ["ready", "ready"]


@pytest.mark.smoke
def test_processes_and_threads_compile_the_same_program(monkeypatch):
    traced, run = set(), Faulty.run

    def watched(self, x, *, cfg):
        traced.add(cfg.kind)
        return run(self, x, cfg=cfg)

    monkeypatch.setattr(Faulty, "run", watched)  # in this process alone
    found = {}
    for count in (1, 0):
        traced.clear()
        inv = Invocation(kernel=failing_on_device, args=(X,))
        data = Autotuner().tune(inv, failing_on_device, policy=AutotunePolicy(compile_processes=count))
        assert data.config == BEST
        # which of the others leads, and is confirmed by its gradient, depends on their times
        found[count] = {c: status for c, status in statuses(data).items() if c.kind != "wrong gradient"}, set(traced)
    assert found[0][0] == found[1][0]
    assert {"raise", "nan", "wrong", "terabyte"} <= found[0][1]
    assert not {"raise", "nan", "wrong", "terabyte"} & found[1][1]


@pytest.mark.filterwarnings("ignore:.* beside the heuristic w:ejkernel.ops.errors.TuningWarning")
def test_a_candidate_that_ends_its_compiling_process_fails_alone():
    data = tune([Fault("abort while tracing", says="LLVM ERROR: no such register\n"), Fault("wrong"), BEST])
    assert list(statuses(data).values()) == ["measured", "failed", "wrong", "measured"]
    assert data.outcomes[1].reason == "the worker was killed by SIGABRT while compiling: LLVM ERROR: no such register"
    assert data.config == BEST


@pytest.mark.filterwarnings("ignore:.* beside the heuristic w:ejkernel.ops.errors.TuningWarning")
def test_a_candidate_that_raises_or_closes_files_there_fails_alone():
    closing = [Fault(kind) for kind in ("close", "close streams", "replace streams")]
    raising = [Fault(kind) for kind in ("interrupt", "quit", "unspeakable")]
    data = tune([*closing, *raising, BEST])
    assert [outcome.status for outcome in data.outcomes] == [
        *["measured"] * 2,
        *["same"] * 2,
        *["failed"] * 3,
        "measured",
    ]
    assert [outcome.reason.partition(":")[0] for outcome in data.outcomes[4:7]] == [
        "KeyboardInterrupt",
        "SystemExit",
        "UnspeakableError",
    ]


def test_a_candidate_that_cannot_be_sent_fails_alone():
    class Local(Faulty):
        pass

    inv = Invocation(kernel=Local("local"), args=(X,)).abstract()
    with pytest.raises(TuningError, match="cannot be sent to a worker process"):
        compile_processes(1).run(work_of(inv, BEST))
    assert compiled(BEST).code


def test_a_candidate_with_callbacks_is_compiled_here():
    compiler = compiler_for(device_fingerprint(), 1, TIMEOUT, lambda: 60.0)
    inv = Invocation(kernel=plain, args=(X,)).abstract()
    assert compiler(inv, Choice(config=Fault("memory"), platform="cpu")) is None


UNGUARDED = """
import jax
import jax.numpy as jnp
from ejkernel.ops import policy_override, tune, autotune

@tune(space={"rows": [1, 2]})
def total(x, *, rows=1):
    return x.reshape(rows, -1).sum()

for policy in ({"compile_processes": 1}, {"isolate": True}):
    with policy_override(**policy):
        try:
            autotune(total, jnp.ones(8))
        except Exception as error:
            print("error", error)
print("the program's work")
"""


def test_a_program_without_a_guard_is_not_run_by_its_workers(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.count("the program's work") == 1
    assert done.stdout.count('the program\'s code below `if __name__ == "__main__":`') == 2
    assert "Traceback" not in done.stderr


# --- which candidate is lost with its process, with processes in memory ---


class FakeProcess(FakeWorker):
    """A compile process in memory."""

    said = ""
    _is_quiet = False
    compile = CompileWorker.compile
    _passed_on = CompileWorker._passed_on

    def _written(self):
        return self.said


PROGRAM = Returned(Program(code=b"code"))


def pool_of(*scripts):
    processes = [FakeProcess(*script) for script in scripts]
    left = iter(processes)
    return CompileProcesses(1, lambda: next(left)), processes


def compile_with(pool, **options):
    return pool.run(work_of(Invocation(kernel=plain, args=(X,)).abstract(), BEST), **options)


def test_a_crash_costs_one_candidate_and_its_output_is_the_reason(capfd):
    pool, (crashed, _) = pool_of([killed()], [PROGRAM])
    crashed.said = f"{REMARKS}LLVM ERROR: no such register\nStack dump:\n"
    with pytest.raises(CandidateError, match=r"killed by SIGABRT while compiling: LLVM ERROR: no such register$"):
        compile_with(pool)
    assert "Stack dump:" in capfd.readouterr().err
    assert compile_with(pool).code == b"code"


def test_an_endless_compilation_is_abandoned():
    pool, (hanging, _) = pool_of([0.5, PROGRAM], [PROGRAM])
    with pytest.raises(GivenUpError, match=r"no sign of life for 0.5 s while compiling \(allowed: 0.3 s\)"):
        compile_with(pool, allowed=0.3)
    assert compile_with(pool).code == b"code"
    assert not hanging.is_alive


def test_a_process_that_dies_while_it_is_idle_is_replaced():
    pool, (dead, living) = pool_of([PROGRAM], [PROGRAM])
    compile_with(pool)
    dead.kill()
    assert compile_with(pool).code == b"code"
    assert living.is_alive


def test_compilations_end_with_their_search(monkeypatch):
    pool, (busy, _) = pool_of([lambda: compiler.close()], [PROGRAM])  # noqa: PLW0108 - made below
    monkeypatch.setattr(processes, "compile_processes", lambda count: pool)
    compiler = compiler_for(device_fingerprint(), 1, TIMEOUT, lambda: 600.0)
    with pytest.raises(CandidateError, match="SIGKILL while compiling"):
        compiler(Invocation(kernel=plain, args=(X,)).abstract(), Choice(config=BEST, platform="cpu"))
    assert (busy.is_alive, compiler._busy) == (False, set())
    assert compile_with(pool).code == b"code"


# --- reports of compilers ---


def test_the_most_that_any_kernel_of_a_program_spills_counts(capfd):
    assert compiled(Fault(says=spill(8) + spill(1892) + spill(0))).spilled == 1892
    assert compiled(BEST).spilled == 0
    assert capfd.readouterr() == ("", "")


REMARKS = """\
I0000 00:00:00.000000 1 compiler.cc:1] starting
W0000 00:00:00.000000 1 compiler.cc:2] slow
ptxas info    : 0 bytes gmem
ptxas warning : a warning
ptxas /tmp/tempfile-vm-1, line 177; info    : Potential out of bound access while accessing symbol '__dynamic_shmem__0'
    of type '.b8' with instruction type '.b32'.
ptxas /tmp/tempfile-vm-1, line 12; warning : a warning

""".replace("\n    of type", " of type")


def test_remarks_of_compilers_are_logged_and_other_lines_are_printed(capfd, caplog):
    with caplog.at_level("DEBUG", "ejkernel.ops.autotuner.compile.processes"):
        compiled(Fault(says=f"{REMARKS}ptxas /tmp/tempfile-vm-1, line 3; error   : syntax\nE0000 an error\nof note"))
    printed = "ptxas /tmp/tempfile-vm-1, line 3; error   : syntax\nE0000 an error\nof note\n"
    assert capfd.readouterr() == ("", printed)
    assert caplog.messages == [f"a compiler wrote: {line}" for line in REMARKS.splitlines() if line]


def spills(count, repeats=1):
    return Fault(repeats=repeats, says=spill(count))


def test_a_spilling_candidate_does_not_run_if_another_spills_little():
    data = tune([spills(1892), spills(20, repeats=2), spills(512, repeats=3)])
    assert list(statuses(data).values()) == ["measured", "pruned", "measured", "pruned"]
    assert data.outcomes[1].reason == "it spills 1892 bytes of registers per thread, much more than others"
    assert [outcome.spilled for outcome in data.outcomes] == [0, 1892, 20, 512]
    assert data.config == spills(20, repeats=2)


def test_a_heuristic_that_spills_is_measured_all_the_same():
    data = tune([spills(900, repeats=3), BEST], spilling)
    assert list(statuses(data).values()) == ["measured", "pruned", "measured"]
    assert data.speedup > 1


@pytest.mark.filterwarnings("ignore:.* beside the heuristic w:ejkernel.ops.errors.TuningWarning")
def test_spilling_candidates_are_measured_if_all_correct_ones_spill():
    data = tune([Fault("wrong", says=spill(0)), spills(900)], spilling)
    assert list(statuses(data).values()) == ["measured", "wrong", "measured"]
    assert data.config == spills(900)


def test_spilling_candidates_from_a_bundle_are_pruned_too(tmp_path):
    inv = Invocation(kernel=plain, args=(X,))
    (call,) = compile_bundle([inv], HERE, tmp_path / "bundle", processes=1)
    assert [candidate.outcome.spilled for candidate in call.candidates] == [0, 0]
    edited = dataclasses.replace(
        call.candidates[1], program=dataclasses.replace(call.candidates[1].program, spilled=900)
    )
    call = dataclasses.replace(call, candidates=(call.candidates[0], edited))
    data = Autotuner().tune(inv, plain, policy=AutotunePolicy(), compiled=call)
    assert list(statuses(data).values()) == ["measured", "pruned"]


# --- the end; the shared process is closed ---


def test_its_processes_leave_the_devices_alone_and_end_with_it():
    assert compiled(BEST).code
    (slot,) = compile_processes(1)._slots
    assert slot.worker.call(platforms_and_caching) == ("cpu", False)
    pid = slot.worker.pid
    compile_processes(1).close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(TuningError, match="were closed"):
        compiled(BEST)
