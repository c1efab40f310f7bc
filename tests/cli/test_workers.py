# SPDX-License-Identifier: Apache-2.0
"""The command under failures, e.g. candidates that end their process, and with programs compiled before."""

import re
from pathlib import Path

import pytest
from tests import forked

from ejkernel.cli import main

pytestmark = pytest.mark.slow

KERNELS = """
import os
import jax
import jax.numpy as jnp
from ejkernel.ops import tune


def plain(x):
    return jnp.sin(x)


@tune(space={"rows": [8, 16, 32]}, reference=plain)
def wave(x, *, rows=8):
    if rows == 16:
        jax.debug.callback(os.abort)
    return jnp.sin(x) + (rows == 32)


def with_a_local_kernel():
    @tune(space={"rows": [1, 2]})
    def local(x, *, rows=1):
        return x * rows

    return lambda x: wave(local(x)), (jax.ShapeDtypeStruct((64, 64), jnp.float32),)


def on_a_mesh():
    from jax.sharding import NamedSharding, PartitionSpec as P
    from ejkernel.modules import rms_norm

    mesh = jax.make_mesh((4, 4), ("data", "model"))
    rows = NamedSharding(mesh, P("data", "model"))
    return rms_norm, (jax.ShapeDtypeStruct((8, 16, 64), jnp.float32, sharding=rows),)


def in_shards():
    from jax.sharding import PartitionSpec as P
    from ejkernel.modules import rms_norm

    mesh = jax.make_mesh((16,), ("data",))
    norm = jax.shard_map(rms_norm, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    rows = jax.sharding.NamedSharding(mesh, P("data"))
    weight = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, P()))
    return norm, (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows), weight)


def paged_in_shards():
    from jax.sharding import PartitionSpec as P
    from ejkernel.modules import paged_attention

    mesh = jax.make_mesh((16,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    run = lambda *args: paged_attention(*args, implementation="tpu_ragged")
    specs = (P("model"), P(), P(), P(), P())
    types = [((256, 8, 128), "bfloat16"), ((64, 16, 2, 2, 128), "bfloat16")]
    types += [((5, 9), "int32"), ((6,), "int32"), ((5,), "int32")]
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("model"), check_vma=False)
    return run, tuple(jax.ShapeDtypeStruct(*one) for one in types)


def program():
    return wave, (jax.ShapeDtypeStruct((64, 64), jnp.float32),)
"""


@pytest.fixture
def tune(tmp_path):
    """Run `ejkernel tune` in a folder that has `waves.py`; give its status, output and messages."""
    (tmp_path / "waves.py").write_text(KERNELS)

    def run(*arguments, command="tune"):
        command = ("-m", "ejkernel.cli", command, *arguments)
        done = forked.python(tmp_path, *command, EJKERNEL_CACHE_DIR=str(tmp_path / "cache"))
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.smoke
def test_a_candidate_that_aborts_is_reported_and_the_others_are_measured(tune):
    status, out, err = tune("waves:program", "-v")
    assert status == 0, err
    assert "wave@v0: the worker was killed by SIGABRT while running; a new worker continues" in err
    assert "1 call in " in err
    assert "1 of 3 measured, 1 crashed, 1 wrong" in out
    assert re.search(r"^\*h +rows=8 +measured", out, re.M)
    assert re.search(r"rows=16 +crashed .* the worker was killed by SIGABRT while running", out)
    assert re.search(r"rows=32 +wrong .* differs from the reference", out)


def test_compiled_candidates_are_measured(tune, tmp_path):
    status, out, err = tune("waves:program", "--compile-only", "--output", "bundle")
    assert status == 0, err
    assert "2 ready, 1 left" in out
    assert "2 of 3 candidates compiled for this machine (--target names another)" in err
    status, _, err = tune("--from", "bundle", "--in-process")
    assert status == 1, err
    assert "bundle has no call that can be tuned here" in err
    assert "there is no kernel 'wave@v0' here" in err
    assert "(--import MODULE)" in err
    status, out, err = tune("--from", "bundle", "--import", "waves")
    assert status == 0, err
    assert "1 call in " in err
    assert "1 of 3 measured, 1 crashed, 1 wrong" in out
    assert Path(tmp_path / "cache").exists()


def test_a_kernel_that_cannot_be_sent_to_a_worker_fails_alone(tune):
    status, out, err = tune("waves:with_a_local_kernel")
    assert status == 0, err
    assert "local: not tuned, because its kernel cannot be sent to a worker process" in err
    assert "define it at the top level of a module, or tune with --in-process" in err
    assert "wave" in out


def test_a_program_for_an_absent_mesh_is_tuned_for_its_shards(tune):
    status, out, _ = tune("waves:on_a_mesh", "--mesh-devices", "16", "--dry-run")
    assert status == 0
    assert re.search(r"rms_norm@v0 +f32\[2,4,64\]", out)
    status, _, messages = tune("waves:on_a_mesh", "--dry-run", "--in-process")
    assert status != 0
    assert "Number of devices" in messages
    status, out, messages = tune("waves:on_a_mesh", "--mesh-devices", "16", command="explain")
    assert status == 0, messages
    assert re.search(r"rms_norm@v0 +f32\[2,4,64\]", out)


@pytest.mark.parametrize(("program", "shard"), [("on_a_mesh", "2,4,64"), ("in_shards", "4,64")])
def test_a_mesh_may_be_of_another_machines_devices(tune, program, shard):
    aim = (f"waves:{program}", "--mesh-devices", "16", "--target", "tpu_v6e")
    status, out, messages = tune(*aim, command="explain")
    assert status == 0, messages
    assert re.search(rf"rms_norm@v0 +f32\[{shard}\]", out)
    assert re.search(r"^  key +\w+ on tpu:tpu_v6_lite$", out, re.M)
    for how in ("--compile-only", "--estimate"):
        status, out, messages = tune(*aim, how, "--dry-run")
        assert status == 0, messages
        assert re.search(rf"rms_norm +f32\[{shard}\].*: \d+ candidates", out)


def test_a_kernel_that_asks_for_the_chip_is_lowered_for_the_target_in_a_mesh(tune):
    aim = ("waves:paged_in_shards", "--mesh-devices", "16", "--target", "tpu_v6e")
    status, out, messages = tune(*aim, command="explain")
    assert status == 0, messages
    assert re.search(r"^  => implementation=tpu_ragged ", out, re.M)


@pytest.mark.parametrize(
    "command", [("tune",), ("explain",), ("tune", "--compile-only"), ("tune", "--estimate", "--target", "tpu_v6e")]
)
def test_mesh_applies_to_lowered_programs_only(capsys, command):
    source = ("--shapes", __file__) if len(command) > 1 else ("--missed",)
    assert main([*command, *source, "--mesh-devices", "16"]) == 2
    assert "--mesh-devices requires MODULE:FUNCTION" in capsys.readouterr().err
