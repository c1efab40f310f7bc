# SPDX-License-Identifier: Apache-2.0
"""Three of JAX's own GPU kernels; some of their candidates spill registers."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention_mgpu import SHAPE, mgpu_attention
from ejkernel.ops import Invocation, Kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig:
    """Tiles of one launch."""

    block_q: int
    block_k: int
    warps: int
    stages: int


class TritonAttention(Kernel[TritonConfig, jax.Array]):
    """Causal attention over `[batch, tokens, heads, head size]` in float16, in Pallas's Triton dialect."""

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array, *, cfg: TritonConfig) -> jax.Array:
        """JAX's kernel."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu import attention

        result: jax.Array = attention.mha(
            q,
            k,
            v,
            None,
            sm_scale=q.shape[-1] ** -0.5,
            causal=True,
            block_sizes=attention.BlockSizes(block_q=cfg.block_q, block_k=cfg.block_k),
            num_warps=cfg.warps,
            num_stages=cfg.stages,
        )
        return result

    def reference(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """XLA's attention."""
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def heuristic_cfg(self, inv: Invocation[TritonConfig, jax.Array]) -> TritonConfig:
        """The default of JAX's kernel."""
        return TritonConfig(block_q=128, block_k=128, warps=8, stages=2)

    def config_space(self, inv: Invocation[TritonConfig, jax.Array]) -> list[TritonConfig]:
        """All of a grid."""
        return [
            TritonConfig(block_q=block_q, block_k=block_k, warps=warps, stages=stages)
            for block_q, block_k, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3))
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulConfig:
    """Tiles of one launch."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    groups: str


class MgpuMatmul(Kernel[MatmulConfig, jax.Array]):
    """`a @ b` in bfloat16, in Pallas's Mosaic GPU dialect."""

    def run(self, a: jax.Array, b: jax.Array, *, cfg: MatmulConfig) -> jax.Array:
        """JAX's kernel."""
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as module

        tiles = module.TuningConfig(
            tile_m=cfg.tile_m,
            tile_n=cfg.tile_n,
            tile_k=cfg.tile_k,
            max_concurrent_steps=cfg.stages,
            grid_tile_width=8,
            wg_dimension=module.MatmulDimension[cfg.groups],
        )
        result: jax.Array = module.matmul(a, b, None, tiles)
        return result

    def reference(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """XLA's product."""
        return a @ b

    def heuristic_cfg(self, inv: Invocation[MatmulConfig, jax.Array]) -> MatmulConfig:
        """A common one."""
        return MatmulConfig(tile_m=128, tile_n=128, tile_k=64, stages=4, groups="N")

    def config_space(self, inv: Invocation[MatmulConfig, jax.Array]) -> list[MatmulConfig]:
        """All of a grid."""
        return [
            MatmulConfig(tile_m=tile_m, tile_n=tile_n, tile_k=64, stages=stages, groups=groups)
            for tile_m, tile_n, stages, groups in itertools.product((64, 128, 256), (64, 128, 256), (2, 4), "MN")
        ]


triton_attention = TritonAttention("triton_attention")
mgpu_matmul = MgpuMatmul("mgpu_matmul")


def program() -> tuple[Any, tuple[Any, ...]]:
    """Return the program for `ejkernel tune benchmarks.gpu_kernels:program`."""
    array = jax.ShapeDtypeStruct(SHAPE, jnp.float16)
    factor = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

    def all_of_them(x: jax.Array, a: jax.Array) -> tuple[jax.Array, ...]:
        return mgpu_attention(x, x, x), triton_attention(x, x, x), mgpu_matmul(a, a)

    return all_of_them, (array, factor)
