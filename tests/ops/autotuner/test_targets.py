# SPDX-License-Identifier: Apache-2.0
"""Devices known only by description, and programs compiled for them on other machines."""

from __future__ import annotations

import importlib.util
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ejkernel.modules import flash_attention, rms_norm
from ejkernel.ops.autotuner.compile import targets
from ejkernel.ops.autotuner.compile.bundles import compile_bundle
from ejkernel.ops.autotuner.compile.targets import Target, compile_for, target_names
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.errors import ConfigError, TuningError, UnsupportedError
from ejkernel.ops.execution.discovery import discover_for
from ejkernel.ops.utils.fingerprint import device_fingerprint, platform_fingerprint

HAS_PLUGIN = any(
    importlib.util.find_spec(f"jax_plugins.xla_{name}") if importlib.util.find_spec("jax_plugins") else None
    for name in ("cuda12", "cuda13")
)
X = jax.ShapeDtypeStruct((128, 128), jnp.float32)


class OnGpu(Kernel[str, jax.Array]):
    """`x + x`, as Pallas has it for Hopper, and as XLA has it; and a product, which XLA tunes on the device."""

    def run(self, x, *, cfg):
        if cfg == "xla":
            return x + x
        if cfg == "product":
            return x @ x
        import jax.experimental.pallas as pl
        import jax.experimental.pallas.mosaic_gpu as plgpu

        def body(source, target):
            rows = pl.ds(jax.lax.axis_index("i") * 64, 64)
            target[rows] = source[rows] + source[rows]

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(2,), grid_names=("i",))(x)

    def heuristic_cfg(self, inv):
        return "xla"

    def config_space(self, inv):
        return ["mosaic", "product"]


CALL = Invocation(kernel=OnGpu("on_gpu"), args=(X,))


def test_the_targets_are_named():
    assert "nvidia_h200" in target_names()
    assert target_names() == sorted(target_names())


@pytest.mark.parametrize("name", ["nvidia_h2000", "", "../nvidia_h200", "gpu:nvidia_h200"])
def test_an_unknown_target_is_an_error_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=rf"target must be one of here, .*nvidia_h200.*; got {re.escape(repr(name))}"):
        Target.named(name)


@pytest.mark.parametrize(("name", "meant"), [("tpu_v7", "tpu7x"), ("v6", "tpu_v6e"), ("h200", "nvidia_h200")])
def test_the_suggested_target_has_the_number_of_the_unknown_one(name, meant):
    with pytest.raises(ConfigError, match=f"got '{name}'; did you mean '{meant}'"):
        Target.named(name)


def test_here_is_this_process_s_device():
    here = Target.named("here")
    assert here == Target("here", device_fingerprint())
    assert here.platform == "cpu"
    assert here.placed(X).sharding is None


def test_a_target_is_called_as_keys_call_the_device():
    h200 = Target.named("nvidia_h200")
    assert (h200.fingerprint, h200.platform) == ("gpu:nvidia_h200", "gpu")


@pytest.mark.parametrize("name", target_names())
def test_a_target_is_found_by_its_fingerprint(name):
    assert Target.of(Target.named(name).fingerprint) == Target.named(name)


def test_for_a_processor_any_process_of_this_machine_compiles():
    assert Target.of(device_fingerprint()) == Target.named("here")


def test_compiling_needs_a_described_device():
    assert Target.of("gpu:abacus") is None


