# SPDX-License-Identifier: Apache-2.0
"""Epilogues: a tile of logits becomes statistics, exponentials, or a gradient.

An epilogue has two halves. `pack` follows the products at once and turns the accumulator into 16-bit numbers. `finish`
takes the exponentials, piece by piece, while the tensor cores compute the next tile: a tile and its packed predecessor
fit in the registers together.

Packed numbers are float16. Without a soft cap they are exponents in base 2 relative to the largest of the row's in this
tile, or to the log-sum-exp, so those that matter are near 0, where float16 is precise: a sum of exponentials is off by
less than 1e-4, and by nothing where one logit dominates. With a soft cap they are the argument of `tanh`, whose
approximation on the GPU is no more precise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._hopper.tile_shapes import ROWS

from .plan import EXPONENTIALS, GRADIENT, STATISTICS, HeadPlan

LOG2E = 1.4426950408889634
DTYPE = jnp.bfloat16
PACKED = jnp.float16
_LEAST = -60000.0  # a finite exponent in `PACKED`, of which the exponential is 0


class Tile(NamedTuple):
    """A warpgroup's part of a tile: its first row, and the column of tiles."""

    row: Any
    column_tile: Any


class Packed(NamedTuple):
    """A tile between the halves of its epilogue.

    Attributes:
        tile: Its position.
        pieces: The packed numbers, `[64, 32]` each; `None` for those that are finished.
        rows: A number per row: what an exponent lacks, or what its exponential is relative to; `None` if not needed.
        sums: The sums per row of the finished pieces, by name.
    """

    tile: Tile
    pieces: tuple[Any, ...]
    rows: Any
    sums: dict[str, Any]


