# SPDX-License-Identifier: Apache-2.0
"""Target devices, and compilation for them on machines without such a device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import jax

from ejkernel import compat, settings
from ejkernel.ops.autotuner.trials.candidates import Program, program_digest
from ejkernel.ops.core.examples import example_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.fingerprint import device_fingerprint, fingerprint_of
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
        description: Its properties for XLA, a `GpuTargetConfigProto` as text; empty for `here`.
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
            raise ConfigError(f"target must be one of {', '.join(names)}; got {name!r}{did_you_mean(name, names)}")
        description = (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
        return cls(name, fingerprint_of("gpu", _field(description, "device_description_str")), description)

    @classmethod
    def of(cls, fingerprint: str) -> Target | None:
        """Return the target with this fingerprint, for compilation in another process; `None` if unknown."""
        if fingerprint.startswith("cpu:"):
            return cls("here", fingerprint)
        described = (cls.named(name) for name in target_names())
        return next((target for target in described if target.fingerprint == fingerprint), None)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this target the device of code traced inside the `with` block."""
        if not self.description:
            yield
            return
        cores = int(_field(self.description, "core_count"))
        # Kernels choose by the name and the number of multiprocessors of the device.
        with compat.abstract_device(_field(self.description, "device_description_str"), cores):
            yield

    def placed(self, like: Any) -> jax.ShapeDtypeStruct:
        """Return the type of an array on this target."""
        if not self.description:
            return jax.ShapeDtypeStruct(like.shape, like.dtype)
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=_sharding(self.description))


def target_names() -> list[str]:
    """Return the names of the targets in the package, without `here`."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _FOLDER.iterdir() if file.name.endswith(_SUFFIX))


def _field(description: str, name: str) -> str:
    match = re.search(rf'\b{name}:\s*"?([^"\n]+)"?', description)
    assert match is not None  # the descriptions come with the package
    return match.group(1).strip()


@functools.cache
def _sharding(description: str) -> Any:
    settings.compile_without_gpu()
    try:
        return compat.gpu_topology_sharding(description)
    except Exception as error:
        raise ConfigError(
            "compiling for a GPU on a machine without one needs JAX's CUDA plugin and NVIDIA's compiler, best in a "
            "separate environment: pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}; pip install nvidia-cuda-nvcc "
            "nvidia-nvvm. A process that has used JAX before needs JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 from its start "
            f"({type(error).__name__}: {error})"
        ) from error


def compile_for(inv: Invocation[Cfg, Out], choice: Choice, target: Target, *, only_once: bool = False) -> Program:
    """Compile a call for a target. Works in any process.

    Args:
        inv: The call, for the target.
        choice: The implementation and configuration.
        target: The device.
        only_once: The program runs once, so compile it even if XLA would tune it on the device.
    """
    types = [target.placed(like) for like in example_types(inv)]
    with target.entered(), compat.numerics(inv.numerics):
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
        if target.description and _TUNED_BY_XLA.search(text) and not only_once:
            return Program(digest=digest, why_left="XLA tunes some of its operations on the device")
        code = compat.serialized(lowered.compile())
    outputs = len(jax.tree.leaves(lowered.out_info))
    return Program(digest=digest, code=code, inputs=len(types), outputs=outputs, mosaic=bool(_MOSAIC.search(text)))
