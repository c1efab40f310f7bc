# SPDX-License-Identifier: Apache-2.0
"""Names of devices and shardings, equal on all machines with the same hardware."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax

from ejkernel import compat

_KINDS = {"gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu", "cpu": "cpu"}
_DISPATCH = {"gpu": "triton", "tpu": "pallas", "cpu": "xla"}
# JAX knows each of these chips by two names, depending on the version of libtpu.
_SAME_CHIP = {"tpu_v5e": "tpu_v5_lite", "tpu_v5p": "tpu_v5", "tpu_v6e": "tpu_v6_lite"}
TPU_NAMES: Final = {f"tpu:{_SAME_CHIP.get(name, name)}": name for name in (*_SAME_CHIP, "tpu_v4", "tpu7x")}


def platform_kind(name: str) -> str:
    """Return `gpu`, `tpu` or `cpu` for a JAX platform name (`cuda`, `rocm`, ...); return other names unchanged."""
    return _KINDS.get(name.lower(), name.lower())


def default_device() -> jax.Device:
    """Return the device that an eager call would use now."""
    chosen: Any = compat.settings.config.jax_default_device
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    device: jax.Device = jax.local_devices()[0] if chosen is None else chosen
    return device


def platform_of(arrays: Sequence[Any]) -> str:
    """Return the platform that JAX computes on for these concrete arrays."""
    # Uncommitted arrays are computed on the default device, regardless of where their data is.
    committed = next((array for array in arrays if getattr(array, "committed", False)), None)
    device: jax.Device = default_device() if committed is None else next(iter(committed.devices()))
    return str(device.platform)


def device_kind() -> str:
    """Return the kind of the default device: `gpu`, `tpu` or `cpu`."""
    return platform_kind(default_device().platform)


def get_device_platform() -> str:
    """Return the platform name in method names for the default device: `triton`, `pallas` or `xla`."""
    kind = device_kind()
    return _DISPATCH.get(kind, kind)


def device_fingerprint(device: jax.Device | None = None) -> str:
    """Return backend and chip of `device` (the default device if `None`), such as `gpu:nvidia_h200`.

    The name of a processor ends with its number of cores: `cpu:amd_epyc_9r14_x8`. If its model is hidden, numbers of
    family, model and stepping precede them: `cpu:intel_xeon_processor_6_143_8_x8`.

    Driver and library versions are not included; they are part of a measurement's provenance.
    """
    if device is None:
        device = default_device()
    kind = platform_kind(device.platform)
    return f"cpu:{_cpu_name()}" if kind == "cpu" else fingerprint_of(kind, device.device_kind)


def device_called(fingerprint: str) -> jax.Device | None:
    """Return a device of this process with this fingerprint, preferably the default device; `None` without one."""
    if device_fingerprint() == fingerprint:
        return default_device()
    try:
        there = jax.local_devices(backend=fingerprint.partition(":")[0])
    except RuntimeError:  # no such platform
        return None
    return next((device for device in there if device_fingerprint(device) == fingerprint), None)


def fingerprint_of(kind: str, chip: str) -> str:
    """Return the fingerprint of an accelerator from its kind and chip name."""
    name = _slug(chip)
    return f"{kind}:{_SAME_CHIP.get(name, name)}"


def name_of_device(fingerprint: str) -> str:
    """Return the name of a device in messages: its fingerprint, or that of a TPU as a target, e.g. `tpu_v6e`."""
    return TPU_NAMES.get(fingerprint, fingerprint)


_traced_for: contextvars.ContextVar[str] = contextvars.ContextVar("ejkernel_traced_for", default="")


@contextlib.contextmanager
def tracing_for(fingerprint: str) -> Iterator[None]:
    """Make this the device of its platform within a `with` block: programs are traced for it, not for one of here."""
    token = _traced_for.set(fingerprint)
    try:
        yield
    finally:
        _traced_for.reset(token)


def traced_for() -> str:
    """Return the device of the enclosing `tracing_for`; empty outside."""
    return _traced_for.get()


def platform_fingerprint(name: str) -> str:
    """Return the fingerprint of a device of platform `name`.

    It is the device of an enclosing `tracing_for`, or another machine's for which the program is being lowered, or this
    process's first one. Without any it is `<kind>:unknown`, and `gpu:amd_unknown` for `rocm`.
    """
    kind = platform_kind(name)
    if _traced_for.get().partition(":")[0] == kind:
        return _traced_for.get()
    absent = None if kind == "cpu" else compat.programs.absent_device()
    if absent is not None and platform_kind(absent.platform) == kind:
        return fingerprint_of(kind, absent.chip)
    # The default device comes first, because the user may have chosen it.
    default = default_device()
    if platform_kind(default.platform) == kind:
        return device_fingerprint(default)
    try:
        return device_fingerprint(jax.local_devices(backend=kind)[0])
    except RuntimeError:  # this process has no device of the platform
        return f"{kind}:amd_unknown" if name.lower() == "rocm" else f"{kind}:unknown"


def lowered_place() -> dict[str, Any]:
    """Return the known fields of the target device, if the program is being lowered."""
    platform = compat.programs.lowered_platform()
    if platform is None:
        return {"platform": None}
    # The model of an NVIDIA GPU may be unknown here. Kernels for TPUs choose by the chip's memory.
    device = platform_fingerprint(platform) if platform.lower() in ("rocm", "tpu") else ""
    return {
        "platform": platform_kind(platform),
        "device_fingerprint": "" if device == "tpu:unknown" else device,
    }


@functools.cache
def _cpu_name() -> str:
    """Return the name of this machine's processor.

    The number of cores available to this process is part of it, because it affects performance.
    """
    file = Path("/proc/cpuinfo")
    first = file.read_text(errors="replace").partition("\n\n")[0] if file.exists() else ""  # of the first core
    info = {name.rstrip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    model = _slug(info.get("model name", ""), "")
    words = [model or _slug(platform.processor() or platform.machine())]
    # Virtual machines often hide the model (`Intel Xeon Processor`, `AMD EPYC`), and ARM processors have no model name:
    # other numbers tell their generation.
    if not any(_MODEL_NUMBER.fullmatch(word) for word in model.split("_")):
        x86 = [info.get(field, "") for field in ("cpu family", "model", "stepping")]
        numbers = x86 if all(x86) else [info.get(field, "") for field in ("CPU implementer", "CPU part")]
        words += [number.removeprefix("0x").lower() for number in numbers if number]
    return f"{'_'.join(words)}_x{len(cores())}"


def cores() -> list[int]:
    """Return the numbers of the processor cores available to this process."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


