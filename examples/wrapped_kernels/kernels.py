# SPDX-License-Identifier: Apache-2.0
"""Three Pallas kernels that JAX ships, as ejkernel operations, each with its own gradient.

    ejkernel tune examples/wrapped_kernels/kernels.py:grouped_step      # on a TPU
    ejkernel tune examples/wrapped_kernels/kernels.py:splash_step       # on a TPU
    ejkernel tune examples/wrapped_kernels/kernels.py:hopper_step       # on an H100 or H200

The kernels are imported where they run, since each needs a device or package that other machines lack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Invocation, Kernel, tune

Call = Invocation[Any, Any]
INTERPRET = jax.default_backend() == "cpu"  # the two for a TPU can be tried without one


# --- megablox: rows of `lhs` are sorted into groups and multiplied with the matrix of their group ---


def plain_gmm(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return the product that `gmm` computes, in plain JAX."""
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)


def group_sizes_that_add_up(inv: Call, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Return arguments whose group sizes add up to all rows; random sizes would cover almost none."""
    lhs, rhs, group_sizes = inv.args
    rows, groups = lhs.shape[0], group_sizes.shape[0]
    ends = np.sort(rng.integers(0, rows + 1, groups - 1))
    sizes = np.diff(np.concatenate([[0], ends, [rows]]))
    return (*(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (lhs, rhs)), jnp.asarray(sizes, jnp.int32))


def tilings(inv: Call) -> dict[str, list[tuple[int, int, int]]]:
    """Return the tilings that divide the rows."""
    rows = inv.args[0].shape[0]
    return {"tiling": [(m, k, n) for m in (128, 256, 512) for k in (128, 512) for n in (128, 512) if rows % m == 0]}


@tune(
    space={"tiling": lambda inv: tilings(inv)["tiling"]},
    reference=plain_gmm,
    example_inputs=group_sizes_that_add_up,
    keeps_residuals=True,
)
def gmm(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tiling: tuple[int, int, int] = (128, 128, 128)
) -> jax.Array:
    """Megablox: the product of each group of rows with its matrix."""
    from jax.experimental.pallas.ops.tpu.megablox import ops

    product: jax.Array = ops.gmm(lhs, rhs, group_sizes, lhs.dtype, tiling, interpret=INTERPRET)
    return product


# --- splash attention: forward and gradient have separate block sizes ---


@tune(
    space={"block_q": [128, 256, 512], "block_kv": [128, 256, 512]},
    bwd_space={"block_q_dkv": [128, 256, 512], "block_kv_dkv": [128, 256, 512]},
    constraints=[
        lambda block_q, block_kv: block_q <= 2 * block_kv,
    ],
    keeps_residuals=True,
)
def splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_q: int = 128,
    block_kv: int = 128,
    block_q_dkv: int = 128,
    block_kv_dkv: int = 128,
) -> jax.Array:
    """Causal attention of `[heads, length, head_dim]`, by JAX's kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    heads, length, _ = query.shape
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q_dkv,
        block_kv_dkv=block_kv_dkv,
        block_kv_dkv_compute=block_kv_dkv,
        use_fused_bwd_kernel=True,
    )
    attend = splash_attention_kernel.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=INTERPRET
    )
    out: jax.Array = attend(query, key, value)
    return out


# --- attention for Hopper: its own dataclass is the configuration ---


class HopperAttention(Kernel[Any, jax.Array]):
    """Attention of `[batch, length, heads, head_dim]`, by JAX's Mosaic GPU kernel."""

    keeps_residuals = True

    def run_mosaic_gpu(self, query: jax.Array, key: jax.Array, value: jax.Array, *, cfg: Any) -> jax.Array:
        """The kernel, with its own gradient."""
        out: jax.Array = _hopper().attention(query, key, value, cfg)
        return out

    def heuristic_cfg(self, inv: Call) -> Any:
        """Blocks that any length of 128 or more can have."""
        return _hopper_config(block_q=64, block_kv=128)

    def config_space(self, inv: Call) -> Collection[Any]:
        """Configurations of the forward, by its own block sizes."""
        return [
            _hopper_config(block_q=q, block_kv=kv, max_concurrent_steps=steps)
            for q in (64, 128)
            for kv in (64, 128, 256)
            for steps in (2, 4)
        ]

    def bwd_config_space(self, inv: Call) -> Collection[Any]:
        """Configurations of the backward, by its own block sizes."""
        return [
            _hopper_config(block_q=64, block_kv=128, backward=(q, kv, other_q, other_kv))
            for q, kv in ((64, 64), (64, 128), (128, 64))
            for other_q, other_kv in ((64, 64), (64, 128), (128, 64))
        ]


def _hopper() -> Any:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    return attention_mgpu


@functools.cache
def _hopper_config(
    *, block_q: int, block_kv: int, max_concurrent_steps: int = 2, backward: tuple[int, ...] = (64, 64, 64, 64)
) -> Any:
    names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    blocks: Mapping[str, int] = dict(zip(names, backward, strict=True))
    return _hopper().TuningConfig(
        block_q=block_q, block_kv=block_kv, max_concurrent_steps=max_concurrent_steps, **blocks
    )


hopper_attention = HopperAttention("hopper_attention")


# --- programs to tune ---


def _gradient(operation: Callable[..., jax.Array], count: int) -> Callable[..., Any]:
    def loss(*arrays: jax.Array) -> jax.Array:
        return operation(*arrays).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=tuple(range(count))))


def grouped_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of `gmm`, of 512 rows in 8 groups."""
    shapes = [((512, 256), jnp.float32), ((8, 256, 256), jnp.float32), ((8,), jnp.int32)]
    return _gradient(gmm, 2), tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def splash_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of `splash`."""
    return _gradient(splash, 3), (jax.ShapeDtypeStruct((2, 512, 128), jnp.float32),) * 3


def hopper_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of `hopper_attention`, which the kernel has for float16 alone."""
    return _gradient(hopper_attention, 3), (jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.float16),) * 3
