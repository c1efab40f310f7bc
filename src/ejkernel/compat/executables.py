# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: for this device or another machine's, carried between processes, and their device times."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.compat.settings import config

_SCOPE = re.compile(r'"scoped_memory_configs":\[.*?"offset":"(\d+)"')
_USED = re.compile(r'"used_scoped_memory_configs":\[.*?"size":"(\d+)"')


def abstract_device(platform: str, device_kind: str, num_cores: int) -> Any:
    """Return a context in which Pallas lowers for this kind of device."""
    device = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform=platform)
    # Without axes: a program may set another mesh.
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def give_to_meshes(platform: str, device_kind: str, num_cores: int) -> None:
    """Let Pallas lower for this kind of device within any new mesh, too: in a process that only traces programs."""
    device = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform=platform)
    mesh: Any = jax.sharding.Mesh
    of_mesh: Any = mesh.abstract_mesh.func

    def abstract_mesh(self: jax.sharding.Mesh) -> jax.sharding.AbstractMesh:
        found: jax.sharding.AbstractMesh = of_mesh(self)
        return found if found.empty else found.update(abstract_device=device)

    mesh.abstract_mesh = functools.cached_property(abstract_mesh)
    mesh.abstract_mesh.__set_name__(mesh, "abstract_mesh")


def gpu_topology_sharding(description: str) -> Any:
    """Return the sharding of arrays on one GPU given by its description (`GpuTargetConfigProto` as text)."""
    from jax._src import xla_bridge
    from jax.experimental import topologies

    # a process that has not used a device yet has no registered compilers
    xla_bridge._discover_and_register_pjrt_plugins()
    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("target",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def tpu_topology_sharding(topology: str) -> Any:
    """Return the sharding of arrays on the first TPU of a topology, e.g. `v6e:2x2`."""
    from jax.experimental import topologies

    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return jax.sharding.SingleDeviceSharding(found.devices[0])


def vector_memory(text: str) -> list[int]:
    """Return the bytes of vector memory that each kernel takes, from the text of a program compiled for a TPU."""
    found = []
    for part in text.split('custom_call_target="tpu_custom_call"')[1:]:
        # XLA may keep other arrays below the kernel's scope; the used bytes count from 0
        sizes = _SCOPE.search(part), _USED.search(part)
        if sizes[0] is not None and sizes[1] is not None:
            found.append(int(sizes[1][1]) - int(sizes[0][1]))
    return found


def compiled_for_one_run(lowered: Any, platform: str) -> Any:
    """Compile quickly rather than well: without XLA's autotuning on GPUs."""
    if platform == "gpu":
        with contextlib.suppress(Exception):  # e.g. a version without this option; the next line reports other errors
            return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    return lowered.compile()


def compiled_to_be_checked(lowered: Any, platform: str) -> Any:
    """Compile a small program that runs once, without optimisation on CPUs, where that takes most of the time."""
    if platform == "cpu":
        with contextlib.suppress(Exception):  # as above
            return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return compiled_for_one_run(lowered, platform)


def compiled_to_be_serialized(lowered: Any) -> Any:
    """Compile without JAX's persistent compilation cache, whether or not this process uses it.

    On CPUs a program from that cache cannot be serialized again: the bytes lack its functions.
    """
    with _past_the_cache():
        return lowered.compile()


class _PastTheCache(threading.local):
    """Whether this thread compiles without the persistent compilation cache."""

    is_on = False


_past = _PastTheCache()
_wrapping = threading.Lock()


@contextlib.contextmanager
def _past_the_cache() -> Iterator[None]:
    """Compile without the persistent compilation cache in this thread, for the `with` block."""
    from jax._src import compilation_cache

    with _wrapping:
        own = compilation_cache.is_cache_used
        # JAX reads its option only once, and for all threads; so ask this thread first, from now on.
        if not hasattr(own, "asks_thread"):

            def is_cache_used(backend: Any) -> bool:
                return not _past.is_on and own(backend)

            is_cache_used.asks_thread = True  # type: ignore[attr-defined]
            compilation_cache.is_cache_used = is_cache_used
    before, _past.is_on = _past.is_on, True
    try:
        yield
    finally:
        _past.is_on = before


def serialized(compiled: Any) -> bytes:
    """Return a program from `compiled_to_be_serialized` as bytes, for `loaded` in a process with the same JAX."""
    from jax.experimental.serialize_executable import serialize

    payload, _, _ = serialize(compiled)
    return bytes(payload)


def loaded(payload: bytes, *, inputs: int, outputs: int) -> Any:
    """Return the program of flat arrays from the bytes of `serialized`, on the default device.

    The bytes are machine code and run as they are: load only your own.
    """
    from jax.experimental.serialize_executable import deserialize_and_load

    in_tree = jax.tree.structure(((0,) * inputs, {}))
    out_tree = jax.tree.structure((0,) * outputs)
    device = config.jax_default_device
    devices = [device] if isinstance(device, jax.Device) else jax.local_devices(backend=device)[:1]
    return deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)


@functools.cache
def load_mosaic_gpu_runtime() -> None:
    """Load the Mosaic GPU runtime into this process, as programs compiled in another process require."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    def double(source: Any, target: Any) -> None:
        target[...] = source[...] + source[...]

    ones = jnp.ones((128,), jnp.float32)
    shape = jax.ShapeDtypeStruct(ones.shape, ones.dtype)
    jax.block_until_ready(plgpu.kernel(double, out_type=shape, grid=(1,), grid_names=("x",))(ones))


def cupti_seconds(work: Callable[[], Any]) -> float | None:
    """Run `work` and return the total time of its GPU kernels in seconds.

    Returns `None` without CUPTI (no NVIDIA GPU, or another profiler is attached) and if no kernel ran. CUPTI stays
    attached, because attaching takes ten milliseconds; `detach_cupti` releases it.
    """
    extension = _cupti()
    try:
        if extension is None:
            return None
        extension._cupti_init()
    except RuntimeError:
        return None
    try:
        jax.block_until_ready(work())
    finally:
        timings = extension._cupti_get_timings(False)  # milliseconds by kernel
    return sum(milliseconds for _, milliseconds in timings) * 1e-3 if timings else None


def detach_cupti() -> None:
    """Detach CUPTI, to which `cupti_seconds` stays attached, so that other profilers can use it.

    Does nothing without CUPTI, or while another profiler is attached.
    """
    extension = _cupti()
    if extension is not None:
        with contextlib.suppress(RuntimeError):  # another profiler is attached
            extension._cupti_init()
            extension._cupti_get_timings(True)


def _cupti() -> Any:
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    extension = vars(mosaic_gpu).get("_mosaic_gpu_ext")
    return extension if hasattr(extension, "_cupti_get_timings") else None


def profiled_planes(work: Callable[[], Any]) -> list[Any]:
    """Run `work` under the profiler and return the planes of its trace, each with a `name` and `lines` of `events`.

    Raises:
        RuntimeError: The profiler is not available, e.g. because another trace is running.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # the device's own events are enough
    with tempfile.TemporaryDirectory(prefix="ejkernel-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(work())
        return [
            plane
            for file in sorted(Path(folder).rglob("*.xplane.pb"))
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        ]
