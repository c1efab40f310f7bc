# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.grouped_bounds`: how much of one dense product's speed a grouped product can reach at most.

Two causes keep it below the dense product of as many rows. A tile belongs to one group, so the last tile of each group
is partly empty. And the matrix of each group is read from memory, however few rows it multiplies. The bound is the
larger of two times: that of all rows of the tiles at the dense product's rate, and that of reading and writing each
operand once at the rate of a large copy. For each shape it is given for whole tiles, and with last tiles of half the
height.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.grouped_matmul import KINDS, SHAPES, Shape, group_sizes

_ITEMSIZE = 2  # bytes of a bfloat16 number
MORE_SHAPES = {
    "16 groups": Shape(m=16384, k=5120, n=8192, groups=16),
    "128 groups, 24,576 rows": Shape(m=24576, k=4096, n=1536, groups=128),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a device.

    Attributes:
        dense: Operations per second of one large dense product.
        copy: Bytes per second of a large copy, read and written.
    """

    dense: float
    copy: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """The least time of a grouped product, in seconds, by each cause.

    Attributes:
        products: Of the products of all rows of the tiles.
        memory: Of reading the operands and writing the result once.
        dense: Of a dense product of as many rows as the groups have.
    """

    products: float
    memory: float
    dense: float

    @property
    def of_dense(self) -> float:
        """The most that a grouped product reaches of the dense product's speed."""
        return self.dense / max(self.products, self.memory, self.dense)


def tile_rows(sizes: np.ndarray[Any, Any], height: int, last: int) -> int:
    """Return the rows of all tiles, of which each has `height` rows, or `last` as the last one of its group."""
    whole, rest = np.divmod(sizes, height)
    ends = np.where(rest == 0, 0, np.where(rest <= last, last, height))
    return int((whole * height + ends).sum())


def bound(shape: Shape, sizes: np.ndarray[Any, Any], rates: Rates, *, height: int, last: int) -> Bound:
    """Return the bound of a product `[m, k] @ [groups, k, n]` with tiles of `height` rows."""
    rows, matrices = int(sizes.sum()), int((sizes > 0).sum())
    per_row = 2 * shape.k * shape.n
    numbers = matrices * shape.k * shape.n + rows * (shape.k + shape.n)
    return Bound(
        products=per_row * tile_rows(sizes, height, last) / rates.dense,
        memory=_ITEMSIZE * numbers / rates.copy,
        dense=per_row * rows / rates.dense,
    )


def table(shapes: dict[str, Shape], kind: str, rates: Rates, height: int) -> Iterator[str]:
    """Yield a Markdown table with a line for each shape."""
    yield f"| | rows per group | tiles of {height} rows | last tiles of {height // 2} or {height} | limited by |"
    yield "|---" * 5 + "|"
    for name, shape in shapes.items():
        sizes = group_sizes(shape, kind)
        whole, short = (bound(shape, sizes, rates, height=height, last=last) for last in (height, height // 2))
        cause = "memory" if short.memory > short.products else "tiles"
        mean = f"{shape.m / shape.groups:,.0f}"
        yield f"| {name} | {mean} | {whole.of_dense:.2f} | {short.of_dense:.2f} | {cause} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped_bounds", description=__doc__)
    known = SHAPES | MORE_SHAPES
    parser.add_argument("--shapes", nargs="*", default=list(known), choices=list(known), metavar="SHAPE")
    parser.add_argument("--kind", default="dirichlet", choices=KINDS, help="of group sizes (default: %(default)s)")
    parser.add_argument("--height", type=int, default=128, metavar="ROWS", help="of a tile (default: %(default)s)")
    parser.add_argument("--dense", type=float, default=800, metavar="TFLOPS", help="default: %(default)s")
    parser.add_argument("--copy", type=float, default=4.2, metavar="TBPS", help="default: %(default)s")
    args = parser.parse_args(argv)
    rates = Rates(dense=1e12 * args.dense, copy=1e12 * args.copy)
    print("\n".join(table({name: known[name] for name in args.shapes}, args.kind, rates, args.height)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
