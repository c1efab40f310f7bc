# SPDX-License-Identifier: Apache-2.0
"""The operations behind `grouped_matmul`: the product and its weights' gradient, each in terms of the other.

The product is linear in each operand, including the row factors. So each gradient is a call of one of the two
operations, with a separate key and configuration, and the backward needs no residuals except the operands.
`activation.py` has the operation for products with an activation or a gate.
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

from ejkernel.kernels._numbers import accumulator, balanced, has_small_range, normalized
from ejkernel.kernels._options import canonical_flag
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.sharding.split import CallPart
from ejkernel.ops.core.types import Cost
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.signature import is_known

from . import _arguments as arguments
from . import reference
from .common import GroupedMatmulCall, Groups, own_rows, scaled_rows, taken_apart, without_rest

REFERENCE_BLOCK = 512
GROUPS = 2  # position of the groups among the arguments
# If rows and matrices are sharded over the same devices, one of them has to move: the rule picks the smaller of
# `g * k * n` numbers for matrices and `m * (k + n)` for rows and results.
SPLIT: Final[Any] = {"split": "rows groups inner columns", "cheapest": True}
_Cfg = TypeVar("_Cfg", bound=OperationConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulConfig(OperationConfig):
    """Configuration of one call of `grouped_matmul`; only `fwd` counts, because gradients are other calls."""

    implementation: str = "xla"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulWgradConfig(OperationConfig):
    """Configuration of one call of `grouped_matmul_wgrad`; only `fwd` counts."""

    implementation: str = "xla"


class GroupedOperation(Operation[_Cfg, GroupedMatmulCall, jax.Array], Generic[_Cfg]):
    """Base of the operations on groups: derivatives are calls, and example sizes resemble those of routers."""

    def call_of(self, inv: Invocation[_Cfg, jax.Array]) -> GroupedMatmulCall:
        """Return the description of the forward; derivatives are separate calls, which every implementation has."""
        return dataclasses.replace(super().call_of(inv), backward=False, higher=False)

    def config_space(self, inv: Invocation[_Cfg, jax.Array]) -> Collection[_Cfg]:
        """Return the search space of a forward; derivatives have no parameters."""
        return super().config_space(inv) if inv.direction == "fwd" else [self.heuristic_cfg(inv)]

    def example_inputs(
        self, inv: Invocation[_Cfg, jax.Array], rng: np.random.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random operands, with one of the kinds of sizes from `example_draws`."""
        draws = self.example_draws(inv, rng)
        return draws[str(rng.choice(list(draws)))]

    def example_draws(
        self, inv: Invocation[_Cfg, jax.Array], rng: np.random.Generator
    ) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the same random operands with each kind of sizes that token routers produce; speed depends on them.

        If the call has only some of the groups, they are those with the most rows: the other devices wait for them.
        """
        (lhs, rhs, groups, *others), kwargs = super().example_inputs(inv, rng)
        drawn = example_groups(groups, lhs.shape[0], self.call_of(inv).groups, rng)
        return {kind: ((lhs, rhs, own, *others), kwargs) for kind, own in drawn.items()}

    def part_arguments(self, part: CallPart, *args: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the sizes of the groups in the shard's rows, and its first group."""
        lhs, rhs, groups, *others = args
        return (lhs, rhs, arguments.groups_of_part(part, groups), *others), options

    def cost(self, inv: Invocation[_Cfg, jax.Array]) -> Cost | None:
        """Return the work of a call if all rows belong to groups, shared evenly among all groups."""
        call = self.call_of(inv)
        if inv.direction != "fwd" or not is_known(call.rows, call.inner, call.columns):
            return None
        rows = call.rows if call.all_groups is None else call.usual_rows * call.groups
        flops = 2 * call.products * call.examples * rows * call.inner * call.columns
        out = call.examples * self.result_size(call) * jnp.dtype(call.out_dtype).itemsize
        return Cost(flops=flops, bytes=inv.input_bytes + out)

    def result_size(self, call: GroupedMatmulCall) -> int:
        """Return the number of elements in the result of one example."""
        return call.rows * call.columns


