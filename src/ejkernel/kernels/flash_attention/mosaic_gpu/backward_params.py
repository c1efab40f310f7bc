# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the backward kernels."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.errors import ConfigError

FORMS = ("fused", "split")
DIVISIONS = ("keys", "products")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackwardParams:
    """How the gradients are computed.

    A block of the first kernel owns some keys and walks over the queries that see them. In the split form a second
    kernel, whose blocks own queries, computes the query's gradient, and the scores once more.

    Attributes:
        form: `fused`: the first kernel adds the query's gradient into float32 memory, in an order that differs from
            run to run; `split`: two kernels, whose results repeat bit by bit.
        division: What the warpgroups of a block of keys divide: `keys`: each has 64 of its own and computes all
            products of them; `products`: one computes the probabilities of 64 keys and the value's gradient, the
            other the scores' gradient and the key's.
        warpgroups: Warpgroups that compute, beside the one that loads; `division='products'` takes 2.
        q_block: Queries in a step of the first kernel.
        q_stages: Tiles of queries that are in shared memory at once.
        dout_stages: Tiles of the output's cotangent, likewise.
        kv_block: Keys in a step of the second kernel; 0 in the fused form, as are the two fields below.
        kv_stages: Tiles of keys, and of values, that are in shared memory at once.
        q_warpgroups: Warpgroups of the second kernel, each with 64 queries.
        head_parts: Into how many parts the heads that read one key head are divided. Each part has blocks of its own in
            the first kernel, so that few key heads fill the chip; the parts' gradients of keys and values are added up
            after it.
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

    def __post_init__(self) -> None:
        _require_one_of("form", self.form, FORMS)
        _require_one_of("division", self.division, DIVISIONS)
        _require_one_of("warpgroups", self.warpgroups, (2,) if self.division == "products" else (1, 2, 3))
        _require_one_of("q_block", self.q_block, (64, 128, 192))
        _require_one_of("q_stages", self.q_stages, (1, 2, 3, 4))
        _require_one_of("dout_stages", self.dout_stages, (1, 2, 3, 4))
        split = self.form == "split"
        _require_one_of("kv_block", self.kv_block, (32, 64, 96, 128) if split else (0,))
        _require_one_of("kv_stages", self.kv_stages, (1, 2, 3, 4) if split else (0,))
        _require_one_of("q_warpgroups", self.q_warpgroups, (1, 2, 3) if split else (0,))
        if type(self.head_parts) is not int or self.head_parts < 1:
            raise ConfigError(f"head_parts must be an int of at least 1, got {self.head_parts!r}.")

    @property
    def keys(self) -> int:
        """How many keys a block of the first kernel owns."""
        return 64 if self.division == "products" else 64 * self.warpgroups


def _require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ConfigError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}.")
