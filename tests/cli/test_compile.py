# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune` across processes: bundles, interruptions, and the output of programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from tests import forked

from ejkernel.ops.autotuner.store.measurements import MeasurementStore

pytestmark = pytest.mark.slow

PROGRAM = r'''
import dataclasses
import os
import signal
import threading
import warnings
import jax
import jax.numpy as jnp
from ejkernel.ops import Kernel

interrupted = []
print("imported")


@dataclasses.dataclass(frozen=True)
class Config:
    repeats: int = 2


class Noisy(Kernel[Config, jax.Array]):
    """Adds 1, after a loop of `repeats`; integers have no gradient, so only the forward is compiled."""

    def run(self, x, *, cfg):
        if os.environ.get("COMPILING_IS_FORBIDDEN"):
            raise RuntimeError("it is compiled here")
        print(f"tracing {cfg}\n", end="")  # at once: candidates are traced side by side
        warnings.warn(f"a warning of {cfg}", UserWarning)
        if cfg.repeats < 0:
            raise ValueError("it fails")
        # so much slower with repeats that no load of the machine hides it
        return jax.lax.fori_loop(0, 20 * cfg.repeats, lambda _, x: x + (jnp.sort(x) > 10**6).astype(x.dtype), x) + 1

    def reference(self, x):
        if os.environ.get("COMPILING_IS_FORBIDDEN"):
            raise RuntimeError("the reference is compiled here")
        return x + 1

    def heuristic_cfg(self, inv):
        return Config(20)

    def config_space(self, inv):
        return [Config(0), Config(-1)]


class Slow(Noisy):
    """When its second candidate is run, Ctrl-C comes."""

    def run(self, x, *, cfg):
        def callback(x):
            if cfg.repeats == 1 and os.environ.get("INTERRUPTED") and not interrupted:
                interrupted.append(True)
                os.kill({"parent": os.getppid(), "self": os.getpid()}[os.environ["INTERRUPTED"]], signal.SIGINT)
                threading.Event().wait(1)  # until the main thread, or the parent, has handled it
            return x + 1

        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def heuristic_cfg(self, inv):
        return Config(4)

    def config_space(self, inv):
        return [Config(1), *(Config(n) for n in range(100, 110))]


noisy, slow = Noisy("noisy"), Slow("slow")
X = jax.ShapeDtypeStruct((256,), jnp.int32)


def step():
    return noisy, (X,)


def long():
    return slow, (X,)
'''


