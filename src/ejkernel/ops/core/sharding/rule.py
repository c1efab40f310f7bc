# SPDX-License-Identifier: Apache-2.0
"""`ShardingRule`: the axes along which a kernel's calls may be sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from ejkernel.ops.errors import KernelError
from ejkernel.ops.utils.values.signature import HasType

Factor = str | None  # the name of an axis; `None` if it is never sharded
WHOLE_BLOCKS: Final = "a shard must begin and end with a block"  # in messages
_UNNAMED: Final = "_"
_ELLIPSIS: Final = "..."


@dataclasses.dataclass(frozen=True, slots=True)
class ShardingRule:
    """The axes along which a call may be sharded, so that each device computes its shard alone.

    For example, a matrix product declares `ShardingRule("m k, k n -> m n", split="m n k")`. The text names the axes of
    every array argument and then of every result. `_` is an axis without a name; `...`, at most once per array, is the
    remaining axes, the same ones in every array.

    An argument that lacks a sharded axis is replicated. A result that lacks one is the *sum* over devices, so `split`
    must not name an axis for which a sum is wrong, such as the axis of a normalisation. The rules of gradients follow.

    Args:
        axes: The axes, as above.
        split: The axes that may be sharded; all others are replicated. `...` means all axes that it represents.
        residuals: The axes of the residuals of `fwd_with_residuals`, in the form of `axes`. Without it, a kernel with
            residuals shards its forward call only.
        follows: `{"g": "h"}`: axis `g` is shorter than `h`, and each of its entries belongs to a run of `h`'s entries,
            as a key head belongs to a group of query heads. It is sharded like `h`, or replicated to devices that each
            use a part.
        multiples: `{"n": 128}`: each shard of axis `n` has a multiple of 128 elements, e.g. because such blocks of a
            result share an entry of another result.
        cheapest: If arrays are sharded along different axes over the same devices, keep the sharding that moves the
            fewest elements; by default the first array decides.

    Raises:
        KernelError: The text does not have this form.
    """

    axes: str
    split: str | Collection[str]
    residuals: str | None = None
    follows: Mapping[str, str] = dataclasses.field(default_factory=dict)
    multiples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cheapest: bool = False

    def __post_init__(self) -> None:
        if self.axes.count("->") != 1:
            raise KernelError(f"axes must look like 'm k, k n -> m n', got {self.axes!r}.")
        known = set(f"{self.axes},{self.residuals or ''}".replace("->", ",").replace(",", " ").split())
        for name in (*self.splittable, *self.follows, *self.follows.values(), *self.multiples):
            if name not in known or name == _UNNAMED:
                raise KernelError(f"split, follows and multiples must name axes of {self.axes!r}, got {name!r}.")
        for name, size in self.multiples.items():
            if type(size) is not int or size < 1:
                raise KernelError(f"multiples of {self.axes!r} must be positive integers, got {size!r} for {name!r}.")
        for text in (*self.operands, *self.results, *(self.kept or ())):
            if text.count(_ELLIPSIS) > 1:
                raise KernelError(f"an array must have '...' once at most, got {' '.join(text)!r}.")
            named = [name for name in text if name != _UNNAMED]
            if len(named) > len(set(named)):
                raise KernelError(f"an array must not have an axis twice, got {' '.join(text)!r}.")

    @property
    def splittable(self) -> tuple[str, ...]:
        """The axes that may be sharded."""
        return tuple(self.split.split() if isinstance(self.split, str) else self.split)

    @property
    def operands(self) -> list[list[str]]:
        """The axes of each argument."""
        return _arrays(self.axes.split("->")[0])

    @property
    def results(self) -> list[list[str]]:
        """The axes of each result."""
        return _arrays(self.axes.split("->")[1]) or [[]]  # a result without axes is a scalar

    @property
    def kept(self) -> list[list[str]] | None:
        """The axes of each residual; `None` if undeclared."""
        return None if self.residuals is None else _arrays(self.residuals)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """A rule applied to arrays of known ranks.

    Attributes:
        operands: The name of each axis of each argument.
        results: The name of each axis of each result.
        splittable: The axes that may be sharded.
        follows, multiples, cheapest: See `ShardingRule`.
    """

    operands: tuple[tuple[Factor, ...], ...]
    results: tuple[tuple[Factor, ...], ...]
    splittable: frozenset[str]
    follows: tuple[tuple[str, str], ...]
    multiples: tuple[tuple[str, int], ...] = ()
    cheapest: bool = False


def factors_of(rule: ShardingRule, op_id: str, arrays: Sequence[HasType], *, residuals: bool) -> Factors | None:
    """Return the rule for a forward call on these arrays; `None` if `residuals` are asked for and undeclared.

    Raises:
        KernelError: The rule does not fit the arrays.
    """
    if residuals and rule.kept is None:
        return None
    texts = rule.operands
    if len(texts) != len(arrays):
        raise KernelError(
            f"{op_id}: sharding_rule {rule.axes!r} has {len(texts)} arrays, and the call has {len(arrays)}."
        )
    more = {_more(op_id, rule, text, array) for text, array in zip(texts, arrays, strict=True) if _ELLIPSIS in text}
    if len(more) > 1:
        raise KernelError(f"{op_id}: '...' in sharding_rule {rule.axes!r} represents {sorted(more)} axes.")
    dots = [f"...{index}" for index in range(next(iter(more), 0))]
    outs = [*rule.results, *((rule.kept or []) if residuals else [])]
    found = Factors(
        operands=tuple(_unfolded(text, dots) for text in texts),
        results=tuple(_unfolded(text, dots) for text in outs),
        splittable=frozenset(name for name in _unfolded(rule.splittable, dots) if name is not None),
        follows=tuple(sorted(rule.follows.items())),
        multiples=tuple(sorted(rule.multiples.items())),
        cheapest=rule.cheapest,
    )
    # results are checked later, because their shapes require a trace
    _check_lengths(op_id, rule, found.operands, arrays)
    return found


def _unfolded(text: Iterable[str], dots: Sequence[str]) -> tuple[Factor, ...]:
    """Return the names of axes, with those of `dots` in place of `...`, and `None` for unnamed ones."""
    names = (name for part in text for name in (dots if part == _ELLIPSIS else (part,)))
    return tuple(None if name == _UNNAMED else name for name in names)


def _more(op_id: str, rule: ShardingRule, text: Sequence[str], array: HasType) -> int:
    more = len(array.shape) - len(text) + 1
    if more < 0:
        raise KernelError(
            f"{op_id}: {' '.join(text)!r} of sharding_rule {rule.axes!r} does not fit the shape {list(array.shape)}."
        )
    return more


def _check_lengths(
    op_id: str, rule: ShardingRule, operands: Sequence[Sequence[Factor]], arrays: Sequence[HasType]
) -> None:
    lengths: dict[str, int] = {}
    for names, array in zip(operands, arrays, strict=True):
        if len(names) != len(array.shape):
            raise KernelError(
                f"{op_id}: sharding_rule {rule.axes!r} gives {len(names)} axes to an array of shape "
                f"{list(array.shape)}."
            )
        for name, length in zip(names, array.shape, strict=True):
            if name is not None and lengths.setdefault(name, length) != length:
                raise KernelError(
                    f"{op_id}: axis {name!r} of sharding_rule {rule.axes!r} has lengths {lengths[name]} and {length}."
                )


def _arrays(text: str) -> list[list[str]]:
    return [array.split() for array in text.split(",")] if text.strip() else []