class WeightsGradient(GroupedOperation[_Cfg], Generic[_Cfg]):
    """Base of the operations with a matrix for each group as result."""

    def result_size(self, call: GroupedMatmulCall) -> int:
        """See `GroupedOperation`."""
        return call.groups * call.inner * call.columns

    def part_arguments(self, part: CallPart, *args: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `GroupedOperation`; adds the shard's number of groups, which no array has as its shape."""
        args, options = super().part_arguments(part, *args, **options)
        return args, options | ({"groups": part.length("groups")} if isinstance(args[GROUPS], tuple) else {})


class _Multilinear(GroupedOperation[_Cfg], Generic[_Cfg]):
    """Base of the two operations: both are linear in each floating-point operand."""

    def run(self, *args: Any, cfg: _Cfg, **options: Any) -> Any:
        """Return the result; its tangents are calls of the same operation."""
        running = self._running(cfg, args, options)

        @jax.custom_jvp
        def compute(*args: Any) -> Any:
            return running.implementation.forward(running.call, *args, params=running.params)[0]

        def tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
            out = compute(*primals)
            # By linearity, the tangent is the same call with the tangent in place of its operand.
            parts = [
                self(*primals[:index], tangent, *primals[index + 1 :], **options)
                for index, tangent in enumerate(tangents)
                if index != GROUPS and not isinstance(tangent, SymbolicZero)
            ]
            return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)

        compute.defjvp(tangents, symbolic_zeros=True)
        return compute(*args)


class GroupedMatmul(_Multilinear[GroupedMatmulConfig]):
    """The operation behind `grouped_matmul`; see there for the arguments."""

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
        """Check the arguments, and drop options with default values, which the key omits."""
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
        """Return the sizes and dtypes of a call."""
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
        """Return a rule that splits every axis; a shard of the groups or of the inner axis gives a partial sum.

        `part_arguments` computes the groups of a shard, and their sizes in its rows, from all sizes.
        """
        rhs = "groups columns inner" if inv.kwargs.get("transpose_rhs") else "groups inner columns"
        scale = ", rows" * (len(inv.args) > GROUPS + 1)
        return ShardingRule(f"rows inner, {rhs}, {axes_of_groups(inv)}{scale} -> rows columns", **SPLIT)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the product, accumulated in float32."""
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
        """Return the gradients of the operands, by separate calls of `grouped_matmul` and `grouped_matmul_wgrad`."""
        lhs, rhs, groups, *scales = primals
        dlhs, drhs = gradients_of_product((lhs, rhs, groups), cotangents[0], kwargs, *scales)
        if not scales:
            return dlhs.astype(lhs.dtype), drhs, None
        own = own_rows(groups, lhs.shape[0], rhs.shape[0])
        # For each row, dout · (lhs @ rhs) is (dout @ rhs.T) · lhs: the gradient of the factor needs no more products.
        left, right = (x.astype(accumulator(x.dtype)) for x in (dlhs, without_rest(lhs, own)))
        dscale = jnp.sum(left * right, axis=1).astype(scales[0].dtype)
        return scaled_rows(dlhs, scales[0], own).astype(lhs.dtype), drhs, None, dscale

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with eight groups."""
        lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 256), (8, 256, 512)))
        return (lhs, rhs, jax.ShapeDtypeStruct((8,), jnp.int32)), {}