class Epilogue:
    """The epilogue of one launch, on references.

    Attributes:
        plan: The launch.
        bias, labels: As in `run_head`; `bias` is `None` without one.
        has_labels: Where labels are; `None` for a gradient.
        first_column: The first column of this launch.
        per_row: Float32 references with a number per row: those that `run_head` takes last.
        parts: References of the results with one number per row and tile, by name.
        out: The matrix; `None` without one.
        slots: This warpgroup's staging buffers; `None` without a matrix.
    """

    def __init__(
        self,
        plan: HeadPlan,
        *,
        bias: Any,
        labels: Any,
        has_labels: Any,
        first_column: Any,
        per_row: Sequence[Any],
        parts: dict[str, Any],
        out: Any,
        slots: Any,
    ) -> None:
        self.plan, self.bias, self.labels, self.has_labels = plan, bias, labels, has_labels
        self.first_column = first_column
        self.per_row, self.parts, self.out, self.slots = per_row, parts, out, slots
        self.is_capped = plan.soft_cap is not None
        self.may_be_removed = plan.bias or plan.may_exceed
        # The logits are this number times the values of `_raw`, or of their `tanh`.
        self.dtype = PACKED if plan.overlap else jnp.float32
        self.unit = plan.scale if plan.soft_cap is None else plan.soft_cap

    # The first half.

    def known(self, tile: Tile) -> tuple[Any, ...]:
        """Return what `pack` needs from global memory: loaded before the products, long before it is needed."""
        relative_to = self._of_rows(self.per_row[0], tile) if self.per_row else None
        if self.plan.mode == GRADIENT:
            return None, relative_to
        return self.has_labels[lax.div(tile.row, ROWS), tile.column_tile], relative_to

    def pack(self, product: Any, tile: Tile, has_label: Any, relative_to: Any) -> Packed:
        """Store the label's logit, the largest logit and the sum of logits; return the packed tile."""
        if has_label is not None:
            self._store_label(product, tile, has_label)
        raw = [self._raw(product, tile, i, remove=True) for i in range(self.plan.pieces)]
        if "sum" in self.parts:
            self._store_part("sum", tile, sum(self._logits(piece).sum(axis=1) for piece in raw))
        top = self._largest(raw, tile)
        if self.is_capped:
            rows = top if self.plan.mode == STATISTICS else relative_to
            return Packed(tile, tuple(self._argument(piece) for piece in raw), rows, {})

        is_shifted = self.plan.mode == EXPONENTIALS and self.plan.overlap
        base = top if is_shifted or self.plan.mode == STATISTICS else relative_to
        pieces = tuple(self._exponents(piece, base) for piece in raw)
        return Packed(tile, pieces, top - relative_to if is_shifted else base, {})

    def _raw(self, product: Any, tile: Tile, index: int, *, remove: bool = False) -> Any:
        """Return a piece of the product with its bias; `remove`: -inf in columns beyond the last."""
        raw = product[:, index * self.plan.piece : (index + 1) * self.plan.piece]
        if self.bias is not None:
            at = self.bias.at[pl.ds(self._first(tile) + index * self.plan.piece, self.plan.piece)]
            bias = plgpu.load(at, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return raw + lax.broadcast_in_dim(bias, raw.shape, [1])
        if remove and self.plan.may_exceed:
            return jnp.where(self._columns() < self.plan.last - self._first(tile) - index * self.plan.piece, raw, -jnp.inf)
        return raw

    def _argument(self, raw: Any) -> Any:
        """Return the packed argument of `tanh`."""
        return (raw * (self.plan.scale / self.unit)).astype(self.dtype)

    def _squashed(self, raw: Any) -> Any:
        """Return `tanh` of capped logits divided by the cap as `finish` computes it, or the same values."""
        return jnp.tanh(self._argument(raw).astype(jnp.float32)) if self.is_capped else raw

    def _logits(self, raw: Any) -> Any:
        """Return logits, 0 for removed ones."""
        s = self._squashed(raw) * self.unit
        return jnp.where(raw == -jnp.inf, 0.0, s) if self.may_be_removed else s

    def _largest(self, raw: list[Any], tile: Tile) -> Any:
        """Store each row's largest logit, and return it in base 2; 0 if all are removed."""
        is_shifted = self.plan.mode == EXPONENTIALS and self.plan.overlap and not self.is_capped
        if self.plan.mode != STATISTICS and not is_shifted and "max" not in self.parts:
            return None
        top = raw[0]
        for piece in raw[1:]:
            top = jnp.maximum(top, piece)
        top = top.max(axis=1)
        largest = self._squashed(top) * self.unit
        if self.may_be_removed:
            removed = top == -jnp.inf
            largest = jnp.where(removed, -jnp.inf, largest)
            top = jnp.where(removed, 0.0, top)
        if "max" in self.parts:
            self._store_part("max", tile, largest)
        return self._squashed(top) * (self.unit * LOG2E)

    def _exponents(self, raw: Any, base: Any) -> Any:
        """Return the packed exponents relative to a number per row."""
        t = raw * (self.unit * LOG2E) - self._wide(base)
        if self.plan.mode == GRADIENT and self.may_be_removed:
            t = jnp.where(raw == -jnp.inf, -jnp.inf, jnp.maximum(t, _LEAST))
        return t.astype(self.dtype)

    def _store_label(self, product: Any, tile: Tile, has_label: Any) -> None:
        """Store the logits at those labels that are columns of this tile."""

        @pl.when(has_label != 0)
        def _here() -> None:
            place = self._of_rows(self.labels, tile) - self._first(tile)
            found: Any = None
            for i in range(self.plan.pieces):
                hit = self._columns() == self._wide(place - i * self.plan.piece)
                raw = self._raw(product, tile, i)
                here = jnp.where(hit, raw, jnp.zeros_like(raw))
                found = here if found is None else found + here
            # The same arithmetic as for the other logits: the label's logit can be compared with the maximum.
            raw = found.sum(axis=1)
            value = self._squashed(raw) * self.unit
            if self.plan.bias and self.is_capped:
                value = jnp.where(raw == -jnp.inf, -jnp.inf, value)
            self._store_part("label", tile, value)

    # The second half.

    def finish(self, packed: Packed, pieces: range) -> Packed:
        """Finish some pieces, and with the last one store the sums per row."""
        left, sums = list(packed.pieces), packed.sums
        for index in pieces:
            value = packed.pieces[index].astype(jnp.float32)
            left[index] = None
            if self.plan.mode == GRADIENT:
                self._store_piece(self._gradient(value, packed, index), packed.tile, index)
                continue
            exponent, squashed = self._exponent(value, packed.rows)
            e = jnp.exp2(exponent)
            if self.plan.mode == EXPONENTIALS:
                self._store_piece(e * self._slope(squashed) if self.is_capped else e, packed.tile, index)
            found = {"total": e}
            if "expected" in self.parts:
                found["expected"] = e * self._finite(value, squashed, packed.rows)
            sums = {name: sums[name] + x.sum(axis=1) if sums else x.sum(axis=1) for name, x in found.items()}
        if all(piece is None for piece in left):
            for name, values in sums.items():
                self._store_part(name, packed.tile, values)
        return packed._replace(pieces=tuple(left), sums=sums)

    def _exponent(self, value: Any, rows: Any) -> tuple[Any, Any]:
        """Return the exponents of a piece, and the `tanh` of its logits divided by the cap."""
        if not self.is_capped:
            return (value + self._wide(rows) if self.plan.mode == EXPONENTIALS and self.plan.overlap else value), None
        squashed = jnp.tanh(value)
        exponent = squashed * (self.unit * LOG2E) - self._wide(rows)
        return (jnp.where(value == -jnp.inf, -jnp.inf, exponent) if self.may_be_removed else exponent), squashed

    def _finite(self, value: Any, squashed: Any, rows: Any) -> Any:
        """Return the logits of a piece; 0 for those without a part in the softmax."""
        s = squashed * self.unit if self.is_capped else (value + self._wide(rows)) * (1 / LOG2E)
        return jnp.where(value == -jnp.inf, 0.0, s)

    def _slope(self, squashed: Any) -> Any:
        return 1.0 - squashed * squashed

    def _gradient(self, value: Any, packed: Packed, index: int) -> Any:
        plan, tile = self.plan, packed.tile
        _, softmax, label, *more = (self._of_rows(ref, tile) for ref in self.per_row)
        constant = more[0] if plan.has_constant else None
        expected = more[-1] if plan.has_expected else None
        exponent, squashed = self._exponent(value, packed.rows)
        p = jnp.exp2(exponent)
        if expected is None:
            d = p * self._wide(softmax)
        else:
            d = p * (self._wide(softmax) + self._wide(expected) * self._finite(value, squashed, packed.rows))
        hit = self._columns() == self._wide(self._of_rows(self.labels, tile) - self._first(tile) - index * self.plan.piece)
        d = d + jnp.where(hit, self._wide(label), 0.0)
        if constant is not None:
            d = d + self._wide(constant)
        if self.is_capped:
            d = d * self._slope(squashed)
        return jnp.where(value == -jnp.inf, 0.0, d) if self.may_be_removed else d

    def _store_piece(self, values: Any, tile: Tile, index: int) -> None:
        plan = self.plan
        slot = self.slots.at[index % plan.out_slots]
        values = values.astype(DTYPE)
        # The copy that last read this slot is the oldest of `out_slots` copies.
        plgpu.wait_smem_to_gmem(plan.out_slots - 1, wait_read_only=True)
        slot[...] = values
        plgpu.commit_smem()
        at = pl.ds(tile.row, ROWS), pl.ds(tile.column_tile * plan.block_n + index * self.plan.piece, self.plan.piece)
        plgpu.copy_smem_to_gmem(slot, self.out.at[at])

    def _first(self, tile: Tile) -> Any:
        """Return the tile's first column, of the weight."""
        return self.first_column + tile.column_tile * self.plan.block_n

    def _of_rows(self, ref: Any, tile: Tile) -> Any:
        return plgpu.load(ref.at[pl.ds(tile.row, ROWS)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def _store_part(self, name: str, tile: Tile, values: Any) -> None:
        self.parts[name].at[tile.column_tile, pl.ds(tile.row, ROWS)][...] = values

    def _columns(self) -> Any:
        """Return the numbers of a piece's columns."""
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, self.plan.piece), 1, layout=plgpu.Layout.WGMMA)

    def _wide(self, values: Any) -> Any:
        """Return numbers per row for each column of a piece."""
        return lax.broadcast_in_dim(values, (ROWS, self.plan.piece), [0])
