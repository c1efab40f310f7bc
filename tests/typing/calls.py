# SPDX-License-Identifier: Apache-2.0
"""Right calls, and wrong ones that type checkers must refuse, each with `wrong` in a comment. Nothing here runs.

`make lint` runs mypy, which reports a call that is refused unexpectedly, and an `ignore` of a call that is accepted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, assert_type

import jax
import numpy as np

from ejkernel.modules import (
    FlashAttentionConfig,
    RmsNormConfig,
    flash_attention,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    token_log_probs,
)
from ejkernel.modules.rms_norm import RmsNorm
from ejkernel.ops import AutotuningResult, Invocation, Kernel, autotune, tune


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """A kernel's own configuration."""

    rows: int


class Gelu(Kernel[ChunkConfig, jax.Array]):
    """A kernel of a user."""

    def run(self, x: jax.Array, *, cfg: ChunkConfig) -> jax.Array:
        return x * cfg.rows

    def heuristic_cfg(self, inv: Invocation[ChunkConfig, jax.Array]) -> ChunkConfig:
        return ChunkConfig(rows=1)


@tune(space={"rows": [1, 2]})
def doubled(x: jax.Array, factor: float, *, rows: int = 1) -> jax.Array:
    """A tuned function."""
    return x * factor * rows


class Layer:
    """Holds a tuned function as a method."""

    @tune(space={"rows": [1, 2]})
    def scaled(self, x: jax.Array, *, rows: int = 1) -> jax.Array:
        return x * rows


def attention(q: jax.Array) -> None:
    assert_type(flash_attention(q, q, q), jax.Array)
    assert_type(flash_attention(q, q, q, causal=True, softmax_scale=0.5, sliding_window=(4, None)), jax.Array)
    assert_type(flash_attention(q, q, q, causal=np.bool_(True), sliding_window=np.int64(4)), jax.Array)
    assert_type(flash_attention(q, q, q, softmax_scale=1 / np.sqrt(64), bias=q, return_lse=False), jax.Array)
    assert_type(flash_attention(q, q, q, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(flash_attention(q, q, q, segment_ids=(q, q), cfg=FlashAttentionConfig()), jax.Array)
    flash_attention(q, q, q, implementation=["cudnn", "xla"], precision=jax.lax.Precision.HIGH)
    flash_attention(q, q, q, casual=True)  # type: ignore[call-overload]  # wrong
    flash_attention(q, q, q, is_causal=True)  # type: ignore[call-overload]  # wrong
    flash_attention(q, q, q, causal="yes")  # type: ignore[call-overload]  # wrong
    flash_attention(q, q, q, softmax_scale="0.5")  # type: ignore[call-overload]  # wrong
    flash_attention(q, q, q, q)  # type: ignore[call-overload]  # wrong
    flash_attention(q, q)  # type: ignore[call-overload]  # wrong
    flash_attention(q, q, q, return_lse=True, casual=True)  # type: ignore[call-overload]  # wrong
    flash_attention(q, q, q, cfg=RmsNormConfig())  # type: ignore[call-overload]  # wrong


def either_form(q: jax.Array, lse: bool) -> None:
    flash_attention(q, q, q, return_lse=lse)
    out: jax.Array = flash_attention(q, q, q, return_lse=lse)  # type: ignore[assignment]  # wrong
    del out


def norms(x: jax.Array, w: jax.Array) -> None:
    assert_type(rms_norm(x, w, eps=1e-5), jax.Array)
    assert_type(rms_norm(x, w, eps=np.float64(1e-5), residual=x), tuple[jax.Array, jax.Array])
    assert_type(layer_norm(x, w, w), jax.Array)
    rms_norm(x, w, epsilon=1e-5)  # type: ignore[call-overload]  # wrong
    rms_norm(x, w, 1e-5)  # type: ignore[call-overload]  # wrong
    layer_norm(x, w)  # type: ignore[call-overload]  # wrong


def products(x: jax.Array, w: jax.Array, sizes: jax.Array) -> None:
    assert_type(grouped_matmul(x, w, sizes, activation="silu", gate=w), jax.Array)
    grouped_matmul(x, w, sizes, group_offset=0)  # type: ignore[call-overload]  # wrong
    grouped_matmul(x, w, sizes, activation="swish")  # type: ignore[call-overload]  # wrong


def losses(x: jax.Array, w: jax.Array, labels: jax.Array) -> None:
    assert_type(linear_cross_entropy(x, w, labels, reduction="sum", z_loss=np.float32(1e-4)), jax.Array)
    assert_type(token_log_probs(x, w, labels), jax.Array)
    assert_type(token_log_probs(x, w, labels, return_entropy=True), tuple[jax.Array, jax.Array])
    linear_cross_entropy(x, w, labels, return_lse=True)
    linear_cross_entropy(x, w, labels, reduction="average")  # type: ignore[call-overload]  # wrong
    linear_cross_entropy(x, w, labels, logsumexp_weight=1e-4)  # type: ignore[call-overload]  # wrong
    linear_cross_entropy(x, w)  # type: ignore[call-overload]  # wrong
    token_log_probs(x, w, labels, cfg=RmsNormConfig())  # type: ignore[call-overload]  # wrong


def tuned_functions(x: jax.Array, layer: Layer) -> None:
    assert_type(doubled(x, 2.0), jax.Array)
    assert_type(doubled(x, factor=2.0, rows=2), jax.Array)
    assert_type(doubled(x, 2.0, cfg={"rows": 2}), jax.Array)
    assert_type(layer.scaled(x, rows=2), jax.Array)
    doubled(x, 2.0, **autotune(doubled, x, 2.0))
    doubled(x)  # type: ignore[call-overload]  # wrong
    doubled(x, 2.0, row=2)  # type: ignore[call-overload]  # wrong
    doubled(x, "2.0")  # type: ignore[call-overload]  # wrong
    layer.scaled(x, row=2)  # type: ignore[call-arg]  # wrong


def tuning(x: jax.Array, w: jax.Array, gelu: Gelu, norm: RmsNorm) -> None:
    assert_type(autotune(gelu, x), ChunkConfig)
    assert_type(autotune(gelu, x, configs=[ChunkConfig(1)], num_iters=3), ChunkConfig)
    assert_type(autotune(norm, x, w), RmsNormConfig)
    assert_type(autotune(doubled, x, 2.0), dict[str, Any])
    assert_type(autotune(jax.jit(rms_norm), x, w), AutotuningResult)
    with autotune(jax.grad(rms_norm), x, w) as result:
        assert_type(result, AutotuningResult)
    gelu(x, cfg=autotune(gelu, x))
    gelu(x, cfg=3)  # type: ignore[arg-type]  # wrong
    autotune(gelu, x, configs=[3])  # type: ignore[misc]  # wrong
