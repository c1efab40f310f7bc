# SPDX-License-Identifier: Apache-2.0
"""The operation behind `flash_attention`: its arguments, its reference, its cost, and which implementations it has."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.bucketing import bucketed
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cost
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation

from . import _arguments as arguments
from .common import AttentionCall, Rules, describe, operands_of, visible_pairs
from .reference import attention

_Invocation = Invocation["FlashAttentionConfig", jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttentionConfig(OperationConfig):
    """How one call of `flash_attention` runs, forward or backward.

    Attributes:
        implementation: Which implementation runs: `xla` or `cudnn`.
        fwd: Its parameters for the forward; `None`: its heuristic's. Those of `xla` are `FwdParams`.
        bwd: Its parameters for the backward, likewise. Those of `xla` are `BwdParams`.
    """

    implementation: str = "xla"


class FlashAttention(Operation[FlashAttentionConfig, AttentionCall, jax.Array]):
    """The operation behind `flash_attention`, which documents the arguments.

    Forward and backward are configured apart, and any forward goes with any backward.
    """

    implementations = Implementations(
        {
            "cudnn": LazyImplementation(f"{__package__}.cudnn:Cudnn", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
        }
    )

    def __init__(self) -> None:
        super().__init__(name="flash_attention")

    def prepare(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        attention_mask: Any = None,
        segment_ids: Any = None,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        sliding_window: arguments.SlidingWindow | None = None,
        logits_soft_cap: float | None = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and bring equal calls into one form."""
        arguments.check_main(query, key, value)
        full = arguments.full_shape(query, key)
        arrays = (
            query,
            key,
            value,
            arguments.canonical_bias(bias, full),
            arguments.canonical_mask(attention_mask, full),
            arguments.canonical_segments(segment_ids, full),
        )
        requested = self.requested(implementation)
        causal, window = arguments.canonical_window(sliding_window, causal)
        return arrays, {
            "causal": causal,
            "softmax_scale": arguments.positive("softmax_scale", softmax_scale, query.shape[3] ** -0.5),
            "sliding_window": window,
            "logits_soft_cap": arguments.positive("logits_soft_cap", logits_soft_cap, None),
            "implementation": requested,
        }

    def describe(self, *args: Any, **options: Any) -> AttentionCall:
        """Return the shapes and the rules."""
        return describe(operands_of(args), _rules(options))

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output, computed in float32 from the whole score matrix."""
        operands = operands_of(args)
        return attention(operands, _rules(options))[0].astype(operands.query.dtype)

    def example_inputs(self, inv: _Invocation, rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random arrays; the first key is never masked, and segment ids rise."""
        args, kwargs = super().example_inputs(inv, rng)
        query, key, value, bias, mask, segments = (*args, None, None, None)[:6]
        if mask is not None:
            mask = mask.at[..., 0].set(True)
        if segments is not None:
            segments = tuple(_random_segments(x.shape, rng).astype(x.dtype) for x in segments)
        return (query, key, value, bias, mask, segments), kwargs

    def cost(self, inv: _Invocation) -> Cost | None:
        """Return the forward's work: two products for every pair that the static rules let see each other.

        What `attention_mask` and `segment_ids` hide depends on their values, and counts as seen.
        """
        if inv.direction != "fwd":
            return None
        call = self.call_of(inv)
        batch, queries, heads, head_dim = call.query
        value_dim = call.value[3]
        pairs = visible_pairs(queries, call.key[1], call.rules)
        rows = call.examples * batch * heads
        out = rows * queries * value_dim * jnp.dtype(call.dtype).itemsize
        return Cost(flops=2 * rows * pairs * (head_dim + value_dim), bytes=inv.input_bytes + out)

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return plain attention."""
        return (jax.ShapeDtypeStruct((1, 256, 8, 64), jnp.bfloat16),) * 3, {}


class BucketedFlashAttention(FlashAttention):
    """The same operation for varying lengths: it has the keys, and so what was tuned, of lengths that are rounded up.

    Every configuration runs for every length: blocks are cut to it, and the last ones are padded.
    """

    def bucket(self, inv: _Invocation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with lengths of powers of two, where the same implementations run these."""
        own, options = inv.abstract_args, inv.abstract_kwargs
        query, key, value, bias, mask, segments = (*own, None, None, None)[:6]
        rounded = (
            *(bucketed(x, 1) for x in (query, key, value)),
            *(bucketed(x, 2, 3) for x in (bias, mask)),
            None if segments is None else tuple(bucketed(x, 1) for x in segments),
        )[: len(own)]
        same = self.able(dataclasses.replace(inv, args=rounded)) == self.able(inv)
        return rounded if same else own, options


bucketed_flash_attention = BucketedFlashAttention()
flash_attention = FlashAttention()  # the later of two of one name: descriptions of any length are rebuilt with it


def _rules(options: dict[str, Any]) -> Rules:
    left, right = options["sliding_window"] or (None, None)
    return Rules(
        scale=options["softmax_scale"],
        left=left,
        right=0 if options["causal"] else right,
        soft_cap=options["logits_soft_cap"],
    )


def _random_segments(shape: tuple[int, ...], rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(np.sort(rng.integers(0, 4, shape), axis=-1))
