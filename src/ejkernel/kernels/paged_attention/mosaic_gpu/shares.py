# SPDX-License-Identifier: Apache-2.0
"""The sum of the shares of an item that several programs computed: the part common to the second kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.device import quotient
from ejkernel.kernels._hopper.launch import plgpu

from .memory import LAYOUT, Item, Work

_LOWEST = -1e30


class SumInputs(NamedTuple):
    """Arrays in global memory; `out` and `lse` are written in place.

    Attributes:
        tiles, programs: As in `Schedule`.
        shares: Of each program those of its first and of its last item.
        share_lse: Their log-sum-exp, to the base 2.
        sinks, scale: Sinks, and scales of the values; `None` in calls without.
        out, lse: The results of the first kernel.
    """

    tiles: Any
    programs: Any
    shares: Any
    share_lse: Any
    sinks: Any
    scale: Any
    out: Any
    lse: Any


class Shares(NamedTuple):
    """How the shares of an item are read.

    Attributes:
        shape: Shape of a share.
        axis: The axis of a share with one softmax for each element.
        together: Shares that are loaded at once.
        load: Returns a share by its index in `SumInputs.shares`.
        load_lse: Returns its log-sum-exp.
    """

    shape: tuple[int, int]
    axis: int
    together: int
    load: Callable[[Any], Any]
    load_lse: Callable[[Any], Any]

    def across(self, vector: Any) -> Any:
        """Return one number for each softmax, broadcast to the shape of a share."""
        return lax.broadcast_in_dim(vector, self.shape, [self.axis])


class Sum(NamedTuple):
    """The sum of some shares."""

    acc: Any  # of the weighted shares
    top: Any  # the maximum to which weights are relative, to the base 2
    total: Any  # the sum of the weights


def when_begun_here(work: Work, item: Item, body: Callable[[], None]) -> None:
    """Run `body` if the last item of this program begins in it and ends in another."""
    pl.when((work.last_item >= 0) & work.begins(item) & jnp.logical_not(work.ends(item)))(body)


def summed(shares: Shares, program: Any, item: Item, work: Work) -> Sum:
    """Return the sum of the shares of an item that begins in this program."""
    missing = item.blocks - work.end_block
    count = 1 + lax.div(missing + work.share - 1, work.share)
    by_row, rows = LAYOUT.reduce(1 - shares.axis), (shares.shape[shares.axis],)
    state = Sum(
        plgpu.layout_cast(jnp.full(shares.shape, 0, jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.full(rows, _LOWEST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.full(rows, 0, jnp.float32), by_row),
    )
    rounds = quotient(count + shares.together - 1, shares.together)
    found: Sum = lax.fori_loop(0, rounds, functools.partial(_add, shares, program, count), state)
    return found


def _add(shares: Shares, program: Any, count: Any, index: Any, state: Sum) -> Sum:
    """Return the sum with some more shares."""
    loaded, lses = [], []
    for i in range(shares.together):
        number = index * shares.together + i
        own = jnp.minimum(number, count - 1)
        # The first program left the share of its last item, the others that of their first.
        slot = 2 * (program + own) + (own == 0).astype(jnp.int32)
        lses.append(shares.load_lse(slot) + jnp.where(number < count, 0.0, -jnp.inf))
        loaded.append(shares.load(slot))
    top = functools.reduce(jnp.maximum, lses, state.top)
    decay = jnp.exp2(state.top - top)
    acc, total = state.acc * shares.across(decay), state.total * decay
    for share, lse in zip(loaded, lses, strict=True):
        weight = jnp.exp2(lse - top)
        acc, total = acc + share * shares.across(weight), total + weight
    return Sum(acc, top, total)
