# SPDX-License-Identifier: Apache-2.0
"""Names of devices and shardings."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel import compat
from ejkernel.ops.utils import fingerprint
from ejkernel.ops.utils.fingerprint import (
    default_device,
    device_fingerprint,
    device_kind,
    get_device_platform,
    has_mosaic_gpu,
    name_of_device,
    platform_fingerprint,
    platform_kind,
    sharding_fingerprint,
)

X = np.ones((8, 4), np.float32)


def fake_device(platform, kind, **more):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


@pytest.mark.parametrize(
    ("name", "kind"), [("cuda", "gpu"), ("rocm", "gpu"), ("gpu", "gpu"), ("TPU", "tpu"), ("cpu", "cpu"), ("npu", "npu")]
)
def test_platforms_have_a_kind(name, kind):
    assert platform_kind(name) == kind


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [
        ("gpu", "NVIDIA H200", "gpu:nvidia_h200"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "gpu:nvidia_a100_sxm4_80gb"),
        ("rocm", "AMD Instinct(TM) MI300X", "gpu:amd_instinct_mi300x"),
        ("tpu", "TPU v5 lite", "tpu:tpu_v5_lite"),
        ("tpu", "TPU v5e", "tpu:tpu_v5_lite"),
        ("tpu", "TPU v5p", "tpu:tpu_v5"),
        ("gpu", "???", "gpu:unknown"),
    ],
)
def test_a_device_is_named_by_backend_and_chip(platform, kind, expected):
    assert device_fingerprint(fake_device(platform, kind)) == expected


def test_a_processor_is_named_by_model_and_cores():
    name = device_fingerprint(jax.devices("cpu")[0])
    assert name == device_fingerprint(jax.devices("cpu")[1])
    assert name.startswith("cpu:")
    assert name.rpartition("_x")[2].isdigit()


X86 = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: {}\nstepping\t: 7\n\nprocessor\t: 1\nmodel\t: 9\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0C\n"


@pytest.mark.parametrize(
    ("info", "name"),
    [
        (X86.format("Intel(R) Xeon(R) Processor @ 2.20GHz"), "intel_xeon_processor_2_20ghz_6_85_7"),
        (X86.format("AMD EPYC"), "amd_epyc_6_85_7"),
        (X86.format("QEMU Virtual CPU version 2.5+"), "qemu_virtual_cpu_version_2_5_6_85_7"),
        (X86.format("Intel(R) Xeon(R) Platinum 8488C"), "intel_xeon_platinum_8488c"),
        (X86.format("AMD EPYC 9R14"), "amd_epyc_9r14"),
        (ARM, "aarch64_41_d0c"),
        ("", "aarch64"),
    ],
)
def test_a_processor_with_a_hidden_model_is_named_by_its_generation(monkeypatch, tmp_path, info, name):
    (tmp_path / "cpuinfo").write_text(info)
    assert named_from(monkeypatch, tmp_path / "cpuinfo").rpartition("_x")[0] == name


def test_the_cores_of_a_system_without_affinity_are_all_of_them(monkeypatch):
    monkeypatch.delattr(fingerprint.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(fingerprint.os, "cpu_count", lambda: 3)
    assert fingerprint.cores() == [0, 1, 2]


def named_from(monkeypatch, cpuinfo):
    monkeypatch.setattr(fingerprint, "Path", lambda name: cpuinfo)
    monkeypatch.setattr(fingerprint.platform, "processor", lambda: "")
    monkeypatch.setattr(fingerprint.platform, "machine", lambda: "aarch64")
    return fingerprint._cpu_name.__wrapped__()


@pytest.mark.parametrize(("kind", "platform"), [("cuda", "triton"), ("tpu", "pallas"), ("cpu", "xla"), ("npu", "npu")])
def test_a_device_has_a_name_for_dispatch(monkeypatch, kind, platform):
    monkeypatch.setattr(fingerprint, "default_device", lambda: fake_device(kind, "chip"))
    assert (device_kind(), get_device_platform()) == (platform_kind(kind), platform)


def test_the_default_device_is_used():
    with jax.default_device(jax.devices()[5]):
        assert default_device() == jax.devices()[5]


def test_the_default_device_may_be_given_by_platform():
    with jax.default_device("cpu"):
        assert default_device() == jax.local_devices(backend="cpu")[0]


def test_a_present_platform_has_its_devices_name():
    assert platform_fingerprint("cpu") == device_fingerprint(jax.devices("cpu")[0])


def test_an_absent_platform_is_unknown():
    assert platform_fingerprint("tpu") == "tpu:unknown"


def lowered_for(*devices, local=()):
    """Return the context of a lowering rule in a program for these devices."""
    backend = types.SimpleNamespace(devices=lambda: devices, local_devices=lambda: local)
    module = types.SimpleNamespace(platforms=("tpu",), axis_context=None, backend=backend)
    return types.SimpleNamespace(module_context=module)


@pytest.mark.parametrize(
    ("fingerprint", "name"),
    [
        ("tpu:tpu_v6_lite", "tpu_v6e"),
        ("tpu:tpu7x", "tpu7x"),
        *((name, name) for name in ("tpu:unknown", "gpu:nvidia_h200", "")),
    ],
)
def test_messages_name_a_tpu_as_a_target(fingerprint, name):
    assert name_of_device(fingerprint) == name


def test_a_program_lowered_for_a_device_of_another_machine_has_that_devices_name():
    v6e = fake_device("tpu", "TPU v6 lite")
    with compat.programs.program_under_way(lowered_for(v6e)):
        assert platform_fingerprint("tpu") == "tpu:tpu_v6_lite"
        assert platform_fingerprint("cpu") == device_fingerprint()
    with compat.programs.program_under_way(lowered_for(v6e, local=[v6e])):  # this process names its devices itself
        assert platform_fingerprint("tpu") == "tpu:unknown"
    with compat.executables.abstract_device("tpu", "TPU v5 lite", 1):
        assert platform_fingerprint("tpu") == "tpu:tpu_v5_lite"


def test_a_platform_beside_the_default_one_has_its_first_devices_name(monkeypatch):
    gpu = fake_device("gpu", "NVIDIA H200")
    here = {"gpu": [gpu], None: jax.devices()}
    monkeypatch.setattr(fingerprint.jax, "local_devices", lambda backend=None: here[backend])
    assert platform_fingerprint("cuda") == "gpu:nvidia_h200"


CAPABILITIES = [("9.0", True), ("10.0", True), ("8.0", False), ("gfx942", False), (None, False)]


@pytest.mark.parametrize(("capability", "expected"), CAPABILITIES)
def test_mosaic_gpu_is_for_hopper_and_later(monkeypatch, capability, expected):
    device = fake_device("gpu", "chip", **({} if capability is None else {"compute_capability": capability}))
    monkeypatch.setattr(fingerprint.jax, "local_devices", lambda backend=None: [device])
    assert has_mosaic_gpu() is expected


def test_an_absent_gpu_is_not_ruled_out():
    assert has_mosaic_gpu() is True


# --- shardings ---


def spread(spec, axis_type=AxisType.Auto):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    return jax.device_put(X, NamedSharding(mesh, spec))


@pytest.mark.parametrize("array", [X, jnp.ones(3), jax.ShapeDtypeStruct((3,), "float32"), 1, None], ids=repr)
def test_an_array_on_one_device_is_unsharded(array):
    assert sharding_fingerprint(array) == "unsharded"


def test_a_replicated_array_is_unsharded():
    assert sharding_fingerprint(spread(PartitionSpec())) == "unsharded"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (PartitionSpec("x"), "mesh[x=4,y=2]:('x',)"),
        (PartitionSpec("x", "y"), "mesh[x=4,y=2]:('x', 'y')"),
        (PartitionSpec(("x", "y")), "mesh[x=4,y=2]:(('x', 'y'),)"),
        (PartitionSpec(None, "y"), "mesh[x=4,y=2]:(None, 'y')"),
    ],
)
def test_a_partition_is_named_by_mesh_and_axes(spec, expected):
    assert sharding_fingerprint(spread(spec)) == expected


def test_axis_types_do_not_matter():
    spec = PartitionSpec("x")
    assert sharding_fingerprint(spread(spec)) == sharding_fingerprint(spread(spec, AxisType.Explicit))


def test_another_sharding_is_named_by_its_devices():
    array = types.SimpleNamespace(sharding=types.SimpleNamespace(device_set=set(range(8))))
    assert sharding_fingerprint(array) == "SimpleNamespace[8]"
