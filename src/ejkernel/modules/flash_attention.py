# SPDX-License-Identifier: Apache-2.0
"""`flash_attention`: softmax attention, by whichever implementation is the fastest for the call."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ejkernel import compat
from ejkernel.kernels.flash_attention import IMPLEMENTATIONS, load, xla
from ejkernel.kernels.flash_attention.common import AttentionCall, Operands, Rules, describe, visible_pairs
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.ops.core.bucketing import bucketed
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cost
from ejkernel.ops.errors import ArgumentError, ConfigError, UnsupportedError
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.fingerprint import platform_kind
from ejkernel.ops.utils.signature import is_known

from . import _attention_arguments as arguments

_Invocation = Invocation["FlashAttentionConfig", jax.Array]

SegmentIds = Int[Array, "batch length"] | tuple[Int[Array, "batch queries"], Int[Array, "batch keys"]]
SlidingWindow = int | tuple[int | None, int | None]

# Blocks that the `xla` implementation is tuned over: of queries, of keys.
_CPU_BLOCKS = ((64, 128, 256, 512), (128, 256, 512, 1024))
_BLOCKS = ((256, 512, 1024), (512, 1024, 2048))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttentionConfig:
    """How one call of `flash_attention` runs, forward or backward.

    Attributes:
        implementation: Which implementation runs: `xla` or `cudnn`.
        fwd: Launch parameters of the forward; `None`s are left to the implementation.
        bwd: Launch parameters of the backward.
    """

    implementation: str = "xla"
    fwd: FwdParams = dataclasses.field(default_factory=FwdParams)
    bwd: BwdParams = dataclasses.field(default_factory=BwdParams)

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise ConfigError(f"implementation must be one of {_names()}; got {self.implementation!r}.")


class FlashAttention(Kernel[FlashAttentionConfig, jax.Array]):
    """The operation behind `flash_attention`, which documents the arguments.

    Forward and backward are configured apart, and any forward goes with any backward.
    """

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
        **options: Any,
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
        return arrays, _canonical_options(query.shape[3], **options)

    def run(self, *args: Any, cfg: FlashAttentionConfig, **options: Any) -> Any:
        """Return the output."""
        return self.fwd_with_residuals(*args, cfg=cfg, **options)[0]

    def fwd_with_residuals(self, *args: Any, cfg: FlashAttentionConfig, **options: Any) -> tuple[Any, Any]:
        """Return the output, and the log-sum-exp of every row."""
        operands, rules = _operands(args), _rules(options)
        implementation = _checked_implementation(cfg, operands, rules, options)
        out, lse = load(implementation).forward(operands, rules, cfg.fwd)
        return out, lse

    def vjp(
        self,
        residuals: Any,
        out: Any,
        cotangents: tuple[Any, ...],
        *args: Any,
        cfg: FlashAttentionConfig,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return the gradients of query, key, value and bias."""
        operands, rules = _operands(args), _rules(options)
        implementation = _checked_implementation(cfg, operands, rules, options, backward=True)
        found = load(implementation).backward(operands, (out, residuals), cotangents[0], rules, cfg.bwd)
        return (*found, None, None)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output, computed in float32 from the whole score matrix."""
        operands = _operands(args)
        return attention(operands, _rules(options))[0].astype(operands.query.dtype)

    def heuristic_cfg(self, inv: _Invocation) -> FlashAttentionConfig:
        """Return cuDNN where it runs, else `xla` with blocks that fit the platform."""
        call = self._call(inv)
        best = _implementations(inv, call)[0]
        if best != "xla":
            return FlashAttentionConfig(implementation=best)
        if not xla.has_blocks(call):
            return FlashAttentionConfig()
        return _xla_config(call, *xla.default_blocks(call, math.prod(inv.batch_sizes)))

    def config_space(self, inv: _Invocation) -> Sequence[FlashAttentionConfig]:
        """Return every implementation that runs the call, `xla` with several block sizes."""
        call = self._call(inv)
        found: list[FlashAttentionConfig] = []
        for name in _implementations(inv, call):
            found += _xla_configs(call) if name == "xla" else [FlashAttentionConfig(implementation=name)]
        return found

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
        args, options = self.prepare(*inv.args, **inv.kwargs)
        operands = _operands(args)
        batch, queries, heads, head_dim = operands.query.shape
        keys, value_dim = operands.key.shape[1], operands.value.shape[3]
        pairs = visible_pairs(queries, keys, _rules(options))
        rows = math.prod(inv.batch_sizes) * batch * heads
        out = rows * queries * value_dim * operands.query.dtype.itemsize
        return Cost(flops=2 * rows * pairs * (head_dim + value_dim), bytes=inv.input_bytes + out)

    def _call(self, inv: _Invocation) -> AttentionCall:
        args, options = self.prepare(*inv.args, **inv.kwargs)
        return describe(
            _operands(args),
            _rules(options),
            platform=inv.platform,
            fingerprint=inv.device_fingerprint,
            backward=inv.direction == "bwd",
        )


class _BucketedFlashAttention(FlashAttention):
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
        stand_in = dataclasses.replace(inv, args=rounded)
        same = _implementations(stand_in, self._call(stand_in)) == _implementations(inv, self._call(inv))
        return rounded if same else own, options


_bucketed_flash_attention = _BucketedFlashAttention()
_flash_attention = FlashAttention()  # the later of two of one name: descriptions of any length are rebuilt with it


def flash_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys groups head_dim"],
    value: Float[Array, "batch keys groups value_dim"],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    bias: Float[Array, "*broadcastable"] | None = None,
    attention_mask: Bool[Array, "*broadcastable"] | None = None,
    segment_ids: SegmentIds | None = None,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
    bucket_lengths: bool = False,
    cfg: FlashAttentionConfig | None = None,
) -> Float[Array, "batch queries heads value_dim"]:
    """Softmax attention, with grouped key/value heads and every usual mask, without the matrix of scores in memory.

    A query that sees no key at all gives zeros, and has zero gradients.

    Args:
        query: Queries. `heads` must be a multiple of `groups`; head `i` reads key head `i // (heads // groups)`.
        key, value: Keys and values, of query's dtype.
        causal: Hide keys after the query; the last query is aligned with the last key.
        softmax_scale: Factor on the products of query and key; `None` means `head_dim ** -0.5`.
        bias: Added to the logits; broadcastable to `[batch, heads, queries, keys]`. It has a gradient.
        attention_mask: True where a key is visible; `[batch, keys]`, or four axes, broadcastable like `bias`.
        segment_ids: A query sees the keys of its own segment alone; one array for both, or a pair.
        sliding_window: A query sees so many keys before and after its own position; a pair is `(left, right)`, with
            `None` for no limit. With `causal` the right side is 0.
        logits_soft_cap: Squash scaled products into `(-cap, cap)` by `cap * tanh(x / cap)`, before the bias is added.
        implementation: Run this one (`xla`, `cudnn`) or raise; `None` leaves the choice to the configuration.
        bucket_lengths: Run with what was tuned for lengths that are rounded up to powers of two, so that a program
            whose lengths vary is tuned once a power. Nothing is padded, and the result is the same.
        cfg: The configuration to run with, for this call and its gradient; `None` resolves one.

    Returns:
        The output, in query's dtype; sums run in float32.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or value.
        ConfigError: `cfg` names another implementation than `implementation`.
        UnsupportedError: `implementation` cannot run this call; the message says why. Where the platform is the
            reason, that is found when the program is lowered.
    """
    kernel = _bucketed_flash_attention if bucket_lengths else _flash_attention
    return kernel(
        query,
        key,
        value,
        bias,
        attention_mask,
        segment_ids,
        causal=causal,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
        cfg=cfg,
    )


def _canonical_options(
    head_dim: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> dict[str, Any]:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ArgumentError(f"implementation must be one of {_names()}, or None; got {implementation!r}.")
    causal, window = arguments.canonical_window(sliding_window, causal)
    return {
        "causal": causal,
        "softmax_scale": arguments.positive("softmax_scale", softmax_scale, head_dim**-0.5),
        "sliding_window": window,
        "logits_soft_cap": arguments.positive("logits_soft_cap", logits_soft_cap, None),
        "implementation": implementation,
    }


def _operands(args: Sequence[Any]) -> Operands:
    *arrays, segments = args
    return Operands(*arrays, *((None, None) if segments is None else segments))


def _rules(options: dict[str, Any]) -> Rules:
    left, right = options["sliding_window"] or (None, None)
    return Rules(
        scale=options["softmax_scale"],
        left=left,
        right=0 if options["causal"] else right,
        soft_cap=options["logits_soft_cap"],
    )


def _implementations(inv: _Invocation, call: AttentionCall) -> list[str]:
    """Return which implementations may run the call, the one to prefer first: the one that was asked for, or all.

    Raises:
        UnsupportedError: the one that was asked for does not run it.
    """
    named = inv.kwargs.get("implementation")
    if named is None:
        able = [name for name in IMPLEMENTATIONS if load(name).unsupported_reason(call) is None]
        return able if inv.direction != "jvp" else ["xla"]
    if not inv.array_types and call.platform != "gpu":
        # Only types are wanted as yet, and the program may be lowered for another platform than this process's.
        call = dataclasses.replace(call, platform=None, device_fingerprint="")
    reason = load(named).unsupported_reason(call)
    if inv.direction == "jvp" and named != "xla":
        reason = f"forward-mode differentiation is not available with implementation={named!r}; use 'xla'."
    if reason is not None:
        raise UnsupportedError(f"{inv.op_id}: {reason}")
    return [named]


def _xla_config(call: AttentionCall, q_block: int, kv_block: int) -> FlashAttentionConfig:
    if call.backward:
        return FlashAttentionConfig(bwd=BwdParams(q_blocksize=q_block, kv_blocksize=kv_block))
    return FlashAttentionConfig(fwd=FwdParams(q_blocksize=q_block, kv_blocksize=kv_block))


def _xla_configs(call: AttentionCall) -> list[FlashAttentionConfig]:
    """Return `xla` with each pair of block sizes that the lengths can tell apart, and whose scores fit in memory."""
    if not xla.has_blocks(call) or not is_known(*call.query):
        return [FlashAttentionConfig()]
    sizes, most = (_CPU_BLOCKS, 1 << 26) if call.platform == "cpu" else (_BLOCKS, 1 << 28)
    q_blocks, kv_blocks = (
        dict.fromkeys(xla.even_block(length, size) for size in choices)
        for length, choices in zip((call.query[1], call.key[1]), sizes, strict=True)
    )
    rows = call.query[0] * call.query[2]
    smallest = min(q_blocks) * min(kv_blocks)
    pairs = [(q, kv) for q, kv in itertools.product(q_blocks, kv_blocks) if q * kv <= max(smallest, most // rows)]
    return [_xla_config(call, *pair) for pair in pairs]


def _checked_implementation(
    cfg: FlashAttentionConfig, operands: Operands, rules: Rules, options: dict[str, Any], *, backward: bool = False
) -> str:
    """Return the implementation that runs: what `cfg` says, where that is possible.

    A forward's configuration may reach a gradient, and one that was measured on one device may reach a program that is
    partitioned over several: `xla` stands in there, unless an implementation was asked for by name.

    Raises:
        ConfigError: `cfg` and the `implementation` argument contradict each other.
        UnsupportedError: the implementation does not run this call.
    """
    named = options["implementation"]
    if named is not None and cfg.implementation != named:
        raise ConfigError(
            f"cfg.implementation is {cfg.implementation!r}, but implementation={named!r} was asked for; leave one out."
        )
    if cfg.implementation == "xla":  # it runs everywhere, so what the program is lowered for need not be asked
        return cfg.implementation
    call = describe(operands, rules, platform=_platform(), backward=backward)
    reason = load(cfg.implementation).unsupported_reason(call)
    if reason is None:
        return cfg.implementation
    if named is None and (call.backward or call.partitioned):
        return "xla"
    raise UnsupportedError(f"flash_attention{'.bwd' if call.backward else ''}: {reason}")


def _random_segments(shape: tuple[int, ...], rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(np.sort(rng.integers(0, 4, shape), axis=-1))


def _platform() -> str | None:
    """Return the kind of device that the program is being lowered for, if it is being lowered."""
    platform = compat.lowered_platform()
    return None if platform is None else platform_kind(platform)


def _names() -> str:
    return ", ".join(IMPLEMENTATIONS)
