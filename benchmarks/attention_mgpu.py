# SPDX-License-Identifier: Apache-2.0
"""JAX's own Mosaic GPU attention as a kernel with 17 candidates: something real, and slow to compile, to tune."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation, Kernel

SHAPE = (4, 4096, 16, 128)  # batch, tokens, heads, head size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MgpuConfig:
    """Tiles of one launch.

    Attributes:
        block_q: Queries a warp group.
        block_kv: Keys and values a step.
        stages: Steps in flight.
    """

    block_q: int
    block_kv: int
    stages: int


# Thirteen run; three need too much shared memory, one does not divide the sequence.
CANDIDATES = [
    MgpuConfig(block_q=block_q, block_kv=block_kv, stages=stages)
    for block_q, block_kv, most in ((64, 64, 6), (64, 128, 4), (128, 64, 5), (128, 128, 3), (256, 64, 3), (192, 64, 2))
    for stages in range(2, most + 1)
]


class MgpuAttention(Kernel[MgpuConfig, jax.Array]):
    """Causal attention over `[batch, tokens, heads, head size]` in float16."""

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array, *, cfg: MgpuConfig) -> jax.Array:
        """JAX's kernel, which does not scale the logits."""
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        tiles = attention_mgpu.TuningConfig(
            block_q=cfg.block_q,
            block_kv=cfg.block_kv,
            max_concurrent_steps=cfg.stages,
            causal=True,
        )
        result: jax.Array = attention_mgpu.attention(q * q.shape[-1] ** -0.5, k, v, tiles)
        return result

    def reference(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """XLA's attention."""
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def heuristic_cfg(self, inv: Invocation[MgpuConfig, jax.Array]) -> MgpuConfig:
        """The first candidate."""
        return CANDIDATES[0]

    def config_space(self, inv: Invocation[MgpuConfig, jax.Array]) -> list[MgpuConfig]:
        """All candidates."""
        return CANDIDATES


mgpu_attention = MgpuAttention("mgpu_attention")


def program() -> tuple[Any, tuple[Any, ...]]:
    """Return the program for `ejkernel tune benchmarks.attention_mgpu:program`."""
    array = jax.ShapeDtypeStruct(SHAPE, jnp.float16)
    return mgpu_attention, (array, array, array)
