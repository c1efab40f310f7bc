# SPDX-License-Identifier: Apache-2.0
"""Interrupted bundles: the next attempt reuses the compiled programs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading

import jax
import jax.numpy as jnp
import pytest
from tests import forked
from tests.ops.sample_kernels import told_apart
from tests.ops.sealing import change_object

from ejkernel import compat
from ejkernel.ops.autotuner.compile.bundles import compile_bundle, read_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.trials.candidates import program_digest
from ejkernel.ops.config import _writing
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import ConfigError

pytestmark = pytest.mark.slow

X = jax.ShapeDtypeStruct((8,), jnp.int32)

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from ejkernel import compat
from tests.ops.autotuner import test_programs

target, kills, compiled, own = sys.argv[1], int(sys.argv[2]), [], compat.executables.compiled_to_be_serialized

def counted(lowered):
    compiled.append(lowered.as_text())
    return own(lowered)

def progress(inv, done, total):
    if kills and len(list(Path("bundle").glob("*.facts.json"))) >= kills:
        os.kill(os.getpid(), signal.SIGKILL)

compat.executables.compiled_to_be_serialized = counted
test_programs.attempt(Path("."), target, progress=progress)
print(json.dumps(len(compiled)))
"""


class Sums(Kernel[int, jax.Array]):
    """`x` times `factor`, in five programs and a failing one; the reference is a sixth."""

    factor = 2

    def run(self, x, *, cfg):
        if cfg < 0:
            raise ValueError("it raises")
        return told_apart(x * self.factor, cfg)

    def reference(self, x):
        return sum([x] * self.factor)

    def heuristic_cfg(self, inv):
        return 0

    def config_space(self, inv):
        return [1, 2, -1, 3, 4]


def attempt(folder, target="here", kernel=None, **options):
    inv = Invocation(kernel=kernel or Sums("sums"), args=(X,))
    (call,) = compile_bundle([inv], Target.named(target), folder / "bundle", **options)
    return call


@pytest.fixture
def compiled(monkeypatch):
    """A list of the digests of the programs that this process compiles."""
    found, own = [], compat.executables.compiled_to_be_serialized

    def noted(lowered):
        found.append(program_digest(lowered.as_text()))
        return own(lowered)

    monkeypatch.setattr(compat.executables, "compiled_to_be_serialized", noted)
    return found


def interrupted(folder, count):
    """Interrupt an attempt after some candidates; return the digests of the programs in its folder."""

    def progress(inv, done, total):
        if done == count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(folder, progress=progress)
    for thread in threading.enumerate():
        if thread.name == "ejkernel-compile":  # its program is lost
            thread.join()
    return {facts.name.partition(".")[0] for facts in facts_of(folder)}


def facts_of(folder):
    return sorted((folder / "bundle").glob("*.facts.json"))


def outcomes(call):
    return [(c.outcome.config, c.outcome.status, c.outcome.reason, c.program is not None) for c in call.candidates]


@pytest.mark.parametrize("target", ["here", "tpu_v6e"])
def test_a_killed_bundle_goes_on_and_compiles_nothing_twice(tmp_path, target):
    if target != "here":
        pytest.importorskip("libtpu")
    (tmp_path / "program.py").write_text(PROGRAM)
    assert forked.python(tmp_path, "program.py", target, "2").returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    whole = len(facts_of(tmp_path))
    assert 2 <= whole < 6
    assert not (tmp_path / "bundle" / "manifest.json").exists()
    done = forked.python(tmp_path, "program.py", target, "0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == 6 - whole
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    rows = [*manifest["calls"][0]["candidates"], manifest["calls"][0]["reference"]]
    digests = {row["program"] for row in rows if row.get("program")}
    assert len(digests) == 6
    files = {f"{digest}{end}" for digest in digests for end in (".bin", ".facts.json")}
    assert files | {"manifest.json"} == set(os.listdir(tmp_path / "bundle"))


def test_an_interrupted_bundle_becomes_the_one_that_was_never_interrupted(tmp_path, compiled):
    for count in (1, 3, 5):
        whole = interrupted(tmp_path, count)
        compiled.clear()
        assert len(whole) >= count - 1  # one candidate fails
    call = attempt(tmp_path)
    assert len(compiled) == 6 - len(whole)
    assert not whole & set(compiled)
    assert read_bundle(tmp_path / "bundle") == [call]
    assert outcomes(call) == outcomes(attempt(tmp_path / "another"))
    assert all(candidate.outcome.compile_seconds > 0 for candidate in call.candidates)


def test_a_kernel_that_was_changed_is_compiled_as_it_is_now(tmp_path, compiled):
    interrupted(tmp_path, 4)
    compiled.clear()
    changed = Sums("sums")
    changed.factor = 3
    call = attempt(tmp_path, kernel=changed)
    assert len(compiled) == 6
    x = jnp.arange(8, dtype=jnp.int32)
    assert all((program.load()(x)[0] == 3 * x).all() for _, program in call.programs)
    assert len(os.listdir(tmp_path / "bundle")) == 13  # the earlier programs are gone


def cut_off(facts):
    facts.write_text(facts.read_text()[:-9])


def of_another_compiler(facts):
    change_object(facts, lambda data: data["compilers"].update(jaxlib="0.1.2"))


def without_code(facts):
    (facts.parent / facts.name.replace(".facts.json", ".bin")).unlink()


@pytest.mark.parametrize("damage", [cut_off, of_another_compiler, without_code])
def test_a_program_that_cannot_be_used_again_is_compiled_again(tmp_path, compiled, damage):
    interrupted(tmp_path, 6)
    whole = facts_of(tmp_path)
    damage(whole[0])
    compiled.clear()
    call = attempt(tmp_path)
    assert len(compiled) == 6 - len(whole) + 1
    assert read_bundle(tmp_path / "bundle") == [call]


def test_only_one_process_compiles_into_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_writing, "PATIENCE", 0.05)
    (tmp_path / "bundle").mkdir()
    descriptor = os.open(tmp_path / "bundle", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process has held the lock of this folder"):
            attempt(tmp_path)
    finally:
        os.close(descriptor)


def test_a_finished_bundle_is_not_compiled_again(tmp_path):
    attempt(tmp_path)
    with pytest.raises(ConfigError, match="must be empty, or that of an interrupted bundle"):
        attempt(tmp_path)
