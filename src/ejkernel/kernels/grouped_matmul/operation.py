# SPDX-License-Identifier: Apache-2.0
"""The operations behind `grouped_matmul`: the product, and its weights' gradient, which differentiate into each other.

The product is linear in each of its operands, a factor for each row included. So the gradient of one is a call of one
of the two operations again, with a key and a configuration of its own, and nothing is left for a backward but the
operands. Products with an activation or a gate are the operation in `activation.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Final, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ejkernel.kernels._numbers import accumulator, has_small_range
from ejkernel.kernels._options import canonical_flag
from ejkernel.kernels._small_range import balanced, normalized
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.parts import CallPart
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.types import Cost
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.signature import is_known

from . import _arguments as arguments
from . import reference
from .common import GroupedMatmulCall, Groups, own_rows, taken_apart, without_rest
from .epilogue import scaled_rows

REFERENCE_BLOCK = 512
GROUPS = 2  # which argument the groups are
# Rows and matrices that are sharded over the same devices cannot both stay there: what is moved is `g * k * n` numbers
# of matrices, or `m * (k + n)` of rows and results, whichever is less.
SPLIT: Final[Any] = {"split": "rows groups inner columns", "cheapest": True}
_Cfg = TypeVar("_Cfg", bound=OperationConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulConfig(OperationConfig):
    """How one call of `grouped_matmul` runs; `fwd` alone is looked at, for products of a gradient are other calls."""

    implementation: str = "xla"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulWgradConfig(OperationConfig):
    """How one call of `grouped_matmul_wgrad` runs; `fwd` alone is looked at."""

    implementation: str = "xla"


class GroupedOperation(Operation[_Cfg, GroupedMatmulCall, jax.Array], Generic[_Cfg]):
    """What operations on groups share: derivatives are made of calls, and sizes of groups are drawn as routers' are."""

    def call_of(self, inv: Invocation[_Cfg, jax.Array]) -> GroupedMatmulCall:
        """Return the description of the forward, derivatives being made of calls of their own."""
        return dataclasses.replace(super().call_of(inv), backward=False)

    def config_space(self, inv: Invocation[_Cfg, jax.Array]) -> Collection[_Cfg]:
        """Return the space of a forward; derivatives have nothing of their own to choose."""
        return super().config_space(inv) if inv.direction == "fwd" else [self.heuristic_cfg(inv)]

    def _is_higher(self, inv: Invocation[_Cfg, jax.Array]) -> bool:
        return False  # every implementation has tangents, made of calls

    def example_inputs(
        self, inv: Invocation[_Cfg, jax.Array], rng: np.random.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random operands, and sizes of one of the kinds that `example_draws` has."""
        draws = self.example_draws(inv, rng)
        return draws[str(rng.choice(list(draws)))]

    def example_draws(
        self, inv: Invocation[_Cfg, jax.Array], rng: np.random.Generator
    ) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the same random operands with sizes as routers of tokens give: what is fast depends on these.

        Of a part of the groups it is the one that has the most rows: the others wait for it.
        """
        (lhs, rhs, groups, *others), kwargs = super().example_inputs(inv, rng)
        (sizes, first), count = taken_apart(groups), self.call_of(inv).groups

        def groups_with(drawn: np.ndarray[Any, Any]) -> Groups:
            found = jnp.asarray(drawn, sizes.dtype)
            if first is None:
                return found
            rows = np.convolve(drawn, np.ones(count), "valid")[::count]
            return found, jnp.asarray(count * rows.argmax(), first.dtype)

        drawn = example_sizes(lhs.shape[0], sizes.shape[0], rng)
        return {kind: ((lhs, rhs, groups_with(own), *others), kwargs) for kind, own in drawn.items()}

    def part_arguments(self, part: CallPart, *args: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the sizes that groups have in the part's rows, and its first group."""
        lhs, rhs, groups, *others = args
        return (lhs, rhs, arguments.groups_of_part(part, groups), *others), options

    def cost(self, inv: Invocation[_Cfg, jax.Array]) -> Cost | None:
        """Return the work of a call all of whose rows belong to groups, of which a part has its share."""
        call = self.call_of(inv)
        if inv.direction != "fwd" or not is_known(call.rows, call.inner, call.columns):
            return None
        rows = call.rows if call.all_groups is None else call.usual_rows * call.groups
        flops = 2 * call.products * call.examples * rows * call.inner * call.columns
        out = call.examples * self.result_size(call) * jnp.dtype(call.out_dtype).itemsize
        return Cost(flops=flops, bytes=inv.input_bytes + out)

    def result_size(self, call: GroupedMatmulCall) -> int:
        """Return how many numbers the result of one example has."""
        return call.rows * call.columns


class _Multilinear(GroupedOperation[_Cfg], Generic[_Cfg]):
    """What the two share: they are linear in each of their floating-point operands."""

    def run(self, *args: Any, cfg: _Cfg, **options: Any) -> Any:
        """Return the result; its tangents are calls again."""
        running = self._running(cfg, args, options)

        @jax.custom_jvp
        def compute(*args: Any) -> Any:
            return running.implementation.forward(running.call, *args, params=running.params)[0]

        def tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
            out = compute(*primals)
            # It is linear in each operand: a tangent in the place of its operand makes the same call.
            parts = [
                self(*primals[:index], tangent, *primals[index + 1 :], **options)
                for index, tangent in enumerate(tangents)
                if index != GROUPS and not isinstance(tangent, SymbolicZero)
            ]
            return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)

        compute.defjvp(tangents, symbolic_zeros=True)
        return compute(*args)


class GroupedMatmul(_Multilinear[GroupedMatmulConfig]):
    """The operation behind `grouped_matmul`, which documents the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(f"{__package__}.mosaic_gpu.implementation:MosaicGpu", platforms=("gpu",)),
            "jax_mgpu": LazyImplementation(f"{__package__}.jax_mgpu:JaxMgpu", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
            "megablox": LazyImplementation(f"{__package__}.megablox:Megablox", platforms=("tpu",)),
        }
    )

    def __init__(self) -> None:
        super().__init__(name="grouped_matmul")

    def prepare(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        row_scale: Any = None,
        *,
        transpose_rhs: Any = False,
        preferred_element_type: Any = None,
        precision: Any = None,
        first_group: Any = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments; options that say nothing are left out, so that they are not in the call's key."""
        transpose_rhs = canonical_flag("transpose_rhs", transpose_rhs)
        arguments.check_product(lhs, rhs, transpose_rhs=transpose_rhs)
        groups = arguments.canonical_groups(group_sizes, first_group, rhs.shape[0])
        if row_scale is not None:
            arguments.check_row_scale(row_scale, lhs)
        args = (lhs, rhs, groups, row_scale)[: 3 if row_scale is None else 4]
        said = arguments.said_options(
            lhs.dtype,
            transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type,
            precision=precision,
        )
        return args, said | {"implementation": self.requested(implementation)}

    def describe(
        self,
        lhs: Any,
        rhs: Any,
        groups: Groups,
        row_scale: Any = None,
        *,
        transpose_rhs: bool = False,
        preferred_element_type: str | None = None,
        precision: str | None = None,
    ) -> GroupedMatmulCall:
        """Return the sizes and dtypes."""
        sizes, first = taken_apart(groups)
        return GroupedMatmulCall(
            rows=lhs.shape[0],
            groups=rhs.shape[0],
            inner=lhs.shape[1],
            columns=rhs.shape[1 if transpose_rhs else 2],
            dtype=str(lhs.dtype),
            out_dtype=preferred_element_type or str(lhs.dtype),
            transpose_rhs=transpose_rhs,
            precision=precision,
            scaled=row_scale is not None,
            all_groups=None if first is None else sizes.shape[0],
        )

    def sharding_rule(self, inv: Invocation[GroupedMatmulConfig, jax.Array]) -> ShardingRule:
        """Return that every axis may be split: a part of the groups, as of what is summed over, gives a part of a sum.

        Which groups are a part's, and how many of its rows each has, follows from all sizes: see `part_arguments`.
        """
        rhs = "groups columns inner" if inv.kwargs.get("transpose_rhs") else "groups inner columns"
        scale = ", rows" * (len(inv.args) > GROUPS + 1)
        return ShardingRule(f"rows inner, {rhs}, {axes_of_groups(inv)}{scale} -> rows columns", **SPLIT)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the product, with sums in float32."""
        lhs, rhs, groups, *scales = args
        transpose_rhs = options.get("transpose_rhs", False)
        out = reference.product(
            lhs, rhs, groups, block=REFERENCE_BLOCK, transpose_rhs=transpose_rhs, precision="highest"
        )
        for row_scale in scales:
            out = scaled_rows(out, row_scale, own_rows(groups, lhs.shape[0], rhs.shape[0]))
        return out.astype(options.get("preferred_element_type") or lhs.dtype)

    def custom_vjp(
        self, primals: tuple[Any, ...], cfg: GroupedMatmulConfig, kwargs: dict[str, Any], cotangents: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the gradients of the operands, by a product and by sums of products that are calls of their own."""
        lhs, rhs, groups, *scales = primals
        dlhs, drhs = gradients_of_product((lhs, rhs, groups), cotangents[0], kwargs, *scales)
        if not scales:
            return dlhs.astype(lhs.dtype), drhs, None
        own = own_rows(groups, lhs.shape[0], rhs.shape[0])
        # Of a row, dout · (lhs @ rhs) is (dout @ rhs.T) · lhs: its factor's gradient takes no further product.
        left, right = (x.astype(accumulator(x.dtype)) for x in (dlhs, without_rest(lhs, own)))
        dscale = jnp.sum(left * right, axis=1).astype(scales[0].dtype)
        return scaled_rows(dlhs, scales[0], own).astype(lhs.dtype), drhs, None, dscale

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with eight groups."""
        lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 256), (8, 256, 512)))
        return (lhs, rhs, jax.ShapeDtypeStruct((8,), jnp.int32)), {}


class GroupedMatmulWgrad(_Multilinear[GroupedMatmulWgradConfig]):
    """The operation behind `grouped_matmul_wgrad`, which documents the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(
                f"{__package__}.mosaic_gpu.implementation:MosaicGpuWgrad", platforms=("gpu",)
            ),
            "xla": f"{__package__}.xla:XlaWgrad",
            "megablox": LazyImplementation(f"{__package__}.megablox:MegabloxWgrad", platforms=("tpu",)),
        }
    )

    def __init__(self) -> None:
        super().__init__(name="grouped_matmul_wgrad")

    def prepare(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        *,
        preferred_element_type: Any = None,
        precision: Any = None,
        first_group: Any = None,
        groups: int | None = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments; options that say nothing are left out, so that they are not in the call's key."""
        arguments.check_operand("lhs", lhs, "[m, k]")
        arguments.check_operand("rhs", rhs, "[m, n]")
        arguments.check_pair(lhs, rhs, (0, 0), "have as many rows")
        count_asked = arguments.canonical_count(groups)
        arguments.check_count(count_asked, group_sizes, first_group)
        own = arguments.canonical_groups(group_sizes, first_group, count_asked)
        said = arguments.said_options(lhs.dtype, preferred_element_type=preferred_element_type, precision=precision)
        # Where all groups are here their sizes say how many: said again, it would make another key of an equal call.
        count = {"groups": groups} if isinstance(own, tuple) else {}
        return (lhs, rhs, own), said | count | {"implementation": self.requested(implementation)}

    def describe(
        self,
        lhs: Any,
        rhs: Any,
        own: Groups,
        *,
        preferred_element_type: str | None = None,
        precision: str | None = None,
        groups: int | None = None,
    ) -> GroupedMatmulCall:
        """Return the sizes and dtypes."""
        sizes, first = taken_apart(own)
        return GroupedMatmulCall(
            rows=lhs.shape[0],
            groups=sizes.shape[0] if groups is None else groups,
            inner=lhs.shape[1],
            columns=rhs.shape[1],
            dtype=str(lhs.dtype),
            out_dtype=preferred_element_type or str(lhs.dtype),
            precision=precision,
            all_groups=None if first is None else sizes.shape[0],
        )

    def result_size(self, call: GroupedMatmulCall) -> int:
        """See `GroupedOperation`."""
        return call.groups * call.inner * call.columns

    def sharding_rule(self, inv: Invocation[GroupedMatmulWgradConfig, jax.Array]) -> ShardingRule:
        """Return that every axis may be split; a part of the rows gives a part of the sum."""
        return ShardingRule(f"rows inner, rows columns, {axes_of_groups(inv)} -> groups inner columns", **SPLIT)

    def part_arguments(self, part: CallPart, *args: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `GroupedOperation`; no argument tells how many groups the part has."""
        args, options = super().part_arguments(part, *args, **options)
        return args, options | ({"groups": part.length("groups")} if isinstance(args[GROUPS], tuple) else {})

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the sums, in float32."""
        lhs, rhs, own = args
        count = options.get("groups", taken_apart(own)[0].shape[0])
        out = reference.weights_gradient(lhs, rhs, own, count=count, block=REFERENCE_BLOCK, precision="highest")
        return out.astype(options.get("preferred_element_type") or lhs.dtype)

    def custom_vjp(
        self,
        primals: tuple[Any, ...],
        cfg: GroupedMatmulWgradConfig,
        kwargs: dict[str, Any],
        cotangents: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """Return the gradients of the operands, by products that are calls of their own."""
        lhs, rhs, groups = primals
        dout, shared = cotangents[0].astype(lhs.dtype), shared_options(kwargs, grouped_matmul)
        dlhs = grouped_matmul(rhs, dout, groups, transpose_rhs=True, **shared)
        return dlhs, grouped_matmul(lhs, dout, groups, **shared), None

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with eight groups."""
        lhs, rhs = (jax.ShapeDtypeStruct((1024, size), jnp.bfloat16) for size in (256, 512))
        return (lhs, rhs, jax.ShapeDtypeStruct((8,), jnp.int32)), {}


grouped_matmul = GroupedMatmul()
grouped_matmul_wgrad = GroupedMatmulWgrad()


def example_sizes(rows: int, groups: int, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Return sizes of groups that add up to `rows`, by kind: even, by Zipf's law in any order, some empty."""
    some = rng.random(groups) < _USED
    some[rng.integers(groups)] = True
    weights = {
        "balanced": np.ones(groups),
        "zipf": rng.permutation(1 / np.arange(1, groups + 1)),
        "some empty": rng.exponential(size=groups) * some,
    }
    return {kind: _apportioned(rows, own) for kind, own in weights.items()}


def axes_of_groups(inv: Invocation[Any, Any]) -> str:
    """Return the axes of sizes, which go whole to every device, and of the first group's number, which has none."""
    return "_, " if isinstance(inv.args[GROUPS], tuple) else "_"


_USED = 0.8  # of the groups, where some are empty


def _apportioned(rows: int, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    ends = np.floor(np.cumsum(weights / weights.sum()) * rows + 0.5)
    ends[-1:] = rows
    return np.diff(ends, prepend=0)


def gradients_of_product(
    primals: tuple[Any, Any, Groups], dout: jax.Array, options: dict[str, Any], row_scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of both operands of a product, calls of their own; with factors, only rhs's has them in it.

    The gradient of `lhs` is in float32 where a factor has yet to be multiplied in and the operands' dtype may overflow
    without it.

    Args:
        primals: Rows, matrices, groups.
        dout: The gradient of the product; a float32 one may be beyond the range of the operands' dtype.
        options: Of the call.
        row_scale: Factors of the rows that `dout` does not have in it as yet.
    """
    lhs, rhs, groups = primals
    transposed = options.get("transpose_rhs", False)
    shared = shared_options(options, grouped_matmul) | {"transpose_rhs": not transposed}
    own = own_rows(groups, lhs.shape[0], rhs.shape[0])
    if has_small_range(lhs.dtype) and (row_scale is not None or dout.dtype != lhs.dtype):
        wide = without_rest(dout.astype(accumulator(lhs.dtype)), own)
        rows, factors = normalized(wide)
        dlhs = grouped_matmul(
            rows.astype(lhs.dtype), rhs, groups, preferred_element_type=accumulator(lhs.dtype), **shared
        )
        dlhs = dlhs * factors
        wide = wide if row_scale is None else scaled_rows(wide, row_scale, own)
        operands = [x.astype(lhs.dtype) for x in balanced(without_rest(lhs, own), wide)]
    else:
        dout = dout.astype(lhs.dtype)
        dlhs = grouped_matmul(dout, rhs, groups, **shared)
        operands = [lhs, dout]
        if row_scale is not None:  # either will do, so the narrower one
            narrower = int(is_known(lhs.shape[1], dout.shape[1]) and dout.shape[1] < lhs.shape[1])
            operands[narrower] = scaled_rows(operands[narrower], row_scale, own)
    if transposed:
        operands.reverse()
    shared = shared_options(options, grouped_matmul_wgrad)
    return dlhs, grouped_matmul_wgrad(*operands, groups, groups=rhs.shape[0], **shared)


def shared_options(options: dict[str, Any], operation: Operation[Any, Any, Any]) -> dict[str, Any]:
    """Return those options of a call that a call of its gradient has, too.

    Of the implementations that were asked for, it is asked for those that it has; if it has none, for none by name.
    """
    shared = {name: options[name] for name in ("precision", "implementation") if name in options}
    asked = shared.get("implementation")
    names = (asked,) if isinstance(asked, str) else asked or ()
    return shared | {"implementation": tuple(name for name in names if name in operation.implementations) or None}
