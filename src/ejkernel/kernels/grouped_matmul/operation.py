# SPDX-License-Identifier: Apache-2.0
"""The operations behind `grouped_matmul`: the product, and its weights' gradient, which differentiate into each other.

The product is linear in each of its operands. So the gradient of one is a call of one of the two operations again, with
a key and a configuration of its own, and nothing is left for a backward but the operands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ejkernel.kernels._options import canonical_flag, canonical_precision
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.types import Cost
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.signature import is_known

from . import _arguments as arguments
from . import reference
from .common import GroupedMatmulCall

_REFERENCE_BLOCK = 512
_Cfg = TypeVar("_Cfg", bound=OperationConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulConfig(OperationConfig):
    """How one call of `grouped_matmul` runs; `fwd` alone is looked at, for products of a gradient are other calls."""

    implementation: str = "xla"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulWgradConfig(OperationConfig):
    """How one call of `grouped_matmul_wgrad` runs; `fwd` alone is looked at."""

    implementation: str = "xla"


class _Bilinear(Operation[_Cfg, GroupedMatmulCall, jax.Array], Generic[_Cfg]):
    """What the two share: how they are differentiated, and what they are measured with."""

    def call_of(self, inv: Invocation[_Cfg, jax.Array]) -> GroupedMatmulCall:
        """Return the description of the forward, derivatives being made of calls of their own."""
        return dataclasses.replace(super().call_of(inv), backward=False)

    def config_space(self, inv: Invocation[_Cfg, jax.Array]) -> Collection[_Cfg]:
        """Return the space of a forward; derivatives have nothing of their own to choose."""
        return super().config_space(inv) if inv.direction == "fwd" else [self.heuristic_cfg(inv)]

    def run(self, *args: Any, cfg: _Cfg, **options: Any) -> Any:
        """Return the result; its tangents are calls again."""
        running = self._running(cfg, args, options)

        @jax.custom_jvp
        def compute(*args: Any) -> Any:
            return running.implementation.forward(running.call, *args, params=running.params)[0]

        def tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
            out = compute(*primals)
            lhs, rhs, group_sizes = primals
            pairs = ((tangents[0], (tangents[0], rhs)), (tangents[1], (lhs, tangents[1])))
            parts = [
                self(*operands, group_sizes, **options)
                for tangent, operands in pairs
                if not isinstance(tangent, SymbolicZero)
            ]
            return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)

        compute.defjvp(tangents, symbolic_zeros=True)
        return compute(*args)

    def _is_higher(self, inv: Invocation[_Cfg, jax.Array]) -> bool:
        return False  # every implementation has tangents, see `run`

    def example_inputs(
        self, inv: Invocation[_Cfg, jax.Array], rng: np.random.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random operands, and sizes of one of the kinds that `example_draws` has."""
        draws = self.example_draws(inv, rng)
        return draws[str(rng.choice(list(draws)))]

    def example_draws(
        self, inv: Invocation[_Cfg, jax.Array], rng: np.random.Generator
    ) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the same random operands with sizes as routers of tokens give: what is fast depends on these."""
        (lhs, rhs, sizes), kwargs = super().example_inputs(inv, rng)
        drawn = example_sizes(lhs.shape[0], sizes.shape[0], rng)
        return {kind: ((lhs, rhs, jnp.asarray(own, sizes.dtype)), kwargs) for kind, own in drawn.items()}

    def cost(self, inv: Invocation[_Cfg, jax.Array]) -> Cost | None:
        """Return the work of a call all of whose rows belong to groups."""
        call = self.call_of(inv)
        if inv.direction != "fwd" or not is_known(call.rows, call.inner, call.columns):
            return None
        flops = 2 * call.examples * call.rows * call.inner * call.columns
        out = call.examples * self.result_size(call) * jnp.dtype(call.out_dtype).itemsize
        return Cost(flops=flops, bytes=inv.input_bytes + out)

    def result_size(self, call: GroupedMatmulCall) -> int:
        """Return how many numbers the result of one example has."""
        raise NotImplementedError


class GroupedMatmul(_Bilinear[GroupedMatmulConfig]):
    """The operation behind `grouped_matmul`, which documents the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(f"{__package__}.mosaic_gpu.implementation:MosaicGpu", platforms=("gpu",)),
            "jax_mgpu": LazyImplementation(f"{__package__}.jax_mgpu:JaxMgpu", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
        }
    )

    def __init__(self) -> None:
        super().__init__(name="grouped_matmul")

    def prepare(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        *,
        transpose_rhs: Any = False,
        preferred_element_type: Any = None,
        precision: Any = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments; options that say nothing are left out, so that they are not in the call's key."""
        transpose_rhs = canonical_flag("transpose_rhs", transpose_rhs)
        arguments.check_operand("lhs", lhs, "[m, k]")
        arguments.check_operand("rhs", rhs, "[groups, n, k]" if transpose_rhs else "[groups, k, n]")
        arguments.check_pair(lhs, rhs, (1, 2 if transpose_rhs else 1), "have one k")
        arguments.check_sizes(group_sizes, rhs.shape[0])
        said = {
            "transpose_rhs": transpose_rhs,
            "preferred_element_type": arguments.canonical_dtype(preferred_element_type, lhs.dtype),
            "precision": canonical_precision(precision),
        }
        return (lhs, rhs, group_sizes), _said(said) | {"implementation": self.requested(implementation)}

    def describe(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        *,
        transpose_rhs: bool = False,
        preferred_element_type: str | None = None,
        precision: str | None = None,
    ) -> GroupedMatmulCall:
        """Return the sizes and dtypes."""
        return GroupedMatmulCall(
            rows=lhs.shape[0],
            groups=rhs.shape[0],
            inner=lhs.shape[1],
            columns=rhs.shape[1 if transpose_rhs else 2],
            dtype=str(lhs.dtype),
            out_dtype=preferred_element_type or str(lhs.dtype),
            transpose_rhs=transpose_rhs,
            precision=precision,
        )

    def result_size(self, call: GroupedMatmulCall) -> int:
        """See `_Bilinear`."""
        return call.rows * call.columns

    def sharding_rule(self, inv: Invocation[GroupedMatmulConfig, jax.Array]) -> ShardingRule:
        """Return that columns, and what is summed over, may be split; rows belong to groups that begin anywhere."""
        rhs = "groups columns inner" if inv.kwargs.get("transpose_rhs") else "groups inner columns"
        return ShardingRule(f"rows inner, {rhs}, groups -> rows columns", split="columns inner")

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the product, with sums in float32."""
        lhs, rhs, group_sizes = args
        transpose_rhs = options.get("transpose_rhs", False)
        out = reference.product(
            lhs, rhs, group_sizes, block=_REFERENCE_BLOCK, transpose_rhs=transpose_rhs, precision="highest"
        )
        return out.astype(options.get("preferred_element_type") or lhs.dtype)

    def custom_vjp(
        self, primals: tuple[Any, ...], cfg: GroupedMatmulConfig, kwargs: dict[str, Any], cotangents: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the gradients of the operands, by a product and by sums of products that are calls of their own."""
        lhs, rhs, group_sizes = primals
        dout = cotangents[0].astype(lhs.dtype)
        transposed = kwargs.get("transpose_rhs", False)
        dlhs = self(dout, rhs, group_sizes, transpose_rhs=not transposed, **_shared(kwargs, self))
        operands = (dout, lhs) if transposed else (lhs, dout)
        drhs = grouped_matmul_wgrad(*operands, group_sizes, **_shared(kwargs, grouped_matmul_wgrad))
        return dlhs, drhs, None

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with eight groups."""
        lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 256), (8, 256, 512)))
        return (lhs, rhs, jax.ShapeDtypeStruct((8,), jnp.int32)), {}


class GroupedMatmulWgrad(_Bilinear[GroupedMatmulWgradConfig]):
    """The operation behind `grouped_matmul_wgrad`, which documents the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(
                f"{__package__}.mosaic_gpu.implementation:MosaicGpuWgrad", platforms=("gpu",)
            ),
            "xla": f"{__package__}.xla:XlaWgrad",
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
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments; options that say nothing are left out, so that they are not in the call's key."""
        arguments.check_operand("lhs", lhs, "[m, k]")
        arguments.check_operand("rhs", rhs, "[m, n]")
        arguments.check_pair(lhs, rhs, (0, 0), "have as many rows")
        arguments.check_sizes(group_sizes)
        said = {
            "preferred_element_type": arguments.canonical_dtype(preferred_element_type, lhs.dtype),
            "precision": canonical_precision(precision),
        }
        return (lhs, rhs, group_sizes), _said(said) | {"implementation": self.requested(implementation)}

    def describe(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        *,
        preferred_element_type: str | None = None,
        precision: str | None = None,
    ) -> GroupedMatmulCall:
        """Return the sizes and dtypes."""
        return GroupedMatmulCall(
            rows=lhs.shape[0],
            groups=group_sizes.shape[0],
            inner=lhs.shape[1],
            columns=rhs.shape[1],
            dtype=str(lhs.dtype),
            out_dtype=preferred_element_type or str(lhs.dtype),
            precision=precision,
        )

    def result_size(self, call: GroupedMatmulCall) -> int:
        """See `_Bilinear`."""
        return call.groups * call.inner * call.columns

    def sharding_rule(self, inv: Invocation[GroupedMatmulWgradConfig, jax.Array]) -> ShardingRule:
        """Return that both axes of the matrices may be split."""
        return ShardingRule("rows inner, rows columns, groups -> groups inner columns", split="columns inner")

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the sums, in float32."""
        lhs, rhs, group_sizes = args
        out = reference.weights_gradient(lhs, rhs, group_sizes, block=_REFERENCE_BLOCK, precision="highest")
        return out.astype(options.get("preferred_element_type") or lhs.dtype)

    def custom_vjp(
        self,
        primals: tuple[Any, ...],
        cfg: GroupedMatmulWgradConfig,
        kwargs: dict[str, Any],
        cotangents: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """Return the gradients of the operands, by products that are calls of their own."""
        lhs, rhs, group_sizes = primals
        dout, shared = cotangents[0].astype(lhs.dtype), _shared(kwargs, grouped_matmul)
        dlhs = grouped_matmul(rhs, dout, group_sizes, transpose_rhs=True, **shared)
        return dlhs, grouped_matmul(lhs, dout, group_sizes, **shared), None

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


_USED = 0.8  # of the groups, where some are empty


def _apportioned(rows: int, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    ends = np.floor(np.cumsum(weights / weights.sum()) * rows + 0.5)
    ends[-1:] = rows
    return np.diff(ends, prepend=0)


def _said(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def _shared(options: dict[str, Any], operation: Operation[Any, Any, Any]) -> dict[str, Any]:
    """Return those options of a call that a call of its gradient has, too.

    Of the implementations that were asked for, it is asked for those that it has; if it has none, for none by name.
    """
    shared = {name: options[name] for name in ("precision", "implementation") if name in options}
    asked = shared.get("implementation")
    names = (asked,) if isinstance(asked, str) else asked or ()
    return shared | {"implementation": tuple(name for name in names if name in operation.implementations) or None}
