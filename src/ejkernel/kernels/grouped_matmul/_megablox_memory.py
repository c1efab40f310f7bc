# SPDX-License-Identifier: Apache-2.0
"""The vector memory of megablox's kernels: tiles and sums follow from the shapes, spilled registers from a table.

A step of a kernel is one basic block for one tile. The compiler keeps the left operand for all columns, so large tiles
spill what the registers do not hold. How much depends on the tile, the dtype of the operands, the chip, and for a
product on the columns of the last tile along the sum, since they are masked. Rows, groups and a transposed matrix do
not change it, the dtype of the result hardly does, and v5e and v5p spill the same. A tile that is
padded to multiples of 128 may spill a few registers more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ejkernel.kernels._vector_memory import REGISTER, Need, like, spilled_registers_of_tiles

COLUMNS = (128, 256, 512, 1024)  # of a result in a row of the table
_CHIPS = ("tpu:tpu_v5_lite", "tpu:tpu_v6_lite", "tpu:tpu_v4", "tpu:tpu7x")
_FILE = 64  # registers of a chip
_ALIKE = 1.02  # kernels of one form may take this much more
# Kernels between those of the table, with results of another dtype, or with tiles that are padded to multiples of 128.
_OTHERS = 1.05


class Tile(NamedTuple):
    """A tile of a kernel.

    Attributes:
        kind: `product`, `single` for a product with one tile along the sum, or `weights`.
        rows: Rows of the left operand.
        inner: Columns of the left operand.
        columns: Columns of the result.
        rest: Columns of the last tile along the sum of a product, if it has fewer than the others; or 0.
    """

    kind: str
    rows: int
    inner: int
    columns: int
    rest: int = 0


def need(tile: Tile, known: int, chip: str, dtypes: tuple[str, str], *, whole: bool) -> Need:
    """Return the bytes of vector memory of a kernel.

    Args:
        tile: Its tile.
        known: Bytes of its tiles and sums.
        chip: The chip. Without tiles of it in the table, the most on any chip counts, and all registers of one.
        dtypes: The dtypes of operands and result.
        whole: Whether rows and columns of a matrix's tile are multiples of 128 without padding.
    """
    operands, out = dtypes
    own = _registers(like(chip), operands, tile.kind)
    if not own:
        most = _FILE + max(_most(tile, one, operands) for one in _CHIPS if _registers(one, operands, tile.kind))
        return Need(known, int((known + REGISTER * most) * _OTHERS))
    margin = _ALIKE if whole and tile in own and operands == out else _OTHERS
    return Need(known, int((known + REGISTER * _most(tile, like(chip), operands)) * margin))


def row_of(tile: Tile, chip: str, dtype: str) -> tuple[str, str]:
    """Return the keys of a row in the table; it has the registers for each of `COLUMNS`."""
    return f"{like(chip)}, {dtype}, {tile.kind}", f"{tile.rows}/{tile.inner}/{tile.rest}"


@functools.cache
def _registers(chip: str, dtype: str, kind: str) -> dict[Tile, int]:
    found: dict[Tile, int] = {}
    for name, row in spilled_registers_of_tiles().get(f"{chip}, {dtype}, {kind}", {}).items():
        rows, inner, rest = map(int, name.split("/"))
        pairs = zip(COLUMNS, row, strict=True)
        found |= {Tile(kind, rows, inner, size, rest): count for size, count in pairs if count is not None}
    return found


@functools.lru_cache(maxsize=4096)  # a space and its heuristic ask for each tile several times
def _most(tile: Tile, chip: str, dtype: str) -> float:
    """Return the registers of a tile, or the most of those in the table that enclose it.

    A tile beyond the table keeps as many times more values as its left operand is larger.
    """
    registers = _registers(chip, dtype, tile.kind)
    if tile in registers:
        return registers[tile]
    rows, inner = (max(sizes) for sizes in zip(*((one.rows, one.inner) for one in registers), strict=True))
    beyond = max(tile.rows / rows, 1) * max(tile.inner / inner, 1)
    # tiles that do not fit in the chip's memory are missing
    most = max(
        (registers[one] for one in _around(tile, registers) if one in registers), default=max(registers.values())
    )
    return most if beyond == 1 else (most + _FILE) * beyond


def _around(tile: Tile, registers: Mapping[Tile, int]) -> Iterator[Tile]:
    """Yield the closest tiles in the table that enclose a tile; whole ones, if it has none with a rest."""
    listed = zip(*((one.rows, one.inner, one.columns) for one in registers), strict=True)
    axes = map(_neighbours, (tile.rows, tile.inner, tile.columns), map(set, listed))
    for rows, inner, columns in itertools.product(*axes):
        whole = Tile(tile.kind, rows, inner, columns)
        rests = {one.rest for one in registers if one._replace(rest=0) == whole} if tile.rest else {0}
        if tile.inner == inner and tile.rest:
            rests = {rest % inner for rest in _neighbours(tile.rest, rests - {0} | {inner})}
        yield from (whole._replace(rest=rest) for rest in rests)


def _neighbours(size: int, sizes: set[int]) -> set[int]:
    """Return the closest sizes that enclose a size."""
    inside = min(max(size, min(sizes)), max(sizes))
    return {max(one for one in sizes if one <= inside), min(one for one in sizes if one >= inside)}
