# SPDX-License-Identifier: Apache-2.0
"""Target devices, and compilation for them on machines without such a device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Collection, Iterator
from importlib import resources
from typing import Any

import jax
import numpy as np

from ejkernel import compat, settings
from ejkernel.ops.autotuner.trials.candidates import Program, program_digest
from ejkernel.ops.core.context import numerics
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.fingerprint import device_fingerprint, fingerprint_of, tracing_for
from ejkernel.ops.utils.messages.names import did_you_mean

_FOLDER = resources.files("ejkernel") / "data" / "targets"
_SUFFIX = ".txtpb"
# XLA chooses algorithms for these by timing on the device, and chooses badly without one. A bundle with such programs
# would compare kernels with a handicapped XLA.
_TUNED_BY_XLA = re.compile(r"stablehlo\.(dot|convolution)|__cudnn|__cublas")
_MOSAIC = re.compile(r"mosaic_gpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A device to compile for.

    Attributes:
        name: Its name on the command line; `here` is the default device of this process.
        fingerprint: Its name in keys.
        description: Its properties: for a GPU a `GpuTargetConfigProto` as text, for a TPU the compiler's topology,
            clock and peaks in the same format; empty for `here`.
    """

    name: str
    fingerprint: str
    description: str = ""

    @property
    def platform(self) -> str:
        """Kind of device: `gpu`, `tpu` or `cpu`."""
        return self.fingerprint.partition(":")[0]

    @classmethod
    def named(cls, name: str) -> Target:
        """Return the target of that name.

        Raises:
            ConfigError: No target has this name.
        """
        if name == "here":
            return cls(name, device_fingerprint())
        if name not in target_names():
            names = ("here", *target_names())
            # `tpu_v7` means `tpu7x` rather than `tpu_v4`
            same = [each for each in names if _number(name) and _number(each) == _number(name)]
            meant = did_you_mean(name, same, 0.4) if same else did_you_mean(name, names)
            raise ConfigError(f"target must be one of {', '.join(names)}; got {name!r}{meant}")
        description = (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
        kind = "tpu" if _field(description, "platform_name") == "TPU" else "gpu"
        return cls(name, fingerprint_of(kind, _field(description, "device_description_str")), description)

    @classmethod
    def of(cls, fingerprint: str) -> Target | None:
        """Return the target with this fingerprint, for compilation in another process; `None` if unknown."""
        if fingerprint.startswith("cpu:"):
            return cls("here", fingerprint)
        described = (cls.named(name) for name in target_names())
        return next((target for target in described if fingerprint == target.fingerprint), None)

    def property_named(self, name: str) -> str:
        """Return a field of the description; empty if it has none of this name."""
        return _field(self.description, name)

    def number_named(self, name: str) -> float | None:
        """Return a number from the description; `None` without a field of this name."""
        return float(text) if (text := self.property_named(name)) else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this target the device of code traced inside the `with` block."""
        if not self.description:
            yield
            return
        # Kernels choose by the name and the number of multiprocessors of the device.
        with tracing_for(self.fingerprint), compat.executables.abstract_device(*self._kind_of_device()):
            yield

    def give_to_meshes(self) -> None:
        """Let new meshes have devices of this target's kind, in a process that only traces programs."""
        if self.description:
            compat.executables.give_to_meshes(*self._kind_of_device())

    def _kind_of_device(self) -> tuple[str, str, int]:
        cores = int(self.property_named("core_count"))
        return self.platform, self.property_named("device_description_str"), cores

    def check(self, *, loads_compiler: bool) -> None:
        """Check that this machine can compile for the target.

        Args:
            loads_compiler: Whether this process compiles. Otherwise a compiler for TPUs is only searched for, because
                loading it changes the environment of this process.

        Raises:
            ConfigError: The compiler is missing.
        """
        if self.platform == "tpu" and self.description and not loads_compiler:
            if importlib.util.find_spec("libtpu") is None:
                raise _no_libtpu("it is not installed")
        else:
            self.placed(jax.ShapeDtypeStruct((), np.dtype("float32")))

    def placed(self, like: Any) -> jax.ShapeDtypeStruct:
        """Return the type of an array on this target."""
        if not self.description:
            return jax.ShapeDtypeStruct(like.shape, like.dtype)
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=_sharding(self.description))


def target_names() -> list[str]:
    """Return the names of the targets in the package, without `here`."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _FOLDER.iterdir() if file.name.endswith(_SUFFIX))


def _number(name: str) -> str:
    """Return the digits in the name of a target, e.g. `7` of `tpu7x`."""
    return re.sub(r"\D", "", name)


def _field(description: str, name: str) -> str:
    match = re.search(rf'\b{name}:\s*"?([^"\n]+)"?', description)
    return match.group(1).strip() if match is not None else ""


@functools.cache
def _sharding(description: str) -> Any:
    if _field(description, "platform_name") == "TPU":
        return _tpu_sharding(_field(description, "topology"))
    settings.compile_without_gpu()
    try:
        return compat.executables.gpu_topology_sharding(description)
    except Exception as error:
        raise ConfigError(
            "compiling for a GPU on a machine without one needs JAX's CUDA plugin and NVIDIA's compiler, best in a "
            "separate environment: pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}; pip install nvidia-cuda-nvcc "
            "nvidia-nvvm. A process that has used JAX before needs JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 from its start "
            f"({type(error).__name__}: {error})"
        ) from error


def _tpu_sharding(topology: str) -> Any:
    if importlib.util.find_spec("libtpu") is None:
        raise _no_libtpu("it is not installed")
    settings.compile_without_tpu()
    try:
        return compat.executables.tpu_topology_sharding(topology)
    except Exception as error:
        raise _no_libtpu(f"{type(error).__name__}: {error}") from error


def _no_libtpu(why: str) -> ConfigError:
    return ConfigError(
        "compiling for a TPU needs Google's compiler, libtpu, but no TPU: pip install "
        f"'jax[tpu]=={jax.__version__}' ({why})"
    )


def compile_for(
    inv: Invocation[Cfg, Out],
    choice: Choice,
    target: Target,
    *,
    only_once: bool = False,
    known: Collection[str] = (),
) -> Program:
    """Compile a call for a target. Works in any process.

    Args:
        inv: The call, for the target.
        choice: The implementation and configuration.
        target: The device.
        only_once: The program runs once, so compile it even if XLA would tune it on the device.
        known: Digests of programs that are only lowered; they are returned without code.
    """
    types = [target.placed(like) for like in inv.argument_types]
    with target.entered(), numerics(inv.numerics):
        try:
            lowered = jax.jit(inv.node.flat(choice)).lower(*types)
        except RuntimeError as error:
            if target.description and "Unknown backend" in str(error):  # e.g. a host callback
                return Program(why_left="lowering it needs the device")
            raise
        text = lowered.as_text()
        digest = program_digest(text)
        if digest is None:
            return Program(why_left="it calls back into the process that compiles it")
        if target.platform == "gpu" and target.description and _TUNED_BY_XLA.search(text) and not only_once:
            return Program(digest=digest, why_left="XLA tunes some of its operations on the device")
        if digest in known:
            return Program(digest=digest)
        compiled = compat.executables.compiled_to_be_serialized(lowered)
        code = compat.executables.serialized(compiled)
        memory = compat.executables.vector_memory(compiled.as_text()) if "@tpu_custom_call" in text else []
    return Program(
        digest=digest,
        code=code,
        inputs=len(types),
        outputs=len(jax.tree.leaves(lowered.out_info)),
        mosaic=bool(_MOSAIC.search(text)),
        vector_memory=max(memory, default=None),
    )