@pytest.mark.skipif(HAS_PLUGIN, reason="JAX's CUDA plugin is here")
def test_compiling_for_a_gpu_without_the_plugin_names_the_package_to_install(tmp_path):
    with pytest.raises(ConfigError, match=rf"pip install --no-deps jax-cuda13-plugin=={re.escape(jax.__version__)}"):
        compile_bundle([CALL], Target.named("nvidia_h200"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("processes", [0, 1])
def test_compiling_for_a_tpu_without_libtpu_names_the_extra_and_changes_no_variable(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=r"libtpu, but no TPU: pip install 'jax\[tpu\]=="):
        compile_bundle([CALL], Target.named("tpu_v5e"), tmp_path / "bundle", processes=processes)
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", [name for name in target_names() if name.startswith("tpu")])
def test_the_target_file_of_a_tpu_has_what_compiling_and_estimating_need(name):
    target = Target.named(name)
    assert target.platform == "tpu"
    assert re.fullmatch(r"[a-z0-9]+:(\d+x)+\d+", target.property_named("topology"))
    assert min(map(target.number_named, ("core_count", "bfloat16_tflops", "memory_bandwidth"))) > 0
    assert target.number_named("clock_rate_ghz") or target.property_named("not_simulated")


def test_a_program_traced_for_a_target_has_its_fingerprint_in_its_calls():
    with Target.named("tpu_v6e").entered():
        assert platform_fingerprint("tpu") == "tpu:tpu_v6_lite"
        assert platform_fingerprint("cpu") == device_fingerprint()
    assert platform_fingerprint("tpu") == "tpu:unknown"


def test_a_call_that_the_target_does_not_run_has_the_reason_there_not_here():
    like = jax.ShapeDtypeStruct((1, 128, 1, 64), "float16")
    attend = jax.jit(lambda q: flash_attention(q, q, q, implementation="pallas_tpu"))
    with (
        Target.named("tpu_v6e").entered(),
        pytest.raises(UnsupportedError, match=r"^flash_attention: query has dtype float16"),
    ):
        discover_for(attend, (like,), {}, platform="tpu")


@pytest.mark.parametrize("target", ["tpu_v6e", "nvidia_h200"])
def test_a_program_with_a_mesh_of_its_own_is_traced_for_a_target(target):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    norm = jax.shard_map(rms_norm, mesh=mesh, in_specs=(rows, jax.sharding.PartitionSpec()), out_specs=rows)
    with Target.named(target).entered():
        platform = Target.named(target).platform
        types = jax.ShapeDtypeStruct((8, 256), "bfloat16"), jax.ShapeDtypeStruct((256,), "bfloat16")
        (call,) = discover_for(norm, types, {}, platform=platform)
    assert call.platform == platform


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin")
def test_programs_are_compiled_for_an_absent_gpu(tmp_path):
    (call,) = compile_bundle([CALL], Target.named("nvidia_h200"), tmp_path / "bundle")
    statuses = {compiled.outcome.config: compiled.outcome for compiled in call.candidates}
    assert {config: outcome.status for config, outcome in statuses.items()} == {
        "xla": "ready",
        "mosaic": "ready",
        "product": "left",
    }
    assert statuses["product"].reason.startswith("XLA tunes some of its operations on the device")
    programs = dict(call.programs)
    assert {config: (p.inputs, p.outputs, p.mosaic) for config, p in programs.items()} == {
        "xla": (1, 1, False),
        "mosaic": (1, 1, True),
    }
    assert b"ELF" in programs["mosaic"].code.read()
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())["target"] == "gpu:nvidia_h200"


class Sorted(Kernel[int, jax.Array]):
    """Compiles to machine code with private functions."""

    def run(self, x, *, cfg):
        return jnp.sort(jnp.sin(x), axis=0) + cfg

    def heuristic_cfg(self, inv):
        return 1


@pytest.fixture
def stored_by_jax(tmp_path):
    """Turn JAX's persistent compilation cache on for every program."""
    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    compilation_cache.reset_cache()
    for name, value in options.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_a_program_for_another_process_does_not_come_from_the_compilation_cache_of_jax(stored_by_jax):
    inv = Invocation(kernel=Sorted("sorted"), args=(X,))
    choice, here, x = Choice(config=1), Target.named("here"), np.ones(X.shape, np.float32)
    for _ in range(2):
        lowered = jax.jit(inv.node.flat(choice)).lower(X)
        np.testing.assert_allclose(lowered.compile()(x)[0], np.sin(x) + 1, rtol=1e-6)  # the program itself is stored
        count = len(list(stored_by_jax.iterdir()))
        program = targets.compile_for(inv, choice, here)
        assert len(list(stored_by_jax.iterdir())) == count > 0
        np.testing.assert_allclose(program.load()(x)[0], np.sin(x) + 1, rtol=1e-6)


# --- programs compiled in one process and run in another ---


HERE = Target.named("here")


def made(run, *args):
    class Plain(Kernel[int, jax.Array]):
        def heuristic_cfg(self, inv):
            return 0

    Plain.run = lambda self, *args, cfg: run(*args)
    inv = Invocation(kernel=Plain("plain"), args=args).abstract()
    return compile_for(inv, Choice(config=0, platform="cpu"), HERE)


def test_a_compiled_program_is_loaded_and_runs():
    x = np.arange(6, dtype=np.float32)
    program = made(lambda x: (x * 3, x.sum()), x)
    assert (program.why_left, program.inputs, program.outputs, program.mosaic) == ("", 1, 2, False)
    tripled, total = program.load()(x)
    assert tripled.tolist() == (x * 3).tolist()
    assert float(total) == 15.0


def test_a_program_is_for_the_first_device():
    program = made(lambda x: x + 1, np.ones(3, np.float32))
    with (
        jax.default_device(jax.devices()[-1]),
        pytest.raises(TuningError, match=r"only on the first device, not on .*; .*CUDA_VISIBLE_DEVICES"),
    ):
        program.load()


@pytest.mark.parametrize("offset", [1.0, 2.0])
def test_programs_with_different_constants_differ(offset):
    constant = np.arange(1000, dtype=np.float32) + offset
    x = np.ones(1000, np.float32)
    program = made(lambda x: x + jnp.asarray(constant), x)
    assert program.digest != made(lambda x: x + jnp.asarray(constant + 1), x).digest
    assert program.load()(x)[0].tolist() == (x + constant).tolist()


def test_a_program_with_callbacks_is_left_and_has_no_twin():
    def run(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    program = made(run, np.ones(3, np.float32))
    assert (program.digest, program.code) == ("", None)
    assert "calls back into the process" in program.why_left


def test_a_compiler_that_another_process_loads_is_only_looked_for(monkeypatch):
    target = Target.named("tpu_v5e")
    monkeypatch.setattr(Target, "placed", lambda *_: pytest.fail("the compiler was loaded"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    target.check(loads_compiler=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        target.check(loads_compiler=False)
