# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the forward and backward kernels."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._options import POSITIVE, check_parameters
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.messages.names import NamedFields

# Keys are columns of one WGMMA, at most 256, and the summed axis of the other, in steps of 16.
_KV_BLOCKS = range(16, 257, 16)
_BACKWARD_KV_BLOCKS = {"fused": (0,), "split": (32, 64, 96, 128), "unfused": (128, 256)}  # by form


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardParams(NamedFields):
    """Launch parameters of the forward; they do not change the result.

    A block of threads has one producer warpgroup and `warpgroups` consumer warpgroups, each with 64 query rows.
    It walks over the keys, `kv_block` at a time.

    Attributes:
        kv_block: Keys per step of the mainloop; a multiple of 16, at most 256.
        stages: Pipeline stages of keys and values.
        warpgroups: Consumer warpgroups, 1 to 3.
        overlap: Whether a consumer's softmax of one block overlaps with its product for the previous block's values.
        ping_pong: Whether consumers take turns at the tensor core, so that one's softmax overlaps with another's
            products.
        persistent: Whether one block of threads per multiprocessor takes tile after tile.
        query_buffers: Buffers for the queries of a tile, 1 or 2; 2 only if persistent.
        pack_heads: Whether the consumers of a tile take the same rows of several heads of one group, rather than
            several 64-row parts of one head.
        share_buffer: Whether the output is staged in the buffer of the queries.
        heads_first: The tile order: all tiles of one group of heads before the next group, rather than the last rows of
            all heads, of as many examples as the cache holds keys for, before earlier rows.
        fma_columns: Of the keys of an unmasked step, those whose exponentials are polynomials on the FMA units, beside
            the others on the slower unit for transcendental functions; a multiple of 8.
        align_keys: Whether keys and values are first copied to rows of whole sectors of memory, which have 32 bytes;
            for head dimensions that are not multiples of 16.
        key_parts: Parts of the keys that count as further examples, for few queries that see all keys. XLA combines
            their outputs. A number that does not divide the keys is reduced to the greatest common divisor.
        alone: Whether one or two consumers, each with 64 queries, compute whole heads of at most 128 queries and keys,
            without the others. They then have `stages` heads in shared memory, or as many bundles of heads of up to 32
            tokens.
    """

    kv_block: int = 128
    stages: int = 2
    warpgroups: int = 2
    overlap: bool = True
    ping_pong: bool = True
    persistent: bool = False
    query_buffers: int = 1
    pack_heads: bool = False
    share_buffer: bool = False
    heads_first: bool = False
    fma_columns: int = 0
    align_keys: bool = False
    key_parts: int = 1
    alone: bool = False

    def __post_init__(self) -> None:
        check_parameters(
            self,
            kv_block=_KV_BLOCKS,
            stages=range(1, 9),
            warpgroups=range(1, 4),
            query_buffers=(1, 2),
            fma_columns=range(0, 257, 8),
            key_parts=POSITIVE,
        )
        if self.fma_columns > self.kv_block:
            raise ConfigError(f"fma_columns must be at most kv_block, {self.kv_block}, got {self.fma_columns}.")
        if self.query_buffers > 1 and not self.persistent:
            raise ConfigError(f"query_buffers must be 1 unless persistent=True, got {self.query_buffers}.")

    def without_persistence(self) -> ForwardParams:
        """Return parameters for a launch with one block of threads per tile.

        Other kernels, such as copies between devices, may hold some multiprocessors. Blocks of a persistent launch then
        wait for these, and a launch of 6.3 ms took 12 ms.
        """
        return dataclasses.replace(self, persistent=False, query_buffers=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackwardParams(NamedFields):
    """Launch parameters of the backward.

    A block of threads of the first kernel owns some keys and walks over the queries that see them. In the split form a
    second kernel, with blocks that own queries, recomputes the scores for the gradient of the queries.

    Attributes:
        form: `fused`: the first kernel adds the query's gradient to float32 memory, in nondeterministic order; `split`:
            two kernels, with reproducible results; `unfused`, for wide heads only: a kernel writes the weights
            and the scores' gradient to memory, and XLA multiplies them; `alone`, for at most 128 queries and keys: one
            or two of the `warpgroups` consumers compute whole heads, and have `q_stages` of them in shared memory.
        division: `keys`: each consumer owns 64 keys and computes all their products; `products`: for the same 64 keys,
            one consumer computes the probabilities and the value's gradient, the other the scores' gradient and the
            key's.
        warpgroups: Consumer warpgroups of the first kernel; 2 for `division='products'`.
        q_block: Queries in a step of the first kernel.
        q_stages: Pipeline stages of queries.
        dout_stages: Pipeline stages of the output's cotangent.
        kv_block: Keys in a step of the second kernel; 0 in the fused form, like the two fields below. Keys of a tile in
            the unfused form, whose tiles have 128 queries and `q_stages` pipeline stages.
        kv_stages: Pipeline stages of keys and values of the second kernel. If they do not fit, values have one.
        q_warpgroups: Consumer warpgroups of the second kernel, each with 64 queries.
        head_parts: Parts into which the query heads of one key head are divided; if they divide unevenly, the first
            parts have one head more. Each part has its own blocks of threads in the first kernel. So a few key heads
            fill the chip, and the last round of blocks is full. XLA adds up the parts' gradients of keys and values.
        query_parts: Parts of the queries that count as further examples, for few keys that every query sees. A number
            that does not divide the queries is reduced to the greatest common divisor.
        key_parts: The same for keys, where the second kernel has few queries: only in the split form, and not with
            `query_parts`.
    """

    form: str = "fused"
    division: str = "keys"
    warpgroups: int = 2
    q_block: int = 64
    q_stages: int = 2
    dout_stages: int = 2
    kv_block: int = 0
    kv_stages: int = 0
    q_warpgroups: int = 0
    head_parts: int = 1
    query_parts: int = 1
    key_parts: int = 1

    def __post_init__(self) -> None:
        split = self.form == "split"
        check_parameters(
            self,
            form=("fused", "split", "unfused", "alone"),
            division=("keys", "products"),
            warpgroups=(2,) if self.division == "products" else range(1, 4),
            q_block=(64, 128, 192),
            q_stages=range(1, 7),
            dout_stages=range(1, 5),
            kv_block=_BACKWARD_KV_BLOCKS.get(self.form, (0,)),
            kv_stages=range(1, 5) if split else (0,),
            q_warpgroups=range(1, 4) if split else (0,),
            head_parts=POSITIVE,
            query_parts=POSITIVE,
            key_parts=POSITIVE,
        )
        if self.key_parts > 1 and (self.query_parts > 1 or not split):
            raise ConfigError(f"key_parts must be 1 unless form='split' and query_parts=1, got {self.key_parts}.")

    @property
    def keys(self) -> int:
        """Keys of a block of threads of the first kernel."""
        return 64 if self.division == "products" else 64 * self.warpgroups