# A shell's background jobs, e.g. these tests, ignore Ctrl-C.
COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("ejkernel.cli", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the program."""
    (tmp_path / "prog.py").write_text(PROGRAM)
    return tmp_path


def start(folder, *arguments, in_session=False, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL")}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=folder,
        env=clean | {"JAX_PLATFORMS": "cpu", "EJKERNEL_CACHE_DIR": str(folder / "cache")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=in_session,
        text=True,
    )


def run(folder, *arguments, **environment):
    """Run the command; only Ctrl-C needs a process of `start`."""
    environment = {"EJKERNEL_CACHE_DIR": str(folder / "cache")} | environment
    done = forked.python(folder, "-m", "ejkernel.cli", *arguments, **environment)
    return done.returncode, done.stdout, done.stderr


COMPILE = ("tune", "prog:step", "--compile-only", "--target", "here", "--output", "bundle")


def test_a_second_process_measures_a_bundle_without_compiling(folder):
    status, out, err = run(folder, *COMPILE, "--compile-processes", "1", "-v")
    assert status == 0, err
    assert re.search(r"noisy@v0 +repeats=0 +ready +\d+\.\d s", out)
    assert "2 ready, 1 failed" in out
    assert "tracing Config(repeats=0)\n" in err
    assert "noisy@v0: 1 x ValueError: it fails" in out
    assert "3 candidates" in err
    assert "ejkernel tune --from bundle --import prog" in err
    arguments = ("tune", "--from", "bundle", "--import", "prog", "--json")
    status, out, err = run(folder, *arguments, COMPILING_IS_FORBIDDEN="1")
    assert status == 0, err
    assert "bundle: 1 call, 0 not usable here" in err
    (entry,) = json.loads(out)["entries"]
    assert entry["config"] == {"repeats": 0}
    assert entry["measured"]["checked"] == ["outputs"]
    (failure,) = entry["measured"]["failures"]
    assert failure["reason"] == "ValueError: it fails"
    status, out, _ = run(folder, "show")
    assert "repeats=0" in out
    status, _, err = run(folder, *COMPILE, "--in-process")
    assert status == 1
    assert "folder must be empty" in err
    status, _, err = run(folder, "tune", "--from", "bundle", "--in-process")
    assert status == 1
    assert "'prog.Config'" in err
    assert "--import" in err


def test_several_devices_on_a_cpu_are_an_error_with_the_reason(folder):
    status, out, err = run(folder, "tune", "prog:step", "--devices", "2")
    assert (status, out) == (1, "")
    assert "--devices 2 requires GPUs, got cpu:" in err
    assert not (folder / "cache").exists() or not list((folder / "cache").rglob("*.json"))


@pytest.mark.parametrize(
    "mode",
    [("--compile-processes", "1"), ("--in-process",)],
    ids=["in a worker and its compilers", "in this process"],
)
def test_output_and_warnings_of_a_program_go_to_stderr(folder, mode):
    status, out, err = run(folder, "tune", "prog:step", "--json", *mode)
    assert status == 0, err
    assert json.loads(out)["entries"][0]["config"] == {"repeats": 0}
    assert "imported\n" in err
    assert "tracing Config(repeats=0)" in err
    assert "ejkernel: warning: a warning of Config(repeats=0)" in err


CTRL_C = """
import os, signal, sys
if "--multiprocessing-fork" in sys.orig_argv:
    os.killpg(0, signal.SIGINT)
"""


def test_ctrl_c_while_the_worker_starts_prints_no_traceback(folder):
    (folder / "sitecustomize.py").write_text(CTRL_C)  # as a terminal sends it: to the worker, too
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    process = start(folder, "tune", "prog:step", in_session=True, PYTHONPATH=path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert (out, err.strip()) == (
        "",
        "ejkernel: stopped; finished searches are saved, run the command again to continue",
    )


def logged(folder):
    """Return how far the only search came, and whether it was interrupted."""
    store = MeasurementStore(folder / "cache")
    (search,) = store.searches()
    return search.progress, search.interrupted


def saved(folder):
    (path,) = (folder / "cache").rglob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("mode", ["in a worker", "in this process"])
def test_ctrl_c_saves_the_best_so_far_and_the_next_search_continues_from_it(folder, mode):
    in_process = mode == "in this process"
    arguments = ("tune", "prog:long", *(("--in-process",) if in_process else ()))
    process = start(folder, *arguments, INTERRUPTED="self" if in_process else "parent")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "stopped; finished searches are saved, run the command again to continue" in err
    progress, interrupted = logged(folder)
    assert interrupted
    assert (progress.state, progress.candidates) == ("partial", 12)
    assert progress.done < 12
    assert list((folder / "cache").rglob("*.json")) == []  # nothing was confirmed
    status, _, err = run(folder, "tune", "prog:long", "--in-process")
    assert status == 0, err
    assert "already tuned" not in err
    assert "1 call in " in err
    search = saved(folder)["measured"]["search"]
    assert (search["done"], search["candidates"]) == (12, 12)
    assert search["state"] in ("complete", "undecided")  # a busy machine may be too noisy to tell


def test_ctrl_c_while_the_program_is_still_looked_at_ends_the_command_at_once(folder):
    endless = "import sys, threading\nprint('imported', file=sys.stderr, flush=True)\nthreading.Event().wait(600)\n"
    (folder / "prog.py").write_text(endless)
    process = start(folder, "tune", "prog:step")
    assert process.stderr.readline() == "imported\n"
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("tune", "prog:step", "--compile-only"), 2, "--compile-only needs --output, a folder"),
        (("tune", "prog:step", "--output", "x"), 2, "--target and --output require --compile-only"),
        (
            ("tune", "--from", "x", "--compile-only", "--output", "y"),
            2,
            "--compile-only needs either MODULE:FUNCTION or --shapes",
        ),
        ((*COMPILE[:4], "abacus", *COMPILE[5:]), 1, "target must be one of here, "),
        ((*COMPILE, "--compile-processes", "-1"), 2, "-1 is not in the range x>=0"),
        ((*COMPILE, "--devices", "2"), 2, "--devices cannot be used with --compile-only"),
        (("tune", "prog:step", "--in-process", "--devices", "2"), 2, "--devices cannot be used with --in-process"),
        ((*COMPILE, "--json"), 2, "--json cannot be used with --compile-only"),
        (("tune", "--from", "nothing"), 1, "there is no folder nothing; pass the folder of a bundle"),
    ],
)
def test_wrong_usage_is_a_clear_error(folder, monkeypatch, capsys, arguments, status, message):
    from ejkernel.cli import main

    monkeypatch.chdir(folder)
    arguments = [*arguments, "--in-process"] if "--from" in arguments else list(arguments)
    assert main(arguments) == status
    assert message in capsys.readouterr().err
