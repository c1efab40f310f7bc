# SPDX-License-Identifier: Apache-2.0
"""Attention by splash attention, the kernels that JAX ships for TPUs.

The kernels take one example, lengths that their blocks divide, and a scaled query. This module pads the lengths, hides
the padding by segment ids, and gives rows without visible keys their values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels._vector_memory import LANES, memory_of, memory_to_pass, untuned_of
from ejkernel.ops.config.published import Facts, PublishedTable
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.messages.names import NamedFields

from ._splash_memory import clipped_blocks, vector_memory
from ._tpu import check_blocks, heads_first, heads_last, segment_ids, unsupported_reason, without_rest
from .common import (
    EMPTY_ROW_LSE,
    AttentionCall,
    AttentionImplementation,
    Operands,
    Rules,
    describe,
    scale_reason,
)

_MOST_MEMORY = "tpu:tpu_v5"
_SIZES = (128, 256, 512, 1024, 2048)
_STEPS = (128, 256, 512, 1024)
Residuals = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplashParams(NamedFields):
    """The blocks of the forward, multiples of 128; shorter sequences have shorter blocks.

    Attributes:
        block_q: Queries per block.
        block_kv: Keys copied to vector memory at once.
        block_kv_compute: Keys per step of the computation.
    """

    block_q: int = 512
    block_kv: int = 512
    block_kv_compute: int = 512

    def __post_init__(self) -> None:
        check_blocks(self, "block_q", "block_kv", "block_kv_compute")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplashBwdParams(NamedFields):
    """The blocks of the backward's kernels, multiples of 128.

    Attributes:
        block_q: Queries per block in the kernel for the gradients of key and value.
        block_kv: Keys copied to vector memory at once there.
        block_kv_compute: Keys per step of the computation there.
        block_q_dq: Queries per block in the kernel for the gradient of the query; `None` fuses both kernels, which
            computes the logits once, and writes one query gradient for each block of keys to be summed.
        block_kv_dq: Keys per block there.
    """

    block_q: int = 512
    block_kv: int = 512
    block_kv_compute: int = 512
    block_q_dq: int | None = 512
    block_kv_dq: int | None = 512

    def __post_init__(self) -> None:
        check_blocks(self, "block_q", "block_kv", "block_kv_compute")
        if (self.block_q_dq is None) != (self.block_kv_dq is None):
            raise ConfigError(
                f"block_q_dq and block_kv_dq must both be None or both be given, got {self.block_q_dq!r} and "
                f"{self.block_kv_dq!r}."
            )
        if self.block_q_dq is not None:
            check_blocks(self, "block_q_dq", "block_kv_dq")

    @property
    def fused(self) -> bool:
        """Whether one kernel computes all gradients."""
        return self.block_q_dq is None


class Splash(AttentionImplementation):
    """JAX's splash attention, on TPUs."""

    name = "splash"
    params = SplashParams
    bwd_params = SplashBwdParams
    features = frozenset(("query_lengths", "key_lengths", "return_lse", "deterministic"))
    published = PublishedTable("splash")

    def published_as(self, call: AttentionCall) -> Facts | None:
        """Return lengths, head dimensions, direction and mask; blocks do not depend on the number of heads."""
        rules = Rules(scale=call.rules.scale, right=call.rules.right)
        plain = dataclasses.replace(call, segments=False, query_lengths=False, key_lengths=False)
        if call != plain or call.rules != rules or rules.right not in (None, 0) or call.dtype != "bfloat16":
            return None
        lengths = {"queries": call.query[1], "keys": call.key[1]}
        sizes = {"head_dim": call.query[3], "value_dim": call.value[3]}
        return lengths | sizes | {"causal": int(rules.right == 0), "backward": int(call.backward)}

    def unsupported(self, call: AttentionCall) -> str | None:
        """Return why the kernels do not support the call, with an alternative; `None` if they do."""
        return unsupported_reason(call, self.name) or scale_reason(call, self.name) or self._memory_reason(call)

    def _memory_reason(self, call: AttentionCall) -> str | None:
        if self.doubt(call, self.params_type(backward=call.backward)()) is None or self._fitting(call):
            return None
        doubt = self.doubt(call, self.every(call)[0])
        return f"query is {call.query} and value {call.value}; use 'xla'. With the smallest blocks of splash {doubt}"

    def heuristic(self, call: AttentionCall) -> SplashParams | SplashBwdParams:
        """Return the default blocks, or the largest that fit in memory."""
        usual: SplashParams | SplashBwdParams = self.params_type(backward=call.backward)()
        if self.doubt(call, usual) is None:
            return usual
        return max(self._fitting(call), key=lambda own: (own.block_q * own.block_kv, own.block_kv_compute))

    def _fitting(self, call: AttentionCall) -> list[SplashParams | SplashBwdParams]:
        """Return the blocks of the space that surely fit in memory."""
        return [params for params in self.space(call) if self.doubt(call, params) is None]

    def params_fault(self, call: AttentionCall, params: SplashParams | SplashBwdParams) -> str | None:
        """Return why these blocks exceed the memory of a TPU; `None` if they may fit."""
        return vector_memory(call, blocks_of(params)).fault(memory_of(call), call)

    def doubt(self, call: AttentionCall, params: SplashParams | SplashBwdParams) -> str | None:
        """See `Implementation`."""
        return vector_memory(call, blocks_of(params)).doubt(untuned_of(call), call)

    def preference(self, call: AttentionCall) -> int:
        """Rank behind `xla`: no TPU has measured these kernels for us."""
        return -1

    def space(self, call: AttentionCall) -> list[Any]:
        """Return the blocks that may fit in memory and are at most as long as the sequences."""
        return [params for params in self.every(call) if self.params_fault(call, params) is None]

    def every(self, call: AttentionCall) -> list[Any]:
        """Return the blocks that are at most as long as the sequences, also those that exceed the memory."""
        blocks = _candidate_blocks(call)
        if not call.backward:
            return [SplashParams(block_q=q, block_kv=k, block_kv_compute=c) for q, k, c in blocks]
        return [
            SplashBwdParams(block_q=q, block_kv=k, block_kv_compute=c, block_q_dq=own and q, block_kv_dq=own and k)
            for (q, k, c), own in itertools.product(blocks, (1, None))
        ]

    def attend(self, operands: Operands, rules: Rules, params: SplashParams) -> tuple[jax.Array, jax.Array]:
        """Return the output and the log-sum-exp, without sinks."""
        operands = unify_varying(operands)
        sizes = _Sizes.of(operands, (params.block_q, params.block_kv, params.block_kv_compute))
        segments = segment_ids(operands, rules, (sizes.padded_queries, sizes.padded_keys))
        query, key, value = sizes.arrays(operands, rules)
        run = functools.partial(
            compat.splash.splash_forward,
            mask=sizes.mask(rules),
            blocks=sizes.blocks,
            soft_cap=rules.soft_cap,
            memory=_memory(operands, rules, "forward", sizes.blocks),
        )
        out, lse = jax.vmap(run)((query, key, value), segments)
        out, lse = heads_last(out, sizes.queries), lse[:, :, : sizes.queries]
        empty = lse <= compat.splash.HIDDEN_LOGIT / 2  # false for NaN, which stays visible
        out = jnp.where(empty.transpose(0, 2, 1)[..., None], 0, out)
        return out, jnp.where(empty, EMPTY_ROW_LSE, lse)

    def differentiate(
        self,
        operands: Operands,
        residuals: Residuals,
        dout: jax.Array,
        rules: Rules,
        params: SplashBwdParams,
        dlse: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return the gradients of query, key and value."""
        operands, (out, lse), dout, dlse = unify_varying((operands, residuals, dout, dlse))
        delta = jnp.einsum("bqhd,bqhd->bhq", out, dout, preferred_element_type=jnp.float32)
        rows = (lse, dout.astype(operands.query.dtype), delta if dlse is None else delta - dlse)
        pull = functools.partial(_pull, operands, rows, rules)
        blocks = blocks_of(params)
        if "fused" in blocks:
            dquery, dkey, dvalue = pull("all", blocks["fused"])
        else:
            _, dkey, dvalue = pull("key and value", blocks["keys"])
            dquery, _, _ = pull("query", blocks["query"])
        dquery = (dquery.astype(jnp.float32) * rules.scale).astype(operands.query.dtype)
        return dquery, dkey.astype(operands.key.dtype), dvalue.astype(operands.value.dtype), None


def blocks_of(params: SplashParams | SplashBwdParams) -> dict[str, tuple[int, int, int]]:
    """Return the blocks of each kernel by the name of its kind: see `vector_memory`."""
    blocks = (params.block_q, params.block_kv, params.block_kv_compute)
    if isinstance(params, SplashParams):
        return {"forward": blocks}
    if params.block_q_dq is None or params.block_kv_dq is None:
        return {"fused": blocks}
    return {"keys": blocks, "query": (params.block_q_dq, params.block_kv_dq, params.block_kv_dq)}


def _memory(
    operands: Operands, rules: Rules, name: str, blocks: compat.splash.SplashBlocks
) -> compat.launches.KernelMemory:
    """Return the memory of the launch; the chip is unknown here, so the limit is for the largest kernels."""
    call = describe(operands, rules, platform="tpu", fingerprint=_MOST_MEMORY)
    return memory_to_pass(vector_memory(call, {name: blocks}), operands[:3])


def _pull(operands: Operands, rows: tuple[Any, ...], rules: Rules, of: str, blocks: tuple[int, int, int]) -> Any:
    """Return the gradients of query, key and value from one kernel, `None` for those of the other."""
    sizes = _Sizes.of(operands, blocks)
    segments = segment_ids(operands, rules, (sizes.padded_queries, sizes.padded_keys))
    lse, dout, delta = rows
    more = ((0, 0), (0, 0), (0, sizes.padded_queries - sizes.queries))
    lse = jnp.pad(lse, more, constant_values=EMPTY_ROW_LSE)
    arrays = (*sizes.arrays(operands, rules), lse, heads_first(dout, sizes.padded_queries), jnp.pad(delta, more))
    name = {"all": "fused", "key and value": "keys"}.get(of, of)
    run = functools.partial(
        compat.splash.splash_backward,
        of=of,
        mask=sizes.mask(rules),
        blocks=sizes.blocks,
        soft_cap=rules.soft_cap,
        memory=_memory(operands, rules, name, sizes.blocks),
    )
    found = jax.vmap(run)(arrays, segments)
    lengths = (sizes.queries, sizes.keys, sizes.keys)
    return [None if x is None else heads_last(x, length) for x, length in zip(found, lengths, strict=True)]


class _Sizes(NamedTuple):
    """Lengths with and without padding, heads, and blocks that divide the padded lengths."""

    queries: int
    keys: int
    padded_queries: int
    padded_keys: int
    heads: int
    blocks: compat.splash.SplashBlocks

    @classmethod
    def of(cls, operands: Operands, blocks: tuple[int, int, int]) -> _Sizes:
        queries, keys, heads = operands.query.shape[1], operands.key.shape[1], operands.query.shape[2]
        clipped = clipped_blocks(queries, keys, blocks)
        padded = (-(-queries // clipped.queries) * clipped.queries, -(-keys // clipped.keys) * clipped.keys)
        return cls(queries, keys, *padded, heads, clipped)

    def mask(self, rules: Rules) -> compat.splash.SplashMask:
        offset = self.keys - self.queries  # the last query is aligned with the last key
        return compat.splash.SplashMask(
            self.padded_queries, self.padded_keys, self.heads, offset, rules.left, rules.right
        )

    def arrays(self, operands: Operands, rules: Rules) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the scaled query, key and value in the kernels' layout, zero where they are hidden by a length."""
        query = (operands.query.astype(jnp.float32) * rules.scale).astype(operands.query.dtype)
        key, value = (without_rest(x, operands.key_lengths) for x in (operands.key, operands.value))
        return (
            heads_first(query, self.padded_queries),
            heads_first(key, self.padded_keys),
            heads_first(value, self.padded_keys),
        )


def _candidate_blocks(call: AttentionCall) -> list[tuple[int, int, int]]:
    """Return blocks of queries, keys and steps, none longer than the sequences; small ones for short sequences."""
    queries, keys = ([size for size in _SIZES if _fits(size, length)] for length in (call.query[1], call.key[1]))
    found = itertools.product(queries or [LANES], keys or [LANES], _STEPS)
    return [(q, k, c) for q, k, c in found if c <= k and (c > LANES or k < 2 * LANES)]


def _fits(size: int, length: int) -> bool:
    return size < length + LANES and (size > LANES or length < 4 * LANES)