class GroupedMatmulWgrad(WeightsGradient[GroupedMatmulWgradConfig], _Multilinear[GroupedMatmulWgradConfig]):
    """The operation behind `grouped_matmul_wgrad`; see there for the arguments."""

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
        """Check the arguments, and drop options with default values, which the key omits."""
        arguments.check_operand("lhs", lhs, "[m, k]")
        arguments.check_operand("rhs", rhs, "[m, n]")
        arguments.check_pair(lhs, rhs, (0, 0), "have as many rows")
        count_asked = arguments.canonical_count(groups)
        arguments.check_count(count_asked, group_sizes, first_group)
        own = arguments.canonical_groups(group_sizes, first_group, count_asked)
        said = arguments.said_options(lhs.dtype, preferred_element_type=preferred_element_type, precision=precision)
        # Without `first_group` the sizes give the count: repeating it would change the key of an equal call.
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
        """Return the sizes and dtypes of a call."""
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

    def sharding_rule(self, inv: Invocation[GroupedMatmulWgradConfig, jax.Array]) -> ShardingRule:
        """Return a rule that splits every axis; a shard of the rows gives a partial sum."""
        return ShardingRule(f"rows inner, rows columns, {axes_of_groups(inv)} -> groups inner columns", **SPLIT)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the gradient, accumulated in float32."""
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
        """Return the gradients of the operands, by separate calls of `grouped_matmul`."""
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


def example_groups(groups: Groups, rows: int, count: int, rng: np.random.Generator) -> dict[str, Groups]:
    """Return groups with each kind of sizes from `example_sizes`.

    Args:
        groups: The groups of a call. With a first group the call has `count` of them: those with the most rows.
        rows: The sum of the sizes.
        count: How many groups the call has.
        rng: Draws the sizes.
    """
    sizes, first = taken_apart(groups)

    def groups_with(drawn: np.ndarray[Any, Any]) -> Groups:
        found = jnp.asarray(drawn, sizes.dtype)
        if first is None:
            return found
        own = np.convolve(drawn, np.ones(count), "valid")[::count]
        return found, jnp.asarray(count * own.argmax(), first.dtype)

    return {kind: groups_with(drawn) for kind, drawn in example_sizes(rows, sizes.shape[0], rng).items()}


def example_sizes(rows: int, groups: int, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Return sizes that add up to `rows`, by kind: balanced, by Zipf's law in random order, and some empty."""
    some = rng.random(groups) < _USED
    some[rng.integers(groups)] = True
    weights = {
        "balanced": np.ones(groups),
        "zipf": rng.permutation(1 / np.arange(1, groups + 1)),
        "some empty": rng.exponential(size=groups) * some,
    }
    return {kind: _apportioned(rows, own) for kind, own in weights.items()}


def axes_of_groups(inv: Invocation[Any, Any]) -> str:
    """Return the axes of the sizes, which every device gets in full, and of the scalar `first_group` if given."""
    return "_, " if isinstance(inv.args[GROUPS], tuple) else "_"


_USED = 0.8  # probability that a group has rows in the kind with some empty


def _apportioned(rows: int, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    ends = np.floor(np.cumsum(weights / weights.sum()) * rows + 0.5)
    ends[-1:] = rows
    return np.diff(ends, prepend=0)


def gradients_of_product(
    primals: tuple[Any, Any, Groups], dout: jax.Array, options: dict[str, Any], row_scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of both operands of a product, by separate calls; only that of `rhs` includes the factors.

    The gradient of `lhs` is float32 if the caller still has to multiply by a factor, and the operands' dtype may
    overflow before that.

    Args:
        primals: Rows, matrices, groups.
        dout: The gradient of the product; in float32 it may exceed the range of the operands' dtype.
        options: Options of the call.
        row_scale: Row factors that `dout` does not include yet.
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
        if row_scale is not None:  # scale the narrower operand
            narrower = int(is_known(lhs.shape[1], dout.shape[1]) and dout.shape[1] < lhs.shape[1])
            operands[narrower] = scaled_rows(operands[narrower], row_scale, own)
    if transposed:
        operands.reverse()
    shared = shared_options(options, grouped_matmul_wgrad)
    return dlhs, grouped_matmul_wgrad(*operands, groups, groups=rhs.shape[0], **shared)


def shared_options(options: dict[str, Any], operation: Operation[Any, Any, Any]) -> dict[str, Any]:
    """Return the options of a call that the calls of its gradient inherit.

    `operation` may lack some of the requested implementations: the others remain, or `None` if there are none.
    """
    shared = {name: options[name] for name in ("precision", "implementation") if name in options}
    asked = shared.get("implementation")
    names = (asked,) if isinstance(asked, str) else asked or ()
    return shared | {"implementation": tuple(name for name in names if name in operation.implementations) or None}
