# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the forward."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.errors import ConfigError

# Keys are columns of one product, at most 256, and are summed over in the other, at least 16 at a time.
_KV_BLOCKS = range(16, 257, 16)
_STAGES = range(1, 9)
_WARPGROUPS = range(1, 4)
_QUERY_BUFFERS = range(1, 3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardParams:
    """How the forward is laid out on a multiprocessor; none of it changes what is computed.

    A block of threads is one warpgroup that copies and `warpgroups` that compute, each of which owns 64 rows of
    queries. It walks over the keys, `kv_block` at a time.

    Attributes:
        kv_block: Keys that are met at a time; a multiple of 16, at most 256.
        stages: How many blocks of keys and values are held at once.
        warpgroups: Warpgroups that compute, 1 to 3.
        overlap: Whether a warpgroup's softmax of one block runs beside its product with the values of the block before.
        ping_pong: Whether warpgroups take turns at the tensor cores, so that one's softmax runs beside another's
            products.
        persistent: Whether there are only as many blocks of threads as multiprocessors, each of which takes tile after
            tile.
        query_buffers: How many tiles' queries are held at once, 1 or 2; 2 only if persistent.
        pack_heads: Whether the warpgroups of a tile are given the same rows of as many heads of one group, rather than
            as many times the rows of one head.
        share_buffer: Whether the output is staged where the queries were.
        heads_first: Whether all tiles of a group of heads come before those of the next, rather than all heads of the
            last rows before those of the rows before.
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

    def __post_init__(self) -> None:
        _check("kv_block", self.kv_block, _KV_BLOCKS, "a multiple of 16 from 16 to 256")
        _check("stages", self.stages, _STAGES, "from 1 to 8")
        _check("warpgroups", self.warpgroups, _WARPGROUPS, "from 1 to 3")
        _check("query_buffers", self.query_buffers, _QUERY_BUFFERS, "1 or 2")
        if self.query_buffers > 1 and not self.persistent:
            raise ConfigError(f"query_buffers must be 1 unless persistent=True, got {self.query_buffers}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and type(value) is not bool:
                raise ConfigError(f"{field.name} must be True or False, got {value!r}.")


def _check(name: str, value: object, allowed: range, wanted: str) -> None:
    if type(value) is not int or value not in allowed:
        raise ConfigError(f"{name} must be {wanted}, got {value!r}.")
