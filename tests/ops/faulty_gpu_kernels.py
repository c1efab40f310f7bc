# SPDX-License-Identifier: Apache-2.0
"""A kernel for NVIDIA GPUs, Hopper and later, with candidates that end every process; workers import it from here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel

SIZE = 128


@dataclasses.dataclass(frozen=True)
class GpuFault:
    """The fault on the device: none, a `deadlock`, or an access `out of bounds`."""

    kind: str = ""
    repeats: int = 0


SLOW, FAST = GpuFault(repeats=20), GpuFault(repeats=1)


def deadlock(x):
    """Wait at a barrier without any arrival."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    def body(source, target):
        def wait(barrier):
            plgpu.barrier_wait(barrier.at[0])
            target[...] = source[...]

        pl.run_scoped(wait, plgpu.Barrier(num_barriers=1))

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(1,), grid_names=("i",))(x)


def write_out_of_bounds(x):
    """Write gigabytes beyond the result."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    def body(source, target):
        start = jax.lax.axis_index("i") * (1 << 28) + (1 << 30)
        target[pl.ds(start, SIZE)] = source[pl.ds(0, SIZE)]

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(4,), grid_names=("i",))(x)


class Treacherous(Kernel[GpuFault, jax.Array]):
    """`x`, by way of `repeats` sines of it; two candidates end their process."""

    def run(self, x, *, cfg):
        if cfg.kind == "deadlock":
            return deadlock(x)
        if cfg.kind == "out of bounds":
            return write_out_of_bounds(x)
        wide = jnp.broadcast_to(x, (1 << 16, SIZE))
        for _ in range(cfg.repeats):
            wide = jnp.sort(wide, axis=0) * 1.0
        return x + 1e-30 * wide.sum(0)

    def reference(self, x):
        return x

    def heuristic_cfg(self, inv):
        return SLOW

    def config_space(self, inv):
        return [GpuFault("deadlock"), GpuFault("out of bounds"), FAST]


treacherous = Treacherous("treacherous")
