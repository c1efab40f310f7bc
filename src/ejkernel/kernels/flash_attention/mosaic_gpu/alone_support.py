# SPDX-License-Identifier: Apache-2.0
"""Launches of `alone`, the kernels of short sequences: sizes, supported calls and parameters.

The other kernels have a block of threads, or at least a tile of a persistent launch, for each head of each example.
With thousands of short examples, nearly all of their time passes between tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ejkernel.kernels._hopper import MULTIPROCESSORS, SHARED_MEMORY
from ejkernel.kernels.flash_attention.common import AttentionCall

from .backward_plan import Buffer, padded_dim, shared_bytes
from .params import BackwardParams, ForwardParams
from .plan import ROWS, AttentionSizes, sizes_of, variation

_WIDEST = 128  # columns: wider matrices do not fit into the registers
_FEW = 32  # rows; with 16, pieces would be half as wide
_LONGEST = 2 * ROWS
_RAISED = 14  # an exponent: weights, which are at most 1, keep most digits in float16


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlonePlan(AttentionSizes):
    """One launch.

    Matrices are in slabs of 64 rows. A head has a team of consumers, one for each slab of queries; in the backward,
    each of them also computes the gradients of a slab of keys. Several heads of up to 32 tokens are one bundle: they
    share a slab, one after the other, and a matrix of scores, where each sees its keys. A key head is there once for
    all heads of the bundle that share it.

    Attributes:
        dtype: Of the operands of products.
        single: Whether the arrays are in float32, and the kernel converts them.
        key_lengths: Whether examples have key lengths.
        bias: The first two sizes of the bias; `None` without one.
        own_keys: Whether heads hide keys of their own, so that each copies, and converts, its keys.
        backward: Whether the launch computes gradients.
        raised: As in `BackwardProblem`.
        consumers: Consumer warpgroups.
        stages: Heads in the shared memory of each team.
    """

    dtype: str
    single: bool
    key_lengths: bool
    bias: tuple[int, ...] | None
    own_keys: bool
    backward: bool
    raised: int
    consumers: int
    stages: int

    @property
    def team(self) -> int:
        """Consumers of a team."""
        return -(-(max(self.queries, self.keys) if self.backward else self.queries) // ROWS)

    @property
    def teams(self) -> int:
        """Teams of a block of threads."""
        return self.consumers // self.team

    @property
    def together(self) -> int:
        """Heads of a bundle: the smallest number that minimises the bundles of each multiprocessor."""
        return min((1, *self._bundles_that_fit), key=lambda n: -(-self.batch * self.heads // (n * MULTIPROCESSORS)))

    @property
    def _bundles_that_fit(self) -> list[int]:
        sizes = {n: max(n * self.queries, n // self._sharing(n) * self.keys) for n in (2, 4, 8)}
        return [n for n, size in sizes.items() if size <= ROWS and self.heads % n == 0]

    def _sharing(self, together: int) -> int:
        return 1 if self.own_keys else math.gcd(together, self.heads // self.groups)

    @property
    def sharing(self) -> int:
        """Heads of a bundle that share the rows of a key head."""
        return self._sharing(self.together)

    @property
    def key_heads(self) -> int:
        """Key heads of a bundle."""
        return self.together // self.sharing

    @property
    def tokens(self) -> int:
        """Rows of a head in a slab of queries."""
        return ROWS // self.together

    @property
    def key_tokens(self) -> int:
        """Rows of a key head in a slab that products take."""
        return self.key_rows // self.key_heads

    @property
    def bundles(self) -> int:
        """Bundles of an example."""
        return self.heads // self.together

    @property
    def items(self) -> int:
        """Bundles of all examples."""
        return self.batch * self.bundles

    @property
    def keeps_heads(self) -> bool:
        """Whether a block of threads has one bundle of many examples, and adds up the gradients of their bias."""
        return self.bias is not None and self.bias[0] == 1

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        if self.keeps_heads:
            return self.bundles * max(1, min(MULTIPROCESSORS // self.bundles, self.batch))
        return min(MULTIPROCESSORS, self.items)

    @property
    def key_rows(self) -> int:
        """Rows of a slab of keys that products take."""
        if self.single and self.key_heads > 1:  # the kernel converts whole slabs
            return ROWS
        return _FEW if self.key_heads * self.keys <= _FEW else ROWS

    @property
    def key_slabs(self) -> int:
        """Slabs of keys."""
        return self.team if self.backward else -(-self.keys // self.key_rows)

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the copied operands."""
        return ("query", "key", "value", "dout") if self.backward else ("query", "key", "value")

    def slabs(self, name: str) -> int:
        """Return the slabs of an operand."""
        return self.key_slabs if name in ("key", "value") else self.team

    def rows(self, name: str) -> int:
        """Return how many rows of an operand's slab products by rows take."""
        if name in ("key", "value"):
            return self.key_rows
        return _FEW if self.queries <= _FEW and self.together == 1 else ROWS

    def heads_of(self, name: str) -> int:
        """Return how many heads of an operand a bundle has."""
        return self.key_heads if name in ("key", "value") else self.together

    @property
    def columns(self) -> int:
        """Keys of a matrix of scores."""
        return self.key_slabs * self.key_rows

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers in shared memory. Gradients leave through those of the operands."""
        count = self.teams if self.single else self.teams * self.stages
        # A product takes whole tiles: no piece has more columns than rows that are summed. And both factors have the
        # same swizzle.
        few = min(self.key_rows, self.rows("query")) if self.backward else self.key_rows
        # `vmap` folds examples into the batch after the memory was checked: then heads are bundled, in whole slabs.
        whole = self.backward or self.single or bool(self._bundles_that_fit)
        buffers: dict[str, Buffer] = {}
        for name in self.operands:
            dim = self.value_dim if name in ("value", "dout") else self.head_dim
            # The other kernels copy, and multiply, these rows.
            rows = ROWS if whole or name == "query" else self.key_rows
            columns = few if self.backward or name == "value" else 0
            buffers[name] = Buffer((count, self.slabs(name), rows, dim), columns=columns)
            if self.single:
                buffers[f"staged_{name}"] = Buffer((count * self.stages, self.slabs(name), ROWS, dim), itemsize=4)
        if self.single:
            buffers["largest"] = Buffer((self.teams, 2, self.team * ROWS), itemsize=4)
        if not self.backward:
            return buffers | {"out": Buffer((self.consumers, ROWS, self.value_dim), itemsize=4 if self.single else 2)}
        square = (self.teams, self.team, self.team, ROWS, ROWS)
        return buffers | {
            "weights": Buffer(square, columns=math.gcd(few, self.value_dim)),
            "dscores": Buffer(square, columns=math.gcd(few, self.head_dim)),
        }


def alone_plan(call: AttentionCall, params: ForwardParams | BackwardParams, raised: int | None = None) -> AlonePlan:
    """Return the launch.

    The kernel converts float32 where memory allows: XLA converts before gradients of two consumers, and wide heads that
    would need two. It also does where wide heads share keys, which the kernel would convert for each head: 279 us
    instead of 361, 761 instead of 1,208.
    """
    plan = AlonePlan(
        **sizes_of(call, padded_dim),
        dtype="float16" if call.dtype == "float32" else call.dtype,
        single=False,
        key_lengths=call.key_lengths,
        bias=None if call.bias is None else call.bias[:2],
        own_keys=call.attention_mask is not None and call.attention_mask[1] > 1 and call.attention_mask[2] == 1,
        backward=isinstance(params, BackwardParams),
        raised=raised or 0,
        consumers=params.warpgroups,
        stages=params.q_stages if isinstance(params, BackwardParams) else params.stages,
    )
    is_wide, shares = max(plan.head_dim, plan.value_dim) > 64, plan.heads > plan.groups and plan.together == 1
    divides = plan.team == 2 and (is_wide or plan.backward or plan.key_slabs < plan.team)
    if call.dtype != "float32" or divides or (is_wide and shares):
        return plan
    return dataclasses.replace(plan, single=True, raised=_RAISED)


def is_alone(params: ForwardParams | BackwardParams) -> bool:
    """Return whether these kernels have parameters."""
    return params.alone if isinstance(params, ForwardParams) else params.form == "alone"


def alone_fault(call: AttentionCall, params: ForwardParams | BackwardParams) -> str | None:
    """Return why these kernels do not run a call with these parameters; `None` if they do."""
    name = "alone=True" if isinstance(params, ForwardParams) else "form='alone'"
    reason = _reason(call)
    if reason is not None:
        return f"{name} {reason}"
    plan = alone_plan(call, params)
    if params != _params(call, plan.consumers, plan.stages):
        return f"{name} takes warpgroups and stages, and the defaults of all other parameters; got {params}."
    if params.warpgroups % plan.team:
        return (
            f"{name} takes a multiple of {plan.team} warpgroups for {call.query[1]} queries, got {params.warpgroups}."
        )
    needed = shared_bytes(plan.buffers)
    if needed > SHARED_MEMORY:
        return f"{params} needs {needed} bytes of shared memory; a block of threads has {SHARED_MEMORY}."
    return None


def alone_heuristic(call: AttentionCall) -> Any:
    """Return good parameters of these kernels; `None` if they do not run the call, or others should be faster.

    Up to 64 queries and keys, they took 0.11 to 0.96 of the others' time. Up to 128, forwards of 64 columns took 0.69
    to 0.95 of it, but as long with more columns, 22 us instead of 19 with shared keys, and 3.4 instead of 2.7 with few
    heads; with a bias 82 us instead of 54, and 89 instead of 74 with a mask that differs between queries. Gradients
    took 0.35 to 0.68 of it with 64 columns, and 0.94 to 0.98 with more; but 14.8 us instead of 11.3 with few heads of
    128 columns, and 494 instead of 382 with 64 queries and 128 keys. Forwards in float32, which others convert before,
    took 39 us instead of 60. For a single query of heads that share keys, cuDNN
    took 18 us forward, and these 31.
    """
    params, (batch, queries, heads, dim), own = next(alone_space(call), None), call.query, call.query[2] == call.key[2]
    if params is None or (queries == 1 and not own and not call.backward):
        return None
    plan = alone_plan(call, params)
    if plan.team == 1 or plan.single:
        return params
    narrow, many = max(dim, call.value[3]) <= 64, call.examples * batch * heads > MULTIPROCESSORS
    by_query = "block" in (variation(call.bias, call), variation(call.attention_mask, call))
    if call.backward:
        # In float16, XLA finds the range of the cotangent first: 91 us, and 72 by cuDNN, for 64 examples of 100 tokens.
        gains = many and own and not by_query and min(queries, call.key[1]) > ROWS and call.dtype != "float16"
        return params if narrow or gains else None
    return params if narrow and many and own and not by_query else None


def alone_space(call: AttentionCall) -> Iterator[Any]:
    """Yield the parameters of these kernels that run a call, the best first."""
    if _reason(call) is not None:
        return
    # With two consumers of 128 queries, three stages instead of two: 55 us instead of 59, 56 instead of 61, 82 instead
    # of 87. With three consumers: 163 instead of 173 and 118 instead of 125, but 71 instead of 67, 212 instead of 200.
    sizes = ((3, 2), (2, 3), (2, 2), (3, 1), (2, 1), (3, 3)) if not call.backward else ((3, 2), (2, 2), (3, 1), (2, 1))
    if call.dtype == "float32":
        sizes = (*sizes, (1, 1))
    for warpgroups, stages in sizes:
        params = _params(call, warpgroups, stages)
        if alone_fault(call, params) is None:
            yield params


def _params(call: AttentionCall, warpgroups: int, stages: int) -> ForwardParams | BackwardParams:
    if call.backward:
        return BackwardParams(form="alone", warpgroups=warpgroups, q_stages=stages)
    return ForwardParams(alone=True, kv_block=ROWS, warpgroups=warpgroups, stages=stages)


def _reason(call: AttentionCall) -> str | None:
    """Return why these kernels do not run a call with any parameters; `None` if they do."""
    rules, longest = call.rules, max(call.query[1], call.key[1])
    given = {
        "a bias below a soft cap": call.bias is not None and rules.soft_cap is not None and rules.cap_after_bias,
        f"the gradient of a bias beyond {ROWS} tokens": call.backward and call.bias is not None and longest > ROWS,
        "segment ids": call.segments,
        "query_lengths": call.query_lengths,
        "dropout": rules.dropout_rate > 0,
        "a backward of partial keys": call.backward and rules.partial,
    }
    found = next((text for text, is_given in given.items() if is_given), None)
    if found is not None:
        return f"does not support {found}."
    if longest > _LONGEST:
        return f"takes at most {_LONGEST} queries and keys, got {call.query[1]} and {call.key[1]}."
    if max(call.query[3], call.value[3]) > _WIDEST:
        return f"takes at most {_WIDEST} columns, got {call.query[3]} and {call.value[3]}."
    return None
