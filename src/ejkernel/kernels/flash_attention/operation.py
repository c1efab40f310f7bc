# SPDX-License-Identifier: Apache-2.0
"""The operation behind `flash_attention`: arguments, reference, cost and implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._options import canonical_scale, canonical_sinks, positive
from ejkernel.ops.core.bucketing import bucketed
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.sharding.split import CallPart
from ejkernel.ops.core.types import Cost
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation

from . import _arguments as arguments
from .common import (
    AttentionCall,
    Operands,
    Residuals,
    Rules,
    all_arguments,
    arguments_of,
    describe,
    gradient_of_sinks,
    operands_of,
    returned_lse,
    visible_pairs,
    with_sinks,
    without_trailing,
)
from .context import Context, Sides
from .reference import attention

_Invocation = Invocation["FlashAttentionConfig", jax.Array]
# Query and output share the name of their sequence, so that a sharded query can give a sharded output. Keys have it too
# if the sequence may be sharded.
_AXES = {
    "query": "batch queries heads _",
    "key": "batch keys groups _",
    "value": "batch keys groups _",
    "bias": "batch heads _ _",
    "attention_mask": "batch heads _ _",
    "query_segments": "batch queries",
    "key_segments": "batch keys",
    "query_lengths": "batch",
    "key_lengths": "batch",
    "sinks": "heads",
}
_MAIN = ("query", "key", "value")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttentionConfig(OperationConfig):
    """The configuration of one call of `flash_attention`, forward or backward.

    Attributes:
        implementation: The name of an implementation in `FlashAttention.implementations`.
        fwd: Its forward parameters, e.g. `FwdParams` for `xla`; `None` for its heuristic.
        bwd: Its backward parameters, e.g. `BwdParams` for `xla`; `None` for its heuristic.
    """

    implementation: str = "xla"


class FlashAttention(Operation[FlashAttentionConfig, AttentionCall, jax.Array]):
    """The operation behind `flash_attention`, which documents the arguments.

    Forward and backward have separate configurations, and every forward works with every backward.
    """

    # the order breaks ties between equally preferred implementations
    implementations = Implementations(
        {
            "cudnn": LazyImplementation(f"{__package__}.cudnn:Cudnn", platforms=("gpu",)),
            "mosaic_gpu": LazyImplementation(f"{__package__}.mosaic_gpu.implementation:MosaicGpu", platforms=("gpu",)),
            "cudnn_packed": LazyImplementation(f"{__package__}.cudnn_packed:CudnnPacked", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
            "splash": LazyImplementation(f"{__package__}.splash:Splash", platforms=("tpu",)),
            "pallas_tpu": LazyImplementation(f"{__package__}.pallas_tpu.implementation:PallasTpu", platforms=("tpu",)),
        }
    )

    def __init__(self) -> None:
        super().__init__(name="flash_attention")

    def prepare(  # noqa: PLR0917 - the arrays are positional, in the order of their gradients
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        attention_mask: Any = None,
        segment_ids: Any = None,
        lengths: Any = None,
        sinks: Any = None,
        dropout_key: Any = None,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        sliding_window: arguments.SlidingWindow | None = None,
        logits_soft_cap: float | None = None,
        soft_cap_after_bias: bool = False,
        dropout_rate: float = 0.0,
        precision: Any = None,
        deterministic: bool = False,
        return_lse: bool = False,
        axis_name: Any = None,
        zigzag: bool = False,
        gather_keys: bool | None = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments and return the canonical form of the call.

        `lengths` is the pair `(query_lengths, key_lengths)`. Options at their default are omitted, so they are not part
        of the call's key.
        """
        arguments.check_main(query, key, value)
        full = arguments.full_shape(query, key)
        rate, dropout_key = arguments.canonical_dropout(dropout_rate, dropout_key)
        arrays = (
            query,
            key,
            value,
            arguments.canonical_bias(bias, full),
            arguments.canonical_mask(attention_mask, full),
            arguments.canonical_segments(segment_ids, full),
            arguments.canonical_lengths(lengths or (None, None), full[0]),
            canonical_sinks(sinks, full[1]),
            dropout_key,
        )
        requested = self.requested(implementation)
        causal, window = arguments.canonical_window(sliding_window, causal)
        cap = positive("logits_soft_cap", logits_soft_cap)
        options = {
            "causal": causal,
            "softmax_scale": canonical_scale(softmax_scale, query.shape[3]),
            "sliding_window": window,
            "logits_soft_cap": cap,
            "implementation": requested,
        }
        more = arguments.canonical_more(
            soft_cap_after_bias=soft_cap_after_bias,
            precision=precision,
            return_lse=return_lse,
            deterministic=deterministic,
        )
        # the order of cap and bias matters only if both are given
        if cap is None or bias is None:
            more.pop("soft_cap_after_bias", None)
        more |= arguments.canonical_context(axis_name, zigzag, gather_keys, arrays, (causal, window))
        return without_trailing(arrays), options | more | ({"dropout_rate": rate} if rate else {})

    def run(self, *args: Any, cfg: FlashAttentionConfig, **options: Any) -> Any:
        """Return the output; with `axis_name`, of this device's queries over the keys of all devices."""
        if not options.get("axis_name"):
            return super().run(*args, cfg=cfg, **options)
        return self.fwd_with_residuals(*args, cfg=cfg, **options)[0]

    def fwd_with_residuals(self, *args: Any, cfg: FlashAttentionConfig, **options: Any) -> tuple[Any, Any]:
        """Return the output and the log-sum-exp; see `run`."""
        if not options.get("axis_name"):
            return super().fwd_with_residuals(*args, cfg=cfg, **options)
        operands = operands_of(args)
        out, lse = self._context(cfg, options).forward(operands._replace(sinks=None))
        if operands.sinks is not None:
            out, lse = with_sinks(out, lse, operands.sinks)
        return ((out, returned_lse(lse)) if options.get("return_lse") else out), lse

    def vjp(
        self,
        residuals: Any,
        out: Any,
        cotangents: tuple[Any, ...],
        *args: Any,
        cfg: FlashAttentionConfig,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return the gradient of each positional argument; see `run`."""
        if not options.get("axis_name"):
            return super().vjp(residuals, out, cotangents, *args, cfg=cfg, **options)
        operands, out = operands_of(args), out[0] if options.get("return_lse") else out
        context = self._context(cfg, options)
        found = context.backward(operands._replace(sinks=None), (out, residuals), cotangents)
        dsinks = gradient_of_sinks(operands.sinks, out, residuals, cotangents)
        return (*found, None, None, None, None, dsinks, None)[: len(args)]

    def _context(self, cfg: FlashAttentionConfig, options: dict[str, Any]) -> Context:
        """Return the computation of a call on one device's shard of the sequence."""
        own = {name: value for name, value in options.items() if name not in arguments.CONTEXT}
        forward, backward = super().fwd_with_residuals, super().vjp

        def attend(operands: Operands, sides: Sides) -> Residuals:
            args, more = arguments_of(operands), own | _options_of(sides) | {"return_lse": False}
            found: Residuals = forward(*args, cfg=self._beside_copies(cfg, args, more), **more)
            return found

        def pull(operands: Operands, sides: Sides, residuals: Residuals, cotangents: Any) -> Any:
            args, more = arguments_of(operands), own | _options_of(sides) | {"partial": True}
            out, lse = residuals
            given = (out, returned_lse(lse)) if own.get("return_lse") else out
            config = self._fitting(cfg, args, more, backward=True)
            return backward(lse, given, tuple(cotangents), *args, cfg=config, **more)[:3]

        rules = _rules(options)
        return Context(
            axes=options["axis_name"],
            sides=(rules.left, rules.right),
            zigzag=options.get("zigzag", False),
            gather=options.get("gather_keys"),
            attend=attend,
            pull=pull,
        )

    def _beside_copies(
        self, cfg: FlashAttentionConfig, args: tuple[Any, ...], options: dict[str, Any]
    ) -> FlashAttentionConfig:
        """Return the configuration of a block with a launch that does not wait for copies between devices."""
        cfg = self._fitting(cfg, args, options)
        selected = self._running(cfg, args, options)
        params = selected.params
        if not getattr(params, "persistent", False):
            return cfg
        params = params.without_persistence()
        fault = selected.implementation.params_fault(selected.call, params)
        return cfg if fault is not None else dataclasses.replace(cfg, fwd=params)

    def describe(self, *args: Any, **options: Any) -> AttentionCall:
        """Return the abstract call: shapes and rules."""
        more = {name: options.get(name, False) for name in ("return_lse", "deterministic")}
        return describe(operands_of(args), _rules(options), **more)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output computed in float32 from the full score matrix."""
        operands = operands_of(args)
        out, lse = attention(operands, _rules(options))
        out = out.astype(operands.query.dtype)
        return (out, returned_lse(lse)) if options.get("return_lse") else out

    def example_inputs(self, inv: _Invocation, rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random arrays in which the first key is visible, segment ids ascend, and no example is empty."""
        args, kwargs = super().example_inputs(inv, rng)
        query, key, value, bias, mask, segments, lengths, *others = all_arguments(args)
        if mask is not None:
            mask = mask.at[..., 0].set(True)
        if segments is not None:
            segments = tuple(_random_segments(x.shape, rng).astype(x.dtype) for x in segments)
        if lengths is not None:
            pairs = zip(lengths, (query.shape[1], key.shape[1]), strict=True)
            lengths = tuple(x if x is None else _random_lengths(x.shape, most, rng) for x, most in pairs)
        return (query, key, value, bias, mask, segments, lengths, *others)[: len(args)], kwargs

    def sharding_rule(self, inv: _Invocation) -> ShardingRule | None:
        """Return the rule: it shards examples and heads, and sequences if queries and keys have the same length."""
        return _attention_rule(operands_of(inv.args), inv.kwargs)

    def part_arguments(self, part: CallPart, *args: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a shard; its queries see the keys of all shards of the sequence."""
        axes = part.axes("queries")
        return args, options | ({"axis_name": axes} if axes else {})

    def bucket(self, inv: _Invocation) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the call without context parallelism: its own shard of the sequence, without the other shards.

        A shard's call has the same configuration as this call, because its blocks have that size or less.
        """
        if arguments.CONTEXT.isdisjoint(inv.kwargs):
            return inv.args, inv.kwargs
        return inv.args, {name: x for name, x in inv.kwargs.items() if name not in arguments.CONTEXT}

    def cost(self, inv: _Invocation) -> Cost | None:
        """Return the cost of the forward: two products for every pair that the static rules make visible.

        Pairs hidden by masks, segment ids or lengths count as visible, because they depend on values.
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
        """Return a plain attention call."""
        return (jax.ShapeDtypeStruct((1, 256, 8, 64), jnp.bfloat16),) * 3, {}


class BucketedFlashAttention(FlashAttention):
    """The same operation for varying lengths: its keys, and so its tuned configurations, use rounded-up lengths.

    Every configuration runs for every length: blocks are clipped to the length, and the last ones are padded. Lengths
    that are no multiples of 8 may need more shared memory; where a configuration then does not fit, the heuristic's
    parameters replace it.
    """

    _replaces_invalid = True

    def bucket(self, inv: _Invocation) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments with lengths rounded up to powers of two, if the same implementations support them."""
        own, options = super().bucket(inv)
        query, key, value, bias, mask, segments, *others = all_arguments(own)
        rounded = (
            *(bucketed(x, 1) for x in (query, key, value)),
            *(bucketed(x, 2, 3) for x in (bias, mask)),
            None if segments is None else tuple(bucketed(x, 1) for x in segments),
            *others,
        )[: len(own)]
        same = self.able(dataclasses.replace(inv, args=rounded)) == self.able(inv)
        return rounded if same else own, options


bucketed_flash_attention = BucketedFlashAttention()
flash_attention = FlashAttention()  # after the bucketed one: descriptions of any length are rebuilt with this kernel


def _rules(options: dict[str, Any]) -> Rules:
    left, right = options["sliding_window"] or (None, None)
    return Rules(
        scale=options["softmax_scale"],
        left=left,
        right=0 if options["causal"] else right,
        soft_cap=options["logits_soft_cap"],
        cap_after_bias=options.get("soft_cap_after_bias", False),
        dropout_rate=options.get("dropout_rate", 0.0),
        precision=options.get("precision"),
        partial=options.get("partial", False),
    )


def _random_segments(shape: tuple[int, ...], rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(np.sort(rng.integers(0, 4, shape), axis=-1))


def _random_lengths(shape: tuple[int, ...], most: int, rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.integers(1, most + 1, shape), jnp.int32)


def _options_of(sides: Sides) -> dict[str, Any]:
    causal, window = arguments.canonical_window(sides, causal=False)
    return {"causal": causal, "sliding_window": window}


def _attention_rule(operands: Operands, options: Mapping[str, Any]) -> ShardingRule | None:
    """Return the rule for a call with these operands; `None` with dropout, which depends on the row's position."""
    if operands.dropout_key is not None:
        return None
    given = [(name, array) for name, array in operands._asdict().items() if array is not None]
    arguments = [_AXES[name] if name in _MAIN else _broadcast(_AXES[name], array) for name, array in given]
    lse = ", batch heads queries" if options.get("return_lse") else ""
    may_split = (
        operands.bias is operands.attention_mask is None
        and operands.query.shape[1] == operands.key.shape[1]
        and not options.get("axis_name")
    )
    axes = f"{', '.join(arguments)} -> batch queries heads _{lse}"
    return ShardingRule(
        axes.replace("keys", "queries") if may_split else axes,
        split="batch heads queries" if may_split else "batch heads",
        residuals="batch heads queries",
        follows={"groups": "heads"},
    )


def _broadcast(axes: str, array: Any) -> str:
    """Return the axes, with `_` in place of those of length 1, which broadcast."""
    return " ".join("_" if length == 1 else name for name, length in zip(axes.split(), array.shape, strict=True))