# Two digits at least, as in 8488c, 9r14 or 7950x; unlike 2 and 20ghz in `Intel Xeon CPU @ 2.20GHz`.
_MODEL_NUMBER = re.compile(r"(?=.{3})(?=.*[0-9].*[0-9])(?!.*[0-9](ghz|mhz)).*")


def _slug(text: str, default: str = "unknown") -> str:
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"\((r|tm)\)", "", text.lower())).strip("_") or default


def sharding_fingerprint(array: object) -> str:
    """Return the layout of `array` over devices: mesh axes and partition, or the number of devices.

    Arrays without a sharding (NumPy, abstract values) and arrays on one device give `unsharded`.
    """
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        return "unsharded"
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = {axis for entry in sharding.spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
        if not axes:
            return "unsharded"
        mesh = ",".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"mesh[{mesh}]:{tuple(sharding.spec)}"
    count = len(sharding.device_set)
    return "unsharded" if count == 1 else f"{type(sharding).__name__}[{count}]"


def has_mosaic_gpu() -> bool:
    """Return whether Mosaic GPU kernels run on this process's GPU (Hopper or later).

    Without a GPU, return `True`: the program may be lowered for another machine with a suitable GPU.
    """
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return True
    major = str(getattr(device, "compute_capability", "0")).partition(".")[0]
    return major.isdigit() and int(major) >= 9
